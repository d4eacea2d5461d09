"""Requests by their names, whichever router has served them: aborted, explained, their responses found."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

import orjson

from sglang_ext.router.api.validation import MAX_NAME_CHARACTERS
from sglang_ext.router.cluster.broadcast import (
    AbortAsked,
    Aborted,
    ExplainAsked,
    Explained,
    ResponseAsked,
    ResponseKept,
)
from sglang_ext.router.cluster.queries import Queries
from sglang_ext.router.dispatch.aborting import Aborting
from sglang_ext.router.dispatch.explain import Explainer
from sglang_ext.router.dispatch.flight import Homes, no_home
from sglang_ext.router.tenancy.tenants import Caller
from sglang_ext.signals import Signal


class SharedRequests:
    """Looks here first, then asks the other routers.

    Args:
        aborting, explainer, homes: requests and responses of this router.
    """

    def __init__(self, queries: Queries, aborting: Aborting, explainer: Explainer, homes: Homes) -> None:
        self._queries = queries
        self._aborting = aborting
        self._explainer = explainer
        self._homes = homes
        self.used: Signal[[str, str]] = Signal()
        """A client asks for a response, or sends something in a session: (its scope, the key of ``home``)."""
        queries.answer(AbortAsked, self._answer_abort)
        queries.answer(ExplainAsked, self._answer_explain)
        queries.answer(ResponseAsked, self._answer_response)

    async def abort(self, name: str | None, caller: Caller) -> int:
        """Abort the caller's requests of this name, or all of them; how many there were."""
        query = AbortAsked("", self._queries.new_id(), caller.scope, name)
        here, replies = await asyncio.gather(
            self._aborting.abort(name, caller.scope), self._queries.ask(query, every=True)
        )
        return here + sum(reply.requests for reply in replies if isinstance(reply, Aborted))

    async def explain(self, request_id: str, caller: Caller) -> dict[str, Any] | None:
        """The answer of ``GET /explain/{request_id}``; None where no router knows the request."""
        if len(request_id) > MAX_NAME_CHARACTERS:
            return None  # no request is called so
        tenant, admin = caller.tenant, caller.admin
        if (here := self._explainer.explain(request_id, tenant=tenant, admin=admin)) is not None:
            return here
        query = ExplainAsked("", self._queries.new_id(), request_id, tenant, admin)
        for reply in await self._queries.ask(query):
            if isinstance(reply, Explained) and reply.body is not None:
                there: dict[str, Any] = orjson.loads(zlib.decompress(reply.body))
                return there
        return None

    async def home(self, scope: str, key: str) -> str:
        """The instance that keeps a response, or a session.

        Args:
            key: the response's id, or a ``session_key``.

        Raises:
            RequestRefused: 404: no router knows it, or it is another tenant's.
        """
        if (found := await self.found(scope, key)) is None:
            raise no_home(key)
        self.used(scope, key)
        return found

    async def found(self, scope: str, key: str) -> str | None:
        """As ``home``; None where no router knows it."""
        if (here := self._homes.get(scope, key)) is not None:
            return here
        if len(key) > 2 * MAX_NAME_CHARACTERS:
            return None
        query = ResponseAsked("", self._queries.new_id(), scope, key)
        for reply in await self._queries.ask(query):
            if isinstance(reply, ResponseKept) and reply.instance is not None:
                self._homes.found(scope, key, reply.instance)
                return reply.instance
        return None

    # -- other routers ask ----------------------------------------------------------------------------

    async def _answer_abort(self, query: AbortAsked) -> Aborted:
        return Aborted("", query.id, await self._aborting.abort(query.name, query.scope))

    async def _answer_explain(self, query: ExplainAsked) -> Explained:
        found = self._explainer.explain(query.request_id, tenant=query.tenant, admin=query.admin)
        return Explained("", query.id, None if found is None else zlib.compress(orjson.dumps(found)))

    async def _answer_response(self, query: ResponseAsked) -> ResponseKept:
        return ResponseKept("", query.id, self._homes.get(query.scope, query.response_id))

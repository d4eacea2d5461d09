"""The endpoints of documents, under ``/v1/documents``."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_ext.clock import Clock
from sglang_ext.router.api.documents import check_document_size, take_document
from sglang_ext.router.api.validation import parse_json_object
from sglang_ext.router.cluster.queries import Queries
from sglang_ext.router.dispatch.choosing import no_worker
from sglang_ext.router.endpoints.advisory_api import check_size
from sglang_ext.router.endpoints.information import send_json
from sglang_ext.router.endpoints.routes import Route
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.hints.documents import Documents
from sglang_ext.router.http.types import Request, Responder
from sglang_ext.router.telemetry.record import Record
from sglang_ext.router.tenancy.admit import check_reserved, priority_of

PATH = "/v1/documents"


class DocumentsApi:
    """Answers requests under ``/v1/documents``. Each tenant sees its own documents only.

    Args:
        documents: keeps the documents.
        fleet: has the model, against which contents are checked.
        clock: seconds.
        ttl_s: how long a document lives unless its body sets a time.
    """

    def __init__(
        self, documents: Documents, fleet: Fleet, clock: Clock, ttl_s: float, queries: Queries
    ) -> None:
        self._documents = documents
        self._fleet = fleet
        self._clock = clock
        self._ttl_s = ttl_s
        self._queries = queries

    def routes(self) -> Iterator[Route]:
        """The endpoints."""
        yield Route(PATH, frozenset({"GET"}), self._all)
        yield Route(PATH + "/", frozenset({"GET", "PUT", "DELETE"}), self._one)

    async def _all(self, request: Request, responder: Responder, record: Record) -> None:
        found = [self._documents.as_json(entry) for entry in self._documents.of(record.caller)]
        record.status = 200
        await send_json(responder, 200, {"object": "list", "data": found})

    async def _one(self, request: Request, responder: Responder, record: Record) -> None:
        id = request.path.removeprefix(PATH + "/")
        if request.method == "PUT":
            await self._put(id, request, record)
        entry = await self._queries.found(lambda: self._documents.find(id, record.caller))
        answer = self._documents.as_json(entry)
        if request.method == "DELETE":
            self._documents.remove(entry)
            answer = {"id": id, "object": "document", "deleted": True}
        record.status = 200
        await send_json(responder, 200, answer)

    async def _put(self, id: str, request: Request, record: Record) -> None:
        """Take a document.

        Raises:
            RequestRefused: it has no form, is no prompt of the model, is too long, or is beyond a budget.
        """
        check_document_size(len(request.body))
        caller, payload = record.caller, parse_json_object(request.body)
        model = self._fleet.model
        if model is None:
            raise no_worker(self._fleet)
        check_reserved(payload, caller, None)
        priority = priority_of(payload, caller)
        now, wall = self._clock.monotonic(), self._clock.wall()
        document = take_document(payload, id, caller.scope, caller.salt, priority, now, wall, self._ttl_s)
        entry = await self._documents.encoded(document, record.budget)
        if entry.hint is not None:
            check_size(entry.hint, model.limits)
        self._documents.take(entry)

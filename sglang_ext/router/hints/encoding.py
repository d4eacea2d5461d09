"""From an advisory request to a hint: the tokens of its conversation, and the namespace of its KV."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.router.api.hints import Advisory
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.hints.hint import Hint
from sglang_ext.router.hints.session_memory import Known, SessionMemory
from sglang_ext.router.tenancy.budgets import Budget
from sglang_ext.router.tenancy.tenants import Caller
from sglang_ext.router.tokens.tokenizing import TokenizerService

OPEN_END = 4
"""Tokens at the end of an open text that its continuation may change."""


class HintEncoder:
    """Makes hints of advisory requests.

    Args:
        sessions: the last prompt of each session.
        ask: asks other routers for the last prompt of a session.
    """

    def __init__(
        self,
        fleet: Fleet,
        tokenizers: TokenizerService,
        sessions: SessionMemory,
        ask: Callable[[str], Awaitable[Known | None]],
    ) -> None:
        self._fleet = fleet
        self._tokenizers = tokenizers
        self._sessions = sessions
        self._ask = ask

    async def hint(
        self, advisory: Advisory, caller: Caller, priority: int, budget: Budget | None = None
    ) -> Hint | None:
        """The hint of an advisory request; None if it names only a session, and the session is unknown.

        Args:
            budget: pays for tokenizing it.

        Raises:
            RequestRefused: 400: the prompt is too long; 429: the budget is used up.
        """
        session = None if advisory.session is None else caller.scope + advisory.session
        known = None
        if advisory.job is not None:
            model = self._fleet.model
            template = model is not None and model.chat.completion_template is not None
            (encoded,) = await self._tokenizers.encode(
                advisory.job,
                completion_template=template,
                answer_follows=False,
                limits=None if model is None else model.limits,
                budget=budget,
            )
            encoded, key = encoded.known, encoded.known.key
            if advisory.job.prompts[0].text is not None:
                # The last tokens may merge with the text that follows.
                key = key[: -OPEN_END * TOKEN_BYTES]
            known = (encoded.namespace, key)
        elif session is not None:
            known = self._sessions.find(session)
            if known is None:
                known = await self._ask(session)
        if known is None:
            return None
        namespace, key = known
        return Hint(caller.scope, namespace, key, session, priority, advisory.earliest_s, advisory.ttl_s)

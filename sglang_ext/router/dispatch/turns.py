"""The turns of sessions: each is compared with the last one when its answer has ended, and remembered."""

from __future__ import annotations

import logging

from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.router.clients.divergence import Turn, find_divergence
from sglang_ext.router.clients.rules import Rule
from sglang_ext.router.dispatch.flight import Flight
from sglang_ext.router.hints.session_memory import SessionMemory
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.tokens.tokenizing import TokenizerService
from sglang_ext.router.tokens.tools import tool_names

logger = logging.getLogger("router.turns")


class Turns:
    """Learns prompts with their answers, and notes in records where turns left the last ones.

    Args:
        sessions: the last turns.
        rules: all of the table, those that are off included.
        tokenizers: decodes the words that differ.
        block_size: tokens of a block.
    """

    def __init__(
        self,
        sessions: SessionMemory,
        rules: tuple[Rule, ...],
        tokenizers: TokenizerService,
        metrics: RouterMetrics,
        block_size: int,
    ) -> None:
        self._sessions = sessions
        self._rules = rules
        self._tokenizers = tokenizers
        self._diverged = metrics.counter("diverged_tokens")
        self._block_size = block_size

    def learn(self, flight: Flight, namespace: tuple[str | None, ...], key: bytes) -> None:
        """A request of a session was answered.

        Args:
            key: its prompt, and its answer as far as that is known. It may be called again with more.
        """
        session = flight.admitted.session
        if session is None or len(flight.prompts) != 1 or namespace[0] != "tokens":
            return
        prompt_tokens = min(flight.prompts[0].known.units, len(key) // TOKEN_BYTES)
        turn = Turn(key, prompt_tokens, tool_names(flight.admitted.job.prompts[0].chat))
        last = self._sessions.last_turn(session, namespace, turn)
        if last is not None and flight.record.divergence is None:
            self._compare(flight, last, turn)
        self._sessions.learn(session, namespace, turn)

    def _compare(self, flight: Flight, last: Turn, turn: Turn) -> None:
        try:
            found = find_divergence(last, turn, self._rules, self._block_size, self._tokenizers.decode)
        except Exception:  # of the tokenizer
            logger.exception("cannot compare a turn with the last one of its session")
            return
        if found is not None:
            flight.record.divergence = found
            self._diverged.labels(found.cause.value).inc(found.lost)

    def __repr__(self) -> str:
        return f"Turns({self._sessions})"

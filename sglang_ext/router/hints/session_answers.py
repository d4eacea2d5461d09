"""The last answers of sessions, as the servers generated them, for the prompts of their next turns."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import msgspec

from sglang_ext.keys import TOKEN_BYTES, decode_tokens
from sglang_ext.router.api.job import PromptInput
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.usage import Usage
from sglang_ext.router.clients.answer_ids import IdsFilter, without_ids
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.telemetry.record import Record
from sglang_ext.router.tenancy.admit import put_in_front, splice
from sglang_ext.router.tenancy.admitted import Admitted
from sglang_ext.router.tenancy.bounded import Bounded, size_of
from sglang_ext.router.tenancy.budgets import Budget
from sglang_ext.router.tokens.answers import KeptAnswer, Outcome, Turn
from sglang_ext.router.tokens.encoded import Encoded

logger = logging.getLogger("router.session_answers")

MOST_ANSWERS = 3
"""Of a session: agents send small requests of another kind beside their own, and ask again."""
Namespace = tuple[str | None, ...]


class TurnTokenizer(Protocol):
    """Renders and tokenizes the prompts of turns: ``tokens.tokenizing.TokenizerService``."""

    @property
    def sends_ids(self) -> bool:
        """Whether conversations may go to servers as token ids."""

    async def turn(
        self,
        prompt: PromptInput,
        key: bytes,
        kept: Sequence[KeptAnswer],
        limits: Limits,
        budget: Budget | None,
    ) -> Turn | None:
        """A prompt, with the tokens of a kept answer where it repeats one; None where it is not rendered."""

    def kept_answer(self, turn: Turn, answer: bytes) -> KeptAnswer | None:
        """The answer to a turn, for the next ones; None if it is no text."""


class SessionAnswers:
    """Keeps the tokens of sessions' last answers, and puts them into the prompts of the next turns.

    Args:
        max_bytes: of all that is kept; the sessions not used for longest are forgotten. 0: it does nothing.
        tokenizers: renders prompts.
        metrics: counts turns by their outcome.
    """

    def __init__(self, max_bytes: int, tokenizers: TurnTokenizer, metrics: RouterMetrics) -> None:
        self.on = max_bytes > 0
        self._kept: Bounded[str, tuple[Namespace, tuple[KeptAnswer, ...]]] = Bounded(max_bytes, _size)
        self._tokenizers = tokenizers
        self._turns = metrics.counter("answer_splices")

    async def begin(
        self, admitted: Admitted, prompts: Sequence[Encoded], record: Record, limits: Limits
    ) -> SessionTurn | None:
        """A request is on its way; None for those that are sent as they are.

        Args:
            prompts: its prompts.
            record: the outcome is noted in it.
            limits: of the model.

        Raises:
            RequestRefused: 429: the client's budget is used up.
        """
        session = admitted.session
        if not self.on or session is None:
            return None
        why = _obstacle(admitted, prompts, self._tokenizers, limits)
        if why is not None:
            self._note(record, why)
            return None
        prompt = admitted.job.prompts[0]
        assert prompt.chat is not None
        namespace, kept = self._kept.use(session) or (prompts[0].namespace, ())
        turn = await self._tokenizers.turn(
            prompt, prompts[0].key, kept if namespace == prompts[0].namespace else (), limits, record.budget
        )
        if turn is None:
            self._note(record, Outcome.NOT_RENDERED)
            return None
        self._note(record, turn.outcome, turn.saved)
        asks = admitted.sent.dialect.asks_ids
        return SessionTurn(
            self, session, admitted, prompts[0], turn, asked=prompt.chat.payload.get(asks) is not None
        )

    def _note(self, record: Record, outcome: Outcome, saved: int = 0) -> None:
        record.splice, record.spliced_tokens = outcome.value, saved
        self._turns.labels(outcome.value).inc()

    def learn(self, session: str, namespace: Namespace, turn: Turn, usage: Usage) -> None:
        """A turn was answered. Answers without ids, and those to another prompt, are not kept."""
        answer = usage.output_keys.get(0)
        if answer is None or usage.prompt_tokens not in (None, len(turn.key) // TOKEN_BYTES):
            return
        try:
            kept = self._tokenizers.kept_answer(turn, answer)
        except Exception:  # of the tokenizer
            logger.exception("cannot keep an answer")
            return
        if kept is None:
            return
        last, others = self._kept.get(session) or (namespace, ())
        if last != namespace:
            others = ()
        others = tuple(each for each in others if each.whole != kept.whole)
        self._kept.put(session, (namespace, (*others, kept)[-MOST_ANSWERS:]))

    @property
    def size_bytes(self) -> int:
        """Memory of all answers."""
        return self._kept.size_bytes

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        return f"SessionAnswers({self._kept})"


class SessionTurn:
    """One request of a session on its way.

    Args:
        turn: its prompt, with the tokens of the last answer where these are known.
        asked: the client itself has said whether it wants the ids.
    """

    __slots__ = ("_answers", "_filter", "_hides", "_namespace", "_session", "_turn", "admitted", "prompts")

    def __init__(
        self,
        answers: SessionAnswers,
        session: str,
        admitted: Admitted,
        prompt: Encoded,
        turn: Turn,
        *,
        asked: bool,
    ) -> None:
        self._answers, self._session, self._turn = answers, session, turn
        self._namespace = prompt.namespace
        self._hides = not asked
        self._filter = IdsFilter()
        sent = admitted.sent
        body = sent.body if asked else put_in_front(sent.body, {sent.dialect.asks_ids: True})
        self.prompts: list[Encoded] = [prompt]
        if turn.outcome is Outcome.SPLICED:
            tokens = len(turn.key) // TOKEN_BYTES
            self.prompts = [msgspec.structs.replace(prompt, key=turn.key, tokens=tokens)]
            body = splice(body, {sent.dialect.takes_ids: decode_tokens(turn.key).tolist()})
        self.admitted: Admitted = msgspec.structs.replace(
            admitted, sent=msgspec.structs.replace(sent, body=body)
        )
        """The request as it is sent."""

    def whole(self, body: bytes) -> bytes:
        """An answer in one piece, as the server gives it to clients that did not ask for ids."""
        return without_ids(body) if self._hides else body

    def feed(self, chunk: bytes) -> bytes:
        """The next piece of a stream, likewise."""
        return self._filter.feed(chunk) if self._hides else chunk

    def end(self) -> bytes:
        """The bytes of a stream that are held back, after its last piece."""
        return self._filter.end()

    def answered(self, usage: Usage) -> None:
        """The whole answer has come."""
        self._answers.learn(self._session, self._namespace, self._turn, usage)


def _obstacle(
    admitted: Admitted, prompts: Sequence[Encoded], tokenizers: TurnTokenizer, limits: Limits
) -> Outcome | None:
    """Why a request is sent as it is."""
    job = admitted.job
    if not admitted.sent.dialect.asks_ids:
        return Outcome.OTHER_API
    if len(job.prompts) != 1 or job.choices != 1 or job.pinned_to is not None:
        return Outcome.NOT_RENDERED
    chat = job.prompts[0].chat
    if chat is None or chat.payload.get("session_params") is not None or prompts[0].tokens is None:
        return Outcome.NOT_RENDERED
    # A server that cuts prompts off cuts a text and ids in places of their own.
    return Outcome.NOT_RENDERED if limits.truncates or not tokenizers.sends_ids else None


def _size(session: str, known: tuple[Namespace, tuple[KeptAnswer, ...]]) -> int:
    namespace, kept = known
    digests = sum(size_of(each.key, each.prompt.digest, each.whole.digest) for each in kept)
    return size_of(session, *namespace) + digests

"""Token counts of answers, read from a copy of the passing bytes without delaying them.

Everything here is best effort: an answer that cannot be read is passed on all the same, and counted as one
without token counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import msgspec

from sglang_ext.router.api.sse import DONE, EventSplitter, parsed
from sglang_ext.router.api.tool_calls import tools_called, tools_called_in
from sglang_ext.stages import StageTimes
from sglang_ext.tiers import Tier, tiers_below

MAX_TEXT_BYTES = 1 << 20
"""Most events of a stream that are kept for their generated text."""
DURABILITY = "durability_end"
"""In ``cached_tokens_details``: see `engine/tiers/acked_answers.py`."""
_ID = re.compile(rb'"id"\s*:\s*"([\x21\x23-\x5b\x5d-\x7e]{1,200})"')
_MEMORY = {"device": Tier.HBM, "host": Tier.DRAM}
"""SGLang's names of tiers in ``cached_tokens_details``; all below are its ``storage``."""


class Usage(msgspec.Struct):
    """Tokens of one request; for a batch, of all its prompts."""

    prompt_tokens: int | None = None
    partial: bool = False
    """``prompt_tokens`` may be of some of the prompts only."""
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    tiers: dict[str, int] = {}
    """Name of a tier -> cached tokens that were found there, where the worker tells."""
    stages: StageTimes | None = None
    """How long it spent in each stage at its instances, where they tell; of a batch, the longest."""
    durability: str | None = None
    """The reported durability, if its end waits for the disk; of a batch, the first that is not durable."""
    response_id: str | None = None
    """The name under which the worker keeps the answer, where it does."""
    output_keys: dict[int, bytes] = {}
    """Index of the prompt -> its generated tokens, encoded; where there is one choice per prompt."""
    output_texts: Mapping[int, str] = {}
    """Index of the prompt -> generated text, if the answer has no ids."""
    tools: tuple[str, ...] = ()
    """Names of the tools that the answer calls."""

    def add_tiers(self, details: Any) -> None:
        """Take in SGLang's ``cached_tokens_details``."""
        if not isinstance(details, dict):
            return
        stages = StageTimes.of_details(details)
        if stages is not None and (self.stages is None or stages.total > self.stages.total):
            self.stages = stages
        end = details.get(DURABILITY)
        if isinstance(end, str) and self.durability in (None, "durable"):
            self.durability = end[:20]
        found = {tier: count(details.get(theirs)) or 0 for theirs, tier in _MEMORY.items()}
        left = count(details.get("storage")) or 0
        nearest, *others = tiers_below(Tier.DRAM)
        for tier in others:
            found[tier] = min(left, count(details.get(tier.usage_key)) or 0)
            left -= found[tier]
        found[nearest] = left
        for tier, tokens in sorted(found.items()):
            if tokens:
                self.tiers[tier.name] = self.tiers.get(tier.name, 0) + tokens


def count(value: Any) -> int | None:
    """A number of tokens; None for other JSON."""
    return value if type(value) is int and value >= 0 else None


def answer_id(data: bytes) -> str | None:
    """The first ``id`` in an answer, or in the beginning of a stream: that of the answer itself, which in all
    dialects stands before those of its parts. In a text, the quotes would be escaped."""
    found = _ID.search(data)
    return None if found is None else found[1].decode("ascii")


class ReadsAnswers(Protocol):
    """The part of a `Dialect` that reads its answers."""

    whole_events: ClassVar[bool]
    says_usage: ClassVar[re.Pattern[bytes]]

    def read(self, usage: Usage, answer: Any, choices: int) -> None: ...

    def texts(self, answers: Sequence[Any]) -> Mapping[int, str]: ...

    def streamed_texts(self, events: Sequence[bytes]) -> Mapping[int, str]: ...


def read_answer(body: bytes, dialect: ReadsAnswers, choices: int) -> Usage:
    """The usage that a complete JSON answer states.

    Args:
        choices: answers per prompt (``n``); a batch lists all choices of a prompt one after another.
    """
    usage = Usage()
    answer = parsed(body)
    dialect.read(usage, answer, choices)
    usage.tools = tools_called(answer)
    if choices == 1:
        usage.output_texts = dialect.texts([answer])
    return usage


class StreamReader:
    """Reads the usage of a stream from its pieces. Only events that matter are parsed.

    Args:
        dialect: of the stream.
        choices: answers per prompt.
    """

    def __init__(self, dialect: ReadsAnswers, choices: int) -> None:
        self.dialect = dialect
        self._whole_events = dialect.whole_events
        self._says_usage = dialect.says_usage
        self._choices = choices
        self.last = b""
        """The last event, where each has the whole answer so far."""
        self.seen = 0
        """How many such events there were."""
        self._splitter = EventSplitter()
        self._events: list[bytes] = []
        self._size = 0
        self.usage = Usage()
        self.done = False
        """The stream announced its end; a connection that closes before that was broken off."""

    @property
    def kept_bytes(self) -> int:
        """Bytes that ``output_texts`` has to parse."""
        return self._size

    @property
    def events(self) -> list[bytes]:
        """All events so far, unless each has the whole answer; not of answers that are ``too_long``."""
        return self._events

    @property
    def too_long(self) -> bool:
        """Whether events were left out."""
        return self._size > MAX_TEXT_BYTES

    @property
    def in_event(self) -> bool:
        """Whether the stream stands in the middle of an event."""
        return self._splitter.in_event

    def feed(self, chunk: bytes) -> None:
        """Take the next piece."""
        for data in self._splitter.feed(chunk):
            if data == DONE:
                self.done = True
                continue
            if self._whole_events:
                self.last = data
                self.seen += 1
            elif self._size <= MAX_TEXT_BYTES:
                self._events.append(data)
                self._size += len(data)
            if self._says_usage.search(data):
                self.dialect.read(self.usage, parsed(data), self._choices)

    def first(self, chunk: bytes) -> Usage:
        """The usage in the first piece, for the headers of the answer. ``feed`` must still be called with the
        piece."""
        usage = Usage()
        for data in EventSplitter().feed(chunk)[:1]:
            if self._whole_events or self._says_usage.search(data):
                self.dialect.read(usage, parsed(data), self._choices)
        return usage

    def tools_called(self) -> tuple[str, ...]:
        """Names of the tools that the stream calls, when it has ended."""
        return tools_called_in(self._events)

    def output_texts(self) -> Mapping[int, str]:
        """The generated text by choice, if the answer has no ids; empty for very long answers.

        Parses every event, so it is called off the event loop, when the stream has ended.
        """
        if self._choices != 1 or self.too_long or self._whole_events:
            return {}
        return self.dialect.streamed_texts(self._events)

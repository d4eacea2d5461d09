"""Requests of a log as arrivals of blocks: bodies, Mooncake's traces, or a recording of a router."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Final

import msgspec
import orjson

from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.protocol.recording import (
    Head,
    Member,
    Namer,
    Request,
    is_recording,
    names_of,
    read_recording,
)
from sglang_ext.router.api.dialect import DIALECTS
from sglang_ext.router.api.job import PromptInput
from sglang_ext.router.clients.request_logs import LogError, LoggedBody, read_requests
from sglang_ext.router.estimate.prompts import LIMITS, Reader
from sglang_ext.router.http.types import RequestRefused
from sglang_ext.router.tokens.chat_template import CannotRender

BLOCK_TOKENS: Final = 16
MOONCAKE_TOKENS: Final = 512
"""Tokens of a block in Mooncake's traces."""


class Arrival(msgspec.Struct, frozen=True):
    """One prompt of a log.

    at: seconds, or None where the log has no times. names: of its whole blocks, each a prefix. tokens: its
    length. answer_tokens: the answer's. answer: names of the blocks that it completes, where they are known.
    cached: tokens that its server reported as cached. first_byte_s: as its router measured it.
    """

    at: float | None
    names: Sequence[Hashable]
    tokens: int
    answer_tokens: int = 0
    answer: Sequence[Hashable] = ()
    cached: int | None = None
    first_byte_s: float | None = None


class Log:
    """Reads a log; its facts are complete once all arrivals were read.

    Args:
        lines: of the file.
        reader: from prompts to keys; for logs of bodies.
    """

    def __init__(self, lines: Iterable[bytes], reader: Reader) -> None:
        iterator = iter(lines)
        first = list(islice((line for line in iterator if line.strip()), 1))
        self._lines = chain(first, iterator)
        self._reader = reader
        self._namer = Namer(secrets.token_bytes(32), BLOCK_TOKENS)
        self.block_tokens = BLOCK_TOKENS
        self.skipped: Counter[str] = Counter()
        """Why requests were passed over."""
        self.members: dict[str, Member] = {}
        """The instances of a recording, by name."""
        self.kind = "bodies"
        self._recorded: list[Arrival] = []
        if first and is_recording(first[0]):
            self.kind = "recording"
            # A line is written when its request has ended.
            self._recorded = sorted(self._recording(), key=lambda each: each.at or 0.0)
        elif first and _is_mooncake(first[0]):
            self.kind, self.block_tokens = "mooncake", MOONCAKE_TOKENS

    def arrivals(self) -> Iterator[Arrival]:
        """The prompts, in the order of their arrival.

        Raises:
            LogError, RecordingError: a line cannot be used.
        """
        if self.kind == "recording":
            yield from self._recorded
        elif self.kind == "mooncake":
            yield from self._mooncake()
        else:
            for logged in read_requests(self._lines):
                if (found := self._of_body(logged)) is not None:
                    yield found

    def _recording(self) -> Iterator[Arrival]:
        for line in read_recording(self._lines):
            if isinstance(line, Head):
                self.block_tokens = line.block_size
            elif isinstance(line, Member):
                self.members[line.instance] = line
            elif isinstance(line, Request):
                if line.status != 200:
                    self.skipped[f"status {line.status}"] += 1
                    continue
                for blocks in line.prompts:
                    alone = len(line.prompts) == 1
                    yield Arrival(
                        line.at,
                        names_of(blocks.names),
                        blocks.tokens,
                        line.completion_tokens or 0 if alone else 0,
                        names_of(blocks.answer),
                        line.cached if alone else None,
                        line.first_byte_s if line.stream else None,
                    )

    def _mooncake(self) -> Iterator[Arrival]:
        for number, line in enumerate(self._lines, 1):
            if not line.strip():
                continue
            try:
                row = orjson.loads(line)
                length, ids = int(row["input_length"]), row["hash_ids"]
                at, answer = float(row["timestamp"]) / 1000, int(row["output_length"])
            except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
                raise LogError(number, f"is no row of a Mooncake trace: {error!r}") from None
            yield Arrival(at, tuple(ids[: length // MOONCAKE_TOKENS]), length, answer)

    def _of_body(self, logged: LoggedBody) -> Arrival | None:
        dialect = DIALECTS.get(logged.path)
        if dialect is None:
            self.skipped[f"no API here has the path {logged.path[:80]}"] += 1
            return None
        try:
            prompts = dialect.parse(orjson.loads(orjson.dumps(logged.body)), LIMITS).prompts
            if len(prompts) != 1 or prompts[0].media:
                self.skipped["several prompts in one request, or pictures"] += 1
                return None
            key = self._reader.encode(prompts[0])
        except RequestRefused as refused:
            self.skipped[refused.message[:120]] += 1
            return None
        except CannotRender as error:
            self.skipped[str(error)[:120]] += 1
            return None
        answer = logged.answer_tokens
        if answer is None and logged.answer:
            answer = len(self._reader.encode(PromptInput(text=logged.answer))) // TOKEN_BYTES
        space = self._namer.word(repr(prompts[0].namespace))
        names = self._namer.names(space, key)
        return Arrival(logged.at, names, len(key) // TOKEN_BYTES, answer or 0)


def _is_mooncake(line: bytes) -> bool:
    try:
        row: Any = orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return isinstance(row, dict) and row.keys() >= {"hash_ids", "input_length", "output_length"}

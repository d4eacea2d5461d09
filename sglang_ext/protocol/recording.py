"""The recording of a router: requests, decisions, and the moments at which reports were applied.

A file has one JSON object in each line, tagged by ``type``:

    head      first in each file: block size, policy, costs, start; again when the costs have changed
    member    an instance, when it is first seen or has changed
    gone      an instance has left
    load      a load report was applied
    applied   placement events were applied
    hint      a hint was offered
    request   a request has ended

``router --record`` writes it, ``simulate --trace`` and ``estimate`` read it. It has no text: a block of
tokens is its *name*, a hash chained over all blocks before it, keyed with a secret of the fleet that is never
in the file (`Namer`). Equal names are equal prefixes in one namespace; without the key, a name cannot be
compared with the hash of a guessed prompt. Sessions, tenants and namespaces are hashed alike.

A prompt repeats the prompts before it, so a line has only the names that the file does not have yet
(`Blocks`); `Writer` leaves the others out, and `read_recording` puts them back.

Times are seconds since the epoch by a clock that does not jump while the router runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import msgspec

from sglang_ext.errors import ConfigError
from sglang_ext.keys import TOKEN_BYTES

VERSION: Final = 1
NAME_BYTES: Final = 8
PAUSE_BLOCKS: Final = 128
KNOWN_NAMES: Final = 1 << 18
"""Names that a writer remembers to have written. Beyond, it forgets them all, and writes some again."""


class RecordingError(ConfigError):
    """A line of a recording cannot be read; names the line."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(f"line {line} {why}", field="FILE")


class Line(msgspec.Struct, frozen=True, tag_field="type", omit_defaults=True):
    """Base of all lines. at: when it happened, seconds since the epoch."""

    at: float


class Limits(msgspec.Struct, frozen=True, omit_defaults=True):
    """The limits of a tenant, by the fields of a key file; 0: none. Of several keys, the sums and the highest
    priority."""

    priority: int = 0
    requests_per_second: float = 0.0
    burst: int = 0
    concurrent: int = 0
    tokens_per_minute: int = 0


class Head(Line, frozen=True, tag="head"):
    """The first line of a file, and another beginning in it: lines after it refer to no names before it.

    router: its name. key_id: the same in all files whose names can be compared. block_size: tokens of a
    block. settings: of the router that a replay needs, by flag. costs: that the router expects of its
    instances before it corrects them, as the JSON of a cost profile; empty for the defaults, and in files of
    earlier versions. limits: of tenants that have any, by their hashed names.
    """

    version: int
    router: str
    key_id: str
    block_size: int
    policy: str
    settings: Mapping[str, str | float] = {}
    costs: Mapping[str, Any] = {}
    limits: Mapping[str, Limits] = {}


class Fill(msgspec.Struct, frozen=True, omit_defaults=True):
    """Blocks that a tier holds, and that it can hold."""

    used: int
    size: int


class Member(Line, frozen=True, tag="member"):
    """An instance. role: ``colocated``, ``prefill`` or ``decode``. tiers: by name, where it reports them. kv:
    equal for instances that can fetch KV from each other, empty where it can from none. chunk: tokens of a
    prompt that it computes in one pass; 0 for all."""

    instance: str
    role: str
    tiers: Mapping[str, Fill] = {}
    kv: str = ""
    chunk: int = 0


class Gone(Line, frozen=True, tag="gone"):
    """An instance has left, or has restarted with nothing cached."""

    instance: str


class Loaded(Line, frozen=True, tag="load"):
    """A load report was applied. See ``protocol.agent.Load``."""

    instance: str
    running: int
    queued: int
    queued_tokens: int


class Applied(Line, frozen=True, tag="applied"):
    """Placement events were applied. first: the number of the first. snapshot: they are a snapshot's, whole.
    age_s: of the oldest when its instance sent them."""

    instance: str
    events: int
    first: int = 0
    snapshot: bool = False
    age_s: float = 0.0


class Blocks(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt as names of blocks.

    space: its namespace, hashed. tokens: its length. exact: the length is of tokens, not of units of 4 bytes
    of text. known: leading blocks that earlier lines of the file have; ``last`` is the name of the last of
    them. names: of the whole blocks after that, in hexadecimal digits one behind the other. answer: of whole
    blocks that the answer completed; empty where its tokens are not known.
    """

    space: str
    tokens: int
    names: str = ""
    answer: str = ""
    known: int = 0
    last: str = ""
    exact: bool = True


class HintLine(Line, frozen=True, tag="hint"):
    """A hint was offered. lead_s: from the hint to the earliest arrival that it names. ttl_s: how long after
    that. verdict: the router's answer. instance: where it was sent."""

    tenant: str
    session: str
    prompt: Blocks
    lead_s: float = 0.0
    ttl_s: float | None = None
    verdict: str = ""
    instance: str = ""


class Choice(msgspec.Struct, frozen=True, omit_defaults=True):
    """One decision for a request; a retry makes another.

    matched: tokens that ``instance`` had by the index. holders: tokens that each instance had. fetched:
    tokens that were to be read from each source. expected_s: time to first token.
    """

    instance: str
    reason: str
    matched: int = 0
    decode: str = ""
    holders: Mapping[str, int] = {}
    fetched: Mapping[str, int] = {}
    expected_s: float | None = None


class Request(Line, frozen=True, tag="request"):
    """A request, written when it has ended. ``at`` is its arrival.

    id, tenant, session: hashed; empty for none. decided_s, sent_s, first_byte_s, ended_s: from the arrival;
    the first two, to the choice of the last attempt's instance, and to the sending there. routed_s: the
    router's own stages until it sent the request on. cached: tokens that the instance reports as cached;
    tiers: by tier. stages: seconds by stage, the router's first. fetch_s: for which KV was read from other
    instances; negative where it did not come within so many.
    """

    id: str
    path: str
    status: int
    prompts: tuple[Blocks, ...]
    tenant: str = ""
    session: str = ""
    priority: int = 0
    stream: bool = False
    max_new_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    choices: tuple[Choice, ...] = ()
    instance: str = ""
    prefill_instance: str = ""
    cached: int | None = None
    tiers: Mapping[str, int] = {}
    queued_s: float = 0.0
    routed_s: float = 0.0
    decided_s: float | None = None
    sent_s: float | None = None
    first_byte_s: float | None = None
    ended_s: float = 0.0
    stages: Mapping[str, float] = {}
    fetch_s: float | None = None


AnyLine: TypeAlias = Head | Member | Gone | Loaded | Applied | HintLine | Request
_DECODER: Final = msgspec.json.Decoder(AnyLine)
_ENCODER: Final = msgspec.json.Encoder()


class Namer:
    """Names blocks, and hashes words.

    Args:
        key: the secret of the fleet, 16 to 64 bytes.
        block_tokens: tokens of a block.
        pause: called between `PAUSE_BLOCKS` blocks, to let other threads run.
    """

    def __init__(self, key: bytes, block_tokens: int, pause: Callable[[], None] = lambda: None) -> None:
        self._key = key
        self._pause = pause
        self._size = block_tokens * TOKEN_BYTES
        self.block_size = block_tokens

    @property
    def key_id(self) -> str:
        """By which files of one key are recognized."""
        return self.word("key")

    def word(self, text: str) -> str:
        """A session's, tenant's or namespace's hash; empty for none."""
        if not text:
            return ""
        return self._hash(text, b"word").hexdigest()

    def names(self, space: str, key: bytes) -> list[str]:
        """The names of the whole blocks of an encoded prompt.

        Args:
            space: ``word`` of its namespace.
            key: encoded as by ``keys.encode_tokens``.
        """
        size = self._size
        found: list[str] = []
        chain = self._hash(space, b"block")
        view = memoryview(key)
        for start in range(0, len(key) - size + 1, size):
            if len(found) % PAUSE_BLOCKS == PAUSE_BLOCKS - 1:
                self._pause()
            chain.update(view[start : start + size])
            found.append(chain.hexdigest())
        return found

    def _hash(self, text: str, purpose: bytes) -> hashlib.blake2b:
        return hashlib.blake2b(text.encode(), digest_size=NAME_BYTES, key=self._key, person=purpose)


class Writer:
    """Makes the lines of one file. A new file begins with a new ``Writer``: each can be read alone."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def blocks(
        self, space: str, tokens: int, names: list[str], answer: int = 0, *, exact: bool = True
    ) -> Blocks:
        """A prompt, with the names that the file has left out.

        Args:
            names: of prompt and answer.
            answer: how many of them, at the end, are the answer's.
        """
        if len(self._known) + len(names) > KNOWN_NAMES:
            self._known.clear()
        prompt = len(names) - answer
        low, high = 0, prompt  # a name is known only with all before it
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if names[middle - 1] in self._known else (low, middle - 1)
        self._known.update(names[low:])
        return Blocks(
            space, tokens, "".join(names[low:prompt]), "".join(names[prompt:]),
            low, names[low - 1] if low else "", exact,
        )  # fmt: skip

    @staticmethod
    def line(line: AnyLine) -> bytes:
        """A line with its end."""
        return _ENCODER.encode(line) + b"\n"


class _Names:
    """Names of a file with their parents, to put back those that a line leaves out."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}

    def whole(self, blocks: Blocks, number: int) -> Blocks:
        """The same with all its names."""
        before: list[str] = []
        name = blocks.last
        while name:
            before.append(name)
            if name not in self._parents or len(before) > blocks.known:
                raise RecordingError(number, f"refers to a block {name} that no line before it has")
            name = self._parents[name]
        if len(before) != blocks.known:
            raise RecordingError(number, f"refers to {blocks.known} blocks of which {len(before)} are there")
        parent = blocks.last
        for name in names_of(blocks.names + blocks.answer):
            self._parents[name] = parent
            parent = name
        if not blocks.known:
            return blocks
        names = "".join(reversed(before)) + blocks.names
        return msgspec.structs.replace(blocks, names=names, known=0, last="")


def names_of(joined: str) -> list[str]:
    """The names in ``Blocks.names`` and ``Blocks.answer``."""
    size = 2 * NAME_BYTES
    return [joined[at : at + size] for at in range(0, len(joined), size)]


def read_recording(lines: Iterable[bytes]) -> Iterator[AnyLine]:
    """The lines of one file, in its order, each prompt with all its names.

    A last line without an end is passed over: its router ended while it wrote.

    Raises:
        RecordingError: a line is none of a recording, or the file does not begin with its head.
    """
    known, first = _Names(), True
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = _DECODER.decode(line)
        except msgspec.MsgspecError as error:
            if not line.endswith(b"\n"):
                return
            raise RecordingError(number, f"is none of a recording: {error}") from None
        if first and not isinstance(found, Head):
            raise RecordingError(number, "is not the head of a recording")
        if isinstance(found, Head) and found.version != VERSION:
            raise RecordingError(number, f"is of version {found.version}; this reads version {VERSION}")
        first = False
        if isinstance(found, Head):
            known = _Names()  # files can be put one behind the other
        elif isinstance(found, Request):
            prompts = tuple(known.whole(each, number) for each in found.prompts)
            found = msgspec.structs.replace(found, prompts=prompts)
        elif isinstance(found, HintLine):
            found = msgspec.structs.replace(found, prompt=known.whole(found.prompt, number))
        yield found


def is_recording(line: bytes) -> bool:
    """Whether a file with this first line is a recording."""
    try:
        return isinstance(_DECODER.decode(line), Head)
    except msgspec.MsgspecError:
        return False

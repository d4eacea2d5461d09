"""Messages between prefill and decode servers about requests, and how the servers find each other.

Bootstrap: each rank of a prefill server sends `Register` to its server's bootstrap port, again and again; a
decode rank sends `Lookup` there and receives all ranks. Hand-over: a decode rank sends `Join` to every rank
of the prefill server and is answered by `Ready` once the request is computed, or refused; then `Done`, or
`Abort`. Where KV is pushed, it sends `Meet` to every rank and, once it has pages, `Push`, which is answered
by `Ready`. When a request has ended, decode may send `Return` (PD-Caching-3). The bytes travel by `disagg`.
See `sglang_ext.wire` for the rules of messages.
"""

from __future__ import annotations

import enum
from typing import Annotated, Final, TypeAlias

import msgspec

from sglang_ext.disagg import messages as transfers
from sglang_ext.disagg.messages import Offer, Refused, Session
from sglang_ext.disagg.transfer.control import Messages
from sglang_ext.engine.pd.prompt_logprobs import PromptLogprobs
from sglang_ext.protocol.agent import ToAgent
from sglang_ext.stages import NO_STAGES, StageTimes
from sglang_ext.wire import Blob, Codec, Epoch, Message, Name

PROTOCOL: Final = 13

MAX_NUMBER: Final = (1 << 63) - 1
MAX_POOLS: Final = 16
"""From which one hand-over moves blocks."""
RETURN_SECONDS: Final = 10.0
"""For a small return to be answered; `moving_seconds` adds the time for the bytes of a large one."""

Number = Annotated[int, msgspec.Meta(ge=1, le=MAX_NUMBER)]
"""Of a hand-over: SGLang's bootstrap_room."""
Rank = Annotated[int, msgspec.Meta(ge=0, lt=4096)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Weights = Annotated[str, msgspec.Meta(max_length=128)]
"""Digest of the whole model's weights (``model_identity.model_digest``); empty while they are being changed,
and then like no others, itself included."""


Settings = Annotated[dict[Name, Name], msgspec.Meta(max_length=1024)]


class RankInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank of a prefill server. endpoint: where it is asked. mode, layout: how KV travels. settings: of
    the model, as `model_settings.model_settings` names them. components: of a model with windows or states,
    how the blocks of each pool lie, by its name. replica: its number among those of its server."""

    instance: Name
    epoch: Epoch
    rank: Rank
    ranks: Ranks
    page_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    metadata_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
    endpoint: Name
    mode: Name = "pull"
    layout: Name = "blocks"
    settings: Settings = msgspec.field(default_factory=dict)
    components: Settings = msgspec.field(default_factory=dict)
    protocol: int = PROTOCOL
    replica: Rank = 0


class Register(Message, frozen=True, tag="register"):
    """A prefill rank lives. Answered by Ok."""

    who: RankInfo


class Lookup(Message, frozen=True, tag="lookup"):
    """Requests the ranks of a replica. Answered by Topology, or refused while one is missing."""

    replica: Rank = 0


class Topology(Message, frozen=True, tag="topology"):
    """All ranks of a replica of the prefill server, in rank order, of one epoch."""

    ranks: Annotated[tuple[RankInfo, ...], msgspec.Meta(max_length=4096)]


class Join(Message, frozen=True, tag="join"):
    """A decode rank takes part in a hand-over. Answered by Ready when prefill is done; that may take long.

    reader: epoch of its endpoint, which is connected already. session: of that connection; the rank's part
    ends with it, and a session that is over is refused as `session`. ranks: how many decode ranks take part.
    reads: whether it needs bytes of this prefill rank. weights: with which decode will go on.
    """

    handover: Number
    reader: Epoch
    session: Session
    rank: Rank
    ranks: Ranks
    reads: bool
    weights: Weights


class Ready(Message, frozen=True, tag="ready"):
    """The request is computed. offers: pages of the whole prompt, leased, and after these the blocks of other
    pools, of each pool in one offer; none for a rank that reads nothing here.

    metadata: SGLang's metadata row (first token, log probabilities, counts), buffer after buffer. stages: how
    long the request took up to here. logprobs: of the prompt, where the request asks for them.
    """

    offers: Annotated[tuple[Offer, ...], msgspec.Meta(max_length=MAX_POOLS)]
    metadata: Blob
    stages: StageTimes = NO_STAGES
    logprobs: PromptLogprobs | None = None


class Meet(Message, frozen=True, tag="meet"):
    """A decode rank takes part in a hand-over, and will name pages to be filled (push). Answered by Ok.

    So the death of this decode rank ends the request, however long decode has no room for it. reader,
    session, ranks, weights: as in `Join`.
    """

    handover: Number
    reader: Epoch
    session: Session
    ranks: Ranks
    weights: Weights


class Push(Message, frozen=True, tag="push"):
    """A decode rank has set pages aside and wants them filled, after `Meet`. Answered by Ready when this
    prefill rank's part of them is.

    control: of decode's endpoint. pages: for the prompt after `skip` pages, which decode has; none where
    other prefill ranks fill them. pool: of decode, in which they are.
    """

    handover: Number
    reader: Epoch
    control: Name
    pages: Blob
    skip: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    pool: Name = "hbm"


class Done(Message, frozen=True, tag="done"):
    """A decode rank needs nothing more of a hand-over; its lease, if it has one, ends. Answered by Ok."""

    handover: Number
    reader: Epoch


class Abort(Message, frozen=True, tag="abort"):
    """The request is over on decode. Answered by Ok.

    rejoins: the request goes on, and the reader takes part again by another connection: only its present part
    is over.
    """

    handover: Number
    reader: Epoch
    reason: Name
    rejoins: bool = False


class Return(Message, frozen=True, tag="return"):
    """A request has ended on decode: one rank's part of its KV, for prefill to insert. Sent to prefill's
    first rank; answered by Returned, once all parts have come.

    name: of the return, alike on all decode ranks. rank, ranks: of decode. offers: pages of the whole blocks
    of `tokens`, leased to each prefill rank, in rank order; none where there was no budget for it. control:
    address of the decode rank's endpoint. weights: by which all of it was computed. extra_key, cache_salt:
    the tenant of the prompt.
    """

    name: Name
    rank: Rank
    ranks: Ranks
    offers: Annotated[tuple[Offer, ...], msgspec.Meta(max_length=4096)]
    control: Name
    tokens: Blob
    weights: Weights
    extra_key: Name | None = None
    cache_salt: Name | None = None


class TakeBack(Message, frozen=True, tag="take_back"):
    """Prefill's first rank to all of its ranks, in one pass of their schedulers: the offers of decode's
    ranks, in rank order.
    """

    parts: Annotated[tuple[Return, ...], msgspec.Meta(min_length=1, max_length=4096)]


class ReturnEnd(enum.StrEnum):
    """The outcome of a return, or why there was none."""

    RETURNED = "returned"
    """Prefill has it, in HBM."""
    DRAM = "dram"
    """Prefill has it, in DRAM."""
    SHORT = "short"
    """Less than one whole block."""
    KNOWN = "known"
    """Prefill has all of it."""
    BUDGET = "budget"
    """Other returns hold a quarter of the tier, on decode or on prefill."""
    MEMORY = "memory"
    """No room at prefill, in DRAM either."""
    WEIGHTS = "weights"
    """Prefill has other weights."""
    BUSY = "busy"
    """Too many commands wait at prefill's ranks."""
    UNREAD = "unread"
    """A rank of prefill could not read its part."""
    PREFILL_GONE = "prefill_gone"
    FAILED = "failed"


class Returned(Message, frozen=True, tag="returned"):
    """tokens: how many prefill has by it that it had not. skipped: why none; None when it read them."""

    tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
    skipped: ReturnEnd | None = None


class Ok(Message, frozen=True, tag="ok"):
    """Confirms a message that needs no other answer."""


Ask = Register | Lookup | Join | Meet | Push | Done | Abort | Return
Answer = Ok | Topology | Ready | Returned | Refused


class _AnyRank(msgspec.Struct, frozen=True):
    protocol: int


class _AnyTopology(msgspec.Struct, frozen=True, tag_field="t", tag="topology"):
    """The part of a topology that every release has."""

    ranks: tuple[_AnyRank, ...]


_ANY_TOPOLOGY: Final = msgspec.msgpack.Decoder(_AnyTopology)


def other_protocol(protocol: int) -> str:
    """The error text for a prefill server of another protocol."""
    return f"protocol {protocol} there, {PROTOCOL} here; run one release"


def _other_release(data: bytes) -> str:
    try:
        spoken = {rank.protocol for rank in _ANY_TOPOLOGY.decode(data).ranks} - {PROTOCOL}
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError):
        return ""
    return other_protocol(max(spoken)) if spoken else ""


MESSAGES: Final = Messages(Codec(transfers.Request | Ask), Codec(transfers.Reply | Answer), _other_release)
"""Messages that a rank answers: of transfers and of hand-overs, on one connection."""

RankCommand: TypeAlias = ToAgent | TakeBack
"""A command to the schedulers of all ranks: a router's, or one of prefill's first rank."""

RANK_COMMANDS: Codec[RankCommand] = Codec(RankCommand)


def alike(one: Weights, other: Weights) -> bool:
    """Whether KV of these weights may stand for KV of those."""
    return one == other != ""

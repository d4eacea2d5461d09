"""Messages between an instance's agent and a router, over one ZeroMQ channel with CURVE.

The router connects (DEALER) to the agent (ROUTER) in rank 0 of an instance and sends `Hello` with its
position. The agent answers `Welcome`; either the router's place in the stream of events is still known, and
the stream goes on there, or a snapshot follows:

    router                            agent
    Hello(epoch, next) -------------> Welcome(epoch, names, resumed)
                       <------------- SnapshotBegin(number, seq), parts and Events mixed, SnapshotEnd(number)
                       <------------- Events(epoch, first, ...)            contiguous numbers, a few ms apart
                       <------------- Beat(epoch, next, load, tiers)       every second
    Ping               -------------> (every second)
    PeerDead           -------------> (an instance died: free its resources)
    PrefillServers     -------------> (to decode: all prefill servers, repeated; connect to them)
    Advise, Withdraw   -------------> (a request is expected, or no more)
    Export               -------------> (a peer will read a prompt's blocks from DRAM)
    Fetch              -------------> (read them from there, for a request that is on its way)
                       <------------- Expecting(id)                       (its request may be sent now)
    Park               -------------> (stop a request where it is: another instance continues it)
                       <------------- Parked(id, resume)                  state that the other one needs
    Watch              -------------> (to the other one: the request with this ticket resumes from this state)
                       <------------- Expecting(ticket)                   (its request may be sent now)
                       <------------- Running(id)
    Unpark             -------------> (end it here, or go on with it after all)
                       <------------- Fetched(id, end, spans)             when that has ended
                       <------------- Advised(id, tokens)                 when all was brought that could be

Events name *runs*: a run is a number for consecutive blocks that are held in the same tiers, drawn by the
instance and never used again in its epoch. A run is defined once, by its parent run and its tokens, so that
every further event costs a few bytes however long the prefix is. `radix_global.sync` makes and applies
events. Blocks below memory are published by name (``keys.block_keys``): a disk outlives the process, and
names are all that it keeps.

During a snapshot, events may refer to runs that have not been published yet. The reader skips these: the part
that publishes the run comes later and is up to date. After `SnapshotEnd`, an unknown run means a lost
message.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from sglang_ext.stages import NO_STAGES, StageTimes
from sglang_ext.tiers import MAX_LEVEL
from sglang_ext.wire import Blob, Codec, Count, Epoch, Message, Name

AGENT_PROTOCOL: Final = 9
"""Changes when one side would misunderstand the other. `Hello` and `Welcome` keep their form across all
versions, so that each side can name the other's version."""
MAX_SECONDS: Final = 86_400
"""Longest time that a request may be expected or waited for: a day."""

MAX_EVENTS: Final = 20_000
"""Events of one message."""
BATCH_EVENTS: Final = 64
BATCH_BYTES: Final = 4 << 10
"""A message is sent when its events, or their tokens and names, exceed this. Reading one then takes well
below a millisecond of the router's time, which also has requests to forward between two messages."""

Tag = Annotated[str, msgspec.Meta(max_length=4096)]
"""A tenant's ``extra_key`` or ``cache_salt``; KV of tenants with longer ones is not published."""
Level = Annotated[int, msgspec.Meta(ge=0, le=MAX_LEVEL)]
"""Level of a tier (``tiers``). Readers skip events of levels that they do not have."""
Tiers = Annotated[int, msgspec.Meta(ge=0, lt=1 << (MAX_LEVEL + 1))]
"""The tiers in memory that hold a run, as bits (`Tier.bit`)."""

MAX_MESSAGE_BYTES: Final = 1 << 20
"""Longest message from a router to an agent."""
MAX_PROMPT_BYTES: Final = MAX_MESSAGE_BYTES - (64 << 10)
"""Longest encoded prompt that fits into one message with all other fields: about 245,000 tokens."""
MAX_TAG: Final = 4096
MAX_OUTPUT_BYTES: Final = 1 << 19
"""Longest encoded output of a request that can be migrated. Longer answers finish in place."""
PREFILLS_AGAIN_S: Final = 10.0
Ticket = Annotated[str, msgspec.Meta(min_length=32, max_length=64)]
"""Unguessable: its bearer may resume a request."""
Host = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:%\[\]-]{1,255}$")]
Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]


class Event(msgspec.Struct, frozen=True, array_like=True):
    """Base of placement events. Sent after the change is complete; a removal is sent before the freed space
    is used again."""


class Stored(Event, frozen=True, tag=1):
    """A new run.

    parent: the run it continues; 0 at the start of a prompt, where ``extra_key`` and ``cache_salt`` name the
        tenant.
    tokens: encoded (``keys.encode_tokens``), whole blocks.
    """

    run: Count
    parent: Count
    tokens: Blob
    tiers: Tiers
    extra_key: Tag | None = None
    cache_salt: Tag | None = None


class Moved(Event, frozen=True, tag=2):
    """A run is in these tiers now, at least one."""

    run: Count
    tiers: Tiers


class Removed(Event, frozen=True, tag=3):
    """A run, with all its continuations, is no longer in memory."""

    run: Count


class Split(Event, frozen=True, tag=4):
    """The first ``blocks`` blocks of ``run`` are the run ``upper`` from now on, in the same tiers."""

    run: Count
    upper: Count
    blocks: Count


class Cleared(Event, frozen=True, tag=5):
    """Nothing is in memory any more, or nothing of it matches any more: the cache was flushed, or the weights
    changed. ``weights``: the version that names of blocks have from now on."""

    weights: Name


class NamesStored(Event, frozen=True, tag=6):
    """A tier below memory has blocks, durably. names: ``keys.BLOCK_KEY_BYTES`` each."""

    level: Level
    names: Blob


class NamesRemoved(Event, frozen=True, tag=7):
    """A tier below memory no longer has blocks."""

    level: Level
    names: Blob


PlacementEvent: TypeAlias = Stored | Moved | Removed | Split | Cleared | NamesStored | NamesRemoved
PlacementEvents = Annotated[tuple[PlacementEvent, ...], msgspec.Meta(max_length=MAX_EVENTS)]


class Pages(msgspec.Struct, frozen=True, array_like=True):
    """Names of blocks below memory are those of SGLang's pages (``keys.page_hashes``, the first
    ``BLOCK_KEY_BYTES``), and each page has a part of each component (``keys.part_name``).

    tokens: of a page; blocks are whole pages. parts: for each component beside the KV of every token, from
        number 1 on, how many pages of it before a place a resume there needs. pairs: see ``page_hashes``.
    """

    tokens: Annotated[int, msgspec.Meta(ge=1)]
    parts: Annotated[tuple[Annotated[int, msgspec.Meta(ge=1)], ...], msgspec.Meta(max_length=255)]
    pairs: bool = False


class Naming(msgspec.Struct, frozen=True, array_like=True):
    """The inputs of names of blocks below memory, beside tenant and tokens (``keys.Namespace``).

    adapters: LoRA is on; names of tenants with an ``extra_key`` then depend on more than this. pages: of a
        model with windows or states, whose names depend on nothing else here; they are those of the weights
        of the server's start, and mean nothing once the weights have changed.
    """

    model: Tag
    weights: Name
    dtype: Name
    geometry: Tag
    shard: Name
    adapters: bool = False
    pages: Pages | None = None


class Load(msgspec.Struct, frozen=True, array_like=True):
    """How busy an instance is."""

    running: Count = 0
    """Requests in the running batch."""
    queued: Count = 0
    """Requests that wait, and one whose prompt is cut and not complete yet."""
    queued_tokens: Count = 0
    """Their tokens that are to be computed; cached prefixes of waiting requests are not deducted."""


class Fill(msgspec.Struct, frozen=True, array_like=True):
    """Blocks that the tier of a level holds, and how many fit. spilled: the part of them held for other
    instances."""

    level: Level
    used: Count = 0
    size: Count = 0
    spilled: Count = 0


class Hello(Message, frozen=True, tag="hello"):
    """Subscribes a router to an instance's events, from ``next`` of ``epoch`` on; empty for everything."""

    router: Name
    epoch: Annotated[bytes, msgspec.Meta(max_length=16)] = b""
    next: Count = 0
    protocol: Count = AGENT_PROTOCOL


class Ping(Message, frozen=True, tag="ping"):
    """A router lives. Every second."""

    router: Name


class PeerDead(Message, frozen=True, tag="dead"):
    """An instance died: free everything held for it. An empty epoch means any."""

    instance: Name
    epoch: Annotated[bytes, msgspec.Meta(max_length=16)] = b""


class PrefillServer(msgspec.Struct, frozen=True, array_like=True):
    """A prefill server that requests may come from. address: ``host:port`` of its bootstrap port."""

    instance: Name
    epoch: Annotated[bytes, msgspec.Meta(max_length=16)]
    address: Name


class PrefillServers(Message, frozen=True, tag="prefills"):
    """All prefill servers that a router has, sent to a decode instance, which connects to them before their
    first request comes (KVDirect, section 4.2). Replaces the router's previous list; repeated every
    `PREFILLS_AGAIN_S`.
    """

    router: Name
    servers: Annotated[tuple[PrefillServer, ...], msgspec.Meta(max_length=4096)]


class Source(msgspec.Struct, frozen=True, array_like=True):
    """Where a prompt's KV can be read, as set up by `Export`.

    endpoints: ``host:port`` of each rank, in order. export: the name under which they export it.
    """

    endpoints: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=256)]
    export: Name


class FetchSpan(msgspec.Struct, frozen=True, array_like=True):
    """A span of a prompt and its source. It begins at the end of the previous span, and reaches up to the
    leading ``tokens`` tokens, which the source exports from the prompt's start. A span that ends where
    another does, or before it, is a fallback: it is read if the other one fails.

    computed: the source computes it meanwhile (`Export.compute`), and exports it layer by layer.
    """

    source: Source
    tokens: Count
    computed: bool = False


FetchSpans = Annotated[tuple[FetchSpan, ...], msgspec.Meta(max_length=64)]


class Export(Message, frozen=True, tag="export"):
    """Let a peer read the blocks held here of a prompt, for ``ttl_s`` at most (MemServe, section 5.3).

    export: the name under which the peer requests it; any bearer of the name can read it. tokens: encoded.
    compute: compute them, and export each layer as soon as it is computed (table 3, sequence parallelism).
    spills: the blocks are about to be evicted, and the peer keeps them: reading does not count as a use.
    """

    export: Name
    tokens: Blob
    extra_key: Tag | None = None
    cache_salt: Tag | None = None
    ttl_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 10.0
    compute: bool = False
    spills: bool = False


class Fetch(Message, frozen=True, tag="fetch"):
    """A request with this prompt is on its way: read the missing blocks from peers.

    spans: in order. wait_s: how long the request may wait for the fetch, and how long the fetch may take.
    for_others: no request is on its way; the blocks are kept in idle DRAM on behalf of the instances that
    hold them.
    """

    id: Name
    tokens: Blob
    spans: FetchSpans
    extra_key: Tag | None = None
    cache_salt: Tag | None = None
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 5.0
    for_others: bool = False


class Advise(Message, frozen=True, tag="advise"):
    """A request with this prompt is expected: bring its cached blocks up to HBM (Symphony, section 3.2).

    id: the router's name of the hint. tokens: encoded. ttl_s: how long the request is expected. earliest_s:
        the earliest time at which it may come.
    """

    id: Name
    tokens: Blob
    extra_key: Tag | None = None
    cache_salt: Tag | None = None
    priority: int = 0
    ttl_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)] = 0.0
    spans: FetchSpans = ()
    """Spans that peers hold and this instance lacks; they are fetched first."""
    earliest_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)] = 0.0


class Withdraw(Message, frozen=True, tag="withdraw"):
    """The request of a hint has come, or is not expected any more: do no more for it."""

    id: Name


class Park(Message, frozen=True, tag="park"):
    """Stop a request between two tokens and keep its state; another instance continues it (MemServe, table
    3). Answered by `Parked`. rid: the server's name of it.
    """

    id: Name
    rid: Name


class Unpark(Message, frozen=True, tag="unpark"):
    """Decision on a parked request: it goes on here (``stay``), or ends, because it runs elsewhere."""

    id: Name
    stay: bool


class Resume(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State of a stopped request with which it goes on elsewhere, beside its KV.

    output: generated so far, encoded (``keys.encode_tokens``), one token at least; the last token has no KV
        yet.
    prompt: digest of the prompt's tokens, to compare (``engine.resume.prompt_digest``).
    cached: tokens found in the cache: in all, in HBM, in DRAM and below.
    received: whether its KV comes by a hand-over. home: bootstrap host and port of the prefill server that
        its KV returns to, and the number of its replica.
    stages: how long it took up to here.
    """

    output: Annotated[bytes, msgspec.Meta(min_length=4, max_length=MAX_OUTPUT_BYTES)]
    prompt: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    cached: tuple[Count, Count, Count, Count] = (0, 0, 0, 0)
    received: bool = False
    home: tuple[Host, Port, Count] | None = None
    stages: StageTimes = NO_STAGES


class Watch(Message, frozen=True, tag="watch"):
    """The request ``rid`` comes with ``ticket`` in its body, and is to resume from this state. Answered by
    `Expecting` with the ticket as its id once it may be sent, and by `Running` with ``id`` when it runs.

    The state itself never travels in a client's request body.
    """

    id: Name
    rid: Name
    ticket: Ticket
    resume: Resume


class Welcome(Message, frozen=True, tag="welcome"):
    """The agent's answer to `Hello`. resumed: the events go on where the router left off."""

    instance: Name
    epoch: Epoch
    block_size: Annotated[int, msgspec.Meta(ge=1, le=65_536)]
    resumed: bool
    naming: Naming | None = None
    """``None``: tiers below memory are not published."""
    protocol: Count = AGENT_PROTOCOL


class SnapshotBegin(Message, frozen=True, tag="begin"):
    """Drop the index. The next event is number ``seq``."""

    epoch: Epoch
    number: Count
    """Number of the snapshot in this epoch; parts of other snapshots are ignored."""
    seq: Count


class SnapshotPart(Message, frozen=True, tag="part"):
    """Some of the runs held at this place in the stream: before event ``seq``. Parents come before children.

    index: counts the parts of a snapshot.
    """

    epoch: Epoch
    number: Count
    index: Count
    seq: Count
    events: PlacementEvents


class SnapshotEnd(Message, frozen=True, tag="end"):
    """The snapshot is complete. partial: there was more than fits; the rest is held but not published."""

    epoch: Epoch
    number: Count
    parts: Count
    seq: Count
    partial: bool = False


class Events(Message, frozen=True, tag="events"):
    """Consecutive events; the first has the number ``first``. age_ms: age of the oldest, when it was sent."""

    epoch: Epoch
    first: Count
    events: PlacementEvents
    age_ms: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class Beat(Message, frozen=True, tag="beat"):
    """The instance lives. Sent every second regardless of other messages. next: number of the next event."""

    epoch: Epoch
    next: Count
    load: Load = Load()
    fills: Annotated[tuple[Fill, ...], msgspec.Meta(max_length=MAX_LEVEL + 1)] = ()


class Advised(Message, frozen=True, tag="advised"):
    """Result of a hint, sent once the instance has stopped working on it.

    end: why it ended, as ``engine.prefetch.PrefetchEnd`` has it; ``computing`` when it goes on with computing
    uncached tokens. tokens: of the prompt's beginning that are in HBM. brought: how many of them were brought
    for this hint. computed: how many were computed for it.
    """

    epoch: Epoch
    id: Name
    end: Name
    tokens: Count
    brought: Count
    computed: Count = 0


class Parked(Message, frozen=True, tag="parked"):
    """A request has stopped, or could not be stopped.

    why: the reason when it has not stopped, else empty; ``again`` when a later attempt may work.
    resume: the state for `Watch`; always present when ``why`` is empty.
    tokens: prompt and answer, encoded; extra_key, cache_salt: of their tenant.
    export: under which DRAM exports their KV; empty when it exports none.
    meeting: ``host:port`` where a decode instance joins ``bootstrap_room`` for the KV; empty on
    colocated ones.
    """

    epoch: Epoch
    id: Name
    why: Name = ""
    resume: Resume | None = None
    tokens: Blob = b""
    extra_key: Tag | None = None
    cache_salt: Tag | None = None
    export: Name = ""
    meeting: Name = ""
    bootstrap_room: Count = 0


class Running(Message, frozen=True, tag="running"):
    """The request of a `Watch` runs here."""

    epoch: Epoch
    id: Name


class Expecting(Message, frozen=True, tag="expecting"):
    """The scheduler has a `Fetch` or `Watch`: a request that is sent now follows it on every rank."""

    epoch: Epoch
    id: Name


class FetchedSpan(msgspec.Struct, frozen=True, array_like=True):
    """Result of one span of a `Fetch`: tokens received, and seconds taken, including waiting for the holder
    and excluding connecting to it. end: as in `Fetched`.
    """

    end: Name
    tokens: Count
    seconds: Annotated[float, msgspec.Meta(ge=0)]


class Fetched(Message, frozen=True, tag="fetched"):
    """Result of a `Fetch`, or of an `Advise` that names spans.

    id: of that message. ahead: it belongs to a hint. end: ``done``, or why not all came, as
    ``FetchEnd`` has it. spans: in order; the next span covers for tokens that one did not
    bring.
    """

    epoch: Epoch
    id: Name
    ahead: bool
    end: Name
    spans: Annotated[tuple[FetchedSpan, ...], msgspec.Meta(max_length=64)] = ()


ToAgent: TypeAlias = (
    Hello | Ping | PeerDead | PrefillServers | Advise | Withdraw | Export | Fetch | Park | Unpark | Watch
)
FromAgent: TypeAlias = (
    Welcome
    | SnapshotBegin
    | SnapshotPart
    | SnapshotEnd
    | Events
    | Beat
    | Expecting
    | Fetched
    | Advised
    | Parked
    | Running
)

TO_AGENT: Codec[ToAgent] = Codec(ToAgent, limit=MAX_MESSAGE_BYTES)
FROM_AGENT: Codec[FromAgent] = Codec(FromAgent)

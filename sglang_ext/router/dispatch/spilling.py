"""Keeps KV that a full instance is about to evict in the idle DRAM of another (KVDirect, section 7).

Twice a second, ``policies.spilling`` looks at the reported DRAM use of the instances, and at conversations
that may continue. It chooses prefixes and targets, and the transfer is that of a fetch: the full instance
exports the prefix from its DRAM, and the target fetches and keeps it for others. The index records it like
any KV, so the next request fetches it back or is sent to the target. If the target does not answer, or dies,
the full instance keeps the prefix as long as it would have anyway.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from sglang_ext.clock import Clock
from sglang_ext.ids import NewId, random_id
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.protocol.agent import Beat, Export, Fetch, Fetched, FetchSpan, Fill, FromAgent, Source
from sglang_ext.router.dispatch.flight import Flight
from sglang_ext.router.fleet.channels import AgentChannels
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.index.conversations import Conversation, Conversations
from sglang_ext.router.index.index import Index
from sglang_ext.router.placing.fetching import movable
from sglang_ext.router.policies.spilling import (
    Memory,
    Prefix,
    Spill,
    SpillTerms,
    spills,
)
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.tiers import Tier

TICK_S: Final = 0.5
AGAIN_S: Final = 60.0
"""Least time between two spills of a prefix, failed ones included: a target that dropped it needed the
memory."""
LOOK_S: Final = 3.0
"""After which it is looked up again who holds a prefix, or still keeps one,"""
REST_S: Final = 60.0
"""or, of a prefix that no full instance holds, after so long."""
LOOKS: Final = 16
"""Look-ups of one round: some milliseconds."""
MOST_PREFIXES: Final = 2000
"""Conversations that a round considers, the coldest of each tenant."""
MOVE_S: Final = 10.0
"""An instance has so long to fetch."""
UNHEARD_S: Final = 30.0
"""A spill without a report for so long has failed."""
MOST_UNDER_WAY: Final = 4
MOST_SPILLED: Final = 10_000
"""Spills that are remembered for as long as they are kept; the oldest count as gone beyond that."""
MOST_RECENT: Final = 2000
"""Most ended spills that are kept for ``/explain``."""
MAX_BYTES: Final = 32 << 20
"""Memory for conversations."""


class SpillChannels(AgentChannels, Protocol):
    """``Agents``, as it is used here."""

    def beat(self, name: str) -> Beat | None:
        """The last report of an instance, while its agent is alive."""


@dataclass(eq=False, slots=True)
class Spilled:
    """A prefix that an instance was asked to keep for others. blocks: new there, or expected to be.
    start: the index of the first of them in the prefix."""

    namespace: tuple[str | None, ...]
    key: bytes
    tenant: str
    source: str
    target: str
    start: int
    blocks: int
    at: float
    """Seconds since the epoch."""
    since: float
    """Time of the request to keep it, or of the last look at it; monotonic."""
    end: str | None = None
    moved_tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        """The spilled prompt, as ``/explain`` shows it."""
        return {
            "from": self.source,
            "to": self.target,
            "tokens": len(self.key) // TOKEN_BYTES,
            "at": self.at,
            "end": self.end,
            "moved_tokens": self.moved_tokens,
        }


class Spilling:
    """See the module's docstring. Lives on the event loop's thread.

    Args:
        terms: thresholds of full and idle instances, and each tenant's share.
        clock: seconds.
        new_id: names spills and exports.
    """

    def __init__(
        self,
        terms: SpillTerms,
        fleet: Fleet,
        trees: Index,
        channels: SpillChannels,
        metrics: RouterMetrics,
        clock: Clock,
        *,
        new_id: NewId = random_id,
    ) -> None:
        self._terms = terms
        self._new_id = new_id
        self._fleet = fleet
        self._trees = trees
        self._channels = channels
        self._clock = clock
        self.conversations = Conversations(clock, trees.block_size, MAX_BYTES)
        self._is_on = False
        self._under_way: dict[str, Spilled] = {}
        self._kept: OrderedDict[str, Spilled] = OrderedDict()
        """Kept prefixes by id, the least recently checked first."""
        self._recent: deque[Spilled] = deque(maxlen=MOST_RECENT)
        self._ends = metrics.counter("spills")
        self._tokens = metrics.counter("spilled_tokens")
        kept = metrics.gauge("spilled_blocks")

        def refresh() -> None:
            kept.clear()
            for tenant, blocks in self.taken().items():
                kept.labels(tenant).set(blocks)

        metrics.refreshing.subscribe(refresh)
        channels.messages.subscribe(self.on_message)

    # -- conversations ------------------------------------------------------------------------------

    def learn(self, flight: Flight, namespace: tuple[str | None, ...], key: bytes) -> None:
        """A request has sent, and was answered, what ``key`` has."""
        if self._is_on and len(flight.prompts) == 1 and movable(namespace, key):
            record = flight.record
            session = flight.admitted.session is not None
            tenant = record.caller.tenant or ""
            self.conversations.learn(namespace, key, tenant, record.request_id, session=session)

    # -- spilling -----------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """Whether any instance keeps KV for others."""
        return self._is_on

    def round(self) -> None:
        """Look once, and tell."""
        now = self._clock.monotonic()
        memories = list(self._memories())
        self._is_on = self._terms.tenant_blocks > 0 and any(memory.limit for memory in memories)
        for id in [id for id, spill in self._under_way.items() if now - spill.since > UNHEARD_S]:
            self._ended(id, "unheard", 0)
        if not self._is_on:
            return
        self._look_at_kept(now)
        full = {memory.name for memory in memories if self._terms.is_full(memory)}
        if not full or len(self._under_way) >= MOST_UNDER_WAY:
            return
        known = {each.id: each for each in self._coldest(full, now)}
        prefixes = [self._prefix(each, now) for each in known.values()]
        found = spills(memories, prefixes, self.taken(), self._terms, self._channels.can_fetch)
        for why, count in found.left.items():
            self._ends.labels(why).inc(count)
        for spill in found.spills[: MOST_UNDER_WAY - len(self._under_way)]:
            conversation = known[spill.prefix.id]
            self._look(conversation, now)
            if conversation.held == spill.prefix.held:  # else the next round sees the change
                self._send(spill, conversation, now)

    def _memories(self) -> Iterator[Memory]:
        for instance in self._fleet.usable():
            registration, beat = (
                self._channels.registration(instance.name),
                self._channels.beat(instance.name),
            )
            fills = () if beat is None else beat.fills
            dram = next((fill for fill in fills if fill.level == Tier.DRAM.level), Fill(Tier.DRAM.level))
            if registration is not None and dram.size and registration.endpoints:
                yield Memory(
                    instance.name,
                    dram.used,
                    dram.size,
                    dram.spilled,
                    registration.for_others,
                    instance.in_flight,
                )

    def _coldest(self, full: set[str], now: float) -> list[Conversation]:
        """Conversations that may go on and that a full instance holds, as far as is known, the coldest first.
        Tenants have equal shares. Some are looked up, those first that were not for longest."""
        lines = self.conversations.of_tenants()
        share = max(1, MOST_PREFIXES // max(1, len(lines)))
        found = [
            list(
                itertools.islice(
                    (
                        each
                        for each in line
                        if each.goes_on and (now - each.looked >= REST_S or not full.isdisjoint(each.held))
                    ),
                    share,
                )
            )
            for line in lines
        ]
        for each in self._due(found, now):
            self._look(each, now)
            if not each.held:
                self.conversations.forget(each)
        coldest = heapq.merge(*found, key=lambda each: each.id)
        return [each for each in coldest if not full.isdisjoint(each.held)]

    def _due(self, lines: Sequence[Sequence[Conversation]], now: float) -> list[Conversation]:
        """Conversations to look up in this round: one of each tenant, then a second one of each, …"""
        due = [
            heapq.nsmallest(
                LOOKS, (each for each in line if now - each.looked >= LOOK_S), key=lambda each: each.looked
            )
            for line in lines
        ]
        due.sort(key=lambda line: line[0].looked if line else now)
        turns = itertools.chain.from_iterable(itertools.zip_longest(*due))
        return list(itertools.islice((each for each in turns if each is not None), LOOKS))

    def _look(self, conversation: Conversation, now: float) -> None:
        """Look up who holds it."""
        conversation.looked = now
        namespace, key, size = conversation.namespace, conversation.key, self._trees.block_size
        blocks = {name: found.in_memory // size for name, found in self._trees.match(namespace, key).items()}
        conversation.held = {name: count for name, count in blocks.items() if count}
        conversation.durable = self._trees.durable(namespace, key) if conversation.held else 0

    def _prefix(self, conversation: Conversation, now: float) -> Prefix:
        # A spilled prefix is not spilled again for a while, and counts as cold.
        resting = now < conversation.again
        durable = max(conversation.held.values(), default=0) if resting else conversation.durable
        return Prefix(conversation.id, conversation.tenant, conversation.held, durable)

    def _send(self, spill: Spill, conversation: Conversation, now: float) -> None:
        there = self._channels.registration(spill.source)
        assert there is not None
        conversation.again = now + AGAIN_S
        key = conversation.key[: spill.blocks * self._trees.block_size * TOKEN_BYTES]
        _, _, extra_key, salt = conversation.namespace
        id, export = self._new_id(), self._new_id()
        source = Source(there.endpoints, export)
        span = FetchSpan(source, len(key) // TOKEN_BYTES)
        sent = self._channels.send(
            spill.source, Export(export, key, extra_key, salt, UNHEARD_S, spills=True)
        ) and self._channels.send(
            spill.target, Fetch(id, key, (span,), extra_key, salt, MOVE_S, for_others=True)
        )
        note = Spilled(
            conversation.namespace,
            key,
            conversation.tenant,
            spill.source,
            spill.target,
            spill.blocks - spill.new,
            spill.new,
            self._clock.wall(),
            now,
        )
        self._recent.append(note)
        self._under_way[id] = note
        if not sent:
            self._ended(id, "unheard", 0)

    # -- what becomes of it -------------------------------------------------------------------------

    def on_message(self, name: str, message: FromAgent) -> None:
        """An agent has sent a message."""
        if isinstance(message, Fetched):
            spill = self._under_way.get(message.id)
            if spill is not None and spill.target == name:
                self._ended(message.id, message.end, sum(span.tokens for span in message.spans))

    def _ended(self, id: str, how: str, tokens: int) -> None:
        spill = self._under_way.pop(id)
        spill.end, spill.moved_tokens = how, tokens
        spill.blocks = tokens // self._trees.block_size
        spill.since = self._clock.monotonic()
        self._ends.labels(how).inc()
        self._tokens.inc(tokens)
        if spill.blocks:
            self._kept[id] = spill
            if len(self._kept) > MOST_SPILLED:
                self._kept.popitem(last=False)

    def _look_at_kept(self, now: float) -> None:
        """Stop counting prefixes that their keepers have evicted."""
        for id, spill in list(self._kept.items())[:LOOKS]:
            if now - spill.since < LOOK_S:
                break
            match = self._trees.match(spill.namespace, spill.key).get(spill.target)
            held = 0 if match is None else match.in_memory // self._trees.block_size
            spill.blocks = min(spill.blocks, max(0, held - spill.start))
            spill.since = now
            self._kept.move_to_end(id)
            if not spill.blocks:
                del self._kept[id]

    def taken(self) -> Counter[str]:
        """Blocks that are kept of each tenant, or on their way."""
        found: Counter[str] = Counter()
        for spill in (*self._kept.values(), *self._under_way.values()):
            found[spill.tenant] += spill.blocks
        return found

    def forget(self, name: str) -> None:
        """An instance was started anew, or is gone."""
        for id in [id for id, spill in self._under_way.items() if name in (spill.source, spill.target)]:
            self._ended(id, "gone", 0)
        for id in [id for id, spill in self._kept.items() if spill.target == name]:
            del self._kept[id]

    # -- seeing -------------------------------------------------------------------------------------

    def copies_of(self, namespace: Any, key: bytes, before: float) -> list[dict[str, Any]]:
        """Spills of a prompt's prefix before a time (seconds since the epoch), oldest first."""
        return [
            spill.as_json()
            for spill in self._recent
            if spill.at <= before and spill.namespace == namespace and key.startswith(spill.key)
        ]

    async def next_round(self) -> float:
        """Look; returns the pause until the next look."""
        self.round()
        return TICK_S

    def __repr__(self) -> str:
        return f"Spilling(on={self._is_on}, kept={len(self._kept)}, {self.conversations!r})"

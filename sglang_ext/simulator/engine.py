"""The cache of a simulated instance: the engine's own parts over memory without bytes.

The tree, the store and its ledger, eviction, retention, the decision to load or to compute, write-through,
prefetching, exports and fetches are the engine's. Stand-ins are what moves bytes: the allocator and the arena
(`memory`), the mover (`copier`), and the link to peers (`peers`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from sglang_ext.config import KvConfig
from sglang_ext.cost_model import CostModel
from sglang_ext.engine.cache.loading import Loading
from sglang_ext.engine.movers.copies import Copies
from sglang_ext.engine.moves.moves import Moves
from sglang_ext.engine.peers.fetch_results import FetchResult
from sglang_ext.engine.peers.peer_kv import PeerKv
from sglang_ext.engine.planners import Planner
from sglang_ext.engine.prefetch.advice import Advice, fetch_nothing
from sglang_ext.engine.prefetch.hbm_prefetch import PrefetchResult
from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.hbm_tier import HbmTier
from sglang_ext.engine.tiers.promotions import Promotions
from sglang_ext.engine.tiers.spilled import Spilled
from sglang_ext.engine.tiers.write_down import WriteDown
from sglang_ext.engine.weights import Weights
from sglang_ext.geometry import BlockLayout
from sglang_ext.mempool.store import Store
from sglang_ext.protocol.agent import Fill, NamesRemoved, NamesStored, PlacementEvent
from sglang_ext.radix_global import Holder, RadixTree
from sglang_ext.radix_global.sync.events import PlacementLog
from sglang_ext.radix_global.sync.runs import packed
from sglang_ext.simulator.copier import Copier
from sglang_ext.simulator.disk import NamedDisk
from sglang_ext.simulator.drive import Drive
from sglang_ext.simulator.links import Network
from sglang_ext.simulator.memory import BlockCount, CountedSlots, SlotCount
from sglang_ext.simulator.peers import PeerWires, Wires
from sglang_ext.simulator.settings import BLOCK_TOKENS, Settings
from sglang_ext.simulator.virtual_time import VirtualClock
from sglang_ext.tiers import Tier

LOAD_MIN_TOKENS: Final = KvConfig().load_min_tokens
"""Shorter runs below HBM are computed."""


class Engine:
    """See the module's docstring.

    Args:
        name: of the instance. epoch: another number after each start.
        model: by which copies take their time.
        network: carries the bytes of disks.
        wires: to the other instances; None where nothing is fetched.
        wake: called when a copy or a read has ended.
        on_hint, on_fetch: take the results of hints and fetches.
        disk: that the instance had before it was started again.
    """

    def __init__(
        self,
        name: str,
        epoch: int,
        settings: Settings,
        model: CostModel,
        clock: VirtualClock,
        loop: asyncio.AbstractEventLoop,
        network: Network,
        wires: Wires | None,
        wake: Callable[[], None],
        on_hint: Callable[[PrefetchResult], None],
        on_fetch: Callable[[FetchResult], None],
        disk: NamedDisk | None = None,
    ) -> None:
        self.ranks, self.weights = Ranks(), Weights()
        self.store = Store(RadixTree(BLOCK_TOKENS, clock=clock.monotonic))
        self.tree = tree = self.store.tree
        self.hbm, dram = Holder.of(name, epoch, Tier.HBM), Holder.of(name, epoch, Tier.DRAM)
        self.log = PlacementLog(tree, {each: each.tier.bit for each in (self.hbm, dram)}, _tenant_of)
        layer_bytes = max(1, model.kv_bytes_per_token // (2 * settings.layers))
        arena = BlockCount(
            settings.dram,
            BlockLayout.uniform(
                n_layers=settings.layers,
                planes_per_layer=2,
                row_bytes=layer_bytes,
                block_tokens=BLOCK_TOKENS,
            ),
        )
        self.copier = Copier(loop, lambda nbytes: model.load_s(Tier.DRAM, nbytes), arena.block_bytes, wake)
        self.moves = Moves(self.ranks, clock=clock)
        self.drive: Drive | None = None
        self.named: list[PlacementEvent] = []
        """Names that have come to the disk or have left it, since the last events."""
        if settings.disk:
            self.drive = Drive(
                name, epoch, settings, self.store, dram, arena.block_bytes, self.ranks, self.weights, clock,
                network, wake, disk,
            )  # fmt: skip
            self.drive.tier.watch(self._on_names)
        self.dram = DramTier(
            self.store.ledger,
            self.hbm,
            dram,
            arena,
            Copies(self.copier, self.ranks),
            observer=self.log,
            below=() if self.drive is None else (self.drive.writes,),
        )
        self.write_down = WriteDown(self.hbm, self.dram, observer=self.log)
        self.write_down.serve(self.store)
        self.slots, slot_ops = self.make_slots(settings.hbm * BLOCK_TOKENS)
        self.hbm_tier = HbmTier(self.store.ledger, self.hbm, self.slots, slot_ops, self.write_down)
        self.promotions: Promotions | None = None
        if self.drive is not None:
            self.promotions = self.drive.promotions(self.store, self.dram, self.moves, LOAD_MIN_TOKENS)
        self.loading = loading = Loading.over(
            self.store, self.hbm_tier, self.write_down, self.promotions, self.moves, self.weights, self.ranks,
            clock=clock,
        )  # fmt: skip
        self.load_back, self.prefill_clock = loading.load_back, loading.prefill_clock
        self.prefetcher = loading.prefetcher
        self.wires = None if wires is None else PeerWires(wires, name, arena.block_bytes, wake)
        self.peers: PeerKv | None = None
        if self.wires is not None:
            self.peers = PeerKv(
                self.store, self.write_down, self.wires, self.wires, self.ranks, self.moves,
                namespace=self.weights.namespace, on_result=on_fetch,
            )  # fmt: skip
        self.spilled: Spilled | None = None
        if self.peers is not None and settings.for_others:
            self.spilled = Spilled(self.dram, settings.for_others, clock)
        ahead = fetch_nothing if self.peers is None else self.peers.fetch_ahead
        advice = Advice(self.prefetcher, on_hint, fetch_ahead=ahead)
        planners: list[Planner | None] = [
            self.peers, self.prefill_clock, self.load_back, self.prefetcher, advice, self.write_down,
            self.spilled, self.promotions,
        ]  # fmt: skip
        self.planners = [each for each in planners if each is not None]
        """In the order in which a server's cache calls them (``patches.adapter.build``)."""
        acting: list[Planner | None] = [self.peers, self.prefetcher, advice, self.spilled]
        self._acting = [each for each in acting if each is not None]

    def make_slots(self, tokens: int) -> tuple[Any, Any]:
        """The allocator of so many slots, and the operations on them (`SlotOps`)."""
        return SlotCount(tokens), CountedSlots()

    def _on_names(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self.named += [NamesStored(Tier.DISK.level, names) for names in packed(stored)]
        self.named += [NamesRemoved(Tier.DISK.level, names) for names in packed(removed)]

    def take_events(self) -> list[PlacementEvent]:
        """The changes since the last call."""
        events, named = self.log.take(), self.named
        if not named:
            return events
        self.named = []
        return [*events, *named]

    def each_pass(self, now: float) -> None:
        """Complete the copies that have ended, and take the next step of each planner (`RankCache`)."""
        if self.prefetcher.alarm <= now:
            self.prefetcher.expire(now)
        self.ranks.each_pass()
        for planner in self._acting:
            planner.each_pass()

    def next_pass(self, now: float) -> float:
        """When an instance that nothing wakes takes its next pass; infinite for never."""
        return now if self.prefetcher.goes_on else max(now, self.prefetcher.alarm)

    def fills(self) -> tuple[Fill, ...]:
        """Of heartbeats."""
        return (
            Fill(Tier.HBM.level, self.tree.blocks_of(self.hbm), self.hbm_tier.n_blocks),
            Fill(
                Tier.DRAM.level,
                self.dram.used_blocks,
                self.dram.n_blocks,
                0 if self.spilled is None else self.spilled.shown,
            ),
            *(
                Fill(tier.level, used, size)
                for tier, (used, size) in (
                    {} if self.promotions is None else self.promotions.blocks()
                ).items()
            ),
        )

    def close(self) -> None:
        """The process ends."""
        self.copier.close()
        if self.drive is not None:
            self.drive.close()
        if self.wires is not None:
            self.wires.close()

    def check(self) -> None:
        """Verify the invariants of tree, ledger and tiers. Raises AssertionError or TreeInvariantError."""
        self.tree.check()
        self.store.ledger.check()
        self.moves.check()
        for planner in self.planners:
            planner.check()
        if self.drive is not None:
            self.drive.check()


def _tenant_of(namespace: object) -> tuple[str | None, str | None]:
    assert isinstance(namespace, tuple)
    return namespace[1], namespace[2]

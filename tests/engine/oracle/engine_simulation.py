"""Random traffic over the simulated scheduler, and the invariants after each step."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from engine_movers import HandMover
from engine_pools import PoolKind, Pools, WrongKvError, node_chains
from engine_scheduler import Settings, SimulatedScheduler, token_at
from engine_verifying import VerifyingScheduler, speculation
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.runtime_context import get_serving

from sglang_ext.clock import Clock
from sglang_ext.config import KvConfig
from sglang_ext.engine.cache.loading import Loading
from sglang_ext.engine.cache.rank_cache import CacheParts
from sglang_ext.engine.commands import RankCommandQueue
from sglang_ext.engine.events.events import PlacementFeed
from sglang_ext.engine.events.router_commands import Replies, RouterCommands
from sglang_ext.engine.movers.copies import Copies
from sglang_ext.engine.movers.mover import LayerGate, Mover, ThreadMover
from sglang_ext.engine.movers.slots import slot_ops
from sglang_ext.engine.moves.moves import Moves
from sglang_ext.engine.peers.peer_kv import PeerKv
from sglang_ext.engine.planners import Planner
from sglang_ext.engine.prefetch.advice import Advice, fetch_nothing
from sglang_ext.engine.prefetch.disk_hints import DiskHints
from sglang_ext.engine.prefetch.hbm_prefetch import Prefetcher
from sglang_ext.engine.prefetch.layer_fill import LayerFill
from sglang_ext.engine.ranks import Later, Least, Ranks
from sglang_ext.engine.retraction import Retraction
from sglang_ext.engine.tiers.disk_writes import DiskWrites
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.hbm_tier import HbmTier
from sglang_ext.engine.tiers.load_policy import Unmeasured
from sglang_ext.engine.tiers.promotions import Promotions
from sglang_ext.engine.tiers.retention import pressure_policy_by_name
from sglang_ext.engine.tiers.spilled import Spilled
from sglang_ext.engine.tiers.write_down import WriteDown
from sglang_ext.engine.transfer_thread import TransferThread
from sglang_ext.engine.weights import Weights
from sglang_ext.geometry import BlockLayout, Geometry
from sglang_ext.keys import Namespace, encode_tokens
from sglang_ext.mempool.ledger import Reservation, Use
from sglang_ext.mempool.store import Store
from sglang_ext.patches.adapter.build_disk import RankFacts, disk_below, promotions_from
from sglang_ext.patches.adapter.own_requests import SglangHost
from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache
from sglang_ext.radix_global import Holder, Node, RadixTree, policy_by_name
from sglang_ext.radix_global.observer import UNOBSERVED
from sglang_ext.testing.tiers import FaultyTier, MemoryTier, WrappedTier
from sglang_ext.tiered_store.copy import PoolCopier
from sglang_ext.tiered_store.dram.arena import DramArena
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier, Get, Ids, LayerRead
from sglang_ext.tiers import Tier

_CONFIG = KvConfig(dram_size=1, disk_path="/simulated", block_size=4, load_min_tokens=0, load_policy="always")
_WEIGHING = dataclasses.replace(_CONFIG, load_policy="auto")
CONTEXT = 200
"""Longest request in tokens."""


@dataclass(frozen=True)
class Scenario:
    """One server under one load."""

    name: str
    kind: PoolKind = field(default_factory=PoolKind)
    block: int = 4
    hbm_tokens: int = 320
    dram_blocks: int | None = 60
    """Size of the DRAM tier; ``None`` for none."""
    shared_dram: bool = False
    """Whether other processes could map it, as that of a server."""
    settings: Settings = field(default_factory=Settings)
    policy: str = "lru"
    load_min_tokens: int = 0
    threaded: bool = False
    """Copies by the real mover instead of the simulated one."""
    rows: int = 6
    tenants: bool = True
    """Requests carry an extra key or a salt at times."""
    force_miss: bool = False
    """``SGLANG_RADIX_FORCE_MISS``: matches are thrown away, so everything is computed again."""
    strip_thinking: bool = False
    """``--strip-thinking-cache``, and all output is thinking: only prompts are kept."""
    disk_blocks: int | None = None
    """Size of the disk below DRAM; ``None`` for none. It is the reference tier, behind real threads."""
    disk_faults: float = 0.0
    """Share of the disk's calls that fail."""
    stream: bool = False
    """Admit requests while their blocks still come from disk."""
    durability: str = "disk"
    """``--kv-durability``."""
    admission: str = "first-layer"
    """``--kv-disk-io admission``."""
    weigh: bool = False
    """Load blocks from disk only if computing them is expected to be slower."""
    prefetch: float = 0.0
    """Share of the passes before which a hint announces a prompt."""
    repeats: float = 0.0
    """Share of the passes before which a request that has ended comes again."""
    layers: int | None = 0
    """Most bytes of HBM for the lowest layers of announced sessions; None: as many as pay off."""
    pressure: str = "weakest-first"
    """``--kv-eviction-policy pressure``."""
    for_others: int = 0
    """``--kv-dram-size for-others``, in blocks."""
    memory: int = 12
    """Number of earlier prompts to continue; few make hits in HBM, many make hits in DRAM."""
    stretch: int = 1
    """How many times longer than other traffic's the prompts are."""
    make_scheduler: type[SimulatedScheduler] = SimulatedScheduler
    make_pools: type[Pools] = Pools
    make_mover: Callable[[Pools, DramArena], Mover] | None = None
    """Makes the mover of a device; None for those of host memory."""

    def __str__(self) -> str:
        return self.name


_Held = tuple[Node, np.ndarray, np.ndarray]
"""A node, where one tier has it, and the hashes of its tokens."""


class LateLayers(WrappedTier):
    """Brings each layer a little later than the one before."""

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        time.sleep(0.005 * layer)
        return super().get_layer(get, layer, memory, ids)


class Rank:
    """Everything of one rank: pools, cache, tiers, scheduler.

    Args:
        scenario: sizes and flags.
        pace: decides how fast copies go; ``None`` for a mover that copies only when it has to.
        cache_class, tier_class, copies_class, write_down_class: under test.
        routed: sends changes to routers, and receives their commands.
        transfers, peers: make them for this rank, which has its tiers by then.
        clock: by which KV on its way is late.
        least, commands, priority_sign, takes_hints, check: see `Ranks` and `CacheParts`.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        pace: random.Random | None = None,
        cache_class: type[GlobalRadixCache] = GlobalRadixCache,
        tier_class: type[DramTier] = DramTier,
        copies_class: type[Copies] = Copies,
        write_down_class: type[WriteDown] = WriteDown,
        gate_class: type[LayerGate] = LayerGate,
        least: Least | None = None,
        later: Later | None = None,
        commands: RankCommandQueue | None = None,
        priority_sign: int = 1,
        takes_hints: bool = False,
        check: bool = False,
        clock: Clock | None = None,
        disk_class: Callable[[BlockTier], BlockTier] = lambda disk: disk,
        routed: bool = False,
        feed_class: Callable[..., PlacementFeed] = PlacementFeed,
        transfers: Callable[[Rank], TransferThread] | None = None,
        peers: Callable[[Rank, TransferThread], PeerKv] | None = None,
    ) -> None:
        self.scenario = scenario
        self._settings = ExitStack()
        if issubclass(scenario.make_scheduler, VerifyingScheduler):
            self._settings.enter_context(speculation(scenario.kind))
        self.pools = scenario.make_pools(
            scenario.kind,
            scenario.hbm_tokens,
            block=scenario.block,
            rows=scenario.rows,
            context=CONTEXT * scenario.stretch + 64,
        )
        self.tree = RadixTree(scenario.block, policy=policy_by_name(scenario.policy))
        self.store = Store(self.tree)
        self.hbm = Holder.of("simulated", 1, Tier.HBM)
        self.dram_holder = Holder.of("simulated", 1, Tier.DRAM)
        self.feed: PlacementFeed | None = None
        self.router_commands: RouterCommands | None = None
        if routed:
            commands = commands or RankCommandQueue()
            self.feed = feed_class(self.tree, (self.hbm, self.dram_holder))
            self.router_commands = RouterCommands(
                commands, self.hbm.epoch.to_bytes(16, "big"), self.feed.queue.post
            )
        self.arena: DramArena | None = None
        self.mover: Mover | None = None
        self.tier: DramTier | None = None
        self.write_down: WriteDown | None = None
        self.writes: DiskWrites | None = None
        self.promotions: Promotions | None = None
        self.ranks = ranks = Ranks(least, later=later, check=check)
        self.weights = Weights("weights", self._read_weights)
        self.spilled: Spilled | None = None
        gate = disk = None
        self.moves = Moves(Ranks())
        config = dataclasses.replace(
            _WEIGHING if scenario.weigh else _CONFIG,
            durability=scenario.durability,
            disk_admission=scenario.admission,
        )
        if scenario.dram_blocks is not None:
            geometry = self.pools.geometry()
            size = scenario.dram_blocks * (geometry.block_bytes + 8) + 8
            self.arena = DramArena(
                geometry.layout, size, shared=scenario.shared_dram, pin=False, name="simulated"
            )
            assert self.arena.n_blocks == scenario.dram_blocks
            copier = PoolCopier(geometry, self.arena)
            if scenario.make_mover is not None:
                self.mover = scenario.make_mover(self.pools, self.arena)
            elif scenario.threaded:
                self.mover = ThreadMover(copier, geometry.n_layers)
            else:
                self.mover = HandMover(copier, geometry.n_layers, pace)
            below = None
            if scenario.disk_blocks is not None:
                disk = disk_class(self._disk(geometry, scenario.disk_blocks))
                facts = RankFacts("simulated", 1)
                identity = Namespace("model", "weights", "float32", "layout")
                below = disk_below(
                    disk,
                    config,
                    facts,
                    identity,
                    self.tree,
                    self.dram_holder,
                    self.arena,
                    ranks,
                    self.weights,
                )
            observer = UNOBSERVED if self.feed is None else self.feed.log
            self.tier = tier_class(
                self.store.ledger,
                self.hbm,
                self.dram_holder,
                self.arena,
                copies_class(self.mover, ranks),
                below=() if below is None else (below,),
                observer=observer,
                pressure=pressure_policy_by_name(scenario.pressure),
            )
            self.write_down = write_down_class(
                self.hbm, self.tier, observer=observer, enabled=config.writes_dram
            )
            self.write_down.serve(self.store)
            self.moves = Moves(ranks, clock=clock)
            if scenario.for_others:
                self.spilled = Spilled(self.tier, scenario.for_others, self.moves.clock)
            if disk is not None and below is not None:
                self.writes = below
                self.promotions = promotions_from(
                    disk,
                    below,
                    config,
                    self.store,
                    self.tier,
                    self.arena,
                    self.moves,
                    stream=scenario.stream,
                )
            gate = gate_class(self.mover, geometry.n_layers)
            self.pools.register(gate)

        replies = self.router_commands or Replies()
        moved_by = None if transfers is None else transfers(self)
        peer_kv = None if peers is None or moved_by is None else peers(self, moved_by)
        hbm_tier = HbmTier(
            self.store.ledger, self.hbm, self.pools.allocator, slot_ops(self.pools.device), self.write_down
        )
        loading = None
        bringing: tuple[Planner | None, ...] = ()
        if self.write_down is not None:
            loading = Loading.over(
                self.store,
                hbm_tier,
                self.write_down,
                self.promotions,
                self.moves,
                self.weights,
                ranks,
                always=not scenario.weigh,
            )
            advice = Advice(
                loading.prefetcher,
                replies.reply_to_hint,
                fetch_ahead=fetch_nothing if peer_kv is None else peer_kv.fetch_ahead,
                priority_sign=priority_sign,
            )
            assert self.arena is not None
            layers = LayerFill.over(
                scenario.layers,
                self.arena.layout,
                self.store,
                self.write_down.dram,
                hbm_tier,
                loading.prefetcher,
                loading.speeds,
                loading.prefill_clock,
            )
            bringing = loading.prefill_clock, loading.load_back, loading.prefetcher, layers
            bringing += (advice,) if takes_hints else ()
        wait = scenario.settings.retract_wait
        retraction = None if wait is None else Retraction(wait, ranks)
        on = (peer_kv, moved_by, *bringing, self.write_down, self.spilled)
        on += (self.promotions, retraction, self.feed)
        parts = CacheParts(
            self.store,
            hbm_tier,
            [planner for planner in on if planner is not None],
            speeds=Unmeasured() if loading is None else loading.speeds,
            load_min_tokens=scenario.load_min_tokens,
            weights=self.weights,
            ranks=ranks,
            moves=self.moves,
            commands=commands,
            priority_sign=priority_sign,
            check=check,
        )
        host = SglangHost(self.pools.allocator)
        self.cache = cache_class(self.pools.params(), parts, host, replies)
        self.expects_faults = False
        """Calls of the cache fail, because a test has them do so."""
        self.look_inside = True
        """Compare everything in every tier after each step, not only the blocks that a forward pass reads."""
        self.scheduler = scenario.make_scheduler(self.pools, self.cache, gate, scenario.settings)

    @staticmethod
    def layout_of(scenario: Scenario) -> BlockLayout:
        """The layout of the blocks of a rank of this scenario."""
        pools = Pools(scenario.kind, scenario.hbm_tokens, block=scenario.block, rows=scenario.rows, context=8)
        return pools.geometry().layout

    def _read_weights(self) -> str:
        return f"weights {self.scheduler.weights}" if self.scheduler.weights else "weights"

    def _disk(self, geometry: Geometry, blocks: int) -> BlockTier:
        disk: BlockTier = MemoryTier(geometry.layout, blocks)
        if self.scenario.stream:
            disk = LateLayers(disk)
        if self.scenario.disk_faults:
            disk = FaultyTier(disk, seed=5, rate=self.scenario.disk_faults)
        return disk

    def serve(self, tokens: list[int], *, new_tokens: int = 1, **options: Any) -> Req:
        """One request from arrival to end, alone; checked after each step."""
        req = self.scheduler.submit(tokens, new_tokens=new_tokens, **options)
        for _ in range(500):
            self.scheduler.step()
            self.check()
            if self.scheduler.idle:
                return req
        raise AssertionError("the request does not end")

    def settle(self) -> None:
        """Let everything end that is being copied or written."""
        if self.tier is not None:
            self.tier.copies.settle()
        if self.writes is not None:
            self.writes.settle()

    def leave_hbm(self, *, on_disk: bool = False) -> None:
        """Let DRAM alone have what HBM has, or the disk alone."""
        self.settle()
        self.cache.evict(EvictParams(num_tokens=self.pools.tokens))
        if on_disk:
            assert self.tier is not None
            self.tier.give_back(self.tier.take(self.tier.n_blocks))
            assert not self.tier.used_blocks

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the mover and give the arena back."""
        self._settings.close()
        self.cache.release_host_resources()
        if self.feed is not None:
            assert self.cache.command_queue is not None
            self.cache.command_queue.close()
        if self.arena is not None:
            self.arena.close()

    # -- invariants -----------------------------------------------------------------------------

    def check(self) -> None:
        """Verify everything that must be true between two passes of the loop."""
        self.cache.check()
        assert self.expects_faults or not self.cache.faults.counts, self.cache.faults
        self._check_counts()
        owned = self._owned_slots()
        self._check_owners(owned)
        if self.look_inside:
            self._check_contents()
        # Free slots hold garbage from here on, so that a read of them cannot go unnoticed.
        self.pools.oracle.spoil(self.pools.free_slots())

    def _check_counts(self) -> None:
        """SGLang's own invariant (``SchedulerInvariantChecker``), with its words."""
        page = self.pools.kind.page
        uncached = 0
        for req in self.scheduler.active():
            assert req.kv.cache_protected_len % page == 0
            uncached += -(-req.kv.kv_allocated_len // page) * page - req.kv.cache_protected_len
        available = self.pools.allocator.available_size()
        evictable, protected = self.cache.evictable_size(), self.cache.protected_size()
        assert available + evictable + protected + uncached == self.pools.tokens, (
            f"leak: {available=} + {evictable=} + {protected=} + {uncached=} != {self.pools.tokens}"
        )

    def _owned_slots(self) -> dict[str, np.ndarray]:
        page = self.pools.kind.page
        owned = {"the allocator": self.pools.free_slots()}
        for i, node in enumerate(self.tree.nodes()):
            if self.hbm in node.placements:
                owned[f"node {i}"] = node.placements[self.hbm]
        for i, each in enumerate(self.store.ledger.reservations):
            if each.tier is Tier.HBM:
                owned[f"{each.use} {i}"] = each.places
        for req in self.scheduler.active():
            row = self.pools.requests.req_to_token[req.kv.req_pool_idx]
            own = row[req.kv.cache_protected_len : req.kv.kv_allocated_len].numpy().astype(np.int64)
            if page > 1 and own.size:
                pages = np.unique(own // page)
                own = (pages[:, None] * page + np.arange(page)).ravel()
            owned[f"request {req.rid}"] = own
        return owned

    def _check_owners(self, owned: dict[str, np.ndarray]) -> None:
        slots = np.concatenate(list(owned.values()))
        counts = np.bincount(slots, minlength=self.pools.tokens + self.pools.kind.page)
        if counts.max(initial=0) > 1:
            twice = int(counts.argmax())
            raise AssertionError(f"slot {twice} is owned by {[who for who in owned if twice in owned[who]]}")
        nobody = np.setdiff1d(self.pools.all_slots(), slots)
        assert not nobody.size, f"slots {nobody[:8]} have no owner"

    def _check_contents(self) -> None:
        """All blocks that the tree lists as readable now equal the oracle's."""
        loading = self._loading()
        in_hbm: list[_Held] = []
        in_dram: list[_Held] = []
        for namespace, root in self.tree.roots.items():
            for node, own in node_chains(root, namespace):
                chain = np.array(own, np.uint64)
                if self.hbm in node.placements and node not in loading:
                    in_hbm.append((node, node.placements[self.hbm], chain))
                copying = self.write_down is not None and node.locks.get(self.write_down._copying)
                if self.dram_holder in node.placements and not copying:
                    in_dram.append((node, node.placements[self.dram_holder], chain))
        self._compare(in_hbm, self._compare_slots)
        self._compare(in_dram, self._compare_blocks)

    def _compare(self, held: list[_Held], compare: Callable[[object, np.ndarray, np.ndarray], None]) -> None:
        """Compare all nodes at once, and one by one to name the wrong one."""
        if not held:
            return
        try:
            compare("a node", *(np.concatenate(part) for part in list(zip(*held, strict=True))[1:]))
        except WrongKvError:
            for node, address, chain in held:
                compare(node, address, chain)
            raise

    def _loading(self) -> set[Node]:
        """Nodes whose HBM copy may not be there yet."""
        found: set[Node] = set()
        if self.tier is not None and self.tier.copies.loading:
            for node in self.tree.nodes():
                if node.locks.get(self.dram_holder) and node.locks.get(self.hbm):
                    found.add(node)
        return found

    def _compare_slots(self, what: object, slots: np.ndarray, chain: np.ndarray) -> None:
        for layer in range(self.pools.oracle.layers):
            self.pools.oracle.compare(slots, self.pools.row_hashes(chain, layer), layer, what)

    def _compare_blocks(self, what: object, blocks: np.ndarray, chain: np.ndarray) -> None:
        assert self.arena is not None
        layout = self.arena.layout
        for layer in range(layout.n_layers):
            hashes = self.pools.row_hashes(chain, layer)
            for i, plane in enumerate(layout.planes_of(layer)):
                self.pools.oracle.compare_blocks(self.arena.plane(plane)[blocks], hashes, layer, i, what)

    def _numbers(self, places: Any) -> list[int]:
        """Slots or blocks."""
        return list(map(int, places))

    def picture(self) -> list[Any]:
        """The whole tree with slots, blocks and locks, to compare ranks."""
        nodes = []
        for namespace, root in sorted(self.tree.roots.items(), key=repr):
            stack: list[Node] = list(root.children.values())
            while stack:
                node = stack.pop()
                places = {
                    holder.tier.title: at.tobytes().hex() if holder.tier is Tier.DISK else self._numbers(at)
                    for holder, at in node.placements.items()
                }
                locks = {repr(holder): count for holder, count in node.locks.items()}
                nodes.append((repr(namespace), node.key.hex(), sorted(places.items()), sorted(locks.items())))
                stack.extend(child for _, child in sorted(node.children.items()))
        return nodes


class Traffic:
    """Draws the next event; equal seeds give equal traffic.

    Prompts continue or fork earlier prompts, over a vocabulary of four, so that prefixes part in the middle
    of a block and come together again.

    Args:
        stretch: how many times longer than usual prompts are.
    """

    def __init__(self, scenario: Scenario, seed: int, stretch: int = 1) -> None:
        self._stretch = stretch
        self.random = random.Random(seed)
        self._hints = random.Random(seed + 1)
        self._repeats = random.Random(seed + 2)
        self._scenario = scenario
        self._known: list[list[int]] = [[0] * 8 * stretch, self._words(40), self._words(90)]
        self._lull = False
        self._passes = 0
        self.counts: dict[str, int] = {}

    def _words(self, count: int) -> list[int]:
        return [self.random.randrange(4) for _ in range(count * self._stretch)]

    def act(self, scheduler: SimulatedScheduler) -> None:
        """Do one thing from outside, or nothing, before a pass of the loop."""
        self._passes += 1
        if self._scenario.prefetch and self._hints.random() < self._scenario.prefetch:
            self._hint(scheduler)
        if self._scenario.repeats and self._repeats.random() < self._scenario.repeats:
            self._repeat(scheduler)
        draw = self.random.random()
        if self._lull:
            if scheduler.idle:
                self._lull = False
                if scheduler.flush():
                    self._count("flush")
        elif draw < 0.30 and len(scheduler.waiting) < 12:
            self._submit(scheduler)
        elif draw < 0.34:
            self._abort(scheduler)
        elif draw < 0.345:
            self._count("weights")
            scheduler.change_weights()
        elif draw < 0.352:
            self._count("retract all")
            scheduler.retract_all()
        elif draw < 0.357:
            self._lull = True  # no request arrives until the server is idle, and then it is flushed

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def _hint(self, scheduler: SimulatedScheduler) -> None:
        """Announce a prompt that will be sent soon, or never."""
        prefetcher = scheduler.cache.find(Prefetcher) or scheduler.cache.find(DiskHints)
        assert prefetcher is not None
        rnd = self._hints
        prefetcher.expire(self._passes)
        if rnd.random() < 0.1:
            prefetcher.cancel(f"session {rnd.randrange(4)}")
            return
        self._count("prefetch")
        salt = "tenant" if self._scenario.tenants and rnd.random() < 0.1 else None
        known = rnd.choice(self._known[-self._scenario.memory :])
        prefetcher.prefetch(
            f"session {rnd.randrange(4)}",
            encode_tokens(known),
            cache_salt=salt,
            priority=rnd.randrange(3),
            until=self._passes + rnd.randrange(1, 60),
        )

    def _repeat(self, scheduler: SimulatedScheduler) -> None:
        """Send a request again that has ended: as it was, with a word more, or with its answer."""
        rnd = self._repeats
        ended = [req for req in scheduler.finished[-20:] if req.positional_embed_overrides is None]
        if not ended or self._lull or len(scheduler.waiting) >= 12:
            return
        self._count("repeat")
        req = rnd.choice(ended)
        prompt = [*req.origin_input_ids, *(req.output_ids if rnd.random() < 0.5 else ())]
        prompt += [1] if rnd.random() < 0.5 else []
        extra_key, salt = scheduler.tenant_of(req)
        scheduler.submit(
            prompt[: CONTEXT * self._stretch - 40],
            new_tokens=rnd.choice((1, 2, 6, 20)),
            extra_key=extra_key,
            salt=salt,
        )

    def _submit(self, scheduler: SimulatedScheduler) -> None:
        self._count("submit")
        rnd = self.random
        known = rnd.choice(self._known[-self._scenario.memory :])
        prompt = known[: rnd.choice((len(known), rnd.randrange(1, len(known) + 1)))]
        prompt = (prompt + self._words(rnd.choice((0, 1, 5, 17, 40))))[: CONTEXT * self._stretch - 40]
        if len(prompt) < 2:
            prompt = prompt + self._words(2)
        extra_key, salt = None, None
        if self._scenario.tenants and rnd.random() < 0.15:
            extra_key, salt = rnd.choice((("lora", None), (None, "tenant"), ("lora", "tenant")))
        for _ in range(rnd.choice((1, 1, 1, 2, 3))):  # several ask the same at once, and compute it twice
            req = scheduler.submit(
                prompt,
                new_tokens=rnd.choice((1, 2, 6, 20, 38)),
                extra_key=extra_key,
                salt=salt,
                priority=rnd.randrange(3) if scheduler.settings.preemption else 0,
                private=rnd.random() < 0.05,
            )
        self._known.append(prompt)
        if rnd.random() < 0.5:
            # The next turn of the same conversation, with the answer that the model will have given.
            self._known.append([*prompt, *_answer(req, rnd.randrange(1, 30))])

    def _abort(self, scheduler: SimulatedScheduler) -> None:
        everyone = [*scheduler.waiting, *(req for req in scheduler.active() if not req.finished())]
        if everyone:
            self._count("abort")
            scheduler.abort(self.random.choice(everyone))


def _answer(req: Req, count: int) -> list[int]:
    return [token_at(req, len(req.origin_input_ids) + i) for i in range(count)]


def run(
    rank: Rank,
    seed: int,
    steps: int,
    *,
    after_step: Callable[[Rank, int], None] | None = None,
) -> Traffic:
    """Drive one rank through ``steps`` passes, check after each, then let everything finish and flush."""
    traffic = Traffic(rank.scenario, seed, rank.scenario.stretch)
    strip = get_serving().override(strip_thinking_cache=rank.scenario.strip_thinking)
    with envs.SGLANG_RADIX_FORCE_MISS.override(rank.scenario.force_miss), strip:
        for step in range(steps):
            traffic.act(rank.scheduler)
            rank.scheduler.step()
            rank.check()
            if after_step is not None:
                after_step(rank, step)
        finish(rank)
    return traffic


def all_of_dram(rank: Rank) -> Reservation:
    """Reserve all of DRAM for another owner, until the reservation is aborted."""
    assert rank.tier is not None
    key = encode_tokens(range(rank.tier.n_blocks * rank.tree.block_size))
    taken = rank.store.reserve(Tier.DRAM, "nobody's", key, Use.FETCH, whole=True)
    assert isinstance(taken, Reservation)
    return taken


def finish(rank: Rank) -> None:
    """Let everything end, then check that nothing is held and that a flush empties all."""
    for _ in range(5000):
        if rank.scheduler.idle:
            break
        rank.scheduler.step()
        rank.check()
    else:
        raise AssertionError(f"the scheduler does not become idle: {rank.cache!r}")
    prefetcher = rank.cache.find(Prefetcher)
    if prefetcher is not None:
        prefetcher.drop_in_flight()
    if rank.promotions is not None:
        rank.promotions.drop_in_flight()
    rank.settle()
    rank.check()
    assert rank.cache.protected_size() == 0, "a lock was left behind"
    assert not any(node.locks for node in rank.tree.nodes()), "a lock was left behind"
    assert rank.scheduler.flush()
    assert rank.cache.total_size() == 0
    assert rank.pools.allocator.available_size() == rank.pools.tokens
    assert rank.pools.requests.available_size() == rank.scenario.rows
    assert rank.arena is None or rank.arena.free_blocks == rank.arena.n_blocks
    assert rank.tree.node_count == 0
    assert not rank.tree.roots
    rank.check()


@contextmanager
def on_disk_only(scenario: Scenario, prompt: list[int], **parts: Any) -> Iterator[Rank]:
    """A rank that has computed a prompt and has it on disk and nowhere else."""
    with Rank(scenario, **parts) as rank:
        rank.serve(prompt)
        rng = random.Random(1)
        for _ in range(5):
            rank.settle()
            rank.serve([rng.randrange(4) for _ in range(160)])
        rank.settle()
        yield rank


SCENARIOS = (
    Scenario("mha, page 1", hbm_tokens=256, dram_blocks=250, memory=40),
    Scenario(
        "mla, page 16, a later pipeline stage",
        kind=PoolKind("mla", 16, layers=3, start_layer=2),
        block=16,
        hbm_tokens=480,
        dram_blocks=60,
        memory=30,
        settings=Settings(chunk=48, new_token_ratio=0.05),
    ),
    Scenario(
        "dsa, index keys by page",
        kind=PoolKind("dsa", 64, layers=3),
        block=64,
        hbm_tokens=64 * 16,
        dram_blocks=10,
        disk_blocks=400,
        memory=60,
        stretch=4,
        settings=Settings(chunk=128, new_token_ratio=0.05),
    ),
    Scenario(
        "dsa, a draft with index keys, brought ahead, overlap",
        kind=PoolKind("dsa", 64, layers=3, draft_layers=1, algorithm="EAGLE"),
        block=64,
        hbm_tokens=64 * 16,
        dram_blocks=10,
        disk_blocks=400,
        memory=60,
        stretch=4,
        prefetch=0.3,
        settings=Settings(overlap=True, chunk=128, new_token_ratio=0.05),
        make_scheduler=VerifyingScheduler,
    ),
    Scenario(
        "a draft's layers, streamed from disk",
        kind=PoolKind(draft_layers=2),
        hbm_tokens=256,
        dram_blocks=100,
        disk_blocks=1000,
        stream=True,
        threaded=True,
        memory=30,
        settings=Settings(overlap=True),
    ),
    Scenario(
        "overlap, memory runs out",
        hbm_tokens=232,
        dram_blocks=200,
        memory=30,
        settings=Settings(overlap=True, new_token_ratio=0.05, max_running=6),
    ),
    Scenario(
        "block of two pages, dfs-weight, slru",
        kind=PoolKind("mha", 4),
        block=8,
        hbm_tokens=256,
        dram_blocks=100,
        memory=30,
        policy="slru",
        settings=Settings(overlap=True, chunk=24, new_token_ratio=0.05, policy="dfs-weight"),
    ),
    Scenario(
        "preemption by priority",
        dram_blocks=100,
        memory=30,
        policy="priority",
        settings=Settings(preemption=True, max_running=3),
    ),
    Scenario(
        "retraction for higher priorities",
        hbm_tokens=256,
        dram_blocks=100,
        memory=30,
        settings=Settings(preemption=True, retract_wait=0.0, max_running=4),
    ),
    Scenario(
        "retraction with overlap, mixed chunks and a disk",
        hbm_tokens=256,
        dram_blocks=100,
        disk_blocks=1000,
        memory=30,
        threaded=True,
        settings=Settings(preemption=True, retract_wait=0.0, max_running=4, overlap=True, mixed=True),
    ),
    Scenario(
        "mixed chunks",
        hbm_tokens=256,
        dram_blocks=100,
        memory=30,
        settings=Settings(mixed=True, overlap=True, new_token_ratio=0.5),
    ),
    Scenario(
        "no chunks, short hits computed, longest prefix first",
        dram_blocks=250,
        memory=40,
        load_min_tokens=24,
        settings=Settings(chunk=None, policy="lpm"),
    ),
    Scenario("DRAM smaller than HBM", hbm_tokens=256, dram_blocks=24),
    Scenario("HBM only", hbm_tokens=232, dram_blocks=None, settings=Settings(new_token_ratio=0.05)),
    Scenario("nothing found is used", dram_blocks=100, force_miss=True),
    Scenario(
        "thinking is not kept",
        kind=PoolKind("mha", 4),
        hbm_tokens=256,
        dram_blocks=100,
        memory=30,
        settings=Settings(new_token_ratio=0.05),
        strip_thinking=True,
    ),
    Scenario("the real mover", hbm_tokens=256, dram_blocks=250, memory=40, threaded=True),
    Scenario("disk below a small DRAM", hbm_tokens=256, dram_blocks=70, disk_blocks=4000, memory=60),
    Scenario(
        "a small faulty disk, overlap, memory runs out",
        hbm_tokens=232,
        dram_blocks=60,
        disk_blocks=200,
        disk_faults=0.2,
        memory=40,
        settings=Settings(overlap=True, new_token_ratio=0.05, max_running=6),
    ),
    Scenario(
        "disk, preemption by priority, the real mover",
        hbm_tokens=256,
        dram_blocks=60,
        disk_blocks=1000,
        memory=40,
        threaded=True,
        settings=Settings(preemption=True, max_running=3),
    ),
    Scenario(
        "streaming from disk",
        hbm_tokens=256,
        dram_blocks=100,
        disk_blocks=4000,
        memory=60,
        threaded=True,
        stream=True,
    ),
    Scenario(
        "streaming from a faulty disk, overlap, mixed chunks",
        hbm_tokens=256,
        dram_blocks=70,
        disk_blocks=2000,
        disk_faults=0.03,
        memory=60,
        threaded=True,
        stream=True,
        settings=Settings(mixed=True, overlap=True, new_token_ratio=0.5),
    ),
    Scenario(
        "a disk, brought ahead, overlap, the real mover",
        hbm_tokens=256,
        dram_blocks=80,
        disk_blocks=1000,
        memory=60,
        threaded=True,
        prefetch=0.2,
        settings=Settings(overlap=True, new_token_ratio=0.05),
    ),
    Scenario(
        "layers of what does not fit, brought ahead, overlap",
        kind=PoolKind(layers=4),
        hbm_tokens=256,
        dram_blocks=250,
        memory=40,
        prefetch=0.9,
        layers=1 << 30,
        settings=Settings(overlap=True, new_token_ratio=0.05),
    ),
    Scenario(
        "layers of MLA, page 16, a disk below a small DRAM, the real mover",
        kind=PoolKind("mla", 16, layers=5, start_layer=2),
        block=16,
        hbm_tokens=640,
        dram_blocks=40,
        disk_blocks=1000,
        memory=40,
        threaded=True,
        prefetch=0.9,
        layers=1 << 30,
    ),
    Scenario("DRAM, brought ahead", hbm_tokens=256, dram_blocks=250, memory=40, prefetch=0.3),
    Scenario(
        "disk, brought ahead, overlap, memory runs out",
        hbm_tokens=232,
        dram_blocks=60,
        disk_blocks=4000,
        memory=60,
        prefetch=0.3,
        settings=Settings(overlap=True, new_token_ratio=0.05, max_running=6),
    ),
    Scenario(
        "a faulty disk, brought ahead, streaming, the real mover",
        hbm_tokens=256,
        dram_blocks=70,
        disk_blocks=2000,
        disk_faults=0.03,
        memory=60,
        threaded=True,
        stream=True,
        prefetch=0.3,
    ),
    Scenario(
        "disk or computing, whichever is faster",
        hbm_tokens=256,
        dram_blocks=100,
        disk_blocks=1000,
        weigh=True,
    ),
)


__all__ = [
    "SCENARIOS",
    "Rank",
    "Scenario",
    "Traffic",
    "WrongKvError",
    "all_of_dram",
    "finish",
    "on_disk_only",
    "run",
]

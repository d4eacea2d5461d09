"""The effect of single flags on a cache that is put together as the factory does it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from engine_movers import HandMover, until
from engine_simulation import Rank, Scenario
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from test_disk_writes import BLOCK, LAYOUT, Setup

from sglang_ext.config import KvConfig
from sglang_ext.engine.events.events import PlacementFeed
from sglang_ext.engine.movers.copies import Copies
from sglang_ext.engine.planners import Planner
from sglang_ext.engine.prefetch.advice import Advice
from sglang_ext.engine.prefetch.hbm_prefetch import Prefetcher
from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.opening import open_disk
from sglang_ext.engine.tiers.promotion import Wanted
from sglang_ext.engine.tiers.write_down import WriteDown
from sglang_ext.engine.weights import Weights
from sglang_ext.errors import ConfigError
from sglang_ext.keys import Namespace, encode_tokens
from sglang_ext.mempool.ledger import Ledger
from sglang_ext.patches.adapter.build_disk import RankFacts, disk_below, names_on
from sglang_ext.protocol.agent import Advise
from sglang_ext.testing.blocks import LAYOUT as BLOCK_LAYOUT
from sglang_ext.testing.blocks import NAMESPACE, get_all, prefix_keys, put_all
from sglang_ext.testing.tiers import GatedTier, MemoryTier
from sglang_ext.tiered_store.disk.tier import DiskTier
from sglang_ext.tiered_store.loading.layer_cache import LayerCache
from sglang_ext.tiered_store.tier import BlockTier
from sglang_ext.tiered_store.wrapped import WrappedTier
from sglang_ext.tiers import Tier

pytestmark = pytest.mark.usefixtures("sglang_config")

FACTS = RankFacts("a", 1)


# -- --kv-disk-io lag -------------------------------------------------------------------------------


class Lagging(Setup):
    """Over a disk that stands still at a gate, with room for four blocks to wait for it."""

    def __init__(self, lag: str) -> None:
        super().__init__()
        self.gated = GatedTier(MemoryTier(LAYOUT, 100))
        self.ranks = Ranks()
        self.writes = disk_below(
            self.gated,
            KvConfig(dram_size=1, disk_path="/below", block_size=BLOCK, disk_lag=lag),
            FACTS,
            Namespace("m", "w", "d", "g"),
            self.tree,
            self.dram,
            self.arena,
            self.ranks,
            Weights("w"),
        )
        self.mover = HandMover(None, LAYOUT.n_layers)
        self.tier = DramTier(
            Ledger(self.tree),
            self.hbm,
            self.dram,
            self.arena,
            Copies(self.mover, self.ranks),
            below=(self.writes,),
        )
        self.write_down = WriteDown(self.hbm, self.tier)
        self.gated.close_gate("put_layer")
        self.insert([1] * 16)
        self.to_dram()
        self.gated.wait_until_stopped("put_layer")
        self.insert([2] * 16)

    def close(self) -> None:
        self.gated.open_gate("put_layer")
        self.writes.settle()
        self.tier.close()
        self.arena.close()


def test_new_kv_is_skipped_while_the_disk_cannot_keep_up() -> None:
    with closing(Lagging("skip")) as lagging:
        lagging.to_dram()
        assert not lagging.gated.stats().blocks
        lagging.gated.open_gate("put_layer")
        lagging.writes.settle()
        counters = lagging.writes.counters
        assert (counters.written, counters.write_skipped, counters.write_failed) == (4, 4, 0)


def test_or_the_server_waits_until_the_disk_has_caught_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Lagging("wait")) as lagging:
        came = threading.Event()
        submit = lagging.writes._writer.submit

        def noted(*args: object, **kwargs: object) -> object:
            came.set()
            return submit(*args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(lagging.writes._writer, "submit", noted)
        server = threading.Thread(target=lagging.to_dram, name="scheduler")
        server.start()
        assert came.wait(10)
        lagging.gated.open_gate("put_layer")
        server.join(10)
        assert not server.is_alive()
        lagging.writes.settle()
        counters = lagging.writes.counters
        assert (counters.written, counters.write_skipped, counters.write_failed) == (8, 0, 0)


def test_a_disk_that_stands_still_holds_the_server_up_for_so_long_only() -> None:
    """Blocks without room in time count as skipped, and no error reaches the scheduler's loop."""
    with closing(Lagging("wait")) as lagging:
        assert lagging.writes._patience == 5.0
        lagging.writes._patience = 0.0
        lagging.to_dram()
        lagging.gated.open_gate("put_layer")
        lagging.writes.settle()
        counters = lagging.writes.counters
        assert (counters.written, counters.write_skipped, counters.write_failed) == (4, 4, 0)


# -- --kv-durability --------------------------------------------------------------------------------

PROMPT = [n % 4 for n in range(41)]
BLOCKS = 10
WITH_DISK = Scenario("durability", hbm_tokens=240, dram_blocks=60, disk_blocks=400)


@pytest.mark.parametrize(
    ("durability", "in_dram", "on_disk"),
    [("off", 0, 0), ("dram", BLOCKS, 0), ("disk", BLOCKS, BLOCKS), ("acked:2", BLOCKS, BLOCKS)],
)
def test_new_kv_is_written_so_far_and_no_further(durability: str, in_dram: int, on_disk: int) -> None:
    disks: list[BlockTier] = []
    with closing(Rank(replace(WITH_DISK, durability=durability), disk_class=kept(disks))) as rank:
        rank.serve(PROMPT)
        rank.settle()
        assert rank.tree.blocks_of(rank.dram_holder) == in_dram
        assert disks[0].stats().blocks == on_disk


@pytest.mark.parametrize("durability", ["off", "dram"])
def test_what_is_on_disk_is_used_however_little_is_written(durability: str) -> None:
    disks: list[BlockTier] = []
    with closing(Rank(WITH_DISK, disk_class=kept(disks))) as first:
        first.serve(PROMPT)
        first.settle()
        with closing(Rank(replace(WITH_DISK, durability=durability), disk_class=kept(disks))) as rank:
            rank.serve([*PROMPT, 1])
            assert rank.scheduler.disk_tokens == BLOCKS * WITH_DISK.block
            assert disks[0].stats().blocks == BLOCKS


def kept(disks: list[BlockTier]) -> Callable[[BlockTier], BlockTier]:
    """All ranks over the first one's disk, as over a directory after a restart."""

    def keep(tier: BlockTier) -> BlockTier:
        disks.append(disks[0] if disks else LeftOpen(tier))
        return disks[-1]

    return keep


class LeftOpen(WrappedTier):
    """A disk that the next rank opens again."""

    def close(self) -> None:
        """Nothing is lost."""


# -- --kv-layer-cache-size, its layers ---------------------------------------------------------------


def test_the_lowest_layers_of_what_is_on_disk_are_kept_in_memory(tmp_path: Path) -> None:
    layers, blocks = 2, 8
    size = blocks * sum(BLOCK_LAYOUT.layer_bytes(layer) for layer in range(layers))
    config = KvConfig(
        dram_size=1 << 20,
        disk_path=str(tmp_path),
        disk_size=32 << 20,
        layer_cache_size=size,
        layer_cache_layers=layers,
    )
    with closing(open_disk(config, "a", "tp0of1", BLOCK_LAYOUT)) as disk:
        assert isinstance(disk, LayerCache)
        assert isinstance(disk.inner, DiskTier)
        assert names_on(disk) == {Tier.DISK: disk.inner}
        put_all(disk, NAMESPACE, prefix_keys(0, 5))
        assert get_all(disk, NAMESPACE, prefix_keys(0, 5)) == 5
        assert disk.stats().extra["layer_cache_hits"] == 5 * layers
        put_all(disk, NAMESPACE, prefix_keys(1, blocks))
        disk.check()
    with closing(open_disk(replace(config, layer_cache_size=0), "a", "tp0of1", BLOCK_LAYOUT)) as disk:
        assert isinstance(disk, DiskTier)
        assert get_all(disk, NAMESPACE, prefix_keys(0, 5)) == 5


@pytest.mark.parametrize(
    ("wrong", "flag"),
    [
        ({"layer_cache_size": 1}, "--kv-layer-cache-size"),
        ({"layer_cache_size": 1 << 20, "layer_cache_layers": 1000}, "--kv-layer-cache-size layers"),
    ],
)
def test_a_layer_cache_that_cannot_be_leaves_the_directory_free(
    wrong: dict[str, int], flag: str, tmp_path: Path
) -> None:
    config = KvConfig(dram_size=1 << 20, disk_path=str(tmp_path), disk_size=32 << 20)
    with pytest.raises(ConfigError, match=flag):
        open_disk(replace(config, **wrong), "a", "tp0of1", BLOCK_LAYOUT)
    open_disk(config, "a", "tp0of1", BLOCK_LAYOUT).close()


# -- --schedule-low-priority-values-first -----------------------------------------------------------


@pytest.mark.parametrize("sign", [1, -1])
def test_which_priorities_go_first_holds_for_disk_and_hints_too(sign: int) -> None:
    with closing(Rank(WITH_DISK, priority_sign=sign, takes_hints=True)) as rank:
        cache = rank.cache
        prefetcher = cache.find(Prefetcher)
        assert prefetcher is not None
        advice = cache.find(Advice)
        assert advice is not None
        rank.serve(PROMPT)
        rank.settle()
        retention = prefetcher.retention
        advice.handle_command(Advise("h", encode_tokens(PROMPT[:40]), ttl_s=60.0, priority=7), 0.0)
        assert [hint.priority for hint in retention._hints.values()] == [7 * sign]
        advice.drop_in_flight()
        assert rank.promotions is not None
        wanted: list[int] = []
        begin = rank.promotions.begin

        def noted(handle: Hashable, asked: Wanted) -> None:
            if not asked.ahead:
                wanted.append(asked.priority)
            begin(handle, asked)

        rank.promotions.begin = noted  # type: ignore[method-assign]
        rank.serve([3, 3, 3, 3, 3, 3, 3, 3, 3], priority=5)
        assert wanted == [5 * sign]


# -- reasons to keep an idle scheduler awake --------------------------------------------------------


class _Planner(Planner):
    def __init__(self, *, busy: bool) -> None:
        self._busy = busy

    @property
    def busy(self) -> bool:
        return self._busy


def test_an_idle_scheduler_stays_awake_while_kv_is_brought_or_a_snapshot_sent() -> None:
    with closing(Rank(WITH_DISK, routed=True)) as rank:
        cache = rank.cache
        rank.serve(PROMPT)
        rank.settle()
        assert not cache.keeps_awake
        cache.evict(EvictParams(num_tokens=rank.pools.tokens))
        prefetcher = cache.find(Prefetcher)
        assert prefetcher is not None
        prefetcher.prefetch("soon", encode_tokens(PROMPT[:40]))
        assert cache.keeps_awake
        for _ in range(50):
            rank.scheduler.step()
            rank.settle()
            if not cache.keeps_awake:
                break
        assert not cache.keeps_awake
        assert not prefetcher.busy
        quiet = cache.planners
        for busy in (True, False):
            cache.planners = (*quiet, _Planner(busy=busy))
            assert cache.keeps_awake is busy
        cache.planners = quiet
        feed = cache.find(PlacementFeed)
        assert feed is not None
        feed.snapshot(1)
        assert cache.keeps_awake
        until(lambda: feed.publish(idle=True) or feed.queue.take() or not cache.keeps_awake, "the snapshot")
        assert not cache.keeps_awake

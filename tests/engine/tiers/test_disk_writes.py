"""From DRAM to disk and what eviction makes of it, with a writer that the test moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_movers import HandMover

from sglang_ext.config import KvConfig
from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.tiers.block_names import BlockNames, unpack_names
from sglang_ext.engine.tiers.disk_writes import DiskWrites
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.hbm_tier import HbmTier
from sglang_ext.engine.tiers.opening import open_disk
from sglang_ext.engine.tiers.slots import HostSlots
from sglang_ext.geometry import BlockLayout
from sglang_ext.keys import Namespace, block_keys, encode_tokens
from sglang_ext.mempool.store import Store
from sglang_ext.radix_global import Evicted, Holder, Node, RadixTree
from sglang_ext.testing.tiers import MemoryTier
from sglang_ext.tiered_store.disk.state import IoMode
from sglang_ext.tiered_store.disk.tier import DiskTier
from sglang_ext.tiered_store.dram.arena import DramArena
from sglang_ext.tiered_store.loading.write_behind import LagPolicy, WriteBehind
from sglang_ext.tiered_store.tier import BlockMemory
from sglang_ext.tiers import Tier, all_tiers

BLOCK = 4
ALIGNED = BlockLayout(16, ((128, 128), (256,)))
"""Blocks that O_DIRECT can read."""
LAYOUT = BlockLayout.uniform(n_layers=2, planes_per_layer=2, row_bytes=8, block_tokens=BLOCK)
PLAIN = (0, None, None)


class Setup:
    """HBM without an end, DRAM of 8 blocks, a disk of ``disk_blocks``, a backlog of ``backlog`` blocks."""

    def __init__(self, disk_blocks: int = 100, backlog: int = 100) -> None:
        self.tree = RadixTree(BLOCK)
        self.hbm, self.dram, self.disk = (Holder.of("writes", 0, tier) for tier in all_tiers())
        self.arena = DramArena(LAYOUT, 8 * (LAYOUT.block_bytes + 8) + 8, shared=False, pin=False)
        self.below = MemoryTier(LAYOUT, disk_blocks)
        self.names = BlockNames(Namespace("m", "w", "d", "g"), BLOCK, self.disk, "start")
        self.writer = WriteBehind(
            self.below, backlog_bytes=backlog * LAYOUT.block_bytes, lag=LagPolicy.SKIP, threaded=False
        )
        memory = BlockMemory.of_arena(self.arena)
        self.ranks = Ranks()
        self.writes = DiskWrites(self.tree, self.dram, self.disk, self.names, self.writer, memory, self.ranks)
        self.mover = HandMover(None, LAYOUT.n_layers)
        self.store = Store(self.tree)
        self.tier = DramTier(
            self.store, self.hbm, self.dram, self.arena, self.mover, self.ranks, below=self.writes
        )
        HbmTier(self.store, self.hbm, None, HostSlots(), self.tier)
        self._next_slot = 0

    def insert(self, tokens: list[int]) -> Node:
        slots = np.arange(self._next_slot, self._next_slot + len(tokens))
        self._next_slot += len(tokens)
        node = self.tree.insert(PLAIN, encode_tokens(tokens), self.hbm, slots).node
        self.tier.write_through(node)
        return node

    def to_dram(self) -> None:
        self.tier.settle()

    def to_disk(self) -> None:
        while self.writer.step():
            pass
        self.ranks.each_pass()

    def evict_hbm(self, blocks: int, only: Callable[[Node], bool] | None = None) -> list[Evicted]:
        gone = self.tree.evict(self.hbm, blocks, only=only)
        self.store.delete(Tier.HBM, gone)
        return gone

    def close(self) -> None:
        self.to_disk()
        self.tier.close()
        self.arena.close()


@pytest.fixture
def setup() -> Iterator[Setup]:
    setup = Setup()
    yield setup
    setup.close()


def test_a_block_stays_locked_in_dram_until_the_disk_has_it(setup: Setup) -> None:
    node = setup.insert(list(range(12)))
    assert not node.locks.get(setup.disk)
    setup.to_dram()
    assert setup.tree.locked_blocks_of(setup.dram) == 3
    assert setup.tree.blocks_of(setup.disk) == 0
    setup.to_disk()
    assert setup.tree.locked_blocks_of(setup.dram) == 0
    keys = block_keys(setup.names.digest(PLAIN), encode_tokens(list(range(12))), BLOCK)
    assert unpack_names(node.placements[setup.disk]) == keys
    assert setup.below.match(setup.names.digest(PLAIN), keys) == 3
    assert setup.writes.counters.written == 3
    assert not any(part.locks for part in setup.tree.nodes())


def test_a_prompt_that_was_split_meanwhile_is_durable_in_all_its_parts(setup: Setup) -> None:
    node = setup.insert(list(range(16)))
    setup.tree.split(node, 1)
    setup.to_dram()
    setup.tree.split(node, 2)
    setup.to_disk()
    assert setup.tree.blocks_of(setup.disk) == 4
    assert not any(part.locks for part in setup.tree.nodes())
    setup.tree.check()


def test_dram_gives_up_what_is_on_disk_before_what_is_not(setup: Setup) -> None:
    durable = setup.insert([1] * 16)
    setup.to_dram()
    setup.to_disk()
    older = setup.insert([2] * 12)
    setup.to_dram()
    setup.evict_hbm(7)
    setup.insert([3] * 12)
    assert setup.dram not in durable.placements
    assert setup.dram in older.placements
    assert setup.tier.counters.evicted == 2  # as many as were needed, the end of the prompt first
    setup.tree.check()


def test_what_leaves_memory_leaves_the_tree_and_stays_on_disk(setup: Setup) -> None:
    setup.insert([1] * 16)
    setup.to_dram()
    setup.to_disk()
    setup.evict_hbm(4)
    assert setup.tree.node_count == 1
    setup.insert([2] * 32)
    assert setup.tree.blocks_of(setup.disk) == 0
    assert setup.below.stats().blocks == 4
    setup.tree.check()


def test_what_was_skipped_is_written_with_what_continues_it() -> None:
    setup = Setup(backlog=2)
    setup.insert([1] * 8)
    setup.insert([2] * 8)
    setup.to_dram()
    setup.to_disk()
    assert setup.writes.counters.write_skipped == setup.writes.counters.written == 2
    skipped = next(node for node in setup.tree.nodes() if setup.disk not in node.placements)
    tokens = [skipped.key[0]] * 8 + [7] * 4
    setup.insert(tokens)
    setup.to_dram()
    setup.to_disk()
    assert setup.tree.blocks_of(setup.disk) == 5
    setup.tree.check()
    setup.close()


def test_hbm_does_not_give_up_what_is_being_copied_to_dram_though_the_disk_has_it(setup: Setup) -> None:
    """It would be overwritten under the copy, and DRAM would have garbage."""
    node = setup.insert([1] * 8)
    setup.to_dram()
    setup.to_disk()
    setup.store.delete(Tier.DRAM, setup.tree.evict(setup.dram, 2))
    assert setup.tier.has_copy(node)  # on disk
    setup.tier.write_through(node)
    assert not setup.tier.has_copy(node)
    assert setup.evict_hbm(2, only=setup.tier.has_copy) == []
    setup.to_dram()
    assert setup.tier.has_copy(node)


def test_a_disk_that_refuses_costs_nothing_but_durability() -> None:
    setup = Setup()
    setup.below.close()
    node = setup.insert([1] * 8)
    setup.to_dram()
    setup.to_disk()
    assert setup.writes.counters.write_failed == 2
    assert setup.disk not in node.placements
    assert setup.dram in node.placements
    assert not any(part.locks for part in setup.tree.nodes())
    setup.close()


@pytest.mark.parametrize("asked", ["buffered", "direct"])
def test_the_flag_says_how_the_disk_is_read(asked: str, tmp_path: Path) -> None:
    config = KvConfig(dram_size=1 << 20, disk_path=str(tmp_path), disk_size=32 << 20, disk_io=asked)
    disk = open_disk(config, "a", "tp0of1", ALIGNED)
    assert isinstance(disk, DiskTier)
    assert disk.config.io is IoMode(asked)
    disk.close()

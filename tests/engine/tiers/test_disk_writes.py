"""Writes from DRAM to disk, and their fate under eviction, with a writer that the test moves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from engine_movers import HandMover

from sglang_ext.config import KvConfig
from sglang_ext.engine.movers.copies import Copies
from sglang_ext.engine.movers.slots import HostSlots
from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.tiers.block_names import BlockNames, unpack_names
from sglang_ext.engine.tiers.disk_writes import DiskWrites
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.hbm_tier import HbmTier
from sglang_ext.engine.tiers.opening import open_disk
from sglang_ext.engine.tiers.write_down import WriteDown
from sglang_ext.geometry import BlockLayout
from sglang_ext.keys import Namespace, block_keys, encode_tokens
from sglang_ext.mempool.store import Store
from sglang_ext.radix_global import Evicted, Holder, Node, RadixTree
from sglang_ext.testing.tiers import MemoryTier, WrappedTier
from sglang_ext.tiered_store.disk.state import IoMode
from sglang_ext.tiered_store.disk.tier import DiskTier
from sglang_ext.tiered_store.dram.arena import DramArena
from sglang_ext.tiered_store.loading.write_behind import LagPolicy, WriteBehind
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier, Outcome, Put
from sglang_ext.tiers import Tier, all_tiers

BLOCK = 4
ALIGNED = BlockLayout(16, ((128, 128), (256,)))
"""Blocks that O_DIRECT can read."""
LAYOUT = BlockLayout.uniform(n_layers=2, planes_per_layer=2, row_bytes=8, block_tokens=BLOCK)
PLAIN = (0, None, None)


class Ordered(WrappedTier):
    """Fails where a block is written before the block that it continues."""

    def __init__(self, inner: BlockTier) -> None:
        super().__init__(inner)
        self.parents: dict[bytes, bytes] = {}
        """Name of each block's parent, where it has one."""
        self.order: list[bytes] = []
        """Names, in the order in which they were written."""

    def prepare_put(self, namespace: bytes, keys: Sequence[bytes]) -> Put | Outcome:
        for key in keys:
            assert self.parents.get(key, key) in {*self.order, key}, "a block before its parent"
            self.order.append(key)
        return super().prepare_put(namespace, keys)


class Setup:
    """HBM without an end, DRAM of ``dram_blocks``, a disk of ``disk_blocks``, a backlog of ``backlog``,
    all in blocks, and a writer that takes ``group_bytes`` at once."""

    def __init__(
        self, disk_blocks: int = 100, backlog: int = 100, dram_blocks: int = 8, group_bytes: int = 64 << 20
    ) -> None:
        self.tree = RadixTree(BLOCK)
        self.hbm, self.dram, self.disk = (Holder.of("writes", 0, tier) for tier in all_tiers())
        self.arena = DramArena(LAYOUT, dram_blocks * (LAYOUT.block_bytes + 8) + 8, shared=False, pin=False)
        self.below = Ordered(MemoryTier(LAYOUT, disk_blocks))
        self.names = BlockNames(Namespace("m", "w", "d", "g"), BLOCK, self.disk, "start")
        self.writer = WriteBehind(
            self.below,
            backlog_bytes=backlog * LAYOUT.block_bytes,
            lag=LagPolicy.SKIP,
            group_bytes=group_bytes,
            threaded=False,
        )
        memory = BlockMemory.of_arena(self.arena)
        self.ranks = Ranks()
        self.writes = DiskWrites(self.tree, self.dram, self.disk, self.names, self.writer, memory, self.ranks)
        self.mover = HandMover(None, LAYOUT.n_layers)
        self.store = Store(self.tree)
        self.tier = DramTier(
            self.store.ledger,
            self.hbm,
            self.dram,
            self.arena,
            Copies(self.mover, self.ranks),
            below=(self.writes,),
        )
        self.write_down = WriteDown(self.hbm, self.tier)
        self.write_down.serve(self.store)
        HbmTier(self.store.ledger, self.hbm, None, HostSlots(), self.write_down)
        self._next_slot = 0

    def insert(self, tokens: list[int], namespace: tuple[int, str | None, str | None] = PLAIN) -> Node:
        slots = np.arange(self._next_slot, self._next_slot + len(tokens))
        self._next_slot += len(tokens)
        keys = block_keys(self.names.digest(namespace), encode_tokens(tokens), BLOCK)
        self.below.parents.update(zip(keys[1:], keys, strict=False))
        node = self.tree.insert(namespace, encode_tokens(tokens), self.hbm, slots).node
        self.write_down.to_dram(node)
        return node

    def to_dram(self) -> None:
        self.tier.copies.settle()

    def to_disk(self) -> None:
        while self.writer.step():
            pass
        self.ranks.each_pass()

    def evict_hbm(self, blocks: int, only: Callable[[Node], bool] | None = None) -> list[Evicted]:
        gone = self.tree.evict(self.hbm, blocks, only=only)
        self.store.ledger.delete(Tier.HBM, gone)
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
    assert setup.tier.evicted == 2  # as many as were needed, the end of the prompt first
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
    setup.store.ledger.delete(Tier.DRAM, setup.tree.evict(setup.dram, 2))
    assert setup.write_down.has_copy(node)  # on disk
    setup.write_down.to_dram(node)
    assert not setup.write_down.has_copy(node)
    assert setup.evict_hbm(2, only=setup.write_down.has_copy) == []
    setup.to_dram()
    assert setup.write_down.has_copy(node)


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


A, B = (0, "own", "a"), (0, None, "b")


def on_disk(setup: Setup, node: Node) -> bool:
    return setup.disk in node.placements


def test_tenants_take_turns() -> None:
    """B's prompt is submitted behind six of A's, is written second, and is noted at once."""
    setup = Setup(dram_blocks=40, group_bytes=LAYOUT.block_bytes)
    of_a = [setup.insert([number] * 8, (0, f"key {number}", "a")) for number in range(6)]
    setup.to_dram()
    of_b = setup.insert([9] * 8, B)
    setup.to_dram()
    for _ in range(2):
        setup.writer.step()
    setup.ranks.each_pass()
    assert on_disk(setup, of_b)
    assert [on_disk(setup, node) for node in of_a] == [True] + [False] * 5
    assert setup.tree.locked_blocks_of(setup.dram) == 10, "of A, what is still being written"
    setup.close()
    assert setup.writes.counters.written == 14


def test_more_writes_than_are_noted_at_once_hold_up_no_other_tenant() -> None:
    setup = Setup(dram_blocks=100, group_bytes=LAYOUT.block_bytes)
    for number in range(80):
        setup.insert([number] * 4, A)
    of_b = setup.insert([90] * 4, B)
    setup.to_dram()
    for _ in range(2):
        setup.writer.step()
    setup.ranks.each_pass()
    assert on_disk(setup, of_b)
    setup.close()


def test_a_prompts_beginning_is_written_before_what_continues_it() -> None:
    """`Ordered` looks; B's prompts come between."""
    setup = Setup(dram_blocks=60, group_bytes=LAYOUT.block_bytes)
    for blocks in range(1, 9):
        for namespace in (A, B, (0, None, "a")):
            setup.insert([3] * 4 * blocks, namespace)
            setup.to_dram()
    setup.to_disk()
    assert setup.writes.counters.written == 24
    assert setup.tree.blocks_of(setup.disk) == 24
    setup.close()


def test_the_tenant_with_the_most_queued_gives_way() -> None:
    setup = Setup(backlog=8, dram_blocks=40)
    of_a = [setup.insert([number] * 8, A) for number in range(4)]
    setup.to_dram()
    of_b = setup.insert([9] * 8, B)
    setup.to_dram()
    newest = setup.insert([3] * 8 + [5] * 4, A)  # continues A's prompt that has given way
    setup.to_dram()
    setup.to_disk()
    assert on_disk(setup, of_b)
    assert [on_disk(setup, node) for node in of_a] == [True, True, True, False]
    assert not on_disk(setup, newest)
    assert setup.writes.counters.write_skipped == 3
    assert not any(part.locks for part in setup.tree.nodes())
    # All of it is written together with its continuation.
    last = setup.insert([3] * 8 + [5] * 4 + [6] * 4, A)
    setup.to_dram()
    setup.to_disk()
    assert on_disk(setup, last)
    assert on_disk(setup, of_a[3])
    assert on_disk(setup, newest)
    setup.tree.check()
    setup.close()


def test_what_continues_a_refused_write_is_refused_while_that_is_pending() -> None:
    """The writer has room again, but the beginning is not there: `Ordered` would fail."""
    setup = Setup(backlog=4, dram_blocks=40, group_bytes=2 * LAYOUT.block_bytes)
    for number in range(2):
        setup.insert([number] * 8, A)
        setup.to_dram()
    setup.insert([9] * 8, B)  # in the place of A's second prompt
    setup.to_dram()
    setup.writer.step()
    setup.insert([1] * 8 + [5] * 4, A)
    setup.to_dram()
    while setup.writer.step():
        pass
    setup.ranks.each_pass()
    assert setup.writes.counters.write_skipped == 3
    last = setup.insert([1] * 8 + [5] * 4 + [6] * 4, A)
    setup.to_dram()
    setup.to_disk()
    assert on_disk(setup, last)
    setup.close()


@pytest.mark.parametrize("seed", range(20))
def test_random_tenants_against_a_dict(seed: int) -> None:
    """Prompts of three tenants that continue each other, over a writer that is behind: every block that the
    tree has on disk is there with all blocks before it, and a block that is written again is complete."""
    rng = random.Random(seed)
    setup = Setup(10_000, rng.choice((4, 9, 30)), dram_blocks=4000, group_bytes=3 * LAYOUT.block_bytes)
    prompts: dict[tuple[tuple[int, str | None, str | None], int], list[int]] = {}
    for _ in range(120):
        namespace = rng.choice((A, A, A, B, (0, None, "c")))
        tokens = prompts.setdefault((namespace, rng.randrange(4)), [rng.randrange(3) for _ in range(BLOCK)])
        tokens += [rng.randrange(2) for _ in range(BLOCK * rng.randrange(3))]
        setup.insert(tokens, namespace)
        setup.to_dram()
        for _ in range(rng.choice((0, 0, 1, 2))):
            setup.writer.step()
        setup.ranks.each_pass()
        setup.writer.check()
        setup.tree.check()
        assert_placed_with_parents(setup)
    setup.to_disk()
    assert not any(part.locks for part in setup.tree.nodes())
    for (namespace, _), tokens in prompts.items():
        tokens += [7] * BLOCK
        setup.insert(tokens, namespace)
        setup.to_dram()
        setup.to_disk()
        keys = block_keys(setup.names.digest(namespace), encode_tokens(tokens), BLOCK)
        wanted = len(keys) if len(keys) <= setup.writer.backlog_bytes // LAYOUT.block_bytes else 0
        assert setup.below.match(setup.names.digest(namespace), keys) >= wanted
    setup.close()


def assert_placed_with_parents(setup: Setup) -> None:
    for node in setup.tree.nodes():
        if on_disk(setup, node):
            assert set(unpack_names(node.placements[setup.disk])) <= set(setup.below.order)
            assert node.parent is not None
            assert node.parent.is_root or on_disk(setup, node.parent)


@pytest.mark.parametrize("asked", ["buffered", "direct"])
def test_the_flag_says_how_the_disk_is_read(asked: str, tmp_path: Path) -> None:
    config = KvConfig(dram_size=1 << 20, disk_path=str(tmp_path), disk_size=32 << 20, disk_io=asked)
    disk = open_disk(config, "a", "tp0of1", ALIGNED)
    assert isinstance(disk, DiskTier)
    assert disk.config.io is IoMode(asked)
    disk.close()

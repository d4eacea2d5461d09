"""The DRAM tier over a tree and a real arena, with a mover that the test moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from engine_movers import HandMover

from sglang_ext.engine.movers.copies import Copies
from sglang_ext.engine.ranks import Least, Ranks
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.write_down import WriteDown
from sglang_ext.geometry import BlockLayout
from sglang_ext.keys import encode_tokens
from sglang_ext.mempool.ledger import Ledger
from sglang_ext.radix_global import Holder, Node, RadixTree
from sglang_ext.tiered_store.dram.arena import DramArena
from sglang_ext.tiers import Tier

BLOCK = 4
LAYOUT = BlockLayout.uniform(n_layers=2, planes_per_layer=2, row_bytes=8, block_tokens=BLOCK)


class Recorder(HandMover):
    """Records the submitted operations."""

    def __init__(self) -> None:
        super().__init__(None, LAYOUT.n_layers)
        self.written: list[tuple[list[int], list[int]]] = []
        self.loaded: list[tuple[list[int], list[int]]] = []

    def write(self, slots: Any, blocks: Any) -> int:
        assert len(slots) == BLOCK * len(blocks)
        self.written.append((list(slots), list(blocks)))
        return super().write(slots, blocks)

    def load(self, slots: Any, blocks: Any, *how: Any, **more: Any) -> int:
        assert len(slots) == BLOCK * len(blocks)
        self.loaded.append((list(slots), list(blocks)))
        return super().load(slots, blocks, *how, **more)


class Setup:
    """A tree, a tier of ``blocks`` blocks and HBM without an end."""

    def __init__(self, blocks: int, least: Least | None = None) -> None:
        self.tree = RadixTree(BLOCK)
        self.hbm = Holder.of("tier", 0, Tier.HBM)
        self.dram = Holder.of("tier", 0, Tier.DRAM)
        self.arena = DramArena(LAYOUT, blocks * (LAYOUT.block_bytes + 8) + 8, shared=False, pin=False)
        self.mover = Recorder()
        self.ranks = Ranks(least)
        self.tier = DramTier(
            Ledger(self.tree), self.hbm, self.dram, self.arena, Copies(self.mover, self.ranks)
        )
        self.write_down = WriteDown(self.hbm, self.tier)
        self._next_slot = 0

    def insert(self, tokens: list[int]) -> Node:
        """A prompt arrives in HBM and is written through."""
        slots = np.arange(self._next_slot, self._next_slot + len(tokens))
        self._next_slot += len(tokens)
        node = self.tree.insert(None, encode_tokens(tokens), self.hbm, slots).node
        self.write_down.to_dram(node)
        return node

    def counts(self) -> tuple[object, ...]:
        return self.tier.copies.counters, self.tier.evicted, self.write_down.skipped

    def evict_hbm(self, blocks: int) -> int:
        gone = self.tree.evict(self.hbm, blocks, only=self.write_down.has_copy)
        return sum(evicted.blocks for evicted in gone)

    def path(self, tokens: list[int]) -> list[Node]:
        return self.tree.match(None, encode_tokens(tokens)).path

    def in_dram(self, tokens: list[int]) -> int:
        """Leading blocks of a prompt that DRAM has."""
        return self.tree.holders(None, encode_tokens(tokens)).get(self.dram, 0) // BLOCK

    def load(self, tokens: list[int]) -> list[Node]:
        nodes = [node for node in self.path(tokens) if self.hbm not in node.placements]
        count = sum(node.blocks for node in nodes) * BLOCK
        slots = np.arange(self._next_slot, self._next_slot + count)
        self._next_slot += count
        self.tier.load(nodes, slots)
        return nodes

    def check(self) -> None:
        self.tree.check()
        self.tier.check()
        self.tier.ledger.check()

    def picture(self) -> list[Any]:
        return sorted(
            (
                node.key,
                sorted((holder.tier, list(map(int, at))) for holder, at in node.placements.items()),
                sorted((holder.tier, count) for holder, count in node.locks.items()),
            )
            for node in self.tree.nodes()
        )


@pytest.fixture
def setup() -> Iterator[Setup]:
    setup = Setup(8)
    yield setup
    setup.check()
    setup.arena.close()


def prompt(letter: int, blocks: int) -> list[int]:
    return [letter] * BLOCK * blocks


def test_a_prompt_is_written_once_from_its_slots(setup: Setup) -> None:
    setup.insert(prompt(1, 3))
    assert setup.mover.written == [(list(range(12)), [0, 1, 2])]
    assert setup.tier.copies.writing
    setup.insert(prompt(1, 3))
    setup.insert(prompt(1, 2))
    assert len(setup.mover.written) == 1
    setup.mover.settle()
    setup.ranks.each_pass()
    assert not setup.tier.copies.writing
    assert setup.tier.copies.counters.written == 3
    assert setup.tier.used_blocks == 3


def test_what_continues_a_prompt_is_written_alone_and_after_it(setup: Setup) -> None:
    setup.insert(prompt(1, 2))
    setup.insert(prompt(1, 3))
    setup.insert(prompt(1, 1) + prompt(2, 1))
    blocks = [written for _, written in setup.mover.written]
    assert blocks == [[0, 1], [2], [3]]
    assert setup.mover.written[1][0] == list(range(16, 20))


def test_a_prefix_that_was_skipped_is_written_with_its_continuation(setup: Setup) -> None:
    """Two nodes without a copy: one copy has both, the upper one first, so DRAM never has a hole."""
    tree, hbm = setup.tree, setup.hbm
    tree.insert(None, encode_tokens(prompt(1, 1)), hbm, np.arange(100, 104))
    node = tree.insert(None, encode_tokens(prompt(1, 3)), hbm, np.arange(100, 112)).node
    setup.write_down.to_dram(node)
    assert setup.mover.written == [(list(range(100, 112)), [0, 1, 2])]


def test_only_the_beginning_is_written_when_not_all_of_it_fits(setup: Setup) -> None:
    setup.insert(prompt(1, 12))
    assert setup.in_dram(prompt(1, 12)) == 8
    assert setup.write_down.skipped == 4
    assert setup.mover.written == [(list(range(32)), list(range(8)))]
    assert [node.blocks for node in setup.path(prompt(1, 12))] == [8, 4]


def test_nothing_is_written_when_everything_is_locked(setup: Setup) -> None:
    setup.insert(prompt(1, 8))
    setup.insert(prompt(2, 3))
    assert setup.in_dram(prompt(2, 3)) == 0
    assert setup.write_down.skipped == 3
    setup.mover.settle()
    setup.ranks.each_pass()
    setup.insert(prompt(2, 3))
    assert setup.in_dram(prompt(2, 3)) == 3
    assert setup.tier.evicted == 3


def test_the_oldest_ends_of_prompts_make_room(setup: Setup) -> None:
    for letter in (1, 2):
        setup.insert(prompt(letter, 4))
    setup.tier.copies.settle()
    setup.insert(prompt(3, 2))
    assert [setup.in_dram(prompt(letter, 4)) for letter in (1, 2, 3)] == [2, 4, 2]
    assert setup.tier.evicted == 2
    setup.tier.copies.settle()
    setup.path(prompt(1, 2))  # used again
    setup.insert(prompt(4, 2))
    assert [setup.in_dram(prompt(letter, 4)) for letter in (1, 2, 3, 4)] == [2, 2, 2, 2]


def test_what_is_continued_is_not_evicted_for_its_own_continuation(setup: Setup) -> None:
    setup.insert(prompt(1, 8))
    setup.tier.copies.settle()
    setup.insert(prompt(1, 10))
    assert setup.in_dram(prompt(1, 10)) == 8
    assert setup.write_down.skipped == 2
    assert setup.tier.evicted == 0


def test_has_copy_only_when_the_copy_is_complete(setup: Setup) -> None:
    node = setup.insert(prompt(1, 2))
    assert not setup.write_down.has_copy(node)
    setup.ranks.each_pass()
    assert not setup.write_down.has_copy(node)
    setup.mover.copy_writes(1)
    assert not setup.write_down.has_copy(node), "the copy is not recorded yet"
    setup.ranks.each_pass()
    assert setup.write_down.has_copy(node)
    skipped = setup.insert(prompt(2, 20))
    assert not setup.write_down.has_copy(skipped)


def test_writes_complete_in_order_and_one_by_one(setup: Setup) -> None:
    nodes = [setup.insert(prompt(letter, 1)) for letter in (1, 2, 3)]
    for done in range(1, 4):
        setup.mover.copy_writes(1)
        setup.ranks.each_pass()
        assert [setup.write_down.has_copy(node) for node in nodes] == [i < done for i in range(3)]
        assert setup.tier.copies.counters.written == done


def test_a_node_split_while_it_is_written_is_released_as_a_whole(setup: Setup) -> None:
    setup.insert(prompt(1, 4))
    setup.path(prompt(1, 2))  # another prompt parts here
    setup.path(prompt(1, 1))
    setup.mover.settle()
    setup.ranks.each_pass()
    assert setup.tier.copies.counters.written == 4
    assert not any(node.locks for node in setup.tree.nodes())
    assert setup.evict_hbm(10) == 4


def test_a_load_places_slots_in_order_and_locks_both_copies(setup: Setup) -> None:
    setup.insert(prompt(1, 2))
    setup.insert(prompt(1, 4))
    setup.tier.copies.settle()
    assert setup.evict_hbm(3) == 3
    nodes = setup.load(prompt(1, 4))
    assert [node.blocks for node in nodes] == [1, 2]
    assert setup.tier.copies.loads_submitted == 1
    slots, blocks = setup.mover.loaded[0]
    assert blocks == [1, 2, 3]
    assert [list(node.placements[setup.hbm]) for node in nodes] == [slots[:4], slots[4:]]
    assert setup.evict_hbm(10) == 0
    assert setup.tree.evict(setup.hbm, 10) == []
    assert setup.tree.evict(setup.dram, 10) == []
    setup.check()
    setup.mover.copy_loads(1)
    assert setup.tier.copies.loading
    setup.ranks.each_pass()
    assert not setup.tier.copies.loading
    assert setup.tier.copies.counters.loaded == 3
    assert setup.evict_hbm(10) == 4


def test_a_loaded_node_is_not_written_again(setup: Setup) -> None:
    setup.insert(prompt(1, 2))
    setup.tier.copies.settle()
    setup.evict_hbm(2)
    setup.load(prompt(1, 2))
    setup.insert(prompt(1, 3))
    assert [blocks for _, blocks in setup.mover.written] == [[0, 1], [2]]


def test_a_load_split_by_a_later_match_is_released_as_a_whole(setup: Setup) -> None:
    setup.insert(prompt(1, 4))
    setup.tier.copies.settle()
    setup.evict_hbm(4)
    setup.load(prompt(1, 4))
    setup.path(prompt(1, 3))
    setup.tier.copies.settle()
    assert not any(node.locks for node in setup.tree.nodes())
    assert setup.tier.copies.counters.loaded == 4


def test_clear_waits_for_copies_and_gives_everything_back(setup: Setup) -> None:
    setup.insert(prompt(1, 4))
    setup.tier.copies.settle()
    setup.evict_hbm(2)
    setup.load(prompt(1, 4))
    setup.insert(prompt(2, 2))
    setup.tier.clear()
    assert setup.mover.writes_done() == 2
    assert setup.mover.loads_done() == 1
    assert setup.arena.free_blocks == 8
    assert setup.tree.blocks_of(setup.dram) == 0
    setup.check()
    setup.tree.drop_holder(setup.hbm)
    setup.insert(prompt(1, 4))
    assert setup.in_dram(prompt(1, 4)) == 4
    assert setup.tier.copies.loads_submitted == 1


def test_repr_shows_the_counts(setup: Setup) -> None:
    setup.insert(prompt(1, 3))
    assert repr(setup.tier).startswith(
        "DramTier(3/8 blocks, 0 evicted, Copies(writing=1, loading=0, CopyCounters(written=0"
    )


def test_check_sees_a_block_without_an_owner(setup: Setup) -> None:
    setup.insert(prompt(1, 3))
    blocks = setup.arena.alloc(2)
    with pytest.raises(AssertionError, match="5 blocks of DRAM are in use, index and ledger know of 3"):
        setup.tier.ledger.check()
    assert blocks is not None
    setup.arena.free(blocks)


class Lagging:
    """Two ranks in agreement: each reports its progress, and both get the smaller number."""

    def __init__(self) -> None:
        self.other = 0

    def __call__(self, numbers: Sequence[int]) -> Sequence[int]:
        return [*numbers[:2], *(min(number, self.other) for number in numbers[2:])]


def test_a_copy_counts_when_it_is_complete_on_every_rank() -> None:
    lagging = Lagging()
    setup = Setup(8, lagging)
    nodes = [setup.insert(prompt(letter, 1)) for letter in (1, 2)]
    setup.mover.settle()
    setup.ranks.each_pass()
    assert setup.tier.copies.counters.written == 0
    lagging.other = 1
    setup.ranks.each_pass()
    assert [setup.write_down.has_copy(node) for node in nodes] == [True, False]
    lagging.other = 5  # the other rank is ahead; this one is not
    setup.insert(prompt(3, 1))
    setup.ranks.each_pass()
    assert setup.tier.copies.counters.written == 2
    setup.check()
    setup.arena.close()


def test_ranks_whose_copies_lag_differently_keep_equal_trees() -> None:
    """The same calls on both; the agreed number decides, not each rank's own progress."""
    ranks: list[Setup] = []

    def least(numbers: Sequence[int]) -> Sequence[int]:
        # Both movers hold the same queues; one is ahead. Neither moves between the two ranks' calls.
        return [*numbers[:2], min(rank.mover.writes_done() for rank in ranks), *numbers[3:]]

    ranks = [Setup(6, least), Setup(6, least)]
    script = [
        prompt(1, 3),
        prompt(2, 3),
        prompt(1, 1) + prompt(3, 2),
        prompt(4, 4),
        prompt(2, 5),
        prompt(5, 2),
    ]
    for i, tokens in enumerate(script * 4):
        ranks[i % 2].mover.copy_writes(i % 3)  # one of the two is ahead of the other
        for rank in ranks:
            rank.ranks.each_pass()
            rank.insert(tokens)
            rank.evict_hbm(i % 4)
            rank.check()
        assert ranks[0].picture() == ranks[1].picture()
        assert ranks[0].counts() == ranks[1].counts()
    assert ranks[0].tier.evicted > 0
    assert ranks[0].write_down.skipped > 0
    for rank in ranks:
        rank.tier.copies.settle()
        rank.arena.close()
    assert ranks[0].picture() == ranks[1].picture()


def test_ranks_that_do_not_agree_drift_apart() -> None:
    """The twin: without the consensus the same calls give different trees."""
    ranks = [Setup(6), Setup(6)]
    for rank in ranks:
        rank.insert(prompt(1, 3))
    ranks[0].mover.settle()
    for rank in ranks:
        rank.ranks.each_pass()
        rank.evict_hbm(2)
    assert ranks[0].picture() != ranks[1].picture()
    for rank in ranks:
        rank.arena.close()

"""Order of eviction from HBM: blocks with a copy, then announced ones with a copy, then last copies."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from engine_movers import HandMover

from sglang_ext.engine.movers.copies import Copies
from sglang_ext.engine.movers.slots import HostSlots
from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.hbm_tier import HbmTier
from sglang_ext.engine.tiers.write_down import WriteDown
from sglang_ext.geometry import BlockLayout
from sglang_ext.keys import encode_tokens
from sglang_ext.mempool.store import Store
from sglang_ext.radix_global import Holder, RadixTree
from sglang_ext.tiered_store.dram.arena import DramArena
from sglang_ext.tiers import Tier

BLOCK = 4
BLOCKS = 8
"""Blocks of HBM and of DRAM; each prompt has 2."""
LAYOUT = BlockLayout.uniform(n_layers=2, planes_per_layer=2, row_bytes=8, block_tokens=BLOCK)


class Slots:
    """SGLang's allocator, as far as the tier asks it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size))

    def available_size(self) -> int:
        return len(self._free)

    def alloc(self, count: int) -> torch.Tensor:
        taken, self._free = self._free[:count], self._free[count:]
        return torch.tensor(taken, dtype=torch.int64)

    def free_segment(self, slots: torch.Tensor, *, start_pos: int) -> None:
        self._free += slots.tolist()


class Rig:
    """HBM over DRAM, and copies that the test moves."""

    def __init__(self) -> None:
        self.tree = RadixTree(BLOCK)
        self.hbm, dram = (Holder.of("tier", 0, tier) for tier in (Tier.HBM, Tier.DRAM))
        self.arena = DramArena(LAYOUT, BLOCKS * (LAYOUT.block_bytes + 8) + 8, shared=False, pin=False)
        self.store = Store(self.tree)
        self.mover = HandMover(None, LAYOUT.n_layers)
        self.dram = DramTier(self.store.ledger, self.hbm, dram, self.arena, Copies(self.mover, Ranks()))
        self.write_down = WriteDown(self.hbm, self.dram)
        self.write_down.serve(self.store)
        self.slots = Slots(BLOCKS * BLOCK)
        self.tier = HbmTier(self.store.ledger, self.hbm, self.slots, HostSlots(), self.write_down)

    def insert(self, letter: int, *, copied: bool) -> None:
        """A prompt of two blocks is in HBM; ``copied``: its copy in DRAM begins."""
        key = encode_tokens([letter] * 2 * BLOCK)
        node = self.tree.insert(None, key, self.hbm, self.slots.alloc(2 * BLOCK).numpy()).node
        if copied:
            assert self.write_down.to_dram(node)

    def announce(self, letter: int) -> None:
        self.dram.retention.expect(f"hint {letter}", None, encode_tokens([letter] * 2 * BLOCK))

    def in_hbm(self) -> dict[int, int]:
        """Blocks of each prompt."""
        tokens = {
            letter: self.tree.holders(None, encode_tokens([letter] * 2 * BLOCK)).get(self.hbm, 0)
            for letter in (1, 2, 3)
        }
        return {letter: count // BLOCK for letter, count in tokens.items() if count}

    def check(self) -> None:
        self.tree.check()
        self.store.ledger.check()
        held = self.tree.blocks_of(self.hbm) * BLOCK
        assert self.slots.available_size() + held == self.slots.size, "a slot is lost"


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.check()
    rig.arena.close()


def test_what_has_a_copy_goes_before_an_older_last_copy(rig: Rig) -> None:
    rig.insert(1, copied=False)
    rig.insert(2, copied=True)
    rig.dram.copies.settle()
    assert rig.tier.evict(2 * BLOCK) == 2 * BLOCK
    assert rig.in_hbm() == {1: 2}
    assert rig.tier.evict(BLOCK) == BLOCK, "a last copy goes where nothing else can"
    assert rig.in_hbm() == {1: 1}


def test_a_copy_under_way_is_waited_for_before_a_last_copy_goes(rig: Rig) -> None:
    rig.insert(1, copied=False)
    rig.insert(2, copied=True)
    assert rig.dram.copies.writing
    assert rig.tier.evict(BLOCK) == BLOCK
    assert rig.in_hbm() == {1: 2, 2: 1}
    assert not rig.dram.copies.writing


def test_the_oldest_copies_only_are_waited_for(rig: Rig) -> None:
    rig.insert(1, copied=True)
    rig.insert(2, copied=True)
    assert rig.tier.evict(2 * BLOCK) == 2 * BLOCK
    assert rig.in_hbm() == {2: 2}
    assert rig.dram.copies.writing
    assert rig.dram.copies.writes_ended == 1


def test_what_was_announced_goes_after_newer_blocks(rig: Rig) -> None:
    rig.insert(1, copied=True)
    rig.insert(2, copied=True)
    rig.insert(3, copied=True)
    rig.dram.copies.settle()
    rig.announce(1)
    assert rig.tier.evict(4 * BLOCK) == 4 * BLOCK
    assert rig.in_hbm() == {1: 2}
    assert rig.tier.evict(BLOCK) == BLOCK, "it goes where nothing else can"
    assert rig.dram.retention.given_up == 1


def test_an_announced_last_copy_goes_last(rig: Rig) -> None:
    rig.insert(1, copied=False)
    rig.insert(2, copied=False)
    rig.insert(3, copied=True)
    rig.dram.copies.settle()
    rig.announce(1)
    rig.announce(3)
    gone = []
    for _ in range(3):
        before = rig.in_hbm()
        assert rig.tier.evict(2 * BLOCK) == 2 * BLOCK
        gone += before.keys() - rig.in_hbm().keys()
    assert gone == [3, 2, 1]


def test_of_what_was_announced_that_of_later_requests_goes_before_what_others_used_since(rig: Rig) -> None:
    rig.insert(1, copied=True)
    rig.insert(2, copied=True)
    rig.dram.copies.settle()
    for letter in (1, 2):
        rig.announce(letter)
    rig.insert(3, copied=True)
    rig.dram.copies.settle()
    rig.dram.retention.defer("hint 1", 100.0)
    rig.dram.retention.defer("hint 2", 200.0)
    gone = []
    for _ in range(3):
        before = rig.in_hbm()
        assert rig.tier.evict(2 * BLOCK) == 2 * BLOCK
        gone += before.keys() - rig.in_hbm().keys()
    assert gone == [2, 1, 3], "the latest first"


def test_what_was_in_no_use_since_goes_before_it(rig: Rig) -> None:
    rig.insert(3, copied=True)
    rig.insert(1, copied=True)
    rig.dram.copies.settle()
    rig.announce(1)
    rig.dram.retention.defer("hint 1", 100.0)
    assert rig.tier.evict(2 * BLOCK) == 2 * BLOCK
    assert rig.in_hbm() == {1: 2}


def test_what_is_due_is_held_again(rig: Rig) -> None:
    rig.insert(1, copied=True)
    rig.announce(1)
    rig.insert(3, copied=True)
    rig.dram.copies.settle()
    rig.dram.retention.defer("hint 1", 100.0)
    rig.dram.retention.defer("hint 1", -math.inf)
    assert rig.tier.evict(2 * BLOCK) == 2 * BLOCK
    assert rig.in_hbm() == {1: 2}

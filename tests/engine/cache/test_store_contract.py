"""The tiers of the store, each held to one contract."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_movers import HandMover

from sglang_ext.engine.movers.copies import Copies
from sglang_ext.engine.movers.slots import HostSlots
from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.hbm_tier import HbmTier
from sglang_ext.mempool.ledger import Committed, Ledger, Reservation
from sglang_ext.mempool.store import Store
from sglang_ext.radix_global import Holder, RadixTree
from sglang_ext.testing.blocks import LAYOUT
from sglang_ext.testing.store_contract import BLOCK, Rig, StoreContract, run_store_model
from sglang_ext.tiered_store.dram.arena import DramArena
from sglang_ext.tiers import Tier

pytestmark = pytest.mark.slow


class Slots:
    """The part of SGLang's allocator that the room uses."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size))

    def available_size(self) -> int:
        return len(self._free)

    def alloc(self, tokens: int) -> torch.Tensor:
        taken, self._free = self._free[:tokens], self._free[tokens:]
        return torch.tensor(taken)

    def free_segment(self, slots: torch.Tensor, *, start_pos: int) -> None:
        assert not set(slots.tolist()) & set(self._free)
        self._free += slots.tolist()


def hbm_rig(blocks: int, store_class: type[Store] = Store) -> Rig:
    store = store_class(RadixTree(BLOCK))
    HbmTier(store.ledger, Holder.of("one", 1, Tier.HBM), Slots(blocks * BLOCK), HostSlots(), None)
    return Rig(store, Tier.HBM)


def dram_rig(blocks: int, store_class: type[Store] = Store) -> Rig:
    store = store_class(RadixTree(BLOCK))
    arena = DramArena(LAYOUT, blocks * (LAYOUT.block_bytes + 8) + 8, shared=False, pin=False)
    hbm, dram = (Holder.of("one", 1, tier) for tier in (Tier.HBM, Tier.DRAM))
    mover = HandMover(SimpleNamespace(), LAYOUT.n_layers)
    DramTier(store.ledger, hbm, dram, arena, Copies(mover, Ranks()))
    return Rig(store, Tier.DRAM, arena.close)


class TestHbmRoom(StoreContract):
    def open_rig(self, blocks: int) -> Rig:
        return hbm_rig(blocks)


class TestDramTier(StoreContract):
    def open_rig(self, blocks: int) -> Rig:
        return dram_rig(blocks)


@pytest.mark.parametrize("open_rig", [hbm_rig, dram_rig], ids=["HbmTier", "DramTier"])
def test_random_reservations_leave_every_block_where_it_was_written(
    open_rig: Callable[[int], Rig], long_run: bool
) -> None:
    run_store_model(open_rig, examples=1000 if long_run else 40)


class GivesBackTheWrongHalf(Store):
    """Keeps the blocks that were not filled, and frees the filled ones."""

    def _commit(self, reservation: Reservation, blocks: int, onward: bool) -> Committed | None:
        if 0 < blocks < reservation.blocks:
            tier = self.ledger.tiers[reservation.tier]
            places = reservation.places
            filled = tier.part(places, 0, blocks)
            reservation.places = tier.join([tier.part(places, blocks, reservation.blocks), filled])
        return super()._commit(reservation, blocks, onward)


class LocksAtTheEnd(Ledger):
    """Locks the prefix that a reservation continues when it ends."""

    def close(self, reservation: Reservation, blocks: int) -> None:
        if reservation.parent is not None:
            self.tree.lock(reservation.parent, self.tiers[reservation.tier].holder)
        super().close(reservation, blocks)


class LosesWhatIsContinued(Store):
    """Does not lock the prefix that a reservation continues."""

    def __init__(self, tree: RadixTree) -> None:
        super().__init__(tree)
        self.ledger = LocksAtTheEnd(tree)
        self.calls = self.ledger.calls

    def reserve_behind(self, level: Tier, *args: Any, **options: Any) -> Any:
        reservation = super().reserve_behind(level, *args, **options)
        if isinstance(reservation, Reservation) and reservation.parent is not None:
            self.tree.unlock(reservation.parent, self.ledger.tiers[reservation.tier].holder)
        return reservation


@pytest.mark.parametrize("damaged", [GivesBackTheWrongHalf, LosesWhatIsContinued])
@pytest.mark.parametrize("open_rig", [hbm_rig, dram_rig], ids=["HbmTier", "DramTier"])
def test_a_faulty_store_is_found_out(open_rig: Callable[..., Rig], damaged: type[Store]) -> None:
    with pytest.raises((AssertionError, ValueError, KeyError)):
        run_store_model(lambda blocks: open_rig(blocks, damaged), examples=400, shrink=False)

"""The lowest layers of announced sessions in HBM, where whole sessions do not fit (Symphony, section 3.3).

A forward pass needs layer 0 first. With the lowest layers of a prefix in HBM it begins at once, and the
others come from DRAM behind the layer gate. So the same HBM serves more sessions: each has as many layers
there as hide the loading of the rest (`load_policy.layers_to_hold`).

A slot of SGLang's pool spans all layers, so a layer alone is kept elsewhere: the region has *strips* of the
pool's blocks, and the planes of any layer of a strip hold one layer of as many blocks of a session, a *cell*.
The layers' planes are all alike, so that every byte of a strip can be used. At admission the slots are
allocated as usual, and cells are copied to them within the device (`near`).

Strips are in the store's ledger (`Use.LAYERS`), count as evictable, and go back when the engine needs slots.
A strip is worth as much as its best cell, and the strip of least worth goes first. The higher the layer of a
cell, the less the cell is worth; of equal layers, cells of the session that the retention policy gives up
first are worth less. Cells hold copies of DRAM blocks: when a block leaves DRAM, its copies are dropped.

No I/O; the scheduler's thread only, and alike on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_ext.engine.movers.mover import BlockIds, Near
from sglang_ext.geometry import BlockLayout
from sglang_ext.mempool.ledger import Reservation, Use
from sglang_ext.mempool.store import Refusal, Store
from sglang_ext.own_functions import SortKey
from sglang_ext.tiers import Tier

MOST_STRIP_BLOCKS = 64
"""More blocks in a strip make fewer copies per layer at admission, and more waste at ends of sessions."""

MOST_OF_HBM = 0.75
"""The rest is for running requests, so that not every admission takes strips back."""

Worth = tuple[float, ...]
"""Compares cells: the smallest goes first."""


@dataclass(eq=False)
class Cell:
    """One layer of some blocks of a session.

    place: the layer in whose planes of the strip the bytes are. ids: the blocks in DRAM. blocks: the number
    of them that are still in DRAM and are found here.
    """

    number: int
    strip: _Strip
    place: int
    session: str
    layer: int
    ids: BlockIds
    order: SortKey
    blocks: int = 0
    landed: bool = False
    readers: int = 0
    """Loads under way that copy from it."""

    @property
    def busy(self) -> bool:
        return bool(self.readers) or not self.landed


@dataclass(eq=False)
class _Strip:
    reservation: Reservation
    cells: dict[int, Cell] = field(default_factory=dict)
    """By place."""


@dataclass
class RegionCounters:
    """Blocks times layers, since the start."""

    filled: int = 0
    """Copied to the region ahead of requests."""
    used: int = 0
    """Copied from it within the device at admission."""
    given_up: int = 0
    """Lost to the engine, or to cells that are worth more."""


class LayerRegion:
    """See the module's docstring.

    Args:
        store: of the rank; the region takes blocks of its HBM.
        layout: of blocks, whose layers are alike (`fits`).
        limit: most bytes that it takes, and never more than `MOST_OF_HBM`; None for that, and only as many as
            pay off. With a size, layer 0 is held in any case.
        lives: whether a session is still announced.
    """

    def __init__(
        self, store: Store, layout: BlockLayout, limit: int | None, lives: Callable[[str], bool]
    ) -> None:
        self._store = store
        self._ledger = store.ledger
        self.n_layers = layout.n_layers
        self._layout = layout
        self._tokens = layout.block_tokens
        self._limit = None if limit is None else limit // layout.block_bytes
        self.least = 0 if limit is None else 1
        """Layers of each session that are held even if loading them is fast."""
        self._lives = lives
        self._strips: list[_Strip] = []
        self._cells: dict[int, Cell] = {}
        self._numbers = 0
        self._units: dict[int, BlockIds] = {}
        """By layer and block of DRAM: number of the cell · `strip_blocks` + place in it; -1 for nowhere."""
        self.counters = RegionCounters()

    @staticmethod
    def fits(layout: BlockLayout) -> bool:
        """Whether there are several layers, and the planes of each could hold any other's."""
        return layout.n_layers > 1 and len(set(layout.layers)) == 1

    # -- how much -------------------------------------------------------------------------------

    @property
    def limit(self) -> int:
        """Blocks of HBM that it may take."""
        most = int(self._ledger.tier_at(Tier.HBM).n_blocks * MOST_OF_HBM)
        return most if self._limit is None else min(self._limit, most)

    @property
    def strip_blocks(self) -> int:
        return max(1, min(MOST_STRIP_BLOCKS, self._ledger.tier_at(Tier.HBM).n_blocks // 32))

    def cell_bytes(self, layer: int) -> int:
        """Of a full cell."""
        return self.strip_blocks * self._layout.layer_bytes(layer)

    @property
    def blocks(self) -> int:
        """Blocks of HBM that it has."""
        return len(self._strips) * self.strip_blocks

    @property
    def cells(self) -> Sequence[Cell]:
        return list(self._cells.values())

    def layers_of(self, session: str) -> int:
        """The number of layers of a session that the region holds, in full or in part."""
        return len({cell.layer for cell in self._cells.values() if cell.session == session})

    def free_places(self) -> int:
        """Cells that could be begun without another strip."""
        return sum(self.n_layers - len(strip.cells) for strip in self._strips)

    def grow(self, strips: int) -> bool:
        """Take ``strips`` more strips from free HBM, or none."""
        taken: list[_Strip] = []
        for _ in range(strips):
            spare = self._store.reserve_spare(Tier.HBM, None, b"", Use.LAYERS, 0, self.strip_blocks)
            if isinstance(spare, Refusal):
                for strip in taken:
                    strip.reservation.abort()
                return False
            taken.append(_Strip(spare))
        self._strips += taken
        return True

    # -- filling --------------------------------------------------------------------------------

    def missing(self, layer: int, ids: BlockIds) -> BlockIds:
        """Those of these DRAM blocks whose layer is not in the region."""
        units = self._units.get(layer)
        return ids if units is None else ids[units[ids] < 0]

    def begin(self, session: str, layer: int, ids: BlockIds, order: SortKey) -> tuple[Cell, Any]:
        """Create a cell for at most `strip_blocks` blocks. Returns the cell and its slots; the caller fills
        the planes of layer ``cell.place`` at these slots. The cell counts once it has ``landed``.
        """
        # Beside cells of the same layer: a strip goes as a whole.
        strip = min(
            (each for each in self._strips if len(each.cells) < self.n_layers),
            key=lambda each: max((abs(cell.layer - layer) for cell in each.cells.values()), default=0),
        )
        place = next(place for place in range(self.n_layers) if place not in strip.cells)
        self._numbers += 1
        cell = Cell(self._numbers, strip, place, session, layer, ids, order)
        strip.cells[place] = self._cells[cell.number] = cell
        return cell, strip.reservation.places[: len(ids) * self._tokens]

    def landed(self, cell: Cell) -> None:
        """A cell is filled."""
        cell.landed = True
        units = self._units.get(cell.layer)
        if units is None:
            dram = self._ledger.tier_at(Tier.DRAM)
            units = self._units[cell.layer] = np.full(dram.n_blocks, -1, dtype=np.int64)
        places = np.flatnonzero(units[cell.ids] < 0)
        units[cell.ids[places]] = cell.number * self.strip_blocks + places
        cell.blocks = len(places)
        self.counters.filled += cell.blocks
        if not cell.blocks:
            self._drop(cell)

    # -- using ----------------------------------------------------------------------------------

    def near(self, ids: BlockIds) -> list[Near]:
        """The parts of blocks about to be loaded that the region holds. Their cells stay until `read`."""
        found: list[Near] = []
        for layer in sorted(self._units):
            units = self._units[layer][ids]
            here = np.flatnonzero(units >= 0)
            numbers = units[here] // self.strip_blocks
            for number in np.unique(numbers):
                positions = here[numbers == number]
                cell = self._cells[int(number)]
                cell.readers += 1
                slots = cell.strip.reservation.places.reshape(-1, self._tokens)
                slots = slots[units[positions] % self.strip_blocks].reshape(-1)
                found.append(Near(layer, cell.place, slots, positions, cell))
                self.counters.used += len(positions)
        return found

    def read(self, near: Sequence[Near]) -> None:
        """A load of these parts is complete. Drops cells of sessions that are not announced any more."""
        for each in near:
            cell = each.cell
            cell.readers -= 1
            if not cell.readers and (not cell.blocks or not self._lives(cell.session)):
                self._drop(cell)

    # -- giving up ------------------------------------------------------------------------------

    def forget(self, ids: BlockIds) -> None:
        """Drop the copies of blocks that are no longer in DRAM."""
        for units in self._units.values():
            gone = units[ids]
            gone = gone[gone >= 0]
            if not len(gone):
                continue
            units[ids] = -1
            for number, count in zip(*np.unique(gone // self.strip_blocks, return_counts=True), strict=True):
                cell = self._cells[int(number)]
                cell.blocks -= int(count)
                if not cell.blocks and not cell.busy:
                    self._drop(cell)

    def give_up(self, blocks: int, *, above: int = -1) -> int:
        """Give back at least ``blocks`` blocks of HBM, in whole strips. Returns the number of blocks.

        Args:
            above: only strips without a cell of this layer or a lower one.
        """
        freed = 0
        while freed < blocks:
            worths = {
                strip: max((self._worth(cell) for cell in strip.cells.values()), default=(-1.0,))
                for strip in self._strips
                if not any(cell.busy for cell in strip.cells.values())
                and all(cell.layer > above or not self._lives(cell.session) for cell in strip.cells.values())
            }
            if not worths:
                break
            strip = min(worths, key=lambda each: worths[each])
            for cell in list(strip.cells.values()):
                self.counters.given_up += cell.blocks
                self._drop(cell, keep=True)
            self._return(strip)
            freed += self.strip_blocks
        return freed

    def displace(self, places: int, layer: int) -> bool:
        """Free ``places`` places for cells of a layer, by giving up cells of higher layers, and of sessions
        that are not announced any more. Returns whether that many are free.
        """
        while self.free_places() < places:
            weaker = [
                cell
                for cell in self._cells.values()
                if not cell.busy and (cell.layer > layer or not self._lives(cell.session))
            ]
            if not weaker:
                return False
            weakest = min(weaker, key=self._worth)
            self.counters.given_up += weakest.blocks
            self._drop(weakest, keep=True)
        return True

    def _worth(self, cell: Cell) -> Worth:
        return (1.0, -cell.layer, *cell.order) if self._lives(cell.session) else (0.0, -cell.layer)

    def _drop(self, cell: Cell, *, keep: bool = False) -> None:
        """Drop a cell. keep: the strip stays, though it may be empty."""
        units = self._units.get(cell.layer)
        if units is not None and cell.landed:
            ours = cell.ids[units[cell.ids] // self.strip_blocks == cell.number]
            units[ours] = -1
        del self._cells[cell.number], cell.strip.cells[cell.place]
        if not cell.strip.cells and not keep:
            self._return(cell.strip)

    def _return(self, strip: _Strip) -> None:
        self._strips.remove(strip)
        strip.reservation.abort()

    def clear(self) -> None:
        """Give all back. No copy to or from it is under way any more."""
        for cell in self.cells:
            self._drop(cell, keep=True)
        for strip in list(self._strips):
            self._return(strip)
        self._units.clear()

    # -- whole ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify the bookkeeping. Raises AssertionError that names the inconsistency."""
        if self.blocks != self._ledger.reserved(Tier.HBM, Use.LAYERS):
            raise AssertionError(f"{self!r} is not what the ledger says")
        found = dict.fromkeys(self._cells, 0)
        for layer, units in self._units.items():
            numbers = units[units >= 0] // self.strip_blocks
            for number, count in zip(*np.unique(numbers, return_counts=True), strict=True):
                cell = self._cells.get(int(number))
                if cell is None or cell.layer != layer:
                    raise AssertionError(f"blocks of layer {layer} are said to be in cell {number}")
                found[cell.number] += int(count)
        for cell in self._cells.values():
            if cell.landed and cell.blocks != found[cell.number]:
                raise AssertionError(
                    f"cell {cell.number} has {cell.blocks} blocks, {found[cell.number]} found"
                )
            if cell.strip.cells.get(cell.place) is not cell or cell.strip not in self._strips:
                raise AssertionError(f"cell {cell.number} is in no strip")

    def __repr__(self) -> str:
        return f"LayerRegion({self.blocks}/{self.limit} blocks, {len(self._cells)} cells, {self.counters})"

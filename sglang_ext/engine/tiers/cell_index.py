"""Cells of the layer region, by their number, and by layer and DRAM block.

A *strip* is a run of blocks of HBM; a *cell* is one layer of as many DRAM blocks of a session, in the planes
of one layer of a strip.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from sglang_ext.engine.movers.mover import BlockIds
from sglang_ext.mempool.ledger import Reservation
from sglang_ext.own_functions import SortKey


@dataclass(eq=False)
class Cell:
    """One layer of some blocks of a session.

    place: the layer in whose planes of the strip the bytes are. ids: the blocks in DRAM. blocks: the number
    of them that are still in DRAM and are found here.
    """

    number: int
    strip: Strip
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
class Strip:
    """Blocks of HBM."""

    reservation: Reservation
    cells: dict[int, Cell] = field(default_factory=dict)
    """By place."""


class CellIndex:
    """See the module's docstring.

    Args:
        strip_blocks: most blocks of a cell.
    """

    def __init__(self, strip_blocks: int, dram_blocks: int) -> None:
        self._strip_blocks = strip_blocks
        self._dram_blocks = dram_blocks
        self._numbers = 0
        self._cells: dict[int, Cell] = {}
        self._units: dict[int, BlockIds] = {}
        """By layer and block of DRAM: number of the cell · `strip_blocks` + place in it; -1 for nowhere."""

    def __len__(self) -> int:
        return len(self._cells)

    def __iter__(self) -> Iterator[Cell]:
        return iter(list(self._cells.values()))

    def create(
        self, strip: Strip, place: int, session: str, layer: int, ids: BlockIds, order: SortKey
    ) -> Cell:
        """Add a cell, which is found by its blocks once it is `landed`."""
        self._numbers += 1
        cell = Cell(self._numbers, strip, place, session, layer, ids, order)
        strip.cells[place] = self._cells[cell.number] = cell
        return cell

    def landed(self, cell: Cell) -> None:
        """A cell is filled: it is found by those of its blocks that no other cell has."""
        cell.landed = True
        units = self._units.get(cell.layer)
        if units is None:
            units = self._units[cell.layer] = np.full(self._dram_blocks, -1, dtype=np.int64)
        places = np.flatnonzero(units[cell.ids] < 0)
        units[cell.ids[places]] = cell.number * self._strip_blocks + places
        cell.blocks = len(places)

    def missing(self, layer: int, ids: BlockIds) -> BlockIds:
        """Those of these DRAM blocks whose layer no cell has."""
        units = self._units.get(layer)
        return ids if units is None else ids[units[ids] < 0]

    def find(self, ids: BlockIds) -> Iterator[tuple[Cell, BlockIds, BlockIds]]:
        """Cells that have some of these DRAM blocks, by layer, each with the positions of these blocks in
        ``ids`` and in the cell.
        """
        for layer in sorted(self._units):
            units = self._units[layer][ids]
            here = np.flatnonzero(units >= 0)
            numbers = units[here] // self._strip_blocks
            for number in np.unique(numbers):
                positions = here[numbers == number]
                yield self._cells[int(number)], positions, units[positions] % self._strip_blocks

    def forget(self, ids: BlockIds) -> list[Cell]:
        """These blocks are no longer in DRAM. Returns the cells that have none of their blocks left."""
        empty: list[Cell] = []
        for units in self._units.values():
            gone = units[ids]
            gone = gone[gone >= 0]
            units[ids] = -1
            for number, count in zip(*np.unique(gone // self._strip_blocks, return_counts=True), strict=True):
                cell = self._cells[int(number)]
                cell.blocks -= int(count)
                if not cell.blocks:
                    empty.append(cell)
        return empty

    def remove(self, cell: Cell) -> None:
        """Take a cell out of the index and out of its strip."""
        units = self._units.get(cell.layer)
        if units is not None and cell.landed:
            ours = cell.ids[units[cell.ids] // self._strip_blocks == cell.number]
            units[ours] = -1
        del self._cells[cell.number], cell.strip.cells[cell.place]

    def check(self) -> None:
        """Verify the bookkeeping. Raises AssertionError that names the inconsistency."""
        found = dict.fromkeys(self._cells, 0)
        for layer, units in self._units.items():
            numbers = units[units >= 0] // self._strip_blocks
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

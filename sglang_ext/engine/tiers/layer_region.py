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
from dataclasses import dataclass
from typing import Any

from sglang_ext.engine.movers.mover import BlockIds, Near
from sglang_ext.engine.tiers.cell_index import Cell, CellIndex, Strip
from sglang_ext.geometry import BlockLayout
from sglang_ext.mempool.ledger import Use
from sglang_ext.mempool.store import Refusal, Store
from sglang_ext.own_functions import SortKey
from sglang_ext.tiers import Tier

MOST_STRIP_BLOCKS = 64
"""More blocks in a strip make fewer copies per layer at admission, and more waste at ends of sessions."""

MOST_OF_HBM = 0.75
"""The rest is for running requests, so that not every admission takes strips back."""

Worth = tuple[float, ...]
"""Compares cells: the smallest goes first."""


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
        hbm_blocks = self._ledger.tiers[Tier.HBM].n_blocks
        most = int(hbm_blocks * MOST_OF_HBM)
        self.limit = most if limit is None else min(limit // layout.block_bytes, most)
        """Blocks of HBM that it may take."""
        self.strip_blocks = max(1, min(MOST_STRIP_BLOCKS, hbm_blocks // 32))
        self.least = 0 if limit is None else 1
        """Layers of each session that are held even if loading them is fast."""
        self._lives = lives
        self._strips: list[Strip] = []
        self.cells = CellIndex(self.strip_blocks, self._ledger.tiers[Tier.DRAM].n_blocks)
        self.counters = RegionCounters()

    @staticmethod
    def fits(layout: BlockLayout) -> bool:
        """Whether there are several layers, and the planes of each could hold any other's."""
        return layout.n_layers > 1 and len(set(layout.layers)) == 1

    # -- how much -------------------------------------------------------------------------------

    def cell_bytes(self, layer: int) -> int:
        """Of a full cell."""
        return self.strip_blocks * self._layout.layer_bytes(layer)

    @property
    def blocks(self) -> int:
        """Blocks of HBM that it has."""
        return len(self._strips) * self.strip_blocks

    def free_places(self) -> int:
        """Cells that could be begun without another strip."""
        return sum(self.n_layers - len(strip.cells) for strip in self._strips)

    def grow(self, strips: int) -> bool:
        """Take ``strips`` more strips from free HBM, or none."""
        taken: list[Strip] = []
        for _ in range(strips):
            spare = self._store.reserve_spare(Tier.HBM, None, b"", Use.LAYERS, 0, self.strip_blocks)
            if isinstance(spare, Refusal):
                for strip in taken:
                    strip.reservation.abort()
                return False
            taken.append(Strip(spare))
        self._strips += taken
        return True

    # -- filling --------------------------------------------------------------------------------

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
        cell = self.cells.create(strip, place, session, layer, ids, order)
        return cell, strip.reservation.places[: len(ids) * self._tokens]

    def landed(self, cell: Cell) -> None:
        """A cell is filled."""
        self.cells.landed(cell)
        self.counters.filled += cell.blocks
        if not cell.blocks:
            self._drop(cell)

    # -- using ----------------------------------------------------------------------------------

    def near(self, ids: BlockIds) -> list[Near]:
        """The parts of blocks about to be loaded that the region holds. Their cells stay until `read`."""
        found: list[Near] = []
        for cell, positions, places in self.cells.find(ids):
            cell.readers += 1
            slots = cell.strip.reservation.places.reshape(-1, self._tokens)[places].reshape(-1)
            found.append(Near(cell.layer, cell.place, slots, positions, cell))
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
        for cell in self.cells.forget(ids):
            if not cell.busy:
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
                for cell in self.cells
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
        self.cells.remove(cell)
        if not cell.strip.cells and not keep:
            self._return(cell.strip)

    def _return(self, strip: Strip) -> None:
        self._strips.remove(strip)
        strip.reservation.abort()

    def clear(self) -> None:
        """Give all back. No copy to or from it is under way any more."""
        for cell in self.cells:
            self._drop(cell, keep=True)
        for strip in list(self._strips):
            self._return(strip)

    # -- whole ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify the bookkeeping. Raises AssertionError that names the inconsistency."""
        if self.blocks != self._ledger.reserved(Tier.HBM, Use.LAYERS):
            raise AssertionError(f"{self!r} is not what the ledger says")
        self.cells.check()
        for cell in self.cells:
            if cell.strip.cells.get(cell.place) is not cell or cell.strip not in self._strips:
                raise AssertionError(f"cell {cell.number} is in no strip")

    def __repr__(self) -> str:
        return f"LayerRegion({self.blocks}/{self.limit} blocks, {len(self.cells)} cells, {self.counters})"

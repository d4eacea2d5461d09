"""Copies between the engine's pool planes and arena blocks, layer by layer, without the GIL.

A *plan* is made once per request: it checks every slot and block id, and merges the tokens of a block whose
slots lie side by side (usually all of them) into one run. Each layer is then one call that only copies, and
may run in any thread while the interpreter goes on.

These are copies by address inside one address space: the pool of a CPU host. A pool in GPU memory is copied
by the engine.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from sglang_ext.geometry import BlockLayout

if TYPE_CHECKING:
    from sglang_ext.tiered_store.dram.arena import Arena
    from sglang_ext.tiered_store.dram.memory import Bytes

Int64s = npt.NDArray[np.int64]


@functools.cache
def _kernels() -> Any:
    from sglang_ext.tiered_store import _kernels

    return _kernels


def warmup() -> None:
    """Load the copy loops now, so that no request waits for it: 0.5 s, or 2 s if they must be compiled."""
    _kernels()


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """The pairs of slots and blocks to copy: checked, and merged into runs. Make one with `PoolCopier.plan`.

    runs: int64, shape (runs, 3): slot, block * block_tokens + token in the block, tokens.
    """

    runs: Int64s
    blocks: int

    @property
    def tokens(self) -> int:
        return int(self.runs[:, 2].sum())

    def split(self, parts: int) -> list[CopyPlan]:
        """The plan in at most `parts` plans of about equally many runs, for as many threads."""
        pieces = np.array_split(self.runs, parts)
        return [CopyPlan(np.ascontiguousarray(piece), self.blocks) for piece in pieces if len(piece)]


class PlaneAddresses(Protocol):
    """A tensor of the pool: where it begins, bytes from row to row, and bytes of a row."""

    @property
    def address(self) -> int: ...

    @property
    def slot_stride(self) -> int: ...

    @property
    def row_bytes(self) -> int: ...


class PoolAddresses(Protocol):
    """The part of a `Geometry` that a copy needs."""

    @property
    def layout(self) -> BlockLayout: ...

    @property
    def planes(self) -> Sequence[PlaneAddresses]: ...

    @property
    def slots(self) -> int: ...


class PoolCopier:
    """Copies between the pool that `geometry` describes and the blocks of `arena`.

    The caller keeps both mapped, and keeps slots and blocks from being given to others, until a copy returns.

    Raises:
        ValueError: pool and arena do not have the same block layout.
    """

    def __init__(self, geometry: PoolAddresses, arena: Arena) -> None:
        if geometry.layout != arena.layout:
            raise ValueError(
                f"the pool's blocks ({geometry.layout.facts()}) are not the arena's ({arena.layout.facts()})"
            )
        if not all(plane.address for plane in geometry.planes):
            raise ValueError("a plane has no address: this geometry describes a layout, not a pool")
        self.geometry = geometry
        self.arena = arena
        self._layout = geometry.layout
        self._planes: Int64s = np.array(
            [
                (plane.address, plane.slot_stride, plane.row_bytes, offset)
                for plane, offset in zip(geometry.planes, self._layout.plane_offsets, strict=False)
            ],
            dtype=np.int64,
        )

    def plan(self, slots: Int64s | Sequence[int], blocks: Int64s | Sequence[int]) -> CopyPlan:
        """Check slots and blocks and merge them into runs.

        Args:
            slots: token slots in the pool, `block_tokens` for each block, shape (blocks * block_tokens,).
            blocks: ids of arena blocks, shape (blocks,).

        Raises:
            ValueError: the lengths do not fit, or a slot or block is out of range.
        """
        slot_array = np.ascontiguousarray(slots, dtype=np.int64)
        block_array = np.ascontiguousarray(blocks, dtype=np.int64)
        tokens = self._layout.block_tokens
        if slot_array.ndim != 1 or block_array.ndim != 1 or slot_array.size != block_array.size * tokens:
            raise ValueError(
                f"{slot_array.shape} slots do not fill {block_array.shape} blocks of {tokens} tokens"
            )
        _check_range("slot", slot_array, self.geometry.slots)
        _check_range("block", block_array, self.arena.n_blocks)
        runs = np.empty((slot_array.size, 3), dtype=np.int64)
        count = _kernels().find_runs(slot_array, block_array, tokens, runs)
        return CopyPlan(runs[:count].copy(), block_array.size)

    def plan_staging(self, slots: Int64s | Sequence[int]) -> CopyPlan:
        """As `plan`, for blocks that lie densely in a staging buffer, one after the other from its start.

        Raises:
            ValueError: not a whole number of blocks, or a slot is out of range.
        """
        slot_array = np.ascontiguousarray(slots, dtype=np.int64)
        tokens = self._layout.block_tokens
        if slot_array.ndim != 1 or slot_array.size % tokens:
            raise ValueError(f"{slot_array.shape} slots are not whole blocks of {tokens} tokens")
        _check_range("slot", slot_array, self.geometry.slots)
        blocks = np.arange(slot_array.size // tokens)
        runs = np.empty((slot_array.size, 3), dtype=np.int64)
        count = _kernels().find_runs(slot_array, blocks, tokens, runs)
        return CopyPlan(runs[:count].copy(), blocks.size)

    def scatter_staging(self, plan: CopyPlan, layer: int, rows: Bytes) -> int:
        """Copy one layer from a staging buffer into the pool, for loads that pass by the arena.

        Args:
            plan: from `plan_staging`.
            rows: uint8, shape (at least the plan's blocks, layer bytes), contiguous.

        Returns the bytes copied. Raises ValueError when `rows` is something else.
        """
        layout = self._layout
        if not 0 <= layer < layout.n_layers:
            raise ValueError(f"layer {layer} is outside of [0, {layout.n_layers})")
        size = layout.layer_bytes(layer)
        fits = rows.ndim == 2 and rows.shape[0] >= plan.blocks and rows.shape[1] == size
        if not fits or rows.dtype != np.uint8 or not rows.flags.c_contiguous:
            raise ValueError(f"staging rows {rows.shape} do not hold {plan.blocks} blocks of {size} bytes")
        first, last = layout.first_plane[layer], layout.first_plane[layer + 1]
        planes = self._planes.copy()
        planes[:, 3] -= layout.layer_offsets[layer]
        _kernels().move_planes(
            planes, first, last, rows.ctypes.data, size, plan.runs, layout.block_tokens, False
        )
        return plan.tokens * sum(layout.row_bytes[first:last])

    def gather(self, plan: CopyPlan, layer: int, stop: int | None = None) -> int:
        """Copy local layers [layer, stop) from the pool into the arena; `stop` is layer + 1 unless given.

        Returns the bytes copied.
        """
        return self._move(plan, layer, layer + 1 if stop is None else stop, to_arena=True)

    def scatter(self, plan: CopyPlan, layer: int, stop: int | None = None) -> int:
        """Copy local layers [layer, stop) from the arena into the pool; `stop` is layer + 1 unless given.

        Slots of one plan must differ from each other. Returns the bytes copied.
        """
        return self._move(plan, layer, layer + 1 if stop is None else stop, to_arena=False)

    def scatter_to(self, plan: CopyPlan, layer: int, place: int) -> int:
        """Copy one local layer from the arena into the pool, into the planes of layer `place`, whose rows are
        alike. Returns the bytes copied.
        """
        return self._move(plan, layer, layer + 1, to_arena=False, place=place)

    def plan_within(self, source: Int64s | Sequence[int], target: Int64s | Sequence[int]) -> Int64s:
        """Check a copy of whole rows from slots to slots of the pool.

        Raises:
            ValueError: not as many of one as of the other, or a slot is out of range.
        """
        pairs = np.array([source, target], dtype=np.int64)
        _check_range("slot", pairs, self.geometry.slots)
        return pairs

    def move_within(self, plan: Int64s, place: int, layer: int) -> None:
        """Copy rows of the pool from the planes of one layer to those of another, whose rows are alike.

        Args:
            plan: from `plan_within`.
        """
        first, count = self._planes_of(layer, place)
        _kernels().move_rows(self._planes, self._layout.first_plane[place], first, count, plan)

    def _planes_of(self, layer: int, place: int) -> tuple[int, int]:
        """The first plane of a layer, and how many there are, where `place` could hold them."""
        layout = self._layout
        for each in (layer, place):
            if not 0 <= each < layout.n_layers:
                raise ValueError(f"layer {each} is outside of [0, {layout.n_layers})")
        first, last = layout.first_plane[layer], layout.first_plane[layer + 1]
        other = layout.first_plane[place]
        if layout.row_bytes[other : layout.first_plane[place + 1]] != layout.row_bytes[first:last]:
            raise ValueError(f"rows of layer {layer} are not as those of layer {place}")
        return first, last - first

    def _move(
        self, plan: CopyPlan, layer: int, stop: int, *, to_arena: bool, place: int | None = None
    ) -> int:
        layout, planes = self._layout, self._planes
        if not 0 <= layer <= stop <= layout.n_layers:
            raise ValueError(f"layers [{layer}, {stop}) are outside of [0, {layout.n_layers})")
        if not self.arena.blocks.size:
            raise ValueError("the arena is closed")
        first, last = layout.first_plane[layer], layout.first_plane[stop]
        if place is not None:
            self._planes_of(layer, place)
            planes = planes.copy()
            planes[first:last, :3] = planes[layout.first_plane[place] : layout.first_plane[place + 1], :3]
        _kernels().move_planes(
            planes,
            first,
            last,
            self.arena.address,
            self.arena.block_bytes,
            plan.runs,
            layout.block_tokens,
            to_arena,
        )
        return plan.tokens * sum(layout.row_bytes[first:last])


def _check_range(name: str, values: Int64s, size: int) -> None:
    if values.size and (int(values.min()) < 0 or int(values.max()) >= size):
        raise ValueError(f"{name}s {values.min()}..{values.max()} are outside of [0, {size})")

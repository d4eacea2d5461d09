"""Unequal parallelism: the byte ranges of peer ranks that make up the blocks of this rank (MemServe, 4.3).

Pure arithmetic over the metadata of CONNECT, done once per peer instance. TP n to m, PP n to m, both at
once, and KV heads or latents that several ranks replicate. The result is a *template* per peer rank: rows
that say, for block 0, which chunk of which remote region goes where in which local region, and how far both
move per block. A transfer then only adds block ids.

    rank plan = all rows from one peer rank      row = (run of block 0, strides per block and per unit, layer)

A *unit* is the smaller of the two block sizes: pages of 1 token can be filled from blocks of 16 and the
other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sglang_ext.disagg.errors import RangeError, RefusedError
from sglang_ext.disagg.runs import TEMPLATE_COLUMNS, Ids, Runs, expand
from sglang_ext.disagg.tensors import PoolMeta, Strided, dtypes, pool_strided
from sglang_ext.geometry import PlaneKind

Locate = Callable[[int, int], tuple[int, int]]
"""(address, bytes) -> (region, offset); raises RangeError when no one region holds them all."""


@dataclass(frozen=True)
class RankPlan:
    """The reads from, or writes to, one peer rank.

    template: int64, shape (rows, 10), see `runs`; column 9 is the layer in the whole model.
    split_remote, split_local: units per block of each side. blocks_remote, blocks_local: valid ids per side.
    """

    rank: int
    template: npt.NDArray[np.int64]
    split_remote: int
    split_local: int
    blocks_remote: int
    blocks_local: int

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the model that this rank serves."""
        return tuple(np.unique(self.template[:, 9]).tolist())

    @cached_property
    def _merged(self) -> npt.NDArray[np.int64]:
        """The template for all layers: rows that continue each other on both sides are one."""
        rows: list[npt.NDArray[np.int64]] = []
        for row in self.template:
            last = rows[-1] if rows else None
            if (
                last is not None
                and (row[[0, 2, 5, 6, 7, 8]] == last[[0, 2, 5, 6, 7, 8]]).all()
                and row[1] == last[1] + last[4]
                and row[3] == last[3] + last[4]
            ):
                last[4] += row[4]
            else:
                rows.append(row.copy())
        return np.array(rows, np.int64).reshape(len(rows), TEMPLATE_COLUMNS)

    def runs(self, remote: Ids, local: Ids, layers: Sequence[int] | None = None, merge: bool = True) -> Runs:
        """Runs for the blocks `remote` into (or from) the blocks `local`, in order of layers, then blocks.

        Both lists name whole blocks of their own side; they must cover the same number of tokens. `layers`
        restricts the transfer (by-layer hand-over); None means all.

        Raises:
            RangeError: an id is out of range, or the lists do not cover the same tokens.
        """
        remote, local = _ids(remote), _ids(local)
        if remote.size * self.split_remote != local.size * self.split_local:
            raise RangeError(
                f"{remote.size} remote blocks of {self.split_remote} units cannot fill {local.size} local "
                f"blocks of {self.split_local}"
            )
        template = self._merged
        if layers is not None:
            template = self.template
            template = template[np.isin(template[:, 9], np.asarray(layers, np.int64))]
        return expand(
            template,
            _units(remote, self.split_remote),
            _units(local, self.split_local),
            (self.split_remote, self.split_local),
            merge,
            (self.blocks_remote * self.split_remote, self.blocks_local * self.split_local),
        )


@dataclass(frozen=True)
class Plan:
    """The plans of all peer ranks that this rank needs; others of the instance need no connection."""

    ranks: tuple[RankPlan, ...]

    def rank(self, index: int) -> RankPlan | None:
        """The plan of one peer rank, None when nothing comes from it."""
        return next((r for r in self.ranks if r.rank == index), None)


def plan(
    local: PoolMeta,
    local_at: Locate,
    remotes: Sequence[PoolMeta | None],
    remote_at: Sequence[Locate],
    replica: int = 0,
) -> Plan:
    """Where each (layer, kind, head) of this rank comes from.

    remotes: the same pool on every rank of the peer instance, in rank order; None for ranks that are not
        connected. remote_at: how to find addresses in each rank's registered regions.
    replica: the preferred one of several ranks with the same bytes, modulo their number; pass this rank's
        index, so that replicas share the load.

    Raises:
        RefusedError: dtype, model or block size differ, or the peers hold too little; the text names the
            difference.
    """
    mine = pool_strided(local)
    theirs = [None if r is None else pool_strided(r) for r in remotes]
    rows: list[list[tuple[int, ...]]] = [[] for _ in remotes]
    unit = _unit(local, remotes)
    for remote, held in zip(remotes, theirs, strict=True):
        if remote is not None and held is not None:
            _same_model(local, mine, remote, held)
    for target in mine:
        need = _heads(target)
        holders = [
            (rank, s)
            for rank, held in enumerate(theirs)
            for s in held or ()
            if (s.layer, s.kind) == (target.layer, target.kind)
        ]
        for rank, source, first, count in _cover(need, holders, replica, target):
            rows[rank] += _rows(source, remote_at[rank], target, local_at, first, count, unit)
    plans: list[RankPlan] = []
    for rank, (remote, found) in enumerate(zip(remotes, rows, strict=True)):
        if remote is None or not found:
            continue
        template = np.array(found, np.int64).reshape(len(found), TEMPLATE_COLUMNS)
        plans.append(
            RankPlan(
                rank,
                template,
                remote.block_tokens // unit,
                local.block_tokens // unit,
                remote.blocks,
                local.blocks,
            )
        )
    return Plan(tuple(plans))


def push_plan(
    local: PoolMeta, local_at: Locate, remotes: Sequence[PoolMeta | None], remote_at: Sequence[Locate]
) -> Plan:
    """Where each (layer, kind, head) of this rank has to be written: every peer rank that holds it gets it.

    A peer rank may need others beside this one (TP n to 1): its own `plan` lists the ranks that fill it
    between them, and the pushing rank is one of those.

    Raises:
        RefusedError: as `plan`.
    """
    mine = {(s.layer, s.kind): s for s in pool_strided(local)}
    unit = _unit(local, remotes)
    plans: list[RankPlan] = []
    for rank, remote in enumerate(remotes):
        if remote is None:
            continue
        theirs = pool_strided(remote)
        _same_model(local, tuple(mine.values()), remote, theirs)
        shared = [(s, mine[s.layer, s.kind]) for s in theirs if (s.layer, s.kind) in mine]
        overlaps = [
            (s, t, max(_heads(s).start, _heads(t).start), min(_heads(s).stop, _heads(t).stop))
            for s, t in shared
        ]
        overlaps = [(s, t, low, high) for s, t, low, high in overlaps if low < high]
        if not overlaps:
            continue
        rows = [
            row
            for s, t, low, high in overlaps
            for row in _rows(s, remote_at[rank], t, local_at, low, high - low, unit)
        ]
        plans.append(
            RankPlan(
                rank,
                np.array(rows, np.int64).reshape(len(rows), TEMPLATE_COLUMNS),
                remote.block_tokens // unit,
                local.block_tokens // unit,
                remote.blocks,
                local.blocks,
            )
        )
    return Plan(tuple(plans))


def _ids(blocks: Ids) -> Ids:
    return np.ascontiguousarray(np.asarray(blocks, np.int64))


def _units(blocks: Ids, split: int) -> Ids:
    if split == 1:
        return blocks
    units: Ids = (blocks[:, None] * split + np.arange(split, dtype=np.int64)[None, :]).reshape(-1)
    return units


def _unit(local: PoolMeta, remotes: Sequence[PoolMeta | None]) -> int:
    sizes = {local.block_tokens} | {r.block_tokens for r in remotes if r is not None}
    unit = min(sizes)
    if any(size % unit for size in sizes):
        raise RefusedError(
            "block_tokens",
            f"block sizes {sorted(sizes)} do not divide each other; set --kv-block-size alike",
        )
    return unit


def _same_model(
    local: PoolMeta, mine: tuple[Strided, ...], remote: PoolMeta, theirs: tuple[Strided, ...]
) -> None:
    if dtypes(mine) != dtypes(theirs):
        raise RefusedError(
            "dtype", f"KV here is {dtypes(mine)}, the peer's is {dtypes(theirs)}; set --kv-cache-dtype alike"
        )
    if local.shard[4:] != remote.shard[4:]:
        raise RefusedError(
            "model",
            f"(layers, heads) here {local.shard[4:]}, at the peer {remote.shard[4:]}; serve one model",
        )
    width = {(s.kind, s.width) for s in mine} ^ {(s.kind, s.width) for s in theirs}
    if width:
        raise RefusedError("model", f"head sizes differ: {sorted(width)}; serve one model")
    held = {(s.layer, s.kind): s.heads for s in theirs if PlaneKind(s.kind).has_heads}
    here, there = local.shard[3], remote.shard[3]
    for s in mine:
        heads = held.get((s.layer, s.kind))
        if heads is not None and heads * here != s.heads * there:
            raise RefusedError(
                "model",
                f"layer {s.layer} has {s.heads} KV heads for each {here} of the model, at the peer {heads} "
                f"for each {there}; serve one model with one draft model",
            )


def _heads(s: Strided) -> range:
    # Of latents and index keys every rank of a TP group holds all, and any one will do.
    return range(s.first_head, s.first_head + s.heads) if PlaneKind(s.kind).has_heads else range(1)


def _cover(
    need: range, holders: list[tuple[int, Strided]], replica: int, target: Strided
) -> list[tuple[int, Strided, int, int]]:
    """(rank, source, first head, heads) that together cover `need` once, in as few parts as may be."""
    parts: list[tuple[int, Strided, int, int]] = []
    head = need.start
    while head < need.stop:
        reach = [(min(_heads(s).stop, need.stop), rank, s) for rank, s in holders if head in _heads(s)]
        if not reach:
            raise RefusedError(
                "shard",
                f"no connected peer rank holds layer {target.layer} {target.kind} head {head}; "
                "connect to every rank of the instance",
            )
        furthest = max(stop for stop, _, _ in reach)
        best = sorted(((rank, s) for stop, rank, s in reach if stop == furthest), key=lambda x: x[0])
        rank, source = best[replica % len(best)]
        parts.append((rank, source, head, furthest - head))
        head = furthest
    return parts


def _rows(
    source: Strided,
    source_at: Locate,
    target: Strided,
    target_at: Locate,
    first: int,
    heads: int,
    unit: int,
) -> list[tuple[int, ...]]:
    """Template rows for heads [first, first + heads) of one layer and kind, for unit 0 of block 0."""
    # (size, stride at the source, stride at the target) per dim of the part; dims of size 1 do not matter.
    dims = [
        (unit, source.token_stride, target.token_stride),
        (heads, source.head_stride, target.head_stride),
        (source.width, source.element_stride, target.element_stride),
    ]
    dims = sorted((d for d in dims if d[0] > 1), key=lambda d: d[1])
    chunk = source.item
    while dims and dims[0][1] == chunk == dims[0][2]:
        chunk *= dims[0][0]
        dims.pop(0)
    offsets = [(0, 0)]
    for size, there, here in dims:
        offsets = [(a + i * there, b + i * here) for i in range(size) for a, b in offsets]
    offsets.sort()
    base = source.address + (first - source.first_head) * source.head_stride
    into = target.address + (first - target.first_head) * target.head_stride
    remote, remote_base = source_at(source.address, source.span)
    local, local_base = target_at(target.address, target.span)
    remote_base += base - source.address
    local_base += into - target.address
    steps = (source.block_stride, unit * source.token_stride, target.block_stride, unit * target.token_stride)
    return [(remote, remote_base + a, local, local_base + b, chunk, *steps, source.layer) for a, b in offsets]

"""Runs: the ranges to be moved, as rows of numbers, and the arithmetic on them.

A run is one contiguous range on both sides. A batch of runs is an int64 array of shape (n, 5):

    column 0  remote region     1  byte offset in it     2  local region     3  byte offset in it     4  bytes

Regions are indices into the registered memory of each side, so that the same run serves every transport: a
transport adds the base address that it knows for a region (the owner's own, or where the reader has mapped
it).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from sglang_ext.compiled import kernel, libc, prefetch, stream
from sglang_ext.disagg.errors import RangeError

Runs = npt.NDArray[np.int64]
"""Shape (n, 5), C order."""
Ids = npt.NDArray[np.int64]

REMOTE, REMOTE_AT, LOCAL, LOCAL_AT, BYTES = 0, 1, 2, 3, 4
RUN_COLUMNS: Final = 5

_memcpy = libc("memcpy", "intp", "intp", "intp")

# Columns of a template row beyond those of a run: byte strides per block and per unit inside a block, each
# side, and the layer (index in the plan's sorted layers) for by-layer transfers.
TEMPLATE_COLUMNS: Final = 10


def total_bytes(runs: Runs) -> int:
    """Bytes that a batch moves."""
    return int(runs[:, BYTES].sum())


@kernel
def _expand(template, remote, local, splits, limits, merge, out):  # type: ignore[no-untyped-def]
    """Rows for every template row and unit, merging a row into the one before where both sides continue
    it; -1 when a remote id leaves its limit, -2 when a local one does.
    """
    split_remote, split_local = splits
    for i in range(remote.shape[0]):
        if remote[i] < 0 or remote[i] >= limits[0]:
            return -1
        if local[i] < 0 or local[i] >= limits[1]:
            return -2
    n = 0
    for t in range(template.shape[0]):
        size = template[t, 4]
        for i in range(remote.shape[0]):
            at = template[t, 1]
            at += (remote[i] // split_remote) * template[t, 5] + (remote[i] % split_remote) * template[t, 6]
            to = template[t, 3]
            to += (local[i] // split_local) * template[t, 7] + (local[i] % split_local) * template[t, 8]
            if (
                merge
                and n
                and out[n - 1, 0] == template[t, 0]
                and out[n - 1, 2] == template[t, 2]
                and out[n - 1, 1] + out[n - 1, 4] == at
                and out[n - 1, 3] + out[n - 1, 4] == to
            ):
                out[n - 1, 4] += size
            else:
                out[n, 0] = template[t, 0]
                out[n, 1] = at
                out[n, 2] = template[t, 2]
                out[n, 3] = to
                out[n, 4] = size
                n += 1
    return n


def expand(
    template: Runs,
    remote: Ids,
    local: Ids,
    splits: tuple[int, int] = (1, 1),
    merge: bool = True,
    limits: tuple[int, int] = (1 << 48, 1 << 48),
) -> Runs:
    """The runs of the units `remote[i] -> local[i]`, for every row of a plan's template.

    splits: units per block of the remote and the local side; a unit's id is block * split + index in the
        block.
    merge: join a run to the one before where both sides continue it; off only to measure the benefit of
        merging.
    limits: units of the remote and the local side.

    Raises:
        RangeError: a unit's id is not below its side's limit.
    """
    out = np.empty((template.shape[0] * remote.shape[0], RUN_COLUMNS), np.int64)
    n = _expand(template, remote, local, splits, limits, merge, out)
    if n < 0:
        side, ids, split, limit = (
            ("remote", remote, splits[0], limits[0]) if n == -1 else ("local", local, splits[1], limits[1])
        )
        found = f"{ids.min() // split} to {ids.max() // split}"
        raise RangeError(f"{side} block ids must lie in [0, {limit // split}), got {found}")
    return out[:n]


@kernel
def _slot(remote, at, local, to):  # type: ignore[no-untyped-def]
    """Hash of a start. Offsets stay below 2**48, so nothing here leaves 63 bits."""
    h = at * 31 + to * 17 + remote * 7 + local
    h = h ^ (h >> 31)
    return ((h & 0x7FFFFFFF) * 0x9E3779B1) >> 20


@kernel
def _coalesce(runs, out, group, slots, following, taken):  # type: ignore[no-untyped-def]
    """Chains of runs that continue each other on both sides; each chain becomes one row of `out`.

    Open addressing over the starts of runs: the successor of a run starts where the run ends.
    `slots` must be filled with -1 and be a power of two, at least twice the rows.
    """
    n = runs.shape[0]
    mask = slots.shape[0] - 1
    for i in range(n):
        h = _slot(runs[i, 0], runs[i, 1], runs[i, 2], runs[i, 3]) & mask
        while slots[h] != -1:
            h = (h + 1) & mask
        slots[h] = i
        following[i] = -1
        taken[i] = 0
    for i in range(n):
        at = runs[i, 1] + runs[i, 4]
        to = runs[i, 3] + runs[i, 4]
        h = _slot(runs[i, 0], at, runs[i, 2], to) & mask
        while slots[h] != -1:
            j = slots[h]
            if (
                taken[j] == 0
                and j != i
                and runs[j, 1] == at
                and runs[j, 3] == to
                and runs[j, 0] == runs[i, 0]
                and runs[j, 2] == runs[i, 2]
            ):
                following[i] = j
                taken[j] = 1
                break
            h = (h + 1) & mask
    m = 0
    for i in range(n):
        if taken[i]:
            continue
        for c in range(5):
            out[m, c] = runs[i, c]
        group[i] = m
        j = following[i]
        while j != -1:
            out[m, 4] += runs[j, 4]
            group[j] = m
            j = following[j]
        m += 1
    return m


def coalesce(runs: Runs) -> tuple[Runs, npt.NDArray[np.int64]]:
    """Merge every group of runs that is contiguous on both the remote and the local side (KVDirect, 4.2).

    The order of the input does not matter: a run finds its continuation wherever it stands, so no merge that
    could be made is missed. Merged runs come in the order of their first members.

    Returns the merged runs and, for each input row, the merged row that holds it. Empty runs must not occur.
    """
    n = runs.shape[0]
    if n < 2:
        return runs, np.zeros(n, np.int64)
    size = 16
    while size < 2 * n:
        size *= 2
    out = np.empty((n, RUN_COLUMNS), np.int64)
    group = np.empty(n, np.int64)
    m = _coalesce(runs, out, group, np.full(size, -1, np.int64), np.empty(n, np.int64), np.empty(n, np.int8))
    return out[:m], group


@kernel
def _cut(runs, limit, out, piece):  # type: ignore[no-untyped-def]
    """Split runs so that pieces of at most `limit` bytes can be formed; returns (rows, pieces)."""
    n = 0
    number = 0
    filled = 0
    for i in range(runs.shape[0]):
        done = 0
        while done < runs[i, 4]:
            rest = runs[i, 4] - done
            if filled and filled + rest > limit:
                number += 1
                filled = 0
            take = min(rest, limit)
            out[n, 0] = runs[i, 0]
            out[n, 1] = runs[i, 1] + done
            out[n, 2] = runs[i, 2]
            out[n, 3] = runs[i, 3] + done
            out[n, 4] = take
            piece[n, 0] = number
            piece[n, 1] = i
            n += 1
            filled += take
            done += take
    return n, number + 1 if n else 0


def cut(runs: Runs, limit: int) -> tuple[Runs, npt.NDArray[np.int64]]:
    """Cut a batch into pieces of at most `limit` bytes; only a run longer than that is itself cut.

    Returns the rows, and for each the number of its piece and the row of `runs` that it came from, shape
    (n, 2).
    """
    most = runs.shape[0] + total_bytes(runs) // limit + 1
    out = np.empty((most, RUN_COLUMNS), np.int64)
    piece = np.empty((most, 2), np.int64)
    n, _ = _cut(runs, limit, out, piece)
    return out[:n], piece[:n]


def steps(runs: Runs, limit: int, most: int = 1 << 62) -> Iterator[Runs]:
    """A batch in parts of at most `limit` bytes, as `cut` makes them, and of at most `most` rows."""
    rows, pieces = cut(np.ascontiguousarray(runs), limit)
    first = 0
    for end in [*(np.flatnonzero(np.diff(pieces[:, 0])) + 1).tolist(), len(rows)]:
        while first < end:
            stop = min(end, first + most)
            yield rows[first:stop]
            first = stop


@kernel
def _outside(runs, side, sizes):  # type: ignore[no-untyped-def]
    for i in range(runs.shape[0]):
        r = runs[i, side]
        at = runs[i, side + 1]
        n = runs[i, 4]
        if r < 0 or r >= sizes.shape[0] or n <= 0 or at < 0 or at > sizes[r] or n > sizes[r] - at:
            return i
    return -1


def outside(runs: Runs, side: int, sizes: npt.NDArray[np.int64]) -> int:
    """The first row whose `side` (REMOTE or LOCAL) leaves its region, -1 when all lie inside.

    sizes: bytes of each region, 0 where an index is not in use.
    """
    return int(_outside(runs, side, sizes))


@kernel
def _survey(runs, remote_sizes, local_sizes):  # type: ignore[no-untyped-def]
    total = 0
    for i in range(runs.shape[0]):
        n = runs[i, 4]
        for side in (0, 2):
            sizes = local_sizes if side else remote_sizes
            r = runs[i, side]
            at = runs[i, side + 1]
            if r < 0 or r >= sizes.shape[0] or n <= 0 or at < 0 or at > sizes[r] or n > sizes[r] - at:
                return i, total
        total += n
    return -1, total


def survey(
    runs: Runs, remote_sizes: npt.NDArray[np.int64], local_sizes: npt.NDArray[np.int64]
) -> tuple[int, int]:
    """The first row that leaves its region on either side, -1 when all lie inside; and the bytes of all."""
    bad, total = _survey(runs, remote_sizes, local_sizes)
    return int(bad), int(total)


@kernel
def copy_runs(runs, to_bases, to, from_bases, source, shortest, flag):  # type: ignore[no-untyped-def]
    """Copy run by run; `to` and `source` are the columns of the two sides. -1 when cancelled.

    shortest: run that is stored past the cache; 0 for none. A full fence has to follow.
    """
    step = 4194304
    for i in range(runs.shape[0]):
        into = to_bases[runs[i, to]] + runs[i, to + 1]
        out = from_bases[runs[i, source]] + runs[i, source + 1]
        left = runs[i, 4]
        past = shortest > 0 and left >= shortest
        if past and i + 2 < runs.shape[0]:
            # The hardware's prefetcher stops at a page's end, and a scattered block begins in another page:
            # ask for the beginnings of the block after the next, whose translations cost as much as a
            # copied page.
            ahead = from_bases[runs[i + 2, source]] + runs[i + 2, source + 1]
            prefetch(ahead)
            prefetch(ahead + 64)
            prefetch(ahead + 128)
            prefetch(ahead + 192)
            prefetch(to_bases[runs[i + 2, to]] + runs[i + 2, to + 1])
        while left > 0:
            if flag[0]:
                return -1
            n = min(left, step)
            if past:
                stream(into, out, n)
            else:
                _memcpy(into, out, n)
            into += n
            out += n
            left -= n
    return 0


def warm() -> None:
    """Load the compiled loops, or compile them where they are not cached: not while a peer waits."""
    one = np.array([(0, 0, 0, 0, 1)], np.int64)
    ids = np.zeros(1, np.int64)
    expand(np.zeros((1, TEMPLATE_COLUMNS), np.int64), ids, ids)
    cut(coalesce(one)[0], 1)
    outside(one, REMOTE, ids)
    survey(one, ids, ids)

"""Compiled loops over planes and blocks. Import them only through `copy.warmup()`: that loads numba and may
compile.
"""

from __future__ import annotations

from sglang_ext.compiled import copy, fence, kernel


@kernel("void(int64[:,::1], int64, int64, intp, int64, int64[:,::1], int64, boolean)")
def move_planes(planes, first, last, arena, block_bytes, runs, block_tokens, to_arena):  # type: ignore[no-untyped-def]
    """Copy planes [first, last) of runs of slots between the engine's pool and arena blocks.

    planes: per plane (pool address, slot stride, row bytes, offset in a block).
    runs: per run (slot, block * block_tokens + token in the block, tokens); a run lies in one block.
    """
    for p in range(first, last):
        stride = planes[p, 1]
        row = planes[p, 2]
        for r in range(runs.shape[0]):
            block = runs[r, 1] // block_tokens
            token = runs[r, 1] - block * block_tokens
            pool = planes[p, 0] + runs[r, 0] * stride
            here = arena + block * block_bytes + planes[p, 3] + token * row
            length = row
            count = runs[r, 2]
            if stride == row:
                length = row * count
                count = 1
            for i in range(count):
                if to_arena:
                    copy(here + i * length, pool + i * stride, length)
                else:
                    copy(pool + i * stride, here + i * length, length)
    fence()


@kernel("int64(int64[::1], int64[::1], int64, int64[:,::1])")
def find_runs(slots, blocks, block_tokens, runs):  # type: ignore[no-untyped-def]
    """Merge neighbouring tokens of a block whose slots follow each other; returns the number of runs."""
    n = 0
    for b in range(blocks.shape[0]):
        for t in range(block_tokens):
            slot = slots[b * block_tokens + t]
            if t and runs[n - 1, 0] + runs[n - 1, 2] == slot:
                runs[n - 1, 2] += 1
            else:
                runs[n, 0] = slot
                runs[n, 1] = blocks[b] * block_tokens + t
                runs[n, 2] = 1
                n += 1
    return n


@kernel("void(int64[:,::1], int64, int64, int64, int64[:,::1])")
def move_rows(planes, source, target, count, slots):  # type: ignore[no-untyped-def]
    """Copy rows of `count` planes from `source` on to as many from `target` on, within the engine's pool.

    planes: as of `move_planes`. slots: (from, to), in two rows.
    """
    for p in range(count):
        row = planes[target + p, 2]
        for i in range(slots.shape[1]):
            copy(
                planes[target + p, 0] + slots[1, i] * planes[target + p, 1],
                planes[source + p, 0] + slots[0, i] * planes[source + p, 1],
                row,
            )
    fence()

"""Compiled copy loops. Import them only through `copy.warmup()`: that loads numba and may compile.

Compiled code is cached beside this file, or in the user's cache directory where that is read-only; where
neither can be written, each process compiles for itself.

Runs of at least `_STREAM_BYTES` go past the caches with non-temporal stores: a load or a write-through moves
more than fits into them, and reading lines only to overwrite them costs up to a third of the bandwidth.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

logger = logging.getLogger(__name__)

_LINE = 64
_STREAM_BYTES = 2048


def _compile(signature: str) -> Callable[[Callable[..., Any]], Any]:
    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(signature, nogil=True, cache=True)(function)
        except (RuntimeError, OSError) as error:  # numba has no directory that it can write its cache to
            logger.warning(
                "copy kernels are compiled anew in each process (%s); "
                "set NUMBA_CACHE_DIR to a writable directory",
                error,
            )
            return numba.njit(signature, nogil=True)(function)

    return decorate


@intrinsic  # type: ignore[untyped-decorator]
def _memcpy(context: Any, target: Any, source: Any, count: Any) -> Any:
    """memcpy(target, source, count) on addresses."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, origin = (builder.inttoptr(arg, cgutils.voidptr_t) for arg in args[:2])
        cgutils.raw_memcpy(builder, to, origin, args[2], 1, align=1)
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def _stream_line(context: Any, target: Any, source: Any) -> Any:
    """Copy one cache line past the caches. `target` must be aligned to it, `source` need not be."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), _LINE // 8).as_pointer()
        value = builder.load(builder.inttoptr(args[1], line), align=1)
        store = builder.store(value, builder.inttoptr(args[0], line), align=_LINE)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp), generate


@intrinsic  # type: ignore[untyped-decorator]
def _fence(context: Any) -> Any:
    """Make streamed stores visible to other cores before anything that follows."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@_compile("void(uintp, uintp, intp)")
def _copy(target, source, count):  # type: ignore[no-untyped-def]
    if count < _STREAM_BYTES:
        _memcpy(target, source, count)
        return
    head = (numba.uintp(0) - target) % numba.uintp(_LINE)
    if head:
        _memcpy(target, source, numba.intp(head))
    done = numba.intp(head)
    while done + _LINE <= count:
        _stream_line(target + numba.uintp(done), source + numba.uintp(done))
        done += _LINE
    if done < count:
        _memcpy(target + numba.uintp(done), source + numba.uintp(done), count - done)


@_compile("void(int64[:,::1], int64, int64, uintp, int64, int64[:,::1], int64, boolean)")
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
            pool = numba.uintp(planes[p, 0] + runs[r, 0] * stride)
            here = arena + numba.uintp(block * block_bytes + planes[p, 3] + token * row)
            length = row
            count = runs[r, 2]
            if stride == row:
                length = row * count
                count = 1
            for i in range(count):
                if to_arena:
                    _copy(here + numba.uintp(i * length), pool + numba.uintp(i * stride), length)
                else:
                    _copy(pool + numba.uintp(i * stride), here + numba.uintp(i * length), length)
    _fence()


@_compile("int64(int64[::1], int64[::1], int64, int64[:,::1])")
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

"""Compiled loops: numba without the GIL, cached on disk; and copying past the caches.

A kernel runs as plain Python where numba is absent: right, but slow, and holding the GIL. That serves hosts
on which only the verbs transport is used (its data path is the NIC's, not ours). Compiled code is cached
beside its source, or in the user's cache directory where that is read-only; where neither can be written,
each process compiles for itself. Importing this module imports numba.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

try:
    import numba
except ImportError:  # pragma: no cover - numba comes with SGLang
    numba = None

logger = logging.getLogger(__name__)

COMPILED: Final = numba is not None
"""Whether kernels are compiled, and so whether the transports that call libc from a kernel can be used."""
STREAM_BYTES: Final = 2048
"""Shorter runs are copied plainly."""


def kernel(function_or_signature: Callable[..., Any] | str) -> Any:
    """Compile a function so that it runs without the GIL: when it is first called, or now for a signature."""
    if isinstance(function_or_signature, str):
        return lambda function: _compiled(function, function_or_signature)
    return _compiled(function_or_signature)


def _compiled(function: Callable[..., Any], *signature: str) -> Callable[..., Any]:
    if numba is None:
        return function
    compiled: Callable[..., Any]
    try:
        compiled = numba.njit(*signature, nogil=True, cache=True)(function)
    except (RuntimeError, OSError) as error:  # numba has no directory that it can write its cache to
        logger.warning(
            "kernels are compiled anew in each process (%s); set NUMBA_CACHE_DIR to a writable directory",
            error,
        )
        compiled = numba.njit(*signature, nogil=True)(function)
    return compiled


def libc(name: str, *arguments: str, result: str = "intp") -> Any:
    """A function of libc that kernels can call; types are numba's names (`intp`, `int32`).

    The symbol is bound by name when the kernel is loaded, so that compiled kernels stay cacheable.
    """
    if numba is None:
        return None
    kinds = {"intp": numba.types.intp, "int32": numba.types.int32}
    kinds["int32*"] = numba.types.CPointer(numba.types.int32)
    return numba.types.ExternalFunction(name, kinds[result](*[kinds[a] for a in arguments]))


_memcpy = libc("memcpy", "intp", "intp", "intp")

if COMPILED:
    from llvmlite import ir  # type: ignore[import-untyped]
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    @intrinsic
    def _stream_line(context, target, source):  # type: ignore[no-untyped-def]
        """Copy 64 bytes with non-temporal stores. `target` is aligned to them, `source` need not be."""

        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            into, out = arguments
            half = ir.VectorType(ir.IntType(64), 4).as_pointer()
            mark = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
            for offset in (ir.Constant(into.type, 0), ir.Constant(into.type, 32)):  # faster than in one piece
                value = builder.load(builder.inttoptr(builder.add(out, offset), half), align=1)
                store = builder.store(value, builder.inttoptr(builder.add(into, offset), half), align=32)
                store.set_metadata("nontemporal", mark)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), generate

    @intrinsic
    def prefetch(context, address):  # type: ignore[no-untyped-def]
        """Fetch the line at `address` ahead, and with it the translation of its page. Never faults."""

        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            pointer = ir.IntType(8).as_pointer()
            small = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [pointer, small, small, small])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
            flags = [ir.Constant(small, x) for x in (0, 0, 1)]
            builder.call(function, [builder.inttoptr(arguments[0], pointer), *flags])
            return context.get_dummy_value()

        return types.void(types.intp), generate

    @intrinsic
    def _full_fence(context):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            builder.fence("seq_cst")
            return context.get_dummy_value()

        return types.void(), generate

    @kernel
    def fence():  # type: ignore[no-untyped-def]
        """No store before it moves behind it and no store after it moves before it, on any processor."""
        _full_fence()

else:  # pragma: no cover - numba comes with SGLang
    _stream_line = prefetch = None

    def fence() -> None:
        """Without compiled kernels: taking a lock is a full fence on x86 and an acquire elsewhere."""
        with threading.Lock():
            pass


@kernel
def stream(into, out, count):  # type: ignore[no-untyped-def]
    """Copy from address to address, past the caches: a `fence` has to follow.

    A plain copy reads every destination line from memory before it overwrites it, and evicts other data from
    the caches. KV that arrives is not read at once by this core; storing it past the cache moves a third less
    through memory: 1.1 to 1.5 times faster for runs of `STREAM_BYTES` and more.
    """
    head = min(count, -into & 63)
    if head:
        _memcpy(into, out, head)
    body = head + ((count - head) & -64)
    for at in range(head, body, 64):
        _stream_line(into + at, out + at)
    if body < count:
        _memcpy(into + body, out + body, count - body)


@kernel
def copy(into, out, count):  # type: ignore[no-untyped-def]
    """Copy from address to address, long runs past the caches: a `fence` has to follow."""
    if count < STREAM_BYTES:
        _memcpy(into, out, count)
    else:
        stream(into, out, count)

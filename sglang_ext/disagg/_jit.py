"""Compiled loops: numba's nopython mode without the GIL, cached on disk.

A kernel runs as plain Python where numba is absent: right, but slow, and holding the GIL. That serves hosts
on which only the verbs transport is used (its data path is the NIC's, not ours).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import numba
except ImportError:  # pragma: no cover - numba comes with SGLang
    numba = None

COMPILED = numba is not None
"""Whether kernels are compiled, and so whether the transports that call libc from a kernel can be used."""


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` so that it runs without the GIL; the result is cached beside the source."""
    if numba is None:
        return function
    compiled: Callable[..., Any] = numba.njit(nogil=True, cache=True)(function)
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

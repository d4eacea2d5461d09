"""``cudaMemcpyBatchAsync``: many copies by one call, for copies without a kernel of ours.

CUDA's runtime has it from 12.8 on; torch has no call for it. The driver does not merge neighbouring ranges:
one costs about half a microsecond of the host's time (vllm#48434), where a call for each costs two or three.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sglang_ext.engine.movers.mover import MoverError

_FIRST: Final = 12_080
_WITHOUT_FAILED_INDEX: Final = 13_000
"""From this version on the call does not report which copy failed."""
_IN_STREAM_ORDER: Final = 1


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("number", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """``struct cudaMemcpyAttributes``: sources are read in the stream's order; no hints of places."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


class BatchCopy:
    """The call. library: CUDA's runtime."""

    def __init__(self, library: Any) -> None:
        version = ctypes.c_int()
        status = library.cudaRuntimeGetVersion(ctypes.byref(version))
        if status != 0 or version.value < _FIRST or not hasattr(library, "cudaMemcpyBatchAsync"):
            raise MoverError(f"the CUDA runtime has no cudaMemcpyBatchAsync (version {version.value})")
        self._library = library
        self._reports = version.value < _WITHOUT_FAILED_INDEX
        self._attributes = _Attributes(_IN_STREAM_ORDER)
        self._first = (ctypes.c_size_t * 1)(0)

    def __call__(
        self,
        sources: npt.NDArray[np.int64],
        targets: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        stream: int,
    ) -> None:
        """Queue copies between any memory of GPUs and pinned memory.

        Args:
            sources, targets: addresses, int64. sizes: bytes, above 0.
            stream: not CUDA's default stream, which the call refuses.

        Raises:
            MoverError: CUDA refuses them.
        """
        if not len(sizes):
            return
        columns = [np.ascontiguousarray(each, np.int64) for each in (targets, sources, sizes)]
        failed = ctypes.c_size_t()
        status = self._library.cudaMemcpyBatchAsync(
            *(ctypes.c_void_p(int(each.ctypes.data)) for each in columns),
            ctypes.c_size_t(len(sizes)),
            ctypes.byref(self._attributes),
            self._first,
            ctypes.c_size_t(1),
            *((ctypes.byref(failed),) if self._reports else ()),
            ctypes.c_void_p(stream),
        )
        if status != 0:
            raise MoverError(f"cudaMemcpyBatchAsync failed with CUDA error {status}")


def batch_copy(library: Any) -> BatchCopy | None:
    """The call, where the runtime has it."""
    try:
        return BatchCopy(library)
    except MoverError:
        return None

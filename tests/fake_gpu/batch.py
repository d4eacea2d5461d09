"""``cudaMemcpyBatchAsync`` of an emulated runtime, by the C calling convention of its version."""

from __future__ import annotations

import ctypes
from typing import Any

_NAMES = ("targets", "sources", "sizes", "count", "attributes", "indices", "kinds", "failed", "stream")
_SIZES = {"count", "kinds"}


class Library:
    """A runtime of a CUDA version, such as 13000. calls: how many copies each batch had. fails: a status."""

    def __init__(self, version: int, fails: int = 0) -> None:
        self.version, self.fails = version, fails
        self.calls: list[int] = []
        names = [name for name in _NAMES if version < 13_000 or name != "failed"]
        types = [ctypes.c_size_t if name in _SIZES else ctypes.c_void_p for name in names]

        def copy(*values: Any) -> int:
            return self._copy(dict(zip(names, values, strict=True)))

        self._kept = ctypes.CFUNCTYPE(ctypes.c_int, *types)(copy)
        # As of a library: without types that would convert or check arguments.
        address = ctypes.cast(self._kept, ctypes.c_void_p).value
        assert address is not None
        if version >= 12_080:
            self.cudaMemcpyBatchAsync = ctypes.CFUNCTYPE(ctypes.c_int)(address)

    def cudaRuntimeGetVersion(self, found: Any) -> int:
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = self.version
        return 0

    def _copy(self, of: dict[str, Any]) -> int:
        count = of["count"]
        order = ctypes.c_int.from_address(of["attributes"]).value
        bad = (
            not of["stream"]
            or of["kinds"] != 1
            or order != 1
            or ctypes.c_size_t.from_address(of["indices"]).value
        )
        if bad or self.fails:
            return self.fails or 1
        self.calls.append(count)
        columns = [
            (ctypes.c_uint64 * count).from_address(of[name]) for name in ("targets", "sources", "sizes")
        ]
        for target, source, nbytes in zip(*columns, strict=True):
            ctypes.memmove(target, source, nbytes)
        return 0

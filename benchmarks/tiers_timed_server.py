"""SGLang's server as `sglang_ext.launch_server` starts it, which notes how long it stands still for loads.

What the scheduler's thread cannot do because KV has to be loaded shows in the time to first token one to one:
waiting for the lowest layer from disk before the request is admitted, preparing the load, waiting for a layer
in the forward pass, and verifying at its end what has streamed in. Against the seconds that a prompt takes to
compute this is too little to be seen as a difference of two of them. The sum of it is written to the file
that `FILE_VARIABLE` names, as one float64 of seconds since the start.

SGLang spawns its scheduler, and a spawned process imports this module again; only there anything is timed.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from sglang_ext import launch_server

FILE_VARIABLE = "SGLANG_EXT_BENCHMARK_STANDSTILL"
_SECONDS = struct.Struct("<d")


def standstill(path: Path) -> float:
    """Seconds that the server has stood still until now."""
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        return 0.0
    return float(_SECONDS.unpack(found)[0])


class Standstill:
    """Adds up seconds, and writes the sum to a file whenever it has changed."""

    def __init__(self, path: Path) -> None:
        self.seconds = 0.0
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        self._asked: dict[Hashable, float] = {}

    def add(self, seconds: float) -> None:
        self.seconds += seconds
        os.pwrite(self._file, _SECONDS.pack(self.seconds), 0)

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose calls count."""

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.add(time.perf_counter() - begin)

        return call

    def from_here(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``prefetch_from_storage``: a request looks on the disk, and may have to wait."""

        def call(cache: Any, handle: Hashable, *args: Any, **kwargs: Any) -> Any:
            self._asked[handle] = time.perf_counter()
            return function(cache, handle, *args, **kwargs)

        return call

    def to_here(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``check_prefetch_progress``: asked each pass, until the request need not wait."""

        def call(cache: Any, handle: Hashable) -> bool:
            ready = bool(function(cache, handle))
            if ready and handle in self._asked:
                self.add(time.perf_counter() - self._asked.pop(handle))
            return ready

        return call


def instrument(path: Path) -> None:
    """Time every place where the scheduler's thread stands still for a load."""
    from sglang_ext.engine.layer_gate import LayerGate
    from sglang_ext.engine.radix_cache import GlobalRadixCache

    still = Standstill(path)
    for owner, name, wrap in (
        (LayerGate, "wait_until", still.timed),
        (GlobalRadixCache, "init_load_back", still.timed),
        (GlobalRadixCache, "ready_to_load_host_cache", still.timed),
        (GlobalRadixCache, "streams_hold", still.timed),
        (GlobalRadixCache, "prefetch_from_storage", still.from_here),
        (GlobalRadixCache, "check_prefetch_progress", still.to_here),
    ):
        setattr(owner, name, wrap(getattr(owner, name)))


if __name__ == "__mp_main__" and FILE_VARIABLE in os.environ:
    instrument(Path(os.environ[FILE_VARIABLE]))

if __name__ == "__main__":
    launch_server.main(sys.argv[1:])

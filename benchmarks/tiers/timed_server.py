"""SGLang's server as `sglang_ext.launch_server` starts it, which notes how long it stands still for loads.

The time in which the scheduler's thread waits for KV loads adds one to one to the time to first token:
waiting for the lowest layer from disk before the request is admitted, preparing the load, waiting for a layer
in the forward pass, and verifying at its end the layers that have streamed in. Against the seconds that a
prompt takes to compute this is too little to be seen as a difference of two of them. The sums of it are
written to the file that `FILE_VARIABLE` names, one float64 of seconds since the start for each of `PARTS`.

SGLang spawns its scheduler, and a spawned process imports this module again; only there anything is timed.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import Any

from sglang_ext import launch_server

FILE_VARIABLE = "SGLANG_EXT_BENCHMARK_STANDSTILL"
PARTS = ("admission", "preparing", "layers", "verifying")
"""Waiting for the lowest layer from disk; slots, plan and start of the load; waiting for layers in the
forward pass; looking at its end whether all of it held."""
_SECONDS = struct.Struct(f"<{len(PARTS)}d")

Parts = dict[str, float]


def standstill(path: Path) -> Parts:
    """Seconds that the server has stood still until now, by part."""
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        return dict.fromkeys(PARTS, 0.0)
    return dict(zip(PARTS, _SECONDS.unpack(found), strict=True))


class Standstill:
    """Adds up seconds, and writes the sums to a file whenever one has changed."""

    def __init__(self, path: Path) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        self._asked: dict[Hashable, float] = {}

    def add(self, part: str, seconds: float) -> None:
        self.seconds[part] += seconds
        os.pwrite(self._file, _SECONDS.pack(*self.seconds.values()), 0)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose calls count for ``part``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.add(part, time.perf_counter() - begin)

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
                self.add("admission", time.perf_counter() - self._asked.pop(handle))
            return ready

        return call

    def close(self) -> None:
        os.close(self._file)


def instrument(path: Path) -> None:
    """Time every place where the scheduler's thread stands still for a load."""
    from sglang_ext.engine.movers.mover import LayerGate
    from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache

    still = Standstill(path)
    for owner, name, wrap in (
        (LayerGate, "wait_until", partial(still.timed, "layers")),
        (GlobalRadixCache, "init_load_back", partial(still.timed, "preparing")),
        (GlobalRadixCache, "ready_to_load_host_cache", partial(still.timed, "preparing")),
        (GlobalRadixCache, "streams_hold", partial(still.timed, "verifying")),
        (GlobalRadixCache, "prefetch_from_storage", still.from_here),
        (GlobalRadixCache, "check_prefetch_progress", still.to_here),
    ):
        setattr(owner, name, wrap(getattr(owner, name)))


if __name__ == "__mp_main__" and FILE_VARIABLE in os.environ:
    instrument(Path(os.environ[FILE_VARIABLE]))

if __name__ == "__main__":
    # A forked scheduler would not import this module again.
    os.environ["SGLANG_EXT_START_METHOD"] = "spawn"
    launch_server.main(sys.argv[1:])

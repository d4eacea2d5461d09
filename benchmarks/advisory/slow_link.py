"""SGLang's server with our cache, whose copies from DRAM to HBM are as slow as a link would make them.

On a host without a GPU both are the same memory, so that loading takes no longer than copying. Here a copy
takes at least its bytes over the bandwidth in the environment (`fleet.LINK`). Copies within HBM, and from HBM
to DRAM, run at full speed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from sglang_ext import launch_server
from sglang_ext.tiered_store.copy import PoolCopier


def slowed(copy: Callable[..., int], bytes_per_second: float) -> Callable[..., int]:
    """The same copy, which takes as long as its bytes do on the link."""

    def slow(*arguments: Any, **more: Any) -> int:
        begun = time.perf_counter()
        nbytes = copy(*arguments, **more)
        time.sleep(max(0.0, begun + nbytes / bytes_per_second - time.perf_counter()))
        return nbytes

    return slow


def limit(bytes_per_second: float) -> None:
    """Slow the copies of every pool of this process and of those that it forks."""
    PoolCopier.scatter = slowed(PoolCopier.scatter, bytes_per_second)  # type: ignore[method-assign]
    PoolCopier.scatter_to = slowed(PoolCopier.scatter_to, bytes_per_second)  # type: ignore[method-assign]


if __name__ in ("__main__", "__mp_main__"):
    limit(float(os.environ["SGLANG_EXT_BENCHMARK_LINK"]))

if __name__ == "__main__":
    launch_server.main(sys.argv[1:])

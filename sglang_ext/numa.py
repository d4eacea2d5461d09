"""NUMA: on which node memory lies."""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections import Counter
from typing import Final

_MOVE_PAGES: Final = {"x86_64": 279, "aarch64": 239}
"""Number of the system call, which has no wrapper in the C library."""
SAMPLES: Final = 64

_libc = ctypes.CDLL(None, use_errno=True)


def node_of(address: int, nbytes: int) -> int:
    """The NUMA node that most of a range of this process's memory lies on, by pages spread over it.

    Returns -1 where none of them has memory yet, or the kernel does not say.
    """
    call = _MOVE_PAGES.get(platform.machine())
    if call is None or nbytes < 1:
        return -1
    count = min(SAMPLES, -(-nbytes // mmap.PAGESIZE))
    step = nbytes // count
    pages = (ctypes.c_void_p * count)(
        *((address + i * step) // mmap.PAGESIZE * mmap.PAGESIZE for i in range(count))
    )
    nodes = (ctypes.c_int * count)()
    # Without nodes to move them to, it only tells where they are.
    if _libc.syscall(call, 0, ctypes.c_ulong(count), pages, None, nodes, 0) != 0:
        return -1
    told = Counter(node for node in nodes if node >= 0)
    return told.most_common(1)[0][0] if told else -1

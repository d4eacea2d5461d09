"""NUMA: list the nodes, find the node of memory, and place memory on one.

By system calls and ``/sys``, without libnuma. A container may forbid the calls, and a virtual machine may
expose no nodes: then the nodes are unknown, and memory lies where the kernel puts it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sglang_ext.errors import ConfigError

logger = logging.getLogger(__name__)

SYS: Final = Path("/sys")
FLAG: Final = "--kv-numa"
SAMPLES: Final = 64
"""Pages of a range that are asked for their node."""
_CALLS: Final = {"x86_64": {"move_pages": 279, "mbind": 237}, "aarch64": {"move_pages": 239, "mbind": 235}}
"""Numbers of system calls that have no wrapper in the C library."""
_PREFERRED: Final = 1
_BIND: Final = 2
_MASK_BITS: Final = 1024

_libc = ctypes.CDLL(None, use_errno=True)


def node_of(address: int, nbytes: int) -> int:
    """The NUMA node that most of a range of this process's memory lies on, by pages spread over it.

    Returns -1 where none of them has memory yet, or the kernel does not say.
    """
    if nbytes < 1:
        return -1
    count = min(SAMPLES, -(-nbytes // mmap.PAGESIZE))
    step = nbytes // count
    pages = (ctypes.c_void_p * count)(
        *((address + i * step) // mmap.PAGESIZE * mmap.PAGESIZE for i in range(count))
    )
    nodes = (ctypes.c_int * count)()
    # Without nodes to move them to, it only reports where they are.
    if _call("move_pages", 0, ctypes.c_ulong(count), pages, None, nodes, 0) != 0:
        return -1
    known = Counter(node for node in nodes if node >= 0)
    return known.most_common(1)[0][0] if known else -1


def cpus_by_node(root: Path = SYS) -> dict[int, frozenset[int]]:
    """The nodes of this host, and the processors of each."""
    found = {}
    for entry in sorted((root / "devices/system/node").glob("node[0-9]*")):
        if re.fullmatch(r"node\d+", entry.name):
            found[int(entry.name[4:])] = _cpus((entry / "cpulist").read_text(encoding="utf-8"))
    return found


def arena_node(
    wanted: str, gpu: int, cpus: frozenset[int], nodes: Mapping[int, frozenset[int]]
) -> int | None:
    """On which node a rank's arena shall lie; None for where the kernel puts it.

    Args:
        wanted: the value of `--kv-numa`: ``auto``, ``none`` or the number of a node.
        gpu: node of the rank's GPU; -1 where it has none, or it is unknown.
        cpus: that the rank may run on. nodes: as `cpus_by_node`.

    Raises:
        ConfigError: there is no such node.
    """
    if wanted == "none":
        return None
    if wanted != "auto":
        if int(wanted) not in nodes:
            there = ", ".join(map(str, nodes)) or "none that the kernel tells of"
            raise ConfigError(
                f"there is no NUMA node {wanted}; there are: {there}", field=FLAG, hint="Use one, or auto"
            )
        return int(wanted)
    if len(nodes) < 2:
        return None
    if gpu in nodes:
        return gpu
    # A rank that may run anywhere has no node of its own.
    return next((node for node, own in nodes.items() if cpus and cpus <= own), None)


def put(address: int, nbytes: int, node: int, *, strict: bool) -> str:
    """Have a range that was not touched yet lie on a node. strict: there or nowhere, instead of there first.

    Returns why the kernel refuses; empty when it does not.
    """
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    mode = _BIND if strict else _PREFERRED
    failed = _call(
        "mbind", ctypes.c_void_p(address), ctypes.c_ulong(nbytes), mode, mask, ctypes.c_ulong(_MASK_BITS), 0
    )
    return os.strerror(failed) if failed else ""


def place_arena(wanted: str, gpu: int, address: int, nbytes: int) -> None:
    """Have a rank's arena, which was not touched yet, lie where `arena_node` says.

    Raises:
        ConfigError: there is no such node, or the kernel refuses the named one.
    """
    node = arena_node(wanted, gpu, frozenset(os.sched_getaffinity(0)), cpus_by_node())
    if node is None:
        return
    refused = put(address, nbytes, node, strict=wanted != "auto")
    if refused and wanted != "auto":
        raise ConfigError(
            f"the arena cannot be put on NUMA node {node}: {refused}",
            field=FLAG,
            hint="Let the container call mbind (CAP_SYS_NICE, or its seccomp profile), or use none",
        )
    if refused:
        logger.warning("the arena lies where the kernel puts it, not on NUMA node %d: %s", node, refused)
    else:
        logger.info("the arena lies on NUMA node %d", node)


def _call(name: str, *arguments: object) -> int:
    """0, or the error number."""
    number = _CALLS.get(platform.machine(), {}).get(name)
    if number is None:
        return 38  # ENOSYS
    return 0 if _libc.syscall(number, *arguments) == 0 else ctypes.get_errno() or 38


def _cpus(text: str) -> frozenset[int]:
    """Of a list as sysfs has it: ``0-3,8``."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(cpu for low, _, high in ranges for cpu in range(int(low), int(high or low) + 1))

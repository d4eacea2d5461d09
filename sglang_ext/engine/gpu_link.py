"""Rates of copies between this process's GPU and the host, and a line of them in the log of a start.

Plain copies from and to pinned memory, on streams of their own. Rates of tiers and transfers are compared
with them (``sglang-ext gpu-check``).
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)

Reasons = Mapping[Any, str | None]
"""The reason against each transport, by its name; None for a usable one."""
COPY_BYTES = 64 << 20
"""Of one copy: a millisecond, so that its start hardly counts; a start has little GPU memory left."""


@dataclass(frozen=True)
class Link:
    """Bytes per second: to the GPU's memory, from it, both at once in sum, within it (read and written)."""

    to_gpu: float
    from_gpu: float
    both: float
    within: float


def measure(nbytes: int = COPY_BYTES, rounds: int = 5) -> Link:
    """The rates of the current GPU; medians of so many copies of so many bytes. Less than half a second."""
    here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    back = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    there, other = (torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    up, down = torch.cuda.Stream(), torch.cuda.Stream()

    def to_gpu() -> None:
        with torch.cuda.stream(up):
            there.copy_(here, non_blocking=True)

    def from_gpu() -> None:
        with torch.cuda.stream(down):
            back.copy_(other, non_blocking=True)

    def both() -> None:
        to_gpu()
        from_gpu()

    def within() -> None:
        with torch.cuda.stream(up):
            other.copy_(there)

    return Link(
        nbytes / _seconds(to_gpu, rounds),
        nbytes / _seconds(from_gpu, rounds),
        2 * nbytes / _seconds(both, rounds),
        2 * nbytes / _seconds(within, rounds),
    )


def _seconds(work: Callable[[], None], rounds: int) -> float:
    times = []
    for at in range(rounds + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if at:  # the first one loads kernels
            times.append(time.perf_counter() - begin)
    return max(statistics.median(times), 1e-9)


def in_words(rate: float) -> str:
    """Bytes per second for people."""
    return f"{rate / 1e9:.1f} GB/s"


def line(name: str, link: Link, *, pinned: bool, transports: Reasons) -> str:
    """The findings of a start, in one line.

    Args:
        name: of the card.
        pinned: whether the DRAM tier is.
        transports: the reason against each transport; None for a usable one.
    """
    usable = ", ".join(name for name, reason in transports.items() if reason is None) or "nothing"
    others = "; ".join(f"{name}: {reason}" for name, reason in transports.items() if reason is not None)
    return (
        f"{name}: {in_words(link.to_gpu)} from pinned host memory, {in_words(link.from_gpu)} to it, "
        f"{in_words(link.both)} both ways; DRAM tier {'pinned' if pinned else 'NOT pinned'}; KV from DRAM "
        f"travels by {usable}{f' ({others})' if others else ''}"
    )


def report(transports: Callable[[], Reasons], *, pinned: bool) -> str | None:
    """Measure, and log the line. Ends no start: a failure is a warning, and None is returned.

    transports: the reasons against each, see `line`.
    """
    try:
        name = torch.cuda.get_device_name(torch.cuda.current_device())
        text = line(name, measure(rounds=3), pinned=pinned, transports=transports())
    except Exception as error:  # noqa: BLE001 - no measurement ends a start
        logger.warning("the link to the GPU could not be measured: %s: %s", type(error).__name__, error)
        return None
    torch.cuda.empty_cache()
    logger.info("%s", text)
    return text

"""Steps of ``gpu-check`` on an emulated GPU, in a process of its own: prints the findings as JSON; of all
steps, and of some where copies to the pool change a byte (``damage``), or take long (``slow``).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from tests import fake_gpu

fake_gpu.install()

from sglang_ext.cluster.doctor.findings import Finding  # noqa: E402
from sglang_ext.engine import gpu_link  # noqa: E402
from sglang_ext.gpu_check import copies, facts  # noqa: E402
from sglang_ext.gpu_check.command import run, verdict  # noqa: E402

SMALL = 1 << 20


@contextmanager
def change(kind: str) -> Iterator[None]:
    """Make the mover wrong, or slow."""
    stock = copies.CudaMover.load

    def load(self: Any, slots: Any, blocks: Any, *rest: Any, **more: Any) -> int:
        if kind == "slow":
            time.sleep(0.02)
        ticket = stock(self, slots, blocks, *rest, **more)
        if kind == "damage":
            self._planes[0][0].view(-1)[int(slots[0]) * self._planes[0][0].shape[1]] += 1
        return ticket

    copies.CudaMover.load = load  # type: ignore[method-assign]
    try:
        yield
    finally:
        copies.CudaMover.load = stock  # type: ignore[method-assign]


def main() -> None:
    """Run the steps on a few tokens."""
    link = gpu_link.measure(SMALL, rounds=1)
    shape = copies.Shape("small", ((2, 64), (2, 64)), copies.SHAPES[0].dtype)

    def speeds() -> Iterator[Finding]:
        return copies.speeds(link, tokens=256, rounds=1, shape=shape)

    def failing() -> Iterator[Finding]:
        raise ZeroDivisionError("of the test")

    steps = [facts.facts, lambda: iter((copies.limits(link),)), lambda: copies.bytes_kept(64)]
    found = {"all": verdict(run([*steps, copies.orders, speeds, failing], None))}
    with change("damage"):
        found["damage"] = verdict(run([lambda: copies.bytes_kept(64)], None))
    with change("slow"):
        found["slow"] = verdict(run([speeds], None))
    line = gpu_link.report(lambda: {"shm": None, "verbs": "no RDMA device"}, pinned=True)
    json.dump({**found, "line": line}, sys.stdout)


if __name__ == "__main__":
    main()

"""Steps of ``gpu-check`` on an emulated GPU, in a process of its own: prints the findings as JSON; of all
steps, and of some where copies to the pool change a byte (``damage``), or take long (``slow``).
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

import numpy as np

from tests import fake_gpu

fake_gpu.install()

import torch  # noqa: E402

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


class Arriving:
    """Layers that a thread of a loader brings."""

    def __init__(self) -> None:
        self.layers = 0

    def decided(self, layer: int) -> bool:
        return layer < self.layers


def arrives() -> list[bool]:
    """Whether each layer of a load has its bytes once a pass may read it, though they arrive meanwhile."""
    with copies.bench(copies.SHAPES[0], 64, 1) as of:
        mover, source, target, blocks = of.mover(), of.slots(64, 0), of.slots(64, 1), np.array([6, 1, 4, 3])
        wanted = [[plane[source].clone() for plane in layer] for layer in of.planes]
        mover.write(source, blocks)
        mover.settle()
        kept, offsets = of.arena.blocks[blocks].copy(), of.arena.layout.layer_offsets
        of.arena.blocks[:] = 0
        arriving = Arriving()

        def bring() -> None:
            for layer in range(len(of.planes)):
                part = slice(offsets[layer], offsets[layer + 1])
                of.arena.blocks[blocks, part] = kept[:, part]
                arriving.layers += 1
                time.sleep(0.05)

        ticket, loader = mover.load(target, blocks, arriving), threading.Thread(target=bring)
        loader.start()
        same = []
        for number, layer in enumerate(of.planes):
            mover.wait_layer(ticket, number)
            rows = [plane[target] for plane in layer]
            same += [bool(torch.equal(row, want)) for row, want in zip(rows, wanted[number], strict=True)]
        loader.join()
        mover.close()
        assert mover.loads_done() == 1
        assert not mover.blocks_without_kernel
        return same


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
    found["arrives"] = {"same": arrives()}
    line = gpu_link.report(lambda: {"shm": None, "verbs": "no RDMA device"}, pinned=True)
    json.dump({**found, "line": line}, sys.stdout)


if __name__ == "__main__":
    main()

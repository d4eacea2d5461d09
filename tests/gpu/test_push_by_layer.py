"""Push by layer out of a GPU's memory: a layer leaves while the pass computes the next, with its own KV."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_ext.engine.forward_fence import ForwardFence, on_host
from sglang_ext.engine.pd.pushing import Computing, LayerFeed, Writing
from sglang_ext.engine.transfer_thread import LoopThread
from sglang_ext.tasks import Tasks
from sglang_ext.testing.waiting import wait_until

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BUSY = 600_000_000
"""Cycles for which a stream is kept busy: a few tenths of a second."""
LAYERS, PAGES = 3, np.array([5, 2, 9])


@pytest.mark.parametrize("fenced", [True, False], ids=["fenced", "twin"])
def test_a_layer_leaves_behind_its_event(fenced: bool) -> None:
    """The twin reads each layer when it is launched."""
    forward, adapter = torch.cuda.Stream(), torch.cuda.Stream()
    pool = torch.zeros(LAYERS, 16, device="cuda")
    table = torch.arange(16, device="cuda", dtype=torch.int32)
    table[: len(PAGES)] = torch.from_numpy(PAGES).cuda()
    read: list[tuple[int, list[float], bool]] = []

    def transfer(runs: tuple[np.ndarray, np.ndarray, list[int]]) -> None:
        _, pages, layers = runs
        with torch.cuda.stream(adapter):
            for layer in layers:
                read.append((layer, pool[layer].cpu()[pages].tolist(), forward.query()))

    part = SimpleNamespace(runs=lambda *which: which, layers=range(LAYERS))
    memory = SimpleNamespace(transfer=transfer)
    writing = Writing(memory, part, PAGES, Counter())  # type: ignore[arg-type]
    thread, tasks = LoopThread("push"), Tasks()
    fence = ForwardFence(torch.cuda, (forward,)) if fenced else lambda: lambda: True
    feed = LayerFeed(thread.loop, 0, LAYERS, fence, tasks.start)
    torch.cuda.synchronize()
    try:
        pages = on_host(table[: len(PAGES)])
        torch.cuda.current_stream().synchronize()  # the twin's adapter knows the pages at least
        feed.forward_begins([Computing(np.arange(len(PAGES)), pages, lambda: [writing])])
        forward.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(forward):
            for layer in range(LAYERS):
                feed.layer_begins(layer)
                torch.cuda._sleep(BUSY)
                pool[layer].fill_(layer + 1.0)
        feed.forward_ended()
        assert not forward.query(), "the host waited for the pass"
        wait_until(lambda: len(read) == LAYERS, seconds=30, what="the layers")
        whole = [(layer, [layer + 1.0] * len(PAGES)) for layer in range(LAYERS)]
        assert ([each[:2] for each in read] == whole) is fenced
        assert not read[0][2], "the pass had not ended"
    finally:
        torch.cuda.synchronize()
        thread.close()

"""A fence over passes on a GPU: passes that it waits for have stored their KV, and others have not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_ext.engine.forward_fence import ForwardFence

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BUSY = 600_000_000
"""Cycles for which a stream is kept busy: a few tenths of a second."""


@pytest.mark.parametrize("overlap", [True, False])
def test_slots_are_written_after_the_pass_that_still_stores_to_them(overlap: bool) -> None:
    """overlap: passes have a stream of their own; otherwise they run on the scheduler's."""
    forward, reader = torch.cuda.Stream(), torch.cuda.Stream()
    pool = SimpleNamespace(device="cuda")
    fence = ForwardFence.of(
        SimpleNamespace(
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
            forward_stream=forward,
        )
    )
    slots = torch.zeros(1 << 10, device="cuda")
    torch.cuda.synchronize()
    for waits in (True, False):
        with torch.cuda.stream(forward if overlap else torch.cuda.current_stream()):
            torch.cuda._sleep(BUSY)
            slots.fill_(1.0)  # the former request's KV
        passed = fence()
        assert not passed(), "the pass runs"
        while waits and not passed():
            pass
        with torch.cuda.stream(reader):
            slots.fill_(2.0)  # the new request's, read from a peer
        torch.cuda.synchronize()
        assert passed()
        assert bool((slots == 2.0).all()) is waits

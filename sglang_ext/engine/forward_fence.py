"""When a peer or a copy may use slots that passes under way use too: after these passes.

With overlap, the result of pass k-2 ends a request while pass k-1, which still contains it, runs. SGLang
frees the request's slots at once and may give them to the next request; its own forward passes come later on
the same stream and are safe. Any other writer to such slots (a one-sided read, a peer's push) has to wait for
pass k-1, or that pass stores the old request's deeper layers over the new KV. SGLang fences its own loads the
same way (`HiCacheController.load_fence_stream`).

Pass k-1 also computes the KV of the last token of the request that has ended, which is in the tree already. A
peer that reads it has to wait for the same pass: the scheduler's own stream does not always follow it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sglang_ext.disagg.runs import Ids

Passed = Callable[[], bool]
"""Whether the passes that had been launched when a fence was set have ended. From any thread."""

POLL_SECONDS = 0.0003
"""Between two looks at a fence: short beside a decode pass."""


def nothing_runs() -> bool:
    """The fence of a pool in host memory: a pass on a CPU has ended when the call that runs it returns."""
    return True


class ForwardFence:
    """Sets fences, in the scheduler's thread.

    module: of the pool's device, as `torch.get_device_module` finds it. streams: on which passes run.
    """

    def __init__(self, module: Any, streams: tuple[Any, ...]) -> None:
        self._module = module
        self._streams = streams

    @classmethod
    def of(cls, scheduler: Any) -> Callable[[], Passed]:
        """A function that sets a fence after all passes that a scheduler has launched."""
        device = scheduler.token_to_kv_pool_allocator.get_kvcache().device
        if device == "cpu":
            return lambda: nothing_runs
        # Not the scheduler's `device_module`, which it has only after it has made its transfer backend.
        return cls(torch.get_device_module(device), (scheduler.forward_stream,))

    def __call__(self) -> Passed:
        events = []
        # Without overlap, passes run on the scheduler's own stream.
        for stream in (*self._streams, self._module.current_stream()):
            event = self._module.Event()
            event.record(stream)
            events.append(event)

        # Several threads may ask at once.
        return lambda: all(event.query() for event in events)


def on_host(numbers: torch.Tensor) -> Callable[[], Ids]:
    """Begin to copy whole numbers from their device, without waiting for it. Returns a function that gives
    them, once a fence that is set after this call has passed. From any thread.
    """
    if not numbers.is_cuda:
        found = numbers.numpy().astype(np.int64)
        return lambda: found
    # Other types than the target's would be converted here, before they have come.
    there = numbers.to(torch.int64)
    here = torch.empty(len(there), dtype=torch.int64).pin_memory()
    here.copy_(there, non_blocking=True)
    return lambda: np.asarray(here.numpy())


async def until_passed(passed: Passed) -> None:
    """Return when the passes have ended."""
    while not passed():  # noqa: ASYNC110 - the condition is the state of a device
        await asyncio.sleep(POLL_SECONDS)

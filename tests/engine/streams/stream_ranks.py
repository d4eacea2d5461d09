"""Ranks of one instance under the stream checker, each a thread with a device and a trace of its own.

Ranks of tensor parallelism share no memory of a device: each has its shard of the KV, its arena, its streams
and its events. They share numbers alone (`Ranks`), which are no order: that all ranks have completed a
copy is known from the least of their numbers, and what makes it an order on each rank is its own event, which
it has asked before. So each rank is checked by itself, as its kernels meet no other rank's, over a program
that both make together; the traces have no common clock, and an agreed number adds nothing to any.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from engine_ranks import DriftedApart, Together
from engine_simulation import Traffic
from fake_cuda import FakeCuda, standing_for_cuda
from stream_engine import Loop, StreamRank, on_device, page_kernels, rank_on

from sglang_ext.engine.movers import cuda_mover

Agree = Callable[[Sequence[int]], int]
"""The number on which ranks act, of their own ones."""


@dataclass
class OneOfMany:
    """A rank and its device."""

    rank: StreamRank
    cuda: FakeCuda


class _Thread(threading.Thread):
    """One rank's process."""

    def __init__(self, number: int, play: Callable[[int], OneOfMany], together: Together) -> None:
        super().__init__(name=f"rank {number}")
        self._number, self._play, self._together = number, play, together
        self.made: OneOfMany | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.made = self._play(self._number)
        except BaseException as error:  # noqa: BLE001 - raised again by the test
            self.error = error
            self._together.give_up()


def serve_together(
    loop: Loop, paces: Sequence[float], seed: int, steps: int, *, agree: Agree = min, **about: Any
) -> list[OneOfMany]:
    """The same traffic on as many ranks as there are paces, whose trees are compared after each pass."""
    together, here, making = Together(len(paces)), threading.local(), threading.Lock()

    def play(number: int) -> OneOfMany:
        here.cuda = cuda = FakeCuda(number, paces[number])

        def least(numbers: Sequence[int]) -> Sequence[int]:
            said = together.everyone(number, list(numbers))
            return [agree(each) for each in zip(*said, strict=True)]

        with cuda.recording(), ExitStack() as stack:
            with making, on_device(cuda, cuda_mover):
                rank = rank_on(cuda, loop, least=least, **about)
            stack.callback(rank.close)
            traffic = Traffic(rank.scenario, seed, rank.scenario.stretch)
            for step in range(steps):
                traffic.act(rank.scheduler)
                rank.scheduler.step()
                pictures = together.everyone(number, rank.picture())
                if any(picture != pictures[0] for picture in pictures):
                    raise DriftedApart(f"the ranks have different trees after step {step}")
        return OneOfMany(rank, cuda)

    with _no_collections(), standing_for_cuda(lambda: here.cuda), page_kernels():
        threads = [_Thread(number, play, together) for number in range(len(paces))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=300)
            assert not thread.is_alive()
    errors = [thread.error for thread in threads if thread.error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, DriftedApart)):
        raise error  # the others raise `DriftedApart` when one gives up
    return [thread.made for thread in threads if thread.made is not None]


@contextmanager
def _no_collections() -> Iterator[None]:
    """A collection frees memory of one rank's device in the thread of another."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

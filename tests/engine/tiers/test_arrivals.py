"""The thread that queues layers as they arrive: their order, its failures, its end. No device is needed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from sglang_ext.engine.movers.arrivals import Arrivals
from sglang_ext.engine.movers.mover import MoverError
from sglang_ext.testing.waiting import wait_until

LAYERS = 3


class Load:
    """A load and its source."""

    def __init__(self) -> None:
        self.events: list[int] = []
        self.arrived = 0
        self.source = self

    def decided(self, layer: int) -> bool:
        return layer < self.arrived


@pytest.fixture
def arrivals() -> Iterator[Arrivals]:
    with closing(Arrivals(lambda load: load.events.append(len(load.events)), LAYERS)) as found:
        yield found


def test_each_layer_is_queued_once_it_has_arrived(arrivals: Arrivals) -> None:
    first, second = Load(), Load()
    arrivals.add(first)
    arrivals.add(second)
    second.arrived = 2
    arrivals.until(lambda: len(second.events) == 2)
    assert not first.events
    first.arrived = second.arrived = LAYERS
    arrivals.until(lambda: len(first.events) == len(second.events) == LAYERS)
    assert first.events == [0, 1, 2]
    wait_until(lambda: not arrivals._loads, seconds=10, what="the loads to be forgotten")


def test_a_wait_for_a_layer_ends_when_it_is_queued(arrivals: Arrivals) -> None:
    load, went_on = Load(), threading.Event()
    arrivals.add(load)

    def wait() -> None:
        arrivals.until(lambda: len(load.events) > 1)
        went_on.set()

    thread = threading.Thread(target=wait)
    thread.start()
    load.arrived = 1
    arrivals.until(lambda: len(load.events) > 0)
    assert not went_on.is_set()
    load.arrived = 2
    assert went_on.wait(10)
    thread.join()


def test_a_layer_that_cannot_be_queued_ends_the_wait() -> None:
    def fails(load: Load) -> None:
        raise RuntimeError("out of memory")

    with closing(Arrivals(fails, LAYERS)) as arrivals:
        load = Load()
        arrivals.add(load)
        load.arrived = 1
        with pytest.raises(MoverError, match="could not be copied"):
            arrivals.until(lambda: bool(load.events))
        with pytest.raises(MoverError):
            arrivals.add(Load())

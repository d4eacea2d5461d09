"""The copying thread: order, the extent of a wait, failure, end. Races are placed with a gated copier."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_movers import DEADLINE_S, GatedCopier, until
from engine_pools import PoolKind, Pools

from sglang_ext.engine.movers.mover import MoverError, ThreadMover
from sglang_ext.tiered_store.copy import PoolCopier
from sglang_ext.tiered_store.dram.arena import DramArena

LAYERS = 3
NO_BLOCKS = np.empty(0, np.int64)


@pytest.fixture
def copier() -> GatedCopier:
    return GatedCopier()


@pytest.fixture
def mover(copier: GatedCopier) -> Iterator[ThreadMover]:
    mover = ThreadMover(copier, LAYERS)
    yield mover
    copier.allow()
    mover.close()


class Waiter:
    """Calls something that waits, in a thread of its own."""

    def __init__(self, mover: ThreadMover, call: Callable[[], Any]) -> None:
        self._call = call
        self.error: BaseException | None = None
        self.seen: list[Any] = []
        self._thread = threading.Thread(target=self._run, name="waiter")
        waiting = len(mover._progress._waiters)
        self._thread.start()
        # It has returned, or it waits for the copying thread.
        until(
            lambda: not self._thread.is_alive() or len(mover._progress._waiters) > waiting,
            "the waiter to wait",
        )

    def _run(self) -> None:
        try:
            self._call()
        except MoverError as error:
            self.error = error

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "still waiting"


def steps(kind: str, name: str) -> list[tuple[str, str, int]]:
    return [(kind, name, layer) for layer in range(LAYERS)]


def test_tickets_count_up_and_each_direction_completes_in_order(
    mover: ThreadMover, copier: GatedCopier
) -> None:
    assert [mover.write("w0", NO_BLOCKS), mover.write("w1", NO_BLOCKS)] == [0, 1]
    assert [mover.load("l0", NO_BLOCKS), mover.load("l1", NO_BLOCKS)] == [0, 1]
    assert (mover.writes_done(), mover.loads_done()) == (0, 0)
    copier.allow()
    mover.settle()
    assert (mover.writes_done(), mover.loads_done()) == (2, 2)
    assert [mover.write("w2", NO_BLOCKS), mover.load("l2", NO_BLOCKS)] == [2, 2]
    mover.settle()
    for kind in ("write", "load"):
        order = [name for k, name, layer in copier.finished if k == kind and layer == LAYERS - 1]
        assert order == [f"{kind[0]}{i}" for i in range(3)]
    for kind, name in (("write", "w1"), ("load", "l0")):
        assert [step for step in copier.finished if step[:2] == (kind, name)] == steps(kind, name)


def test_the_lowest_layer_of_all_loads_goes_first(mover: ThreadMover, copier: GatedCopier) -> None:
    mover.load("a", NO_BLOCKS)
    copier.wait_started(1)
    mover.load("b", NO_BLOCKS)
    mover.load("c", NO_BLOCKS)
    copier.allow()
    mover.settle()
    assert copier.finished == [("load", name, layer) for layer in range(LAYERS) for name in "abc"]


def test_a_late_load_catches_up_before_the_others_go_on(mover: ThreadMover, copier: GatedCopier) -> None:
    mover.load("a", NO_BLOCKS)
    copier.allow(2)
    copier.wait_started(3)  # layers 0 and 1 are in, 2 is being copied
    mover.load("b", NO_BLOCKS)
    copier.allow()
    mover.settle()
    assert copier.finished == [*steps("load", "a"), *steps("load", "b")]


def test_what_is_being_computed_is_written_layer_by_layer(mover: ThreadMover, copier: GatedCopier) -> None:
    """Each layer is reported once it is written; operations submitted later wait."""
    computed, told = SimpleNamespace(layers=0), []
    computed.decided = lambda layer: layer < computed.layers
    copier.allow()
    mover.write("w", NO_BLOCKS, computed, lambda layer: told.append((layer, len(copier.finished))))
    mover.write("later", NO_BLOCKS)
    for layer in range(LAYERS):
        mover.load(f"l{layer}", NO_BLOCKS)  # a load waits for no write
        until(lambda layer=layer: mover.loads_done() == layer + 1, "the load")  # type: ignore[misc]
        assert [layer for layer, _ in told] == list(range(layer))
        computed.layers = layer + 1
        until(lambda layer=layer: len(told) == layer + 1, "the layer")  # type: ignore[misc]
    mover.settle()
    assert [finished for _, finished in told] == [LAYERS * (layer + 1) + layer + 1 for layer in range(LAYERS)]
    assert copier.finished[-LAYERS:] == steps("write", "later")


def test_writes_yield_to_loads_after_each_layer(mover: ThreadMover, copier: GatedCopier) -> None:
    mover.write("w", NO_BLOCKS)
    copier.wait_started(1)
    mover.load("a", NO_BLOCKS)
    copier.allow(1 + LAYERS)
    copier.wait_started(2 + LAYERS)
    mover.load("b", NO_BLOCKS)
    copier.allow()
    mover.settle()
    write = steps("write", "w")
    assert copier.finished == [write[0], *steps("load", "a"), write[1], *steps("load", "b"), write[2]]


def test_what_is_brought_ahead_goes_behind_loads_and_among_the_writes(
    mover: ThreadMover, copier: GatedCopier
) -> None:
    assert mover.load_bytes_per_second is None
    assert [mover.bring("b0", NO_BLOCKS), mover.write("w1", NO_BLOCKS)] == [0, 1]
    copier.wait_started(1)
    assert mover.load("l0", NO_BLOCKS) == 0
    copier.allow()
    mover.wait_layer(0, LAYERS - 1)
    mover.settle()
    assert (mover.writes_done(), mover.loads_done()) == (2, 1)
    brought = steps("load", "b0")
    assert copier.finished == [brought[0], *steps("load", "l0"), *brought[1:], *steps("write", "w1")]
    assert mover.load_bytes_per_second is not None


def test_a_load_that_is_done_out_of_order_completes_after_the_older_one(
    mover: ThreadMover, copier: GatedCopier
) -> None:
    mover.load("a", NO_BLOCKS)
    mover.load("b", NO_BLOCKS)
    copier.allow(2 * LAYERS - 1)  # a0 b0 a1 b1 a2, and then b2 waits
    copier.wait_started(2 * LAYERS)
    until(lambda: mover.loads_done() == 1, "the first load")
    copier.allow(1)
    mover.settle()
    assert mover.loads_done() == 2


def test_a_wait_ends_with_its_layer_and_not_before(mover: ThreadMover, copier: GatedCopier) -> None:
    ticket = mover.load("a", NO_BLOCKS)
    for layer in range(LAYERS):
        waiter = Waiter(mover, lambda layer=layer: mover.wait_layer(ticket, layer))
        assert waiter.waits
        copier.allow(1)
        waiter.join()
        assert copier.finished == steps("load", "a")[: layer + 1]
        mover.wait_layer(ticket, layer)  # no longer waits
    mover.settle()


def test_a_wait_covers_earlier_loads_and_no_later_one(mover: ThreadMover, copier: GatedCopier) -> None:
    mover.load("a", NO_BLOCKS)
    ticket = mover.load("b", NO_BLOCKS)
    mover.load("c", NO_BLOCKS)
    waiter = Waiter(mover, lambda: mover.wait_layer(ticket, 0))
    copier.allow(1)
    copier.wait_started(2)
    assert waiter.waits, "layer 0 of the ticket itself is not in yet"
    copier.allow(1)
    waiter.join()
    assert copier.finished == [("load", "a", 0), ("load", "b", 0)]
    later = Waiter(mover, lambda: mover.wait_layer(ticket + 1, 0))
    assert later.waits
    copier.allow(1)
    later.join()


def test_a_wait_ends_although_a_newer_load_holds_up_the_next_layers(
    mover: ThreadMover, copier: GatedCopier
) -> None:
    ticket = mover.load("a", NO_BLOCKS)
    copier.allow(LAYERS - 1)
    copier.wait_started(LAYERS)
    waiter = Waiter(mover, lambda: mover.wait_layer(ticket, LAYERS - 1))
    mover.load("b", NO_BLOCKS)
    copier.allow(1)
    waiter.join()
    assert mover.loads_done() == 1


def test_writes_do_not_delay_a_wait_beyond_the_layer_under_way(
    mover: ThreadMover, copier: GatedCopier
) -> None:
    mover.write("w", NO_BLOCKS)
    copier.wait_started(1)
    ticket = mover.load("a", NO_BLOCKS)
    waiter = Waiter(mover, lambda: mover.wait_layer(ticket, LAYERS - 1))
    copier.allow(1 + LAYERS)
    waiter.join()
    assert copier.finished == [("write", "w", 0), *steps("load", "a")]


def test_settle_waits_for_everything_and_returns_at_once_for_nothing(
    mover: ThreadMover, copier: GatedCopier
) -> None:
    mover.settle()
    mover.write("w", NO_BLOCKS)
    mover.load("a", NO_BLOCKS)
    waiter = Waiter(mover, mover.settle)
    copier.allow(2 * LAYERS - 1)
    copier.wait_started(2 * LAYERS)
    assert waiter.waits
    copier.allow(1)
    waiter.join()
    assert (mover.loads_done(), mover.writes_done()) == (1, 1)


def test_the_first_writes_are_waited_for_and_not_the_later_ones(
    mover: ThreadMover, copier: GatedCopier
) -> None:
    mover.wait_writes(0)
    mover.write("w", NO_BLOCKS)
    mover.write("x", NO_BLOCKS)
    waiter = Waiter(mover, lambda: mover.wait_writes(1))
    copier.allow(LAYERS - 1)
    copier.wait_started(LAYERS)
    assert waiter.waits
    copier.allow(1)
    waiter.join()
    assert mover.writes_done() == 1
    copier.allow(LAYERS)


def test_a_failing_copy_surfaces_in_every_call_and_hangs_none(
    mover: ThreadMover, copier: GatedCopier
) -> None:
    done = mover.load("before", NO_BLOCKS)
    copier.allow(LAYERS)
    mover.wait_layer(done, LAYERS - 1)
    copier.fail_at = ("load", "bad one", 1)
    ticket = mover.load("bad one", NO_BLOCKS)
    mover.write("w", NO_BLOCKS)
    waiters = [
        Waiter(mover, lambda: mover.wait_layer(ticket, 1)),
        Waiter(mover, lambda: mover.wait_layer(ticket, LAYERS - 1)),
        Waiter(mover, mover.settle),
    ]
    assert all(waiter.waits for waiter in waiters)
    copier.allow(2)
    for waiter in waiters:
        waiter.join()
        assert isinstance(waiter.error, MoverError)
        assert isinstance(waiter.error.__cause__, OSError)
    for call in (
        mover.writes_done,
        mover.loads_done,
        mover.settle,
        lambda: mover.wait_layer(ticket, 0),
        lambda: mover.write("x", NO_BLOCKS),
        lambda: mover.load("x", NO_BLOCKS),
    ):
        with pytest.raises(MoverError, match="copying between HBM and DRAM failed"):
            call()
    mover.wait_layer(done, LAYERS - 1)  # layers loaded before stay readable
    assert "failed=True" in repr(mover)
    mover.close()


def test_a_write_that_fails_stops_loads_too(mover: ThreadMover, copier: GatedCopier) -> None:
    copier.fail_at = ("write", "w", 0)
    mover.write("w", NO_BLOCKS)
    copier.wait_started(1)
    ticket = mover.load("a", NO_BLOCKS)
    waiter = Waiter(mover, lambda: mover.wait_layer(ticket, 0))
    copier.allow()
    waiter.join()
    assert isinstance(waiter.error, MoverError)


def test_slots_out_of_range_are_refused_at_once_and_harm_nothing(
    mover: ThreadMover, copier: GatedCopier
) -> None:
    copier.allow()
    for submit in (mover.write, mover.load):
        with pytest.raises(ValueError, match="out of range"):
            submit("bad", NO_BLOCKS)
    assert mover.load("good", NO_BLOCKS) == 0
    mover.settle()
    assert mover.loads_done() == 1


def test_close_finishes_what_is_under_way_and_takes_nothing_new(
    mover: ThreadMover, copier: GatedCopier
) -> None:
    mover.write("w", NO_BLOCKS)
    mover.load("a", NO_BLOCKS)
    copier.wait_started(1)
    closer = threading.Thread(target=mover.close)
    closer.start()
    until(lambda: mover._closing, "close to be called")
    with pytest.raises(MoverError, match="closed"):
        mover.load("late", NO_BLOCKS)
    assert closer.is_alive()
    copier.allow()
    closer.join(DEADLINE_S)
    assert len(copier.finished) == 2 * LAYERS
    mover.close()
    mover.settle()
    mover.wait_layer(0, LAYERS - 1)
    assert (mover.loads_done(), mover.writes_done()) == (1, 1)


def test_repr_shows_the_counts(mover: ThreadMover, copier: GatedCopier) -> None:
    mover.write("w", NO_BLOCKS)
    mover.write("v", NO_BLOCKS)
    copier.allow(LAYERS)
    until(lambda: mover.writes_done() == 1, "the first write")
    assert repr(mover) == "ThreadMover(loads=0+0, writes=1+1, failed=False)"


@pytest.mark.parametrize("operations", [300, pytest.param(30_000, marks=pytest.mark.long)])
def test_real_copies_move_exactly_what_was_asked_for(operations: int) -> None:
    """Random writes and loads over a real pool and arena, each checked when it is reported as complete."""
    pools = Pools(PoolKind("mha", 1, LAYERS), 256, block=4, rows=1, context=8)
    geometry = pools.geometry()
    rnd = random.Random(7)
    with DramArena(geometry.layout, 32 * (geometry.block_bytes + 8) + 8, shared=False, pin=False) as arena:
        mover = ThreadMover(PoolCopier(geometry, arena), LAYERS)
        chains = np.arange(1, 257, dtype=np.uint64).reshape(64, 4) * np.uint64(12345)
        held: dict[int, int] = {}  # arena block -> block of tokens whose KV it holds
        loads: list[tuple[int, np.ndarray, int]] = []
        for _ in range(operations):
            unit = rnd.randrange(32)
            slots = np.arange(1 + 4 * unit, 5 + 4 * unit)
            for layer in range(LAYERS):
                pools.oracle.write(slots, chains[unit], layer)
            block = rnd.randrange(32)
            mover.write(slots, np.array([block]))
            held[block] = unit
            if rnd.random() < 0.3:
                mover.settle()  # a write to a block and a load of it are ordered by their caller
                block, unit = rnd.choice(list(held.items()))
                target = np.arange(129 + 4 * unit, 133 + 4 * unit)
                pools.oracle.spoil(target)
                ticket = mover.load(target, np.array([block]))
                for layer in range(LAYERS):
                    mover.wait_layer(ticket, layer)
                    pools.oracle.compare(target, chains[unit], layer, f"load {ticket}")
                loads.append((ticket, target, unit))
        mover.settle()
        assert mover.writes_done() == operations
        assert mover.loads_done() == len(loads) > 0
        mover.close()

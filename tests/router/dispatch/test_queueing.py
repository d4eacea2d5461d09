"""Waiting for a place: the order of the queue, and that no place is lost."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.router.dispatch.queueing import Admission, Line, QueueFull, QueueTimeout, Waiting
from sglang_ext.router.endpoints.retry_budget import RetryBudget
from sglang_ext.testing.fakes import FakeClock


@given(st.lists(st.integers(-3, 3), max_size=40))
def test_the_line_goes_by_priority_then_arrival(priorities: list[int]) -> None:
    line = Line(100)
    tickets = [line.join(Waiting(priority))[0] for priority in priorities]
    order = [line.next() for _ in tickets]
    expected = sorted(range(len(priorities)), key=lambda i: (-priorities[i], i))
    assert order == [tickets[i] for i in expected]
    assert line.next() is None
    line.check()


def test_a_full_line_gives_way_to_the_more_important_only() -> None:
    line = Line(2)
    first, _ = line.join(Waiting())
    second, _ = line.join(Waiting())
    with pytest.raises(QueueFull):
        line.join(Waiting())
    third, displaced = line.join(Waiting(1))
    assert displaced is second
    assert second.displaced
    assert [line.next(), line.next(), line.next()] == [third, first, None]
    line.check()


@given(st.lists(st.tuples(st.sampled_from(["join", "next", "leave"]), st.integers(-2, 2)), max_size=60))
def test_the_line_against_a_sorted_list(steps: list[tuple[str, int]]) -> None:
    line, model, tickets = Line(5), [], []
    for action, priority in steps:
        if action == "join":
            try:
                ticket, displaced = line.join(Waiting(priority))
            except QueueFull:
                assert len(model) == 5
                assert min(t.rank for t in model)[0] <= max(t.rank for t in model)[0] <= (-priority,)
                continue
            if displaced is not None:
                assert displaced == max(model)
                model.remove(displaced)
            model.append(ticket)
            tickets.append(ticket)
        elif action == "next":
            expected = min(model, default=None)
            assert line.next() is expected
            if expected is not None:
                model.remove(expected)
        elif tickets:
            ticket = random.Random(priority).choice(tickets)
            line.leave(ticket)
            if ticket in model:
                model.remove(ticket)
        assert len(line) == len(model)
        line.check()


class Rig:
    """An admission with a fake clock, and requests that hold their place until released."""

    def __init__(self, capacity: float, **options: object) -> None:
        self.clock = FakeClock()
        self.capacity = capacity
        self.admission = Admission(lambda: self.capacity, self.clock, **options)  # type: ignore[arg-type]
        self.order: list[str] = []

    def start(self, name: str, priority: int = 0) -> tuple[asyncio.Task[float], asyncio.Event]:
        done = asyncio.Event()

        async def run() -> float:
            waited = 0.0
            if not self.admission.enter():
                waited = await self.admission.wait(Waiting(priority))
            try:
                self.order.append(name)
                await done.wait()
                return waited
            finally:
                self.admission.leave()

        return asyncio.create_task(run()), done


async def turns(count: int = 8) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_places_go_to_who_is_next() -> None:
    rig = Rig(1)
    first, end_first = rig.start("first")
    await turns()
    low, end_low = rig.start("low", -1)
    normal, end_normal = rig.start("normal")
    high, end_high = rig.start("high", 5)
    await turns()
    assert rig.order == ["first"]
    for end in (end_first, end_high, end_normal, end_low):
        end.set()
        await turns()
    assert rig.order == ["first", "high", "normal", "low"]
    await asyncio.gather(first, low, normal, high)
    assert rig.admission.admitted == 0
    rig.admission.check()


async def test_patience_ends() -> None:
    rig = Rig(0, patience_s=10.0)
    task, _ = rig.start("x")
    for _ in range(60):
        await turns()
        rig.clock.advance(0.25)
    await turns()
    with pytest.raises(QueueTimeout, match="10 s"):
        await task
    assert (rig.admission.admitted, len(rig.admission.line)) == (0, 0)


async def test_a_fleet_that_grows_is_noticed() -> None:
    rig = Rig(0)
    task, done = rig.start("x")
    await turns()
    rig.capacity = 1
    rig.clock.advance(0.3)
    await turns()
    assert rig.order == ["x"]
    done.set()
    assert await task == pytest.approx(0.3)


async def test_a_displaced_request_is_refused_at_once() -> None:
    rig = Rig(0, size=1)
    less, _ = rig.start("less")
    await turns()
    more, done = rig.start("more", 1)
    await turns()
    with pytest.raises(QueueFull):
        await less
    third, _ = rig.start("third", 1)
    await turns()
    with pytest.raises(QueueFull):
        await third
    rig.capacity = 1
    rig.clock.advance(1)
    done.set()
    await turns()
    await more
    assert rig.admission.admitted == 0


@pytest.mark.parametrize("moment", range(12))
async def test_a_cancellation_at_any_moment_loses_no_place(moment: int) -> None:
    rig = Rig(1)
    holder, end = rig.start("holder")
    await turns()
    task, _ = rig.start("waiter")
    for step in range(12):
        if step == moment:
            task.cancel()
        if step == 5:
            end.set()
        await asyncio.sleep(0)
    await asyncio.gather(holder, task, return_exceptions=True)
    assert (rig.admission.admitted, len(rig.admission.line)) == (0, 0)
    again, done = rig.start("again")
    done.set()
    await again
    rig.admission.check()


def test_the_retry_budget_is_a_share_of_requests() -> None:
    budget = RetryBudget(0.5, reserve=2)
    for _ in range(10):
        budget.begin(100.0)
    assert [budget.spend(100.0) for _ in range(8)] == [True] * 7 + [False]
    assert not budget.spend(104.0)
    # Requests that still run count in the next window too; budget spent long ago does not.
    assert budget.spend(106.0) is False
    assert budget.spend(111.0) is True


def test_what_has_ended_long_ago_gives_no_budget() -> None:
    budget = RetryBudget(1.0, reserve=1)
    for _ in range(10):
        budget.begin(0.0)
        budget.end()
    assert budget.spend(4.0)
    assert budget.spend(9.0)
    assert [budget.spend(30.0), budget.spend(30.0)] == [True, False]

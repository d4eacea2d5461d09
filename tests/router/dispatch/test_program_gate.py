"""Turns wait at the gate until their session's KV has room, and none is lost there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.router.dispatch.program_gate import ProgramGate
from sglang_ext.router.dispatch.programs import Programs
from sglang_ext.router.dispatch.queueing import QueueFull, QueueTimeout
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.testing.fakes import FakeClock


def turn(name: str | None, tokens: int = 60) -> Any:
    """A request of a session, as far as the gate looks at it."""
    return SimpleNamespace(
        admitted=SimpleNamespace(session=name),
        units=tokens,
        record=SimpleNamespace(completion_tokens=2, first_byte=None, instance="i", stream=True),
        works=False,
        began=0.0,
        goes_on=None,
    )


class Rig:
    def __init__(self, capacity: float = 100.0, **more: Any) -> None:
        self.clock = FakeClock()
        self.gate = ProgramGate(
            lambda: capacity, lambda name, new, known: 0.01 * new + 0.0001 * known, RouterMetrics(),
            self.clock,
            programs=Programs(quantum=1), **{"size": 8, "patience_s": 100.0} | more,
        )  # fmt: skip

    async def waiting(self, flight: Any) -> asyncio.Task[float]:
        task = asyncio.ensure_future(self.gate.enter(flight))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task


async def test_a_turn_waits_until_another_session_makes_room() -> None:
    rig, first, second = Rig(), turn("a"), turn("b")
    assert await rig.gate.enter(first) == 0.0
    task = await rig.waiting(second)
    assert not task.done()
    rig.clock.advance(3.0)
    assert rig.gate.ends(first, 1.0)
    assert await task == pytest.approx(3.0)
    assert second.works
    assert not first.works
    rig.gate.check()


@pytest.mark.parametrize("capacity", [100.0, float("inf")])
async def test_what_is_of_no_session_or_without_limit_passes(capacity: float) -> None:
    rig = Rig(capacity)
    for name in (None,) if capacity < float("inf") else (None, "a", "b", "c"):
        flight = turn(name, 1000)
        assert await rig.gate.enter(flight) == 0.0
        assert not rig.gate.ends(flight, 1.0)
    assert rig.gate.programs.working == 0


async def test_one_that_waits_too_long_is_refused_and_holds_up_nobody() -> None:
    rig, first = Rig(patience_s=2.0), turn("a")
    await rig.gate.enter(first)
    task = await rig.waiting(turn("large", 100))
    rig.clock.advance(2.5)
    with pytest.raises(QueueTimeout):
        await task
    assert rig.gate.programs.waiting == 0
    assert await rig.gate.enter(turn("small", 10)) == 0.0
    rig.gate.check()


async def test_a_full_line_refuses() -> None:
    rig = Rig(size=1)
    await rig.gate.enter(turn("a"))
    task = await rig.waiting(turn("b"))
    with pytest.raises(QueueFull):
        await rig.gate.enter(turn("c"))
    assert rig.gate.programs.waiting == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.gate.programs.waiting == 0
    rig.gate.check()


@pytest.mark.parametrize("granted", [False, True])
async def test_a_client_that_goes_away_gives_its_place_back(granted: bool) -> None:
    """Before it is granted, and in the very moment in which it is."""
    rig, first = Rig(), turn("a")
    await rig.gate.enter(first)
    task, behind = await rig.waiting(turn("b")), await rig.waiting(turn("c"))
    if granted:
        rig.gate.ends(first, 1.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    if not granted:
        rig.gate.ends(first, 1.0)
    await behind
    assert (rig.gate.programs.working, rig.gate.programs.waiting) == (1, 0)
    rig.gate.check()


@pytest.mark.parametrize(("took_s", "late"), [(0.1, False), (1.0, True)])
async def test_turns_that_go_on_show_how_many_sessions_are_served_in_time(took_s: float, late: bool) -> None:
    rig = Rig()
    for tokens in (60, 80):
        flight = turn("a", tokens)
        await rig.gate.enter(flight)
        rig.clock.advance(took_s)
        flight.record.first_byte = rig.clock.monotonic()
        rig.gate.ends(flight, 1.0)
        if tokens == 60:
            assert rig.gate.programs.budget.tokens(100.0) == 100.0, "the first turn brings its KV with it"
    budget = rig.gate.programs.budget.tokens(100.0)
    assert (budget < 100.0) is late
    rig.gate.check()


async def test_an_answer_in_one_piece_shows_nothing() -> None:
    rig = Rig()
    for _ in range(2):
        flight = turn("a")
        flight.record.stream = False
        await rig.gate.enter(flight)
        rig.clock.advance(5.0)
        flight.record.first_byte = rig.clock.monotonic()
        rig.gate.ends(flight, 1.0)
    assert rig.gate.programs.budget.tokens(100.0) == 100.0

"""Threads that several owners share: the order of turns, placed with gates."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.router.tokens.fair_pool import LONG, FairPool
from sglang_ext.testing.waiting import until


class Held:
    """Work that goes on when it is let."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self._go = threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self._go.wait(60)

    def let_go(self) -> None:
        self._go.set()


@pytest.fixture
async def one() -> AsyncIterator[FairPool]:
    pool = FairPool(1, "test-fair")
    yield pool
    pool.close()


@pytest.fixture
async def two() -> AsyncIterator[FairPool]:
    pool = FairPool(2, "test-fair")
    yield pool
    pool.close()


def noting(order: list[str], name: str) -> Callable[[], None]:
    return lambda: order.append(name)


async def begin(pool: FairPool, owner: str, size: int, held: Held) -> asyncio.Task[None]:
    task = asyncio.create_task(pool.run(owner, size, held))
    await until(held.begun.is_set)
    return task


async def test_one_text_of_an_owner_waits_for_no_backlog_of_another(one: FairPool) -> None:
    held, order = Held(), list[str]()
    first = await begin(one, "a", 100, held)
    waiting = [asyncio.create_task(one.run("a", 100, noting(order, "a"))) for _ in range(5)]
    await until(lambda: len(one._short) == 5)
    waiting.append(asyncio.create_task(one.run("b", 100, noting(order, "b"))))
    await until(lambda: len(one._short) == 6)
    held.let_go()
    await asyncio.gather(first, *waiting)
    assert order == ["b", *"aaaaa"]


async def test_the_same_length_is_done_for_each(one: FairPool) -> None:
    held, order = Held(), list[str]()
    first = await begin(one, "else", 1, held)
    sizes = {"a": 300, "b": 100}
    waiting = [
        asyncio.create_task(one.run(name, sizes[name], noting(order, name))) for name in "aaaabbbbbbbbbbbb"
    ]
    await until(lambda: len(one._short) == len(waiting))
    held.let_go()
    await asyncio.gather(first, *waiting)
    for upto in range(4, 17, 4):
        assert order[:upto].count("b") == 3 * order[:upto].count("a")


async def test_long_work_leaves_a_thread_to_short(two: FairPool) -> None:
    held, order = [Held() for _ in range(3)], list[str]()
    first = await begin(two, "a", LONG, held[0])
    more = [
        asyncio.create_task(two.run(owner, LONG, each)) for owner, each in zip("bc", held[1:], strict=True)
    ]
    await until(lambda: len(two._long) == 2)
    await two.run("d", LONG - 1, noting(order, "d"))
    assert order == ["d"]
    assert not held[1].begun.is_set()
    # The twin: of short work, both threads are taken.
    held[0].let_go()
    await first
    await until(held[1].begun.is_set)
    held.append(Held())
    short = await begin(two, "a", LONG - 1, held[-1])
    other = asyncio.create_task(two.run("d", 1, noting(order, "d")))
    await until(lambda: len(two._short) == 1)
    assert order == ["d"]
    for each in held:
        each.let_go()
    await asyncio.gather(*more, other, short)
    assert order == ["d", "d"]


async def test_what_is_not_waited_for_any_more_is_not_begun(one: FairPool) -> None:
    held, order = Held(), list[str]()
    first = await begin(one, "a", 1, held)
    gone = asyncio.create_task(one.run("a", 1, noting(order, "gone")))
    await until(lambda: len(one._short) == 1)
    gone.cancel()
    with suppress(asyncio.CancelledError):
        await gone
    stays = asyncio.create_task(one.run("a", 1, noting(order, "stays")))
    held.let_go()
    await asyncio.gather(first, stays)
    assert order == ["stays"]
    assert one.running == 0


async def test_the_time_spent_is_reported_in_any_case(one: FairPool) -> None:
    spent: list[float] = []

    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await one.run("a", 1, fails, spent.append)
    held = Held()
    task = asyncio.create_task(one.run("a", 1, held, spent.append))
    await until(held.begun.is_set)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert len(spent) == 1
    held.let_go()
    await until(lambda: len(spent) == 2)
    assert min(spent) >= 0
    assert await one.run("a", 1, lambda: 7, spent.append) == 7
    assert len(spent) == 3


async def test_what_waits_when_it_is_closed_is_cancelled() -> None:
    pool, held = FairPool(1, "test-fair"), Held()
    first = await begin(pool, "a", 1, held)
    waiting = [asyncio.create_task(pool.run("a", size, noting([], "never"))) for size in (1, LONG)]
    await until(lambda: len(pool._short) == len(pool._long) == 1)
    held.let_go()
    pool.close()
    for task in waiting:
        with pytest.raises(asyncio.CancelledError):
            await task
    await first
    assert pool.running == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 500)), min_size=1, max_size=40))
def test_no_owner_is_ahead_of_another_by_more_than_a_piece(work: list[tuple[str, int]]) -> None:
    """While two owners both wait, their counts of begun work differ by no more than one piece of each."""

    async def run() -> list[tuple[str, int]]:
        pool = FairPool(1, "test-fair")
        held, order = Held(), list[tuple[str, int]]()
        try:
            first = await begin(pool, "else", 1, held)
            tasks = [
                asyncio.create_task(pool.run(owner, size, lambda each=(owner, size): order.append(each)))
                for owner, size in work
            ]
            await until(lambda: len(pool._short) == len(work))
            held.let_go()
            await asyncio.gather(first, *tasks)
        finally:
            pool.close()
        return order

    order = asyncio.run(run())
    assert sorted(order) == sorted(work)
    left = {owner: [size for name, size in work if name == owner] for owner, _ in work}
    done = dict.fromkeys(left, 0)
    for owner, size in order:
        assert left[owner].pop(0) == size
        waiting = [name for name, rest in left.items() if rest]
        done[owner] += size
        for other in waiting:
            assert done[owner] - size <= done[other] + 500

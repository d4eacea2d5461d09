"""The stream checker itself: it finds each kind of race, and none where the program has an order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fake_cuda import DEVICE, DeviceTensor, FakeCuda


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with FakeCuda().installed() as cuda:
        yield cuda


def races(cuda: FakeCuda) -> list[str]:
    return [str(race) for race in cuda.trace.races.values()]


@pytest.mark.parametrize("order", ["wait_stream", "event", "host", "none"])
def test_streams_need_an_order(cuda: FakeCuda, order: str) -> None:
    rows = cuda.rows(torch.zeros(8, 4), "pool")
    other = torch.cuda.Stream(DEVICE)
    rows[2:5] = 1.0
    event = torch.cuda.Event()
    event.record()
    if order == "wait_stream":
        other.wait_stream(torch.cuda.current_stream())
    elif order == "event":
        other.wait_event(event)
    elif order == "host":
        event.synchronize()
    with torch.cuda.stream(other):
        rows[4:6].sum()
    assert len(cuda.trace.races) == (order == "none"), races(cuda)
    if order == "none":
        assert next(iter(cuda.trace.races.values())).cells == (4,)
    assert cuda.trace.synchronizations == (
        ["test_stream_checker.py:test_streams_need_an_order"] * (order == "host")
    )


def test_an_event_recorded_too_early_orders_nothing_after_it(cuda: FakeCuda) -> None:
    rows = cuda.rows(torch.zeros(8, 4), "pool")
    other, event = torch.cuda.Stream(DEVICE), torch.cuda.Event()
    event.record()
    rows[2] = 1.0
    other.wait_event(event)
    with torch.cuda.stream(other):
        rows.index_select(0, torch.arange(3, device=DEVICE))
    assert len([race for race in races(cuda) if race.startswith("pool [2]")]) == 1


@pytest.mark.parametrize("write", ["index_copy", "index_fill", "slice"])
def test_rows_of_an_index_are_compared_and_others_are_not(cuda: FakeCuda, write: str) -> None:
    rows = cuda.rows(torch.zeros(8, 4), "pool")
    other = torch.cuda.Stream(DEVICE)
    index = torch.arange(3, 5, device=DEVICE)
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        if write == "index_copy":
            rows.index_copy_(0, index, torch.ones(2, 4, device=DEVICE))
        elif write == "index_fill":
            rows.index_fill_(0, index, 1.0)
        else:
            rows[3:5] = 1.0
    rows[0:3] = 2.0
    rows[5:] = 2.0
    assert not cuda.trace.races, races(cuda)
    rows[4] = 2.0
    assert [race.cells for race in cuda.trace.races.values()] == [(4,)]


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_that_is_let_go_is_reused_by_its_stream(cuda: FakeCuda, recorded: bool) -> None:
    other = torch.cuda.Stream(DEVICE)
    index = torch.arange(3, device=DEVICE)
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        index.sum()
    if recorded:
        index.record_stream(other)
    del index
    assert bool(cuda.trace.races) is not recorded
    assert all("reuse" in race for race in races(cuda))


def test_memory_that_its_own_stream_used_needs_no_record(cuda: FakeCuda) -> None:
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        buffer = torch.empty(4, device=DEVICE)
        buffer.fill_(1.0)
        del buffer
    assert not cuda.trace.races


@pytest.mark.parametrize(("pinned", "non_blocking", "waits"), [(1, 1, 0), (1, 0, 1), (0, 1, 1)])
def test_a_copy_from_the_host_waits_unless_memory_is_pinned(
    cuda: FakeCuda, pinned: int, non_blocking: int, waits: int
) -> None:
    host = torch.arange(4)
    if pinned:
        host = host.pin_memory()
    there = host.to(DEVICE, non_blocking=bool(non_blocking))
    assert isinstance(there, DeviceTensor)
    assert there.is_cuda
    del host  # pinned memory stays until the copy has ended
    assert not cuda.trace.races, races(cuda)
    assert len(cuda.trace.synchronizations) == waits
    assert there.tolist() == [0, 1, 2, 3]
    assert len(cuda.trace.synchronizations) == waits + 1


def test_the_host_may_not_read_what_is_being_copied_to_it(cuda: FakeCuda) -> None:
    memory = torch.zeros(4, 8)
    cuda.register(memory, "arena", pinned=True)
    there = torch.ones(8, device=DEVICE)
    memory[1].copy_(there, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    assert not cuda.trace.races
    event.synchronize()
    memory[1].sum()
    assert not cuda.trace.races, races(cuda)
    memory[1].copy_(there, non_blocking=True)
    memory[1].sum()
    assert len(cuda.trace.races) == 1


def test_a_query_that_is_true_is_an_order_and_false_is_none() -> None:
    for pace in (0.0, 1.0):
        with FakeCuda(pace=pace).installed() as cuda:
            rows = cuda.rows(torch.zeros(8, 4), "pool")
            other, event = torch.cuda.Stream(DEVICE), torch.cuda.Event()
            with torch.cuda.stream(other):
                rows[1] = 1.0
                event.record()
            assert event.query() is bool(pace)
            assert event.query() is bool(pace)
            rows[1] = 2.0
            assert bool(cuda.trace.races) is not bool(pace)


def test_random_orders_agree_where_there_is_no_race_and_differ_where_there_is() -> None:
    for ordered in (True, False):
        with FakeCuda().installed() as cuda:
            memory = torch.zeros(8, 4)
            rows = cuda.rows(memory, "pool")
            other = torch.cuda.Stream(DEVICE)
            for step in range(6):
                if ordered:
                    other.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(other):
                    rows += float(step)
                if ordered:
                    torch.cuda.current_stream().wait_stream(other)
                rows *= 2.0
        found = set()
        for seed in range(12):
            cuda.replay(seed)
            found.add(float(memory[3, 2]))
        assert bool(cuda.trace.races) is not ordered
        assert (len(found) == 1) is ordered, found


def test_freed_memory_is_poisoned_in_some_order() -> None:
    with FakeCuda().installed() as cuda:
        memory = torch.zeros(4, dtype=torch.int64)
        target = cuda.adopt(memory, "target")
        other = torch.cuda.Stream(DEVICE)
        index = torch.arange(4, device=DEVICE)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            target.copy_(index)
        del index
    found = set()
    for seed in range(12):
        cuda.replay(seed)
        found.add(tuple(memory.tolist()))
    assert (0, 1, 2, 3) in found
    assert len(found) == 2

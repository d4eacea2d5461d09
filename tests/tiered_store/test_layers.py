"""The order of layer reads, against a model that sorts everything anew at each step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_ext.tiered_store.loading.layers import AHEAD, ByteBudget, LayerQueue, LayerTask


def drain(queue: LayerQueue) -> list[tuple[object, int]]:
    """Start and finish one after the other."""
    order = []
    while (task := queue.start()) is not None:
        order.append((task.request, task.layer))
        queue.finish(task)
        queue.check()
    return order


def test_lowest_layer_first_across_requests() -> None:
    queue = LayerQueue(1)
    queue.add("a", [1] * 3)
    queue.add("b", [1] * 3)
    assert drain(queue) == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_then_by_priority_then_by_arrival() -> None:
    queue = LayerQueue(1)
    queue.add("first", [1, 1])
    queue.add("urgent", [1, 1], priority=5)
    queue.add("last", [1, 1])
    order = drain(queue)
    assert order[:3] == [("urgent", 0), ("first", 0), ("last", 0)]
    assert order[3:] == [("urgent", 1), ("first", 1), ("last", 1)]


def test_reads_ahead_give_way_until_a_request_waits_for_them() -> None:
    queue = LayerQueue(1)
    queue.add("ahead", [1] * 3, priority=AHEAD)
    queue.add("request", [1] * 2, priority=-5)
    assert (queue.waiting_bytes, queue.bytes_left("ahead")) == (2, 3)
    assert drain(queue) == [("request", 0), ("request", 1), ("ahead", 0), ("ahead", 1), ("ahead", 2)]
    queue.add("ahead", [1] * 2, priority=AHEAD)
    queue.add("other", [1] * 2)
    queue.set_priority("ahead", 0)
    assert queue.waiting_bytes == 4
    assert drain(queue) == [("ahead", 0), ("other", 0), ("ahead", 1), ("other", 1)]


def test_a_newcomer_starts_with_its_lowest_layer_before_others_go_on() -> None:
    queue = LayerQueue(1)
    queue.add("old", [1] * 4)
    for _ in range(2):
        task = queue.start()
        assert task is not None
        queue.finish(task)
    queue.add("new", [1] * 4)
    assert drain(queue) == [("new", 0), ("new", 1), ("old", 2), ("new", 2), ("old", 3), ("new", 3)]


def test_patience_bounds_how_long_newcomers_go_first() -> None:
    """With a stream of new requests, the old one's upper layers come all the same."""
    queue = LayerQueue(1, patience=4)
    queue.add("old", [1] * 8)
    seen: list[tuple[object, int]] = []
    for number in range(200):
        queue.add(number, [1] * 8)
        task = queue.start()
        assert task is not None
        queue.finish(task)
        seen.append((task.request, task.layer))
    assert ("old", 7) in seen
    starved = LayerQueue(1, patience=10**9)
    starved.add("old", [1] * 8)
    for number in range(60):
        starved.add(number, [1] * 8)
        task = starved.start()
        assert task is not None
        starved.finish(task)
        assert task.layer == 0


def test_the_budget_counts_bytes_not_tasks() -> None:
    queue = LayerQueue(100, at_once=2)
    queue.add("large", [60, 60])
    queue.add("small", [10] * 5)
    tasks = [queue.start(), queue.start()]
    assert [task.nbytes for task in tasks if task] == [60, 10]
    assert queue.budget.used == 70
    # 60 do not fit beside 70; the 10 behind them must not overtake.
    assert queue.start() is None
    assert tasks[1] is not None
    queue.finish(tasks[1])
    assert queue.start() is None
    assert tasks[0] is not None
    queue.finish(tasks[0])
    assert queue.start() == LayerTask("large", 1, 60)


def test_a_requests_layers_come_one_after_the_other_and_others_beside_them() -> None:
    queue = LayerQueue(100)
    queue.add("a", [10] * 3)
    queue.add("b", [10] * 3)
    first, second = queue.start(), queue.start()
    assert (first, second) == (LayerTask("a", 0, 10), LayerTask("b", 0, 10))
    assert queue.start() is None
    queue.set_priority("a", 5)  # changes nothing about that
    assert queue.start() is None
    assert second is not None
    assert not queue.finish(second)
    assert queue.start() == LayerTask("b", 1, 10)
    assert first is not None
    assert not queue.finish(first)
    assert queue.start() == LayerTask("a", 1, 10)
    queue.check()


def test_a_layer_larger_than_the_budget_goes_alone() -> None:
    queue = LayerQueue(10)
    queue.add("huge", [50, 50])
    queue.add("tiny", [1])
    first = queue.start()
    assert first == LayerTask("huge", 0, 50)
    assert queue.start() is None
    assert first is not None
    queue.finish(first)
    assert queue.start() == LayerTask("tiny", 0, 1)
    assert queue.start() is None


def test_cancelling() -> None:
    queue = LayerQueue(2)
    queue.add("a", [1] * 3)
    queue.add("b", [1] * 3)
    task = queue.start()
    assert task == LayerTask("a", 0, 1)
    assert not queue.cancel("a")  # one of its layers is being read
    assert queue.cancel("b")
    assert queue.start() is None
    with pytest.raises(ValueError, match="already"):
        queue.add("a", [1])
    assert task is not None
    assert queue.finish(task)
    queue.check()
    assert len(queue) == 0
    assert queue.cancel("a")
    queue.add("a", [1])
    assert queue.waiting_bytes == 1


def test_priority_may_change_while_waiting() -> None:
    queue = LayerQueue(1)
    queue.add("a", [1, 1])
    queue.add("b", [1, 1])
    queue.set_priority("b", 3)
    queue.set_priority("nobody", 3)
    assert drain(queue) == [("b", 0), ("a", 0), ("b", 1), ("a", 1)]


@pytest.mark.parametrize("sizes", [[], [1, -1]])
def test_impossible_sizes_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="sizes"):
        LayerQueue(1).add("a", sizes)


def test_impossible_configurations_are_refused() -> None:
    with pytest.raises(ValueError, match="budget"):
        LayerQueue(0)
    with pytest.raises(ValueError, match="patience"):
        LayerQueue(1, patience=0)
    with pytest.raises(ValueError, match="at_once 0"):
        LayerQueue(1, at_once=0)


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 60))
def test_a_budget_is_never_exceeded_by_two(sizes: list[int], limit: int) -> None:
    budget = ByteBudget(limit)
    held: list[int] = []
    for size in sizes:
        if budget.fits(size):
            budget.take(size)
            held.append(size)
        else:
            with pytest.raises(ValueError, match="do not fit"):
                budget.take(size)
            budget.give(held.pop(0))
        assert budget.used == sum(held)
        assert budget.used <= limit or len(held) == 1
    with pytest.raises(ValueError, match="not taken"):
        budget.give(budget.used + 1)


class QueueModel(RuleBasedStateMachine):
    """Against lists that are sorted anew for each question."""

    BUDGET, PATIENCE, AT_ONCE = 20, 3, 2

    def __init__(self) -> None:
        super().__init__()
        self.queue = LayerQueue(self.BUDGET, patience=self.PATIENCE, at_once=self.AT_ONCE)
        self.waiting: dict[int, dict[str, object]] = {}
        self.flying: list[LayerTask] = []
        self.gone: set[int] = set()
        self.arrivals = 0
        self.started = 0

    def candidates(self) -> list[tuple[tuple[int, int, int], int, int, int]]:
        found = []
        for number, w in self.waiting.items():
            sizes, layer = w["sizes"], w["next"]
            assert isinstance(sizes, list)
            assert isinstance(layer, int)
            flying = sum(task.request == number for task in self.flying)
            if number not in self.gone and layer < len(sizes) and flying < self.AT_ONCE:
                key = (layer + w["arrived"] // self.PATIENCE, -w["priority"], number)  # type: ignore[operator]
                found.append((key, number, layer, sizes[layer]))
        return sorted(found)

    @rule(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=5), priority=st.integers(-2, 2))
    def add(self, sizes: list[int], priority: int) -> None:
        self.queue.add(self.arrivals, sizes, priority=priority)
        self.waiting[self.arrivals] = {
            "sizes": sizes,
            "priority": priority,
            "next": 0,
            "arrived": self.started,
        }
        self.arrivals += 1

    @rule()
    def start(self) -> None:
        task = self.queue.start()
        candidates = self.candidates()
        if not candidates:
            assert task is None
            return
        _, number, layer, size = candidates[0]
        used = sum(t.nbytes for t in self.flying)
        if self.flying and used + size > self.BUDGET:
            assert task is None
            return
        assert task == LayerTask(number, layer, size)
        self.waiting[number]["next"] = layer + 1
        self.flying.append(task)
        self.started += 1

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        task = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        others = any(t.request == task.request for t in self.flying)
        assert isinstance(task.request, int)
        w = self.waiting[task.request]
        done = task.request in self.gone or w["next"] == len(w["sizes"])  # type: ignore[arg-type]
        assert self.queue.finish(task) == (done and not others)
        if done and not others:
            del self.waiting[task.request]

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.waiting)))
        flying = any(t.request == number for t in self.flying)
        assert self.queue.cancel(number) == (not flying)
        self.gone.add(number)
        if not flying:
            del self.waiting[number]

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), priority=st.integers(-3, 3))
    def prioritise(self, data: st.DataObject, priority: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.waiting)))
        self.queue.set_priority(number, priority)
        self.waiting[number]["priority"] = priority

    @invariant()
    def agrees(self) -> None:
        self.queue.check()
        assert len(self.queue) == len(self.waiting)
        assert self.queue.budget.used == sum(t.nbytes for t in self.flying)
        assert self.queue.waiting_bytes == sum(
            sum(w["sizes"][w["next"] :])  # type: ignore[index,misc]
            for number, w in self.waiting.items()
            if number not in self.gone
        )


class OneAfterTheOther(QueueModel):
    AT_ONCE = 1


TestOneAfterTheOther = OneAfterTheOther.TestCase
TestOneAfterTheOther.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

TestQueueModel = QueueModel.TestCase
TestQueueModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.long
class TestQueueModelLong(QueueModel.TestCase):
    settings = settings(max_examples=1000, stateful_step_count=80, deadline=None)

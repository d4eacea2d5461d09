"""A queue shared by bytes: turns, and which items give way, against lists."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_ext.tiered_store.loading.fair_queue import FairQueue

OWNERS = "abc"
LARGEST = 50
owners = st.sampled_from(OWNERS)
sizes = st.integers(1, LARGEST)


class FairQueueModel(RuleBasedStateMachine):
    """Items are (tenant, number, bytes); each tenant's are kept in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[tuple[str, int, int]] = FairQueue()
        self.lists: dict[str, list[tuple[str, int, int]]] = {owner: [] for owner in OWNERS}
        self.pushed = 0
        self.served: Counter[str] = Counter()
        """Bytes for each tenant since all three had items, if they have."""

    @property
    def nbytes(self) -> int:
        return sum(item[2] for items in self.lists.values() for item in items)

    @rule(owner=owners, nbytes=sizes)
    def push(self, owner: str, nbytes: int) -> None:
        item = (owner, self.pushed, nbytes)
        self.pushed += 1
        self.queue.push(owner, nbytes, item)
        self.lists[owner].append(item)

    @rule()
    def pop(self) -> None:
        if not self.queue:
            return
        waiting = [owner for owner in OWNERS if self.lists[owner]]
        first = self.queue.first
        item = self.queue.pop()
        assert item == first == self.lists[item[0]].pop(0), "a tenant's items come in order"
        if len(waiting) < len(OWNERS):
            self.served.clear()
            return
        self.served[item[0]] += item[2]
        for other in OWNERS:
            assert self.served[item[0]] - item[2] <= self.served[other] + 2 * LARGEST

    @rule(owner=owners, nbytes=sizes, room=st.integers(0, 200))
    def make_room(self, owner: str, nbytes: int, room: int) -> None:
        before = self.nbytes
        taken = self.queue.make_room(owner, nbytes, room)
        if taken is None:
            assert before + nbytes > room
            return
        for item in taken:
            assert item[0] != owner
            assert item == self.lists[item[0]].pop(), "the newest first"
        assert self.nbytes + nbytes <= room
        if taken:
            assert self.nbytes + taken[-1][2] + nbytes > room, "no more than was needed"
            self.served.clear()
        self.push(owner, nbytes)

    @invariant()
    def is_whole(self) -> None:
        self.queue.check()
        assert self.queue.nbytes == self.nbytes
        assert len(self.queue) == sum(map(len, self.lists.values()))


TestFairQueue = FairQueueModel.TestCase


@given(st.lists(sizes, min_size=1, max_size=30), st.lists(sizes, max_size=5))
def test_an_item_waits_for_one_of_each_other_tenant(backlog: list[int], before: list[int]) -> None:
    """However much the others have queued, and whatever was served before."""
    queue: FairQueue[str] = FairQueue()
    for nbytes in backlog:
        queue.push("a", nbytes, "a")
        queue.push("c", nbytes, "c")
    for _ in range(min(len(before), len(backlog))):
        queue.pop()
    queue.push("b", 50, "b")
    order = [queue.pop() for _ in range(len(queue))]
    at = order.index("b")
    assert Counter(order[:at])["a"] <= 1
    assert Counter(order[:at])["c"] <= 1


@given(st.lists(sizes, max_size=30), st.randoms(use_true_random=False))
def test_a_tenant_alone_has_a_plain_queue(nbytes: list[int], rng: random.Random) -> None:
    queue, plain, served = FairQueue[int](), list[int](), 0
    for number, size in enumerate(nbytes):
        assert queue.make_room("a", size, queue.nbytes) is None, "it never loses its own items"
        queue.push("a", size, number)
        plain.append(number)
        if rng.random() < 0.4:
            assert queue.pop() == plain.pop(0) == served
            served += 1
    assert [queue.pop() for _ in range(len(queue))] == plain


def test_a_tenant_that_was_idle_has_no_credit() -> None:
    """It takes turns with a tenant for which much was written meanwhile."""
    queue: FairQueue[str] = FairQueue()
    for _ in range(20):
        queue.push("a", 10, "a")
    for _ in range(15):
        queue.pop()
    for _ in range(5):
        queue.push("b", 10, "b")
    order = [queue.pop() for _ in range(10)]
    assert Counter(order[:5])["a"] >= 2


def test_bytes_are_shared_not_items() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(30):
        queue.push("large", 300, "large")
        queue.push("small", 100, "small")
    first = Counter(queue.pop() for _ in range(20))
    assert first == {"small": 15, "large": 5}


def test_the_tenant_with_the_most_gives_way() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(6):
        queue.push("a", 10, f"a{number}")
    for number in range(3):
        queue.push("c", 10, f"c{number}")
    assert queue.make_room("b", 20, 90) == ["a5", "a4"]
    queue.push("b", 20, "b")
    assert queue.make_room("a", 10, 90) is None, "nothing of others comes after it"
    assert queue.make_room("b", 10, 90) == ["a3"]


@pytest.mark.parametrize("most", [9, 59])
def test_nothing_is_taken_where_it_would_not_be_enough(most: int) -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(3):
        queue.push("a", 20, f"a{number}")
    assert queue.make_room("b", 10 if most < 10 else 60, most) is None
    assert len(queue) == 3
    queue.check()

"""The hooks that throw a prefill batch away, around a scheduler that notes what is done to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.patches.hooks import restarts
from sglang_ext.patches.process import PROCESS


class Cache:
    def __init__(self) -> None:
        self.holds = True

    def streams_hold(self) -> bool:
        return self.holds


class Scheduler:
    def __init__(self, cache: Cache) -> None:
        self.tree_cache = cache
        self.chunked_req: Any = None
        self.last_batch: Any = None
        self.queued: list[str] = []

    def _add_request_to_queue(self, req: str, is_retracted: bool = False) -> None:
        assert is_retracted
        self.queued.append(req)


class Batch:
    def __init__(self, number: int, *reqs: str, extend: bool = True) -> None:
        self.forward_iter = number
        self.reqs = list(reqs)
        self.forward_mode = SimpleNamespace(is_extend=lambda: extend)

    def filter_batch(self, keep_indices: list[int]) -> None:
        self.reqs = [self.reqs[i] for i in keep_indices]


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    monkeypatch.setattr(restarts, "take_back", lambda reqs, cache: list(reqs))
    cache = Cache()
    monkeypatch.setattr(PROCESS, "cache", cache)
    return Scheduler(cache)


def test_a_batch_that_holds_is_left_alone(scheduler: Scheduler) -> None:
    batch = Batch(1, "a")
    restarts.after_run_batch(None, scheduler, batch)
    restarts.after_batch_result(None, scheduler, batch, None)
    scheduler.last_batch = batch
    restarts.after_events(None, scheduler)
    assert (batch.reqs, scheduler.queued) == (["a"], [])


def test_requests_come_back_after_the_result_of_their_own_batch(scheduler: Scheduler) -> None:
    """With overlap, the result of the chunk before comes first. A request that was prefilled again by then
    would take the old result of this batch for its own, and answer its first token twice.
    """
    before, batch = Batch(6, "a"), Batch(7, "a", "b")
    scheduler.tree_cache.holds = False
    scheduler.chunked_req = "a"
    restarts.after_run_batch(None, scheduler, batch)
    assert scheduler.chunked_req is None
    restarts.after_batch_result(None, scheduler, before, None)
    assert scheduler.queued == []
    restarts.after_batch_result(None, scheduler, Batch(7, "a", "b"), None)  # a copy
    assert scheduler.queued == ["a", "b"]
    restarts.after_batch_result(None, scheduler, batch, None)
    assert scheduler.queued == ["a", "b"]


def test_they_leave_the_last_batch_before_it_is_merged(scheduler: Scheduler) -> None:
    batch = Batch(7, "a", "b")
    scheduler.tree_cache.holds = False
    restarts.after_run_batch(None, scheduler, batch)
    batch.reqs.append("finished before")
    scheduler.last_batch = batch
    restarts.after_events(None, scheduler)
    assert batch.reqs == ["finished before"]
    batch.reqs.append("a")  # prefilled again
    restarts.after_events(None, scheduler)
    assert batch.reqs == ["finished before", "a"]


def test_decode_and_other_caches_are_not_asked(scheduler: Scheduler) -> None:
    scheduler.tree_cache.holds = False
    restarts.after_run_batch(None, scheduler, Batch(1, "a", extend=False))
    scheduler.tree_cache = Cache()
    scheduler.tree_cache.holds = False
    restarts.after_run_batch(None, scheduler, Batch(2, "a"))
    restarts.after_batch_result(None, scheduler, Batch(2, "a"), None)
    assert scheduler.queued == []

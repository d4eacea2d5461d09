"""The hooks that throw a prefill batch away, around a scheduler that notes its calls."""

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
        self.disaggregation_mode = SimpleNamespace(value="null")
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


@pytest.fixture
def prefill(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    """Of a prefill server, whose last batch did not hold."""
    scheduler.disaggregation_mode.value = "prefill"
    scheduler.tree_cache.holds = False
    monkeypatch.setattr(restarts, "queue_again", lambda scheduler, req: scheduler.queued.append(req))
    monkeypatch.setattr("sglang.srt.disaggregation.utils.is_aborted", lambda req: req == "aborted")
    return scheduler


def process(scheduler: Scheduler, batch: Batch) -> list[int]:
    """The numbers of the batches whose result is used."""
    used: list[int] = []
    restarts.around_prefill_result(
        lambda _, batch, __: used.append(batch.forward_iter), scheduler, batch, None
    )
    restarts.after_batch_result(None, scheduler, batch, None)
    return used


def test_prefill_takes_back_after_the_results_before(prefill: Scheduler) -> None:
    """With overlap: the chunk before still belongs to a request that goes on."""
    before, batch = Batch(6, "a"), Batch(7, "a", "b")
    prefill.chunked_req = "a"
    restarts.after_run_batch(None, prefill, batch)
    assert prefill.chunked_req == "a"
    assert process(prefill, before) == [6]
    prefill.last_batch = batch
    restarts.after_events(None, prefill)
    assert (prefill.chunked_req, batch.reqs, prefill.queued) == (None, [], [])
    assert process(prefill, Batch(7, "a", "b")) == []
    assert prefill.queued == ["a", "b"]
    assert process(prefill, Batch(8, "a", "b")) == [8]


def test_prefill_without_overlap_takes_back_with_the_result(prefill: Scheduler) -> None:
    batch = Batch(7, "a", "b")
    restarts.after_run_batch(None, prefill, batch)
    assert process(prefill, batch) == []
    assert prefill.queued == ["a", "b"]
    prefill.last_batch = batch
    restarts.after_events(None, prefill)
    assert batch.reqs == []


def test_what_was_aborted_meanwhile_ends(prefill: Scheduler) -> None:
    told: list[str] = []
    prefill._retire_aborted_prefill_result = lambda req: True  # type: ignore[attr-defined]
    prefill.output_streamer = SimpleNamespace(  # type: ignore[attr-defined]
        stream_output=lambda reqs, return_logprob: told.extend(reqs)
    )

    class Aborted(str):
        return_logprob = False

    batch = Batch(7, Aborted("aborted"), "b")
    restarts.after_run_batch(None, prefill, batch)
    assert process(prefill, batch) == []
    assert told == ["aborted"]

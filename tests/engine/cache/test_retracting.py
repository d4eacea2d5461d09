"""Running requests give way and go on from their KV: SGLang's own batches and admission, call by call.

Random traffic over the same is in test_simulation.py; the hooks on a real server in
tests/integration/cache/test_retraction.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_pools import WrongKvError
from engine_scheduler import Settings, token_at
from engine_simulation import Rank, Scenario
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import AddReqResult

from sglang_ext.engine.retraction import RetractionCounters
from sglang_ext.keys import encode_tokens
from sglang_ext.patches.hooks import retraction as hooks
from sglang_ext.patches.process import PROCESS

pytestmark = pytest.mark.usefixtures("sglang_config")

BLOCK = 4
LOW = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
HIGH = [11, 12, 13, 14, 15, 16]
ANSWER = 60

MakeRank = Callable[..., Rank]


@pytest.fixture
def make_rank() -> Iterator[MakeRank]:
    ranks: list[Rank] = []

    def make(*, wait: float = 0.0, running: int = 1, overlap: bool = False, **changes: Any) -> Rank:
        settings = Settings(preemption=True, retract_wait=wait, max_running=running, overlap=overlap)
        about = {"hbm_tokens": 160, "dram_blocks": 60, "settings": settings, **changes}
        ranks.append(Rank(Scenario("retraction", block=BLOCK, **about)))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.close()


def start(rank: Rank, tokens: list[int], *, answer: int = ANSWER, given: int = 9, **about: Any) -> Req:
    """A request that has generated so many tokens."""
    req = rank.scheduler.submit(tokens, new_tokens=answer, **about)
    until(rank, lambda: len(req.output_ids) >= given)
    return req


def until(rank: Rank, done: Callable[[], bool]) -> None:
    for _ in range(500):
        if done():
            return
        rank.scheduler.step()
        rank.check()
    raise AssertionError("it does not come to that")


def counters(rank: Rank) -> RetractionCounters:
    assert rank.cache.retracting is not None
    return rank.cache.retracting.retraction.counters


def right(req: Req, answer: int = ANSWER) -> bool:
    prompt = len(req.origin_input_ids)
    return list(req.output_ids) == [token_at(req, prompt + index) for index in range(answer)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("lacks", ["a place", "slots"])
def test_a_low_priority_gives_way_and_goes_on_from_its_kv(
    make_rank: MakeRank, lacks: str, overlap: bool
) -> None:
    short = lacks == "slots"
    rank = make_rank(overlap=overlap, running=4 if short else 1, hbm_tokens=76 if short else 160)
    req = start(rank, LOW)
    had = len(req.output_ids)
    high = rank.scheduler.submit(HIGH, new_tokens=40, priority=5)
    until(rank, high.finished)
    assert len(req.output_ids) - had <= 2  # it stood meanwhile
    assert req in rank.scheduler.waiting
    until(rank, lambda: rank.scheduler.idle)
    assert right(req)
    assert right(high, 40)
    count = counters(rank)
    assert (count.retracted, count.resumed, count.error) == (1, 1, 0)
    assert count.recomputed_tokens < BLOCK
    assert count.found_tokens >= len(LOW) + had - BLOCK


def test_its_kv_comes_from_dram_where_hbm_needed_the_slots(make_rank: MakeRank) -> None:
    rank = make_rank(hbm_tokens=96)
    req = start(rank, LOW, given=30)
    until(rank, rank.scheduler.submit(list(range(20, 90)), new_tokens=20, priority=5).finished)
    until(rank, req.finished)
    assert right(req)
    assert rank.scheduler.loaded_tokens > 0
    assert counters(rank).recomputed_tokens < BLOCK


def test_the_twin_whose_kv_is_damaged_is_seen(make_rank: MakeRank) -> None:
    rank = make_rank()
    req = start(rank, LOW)
    high = rank.scheduler.submit(HIGH, new_tokens=4, priority=5)
    until(rank, lambda: bool(high.output_ids))
    key = encode_tokens(req.origin_input_ids + req.output_ids)
    slot = int(rank.tree.match((0, None, None), key).path[-1].placements[rank.hbm][-1])
    rank.pools.kvcache.get_key_buffer(0)[slot].view(torch.uint8).view(-1)[:1] ^= 1
    rank.look_inside = False
    with pytest.raises(WrongKvError, match="in forward"):
        until(rank, req.finished)


def test_no_request_gives_way_where_the_wait_is_short(make_rank: MakeRank) -> None:
    rank = make_rank(wait=1000.0)
    req = start(rank, LOW)
    high = rank.scheduler.submit(HIGH, new_tokens=4, priority=5)
    until(rank, req.finished)
    assert not high.output_ids
    until(rank, high.finished)
    assert right(req)
    assert counters(rank) == RetractionCounters(avoided=1)


def test_who_would_go_on_otherwise_is_left_running(make_rank: MakeRank) -> None:
    rank = make_rank()
    req = start(rank, LOW)
    req.sampling_params.frequency_penalty = 0.5
    high = rank.scheduler.submit(HIGH, new_tokens=4, priority=5)
    until(rank, req.finished)
    until(rank, high.finished)
    assert counters(rank) == RetractionCounters()


def test_weights_that_changed_under_a_request_leave_it_running(make_rank: MakeRank) -> None:
    """Its KV then belongs to no weights in use, and other weights would compute it again."""
    rank = make_rank()
    req = start(rank, LOW)
    rank.scheduler.change_weights()
    high = rank.scheduler.submit(HIGH, new_tokens=4, priority=5)
    until(rank, req.finished)
    until(rank, high.finished)
    assert counters(rank) == RetractionCounters()


def test_a_request_that_is_not_admitted_after_all_retracts_none(make_rank: MakeRank) -> None:
    """SGLang queues the requests that it has preempted only if another was admitted in their place."""
    rank = make_rank(disk_blocks=100, threaded=True)
    req = start(rank, LOW)
    high = rank.scheduler.submit(HIGH, new_tokens=4, priority=5)
    ready = rank.cache.check_prefetch_progress
    blocked = {high.cache_request_handle}
    rank.cache.check_prefetch_progress = (  # type: ignore[method-assign]
        lambda handle: handle not in blocked and ready(handle)
    )
    until(rank, lambda: counters(rank).retracted == 1)
    assert not high.output_ids
    assert req in [*rank.scheduler.waiting, *rank.scheduler.active()]
    blocked.clear()
    until(rank, high.finished)
    until(rank, req.finished)
    assert right(req)


def test_kv_that_cannot_be_kept_is_computed_again(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank(dram_blocks=None)
    req = start(rank, LOW)
    had = len(req.output_ids)

    rows, keep = rank.cache.rows, rank.cache.rows.keep

    def fail_once(*_: object) -> None:
        monkeypatch.setattr(rows, "keep", keep)
        raise RuntimeError("no")

    monkeypatch.setattr(rows, "keep", fail_once)
    until(rank, rank.scheduler.submit(HIGH, new_tokens=4, priority=5).finished)
    until(rank, req.finished)
    assert right(req)
    count = counters(rank)
    assert (count.retracted, count.error) == (1, 1)
    assert count.recomputed_tokens >= had


def test_a_decision_that_fails_retracts_no_request(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank()
    req = start(rank, LOW)

    def fail(*_: object) -> None:
        raise RuntimeError("no")

    assert rank.cache.retracting is not None
    monkeypatch.setattr(rank.cache.retracting.retraction, "judge", fail)
    high = rank.scheduler.submit(HIGH, new_tokens=4, priority=5)
    until(rank, high.finished)
    assert right(req)
    assert counters(rank).retracted == 0
    assert counters(rank).error > 0


# -- the hooks -------------------------------------------------------------------------------------------


def test_without_our_decision_sglangs_own_is_asked(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank()
    monkeypatch.setattr(PROCESS, "cache", rank.cache)
    monkeypatch.setattr(rank.cache, "retracting", None)
    adder, scheduler = SimpleNamespace(tree_cache=rank.cache), SimpleNamespace(tree_cache=rank.cache)
    assert hooks.around_preempt(lambda *_: True, adder, "req") is True
    assert hooks.around_add(lambda *_, **__: AddReqResult.NO_TOKEN, adder, "req") is AddReqResult.NO_TOKEN
    hooks.after_prefill_batch((None, None), scheduler)
    hooks.before_batch_result(scheduler, None)


def test_the_hooks_reach_the_cache_of_their_scheduler(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank()
    asked: list[Any] = []
    retracting = SimpleNamespace(
        make_room=lambda adder, req, rows: bool(asked.append((req, rows))),
        add=lambda stock, adder, req, *args, **kwargs: asked.append((req, kwargs)),
        queue=lambda: asked.append("queue"),
        admitted=asked.append,
        retraction=SimpleNamespace(
            decoded=lambda: asked.append("decoded"), interrupted=lambda: asked.append("interrupted")
        ),
    )
    monkeypatch.setattr(PROCESS, "cache", rank.cache)
    monkeypatch.setattr(rank.cache, "retracting", retracting)
    ours = SimpleNamespace(tree_cache=rank.cache)

    def never(*_: object, **__: object) -> Any:
        raise AssertionError("SGLang's own is not asked")

    hooks.around_preempt(never, ours, "a")
    hooks.around_add(never, ours, "b", has_chunked_req=False, truncation_align_size=None)
    hooks.after_prefill_batch((SimpleNamespace(reqs=["c"]), None), ours)
    for decodes in (True, False):
        mode = SimpleNamespace(is_decode=lambda decodes=decodes: decodes)
        hooks.before_batch_result(ours, SimpleNamespace(forward_mode=mode), None)
    assert asked == [
        ("a", 1),
        ("b", {"has_chunked_req": False, "truncation_align_size": None}),
        "queue",
        ["c"],
        "decoded",
        "interrupted",
    ]

"""The decision to load or to compute, as an answer reports it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from engine_simulation import Rank, Scenario
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.tiers.load_policy import AgreedSpeeds, DramPolicy, PrefillCost
from sglang_ext.engine.tiers.load_report import (
    Decision,
    LoadDecisions,
    LoadReport,
    Reason,
    answer_details,
    begin_report,
    details_of,
)
from sglang_ext.engine.tiers.prefill_clock import PrefillClock
from sglang_ext.tiers import Tier

BLOCK, BYTES = 16, 1 << 16


def test_a_report_becomes_whole_numbers_and_texts_under_sglangs_names() -> None:
    req = SimpleNamespace()
    begin_report(req, Tier.DISK).decided(20, Decision(12, 0.0104, 0.25, Reason.OVERLAP), BLOCK, BYTES)
    begin_report(req, Tier.DRAM).decided(3, Decision(3, None, None, Reason.UNMEASURED), BLOCK, BYTES)
    assert details_of(req) == {
        "host_decision": "load",
        "host_reason": "unmeasured",
        "host_found_tokens": 48,
        "host_read_tokens": 48,
        "host_read_bytes": 3 * BYTES,
        "storage_decision": "both",
        "storage_reason": "overlap",
        "storage_found_tokens": 320,
        "storage_read_tokens": 192,
        "storage_read_bytes": 12 * BYTES,
        "storage_load_us": 10400,
        "storage_compute_us": 250_000,
    }


def test_nothing_found_says_nothing() -> None:
    req = SimpleNamespace()
    assert details_of(req) == {}
    begin_report(req, Tier.DISK)
    assert details_of(req) == {}


def test_what_came_in_the_end_counts() -> None:
    report = LoadReport(Tier.DISK)
    report.decided(20, Decision(20, 0.1, 0.2, Reason.FASTER), BLOCK, BYTES)
    shared = LoadReport(Tier.DISK)
    shared.shares(report)
    report.came(5 * BLOCK, Reason.FAILED)
    assert (report.decision, report.reason, report.read_bytes) == ("both", Reason.FAILED, 5 * BYTES)
    assert (shared.decision, shared.read_bytes) == ("load", 20 * BYTES)
    report.came(0, Reason.LATE)
    assert (report.decision, report.details()["storage_reason"]) == ("compute", "late")


def test_decisions_are_counted_by_what_and_why() -> None:
    decisions = LoadDecisions()
    report = LoadReport(Tier.DISK)
    report.decided(2, Decision(0, 0.2, 0.1, Reason.SLOWER), BLOCK, BYTES)
    decisions.note(report)
    decisions.note(report)
    assert dict(decisions.counts) == {("compute", "slower"): 2}
    assert decisions.last is report


def dram_policy(rate: float | None, *, always: bool = False, learnt: bool = True) -> DramPolicy:
    cost = PrefillCost()
    if learnt:
        for _ in range(5):
            cost.observe(1000, 0.0, 0.1)
    ranks = Ranks()
    speeds = AgreedSpeeds(cost, lambda: rate, ranks)
    ranks.each_pass()
    return DramPolicy(BLOCK, BYTES, always=always, speeds=speeds)


@pytest.mark.parametrize(
    ("rate", "options", "blocks", "reason"),
    [
        (1e9, {}, 10, Reason.FASTER),
        (1e6, {}, 0, Reason.SLOWER),
        (1e6, {"always": True}, 10, Reason.ALWAYS),
        (None, {}, 10, Reason.UNMEASURED),
        (1e6, {"learnt": False}, 10, Reason.UNMEASURED),
    ],
)
def test_dram_is_weighed_by_its_measured_speed(
    rate: float | None, options: dict[str, bool], blocks: int, reason: Reason
) -> None:
    decision = dram_policy(rate, **options).weigh(10, 0)
    assert (decision.blocks, decision.reason) == (blocks, reason)
    if rate is not None:
        assert decision.read_seconds == pytest.approx(10 * BYTES / rate + DramPolicy.OVERHEAD_SECONDS)
    if options.get("learnt", True):
        assert decision.recompute_seconds == pytest.approx(160 * 1e-4)


def test_loads_under_way_count() -> None:
    policy = dram_policy(1e8)
    assert policy.weigh(10, 0).blocks == 10
    assert policy.weigh(10, 0, waiting_blocks=50).reason is Reason.SLOWER


def test_dram_that_was_too_slow_is_tried_again_after_a_while() -> None:
    policy = dram_policy(2e7)
    tries = 1
    while not policy.weigh(10, 0).blocks:
        tries += 1
    assert 5 < tries < 20
    assert not policy.weigh(10, 0).blocks


def test_the_backend_is_named_where_the_disk_was_asked() -> None:
    plain = SimpleNamespace()
    assert answer_details(None, plain) is None
    assert answer_details({"device": 3, "host": 1}, plain) is None
    assert answer_details({"device": 3, "host": 1, "storage": 2}, plain) == {
        "device": 3, "host": 1, "storage": 2, "storage_backend": "global",
    }  # fmt: skip
    told = answer_details({"device": 3, "host": 0, "storage": 0, "storage_backend": "none"}, plain)
    assert told is not None
    assert told["storage_backend"] == "global"
    req = SimpleNamespace()
    begin_report(req, Tier.DRAM).decided(4, Decision(4, None, None), 4, 8)
    told = answer_details(None, req)
    assert told is not None
    assert "storage_backend" not in told
    begin_report(req, Tier.DISK).decided(4, Decision(0, 1.0, 0.5, Reason.SLOWER), 4, 8)
    told = answer_details(None, req)
    assert told is not None
    assert (told["storage_backend"], told["storage_decision"]) == ("global", "compute")


SERVED = Scenario("served", hbm_tokens=240, dram_blocks=100, disk_blocks=400, memory=30)


@pytest.mark.usefixtures("sglang_config")
def test_a_requests_answer_has_the_decisions_of_both_tiers() -> None:
    with Rank(SERVED) as rank:
        prompt = [n % 7 for n in range(100)]
        assert details_of(rank.serve(prompt)) == {}
        rank.settle()
        assert rank.tier is not None
        rank.cache.evict(EvictParams(num_tokens=rank.pools.tokens))
        rank.tier.give_back(rank.tier.take(rank.tier.n_blocks))
        details = details_of(rank.serve(prompt))
        # It came from disk, and from DRAM to HBM.
        assert details["storage_decision"] == details["host_decision"] == "load"
        assert details["storage_found_tokens"] == details["host_read_tokens"] == 96
        assert details["storage_reason"] == "always"
        layout = rank.pools.geometry().layout
        assert details["storage_read_bytes"] == 24 * layout.block_bytes
        assert rank.promotions is not None
        assert rank.promotions.decisions[Tier.DISK].counts["load", "always"] == 1


@pytest.mark.usefixtures("sglang_config")
def test_a_dram_hit_that_is_slower_than_computing_is_computed() -> None:
    with Rank(Scenario("slow DRAM", hbm_tokens=240, dram_blocks=100, weigh=True)) as rank:
        prompt = [n % 7 for n in range(101)]
        rank.serve(prompt)
        assert rank.tier is not None
        rank.tier.copies.settle()
        for number in (1, 2):
            rank.serve([number * 100 + n for n in range(150)])
        clock = rank.cache.find(PrefillClock)
        assert clock is not None
        for _ in range(50):
            clock._cost.observe(1000, 0.0, 0.001)
        assert rank.mover is not None
        rank.mover.load_bytes_per_second = 1e3  # type: ignore[misc]
        req = rank.serve(prompt)
        assert req.cached_tokens == 0
        details = details_of(req)
        assert (details["host_decision"], details["host_reason"]) == ("compute", "slower")
        assert int(details["host_load_us"]) > int(details["host_compute_us"])

"""The cache under a whole server's traffic: SGLang's own scheduling around it, an oracle for every row.

After each pass of the scheduler's loop: the cache's own check, SGLang's count of slots, one owner for every
slot, and in every tier the oracle's KV. Free slots are spoilt, so that reading one is seen.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from engine_scheduler import SimulatedScheduler
from engine_simulation import SCENARIOS, Rank, Scenario, Traffic, run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]


@contextmanager
def served(scenario: Scenario, seed: int, steps: int) -> Iterator[tuple[Rank, Traffic]]:
    """A rank after so much traffic, empty again. Copies are late in every other run, else at random."""
    with Rank(scenario, pace=random.Random(seed) if seed % 2 else None) as rank:
        yield rank, run(rank, seed, steps)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_every_row_is_right_and_every_slot_has_one_owner(scenario: Scenario) -> None:
    with served(scenario, seed=1, steps=110) as (rank, traffic):
        finished = len(rank.scheduler.finished)
        assert finished > 15
        assert traffic.counts["submit"] > 10


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_every_row_is_right_and_every_slot_has_one_owner_for_long(scenario: Scenario, seed: int) -> None:
    """64 runs, 25,600 passes of the loop."""
    with served(scenario, seed=100 + seed, steps=400) as (rank, traffic):
        finished = len(rank.scheduler.finished)
        assert finished > 30
        assert traffic.counts["abort"] > 0


def test_the_disk_is_used() -> None:
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == "disk below a small DRAM")
    with served(scenario, seed=1, steps=200) as (rank, _):
        assert rank.promotions is not None
        assert rank.writes is not None
        assert rank.scheduler.disk_tokens > 0
        assert rank.promotions.counters.promoted > 0
        assert rank.writes.counters.written > 0


@pytest.mark.parametrize("on_disk", [False, True], ids=["in DRAM", "on disk"])
@pytest.mark.parametrize("scenario", [each for each in SCENARIOS if "dsa" in each.name], ids=str)
def test_a_prompt_with_index_keys_is_found(scenario: Scenario, on_disk: bool) -> None:
    prompt = [at % 5 for at in range(4 * 64 + 1)]
    with Rank(scenario) as rank:
        rank.serve(prompt)
        rank.leave_hbm(on_disk=on_disk)
        rank.serve([*prompt, 1, 2], new_tokens=30)
        assert rank.scheduler.loaded_tokens == 4 * 64
        assert rank.scheduler.disk_tokens == 4 * 64 * on_disk


@pytest.mark.parametrize("on_disk", [False, True], ids=["in DRAM", "on disk"])
def test_adapters_share_no_latents_and_no_index_keys(on_disk: bool) -> None:
    prompt = [at % 5 for at in range(4 * 64 + 1)]
    scenario = next(each for each in SCENARIOS if each.name == "dsa, index keys by page")
    with Rank(replace(scenario, dram_blocks=40)) as rank:
        rank.serve(prompt, adapter="one")
        assert rank.serve([*prompt, 1], adapter="one").cached_tokens == 4 * 64
        rank.leave_hbm(on_disk=on_disk)
        found = [
            rank.serve([*prompt, 1, 2], adapter=adapter).cached_tokens for adapter in ("two", None, "one")
        ]
        assert found == [0, 0, 4 * 64]
        assert rank.scheduler.loaded_tokens == 4 * 64
        assert rank.scheduler.disk_tokens == 4 * 64 * on_disk


@pytest.mark.parametrize("scenario", [each for each in SCENARIOS if "retraction" in each.name], ids=str)
def test_retracted_requests_go_on_from_their_kv(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing need be evicted from DRAM and weights stay, each finds all whole blocks that it had."""
    monkeypatch.setattr(SimulatedScheduler, "change_weights", lambda self: None)
    with served(replace(scenario, dram_blocks=4000), seed=3, steps=200) as (rank, _):
        retracting = rank.cache.retracting
        assert retracting is not None
        counters = retracting.retraction.counters
        assert counters.retracted >= counters.resumed > 2
        assert counters.error == 0
        assert counters.found_tokens > 0
        assert counters.recomputed_tokens <= (rank.cache.block_size - 1) * counters.resumed
        assert rank.scheduler.preempted == 0


@pytest.mark.long
def test_traffic_reaches_what_it_is_meant_to_reach() -> None:
    """Loads, retraction, preemption, aborts, weight changes, flushes, eviction, skipped writes: all occur."""
    seen: dict[str, int] = {}
    for scenario in SCENARIOS:
        with served(scenario, seed=3, steps=300) as (rank, traffic):
            counts = dict(traffic.counts)
            counts["loaded tokens"] = rank.scheduler.loaded_tokens
            counts["retracted"] = rank.scheduler.retracted
            counts["preempted"] = rank.scheduler.preempted
            if rank.tier is not None:
                counts["evicted"] = rank.tier.evicted
                counts["skipped"] = rank.write_down.skipped
        for what, count in counts.items():
            seen[what] = seen.get(what, 0) + count
    wanted = ("submit", "abort", "weights", "retract all", "flush", "loaded tokens", "retracted", "preempted")
    lacking = [what for what in (*wanted, "evicted", "skipped") if not seen.get(what)]
    assert not lacking, seen

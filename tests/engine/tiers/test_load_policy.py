"""Load or recompute, from measured numbers alone."""

from __future__ import annotations

import math
import random

import pytest

from sglang_ext.engine.movers.bandwidth import Bandwidth
from sglang_ext.engine.tiers.load_policy import DiskPolicy, PrefillCost
from sglang_ext.engine.tiers.prefill_clock import PrefillClock
from sglang_ext.testing.fakes import FakeClock
from sglang_ext.tiers import Tier

A, B = 2e-4, 3e-8


def learnt(noise: float = 0.0) -> PrefillCost:
    """A cost that has seen 200 batches of a server with the coefficients above."""
    rng = random.Random(1)
    cost = PrefillCost()
    for _ in range(200):
        tokens, context = rng.randrange(64, 2048), rng.randrange(0, 16_000)
        pairs = tokens * (context + tokens / 2)
        cost.observe(tokens, pairs, (A * tokens + B * pairs) * (1 + noise * rng.uniform(-1, 1)))
    return cost


def policy(cost: PrefillCost, *, bandwidth: float | None, **options: object) -> DiskPolicy:
    made = DiskPolicy(16, 1 << 20, cost=cost, **options)  # type: ignore[arg-type]
    if bandwidth is not None:
        made.bandwidths[Tier.DISK].bytes_per_second = bandwidth
    return made


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_the_cost_of_prefill_is_learnt_from_batches(noise: float) -> None:
    cost = learnt(noise)
    for tokens, context in ((512, 0), (512, 16_000), (4096, 4096)):
        expected = A * tokens + B * tokens * (context + tokens / 2)
        predicted = cost.seconds(tokens, context)
        assert predicted is not None
        assert abs(predicted - expected) <= max(1e-9, 0.15 * noise / 0.3) * expected + 1e-9


def test_batches_of_one_shape_tell_the_cost_per_token() -> None:
    cost = PrefillCost()
    for _ in range(10):
        cost.observe(256, 256 * 128, 0.1)
    predicted = cost.seconds(512, 0)
    assert predicted is not None
    assert 0.19 <= predicted <= 0.41  # linear in tokens, or in pairs: the data do not show which


def test_no_coefficient_is_negative_whatever_the_noise() -> None:
    rng = random.Random(3)
    for _ in range(100):
        cost = PrefillCost()
        for _ in range(5):
            tokens = rng.randrange(32, 512)
            cost.observe(tokens, tokens * rng.randrange(1, 4000), rng.uniform(0.001, 1))
        known = cost.coefficients()
        assert known is not None
        assert min(known) >= 0


def test_small_batches_and_broken_clocks_teach_nothing() -> None:
    cost = PrefillCost()
    cost.observe(1, 1000, 0.05)
    cost.observe(512, 512 * 256, 0.0)
    assert cost.coefficients() is None
    assert cost.seconds(100, 0) is None


def test_a_server_that_got_slower_is_noticed() -> None:
    cost = learnt()
    for _ in range(300):
        cost.observe(512, 512 * 256, 10 * (A * 512 + B * 512 * 256))
    predicted = cost.seconds(512, 0)
    assert predicted is not None
    assert predicted > 8 * (A * 512 + B * 512 * 256)


def test_bandwidth_follows_the_newest_loads() -> None:
    bandwidth = Bandwidth()
    assert bandwidth.seconds(100) is None
    bandwidth.observe(1000, 1.0)
    assert bandwidth.seconds(1000) == pytest.approx(1.0)
    for _ in range(30):
        bandwidth.observe(4000, 1.0)
    assert bandwidth.seconds(4000) == pytest.approx(1.0, rel=0.01)
    bandwidth.observe(0, 1.0)
    bandwidth.observe(10, 0.0)
    assert bandwidth.seconds(4000) == pytest.approx(1.0, rel=0.01)


def test_what_is_not_known_yet_is_loaded() -> None:
    assert policy(PrefillCost(), bandwidth=None).blocks_to_read([(Tier.DISK, 10)], 0) == 10
    assert policy(PrefillCost(), bandwidth=1.0).blocks_to_read([(Tier.DISK, 10)], 0) == 10
    assert policy(learnt(), bandwidth=None).blocks_to_read([(Tier.DISK, 10)], 0) == 10


def test_the_faster_way_is_taken_and_its_numbers_are_kept() -> None:
    # 64 blocks: 1024 tokens, computed in 0.22 s; 64 MiB.
    fast, slow = policy(learnt(), bandwidth=1e9), policy(learnt(), bandwidth=1e8)
    assert fast.blocks_to_read([(Tier.DISK, 64)], 0) == 64
    assert slow.blocks_to_read([(Tier.DISK, 64)], 0) == 0
    assert slow.last is not None
    assert slow.last.read_seconds == pytest.approx(0.67, rel=0.01)
    assert slow.last.recompute_seconds == pytest.approx(0.22, rel=0.05)
    # The same blocks cost more to compute deep in a long prompt, and then are worth reading.
    assert slow.blocks_to_read([(Tier.DISK, 64)], 4000) == 64


def test_where_both_overlap_the_head_is_read_while_the_tail_is_computed() -> None:
    # Computed in 0.22 s, read in 0.67 s: neither alone is best.
    made = policy(learnt(), bandwidth=1e8, overlaps=True)
    chosen = made.blocks_to_read([(Tier.DISK, 64)], 0, new_tokens=16)
    assert 8 < chosen < 24
    read = chosen * (1 << 20) / 1e8
    tail = (64 - chosen) * 16 + 16
    compute = A * tail + B * tail * (chosen * 16 + tail / 2)
    assert read == pytest.approx(compute, rel=0.1)
    # With much to compute after them, all of them hide behind it.
    assert made.blocks_to_read([(Tier.DISK, 64)], 0, new_tokens=6000) == 64
    # A disk that is busy for longer than computing takes is left alone.
    assert made.blocks_to_read([(Tier.DISK, 64)], 0, new_tokens=16, waiting_bytes=1 << 30) == 0


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_best_border_is_the_best_of_all_borders(overlaps: bool) -> None:
    rng = random.Random(5)
    made = policy(learnt(), bandwidth=1.0, overlaps=overlaps)
    for _ in range(200):
        found, start, new = rng.randrange(1, 80), rng.randrange(0, 500), rng.randrange(1, 2000)
        waiting, bandwidth = rng.choice((0, 1 << 22, 1 << 28)), 10 ** rng.uniform(6.5, 10)
        totals = []
        for blocks in range(found + 1):
            tail = (found - blocks) * 16 + new
            compute = A * tail + B * tail * ((start + blocks) * 16 + tail / 2)
            read = (waiting + blocks * (1 << 20)) / bandwidth if blocks else 0.0
            totals.append(max(read, compute) if overlaps else read + compute)
        made.bandwidths[Tier.DISK].bytes_per_second = bandwidth
        chosen = made.blocks_to_read([(Tier.DISK, found)], start, new_tokens=new, waiting_bytes=waiting)
        assert totals[chosen] <= min(totals) * 1.001 + 1e-9, (found, start, new, waiting, bandwidth)


def test_a_busy_disk_counts() -> None:
    made = policy(learnt(), bandwidth=1e9)
    assert made.blocks_to_read([(Tier.DISK, 64)], 0, waiting_bytes=0) == 64
    assert made.blocks_to_read([(Tier.DISK, 64)], 0, waiting_bytes=1 << 30) == 0


def test_a_disk_that_was_too_slow_is_tried_again_after_a_while() -> None:
    made = policy(learnt(), bandwidth=1e8)
    tries = 1
    while not made.blocks_to_read([(Tier.DISK, 64)], 0):
        tries += 1
    assert 5 < tries < 30


def test_always_means_always_except_for_what_is_too_short() -> None:
    made = policy(learnt(), bandwidth=1.0, always=True, least_tokens=64)
    assert made.blocks_to_read([(Tier.DISK, 4)], 0) == 4
    assert made.blocks_to_read([(Tier.DISK, 3)], 0) == 0
    assert made.blocks_to_read([(Tier.DISK, 0)], 0) == 0
    assert made.patience(4, 0) == math.inf


def test_a_read_is_given_up_when_computing_would_have_been_done() -> None:
    made = policy(learnt(), bandwidth=1e9)
    assert made.patience(64, 0) == pytest.approx(0.22, rel=0.05)
    assert made.patience(1, 0) == 0.05
    assert policy(PrefillCost(), bandwidth=1e9).patience(64, 0) == math.inf


class TestPrefillClock:
    @pytest.mark.parametrize("apart_s", [2.0, 0.0], ids=["on a GPU", "on a CPU, where it has run by then"])
    def test_batches_that_overlap_are_timed_together(self, apart_s: float) -> None:
        cost, clock = PrefillCost(), FakeClock()
        timer = PrefillClock(cost, clock)
        timer.prefill_begins([(100, 0)], loads=False)
        clock.advance(1.0)
        timer.prefill_begins([(100, 0)], loads=False)  # formed before the first one's result is processed
        clock.advance(3.0 - apart_s)
        timer.prefill_ended()
        clock.advance(apart_s)
        timer.prefill_ended()
        assert cost.batches == 1
        assert cost.seconds(100, 0) == pytest.approx(2.0)

    def test_batches_without_an_end_are_timed_all_the_same(self) -> None:
        cost, clock = PrefillCost(), FakeClock()
        timer = PrefillClock(cost, clock)
        timer.prefill_begins([(100, 0)], loads=False)
        for _ in range(40):
            timer.prefill_begins([(100, 0)], loads=False)
            clock.advance(2.0)
            timer.prefill_ended()
        assert cost.batches == 5
        assert cost.seconds(100, 0) == pytest.approx(2.0)

    def test_batches_that_wait_for_loads_teach_nothing(self) -> None:
        cost, clock = PrefillCost(), FakeClock()
        timer = PrefillClock(cost, clock)
        timer.prefill_begins([(100, 0)], loads=True)
        clock.advance(5.0)
        timer.prefill_ended()
        timer.prefill_ended()  # of a batch that was not announced
        assert cost.batches == 0

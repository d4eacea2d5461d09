"""The arithmetic of the advisory benchmark: figures of made-up requests, known by hand."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from benchmarks.advisory.figures import (
    Advised,
    Served,
    cost_line,
    cost_of,
    fit_hits,
    hidden_share,
    max_over_median,
    normalized_latency,
    not_hidden,
    share_within,
    times_the_users,
    users_at,
)
from benchmarks.advisory.sticky import sticky
from sglang_ext.router.policies import Instance, PolicyOptions, Prompt

ONE = Served(
    "s", 1, sent=10.0, first=10.5, ended=12.0, prompt=100, known=80, answer=4, hbm=48, dram=16, disk=16
)


def served(**changes: object) -> Served:
    return dataclasses.replace(ONE, **changes)  # type: ignore[arg-type]


def test_one_request() -> None:
    assert ONE.ttft == 0.5
    assert ONE.normalized == 0.5
    assert ONE.computed == 20
    assert normalized_latency([ONE, served(ended=14.0)]) == 0.75


def test_the_load_of_equal_instances_is_equal() -> None:
    both = [served(instance="a"), served(instance="b")]
    assert max_over_median(both, ["a", "b"], 1.0) == 1.0
    assert max_over_median([served(instance="a")] * 2, ["a", "b"], 1.0) == 2.0
    # Three quarters of the load at one of two: 3 over a median of 2.
    assert max_over_median([*both, *[served(instance="a")] * 2], ["a", "b"], 1.0) == 1.5
    # Of four instances, of which one has twice as much.
    four = [served(instance=name) for name in "abcda"]
    assert max_over_median(four, list("abcd"), 1.0) == 2.0


def test_imbalance_that_evens_out_is_seen_in_windows() -> None:
    in_turn = [
        served(sent=0.0, first=1.0, ended=10.0, instance="a"),
        served(sent=10.0, first=11.0, ended=20.0, instance="b"),
        served(sent=20.0, first=20.0, ended=20.0, instance="b"),
    ]
    assert max_over_median(in_turn, ["a", "b"], 10.0) == 2.0
    assert max_over_median(in_turn, ["a", "b"], 20.0) == 1.0


def test_an_unknown_load_has_no_ratio() -> None:
    assert max_over_median([ONE], ["a"], 1.0) is None
    assert max_over_median([], ["a"], 1.0) is None


def test_users_are_read_off_a_line_through_the_measured_points() -> None:
    curve = {4: 0.1, 8: 0.2, 16: 0.6}
    assert users_at(0.15, curve) == (6.0, 6.0)
    assert users_at(0.4, curve) == (12.0, 12.0)
    assert users_at(0.1, curve) == (4.0, 4.0)
    assert users_at(0.05, curve) == (0.0, 4.0)
    assert users_at(0.7, curve) == (16.0, math.inf)
    # A dip is no reason to take the worse side of it.
    assert users_at(0.2, {4: 0.1, 8: 0.3, 16: 0.15}) == (6.0, 6.0)
    assert users_at(0.1, {4: 0.1, 8: 0.1}) == (8.0, 8.0)


def test_users_are_compared_by_the_least_that_it_can_be() -> None:
    assert times_the_users((12.0, 12.0), (4.0, 4.0)) == 3.0
    assert times_the_users((16.0, math.inf), (0.0, 8.0)) == 2.0
    assert times_the_users((0.0, 16.0), (4.0, 4.0)) == 0.0
    assert times_the_users((16.0, 16.0), (8.0, math.inf)) == 0.0


def hits(noise: float = 0.0) -> list[Served]:
    found = []
    for number, (new, known) in enumerate((n, c) for n in (16, 64, 128) for c in (256, 1024, 2048)):
        seconds = (0.01 + 2e-4 * new + 1e-6 * known + 1e-8 * new * known) * (1 + noise * (number % 2))
        found.append(
            served(sent=0.0, first=seconds, prompt=new + known, known=known, hbm=known, dram=0, disk=0)
        )
    return found


def test_the_line_of_hits_gives_back_what_it_was_made_from() -> None:
    line = fit_hits(hits())
    assert line.seconds(32, 512) == pytest.approx(0.01 + 2e-4 * 32 + 1e-6 * 512 + 1e-8 * 32 * 512, rel=1e-3)
    assert share_within(hits(), line) == 1.0
    slow = [dataclasses.replace(hit, first=hit.first * 1.2) for hit in hits()]
    assert share_within(slow, line) == 0.0
    assert share_within([*slow, *hits()], line) == 0.5
    assert share_within(slow, line, factor=1.3) == 1.0


def test_half_of_the_hits_lie_above_their_line() -> None:
    noisy = hits(noise=0.3)
    line = fit_hits(noisy)
    above = sum(hit.ttft > line.seconds(hit.computed, hit.hbm) * 1.0001 for hit in noisy)
    assert abs(above - len(noisy) / 2) <= 1


def test_a_line_needs_hits() -> None:
    with pytest.raises(ValueError, match="too few"):
        fit_hits(hits()[:3])


def test_what_is_moved_late_is_not_hidden() -> None:
    assert hidden_share(90, 10) == 0.9
    assert hidden_share(0, 10) == 0.0
    assert hidden_share(0, 0) == 1.0


def test_the_cost_of_a_level_is_against_level_0_of_the_same_measurement() -> None:
    found = [served(), served(), served(level=0.1, ended=12.2), served(level=0.3, ended=13.0)]
    assert cost_of(0.1, found) == pytest.approx(0.1)
    assert cost_of(0.3, found) == pytest.approx(0.5)
    assert cost_of(0.0, found) == 0.0


def test_sticky_sessions_stay_where_they_began() -> None:
    def fleet(a: int, b: int) -> tuple[Instance, ...]:
        return (Instance("a", a, 0, 0, 0), Instance("b", b, 0, 0, 0))

    def choose(session: str | None, a: int, b: int) -> str:
        return sticky(Prompt(10, session), fleet(a, b), {}, None, PolicyOptions()).instance  # type: ignore[arg-type]

    assert choose("sticks", 3, 1) == "b"
    assert choose("sticks", 0, 9) == "b"
    assert choose("other", 0, 9) == "a"
    assert choose(None, 0, 9) == "a"
    # Its instance is gone: another one is its home from then on.
    only = (Instance("c", 5, 0, 0, 0),)
    assert sticky(Prompt(10, "sticks"), only, {}, None, PolicyOptions()).instance == "c"  # type: ignore[arg-type]


def test_a_line_tells_a_small_cost_where_two_levels_do_not() -> None:
    """A tenth more at level 1, behind prompts whose lengths matter ten times as much."""
    rng = random.Random(5)
    many = []
    for number in range(800):
        level = (0.0, 0.1, 0.3, 0.5)[number // 10 % 4]
        new = rng.randrange(20, 400)
        latency = (1.0 + 0.4 * level) * 0.05 + 0.0002 * (new - 210) + rng.gauss(0.0, 0.01)
        begin = 0.7 * number
        many.append(served(sent=begin, ended=begin + 4 * latency, prompt=1000 + new, known=1000, level=level))
    line = cost_line(many, 7.0, 1)
    cost, noise = line.cost(0.1)
    assert cost == pytest.approx(0.04, abs=3 * noise)
    assert 0.0005 < noise < 0.01
    assert line.cost(0.3) == (pytest.approx(3 * cost), pytest.approx(3 * noise))
    assert abs(cost_of(0.1, many) - 0.04) > noise


def test_what_was_not_hidden_has_a_reason() -> None:
    def advised(ready: bool, below: int) -> Advised:
        return Advised(ready, below, 1.0, 0.2 if ready else None)

    found = not_hidden(
        [
            served(dram=10, disk=1),
            served(dram=20, disk=2, advised=advised(False, 50)),
            served(dram=40, disk=8, advised=advised(True, 30)),
            served(dram=5, disk=0, advised=advised(True, 30)),
            served(dram=0, disk=0, advised=advised(True, 0)),
        ]
    )
    assert found == {"no hint": 11, "too late": 22, "no room": 35, "given up": 18}

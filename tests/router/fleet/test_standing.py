"""The fleet's running totals equal a look at each instance, whatever has changed in between."""

from __future__ import annotations

import random

import pytest
from router_costs import router_costs

from sglang_ext.cost_model import CostModel
from sglang_ext.router.fleet.standing import Standing
from sglang_ext.router.policies import Instance, Match, PolicyOptions, Prompt, Role, prompt_tree
from sglang_ext.router.policies.fleet_queries import (
    all_colocated,
    all_trusted,
    any_awaited,
    busier_than,
    holders_among,
    in_flight_range,
    least_cached,
    least_loaded,
    named,
)

COSTS = router_costs(CostModel(), lambda: 0.0)
NAMES = "abcdefgh"


def drawn(name: str, draw: random.Random) -> Instance:
    role = draw.choice((Role.COLOCATED, Role.COLOCATED, Role.PREFILL))
    counts = [draw.choice((0, 1, 30)) for _ in range(4)]
    return Instance(name, *counts, role, draw.random() < 0.8, draw.random() < 0.2)


def agrees(whole: tuple[Instance, ...], matches: dict[str, Match]) -> None:
    """A fleet's answers equal those of a look at each instance."""
    plain = tuple(whole)
    for question in (all_colocated, all_trusted, any_awaited, least_loaded, in_flight_range):
        assert question(whole) == question(plain), question
    for name in (*NAMES, "nobody"):
        assert named(whole, name) == named(plain, name)
    assert dict(holders_among(whole, matches)) == dict(holders_among(plain, matches))
    for count in (-1, 0, 1, 30):
        assert busier_than(whole, count) == busier_than(plain, count)
    apart = frozenset(instance.name for instance in plain[1:] if instance.in_flight)
    assert least_cached(whole, apart) == least_cached(plain, apart)
    for tokens in (100, 2000):
        decisions = [
            prompt_tree(Prompt(tokens), each, matches, COSTS, PolicyOptions()) for each in (whole, plain)
        ]
        assert decisions[0] == decisions[1]


def test_it_agrees_with_a_look_at_each() -> None:
    for seed in range(100):
        draw = random.Random(seed)
        standing, truth = Standing(), dict[str, Instance]()
        for _ in range(30):
            name = draw.choice(NAMES)
            if draw.random() < 0.2:
                standing.drop(name)
                truth.pop(name, None)
            else:
                truth[name] = drawn(name, draw)
                standing.put(truth[name])
            whole = standing.fleet()
            assert tuple(whole) == tuple(truth.values())
            assert len(standing) == len(truth)
            assert all(standing.get(each) == truth.get(each) for each in NAMES)
            if truth:
                holders = draw.sample([*NAMES, "nobody"], draw.randrange(4))
                agrees(
                    whole, {each: Match(draw.choice((0, 16, 500)), draw.random() < 0.5) for each in holders}
                )


def test_a_fleet_stays_what_it_was() -> None:
    """Stories keep it."""
    standing, draw = Standing(), random.Random(0)
    for name in NAMES:
        standing.put(drawn(name, draw))
    before, copy = standing.fleet(), tuple(standing.fleet())
    standing.drop("a")
    standing.put(drawn("b", draw))
    standing.put(drawn("i", draw))
    assert tuple(before) == copy
    agrees(before, {"a": Match(500), "i": Match(500)})


@pytest.mark.parametrize("what", ["least", "colocated", "trusted", "awaited", "most_in_flight", "places"])
def test_a_fleet_that_is_wrong_about_itself_is_found(what: str) -> None:
    standing = Standing()
    for number, name in enumerate(NAMES):
        standing.put(Instance(name, number, 0, 0, 0))
    whole = standing.fleet()
    agrees(whole, {})
    wrong = {"least": whole[1], "most_in_flight": 100, "places": {}}.get(
        what, not getattr(whole, what, False)
    )
    setattr(whole, what, wrong)
    with pytest.raises(AssertionError):
        agrees(whole, {})

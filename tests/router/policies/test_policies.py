"""Policies are pure: a table of situations and the required decisions."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_costs import router_costs

from sglang_ext.cost_model import CostModel
from sglang_ext.router.fleet.standing import Standing
from sglang_ext.router.policies import (
    POLICIES,
    Decision,
    Instance,
    Match,
    PolicyOptions,
    Prompt,
    Reason,
    Role,
    first_targets,
    least_load,
    prompt_tree,
    round_robin,
)
from sglang_ext.router.policies.assembly import guarded
from sglang_ext.router.policies.fleet_queries import load_of

OPTIONS = PolicyOptions(
    cache_threshold=0.3, balance_abs_threshold=8, balance_rel_threshold=1.5, tie_tokens=16
)

COSTS = router_costs(CostModel(), lambda: 0.0)


def fleet(
    *in_flight: int, cached: tuple[int, ...] = (), picked: tuple[int, ...] = ()
) -> tuple[Instance, ...]:
    """Instances a, b, c … with so many requests in flight."""
    return tuple(
        Instance(
            name=chr(ord("a") + i),
            in_flight=load,
            queued_tokens=0,
            cached_tokens=cached[i] if cached else 0,
            last_picked=picked[i] if picked else 0,
        )
        for i, load in enumerate(in_flight)
    )


def own(tokens: dict[str, int]) -> dict[str, Match]:
    """Matches with the request's own past."""
    return {name: Match(count, own=True) for name, count in tokens.items()}


def common(tokens: dict[str, int]) -> dict[str, Match]:
    """Matches with a common beginning."""
    return {name: Match(count, own=False) for name, count in tokens.items()}


@pytest.mark.parametrize(
    ("loads", "matches", "tokens", "chosen", "reason"),
    [
        pytest.param((3, 0), {}, 100, "b", Reason.NO_PREFIX, id="no instance holds it: the least loaded"),
        pytest.param((20, 0), {}, 100, "b", Reason.NO_PREFIX, id="no instance holds it, and one is ahead"),
        pytest.param((3, 0), {"a": 64}, 100, "a", Reason.PREFIX, id="one holds it: that one, though busier"),
        pytest.param(
            (8, 0), {"a": 64}, 100, "a", Reason.PREFIX, id="exactly at the threshold: still that one"
        ),
        pytest.param((9, 0), {"a": 64}, 100, "b", Reason.REBALANCED, id="too far ahead: another"),
        pytest.param(
            (100, 91), {"a": 64}, 100, "a", Reason.PREFIX, id="ahead by 9, but not by half: that one"
        ),
        pytest.param(
            (3, 1, 2), {"a": 64, "b": 64}, 100, "b", Reason.PREFIX_SHARED, id="two: the less loaded"
        ),
        pytest.param(
            (3, 1, 2), {"a": 80, "b": 64}, 100, "b", Reason.PREFIX_SHARED, id="a block more is a tie"
        ),
        pytest.param((3, 1, 2), {"a": 96, "b": 64}, 100, "a", Reason.PREFIX, id="two blocks more are not"),
        pytest.param((1, 0), {"a": 48}, 1000, "a", Reason.PREFIX, id="its own past decides, however short"),
        pytest.param((20, 0, 1), {"a": 96, "c": 64}, 100, "c", Reason.REBALANCED, id="the next best holder"),
        pytest.param((20, 0, 1), {"a": 96, "c": 96}, 100, "c", Reason.PREFIX, id="the busy holder drops out"),
        pytest.param(
            (20, 1, 0), {"a": 96}, 100, "c", Reason.REBALANCED, id="no other holder: the least loaded"
        ),
        pytest.param((1,), {"a": 0}, 100, "a", Reason.NO_PREFIX, id="only one instance"),
        pytest.param((50,), {"a": 64}, 100, "a", Reason.PREFIX, id="one instance is never ahead of itself"),
        pytest.param((1, 0), {"a": 64}, 0, "a", Reason.PREFIX, id="length unknown: any prefix decides"),
    ],
)
def test_prompt_tree(loads, matches, tokens, chosen, reason) -> None:
    decision = prompt_tree(Prompt(tokens), fleet(*loads), own(matches), COSTS, OPTIONS)
    assert (decision.instance, decision.reason) == (chosen, reason)
    assert decision.matched == matches.get(chosen, 0)
    assert decision.scores == {name: float(tokens) for name, tokens in matches.items()}


def by_the_rule(
    tokens: int, instances: tuple[Instance, ...], matches: dict[str, Match]
) -> tuple[str, Reason, int]:
    """``prompt_tree``'s rule, as its docstring has it: every instance is asked everything."""
    least = min(one.in_flight for one in instances)
    level = [one for one in instances if one.in_flight - least <= 8 or one.in_flight <= 1.5 * least]

    def holders(candidates: list[Instance]) -> tuple[list[Instance], Reason]:
        held = {one.name: matches.get(one.name, Match(0)) for one in candidates}
        longest = max(match.tokens for match in held.values())
        if not longest:
            return [], Reason.NO_PREFIX
        best = [one for one in candidates if longest - held[one.name].tokens <= 16]
        if not any(held[one.name].own for one in best):
            if longest < 0.3 * tokens:
                return [], Reason.SHORT_PREFIX
            emptiest = min(one.cached_tokens for one in candidates)
            best = [one for one in best if one.cached_tokens - emptiest <= 4 * longest]
            if not best:
                return [], Reason.SPREAD
        return best, Reason.PREFIX if len(best) == 1 else Reason.PREFIX_SHARED

    best, reason = holders(level)
    if len(level) < len(instances):
        wanted, _ = holders(list(instances))
        if wanted and not {one.name for one in wanted} & {one.name for one in level}:
            reason = Reason.REBALANCED
    chosen = min(best or level, key=load_of)
    return chosen.name, reason, matches[chosen.name].tokens if chosen.name in matches else 0


def agrees_with_the_rule(draw: random.Random, rule: Callable[..., tuple[str, Reason, int]]) -> Reason:
    """One decision of a random fleet, in which many instances hold the same part and share one match."""
    standing, names = Standing(), [f"i{number}" for number in range(draw.choice((1, 2, 4, 12)))]
    for name in names:
        standing.put(Instance(name, draw.choice((0, 1, 20)), *(draw.choice((0, 30, 900)) for _ in range(3))))
    shared = [Match(draw.choice((0, 16, 32, 200, 500)), draw.random() < 0.5) for _ in range(3)]
    holders = draw.sample([*names, "gone"], draw.randrange(len(names) + 2))
    matches = {name: draw.choice([*shared, Match(200), Match(216, own=True)]) for name in holders}
    tokens = draw.choice((100, 600, 2000))
    whole = standing.fleet()
    for seen in (whole, tuple(whole)):
        decision = prompt_tree(Prompt(tokens), seen, matches, COSTS, OPTIONS)
        assert (decision.instance, decision.reason, decision.matched) == rule(tokens, tuple(whole), matches)
        assert decision.scores == {
            name: float(match.tokens) for name, match in matches.items() if name != "gone"
        }
    return decision.reason


def decisions(rule: Callable[..., tuple[str, Reason, int]], count: int) -> set[Reason]:
    draw = random.Random(3)
    return {agrees_with_the_rule(draw, rule) for _ in range(count)}


def test_prompt_tree_is_its_rule_however_many_share_a_match() -> None:
    assert len(decisions(by_the_rule, 3000)) == 6


def test_another_rule_is_found() -> None:
    def generous(tokens: int, instances: tuple[Instance, ...], matches: dict[str, Match]) -> Any:
        return by_the_rule(tokens, instances, own({name: match.tokens for name, match in matches.items()}))

    with pytest.raises(AssertionError):
        decisions(generous, 3000)


def test_idle_instances_share_new_prompts_by_what_they_cache() -> None:
    decision = prompt_tree(Prompt(100), fleet(0, 0, 0, cached=(500, 100, 300)), {}, COSTS, OPTIONS)
    assert decision.instance == "b"


@pytest.mark.parametrize(
    ("cached", "matches", "chosen", "reason"),
    [
        pytest.param((492, 100), common({"a": 98}), "a", Reason.PREFIX, id="four times its size: stays"),
        pytest.param((493, 100), common({"a": 98}), "b", Reason.SPREAD, id="more: spreads"),
        pytest.param((9000, 100), own({"a": 98}), "a", Reason.PREFIX, id="its own past: stays whatever"),
        pytest.param(
            (900, 100), common({"a": 98, "b": 98}), "b", Reason.PREFIX, id="the fuller holder drops out"
        ),
        pytest.param((200, 100), common({"a": 98, "b": 98}), "b", Reason.PREFIX_SHARED, id="both hold it"),
        pytest.param(
            (900, 100), common({"a": 20}), "b", Reason.SHORT_PREFIX, id="too short to decide anyway"
        ),
    ],
)
def test_common_beginnings_spread_over_the_memory(cached, matches, chosen, reason) -> None:
    decision = prompt_tree(Prompt(100), fleet(0, 0, cached=cached, picked=(9, 1)), matches, COSTS, OPTIONS)
    assert (decision.instance, decision.reason) == (chosen, reason)


def test_conversations_with_one_system_prompt_share_an_idle_fleet() -> None:
    """One after the other, so that no instance is ever busy: still each instance gets its part, and only the
    system prompt is computed more than once, once per instance."""
    cached = {"a": 0, "b": 0, "c": 0}
    system: set[str] = set()
    homes = []
    for number in range(36):
        view = tuple(Instance(name, 0, 0, tokens, number) for name, tokens in cached.items())
        matches = common(dict.fromkeys(system, 100))
        chosen = prompt_tree(Prompt(160), view, matches, COSTS, OPTIONS).instance
        cached[chosen] += 160 if chosen not in system else 60
        system.add(chosen)
        homes.append(chosen)
    assert min(homes.count(name) for name in "abc") >= 9, homes


def test_questions_about_a_long_document_stay_with_it() -> None:
    cached = {"a": 0, "b": 0}
    for number in range(20):
        view = tuple(Instance(name, 0, 0, tokens, number) for name, tokens in cached.items())
        matches = common({"a": 10_000}) if number else {}
        assert prompt_tree(Prompt(10_050), view, matches, COSTS, OPTIONS).instance == "a"
        cached["a"] += 50 if number else 10_050


def test_a_popular_prefix_spreads_over_the_fleet() -> None:
    """Requests with one prefix that never end: every instance gets its part."""
    in_flight = {"a": 0, "b": 0, "c": 0}
    holders: dict[str, int] = {"a": 960}
    reasons = []
    for number in range(60):
        view = tuple(Instance(name, load, 0, 0, number) for name, load in in_flight.items())
        decision = prompt_tree(Prompt(1000), view, own(holders), COSTS, OPTIONS)
        in_flight[decision.instance] += 1
        holders[decision.instance] = 960
        reasons.append(decision.reason)
    assert max(in_flight.values()) - min(in_flight.values()) <= OPTIONS.balance_abs_threshold + 1
    assert reasons[0] is Reason.PREFIX
    assert Reason.REBALANCED in reasons
    assert Reason.PREFIX_SHARED in reasons


def test_least_load_counts_requests_then_prompt_tokens() -> None:
    busy = Instance("a", in_flight=1, queued_tokens=900, cached_tokens=0, last_picked=0)
    lighter = Instance("b", in_flight=1, queued_tokens=10, cached_tokens=0, last_picked=5)
    assert least_load(Prompt(10), (busy, lighter), own({"a": 10}), COSTS, OPTIONS).instance == "b"
    assert least_load(Prompt(10), fleet(2, 3), {}, COSTS, OPTIONS).instance == "a"


def test_round_robin_takes_turns_while_instances_come_and_go() -> None:
    picked = {"a": 0, "b": 0, "c": 0}
    order = []
    for number in range(1, 10):
        names = ["a", "c"] if 4 <= number <= 5 else ["a", "b", "c"]
        view = tuple(Instance(name, 0, 0, 0, picked[name]) for name in names)
        chosen = round_robin(Prompt(1), view, own({"a": 5}), COSTS, OPTIONS).instance
        picked[chosen] = number
        order.append(chosen)
    assert order == ["a", "b", "c", "a", "c", "b", "a", "c", "b"]


instances = st.builds(
    Instance,
    name=st.sampled_from("abcdef"),
    in_flight=st.integers(0, 200),
    queued_tokens=st.integers(0, 10_000),
    cached_tokens=st.integers(0, 10_000),
    last_picked=st.integers(0, 1000),
)

all_matches = st.dictionaries(
    st.sampled_from("abcdefg"), st.builds(Match, tokens=st.integers(0, 4096), own=st.booleans())
)


@given(
    policy=st.sampled_from(sorted(POLICIES)),
    fleet=st.lists(instances, min_size=1, max_size=6, unique_by=lambda i: i.name).map(tuple),
    matches=all_matches,
    tokens=st.integers(0, 4096),
)
def test_every_policy_chooses_an_instance_that_is_there_and_says_the_same_twice(
    policy, fleet, matches, tokens
) -> None:
    choose = POLICIES[policy]
    decision = choose(Prompt(tokens), fleet, matches, COSTS, OPTIONS)
    assert decision.instance in {i.name for i in fleet}
    assert decision.matched == matches.get(decision.instance, Match(0)).tokens
    assert (
        choose(Prompt(tokens), tuple(reversed(fleet)), matches, COSTS, OPTIONS).instance == decision.instance
    )


@given(
    fleet=st.lists(instances, min_size=1, max_size=6, unique_by=lambda i: i.name).map(tuple),
    matches=all_matches,
)
def test_prompt_tree_never_chooses_one_that_is_ahead(fleet, matches) -> None:
    decision = prompt_tree(Prompt(4096), fleet, matches, COSTS, OPTIONS)
    chosen = next(i for i in fleet if i.name == decision.instance)
    least = min(i.in_flight for i in fleet)
    assert chosen.in_flight <= max(
        least + OPTIONS.balance_abs_threshold, OPTIONS.balance_rel_threshold * least
    )


def test_a_pair_is_made_of_halves_that_fit() -> None:
    """With any policy: the idle decode instance cannot take requests over from the idle prefill instance."""
    halves = (
        Instance("p1", 0, 0, 0, 0, Role.PREFILL, handover="1"),
        Instance("p2", 9, 0, 0, 0, Role.PREFILL, handover="2"),
        Instance("d1", 9, 0, 0, 0, Role.DECODE, handover="1"),
        Instance("d2", 0, 0, 0, 0, Role.DECODE, handover="2"),
        Instance("p3", 0, 0, 0, 0, Role.PREFILL, handover="3"),
    )
    assert [known.name for known in first_targets(halves)] == ["p1", "p2"]
    for name, policy in POLICIES.items():
        for number in range(20):
            decision = policy(Prompt(100, request_id=f"{name} {number}"), halves, {}, COSTS, OPTIONS)
            assert (decision.instance, decision.decode) in {("p1", "d1"), ("p2", "d2")}, name
    own_choice = guarded(
        lambda *_: Decision("p1", Reason.LEAST_LOAD, decode="d2"), "own", POLICIES["least-load"]
    )
    decision = own_choice(Prompt(100), halves, {}, COSTS, OPTIONS)
    assert (decision.decode, decision.reason) == ("d1", Reason.POLICY_FAILED)
    unknown = (halves[0], Instance("d", 0, 0, 0, 0, Role.DECODE))
    assert [known.name for known in first_targets(unknown)] == ["p1"]

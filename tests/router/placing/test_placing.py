"""Placing a request: one price per instance, one plan, and estimates that follow from them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outlooks import AskedOutlook

from sglang_ext.router.placing.placing import Placement, PlacingOptions, place
from sglang_ext.router.policies import (
    Decision,
    Fetch,
    Instance,
    Match,
    PolicyOptions,
    Prompt,
    Reason,
    Role,
    policy_named,
)
from sglang_ext.router.policies.assembly import trusted_matches
from sglang_ext.router.policies.fleet_queries import decoders_for, first_targets, named
from sglang_ext.router.policies.spans import fetches_of, price_at
from sglang_ext.router.policies.splitting import SplitTerms
from sglang_ext.tiers import Tier

TOKENS = 1000
PROMPT = Prompt(TOKENS)


@dataclass
class Seconds:
    """A token takes 1 s to compute. links: seconds of each token from a holder; others cannot be read from.
    asked: how often each cost was asked for, by name and arguments."""

    links: Mapping[str, float] = field(default_factory=dict)
    queues: Mapping[str, float] = field(default_factory=dict)
    loads: Mapping[Tier, float] = field(default_factory=lambda: {Tier.DRAM: 0.1, Tier.DISK: 0.5})
    splits: bool = False
    calibrated: bool = True
    basis: str = "calibrated"
    asked: list[tuple[Any, ...]] = field(default_factory=list)

    def exec_s(self, instance: Instance, new_tokens: int, context_tokens: int) -> float:
        self.asked.append(("exec", instance.name, new_tokens, context_tokens))
        return float(new_tokens)

    def load_s(self, instance: Instance, tier: Tier, tokens: int) -> float:
        self.asked.append(("load", instance.name, tier, tokens))
        return tokens * self.loads[tier]

    def transfer_s(self, source: Instance, target: Instance, tokens: int) -> float:
        if source.role is Role.PREFILL and target.role is Role.DECODE:
            return 0.01 * tokens
        return tokens * self.links[source.name] if self.can_fetch(source.name, target.name) else math.inf

    def queue_s(self, instance: Instance) -> float:
        self.asked.append(("queue", instance.name))
        return self.queues.get(instance.name, 0.0)

    def decode_s(self, instance: Instance) -> float:
        return 0.0

    def outlook(self, fleet) -> AskedOutlook:
        return AskedOutlook(self, fleet)

    def can_fetch(self, source: str, target: str) -> bool:
        return source in self.links and source != target

    def can_split(self, source: str, target: str) -> bool:
        return self.splits and source != target

    def chunk(self, name: str) -> int:
        return 0

    def factor(self, name: str) -> float:
        return 1.0


def instance(name: str, in_flight: int = 0, role: Role = Role.COLOCATED, *, trusted: bool = True) -> Instance:
    return Instance(name, in_flight, 0, 0, 0, role, trusted)


A, B, C = (instance(name) for name in "abc")
FLEET = (A, B, C)


def options(policy: str | Decision = "prompt-tree", **more: Any) -> PlacingOptions:
    """With a policy by its name, or a given decision."""
    rule = policy_named(policy) if isinstance(policy, str) else lambda *_: policy
    return PlacingOptions(policy=rule, thresholds=PolicyOptions(), **more)


# -- any request in any fleet ---------------------------------------------------------------------------

names = st.sampled_from("abcde")
seconds = st.sampled_from([0.0, 0.1, 0.5, 1.5, 3.0])


@st.composite
def matches_of(draw: st.DrawFn) -> Match:
    hbm, dram, disk = (draw(st.integers(0, 300)) for _ in range(3))
    return Match(hbm + dram + disk, draw(st.booleans()), {Tier.DRAM: dram, Tier.DISK: disk})


@st.composite
def fleets(draw: st.DrawFn) -> tuple[Instance, ...]:
    paired = draw(st.booleans())
    fleet = []
    for number, name in enumerate(draw(st.lists(names, min_size=2, unique=True))):
        role = (Role.PREFILL, Role.DECODE)[number] if paired and number < 2 else Role.COLOCATED
        fleet.append(instance(name, draw(st.integers(0, 12)), role, trusted=draw(st.booleans())))
    return tuple(fleet)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of ``place``."""
    fleet = draw(fleets())
    policy = draw(
        st.sampled_from(["auto", "cost", "prompt-tree", "session", "least-load", "round-robin", "random"])
    )
    announced = None
    if draw(st.booleans()):
        announced = Decision(
            draw(st.sampled_from([one.name for one in first_targets(fleet)])), Reason.ADVISED
        )
    return {
        "prompt": Prompt(TOKENS, draw(st.sampled_from([None, "s"])), request_id="r"),
        "fleet": fleet,
        "matches": draw(st.dictionaries(names, matches_of())),
        "costs": Seconds(
            links=draw(st.dictionaries(names, seconds)),
            queues=draw(st.dictionaries(names, seconds)),
            splits=draw(st.booleans()),
        ),
        "options": options(
            policy,
            split=draw(st.sampled_from([None, SplitTerms(100, 0.0), SplitTerms(100, 1.25)])),
            ahead=draw(st.booleans()),
        ),
        "announced": announced,
    }


def check_plan(placed: Placement, request: dict[str, Any]) -> None:
    """The plan covers the prompt, and every span comes from an instance that can give it."""
    plan, costs, chosen = placed.plan, request["costs"], placed.instance
    assert plan is not None
    assert plan.instance == chosen
    assert plan.read
    held = trusted_matches(request["fleet"], request["matches"])
    place_ = 0
    for span in plan.spans:
        assert span.start == (place_ if span.source is not None else min(place_, TOKENS - 1))
        place_ = span.end
        if span.source == chosen:
            assert held[chosen].tokens >= span.end
        elif span.source is not None and span.tier is None:
            assert plan.split is not None
            assert costs.can_split(span.source, chosen)
        elif span.source is not None:
            assert held[span.source].tokens >= span.end
            assert costs.can_fetch(span.source, chosen)
    assert place_ >= TOKENS
    assert plan.spare is None or costs.can_fetch(plan.spare.source, chosen)


@given(requests())
def test_every_placement_is_possible_and_its_estimates_are_its_plans_sums(request: dict[str, Any]) -> None:
    placed, fleet, costs = place(**request), request["fleet"], request["costs"]
    assert placed.instance in {one.name for one in first_targets(fleet)}
    chosen = named(fleet, placed.instance)
    assert chosen is not None
    decoders = [one.name for one in decoders_for(fleet, chosen)] if chosen.role is Role.PREFILL else [None]
    assert placed.decode in decoders
    hand_over_s = 0.0
    if placed.decode is not None:
        held = trusted_matches(fleet, request["matches"]).get(placed.decode, Match(0))
        hand_over_s = 0.01 * (TOKENS - held.tokens)
    for estimate in (placed.estimate, placed.alone):
        assert estimate.queue_s == costs.queues.get(placed.instance, 0.0)
    assert placed.alone.transfer_s == pytest.approx(hand_over_s)
    if placed.plan is None:
        assert placed.estimate is placed.alone
        return
    check_plan(placed, request)
    if not placed.plan.worth_it:
        assert placed.estimate is placed.alone
        assert placed.reason is not Reason.ADVISED or request["announced"] is None
        return
    spans = placed.plan.spans
    assert placed.estimate.load_s == sum(span.seconds for span in spans if span.source == placed.instance)
    assert placed.estimate.exec_s == sum(span.seconds for span in spans if span.source is None)
    assert placed.estimate.transfer_s == pytest.approx(hand_over_s + placed.plan.transfer_s)
    exporting = {span.source for span in placed.plan.asked}
    assert placed.plan.busy_s == max(costs.queues.get(name, 0.0) for name in exporting)


@given(requests())
def test_placing_is_pure(request: dict[str, Any]) -> None:
    before = copy.deepcopy({name: request[name] for name in ("prompt", "fleet", "matches", "announced")})
    first = place(**request)
    assert place(**request) == first
    assert before == {name: request[name] for name in before}


@given(requests())
def test_a_price_that_a_policy_hands_on_changes_nothing(request: dict[str, Any]) -> None:
    """Unless the policy's weights differ, `place` calculates the same price itself."""

    def handing_on(*args: Any) -> Decision:
        args = (*args[:4], replace(args[4], exec_weight=1.0, balance_cache_factor=math.inf))
        return policy_named("cost")(*args)

    def keeping(*args: Any) -> Decision:
        found = handing_on(*args)
        return Decision(found.instance, found.reason, found.matched, found.scores, found.decode)

    placed = [
        place(**{**request, "options": replace(request["options"], policy=policy), "announced": None})
        for policy in (handing_on, keeping)
    ]
    assert placed[0] == placed[1]


# -- one price ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("matches", [{}, {"a": Match(500)}, {"a": Match(900), "b": Match(300)}])
@pytest.mark.parametrize("policy", ["cost", "prompt-tree"])
def test_an_instance_is_priced_once(policy: str, matches: dict[str, Match]) -> None:
    costs = Seconds({"a": 0.1, "b": 0.1})
    placed = place(PROMPT, FLEET, matches, costs, options(policy))
    queues = [name for kind, name, *_ in costs.asked if kind == "queue"]
    holders = {span.source for span in placed.plan.asked} if placed.plan is not None else set()
    # The policy `cost` compares the queues of all, then lists the terms of the instance that it chooses.
    priced = [*(one.name for one in FLEET if policy == "cost"), placed.instance]
    assert sorted(queues) == sorted([*priced, *holders])
    alone = ("exec", placed.instance, TOKENS - matches.get(placed.instance, Match(0)).tokens)
    # `cost` compares it, lists its terms, and asks for a block's share of the whole prompt.
    most = 1 if policy == "prompt-tree" else 2 + 2 * (alone[2] == TOKENS)
    assert 1 <= [asked[:3] for asked in costs.asked].count(alone) <= most


def test_a_price_for_another_instance_is_not_used() -> None:
    """A policy of a user's may change a decision of `cost`."""
    costs, matches = Seconds({"a": 0.1}), {"a": Match(900)}
    pricing = price_at(TOKENS, C, (A,), matches, costs, exec_weight=9.0)
    placed = place(PROMPT, FLEET, matches, costs, options(Decision("b", Reason.RANDOM, pricing=pricing)))
    assert placed.plan is not None
    assert placed.plan.instance == "b"
    assert placed.plan.alone_s == TOKENS


def test_a_decisions_spans_are_planned_whatever_its_price_says() -> None:
    costs, matches = Seconds({"a": 0.1, "c": 0.1}), {"a": Match(900), "c": Match(900)}
    pricing = price_at(TOKENS, B, (A,), matches, costs)
    assert pricing.plan is not None
    own = fetches_of(pricing.plan)
    same = place(
        PROMPT, FLEET, matches, costs, options(Decision("b", Reason.FETCH, fetch=own, pricing=pricing))
    )
    assert same.plan == pricing.plan
    other = (Fetch("c", 100), Fetch("a", 200))
    placed = place(
        PROMPT, FLEET, matches, costs, options(Decision("b", Reason.FETCH, fetch=other, pricing=pricing))
    )
    assert placed.plan is not None
    assert fetches_of(placed.plan) == other
    assert placed.plan.worth_it


# -- an earlier decision --------------------------------------------------------------------------------

ADVISED = Decision("b", Reason.ADVISED, 0)


@pytest.mark.parametrize(
    ("link", "expected"),
    [(0.1, ("b", Reason.ADVISED)), (5.0, ("a", Reason.PREFIX)), (None, ("b", Reason.ADVISED))],
)
def test_an_announced_place_stands_if_its_kv_can_be_there(link: float | None, expected: Any) -> None:
    costs = Seconds({} if link is None else {"a": link})
    placed = place(PROMPT, FLEET, {"a": Match(900, own=True)}, costs, options(), ADVISED)
    assert (placed.instance, placed.reason) == expected


def test_an_announced_prefill_instance_gets_a_decode_instance() -> None:
    fleet = (instance("p", 0, Role.PREFILL), instance("d", 3, Role.DECODE), instance("e", 0, Role.DECODE))
    placed = place(PROMPT, fleet, {}, Seconds(), options(), Decision("p", Reason.ADVISED))
    assert (placed.instance, placed.decode) == ("p", "e")
    placed = place(PROMPT, fleet, {}, Seconds(), options(), Decision("p", Reason.ADVISED, decode="d"))
    assert placed.decode == "d"
    placed = place(PROMPT, fleet, {"d": Match(900)}, Seconds(), options(), Decision("p", Reason.ADVISED))
    assert placed.decode == "d"
    assert placed.estimate.transfer_s == pytest.approx(0.01 * 100)


def test_ahead_of_its_request_all_kv_is_brought() -> None:
    costs, matches = Seconds({"a": 5.0}), {"a": Match(900)}
    now = place(PROMPT, FLEET, matches, costs, options("least-load"), ADVISED)
    assert (now.instance, now.reason) == ("a", Reason.LEAST_LOAD)
    ahead = place(PROMPT, FLEET, matches, costs, options(ahead=True), ADVISED)
    assert ahead.instance == "b"
    assert ahead.plan is not None
    assert (ahead.plan.worth_it, fetches_of(ahead.plan)) == (True, (Fetch("a", 900),))


# -- splits ---------------------------------------------------------------------------------------------


ALONE = Decision("b", Reason.NO_PREFIX)


def split(prompt: Prompt = PROMPT, decision: Decision = ALONE, **more: Any) -> Placement:
    costs = Seconds({"a": 0.0, "c": 0.0}, splits=True)
    terms = options(decision, split=SplitTerms(100, 0.0), block_size=10)
    fleet = more.get("fleet", FLEET)
    return place(prompt, fleet, more.get("matches", {}), costs, terms)


def test_another_instance_computes_the_beginning() -> None:
    plan = split().plan
    assert plan is not None
    assert plan.split is not None
    assert plan.split.source == "a"
    first, rest = plan.spans
    assert (first.source, first.tier, first.start, rest.source, rest.end) == ("a", None, 0, None, TOKENS)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"prompt": Prompt(TOKENS, movable=False)}, id="a prompt that cannot be moved"),
        pytest.param({"matches": {"a": Match(900)}}, id="KV that is read"),
        pytest.param({"matches": {"b": Match(950)}}, id="a short rest"),
        pytest.param(
            {
                "decision": Decision("b", Reason.NO_PREFIX, decode="d"),
                "fleet": (*FLEET, instance("d", 0, Role.DECODE)),
            },
            id="a pair",
        ),
    ],
)
def test_no_other_instance_computes(arguments: dict[str, Any]) -> None:
    plan = split(**arguments).plan
    assert plan is None or plan.split is None

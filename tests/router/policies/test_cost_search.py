"""The policy `cost` compares a fleet in arrays. It decides as the search that prices every instance does."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import exhaustive_cost
import pytest
from router_costs import router_costs

from sglang_ext.cost_model import CostModel
from sglang_ext.cost_model.batch import Batching
from sglang_ext.cost_model.levels import ArchLevel, OperatorLevel
from sglang_ext.cost_model.operators import Attention, Linear, Link, Outside, Rest, Waves
from sglang_ext.cost_model.profile import SCHEMA, Decode, Identity, Profile, Quality
from sglang_ext.protocol.agent import Load
from sglang_ext.router.fleet.standing import Standing
from sglang_ext.router.placing.costs import RouterCosts
from sglang_ext.router.policies import Decision, Instance, Match, PolicyOptions, Prompt, Role, cost
from sglang_ext.router.policies.base import Fleet, Reason
from sglang_ext.tiers import Tier

ARCH = ArchLevel((0.004, 0.0, 6e-5, 2e-9, 1e-9, 0.0))
OPERATORS = OperatorLevel(
    32,
    4096,
    2,
    (Linear(4096, 6144, 32), Linear(4096, 28672, 32), Linear(14336, 4096, 32, split="inner")),
    Waves(132, 128, 128, 5e14, 4e-6),
    Attention(-2e-11, 4e-11, 1e-7, 1e-3, -1e-11),
    Rest(1e-3, 1e-6),
    Outside(4e-3, 1e-7),
)
BATCHINGS = (Batching(), Batching(chunk=2048), Batching(most=4096), Batching(chunk=1024, mixed=True))
NOW_S = 1000.0


def profile(operators: OperatorLevel | None) -> Profile:
    return Profile(
        schema=SCHEMA,
        identity=Identity("m", "d", "bfloat16"),
        arch=ARCH,
        quality=Quality(10, 0.1),
        longest_prompt=8192,
        kv_bytes_per_token=1 << 17,
        operators=operators,
        decode=Decode.linear(0.01, 2e-4),
        tiers={"dram": Link(1e-4, 1e-10), "disk": Link(1e-3, 5e-10)},
        transfer=Link(2e-3, 2e-10),
    )


MODELS = (CostModel(), CostModel(profile(None)), CostModel(profile(OPERATORS)))


@dataclass
class Case:
    prompt: Prompt
    fleet: Fleet
    matches: Mapping[str, Match]
    costs: RouterCosts
    options: PolicyOptions


def drawn_match(draw: random.Random, tokens: int) -> Match:
    held = min(tokens, draw.choice((16, 512, 1024, 2048, tokens, draw.randrange(1, tokens + 1))))
    below = {}
    if draw.random() < 0.4:
        below[Tier.DRAM] = draw.randrange(held + 1)
    if draw.random() < 0.4:
        below[Tier.DISK] = draw.randrange(held - below.get(Tier.DRAM, 0) + 1)
    return Match(held, draw.random() < 0.5, below)


def drawn_fleet(draw: random.Random, names: list[str]) -> Fleet:
    """Colocated instances, or pairs among them; of equal or of different load and trust."""
    pairs, busy = draw.random() < 0.3, draw.random() < 0.6
    standing = Standing()
    cached = draw.choice((0, 10_000, 1_000_000))
    for number, name in enumerate(names):
        role = Role.COLOCATED
        if pairs:
            role = (Role.PREFILL, Role.DECODE, Role.COLOCATED)[number % draw.choice((2, 3))]
        counts = [draw.randrange(6) if busy else 0, draw.randrange(2) * 500 if busy else 0]
        handover = draw.choice("xy") if role is not Role.COLOCATED and draw.random() < 0.9 else ""
        standing.put(
            Instance(
                name, *counts, draw.randrange(cached + 1), draw.randrange(3), role,
                draw.random() < 0.95, draw.random() < 0.05, handover,
            )
        )  # fmt: skip
    whole = standing.fleet()
    return whole if draw.random() < 0.7 else tuple(whole)


def drawn_case(seed: int, most: int = 24) -> Case:
    draw = random.Random(seed)
    names = [f"i{number:03}" for number in range(draw.randrange(2, most))]
    now = [NOW_S]
    kinds = {name: draw.choice((*"kkkkk", "l", None)) for name in names}
    alike = draw.random() < 0.6
    usual = draw.choice(BATCHINGS)
    fills = {name: usual if alike else draw.choice(BATCHINGS) for name in names}

    def can_fetch(source: str, target: str) -> bool:
        return source != target and kinds[source] is not None and kinds[source] == kinds[target]

    costs = router_costs(
        draw.choice(MODELS), lambda: now[0], can_fetch=can_fetch, shares_kv=kinds.__getitem__,
        batching=fills.__getitem__,
    )  # fmt: skip
    for _ in range(draw.choice((0, 1, 30))):  # corrections, unequal bandwidths, unequal disks
        costs.observe(draw.choice(names), 1.0, draw.choice((0.3, 1.0, 1.1, 3.0)))
        costs.observe_transfer(draw.choice(names), draw.choice(names), 5000, draw.choice((0.01, 0.3, 3.0)))
        costs.observe_load(draw.choice(names), 0.1, draw.choice((0.02, 0.1, 1.0)))
    fleet = drawn_fleet(draw, names)
    if draw.random() < 0.8:
        costs.outlook(fleet)  # so that the loads below change it
    crowd = draw.choice((0, 1, len(names), 4 * len(names)))
    for _ in range(crowd):
        now[0] += draw.random() * 0.01
        sending = costs.sending(
            draw.choice(names),
            draw.choice((1, 300, 5000)),
            draw.choice((0, 2000)),
            streams=draw.random() < 0.7,
        )
        sending.__enter__()
        if draw.random() < 0.3:
            now[0] += draw.random() * 0.1
            sending.first_byte() if draw.random() < 0.7 else sending.__exit__()
    for name in draw.sample(names, draw.randrange(len(names) + 1)):
        requests = draw.randrange(5)
        costs.on_load(name, Load(draw.randrange(9), requests, 700 * requests), draw.randrange(3))
    now[0] += draw.choice((0.0, 0.05, 1.0, 30.0))
    tokens = draw.choice((1, 40, 700, 3000, 9000))
    held = [drawn_match(draw, tokens) for _ in range(draw.choice((1, 1, 3, len(names))))]
    holders = draw.sample(names, draw.choice((0, 1, len(names) // 2, len(names))))
    weights = PolicyOptions() if draw.random() < 0.5 else PolicyOptions(queue_weight=2.0, exec_weight=1.0)
    return Case(Prompt(tokens), fleet, {name: draw.choice(held) for name in holders}, costs, weights)


def summary(decision: Decision) -> tuple[object, ...]:
    return decision.instance, decision.decode, decision.reason, decision.matched, decision.fetch


def answerable(case: Case) -> bool:
    return bool(exhaustive_cost.first_targets(case.fleet))


def differs_by_rounding(case: Case, fast: Decision, every: Decision) -> bool:
    """Whether two decisions cost the same within 1 %, or one of them is for an instance whose price is the
    least and exactly one block's share more: whether that is equal by the rule, rounding decides."""
    cheapest, tokens = max(every.scores, key=every.scores.__getitem__), case.prompt.tokens
    instance = next(one for one in case.fleet if one.name == cheapest)
    block_s = case.costs.exec_s(instance, tokens, 0) * min(1.0, case.options.tie_tokens / tokens)
    least = -every.scores[cheapest]
    prices = [-every.scores[decision.instance] for decision in (fast, every)]
    if max(prices) <= 1.01 * min(prices):
        return True
    return any(price == pytest.approx(least + block_s, rel=1e-9) for price in prices)


def test_a_price_at_the_edge_of_equal_ones_is_the_one_that_differs() -> None:
    """A price is 4.060002 ms above the least one, and a block's share is 4.060002 ms."""
    for seed in (21_755, 37_412):
        case = drawn_case(seed)
        fast = cost(case.prompt, case.fleet, case.matches, case.costs, case.options)
        every = exhaustive_cost.cost(case.prompt, case.fleet, case.matches, case.costs, case.options)
        assert fast.instance != every.instance
        assert differs_by_rounding(case, fast, every)


def test_decisions_are_those_of_the_exhaustive_search(request: pytest.FixtureRequest) -> None:
    count = 60_000 if request.config.getoption("--long") else 2_000
    equal = asked = 0
    for seed in range(count):
        case = drawn_case(seed)
        if not answerable(case):
            continue
        asked += 1
        fast = cost(case.prompt, case.fleet, case.matches, case.costs, case.options)
        every = exhaustive_cost.cost(case.prompt, case.fleet, case.matches, case.costs, case.options)
        if summary(fast) == summary(every):
            equal += 1
        else:
            assert differs_by_rounding(case, fast, every), seed
        for name, seconds in fast.scores.items():
            assert seconds == pytest.approx(every.scores[name], rel=0.01, abs=1e-6), (seed, name)
    assert asked > count / 2
    assert equal >= 0.999 * asked, f"{asked - equal} of {asked}"


def test_a_search_that_prices_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With other weights, the two searches differ in a hundredth of the fleets or more."""
    differ = 0
    for seed in range(300):
        case = drawn_case(seed)
        if answerable(case):
            fast = cost(case.prompt, case.fleet, case.matches, case.costs, PolicyOptions(exec_weight=0.5))
            every = exhaustive_cost.cost(case.prompt, case.fleet, case.matches, case.costs, case.options)
            differ += fast.instance != every.instance
    assert differ >= 3


def test_the_outlook_is_what_the_costs_answer_one_by_one() -> None:
    for seed in range(300):
        case = drawn_case(seed)
        outlook = case.costs.outlook(case.fleet)
        for place, instance in enumerate(case.fleet):
            asked = case.costs.queue_s(instance)
            assert outlook.queue_s[place] == pytest.approx(asked, rel=1e-6, abs=1e-9), (seed, instance.name)
            assert outlook.factor[place] == case.costs.factor(instance.name)
            if outlook.waiting is not None and outlook.waiting[place]:
                least = outlook.factor[place] * outlook.adding_s(700, 100)
                assert least <= case.costs.exec_s(instance, 700, 100) * (1 + 1e-6), (seed, instance.name)
                continue
            seconds, passes = outlook.computing(int(outlook.kind[place]), 700, 100)
            if outlook.steps_s is not None:
                seconds += passes * outlook.steps_s[place]
            assert outlook.factor[place] * seconds == pytest.approx(case.costs.exec_s(instance, 700, 100))


def test_large_fleets_are_decided_alike() -> None:
    for seed in range(40):
        case = drawn_case(10_000_000 + seed, most=120)
        if answerable(case):
            fast = cost(case.prompt, case.fleet, case.matches, case.costs, case.options)
            every = exhaustive_cost.cost(case.prompt, case.fleet, case.matches, case.costs, case.options)
            assert (
                fast.instance == every.instance
                or every.scores[fast.instance] >= 1.01 * every.scores[every.instance]
            )


def test_an_instance_that_cannot_fetch_any_more_is_not_chosen_for_its_fetch() -> None:
    """Its agent has been silent since its last report."""
    names = ("a", "b", "c")
    silent: set[str] = set()
    costs = router_costs(
        MODELS[1], lambda: NOW_S, can_fetch=lambda source, target: source != target and target not in silent
    )
    fleet = tuple(Instance(name, int(name == "c"), 0, 0, 0) for name in names)
    for _ in range(4):
        costs.sending("a", 8000, 0, streams=True).__enter__()
    matches = {"a": Match(8000, own=True)}
    decision = cost(Prompt(9000), fleet, matches, costs, PolicyOptions())
    assert (decision.instance, decision.reason) == ("b", Reason.FETCH)
    silent.add("b")
    decision = cost(Prompt(9000), fleet, matches, costs, PolicyOptions())
    assert (decision.instance, decision.reason) == ("c", Reason.FETCH)

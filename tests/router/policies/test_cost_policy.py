"""The cost policy and the rules around every policy: tables of situations and the required decisions."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outlooks import AskedOutlook

from sglang_ext.errors import ConfigError
from sglang_ext.router.policies import (
    POLICIES,
    Decision,
    Fetch,
    Instance,
    Match,
    PolicyOptions,
    Prompt,
    Reason,
    Role,
    first_targets,
    policy_named,
)
from sglang_ext.router.policies.simple import rendezvous
from sglang_ext.tiers import Tier

OPTIONS = PolicyOptions(exec_weight=1.0)
"""The paper's equations; ``test_what_is_computed_counts_more`` has the default."""
BUILT_IN = sorted(POLICIES)


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Costs for mental arithmetic: a token takes 1 s to compute, at any position."""

    queues: Mapping[str, float] = dataclasses.field(default_factory=dict)
    dram: float = 0.1
    disk: float = 0.5
    transfer: float = math.inf
    calibrated: bool = True

    def exec_s(self, instance: Instance, new_tokens: int, context_tokens: int) -> float:
        return float(new_tokens)

    def load_s(self, instance: Instance, tier: Tier, tokens: int) -> float:
        return tokens * {Tier.HBM: 0.0, Tier.DRAM: self.dram, Tier.DISK: self.disk}[tier]

    def transfer_s(self, source: Instance, target: Instance, tokens: int) -> float:
        hands_over = source.role is Role.PREFILL and target.role is Role.DECODE
        per_token = 0.2 if hands_over and self.transfer == math.inf else self.transfer
        return tokens * per_token if tokens else 0.0

    def queue_s(self, instance: Instance) -> float:
        return self.queues.get(instance.name, 0.0)

    def decode_s(self, instance: Instance) -> float:
        return 0.01 * (instance.in_flight + 1)

    def outlook(self, fleet) -> AskedOutlook:
        return AskedOutlook(self, fleet)


def instance(name: str, in_flight: int = 0, cached: int = 0, picked: int = 0, **more) -> Instance:
    return Instance(name, in_flight, 0, cached, picked, **more)


A, B, C = instance("a"), instance("b"), instance("c")
FULL = Match(900, own=True)


def choose(fleet, matches, costs, prompt=None, policy="cost", options=OPTIONS) -> Decision:
    return POLICIES[policy](prompt or Prompt(1000), tuple(fleet), matches, costs, options)


@pytest.mark.parametrize(
    ("fleet", "matches", "costs", "chosen", "reason"),
    [
        pytest.param((A, B), {}, Seconds(), "a", Reason.NO_PREFIX, id="no holder: the names decide"),
        pytest.param((A, B), {}, Seconds({"a": 50}), "b", Reason.NO_PREFIX, id="the shorter queue"),
        pytest.param(
            (A, B), {}, Seconds({"a": 10}), "a", Reason.NO_PREFIX, id="within a block: equal, load decides"
        ),
        pytest.param((A, B), {"b": FULL}, Seconds(), "b", Reason.PREFIX, id="who holds it"),
        pytest.param(
            (A, B), {"b": FULL}, Seconds({"b": 800}), "b", Reason.PREFIX, id="waiting for it is worth it"
        ),
        pytest.param(
            (A, B), {"b": FULL}, Seconds({"b": 950}), "a", Reason.REBALANCED, id="computing is sooner"
        ),
        pytest.param(
            (instance("a", 3), instance("b", 1)),
            {"a": FULL, "b": FULL},
            Seconds(),
            "b",
            Reason.PREFIX_SHARED,
            id="both hold it: the less loaded",
        ),
        pytest.param(
            (A, B),
            {"a": Match(600, own=True), "b": Match(900, own=True, below={Tier.DISK: 600})},
            Seconds(),
            "a",
            Reason.REBALANCED,
            id="600 in HBM (400 s) beat 300 in HBM and 600 on disk (100 + 300 s) by load: equal costs",
        ),
        pytest.param(
            (A, B),
            {"a": Match(600, own=True), "b": Match(900, own=True, below={Tier.DRAM: 600})},
            Seconds(),
            "b",
            Reason.PREFIX,
            id="loading from DRAM (100 + 60 s) beats computing (400 s)",
        ),
        pytest.param(
            (A, B),
            {"a": Match(200, own=True), "b": Match(900, own=True, below={Tier.DISK: 900})},
            Seconds(disk=2.0),
            "a",
            Reason.REBALANCED,
            id="a prefix slower to load than to compute attracts nothing",
        ),
        pytest.param(
            (instance("a", cached=5000), instance("b", cached=100)),
            {"a": Match(900)},
            Seconds(),
            "b",
            Reason.SPREAD,
            id="a common beginning spreads over the memory",
        ),
        pytest.param(
            (instance("a", cached=5000), instance("b", cached=100)),
            {"a": FULL},
            Seconds(),
            "a",
            Reason.PREFIX,
            id="its own past does not",
        ),
        pytest.param(
            (instance("a", 1, trusted=False), B),
            {"a": FULL},
            Seconds(),
            "b",
            Reason.UNTRUSTED,
            id="an untrusted index attracts nothing",
        ),
        pytest.param(
            (instance("a", trusted=False), instance("b", 5)),
            {"a": FULL, "b": FULL},
            Seconds(),
            "b",
            Reason.PREFIX,
            id="a trusted one does",
        ),
        pytest.param((A,), {"a": Match(1000, own=True)}, Seconds(), "a", Reason.PREFIX, id="all of it"),
    ],
)
def test_cost(fleet, matches, costs, chosen, reason) -> None:
    decision = choose(fleet, matches, costs)
    assert (decision.instance, decision.reason) == (chosen, reason)
    believed = {i.name for i in fleet if i.trusted}
    assert decision.matched == (matches[chosen].tokens if chosen in matches and chosen in believed else 0)
    assert set(decision.scores) == {i.name for i in fleet}


@pytest.mark.parametrize(
    ("matches", "costs", "chosen", "fetch"),
    [
        pytest.param(
            {"a": FULL}, Seconds({"a": 950}, transfer=0.2), "b", (Fetch("a", 900),), id="fetching is sooner"
        ),
        pytest.param({"a": FULL}, Seconds({"a": 950}, transfer=1.5), "b", (), id="computing is sooner"),
        pytest.param(
            {"a": FULL}, Seconds({"a": 950}, transfer=1.0), "b", (Fetch("a", 900),), id="equal: fetch"
        ),
        pytest.param({"a": FULL}, Seconds({"a": 950}), "b", (), id="nobody can fetch"),
        pytest.param({"a": FULL}, Seconds(transfer=0.2), "a", (), id="a holder needs nothing"),
        pytest.param(
            {"a": FULL, "b": Match(880, own=True)},
            Seconds({"a": 950}, transfer=2.0),
            "b",
            (),
            id="too little",
        ),
        pytest.param(
            {"a": FULL, "b": Match(500, own=True)},
            Seconds({"a": 950}, transfer=0.2),
            "b",
            (Fetch("a", 900),),
            id="the part beyond the own prefix",
        ),
    ],
)
def test_fetch_or_recompute(matches, costs, chosen, fetch) -> None:
    decision = choose((A, B), matches, costs)
    assert (decision.instance, decision.fetch) == (chosen, fetch)
    if fetch:
        assert decision.reason is Reason.FETCH


def test_the_scores_are_equation_1() -> None:
    matches = {"a": FULL, "b": Match(500, own=True, below={Tier.DRAM: 200})}
    decision = choose((A, B, C), matches, Seconds({"a": 30, "c": 7}))
    assert decision.scores == {"a": -(30 + 100), "b": -(500 + 0.1 * 200), "c": -(7 + 1000)}


def test_what_is_computed_counts_more() -> None:
    """Computing 900 tokens elsewhere saves 50 s of this request, and costs the next request 900."""
    matches, costs = {"b": FULL}, Seconds({"b": 950})
    assert choose((A, B), matches, costs).instance == "a"
    assert choose((A, B), matches, costs, options=PolicyOptions()).instance == "b"
    later = Seconds({"b": 1900})
    assert choose((A, B), matches, later, options=PolicyOptions()).instance == "a"


def test_the_weights_are_those_of_equation_1s_terms() -> None:
    matches, costs = {"a": FULL}, Seconds({"a": 30, "b": 7})
    weighed = PolicyOptions(queue_weight=3.0, exec_weight=0.5)
    assert choose((A, B), matches, costs, options=weighed).scores == {
        "a": -(3 * 30 + 0.5 * 100),
        "b": -(3 * 7 + 0.5 * 1000),
    }


P, Q = instance("p", role=Role.PREFILL), instance("q", role=Role.PREFILL)
D, E = instance("d", role=Role.DECODE), instance("e", role=Role.DECODE)


@pytest.mark.parametrize(
    ("fleet", "matches", "costs", "chosen", "decode"),
    [
        pytest.param((P, D), {}, Seconds(), "p", "d", id="the only pair"),
        pytest.param((P, Q, D, E), {"q": FULL}, Seconds(), "q", "d", id="prefill by its prefix"),
        pytest.param((P, D, E), {"e": Match(500, own=True)}, Seconds(), "p", "e", id="decode by its prefix"),
        pytest.param(
            (P, instance("d", 90, role=Role.DECODE), E), {}, Seconds(), "p", "e", id="decode by its load"
        ),
        pytest.param(
            (P, instance("d", 300, role=Role.DECODE), E),
            {"d": Match(500, own=True)},
            Seconds(),
            "p",
            "e",
            id="a busy decode instance costs more than sending the prefix",
        ),
        pytest.param((A, P, D), {}, Seconds({"p": 500}), "a", None, id="a colocated instance is sooner"),
        pytest.param(
            (A, P, D), {}, Seconds({"a": 500}), "p", "d", id="a pair is sooner than a colocated instance"
        ),
        pytest.param((A, P), {}, Seconds({"a": 500}), "a", None, id="no instance decodes: no use of prefill"),
    ],
)
def test_prefill_and_decode_are_chosen_together(fleet, matches, costs, chosen, decode) -> None:
    decision = choose(fleet, matches, costs)
    assert (decision.instance, decision.decode) == (chosen, decode)


@pytest.mark.parametrize("policy", BUILT_IN)
def test_every_policy_names_an_instance_to_decode(policy) -> None:
    decision = choose((P, D, E), {"e": Match(990, own=True)}, Seconds(), policy=policy)
    assert (decision.instance, decision.decode) == ("p", "e")
    assert decision.reason is not Reason.POLICY_FAILED


@pytest.mark.parametrize(
    ("fleet", "names"),
    [
        pytest.param((A, P, D), "ap", id="mixed"),
        pytest.param((A, P), "a", id="prefill without decode"),
        pytest.param((P,), "", id="prefill alone"),
        pytest.param((D, E), "", id="decode alone"),
    ],
)
def test_who_can_begin(fleet, names) -> None:
    assert "".join(i.name for i in first_targets(fleet)) == names


@pytest.mark.parametrize("policy", ["cost", "prompt-tree", "auto"])
def test_a_prefix_that_all_instances_hold_attracts_no_requests(policy) -> None:
    """Requests that never end, one prefix held by all: each instance gets its share."""
    in_flight = dict.fromkeys("abcd", 0)
    for number in range(40):
        fleet = tuple(instance(n, load, picked=number) for n, load in in_flight.items())
        matches = dict.fromkeys(in_flight, Match(900, own=False))
        costs = Seconds({n: 100.0 * load for n, load in in_flight.items()})
        in_flight[choose(fleet, matches, costs, policy=policy).instance] += 1
    assert set(in_flight.values()) == {10}


def test_a_popular_prefix_that_one_holds_spreads_when_its_queue_grows() -> None:
    in_flight = dict.fromkeys("abcd", 0)
    holders = {"a"}
    for number in range(60):
        fleet = tuple(instance(n, load, picked=number) for n, load in in_flight.items())
        matches = dict.fromkeys(holders, FULL)
        costs = Seconds({n: 100.0 * load for n, load in in_flight.items()})
        chosen = choose(fleet, matches, costs).instance
        in_flight[chosen] += 1
        holders.add(chosen)
    assert holders == set("abcd")
    assert max(in_flight.values()) - min(in_flight.values()) <= 10


def test_auto_is_cost_with_a_profile_and_the_prompt_tree_without() -> None:
    matches = {"b": FULL}
    busy = {"b": 950.0}
    assert choose((A, B), matches, Seconds(busy), policy="auto").instance == "a"
    unmeasured = Seconds(busy, calibrated=False)
    assert choose((A, B), matches, unmeasured, policy="auto").instance == "b"
    assert choose((A, B), matches, unmeasured, policy="cost").instance == "a"


# -- session and random ---------------------------------------------------------------------------------


def test_a_session_stays_and_others_do_not_move_it() -> None:
    fleet = tuple(instance(name) for name in "abcdef")
    homes = {
        f"s{n}": choose(fleet, {}, Seconds(), Prompt(10, f"s{n}"), "session").instance for n in range(600)
    }
    counts = [list(homes.values()).count(i.name) for i in fleet]
    assert min(counts) > 60
    without_c = tuple(i for i in fleet if i.name != "c")
    for session, home in homes.items():
        now = choose(without_c, {}, Seconds(), Prompt(10, session), "session")
        assert now.reason is Reason.SESSION
        assert now.instance == home or home == "c"


def test_without_a_session_load_decides() -> None:
    decision = choose((instance("a", 2), instance("b", 1)), {}, Seconds(), policy="session")
    assert (decision.instance, decision.reason) == ("b", Reason.NO_SESSION)


def test_random_draws_from_the_request_and_reaches_everybody() -> None:
    fleet = tuple(instance(name, in_flight=9 * (name == "a")) for name in "abc")
    drawn = [
        choose(fleet, {}, Seconds(), Prompt(10, request_id=f"r{n}"), "random").instance for n in range(300)
    ]
    assert min(drawn.count(name) for name in "abc") > 60
    again = choose(fleet, {}, Seconds(), Prompt(10, request_id="r7"), "random")
    assert (again.instance, again.reason) == (drawn[7], Reason.RANDOM)


@given(st.text(), st.lists(st.text(min_size=1), min_size=1, max_size=5, unique=True))
def test_hashing_takes_any_text(key, names) -> None:
    fleet = tuple(instance(name) for name in names)
    assert rendezvous(key, fleet) is rendezvous(key, tuple(reversed(fleet)))


# -- trust ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["prompt-tree", "cost", "auto"])
def test_without_a_believed_index_load_decides_and_says_so(policy) -> None:
    fleet = (instance("a", 3, trusted=False), instance("b", 1, trusted=False))
    costs = Seconds({"a": 300, "b": 100})
    decision = choose(fleet, {"a": FULL}, costs, policy=policy)
    assert (decision.instance, decision.reason, decision.matched) == ("b", Reason.UNTRUSTED, 0)


# -- a policy of one's own --------------------------------------------------------------------------------


@pytest.fixture
def module(monkeypatch):
    made = ModuleType("a_policy_of_ones_own")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def last(prompt, fleet, matches, costs, options):
    return Decision(fleet[-1].name, Reason.LEAST_LOAD)


def test_a_policy_of_ones_own_by_dotted_path(module) -> None:
    module.last = last
    policy = policy_named("a_policy_of_ones_own:last")
    assert policy(Prompt(10), (A, B), {}, Seconds(), OPTIONS).instance == "b"
    decision = policy(Prompt(10), (D, E, P), {}, Seconds(), OPTIONS)
    assert (decision.instance, decision.decode) == ("p", "d")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fastest", "unknown policy 'fastest'"),
        ("no_such_package_here:f", "cannot import 'no_such_package_here'"),
        ("a_policy_of_ones_own:gone", "has no 'gone'"),
        ("a_policy_of_ones_own:", "unknown policy"),
        (":f", "unknown policy"),
        ("a_policy_of_ones_own:number", "no plain function"),
        ("a_policy_of_ones_own:klass", "no plain function"),
        ("a_policy_of_ones_own:coroutine", "no plain function"),
        ("a_policy_of_ones_own:three", "5 arguments"),
    ],
)
def test_what_is_no_policy_is_refused(module, name, why) -> None:
    async def coroutine(prompt, fleet, matches, costs, options):
        return None

    module.number, module.klass, module.coroutine = 7, dict, coroutine
    module.three = lambda prompt, fleet, matches: None
    with pytest.raises(ConfigError, match=why) as caught:
        policy_named(name)
    assert caught.value.field == "--policy"
    assert caught.value.hint


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from sglang_ext.router.policies import beginners", "first_targets"),
        ("from sglang_ext.router.policies import questions", "fleet_queries"),
        ("from sglang_ext.router.policies.questions import named", "fleet_queries"),
        ("import sglang_ext.router.policies.questions", "fleet_queries"),
    ],
)
def test_a_policy_that_uses_a_former_name_is_refused_with_the_new_one(
    tmp_path, monkeypatch, source: str, name: str
) -> None:
    (tmp_path / "a_policy_of_last_year.py").write_text(f"{source}\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"is named {name} now"):
        policy_named("a_policy_of_last_year:policy")
    assert "a_policy_of_last_year" not in sys.modules


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        pytest.param(lambda: 1 / 0, "division by zero", id="an exception"),
        pytest.param(lambda: "a", "str instead of a Decision", id="no decision"),
        pytest.param(lambda: Decision("z", Reason.PREFIX), "'z', which is none of", id="nobody"),
        pytest.param(lambda: Decision("d", Reason.PREFIX), "'d', which is none of", id="one that decodes"),
        pytest.param(lambda: Decision("a", Reason.PREFIX, decode="b"), "'b' to decode", id="decodes not"),
        pytest.param(
            lambda: Decision("a", Reason.PREFIX, fetch=(Fetch("z", 5),)),
            "fetches from 'z'",
            id="fetch from nobody",
        ),
        pytest.param(
            lambda: Decision("a", "because"), "none of router.policies.Reason", id="a reason of its own"
        ),
        pytest.param(lambda: Decision("a", Reason.PREFIX, 0, {"a": math.nan}), "no numbers", id="NaN"),
    ],
)
def test_a_policy_that_fails_costs_no_request(module, caplog, answer, said) -> None:
    module.broken = lambda prompt, fleet, matches, costs, options: answer()
    policy = policy_named("a_policy_of_ones_own:broken")
    with caplog.at_level(logging.ERROR, "router.policies"):
        decision = policy(Prompt(10), (instance("a", 1), B, D), {}, Seconds(), OPTIONS)
    assert (decision.instance, decision.reason) == ("b", Reason.POLICY_FAILED)
    assert said in caplog.text


def test_the_example_in_the_documentation_is_a_policy(module) -> None:
    text = (Path(__file__).parents[3] / "docs" / "cost_model.md").read_text("utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(example, module.__dict__)
    policy = policy_named("a_policy_of_ones_own:shortest_queue")
    decision = policy(Prompt(10), (A, B), {}, Seconds({"a": 5}), OPTIONS)
    assert (decision.instance, decision.reason) == ("b", Reason.LEAST_LOAD)


# -- properties of all decisions --------------------------------------------------------------------------

roles = st.sampled_from([Role.COLOCATED, Role.COLOCATED, Role.PREFILL, Role.DECODE])
instances = st.builds(
    Instance,
    name=st.sampled_from("abcdef"),
    in_flight=st.integers(0, 200),
    queued_tokens=st.integers(0, 10_000),
    cached_tokens=st.integers(0, 10_000),
    last_picked=st.integers(0, 1000),
    role=roles,
    trusted=st.booleans(),
)
fleets = (
    st.lists(instances, min_size=1, max_size=6, unique_by=lambda i: i.name).map(tuple).filter(first_targets)
)
some_matches = st.dictionaries(
    st.sampled_from("abcdefg"),
    st.builds(
        lambda hbm, dram, disk, own: Match(hbm + dram + disk, own, {Tier.DRAM: dram, Tier.DISK: disk}),
        st.integers(0, 2000),
        st.integers(0, 2000),
        st.integers(0, 2000),
        st.booleans(),
    ),
)
some_costs = st.builds(
    Seconds,
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 1e4)),
    transfer=st.sampled_from([math.inf, 0.01, 0.2, 3.0]),
    calibrated=st.booleans(),
)
prompts = st.builds(
    Prompt, st.integers(0, 8000), st.none() | st.text(max_size=4), request_id=st.text(max_size=4)
)


@given(st.sampled_from(BUILT_IN), prompts, fleets, some_matches, some_costs)
def test_every_decision_can_be_followed(policy, prompt, fleet, matches, costs) -> None:
    decision = choose(fleet, matches, costs, prompt, policy)
    by_name = {i.name: i for i in fleet}
    chosen = by_name[decision.instance]
    assert chosen in first_targets(fleet)
    assert (decision.decode is not None) == (chosen.role is Role.PREFILL)
    assert decision.decode is None or by_name[decision.decode].role is Role.DECODE
    trusted = {name: m for name, m in matches.items() if name in by_name and by_name[name].trusted}
    assert decision.matched == trusted.get(chosen.name, Match(0)).tokens
    place = trusted.get(chosen.name, Match(0)).in_memory
    for fetch in decision.fetch:
        assert fetch.source != chosen.name
        assert place < fetch.tokens <= trusted[fetch.source].tokens
        place = fetch.tokens
    assert not any(math.isnan(score) for score in decision.scores.values())
    again = choose(tuple(reversed(fleet)), matches, costs, prompt, policy)
    assert (again.instance, again.decode) == (decision.instance, decision.decode)


@given(fleets, some_matches, some_costs, prompts, st.sampled_from("abcdef"), st.floats(0, 1e4))
def test_a_longer_queue_never_makes_an_instance_more_attractive(
    fleet, matches, costs, prompt, name, more
) -> None:
    before = choose(fleet, matches, costs, prompt)
    queues = {**costs.queues, name: costs.queues.get(name, 0.0) + more}
    after = choose(fleet, matches, dataclasses.replace(costs, queues=queues), prompt)
    if name in after.scores:
        assert after.scores[name] <= before.scores[name]

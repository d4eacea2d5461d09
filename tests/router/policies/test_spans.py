"""The sources of a prompt's KV, span by span: situations, and a search over all possible plans."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outlooks import AskedOutlook

from sglang_ext.router.policies import Fetch, Instance, Match
from sglang_ext.router.policies.plan import Plan
from sglang_ext.router.policies.spans import MOST_ENDS, fetches_of, given_plan, price_at, ways_at
from sglang_ext.tiers import Tier

PROMPT = 1000


@dataclass(frozen=True)
class Seconds:
    """A token takes 1 s to compute. links: by holder, seconds of any transfer and of each token."""

    links: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    loads: Mapping[Tier, float] = field(default_factory=lambda: {Tier.DRAM: 0.1, Tier.DISK: 0.5})
    calibrated: bool = True

    def exec_s(self, instance: Instance, new_tokens: int, context_tokens: int) -> float:
        return float(new_tokens)

    def load_s(self, instance: Instance, tier: Tier, tokens: int) -> float:
        return tokens * self.loads[tier]

    def transfer_s(self, source: Instance, target: Instance, tokens: int) -> float:
        once, each = self.links.get(source.name, (0.0, math.inf))
        return once + each * tokens if tokens else 0.0

    def queue_s(self, instance: Instance) -> float:
        return 0.0

    def decode_s(self, instance: Instance) -> float:
        return 0.0

    def outlook(self, fleet) -> AskedOutlook:
        return AskedOutlook(self, fleet)


def instance(name: str) -> Instance:
    return Instance(name, 0, 0, 0, 0)


T, A, B, C = (instance(name) for name in "tabc")


def plan_of(matches: Mapping[str, Match], costs: Seconds, *, whole: bool = False) -> Plan | None:
    return price_at(PROMPT, T, (A, B, C), matches, costs, whole=whole).plan


def told(plan: Plan | None) -> list[tuple[str | None, str | None, int, int]]:
    assert plan is not None
    return [(s.source, None if s.tier is None else s.tier.name, s.start, s.end) for s in plan.spans]


FAST, SLOW = (5.0, 0.1), (5.0, 0.5)


@pytest.mark.parametrize(
    ("matches", "links", "expected", "seconds"),
    [
        pytest.param(
            {"a": Match(900)},
            {"a": FAST},
            [("a", "hbm", 0, 900), (None, None, 900, 1000)],
            95 + 100,
            id="one holder",
        ),
        pytest.param(
            {"a": Match(900), "b": Match(600)},
            {"a": SLOW, "b": FAST},
            [("b", "hbm", 0, 600), ("a", "hbm", 600, 900), (None, None, 900, 1000)],
            65 + 155 + 100,
            id="the faster one has less: it, and then the other",
        ),
        pytest.param(
            {"a": Match(900), "b": Match(600)},
            {"a": FAST, "b": FAST},
            [("a", "hbm", 0, 900), (None, None, 900, 1000)],
            95 + 100,
            id="both are as fast: one journey is better than two",
        ),
        pytest.param(
            {"a": Match(900), "b": Match(600)},
            {"a": (5.0, 2.0), "b": FAST},
            [("b", "hbm", 0, 600), (None, None, 600, 1000)],
            65 + 400,
            id="a prefix that is computed sooner is not read",
        ),
        pytest.param(
            {"t": Match(300, below={Tier.DRAM: 100}), "a": Match(900, below={Tier.DRAM: 700})},
            {"a": FAST},
            [("t", "hbm", 0, 200), ("t", "dram", 200, 300), ("a", "dram", 300, 900), (None, None, 900, 1000)],
            10 + 65 + 100,
            id="behind its own prefix",
        ),
        pytest.param(
            {"t": Match(900, below={Tier.DISK: 900}), "a": Match(600)},
            {"a": FAST},
            [("a", "hbm", 0, 600), ("t", "disk", 600, 900), (None, None, 900, 1000)],
            65 + 150 + 100,
            id="its own disk comes behind others' memory",
        ),
        pytest.param(
            {"a": Match(1000)},
            {"a": FAST},
            [("a", "hbm", 0, 1000), (None, None, 999, 1000)],
            105 + 1,
            id="the last token is computed in any case",
        ),
        pytest.param(
            {"a": Match(900, below={Tier.DISK: 400})},
            {"a": FAST},
            [("a", "disk", 0, 900), (None, None, 900, 1000)],
            0.5 * 400 + 95 + 100,
            id="a peer's disk, which it loads from first",
        ),
        pytest.param(
            {"a": Match(900, below={Tier.DISK: 400}), "b": Match(600)},
            {"a": (5.0, 0.2), "b": FAST},
            [("b", "hbm", 0, 600), ("a", "disk", 600, 900), (None, None, 900, 1000)],
            65 + 0.5 * 400 + 65 + 100,
            id="memory of one, the disk of another, which begins where its memory ends",
        ),
        pytest.param(
            {"t": Match(900, below={Tier.DISK: 900}), "a": Match(900, below={Tier.DISK: 300})},
            {"a": FAST},
            [("a", "hbm", 0, 600), ("t", "disk", 600, 900), (None, None, 900, 1000)],
            65 + 150 + 100,
            id="blocks on its own disk are read there",
        ),
    ],
)
def test_spans(
    matches: dict[str, Match],
    links: dict[str, tuple[float, float]],
    expected: list[tuple[str | None, str | None, int, int]],
    seconds: float,
) -> None:
    plan = plan_of(matches, Seconds(links))
    assert told(plan) == expected
    assert plan is not None
    assert plan.seconds == pytest.approx(seconds)
    assert plan.worth_it


@pytest.mark.parametrize(
    "matches",
    [
        pytest.param({}, id="nobody has anything"),
        pytest.param({"a": Match(300), "t": Match(300)}, id="nobody has more"),
        pytest.param({"c": Match(900)}, id="an instance with more cannot be read from"),
    ],
)
def test_without_a_holder_there_is_no_plan(matches: dict[str, Match]) -> None:
    assert plan_of(matches, Seconds({"a": FAST})) is None


def test_what_takes_longer_than_computing_is_not_worth_it() -> None:
    plan = plan_of({"a": Match(900)}, Seconds({"a": (5.0, 1.1)}))
    assert plan is not None
    assert not plan.worth_it
    assert plan.seconds > plan.alone_s == PROMPT


def test_for_a_hint_all_is_read_whatever_computing_takes() -> None:
    matches, costs = {"a": Match(900), "b": Match(600)}, Seconds({"a": (5.0, 2.0), "b": FAST})
    plan = plan_of(matches, costs, whole=True)
    assert told(plan)[:2] == [("b", "hbm", 0, 600), ("a", "hbm", 600, 900)]


def test_the_disk_of_a_peer_may_take_longer_than_computing() -> None:
    costs = Seconds({"a": FAST}, loads={Tier.DRAM: 0.1, Tier.DISK: 1.5})
    plan = plan_of({"a": Match(900, below={Tier.DISK: 400})}, costs)
    assert told(plan) == [("a", "hbm", 0, 500), (None, None, 500, 1000)]


@pytest.mark.parametrize(
    ("matches", "spare"),
    [
        pytest.param({"a": Match(900)}, None, id="nobody else"),
        pytest.param({"a": Match(900), "b": Match(900), "c": Match(600)}, ("b", 0, 900), id="as much"),
        pytest.param({"a": Match(900), "b": Match(500), "c": Match(600)}, ("c", 0, 600), id="less"),
        pytest.param({"a": Match(900), "b": Match(900, below={Tier.DISK: 900})}, None, id="on disk only"),
        pytest.param({"a": Match(900), "t": Match(400), "b": Match(300)}, None, id="what is here"),
    ],
)
def test_who_is_read_from_instead(matches: dict[str, Match], spare: tuple[str, int, int] | None) -> None:
    plan = plan_of(matches, Seconds({"a": (1.0, 0.1), "b": (9.0, 0.2), "c": (9.0, 0.2)}))
    assert plan is not None
    assert [span.source for span in plan.read] == ["a"]
    found = plan.spare
    assert (None if found is None else (found.source, found.start, found.end)) == spare


def test_a_decisions_own_word_is_followed() -> None:
    matches = {"t": Match(100), "a": Match(900), "b": Match(600)}
    fetches = (Fetch("b", 50), Fetch("b", 300), Fetch("a", 700))
    costs = Seconds({"a": SLOW, "b": FAST})
    ways = ways_at(PROMPT, T, matches["t"], costs)
    plan = given_plan(PROMPT, T, (T, A, B), fetches, matches, costs, ways)
    assert told(plan) == [
        ("t", "hbm", 0, 100),
        ("b", "hbm", 100, 300),
        ("a", "hbm", 300, 700),
        (None, None, 700, 1000),
    ]
    assert plan is not None
    assert plan.worth_it, "whatever computing takes"
    assert fetches_of(plan) == fetches[1:]
    assert given_plan(PROMPT, T, (T, A), (Fetch("a", 100),), matches, Seconds(), ways) is None


# -- against everything that could be done --------------------------------------------------------------

lengths = st.integers(0, 4)
"""Tokens held in a tier: never the whole prompt, whose last token is computed in any case."""
speeds = st.sampled_from([0.1, 0.3, 0.5, 1.5, math.inf])


@st.composite
def held(draw: st.DrawFn) -> Match:
    hbm, dram, disk = draw(lengths), draw(lengths), draw(lengths)
    return Match(hbm + dram + disk, below={Tier.DRAM: dram, Tier.DISK: disk})


def all_sums(
    tokens: int, matches: Mapping[str, Match], costs: Seconds, names: tuple[str, ...]
) -> Iterator[float]:
    """The time of each way of reading at least one span, token by token: an oracle that knows no places."""
    own = matches["t"]
    memory = min(own.in_memory, tokens)
    base = sum(costs.load_s(T, tier, n) for tier, n in own.below.items() if tier.in_memory)
    for end in range(memory + 1, tokens + 1):
        for cuts in itertools.chain.from_iterable(
            itertools.combinations(range(memory + 1, end), n) for n in range(3)
        ):
            places = (memory, *cuts, end)
            for sources in itertools.product(names, repeat=len(places) - 1):
                spans = list(zip(sources, places, places[1:], strict=False))
                if all(
                    matches[s].tokens >= stop and (matches[s].in_memory >= stop or stop > own.tokens)
                    for s, _, stop in spans
                ):
                    moving = sum(
                        costs.transfer_s(instance(s), T, stop - start)
                        + costs.load_s(T, Tier.DISK, max(0, stop - matches[s].in_memory))
                        for s, start, stop in spans
                    )
                    rest = float(max(1, tokens - end))
                    if own.tokens > end:
                        reach = min(own.tokens, tokens)
                        rest = min(
                            rest,
                            costs.load_s(T, Tier.DISK, own.tokens - max(end, memory))
                            + max(1, tokens - reach),
                        )
                    yield base + moving + rest


@given(held(), held(), held(), speeds, speeds, st.sampled_from([0.0, 0.7]))
def test_no_other_way_is_faster(
    own: Match, one: Match, other: Match, fast: float, slow: float, once: float
) -> None:
    tokens, matches = 13, {"t": own, "a": one, "b": other}
    costs = Seconds({"a": (once, fast), "b": (once, slow)})
    pricing = price_at(tokens, T, (A, B), matches, costs)
    plan = pricing.plan
    sums = [each for each in all_sums(tokens, matches, costs, ("a", "b")) if each < math.inf]
    assert (plan is None) == (not sums)
    if plan is None:
        return
    # A way that stops in the middle of a holder's KV is best only where none is worth it.
    assert min(plan.seconds, plan.alone_s) <= min(*sums, plan.alone_s) + 1e-9
    place = 0
    for span in plan.spans:
        assert span.start == (place if span.source is not None else min(place, tokens - 1))
        assert span.end > span.start or span.source is None
        place = span.end
    assert place == tokens or own.tokens > tokens
    assert plan.read
    assert all(matches[span.source or ""].tokens >= span.end for span in plan.read)
    assert plan.seconds == pytest.approx(sum(span.seconds for span in plan.spans))
    assert plan.alone_s == pricing.alone.seconds == pricing.alone_s(1.0)
    assert plan.transfer_s == pytest.approx(sum(span.seconds for span in plan.read))
    rest_s = plan.seconds - plan.transfer_s
    assert plan.saved_s == pytest.approx(max(0.0, plan.alone_s - rest_s), abs=1e-9)


def test_of_many_holders_the_farthest_places_are_tried() -> None:
    fleet = tuple(instance(f"i{n}") for n in range(3 * MOST_ENDS))
    matches = {each.name: Match(10 * (n + 1)) for n, each in enumerate(fleet)}
    costs = Seconds({each.name: (0.0, 0.1) for each in fleet})
    plan = price_at(PROMPT, T, fleet, matches, costs).plan
    assert plan is not None
    assert plan.read[-1].end == 10 * len(fleet)

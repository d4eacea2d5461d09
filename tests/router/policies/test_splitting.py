"""Where a prompt is cut for two instances, and when it is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from outlooks import AskedOutlook

from sglang_ext.router.policies import Instance, Match
from sglang_ext.router.policies.plan import Split
from sglang_ext.router.policies.spans import price_at
from sglang_ext.router.policies.splitting import LAYER, SplitTerms, best_split, split_plan
from sglang_ext.tiers import Tier

PROMPT = 16_000
BLOCK = 16


@dataclass(frozen=True)
class Seconds:
    """A token takes 1 ms to compute, and as much more for each 8000 tokens before it."""

    queues: Mapping[str, float] = field(default_factory=dict)
    transfer: float = 1e-6
    calibrated: bool = True

    def exec_s(self, instance: Instance, new_tokens: int, context_tokens: int) -> float:
        return new_tokens * (1 + (context_tokens + new_tokens / 2) / 8000) * 1e-3

    def load_s(self, instance: Instance, tier: Tier, tokens: int) -> float:
        return 0.0

    def transfer_s(self, source: Instance, target: Instance, tokens: int) -> float:
        return tokens * self.transfer

    def queue_s(self, instance: Instance) -> float:
        return self.queues.get(instance.name, 0.0)

    def decode_s(self, instance: Instance) -> float:
        return 0.0

    def outlook(self, fleet) -> AskedOutlook:
        return AskedOutlook(self, fleet)


def instance(name: str, in_flight: int = 0) -> Instance:
    return Instance(name, in_flight, 0, 0, 0)


T, A, B = (instance(name) for name in "tab")
AUTO = SplitTerms()


def split(
    tokens: int = PROMPT,
    *,
    matches: Mapping[str, Match] | None = None,
    costs: Seconds | None = None,
    chunk: int = 0,
    terms: SplitTerms = AUTO,
    helpers: tuple[Instance, ...] = (A,),
) -> Split | None:
    matches, costs = matches or {}, costs or Seconds()
    pricing = price_at(tokens, T, (), matches, costs)
    return best_split(
        tokens, T, helpers, matches, costs, lambda name: chunk, terms, pricing=pricing, block=BLOCK
    )


def cost(new: int, context: int) -> float:
    return Seconds().exec_s(A, new, context)


def test_both_take_as_long_and_the_first_span_is_longer() -> None:
    found = split()
    assert found is not None
    assert found.tokens % BLOCK == 0
    first, rest = cost(found.tokens, 0), cost(PROMPT - found.tokens, found.tokens)
    assert found.tokens > PROMPT / 2
    assert first == pytest.approx(rest, rel=0.15)
    assert found.seconds < 0.6 * found.alone_s
    assert found.seconds >= max(first, rest)


def test_a_split_is_a_plan_of_own_spans_a_computed_one_and_the_rest() -> None:
    matches, costs = {"t": Match(2000, below={Tier.DRAM: 500})}, Seconds()
    found = split(matches=matches, costs=costs)
    assert found is not None
    plan = split_plan(PROMPT, T, found, matches, costs)
    assert [(span.source, span.tier, span.start, span.end) for span in plan.spans] == [
        ("t", Tier.HBM, 0, 1500),
        ("t", Tier.DRAM, 1500, 2000),
        ("a", None, 2000, found.tokens),
        (None, None, found.tokens, PROMPT),
    ]
    assert plan.worth_it
    assert plan.read == plan.asked == (plan.spans[2],)
    assert plan.transfer_s + plan.spans[3].seconds == pytest.approx(found.seconds)
    assert plan.saved_s == pytest.approx(found.alone_s - found.seconds)


def test_no_cut_that_is_tried_is_better() -> None:
    """Against all places, timed by hand: no chunks, no cached prefix, and no queue."""
    found = split()
    assert found is not None
    best = min(
        max(
            LAYER * cost(cut, 0) + cost(PROMPT - cut, cut),
            cost(cut, 0) + LAYER * cost(PROMPT - cut, cut),
        )
        for cut in range(BLOCK, PROMPT, BLOCK)
    )
    assert best <= found.seconds <= 1.03 * best


def test_with_chunks_only_one_pass_of_each_runs_beside_the_other() -> None:
    found = split(chunk=8000)
    assert found is not None
    assert found.seconds < 0.7 * found.alone_s
    small = split(chunk=1000, terms=SplitTerms(2048, 0.0))
    assert small is not None
    assert small.seconds > 0.9 * small.alone_s
    assert split(chunk=1000) is None, "it is not worth a helper"


@pytest.mark.parametrize(
    ("matches", "least"),
    [({"a": Match(8000)}, 8000), ({"t": Match(2000)}, 2000), ({"a": Match(4000), "t": Match(2000)}, 4000)],
)
def test_a_cached_part_is_not_cut(matches: Mapping[str, Match], least: int) -> None:
    found = split(matches=matches)
    assert found is not None
    assert found.tokens > least
    assert found.known == matches.get("a", Match(0)).tokens


def test_a_busy_helper_is_waited_for_while_that_is_worth_it() -> None:
    idle, some = split(), split(costs=Seconds({"a": 4.0}))
    assert idle is not None
    assert some is not None
    assert some.seconds == pytest.approx(idle.seconds + 4.0)
    assert split(costs=Seconds({"a": 60.0})) is None
    both = split(helpers=(instance("a", 2), B), costs=Seconds({"a": 4.0}))
    assert both is not None
    assert both.source == "b"


def test_a_slow_link_is_not_worth_it() -> None:
    assert split(costs=Seconds(transfer=6e-3)) is None
    assert split(costs=Seconds(transfer=float("inf")), terms=SplitTerms(1, 0.0)) is None


@pytest.mark.parametrize("tokens", [0, 1, BLOCK, 2000])
def test_a_short_prompt_is_not_split(tokens: int) -> None:
    assert split(tokens) is None


def test_a_prompt_of_which_little_is_left_is_not_split() -> None:
    assert split(matches={"t": Match(PROMPT - 1000)}) is None


@pytest.mark.parametrize(
    ("text", "terms"),
    [("off", None), ("auto", AUTO), ("4096", SplitTerms(4096, 0.0))],
)
def test_the_flag(text: str, terms: SplitTerms | None) -> None:
    assert SplitTerms.of(text) == terms


@pytest.mark.parametrize("text", ["", "on", "0", "-1", "1.5"])
def test_what_the_flag_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|^-?\d+$"):
        SplitTerms.of(text)

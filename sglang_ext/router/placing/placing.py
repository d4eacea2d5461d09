"""Where a request runs, for requests and for hints: the one place that decides and prices.

`place` asks the policy for an instance, then plans which spans of the prompt's KV the instance reads from
other instances, and estimates the time to first token from the same price. A policy that has priced its
choice hands the price on (``Decision.pricing``); all other choices are priced here. So each request has one
price per instance: the plan that ``fetching`` carries out and the estimate that ``/explain`` shows are parts
of it.

Pure: no I/O, no clock, no state. Speeds and queues come from ``PlacingCosts``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from sglang_ext.router.policies.assembly import trusted_matches, with_decode
from sglang_ext.router.policies.base import (
    Costs,
    Decision,
    Fleet,
    Instance,
    Matches,
    Policy,
    PolicyOptions,
    Prompt,
    Reason,
)
from sglang_ext.router.policies.fleet_queries import matched_tokens, named
from sglang_ext.router.policies.plan import Plan, Pricing
from sglang_ext.router.policies.spans import fetches_of, given_plan, holders_beyond, price_at
from sglang_ext.router.policies.splitting import SplitTerms, best_split, split_plan
from sglang_ext.router.telemetry.estimate import Estimate


class PlacingCosts(Costs, Protocol):
    """The costs that policies see, and the facts that plans need besides."""

    @property
    def basis(self) -> str:
        """The origin of the costs, for people."""

    def can_fetch(self, source: str, target: str) -> bool:
        """Whether instance ``target`` can fetch KV from instance ``source``."""

    def can_split(self, source: str, target: str) -> bool:
        """Whether ``source`` can compute the beginning of a prompt for ``target``."""

    def chunk(self, name: str) -> int:
        """Tokens of a prompt that an instance computes in one pass; 0 for all."""

    def factor(self, name: str) -> float:
        """The correction in an instance's computing times: observed over calculated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacingOptions:
    """How requests are placed.

    split: when two instances compute one prompt; None for never. block_size: tokens of a block. ahead: the
    request comes later, so that the plan brings all KV that any instance holds, even if computing is faster.
    """

    policy: Policy
    thresholds: PolicyOptions
    split: SplitTerms | None = None
    block_size: int = 16
    ahead: bool = False


@dataclass(slots=True)
class Placement:
    """Where a request runs.

    instance: the first instance that it is sent to. decode: the decode instance, if it differs. plan: the
    spans of the prompt's KV; None if no other instance has any that ``instance`` lacks. estimate: with the
    plan, if it is worth it; alone: without. matched: tokens that ``instance`` holds according to the index.
    """

    instance: str
    decode: str | None
    plan: Plan | None
    estimate: Estimate
    alone: Estimate
    reason: Reason
    matched: int
    scores: Mapping[str, float]


def place(
    prompt: Prompt,
    fleet: Fleet,
    matches: Matches,
    costs: PlacingCosts,
    options: PlacingOptions,
    announced: Decision | None = None,
) -> Placement:
    """Place a request.

    Args:
        fleet: the instances that can take the request; never empty.
        announced: an earlier decision for the request. It stands unless its instance would have to compute
            KV that another instance holds, because fetching it takes longer. Then the policy decides.
    """
    known = trusted_matches(fleet, matches)
    if announced is not None:
        announced = with_decode(announced, prompt, fleet, known, costs, options.thresholds)
        placement = _placed(announced, prompt, fleet, known, costs, options)
        if placement.plan is None or placement.plan.worth_it:
            return placement
    decision = options.policy(prompt, fleet, matches, costs, options.thresholds)
    return _placed(decision, prompt, fleet, known, costs, options)


def _placed(
    decision: Decision,
    prompt: Prompt,
    fleet: Fleet,
    matches: Matches,
    costs: PlacingCosts,
    options: PlacingOptions,
) -> Placement:
    """A decision with its plan and its estimates."""
    chosen = named(fleet, decision.instance)
    assert chosen is not None, decision.instance
    pricing = _pricing(decision, chosen, prompt, fleet, matches, costs, options)
    alone = pricing.alone
    hand_over_s = 0.0
    if decision.decode is not None:
        decode = named(fleet, decision.decode)
        assert decode is not None, decision.decode
        hand_over_s = costs.transfer_s(
            chosen, decode, max(0, prompt.tokens - matched_tokens(matches, decision.decode))
        )
    factor = costs.factor(chosen.name)
    without = Estimate(pricing.queue_s, alone.load_s, hand_over_s, alone.exec_s, factor, costs.basis)
    estimate, plan = without, pricing.plan
    if plan is not None and plan.worth_it:
        plan = msgspec.structs.replace(plan, busy_s=_busy_s(plan, fleet, costs))
        load_s = sum([span.seconds for span in plan.spans if span.source == chosen.name])
        exec_s = sum([span.seconds for span in plan.spans if span.source is None])
        transfer_s = hand_over_s + plan.transfer_s
        estimate = Estimate(pricing.queue_s, load_s, transfer_s, exec_s, factor, costs.basis)
    return Placement(
        chosen.name,
        decision.decode,
        plan,
        estimate,
        without,
        decision.reason,
        decision.matched,
        decision.scores,
    )


def _pricing(
    decision: Decision,
    chosen: Instance,
    prompt: Prompt,
    fleet: Fleet,
    matches: Matches,
    costs: PlacingCosts,
    options: PlacingOptions,
) -> Pricing:
    """The price of a decision, with the plan to carry out: the decision's own spans, or the fastest, or a
    split where reading is not worth it."""
    tokens, pricing = prompt.tokens, decision.pricing
    if options.ahead:
        return price_at(tokens, chosen, _holders(chosen, fleet, matches, costs), matches, costs, whole=True)
    if decision.fetch:
        if pricing is None or pricing.instance != chosen.name:
            pricing = price_at(tokens, chosen, (), matches, costs)
        if pricing.plan is not None and pricing.plan.worth_it and fetches_of(pricing.plan) == decision.fetch:
            return pricing
        plan = given_plan(tokens, chosen, fleet, decision.fetch, matches, costs, pricing.ways)
        return msgspec.structs.replace(pricing, plan=plan)
    if pricing is None or pricing.instance != chosen.name:
        pricing = price_at(tokens, chosen, _holders(chosen, fleet, matches, costs), matches, costs)
    is_read = pricing.plan is not None and pricing.plan.worth_it
    if options.split is None or is_read or decision.decode is not None or not prompt.movable:
        return pricing
    helpers = [known for known in fleet if costs.can_split(known.name, chosen.name)]
    split = best_split(
        tokens, chosen, helpers, matches, costs, costs.chunk, options.split, pricing=pricing,
        block=options.block_size,
    )  # fmt: skip
    if split is None:
        return pricing
    return msgspec.structs.replace(pricing, plan=split_plan(tokens, chosen, split, matches, costs))


def _holders(chosen: Instance, fleet: Fleet, matches: Matches, costs: PlacingCosts) -> list[Instance]:
    return holders_beyond(chosen, fleet, matches, costs.can_fetch)


def _busy_s(plan: Plan, fleet: Fleet, costs: PlacingCosts) -> float:
    """The longest queue at an instance that is asked to export."""
    holders = [named(fleet, span.source) for span in plan.asked if span.source is not None]
    return max([costs.queue_s(holder) for holder in holders if holder is not None], default=0.0)


def gathering_plan(
    tokens: int, target: str, fleet: Fleet, matches: Matches, costs: PlacingCosts
) -> Plan | None:
    """The plan that brings to ``target`` all KV of a prompt that another instance holds; None if there is
    none, or ``target`` is not in the fleet."""
    chosen = named(fleet, target)
    if chosen is None:
        return None
    return price_at(tokens, chosen, _holders(chosen, fleet, matches, costs), matches, costs, whole=True).plan


def fetches_everywhere(fleet: Fleet, costs: PlacingCosts) -> bool:
    """Whether any instance of a fleet can fetch from any other."""
    first, others = fleet[0], fleet[1:]
    return bool(others) and all([costs.can_fetch(first.name, other.name) for other in others])

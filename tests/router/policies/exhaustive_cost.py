"""The policy `cost` as it was when it priced every instance: the reference for the fast one.

Kept as it was; see ``sglang_ext.router.policies.cost`` for the rule.
"""

from __future__ import annotations

from dataclasses import dataclass

from exhaustive_spans import fetches_of, price_at

from sglang_ext.router.policies.assembly import choose_decode, trusted_matches
from sglang_ext.router.policies.base import (
    NOTHING,
    Costs,
    Decision,
    Fetch,
    Fleet,
    Instance,
    Match,
    Matches,
    PolicyOptions,
    Prompt,
    Reason,
    Role,
)
from sglang_ext.router.policies.fleet_queries import first_targets, for_want_of, load_of
from sglang_ext.router.policies.plan import Pricing


@dataclass(frozen=True, slots=True)
class Price:
    """Weighted seconds of a request at one instance."""

    instance: Instance
    seconds: float
    held: Match
    pricing: Pricing
    decode: str | None
    crowded: bool
    """``held`` was not counted, because the instance already caches much more than others."""

    @property
    def fetch(self) -> tuple[Fetch, ...]:
        """The spans that the instance fetches."""
        plan = self.pricing.plan
        return () if plan is None or not plan.worth_it else fetches_of(plan)


def cost(prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions) -> Decision:
    """Choose by the rule in the module's docstring; scores are negative seconds."""
    known = trusted_matches(fleet, matches)
    candidates = first_targets(fleet)
    emptiest = min(instance.cached_tokens for instance in candidates)
    holders = tuple(instance for instance in fleet if known.get(instance.name, NOTHING).tokens)
    prices = [
        price(prompt, instance, emptiest, holders, fleet, known, costs, options) for instance in candidates
    ]
    least = min(prices, key=lambda one: (one.seconds, load_of(one.instance)))
    tie = _block_s(prompt, least.instance, costs, options)
    chosen = min(
        (one for one in prices if one.seconds - least.seconds <= tie), key=lambda one: load_of(one.instance)
    )
    fetch = chosen.fetch
    return Decision(
        chosen.instance.name,
        Reason.FETCH if fetch else _reason(chosen, prices, options),
        chosen.held.tokens,
        {one.instance.name: -one.seconds for one in prices},
        chosen.decode,
        fetch,
        None if chosen.crowded else chosen.pricing,  # a crowded instance's own KV was left out
    )


def price(
    prompt: Prompt,
    instance: Instance,
    emptiest: int,
    holders: Fleet,
    fleet: Fleet,
    matches: Matches,
    costs: Costs,
    options: PolicyOptions,
) -> Price:
    """The price of the request at ``instance``.

    Args:
        emptiest: tokens that the emptiest instance caches.
        holders: instances of the fleet that hold any of the prompt.
    """
    held = matches.get(instance.name, NOTHING)
    slack = options.balance_cache_factor * held.tokens
    crowded = bool(held.tokens) and not held.own and instance.cached_tokens - emptiest > slack
    weight = options.exec_weight
    if crowded:
        pricing = price_at(prompt.tokens, instance, (), {}, costs)
    else:
        pricing = price_at(prompt.tokens, instance, holders, matches, costs, exec_weight=weight)
    plan = pricing.plan
    seconds = plan.seconds if plan is not None and plan.worth_it else pricing.alone_s(weight)
    seconds += options.queue_weight * pricing.queue_s
    decode = None
    if instance.role is Role.PREFILL:
        best, hand_over = choose_decode(prompt, instance, fleet, matches, costs, options)
        decode = best.name
        seconds += hand_over
    return Price(instance, seconds, held, pricing, decode, crowded)


def _block_s(prompt: Prompt, instance: Instance, costs: Costs, options: PolicyOptions) -> float:
    """One block's share of computing the whole prompt."""
    if prompt.tokens <= 0:
        return 0.0
    return costs.exec_s(instance, prompt.tokens, 0) * min(1.0, options.tie_tokens / prompt.tokens)


def _reason(chosen: Price, prices: list[Price], options: PolicyOptions) -> Reason:
    longest = max(one.held.tokens for one in prices)
    if longest <= 0:
        return for_want_of(Reason.NO_PREFIX, tuple(one.instance for one in prices))
    best = [one for one in prices if longest - one.held.tokens <= options.tie_tokens]
    if chosen in best:
        return Reason.PREFIX if len(best) == 1 else Reason.PREFIX_SHARED
    return Reason.SPREAD if all(one.crowded for one in best) else Reason.REBALANCED

"""Cost: the instance where the first token is expected soonest (MemServe, section 5.3, equations 1 and 2).

For each instance p that can begin with the request:

    queue(p) + the least of
        load(what p holds below HBM) + exec(what is left, after what p holds)
        exec(what is left, after what p has in HBM)                        loading costs more than computing
        transfer(what p' has in memory beyond p) + exec(what is left after that)   where fetching is possible

The smallest sum wins (equation 1), where a second of queue counts ``queue_weight`` times and a second of
exec ``exec_weight`` times. With 1 and 1 it is the paper's equation, the time of this request alone. By
default exec counts 1.5 times: what is computed here also keeps whoever comes next waiting, and what another
holds need not be computed at all. If the smallest is one with a transfer, the decision names p'
(equation 2: transfer is taken where it is no longer than what it saves). With prefill and decode apart, the
pair is chosen together: to p's sum comes what the hand-over to the best decode instance takes.

Sums within the time that one block of the prompt takes are equal; then load decides. And as in
``prompt_tree``, rule 3: a *common beginning* that p holds is not counted where p caches more than the
emptiest instance by more than ``balance_cache_factor`` times that beginning. Time alone would send every
conversation with a popular system prompt to one instance for as long as nobody waits there, and leave the
memory of all others empty; queues alone would notice only when it has to evict.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_ext.router.policies.assembly import assembled, choose_decode, trusted_matches
from sglang_ext.router.policies.base import (
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
    beginners,
    for_want_of,
    load_of,
)
from sglang_ext.router.policies.prompt_tree import NOTHING, prompt_tree


@dataclass(frozen=True, slots=True)
class Price:
    """What a request costs at one instance."""

    instance: Instance
    seconds: float
    held: Match
    fetch: Fetch | None
    decode: str | None
    crowded: bool
    """What it holds was not counted, because it caches much more than others already."""


def cost(prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions) -> Decision:
    """Choose by the rule in the module's docstring; scores are negative seconds."""
    known = trusted_matches(fleet, matches)
    candidates = beginners(fleet)
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
    return Decision(
        chosen.instance.name,
        _reason(chosen, prices, options),
        chosen.held.tokens,
        {one.instance.name: -one.seconds for one in prices},
        chosen.decode,
        chosen.fetch,
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
    """What the request costs at ``instance``.

    Args:
        emptiest: tokens that the emptiest instance caches.
        holders: those of the fleet that hold any of the prompt.
    """
    held = matches.get(instance.name, NOTHING)
    slack = options.balance_cache_factor * held.tokens
    crowded = bool(held.tokens) and not held.own and instance.cached_tokens - emptiest > slack
    counted = NOTHING if crowded else held
    weight = options.exec_weight
    seconds = _prefill_s(prompt, instance, counted, costs, weight)
    fetch = None
    for source in () if crowded else holders:
        there = min(matches[source.name].in_memory, prompt.tokens)
        if source is instance or there <= held.tokens:
            continue
        moving = costs.transfer_s(source, instance, there - held.tokens) + _load_s(instance, held, costs)
        if moving > seconds:
            continue
        with_fetch = moving + weight * _exec_s(prompt, instance, there, costs)
        if with_fetch < seconds or (with_fetch == seconds and fetch is None):
            seconds, fetch = with_fetch, Fetch(source.name, there)
    seconds += options.queue_weight * costs.queue_s(instance)
    decode = None
    if instance.role is Role.PREFILL:
        best, hand_over = choose_decode(prompt, instance, fleet, matches, costs, options)
        decode = best.name
        seconds += hand_over
    return Price(instance, seconds, held, fetch, decode, crowded)


def _prefill_s(prompt: Prompt, instance: Instance, held: Match, costs: Costs, weight: float) -> float:
    """To the first token with what the instance itself holds, once it begins; computing counts ``weight``
    times. It loads a tier only where that is faster than computing, as its own load policy does."""
    return min(
        _load_s(instance, way, costs) + weight * _exec_s(prompt, instance, way.tokens, costs)
        for way in ways(held)
    )


def ways(held: Match) -> list[Match]:
    """What an instance may begin with of what it holds: all of it, or without its farthest tiers."""
    found = [held]
    known, below = held.tokens, dict(held.below)
    while below:
        known -= below.popitem()[1]  # the farthest
        found.append(Match(known, below=dict(below)))
    return found


def _load_s(instance: Instance, held: Match, costs: Costs) -> float:
    return sum(costs.load_s(instance, tier, tokens) for tier, tokens in held.below.items())


def _exec_s(prompt: Prompt, instance: Instance, known: int, costs: Costs) -> float:
    """The last token is computed in any case: its logits begin the answer."""
    new = max(1, prompt.tokens - known)
    return costs.exec_s(instance, new, max(0, prompt.tokens - new))


def _block_s(prompt: Prompt, instance: Instance, costs: Costs, options: PolicyOptions) -> float:
    """One block's share of computing the whole prompt."""
    if prompt.tokens <= 0:
        return 0.0
    return costs.exec_s(instance, prompt.tokens, 0) * min(1.0, options.tie_tokens / prompt.tokens)


def _reason(chosen: Price, prices: list[Price], options: PolicyOptions) -> Reason:
    longest = max(one.held.tokens for one in prices)
    if chosen.fetch is not None:
        return Reason.FETCH
    if longest <= 0:
        return for_want_of(Reason.NO_PREFIX, tuple(one.instance for one in prices))
    best = [one for one in prices if longest - one.held.tokens <= options.tie_tokens]
    if chosen in best:
        return Reason.PREFIX if len(best) == 1 else Reason.PREFIX_SHARED
    return Reason.SPREAD if all(one.crowded for one in best) else Reason.REBALANCED


_by_prompt_tree = assembled(prompt_tree)


def auto(prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions) -> Decision:
    """Choose as ``cost`` does if the costs were measured, else as ``prompt_tree``.

    ``docs/cost_model.md`` has the comparison that this default follows.
    """
    policy = cost if costs.calibrated else _by_prompt_tree
    return policy(prompt, fleet, matches, costs, options)

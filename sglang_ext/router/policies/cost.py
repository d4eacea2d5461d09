"""Cost: the instance with the shortest expected time to first token (MemServe, section 5.3, equations 1, 2).

For each instance p that can begin with the request:

    queue(p) + the least of
        load(p's match below HBM) + exec(the tokens behind p's match)
        exec(the tokens behind p's match in HBM)                    if loading costs more than computing
        transfer(tokens beyond p's match, from other instances' memory) + exec(the rest)   if p can fetch

The smallest sum wins (equation 1), where a second of queue counts ``queue_weight`` times and a second of
exec ``exec_weight`` times. With 1 and 1 it is the paper's equation, the time of this request alone. By
default exec counts 1.5 times: computing also delays the requests queued behind this one, and KV that another
instance holds need not be computed at all. If the smallest sum has a transfer, the decision names the source
of each span (equation 2: transfer is chosen if it takes no longer than it saves; ``spans`` chooses the
holders, span by span). With PD disaggregation, the pair is chosen together: the hand-over to the best decode
instance is added to p's sum.

Sums within the time that one block of the prompt takes are equal; then load decides. And as in
``prompt_tree``, rule 3: a *common beginning* that p holds is not counted if p caches more than the
emptiest instance by more than ``balance_cache_factor`` times that beginning. Time alone would send all
conversations with a popular system prompt to one instance until a queue forms there, and leave the memory of
all others empty; queues alone would react only when the instance has to evict.

A fleet may have a thousand instances, and pricing one takes as long as comparing a hundred. So instances are
compared in arrays (``outlook``): the seconds of each one at which nothing waits, exactly, and a lower bound
where prompts wait, since exec depends on these there. Of the latter, an instance is priced only if its bound
is below the least price so far. The chosen one's spans are listed in the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from sglang_ext.router.policies.assembly import assembled, trusted_matches
from sglang_ext.router.policies.base import (
    NOTHING,
    Costs,
    Decision,
    Fleet,
    Match,
    Matches,
    PolicyOptions,
    Prompt,
    Reason,
)
from sglang_ext.router.policies.fleet_queries import first_targets, for_want_of, place_of
from sglang_ext.router.policies.outlook import Numbers
from sglang_ext.router.policies.plan import Plan
from sglang_ext.router.policies.prompt_tree import prompt_tree
from sglang_ext.router.policies.search import Search
from sglang_ext.router.policies.spans import fetches_of, price_at

AGREES = 1e-6
"""Relative difference up to which a price from arrays and one from its spans are equal."""


class Scores(Mapping[str, float]):
    """Negative seconds of the instances that were priced. A lazy view, because few callers read the scores.

    Args:
        seconds: of each instance; infinite for those that were not priced.
    """

    def __init__(self, fleet: Fleet, seconds: Numbers) -> None:
        self._fleet = fleet
        self._seconds = seconds

    def __getitem__(self, name: str) -> float:
        place = place_of(self._fleet, name)
        if place is None or not math.isfinite(self._seconds[place]):
            raise KeyError(name)
        return -float(self._seconds[place])

    def __iter__(self) -> Iterator[str]:
        priced = np.flatnonzero(np.isfinite(self._seconds))
        return iter([self._fleet[place].name for place in priced.tolist()])

    def __len__(self) -> int:
        return int(np.isfinite(self._seconds).sum())

    def __repr__(self) -> str:
        return f"Scores({dict(self)})"


def cost(prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions) -> Decision:
    """Choose by the rule in the module's docstring; scores are negative seconds."""
    known = trusted_matches(fleet, matches)
    candidates = first_targets(fleet)
    search = Search(prompt, fleet, candidates, known, costs, options)
    while True:
        place = search.best()
        chosen, crowded = fleet[place], search.is_crowded(place)
        weight = 1.0 if crowded else options.exec_weight
        sources = search.sources_of(search.kind_at(place))
        pricing = price_at(prompt.tokens, chosen, sources, known, costs, exec_weight=weight)
        plan: Plan | None = pricing.plan
        if crowded or (plan is not None and not plan.worth_it):
            plan = None  # the price of a crowded instance leaves out its own KV
        decode, hand_over_s = search.hand_over(chosen)
        if not crowded:
            seconds = pricing.alone_s(weight) if plan is None else plan.seconds
            seconds += options.queue_weight * pricing.queue_s + hand_over_s
            if seconds > float(search.seconds[place]) * (1 + AGREES) + AGREES:
                search.seconds[place] = seconds  # unlike others of its kind, it cannot fetch any more
                continue
        fetch = () if plan is None else fetches_of(plan)
        return Decision(
            chosen.name,
            Reason.FETCH if fetch else _reason(known.get(chosen.name, NOTHING), candidates, search, options),
            known.get(chosen.name, NOTHING).tokens,
            Scores(fleet, search.seconds),
            decode,
            fetch,
            pricing,
        )


def _reason(chosen: Match, candidates: Fleet, search: Search, options: PolicyOptions) -> Reason:
    """Why the instance that holds ``chosen`` was chosen, if it fetches nothing."""
    longest, can_begin = 0, search.can_begin
    held: list[tuple[Match, Numbers]] = []
    for group in search.groups:
        places = group.whole if can_begin is None else group.whole[can_begin[group.whole]]
        if len(places):
            held.append((group.held, places))
            longest = max(longest, group.held.tokens)
    if longest <= 0:
        return for_want_of(Reason.NO_PREFIX, candidates)
    near = [(match, places) for match, places in held if longest - match.tokens <= options.tie_tokens]
    count = sum([len(places) for _, places in near])
    strangers = longest <= options.tie_tokens  # instances without a match are near, too
    if strangers:
        count += len(candidates) - sum([len(places) for _, places in held])
    # All holders of a group have its match object.
    if any([match is chosen for match, _ in near]) or (
        strangers and not any([match is chosen for match, _ in held])
    ):
        return Reason.PREFIX if count == 1 else Reason.PREFIX_SHARED
    if strangers and count > sum([len(places) for _, places in near]):
        return Reason.REBALANCED
    crowded = [search.crowded(match, places) for match, places in near]
    spread = all([each is not None and bool(each.all()) for each in crowded])
    return Reason.SPREAD if spread else Reason.REBALANCED


_by_prompt_tree = assembled(prompt_tree)


def auto(prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions) -> Decision:
    """Choose by ``cost`` if the costs were measured, else by ``prompt_tree``.

    ``docs/cost_model.md`` has the comparison behind this default.
    """
    policy = cost if costs.calibrated else _by_prompt_tree
    return policy(prompt, fleet, matches, costs, options)

"""Prompt tree: the instance that holds the longest prefix, unless it is too busy (MemServe, section 6).

The rule, in order:

1. An instance is *ahead* when it has more than ``balance_abs_threshold`` requests in flight more than the
   least loaded one, and more than ``balance_rel_threshold`` times as many. Both must hold: 2 against 1 is
   twice as many, and 108 against 100 is 8 more, but neither is an imbalance. The cache of an instance that
   is ahead does not count.
2. Among the others, find the longest cached prefix. Instances whose match is shorter by at most
   ``tie_tokens`` (a block) are equal; the least loaded of them is chosen.
3. A prefix that is a *common beginning*, and not the request's own past (``Match.own``), decides only
   if it is at least ``cache_threshold`` of the prompt, and if its holder does not cache more than
   the emptiest instance by more than ``balance_cache_factor`` times that prefix. Computing a system prompt
   once more costs that prefix; keeping every conversation that starts with it on one instance wastes the
   memory of all others. The factor weighs balance against that cost: a long document with many requests
   spreads to other instances late, and a short system prompt early.
4. Otherwise the least loaded instance is chosen; among idle ones, the one with the least cached KV.

A popular prefix therefore does not pull all requests to one instance. While one instance holds it, that
instance gets ahead in load (rule 1) or in memory (rule 3). The next request goes to another instance, which
then holds the prefix, too. Once all instances hold it, rule 2 spreads requests by load. Only rule 1 moves a
conversation that has begun.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sglang_ext.router.policies.base import (
    NOTHING,
    Costs,
    Decision,
    Fleet,
    Instance,
    Match,
    Matches,
    PolicyOptions,
    Prompt,
    Reason,
)
from sglang_ext.router.policies.fleet_queries import (
    busier_than,
    holders_among,
    in_flight_range,
    least_cached,
    least_loaded,
    matched_tokens,
    named,
)


class MatchedTokens(Mapping[str, float]):
    """Matched tokens of each instance, as scores; instances without a match are left out.

    A lazy view, because few callers read the scores.
    """

    def __init__(self, fleet: Fleet, matches: Matches) -> None:
        self._fleet = fleet
        self._matches = matches

    def __getitem__(self, name: str) -> float:
        if named(self._fleet, name) is None:
            raise KeyError(name)
        return float(self._matches[name].tokens)

    def __iter__(self) -> Iterator[str]:
        return iter([instance.name for instance, _ in holders_among(self._fleet, self._matches)])

    def __len__(self) -> int:
        return len(holders_among(self._fleet, self._matches))

    def __repr__(self) -> str:
        return f"MatchedTokens({dict(self)})"


def prompt_tree(
    prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions
) -> Decision:
    """Choose by the rule in the module's docstring; scores are matched tokens."""
    held = holders_among(fleet, matches)
    least, most = in_flight_range(fleet)
    if most - least <= options.balance_abs_threshold:  # then no instance is ahead
        best, reason = _holders(prompt, fleet, held, options)
        return _least_loaded(best, reason, fleet, matches)
    many = busier_than(fleet, least + options.balance_abs_threshold)
    ahead = frozenset([instance.name for instance in many if is_ahead(instance, least, options)])
    level = [(instance, match) for instance, match in held if instance.name not in ahead]
    best, reason = _holders(prompt, fleet, level, options, ahead)
    if ahead:
        wanted, _ = _holders(prompt, fleet, held, options)
        if wanted and all([instance.name in ahead for instance in wanted]):
            reason = Reason.REBALANCED
    return _least_loaded(best, reason, fleet, matches)


def _holders(
    prompt: Prompt,
    fleet: Fleet,
    held: list[tuple[Instance, Match]],
    options: PolicyOptions,
    ahead: frozenset[str] = frozenset(),
) -> tuple[list[Instance], Reason]:
    """Rules 2 and 3: the candidates that hold a deciding prefix; empty if there is none.

    Args:
        held: the candidates with a match, and the match.
        ahead: the instances of the fleet that are no candidates, by name.
    """
    # Instances that hold the same part of a prompt share one match object.
    longest = 0
    seen: Match | None = None
    for _, match in held:
        if match is not seen:
            seen = match
            longest = max(longest, match.tokens)
    if longest <= 0:
        return [], Reason.NO_PREFIX
    tie = options.tie_tokens
    if longest <= tie:
        matches = {instance.name: match for instance, match in held}
        candidates = [instance for instance in fleet if instance.name not in ahead]
        held = [(instance, matches.get(instance.name, NOTHING)) for instance in candidates]
    best = []
    own = near = False
    seen = None
    for instance, match in held:
        if match is not seen:
            seen = match
            near = longest - match.tokens <= tie
            own = own or (near and match.own)
        if near:
            best.append(instance)
    if not own:
        if longest < options.cache_threshold * prompt.tokens:
            return [], Reason.SHORT_PREFIX
        emptiest = least_cached(fleet, ahead)
        slack = options.balance_cache_factor * longest
        best = [instance for instance in best if instance.cached_tokens - emptiest <= slack]
        if not best:
            return [], Reason.SPREAD
    return best, Reason.PREFIX if len(best) == 1 else Reason.PREFIX_SHARED


def is_ahead(instance: Instance, least: int, options: PolicyOptions) -> bool:
    """Whether ``instance`` has so much more load than the least loaded that its cache must not count."""
    return (
        instance.in_flight - least > options.balance_abs_threshold
        and instance.in_flight > options.balance_rel_threshold * least
    )


def _least_loaded(candidates: Sequence[Instance], reason: Reason, fleet: Fleet, matches: Matches) -> Decision:
    """Of the candidates, or of the fleet, if there are none: its least loaded instance is never ahead."""
    chosen = candidates[0] if len(candidates) == 1 else least_loaded(fleet, candidates or fleet)
    held = matched_tokens(matches, chosen.name)
    return Decision(chosen.name, reason, held, MatchedTokens(fleet, matches))

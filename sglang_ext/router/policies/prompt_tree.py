"""Prompt tree: the instance that holds the longest prefix, unless it is too busy (MemServe, section 6).

The rule, in order:

1. An instance is *ahead* when it has more than ``balance_abs_threshold`` requests in flight more than the
   least loaded one, and more than ``balance_rel_threshold`` times as many. Both, because 2 against 1 is
   twice as many and means nothing, and 108 against 100 is 8 more and means nothing. Who is ahead gets
   nothing for what it caches.
2. Among the others, find the longest cached prefix. Whoever holds as much to within ``tie_tokens`` (a
   block) is as good; the least loaded of them is taken.
3. A prefix that is a *common beginning*, and not the request's own past (``Match.own``), decides only
   where it is at least ``cache_threshold`` of the prompt, and where its holder does not cache more than
   the emptiest instance by more than ``balance_cache_factor`` times that prefix. Computing a system prompt
   once more costs that prefix; keeping every conversation that starts with it on one instance wastes the
   memory of all others. The factor says how many times its price the balance is worth, so a long document
   that is asked about often moves late, and a short system prompt early.
4. Otherwise the least loaded instance is taken; among idle ones, the one that caches least.

A popular prefix therefore does not pull everything to one instance: while one instance holds it, that
instance gets ahead in load (rule 1) or in memory (rule 3), the next request goes elsewhere, and the prefix
is then held there too; once everybody holds it, rule 2 spreads by load. A conversation that has begun is
moved by rule 1 only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

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
from sglang_ext.router.policies.questions import (
    holders_among,
    in_flight_range,
    least_loaded,
    matched_tokens,
    named,
)

_CACHED = attrgetter("cached_tokens")


class MatchedTokens(Mapping[str, float]):
    """What each instance of a fleet holds, as scores; who holds nothing is left out. Few ask for them."""

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
    if most - least <= options.balance_abs_threshold:  # then nobody is ahead
        best, reason = _holders(prompt, fleet, held, options)
        return _least_loaded(best or fleet, reason, fleet, matches)
    level = tuple([instance for instance in fleet if not is_ahead(instance, least, options)])
    best, reason = _holders(prompt, level, holders_among(level, matches), options)
    if len(level) < len(fleet):
        wanted, _ = _holders(prompt, fleet, held, options)
        if wanted and not set(wanted) & set(level):
            reason = Reason.REBALANCED
    return _least_loaded(best or level, reason, fleet, matches)


def _holders(
    prompt: Prompt, candidates: Fleet, held: list[tuple[Instance, Match]], options: PolicyOptions
) -> tuple[list[Instance], Reason]:
    """Rules 2 and 3: who of the candidates holds a prefix that decides; nobody, if none does.

    Args:
        held: those that hold anything, and what.
    """
    # Many may hold the same part of a prompt, and then have one and the same match.
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
        emptiest = min(map(_CACHED, candidates))
        slack = options.balance_cache_factor * longest
        best = [instance for instance in best if instance.cached_tokens - emptiest <= slack]
        if not best:
            return [], Reason.SPREAD
    return best, Reason.PREFIX if len(best) == 1 else Reason.PREFIX_SHARED


def is_ahead(instance: Instance, least: int, options: PolicyOptions) -> bool:
    """Whether ``instance`` carries so much more than the least loaded that its cache must not attract."""
    return (
        instance.in_flight - least > options.balance_abs_threshold
        and instance.in_flight > options.balance_rel_threshold * least
    )


def _least_loaded(candidates: Sequence[Instance], reason: Reason, fleet: Fleet, matches: Matches) -> Decision:
    chosen = candidates[0] if len(candidates) == 1 else least_loaded(fleet, candidates)
    held = matched_tokens(matches, chosen.name)
    return Decision(chosen.name, reason, held, MatchedTokens(fleet, matches))

"""Prompt tree: the instance that holds the longest prefix, unless it is too busy (MemServe, section 6).

The rule, in order:

1. An instance is *ahead* when it has more than ``balance_abs_threshold`` requests in flight more than the
   least loaded one, and more than ``balance_rel_threshold`` times as many. Both, because 2 against 1 is
   twice as many and means nothing, and 108 against 100 is 8 more and means nothing.
2. Among the instances that are not ahead, find the longest cached prefix. It decides when it is at least
   ``cache_threshold`` of the prompt: a system prompt that everything starts with is no reason to send
   everything to whoever saw it first.
3. Whoever holds as much to within ``tie_tokens`` (a block) is as good; the least loaded of them is taken.
4. Otherwise the least loaded instance is taken; among idle ones, the one that caches least, so that new
   conversations spread over the fleet's memory.

A popular prefix therefore does not pull everything to one instance: while one instance holds it, that
instance runs ahead, the next request goes elsewhere, and the prefix is then held there too; once
everybody holds it, rule 3 spreads by load.
"""

from __future__ import annotations

from router.policies.base import Decision, Fleet, Instance, Matches, PolicyOptions, Prompt, Reason, load_of


def prompt_tree(prompt: Prompt, fleet: Fleet, matches: Matches, options: PolicyOptions) -> Decision:
    """Choose by the rule in the module's docstring; scores are matched tokens."""
    scores = {instance.name: float(matches.get(instance.name, 0)) for instance in fleet}
    longest_anywhere = max(scores.values())
    if longest_anywhere <= 0:
        return _least_loaded(fleet, Reason.NO_PREFIX, scores)

    least = min(instance.in_flight for instance in fleet)
    level = tuple(instance for instance in fleet if not is_ahead(instance, least, options))
    longest = max(scores[instance.name] for instance in level)
    enough = max(1.0, options.cache_threshold * prompt.tokens)
    passed_over = longest_anywhere >= enough and longest_anywhere - longest > options.tie_tokens

    if longest < enough:
        return _least_loaded(level, Reason.REBALANCED if passed_over else Reason.SHORT_PREFIX, scores)
    best = tuple(i for i in level if longest - scores[i.name] <= options.tie_tokens)
    if passed_over:
        reason = Reason.REBALANCED
    else:
        reason = Reason.PREFIX if len(best) == 1 else Reason.PREFIX_SHARED
    return _least_loaded(best, reason, scores)


def is_ahead(instance: Instance, least: int, options: PolicyOptions) -> bool:
    """Whether ``instance`` carries so much more than the least loaded that its cache must not attract."""
    return (
        instance.in_flight - least > options.balance_abs_threshold
        and instance.in_flight > options.balance_rel_threshold * least
    )


def _least_loaded(candidates: Fleet, reason: Reason, scores: dict[str, float]) -> Decision:
    chosen = min(candidates, key=load_of)
    return Decision(chosen.name, reason, int(scores[chosen.name]), scores)

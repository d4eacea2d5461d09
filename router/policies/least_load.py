"""Least load: the instance with the fewest requests in flight."""

from __future__ import annotations

from sglang_ext.router.policies.base import (
    Costs,
    Decision,
    Fleet,
    Matches,
    PolicyOptions,
    Prompt,
    Reason,
    load_of,
    matched_tokens,
)


def least_load(
    prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions
) -> Decision:
    """Choose by requests in flight, then by prompt tokens still to be computed; prefixes do not count."""
    chosen = min(fleet, key=load_of)
    return Decision(
        chosen.name,
        Reason.LEAST_LOAD,
        matched_tokens(matches, chosen.name),
        {instance.name: -float(instance.in_flight) for instance in fleet},
    )

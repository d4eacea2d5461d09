"""Round robin: the instance that was not chosen for longest."""

from __future__ import annotations

from sglang_ext.router.policies.base import (
    Costs,
    Decision,
    Fleet,
    Matches,
    PolicyOptions,
    Prompt,
    Reason,
    matched_tokens,
)


def round_robin(
    prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions
) -> Decision:
    """Choose in turn. Instances may come and go: a new one is next, the others keep their order."""
    chosen = min(fleet, key=lambda instance: (instance.last_picked, instance.name))
    return Decision(
        chosen.name,
        Reason.ROUND_ROBIN,
        matched_tokens(matches, chosen.name),
        {instance.name: -float(instance.last_picked) for instance in fleet},
    )

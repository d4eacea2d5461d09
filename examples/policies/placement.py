"""Where a request goes: all of a tenant's traffic stays on half of the fleet, by the length of its prompts.

    sglang-ext router --policy placement:long_prompts_apart …

(with this folder on PYTHONPATH). Long prompts then never wait in front of short ones.
"""

from __future__ import annotations

from sglang_ext.router.policies import (
    Costs,
    Decision,
    Fleet,
    Matches,
    PolicyOptions,
    Prompt,
    Reason,
    first_targets,
)

LONG_TOKENS = 4096


def long_prompts_apart(
    prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions
) -> Decision:
    """Long prompts to the first half of the instances, short ones to the rest; there to the longest match."""
    instances = sorted(first_targets(fleet), key=lambda instance: instance.name)
    half = (len(instances) + 1) // 2
    some = instances[:half] if prompt.tokens >= LONG_TOKENS else instances[half:] or instances

    def tokens_of(name: str) -> int:
        return matches[name].tokens if name in matches else 0

    chosen = max(some, key=lambda instance: (tokens_of(instance.name), -instance.in_flight))
    matched = tokens_of(chosen.name)
    return Decision(chosen.name, Reason.PREFIX if matched else Reason.LEAST_LOAD, matched)

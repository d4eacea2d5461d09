"""Random: an instance drawn from the request's id, so that a retry of the decision draws the same."""

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
from sglang_ext.router.policies.hashing import rendezvous


def random_choice(
    prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions
) -> Decision:
    """Every instance with the same probability; neither load nor prefixes count."""
    chosen = rendezvous(prompt.request_id, fleet)
    return Decision(chosen.name, Reason.RANDOM, matched_tokens(matches, chosen.name))

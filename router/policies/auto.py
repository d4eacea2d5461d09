"""Auto: by cost where the costs were measured, by the prompt tree where they are guesses.

``docs/cost_model.md`` has the comparison that this default follows.
"""

from __future__ import annotations

from sglang_ext.router.policies.assembly import assembled
from sglang_ext.router.policies.base import Costs, Decision, Fleet, Matches, PolicyOptions, Prompt
from sglang_ext.router.policies.cost import cost
from sglang_ext.router.policies.prompt_tree import prompt_tree

_by_prompt_tree = assembled(prompt_tree)


def auto(prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions) -> Decision:
    """Choose as ``cost`` does if there is a profile, else as ``prompt_tree``."""
    policy = cost if costs.calibrated else _by_prompt_tree
    return policy(prompt, fleet, matches, costs, options)

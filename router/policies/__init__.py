"""How an instance is chosen: pure functions, by name."""

from router.policies.base import (
    Decision,
    Fetch,
    Fleet,
    Instance,
    Match,
    Matches,
    Policy,
    PolicyOptions,
    Prompt,
    Reason,
    Role,
)
from router.policies.least_load import least_load
from router.policies.prompt_tree import prompt_tree
from router.policies.round_robin import round_robin

POLICIES: dict[str, Policy] = {
    "prompt-tree": prompt_tree,
    "round-robin": round_robin,
    "least-load": least_load,
}

__all__ = [
    "POLICIES",
    "Decision",
    "Fetch",
    "Fleet",
    "Instance",
    "Match",
    "Matches",
    "Policy",
    "PolicyOptions",
    "Prompt",
    "Reason",
    "Role",
    "least_load",
    "prompt_tree",
    "round_robin",
]

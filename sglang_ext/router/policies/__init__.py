"""Routing policies: pure functions that choose an instance, by name or by the dotted path of a custom one."""

from __future__ import annotations

from sglang_ext.own_functions import load_function
from sglang_ext.router.policies.assembly import assembled, guarded
from sglang_ext.router.policies.base import (
    Costs,
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
from sglang_ext.router.policies.cost import auto, cost
from sglang_ext.router.policies.fleet_queries import beginners
from sglang_ext.router.policies.prompt_tree import prompt_tree
from sglang_ext.router.policies.simple import least_load, random_choice, round_robin, session

POLICIES: dict[str, Policy] = {
    "auto": auto,
    "cost": cost,
    "prompt-tree": assembled(prompt_tree),
    "session": assembled(session),
    "least-load": assembled(least_load),
    "round-robin": assembled(round_robin),
    "random": assembled(random_choice),
}

SIGNATURE = "(prompt, fleet, matches, costs, options) -> router.policies.Decision"
_FIELD = "--policy"


def policy_named(name: str) -> Policy:
    """A built-in policy by its name, or a custom one by ``package.module:function``.

    A custom policy gets the same arguments as a built-in one, with the whole fleet. Its exceptions and its
    invalid decisions are logged, and the least loaded instance is chosen instead.

    Raises:
        ConfigError: there is no such policy; names the lookup that failed and the missing part.
    """
    if name in POLICIES:
        return POLICIES[name]
    return guarded(load_function(name, POLICIES, SIGNATURE, field=_FIELD), name, POLICIES["least-load"])


__all__ = [
    "POLICIES",
    "Costs",
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
    "beginners",
    "cost",
    "least_load",
    "policy_named",
    "prompt_tree",
    "random_choice",
    "round_robin",
    "session",
]

"""Routing policies: pure functions that choose an instance, by name or by the dotted path of a custom one."""

from __future__ import annotations

from typing import NoReturn

from sglang_ext.errors import ConfigError
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
from sglang_ext.router.policies.fleet_queries import first_targets
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
RENAMED = {"beginners": "first_targets", "questions": "fleet_queries"}
"""Former names in this package that custom policies may still use -> their names now."""


def __getattr__(name: str) -> NoReturn:
    if name in RENAMED:
        raise ImportError(f"{__name__}.{name} is named {RENAMED[name]} now")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def policy_named(name: str) -> Policy:
    """A built-in policy by its name, or a custom one by ``package.module:function``.

    A custom policy gets the same arguments as a built-in one, with the whole fleet. Its exceptions and its
    invalid decisions are logged, and the least loaded instance is chosen instead.

    Raises:
        ConfigError: there is no such policy; names the lookup that failed and the missing part.
    """
    if name in POLICIES:
        return POLICIES[name]
    try:
        function = load_function(name, POLICIES, SIGNATURE, field=_FIELD)
    except ConfigError as error:
        missing = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
        package, _, module = (missing or "").rpartition(".")
        if package == __name__ and module in RENAMED:
            raise ConfigError(
                f"cannot import {name.partition(':')[0]!r}: {missing} is named {RENAMED[module]} now",
                field=_FIELD,
                hint=f"Import {package}.{RENAMED[module]}",
            ) from error
        raise
    return guarded(function, name, POLICIES["least-load"])


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
    "cost",
    "first_targets",
    "least_load",
    "policy_named",
    "prompt_tree",
    "random_choice",
    "round_robin",
    "session",
]

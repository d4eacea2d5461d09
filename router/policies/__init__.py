"""How an instance is chosen: pure functions, by name or by the dotted path of one's own."""

from __future__ import annotations

import importlib
import inspect

from sglang_ext.errors import ConfigError
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
    beginners,
)
from sglang_ext.router.policies.cost import auto, cost
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
    """A policy by its name, or one's own by ``package.module:function``.

    One's own is called as every other, with the whole fleet. What it raises, and decisions that cannot be
    followed, are logged, and the least loaded instance is taken instead.

    Raises:
        ConfigError: there is no such policy; says what was looked for and what is missing.
    """
    if name in POLICIES:
        return POLICIES[name]
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(
            f"unknown policy {name!r}",
            field=_FIELD,
            hint=f"Choose one of {', '.join(POLICIES)}, or name a function as package.module:function",
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs somebody else's code
        raise ConfigError(
            f"cannot import {module_name!r}: {type(error).__name__}: {error}",
            field=_FIELD,
            hint="Put its folder on PYTHONPATH, or install its package",
        ) from error
    try:
        function = getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError(
            f"{module_name} has no {attribute!r}",
            field=_FIELD,
            hint=f"Define there: def {attribute}{SIGNATURE}",
        ) from error
    _check_callable(function, name)
    return guarded(function, name, POLICIES["least-load"])


def _check_callable(function: object, name: str) -> None:
    if not callable(function) or inspect.isclass(function) or inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{name} is no plain function", field=_FIELD, hint=f"A policy is a function {SIGNATURE}"
        )
    try:
        inspect.signature(function).bind(None, None, None, None, None)
    except TypeError as error:
        raise ConfigError(
            f"{name} cannot be called with five arguments: {error}",
            field=_FIELD,
            hint=f"A policy is a function {SIGNATURE}",
        ) from error
    except ValueError:
        return  # a built-in without a signature; a wrong call is caught when it is made


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

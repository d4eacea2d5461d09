"""Functions of one's own in place of built-in policies, by ``package.module:function``.

The name and the signature are checked where the function is loaded, at start; each caller guards against the
function's later failures.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import math
from collections.abc import Callable, Collection
from typing import Any, TypeGuard, TypeVar

from sglang_ext.errors import ConfigError
from sglang_ext.flags import Parser

logger = logging.getLogger(__name__)

Thing = TypeVar("Thing")
SortKey = tuple[float, ...]
"""Numbers by which things are ordered; the smallest comes first."""


def load_function(name: str, known: Collection[str], signature: str, *, field: str) -> Callable[..., Any]:
    """One's own function by ``package.module:function``.

    Args:
        known: the built-in names, for the message.
        signature: its arguments and result, as ``(node) -> numbers``.
        field: the flag.

    Raises:
        ConfigError: there is no such function; names the searched and the missing part.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(
            f"unknown policy {name!r}",
            field=field,
            hint=f"Choose one of {', '.join(known)}, or name a function as package.module:function",
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code
        raise ConfigError(
            f"cannot import {module_name!r}: {type(error).__name__}: {error}",
            field=field,
            hint="Put its folder on PYTHONPATH, or install its package",
        ) from error
    try:
        function = getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError(
            f"{module_name} has no {attribute!r}",
            field=field,
            hint=f"Define there: def {attribute}{signature}",
        ) from error
    if not callable(function) or inspect.isclass(function) or inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{name} is no plain function", field=field, hint=f"A policy is a function {signature}"
        )
    arguments = signature[1 : signature.index(")")].split(",")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{name} cannot be called with {len(arguments)} argument{'s'[: len(arguments) > 1]}: {error}",
            field=field,
            hint=f"A policy is a function {signature}",
        ) from error
    except ValueError:
        pass  # a built-in without a signature; a wrong call is caught when it is made
    return function  # type: ignore[no-any-return]


def policy_name(known: Collection[str]) -> Parser:
    """A flag's value: one of these names, or a dotted path, which is loaded where it is used."""

    def parse(text: str) -> str:
        if text not in known and not all(text.partition(":")):
            raise ValueError(f"{text!r} is not one of {', '.join(known)}, nor a package.module:function")
        return text

    return Parser(parse, "NAME")


def order_named(
    name: str, known: dict[str, Callable[[Thing], SortKey]], signature: str, *, field: str
) -> Callable[[Thing], SortKey]:
    """A function from things to their sort key: a built-in order or one's own.

    Where one's own fails or returns something else than a tuple of numbers, the first built-in order is used
    for that thing, and the log says so once.

    Raises:
        ConfigError: as ``load_function``.
    """
    if name in known:
        return known[name]
    function = load_function(name, known, signature, field=field)
    instead_name, instead = next(iter(known.items()))
    is_logged = False

    def safe(thing: Thing) -> SortKey:
        nonlocal is_logged
        error: Exception | None = None
        try:
            key = function(thing)
            if _is_sort_key(key):
                return key
        except Exception as raised:  # noqa: BLE001  (the user's code; logged below)
            error = raised
        if not is_logged:
            is_logged = True
            what = "failed" if error else "did not return a tuple of numbers"
            logger.error("%s %s %s; %s is used instead", field, name, what, instead_name, exc_info=error)
        return instead(thing)

    return safe


def _is_sort_key(key: object) -> TypeGuard[SortKey]:
    return type(key) is tuple and all(isinstance(one, int | float) and not math.isnan(one) for one in key)

"""What a patch is: a named change to SGLang, with the functions it relies on and how they must look.

SGLang's plugin hooks fasten to a name and nothing else: after an upgrade the name may still be there and
mean something different. A patch therefore declares the source of every function that it replaces or
relies on, and is not applied when that source has changed.
"""

from __future__ import annotations

import enum
import hashlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_ext.patches.version import SGLANG_VERSION, installed_sglang_version

HASH_CHARS = 12


class Scope(enum.Enum):
    """Where a patch belongs.

    ``PROCESS`` is applied before SGLang is first imported and only by the CPU runtime; ``CPU`` is applied in
    the server's and the scheduler's process by the CPU runtime; ``SERVER`` is applied with the
    global cache backend, on any device.
    """

    PROCESS = "process"
    CPU = "cpu"
    SERVER = "server"


class TargetState(enum.Enum):
    """How a target compares with what its patch declares."""

    OK = "ok"
    MISSING = "missing"
    SIGNATURE = "signature differs"
    SOURCE = "source differs"


class PatchMismatchError(RuntimeError):
    """A patch does not fit the installed SGLang. The message says what the user can do."""


@dataclass(frozen=True)
class Target:
    """A function of SGLang that a patch replaces or relies on.

    ``path`` is its dotted name, ``signature`` its parameters with defaults and without annotations (see
    :func:`signature_of`), ``source`` the first ``HASH_CHARS`` hex digits of the SHA-256 of its source.
    """

    path: str
    signature: str
    source: str


@dataclass(frozen=True)
class TargetReport:
    """One target, compared; ``detail`` holds what was found where it differs."""

    target: Target
    state: TargetState
    detail: str = ""


@dataclass(frozen=True)
class Patch:
    """One change to SGLang.

    ``summary`` is one line for ``python -m sglang_ext.patches``; the module's docstring says the rest.
    ``apply`` makes the change in this process and must be safe to call twice. ``applied`` tells whether the
    change is in place.
    """

    name: str
    summary: str
    scope: Scope
    targets: tuple[Target, ...]
    apply: Callable[[], None]
    applied: Callable[[], bool]


def plain_function(obj: Any) -> Any:
    """The Python function below decorators that keep ``__wrapped__`` or ``fn`` (hooks, triton.jit)."""
    while True:
        if inspect.ismethod(obj):
            obj = obj.__func__
        elif hasattr(obj, "__wrapped__"):
            obj = obj.__wrapped__
        elif (
            not inspect.isfunction(obj)
            and not inspect.isclass(obj)
            and inspect.isfunction(getattr(obj, "fn", None))
        ):
            obj = obj.fn
        else:
            return obj


def put_in_place(owner: Any, name: str, function: Callable[..., Any], patch: str) -> None:
    """Give a module or class a function of ours under SGLang's name, for `is_in_place` to know."""
    function.sglang_ext_patch = patch  # type: ignore[attr-defined]
    setattr(owner, name, function)


def is_in_place(owner: Any, name: str, patch: str) -> bool:
    """Whether a function is the one that this patch put there."""
    return getattr(getattr(owner, name), "sglang_ext_patch", None) == patch


def resolve(path: str) -> Any:
    """The object at a dotted path, importing what is needed.

    Raises:
        ImportError, AttributeError: when there is no such object.
    """
    return pkgutil.resolve_name(path)


def signature_of(function: Callable[..., Any]) -> str:
    """The parameters of a function with their defaults, without annotations: ``(self, n, flag=None)``."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def describe(path: str) -> Target:
    """``path`` as it looks in the installed SGLang."""
    function = plain_function(resolve(path))
    source = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:HASH_CHARS]
    return Target(path, signature_of(function), source)


def check_target(target: Target) -> TargetReport:
    """Compare one target with the installed SGLang."""
    try:
        found = describe(target.path)
    except (ImportError, AttributeError, OSError, TypeError) as error:
        return TargetReport(target, TargetState.MISSING, f"{type(error).__name__}: {error}")
    if found.signature != target.signature:
        return TargetReport(target, TargetState.SIGNATURE, found.signature)
    if found.source != target.source:
        return TargetReport(target, TargetState.SOURCE, found.source)
    return TargetReport(target, TargetState.OK)


def check_patch(patch: Patch) -> list[TargetReport]:
    """Compare every target of a patch with the installed SGLang, in the order declared."""
    return [check_target(target) for target in patch.targets]


def mismatch_message(patch: Patch, report: TargetReport) -> str:
    """The message for a target that is not as declared: patch, target, version, way out."""
    found = f" (found {report.detail})" if report.detail else ""
    return (
        f"patch {patch.name!r} does not fit sglang {installed_sglang_version()}: "
        f"{report.target.path}: {report.state.value}{found}. "
        f"It was written for sglang {SGLANG_VERSION}; install that version "
        f"(pip install sglang=={SGLANG_VERSION}), or review the patch against the new source "
        f"and renew its hashes (python -m sglang_ext.patches --hashes {patch.name})."
    )

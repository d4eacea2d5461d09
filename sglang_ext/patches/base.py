"""A patch: a named change to SGLang, with the functions it relies on and how they must look.

SGLang's plugin hooks fasten to a name and nothing else: after an upgrade the name may still be there and
mean something different. A patch therefore names every function that it replaces or relies on; ``hashes/``
has their source in each version of SGLang, and a patch is not applied when that source has changed.
"""

from __future__ import annotations

import enum
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_ext.patches.contract.source import Found, Source
from sglang_ext.patches.versions import Declared, installed_sglang_version, tested_versions


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
    """How a target compares with its declaration for the version."""

    OK = "ok"
    MISSING = "missing"
    UNKNOWN = "not declared"
    SIGNATURE = "signature differs"
    SOURCE = "source differs"


class PatchMismatchError(RuntimeError):
    """A patch does not fit the installed SGLang. The message says what the user can do."""


@dataclass(frozen=True)
class TargetReport:
    """One target, by dotted name, compared; ``detail`` describes the difference, if any."""

    path: str
    state: TargetState
    detail: str = ""


@dataclass(frozen=True)
class Patch:
    """One change to SGLang.

    ``summary`` is one line for ``python -m sglang_ext.patches``; the module's docstring says the rest.
    ``targets`` are the dotted names of the functions that it replaces or relies on.
    ``apply`` makes the change in this process and must be safe to call twice. ``applied`` tells whether the
    change is in place.
    """

    name: str
    summary: str
    scope: Scope
    targets: tuple[str, ...]
    apply: Callable[[], None]
    applied: Callable[[], bool]


def put_in_place(owner: Any, name: str, function: Callable[..., Any], patch: str) -> None:
    """Give a module or class a function of ours under SGLang's name, for `is_in_place` to know."""
    function.sglang_ext_patch = patch  # type: ignore[attr-defined]
    setattr(owner, name, function)


def is_in_place(owner: Any, name: str, patch: str) -> bool:
    """Whether this patch has installed the function."""
    return getattr(getattr(owner, name), "sglang_ext_patch", None) == patch


def resolve(path: str) -> Any:
    """The object at a dotted path, importing modules as needed.

    Raises:
        ImportError, AttributeError: when there is no such object.
    """
    return pkgutil.resolve_name(path)


def check_target(path: str, declared: Mapping[str, Declared], source: Source) -> TargetReport:
    """Compare one target with SGLang's source."""
    found = source.find(path)
    if not isinstance(found, Found):
        return TargetReport(path, TargetState.MISSING)
    expected = declared.get(path)
    if expected is None:
        return TargetReport(path, TargetState.UNKNOWN)
    if found.signature != expected.signature:
        return TargetReport(path, TargetState.SIGNATURE, found.signature)
    if found.source != expected.source:
        return TargetReport(path, TargetState.SOURCE, found.source)
    return TargetReport(path, TargetState.OK)


def mismatch_message(patch: Patch, report: TargetReport) -> str:
    """The message for a target that is not as declared: patch, target, version, way out."""
    found = f" (found {report.detail})" if report.detail else ""
    installed = installed_sglang_version()
    return (
        f"patch {patch.name!r} does not fit sglang {installed}: {report.path}: {report.state.value}{found}. "
        f"Install it anew (pip install --force-reinstall --no-deps sglang=={installed}), or a version that "
        f"is tested ({tested_versions()}); `python -m sglang_ext.patches --check` names all that differs."
    )

"""Whether everything that the plugin changes in this process is in place.

SGLang swallows exceptions of a plugin, so problems are kept here until the plugin is needed: by the launcher,
the command line that chooses our cache, or the factory that builds it in each scheduler process.
"""

from __future__ import annotations

from sglang_ext.patches.base import Patch
from sglang_ext.patches.process import PROCESS


class NotReadyError(RuntimeError):
    """The plugin is not in place in this process; the message names every hook and patch that is not."""


def expect(patch: Patch) -> None:
    """Have :func:`require` prove that this patch is in place."""
    if patch not in PROCESS.expected:
        PROCESS.expected.append(patch)


def report(problem: str) -> None:
    """Keep a problem for :func:`require`."""
    PROCESS.problems.append(problem)


def reported() -> tuple[str, ...]:
    """The problems kept so far."""
    return tuple(PROCESS.problems)


def problems() -> list[str]:
    """Everything that is not in place, as sentences."""
    missing = [
        f"{patch.name!r} did not take in this process, although SGLang was given it; targets: "
        f"{', '.join(patch.targets)}. Another plugin may have replaced it; "
        f"set SGLANG_PLUGINS=sglang_ext to start without other plugins"
        for patch in PROCESS.expected
        if not patch.applied()
    ]
    return [*PROCESS.problems, *missing]


def require() -> None:
    """Refuse to go on unless everything is in place. SGLang must have applied its hooks before.

    Raises:
        NotReadyError: naming each missing hook and patch.
    """
    found = problems()
    if found:
        raise NotReadyError("sglang_ext is not ready: " + "; ".join(found))

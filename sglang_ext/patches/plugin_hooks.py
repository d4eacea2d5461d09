"""Patches made of SGLang's own plugin hooks, with proof that each one took.

SGLang applies the hooks of all plugins at once, after every plugin has been loaded, and logs and swallows
what fails. A hook is therefore registered first and proved later: its function must be found in the chain of
wrappers that now stands at the target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import ismethod
from typing import Any

from sglang_ext.patches.base import Patch, Scope, resolve


@dataclass(frozen=True)
class Hook:
    """A function of ours at a function of SGLang's.

    ``target`` is its dotted name, ``kind`` one of SGLang's ``HookType`` values: ``before`` takes the target's
    arguments, ``after`` its result and arguments, ``around`` itself and its arguments.
    """

    target: str
    kind: str
    function: Callable[..., Any]

    def register(self) -> None:
        """Hand the hook to SGLang; it takes effect when SGLang applies all hooks."""
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(self.target, self.function, HookType(self.kind))

    def took(self) -> bool:
        """Whether the target calls our function now."""
        try:
            wrapper = resolve(self.target)
        except (ImportError, AttributeError):
            return False
        wrapper = wrapper.__func__ if ismethod(wrapper) else wrapper
        while wrapper is not None:
            cells = getattr(wrapper, "__closure__", None) or ()
            if any(cell.cell_contents is self.function for cell in cells):
                return True
            wrapper = getattr(wrapper, "__wrapped__", None)
        return False


def hook_patch(name: str, summary: str, *hooks: Hook) -> Patch:
    """A patch of scope ``SERVER`` that consists of hooks."""

    def apply() -> None:
        for hook in hooks:
            hook.register()

    def applied() -> bool:
        return all(hook.took() for hook in hooks)

    return Patch(name, summary, Scope.SERVER, tuple(hook.target for hook in hooks), apply, applied)

"""The plugin that SGLang loads from the entry-point group ``sglang.srt.plugins``."""

from __future__ import annotations

import argparse
import os

from sglang_ext.patches import runtime


def _add_cli_args(_result: object, parser: argparse.ArgumentParser) -> None:
    if runtime.active(os.environ):
        parser.set_defaults(**runtime.FLAG_DEFAULTS)


def register() -> None:
    """Called by SGLang in the server's process and in every scheduler process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_ext.patches.base import Scope
    from sglang_ext.patches.registry import apply_all, check_all, select

    HookRegistry.register("sglang.srt.server_args.ServerArgs.add_cli_args", _add_cli_args, HookType.AFTER)
    if runtime.active(os.environ):
        check_all(select(Scope.PROCESS, Scope.CPU))
        apply_all(select(Scope.PROCESS, Scope.CPU))


def require_ready() -> None:
    """Refuse to start when a hook or patch did not take."""

"""Registers the plugin with SGLang, in the server's process and in every scheduler process.

It registers the cache backend ``global`` and the hooks of :mod:`sglang_ext.patches`. SGLang logs and swallows
exceptions of a plugin or a hook and starts without it; so the check that everything is in place comes later,
in the code that needs it: the launcher, the hook that reads the command line, and the factory, which SGLang
calls in every scheduler process in which the backend is chosen. Without ``--radix-cache-backend global`` and
without our launcher nothing changes but the flags in ``--help``.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from sglang_ext.patches import readiness
from sglang_ext.patches.adapter.admission import BACKEND
from sglang_ext.patches.base import Patch, PatchMismatchError, Scope
from sglang_ext.patches.cpu import runtime
from sglang_ext.patches.hooks import flags
from sglang_ext.patches.process import PROCESS
from sglang_ext.patches.registry import apply_all, check_all, require_applied, require_version, select

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the backend and the hooks. SGLang applies the hooks of all plugins after this.

    Raises:
        SystemExit: on a CPU, when a patch of the CPU runtime or the version of SGLang does not fit; no server
            could run.
    """
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    # First, so that choosing the backend always comes to the factory, which reports what failed below.
    register_radix_cache_backend(BACKEND, create_cache)
    on_cpu = runtime.active(os.environ)
    try:
        require_version(os.environ)
    except PatchMismatchError as error:
        if on_cpu:
            raise SystemExit(f"sglang_ext: {error}") from error
        readiness.report(str(error))
        logger.warning("sglang_ext is off: %s", error)
        return
    if on_cpu:
        _apply_cpu_runtime()
        PROCESS.checks_vocabulary = True
    for patch in select(Scope.SERVER):
        _register_hooks(patch)


def _apply_cpu_runtime() -> None:
    patches = select(Scope.PROCESS, Scope.CPU)
    try:
        check_all(patches)
        apply_all(patches)
        require_applied(patches)
    except PatchMismatchError as error:
        raise SystemExit(f"sglang_ext: {error}") from error


def _register_hooks(patch: Patch) -> None:
    try:
        check_all([patch])
        patch.apply()
    except Exception as error:  # noqa: BLE001 (whatever it is, SGLang would swallow it; require() reports it)
        readiness.report(f"{patch.name!r}: {error}")
        logger.warning("sglang_ext: %r is off: %s", patch.name, error)
    else:
        readiness.expect(patch)


def create_cache(ctx: Any) -> Any:
    """Build the cache for ``--radix-cache-backend global``; SGLang's factory interface.

    Raises:
        NotReadyError: when a hook did not take in this process.
        ConfigError: when a flag's value cannot work or the server cannot be served.
    """
    readiness.require()
    config = flags.carried_config(ctx.server_args, os.environ)
    PROCESS.checks_vocabulary = True

    from sglang_ext.patches.adapter.build import create_global_radix_cache

    cache = create_global_radix_cache(ctx, config)
    PROCESS.cache, PROCESS.commands = cache, cache.command_queue
    return cache

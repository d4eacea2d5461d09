"""The entry point that SGLang loads, in the server's process and in every scheduler process.

Imports nothing of ours before it is called, so that it always loads. SGLang logs exceptions of a plugin and
goes on: the output then ends with "unrecognized arguments: --kv-router", far below the reason. The reason is
therefore printed once more when the process ends, as its last line.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys


def register() -> None:
    """Register the backend ``global`` and the hooks, by :mod:`sglang_ext.patches.registration`.

    Raises:
        Exception: whatever kept the package from being imported or registered; SGLang logs it.
        SystemExit: on a CPU, where no server could run.
    """
    try:
        from sglang_ext.patches import readiness, registration

        registration.register()
    except Exception as error:
        reason = f"could not be loaded: {type(error).__name__}: {error}"
        atexit.register(explain, os.getpid(), reason)
        with contextlib.suppress(Exception):
            from sglang_ext.patches import readiness

            readiness.report(reason)
        raise
    if found := readiness.reported():
        atexit.register(explain, os.getpid(), f"is not ready: {'; '.join(found)}")


def explain(pid: int, reason: str) -> None:
    """Print why the plugin is off, in the process that failed to load it only, not in its forked children."""
    if os.getpid() == pid:
        sys.stderr.write(f"sglang_ext {' '.join(reason.split())}\n")

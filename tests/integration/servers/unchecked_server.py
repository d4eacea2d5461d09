"""SGLang's server as ``sglang_ext.launch_server`` starts it, whose scheduler checks no prompt to embed.

As stock schedulers do not. Its folder (`hooked_server`) is not used.
"""

from __future__ import annotations

from pathlib import Path

from hooked_server import serve


def leave_unchecked(_folder: Path) -> None:
    """Have the scheduler of this process check no prompt."""
    from sglang_ext.patches.hooks import request_values

    request_values.check_pooled = lambda message, scheduler: None


if __name__ == "__main__":
    serve(leave_unchecked)

"""SGLang's server as ``sglang_ext.launch_server`` starts it, whose reads from peers can be held up.

While there is a file ``hold`` in the folder of ``GATE``, each read waits after it was offered its blocks, and
a file ``held`` says how many do. They go on when ``hold`` is gone. Elsewhere that moment is too short to hit.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from pathlib import Path
from typing import Any

from sglang_ext import launch_server

GATE = "SGLANG_TEST_FETCH_GATE"


def hold_reads(folder: Path) -> None:
    """Look for the file before each read of this process's scheduler."""
    from sglang_ext.engine.fetch_link import FetchLink

    reading = FetchLink._reading
    waiting = 0

    async def held(self: FetchLink, *arguments: Any) -> int:
        nonlocal waiting
        if (folder / "hold").exists():
            waiting += 1
            (folder / "held").write_text(str(waiting))
            try:
                while (folder / "hold").exists():  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            finally:
                waiting -= 1
                (folder / "held").unlink(missing_ok=True)
        return await reading(self, *arguments)

    FetchLink._reading = held  # type: ignore[method-assign]


if __name__ == "__mp_main__" and GATE in os.environ:  # in the scheduler's process, spawned
    hold_reads(Path(os.environ[GATE]))

if __name__ == "__main__":
    if GATE in os.environ:  # or forked
        os.register_at_fork(after_in_child=functools.partial(hold_reads, Path(os.environ[GATE])))
    launch_server.main(sys.argv[1:])

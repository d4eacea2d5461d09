"""SGLang's server as ``sglang_ext.launch_server`` starts it, whose reads from peers can be held up.

While there is a file ``hold`` in its folder (`hooked_server`), each read waits after it was offered its
blocks, and a file ``held`` has the number of waiting reads. They go on when ``hold`` is gone. Reads by layer
wait at the layer that ``hold`` names, or at the first. A file ``dead`` appears when the server has taken the
holder of a waiting read for dead. Elsewhere that moment is too short to hit. With a file ``slow`` each pass
of the scheduler takes longer, so that a request keeps the server busy and uses little CPU time.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from hooked_server import serve

SLOW_PASS_SECONDS = 0.03


def hold_reads(folder: Path) -> None:
    """Look for the files before each read and each pass of this process's scheduler."""
    from sglang_ext.engine.peers.fetch_link import FetchLink
    from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache

    reading = FetchLink._read
    waiting = 0

    def holds(layers: Any) -> bool:
        gate = folder / "hold"
        return gate.exists() and (layers is None or layers == [int(gate.read_text() or 0)])

    async def held(self: FetchLink, job: Any, *arguments: Any) -> None:
        nonlocal waiting
        if holds(arguments[4]):
            waiting += 1
            (folder / "held").write_text(str(waiting))
            try:
                while (folder / "hold").exists():
                    if job.instance.gone:
                        (folder / "dead").touch()
                    await asyncio.sleep(0.005)
            finally:
                waiting -= 1
                (folder / "held").unlink(missing_ok=True)
        await reading(self, job, *arguments)

    events = GlobalRadixCache.check_hicache_events

    def each_pass(self: GlobalRadixCache) -> None:
        if (folder / "slow").exists():
            time.sleep(SLOW_PASS_SECONDS)
        events(self)

    FetchLink._read = held  # type: ignore[method-assign]
    GlobalRadixCache.check_hicache_events = each_pass  # type: ignore[method-assign]


if __name__ == "__main__":
    serve(hold_reads)

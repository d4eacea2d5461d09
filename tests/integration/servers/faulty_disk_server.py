"""SGLang's server as ``sglang_ext.launch_server`` starts it, with a disk that is slow and, on command,
faulty.

Files in its folder (`hooked_server`) switch faults on:

- ``damage``: the upper half of every read does not verify in the last layer;
- ``blind``: the cache does not check whether streamed layers were good;
- ``slow-writes``: has the seconds that each group of writes takes longer;
- ``hold-writes``: they wait until it is gone;
- ``full``: nothing is written;
- ``hold-copies``: copies from DRAM to HBM wait until it is gone; the file ``copying`` shows that one does;
- ``blocking``: a decode server's scheduler waits for such copies.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from hooked_server import serve
from huge_values import make_last_huge

SECONDS_PER_LAYER = 0.15


def make_faulty(folder: Path) -> None:
    """Disturb the disk tier of this process."""
    from sglang_ext.engine.pd.disk_loads import LocalAhead
    from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache
    from sglang_ext.tiered_store.copy import PoolCopier
    from sglang_ext.tiered_store.disk.tier import DiskTier
    from sglang_ext.tiered_store.tier import LayerRead, Outcome

    read_layer, look = DiskTier.get_layer, GlobalRadixCache.streams_hold

    def get_layer(self: DiskTier, get: Any, layer: int, memory: Any, ids: Any) -> LayerRead:
        time.sleep(SECONDS_PER_LAYER * layer)
        read = read_layer(self, get, layer, memory, ids)
        if layer == self.layout.n_layers - 1 and (folder / "damage").exists():
            good = len(ids) // 2
            for rows in memory.rows(layer, ids)[good:]:
                make_last_huge(rows.view(np.float32))
            get.blocks = min(get.blocks, good)
            return LayerRead(get.blocks, Outcome.DAMAGED)
        return read

    def streams_hold(self: GlobalRadixCache) -> bool:
        return look(self) or (folder / "blind").exists()

    prepare, complete = DiskTier.prepare_put, DiskTier.complete_puts

    def prepare_put(self: DiskTier, namespace: bytes, keys: Any) -> Any:
        return Outcome.FULL if (folder / "full").exists() else prepare(self, namespace, keys)

    def complete_puts(self: DiskTier, puts: Any) -> list[Outcome]:
        slow = folder / "slow-writes"
        if slow.exists():
            time.sleep(float(slow.read_text()))
        while (folder / "hold-writes").exists():
            time.sleep(0.01)
        return complete(self, puts)

    scatter, ahead = PoolCopier.scatter, LocalAhead.each_pass

    def held_scatter(self: PoolCopier, plan: Any, layer: int, stop: int | None = None) -> int:
        while (folder / "hold-copies").exists():
            (folder / "copying").touch()
            time.sleep(0.01)
        return scatter(self, plan, layer, stop)

    def each_pass(self: LocalAhead, queue: Any) -> None:
        ahead(self, queue)
        if (folder / "blocking").exists():
            self._cache.settle()

    PoolCopier.scatter = held_scatter  # type: ignore[method-assign]
    LocalAhead.each_pass = each_pass  # type: ignore[method-assign]
    DiskTier.get_layer = get_layer  # type: ignore[method-assign]
    DiskTier.prepare_put = prepare_put  # type: ignore[method-assign]
    DiskTier.complete_puts = complete_puts  # type: ignore[method-assign]
    GlobalRadixCache.streams_hold = streams_hold  # type: ignore[method-assign]


if __name__ == "__main__":
    serve(make_faulty)

"""SGLang's server as ``sglang_ext.launch_server`` starts it, with a disk that is slow and, when told, faulty.

Its folder (`hooked_server`) says what is wrong now: with a file ``damage`` in it, the upper half of every
read does not verify in the last layer; with a file ``blind``, the cache does not look whether what streamed
held. A file ``slow-writes`` has the seconds that each group of writes takes longer, and with a file ``full``
nothing is written.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hooked_server import serve

SECONDS_PER_LAYER = 0.15


def make_faulty(folder: Path) -> None:
    """Disturb the disk tier of this process."""
    from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache
    from sglang_ext.tiered_store.disk.tier import DiskTier
    from sglang_ext.tiered_store.tier import LayerRead, Outcome

    read_layer, look = DiskTier.get_layer, GlobalRadixCache.streams_hold

    def get_layer(self: DiskTier, get: Any, layer: int, memory: Any, ids: Any) -> LayerRead:
        time.sleep(SECONDS_PER_LAYER * layer)
        read = read_layer(self, get, layer, memory, ids)
        if layer == self.layout.n_layers - 1 and (folder / "damage").exists():
            good = len(ids) // 2
            for rows in memory.rows(layer, ids)[good:]:
                rows[-1] ^= 0x40
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
        return complete(self, puts)

    DiskTier.get_layer = get_layer  # type: ignore[method-assign]
    DiskTier.prepare_put = prepare_put  # type: ignore[method-assign]
    DiskTier.complete_puts = complete_puts  # type: ignore[method-assign]
    GlobalRadixCache.streams_hold = streams_hold  # type: ignore[method-assign]


if __name__ == "__main__":
    serve(make_faulty)

"""SGLang's server as ``sglang_ext.launch_server`` starts it, whose retracted requests can be disturbed.

Files in its folder (`hooked_server`) disturb them:

- ``slow``: has the seconds that each pass of the scheduler takes longer;
- ``patient``: has the seconds that a request may be expected to wait, in place of ``--kv-retract-wait``;
- ``damage``: one bit of a retracted request's KV is wrong from then on.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hooked_server import serve
from huge_values import make_last_huge


def disturb(folder: Path) -> None:
    """Look for files in this process's scheduler."""
    from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache
    from sglang_ext.patches.adapter.retracting import Retracting

    events, let_go = GlobalRadixCache.check_hicache_events, Retracting._let_go
    usual: list[float] = []

    def check_hicache_events(self: GlobalRadixCache) -> None:
        slow = folder / "slow"
        if slow.exists():
            time.sleep(float(slow.read_text()))
        if self.retracting is not None:
            usual.append(self.retracting.retraction.wait_s)
            patient = folder / "patient"
            self.retracting.retraction.wait_s = float(patient.read_text()) if patient.exists() else usual[0]
            del usual[1:]
        events(self)

    def damage_and_let_go(self: Retracting, req: Any) -> None:
        if (folder / "damage").exists():
            cache: Any = self._cache
            had = len(req.origin_input_ids) + len(req.output_ids) - 1
            last = had // cache.block_size * cache.block_size - 1
            slot = int(cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx, last])
            values = cache.token_to_kv_pool_allocator.get_kvcache().v_buffer[-1][slot]
            make_last_huge(values.view(-1).numpy())
        let_go(self, req)

    GlobalRadixCache.check_hicache_events = check_hicache_events  # type: ignore[method-assign]
    Retracting._let_go = damage_and_let_go  # type: ignore[method-assign]


if __name__ == "__main__":
    serve(disturb)

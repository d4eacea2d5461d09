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


def disturb(folder: Path) -> None:
    """Look for files in this process's scheduler."""
    import torch

    from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache

    events, keep = GlobalRadixCache.check_hicache_events, GlobalRadixCache.keep_running_req
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

    def keep_running_req(self: GlobalRadixCache, req: Any, *, up_to: int) -> None:
        if (folder / "damage").exists():
            last = up_to // self.block_size * self.block_size - 1
            slot = int(self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, last])
            values = self.token_to_kv_pool_allocator.get_kvcache().v_buffer[-1][slot]
            # The highest bit of the exponent of a float32.
            values.view(-1)[-1:].view(torch.uint8)[3] ^= 0x40
        keep(self, req, up_to=up_to)

    GlobalRadixCache.check_hicache_events = check_hicache_events  # type: ignore[method-assign]
    GlobalRadixCache.keep_running_req = keep_running_req  # type: ignore[method-assign]


if __name__ == "__main__":
    serve(disturb)

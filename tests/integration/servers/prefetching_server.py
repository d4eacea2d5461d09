"""SGLang's server as ``sglang_ext.launch_server`` starts it, which brings prompts to HBM on command of a
file.

A file ``NAME.ask`` in its folder (`hooked_server`) holds token ids as JSON. Its result is in ``NAME.told``
when it has ended: how, and how many tokens are in HBM. In a cluster, an agent asks in this place: the
scheduler's pass.
"""

from __future__ import annotations

import json
from pathlib import Path

from hooked_server import serve


def listen(folder: Path) -> None:
    """Look for files in each pass of this process's scheduler."""
    from sglang_ext.engine.prefetch.advice import Advice
    from sglang_ext.engine.prefetch.hbm_prefetch import Prefetcher, PrefetchResult
    from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache

    events, each_pass = GlobalRadixCache.check_hicache_events, Advice.each_pass

    def tell(ended: PrefetchResult) -> None:
        told = folder / f"{ended.id}.part"
        told.write_text(json.dumps([ended.end.value, ended.tokens, ended.brought]))
        told.rename(folder / f"{ended.id}.told")

    def check_hicache_events(self: GlobalRadixCache) -> None:
        prefetcher = self.find(Prefetcher)
        assert prefetcher is not None
        for path in folder.glob("*.ask"):
            prefetcher.prefetch(path.stem, json.loads(path.read_text()))
            path.unlink()
        events(self)

    def told(self: Advice) -> None:
        for ended in self._brings.take_ended():
            tell(ended)
        each_pass(self)

    GlobalRadixCache.check_hicache_events = check_hicache_events  # type: ignore[method-assign]
    Advice.each_pass = told  # type: ignore[method-assign]


if __name__ == "__main__":
    serve(listen)

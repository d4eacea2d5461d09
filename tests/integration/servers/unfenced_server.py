"""SGLang's server as ``sglang_ext.launch_server`` starts it, whose cache does not learn of changed weights
while the folder (`hooked_server`) has a file ``no-fence``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hooked_server import serve


def drop_fence(folder: Path) -> None:
    """Have the caches of this process look for the file whenever weights change."""
    from sglang_ext.patches.adapter.hybrid.cache import HybridRadixCache
    from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache

    def unless_dropped(inform: Any) -> Any:
        def informed(self: Any) -> None:
            if not (folder / "no-fence").exists():
                inform(self)

        return informed

    for cache in (GlobalRadixCache, HybridRadixCache):
        for name in ("weights_changing", "weights_changed"):
            setattr(cache, name, unless_dropped(getattr(cache, name)))


if __name__ == "__main__":
    serve(drop_fence)

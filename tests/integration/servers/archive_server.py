"""SGLang's server as ``sglang_ext.launch_server`` starts it, with a tier more below the disk.

It is another disk, in the folder of `hooked_server`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hooked_server import FOLDER, serve


def add_archive(folder: Path) -> None:
    """Register the tier in this process."""
    from sglang_ext.tiers import Tier, register

    register(Tier("archive", 3, "archive", opens=f"{__name__}:open_archive"))


def open_archive(config: Any, instance: str, shard: str, layout: Any) -> Any:
    """See `engine.tiers.opening.Opener`."""
    from sglang_ext.tiered_store.disk.state import DiskConfig
    from sglang_ext.tiered_store.disk.tier import DiskTier
    from sglang_ext.tiers import tier_named

    folder = Path(os.environ[FOLDER]) / shard
    return DiskTier(DiskConfig(folder, 1 << 30, instance=instance), layout, tier=tier_named("archive"))


if __name__ == "__main__":
    serve(add_archive)

"""The directory of the disk is emptied under a server: blocks in memory are written again as a whole.

The simulated forward pass compares every byte that it reads with the computed one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_simulation import Rank, Scenario

from sglang_ext.engine.tiers.disk_writes import DiskWrites
from sglang_ext.tiered_store.disk.state import DiskConfig
from sglang_ext.tiered_store.disk.tier import DiskTier
from sglang_ext.tiered_store.tier import BlockTier

pytestmark = pytest.mark.usefixtures("sglang_config")

BLOCK = 4
SCENARIO = Scenario("a disk that goes", hbm_tokens=400, dram_blocks=120, disk_blocks=1, memory=30)
PROMPT = [1000 + n for n in range(24 * BLOCK + 1)]
NEXT = [*PROMPT, *(3000 + n for n in range(8 * BLOCK))]


def over(folder: Path) -> Callable[[BlockTier], BlockTier]:
    """A disk tier at a real directory."""
    return lambda stand_in: DiskTier(DiskConfig(folder, 64 << 20), stand_in.layout)


@pytest.mark.parametrize("forgets", [True, False], ids=["forgets", "twin"])
def test_a_conversation_is_on_disk_as_a_whole_again(
    tmp_path: Path, forgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin goes on as if the disk still had the earlier turns: no restart finds anything of them."""
    if not forgets:
        monkeypatch.setattr(DiskWrites, "_forget_lost", lambda _self: None)
    folder = tmp_path / "disk"
    with Rank(SCENARIO, disk_class=over(folder)) as rank:
        rank.serve(PROMPT)
        rank.settle()
        shutil.rmtree(folder)
        rank.serve([5000 + n for n in range(8 * BLOCK)])
        rank.settle()
        rank.serve(NEXT)
        rank.settle()
        assert rank.promotions is not None
        assert rank.promotions._tier.renewals == 1
    with Rank(SCENARIO, disk_class=over(folder)) as rank:
        assert rank.serve(NEXT).cached_tokens == (32 * BLOCK if forgets else 0)

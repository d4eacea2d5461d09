"""The disk tier: the contract, restart, limits, and what a failing medium turns into."""

from __future__ import annotations

from pathlib import Path

from sglang_ext.geometry import BlockLayout
from sglang_ext.testing.tier_contract import (
    DurableTierContract,
)
from sglang_ext.tiered_store.disk import DiskTier
from sglang_ext.tiered_store.disk_state import DiskConfig, IoMode
from sglang_ext.tiered_store.tier import BlockTier

RUN_BYTES = 16 << 10
"""A run of a few blocks of the test layout: a page for the header and one for each of three layers."""


def config(path: Path, capacity: int = 24, **options: object) -> DiskConfig:
    return DiskConfig(path, capacity * RUN_BYTES, **options)  # type: ignore[arg-type]


class TestDiskTier(DurableTierContract):
    def open_tier(self, layout: BlockLayout, capacity: int, tmp_path: Path) -> BlockTier:
        return DiskTier(config(tmp_path, capacity), layout)


class TestDiskTierPastThePageCache(DurableTierContract):
    def open_tier(self, layout: BlockLayout, capacity: int, tmp_path: Path) -> BlockTier:
        return DiskTier(config(tmp_path, capacity, io=IoMode.DIRECT), layout)

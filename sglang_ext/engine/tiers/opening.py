"""Opening the tiers below memory that a rank's configuration asks for."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from sglang_ext.config import KvConfig
from sglang_ext.errors import ConfigError
from sglang_ext.geometry import BlockLayout
from sglang_ext.tiered_store.chain import TierChain
from sglang_ext.tiered_store.disk.followed import FollowedDisk
from sglang_ext.tiered_store.disk.state import DiskConfig, IoMode
from sglang_ext.tiered_store.disk.tier import DiskTier
from sglang_ext.tiered_store.loading.layer_cache import LayerCache
from sglang_ext.tiered_store.tier import BlockTier
from sglang_ext.tiers import Tier, tiers_below


class Opener(Protocol):
    """The function that `Tier.opens` or `Tier.follows` names.

    Raises:
        ConfigError: the configuration asks for the tier, and it cannot be opened.
    """

    def __call__(self, config: KvConfig, instance: str, shard: str, layout: BlockLayout) -> BlockTier | None:
        """The tier of one rank, or ``None`` where the configuration asks for none. shard: the rank's part of
        the model, as ``tp0of1``."""


def open_below(
    config: KvConfig,
    instance: str,
    shard: str,
    layout: BlockLayout,
    farther: Sequence[BlockTier] = (),
    *,
    follows: bool = False,
) -> BlockTier | None:
    """All tiers below memory, as one; ``None`` where there are none.

    Args:
        farther: tiers below the registered ones, which are open already.
        follows: another rank on this host has the same KV, has opened the tiers, and writes to them.

    Raises:
        ConfigError: see `Opener`. Also a tier that ranks cannot share.
    """
    opened: list[BlockTier] = []
    try:
        for tier in tiers_below(Tier.DRAM):
            if tier.opens:
                opener: Opener = pkgutil.resolve_name(_follower_of(tier) if follows else tier.opens)
                made = opener(config, instance, shard, layout)
                opened += [] if made is None else [made]
    except BaseException:
        for made in opened:
            made.close()
        raise
    opened += farther
    return opened[0] if len(opened) == 1 else TierChain(opened) if opened else None


def _follower_of(tier: Tier) -> str:
    if not tier.follows:
        raise ConfigError(
            f"{tier.title} cannot be read by other ranks than the one that writes to it",
            field="--attn-cp-size",
            hint="Use --tp-size instead, or leave that tier out",
        )
    return tier.follows


def open_disk(config: KvConfig, instance: str, shard: str, layout: BlockLayout) -> BlockTier | None:
    """The directory of this rank at ``--kv-disk-path``, with the layer cache in front of it if there is one.

    Raises:
        ConfigError: it cannot be used, another server uses it, or the layer cache cannot be made.
    """
    if config.disk_path is None:
        return None
    return _behind_layers(config, DiskTier(disk_config(config, instance, shard), layout))


def follow_disk(config: KvConfig, instance: str, shard: str, layout: BlockLayout) -> BlockTier | None:
    """The same for a rank that reads the blocks which another rank, with the directory open, writes there.

    Raises:
        ConfigError: the layer cache cannot be made.
    """
    if config.disk_path is None:
        return None
    return _behind_layers(config, FollowedDisk(disk_config(config, instance, shard), layout))


def disk_config(config: KvConfig, instance: str, shard: str) -> DiskConfig:
    """The configuration of a rank's directory at ``--kv-disk-path``."""
    return DiskConfig(
        Path(str(config.disk_path)) / shard, config.disk_size, io=IoMode(config.disk_io), instance=instance
    )


def _behind_layers(config: KvConfig, disk: BlockTier) -> BlockTier:
    """The disk behind a layer cache, if there is one. Closes the disk where the cache cannot be made."""
    if not config.layer_cache_size:
        return disk
    try:
        return LayerCache(disk, config.layer_cache_size, config.layer_cache_layers)
    except ConfigError:
        disk.close()
        raise

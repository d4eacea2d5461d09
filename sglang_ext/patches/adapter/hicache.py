"""Opens the files that SGLang's HiCache wrote for this model and rank, as the farthest tier."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_ext.config import KvConfig
from sglang_ext.errors import ConfigError
from sglang_ext.geometry import Geometry, PlaneKind
from sglang_ext.tiered_store.hicache import ENDING, FIELD, HiCacheStore, PageOrder
from sglang_ext.tiers import Tier, all_tiers, register

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

logger = logging.getLogger(__name__)

HICACHE = Tier("hicache", 8, "HiCache's files", load_latency_s=5e-3, load_bytes_per_s=1e9)
"""Registered in a process that reads them. A router does not know the level, and needs not: the files cannot
be listed as blocks, so that no event names them."""


def hicache_store(
    ctx: TreeCacheBuildContext, config: KvConfig, geometry: Geometry, *, model: str
) -> HiCacheStore | None:
    """The files of this rank; None where the flags name none, or HiCache has written none.

    Args:
        model: the name by which it is served.

    Raises:
        ConfigError: files of this model cannot be read, or all files are of others.
    """
    if config.hicache is None:
        return None
    word, _, folder = config.hicache.partition(":")
    order = PageOrder(word)
    _require(geometry)
    if not _has_files(folder):
        logger.warning("%s has no files of HiCache: there is nothing to read", folder)
        return None
    if HICACHE not in all_tiers():
        register(HICACHE)
    suffix = _suffix(ctx, geometry, model)
    if order is PageOrder.PAGE_UNIFIED:
        suffix = _unified(ctx, geometry, model) + suffix
    return HiCacheStore(Path(folder), suffix, order, geometry.layout, HICACHE)


def _has_files(folder: str) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(entry.name.endswith(ENDING) for entry in entries)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be read: {error.strerror}", field=FIELD, hint="Name a directory of this user's"
        ) from error


def _require(geometry: Geometry) -> None:
    if len({plane.row_bytes for plane in geometry.planes}) > 1:
        raise ConfigError(
            "HiCache's file backend keeps no KV whose rows differ in size",
            field=FIELD,
            hint="Leave the setting out",
        )


def _suffix(ctx: Any, geometry: Geometry, model: str) -> str:
    """The suffix that ``HiCacheFile.__init__`` gives the names of a rank's pages."""
    name = model.replace("/", "-")
    replicated = geometry.planes[0].kind is PlaneKind.LATENT
    return f"_{name}" if replicated else f"_{name}_{ctx.tp_rank}_{ctx.tp_size}"


def _unified(ctx: Any, geometry: Geometry, model: str) -> str:
    try:
        from sglang_ext.patches.adapter.hicache_unified import unified_suffix
    except ImportError:
        raise ConfigError(
            "this version of SGLang has no unified names of pages",
            field=FIELD,
            hint="Install SGLang 0.5.23, or name another layout",
        ) from None
    return unified_suffix(ctx, geometry, model)

"""The unified names of HiCache's pages, which SGLang has from 0.5.23 on (``KVCacheNamespace``)."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.hicache_key_scheme import plan_unified_kv

from sglang_ext.errors import ConfigError
from sglang_ext.geometry import Geometry, PlaneKind
from sglang_ext.tiered_store.hicache import FIELD


def unified_suffix(ctx: Any, geometry: Geometry, model: str) -> str:
    """The coordinate of this rank's KV in the unified key scheme, as one object for all layers and heads.

    Raises:
        ConfigError: the scheme has no names for it.
    """
    plane, shard = geometry.planes[0], geometry.shard
    try:
        plan = plan_unified_kv(
            model_id=model,
            dtype=plane.dtype,
            page_size=ctx.params.page_size,
            rank_replicated=plane.kind is PlaneKind.LATENT,
            local_kv_heads=shard.heads,
            attn_tp_rank=ctx.tp_rank,
            attn_tp_size=ctx.tp_size,
            attn_cp_size=1,
            start_layer=shard.first_layer,
            end_layer=shard.first_layer + shard.layers,
            is_final_stage=True,
        )
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(str(error), field=FIELD, hint="Name another layout") from None
    (suffix,) = plan.suffixes
    return f"_{suffix}"

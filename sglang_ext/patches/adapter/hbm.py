"""SGLang's KV pools as planes: the engine's memory as tiers and transfers see it.

A model has one pool per component (`radix_global.components`). The models served today have one pool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_ext.disagg.memory import MemoryKind
from sglang_ext.disagg.transfer.pools import MemoryRange, PoolSpec
from sglang_ext.errors import ConfigError
from sglang_ext.geometry import Geometry, mha_geometry, mla_geometry
from sglang_ext.radix_global.components import FULL, Component, LayerMap, RowMap, slot_rows


def pool_planes(kvcache: Any) -> list[list[torch.Tensor]]:
    """The pool's tensors by local layer: [[k, v], ...] for MHA and GQA, [[latent], ...] for MLA.

    Each tensor has shape (slots, heads, head size) or (slots, 1, latent size) in the dtype of its values:
    SGLang keeps float8 in tensors of bytes, and KV of one kind of float8 must not pass for the other's.

    Raises:
        ConfigError: the pool is of a kind whose rows do not hold the whole KV of a token.
    """
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    # Subclasses add planes (scales, indexer keys) or another layout, so the exact type is asked for.
    dtype = kvcache.dtype
    if type(kvcache) is MHATokenToKVPool:
        if kvcache.kv_cache_layout != "nhd":
            raise _unsupported(f"KV pools in the layout {kvcache.kv_cache_layout!r}, only 'nhd'")
        if kvcache.is_quantized_kv_cache:
            raise _unsupported("a quantized KV cache; set --kv-cache-dtype auto")
        return [
            [k.view(dtype), v.view(dtype)] for k, v in zip(kvcache.k_buffer, kvcache.v_buffer, strict=True)
        ]
    if type(kvcache) is MLATokenToKVPool:
        return [[latent.view(dtype)] for latent in kvcache.kv_buffer]
    raise _unsupported(f"KV pools of the kind {type(kvcache).__name__}")


@dataclass(frozen=True)
class EnginePool:
    """One rank's pool of a component: tiers have it in blocks, transfers in pages.

    planes: as ``pool_planes`` returns them. geometry: in blocks. layers: the model layers, in the order of
    the planes. rows: maps the engine's token slots to rows of this pool.
    """

    planes: list[list[torch.Tensor]]
    geometry: Geometry
    layers: tuple[int, ...]
    component: Component = FULL
    rows: RowMap = slot_rows

    @staticmethod
    def of(kvcache: Any, model_config: Any, *, block_tokens: int, page_tokens: int) -> EnginePool:
        """By what SGLang knows of the pool and of the model.

        Raises:
            ConfigError: see ``pool_planes``.
        """
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        planes = pool_planes(kvcache)
        geometry = pool_geometry(
            planes,
            block_tokens=block_tokens,
            page_tokens=page_tokens,
            first_layer=kvcache.start_layer,
            model_layers=model_config.num_hidden_layers,
            tp_rank=parallel.attn_tp_rank,
            tp_size=parallel.attn_tp_size,
            model_kv_heads=model_config.get_total_num_kv_heads(),
        )
        first = kvcache.start_layer
        return EnginePool(planes, geometry, tuple(range(first, first + len(planes))))

    @property
    def device(self) -> torch.device:
        return self.planes[0][0].device

    @property
    def pages(self) -> Geometry:
        """The geometry in the engine's pages."""
        return dataclasses.replace(self.geometry, block_tokens=self.geometry.page_tokens)

    @property
    def kind(self) -> MemoryKind:
        return MemoryKind.HOST if self.device.type == "cpu" else MemoryKind.CUDA

    def spec(self, name: str) -> PoolSpec:
        """As an endpoint's pool of pages. Every page may be leased; the caller that offers it holds it."""
        tensors = [plane for layer in self.planes for plane in layer]
        memory = [MemoryRange(each.data_ptr(), each.nbytes, self.kind, keep=each) for each in tensors]
        return PoolSpec.of_geometry(name, self.pages, memory, lease_budget=self.geometry.slots)


def layer_map(pools: Sequence[EnginePool]) -> LayerMap:
    """The components of each of a rank's layers. Each layer is in at least one of the pools."""
    named = [layer for pool in pools for layer in pool.layers]
    layers = {pool.component: pool.layers for pool in pools}
    return LayerMap.of(layers, min(named), max(named) - min(named) + 1)


def _unsupported(what: str) -> ConfigError:
    return ConfigError(
        f"the global cache does not support {what}",
        field="--radix-cache-backend global",
        hint="Leave the flag out to serve this model with SGLang's own cache",
    )


def pool_geometry(
    planes: list[list[torch.Tensor]],
    *,
    block_tokens: int,
    page_tokens: int,
    first_layer: int,
    model_layers: int,
    tp_rank: int,
    tp_size: int,
    model_kv_heads: int,
) -> Geometry:
    """The geometry of one rank's pool (KVDirect, figure 5).

    Args:
        planes: as ``pool_planes`` returns them.
        first_layer: index, in the whole model, of this pipeline stage's first layer.
        tp_rank: place of this rank among those that share the heads.
        tp_size: how many those are.
        model_kv_heads: KV heads of the whole model; fewer than ``tp_size`` means they are replicated.
    """
    first = planes[0][0]
    dtype = str(first.dtype).removeprefix("torch.")
    slots = first.shape[0]
    if len(planes[0]) == 1:
        return mla_geometry(
            addresses=tuple(layer[0].data_ptr() for layer in planes),
            slots=slots,
            latent_dim=first.shape[-1],
            dtype=dtype,
            first_layer=first_layer,
            model_layers=model_layers,
            block_tokens=block_tokens,
            page_tokens=page_tokens,
        )
    heads = first.shape[1]
    return mha_geometry(
        k_addresses=tuple(layer[0].data_ptr() for layer in planes),
        v_addresses=tuple(layer[1].data_ptr() for layer in planes),
        slots=slots,
        heads=heads,
        head_dim=first.shape[2],
        v_head_dim=planes[0][1].shape[2],
        dtype=dtype,
        first_layer=first_layer,
        model_layers=model_layers,
        first_head=tp_rank * model_kv_heads // tp_size,
        model_heads=max(model_kv_heads, heads),
        block_tokens=block_tokens,
        page_tokens=page_tokens,
    )

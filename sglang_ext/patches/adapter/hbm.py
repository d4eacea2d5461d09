"""SGLang's KV pools as planes: the engine's memory as tiers and transfers see it.

These are the pool of the model, and those of its draft models, which use the same slots. The layers of the
drafts are numbered after those of the model, and their KV is in the same blocks.
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
from sglang_ext.geometry import (
    ELEMENT_DIM,
    HEAD_DIM,
    KINDS_OF_A_LAYER,
    TOKEN_DIM,
    Geometry,
    Plane,
    PlaneKind,
    Shard,
)


def pool_planes(kvcache: Any, *, by_page: bool = False) -> list[list[torch.Tensor]]:
    """The pool's tensors by local layer: [[k, v], ...] for MHA and GQA, [[latent], ...] for MLA, and
    [[latent, index keys], ...] for DSA, where layers that use the choice of another layer have no index keys.

    K and V have shape (slots, heads, head size), latents (slots, 1, latent size), in the dtype of their
    values: SGLang keeps float8 in tensors of bytes, and KV of one kind of float8 must not pass for another's.
    Index keys have shape (slots, bytes of a token); see `PlaneKind.INDEX`.

    Args:
        by_page: whether only prefixes of whole pages are kept. An index key for several tokens belongs to a
            page then; otherwise the keys of an unfinished group are in memory of the request.

    Raises:
        ConfigError: the pool is of a kind whose rows do not hold the whole KV of a token.
    """
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool

    # Subclasses add planes (scales) or another layout, so the exact type is asked for.
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
    if type(kvcache) is DSATokenToKVPool:
        index = _index_planes(kvcache, by_page=by_page)
        return [[latent.view(dtype), *keys] for latent, keys in zip(kvcache.kv_buffer, index, strict=True)]
    raise _unsupported(f"KV pools of the kind {type(kvcache).__name__}")


def _index_planes(kvcache: Any, *, by_page: bool) -> list[list[torch.Tensor]]:
    """The index keys of each layer of a DSA pool, as one row for each slot."""
    if kvcache.index_kpool != 1 and not by_page:
        raise _unsupported(f"index keys for groups of {kvcache.index_kpool} tokens")
    slots = kvcache.kv_buffer[0].shape[0]
    found: list[list[torch.Tensor]] = []
    for pages in kvcache.index_k_with_scale_buffer:
        row_bytes = pages.shape[1] // kvcache.page_size
        rows = pages.view(-1, row_bytes)
        if len(pages) and len(rows) < slots:
            raise _unsupported(f"index keys for {len(rows)} of {slots} slots")
        found.append([rows[:slots]] if len(pages) else [])
    return found


@dataclass(frozen=True)
class Drafts:
    """The draft models of a rank.

    runners: SGLang's, of those that have KV of their own.
    """

    runners: Sequence[Any] = ()

    @property
    def pools(self) -> list[Any]:
        """Their KV pools, with the slots of the model's."""
        return [runner.token_to_kv_pool for runner in self.runners]

    @property
    def models(self) -> list[torch.nn.Module]:
        return [runner.model for runner in self.runners]

    @property
    def configs(self) -> list[Any]:
        """Their configurations, as Hugging Face has them."""
        return [runner.model_config.hf_config for runner in self.runners]


@dataclass(frozen=True)
class EnginePool:
    """One rank's pool: tiers have it in blocks, transfers in pages.

    planes: as ``pool_planes`` returns them. geometry: in blocks.
    """

    planes: list[list[torch.Tensor]]
    geometry: Geometry

    @staticmethod
    def of(
        kvcache: Any, model_config: Any, *, drafts: Sequence[Any] = (), block_tokens: int, page_tokens: int
    ) -> EnginePool:
        """By what SGLang knows of the pool and of the model.

        drafts: the pools of the draft models.

        Raises:
            ConfigError: see ``pool_planes``.
        """
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        of_drafts = [layer for pool in drafts for layer in pool_planes(pool)]
        planes = pool_planes(kvcache) + of_drafts
        geometry = pool_geometry(
            planes,
            block_tokens=block_tokens,
            page_tokens=page_tokens,
            first_layer=kvcache.start_layer,
            model_layers=model_config.num_hidden_layers + len(of_drafts),
            tp_rank=parallel.attn_tp_rank,
            tp_size=parallel.attn_tp_size,
            model_kv_heads=model_config.get_total_num_kv_heads(),
        )
        return EnginePool(planes, geometry)

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
        planes: as ``pool_planes`` returns them; those of draft models come last.
        first_layer: index, in the whole model, of this pipeline stage's first layer.
        model_layers: layers of the model and of its draft models.
        tp_rank: place of this rank among those that share the heads.
        tp_size: how many those are.
        model_kv_heads: KV heads of the whole model; fewer than ``tp_size`` means they are replicated.

    Raises:
        ConfigError: the ranks do not share the heads of a draft model as they share the model's.
    """
    described = [
        _plane(first_layer + i, kind, tensor)
        for i, layer in enumerate(planes)
        for kind, tensor in zip(_kinds(layer), layer, strict=True)
    ]
    heads, has_heads = described[0].dim(HEAD_DIM), described[0].kind.has_heads
    shared = tp_size == 1 or (has_heads and heads * tp_size == model_kv_heads)
    if not shared and any(plane.dim(HEAD_DIM) != heads for plane in described):
        raise ConfigError(
            f"{tp_size} ranks do not share the KV heads of the draft model as they share the model's",
            field="--tp-size",
            hint="Use 1, or start without --speculative-algorithm",
        )
    shard = Shard(
        first_layer,
        len(planes),
        tp_rank * model_kv_heads // tp_size if has_heads else 0,
        heads,
        model_layers,
        max(model_kv_heads, heads) if has_heads else 1,
    )
    return Geometry(tuple(described), shard, block_tokens, page_tokens)


def _kinds(layer: Sequence[torch.Tensor]) -> list[PlaneKind]:
    """The kinds of a layer's planes, by their number and shapes: index keys alone have no heads."""
    k_and_v, latent, with_index = KINDS_OF_A_LAYER
    if len(layer) == 1:
        return latent
    return k_and_v if layer[-1].dim() == 3 else with_index


def _plane(layer: int, kind: PlaneKind, tensor: torch.Tensor) -> Plane:
    # A latent has one row for all heads.
    rows = tensor if kind.has_heads else tensor.view(len(tensor), -1)
    dims = (TOKEN_DIM, HEAD_DIM, ELEMENT_DIM) if kind.has_heads else (TOKEN_DIM, ELEMENT_DIM)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Plane(layer, kind, tensor.data_ptr(), dims, tuple(rows.shape), rows.stride(), dtype)


def load_by_sglang(
    planes: Sequence[torch.Tensor],
    blocks: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    layer: int,
) -> None:
    """Queue SGLang's kernel for host memory in blocks of all layers ("page-unified"), as ours are.

    Args:
        planes: of the layer, K and V or a latent: rows of words, shape (slots, words), dense.
        blocks: pinned, of the same words, shape (blocks, layers, planes, tokens of a block, words).
        tokens: int64 on the device, where each token is in ``blocks``: block times tokens of a block, and its
            place there.
        slots: int64 on the device, of the tokens.

    Raises:
        ValueError, RuntimeError: SGLang's kernel is not for such rows, or does not compile.
    """
    from sglang.kernels.ops.kvcache import hicache

    rows = [plane.unsqueeze(1) for plane in planes]
    if len(rows) == 1:
        source = blocks.squeeze(2)
        hicache.transfer_hicache_one_layer_mla_page_unified_lf(rows[0], source, tokens, slots, layer)
    else:
        source = blocks.unsqueeze(1).unsqueeze(5)
        hicache.transfer_hicache_one_layer_page_unified_lf(*rows, source, tokens, slots, layer)

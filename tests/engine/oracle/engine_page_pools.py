"""Pools whose tensors have a row for each page: DeepSeek V4, and index keys for several tokens with states,
beside latents or beside K and V.

As in `engine_hybrid_pools` the pools and allocators are SGLang's. Pages have 256 tokens, and the oracle has
each token write its share of each row of its page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from engine_hybrid_pools import (
    FULL,
    FULL_LAYERS,
    MAMBA,
    STATE_LAYERS,
    SWA,
    HybridKind,
    HybridPools,
    Planes,
    runner_of,
    state_planes,
)
from engine_hybrids import HybridScenario
from engine_pools import PagePlane
from engine_scheduler import Settings
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.runtime_context import get_exec

PAGE = 256
MOST = 8
"""Bytes of a token's share that the oracle writes and compares at each step: pages of the window have 150 KB
in a layer. `whole` compares all that SGLang uses."""


Reads = Callable[[DeepSeekV4TokenToKVPool], torch.Tensor]
"""How a model gets a tensor."""
WINDOWS: list[Reads] = [lambda pool, layer=layer: pool.get_swa_key_buffer_radix(layer) for layer in range(3)]


class CompressedPools(HybridPools):
    """DeepSeek V4 with a layer of each kind: with the window alone, compressed by 4 and by 128.

    Compressed latents and index keys are `FULL`. The states of groups of 4 tokens lie beside the window. The
    draft model has a layer with the window alone (MTP).
    """

    most = MOST
    ratios = (0, 4, 128)
    model_layers = {FULL: (1, 3, 4), SWA: (0, 2, 5, 6, 7), MAMBA: ()}
    """One "layer" for each tensor, in the order of `reads`."""
    reads: Mapping[ComponentType, Sequence[Reads]] = {
        FULL: [
            lambda pool: pool.get_extra_key_buffer(1),
            lambda pool: pool.get_index_k_with_scale_buffer(1),
            lambda pool: pool.get_extra_key_buffer(2),
        ],
        SWA: [
            *WINDOWS,
            lambda pool: _rings(pool.get_attention_compress_states(1)),
            lambda pool: _rings(pool.get_indexer_compress_states(1)),
        ],
    }

    def _kvcache(self) -> DeepSeekV4TokenToKVPool:
        return self._compressed(self.ratios)

    def _compressed(self, ratios: Sequence[int], **more: Any) -> DeepSeekV4TokenToKVPool:
        rest = int(not more)
        return DeepSeekV4TokenToKVPool(
            max_num_reqs=self.rows,
            swa_size=self.window_tokens,
            c4_size=self.tokens // 4 * rest,
            c128_size=self.tokens // 128 * rest,
            # A ring of 8 states for each page of the window, of 16 with drafts.
            c4_state_pool_size=self.window_tokens // PAGE * (16 if self.kind.verified else 8) * rest,
            c128_state_pool_size=0,
            page_size=PAGE,
            swa_page_size=PAGE,
            dtype=torch.float8_e4m3fn,
            c4_state_dtype=torch.float32,
            c128_state_dtype=torch.float32,
            qk_nope_head_dim=448,
            qk_rope_head_dim=64,
            indexer_head_dim=128,
            layer_num=len(ratios),
            device="cpu",
            enable_memory_saver=False,
            compression_ratios=list(ratios),
            kv_source_layers=[layer for layer, ratio in enumerate(ratios) if ratio in (1, 2)],
            full_size=self.tokens,
            sliding_window=self.kind.window,
            # Without them, SGLang leaves the last layer out of its list for external stores.
            start_layer=0,
            end_layer=len(ratios),
            **more,
        )

    def _draft(self) -> Any:
        pool = self._compressed((0,), is_draft_worker=True)
        pool.register_mapping(self.allocator.full_to_swa_index_mapping)
        return runner_of(pool, self)

    def _draft_planes(self) -> dict[ComponentType, Planes]:
        (pool,) = self.drafts.pools
        return {SWA: [[PagePlane(WINDOWS[0](pool), PAGE, self.most)]]}

    def _planes(self) -> dict[ComponentType, Planes]:
        return {
            part: [[PagePlane(reads(self.kvcache), PAGE, self.most)] for reads in of]
            for part, of in self.reads.items()
        }

    def read(self, layer: int) -> None:
        for part, of in self.reads.items():
            if layer in self.model_layers[part]:
                of[self.model_layers[part].index(layer)](self.kvcache)


def _rings(states: Any) -> torch.Tensor:
    """States as bytes with a row for each page of the window."""
    return _together(states.kv_score_buffer.kv_score, states.ring_size)


def _together(rows: torch.Tensor, count: int) -> torch.Tensor:
    """So many rows as one."""
    return rows[: len(rows) // count * count].view(len(rows) // count, -1)


class LowRatioPools(CompressedPools):
    """DeepSeek V4.1 with layers compressed by 1 and by 2, whose index keys have several rows for a page."""

    ratios = (0, 1, 2)
    model_layers = {FULL: (1, 2, 4, 5), SWA: (0, 3, 6), MAMBA: ()}
    reads = {
        FULL: [
            lambda pool: pool.get_extra_key_buffer(1),
            lambda pool: _together(pool.get_index_k_with_scale_buffer(1), 4),
            lambda pool: pool.get_extra_key_buffer(2),
            lambda pool: _together(pool.get_index_k_with_scale_buffer(2), 2),
        ],
        SWA: WINDOWS,
    }


class ReplayedPools(LowRatioPools):
    """The same where SGLang keeps windows by request only, and computes that of a resumed prompt again."""

    model_layers = {FULL: (0, 1, 2, 3), SWA: (), MAMBA: ()}
    reads = {FULL: LowRatioPools.reads[FULL]}

    def _kvcache(self) -> DeepSeekV4TokenToKVPool:
        with get_exec().features.override(enable_encoder_swa_bounded_replay=True):
            return super()._kvcache()


class GroupedPools(HybridPools):
    """Latents with an index key for 4 tokens each, and states. The draft model has a layer with such keys."""

    most = MOST

    def _kvcache(self) -> HybridLinearKVPool:
        return self._grouped(FULL_LAYERS)

    def _grouped(self, layers: Sequence[int]) -> HybridLinearKVPool:
        return HybridLinearKVPool(
            size=self.tokens,
            dtype=torch.bfloat16,
            page_size=PAGE,
            head_num=1,
            head_dim=12,
            full_attention_layer_ids=list(layers),
            device="cpu",
            mamba_pool=self.requests.mamba_pool,
            use_mla=True,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            use_dsa=True,
            index_head_dim=128,
            kv_cache_dim=12,
            index_kpool=4,
            index_kpool_compress=True,
            tail_extra_slots=self.kind.verified,
            max_running_requests=self.rows,
        )

    def _planes(self) -> dict[ComponentType, Planes]:
        states = state_planes(self.requests.mamba_pool.mamba_cache)
        return {FULL: self._latents(self.kvcache), MAMBA: states}

    def _latents(self, of: HybridLinearKVPool) -> Planes:
        pool = of.full_kv_pool
        keys = [PagePlane(pages, PAGE, self.most) for pages in pool.index_k_with_scale_buffer]
        latents = [rows.view(torch.bfloat16) for rows in pool.kv_buffer]
        return list(zip(latents, keys, strict=True))

    def _draft(self) -> Any:
        return runner_of(self._grouped([0]), self)

    def _draft_planes(self) -> dict[ComponentType, Planes]:
        return {FULL: self._latents(self.drafts.pools[0])}

    def read(self, layer: int) -> None:
        super().read(layer)
        if layer not in STATE_LAYERS:
            self.kvcache.get_index_k_with_scale_buffer(layer)


class QsaPools(HybridPools):
    """K and V with an index key for 4 tokens each, and states, beside which a layer keeps the window of a
    short convolution and the model the last tokens. The draft model has a layer with such keys."""

    most = MOST
    side_states: Mapping[str, Any] = {
        "short_conv_layer_ids": FULL_LAYERS[:1],
        "short_conv_state_shape": (4, 2),
        "ngram_context_len": 2,
        "ngram_eos_token_id": 0,
    }

    def _kvcache(self) -> Any:
        return self._with_index(FULL_LAYERS)

    def _with_index(self, layers: Sequence[int]) -> Any:
        from sglang.srt.mem_cache.qsa_kv_pool import QSATokenToKVPool

        return QSATokenToKVPool(
            size=self.tokens,
            dtype=torch.bfloat16,
            page_size=PAGE,
            head_num=2,
            head_dim=4,
            full_attention_layer_ids=list(layers),
            device="cpu",
            mamba_pool=self.requests.mamba_pool,
            qsa_index_kv_heads=1,
            qsa_index_head_dim=128,
            qsa_compress_ratio=4,
            qsa_token_topk=2048,
            num_request_slots=self.requests.req_to_token.shape[0],
        )

    def _planes(self) -> dict[ComponentType, Planes]:
        pool = self.requests
        first, *rest = state_planes(pool.mamba_pool.mamba_cache)
        beside = [*pool.short_conv_pool.conv_state, pool.ngram_pool.context.unsqueeze(1)]
        return {FULL: self._full(self.kvcache), MAMBA: [[*beside, *first], *rest]}

    def _full(self, of: Any) -> Planes:
        keys = [
            PagePlane(_together(keys.view(len(keys), -1).view(torch.uint8), PAGE // 4), PAGE, self.most)
            for keys in of.qsa_compressed_k_buffer_pool
        ]
        kv = zip(of.full_kv_pool.k_buffer, of.full_kv_pool.v_buffer, keys, strict=True)
        return [list(layer) for layer in kv]

    def _draft(self) -> Any:
        return runner_of(self._with_index([0]), self)

    def _draft_planes(self) -> dict[ComponentType, Planes]:
        return {FULL: self._full(self.drafts.pools[0])}

    def read(self, layer: int) -> None:
        if layer == STATE_LAYERS[0]:
            self.requests.get_ngram_context(torch.zeros(1, dtype=torch.int64))
        super().read(layer)
        if layer in FULL_LAYERS:
            self.kvcache.get_qsa_compressed_k_buffer(layer)
        if layer == FULL_LAYERS[0]:
            self.requests.short_conv_layer_cache(layer)


_SETTINGS = Settings(chunk=2 * PAGE, max_prefill=8 * PAGE, new_token_ratio=0.05)
COMPRESSED = HybridScenario(
    "compressed",
    HybridKind(window=128, page=PAGE),
    hbm_tokens=20 * PAGE,
    window_tokens=16 * PAGE,
    settings=_SETTINGS,
    make_pools=CompressedPools,
    stretch=8,
)
LOW_RATIO = replace(COMPRESSED, name="compressed by 1 and 2", make_pools=LowRatioPools)
REPLAYED = replace(
    COMPRESSED, name="windows computed again", kind=HybridKind(page=PAGE), make_pools=ReplayedPools
)
GROUPED = HybridScenario(
    "index keys of groups, states",
    HybridKind(states=40, grid=PAGE, latents=True, page=PAGE),
    hbm_tokens=20 * PAGE,
    settings=_SETTINGS,
    make_pools=GroupedPools,
    stretch=8,
)

QSA = replace(
    GROUPED,
    name="index keys of groups beside KV, states",
    kind=replace(GROUPED.kind, latents=False),
    make_pools=QsaPools,
)


def whole(scenario: HybridScenario) -> HybridScenario:
    """The same with every byte compared."""
    every_byte = type("EveryByte", (scenario.make_pools,), {"most": 1 << 20})
    return replace(scenario, make_pools=every_byte)

"""SGLang's own pools and allocators on the CPU for models with windows or states, and an oracle for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from engine_pools import Hashes, Oracle, Planes, extend_chain
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.environ import envs
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.runtime_context import get_exec, get_schedule, get_server_args, get_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_ext.patches.adapter.hbm import Drafts, pool_planes

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA
FULL_LAYERS, WINDOW_LAYERS, STATE_LAYERS = (0, 3), (1, 4), (2, 5)
MODEL_LAYERS = {FULL: FULL_LAYERS, SWA: WINDOW_LAYERS, MAMBA: STATE_LAYERS}
"""Model layers of each component, where the model has it."""
DRAFT_LAYER = 16
"""Number of the draft model's first layer."""

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HybridKind:
    """The state of a model besides the KV of all tokens.

    Args:
        window: how many tokens before its own a layer with a window reads; 0 without such layers.
        states: slots for states; 0 without such layers.
        grid: tokens between the states that SGLang keeps (``extra_buffer``); 0 where it keeps those at the
            end of each chunk and request (``no_buffer``).
        latents: layers with full attention keep MLA latents.
        verified: tokens that the model verifies in a decoding pass; 0 without speculation.
        draft: kinds of layers of the draft model: ``full``, ``window``, or both; none without a draft model.
        depth: layers of each of these kinds.
        bigrams: SGLang's keys are pairs of tokens (EAGLE): a draft's row also depends on the next token.
        method: the algorithm; empty where the other fields tell it.
    """

    window: int = 0
    states: int = 0
    grid: int = 0
    latents: bool = False
    page: int = 1
    verified: int = 0
    draft: tuple[str, ...] = ()
    depth: int = 1
    bigrams: bool = True
    method: str = ""

    @property
    def algorithm(self) -> str:
        """As SGLang names it."""
        if self.method or not self.verified:
            return self.method or "NONE"
        return "NGRAM" if not self.draft else "EAGLE" if self.bigrams else "STANDALONE"

    def draft_chain(self, chain: Hashes, after: Sequence[int]) -> Hashes:
        """The hashes of a draft's rows: with EAGLE, a row belongs to its token and to the next one. With
        states, SGLang's keys are single tokens, and the row of a page's last token may have been made with
        the next token of another text: here it belongs to its own token alone.

        Args:
            chain: hashes of the prefix up to each token.
            after: the next token.
        """
        if not (self.draft and self.bigrams):
            return chain
        last = chain[-1:].tolist()
        extend_chain(last, None, after)
        shifted = np.append(chain[1:], np.uint64(last[-1]))
        if self.states:
            shifted[self.page - 1 :: self.page] = chain[self.page - 1 :: self.page]
        return shifted

    def __str__(self) -> str:
        parts = ["latents"] if self.latents else []
        parts += [f"window{self.window}"] if self.window else []
        parts += ["state" + (f"-grid{self.grid}" if self.grid else "")] if self.states else []
        parts += [f"verified{self.verified}"] if self.verified else []
        return "-".join([*parts, f"page{self.page}"])


class HybridPools:
    """The pools of one rank of such a model, as SGLang's scheduler makes them.

    Args:
        tokens, window_tokens: slots with full attention, and with a window.
        rows: requests that may run.
    """

    device = torch.device("cpu")
    model_layers: Mapping[ComponentType, Sequence[int]] = MODEL_LAYERS
    side_states: Mapping[str, Any] = {}
    """Arguments of SGLang for what layers without a recurrent state keep by the slots of states."""

    def __init__(
        self,
        kind: HybridKind,
        *,
        tokens: int,
        window_tokens: int = 0,
        rows: int = 6,
        context: int = 264,
        overlap: bool = False,
        tree_core: str = "python",
    ) -> None:
        self.kind = kind
        self.tokens = tokens
        self.window_tokens = window_tokens
        self.rows = rows
        self.tree_core = tree_core
        self.requests = self._requests(context, overlap)
        self.kvcache = self._kvcache()
        self.allocator = self._allocator()
        self.planes = self._planes()
        """The planes of each component by its local layers; the first dim of a tensor is the slot."""
        names = self.model_layers
        self.oracles = {part: Oracle(self.seen(planes), names[part]) for part, planes in self.planes.items()}
        self.full, self.window, self.state = map(self.oracles.get, MODEL_LAYERS)
        self.drafts = Drafts((self._draft(),) if kind.draft else ())
        self.draft_oracles = {
            part: Oracle(planes, range(DRAFT_LAYER, DRAFT_LAYER + len(planes)))
            for part, planes in (self._draft_planes() if kind.draft else {}).items()
            if planes
        }
        """Of the draft model's planes, by the component whose slots they have."""
        self.layers = sorted(
            (layer, part, local) for part in self.oracles for local, layer in enumerate(names[part])
        )
        """(model layer, component, local layer) in the order of the model's layers."""

    def seen(self, planes: Planes) -> Planes:
        """The planes as the oracle reads and writes them."""
        return planes

    def _planes(self) -> dict[ComponentType, Planes]:
        found: dict[ComponentType, Planes] = {FULL: pool_planes(self.kvcache.full_kv_pool)}
        if self.kind.window:
            found[SWA] = pool_planes(self.kvcache.swa_kv_pool)
        if self.kind.states:
            found[MAMBA] = state_planes(self.requests.mamba_pool.mamba_cache)
        return found

    def _draft(self) -> Any:
        """The runner of a draft model with layers of each kind that the draft has."""
        kind = self.kind
        common = {"page_size": kind.page, "dtype": torch.float32, "head_num": 1, "head_dim": 4}
        common |= {"device": str(self.device), "enable_memory_saver": False}
        if kind.window and "window" in kind.draft:
            pool: Any = SWAKVPool(
                size=self.tokens,
                size_swa=self.window_tokens,
                swa_attention_layer_ids=list(range(kind.depth, 2 * kind.depth)),
                full_attention_layer_ids=list(range(kind.depth)) if "full" in kind.draft else [],
                **common,
            )
            pool.register_mapping(self.allocator.full_to_swa_index_mapping)
        elif kind.states:
            pool = HybridLinearKVPool(
                size=self.tokens,
                full_attention_layer_ids=list(range(kind.depth)),
                mamba_pool=self.requests.mamba_pool,
                **common,
            )
        else:
            pool = MHATokenToKVPool(size=self.tokens, layer_num=kind.depth, **common)
        return runner_of(pool, self)

    def _draft_planes(self) -> dict[ComponentType, Planes]:
        """The draft model's planes, by the component whose slots they have."""
        (pool,) = self.drafts.pools
        if isinstance(pool, SWAKVPool):
            return {FULL: pool_planes(pool.full_kv_pool), SWA: pool_planes(pool.swa_kv_pool)}
        return {FULL: pool_planes(getattr(pool, "full_kv_pool", pool))}

    def _requests(self, context: int, overlap: bool) -> Any:
        kind = self.kind
        if not kind.states:
            return ReqToTokenPool(self.rows, context, str(self.device), enable_memory_saver=False)
        shape = Mamba2StateShape(
            conv=[(4, 2), (2, 4)],
            temporal=(2, 2, 4),
            intermediate_size=4,
            conv_dim=4,
            ssm_state_size=4,
            num_heads=2,
            head_dim=2,
            state_size=4,
            conv_kernel=3,
        )
        return HybridReqToTokenPool(
            size=self.rows,
            mamba_size=kind.states,
            mamba_spec_state_size=self.rows,
            max_context_len=context,
            device=str(self.device),
            enable_memory_saver=False,
            cache_params=Mamba2CacheParams(
                shape=shape,
                dtype=Mamba2StateDType(conv=torch.float32, temporal=torch.float32),
                layers=list(STATE_LAYERS),
            ),
            mamba_layer_ids=list(STATE_LAYERS),
            speculative_num_draft_tokens=kind.verified or None,
            enable_mamba_extra_buffer=bool(kind.grid),
            enable_overlap_schedule=overlap,
            **self.side_states,
        )

    def _kvcache(self) -> Any:
        kind = self.kind
        common = {"page_size": kind.page, "dtype": torch.float32, "head_num": 2, "head_dim": 4}
        if kind.window:
            latents: dict[str, Any] = {}
            if kind.latents:
                about = {"page_size": kind.page, "device": str(self.device), "enable_memory_saver": False}
                about |= {"kv_lora_rank": 8, "qk_rope_head_dim": 4}
                latents = {"full_kv_pool_class": MLATokenToKVPool, "swa_kv_pool_class": MLATokenToKVPool}
                latents |= {"full_kv_pool_kwargs": about, "swa_kv_pool_kwargs": about}
            return SWAKVPool(
                size=self.tokens,
                size_swa=self.window_tokens,
                swa_attention_layer_ids=list(WINDOW_LAYERS),
                full_attention_layer_ids=list(FULL_LAYERS),
                device=str(self.device),
                **common,
                **latents,
            )
        latents = {"use_mla": True, "kv_lora_rank": 8, "qk_rope_head_dim": 4} if kind.latents else {}
        return HybridLinearKVPool(
            size=self.tokens,
            full_attention_layer_ids=list(FULL_LAYERS),
            device=str(self.device),
            mamba_pool=self.requests.mamba_pool,
            **common,
            **latents,
        )

    def _allocator(self) -> Any:
        page = self.kind.page
        if self.kind.window:
            allocator = SWATokenToKVPoolAllocator(
                self.tokens,
                self.window_tokens,
                page,
                torch.float32,
                str(self.device),
                self.kvcache,
                need_sort=False,
            )
            parts = (allocator.full_attn_allocator, allocator.swa_attn_allocator)
        elif page == 1:
            return TokenToKVPoolAllocator(self.tokens, torch.float32, str(self.device), self.kvcache, False)
        else:
            allocator = PagedTokenToKVPoolAllocator(
                self.tokens, page, torch.float32, str(self.device), self.kvcache, False
            )
            parts = (allocator,)
        for part in parts:
            # Its checks make the host wait for a device.
            part.debug_mode = page > 1 and self.device.type == "cpu"
        return allocator

    def params(self) -> CacheInitParams:
        """The parameters that SGLang passes to a cache."""
        kind = self.kind
        components = [FULL]
        components += [SWA] if kind.window else []
        components += [MAMBA] if kind.states else []
        return CacheInitParams(
            disable=False,
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=kind.page,
            sliding_window_size=kind.window or None,
            is_eagle=getattr(SpeculativeAlgorithm, kind.algorithm).is_eagle(),
            enable_mamba_extra_buffer=bool(kind.grid),
            tree_components=tuple(components),
            tree_core_backend=self.tree_core,
        )

    def register(self, counter: Any) -> None:
        """Have reads wait for loads, as SGLang does with a counter of layers."""
        self.kvcache.register_layer_transfer_counter(counter)
        if self.kind.states:
            self.requests.register_layer_transfer_counter(counter)

    def read(self, layer: int) -> None:
        """Get a layer's buffers for reading, as a model does."""
        if layer in STATE_LAYERS:
            self.requests.mamba2_layer_cache(layer)
        else:
            self.kvcache.get_kv_buffer(layer)

    def window_rows(self, slots: Ids) -> Ids:
        """Where the window pool has tokens; 0 where it has none."""
        rows: Ids = self.allocator.full_to_swa_index_mapping[torch.from_numpy(slots)].numpy()
        return rows

    # -- free slots of each pool ----------------------------------------------------------------

    def free(self, component: ComponentType) -> Ids:
        """Every slot of a component that its allocator would hand out."""
        if component == MAMBA:
            free: Ids = self.requests.mamba_allocator.free_slots.numpy()
            return free
        allocator = self.allocator
        if self.kind.window:
            allocator = allocator.swa_attn_allocator if component == SWA else allocator.full_attn_allocator
        pages = allocator.get_all_free_pages().numpy()
        return self._of_pages(pages)

    def whole_pages(self, slots: Ids) -> Ids:
        """All slots of the pages that have some of these slots."""
        return self._of_pages(np.unique(slots // self.kind.page))

    def _of_pages(self, pages: Ids) -> Ids:
        page = self.kind.page
        slots: Ids = (pages[:, None] * page + np.arange(page)).ravel().astype(np.int64)
        return slots

    def all(self, component: ComponentType) -> Ids:
        """Every slot of a component, the padded ones at the front left out."""
        if component == MAMBA:
            return np.arange(1, self.kind.states + 1)
        size = self.window_tokens if component == SWA else self.tokens
        return np.arange(self.kind.page, size + self.kind.page)


def runner_of(pool: Any, pools: HybridPools) -> Any:
    """The runner of a draft model with this KV pool."""
    window = pools.kind.window or None
    return SimpleNamespace(
        token_to_kv_pool=pool, req_to_token_pool=pools.requests, sliding_window_size=window
    )


def state_planes(states: Any) -> list[list[torch.Tensor]]:
    """The state pool's tensors by local layer, each with a row for a slot."""
    found = []
    for layer in range(len(STATE_LAYERS)):
        planes = [states.temporal[layer], *(conv[layer] for conv in states.conv)]
        # On CPUs with AMX, SGLang keeps the window of a convolution first.
        found.append([each if each.is_contiguous() else each.transpose(-1, -2) for each in planes])
    return found


@contextmanager
def process_settings(kind: HybridKind) -> Iterator[None]:
    """SGLang's process-wide settings for such a model: the grid of its states, and how often a
    request that decodes gives up rows that left its window."""
    args = get_server_args()
    args._mamba_cache_chunk_size = kind.grid or 1
    states = {"enable_mamba_extra_buffer": bool(kind.grid), "mamba_track_interval": kind.grid or 1}
    # SGLang pins the mask of the states that a decode keeps, whatever the device.
    pinning = patch.object(torch.Tensor, "pin_memory", lambda own: own)
    drafts: dict[str, Any] = {}
    pages = {"page_size": kind.page} if kind.verified else {}
    if kind.verified:
        drafts = {"speculative_algorithm": kind.algorithm}
        drafts |= {"speculative_num_steps": kind.verified - 1, "speculative_eagle_topk": 1}
        drafts |= {"speculative_num_draft_tokens": kind.verified}
    rare = envs.SGLANG_SWA_EVICTION_INTERVAL.override(4)
    try:
        with (
            get_exec().mamba.override(**states),
            get_spec().override(**drafts),
            get_schedule().override(**pages),
            rare,
            pinning,
        ):
            yield
    finally:
        vars(args).pop("_mamba_cache_chunk_size", None)

"""The memory of a model with windows or states that prefill hands over to decode: its components, and beside
them what SGLang keeps for each running request only.

A tier keeps whole pages, but a prompt ends anywhere. The tokens behind the last group that a compressed
latent or an index key stands for are in a row of their request until their group is complete.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_ext.engine.hybrid.components import FULL, AtSnapshot, Component
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.patches.adapter.admission import QSA_POOL
from sglang_ext.patches.adapter.hbm import Drafts
from sglang_ext.patches.adapter.hybrid.pools import (
    ComponentPool,
    ShareStates,
    component_pools,
    rows_of_bytes,
)
from sglang_ext.patches.adapter.hybrid.sharing import of_attention

REQUEST = "request"
"""Name of the pool of what SGLang keeps by request."""


def handed_over_pools(
    params: Any, window_tokens: int | None, drafts: Drafts, states: ShareStates = lambda mamba_pool: None
) -> dict[str, ComponentPool]:
    """The pools by the names that endpoints have for them.

    Args:
        params, window_tokens, drafts, states: see `component_pools`.

    Raises:
        ConfigError: see `component_pools`.
    """
    found = {
        HBM_POOL if pool.component is FULL else str(pool.component): pool
        for pool in component_pools(params, window_tokens, drafts, states)
    }
    kvcache = params.token_to_kv_pool_allocator.get_kvcache()
    planes = [plane for pool in (kvcache, *drafts.pools) for plane in _unfinished_groups(pool)]
    if planes:
        rows = min(map(len, planes))
        layers = [[plane[:rows]] for plane in planes]
        # Index keys of QSA are whole in each rank. Of other models, unlike ranks are refused.
        sharing = of_attention(layers) if type(kvcache).__name__ == QSA_POOL else None
        found[REQUEST] = ComponentPool(Component(REQUEST, AtSnapshot()), layers, 1, sharing=sharing)
    return found


def _unfinished_groups(pool: Any) -> list[torch.Tensor]:
    """The tensors of the tokens of unfinished groups, as rows of bytes in SGLang's numbers for hand-overs: of
    a request, or of a group within its ring."""
    if hasattr(pool, "get_request_state_buf_infos"):
        states = [each for each in pool.compress_state_pools if each is not None and each.request_scoped]
        _, _, sizes = pool.get_request_state_buf_infos()
        tensors = [rows_of_bytes(each.kv_score_buffer.kv_score) for each in states]
        return [_in_rows(tensor, size) for tensor, size in zip(tensors, sizes, strict=True)]
    if type(pool).__name__ == QSA_POOL:
        _, _, sizes = pool.get_qsa_pending_state_buf_infos()
        rings = (*pool.qsa_key_state_buffer_pool, pool.qsa_rope_position_buffer)
        return [_in_rows(rows_of_bytes(ring), size) for ring, size in zip(rings, sizes, strict=True)]
    keys = getattr(pool, "full_kv_pool", pool)
    if not getattr(keys, "kpool_use_compress", False):
        return []
    first = keys.start_layer
    tails = [tail for i in range(keys.layer_num) for tail in keys.get_compress_tail_buffers(first + i)]
    return [rows_of_bytes(tail) for tail in tails if len(tail)]  # a layer may use another's choice


def _in_rows(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Rows of bytes as longer ones of so many bytes."""
    count = size // tensor.shape[1]
    return tensor[: len(tensor) // count * count].view(-1, size)

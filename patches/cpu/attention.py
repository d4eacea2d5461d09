"""Attention on a CPU that costs what is new, not what is cached.

What: two methods of the attention backend ``torch_native``. For a prompt of which a part is cached, SGLang's
``_run_sdpa_forward_extend`` attends with a query for every token of the prompt and throws away those of the
cached ones: 13 new tokens behind 2,000 cached ones cost as much attention as 2,013 new ones, so that a hit is
worth far less than on a GPU, whose backends do not do this. Ours attends with the new queries only. And both,
``_run_sdpa_forward_decode`` too, gather keys and values by advanced indexing, which copies at a fifth of what
``index_select`` reaches on a CPU.

Keys, values and what each query sees are the same; results differ by rounding at most (a few 1e-7 in float32:
how many queries are multiplied at once decides that, as it does in SGLang between a hit and a miss). Encoders
and cross-attention stay SGLang's own, and so does what is not on a CPU.

Why no extension point serves: an attention backend of a name of our own could be registered, but the models'
tables of what to do for which backend know ``torch_native``.

For: SGLang 0.5.21.
Can go: when SGLang's backend attends with the new queries only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_ext.patches.base import Patch, Scope, Target, resolve

_CLASS = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_EXTEND, _DECODE = "_run_sdpa_forward_extend", "_run_sdpa_forward_decode"
_NAME = "native_attention"

Method = Callable[..., torch.Tensor]


def _extend(stock: Method) -> Method:
    @functools.wraps(stock)
    def run(
        backend: Any,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        if encoder_lens is not None or is_cross_attn or not causal or query.device.type != "cpu":
            return stock(
                backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
                extend_prefix_lens, extend_seq_lens, encoder_lens, scaling, enable_gqa, causal, is_cross_attn,
                sliding_window_size,
            )  # fmt: skip
        start = 0
        rows = zip(
            req_pool_indices.tolist(),
            seq_lens.tolist(),
            extend_prefix_lens.tolist(),
            extend_seq_lens.tolist(),
            strict=True,
        )
        for row, length, prefix, new in rows:
            end = start + new
            _attend(
                query[start:end],
                output[start:end],
                _gathered(k_cache, req_to_token[row, :length], query.dtype),
                _gathered(v_cache, req_to_token[row, :length], query.dtype),
                _mask(backend, new, length, prefix, sliding_window_size),
                scaling,
                enable_gqa,
            )
            start = end
        return output

    return run


def _decode(stock: Method) -> Method:
    @functools.wraps(stock)
    def run(
        backend: Any,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        if encoder_lens is not None or is_cross_attn or causal or query.device.type != "cpu":
            return stock(
                backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
                encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
            )  # fmt: skip
        for at, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
            # The last token sees all others, but for a window.
            window = sliding_window_size is not None and sliding_window_size > -1
            _attend(
                query[at : at + 1],
                output[at : at + 1],
                _gathered(k_cache, req_to_token[row, :length], query.dtype),
                _gathered(v_cache, req_to_token[row, :length], query.dtype),
                _mask(backend, 1, length, length - 1, sliding_window_size) if window else None,
                scaling,
                enable_gqa,
            )
        return output

    return run


def _gathered(pool: torch.Tensor, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a pool (slots, heads, size) has of a request's tokens, as (heads, tokens, size)."""
    return pool.index_select(0, tokens).to(dtype).movedim(0, 1)


def _mask(backend: Any, new: int, length: int, prefix: int, window: int | None) -> torch.Tensor | str | None:
    """Which keys each new query sees: ``"causal"`` where the queries are all of the prompt's."""
    if window is not None and window > -1:
        mask: torch.Tensor = backend._make_sliding_window_mask(
            q_len=new,
            kv_len=length,
            sliding_window_size=window,
            device=torch.device("cpu"),
            query_offset=prefix,
        )
        return mask
    if prefix == 0:
        return "causal"
    return torch.ones(new, length, dtype=torch.bool).tril_(prefix)


def _attend(
    query: torch.Tensor,
    output: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | str | None,
    scaling: float | None,
    enable_gqa: bool,
) -> None:
    """Attention of one request. query, output: (queries, heads, size); key, value: (heads, tokens, size)."""
    causal = isinstance(mask, str)
    found = scaled_dot_product_attention(
        query.movedim(0, 1).unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        attn_mask=None if isinstance(mask, str) else mask,
        enable_gqa=enable_gqa,
        scale=scaling,
        is_causal=causal,
    )
    output.copy_(found.squeeze(0).movedim(0, 1))


def apply() -> None:
    """Put both in the place of SGLang's."""
    if applied():
        return
    backend = resolve(_CLASS)
    for name, made in ((_EXTEND, _extend), (_DECODE, _decode)):
        ours = made(getattr(backend, name))
        ours.sglang_ext_patch = _NAME  # type: ignore[attr-defined]
        setattr(backend, name, ours)


def applied() -> bool:
    """Whether SGLang's backend calls ours."""
    backend = resolve(_CLASS)
    return all(
        getattr(getattr(backend, name), "sglang_ext_patch", None) == _NAME for name in (_EXTEND, _DECODE)
    )


PATCH = Patch(
    name=_NAME,
    summary="torch_native attends with the new tokens' queries only, and gathers keys and values faster",
    scope=Scope.CPU,
    targets=(
        Target(
            f"{_CLASS}.{_EXTEND}",
            "(self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, "
            "extend_prefix_lens, extend_seq_lens, encoder_lens=None, scaling=None, enable_gqa=False, "
            "causal=False, is_cross_attn=False, sliding_window_size=None)",
            "cd0f84f54931",
        ),
        Target(
            f"{_CLASS}.{_DECODE}",
            "(self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, "
            "encoder_lens=None, scaling=None, enable_gqa=False, causal=False, is_cross_attn=False, "
            "sliding_window_size=None)",
            "062856df45d2",
        ),
        Target(
            f"{_CLASS}._make_sliding_window_mask",
            "(*, q_len, kv_len, sliding_window_size, device, query_offset=0)",
            "c317bbc9c2f8",
        ),
    ),
    apply=apply,
    applied=applied,
)

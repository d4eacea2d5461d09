"""Attention on a CPU whose cost grows with the new tokens, not with the cached ones.

Change: three methods of the attention backend ``torch_native``, and a method that it lacks. For a prompt of
which a part is cached, SGLang's ``_run_sdpa_forward_extend`` attends with a query for every token of the
prompt and throws away those of the cached ones: 13 new tokens behind 2,000 cached ones cost as much attention
as 2,013 new ones, so that a hit is worth far less than on a GPU, whose backends do not do this. Ours attends
with the new queries only. And both, ``_run_sdpa_forward_decode`` too, gather keys and values by advanced
indexing, which copies at a fifth of the rate that ``index_select`` reaches on a CPU.

Layers with a sliding window may have a pool of their own, with slots of its own. SGLang's two methods read it
at the slots of the other layers, though it was written at its own: they read other tokens' KV, or past its
end, which ends the server. Ours read where it was written, and no token that the window has left behind.

Models with attention sinks (gpt-oss, MiMo-V2) pass them to ``forward``, and SGLang's fails on them. Ours
takes them: a sink is a logit of each head that takes part in the softmax, and has no value.

With DP attention, SGLang pads a batch with requests to the size of other replicas' and asks the backend for
their length, which ``torch_native`` does not give: the server ends in its first pass. Ours does.

Keys, values and the mask of each query are the same; results differ by rounding at most (a few 1e-7 in
float32: how many queries are multiplied at once decides that, as it does in SGLang between a hit and a miss).
Encoders and cross-attention stay SGLang's own, and so does attention on other devices.

Why no extension point serves: an attention backend of a name of our own could be registered, but the models'
tables of actions by backend contain ``torch_native``.

Can go: when SGLang's backend attends with the new queries only.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_ext.patches.base import Patch, Scope, is_in_place, put_in_place, resolve

_CLASS = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_EXTEND = "_run_sdpa_forward_extend"
_DECODE = "_run_sdpa_forward_decode"
_FORWARD = "forward"
_SINKS = "_sglang_ext_sinks"
"""Attribute of a backend: the sinks of the layer that it computes."""
_PADDING = "get_cpu_graph_seq_len_fill_value"
_NAME = "native_attention"

Method = Callable[..., torch.Tensor]


def _ours(stock: Method, *, extends: bool) -> Method:
    """Ours for one of the two: with new queries behind a prefix, or with a single query that sees all tokens
    before it."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def run(*args: Any, **options: Any) -> torch.Tensor:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        given = SimpleNamespace(**bound.arguments)
        plain = given.encoder_lens is None and not given.is_cross_attn and bool(given.causal) is extends
        if not plain or given.query.device.type != "cpu":
            return stock(*args, **options)
        lengths = given.seq_lens.tolist()
        fresh = given.extend_seq_lens.tolist() if extends else [1] * len(lengths)
        window = -1 if given.sliding_window_size is None else given.sliding_window_size
        start = 0
        for row, length, new in zip(given.req_pool_indices.tolist(), lengths, fresh, strict=True):
            prefix, end = length - new, start + new
            # The first token that the first query sees.
            first = max(prefix - window, 0) if window > -1 else 0
            tokens = _slots(given.self, given.req_to_token[row, first:length], window)
            _attend(
                given.query[start:end],
                given.output[start:end],
                _gathered(given.k_cache, tokens, given.query.dtype),
                _gathered(given.v_cache, tokens, given.query.dtype),
                _mask(given.self, new, length - first, prefix - first, window) if extends else None,
                given.scaling,
                given.enable_gqa,
                getattr(given.self, _SINKS, None),
            )
            start = end
        output: torch.Tensor = given.output
        return output

    return run


def _slots(backend: Any, tokens: torch.Tensor, window: int) -> torch.Tensor:
    """A request's slots in the pool of a layer, from those in the pool of layers without a window."""
    if window > -1 and backend.use_sliding_window_kv_pool:
        slots: torch.Tensor = backend.token_to_kv_pool.translate_loc_from_full_to_swa(tokens)
        return slots
    return tokens


def _gathered(pool: torch.Tensor, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A request's tokens, gathered from a pool (slots, heads, size), as (heads, tokens, size)."""
    return pool.index_select(0, tokens).to(dtype).movedim(0, 1)


def _mask(backend: Any, new: int, length: int, prefix: int, window: int) -> torch.Tensor | str:
    """The keys that each new query sees: ``"causal"`` where there are no keys before the first query's."""
    if window > -1:
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
    sinks: torch.Tensor | None,
) -> None:
    """Attention of one request. query, output: (queries, heads, size); key, value: (heads, tokens, size);
    sinks: (heads,)."""
    if sinks is not None:
        mask = _with_sinks(mask, sinks.to(query.dtype), len(query), key.shape[1])
        # The sink is one more key, of which only the mask counts.
        key, value = (torch.nn.functional.pad(each, (0, 0, 0, 1)) for each in (key, value))
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


def _with_sinks(
    mask: torch.Tensor | str | None, sinks: torch.Tensor, queries: int, keys: int
) -> torch.Tensor:
    """The addends of the logits (heads, queries, keys + 1), the last of which are the sinks."""
    added = sinks.new_zeros(len(sinks), queries, keys + 1)
    seen = torch.ones(queries, keys, dtype=torch.bool).tril_() if isinstance(mask, str) else mask
    if seen is not None:
        added[..., :-1].masked_fill_(~seen, -torch.inf)
    added[..., -1] = sinks.unsqueeze(1)
    return added


def _forward(stock: Method) -> Method:
    @functools.wraps(stock)
    def forward(backend: Any, *args: Any, sinks: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        if sinks is None:
            return stock(backend, *args, **options)
        setattr(backend, _SINKS, sinks)
        try:
            return stock(backend, *args, **options)
        finally:
            setattr(backend, _SINKS, None)

    return forward


def _padded_length(_backend: Any) -> int:
    """The length of a request that pads a batch to the size of other replicas' with DP attention: it attends
    to one token, whose result SGLang drops."""
    return 1


def apply() -> None:
    """Put ours in the place of SGLang's."""
    if applied():
        return
    backend = resolve(_CLASS)
    put_in_place(backend, _FORWARD, _forward(getattr(backend, _FORWARD)), _NAME)
    for name in (_EXTEND, _DECODE):
        put_in_place(backend, name, _ours(getattr(backend, name), extends=name == _EXTEND), _NAME)
    put_in_place(backend, _PADDING, _padded_length, _NAME)


def applied() -> bool:
    """Whether SGLang's backend calls ours."""
    return all(is_in_place(resolve(_CLASS), name, _NAME) for name in (_EXTEND, _DECODE, _FORWARD, _PADDING))


PATCH = Patch(
    name=_NAME,
    summary="torch_native attends with new tokens' queries only, reads windows where they were written, and "
    "takes attention sinks",
    scope=Scope.CPU,
    targets=(
        f"{_CLASS}.{_EXTEND}",
        f"{_CLASS}.{_DECODE}",
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch._pad_inputs_to_size",
        f"{_CLASS}._make_sliding_window_mask",
        f"{_CLASS}.init_forward_metadata",
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward",
        "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool.translate_loc_from_full_to_swa",
    ),
    apply=apply,
    applied=applied,
)

"""Gated delta rules (GDN, and KDA, which decays each key channel by itself), token by token in plain torch.

Of each head, the state is a matrix (values, keys). A token first decays it, then corrects its answer for
the token's key, and then answers the query::

    S = S * exp(decay)
    S = S + beta * (v - S k) k^T
    o = S q

SGLang's CUDA and Triton kernels compute chunks of tokens at once, with results that depend on where a chunk
begins. Here a prompt in two parts gives the bits of the whole, if states are kept in float32, and no answer
depends on other requests of its batch.

`GDN_KERNELS` and `GDN_OPERATORS` have the names, arguments and results of SGLang's CPU kernels. Tensors of
tokens are (1, tokens, heads, size): those of all requests, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import softplus

_EPSILON = 1e-6


def advance(
    states: torch.Tensor,
    slots: torch.Tensor,
    bounds: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:
    """Run each request's tokens through its state, which it changes; return the outputs, of the shape of v.

    Args:
        states: (slots, heads of v, size of v, size of k): the pool of states.
        slots: (requests,): each request's slot. A negative one is padding: its outputs are zero.
        bounds: (requests + 1,): where each request's tokens begin, and where the last one's end.
        q, k: (1, tokens, heads, size): scaled here to length 1, and q by the root of its size. Each head
            serves as many heads of v as there are more of those.
        v: (1, tokens, heads of v, size of v).
        decay: (1, tokens, heads of v), or (1, tokens, heads of v, size of k): the logarithm.
        beta: (1, tokens, heads of v).
    """
    group = v.shape[2] // k.shape[2]
    query = _normalized(q[0]).mul_(q.shape[-1] ** -0.5).repeat_interleave(group, dim=1).unsqueeze(2)
    key = _normalized(k[0]).repeat_interleave(group, dim=1).unsqueeze(2)
    # In double, since torch's exp in float32 has other bits at the end of a vector.
    factor = decay[0].double().exp().float()
    factor = factor[..., None, None] if factor.ndim == 2 else factor.unsqueeze(2)
    value, strength = v[0].float(), beta[0].float().unsqueeze(-1)
    output = torch.zeros_like(value)
    for slot, (start, end) in zip(slots.tolist(), pairwise(bounds.tolist()), strict=True):
        if slot < 0 or start == end:
            continue
        state = states[slot].float()
        for token in range(start, end):
            state = state * factor[token]
            missing = (value[token] - (state * key[token]).sum(-1)) * strength[token]
            state += missing.unsqueeze(-1) * key[token]
            output[token] = (state * query[token]).sum(-1)
        states[slot] = state.to(states.dtype)
    return output.to(v.dtype).unsqueeze(0)


def _normalized(rows: torch.Tensor) -> torch.Tensor:
    rows = rows.float()
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + _EPSILON)


def fused_gdn_gating_cpu(
    A_log: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logarithms of the decays, and beta, both (1, tokens, heads) float32.

    Args:
        A_log, dt_bias: (heads,).
        a, b: (tokens, heads).
    """
    decay = -A_log.double().exp() * softplus(a.double() + dt_bias.double())
    return decay.float().unsqueeze(0), b.double().sigmoid().float().unsqueeze(0)


def chunk_gated_delta_rule_cpu(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_options: Any,
) -> tuple[torch.Tensor, None, None]:
    """Prefill: outputs, and None for what only GPUs use."""
    return advance(initial_state, initial_state_indices, cu_seqlens, q, k, v, g, beta), None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_options: Any,
) -> torch.Tensor:
    """Decode: one token of each request.

    Raises:
        NotImplementedError: for the verification of drafts.
    """
    if _options.get("disable_state_update"):
        raise NotImplementedError("speculative decoding of a model with linear-attention layers on a CPU")
    decay, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    return advance(initial_state_source, initial_state_indices, cu_seqlens, q, k, v, decay, beta)


GDN_KERNELS: dict[str, Callable[..., Any]] = {"chunk_gated_delta_rule_cpu": chunk_gated_delta_rule_cpu}
"""Of ``sgl_kernel.mamba``."""

GDN_OPERATORS: dict[str, Callable[..., Any]] = {
    operator.__name__: operator
    for operator in (fused_gdn_gating_cpu, fused_sigmoid_gating_delta_rule_update_cpu)
}
"""Of ``torch.ops.sgl_kernel``."""

"""The scan of Mamba2 layers (state-space duality), token by token in plain torch.

Change: six functions that SGLang's ``MambaMixer2`` calls. On a CPU, SGLang imports two of them from Triton,
which refuses without a GPU driver, and none of the short convolution. Of each head, the state is a matrix
(size of a head, size of the state)::

    S = S * exp(dt * A) + dt * x B^T
    y = S C + D x

A prompt in two parts gives the bits of the whole, if states are kept in float32, and no request's answer
depends on others of its batch.

Why no extension point serves: SGLang imports the kernels by device at the top of the module.

Can go: when SGLang has a torch form for CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import softplus

from sglang_ext.patches.base import Patch, Scope, resolve
from sglang_ext.patches.cpu.short_conv import PAD_SLOT_ID, causal_conv1d_fn_cpu, causal_conv1d_update_cpu

_NAME = "mamba2"
_MODULE = "sglang.srt.layers.attention.mamba.mamba"
_MIXER = f"{_MODULE}.MambaMixer2.forward"


def advance(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one request's tokens through its state; return outputs (tokens, heads, size), and the new state.

    Args:
        state: (heads, size, size of the state) float32.
        x: (tokens, heads, size).
        dt: (tokens, heads): the step before its bias and softplus.
        a, d, bias: (heads,): the decay's rate, which is negative, the skip's weight, and the step's bias.
        b, c: (tokens, groups, size of the state): the vectors B and C; heads that follow each other share a
            group.
    """
    heads = x.shape[1]
    # In double, since torch's exp in float32 has other bits at the end of a vector.
    step = softplus(dt.double() + bias.double())
    decay = (step * a.double()).exp().float()[..., None, None]
    written = (x.float() * step.float().unsqueeze(-1)).unsqueeze(-1)
    inputs, queries = (
        each.float().repeat_interleave(heads // each.shape[1], dim=1).unsqueeze(2) for each in (b, c)
    )
    found = torch.empty_like(x, dtype=torch.float32)
    for token in range(len(x)):
        state = state * decay[token] + written[token] * inputs[token]
        found[token] = (state * queries[token]).sum(-1)
    return found + x.float() * d.float().unsqueeze(-1), state


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_states: torch.Tensor | None,
    out: torch.Tensor,
    state_dtype: torch.dtype,
    **_options: Any,
) -> tuple[None, torch.Tensor, None]:
    """Prefill: write the outputs into ``out``; return each request's new state, and None for snapshots.

    Args:
        x, dt, B, C, out: (1, tokens, ...), all requests one after the other; the rest as for `advance`.
        cu_seqlens: (requests + 1,): where each request begins, and where the last one ends.
        initial_states: (requests, heads, size, size of the state); zeros without it.
    """
    bounds = cu_seqlens.tolist()
    states = x.new_zeros((len(bounds) - 1, *x.shape[2:], B.shape[-1]), dtype=state_dtype)
    if initial_states is not None:
        states.copy_(initial_states)
    for request, (start, end) in enumerate(pairwise(bounds)):
        x_, dt_, b_, c_ = (each[0, start:end] for each in (x, dt, B, C))
        found, state = advance(states[request].float(), x_, dt_, A, b_, c_, D, dt_bias)
        out[0, start:end] = found.to(out.dtype)
        states[request] = state.to(state_dtype)
    return None, states, None


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    *,
    dt_bias: torch.Tensor,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    **options: Any,
) -> None:
    """Decode: one token of each request; changes its slot of ``state``, and writes ``out``.

    Args:
        state: (slots, heads, size, size of the state).
        x, out: (requests, heads, size). B, C: (requests, groups, size of the state).
        dt, A, D, dt_bias: as for `advance`, repeated over the sizes.
        state_batch_indices: (requests,): each request's slot. A negative one is padding: its output is zero.

    Raises:
        NotImplementedError: for the verification of drafts.
    """
    if options.get("disable_state_update"):
        raise NotImplementedError("speculative decoding of a model with Mamba2 layers on a CPU")
    for row, slot in enumerate(state_batch_indices.tolist()):
        if slot == PAD_SLOT_ID:
            out[row] = 0
            continue
        one = slice(row, row + 1)
        found, after = advance(
            *(state[slot].float(), x[one], dt[one, :, 0], A[:, 0, 0]),
            *(B[one], C[one], D[:, 0], dt_bias[:, 0]),
        )
        out[row] = found[0].to(out.dtype)
        state[slot] = after.to(state.dtype)


_OURS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv1d_fn_cpu,
    "causal_conv1d_update": causal_conv1d_update_cpu,
    "causal_conv1d_fn_triton": causal_conv1d_fn_cpu,
    "causal_conv1d_update_triton": causal_conv1d_update_cpu,
    "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
    "selective_state_update": selective_state_update,
}


def apply() -> None:
    """Put ours in the place of SGLang's, and where it has none."""
    for name, ours in _OURS.items():
        setattr(resolve(_MODULE), name, ours)


def applied() -> bool:
    """Whether SGLang's mixer calls ours."""
    return all(getattr(resolve(_MODULE), name, None) is ours for name, ours in _OURS.items())


PATCH = Patch(
    name=_NAME,
    summary="the scan of Mamba2 layers in plain torch",
    scope=Scope.CPU,
    targets=(_MIXER,),
    apply=apply,
    applied=applied,
)

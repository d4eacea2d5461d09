"""The short convolution of models with states, in plain torch: LFM2, and the front of other state layers.

Change: SGLang's LFM2 calls ``causal_conv1d_fn`` and ``causal_conv1d_update``, which launch Triton's kernels
on every device but CUDA's; without a GPU driver Triton refuses ("0 active drivers"). Ours take their place.
SGLang's other layers with a short convolution import both from ``sgl_kernel.mamba`` on a CPU, so the stand-in
(`kernels`) has them too.

A channel's output is ``sum_k weight[k] * x[t - width + 1 + k]``. A *state* is the inputs of the last
``width - 1`` tokens of a request: (channels, width - 1). A token's output has the same bits in whichever
chunk it is computed: sums run over ``k`` alone, in one order.

Why no extension point serves: SGLang chooses the kernel by device inside the two functions.

Can go: when SGLang has a torch form of its own, as of most other kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_ext.patches.base import Patch, Scope, is_in_place, put_in_place, resolve

_MODULE = "sglang.srt.layers.attention.mamba.causal_conv1d"
_NAME = "short_conv"
PAD_SLOT_ID = -1
"""The slot of a row that only fills up a batch, as in SGLang."""


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = PAD_SLOT_ID,
    seq_lens_cpu: Any = None,
) -> torch.Tensor:
    """Convolve the new tokens of a batch of prompts, and leave each request's state behind its last one.

    Args:
        x: (channels, tokens), request after request.
        weight: (channels, width); bias: (channels,).
        conv_states: (slots, channels, width - 1), written in place.
        query_start_loc: (requests + 1,): where each request begins in ``x``, and where the last one ends.
        cache_indices: (requests,): each request's slot; one with ``pad_slot_id`` is skipped.
        has_initial_state: (requests,) bool: whether to continue from the slot's state, not from zeros.
        seq_lens_cpu: the requests' lengths, which ``query_start_loc`` has too.

    Returns:
        (channels, tokens); zeros for requests that are skipped, and for tokens behind the last request.
    """
    found = torch.zeros_like(x)
    starts = query_start_loc.tolist()
    for request, slot in enumerate(cache_indices.tolist()):
        start, end = starts[request], starts[request + 1]
        if slot == pad_slot_id or start == end:
            continue
        state = conv_states[slot]
        continues = has_initial_state is not None and bool(has_initial_state[request])
        before = state if continues else torch.zeros_like(state)
        found[:, start:end] = _convolve(x[:, start:end], before, weight, bias, activation, into=state)
    return found


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | bool | None = None,
    cache_seqlens: None = None,
    conv_state_indices: torch.Tensor | None = None,
    pad_slot_id: int = PAD_SLOT_ID,
) -> torch.Tensor:
    """Convolve the next token of each request, or its next few, and move its state on.

    Args:
        x: (requests, channels) or (requests, channels, tokens).
        conv_state: (slots, channels, width - 1), written in place.
        weight, bias, pad_slot_id: as for `causal_conv1d_fn_cpu`.
        cache_seqlens: SGLang's states that are ring buffers; no caller has them on a CPU.
        conv_state_indices: (requests,): each request's slot; without it, request i has slot i.

    Returns:
        As ``x``; zeros for requests that are skipped.
    """
    found = torch.zeros_like(x)
    slots = torch.arange(len(x)) if conv_state_indices is None else conv_state_indices[: len(x)].long()
    real = (slots != pad_slot_id).nonzero().flatten()
    new = x[real] if x.dim() == 3 else x[real].unsqueeze(-1)
    state = conv_state[slots[real]]
    convolved = _convolve(new, state, weight, bias, activation, into=state)
    found[real] = convolved if x.dim() == 3 else convolved.squeeze(-1)
    conv_state[slots[real]] = state
    return found


def _convolve(
    x: torch.Tensor,
    before: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | bool | None,
    *,
    into: torch.Tensor,
) -> torch.Tensor:
    """Convolve ``x`` (..., channels, tokens) behind ``before`` (..., channels, width - 1), in float32.

    Writes the state behind ``x`` into ``into``, which may be ``before``.
    """
    width, tokens = weight.shape[-1], x.shape[-1]
    if before.shape[-1] != width - 1:
        raise NotImplementedError(f"states of {before.shape[-1]} tokens with a convolution of width {width}")
    inputs = torch.cat((before.to(x.dtype), x), dim=-1)
    into.copy_(inputs[..., tokens:])
    taps = weight.float().unbind(-1)
    total = inputs[..., :tokens].float() * taps[0].unsqueeze(-1)
    for k in range(1, width):
        total += inputs[..., k : k + tokens].float() * taps[k].unsqueeze(-1)
    if bias is not None:
        total += bias.float().unsqueeze(-1)
    if activation in ("silu", "swish", True):
        # In double, since torch's exp in float32 has other bits at the end of a vector.
        total = torch.nn.functional.silu(total.double())
    return total.to(x.dtype)


KERNELS: dict[str, Callable[..., Any]] = {
    kernel.__name__: kernel for kernel in (causal_conv1d_fn_cpu, causal_conv1d_update_cpu)
}
"""By the names under which SGLang imports them from ``sgl_kernel.mamba``."""

_TRITONS: dict[str, Callable[..., torch.Tensor]] = {
    "_causal_conv1d_fn_triton": causal_conv1d_fn_cpu,
    "_causal_conv1d_update_triton": causal_conv1d_update_cpu,
}
"""Triton's, by the names under which SGLang's two functions call them."""


def apply() -> None:
    """Put both in the place of Triton's."""
    for name, ours in _TRITONS.items():
        put_in_place(resolve(_MODULE), name, ours, _NAME)


def applied() -> bool:
    """Whether SGLang's functions call ours."""
    return all(is_in_place(resolve(_MODULE), name, _NAME) for name in _TRITONS)


PATCH = Patch(
    name=_NAME,
    summary="the short convolution of LFM2 and of state layers in plain torch",
    scope=Scope.CPU,
    targets=(f"{_MODULE}.causal_conv1d_fn", f"{_MODULE}.causal_conv1d_update"),
    apply=apply,
    applied=applied,
)

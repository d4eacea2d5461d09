"""Kimi's delta attention (KDA) on a CPU, by the recurrence of `delta_rule`.

Change: three functions that SGLang's KDA backend calls. On a CPU, it imports the convolution of prompts from
Triton, which refuses without a GPU driver, and neither the recurrence of prefill nor that of decode.

Why no extension point serves: the backend has one per kernel library, none of which runs on a CPU.

Can go: when SGLang has a torch form for CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import softplus

from sglang_ext.patches.base import Patch, Scope, resolve
from sglang_ext.patches.cpu.delta_rule import advance
from sglang_ext.patches.cpu.short_conv import causal_conv1d_fn_cpu

_NAME = "kda"
_LINEAR = "sglang.srt.layers.attention.linear"
_KERNEL = f"{_LINEAR}.kernels.kda_triton"
_BACKEND = f"{_LINEAR}.kda_backend"


def decays(
    gate: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None
) -> torch.Tensor:
    """The logarithms of the decays, (1, tokens, heads, size of k) float32.

    Args:
        gate: the projection, of that shape, or with any of its dimensions merged.
        a_log: heads in any shape.
        dt_bias: (heads * size of k,).
        lower_bound: of the decays, where the model has one (its "safe gate").
    """
    rate = a_log.double().exp().view(-1, 1)
    shifted = gate.double().view(1, -1, len(rate), dt_bias.numel() // len(rate))
    shifted = shifted + dt_bias.double().view(len(rate), -1)
    # In double, since torch's exp in float32 has other bits at the end of a vector.
    if lower_bound is not None:
        return (lower_bound * (rate * shifted).sigmoid()).float()
    return (-rate * softplus(shifted)).float()


def _run(
    states: torch.Tensor,
    slots: torch.Tensor,
    bounds: torch.Tensor,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    decay: torch.Tensor,
    beta: torch.Tensor,
    beta_is_raw: bool,
) -> torch.Tensor:
    if beta_is_raw:
        beta = beta.double().sigmoid().float()
    return advance(states, slots, bounds, *qkv, decay, beta.view(decay.shape[:3]))


def chunk_kda(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None = None,
    beta_is_raw: bool = False,
    **_options: Any,
) -> torch.Tensor:
    """Prefill: ``g`` as projected, and ``beta`` too where it is raw; the rest as for `delta_rule.advance`."""
    decay = decays(g, A_log, dt_bias, lower_bound)
    return _run(initial_state, initial_state_indices, cu_seqlens, (q, k, v), decay, beta, beta_is_raw)


def fused_sigmoid_gating_delta_rule_update(
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
    lower_bound: float | None = None,
    **options: Any,
) -> torch.Tensor:
    """Decode: one token of each request.

    Raises:
        NotImplementedError: for the verification of drafts.
    """
    if options.get("disable_state_update"):
        raise NotImplementedError("speculative decoding of a model with KDA layers on a CPU")
    decay = decays(a, A_log, dt_bias, lower_bound)
    return _run(
        initial_state_source, initial_state_indices, cu_seqlens, (q, k, v), decay, b, beta_is_raw=True
    )


_OURS: dict[tuple[str, str], Callable[..., Any]] = {
    (_KERNEL, "chunk_kda"): chunk_kda,
    (_KERNEL, "fused_sigmoid_gating_delta_rule_update"): fused_sigmoid_gating_delta_rule_update,
    (_BACKEND, "causal_conv1d_fn"): causal_conv1d_fn_cpu,
}


def apply() -> None:
    """Put ours in the place of SGLang's, and where it has none."""
    for (module, name), ours in _OURS.items():
        setattr(resolve(module), name, ours)


def applied() -> bool:
    """Whether SGLang's backend calls ours."""
    return all(getattr(resolve(module), name, None) is ours for (module, name), ours in _OURS.items())


PATCH = Patch(
    name=_NAME,
    summary="Kimi's delta attention in plain torch",
    scope=Scope.CPU,
    targets=(
        f"{_KERNEL}.TritonKDAKernel.extend",
        f"{_KERNEL}.TritonKDAKernel.decode",
        f"{_BACKEND}.KDAAttnBackend.forward_extend",
        f"{_BACKEND}.KDAAttnBackend.forward_decode",
    ),
    apply=apply,
    applied=applied,
)

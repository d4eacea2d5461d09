"""Operators that SGLang's Qwen models call on a CPU, in plain torch.

Change: a shared expert with a gate (Qwen2-MoE, Qwen3-Next, Qwen3.5-MoE) launches two Triton kernels, which
refuse without a GPU driver; ours take their place. Those that Qwen3.5 calls in ``torch.ops.sgl_kernel`` are
in the stand-in (`kernels`).

Why no extension point serves: SGLang calls Triton's on every device but CPUs with AMX.

Can go: when SGLang has a torch form for CPUs without AMX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_ext.patches.base import Patch, Scope, is_in_place, put_in_place, resolve

_NAME = "shared_experts"
_MODULE = "sglang.srt.models.qwen2_moe"
_ELEMENTWISE = "sglang.kernels.ops.elementwise.elementwise"


def fused_qk_gemma_rmsnorm_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    epsilon: float,
    head_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norms of queries and keys, (tokens * heads, head_size) each. q, k: (tokens, heads * head_size)."""
    return _gemma_norm(q, q_weight, epsilon, head_size), _gemma_norm(k, k_weight, epsilon, head_size)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    epsilon: float,
    head_size: int,
    heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same where each head's gate lies behind its query; and the gates, (tokens, heads, head_size)."""
    q, gate = q_gate.reshape(-1, heads, 2, head_size).unbind(2)
    return (
        _gemma_norm(q, q_weight, epsilon, head_size),
        _gemma_norm(k, k_weight, epsilon, head_size),
        gate.contiguous(),
    )


def _gemma_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float, size: int) -> torch.Tensor:
    rows = rows.reshape(-1, size)
    scaled = torch.rms_norm(rows.float(), (size,), eps=epsilon)
    return (scaled * (1 + weight.float())).to(rows.dtype)


def fused_sigmoid_mul_cpu(rows: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Multiply by the sigmoids of the gates, in place."""
    return rows.mul_(gate.reshape(rows.shape).sigmoid())


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: torch.Tensor, ba: torch.Tensor, k_heads: int, v_heads: int, k_size: int, v_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cut the projections of a GDN layer: q, k and v in one (tokens, sizes), z, b and a by head."""
    qkv, z = qkvz.split([2 * k_heads * k_size + v_heads * v_size, v_heads * v_size], dim=-1)
    b, a = ba.split(v_heads, dim=-1)
    return qkv.contiguous(), z.reshape(-1, v_heads, v_size), b.contiguous(), a.contiguous()


QWEN_OPERATORS: dict[str, Callable[..., Any]] = {
    operator.__name__: operator
    for operator in (
        fused_qk_gemma_rmsnorm_cpu,
        fused_qk_gemma_rmsnorm_with_gate_cpu,
        fused_qkvzba_split_reshape_cat_contiguous_cpu,
        fused_sigmoid_mul_cpu,
    )
}


def fused_gate_sigmoid_mul(
    hidden_states: torch.Tensor, gate_weight: torch.Tensor, shared_output: torch.Tensor
) -> torch.Tensor:
    """The shared expert's output (tokens, hidden) times the sigmoid of its gate; gate_weight: (hidden,)."""
    gate = (hidden_states.float() * gate_weight.float()).sum(-1, keepdim=True).sigmoid()
    return (shared_output.float() * gate).to(shared_output.dtype)


def fused_gate_sigmoid_mul_add(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> None:
    """Add the same to the output of the other experts, in place."""
    final_hidden_states += fused_gate_sigmoid_mul(hidden_states, gate_weight, shared_output)


_OURS: dict[str, Callable[..., Any]] = {
    "fused_gate_sigmoid_mul": fused_gate_sigmoid_mul,
    "fused_gate_sigmoid_mul_add": fused_gate_sigmoid_mul_add,
}


def apply() -> None:
    """Put both in the place of SGLang's."""
    for name, ours in _OURS.items():
        put_in_place(resolve(_MODULE), name, ours, _NAME)


def applied() -> bool:
    """Whether SGLang's shared experts call ours."""
    return all(is_in_place(resolve(_MODULE), name, _NAME) for name in _OURS)


PATCH = Patch(
    name=_NAME,
    summary="shared experts with a gate run without Triton",
    scope=Scope.CPU,
    targets=(
        f"{_ELEMENTWISE}.fused_gate_sigmoid_mul",
        f"{_ELEMENTWISE}.fused_gate_sigmoid_mul_add",
    ),
    apply=apply,
    applied=applied,
)

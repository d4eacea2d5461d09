"""Operators of ``torch.ops.sgl_kernel`` that SGLang's Qwen3.5 calls on a CPU, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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

"""Operators of models with states beside their recurrences: norms with a gate, and Qwen3.5's operators."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.patches.cpu import gated_norms
from sglang_ext.patches.cpu.qwen_operators import (
    PATCH,
    fused_gate_sigmoid_mul,
    fused_gate_sigmoid_mul_add,
    fused_qk_gemma_rmsnorm_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
    fused_sigmoid_mul_cpu,
)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("first", [True, False], ids=["norm-gate", "gate-norm"])
@pytest.mark.parametrize("groups", [None, 8])
def test_a_gated_norm_is_sglangs_own_reference(gated: bool, first: bool, groups: int | None) -> None:
    reference = importlib.import_module("sglang.kernels.ops.attention.fla.layernorm_gated").rms_norm_ref
    rows, gate, weight = torch.randn(7, 32), torch.randn(7, 32), torch.randn(32)
    z = gate if gated else None
    norm: Any = SimpleNamespace(
        weight=weight, eps=1e-5, activation="swish", group_size=groups, norm_before_gate=first
    )
    expected = reference(rows, weight, None, z=z, eps=1e-5, group_size=groups, norm_before_gate=first)
    torch.testing.assert_close(gated_norms.gated_norm(norm, rows, z), expected)


def test_sglangs_norms_run_here_once_patched() -> None:
    gated_norms.apply()
    gated_norms.apply()
    assert gated_norms.applied()
    rows, gate = torch.randn(4, 16), torch.randn(4, 16)
    fla = "sglang.kernels.ops.attention.fla"
    plain = importlib.import_module(f"{fla}.layernorm_gated").RMSNorm(16)
    fused = importlib.import_module(f"{fla}.fused_norm_gate").FusedRMSNormGated(16, activation="sigmoid")
    torch.nn.init.ones_(fused.weight)
    found = torch.nn.functional.rms_norm(rows, (16,), eps=1e-5)
    torch.testing.assert_close(plain(rows, gate).detach(), found * torch.nn.functional.silu(gate))
    torch.testing.assert_close(fused(rows, gate).detach(), found * gate.sigmoid())


def test_qwens_norms_and_gates() -> None:
    tokens, heads, size = 3, 4, 8
    q_gate, k = torch.randn(tokens, heads * 2 * size), torch.randn(tokens, 2 * size)
    q_weight, k_weight = torch.randn(2, size)
    q, normed, gate = fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, 1e-6, size, heads)
    by_head = q_gate.view(tokens, heads, 2 * size)
    assert torch.equal(gate.view(tokens, heads, size), by_head[..., size:])
    queries = by_head[..., :size].reshape(tokens, -1)
    expected = fused_qk_gemma_rmsnorm_cpu(queries, k, q_weight, k_weight, 1e-6, size)
    assert torch.equal(q, expected[0])
    assert torch.equal(normed, expected[1])
    rows = queries.view(-1, size)
    scale = (rows.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    torch.testing.assert_close(q, rows * scale * (1 + q_weight))
    product, gates = torch.randn(2, tokens, 16)
    multiplied = product * gates.sigmoid()
    fused_sigmoid_mul_cpu(product, gates)
    torch.testing.assert_close(product, multiplied)


def test_the_projections_of_a_gated_delta_layer_are_cut_at_the_heads() -> None:
    k_heads, v_heads, k_size, v_size = 2, 4, 3, 5
    qkvz = torch.randn(6, 2 * k_heads * k_size + 2 * v_heads * v_size)
    ba = torch.randn(6, 2 * v_heads)
    qkv, z, b, a = fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, k_heads, v_heads, k_size, v_size)
    assert torch.equal(torch.cat([qkv, z.flatten(1)], dim=1), qkvz)
    assert z.shape == (6, v_heads, v_size)
    assert torch.equal(torch.cat([b, a], dim=1), ba)


def test_a_shared_experts_output_is_gated_and_added() -> None:
    PATCH.apply()
    PATCH.apply()
    assert PATCH.applied()
    hidden, shared, others = torch.randn(3, 5, 16)
    weight, expected = torch.randn(16), others.clone()
    for token in range(5):
        expected[token] += shared[token] * (hidden[token] @ weight).sigmoid()
    gated = fused_gate_sigmoid_mul(hidden, weight, shared)
    torch.testing.assert_close(gated, expected - others)
    fused_gate_sigmoid_mul_add(hidden, weight, shared, others)
    torch.testing.assert_close(others, expected)

"""Kimi's delta attention: its gates, and prefill against decode. The recurrence: `test_delta_rule.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import softplus

from sglang_ext.patches.cpu import kda

HEADS, SIZE = 3, 8


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


GATES = {"A_log": draw(1, 1, HEADS, 1, seed=1), "dt_bias": draw(HEADS * SIZE, seed=2)}


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_decays_are_those_of_the_formula_whatever_the_chunk(lower_bound: float | None) -> None:
    gate = draw(1, 9, HEADS, SIZE) * 4
    decays = kda.decays(gate, GATES["A_log"], GATES["dt_bias"], lower_bound)
    shifted = (gate[0] + GATES["dt_bias"].view(HEADS, SIZE)).double()
    rate = GATES["A_log"].view(HEADS, 1).double().exp()
    expected = -rate * softplus(shifted) if lower_bound is None else lower_bound * (rate * shifted).sigmoid()
    torch.testing.assert_close(decays[0].double(), expected, rtol=1e-6, atol=1e-8)
    for token in range(9):
        # Decode's gate is not cut into heads.
        alone = kda.decays(gate[0, token].view(1, -1), GATES["A_log"], GATES["dt_bias"], lower_bound)
        assert torch.equal(alone[0, 0], decays[0, token])


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "activated"])
def test_decode_gives_the_bits_of_prefill(raw: bool) -> None:
    """SGLang 0.5.21 activates beta before prefill, later releases leave it to the kernel."""
    count = 12
    q, k, v, gate = (draw(1, count, HEADS, SIZE, seed=seed) for seed in range(3, 7))
    beta = draw(1, count, HEADS, seed=7)
    prefilled = draw(4, HEADS, SIZE, SIZE, seed=8)
    decoded = prefilled.clone()
    output = kda.chunk_kda(
        **{"q": q, "k": k, "v": v, "g": gate, **GATES},
        beta=beta if raw else beta.double().sigmoid().float(),
        initial_state=prefilled,
        initial_state_indices=torch.tensor([2]),
        cu_seqlens=torch.tensor([0, count]),
        beta_is_raw=raw,
    )
    for token in range(count):
        one = slice(token, token + 1)
        # Two requests of a batch, of which the first is padding.
        answer = kda.fused_sigmoid_gating_delta_rule_update(
            **{name: each[:, [token, token]] for name, each in (("q", q), ("k", k), ("v", v))},
            **GATES,
            a=gate[0, [token, token]].flatten(1),
            b=beta[:, [token, token]],
            initial_state_source=decoded,
            initial_state_indices=torch.tensor([-1, 2]),
            cu_seqlens=torch.tensor([0, 1, 2]),
        )
        assert torch.equal(answer[:, 1], output[:, one][:, 0])
        assert not answer[:, 0].any()
    assert torch.equal(decoded, prefilled)


def test_the_verification_of_drafts_is_refused() -> None:
    names = ("A_log", "dt_bias", "q", "k", "v", "a", "b", "cu_seqlens", "initial_state_source")
    given: dict[str, Any] = dict.fromkeys((*names, "initial_state_indices"), torch.zeros(1))
    with pytest.raises(NotImplementedError, match="speculative"):
        kda.fused_sigmoid_gating_delta_rule_update(**given, disable_state_update=True)


def test_sglangs_backend_calls_them_once_patched() -> None:
    kda.apply()
    kda.apply()
    assert kda.applied()

"""The gated delta rule in torch: held to its formula, to itself in parts, and to its slots."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from sglang_ext.patches.cpu.delta_rule import (
    GDN_KERNELS,
    GDN_OPERATORS,
    advance,
    chunk_gated_delta_rule_cpu,
    fused_gdn_gating_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
)

SLOTS, K_HEADS, V_HEADS, K_SIZE, V_SIZE = 5, 2, 6, 16, 24

Tokens = dict[str, torch.Tensor]


def tokens(count: int, *, by_channel: bool = False, seed: int = 3) -> Tokens:
    """Random arguments of `advance` for so many tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(1, count, *shape, generator=generator)

    decay = draw(V_HEADS, K_SIZE) if by_channel else draw(V_HEADS)
    return {
        "q": draw(K_HEADS, K_SIZE),
        "k": draw(K_HEADS, K_SIZE),
        "v": draw(V_HEADS, V_SIZE),
        "decay": -decay.exp() / 8,
        "beta": draw(V_HEADS).sigmoid(),
    }


def pool() -> torch.Tensor:
    return torch.randn(SLOTS, V_HEADS, V_SIZE, K_SIZE, generator=torch.Generator().manual_seed(1))


def run(states: torch.Tensor, given: Tokens, slots: list[int], bounds: list[int]) -> torch.Tensor:
    return advance(states, torch.tensor(slots), torch.tensor(bounds, dtype=torch.int32), **given)


def part(given: Tokens, start: int, end: int) -> Tokens:
    return {name: tensor[:, start:end] for name, tensor in given.items()}


def by_formula(state: torch.Tensor, given: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs (tokens, heads, size) and the state behind them, head by head, in float64."""
    wide = {name: tensor[0].double() for name, tensor in given.items()}
    state = state.double().clone()
    found = torch.zeros_like(wide["v"])
    for token in range(len(found)):
        for head in range(V_HEADS):
            shared = head // (V_HEADS // K_HEADS)
            q, k = wide["q"][token, shared], wide["k"][token, shared]
            q, k = q / (q @ q + 1e-6).sqrt() / K_SIZE**0.5, k / (k @ k + 1e-6).sqrt()
            decayed = state[head] * wide["decay"][token, head].exp()
            missing = wide["v"][token, head] - decayed @ k
            state[head] = decayed + wide["beta"][token, head] * torch.outer(missing, k)
            found[token, head] = state[head] @ q
    return found, state


@pytest.mark.parametrize("by_channel", [False, True], ids=["gdn", "kda"])
def test_outputs_and_states_are_those_of_the_formula(by_channel: bool) -> None:
    states, given = pool(), tokens(40, by_channel=by_channel)
    found, state = by_formula(states[2], given)
    output = run(states, given, [2], [0, 40])
    torch.testing.assert_close(output[0].double(), found, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states[2].double(), state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by_channel", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("cut", [1, 7, 16, 39])
def test_two_chunks_give_the_bits_of_the_whole(by_channel: bool, cut: int) -> None:
    given = tokens(40, by_channel=by_channel)
    whole, parts = pool(), pool()
    output = run(whole, given, [2], [0, 40])
    first = run(parts, part(given, 0, cut), [2], [0, cut])
    second = run(parts, part(given, cut, 40), [2], [0, 40 - cut])
    assert torch.equal(torch.cat([first, second], dim=1), output)
    assert torch.equal(parts, whole)


def test_requests_of_a_batch_do_not_see_each_other() -> None:
    given, together, alone = tokens(30), pool(), pool()
    output = run(together, given, [3, 1, 4], [0, 11, 12, 30])
    for slot, start, end in ((1, 11, 12), (4, 12, 30), (3, 0, 11)):
        assert torch.equal(
            run(alone, part(given, start, end), [slot], [0, end - start]), output[:, start:end]
        )
    assert torch.equal(together, alone)


def test_other_slots_and_padding_stay_as_they_are() -> None:
    states, given = pool(), tokens(20)
    output = run(states, given, [-1, 2, -1], [0, 4, 18, 20])
    assert not output[0, :4].any()
    assert not output[0, 18:].any()
    assert output[0, 4:18].any()
    before = pool()
    changed = [slot for slot in range(SLOTS) if not torch.equal(states[slot], before[slot])]
    assert changed == [2]


def test_a_state_that_is_damaged_in_one_number_gives_other_outputs() -> None:
    """The twin of the tests above: outputs depend on the state, long after."""
    given = tokens(40)
    whole, damaged = pool(), pool()
    damaged[2, :, 0, 0] += 1.0
    output, other = run(whole, given, [2], [0, 40]), run(damaged, given, [2], [0, 40])
    assert (output - other)[0, 0].abs().max() > 1e-3
    assert (output - other)[0, -1].abs().max() > 1e-7


def gates(count: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    a, b = torch.randn(2, count, V_HEADS, generator=generator) * 8
    a_log, dt_bias = torch.randn(2, V_HEADS, generator=generator)
    return a_log, a, b, dt_bias


def test_gates_are_those_of_the_formula_whatever_the_chunk() -> None:
    a_log, a, b, dt_bias = gates(33)
    decay, beta = fused_gdn_gating_cpu(a_log, a, b, dt_bias)
    softplus = torch.log1p((a + dt_bias).double().exp())
    torch.testing.assert_close(decay[0].double(), -a_log.double().exp() * softplus, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(beta[0].double(), 1 / (1 + (-b.double()).exp()), rtol=1e-6, atol=1e-8)
    for token in range(33):
        one = slice(token, token + 1)
        alone = fused_gdn_gating_cpu(a_log, a[one], b[one], dt_bias)
        assert torch.equal(alone[0][0], decay[0, one])
        assert torch.equal(alone[1][0], beta[0, one])


def test_decode_gives_the_bits_of_prefill() -> None:
    given, (a_log, a, b, dt_bias) = tokens(12), gates(12)
    prefilled, decoded = pool(), pool()
    decay, beta = fused_gdn_gating_cpu(a_log, a, b, dt_bias)
    qkv = {name: given[name] for name in "qkv"}
    output, _, _ = chunk_gated_delta_rule_cpu(
        **qkv,
        g=decay,
        beta=beta,
        initial_state=prefilled,
        initial_state_indices=torch.tensor([3]),
        cu_seqlens=torch.tensor([0, 12]),
        head_first=False,
        use_qk_l2norm_in_kernel=True,
    )
    update: dict[str, Any] = {"A_log": a_log, "dt_bias": dt_bias, "initial_state_source": decoded}
    for token in range(12):
        one = slice(token, token + 1)
        answer = fused_sigmoid_gating_delta_rule_update_cpu(
            **{name: tensor[:, one] for name, tensor in qkv.items()},
            **update,
            a=a[one],
            b=b[one],
            initial_state_indices=torch.tensor([3]),
            cu_seqlens=torch.tensor([0, 1]),
        )
        assert torch.equal(answer[:, 0], output[:, token])
    assert torch.equal(decoded, prefilled)


def test_the_verification_of_drafts_is_refused() -> None:
    nothing = torch.zeros(1)
    names = ("A_log", "dt_bias", "q", "k", "v", "a", "b", "cu_seqlens")
    with pytest.raises(NotImplementedError, match="speculative"):
        fused_sigmoid_gating_delta_rule_update_cpu(
            **dict.fromkeys(names, nothing),
            initial_state_source=nothing,
            initial_state_indices=nothing,
            disable_state_update=True,
        )


def test_sglang_takes_them_from_the_stand_in() -> None:
    module = importlib.import_module("sglang.srt.layers.attention.linear.kernels.gdn_triton")
    backend = importlib.import_module("sglang.srt.layers.attention.linear.gdn_backend")
    assert module.chunk_gated_delta_rule is GDN_KERNELS["chunk_gated_delta_rule_cpu"]
    update = "fused_sigmoid_gating_delta_rule_update"
    assert getattr(module, update) is GDN_OPERATORS[f"{update}_cpu"]
    assert backend.fused_gdn_gating is GDN_OPERATORS["fused_gdn_gating_cpu"]

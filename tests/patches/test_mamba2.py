"""The scan of Mamba2 in torch: held to its formula, to itself in parts, and to its slots."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from sglang_ext.patches.cpu import mamba2

SLOTS, GROUPS, HEADS, SIZE, STATE = 5, 2, 6, 8, 16

Tensors = dict[str, torch.Tensor]


def weights() -> Tensors:
    generator = torch.Generator().manual_seed(2)
    a, d, bias = torch.randn(3, HEADS, generator=generator)
    return {"a": -a.exp(), "d": d, "bias": bias}


def tokens(count: int) -> Tensors:
    """Random arguments of `advance` for so many tokens."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(count, *shape, generator=generator)

    written, read = draw(GROUPS, STATE), draw(GROUPS, STATE)
    return {"x": draw(HEADS, SIZE), "dt": draw(HEADS), "b": written, "c": read}


def pool() -> torch.Tensor:
    return torch.randn(SLOTS, HEADS, SIZE, STATE, generator=torch.Generator().manual_seed(1))


def by_formula(state: torch.Tensor, given: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and the state behind them, head by head, in float64."""
    wide = {name: tensor.double() for name, tensor in (given | weights()).items()}
    state = state.double().clone()
    found = torch.zeros_like(wide["x"])
    for token in range(len(found)):
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            x, step = (
                wide["x"][token, head],
                torch.log1p((wide["dt"][token, head] + wide["bias"][head]).exp()),
            )
            added = step * torch.outer(x, wide["b"][token, group])
            state[head] = state[head] * (step * wide["a"][head]).exp() + added
            found[token, head] = state[head] @ wide["c"][token, group] + wide["d"][head] * x
    return found, state


def prefill(
    given: Tensors, bounds: list[int], states: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, and each request's new state, as `MambaMixer2` asks for them."""
    out = torch.full((1, *given["x"].shape), torch.nan)
    own = weights()
    _, found, _ = mamba2.mamba_chunk_scan_combined(
        given["x"].unsqueeze(0),
        given["dt"].unsqueeze(0),
        own["a"],
        given["b"].unsqueeze(0),
        given["c"].unsqueeze(0),
        chunk_size=16,
        D=own["d"],
        z=None,
        dt_bias=own["bias"],
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        initial_states=states,
        out=out,
        state_dtype=torch.float32,
    )
    return out[0], found


def decode(states: torch.Tensor, given: Tensors, slots: list[int], **options: Any) -> torch.Tensor:
    """Outputs of one token of each request."""
    own, out = weights(), torch.full_like(given["x"], torch.nan)
    mamba2.selective_state_update(
        states,
        given["x"],
        given["dt"][:, :, None].expand(-1, -1, SIZE),
        own["a"][:, None, None].expand(-1, SIZE, STATE),
        given["b"],
        given["c"],
        own["d"][:, None].expand(-1, SIZE),
        z=None,
        dt_bias=own["bias"][:, None].expand(-1, SIZE),
        dt_softplus=True,
        state_batch_indices=torch.tensor(slots),
        out=out,
        **options,
    )
    return out


def part(given: Tensors, start: int, end: int) -> Tensors:
    return {name: tensor[start:end] for name, tensor in given.items()}


def test_outputs_and_states_are_those_of_the_formula() -> None:
    states, given = pool(), tokens(40)
    found, state = by_formula(states[2], given)
    output, after = prefill(given, [0, 40], states[2:3])
    torch.testing.assert_close(output.double(), found, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(after[0].double(), state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cut", [1, 7, 16, 39])
def test_two_chunks_give_the_bits_of_the_whole(cut: int) -> None:
    given = tokens(40)
    output, state = prefill(given, [0, 40], None)
    first, between = prefill(part(given, 0, cut), [0, cut], None)
    second, after = prefill(part(given, cut, 40), [0, 40 - cut], between)
    assert torch.equal(torch.cat([first, second]), output)
    assert torch.equal(after, state)


def test_requests_of_a_batch_do_not_see_each_other() -> None:
    given, states = tokens(30), pool()[:3]
    output, after = prefill(given, [0, 11, 12, 30], states)
    for request, (start, end) in enumerate(((0, 11), (11, 12), (12, 30))):
        alone, state = prefill(part(given, start, end), [0, end - start], states[request : request + 1])
        assert torch.equal(alone, output[start:end])
        assert torch.equal(state[0], after[request])


def test_decode_gives_the_bits_of_prefill_and_leaves_other_slots_and_padding() -> None:
    given, states = tokens(12), pool()
    output, after = prefill(given, [0, 12], states[3:4])
    for token in range(12):
        rows = {name: tensor[[token, token]] for name, tensor in given.items()}
        answer = decode(states, rows, [-1, 3])
        assert torch.equal(answer[1], output[token])
        assert not answer[0].any()
    assert torch.equal(states[3], after[0])
    changed = [slot for slot in range(SLOTS) if not torch.equal(states[slot], pool()[slot])]
    assert changed == [3]


def test_a_state_that_is_damaged_in_one_number_gives_other_outputs() -> None:
    """The twin of the tests above."""
    given, states, damaged = tokens(12), pool(), pool()
    damaged[2, 0, 0, 0] += 1.0
    output, other = (prefill(given, [0, 12], each[2:3])[0] for each in (states, damaged))
    assert (output - other)[0].abs().max() > 1e-3


def test_the_verification_of_drafts_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="speculative"):
        decode(pool(), tokens(1), [0], disable_state_update=True)


def test_sglangs_mixer_calls_them_once_patched() -> None:
    mamba2.apply()
    mamba2.apply()
    assert mamba2.applied()
    mixer = importlib.import_module("sglang.srt.layers.attention.mamba.mamba")
    assert mixer.mamba_chunk_scan_combined is mamba2.mamba_chunk_scan_combined

"""The short convolution in torch: against a loop over tokens, in chunks, in batches, and beside padding."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.patches.cpu import short_conv
from sglang_ext.patches.cpu.short_conv import causal_conv1d_fn_cpu, causal_conv1d_update_cpu

CHANNELS, SLOTS = 24, 6
DTYPES = [torch.float32, torch.bfloat16]


class Layer:
    """A layer's weights, and the states of all slots, which are noise at first."""

    def __init__(self, width: int = 3, dtype: torch.dtype = torch.float32, activation: str | None = None):
        self.rng = torch.Generator().manual_seed(11)
        self.width, self.dtype, self.activation = width, dtype, activation
        self.weight, self.bias = self.noise(CHANNELS, width), self.noise(CHANNELS)
        self.states = self.noise(SLOTS, CHANNELS, width - 1)

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.rng).to(self.dtype)

    def extend(self, x: torch.Tensor, lengths: list[int], slots: list[int], continues: list[bool]):
        return causal_conv1d_fn_cpu(
            x,
            self.weight,
            self.bias,
            conv_states=self.states,
            query_start_loc=torch.tensor([0, *lengths]).cumsum(0).int(),
            cache_indices=torch.tensor(slots),
            has_initial_state=torch.tensor(continues),
            activation=self.activation,
        )

    def step(self, x: torch.Tensor, slots: list[int]) -> torch.Tensor:
        return causal_conv1d_update_cpu(
            x,
            self.states,
            self.weight,
            self.bias,
            self.activation,
            conv_state_indices=torch.tensor(slots, dtype=torch.int32),
        )

    def naive(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token by token in float64. x: (channels, tokens)."""
        inputs = torch.cat((state, x), 1).double()
        found = torch.empty_like(x, dtype=torch.float64)
        for token in range(x.shape[1]):
            for channel in range(CHANNELS):
                seen = inputs[channel, token : token + self.width]
                found[channel, token] = (seen * self.weight[channel].double()).sum() + self.bias[channel]
        if self.activation:
            found = found / (1 + (-found).exp())
        return found.to(self.dtype), inputs[:, x.shape[1] :].to(self.dtype)


@pytest.fixture(params=DTYPES, ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_it_is_the_sum_over_the_last_tokens(
    width: int, activation: str | None, tokens: int, dtype: torch.dtype
) -> None:
    layer = Layer(width, dtype, activation)
    x = layer.noise(CHANNELS, tokens)
    expected, state = layer.naive(x, layer.states[4])
    got = layer.extend(x, [tokens], [4], [True])
    torch.testing.assert_close(got, expected, atol=1e-5 if dtype == torch.float32 else 0.05, rtol=0.0)
    assert torch.equal(layer.states[4], state)


def test_a_prompt_without_a_prefix_starts_from_zeros() -> None:
    layer = Layer()
    x = layer.noise(CHANNELS, 5)
    expected, _ = layer.naive(x, torch.zeros(CHANNELS, 2))
    torch.testing.assert_close(layer.extend(x, [5], [2], [False]), expected)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("chunks", [[40], [1, 39], [16, 24], [13, 1, 1, 25], [37, 2, 1]])
def test_chunks_have_the_bits_of_the_whole(
    chunks: list[int], activation: str | None, dtype: torch.dtype
) -> None:
    layer = Layer(3, dtype, activation)
    x = layer.noise(CHANNELS, 40)
    whole = layer.extend(x, [40], [1], [False])
    parts, begin = [], 0
    for length in chunks:
        parts.append(layer.extend(x[:, begin : begin + length], [length], [3], [begin > 0]))
        begin += length
    assert torch.equal(torch.cat(parts, 1), whole)
    assert torch.equal(layer.states[3], layer.states[1])


@pytest.mark.parametrize("activation", [None, "silu"])
def test_decoding_has_the_bits_of_a_prefill(activation: str | None, dtype: torch.dtype) -> None:
    layer = Layer(4, dtype, activation)
    x = layer.noise(CHANNELS, 20)
    whole = layer.extend(x, [20], [1], [False])
    parts = [layer.extend(x[:, :8], [8], [3], [False])]
    parts += [layer.step(x[:, token].unsqueeze(0), [3]).squeeze(0).unsqueeze(1) for token in range(8, 20)]
    assert torch.equal(torch.cat(parts, 1), whole)
    assert torch.equal(layer.states[3], layer.states[1])


def test_several_tokens_move_a_state_as_one_after_the_other() -> None:
    layer = Layer(activation="silu")
    layer.states[5] = layer.states[2]
    x = layer.noise(CHANNELS, 4)
    at_once = layer.step(x.unsqueeze(0), [2]).squeeze(0)
    single = torch.cat([layer.step(x[:, token].unsqueeze(0), [5]) for token in range(4)]).T
    assert torch.equal(at_once, single)
    assert torch.equal(layer.states[5], layer.states[2])


def test_requests_of_a_batch_do_not_touch_each_other(dtype: torch.dtype) -> None:
    lengths, slots, continues = [5, 0, 1, 9], [4, 5, 0, 2], [True, True, False, True]
    layer = Layer(4, dtype, "silu")
    before, x = layer.states.clone(), layer.noise(CHANNELS, sum(lengths))
    together = layer.extend(x, lengths, slots, continues)
    after = layer.states.clone()
    layer.states.copy_(before)
    alone, begin = [], 0
    for length, slot, goes_on in zip(lengths, slots, continues, strict=True):
        alone.append(layer.extend(x[:, begin : begin + length], [length], [slot], [goes_on]))
        begin += length
    assert torch.equal(together, torch.cat(alone, 1))
    assert torch.equal(after, layer.states)
    assert torch.equal(after[[1, 3, 5]], before[[1, 3, 5]]), "slots of no request, and of one without tokens"

    rows = layer.noise(3, CHANNELS)
    layer.states.copy_(before)
    together = layer.step(rows, [4, 0, 2])
    after = layer.states.clone()
    layer.states.copy_(before)
    alone = [layer.step(row.unsqueeze(0), [slot]) for row, slot in zip(rows, [4, 0, 2], strict=True)]
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(after, layer.states)


def test_padding_leaves_every_state_alone() -> None:
    layer = Layer(activation="silu")
    before, x = layer.states.clone(), layer.noise(CHANNELS, 7)
    got = layer.extend(x, [2, 3], [-1, 1], [True, True])
    assert not got[:, [0, 1, 5, 6]].any(), "tokens of padding, and behind the last request"
    assert torch.equal(layer.states[[0, 2, 3, 4, 5]], before[[0, 2, 3, 4, 5]])
    assert not torch.equal(layer.states[1], before[1])
    layer.states.copy_(before)
    got = layer.step(x[:, :3].T, [-1, 2, -1])
    assert not got[[0, 2]].any()
    assert got[1].any()
    assert torch.equal(layer.states[[0, 1, 3, 4, 5]], before[[0, 1, 3, 4, 5]])
    assert torch.equal(layer.step(x[:, :2].T, [-1, -1]), torch.zeros(2, CHANNELS))


def test_another_state_gives_another_result() -> None:
    """The twin: one value of the state, which reaches as far as the convolution is wide."""
    layer = Layer(4)
    layer.states[3] = layer.states[2]
    layer.states[3][7, -1] += 1.0
    x = layer.noise(CHANNELS, 6)
    difference = layer.extend(x, [6], [2], [True]) - layer.extend(x, [6], [3], [True])
    assert (difference != 0).nonzero().tolist() == [[7, 0], [7, 1], [7, 2]]


def test_a_state_of_another_width_is_refused() -> None:
    layer = Layer(4)
    layer.states = layer.noise(SLOTS, CHANNELS, 5)
    with pytest.raises(NotImplementedError, match="5 tokens"):
        layer.step(layer.noise(1, CHANNELS), [0])


def test_sglangs_functions_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As LFM2 calls them."""
    from sglang.srt.layers.attention.mamba import causal_conv1d

    for name in short_conv._TRITONS:
        monkeypatch.setattr(causal_conv1d, name, getattr(causal_conv1d, name))
    short_conv.apply()
    short_conv.apply()
    assert short_conv.applied()
    layer, other = Layer(), Layer()
    x, slots = layer.noise(CHANNELS, 6), torch.tensor([3])
    got = causal_conv1d.causal_conv1d_fn(
        x,
        layer.weight,
        layer.bias,
        query_start_loc=torch.tensor([0, 6], dtype=torch.int32),
        cache_indices=slots,
        has_initial_state=torch.tensor([False]),
        conv_states=layer.states,
        activation=None,
    )
    assert torch.equal(got, other.extend(x, [6], [3], [False]))
    row = x[:, 2].unsqueeze(0)
    got = causal_conv1d.causal_conv1d_update(
        row, layer.states, layer.weight, layer.bias, activation=None, conv_state_indices=slots
    )
    assert torch.equal(got, other.step(row, [3]))
    assert torch.equal(layer.states, other.states)

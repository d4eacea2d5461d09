"""Attention on a CPU with the new queries only: SGLang's results, up to rounding."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_ext.patches.cpu import attention as native_attention

SLOTS = 4096
STOCK = {
    name: getattr(TorchNativeAttnBackend, name)
    for name in (native_attention._EXTEND, native_attention._DECODE)
}
BACKEND = SimpleNamespace(
    _make_sliding_window_mask=TorchNativeAttnBackend._make_sliding_window_mask,
    use_sliding_window_kv_pool=False,
)


@dataclass(frozen=True)
class Shape:
    """Of a model's layer."""

    heads: int
    kv_heads: int
    size: int
    value_size: int
    dtype: torch.dtype = torch.float32


SHAPES = {
    "MHA": Shape(4, 4, 32, 32),
    "GQA": Shape(8, 2, 64, 64),
    "bfloat16": Shape(4, 2, 64, 64, torch.bfloat16),
    "latent": Shape(8, 1, 96, 64),
}


@pytest.fixture(autouse=True)
def stock(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, method in STOCK.items():
        # Other tests may have applied it in this process.
        monkeypatch.setattr(TorchNativeAttnBackend, name, getattr(method, "__wrapped__", method))


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def shape(request: pytest.FixtureRequest) -> Shape:
    return request.param


class Batch:
    """Requests with KV in a pool, in slots that lie anywhere."""

    def __init__(self, shape: Shape, prefixes: list[int], new: list[int]) -> None:
        rng = torch.Generator().manual_seed(7)
        self.shape = shape
        self.prefixes, self.new = torch.tensor(prefixes), torch.tensor(new)
        self.lengths = self.prefixes + self.new
        self.k = torch.randn(SLOTS, shape.kv_heads, shape.size, generator=rng).to(shape.dtype)
        self.v = torch.randn(SLOTS, shape.kv_heads, shape.value_size, generator=rng).to(shape.dtype)
        self.rows = torch.tensor(list(reversed(range(len(new)))))
        places = torch.randperm(SLOTS, generator=rng)[: 1024 * len(new)]
        self.req_to_token = places.view(len(new), 1024).to(torch.int32)
        self.query = torch.randn(sum(new), shape.heads, shape.size, generator=rng).to(shape.dtype)

    def attend(self, **more: Any) -> torch.Tensor:
        """As ``forward_extend`` calls it, or ``forward_decode`` where all requests have one new token."""
        shape = self.shape
        output = torch.full((len(self.query), shape.heads, shape.value_size), torch.nan, dtype=shape.dtype)
        decodes = bool((self.new == 1).all())
        given = (self.query, output, self.k, self.v, self.req_to_token, self.rows, self.lengths)
        options = {
            "scaling": shape.size**-0.5,
            "enable_gqa": shape.heads != shape.kv_heads,
            "causal": not decodes,
            **more,
        }
        if decodes:
            TorchNativeAttnBackend._run_sdpa_forward_decode(BACKEND, *given, **options)
        else:
            TorchNativeAttnBackend._run_sdpa_forward_extend(
                BACKEND, *given, self.prefixes, self.new, **options
            )
        return output


BATCHES = {
    "nothing cached": ([0], [300]),
    "nearly all cached": ([700], [13]),
    "one new token beside others": ([700, 0, 64], [1, 40, 200]),
    "decode": ([16, 400, 1000], [1, 1, 1]),
}


@pytest.mark.parametrize("window", [None, 50], ids=["all", "window"])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_the_results_are_sglangs_own(
    shape: Shape, batch: tuple[list[int], list[int]], window: int | None
) -> None:
    given = Batch(shape, *batch)
    expected = given.attend(sliding_window_size=window)
    native_attention.apply()
    assert native_attention.applied()
    got = given.attend(sliding_window_size=window)
    assert not got.isnan().any()
    if len(got) == len(given.lengths) and window is None:
        assert torch.equal(got, expected), "decoding is the same product"
    bits = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}[shape.dtype]
    torch.testing.assert_close(got, expected, atol=bits, rtol=0.0)


def test_another_key_gives_another_result(shape: Shape) -> None:
    """The twin: the key of one cached token."""
    given = Batch(shape, [700], [13])
    expected = given.attend()
    native_attention.apply()
    given.k[given.req_to_token[0, 3]] += 3.0
    assert (given.attend() - expected).abs().max() > 1e-3


def with_sinks(given: Batch, sinks: torch.Tensor, window: int | None) -> torch.Tensor:
    """As transformers computes it: the sinks are further logits, whose weights are dropped."""
    found, start = [], 0
    for row, length, new in zip(given.rows.tolist(), given.lengths.tolist(), given.new.tolist(), strict=True):
        slots = given.req_to_token[row, :length].long()
        copies = given.shape.heads // given.shape.kv_heads
        key, value = (part[slots].repeat_interleave(copies, dim=1) for part in (given.k, given.v))
        query = given.query[start : start + new]
        logits = torch.einsum("qhs,khs->hqk", query, key) * given.shape.size**-0.5
        distance = torch.arange(length - new, length).unsqueeze(1) - torch.arange(length)
        logits.masked_fill_((distance < 0) | (distance > (length if window is None else window)), -torch.inf)
        last = sinks.view(-1, 1, 1).expand(-1, new, 1)
        weights = torch.cat((logits, last), dim=-1).softmax(-1)[..., :-1]
        found.append(torch.einsum("hqk,khs->qhs", weights, value))
        start += new
    return torch.cat(found)


@pytest.mark.parametrize("window", [None, 50], ids=["all", "window"])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_sinks_take_part_in_the_softmax(
    batch: tuple[list[int], list[int]], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Batch(SHAPES["GQA"], *batch)
    sinks = torch.linspace(-1.0, 4.0, given.shape.heads)
    native_attention.apply()
    monkeypatch.setattr(BACKEND, native_attention._SINKS, sinks, raising=False)
    got, expected = given.attend(sliding_window_size=window), with_sinks(given, sinks, window)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=0.0)
    # The twin: other sinks.
    assert (with_sinks(given, sinks + 1.0, window) - expected).abs().max() > 1e-2


def test_the_sinks_of_a_layer_are_there_while_it_is_computed() -> None:
    backend = SimpleNamespace()
    seen = []

    def stock(backend: Any, layer: str) -> None:
        seen.append((layer, getattr(backend, native_attention._SINKS, None)))

    forward = native_attention._forward(stock)
    forward(backend, "first", sinks="its sinks")
    forward(backend, "second")
    assert seen == [("first", "its sinks"), ("second", None)]


def test_encoders_attend_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every query of theirs sees all keys; that is SGLang's own."""
    given = Batch(SHAPES["GQA"], [0], [64])
    expected = given.attend(causal=False)
    native_attention.apply()
    monkeypatch.setattr(native_attention, "_attend", None)
    assert torch.equal(given.attend(causal=False), expected)
    with pytest.raises(TypeError):
        given.attend()


def test_applying_it_twice_changes_nothing() -> None:
    native_attention.apply()
    once = TorchNativeAttnBackend._run_sdpa_forward_extend
    native_attention.apply()
    assert TorchNativeAttnBackend._run_sdpa_forward_extend is once


def test_a_request_that_pads_a_batch_attends_to_one_token() -> None:
    """With DP attention, SGLang asks the backend for the length of such a request."""
    native_attention.apply()
    assert TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value(object()) == 1

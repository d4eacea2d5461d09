"""Attention over a window's own pool: read where it was written, after other requests took the slots."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch.nn.functional import scaled_dot_product_attention

from sglang_ext.patches.cpu import attention as native_attention

HEADS, KV_HEADS, SIZE = 4, 2, 16
WINDOW = 16
"""Tokens that a query sees, itself among them."""
TOKENS, WINDOW_TOKENS = 512, 320
LENGTHS = [1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW]
METHODS = {
    name: getattr(TorchNativeAttnBackend, name)
    for name in (native_attention._EXTEND, native_attention._DECODE)
}


@pytest.fixture(autouse=True)
def stock(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, method in METHODS.items():
        # Other tests may have applied the patch in this process.
        monkeypatch.setattr(TorchNativeAttnBackend, name, getattr(method, "__wrapped__", method))


def layer(layer_id: int, window: int) -> SimpleNamespace:
    return SimpleNamespace(
        layer_id=layer_id,
        is_cross_attention=False,
        attn_type=AttentionType.DECODER,
        qk_head_dim=SIZE,
        v_head_dim=SIZE,
        tp_q_head_num=HEADS,
        tp_k_head_num=KV_HEADS,
        scaling=SIZE**-0.5,
        # SGLang's counts the tokens before the query only.
        sliding_window_size=window,
    )


LAYERS = {"window": layer(0, WINDOW - 1), "all": layer(1, -1)}


class Request:
    """A request's keys and values of both layers, as computed, and its row of the page table."""

    def __init__(self, engine: Engine, row: int) -> None:
        self.engine, self.row, self.length = engine, row, 0
        shape = (TOKENS, KV_HEADS, SIZE)
        self.kv = {name: [torch.randn(shape, generator=engine.rng) for _ in "kv"] for name in LAYERS}

    def extend(self, new: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Run both layers over the next tokens: the backend's results, and those of a plain attention."""
        engine, prefix = self.engine, self.length
        self.length += new
        slots = engine.allocator.alloc(new)
        engine.table[self.row, prefix : self.length] = slots.int()
        batch = SimpleNamespace(
            out_cache_loc=slots,
            req_pool_indices=torch.tensor([self.row]),
            seq_lens=torch.tensor([self.length]),
            extend_prefix_lens=torch.tensor([prefix]),
            extend_seq_lens=torch.tensor([new]),
            encoder_lens=None,
            forward_mode=SimpleNamespace(is_target_verify=lambda: False),
        )
        engine.backend.init_forward_metadata(batch)
        forward = engine.backend.forward_decode if new == 1 else engine.backend.forward_extend
        found = {}
        for name, each in LAYERS.items():
            query = torch.randn(new, HEADS * SIZE, generator=engine.rng)
            k, v = (part[prefix : self.length] for part in self.kv[name])
            got = forward(query, k.reshape(new, -1, SIZE), v.reshape(new, -1, SIZE), each, batch)
            found[name] = (got, self.expected(name, query, prefix))
        return found

    def expected(self, name: str, query: torch.Tensor, prefix: int) -> torch.Tensor:
        places = torch.arange(self.length)
        distance = places[prefix:].unsqueeze(1) - places.unsqueeze(0)
        seen = (distance >= 0) & (distance < (WINDOW if name == "window" else self.length))
        k, v = (part[: self.length].movedim(0, 1).unsqueeze(0) for part in self.kv[name])
        q = query.view(-1, HEADS, SIZE).movedim(0, 1).unsqueeze(0)
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return out.squeeze(0).movedim(0, 1).reshape(len(query), -1)

    def leave_behind(self) -> None:
        """Free the slots that the window has left, as a tree does that keeps the other layers' KV."""
        old = self.engine.table[self.row, : max(self.length - WINDOW, 0)].long()
        self.engine.allocator.free_swa(old[self.engine.allocator.full_to_swa_index_mapping[old] > 0])

    def end(self) -> None:
        self.leave_behind()
        tokens = self.engine.table[self.row, : self.length].long()
        left = max(self.length - WINDOW, 0)
        self.engine.allocator.free_full(tokens[:left])
        self.engine.allocator.free(tokens[left:])


class Engine:
    """SGLang's pools, allocator and backend, without a model."""

    def __init__(self) -> None:
        self.rng = torch.Generator().manual_seed(3)
        pool = SWAKVPool(
            size=TOKENS,
            size_swa=WINDOW_TOKENS,
            page_size=1,
            dtype=torch.float32,
            head_num=KV_HEADS,
            head_dim=SIZE,
            swa_attention_layer_ids=[0],
            full_attention_layer_ids=[1],
            device="cpu",
        )
        self.allocator = SWATokenToKVPoolAllocator(
            TOKENS, WINDOW_TOKENS, 1, torch.float32, "cpu", pool, need_sort=False
        )
        self.table = torch.zeros(8, TOKENS, dtype=torch.int32)
        runner = SimpleNamespace(
            device="cpu",
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            token_to_kv_pool=pool,
        )
        self.backend = TorchNativeAttnBackend(runner)

    def churn(self) -> None:
        """Requests that come and go, with more tokens than the window's pool has.

        Up to there both pools give the same slots; from there a token's two slots have nothing in common.
        """
        for _ in range(2):
            first, second = Request(self, 6), Request(self, 7)
            for request, new in ((first, 90), (second, 60), (first, 1), (second, 30)):
                request.extend(new)
                request.leave_behind()
            first.end()
            second.end()


def off(found: dict[str, tuple[torch.Tensor, torch.Tensor]], name: str) -> float:
    got, expected = found[name]
    return float((got - expected).abs().max())


def longest_error(prefix: int, new: int) -> dict[str, float]:
    """The largest error of each layer over requests with a prefix, new tokens, then single ones, with others
    in between that take the slots that the window has left."""
    engine = Engine()
    engine.churn()
    request, other = Request(engine, 2), Request(engine, 3)
    rounds = [request.extend(prefix)]
    for tokens in (new, 1, 1):
        request.leave_behind()
        rounds.append(other.extend(20))
        other.leave_behind()
        rounds.append(request.extend(tokens))
    return {name: max(off(found, name) for found in rounds) for name in LAYERS}


@pytest.mark.parametrize("new", [1, 7, 2 * WINDOW + 3])
@pytest.mark.parametrize("prefix", LENGTHS)
def test_a_window_is_read_where_it_was_written(prefix: int, new: int) -> None:
    native_attention.apply()
    assert max(longest_error(prefix, new).values()) < 1e-5


def is_wrong(prefix: int, new: int) -> bool:
    """Whether the window's layer is wrong, or ends the server; the other layer is right."""
    try:
        errors = longest_error(prefix, new)
    except IndexError:
        return True
    assert errors["all"] < 1e-5
    return errors["window"] > 1e-2


@pytest.mark.parametrize("prefix", LENGTHS)
def test_sglangs_own_reads_other_tokens(prefix: int) -> None:
    """Why there is a patch."""
    assert is_wrong(prefix, 7)


@pytest.mark.parametrize("prefix", LENGTHS)
def test_without_translated_slots_the_window_is_wrong(prefix: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin."""
    native_attention.apply()
    monkeypatch.setattr(native_attention, "_slots", lambda _backend, tokens, _window: tokens)
    assert is_wrong(prefix, 7)


def test_a_window_one_token_short_is_seen() -> None:
    """The twin of the window's length, where slots before it belong to others."""
    native_attention.apply()
    engine = Engine()
    engine.churn()
    request = Request(engine, 2)
    request.extend(3 * WINDOW)
    last = engine.allocator.full_to_swa_index_mapping[engine.table[2, request.length - WINDOW + 1].long()]
    engine.backend.token_to_kv_pool.swa_kv_pool.k_buffer[0][last] += 3.0
    assert off(request.extend(1), "window") > 1e-3

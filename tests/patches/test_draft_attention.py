"""Drafting and verifying with ``torch_native``: the attention of each draft is that of plain decoding."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import draft_utils
from sglang.srt.speculative.draft_utils import DraftBackendFactory

from sglang_ext.errors import ConfigError
from sglang_ext.patches.cpu import draft_attention, runtime
from sglang_ext.patches.hooks.flags import carry_flags

HEADS, SIZE, DRAFTS = 2, 16, 4
PREFIXES = [9, 3]


@pytest.fixture(autouse=True)
def patched() -> None:
    draft_attention.apply()
    assert draft_attention.applied()


class Pool:
    """One layer's KV."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(3)
        self.k = torch.randn(64, HEADS, SIZE, generator=rng)
        self.v = torch.randn(64, HEADS, SIZE, generator=rng)

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.k

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.v

    def set_kv_buffer(self, layer: Any, where: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        raise AssertionError("the tests' KV is there already")


@pytest.fixture
def runner() -> SimpleNamespace:
    table = torch.randperm(64, generator=torch.Generator().manual_seed(4)).view(2, 32).to(torch.int32)
    return SimpleNamespace(
        device="cpu",
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=Pool(),
        draft_attention_backend="torch_native",
        model_config=SimpleNamespace(hf_config=None, hf_text_config=None),
    )


LAYER = SimpleNamespace(
    layer_id=0,
    qk_head_dim=SIZE,
    v_head_dim=SIZE,
    tp_q_head_num=HEADS,
    tp_k_head_num=HEADS,
    is_cross_attention=False,
    attn_type=AttentionType.DECODER,
    scaling=SIZE**-0.5,
    sliding_window_size=-1,
)


def batch(mode: ForwardMode, lengths: list[int], **more: Any) -> SimpleNamespace:
    given = {"out_cache_loc": None, "encoder_lens": None, "extend_prefix_lens": None, "extend_seq_lens": None}
    rows, seq_lens = torch.tensor([1, 0]), torch.tensor(lengths)
    return SimpleNamespace(forward_mode=mode, req_pool_indices=rows, seq_lens=seq_lens, **{**given, **more})


def decoded(runner: Any, query: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """One token of each request, with SGLang's backend for plain decoding."""
    return TorchNativeAttnBackend(runner).forward_decode(
        query, None, None, LAYER, batch(ForwardMode.DECODE, lengths)
    )


@pytest.fixture
def factory(runner: Any, monkeypatch: pytest.MonkeyPatch) -> DraftBackendFactory:
    monkeypatch.setattr(draft_utils, "attention_backends", lambda: ("torch_native", "torch_native"))
    monkeypatch.setattr(
        draft_utils, "get_spec", lambda: SimpleNamespace(speculative_attention_mode="prefill")
    )
    return DraftBackendFactory(runner, 1, DRAFTS - 1)


def test_each_step_that_drafts_sees_the_drafts_before_it(factory: Any, runner: Any) -> None:
    steps = factory.create_decode_backend()
    assert len(steps.attn_backends) == DRAFTS - 2
    given = batch(ForwardMode.DECODE, PREFIXES)
    steps.init_forward_metadata(given)
    query = torch.randn(2, HEADS * SIZE)
    for ahead, step in enumerate(steps.attn_backends, 1):
        got = step.forward_decode(query, None, None, LAYER, given)
        assert torch.equal(got, decoded(runner, query, [length + ahead for length in PREFIXES]))
        assert not torch.equal(got, decoded(runner, query, PREFIXES)), "the twin: the drafts are not seen"
    assert given.seq_lens.tolist() == PREFIXES


def test_the_backend_after_verification_is_the_plain_one(factory: Any) -> None:
    assert type(factory.create_draft_extend_backend()) is TorchNativeAttnBackend


def test_drafts_are_verified_as_if_decoded_one_after_the_other(runner: Any) -> None:
    query = torch.randn(2, DRAFTS, HEADS * SIZE)
    verifies = batch(
        ForwardMode.TARGET_VERIFY, PREFIXES, spec_info=SimpleNamespace(tree_topk=1, draft_token_num=DRAFTS)
    )
    got = TorchNativeAttnBackend(runner).forward_extend(
        query.view(2 * DRAFTS, -1), None, None, LAYER, verifies
    )
    for draft in range(DRAFTS):
        expected = decoded(runner, query[:, draft], [length + draft + 1 for length in PREFIXES])
        torch.testing.assert_close(got.view(2, DRAFTS, -1)[:, draft], expected, atol=2e-6, rtol=0.0)
    assert verifies.seq_lens.tolist() == PREFIXES
    assert verifies.extend_seq_lens is None


def test_trees_are_refused_with_the_way_out(factory: Any, runner: Any) -> None:
    factory.topk = 4
    for create in (factory.create_decode_backend, factory.create_draft_extend_backend):
        with pytest.raises(ConfigError, match="4 makes trees"):
            create()
    verifies = batch(
        ForwardMode.TARGET_VERIFY, PREFIXES, spec_info=SimpleNamespace(tree_topk=4, draft_token_num=DRAFTS)
    )
    with pytest.raises(ConfigError, match="chains only"):
        TorchNativeAttnBackend(runner).forward_extend(
            torch.randn(8, HEADS * SIZE), None, None, LAYER, verifies
        )


def test_other_backends_are_created_as_before(factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    factory.draft_attn_backend, plain = "triton", SimpleNamespace(attn_backends=[])
    monkeypatch.setattr(factory, "_create_triton_decode_backend", lambda: ("triton", plain))
    assert factory.create_decode_backend() is plain
    factory.draft_attn_backend = "no such"
    with pytest.raises(ValueError, match="EAGLE is not supported in decode attention backend no such"):
        factory.create_decode_backend()


def test_trees_are_refused_when_the_flags_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    given = SimpleNamespace(
        attention_backend="torch_native", speculative_draft_model_path="draft", speculative_eagle_topk=4
    )
    monkeypatch.setenv(runtime.ACTIVE, "1")
    with pytest.raises(ConfigError, match=r"4 makes trees.*Set it to 1") as caught:
        carry_flags(given, object, argparse.Namespace())
    assert caught.value.field == "--speculative-eagle-topk"
    given.speculative_eagle_topk = 1
    carry_flags(given, object, argparse.Namespace())
    given.speculative_eagle_topk, given.attention_backend = 4, "intel_amx"
    carry_flags(given, object, argparse.Namespace())

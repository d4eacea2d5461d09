"""MLA models on a CPU: the patches choose as SGLang chooses elsewhere."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

from sglang_ext.patches.cpu import early_send, mla_attention, mla_rope


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "get_rope_cpu", factory.get_rope_cpu)
    monkeypatch.setattr(
        handlers.AttentionBackendRegistry, "_handlers", dict(handlers.AttentionBackendRegistry._handlers)
    )


def test_mla_layers_attend_absorbed_with_torch_native() -> None:
    mla_attention.apply()
    assert mla_attention.applied()
    handler = handlers.AttentionBackendRegistry.get_handler("torch_native")
    assert handler(None, None) is handlers.AttnForwardMethod.MLA
    assert handlers.AttentionBackendRegistry.get_handler("triton") is handlers.handle_attention_triton


@pytest.mark.parametrize("scaling", [None, {"rope_type": "default"}])
def test_rope_without_yarn_is_what_every_other_model_takes(
    scaling: dict[str, str] | None, monkeypatch
) -> None:
    sentinel = object()
    monkeypatch.setattr(factory, "get_rope", lambda *args: (sentinel, args))
    mla_rope.apply()
    assert mla_rope.applied()
    made = factory.get_rope_wrapper(16, 16, 4096, 10000, False, scaling, torch.float32, device="cpu")
    assert made == (sentinel, (16, 16, 4096, 10000, False, scaling, torch.float32, 1.0))


def test_stock_rope_refuses_a_model_without_yarn() -> None:
    """The twin: the error that the patch prevents."""
    with pytest.raises(AssertionError):
        factory.get_rope_wrapper(16, 16, 4096, 10000, False, None, torch.float32, device="cpu")


def test_rope_with_yarn_stays_sglangs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(factory, "get_rope_cpu", lambda *args: seen.append(args))
    mla_rope.apply()
    yarn = {"rope_type": "deepseek_yarn", "factor": 8.0}
    factory.get_rope_wrapper(16, 16, 4096, 10000, False, yarn, torch.float32, device="cpu")
    assert seen == [(16, 16, 4096, 10000, False, yarn, torch.float32, 1.0, "cpu")]


class PrefillScheduler:
    enable_overlap = True


def test_early_send_records_no_event_and_leaves_overlap_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin as Mixin

    seen = []

    def stock(scheduler: PrefillScheduler, req: str) -> None:
        seen.append((scheduler.enable_overlap, req))
        if req == "bad":
            raise ValueError(req)

    monkeypatch.setattr(Mixin, "maybe_send_cached_prefix_chunk", stock)
    early_send.apply()
    assert early_send.applied()
    scheduler = PrefillScheduler()
    Mixin.maybe_send_cached_prefix_chunk(scheduler, "req")
    with pytest.raises(ValueError, match="bad"):
        Mixin.maybe_send_cached_prefix_chunk(scheduler, "bad")
    assert seen == [(False, "req"), (False, "bad")]
    assert scheduler.enable_overlap

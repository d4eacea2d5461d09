"""The decision to load or to compute, in the scheduler's output for a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.engine.tiers.load_report import Decision, Reason, begin_report
from sglang_ext.patches.hooks import load_details
from sglang_ext.patches.process import PROCESS
from sglang_ext.tiers import Tier


@pytest.fixture
def streamer(monkeypatch: pytest.MonkeyPatch) -> Any:
    cache = SimpleNamespace()
    monkeypatch.setattr(PROCESS, "cache", cache)
    return SimpleNamespace(tree_cache=cache)


def decided(blocks: int) -> Any:
    req = SimpleNamespace()
    begin_report(req, Tier.DISK).decided(4, Decision(blocks, 0.2, 0.1, Reason.SLOWER), 16, 1024)
    return req


def test_the_numbers_join_the_tokens_by_tier(streamer: Any) -> None:
    before = {"device": 16, "host": 0, "storage": 0}
    after = load_details.after_details(before, streamer, decided(0))
    assert after.items() >= {"device": 16, "storage_decision": "compute", "storage_load_us": 200_000}.items()
    assert all(isinstance(value, int | str) for value in after.values())
    assert before == {"device": 16, "host": 0, "storage": 0}


def test_a_request_that_was_computed_says_why(streamer: Any) -> None:
    after = load_details.after_details(None, streamer, decided(0))
    assert (after["device"], after["host"], after["storage"]) == (0, 0, 0)
    assert after["storage_reason"] == "slower"


def test_others_are_left_as_they_are(streamer: Any) -> None:
    assert load_details.after_details(None, streamer, SimpleNamespace()) is None
    foreign = SimpleNamespace(tree_cache=SimpleNamespace())
    assert load_details.after_details({"device": 1}, foreign, decided(2)) is None

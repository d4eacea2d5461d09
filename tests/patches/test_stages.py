"""The time of a request in each stage, in its scheduler's output and in OpenAI's answers."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.patches.adapter.request_stages import own_stages, request_stages, set_former, set_handed
from sglang_ext.patches.hooks import stages as hook
from sglang_ext.patches.process import PROCESS
from sglang_ext.stages import Handed, StageTimes


def request(*, ended: bool = True, **fields: Any) -> Any:
    """A request that came three seconds ago, began two seconds ago, and had a token one second ago."""
    now = time.perf_counter()
    stats = SimpleNamespace(
        scheduler_recv_time=now - 3, forward_entry_time=now - 2, prefill_finished_time=now - 1
    )
    given = {"disagg_kv_sender": None, "bootstrap_room": None, **fields}
    return SimpleNamespace(time_stats=stats, finished=lambda: ended, **given)


@pytest.fixture
def streamer(monkeypatch: pytest.MonkeyPatch) -> Any:
    cache = SimpleNamespace()
    monkeypatch.setattr(PROCESS, "cache", cache)
    monkeypatch.setattr(PROCESS, "stages", None)
    args = SimpleNamespace(disaggregation_mode="null", disaggregation_transfer_backend="mooncake")
    return SimpleNamespace(tree_cache=cache, server_args=args)


class Counted:
    """Stands for the metrics."""

    def __init__(self, args: Any, reports: bool) -> None:
        self.args, self.reports, self.seen = args, reports, 0

    def ended(self, req: Any) -> StageTimes | None:
        self.seen += 1
        return request_stages(req) if self.reports else None


def test_an_answer_has_them_once_the_request_has_ended(streamer: Any) -> None:
    PROCESS.stages = Counted(streamer.server_args, reports=True)
    assert hook.after_details({"device": 16}, streamer, request(ended=False)) is None
    details = hook.after_details({"device": 16, "host": 0}, streamer, request())
    assert (details["device"], details["host"]) == (16, 0)
    assert all(isinstance(value, int) for value in details.values())
    stages = StageTimes.of_details(details)
    assert stages is not None
    assert stages.total == pytest.approx(3.0, abs=0.5)
    assert PROCESS.stages.seen == 1


def test_off_leaves_the_answer_and_counts(streamer: Any) -> None:
    PROCESS.stages = Counted(streamer.server_args, reports=False)
    assert hook.after_details({"device": 16}, streamer, request()) is None
    assert PROCESS.stages.seen == 1


def test_other_servers_are_left_alone(streamer: Any) -> None:
    streamer.tree_cache = SimpleNamespace()
    assert hook.after_details(None, streamer, request()) is None


def test_no_error_reaches_sglang(streamer: Any) -> None:
    PROCESS.stages = Counted(streamer.server_args, reports=True)
    assert hook.after_details(None, streamer, SimpleNamespace(finished=lambda: True)) is None


def test_what_came_with_the_kv_and_before_a_move_is_added_once() -> None:
    req = request(bootstrap_room=7)
    set_handed(req, Handed(came=time.perf_counter() - 2.5, before=StageTimes(0.1, 0.2)))
    set_former(req, StageTimes(10.0, 20.0, 30.0, 40.0, 50.0))
    role, own = own_stages(req)
    assert (role, own.prefill_queue, own.prefill) == ("decode", 0.0, 0.0)
    whole = request_stages(req)
    assert (whole.prefill_queue, whole.prefill) == (10.1, 20.2)
    assert whole.total == pytest.approx(150.0 + 3.0, abs=0.5)


@pytest.mark.parametrize(("fields", "role"), [({}, "colocated"), ({"disagg_kv_sender": object()}, "prefill")])
def test_whose_stages_they_are(fields: dict[str, Any], role: str) -> None:
    found, stages = own_stages(request(**fields))
    assert found == role
    assert (stages.transfer > 0.5, stages.decode > 0.5) == (role == "prefill", role == "colocated")


def test_openai_answers_carry_them() -> None:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionStreamResponse, SglExt
    from sglang.srt.entrypoints.openai.utils import cached_tokens_details_from_dict

    hook.open_models()
    reports = {"device": 3, "host": 0, "dram_decision": "load", **StageTimes(0.1, 0.2).details()}
    details = cached_tokens_details_from_dict(reports)
    hook.after_model(details, reports)
    answer = ChatCompletionStreamResponse(
        id="x", model="m", choices=[], sglext=SglExt(cached_tokens_details=details)
    )
    said = json.loads(answer.model_dump_json())["sglext"]["cached_tokens_details"]
    assert StageTimes.of_details(said) == StageTimes(0.1, 0.2)
    assert (said["device"], "dram_decision" in said) == (3, False)

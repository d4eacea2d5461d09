"""``sglang-ext diverge``: logs of several kinds are read, and turns compared as the router compares them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.errors import ConfigError
from sglang_ext.router.clients.request_logs import LoggedBody, read_requests
from sglang_ext.router.clients.rules import shipped
from sglang_ext.router.diverge import FAILED, Units, compare, main

BILLING = "x-anthropic-billing-header: cc_version=2.1.245.2ef; cc_entrypoint=cli; cch={};"
SYSTEM = "You are an agent. " + "It reads files and edits code with care. " * 20
USER = {"role": "user", "content": "read a file"}


def claude_code(cch: str, *messages: dict[str, Any]) -> dict[str, Any]:
    system = [{"type": "text", "text": BILLING.format(cch)}, {"type": "text", "text": SYSTEM}]
    return {"model": "m", "max_tokens": 8, "system": system, "messages": list(messages)}


def read(*lines: Any) -> list[LoggedBody]:
    return list(read_requests(json.dumps(line).encode() for line in lines))


TURNS = (
    claude_code("0f3a2", USER),
    claude_code("91bc7", USER, {"role": "assistant", "content": "done"}, {"role": "user", "content": "on"}),
)


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(TURNS, id="bodies"),
        pytest.param([{"request": turn, "response": {"content": []}} for turn in TURNS], id="pairs"),
        pytest.param(
            [{"custom_id": "1", "method": "POST", "url": "/v1/messages", "body": turn} for turn in TURNS],
            id="batch",
        ),
        pytest.param(
            [
                {
                    "call_type": "anthropic_messages", "trace_id": "t", "model": "m",
                    "messages": turn["messages"],
                    "model_parameters": {"system": turn["system"], "max_tokens": 8},
                }
                for turn in TURNS
            ],
            id="litellm",
        ),
    ],
)  # fmt: skip
def test_a_log_shows_where_claude_code_leaves_its_last_turn(lines: Any) -> None:
    sent, repaired = compare(read(*lines), Units(), shipped())
    assert sent.skipped == repaired.skipped == {}
    assert sent.found.requests == 2
    ((cause, rule),) = sent.found.lost
    assert (cause, rule) == ("rule", "claude-code-billing")
    assert not repaired.found.lost
    assert repaired.found.shared > 10 * sent.found.shared
    (_, worst) = sent.found.worst[0]
    assert worst.before.startswith("cch=0f3a2;")
    assert worst.after.startswith("cch=91bc7;")


def test_conversations_without_a_name_are_kept_apart() -> None:
    def ask(name: str, turns: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"{name} {at} " + f"{name}{at} " * 30} for at in range(turns)]
        return {"model": "m", "messages": messages}

    sent, _ = compare(read(ask("a", 1), ask("b", 1), ask("a", 2), ask("b", 2)), Units(), shipped())
    assert not sent.found.lost
    assert len(sent._sessions) == 2
    assert sent.found.shared > 0


def test_sglang_s_log_has_the_tokens_of_its_server() -> None:
    def line(event: str, **obj: Any) -> dict[str, Any]:
        return {"timestamp": "2026-11-29T10:00:00", "event": event, "rid": "r", "obj": obj}

    lines = [
        line("request.received.openai", messages=[USER]),
        line("request.received", input_ids=[1, 2, 3], extra_key="k"),
        line("request.finished", input_ids=[1, 2, 3]),
    ]
    assert [(each.path, each.body) for each in read(*lines)] == [
        ("/generate", {"input_ids": [1, 2, 3], "extra_key": "k"})
    ]
    for cut in ({"input_ids": "[1, 2 ... 3]"}, {"text": "a ... b"}, {}):
        with pytest.raises(ConfigError, match=r"line 1 has .* --log-requests-level 3"):
            read(line("request.received", **cut))


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"{", "line 2 is not JSON"),
        (b"Receive: obj=GenerateReqInput()", "line 2 is not JSON.*--log-requests-format json"),
        (b"3", "line 2 is no JSON object"),
        (b"{}", "line 2 has no messages, input, prompt, text or input_ids"),
    ],
)
def test_errors_name_the_line(line: bytes, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        list(read_requests([b"\n", line]))


def test_the_command_prints_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    odd = {"messages": [{"role": "nobody", "content": "x"}]}
    log.write_text("".join(json.dumps(turn) + "\n" for turn in (*TURNS, odd)), encoding="utf-8")
    out = io.StringIO()
    assert main([str(log)], out) == 0
    text = out.getvalue()
    assert "2 requests" in text
    assert "repaired by rule claude-code-billing" in text
    assert "passed over 1: " in text
    assert main([str(tmp_path / "none")], out) == FAILED
    assert "cannot read" in capsys.readouterr().err


def test_with_the_model_s_tokenizer_lengths_are_tokens(tmp_path: Path, tokenizer_dir: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(turn) + "\n" for turn in TURNS), encoding="utf-8")
    out = io.StringIO()
    assert main([str(log), "--model-path", str(tokenizer_dir)], out) == 0
    text = out.getvalue()
    assert "units" not in text
    assert "`cch=0f3a2;" in text

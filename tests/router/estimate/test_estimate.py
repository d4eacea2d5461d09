"""``sglang-ext estimate``: every kind of log, and its report."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.keys import encode_tokens
from sglang_ext.protocol.recording import VERSION, Fill, Head, Member, Namer, Request, Writer
from sglang_ext.router.estimate.command import FAILED, kv_bytes_of, main

WORDS = "It reads files and edits code with care. " * 40


def estimate(tmp_path: Path, lines: list[Any], *flags: str) -> tuple[dict[str, Any], str]:
    log, found, out = tmp_path / "log.jsonl", tmp_path / "found.json", io.StringIO()
    log.write_bytes(
        b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
    )
    assert main([str(log), "--json", str(found), *flags], out) == 0, out.getvalue()
    return json.loads(found.read_text()), out.getvalue()


def talk(turns: int, session: str = "a") -> list[list[dict[str, str]]]:
    messages: list[dict[str, str]] = [{"role": "user", "content": session + WORDS}]
    found = []
    for turn in range(turns):
        found.append(list(messages))
        messages += [
            {"role": "assistant", "content": f"done {turn}"},
            {"role": "user", "content": f"go on {turn}"},
        ]
    return found


def openai(messages: list[dict[str, str]], at: float) -> dict[str, Any]:
    return {"timestamp": at, "model": "m", "messages": messages}


def anthropic(messages: list[dict[str, str]], at: float) -> dict[str, Any]:
    body = {"model": "m", "max_tokens": 9, "messages": messages, "system": "Be brief."}
    return {"created_at": f"2026-01-01T00:00:{at:02.0f}+00:00", "request": body}


def litellm(messages: list[dict[str, str]], at: float) -> dict[str, Any]:
    return {
        "call_type": "acompletion",
        "model": "m",
        "messages": messages,
        "startTime": at,
        "completion_tokens": 3,
    }


def sglang(messages: list[dict[str, str]], at: float) -> dict[str, Any]:
    ids = list("".join(message["content"] for message in messages).encode())
    received = {"rid": "r", "input_ids": ids}
    return {"timestamp": f"2026-01-01T00:00:{at:02.0f}", "event": "request.received", "obj": received}


@pytest.mark.parametrize("kind", [openai, anthropic, litellm, sglang])
def test_every_kind_of_log_gives_the_same_picture(kind, tmp_path) -> None:
    lines = [kind(messages, 10.0 * at) for at, messages in enumerate(talk(4))]
    found, text = estimate(tmp_path, lines, "--instances", "2")
    assert (found["requests"], found["seconds"], found["timed"]) == (4, 30.0, True)
    assert found["with_sglang_ext"]["hit_share"] > 0.6
    # In turn, the third finds the KV of the first at its instance, and the second nothing.
    assert found["today"]["hit_share"] < found["with_sglang_ext"]["hit_share"] - 0.15
    assert found["gpu_seconds_saved"] > 0
    assert found["today"]["ttft_s"]["p90"] > found["with_sglang_ext"]["ttft_s"]["p90"]
    assert "units of 4 bytes" in text
    assert len(found["settings"]) == 3
    shares = [row["by_prefix"] for row in found["curve"]]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(found["without_a_limit"])


def test_a_cut_off_log_of_sglang_is_refused_by_name(tmp_path, capsys) -> None:
    log = tmp_path / "log.jsonl"
    cut = {"event": "request.received", "timestamp": "t", "obj": {"rid": "r", "text": "It reads ... care"}}
    log.write_text(json.dumps(cut) + "\n")
    assert main([str(log)], io.StringIO()) == FAILED
    assert "--log-requests-level 3" in capsys.readouterr().err
    assert main([str(tmp_path / "none")], io.StringIO()) == FAILED
    assert "cannot read" in capsys.readouterr().err
    log.write_text("\n")
    assert main([str(log)], io.StringIO()) == FAILED
    assert "no request" in capsys.readouterr().err


def mooncake(at: float, ids: list[int], tokens: int, answer: int = 100) -> dict[str, Any]:
    return {"timestamp": at * 1000, "input_length": tokens, "output_length": answer, "hash_ids": ids}


def test_a_mooncake_trace_is_in_blocks_of_512(tmp_path) -> None:
    lines = [mooncake(0, [1, 2, 3], 1500), mooncake(60, [1, 2, 4, 5], 2000)]
    found, text = estimate(tmp_path, lines)
    # Of the second prompt, two whole blocks are the first's; 1,500 and 100 tokens end in the third.
    assert found["with_sglang_ext"]["hit_share"] == pytest.approx((3 * 512) / 3500)
    assert found["prompt_tokens"] == 3500
    assert "tokens of prompts" in text
    assert found["seconds"] == 60
    short = [mooncake(0, [1, 2, 3], 1500, 10), mooncake(60, [1, 2, 4, 5], 2000)]
    assert estimate(tmp_path, short)[0]["with_sglang_ext"]["hit_share"] == pytest.approx(1024 / 3500)


def recording(tiers: dict[str, Fill]) -> list[bytes]:
    namer, writer = Namer(b"0" * 32, 16), Writer()
    lines: list[Any] = [Head(0.0, VERSION, "r", namer.key_id, 16, "auto")]
    lines += [Member(0.0, name, "colocated", tiers) for name in ("one", "two")]
    asked = []
    for at, length in enumerate((320, 640, 960)):
        names = namer.names("s", encode_tokens(list(range(length + 32))))
        blocks = writer.blocks("s", length, names, answer=2)
        asked.append(
            Request(
                float(at), id="i", path="/generate", status=200, prompts=(blocks,), completion_tokens=33,
                cached=0 if not at else length - 320, choices=(), stream=True, first_byte_s=0.5,
            )
        )  # fmt: skip
    # A line is written at the end of its request, which may be after later ones.
    return [Writer.line(line) for line in (*lines, asked[0], *asked[1:])]


def test_a_recording_brings_its_fleet_and_what_was_measured(tmp_path) -> None:
    tiers = {"hbm": Fill(10, 1000), "dram": Fill(10, 4000)}
    found, text = estimate(tmp_path, recording(tiers))
    fleet = found["fleet"]
    assert (fleet["instances"], fleet["disk_bytes"]) == (2, 0)
    assert fleet["hbm_bytes"] == 1000 * 16 * fleet["kv_bytes_per_token"]
    assert found["measured_hit_share"] == pytest.approx((320 + 640) / 1920)
    # Each turn finds the one before with its answer.
    assert found["with_sglang_ext"]["hit_share"] == pytest.approx((352 + 672) / 1920)
    assert "measured: 50.0 %" in text
    small, _ = estimate(tmp_path, recording({"hbm": Fill(10, 10)}))
    assert small["with_sglang_ext"]["hit_share"] == pytest.approx(2 * 160 / 1920)
    given, _ = estimate(tmp_path, recording(tiers), "--tiers", "hbm=1MiB,kv-bytes=1KiB", "--instances", "3")
    assert (given["fleet"]["instances"], given["fleet"]["hbm_bytes"]) == (3, 1 << 20)


def test_the_page_has_the_curve_and_loads_nothing(tmp_path) -> None:
    page = tmp_path / "page.html"
    lines = [openai(messages, 1.0) for messages in talk(3, "<b>")]
    estimate(tmp_path, lines, "--html", str(page))
    text = page.read_text()
    assert text.count("<polyline") == 2
    assert "http" not in text.replace("http://www.w3.org", "")


def test_kv_of_a_token_is_by_the_models_configuration(tmp_path) -> None:
    config = {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kv_bytes_of(str(tmp_path)) == 128 << 10
    (tmp_path / "config.json").write_text(json.dumps({**config, "kv_lora_rank": 512, "qk_rope_head_dim": 64}))
    assert kv_bytes_of(str(tmp_path)) == 32 * 576 * 2
    (tmp_path / "config.json").write_text("{}")
    assert kv_bytes_of(str(tmp_path)) is None

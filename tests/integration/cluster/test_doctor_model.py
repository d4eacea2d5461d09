"""The doctor on models of which only the configuration is there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.testing.models import RECIPES
from tests.support.servers.programs import run_program

pytestmark = pytest.mark.slow

MAMBA: dict[str, Any] = {
    **RECIPES["tiny"].config,
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "conv_L_cache": 3,
}
DSA: dict[str, Any] = {
    **RECIPES["tiny-mla-moe"].config,
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_topk": 2048,
    "index_head_dim": 128,
}
MUSE: dict[str, Any] = {
    "architectures": ["MuseSparkForConditionalGeneration"],
    "model_type": "muse_spark",
    "text_config": {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
STATES_AND_PICTURES: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {**RECIPES["tiny-gdn"].config, "model_type": "qwen3_5_text"},
    "vision_config": {"model_type": "qwen3_5", "depth": 2, "hidden_size": 64, "num_heads": 4},
    "image_token_id": 1,
}
LATENTS_AND_PICTURES: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": RECIPES["tiny-mla-moe"].config,
    "vision_config": {},
    "media_placeholder_token_id": 5,
}
LATE_SIZES = "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"
ANSWERS: list[tuple[str, dict[str, Any], tuple[str, ...], int, dict[str, tuple[str, str]]]] = [
    (
        "moe",
        RECIPES["tiny-moe"].config,
        ("--kv-dram-size", "1GiB"),
        0,
        {"start": ("ok", "admitted"), "family": ("ok", "GQA with experts"), "disk": ("ok", "proof: server"),
         "hints": ("ok", "served")},
    ),
    (
        "mla",
        RECIPES["tiny-mla"].config,
        (),
        0,
        {"family": ("ok", "MLA, dense"), "PD": ("ok", "migration server")},
    ),
    ("gemma", RECIPES["tiny-gemma3"].config, (), 0, {"family": ("ok", "keeps all KV")}),
    (
        "window",
        RECIPES["tiny-swa"].config,
        (),
        0,
        {"start": ("ok", "admitted"), "disk": ("ok", "proof: server"), "hints": ("ok", "served"),
         "PD": ("warning", "--kv-pd-caching 3")},
    ),
    (
        "whole-windows",
        RECIPES["tiny-swa"].config,
        ("--disable-hybrid-swa-memory",),
        0,
        {"family": ("ok", "--disable-hybrid-swa-memory"), "DRAM": ("ok", "proof: server")},
    ),
    (
        "states",
        MAMBA,
        (),
        0,
        {"start": ("ok", "admitted"), "family": ("ok", "short convolution"),
         "PD": ("warning", "--kv-pd-caching 3")},
    ),
    (
        "states and a router",
        MAMBA,
        ("--kv-router", "http://127.0.0.1:30000"),
        0,
        {"start": ("ok", "admitted"), "family": ("ok", "short convolution"), "hints": ("ok", "served")},
    ),
    (
        "Muse Spark",
        MUSE,
        (),
        1,
        {"start": ("problem", f"{LATE_SIZES}=1"), "family": ("ok", "Sliding windows in a pool"),
         "PD": ("warning", "registers the whole pool")},
    ),
    (
        "states and pictures",
        STATES_AND_PICTURES,
        ("--kv-dram-size", "1GiB"),
        0,
        {"start": ("ok", "admitted"), "family": ("ok", "States: GDN"), "DRAM": ("ok", "proof: server"),
         "hints": ("ok", "served"), "PD": ("ok", "proof: server"), "speculation": ("ok", "proof: oracle")},
    ),
    (
        "latents and pictures",
        LATENTS_AND_PICTURES,
        (),
        0,
        {"start": ("ok", "admitted"), "family": ("ok", "MLA with pictures"), "disk": ("ok", "proof: oracle"),
         "hints": ("ok", "proof: oracle"), "PD": ("ok", "proof: reading"), "speculation": ("ok", "reading")},
    ),
    ("index", DSA, (), 0, {"family": ("ok", "index (DSA)"), "PD": ("ok", "proof: oracle")}),
    ("replicas", RECIPES["tiny"].config, ("--dp-size", "2"), 0, {"start": ("ok", "admitted")}),
    (
        "DP attention",
        RECIPES["tiny-moe"].config,
        ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"),
        0,
        {"start": ("ok", "admitted")},
    ),
    (
        "context parallelism",
        RECIPES["tiny-moe"].config,
        ("--tp-size", "2", "--attn-cp-size", "2"),
        0,
        {"start": ("ok", "admitted"), "disk": ("ok", "served"), "fetch": ("warning", "share the tokens")},
    ),
    (
        "transfer",
        RECIPES["tiny"].config,
        ("--disaggregation-transfer-backend", "global", "--disaggregation-mode", "prefill"),
        0,
        {"PD": ("ok", "proof: server")},
    ),
]  # fmt: skip


@pytest.fixture
def doctor(preloaded_servers: None, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Runs the command; returns its exit code and all that it printed."""
    (tmp_path / "cwd").mkdir()
    return lambda *words: run_program(["-m", "sglang_ext.cli", "doctor", *words], tmp_path / "cwd")


@pytest.mark.parametrize(
    ("config", "flags", "status", "says"), [each[1:] for each in ANSWERS], ids=[each[0] for each in ANSWERS]
)
def test_a_folder_with_a_configuration_alone_is_enough(
    config: dict[str, Any],
    flags: tuple[str, ...],
    status: int,
    says: dict[str, tuple[str, str]],
    tmp_path: Path,
    doctor: Callable[..., tuple[int, str]],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    code, printed = doctor("--model-path", str(tmp_path), *flags, "--json")
    assert code == status, printed
    answer, _ = json.JSONDecoder().raw_decode(printed, printed.index("{"))
    found = {finding["subject"]: finding for finding in answer["findings"]}
    for subject, (level, text) in says.items():
        assert found[subject]["level"] == level, found
        assert text in found[subject]["text"]
    assert bool(found["start"]["advice"]) is bool(status), "the way out"


def test_muse_spark_is_admitted_where_its_way_out_was_taken(
    tmp_path: Path, doctor: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MUSE))
    code, printed = doctor("--model-path", str(tmp_path))
    assert code == 1
    assert f"Set {LATE_SIZES}=0" in printed
    monkeypatch.setenv(LATE_SIZES, "0")
    code, printed = doctor("--model-path", str(tmp_path))
    assert code == 0, printed
    assert "admitted" in printed


def test_a_model_that_is_not_there_is_a_finding_and_no_traceback(tmp_path: Path) -> None:
    """Started afresh: with the imports in the command's own order."""
    done = subprocess.run(
        [sys.executable, "-m", "sglang_ext.cli", "doctor", f"--model-path={tmp_path / 'none'}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert "cannot be read" in done.stdout
    assert "config.json" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_flag_that_no_server_has_is_refused(doctor: Callable[..., tuple[int, str]]) -> None:
    code, printed = doctor("--model-path", "x", "--no-such-flag")
    assert code == 2
    assert "--no-such-flag" in printed

"""The tiny models: same bytes every time, safe to build at the same time, and sensitive to all they read."""

from __future__ import annotations

import hashlib
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from sglang_ext.testing.model_kinds import KINDS
from sglang_ext.testing.models import (
    DTYPES,
    RECIPES,
    DType,
    build_model,
    cache_dir,
    main,
    model_path,
    parameter_count,
    recipe_hash,
    weight_shapes,
)
from sglang_ext.testing.state_kinds import STATE_KINDS
from sglang_ext.testing.tokenizer import emitted_ids
from tests.support.adapters import TARGETS, build_adapter
from tests.support.reference import Reference

pytestmark = pytest.mark.slow

TEXT = [
    name
    for name, recipe in RECIPES.items()
    if recipe.has_weights
    and recipe.config.keys().isdisjoint(("vision_config", "id2label"))
    and recipe.config["model_type"] != "spark2_5"
]
"""Those that `Reference` reads. The others are in tests/integration/cache: the vision model in
`test_pictures.py`, and Spark 2.5, which transformers lacks, in `test_hybrid_windows.py`."""
SHORT = ("tiny-moe", "tiny-lfm2")
"""The short form has these models of `KINDS` and `STATE_KINDS`; the long form has all."""
BUFFERS = ("e_score_correction_bias", "router_bias", "layer_scalar")
CLASSIFYING = [name for name, recipe in RECIPES.items() if "id2label" in recipe.config]


def each(names: Iterable[str]) -> list[Any]:
    """Parameters of a test; most models of other kinds are for the long form."""
    return [
        pytest.param(name, marks=pytest.mark.long)
        if name in {**KINDS, **STATE_KINDS} and name not in SHORT
        else name
        for name in names
    ]


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "sglang_ext" / "models"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", each(RECIPES))
def test_two_builds_are_the_same_to_the_byte(tmp_path: Path, name: str, dtype: DType) -> None:
    first = digest(build_model(name, dtype, tmp_path / "a"))
    assert first == digest(build_model(name, dtype, tmp_path / "b"))
    assert ("model.safetensors" in first) == RECIPES[name].has_weights
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= set(first)


def test_sizes() -> None:
    assert round(parameter_count(RECIPES["tiny"]) / 1e6) == 15
    assert round(parameter_count(RECIPES["small"]) / 1e6) == 40
    assert round(parameter_count(RECIPES["tiny-mla"]) / 1e6) == 12
    assert parameter_count(RECIPES["tiny-swa"]) == 0
    assert round(parameter_count(RECIPES["tiny-vl"]) / 1e6) == 16
    assert RECIPES["tiny-vl"].kv_elements_per_token == 4 * 2 * 4 * 32
    assert RECIPES["tiny"].kv_elements_per_token == 4 * 2 * 4 * 32
    assert RECIPES["tiny-mla"].kv_elements_per_token == 4 * (64 + 32)
    assert RECIPES["tiny-lfm2"].kv_elements_per_token == 2 * 2 * 4 * 32, "convolutions have no KV"
    small = RECIPES["small"]
    # Benchmarks of reuse rely on this ratio: computing a token's KV takes far more than moving it.
    operations = 2 * (parameter_count(small) - 32_000 * small.config["hidden_size"])
    assert operations / (4 * small.kv_elements_per_token) > 10_000


def test_bfloat16_is_float32_rounded_to_nearest(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    whole = load_file(build_model("tiny", "float32", tmp_path / "a") / "model.safetensors")
    raw = (build_model("tiny", "bfloat16", tmp_path / "b") / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    del header["__metadata__"]
    assert list(header) == list(weight_shapes(RECIPES["tiny"]))
    assert set(whole) == set(header)
    for name in ("model.embed_tokens.weight", "model.layers.3.mlp.down_proj.weight", "model.norm.weight"):
        start, end = header[name]["data_offsets"]
        halves = np.frombuffer(raw, "<u2", (end - start) // 2, 8 + length + start).astype(np.uint32)
        rounded = (halves << 16).view(np.float32).reshape(header[name]["shape"])
        assert header[name]["dtype"] == "BF16"
        # Half a unit in the last of 8 bits.
        np.testing.assert_allclose(rounded, whole[name], rtol=2.0**-8, atol=0)


@pytest.mark.parametrize("name", CLASSIFYING)
def test_transformers_reads_every_weight_of_a_classifier(name: str) -> None:
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()  # it leaves a thread behind
    model, found = AutoModelForSequenceClassification.from_pretrained(
        model_path(name), dtype="float32", output_loading_info=True
    )
    assert not any(found.values()), found
    assert sum(weight.numel() for weight in model.parameters()) == parameter_count(RECIPES[name])
    assert model.config.num_labels == len(RECIPES[name].config["id2label"])


@pytest.mark.parametrize(("name", "dtype"), [("huge", "float32"), ("tiny", "float64")])
def test_unknown_names_are_refused_with_the_choices(tmp_path: Path, name: str, dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"choose one of (tiny, |float32, bfloat16)"):
        build_model(name, dtype, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_cache_builds_once(cache: Path) -> None:
    path = model_path("tiny-swa", "float32")
    assert path == cache / f"tiny-swa-float32-{recipe_hash('tiny-swa', 'float32')}"
    assert cache_dir() == cache
    stamp = (path / "config.json").stat().st_mtime_ns
    assert model_path("tiny-swa", "float32") == path
    assert (path / "config.json").stat().st_mtime_ns == stamp
    assert model_path("tiny-swa", "bfloat16") != path
    assert len(list(cache.iterdir())) == 2


def test_a_build_that_fails_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sglang_ext.testing.models._save_weights", full)
    with pytest.raises(OSError, match="No space left"):
        model_path("tiny", "float32")
    assert list(cache.iterdir()) == []


def test_builders_at_the_same_time_agree(cache: Path) -> None:
    command = [sys.executable, "-m", "sglang_ext.testing.models", "tiny"]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    paths = {builder.communicate(timeout=120)[0].strip() for builder in builders}
    assert [builder.returncode for builder in builders] == [0] * 4
    assert paths == {str(model_path("tiny", "float32"))}
    (only,) = cache.iterdir()
    assert digest(only) == digest(build_model("tiny", "float32", cache.parent / "alone"))


def test_the_command_lists_and_builds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()] == list(RECIPES)
    assert "15.3M" in listed
    assert main(["tiny-swa", "--dtype", "bfloat16", "--out", str(tmp_path / "model")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(SystemExit):
        main([])
    assert "NAME is missing" in capsys.readouterr().err


# --- the models' outputs, by transformers' implementation ---


@pytest.fixture(scope="module", params=each(TEXT))
def reference(request: pytest.FixtureRequest) -> Reference:
    return Reference(request.param)


@pytest.mark.parametrize("length", [60, 600])
def test_the_answer_depends_on_every_part_of_the_context(reference: Reference, length: int) -> None:
    rng = random.Random(length)
    prompt = [rng.randrange(3, 32_000) for _ in range(length)]
    tokens, logprobs = reference.answer(prompt, 8)
    assert len(set(tokens)) > 4, "the model repeats itself"
    for place in (0, 3, length // 3, length - 2):
        changed = list(prompt)
        changed[place] = changed[place] % 31_000 + 500
        other_tokens, other_logprobs = reference.answer(changed, 8)
        moved = max(abs(a - b) for a, b in zip(logprobs, other_logprobs, strict=True))
        # Ten times the tolerance of same-answer tests.
        assert other_tokens != tokens or moved > 1e-3, place


def test_transformers_counts_the_same_parameters(
    request: pytest.FixtureRequest, reference: Reference
) -> None:
    name = request.node.callspec.params["reference"]
    # In transformers, the bias of the experts' scores and the scale of a layer are buffers.
    sizes = [
        math.prod(shape)
        for weight, shape in weight_shapes(RECIPES[name]).items()
        if not weight.endswith(BUFFERS)
    ]
    assert reference.parameters == sum(sizes)


def test_answers_are_made_of_words_that_come_back_as_the_same_ids(reference: Reference) -> None:
    rng = random.Random(1)
    words = set(emitted_ids())
    tokens = [
        token
        for _ in range(4)
        for token in reference.answer([rng.randrange(3, 32_000) for _ in range(40)], 50)[0]
    ]
    assert len(set(tokens)) > 100
    assert set(tokens) <= words


def test_adapters_differ_by_name_and_are_the_same_bytes_every_time(tmp_path: Path) -> None:
    first, again, other = (
        build_adapter("tiny", name, tmp_path / folder)
        for name, folder in (("a", "x"), ("a", "y"), ("b", "x"))
    )
    weights = [(path / "adapter_model.safetensors").read_bytes() for path in (first, again, other)]
    assert weights[0] == weights[1] != weights[2]
    tensors = load_file(first / "adapter_model.safetensors")
    config = json.loads((first / "adapter_config.json").read_text())
    layers = RECIPES["tiny"].config["num_hidden_layers"]
    assert len(tensors) == layers * len(TARGETS) * 2
    hidden = RECIPES["tiny"].config["hidden_size"]
    assert tensors["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"].shape == (
        hidden,
        config["r"],
    )

"""Draft models of tiny models that guess well."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from sglang_ext.testing.models import model_path


def eagle_head(folder: Path) -> Path:
    """Write an EAGLE head to a folder that is not there yet, and return the folder.

    The head has the layers of the tiny model. Before them is a layer whose output is its input, because the
    first layer of SGLang's EAGLE models has no norm before its attention. The head reads the embedding alone.
    """
    shutil.copytree(model_path("tiny"), folder)
    config = json.loads((folder / "config.json").read_text())
    size, layers = config["hidden_size"], config["num_hidden_layers"]
    config |= {"architectures": ["LlamaForCausalLMEagle"], "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers + 1}))
    target = load_file(folder / "model.safetensors")
    weights = {
        "fc.weight": np.hstack([np.eye(size, dtype=np.float32), np.zeros((size, size), np.float32)]),
        "fc.bias": np.zeros(size, np.float32),
    }
    for layer in range(-1, layers):
        prefix = f"model.layers.{max(layer, 0)}."
        for name, values in target.items():
            if name.startswith(prefix) and (layer >= 0 or "input_layernorm" not in name):
                nothing = layer < 0 and ("o_proj" in name or "down_proj" in name)
                place = f"layers.{layer + 1}.{name.removeprefix(prefix)}"
                weights[place] = np.zeros_like(values) if nothing else values
    save_file(weights, folder / "model.safetensors")
    return folder


SILENT = 99
"""The first token of each prompt for `drafted_gemma`."""


def drafted_gemma(folder: Path) -> Path:
    """Write the tiny Gemma 3 to a folder that is not there yet, so changed that it guesses well as its own
    draft. Returns the folder.

    SGLang shifts the tokens of a draft by one: it never sees the first token of a prompt. The tiny model
    attends so sharply that this token changes its answers hundreds of tokens later. Here the first token has
    no embedding, so that no value comes from it, and layers without a window attend less sharply.
    """
    shutil.copytree(model_path("tiny-gemma3"), folder)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][SILENT] = 0
    for layer, kind in enumerate(config["layer_types"]):
        if kind == "full_attention":
            weights[f"model.layers.{layer}.self_attn.q_norm.weight"][:] = 0  # the model adds 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def windowed_target(folder: Path, window: int) -> Path:
    """Write the tiny model with windows to a folder that is not there yet, with longer windows and without
    gates and feed-forward parts: layers of Llama can compute the same as its layers. Returns the folder."""
    shutil.copytree(model_path("tiny-spark"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "sliding_window": window}))
    weights = load_file(folder / "model.safetensors")
    for name, values in weights.items():
        if "g_proj" in name or "down_proj" in name:
            values[:] = 0
    save_file(weights, folder / "model.safetensors")
    return folder


def windowed_eagle_head(target: Path, folder: Path) -> Path:
    """Write an EAGLE head for `windowed_target`. Its layers have no windows: up to the length of one it
    guesses well."""
    shutil.copytree(target, folder)
    config = json.loads((target / "config.json").read_text())
    size, layers = config["hidden_size"], config["num_hidden_layers"]
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    kept += ("head_dim", "rope_theta", "rms_norm_eps", "max_position_embeddings", "hidden_act", "torch_dtype")
    llama = {name: config[name] for name in kept} | {"model_type": "llama", "mlp_bias": False}
    llama |= {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": layers + 1}
    (folder / "config.json").write_text(json.dumps(llama | {"tie_word_embeddings": False}))
    rows = [config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value")]
    found = load_file(target / "model.safetensors")
    weights = {
        "fc.weight": np.hstack([np.eye(size, dtype=np.float32), np.zeros((size, size), np.float32)]),
        "fc.bias": np.zeros(size, np.float32),
    }
    for layer in range(-1, layers):
        here, there = f"model.layers.{max(layer, 0)}.", f"layers.{layer + 1}."
        rest = {name.removeprefix(here): found[name] for name in found if name.startswith(here)}
        joined, out = (rest.pop(f"self_attn.{part}_proj.weight") for part in ("q_k_v", "out"))
        del rest["self_attn.g_proj.weight"]
        parts = np.split(joined, np.cumsum([rows[0], rows[1]]))
        rest |= {f"self_attn.{part}_proj.weight": each for part, each in zip("qkv", parts, strict=True)}
        # A gate of 0 lets half of a head through. The layer in front changes nothing.
        rest["self_attn.o_proj.weight"] = out * np.float32(0.5 if layer >= 0 else 0)
        if layer < 0:
            del rest["input_layernorm.weight"]
        weights |= {there + name: np.ascontiguousarray(values) for name, values in rest.items()}
    save_file(weights, folder / "model.safetensors")
    return folder

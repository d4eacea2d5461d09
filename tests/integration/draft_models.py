"""Draft models of the tiny model that guess well."""

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

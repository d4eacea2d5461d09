"""Tiny LoRA adapters for the tiny models (``models``): random, the same bytes every time, large enough to
change greedy answers."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import save_file

from sglang_ext.testing.models import RECIPES, SEED, weight_shapes

TARGETS: Final = ("o_proj", "down_proj")
"""Modules that an adapter changes. They change hidden states, and so the KV of all later layers."""
DEVIATION: Final = 0.2
"""Deviation of both factors. With the weights' own deviation some greedy answers stay as they are."""


def build_adapter(
    model: str, name: str, folder: Path, *, rank: int = 4, targets: Sequence[str] = TARGETS
) -> Path:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors`` as PEFT does; return their folder.

    Args:
        model: name of a tiny model.
        name: of the adapter; another name gives other weights.
        folder: the adapter's folder is made in it.
        rank: columns of the first factor.
        targets: modules that it changes.
    """
    path = folder / name
    path.mkdir(parents=True)
    tensors = {}
    for weight, shape in weight_shapes(RECIPES[model]).items():
        module = weight.removesuffix(".weight")
        if module.rpartition(".")[2] not in targets:
            continue
        outputs, inputs = shape
        for factor, size in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
            generator = np.random.Generator(
                np.random.PCG64([SEED, zlib.crc32(f"{name} {module} {factor}".encode())])
            )
            values = generator.standard_normal(size, np.float32) * np.float32(DEVIATION)
            tensors[f"base_model.model.{module}.{factor}.weight"] = values
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": model, "bias": "none",
        "r": rank, "lora_alpha": 2 * rank, "lora_dropout": 0.0, "target_modules": list(targets),
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return path

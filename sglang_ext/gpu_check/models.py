"""A model of a real one's shape with random weights, made on the GPU: nothing is downloaded.

    python -m sglang_ext.gpu_check.models SHAPE FOLDER [--no-weights]

The weights are noise of the deviation that ``sglang_ext.testing.models`` has, scaled to the width: greedy
answers depend on every token before, so that damaged KV shows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_ext.testing.models import DEVIATION, SEED
from sglang_ext.testing.tokenizer import BOS_TOKEN_ID, EOS_TOKEN_ID, VOCAB_SIZE, write_tokenizer

CONTEXT = 32_768


@dataclass(frozen=True)
class Shape:
    """hidden, inner: widths. head: the size of one."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int


SHAPES = {
    "8b": Shape(4096, 14336, 32, 32, 8, 128),
    "1b": Shape(2048, 8192, 16, 32, 8, 64),
    "tiny": Shape(256, 1024, 4, 4, 2, 64),
}
"""Those of Llama-3.1-8B (128 KiB of KV per token) and Llama-3.2-1B (32 KiB, 2.5 GB), and a small one."""


def write_model(folder: Path, shape: Shape = SHAPES["1b"], *, weights: bool = True) -> None:
    """Write config and tokenizer, and weights unless the server makes its own (``--load-format dummy``)."""
    from safetensors.torch import save_file

    config = _config(shape)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    write_tokenizer(folder, CONTEXT)
    if weights:
        made = {name: tensor.cpu() for name, tensor in _weights(config["vocab_size"], shape)}
        save_file(made, folder / "model.safetensors", {"format": "pt"})


def main() -> None:
    """Write one by its command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--no-weights", action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    write_model(given.folder, SHAPES[given.shape], weights=not given.no_weights)


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": None,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "dtype": "bfloat16",
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": BOS_TOKEN_ID,
    }


def _weights(vocabulary: int, shape: Shape) -> Iterator[tuple[str, torch.Tensor]]:
    hidden, inner = shape.hidden, shape.inner
    deviation = DEVIATION * (256 / hidden) ** 0.5
    torch.manual_seed(SEED)

    def noise(*size: int) -> torch.Tensor:
        return (torch.randn(size, device="cuda") * deviation).to(torch.bfloat16)

    def ones() -> torch.Tensor:
        return torch.ones(hidden, dtype=torch.bfloat16, device="cuda")

    yield "model.embed_tokens.weight", noise(vocabulary, hidden)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", ones()
        yield at + "post_attention_layernorm.weight", ones()
        yield at + "self_attn.q_proj.weight", noise(shape.heads * shape.head, hidden)
        yield at + "self_attn.k_proj.weight", noise(shape.kv_heads * shape.head, hidden)
        yield at + "self_attn.v_proj.weight", noise(shape.kv_heads * shape.head, hidden)
        yield at + "self_attn.o_proj.weight", noise(hidden, shape.heads * shape.head)
        yield at + "mlp.gate_proj.weight", noise(inner, hidden)
        yield at + "mlp.up_proj.weight", noise(inner, hidden)
        yield at + "mlp.down_proj.weight", noise(hidden, inner)
    yield "model.norm.weight", ones()


if __name__ == "__main__":
    main()

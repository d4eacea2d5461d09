"""Tiny models with random weights, built on the spot: the same bytes every time, in seconds, no download.

`python -m sglang_ext.testing.models NAME [--dtype float32|bfloat16] --out DIR`, or `--list`.

The weights are noise, and still every output token depends on every token of the context: deviation 0.08
instead of the usual 0.02, and tied embeddings. With the usual one a random model repeats one token regardless
of its context, and a damaged KV cache would go unseen.

The embeddings of entries that are not whole words (bytes, fragments, Chinese characters, special tokens)
are drawn with half the deviation, as trained models have smaller ones for rare tokens. Greedy answers are
then made of whole words, which re-tokenise to the ids that were generated: over the chat API a turn finds
the KV of the answer before it again, as it does with a trained model. Sampled answers are less pure: of all
tokens 9 to 16 % are no whole words at temperature 1, 1 to 6 % at 0.6, less than 0.1 % at 0.3. The cost is
that such a model never ends an answer by itself; set `max_tokens`.

SGLang's default `--dtype auto` serves a float32 model in float16: give `--dtype float32` with it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sglang_ext.testing.encoders import CROSS_ENCODER, bert_shapes
from sglang_ext.testing.model_kinds import (
    FINAL_NORMS,
    KINDS,
    NORM_WEIGHTS,
    feed_forward,
    head_norms,
    mimo_attention,
    norms,
    of_layer,
    sinks_attention,
    spark_attention,
    step_attention,
)
from sglang_ext.testing.state_kinds import (
    CONVOLUTION,
    STATE_KINDS,
    has_attention,
    mixer_layer,
    state_layer,
)
from sglang_ext.testing.tokenizer import (
    BOS_TOKEN_ID,
    EOS_TOKEN_ID,
    VISION_TOKENS,
    VOCAB_SIZE,
    emitted_ids,
    write_tokenizer,
)

DType = Literal["float32", "bfloat16"]
DTYPES: tuple[DType, ...] = ("float32", "bfloat16")

SEED = 20_240_613
DEVIATION = 0.08
RARE_TOKEN_FACTOR = 0.5
CONVOLUTION_DEVIATION = 0.6
"""Of weights that sum a few tokens only: with the usual one, a damaged state would go unseen."""
CONTEXT_LENGTH = 32_768
_EMBEDDINGS, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_MIXERS = "hybrid_override_pattern"
"""In a config.json: each layer is one mixer, and the embeddings have a name of their own."""
_EMBEDDINGS_OF_MIXERS = "model.embeddings.weight"


@dataclass(frozen=True)
class Recipe:
    """One model: `config` is its config.json without the dtype."""

    name: str
    summary: str
    config: dict[str, Any]
    has_weights: bool = True

    @property
    def generates(self) -> bool:
        """Whether a server of it generates text."""
        return self.has_weights and "id2label" not in self.config

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers of the KV pool that one token takes, all layers together."""
        config = self.config
        layers = [layer for layer in range(config["num_hidden_layers"]) if has_attention(config, layer)]
        if "kv_lora_rank" in config:
            latent: int = config["kv_lora_rank"] + config["qk_rope_head_dim"]
            return len(layers) * latent
        found = [of_layer(config, layer) for layer in layers]
        return sum(
            int(own["num_key_value_heads"] * (own["head_dim"] + own.get("v_head_dim", own["head_dim"])))
            for own in found
        )


_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": True,
    "initializer_range": DEVIATION,
    "max_position_embeddings": CONTEXT_LENGTH,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": BOS_TOKEN_ID,
    "use_cache": True,
}

_LLAMA: dict[str, Any] = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "mlp_bias": False,
    "rope_theta": 500_000.0,
    "rope_scaling": None,
}

_VISION_VOCABULARY = VOCAB_SIZE + 32
_VISION_START, _VISION_END, _IMAGE, _VIDEO = range(VOCAB_SIZE, VOCAB_SIZE + len(VISION_TOKENS))
_PICTURES: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 784,
    "max_pixels": 100_352,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""How a picture is cut: a token for each 28 by 28 pixels, 128 at most."""

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "tiny",
            "Llama, grouped-query attention: for tests",
            {
                **_LLAMA,
                "hidden_size": 256,
                "intermediate_size": 2048,
                "num_hidden_layers": 4,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 32,
            },
        ),
        Recipe(
            "tiny-untied",
            "Llama with an output layer of its own, as stages of a pipeline need it: for tests",
            {
                **_LLAMA,
                "tie_word_embeddings": False,
                "hidden_size": 256,
                "intermediate_size": 1024,
                "num_hidden_layers": 3,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 32,
            },
        ),
        Recipe(
            "small",
            "Llama, few KV heads: for benchmarks, prefill costs far more than moving its KV",
            {
                **_LLAMA,
                "hidden_size": 512,
                "intermediate_size": 3584,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 64,
            },
        ),
        Recipe(
            "tiny-mla",
            "DeepSeek-V2, all layers dense: latent attention (MLA), for tests",
            {
                **_COMMON,
                "architectures": ["DeepseekV2ForCausalLM"],
                "model_type": "deepseek_v2",
                "hidden_size": 256,
                "intermediate_size": 1024,
                "moe_intermediate_size": 1024,
                "num_hidden_layers": 4,
                "first_k_dense_replace": 4,
                "moe_layer_freq": 1,
                # transformers insists on experts; no layer has them, see first_k_dense_replace.
                "n_routed_experts": 4,
                "n_shared_experts": 1,
                "num_experts_per_tok": 2,
                "topk_method": "greedy",
                "norm_topk_prob": False,
                "routed_scaling_factor": 1.0,
                "num_attention_heads": 8,
                "num_key_value_heads": 8,
                "q_lora_rank": None,
                "kv_lora_rank": 64,
                "qk_nope_head_dim": 32,
                "qk_rope_head_dim": 32,
                "v_head_dim": 32,
                "rope_theta": 10_000.0,
                "rope_scaling": None,
            },
        ),
        Recipe(
            "tiny-vl",
            "Qwen2.5-VL, two layers of vision: takes pictures, for tests",
            {
                **_COMMON,
                "architectures": ["Qwen2_5_VLForConditionalGeneration"],
                "model_type": "qwen2_5_vl",
                "vocab_size": _VISION_VOCABULARY,
                "hidden_size": 256,
                "intermediate_size": 2048,
                "num_hidden_layers": 4,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 32,
                "rope_theta": 10_000.0,
                "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [4, 6, 6]},
                "vision_start_token_id": _VISION_START,
                "vision_end_token_id": _VISION_END,
                "vision_token_id": _IMAGE,
                "image_token_id": _IMAGE,
                "video_token_id": _VIDEO,
                "vision_config": {
                    "model_type": "qwen2_5_vl",
                    "depth": 2,
                    "hidden_size": 64,
                    "intermediate_size": 128,
                    "num_heads": 2,
                    "in_channels": 3,
                    "in_chans": 3,
                    "out_hidden_size": 256,
                    "patch_size": 14,
                    "spatial_merge_size": 2,
                    "spatial_patch_size": 14,
                    "temporal_patch_size": 2,
                    "tokens_per_second": 2,
                    "window_size": 56,
                    "fullatt_block_indexes": [1],
                    "hidden_act": "silu",
                },
            },
        ),
        Recipe(
            "tiny-swa",
            "gpt-oss-like layers with a sliding window, config and tokenizer only: for tests of refusals",
            {
                **_COMMON,
                "architectures": ["GptOssForCausalLM"],
                "model_type": "gpt_oss",
                "hidden_size": 256,
                "intermediate_size": 256,
                "num_hidden_layers": 4,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 32,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "sliding_window": 128,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "rope_theta": 10_000.0,
                "rope_scaling": None,
            },
            has_weights=False,
        ),
        Recipe(
            "tiny-classifier",
            "Llama that gives a text one of three classes, for tests",
            {
                **_LLAMA,
                "architectures": ["LlamaForSequenceClassification"],
                "hidden_size": 256,
                "intermediate_size": 1024,
                "num_hidden_layers": 2,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 32,
                "id2label": {"0": "praise", "1": "blame", "2": "neither"},
                "label2id": {"praise": 0, "blame": 1, "neither": 2},
            },
        ),
        Recipe("tiny-cross-encoder", "BERT that scores a query and a document, for tests", CROSS_ENCODER),
        *(
            Recipe(
                name,
                f"{summary}: for tests",
                {**_COMMON, "architectures": [architecture], "model_type": model_type, **own},
            )
            for name, (summary, architecture, model_type, own) in {**KINDS, **STATE_KINDS}.items()
        ),
    )
}


def _llama_attention(config: dict[str, Any], prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    gated = 2 if config.get("attn_output_gate") else 1  # each head's gate lies behind its query
    yield prefix + "q_proj.weight", (gated * queries, hidden)
    yield prefix + "k_proj.weight", (keys, hidden)
    yield prefix + "v_proj.weight", (keys, hidden)
    yield f"{prefix}{'out' if config['model_type'] == 'lfm2' else 'o'}_proj.weight", (hidden, queries)
    if "vision_config" in config:  # Qwen2's attention has biases
        yield prefix + "q_proj.bias", (queries,)
        yield prefix + "k_proj.bias", (keys,)
        yield prefix + "v_proj.bias", (keys,)
    yield from head_norms(config, prefix)


def _vision(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The part of Qwen2.5-VL that makes embeddings of a picture."""
    hidden, inner, patch = config["hidden_size"], config["intermediate_size"], config["patch_size"]
    yield "visual.patch_embed.proj.weight", (hidden, 3, config["temporal_patch_size"], patch, patch)
    for layer in range(config["depth"]):
        prefix = f"visual.blocks.{layer}."
        yield prefix + "norm1.weight", (hidden,)
        yield prefix + "norm2.weight", (hidden,)
        for name, shape in (
            ("attn.qkv", (3 * hidden, hidden)),
            ("attn.proj", (hidden, hidden)),
            ("mlp.gate_proj", (inner, hidden)),
            ("mlp.up_proj", (inner, hidden)),
            ("mlp.down_proj", (hidden, inner)),
        ):
            yield f"{prefix}{name}.weight", shape
            yield f"{prefix}{name}.bias", shape[:1]
    merged = hidden * config["spatial_merge_size"] ** 2
    yield "visual.merger.ln_q.weight", (hidden,)
    yield "visual.merger.mlp.0.weight", (merged, merged)
    yield "visual.merger.mlp.0.bias", (merged,)
    yield "visual.merger.mlp.2.weight", (config["out_hidden_size"], merged)
    yield "visual.merger.mlp.2.bias", (config["out_hidden_size"],)


def _mla_attention(config: dict[str, Any], prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    if rank := config["q_lora_rank"]:
        yield prefix + "q_a_proj.weight", (rank, hidden)
        yield prefix + "q_a_layernorm.weight", (rank,)
        yield prefix + "q_b_proj.weight", (heads * (nope + rope), rank)
    else:
        yield prefix + "q_proj.weight", (heads * (nope + rope), hidden)
    yield prefix + "kv_a_proj_with_mqa.weight", (latent + rope, hidden)
    yield prefix + "kv_a_layernorm.weight", (latent,)
    yield prefix + "kv_b_proj.weight", (heads * (nope + value), latent)
    yield prefix + "o_proj.weight", (hidden, heads * value)


_ATTENTIONS: dict[str, Callable[..., Iterator[tuple[str, tuple[int, ...]]]]] = {
    "gpt_oss": sinks_attention,
    "mimo_v2_flash": mimo_attention,
    "spark2_5": spark_attention,
    "step3p5": step_attention,
}
"""Model type: the weights of its attention, where they are not Llama's or MLA's."""


def _attention(config: dict[str, Any]) -> Callable[..., Iterator[tuple[str, tuple[int, ...]]]]:
    if config["model_type"] in _ATTENTIONS:
        return _ATTENTIONS[config["model_type"]]
    return _mla_attention if "kv_lora_rank" in config else _llama_attention


def weight_shapes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight, in the order of the layers. Empty for a recipe without weights."""
    if not recipe.has_weights:
        return {}
    config = recipe.config
    if config["model_type"] == "bert":
        return dict(bert_shapes(config))
    hidden = config["hidden_size"]
    attention = _attention(config)
    embeddings = _EMBEDDINGS_OF_MIXERS if _MIXERS in config else _EMBEDDINGS
    shapes: dict[str, tuple[int, ...]] = {embeddings: (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        if _MIXERS in config:
            shapes.update(mixer_layer(config, layer, prefix))
            continue
        shapes.update(norms(config, prefix))
        shapes.update(state_layer(config, layer, prefix))
        if has_attention(config, layer):
            shapes.update(attention(of_layer(config, layer), prefix + "self_attn."))
        shapes.update(feed_forward(config, layer, prefix))
    shapes[FINAL_NORMS.get(config["model_type"], "model.norm") + ".weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes[_OUTPUT] = (config["vocab_size"], hidden)
    if "id2label" in config:
        shapes["score.weight"] = (len(config["id2label"]), hidden)
    if "vision_config" in config:
        shapes.update(_vision(config["vision_config"]))
    return shapes


def parameter_count(recipe: Recipe) -> int:
    """Number of parameters; the tied embedding counts once."""
    return sum(math.prod(shape) for shape in weight_shapes(recipe).values())


def _weight(name: str, shape: tuple[int, ...], scales: dict[str, float]) -> npt.NDArray[np.float32]:
    """scales: the weights of those norms whose weights are not 1, by the name of the module."""
    if name.endswith("A_log"):  # states that fade over some tokens to some hundreds, head by head
        return np.linspace(-6.0, 0.0, math.prod(shape), dtype=np.float32).reshape(shape)
    if name.endswith(("sinks", "sink_bias")):  # SGLang keeps them in bfloat16, which has these
        return np.linspace(-1.0, 1.0, math.prod(shape) + 1, dtype=np.float32)[1:]
    if len(shape) == 1:
        value = 0.0 if name.endswith((".bias", "router_bias")) else scales.get(name.split(".")[-2], 1.0)
        return np.full(shape, value, np.float32)
    name = _EMBEDDINGS if name in (_OUTPUT, _EMBEDDINGS_OF_MIXERS) else name
    # A generator per weight: adding or reordering weights leaves the others as they are.
    generator = np.random.Generator(np.random.PCG64([SEED, zlib.crc32(name.encode())]))
    deviation = CONVOLUTION_DEVIATION if name.endswith(CONVOLUTION) else DEVIATION
    values = generator.standard_normal(shape, np.float32) * np.float32(deviation)
    if name == _EMBEDDINGS:
        rare = np.ones(len(values), bool)
        rare[list(emitted_ids())] = False
        values[rare] *= np.float32(RARE_TOKEN_FACTOR)
    return values


def _to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper half of each float32, rounded to nearest even. The weights hold no NaN."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _save_weights(recipe: Recipe, dtype: DType, path: Path) -> None:
    """The safetensors format: length of the header (8 bytes), JSON header, then the tensors without gaps.

    Written here and not by the library so that the bytes do not depend on its version.
    """
    tag, width = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    shapes = weight_shapes(recipe)
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * width
        header[name] = {"dtype": tag, "shape": shape, "data_offsets": (offset, end)}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, shape in shapes.items():
            values = _weight(name, shape, NORM_WEIGHTS.get(recipe.config["model_type"], {}))
            file.write((values if dtype == "float32" else _to_bfloat16(values)).tobytes())


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _recipe(name: str, dtype: str) -> Recipe:
    if name not in RECIPES:
        raise ValueError(f"no model is called {name!r}; choose one of {', '.join(RECIPES)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not built; choose one of {', '.join(DTYPES)}")
    return RECIPES[name]


def build_model(name: str, dtype: DType, out_dir: Path | str) -> Path:
    """Write the model's config, tokenizer and weights into `out_dir` (made if missing); return it.

    Raises:
        ValueError: `name` or `dtype` is not among RECIPES, DTYPES.
    """
    recipe = _recipe(name, dtype)
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    _write_json(out_dir / "config.json", {**recipe.config, "dtype": dtype, "torch_dtype": dtype})
    _write_json(
        out_dir / "generation_config.json",
        {key: recipe.config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    vision = "vision_config" in recipe.config
    write_tokenizer(out_dir, recipe.config["max_position_embeddings"], vision=vision)
    if vision:
        _write_json(out_dir / "preprocessor_config.json", _PICTURES)
    if recipe.has_weights:
        _save_weights(recipe, dtype, out_dir / "model.safetensors")
    return out_dir


def recipe_hash(name: str, dtype: DType) -> str:
    """12 hex digits that change when anything changes that the built files depend on."""
    _recipe(name, dtype)
    digest = hashlib.sha256(f"{name} {dtype}".encode())
    here = Path(__file__).parent
    sources = [
        here / "models.py",
        here / "encoders.py",
        here / "model_kinds.py",
        here / "state_kinds.py",
        here / "tokenizer.py",
        *sorted((here / "static").iterdir()),
    ]
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


def cache_dir() -> Path:
    """Where `model_path` keeps models: $XDG_CACHE_HOME/sglang_ext/models, or the same below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang_ext" / "models"


def model_path(name: str, dtype: DType = "float32") -> Path:
    """The folder of the built model, built now if it is not in the cache.

    Builders that run at the same time each build their own copy; the first rename wins and the others' copies
    are dropped, so a folder of this name is always whole.
    """
    final = cache_dir() / f"{name}-{dtype}-{recipe_hash(name, dtype)}"
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".building-{name}-", dir=final.parent))
    try:
        build_model(name, dtype, building)
        building.chmod(0o755)
        try:
            building.rename(final)
        except OSError:
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return final


def main(arguments: list[str] | None = None) -> int:
    """Command line: build one model, or list them."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_ext.testing.models",
        description="Build a tiny model with random weights: the same bytes every time, no download.",
    )
    parser.add_argument("name", nargs="?", choices=list(RECIPES), metavar="NAME", help=", ".join(RECIPES))
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write; default: the user's cache")
    parser.add_argument("--list", action="store_true", help="list the models and stop")
    options = parser.parse_args(arguments)
    if options.list:
        for recipe in RECIPES.values():
            millions = f"{parameter_count(recipe) / 1e6:.1f}M" if recipe.has_weights else "none"
            print(f"{recipe.name:10} {millions:>6} parameters  {recipe.summary}")  # noqa: T201
        return 0
    if options.name is None:
        parser.error("NAME is missing: " + ", ".join(RECIPES))
    path = (
        build_model(options.name, options.dtype, options.out)
        if options.out
        else model_path(options.name, options.dtype)
    )
    print(path)  # noqa: T201
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

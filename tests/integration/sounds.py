"""A tiny Qwen2-Audio with random weights, and sounds in prompts for it."""

from __future__ import annotations

import base64
import io
import json
import random
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from sglang_ext.testing.models import RECIPES, weight_shapes
from sglang_ext.testing.tokenizer import VISION_TOKENS, VOCAB_SIZE, tokenizer_config, tokenizer_json

TEXT = "tiny-vl"
"""The model whose layers of text it has."""
SOUND_TOKENS = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
_FIRST = VOCAB_SIZE + len(VISION_TOKENS)
START, SOUND, END = range(_FIRST, _FIRST + len(SOUND_TOKENS))
RATE = 16_000
SECONDS = 1.2
HIDDEN, INNER, BINS = 64, 128, 16
DEVIATION = 0.15


def build(folder: Path) -> Path:
    """Write the model; return its folder."""
    own = RECIPES[TEXT].config
    text = {name: value for name, value in own.items() if "vision" not in name and "token_id" not in name}
    ids = {name: own[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rope_scaling": None, **ids}
    audio = {
        "model_type": "qwen2_audio_encoder",
        "num_mel_bins": BINS,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": INNER,
        "d_model": HIDDEN,
        "max_source_positions": 1500,
    }
    config = {
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "model_type": "qwen2_audio",
        "audio_config": audio,
        "text_config": text,
        "audio_token_index": SOUND,
        "vocab_size": text["vocab_size"],
        "torch_dtype": "float32",
        **ids,
    }
    extractor = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "Qwen2AudioProcessor",
        "feature_size": BINS,
        "sampling_rate": RATE,
        "chunk_length": 30,
        "hop_length": 160,
        "n_fft": 400,
        "return_attention_mask": True,
    }
    tokenizer = tokenizer_json(vision=True)
    like = tokenizer["added_tokens"][-1]
    for id, token in zip((START, SOUND, END), SOUND_TOKENS, strict=True):
        tokenizer["added_tokens"].append({**like, "id": id, "content": token})
    for name, content in (
        ("config", config),
        ("generation_config", ids),
        ("preprocessor_config", extractor),
        ("tokenizer", tokenizer),
        ("tokenizer_config", tokenizer_config(text["max_position_embeddings"])),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content), "utf-8")
    save_file(dict(_weights()), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights() -> Iterator[tuple[str, np.ndarray[Any, np.dtype[np.float32]]]]:
    rng = np.random.default_rng(7)
    shapes = {f"language_model.{n}": s for n, s in weight_shapes(RECIPES[TEXT]).items() if "visual" not in n}
    shapes |= {f"audio_tower.{n}": s for n, s in _tower()}
    shapes |= {
        "multi_modal_projector.linear.weight": (256, HIDDEN),
        "multi_modal_projector.linear.bias": (256,),
    }
    for name, shape in shapes.items():
        if len(shape) == 1:
            yield name, np.full(shape, 0.0 if name.endswith("bias") else 1.0, np.float32)
        else:
            deviation = DEVIATION if name.startswith(("audio", "multi")) else 0.08
            yield name, rng.standard_normal(shape, np.float32) * np.float32(deviation)


def _tower() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from (("conv1.weight", (HIDDEN, BINS, 3)), ("conv1.bias", (HIDDEN,)))
    yield from (("conv2.weight", (HIDDEN, HIDDEN, 3)), ("conv2.bias", (HIDDEN,)))
    yield "embed_positions.weight", (1500, HIDDEN)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        yield f"layers.0.self_attn.{name}.weight", (HIDDEN, HIDDEN)
        if name != "k_proj":
            yield f"layers.0.self_attn.{name}.bias", (HIDDEN,)
    for name, shape in (("fc1", (INNER, HIDDEN)), ("fc2", (HIDDEN, INNER))):
        yield from ((f"layers.0.{name}.weight", shape), (f"layers.0.{name}.bias", shape[:1]))
    for name in ("layers.0.self_attn_layer_norm", "layers.0.final_layer_norm", "layer_norm"):
        yield from ((f"{name}.weight", (HIDDEN,)), (f"{name}.bias", (HIDDEN,)))


def sound(number: int) -> str:
    """A data URL of noise, another one for each number, all of one length."""
    samples = random.Random(number).randbytes(2 * int(RATE * SECONDS))
    file = io.BytesIO()
    with wave.open(file, "wb") as wav:
        wav.setnchannels(1)
        wav.setsampwidth(2)
        wav.setframerate(RATE)
        wav.writeframes(samples)
    return "data:audio/wav;base64," + base64.b64encode(file.getvalue()).decode()

"""A tiny cross-encoder (BERT): its configuration, and the shapes of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from sglang_ext.testing.tokenizer import BOS_TOKEN_ID, VOCAB_SIZE

CROSS_ENCODER: Final[dict[str, Any]] = {
    "architectures": ["BertForSequenceClassification"],
    "model_type": "bert",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "gelu",
    "max_position_embeddings": 1024,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "position_embedding_type": "absolute",
    "id2label": {"0": "relevance"},
    "label2id": {"relevance": 0},
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": BOS_TOKEN_ID,
    "pad_token_id": BOS_TOKEN_ID,
}
"""It takes a query and a document of 1024 tokens together, and answers with one number."""


def bert_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every weight of a BERT that classifies."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    for name, rows in (
        ("word_embeddings", config["vocab_size"]),
        ("position_embeddings", config["max_position_embeddings"]),
        ("token_type_embeddings", config["type_vocab_size"]),
    ):
        yield f"bert.embeddings.{name}.weight", (rows, hidden)
    yield from _with_bias("bert.embeddings.LayerNorm", (hidden,))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"bert.encoder.layer.{layer}."
        for name, shape in (
            ("attention.self.query", (hidden, hidden)),
            ("attention.self.key", (hidden, hidden)),
            ("attention.self.value", (hidden, hidden)),
            ("attention.output.dense", (hidden, hidden)),
            ("attention.output.LayerNorm", (hidden,)),
            ("intermediate.dense", (inner, hidden)),
            ("output.dense", (hidden, inner)),
            ("output.LayerNorm", (hidden,)),
        ):
            yield from _with_bias(prefix + name, shape)
    yield from _with_bias("bert.pooler.dense", (hidden, hidden))
    yield from _with_bias("classifier", (len(config["id2label"]), hidden))


def _with_bias(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]

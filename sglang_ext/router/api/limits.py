"""The limits of a model."""

from __future__ import annotations

import enum

import msgspec


class ModelKind(enum.Enum):
    """The output of a server: generated tokens or embeddings. A request for the other kind ends SGLang."""

    GENERATES = "generates text"
    POOLS = "embeds, classifies or scores"
    """Started with ``--is-embedding``, or of a model that does nothing else."""


class Limits(msgspec.Struct, frozen=True):
    """The limits of a model's prompts."""

    vocab_size: int
    context_length: int
    truncates: bool = False
    """Too long prompts are cut by the server instead of refused."""
    served_name: str = ""
    """Under which the model is served."""

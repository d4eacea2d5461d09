"""What a model can take."""

from __future__ import annotations

import enum

import msgspec


class ModelKind(enum.Enum):
    """What a server makes of a prompt. SGLang ends a server that is asked for the other."""

    GENERATES = "generates text"
    POOLS = "embeds, classifies or scores"
    """Started with ``--is-embedding``, or of a model that does nothing else."""


class Limits(msgspec.Struct, frozen=True):
    """What the model can take."""

    vocab_size: int
    context_length: int
    truncates: bool = False
    """Too long prompts are cut by the server instead of refused."""
    served_name: str = ""
    """Under which the model is served."""

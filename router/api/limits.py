"""What a model can take."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True):
    """What the model can take."""

    vocab_size: int
    context_length: int
    truncates: bool = False
    """Too long prompts are cut by the server instead of refused."""
    served_name: str = ""
    """Under which the model is served."""

"""Names as an argument: whatever names a message, a hint or a router is given the source of new names, so
that a simulation draws the same ones in each run."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from typing import TypeAlias

NewId: TypeAlias = Callable[[], str]
"""Returns a name that it has not returned before: at most 32 characters."""


def random_id() -> str:
    """32 hex digits that no other process draws."""
    return uuid.uuid4().hex


def quick_ids(seed: str | None = None) -> NewId:
    """A source of ids that differ but can be guessed: it does not ask the system for each.

    Args:
        seed: the ids of one seed are the same in each run; others in each process without one.
    """
    draw = random.Random(seed)

    def new_id() -> str:
        return draw.getrandbits(128).to_bytes(16, "big").hex()

    return new_id

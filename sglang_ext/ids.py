"""Names as an argument: whatever names a message, a hint or a router is given the source of new names, so
that a simulation draws the same ones in each run."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TypeAlias

NewId: TypeAlias = Callable[[], str]
"""Returns a name that it has not returned before: at most 32 characters."""


def random_id() -> str:
    """32 hex digits that no other process draws."""
    return uuid.uuid4().hex

"""File descriptors in reserve for a router's own work, when its clients' connections take all others."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from typing import TypeVar

logger = logging.getLogger("router.files")

T = TypeVar("T")
COUNT = 8


class SpareFiles:
    """Descriptors that are open and unused until others are lacking (``ulimit -n``). For one thread.

    Args:
        count: most that are kept.
    """

    def __init__(self, count: int = COUNT) -> None:
        self._count = count
        self._spare: list[int] = []

    def fill(self) -> None:
        """Keep as many as there may be."""
        try:
            while len(self._spare) < self._count:
                self._spare.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            pass  # none is left: the next call tries again

    def run(self, act: Callable[[], T]) -> T:
        """Call ``act``, which opens a file, and return its result; use a spare descriptor if none is left.

        Raises:
            OSError: as ``act`` does.
        """
        try:
            return act()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._spare:
                raise
        logger.warning("no open files are left (ulimit -n): a spare one is used")
        os.close(self._spare.pop())
        return act()

    def close(self) -> None:
        """Give all back."""
        while self._spare:
            os.close(self._spare.pop())

    def __repr__(self) -> str:
        return f"SpareFiles({len(self._spare)} of {self._count})"

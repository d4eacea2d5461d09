"""Which weights a rank computes KV with: a generation per change in place, and what each generation was.

A block of KV belongs to the generation that computed it, from then on and under every name. While weights are
being changed there is no such generation: what is computed then may be of both, and is nobody's. So a change
has two ends, and takes two numbers. Numbers are of one process; between processes a generation is known by
its version, a digest of the weights themselves, so that weights that come back are found again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

logger = logging.getLogger(__name__)


class Weights:
    """See the module's docstring. The scheduler's thread only.

    Args:
        version: digest of the weights that the rank was started with; empty where nobody compares them.
        read: digests the weights as they are now; ``None`` where nobody compares them.
    """

    def __init__(self, version: str = "", read: Callable[[], str] | None = None) -> None:
        self.generation = 0
        self.moving = False
        """Whether they are being changed: what is computed now must not be cached."""
        self._read = read
        self._versions = {0: version}

    def begin(self) -> None:
        """They are about to change, and may do so at any time until ``settle``."""
        self.generation += 1
        self.moving = True

    def settle(self) -> None:
        """They stay as they are now. Never raises: weights that cannot be read are like no others."""
        self.generation += 1
        self.moving = False
        if self._read is None:
            return
        try:
            self._versions[self.generation] = self._read()
        except Exception:
            logger.exception("the new weights cannot be read; their KV is found by this process only")

    def namespace(self, extra_key: str | None, cache_salt: str | None) -> Hashable:
        """Where the KV of a tenant's prompts belongs now."""
        return (self.generation, extra_key, cache_salt)

    def version(self, generation: int) -> str | None:
        """The digest of a generation's weights; ``None`` for such as no other process can know."""
        return self._versions.get(generation)

    @property
    def as_started(self) -> bool:
        """Whether they are what the server was started with, as far as is known."""
        if self.generation == 0:
            return True
        return not self.moving and self.version(self.generation) == self._versions[0] != ""

    def __repr__(self) -> str:
        state = "moving" if self.moving else self.version(self.generation) or "unknown"
        return f"Weights(generation={self.generation}, {state})"

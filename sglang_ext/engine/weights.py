"""Generations of a rank's weights: one per change in place, and the version of each generation.

A block of KV belongs to the generation that computed it, from then on and under every name. While weights are
being changed there is no such generation: KV computed then may depend on both versions, and is not cached. So
a change has a beginning and an end, and takes two numbers. Numbers are valid in one process. Between
processes a version identifies a generation: a digest of the weights themselves, so that KV of weights that
are restored later is found again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

logger = logging.getLogger(__name__)


class Weights:
    """See the module's docstring. The scheduler's thread only.

    Args:
        version: digest of the weights that the rank was started with; empty where weights are not compared.
        read: digests the weights as they are now; ``None`` where weights are not compared.
    """

    def __init__(self, version: str = "", read: Callable[[], str] | None = None) -> None:
        self.generation = 0
        self.moving = False
        """Whether the weights are being changed: KV computed now must not be cached."""
        self._read = read
        self._versions = {0: version}

    def begin(self) -> None:
        """The weights are about to change, at any time until ``settle``."""
        self.generation += 1
        self.moving = True

    def settle(self) -> None:
        """The change has ended. Never raises: weights that cannot be read get no version, and match no other
        weights.
        """
        self.generation += 1
        self.moving = False
        if self._read is None:
            return
        try:
            self._versions[self.generation] = self._read()
        except Exception:
            logger.exception("the new weights cannot be read; their KV is found by this process only")

    def namespace(self, extra_key: str | None, cache_salt: str | None) -> Hashable:
        """The namespace for the KV of a tenant's prompts under the current weights."""
        return (self.generation, extra_key, cache_salt)

    def version(self, generation: int) -> str | None:
        """The digest of a generation's weights; ``None`` where no digest exists."""
        return self._versions.get(generation)

    @property
    def as_started(self) -> bool:
        """Whether the weights are those of the server's start, as far as their digests show."""
        if self.generation == 0:
            return True
        return not self.moving and self.version(self.generation) == self._versions[0] != ""

    def __repr__(self) -> str:
        state = "moving" if self.moving else self.version(self.generation) or "unknown"
        return f"Weights(generation={self.generation}, {state})"

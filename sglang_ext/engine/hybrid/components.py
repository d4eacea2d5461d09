"""Components: the parts that a model's cached state consists of, and which rows of each a request needs.

Each component has its own rows in its own memory, and a *coverage*: the rule for which rows must be there so
that a request may resume after a number of blocks.

    component  coverage         a resume after P tokens needs              rows in a block
    full       EveryToken       all of [0, P)                              one per token
    window     LastWindow(W)    [P - W, P), or all of it where P < W       one per token
    state      AtSnapshot       the state after exactly P tokens           one per block

Everything here is pure: no pool, no tree, no clock.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Flags = npt.NDArray[np.bool_]


class Coverage(abc.ABC):
    """The rows of a component that a request needs."""

    @abc.abstractmethod
    def resume_points(self, held: Flags, block_tokens: int) -> Flags:
        """After how many blocks this component lets a request resume.

        Args:
            held: for each block of a path, whether its rows are held; of a state, the one after it.
            block_tokens: tokens of a block.

        Returns:
            Shape (blocks + 1,). Entry 0, which needs nothing, is always true.
        """

    @abc.abstractmethod
    def blocks(self, block_tokens: int) -> int | None:
        """How many blocks before a resume point a request needs: None for all."""


@dataclass(frozen=True)
class EveryToken(Coverage):
    """Attention to all tokens: KV, latents, index keys and draft KV, packed into one block."""

    def resume_points(self, held: Flags, block_tokens: int) -> Flags:
        return _from_the_start(np.logical_and.accumulate(held))

    def blocks(self, block_tokens: int) -> int | None:
        return None


@dataclass(frozen=True)
class LastWindow(Coverage):
    """Attention to the last `tokens` tokens."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"a window of {self.tokens} tokens; it must have at least 1")

    def resume_points(self, held: Flags, block_tokens: int) -> Flags:
        ends = np.arange(1, len(held) + 1)
        # The length of the run of held blocks that ends with each block.
        run = ends - np.maximum.accumulate(np.where(held, 0, ends))
        return _from_the_start(run >= np.minimum(ends, self.blocks(block_tokens)))

    def blocks(self, block_tokens: int) -> int:
        """The number of whole blocks that contain a window that ends where a block ends."""
        return -(-self.tokens // block_tokens)


@dataclass(frozen=True)
class AtSnapshot(Coverage):
    """A recurrent state, which replaces the rows of all tokens before it. Kept at ends of blocks only."""

    def resume_points(self, held: Flags, block_tokens: int) -> Flags:
        return _from_the_start(held)

    def blocks(self, block_tokens: int) -> int:
        return 1


def _from_the_start(points: Flags) -> Flags:
    return np.concatenate([np.ones(1, np.bool_), points])


@dataclass(frozen=True)
class Component:
    """One part of a model's cached state. Two components of a model differ in name."""

    name: str
    coverage: Coverage

    def __repr__(self) -> str:
        return self.name


FULL: Final = Component("full", EveryToken())
"""The KV of every token."""


def resume_points(held: Mapping[Component, Flags], block_tokens: int) -> Flags:
    """After how many blocks of a path a request may resume. Ranks must intersect these sets: the least of
    their longest resume points may not be a resume point of each rank.

    Args:
        held: for each component, as `Coverage.resume_points`; all of one length.

    Returns:
        Shape (blocks + 1,).
    """
    points = [component.coverage.resume_points(each, block_tokens) for component, each in held.items()]
    found: Flags = np.logical_and.reduce(points)
    return found

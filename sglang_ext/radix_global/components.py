"""Components: the parts that a model's cached state consists of, and which rows of each a request needs.

Most models have one component, `FULL`: the KV of every token. Models with a sliding window or with recurrent
states have more. Each component has its own rows in its own memory, and a *coverage*: the rule for which rows
must be there so that a request may resume after a number of blocks. Models with more than one component are
not served yet; tests run one.

    component  coverage         a resume after P tokens needs              rows in a block
    full       EveryToken       all of [0, P)                              one per token
    window     LastWindow(W)    [P - W, P), or all of it where P < W       one per token
    state      AtSnapshot       the state after exactly P tokens           one per block
    tail       RequestTail      nothing: it moves in a hand-over only      not kept

Everything here is pure: no pool, no tree, no clock.
"""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import numpy as np
import numpy.typing as npt

from sglang_ext.keys import BLOCK_KEY_BYTES

Flags = npt.NDArray[np.bool_]


class Coverage(abc.ABC):
    """The rows of a component that a request needs. The rows to save and to lock follow from it."""

    closed: ClassVar[bool] = False
    """Whether a holder of a block has every block before it. Only ends of prefixes may be evicted then."""
    divides: ClassVar[bool] = True
    """Whether each block of a run has rows of its own, so that the run can be cut at any block."""

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
    def to_save(self, end: int, evicted: int, block_tokens: int) -> range:
        """The blocks to save when a request's first `end` tokens enter the cache.

        Args:
            evicted: leading tokens whose rows the engine has already given up.
        """

    @abc.abstractmethod
    def locked_blocks(self, block_tokens: int) -> int | None:
        """How many blocks before a resume point a lock keeps: None for all, 0 for the last node alone."""


@dataclass(frozen=True)
class EveryToken(Coverage):
    """Attention to all tokens: KV, latents, index keys and draft KV, packed into one block."""

    closed: ClassVar[bool] = True

    def resume_points(self, held: Flags, block_tokens: int) -> Flags:
        return _from_the_start(np.logical_and.accumulate(held))

    def to_save(self, end: int, evicted: int, block_tokens: int) -> range:
        return range(end // block_tokens)

    def locked_blocks(self, block_tokens: int) -> int | None:
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

    def to_save(self, end: int, evicted: int, block_tokens: int) -> range:
        last = end // block_tokens
        # A block that has lost some of its rows is not saved.
        return range(max(-(-evicted // block_tokens), last - self.blocks(block_tokens), 0), last)

    def locked_blocks(self, block_tokens: int) -> int | None:
        return self.blocks(block_tokens)

    def blocks(self, block_tokens: int) -> int:
        """The number of whole blocks that contain a window that ends where a block ends."""
        return -(-self.tokens // block_tokens)


@dataclass(frozen=True)
class AtSnapshot(Coverage):
    """A recurrent state, which replaces the rows of all tokens before it. Kept at ends of blocks only."""

    divides: ClassVar[bool] = False

    def resume_points(self, held: Flags, block_tokens: int) -> Flags:
        return _from_the_start(held)

    def to_save(self, end: int, evicted: int, block_tokens: int) -> range:
        blocks, rest = divmod(end, block_tokens)
        return range(0) if rest else range(max(blocks - 1, 0), blocks)

    def locked_blocks(self, block_tokens: int) -> int | None:
        return 0


@dataclass(frozen=True)
class RequestTail(Coverage):
    """Rows of a running request that no other request can use. A hand-over moves them; no tier keeps them."""

    def resume_points(self, held: Flags, block_tokens: int) -> Flags:
        return np.ones(len(held) + 1, np.bool_)

    def to_save(self, end: int, evicted: int, block_tokens: int) -> range:
        return range(0)

    def locked_blocks(self, block_tokens: int) -> int | None:
        return 0


def _from_the_start(points: Flags) -> Flags:
    return np.concatenate([np.ones(1, np.bool_), points])


@dataclass(frozen=True)
class Component:
    """One part of a model's cached state. Two components of a model differ in name."""

    name: str
    coverage: Coverage

    def names(self, namespace: bytes, blocks: Sequence[bytes]) -> list[bytes]:
        """The names of this component's rows, on disk and between peers. For `FULL`, they are `blocks`.

        Args:
            namespace: `keys.Namespace.digest()`.
            blocks: the names of the blocks (`keys.block_keys`).
        """
        if self == FULL:
            return list(blocks)
        person = hashlib.blake2b(self.name.encode(), digest_size=16).digest()
        return [
            hashlib.blake2b(block, digest_size=BLOCK_KEY_BYTES, key=namespace, person=person).digest()
            for block in blocks
        ]

    def __repr__(self) -> str:
        return self.name


FULL: Final = Component("full", EveryToken())
"""The KV of every token: the one component of most models."""


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


class RowMap(Protocol):
    """Maps token slots of the engine to rows of a component's memory."""

    def __call__(self, slots: Any) -> Any:
        """The rows, in the order of the slots. Slots are whole blocks."""


def slot_rows(slots: Any) -> Any:
    """The row of a slot has the slot's number, as in the pool of `FULL`."""
    return slots


@dataclass(frozen=True)
class PagedRows:
    """One row for `tokens` adjacent slots, as where a pool has one row per page."""

    tokens: int

    def __call__(self, slots: Any) -> Any:
        return slots[:: self.tokens] // self.tokens


@dataclass(frozen=True, eq=False)
class TableRows:
    """Rows by a table, as SGLang's table from slots of the full pool to slots of the window's pool.

    table: an array or tensor, read at each call; 0 where a slot has no row.
    """

    table: Any

    def __call__(self, slots: Any) -> Any:
        return self.table[slots]


@dataclass(frozen=True)
class LayerMap:
    """The components of each model layer of a rank, and the layer's number in each (its local layer).

    parts: for each layer, counted from the rank's first. A layer with attention and a state has two parts.
    """

    parts: tuple[tuple[tuple[Component, int], ...], ...]

    @staticmethod
    def of(layers: Mapping[Component, Iterable[int]], first: int, count: int) -> LayerMap:
        """Build the map from the model layers of each component, listed in the order of its local layers.

        Raises:
            ValueError: a layer is outside of [first, first + count), or is named twice by a component.
        """
        parts: list[list[tuple[Component, int]]] = [[] for _ in range(count)]
        for component, names in layers.items():
            for local, layer in enumerate(names):
                if not first <= layer < first + count:
                    raise ValueError(f"{component!r}: layer {layer} is outside of [{first}, {first + count})")
                if any(component == other for other, _ in parts[layer - first]):
                    raise ValueError(f"{component!r} has layer {layer} twice")
                parts[layer - first].append((component, local))
        return LayerMap(tuple(map(tuple, parts)))

    @property
    def n_layers(self) -> int:
        return len(self.parts)

    def of_component(self, component: Component) -> list[int]:
        """For each local layer of a component, the rank's layer."""
        found = [
            (local, layer)
            for layer, parts in enumerate(self.parts)
            for other, local in parts
            if other == component
        ]
        return [layer for _, layer in sorted(found)]

"""Runs, the unit of placement events, and their pieces in the tree's nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from sglang_ext.keys import BLOCK_KEY_BYTES
from sglang_ext.protocol.agent import Naming
from sglang_ext.radix_global.node import Node

RUN_BYTES: Final = 420
"""Memory of a run and of its piece, beside the node; measured, see the test of the estimate."""
NAME_BYTES: Final = 150
"""Memory of a name of a block below memory; measured, see the test of the estimate."""
NAMES_PER_EVENT: Final = 256


class Run:
    """Consecutive blocks of one instance that are in the same tiers."""

    __slots__ = ("blocks", "cut", "node", "number", "tiers")

    def __init__(self, number: int, tiers: int, blocks: int, node: Node) -> None:
        self.number = number
        self.tiers = tiers
        self.blocks = blocks
        self.cut = False
        """Its end was evicted here, so that its continuations cannot be placed."""
        self.node = node
        """The node at which it ends. Nodes of the tree may be shorter than the run."""


class Piece:
    """The address of a node in the tree: the run that it is a part of. Its length counts blocks."""

    __slots__ = ("blocks", "run")

    def __init__(self, run: Run, blocks: int) -> None:
        self.run = run
        self.blocks = blocks

    def __len__(self) -> int:
        return self.blocks

    def __getitem__(self, part: slice) -> Piece:
        start, stop, _ = part.indices(self.blocks)
        return Piece(self.run, stop - start)


def names_in(data: bytes) -> Iterable[bytes]:
    """The names of blocks in an event."""
    return [data[i : i + BLOCK_KEY_BYTES] for i in range(0, len(data), BLOCK_KEY_BYTES)]


def path_key(node: Node) -> bytes:
    """The tokens of the whole prefix that ends with ``node``."""
    parts: list[bytes] = []
    current: Node | None = node
    while current is not None:
        parts.append(current.key)
        current = current.parent
    return b"".join(reversed(parts))


def with_weights(naming: Naming, weights: str) -> Naming | None:
    """``naming`` after an update of the weights; None where the names are not known any more."""
    if naming.pages is not None:
        return naming if weights == naming.weights else None
    return Naming(naming.model, weights, naming.dtype, naming.geometry, naming.shard, naming.adapters)


def packed(names: Sequence[bytes]) -> list[bytes]:
    """Names of blocks, joined as events carry them."""
    return [b"".join(names[i : i + NAMES_PER_EVENT]) for i in range(0, len(names), NAMES_PER_EVENT)]

"""Nodes of the tree, and the results of its operations."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np

from sglang_ext.radix_global.placement import Holder

Address = Any
"""Where a holder keeps the blocks of a node: ``None`` (unknown), or a sequence with the same number of
entries for every block, sliced when the node is split (numpy array, tensor, list, bytes). The tree owns an
address once it is passed in: the caller must not change it afterwards."""


class Node:
    """A run of blocks with the same holders. Created by the tree only."""

    __slots__ = (
        "blocks",
        "children",
        "hits",
        "key",
        "last_access",
        "locks",
        "namespace",
        "only_child",
        "parent",
        "placements",
        "priority",
        "queued",
    )

    def __init__(self, parent: Node | None, key: bytes, blocks: int, namespace: Hashable = None) -> None:
        self.parent = parent
        self.namespace = namespace
        self.key = key
        """The encoded tokens of the edge that leads here."""
        self.blocks = blocks
        self.children: dict[bytes, Node] = {}
        """By the encoded tokens of their first block."""
        self.only_child: Node | None = None
        """The child when there is just one. Along a conversation that is the rule, and going down without the
        dictionary touches half as many objects, which on a large tree are all out of the CPU's caches."""
        self.placements: dict[Holder, Address] = {}
        self.locks: dict[Holder, int] = {}
        """Locks that end here or below, per holder; absent when none."""
        self.queued: set[Holder] = set()
        """Holders whose eviction queue has this node."""
        self.last_access = 0.0
        self.hits = 0
        self.priority = 0

    @property
    def is_root(self) -> bool:
        return self.parent is None

    def adopt(self, first: bytes, child: Node) -> None:
        """Add ``child`` under the bytes of its first block, replacing any other child there."""
        self.children[first] = child
        self.only_child = child if len(self.children) == 1 else None

    def disown(self, first: bytes) -> None:
        """Drop the child whose first block is ``first``."""
        del self.children[first]
        self.only_child = next(iter(self.children.values())) if len(self.children) == 1 else None

    def can_go(self, holder: Holder) -> bool:
        """Whether ``holder`` may give up its copy, which is not locked and has no continuation there."""
        if holder not in self.placements or self.locks.get(holder):
            return False
        children = self.children  # most nodes that come up have none
        return not children or not any(holder in child.placements for child in children.values())

    def __repr__(self) -> str:
        held = ", ".join(f"{holder!r}" for holder in self.placements)
        return f"Node(blocks={self.blocks}, children={len(self.children)}, held=[{held}], locks={self.locks})"


class Match(NamedTuple):
    """The longest known prefix of a prompt."""

    node: Node
    """Last node of the path; a root when nothing matched."""
    path: list[Node]
    """Matched nodes from the top, roots left out."""
    blocks: int


class InsertResult(NamedTuple):
    """Changes made by an insertion."""

    node: Node
    """The node at which the inserted prompt ends; a root when it is shorter than a block."""
    blocks: int
    """Whole blocks of the prompt."""
    held_blocks: int
    """Leading blocks that the holder had before."""
    added: list[Node]
    """Nodes that this holder has gained, from the top."""

    @property
    def new_blocks(self) -> int:
        return self.blocks - self.held_blocks


class Evicted(NamedTuple):
    """A placement that was taken out of the tree; its bytes may now be freed."""

    node: Node
    blocks: int
    address: Address


def address_unit(address: Address, blocks: int) -> int:
    """Entries of ``address`` per block.

    Raises:
        ValueError: it has not the same number of entries, at least one, for each of ``blocks``.
    """
    unit, rest = divmod(len(address), blocks)
    if rest or unit == 0:
        raise ValueError(f"an address of {len(address)} entries does not divide into {blocks} blocks")
    return unit


def cut_address(address: Address, start: int, end: int) -> Address:
    """Entries ``start`` to ``end`` of an address.

    A view keeps the whole array alive for as long as one block of it is known, and every turn of a
    conversation brings an array of its whole prompt. Therefore a view is returned only if it covers at least
    half of the array.
    """
    if start == 0 and end == len(address):
        return address
    part = address[start:end]
    if isinstance(part, np.ndarray):
        whole = part.base
        return part if isinstance(whole, np.ndarray) and 2 * part.size >= whole.size else part.copy()
    clone = getattr(part, "clone", None)
    return part if clone is None else clone()

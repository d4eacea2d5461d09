"""Evictions of blocks by instance, tier and time: a ring, bounded in bytes, for explaining misses.

An entry refers to the tree node of the evicted blocks. A node that has left the tree keeps its tokens and its
parents, so an entry can be compared with a prompt long after. Evictions are frequent and queries rare, so all
computing is left to the query.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Final

from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.radix_global import Node
from sglang_ext.radix_global.sync.runs import path_key
from sglang_ext.tiers import Tier, all_tiers, nearest_in, tier_at

ENTRY_BYTES: Final = 1400
"""Memory of an entry and its node, without the node's tokens."""
NAME_BYTES: Final = 250


@dataclass(frozen=True, slots=True)
class Departure:
    """Blocks of a prompt that left a tier."""

    instance: str
    tier: str
    at: float
    """Seconds since the epoch."""
    tokens: int
    """Leading tokens of the prompt up to the end of the first block that left."""
    still_in: str = ""
    """The nearest tier in memory that still had the blocks; empty for none."""


@dataclass(frozen=True, slots=True)
class _Entry:
    instance: str
    at: float
    node: Node
    blocks: int
    left: int
    kept: int


@dataclass(frozen=True, slots=True)
class _Names:
    instance: str
    at: float
    level: int
    names: frozenset[bytes]


class History:
    """See the module's docstring.

    Args:
        max_bytes: estimated memory; 0 keeps nothing.
        block_bytes: size of an encoded block.
    """

    def __init__(self, max_bytes: int, block_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._step = block_bytes
        self._ring: deque[_Entry | _Names] = deque()
        self.size_bytes = 0

    def left(self, instance: str, at: float, node: Node, blocks: int, left: int, kept: int) -> None:
        """Record that the last ``blocks`` blocks up to ``node`` left tiers ``left`` and stay in ``kept``."""
        self._add(_Entry(instance, at, node, blocks, left, kept))

    def left_names(self, instance: str, at: float, level: int, names: Iterable[bytes]) -> None:
        """Record that blocks left a tier below memory."""
        self._add(_Names(instance, at, level, frozenset(names)))

    def _add(self, entry: _Entry | _Names) -> None:
        self._ring.append(entry)
        self.size_bytes += _bytes_of(entry)
        while self.size_bytes > self._max_bytes and self._ring:
            self.size_bytes -= _bytes_of(self._ring.popleft())

    def of(self, namespace: Hashable, key: bytes, names: Iterable[bytes] = ()) -> list[Departure]:
        """Departures of a prompt's blocks, oldest first.

        Args:
            namespace: of the tree.
            key: the encoded prompt.
            names: names of its blocks, in order, for departures from tiers below memory.
        """
        found: list[Departure] = []
        order = {name: place for place, name in enumerate(names)}
        for entry in self._ring:
            if isinstance(entry, _Names):
                places = [order[name] for name in entry.names if name in order]
                tier = tier_at(entry.level)
                if places and tier is not None:
                    found.append(self._departure(entry.instance, tier, entry.at, min(places), 0))
                continue
            if entry.node.namespace != namespace:
                continue
            start = self._common_start(entry, key)
            if start is None:
                continue
            for tier in all_tiers():
                if entry.left & tier.bit:
                    found.append(self._departure(entry.instance, tier, entry.at, start, entry.kept))
        return found

    def _common_start(self, entry: _Entry, key: bytes) -> int | None:
        """Index of the entry's first block, if the prompt has that block."""
        prefix = path_key(entry.node)
        end = len(prefix) - entry.blocks * self._step
        return end // self._step if key.startswith(prefix[: end + self._step]) else None

    def _departure(self, instance: str, tier: Tier, at: float, start: int, kept: int) -> Departure:
        still = nearest_in(kept)
        tokens = (start + 1) * self._step // TOKEN_BYTES
        return Departure(instance, tier.name, at, tokens, "" if still is None else still.name)

    def __len__(self) -> int:
        return len(self._ring)

    def __repr__(self) -> str:
        return f"History({len(self)}, bytes={self.size_bytes})"


def _bytes_of(entry: _Entry | _Names) -> int:
    if isinstance(entry, _Names):
        return 200 + NAME_BYTES * len(entry.names)
    return ENTRY_BYTES + len(entry.node.key)

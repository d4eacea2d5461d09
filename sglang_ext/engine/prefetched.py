"""What was brought to HBM ahead of a request, and in which order it goes when SGLang wants the memory back.

Such blocks are borrowed from SGLang's pool (Symphony, section 3.3: memory is shared cooperatively with the
engine): they go before anything else that is cached, and a small prefix before a large one, because bringing
it again costs least. Of a prefix the end goes first. A slot of SGLang's spans all layers, so "later layers
first" is what happens below: the layer cache keeps the lowest layers of what HBM and DRAM have given up.

A prefix that a request has used since is ordinary cached KV from then on. No I/O; the scheduler's thread
only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.radix_global import Evicted, Holder, Node, RadixTree
from sglang_ext.radix_global.edges import walk

MOST_REMEMBERED = 1024
"""Prefixes; beyond that the oldest become ordinary."""


@dataclass(eq=False)
class Borrowed:
    """A run of blocks that was brought: those from ``start`` to ``end`` of a prompt."""

    namespace: Hashable
    key: bytes
    """As far as ``end``."""
    start: int
    end: int
    hits: int
    """Uses of its last node when it was brought."""
    since: float
    """When its first blocks were brought, in the tree's time."""

    @property
    def blocks(self) -> int:
        return self.end - self.start


def path_of(tree: RadixTree, namespace: Hashable, key: bytes) -> Iterator[tuple[int, Node]]:
    """The nodes that lie wholly on a prompt's way, each with the block at which it ends. Changes nothing."""
    end = 0
    for blocks, node in walk(tree.roots.get(namespace), key, tree.block_size * TOKEN_BYTES):
        end += node.blocks
        if blocks < end:
            return
        yield end, node


class Prefetched:
    """See the module's docstring.

    Args:
        tree: the rank's tree.
        hbm: the holder that stands for this rank's pool.
        has_copy: whether HBM may give up a node for free.
    """

    def __init__(self, tree: RadixTree, hbm: Holder, has_copy: Callable[[Node], bool]) -> None:
        self._tree = tree
        self._hbm = hbm
        self._has_copy = has_copy
        self._step = tree.block_size * TOKEN_BYTES
        self._borrowed: list[Borrowed] = []
        self.given_up = 0
        """Blocks, since the start."""

    def add(self, namespace: Hashable, key: bytes, start: int, end: int) -> bool:
        """Blocks ``start`` to ``end`` of a prompt have been brought. False when they are not in HBM now."""
        key = key[: end * self._step]
        last = self._last(namespace, key)
        if last is None or last[0] != end:
            return False
        _, node = last
        before = self._continued(namespace, key, start)
        if before is None:
            before = Borrowed(namespace, key, start, end, node.hits, node.last_access)
            self._borrowed.append(before)
            del self._borrowed[:-MOST_REMEMBERED]
        before.key, before.end, before.hits = key, end, node.hits
        return True

    def _continued(self, namespace: Hashable, key: bytes, start: int) -> Borrowed | None:
        """What ends where this begins, and was not used yet."""
        for known in self._borrowed:
            if known.namespace == namespace and known.end == start and key.startswith(known.key):
                last = self._last(namespace, known.key)
                return known if last is not None and last[1].hits <= known.hits else None
        return None

    def give_up(self, blocks: int) -> list[Evicted]:
        """Take up to so many blocks out of the tree; the caller frees their slots."""
        gone: list[Evicted] = []
        missing = blocks
        progress = True
        while missing > 0 and progress:
            progress = False
            # What continues another prefix goes before it, so a second look may find more.
            for borrowed in sorted(self._borrowed, key=lambda each: each.blocks):
                taken = self._take(borrowed, missing)
                missing -= sum(evicted.blocks for evicted in taken)
                progress = progress or bool(taken)
                gone += taken
                if missing <= 0:
                    break
        self.given_up += blocks - missing
        return gone

    def _take(self, borrowed: Borrowed, blocks: int) -> list[Evicted]:
        gone: list[Evicted] = []
        while blocks > 0:
            last = self._last(borrowed.namespace, borrowed.key)
            if last is None or last[0] <= borrowed.start or last[1].hits > borrowed.hits:
                self._borrowed.remove(borrowed)
                break
            end, node = last
            if not node.can_go(self._hbm) or not self._has_copy(node):
                break
            most = min(blocks, end - borrowed.start)
            if node.blocks > most:
                self._tree.split(node, node.blocks - most)
            blocks -= node.blocks
            borrowed.end = end - node.blocks
            borrowed.key = borrowed.key[: borrowed.end * self._step]
            gone += self._tree.remove(node, self._hbm)
        return gone

    @property
    def oldest(self) -> float:
        """Since when the oldest of them has been here, in the tree's time; infinite without any."""
        return min((borrowed.since for borrowed in self._borrowed), default=float("inf"))

    def blocks(self) -> int:
        """Blocks that are here and were not used yet, as far as is known without looking."""
        return sum(borrowed.blocks for borrowed in self._borrowed)

    def clear(self) -> None:
        self._borrowed.clear()

    def _last(self, namespace: Hashable, key: bytes) -> tuple[int, Node] | None:
        """Where HBM ends on a prompt's way."""
        found = None
        for end, node in path_of(self._tree, namespace, key):
            if self._hbm not in node.placements:
                break
            found = (end, node)
        return found

    def __repr__(self) -> str:
        return (
            f"Prefetched({self.blocks()} blocks of {len(self._borrowed)} prompts, given up {self.given_up})"
        )

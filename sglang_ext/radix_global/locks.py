"""Lock references, per holder: a lock on a node counts on that node and everything before it."""

from __future__ import annotations

from sglang_ext.radix_global.node import Node
from sglang_ext.radix_global.placement import Holder


def take(node: Node, holder: Holder) -> int:
    """Count one lock more from ``node`` up. Returns the holder's blocks that were not locked before.

    Raises:
        ValueError: the node is no longer in the tree, where a lock would protect nothing.
    """
    if node.parent is not None and not node.placements:
        raise ValueError(f"{node!r} is no longer in the tree")
    newly = 0
    current = node
    while (parent := current.parent) is not None:
        count = current.locks.get(holder, 0)
        current.locks[holder] = count + 1
        if count == 0 and holder in current.placements:
            newly += current.blocks
        current = parent
    return newly


def move(node: Node, onward: Node, holder: Holder) -> int | None:
    """Count one lock of ``node`` as one of ``onward``, which continues it, from now on: one lock more of
    each node between them. Returns the holder's blocks that were not locked before; None, and changes
    nothing, where ``onward`` does not continue ``node``.
    """
    between: list[Node] = []
    current: Node | None = onward
    while current is not node:
        if current is None:
            return None
        between.append(current)
        current = current.parent
    newly = 0
    for current in between:
        count = current.locks.get(holder, 0)
        current.locks[holder] = count + 1
        if count == 0 and holder in current.placements:
            newly += current.blocks
    return newly


def release(node: Node, holder: Holder) -> tuple[int, Node | None]:
    """Count one lock less from ``node`` up.

    Returns:
        The holder's blocks that are no longer locked, and the last node among them. Only that node may be
        evictable now: the holder also has a continuation of each of the others.

    Raises:
        ValueError: it is not locked.
    """
    freed = 0
    last: Node | None = None
    below: Node | None = None
    current = node
    while (parent := current.parent) is not None:
        count = current.locks.get(holder, 0)
        if count < 1:
            raise ValueError(f"{current!r} is not locked for {holder!r}")
        if count > 1:
            current.locks[holder] = count - 1
        else:
            del current.locks[holder]
            if holder in current.placements:
                freed += current.blocks
                if below is None or holder not in below.placements:
                    last = current
        below = current
        current = parent
    return freed, last

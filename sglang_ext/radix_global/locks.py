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
    continued = False
    current = node
    while (parent := current.parent) is not None:
        count = current.locks.get(holder, 0)
        if count < 1:
            raise ValueError(f"{current!r} is not locked for {holder!r}")
        held = holder in current.placements
        if count > 1:
            current.locks[holder] = count - 1
        else:
            del current.locks[holder]
            if held:
                freed += current.blocks
                if not continued:
                    last = current
        continued = held
        current = parent
    return freed, last

"""Invariants of the tree, verified by a walk over all nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping

from sglang_ext.radix_global.eviction import EvictionQueue, Usage
from sglang_ext.radix_global.node import Node
from sglang_ext.radix_global.placement import Holder


class TreeInvariantError(AssertionError):
    """``check()`` found the tree in a state that must not occur."""


def violations(
    block_bytes: int,
    empty_root: Node,
    roots: Mapping[Hashable, Node],
    usage: Mapping[Holder, Usage],
    node_count: int,
) -> Iterator[str]:
    """Yield a sentence for each violation; nothing when the tree is sound.

    Args:
        block_bytes: bytes of one encoded block.
        empty_root: the node at which an empty match ends.
        roots: by namespace.
        usage: by holder.
        node_count: nodes below the roots, as the tree has counted them.
    """
    nodes: Counter[Holder] = Counter()
    blocks: Counter[Holder] = Counter()
    locked: Counter[Holder] = Counter()
    queued: dict[Holder, dict[int, Node]] = {}
    count = 0
    if empty_root.children or empty_root.parent is not None or empty_root.placements or empty_root.locks:
        yield "the root that stands for no match holds something"
    for namespace, root in roots.items():
        if root.namespace != namespace:
            yield f"the root of {root.namespace!r} is kept under {namespace!r}"
        if not root.children:
            yield f"the root of {namespace!r} is empty and was kept"
        if root.parent is not None or root.placements or root.locks or root.queued:
            yield f"the root of {namespace!r} holds something"
        stack = [(root, first, child) for first, child in root.children.items()]
        while stack:
            parent, first, node = stack.pop()
            stack.extend((node, key, child) for key, child in node.children.items())
            count += 1
            yield from _node_violations(block_bytes, parent, first, node)
            for holder in node.placements:
                nodes[holder] += 1
                blocks[holder] += node.blocks
                if node.locks.get(holder):
                    locked[holder] += node.blocks
            for holder in node.queued:
                queued.setdefault(holder, {})[id(node)] = node
    if count != node_count:
        yield f"there are {count} nodes, counted {node_count}"
    for holder in (blocks.keys() | queued.keys()) - usage.keys():
        yield f"{holder!r} has nodes and no counters"
    for holder, counted in usage.items():
        if counted.nodes != nodes[holder]:
            yield f"{holder!r} has {nodes[holder]} nodes, counted {counted.nodes}"
        if counted.blocks != blocks[holder]:
            yield f"{holder!r} has {blocks[holder]} blocks, counted {counted.blocks}"
        if counted.locked != locked[holder]:
            yield f"{holder!r} has {locked[holder]} locked blocks, counted {counted.locked}"
        yield from _queue_violations(holder, counted.queue, queued.get(holder, {}))


def _node_violations(block_bytes: int, parent: Node, first: bytes, node: Node) -> Iterator[str]:
    if node.parent is not parent:
        yield f"{node!r} has another parent than the one it was found under"
    if parent.only_child is not (node if len(parent.children) == 1 else None):
        yield f"{parent!r} takes {parent.only_child!r} to be its only child"
    if node.namespace != parent.namespace:
        yield f"{node!r} is of another namespace than its parent"
    if node.blocks < 1 or len(node.key) != node.blocks * block_bytes:
        yield f"{node!r} has an edge of {len(node.key)} bytes"
    if node.key[:block_bytes] != first:
        yield f"{node!r} is not found by its first block"
    if not node.placements:
        yield f"{node!r} has no holder"
    for holder, address in node.placements.items():
        if parent.parent is not None and holder not in parent.placements:
            yield f"{holder!r} has a hole above {node!r}"
        if address is not None and (len(address) == 0 or len(address) % node.blocks):
            yield f"{node!r} has an address of {len(address)} entries for {holder!r}"
        if node.can_go(holder) and holder not in node.queued:
            yield f"{node!r} is not queued for eviction from {holder!r}"
    below: Counter[Holder] = Counter()
    for child in node.children.values():
        below.update(child.locks)
    for holder in node.locks.keys() | below.keys():
        locks = node.locks.get(holder, 0)
        if locks < below[holder]:
            yield f"{node!r} is locked less often for {holder!r} than its children"
        if locks < 1:
            yield f"{node!r} has a lock count of {locks} for {holder!r}"


def _queue_violations(holder: Holder, queue: EvictionQueue, believing: Mapping[int, Node]) -> Iterator[str]:
    """Violations in a queue. believing: nodes of the tree that are marked as queued, by id."""
    entries: set[int] = set()
    for key, node in queue.entries():
        if id(node) in entries:
            yield f"{node!r} is queued twice for eviction from {holder!r}"
        entries.add(id(node))
        if holder not in node.queued:
            yield f"{node!r} does not know that it is queued for eviction from {holder!r}"
        if key > queue.policy(node):
            yield f"{node!r} is queued behind its place for {holder!r}"
    for place in believing.keys() - entries:
        yield f"{believing[place]!r} is missing from the eviction queue of {holder!r}"

"""Edges of the tree: comparing them with a prompt, walking along them, cutting them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sglang_ext.radix_global.node import Address, Node, cut_address
from sglang_ext.radix_global.placement import Holder


def common_blocks(edge: bytes, key: bytes, position: int, block_bytes: int) -> int:
    """Whole blocks that ``edge`` shares with ``key`` from byte ``position`` on; the first one matches.

    Bisects the rest, comparing only the half in question, so that each byte is compared about once.
    """
    shared = 1
    limit = min(len(edge), len(key) - position) // block_bytes
    while shared < limit:
        middle = (shared + limit + 1) // 2
        start, end = shared * block_bytes, middle * block_bytes
        if edge[start:end] == key[position + start : position + end]:
            shared = middle
        else:
            limit = middle - 1
    return shared


def walk(root: Node | None, key: bytes, block_bytes: int) -> Iterator[tuple[int, Node]]:
    """Yield (blocks of ``key`` matched so far, node), the last node possibly matched in part.

    Changes nothing.
    """
    node = root
    position = 0
    blocks = 0
    while node is not None:
        child = node.only_child
        if child is None or not key.startswith(child.key, position):
            child = node.children.get(key[position : position + block_bytes])
            if child is None:
                return
            if not key.startswith(child.key, position):
                yield blocks + common_blocks(child.key, key, position, block_bytes), child
                return
        blocks += child.blocks
        position += len(child.key)
        yield blocks, child
        node = child


def ends(path: Sequence[Node]) -> list[tuple[int, list[Holder]]]:
    """The last node of a path that each holder has: (index on the path, holders) pairs, last node first.

    A holder of a node also has all nodes before it, so each holder is looked at only where it ends.
    """
    found: list[tuple[int, list[Holder]]] = []
    deeper: dict[Holder, Address] = {}
    for place in range(len(path) - 1, -1, -1):
        placements = path[place].placements
        if len(placements) > len(deeper):
            new = [holder for holder in placements if holder not in deeper] if deeper else list(placements)
            found.append((place, new))
        deeper = placements
    return found


def cut_node(node: Node, blocks: int, block_bytes: int) -> Node:
    """Put the first ``blocks`` blocks of ``node`` into a new parent, and return that.

    ``node`` itself stays the tail: its holders and locks still cover the whole path.
    """
    parent = node.parent
    assert parent is not None
    assert 0 < blocks < node.blocks
    cut = blocks * block_bytes
    upper = Node(parent, node.key[:cut], blocks, node.namespace)
    upper.last_access, upper.hits, upper.priority = node.last_access, node.hits, node.priority
    upper.locks = dict(node.locks)
    for holder, address in node.placements.items():
        if address is None:
            upper.placements[holder] = None
        else:
            border = len(address) // node.blocks * blocks
            upper.placements[holder] = cut_address(address, 0, border)
            node.placements[holder] = cut_address(address, border, len(address))
    parent.adopt(upper.key[:block_bytes], upper)
    node.key = node.key[cut:]
    node.blocks -= blocks
    node.parent = upper
    upper.adopt(node.key[:block_bytes], node)
    return upper

"""Deleting a prompt from every tier."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator

from sglang_ext.mempool.tiers import Tiers, unpack_keys
from sglang_ext.radix_global import Node
from sglang_ext.tiers import Tier


def delete(
    tiers: Tiers, namespace: Hashable, key: bytes, *, continuations: bool, spared: Container[bytes]
) -> int:
    """See `MemPool.delete`. spared: block keys that holds need on disk."""
    path = list(tiers.tree.match(namespace, key).path)
    gone = 0
    if continuations and path:
        # From the ends, so that no tier is left with a hole; what is held keeps what lies before it.
        for node in list(_below(path[-1])):
            if not node.locks and not node.children:
                gone += _forget(tiers, node, spared)
    while path and not path[-1].locks and not path[-1].children:
        gone += _forget(tiers, path.pop(), spared)
    if tiers.disk is not None:
        kept = sum(node.blocks for node in path)
        _drop(tiers, namespace, tiers.keys(namespace, (), key)[kept:], spared)
    return gone


def _forget(tiers: Tiers, node: Node, spared: Container[bytes]) -> int:
    """Take an end of a prefix out of every tier; the blocks that were freed in HBM and DRAM."""
    for gone in tiers.tree.remove(node, tiers.holders[Tier.DISK]):
        if tiers.disk is not None:
            _drop(tiers, node.namespace, unpack_keys(gone.address), spared)
    return sum(
        tiers.store.delete(tier, tiers.tree.remove(node, tiers.holders[tier])) for tier in tiers.regions
    )


def _drop(tiers: Tiers, namespace: Hashable, keys: list[bytes], spared: Container[bytes]) -> None:
    assert tiers.disk is not None
    tiers.disk.drop(tiers.digest(namespace), [key for key in keys if key not in spared])


def _below(node: Node) -> Iterator[Node]:
    """What continues a node, ends first."""
    for child in list(node.children.values()):
        yield from _below(child)
        yield child

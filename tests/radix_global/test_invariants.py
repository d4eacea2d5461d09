"""`check()` finds every kind of damage, and names it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sglang_ext.keys import encode_tokens
from sglang_ext.radix_global import Holder, Node, RadixTree, TreeInvariantError
from sglang_ext.tiers import Tier

HBM = Holder.of("a", 1, Tier.HBM)
DRAM = Holder.of("a", 1, Tier.DRAM)
NEW = Holder.of("c", 1, Tier.HBM)


def key(text: str) -> bytes:
    return encode_tokens([ord(letter) for letter in text for _ in range(2)])


@pytest.fixture
def tree() -> RadixTree:
    """Two blocks, then two children of one block each, one of which is locked; one of two has a copy."""
    tree = RadixTree(2)
    tree.insert("n", key("abc"), HBM, np.arange(3))
    tree.insert("n", key("abd"), HBM, np.arange(3))
    tree.insert("n", key("ab"), DRAM)
    tree.lock(end(tree), HBM)
    tree.check()
    return tree


def top(tree: RadixTree) -> Node:
    return tree.match("n", key("ab")).node


def end(tree: RadixTree) -> Node:
    return tree.match("n", key("abc")).node


def free_end(tree: RadixTree) -> Node:
    return tree.match("n", key("abd")).node


def queue_entry(tree: RadixTree, node: Node) -> None:
    queue = tree._usage[HBM].queue
    queue._heap = [entry for entry in queue._heap if entry[2] is not node]


def misplace_root(tree: RadixTree) -> None:
    tree._roots["m"] = tree._roots.pop("n")


def add_empty_root(tree: RadixTree) -> None:
    tree._roots["m"] = Node(None, b"", 0, "m")


def place_on_root(tree: RadixTree) -> None:
    tree._roots["n"].placements[HBM] = None


def place_on_empty_root(tree: RadixTree) -> None:
    tree.root.placements[HBM] = None


def reparent(tree: RadixTree) -> None:
    end(tree).parent = tree.root


def rename(tree: RadixTree) -> None:
    end(tree).namespace = "m"


def shorten_edge(tree: RadixTree) -> None:
    end(tree).key = end(tree).key[:-4]


def no_blocks(tree: RadixTree) -> None:
    node = free_end(tree)
    node.key, node.blocks = b"", 0


def change_edge(tree: RadixTree) -> None:
    end(tree).key = key("z")


def abandon(tree: RadixTree) -> None:
    free_end(tree).placements.clear()


def make_hole(tree: RadixTree) -> None:
    del top(tree).placements[HBM]


def odd_address(tree: RadixTree) -> None:
    top(tree).placements[HBM] = np.arange(3)


def empty_address(tree: RadixTree) -> None:
    top(tree).placements[HBM] = np.arange(0)


def unqueue(tree: RadixTree) -> None:
    node = free_end(tree)
    node.queued.discard(HBM)
    queue_entry(tree, node)


def negative_lock(tree: RadixTree) -> None:
    free_end(tree).locks[DRAM] = 0


def lock_below_only(tree: RadixTree) -> None:
    del top(tree).locks[HBM]


def miscount_all(tree: RadixTree) -> None:
    tree.node_count += 1


def forget_counters(tree: RadixTree) -> None:
    del tree._usage[HBM]


def stray_mark(tree: RadixTree) -> None:
    top(tree).queued.add(NEW)


def miscount_nodes(tree: RadixTree) -> None:
    tree._usage[HBM].nodes -= 1


def miscount_blocks(tree: RadixTree) -> None:
    tree._usage[HBM].blocks += 1


def miscount_locked(tree: RadixTree) -> None:
    tree._usage[HBM].locked += 1


def queue_twice(tree: RadixTree) -> None:
    queue = tree._usage[HBM].queue
    queue._heap.append(queue._heap[0])


def lose_mark(tree: RadixTree) -> None:
    queue = tree._usage[DRAM].queue
    queue._heap[0][2].queued.discard(DRAM)
    # A node that cannot go does not have to be queued, so only the entry is wrong.
    top(tree).locks[DRAM] = 1
    tree._usage[DRAM].locked = 2


def shrink_key(tree: RadixTree) -> None:
    free_end(tree).last_access = -1.0


def lose_entry(tree: RadixTree) -> None:
    queue_entry(tree, free_end(tree))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (misplace_root, "the root of 'n' is kept under 'm'"),
        (add_empty_root, "the root of 'm' is empty"),
        (place_on_root, "the root of 'n' holds something"),
        (place_on_empty_root, "stands for no match holds something"),
        (reparent, "has another parent"),
        (rename, "of another namespace"),
        (shorten_edge, "has an edge of 4 bytes"),
        (no_blocks, "has an edge of 0 bytes"),
        (change_edge, "is not found by its first block"),
        (abandon, "has no holder"),
        (make_hole, "a/1/HBM has a hole above"),
        (odd_address, "has an address of 3 entries"),
        (empty_address, "has an address of 0 entries"),
        (unqueue, "is not queued for eviction from a/1/HBM"),
        (negative_lock, "has a lock count of 0 for a/1/DRAM"),
        (lock_below_only, "is locked less often for a/1/HBM than its children"),
        (miscount_all, "there are 3 nodes, counted 4"),
        (forget_counters, "a/1/HBM has nodes and no counters"),
        (stray_mark, "c/1/HBM has nodes and no counters"),
        (miscount_nodes, "has 3 nodes, counted 2"),
        (miscount_blocks, "has 4 blocks, counted 5"),
        (miscount_locked, "has 3 locked blocks, counted 4"),
        (queue_twice, "is queued twice"),
        (lose_mark, "does not know that it is queued for eviction from a/1/DRAM"),
        (shrink_key, "is queued behind its place for a/1/HBM"),
        (lose_entry, "is missing from the eviction queue of a/1/HBM"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_damage_is_found_and_named(tree: RadixTree, damage: Callable[[RadixTree], None], says: str) -> None:
    damage(tree)
    with pytest.raises(TreeInvariantError) as error:
        tree.check()
    assert says in str(error.value)

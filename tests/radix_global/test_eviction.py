"""The order of eviction, and the queue that keeps it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from sglang_ext.errors import ConfigError
from sglang_ext.keys import encode_tokens
from sglang_ext.radix_global import POLICIES, Holder, Node, RadixTree, policy_by_name
from sglang_ext.radix_global.eviction import EvictionQueue, lru
from sglang_ext.tiers import Tier

HBM = Holder.of("a", 1, Tier.HBM)
DRAM = Holder.of("a", 1, Tier.DRAM)


def make_tree(policy: str = "lru") -> RadixTree:
    clock = itertools.count(1)
    return RadixTree(2, policy=policy_by_name(policy), clock=lambda: float(next(clock)))


def key(text: str) -> bytes:
    """A prompt of blocks of two tokens, each block a letter."""
    return encode_tokens([ord(letter) for letter in text for _ in range(2)])


def insert(tree: RadixTree, *prompts: str, holder: Holder = HBM, priority: int = 0) -> None:
    for prompt in prompts:
        tree.insert("n", key(prompt), holder, list(prompt), priority=priority)


def evicted(tree: RadixTree, blocks: int, holder: Holder = HBM, **options: Any) -> list[str]:
    return ["".join(gone.address) for gone in tree.evict(holder, blocks, **options)]


def test_the_least_recently_used_end_goes_first() -> None:
    tree = make_tree()
    insert(tree, "ab", "cd", "ef")
    tree.match("n", key("ab"))
    assert evicted(tree, 6) == ["cd", "ef", "ab"]


def test_a_prefix_goes_after_what_continues_it() -> None:
    tree = make_tree()
    insert(tree, "a", "ab", "abc", "x")
    assert evicted(tree, 9) == ["c", "b", "a", "x"]


def test_exactly_what_is_asked_for_goes_from_the_end() -> None:
    tree = make_tree()
    insert(tree, "abcdef", "xy")
    assert evicted(tree, 1) == ["f"]
    assert evicted(tree, 2) == ["de"]
    assert tree.match("n", key("abcdef")).blocks == 3
    assert evicted(tree, 4) == ["xy", "bc"], "the match has made the rest the newest"
    assert (tree.blocks_of(HBM), evicted(tree, 0), evicted(tree, -1)) == (1, [], [])
    tree.check()


def test_used_again_means_protected_in_slru() -> None:
    tree = make_tree("slru")
    insert(tree, "a", "b", "c", "a", "d")
    tree.match("n", key("b"))
    tree.touch("n", key("c"))
    assert evicted(tree, 9) == ["d", "b", "c", "a"], "to be matched or touched is not a use"


def test_what_one_request_inserts_in_parts_is_used_once_in_slru() -> None:
    tree = make_tree("slru")
    insert(tree, "x", "x")
    for part in ("a", "ab", "abc"):
        tree.insert("n", key(part), HBM, list(part), same_request=part != "a")
    tree.insert("n", key("xyz"), HBM, list("xyz"), same_request=True)
    assert [node.hits for node in tree.match("n", key("abc")).path] == [1, 1, 1]
    assert [node.hits for node in tree.match("n", key("xyz")).path] == [2, 1]
    assert evicted(tree, 9) == ["c", "b", "a", "yz", "x"]


def test_a_scan_cannot_push_out_what_is_shared_in_slru() -> None:
    tree = make_tree("slru")
    insert(tree, "s", "s")
    for number in range(50):
        insert(tree, chr(1000 + number))
        if tree.blocks_of(HBM) > 5:
            evicted(tree, 1)
    assert tree.match("n", key("s")).blocks == 1


def test_low_priority_goes_first() -> None:
    tree = make_tree("priority")
    insert(tree, "a", priority=5)
    insert(tree, "b", priority=-1)
    insert(tree, "c")
    insert(tree, "b", priority=-2)
    insert(tree, "c", priority=7)
    assert evicted(tree, 9) == ["b", "a", "c"]


def test_only_what_is_allowed_goes() -> None:
    tree = make_tree()
    insert(tree, "ab", "cd", "ef", "gh")
    insert(tree, "cd", "gh", holder=DRAM)
    copied = {"only": lambda node: DRAM in node.placements}
    assert evicted(tree, 3, **copied) == ["cd", "h"]
    assert evicted(tree, 9, **copied) == ["g"]
    assert evicted(tree, 9, **copied) == []
    assert evicted(tree, 9) == ["ab", "ef"]
    assert tree.blocks_of(DRAM) == 4
    tree.check()


@pytest.mark.parametrize(("look_past", "gone"), [(0, []), (1, []), (2, ["e"]), (64, ["e"])])
def test_looking_past_what_is_not_allowed_is_bounded(look_past: int, gone: list[str]) -> None:
    tree = make_tree()
    insert(tree, "a", "b", "e")
    insert(tree, "e", holder=DRAM)
    asked: list[Node] = []

    def copied(node: Node) -> bool:
        asked.append(node)
        return DRAM in node.placements

    assert evicted(tree, 1, only=copied, look_past=look_past) == gone
    assert len(asked) <= look_past + 1
    tree.check()
    tree.touch("n", key("a"))
    assert evicted(tree, 1) == ["b"], "blocks that were passed over keep their place"


def test_what_is_spared_stays_and_counts_as_used() -> None:
    tree = make_tree()
    insert(tree, *(chr(1000 + number) for number in range(100)), "ab", "cd")
    spared = {tree.match("n", key(chr(1000 + number))).node for number in range(100)}
    asked: list[Node] = []

    def once(node: Node) -> bool:
        asked.append(node)
        return True

    insert(tree, "ef")
    assert evicted(tree, 3, spare=spared, only=once, look_past=0) == ["ab", "d"]
    assert not spared & set(asked)
    insert(tree, "gh")
    assert evicted(tree, 9, spare=spared) == ["c", "ef", "gh"]
    assert sorted(evicted(tree, 200)) == [chr(1000 + number) for number in range(100)]
    tree.check()


def test_policies_are_found_by_name() -> None:
    assert {name: policy_by_name(name) for name in POLICIES} == POLICIES
    with pytest.raises(ConfigError, match="unknown policy 'fifo'") as refused:
        policy_by_name("fifo")
    assert refused.value.field == "--kv-eviction-policy"
    assert "lru, slru, priority" in str(refused.value.hint)


# -- the queue alone --------------------------------------------------------------------------------


def node_at(time: float) -> Node:
    node = Node(Node(None, b"", 0), b"", 1)
    node.placements[HBM] = None
    node.last_access = time
    return node


def test_a_key_that_grew_is_looked_at_again() -> None:
    queue = EvictionQueue(HBM, lru)
    first, second = node_at(1), node_at(2)
    for node in (first, second):
        queue.offer(node, 2)
    first.last_access = 3
    assert [queue.take(), queue.take(), queue.take()] == [second, first, None]
    assert first.queued == second.queued == set()


def test_offering_twice_is_offering_once() -> None:
    queue = EvictionQueue(HBM, lru)
    node = node_at(1)
    queue.offer(node, 1)
    queue.offer(node, 1)
    assert (len(queue), queue.take(), queue.take()) == (1, node, None)


def test_what_cannot_go_leaves_the_queue_until_it_is_offered_again() -> None:
    queue = EvictionQueue(HBM, lru)
    node = node_at(1)
    node.locks[HBM] = 1
    queue.offer(node, 1)
    assert queue.take() is None
    assert (len(queue), node.queued) == (0, set())
    del node.locks[HBM]
    queue.offer(node, 1)
    assert queue.take() is node


def test_entries_of_nodes_that_are_gone_are_swept_out() -> None:
    queue = EvictionQueue(HBM, lru)
    nodes = [node_at(number) for number in range(1_000)]
    for held, node in enumerate(nodes, start=1):
        queue.offer(node, held)
    for node in nodes[10:]:
        del node.placements[HBM]
    newest = node_at(0.5)
    queue.offer(newest, 11)
    assert len(queue) == 11
    assert all(HBM not in node.queued for node in nodes[10:])
    assert [queue.take() for _ in range(12)] == [nodes[0], newest, *nodes[1:10], None]


def test_equal_keys_go_in_the_order_of_their_offers() -> None:
    queue = EvictionQueue(HBM, lru)
    nodes = [node_at(1) for _ in range(5)]
    for node in nodes:
        queue.offer(node, 5)
    assert [queue.take() for _ in range(5)] == nodes


def test_clearing_forgets_every_mark() -> None:
    queue = EvictionQueue(HBM, lru)
    node = node_at(1)
    queue.offer(node, 1)
    queue.clear()
    assert (len(queue), node.queued) == (0, set())

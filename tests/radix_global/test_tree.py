"""The tree where it is thin: ends of prompts, splits, locks over splits, namespaces, churn."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np
import pytest

from sglang_ext.keys import encode_tokens
from sglang_ext.radix_global import Holder, RadixTree, policy_by_name
from sglang_ext.radix_global.edges import common_blocks
from sglang_ext.radix_global.eviction import SLACK
from sglang_ext.tiers import Tier

BLOCK = 4
HBM = Holder.of("a", 1, Tier.HBM)
DRAM = Holder.of("a", 1, Tier.DRAM)
PEER = Holder.of("b", 2, Tier.HBM)


def key(*blocks: str, tail: int = 0) -> bytes:
    """A prompt of blocks of equal tokens, each named by a letter, and a tail shorter than a block."""
    tokens = [ord(name) for name in blocks for _ in range(BLOCK)] + [0] * tail
    return encode_tokens(tokens)


def slots(count: int, start: int = 0) -> np.ndarray[Any, Any]:
    return np.arange(start, start + count * BLOCK)


@pytest.fixture
def tree() -> RadixTree:
    clock = itertools.count(1)
    return RadixTree(BLOCK, clock=lambda: float(next(clock)))


# -- short prompts ----------------------------------------------------------------------------------


def test_an_empty_tree_knows_nothing(tree: RadixTree) -> None:
    match = tree.match("n", key("a"))
    assert match == (tree.root, [], 0)
    assert tree.holders("n", key("a")) == {}
    assert tree.evict(HBM, 5) == []
    assert tree.drop_holder(HBM) == 0
    tree.touch("n", key("a"))
    tree.check()
    assert (tree.node_count, tree.known_holders(), dict(tree.roots)) == (0, [], {})


@pytest.mark.parametrize("prompt", [b"", key(tail=1), key(tail=BLOCK - 1)])
def test_a_prompt_shorter_than_a_block_leaves_no_trace(tree: RadixTree, prompt: bytes) -> None:
    result = tree.insert("n", prompt, HBM, None)
    assert (result.node, result.blocks, result.held_blocks, result.added) == (tree.root, 0, 0, [])
    tree.insert("n", key("a", "b"), HBM, slots(2))
    match = tree.match("n", prompt)
    assert (match.path, match.blocks, match.node.is_root) == ([], 0, True)
    assert tree.holders("n", prompt) == {}
    assert tree.lock(match.node, HBM) == 0 == tree.unlock(match.node, HBM)
    tree.check()
    assert tree.node_count == 1


def test_a_tail_shorter_than_a_block_is_left_out(tree: RadixTree) -> None:
    result = tree.insert("n", key("a", "b", tail=3), HBM, slots(2))
    assert (result.blocks, result.node.blocks, len(result.node.key)) == (2, 2, 2 * BLOCK * 4)
    assert tree.match("n", key("a", "b", tail=1)).blocks == 2
    assert tree.node_count == 1


# -- inside an edge ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", [0, 1, BLOCK - 1])
def test_a_prompt_that_ends_inside_an_edge_splits_it_at_the_block(tree: RadixTree, tail: int) -> None:
    end = tree.insert("n", key("a", "b", "c"), HBM, slots(3)).node
    match = tree.match("n", key("a", tail=tail))
    assert (match.blocks, match.node.blocks, end.blocks) == (1, 1, 2)
    assert end.parent is match.node
    assert match.node.placements[HBM].tolist() == list(range(BLOCK))
    assert end.placements[HBM].tolist() == list(range(BLOCK, 3 * BLOCK))
    tree.check()


@pytest.mark.parametrize("differs", range(BLOCK))
def test_prompts_that_part_inside_the_first_block_share_nothing(tree: RadixTree, differs: int) -> None:
    other = [ord("a")] * BLOCK
    other[differs] += 1
    tree.insert("n", key("a", "b"), HBM, slots(2))
    assert tree.match("n", encode_tokens(other * 2)).blocks == 0
    assert tree.insert("n", encode_tokens(other * 2), HBM, slots(2)).held_blocks == 0
    assert tree.node_count == 2
    tree.check()


@pytest.mark.parametrize("differs", range(BLOCK, 3 * BLOCK))
def test_prompts_that_part_later_share_the_whole_blocks_before(tree: RadixTree, differs: int) -> None:
    other = [ord(name) for name in "abc" for _ in range(BLOCK)]
    other[differs] += 1
    tree.insert("n", key("a", "b", "c"), HBM, slots(3))
    result = tree.insert("n", encode_tokens(other), HBM, slots(3, start=100))
    shared = differs // BLOCK
    assert result.held_blocks == shared
    assert result.node.placements[HBM].tolist() == list(range(100 + shared * BLOCK, 100 + 3 * BLOCK))
    tree.check()


def test_asking_and_touching_split_nothing(tree: RadixTree) -> None:
    tree.insert("n", key("a", "b", "c"), HBM)
    tree.insert("n", key("a", "b"), PEER)
    assert tree.holders("n", key("a", "x")) == {HBM: BLOCK, PEER: BLOCK}
    assert tree.holders("n", key("a", "b", "c", "d")) == {HBM: 3 * BLOCK, PEER: 2 * BLOCK}
    tree.touch("n", key("a", "x"))
    assert tree.node_count == 2
    first = tree.match("n", key("a", "b")).node
    assert (first.hits, next(iter(first.children.values())).hits) == (2, 1)


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 8, 33])
@pytest.mark.parametrize("length", [1, 2, 7, 33])
def test_common_blocks_against_a_loop(blocks: int, length: int) -> None:
    size = 8
    edge = bytes(i % 251 for i in range(blocks * size))
    prefix = b"prompt before it"
    for differs in range(size, min(blocks, length) * size + 1):
        other = bytearray(i % 251 for i in range(length * size))
        if differs < len(other):
            other[differs] ^= 0xFF
        expected = next(
            i
            for i in itertools.count()
            if i == min(blocks, length)
            or edge[i * size : i * size + size] != other[i * size : i * size + size]
        )
        assert common_blocks(edge, prefix + bytes(other), len(prefix), size) == expected


def test_a_huge_edge(tree: RadixTree) -> None:
    tokens = np.arange(1_000_000, dtype=np.int64)
    count = len(tokens) // BLOCK
    tree.insert("n", encode_tokens(tokens), HBM, tokens)
    for cut in (count - 1, count // 2, 1):
        other = tokens.copy()
        other[cut * BLOCK] = 0x7FFFFFFF
        match = tree.match("n", encode_tokens(other))
        assert match.blocks == cut
        joined = np.concatenate([node.placements[HBM] for node in match.path])
        assert np.array_equal(joined, tokens[: cut * BLOCK])
    whole = tree.match("n", encode_tokens(tokens))
    assert (whole.blocks, len(whole.path)) == (count, 4)
    tree.check()


# -- addresses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [list(range(6)), bytes(range(6)), np.arange(6), [f"{i}" for i in range(6)]],
    ids=["list", "bytes", "array", "names"],
)
def test_addresses_of_any_kind_are_cut_with_their_node(tree: RadixTree, address: Any) -> None:
    tree.insert("n", key("a", "b", "c"), HBM, address)
    first, second = tree.match("n", key("a")).node, tree.match("n", key("a", "b", "c")).node
    assert list(first.placements[HBM]) == list(address[:2])
    assert list(second.placements[HBM]) == list(address[2:])
    tree.check()


@pytest.mark.parametrize("entries", [0, 1, 4, 7])
def test_an_address_that_does_not_divide_is_refused_and_changes_nothing(
    tree: RadixTree, entries: int
) -> None:
    with pytest.raises(ValueError, match=f"{entries} entries does not divide into 3 blocks"):
        tree.insert("n", key("a", "b", "c"), HBM, np.arange(entries))
    assert (tree.node_count, dict(tree.roots), tree.blocks_of(HBM)) == (0, {}, 0)
    node = tree.insert("n", key("a", "b", "c"), HBM).node
    with pytest.raises(ValueError, match="does not divide"):
        tree.place(node, DRAM, np.arange(entries))
    assert DRAM not in node.placements
    tree.check()


def test_no_block_keeps_much_more_than_itself_alive(tree: RadixTree) -> None:
    """Every turn brings an array of the whole prompt; the tree must not collect those."""
    turns = 40
    for turn in range(1, turns + 1):
        tree.insert("n", encode_tokens(range(turn * BLOCK)), HBM, slots(turn))
    for cut in range(1, turns, 3):
        tree.match("n", encode_tokens([*range(cut * BLOCK), 1_000] + [0] * BLOCK))
    tree.insert("m", encode_tokens(range(turns * BLOCK)), HBM, slots(turns))
    for cut in range(turns - 1, 0, -1):
        tree.match("m", encode_tokens(range(cut * BLOCK)))
    for node in tree.nodes():
        kept = node.placements[HBM]
        owner = kept if kept.base is None else kept.base
        assert owner.size <= 2 * kept.size
    joined = np.concatenate(
        [node.placements[HBM] for node in tree.match("m", encode_tokens(range(160))).path]
    )
    assert joined.tolist() == list(range(160))
    tree.check()


def test_tensors_are_cut_into_memory_of_their_own(tree: RadixTree) -> None:
    torch = pytest.importorskip("torch")
    tree.insert("n", key("a", "b", "c"), HBM, torch.arange(6))
    first, second = tree.match("n", key("a")).node, tree.match("n", key("a", "b", "c")).node
    assert [node.placements[HBM].tolist() for node in (first, second)] == [[0, 1], [2, 3, 4, 5]]
    assert [node.placements[HBM].untyped_storage().size() for node in (first, second)] == [16, 32]


def test_what_a_holder_has_already_is_not_replaced(tree: RadixTree) -> None:
    tree.insert("n", key("a", "b"), HBM, slots(2))
    result = tree.insert("n", key("a", "b", "c"), HBM, slots(3, start=50))
    assert (result.blocks, result.held_blocks, result.new_blocks) == (3, 2, 1)
    path = tree.match("n", key("a", "b", "c")).path
    assert [node.placements[HBM].tolist() for node in path] == [list(range(8)), list(range(58, 62))]


def test_a_second_holder_joins_without_new_nodes(tree: RadixTree) -> None:
    tree.insert("n", key("a", "b"), HBM, slots(2))
    result = tree.insert("n", key("a", "b"), PEER)
    assert (result.held_blocks, [node.blocks for node in result.added], tree.node_count) == (0, [2], 1)
    assert tree.holders("n", key("a", "b")) == {HBM: 2 * BLOCK, PEER: 2 * BLOCK}
    assert [evicted.address for evicted in tree.evict(PEER, 9)] == [None]
    assert tree.holders("n", key("a", "b")) == {HBM: 2 * BLOCK}
    tree.check()


# -- placing, splitting, removing -------------------------------------------------------------------


def test_placing_keeps_prefixes_whole(tree: RadixTree) -> None:
    tree.insert("n", key("a", "b"), HBM, slots(2))
    first = tree.match("n", key("a")).node
    second = tree.match("n", key("a", "b")).node
    with pytest.raises(ValueError, match="lacks the prefix"):
        tree.place(second, DRAM, [7])
    tree.place(first, DRAM, [7])
    with pytest.raises(ValueError, match="already has"):
        tree.place(first, DRAM, [8])
    tree.place(second, DRAM, [8])
    with pytest.raises(ValueError, match="lacks the prefix"):
        tree.place(tree.match("n", b"").node, DRAM, [9])
    assert tree.blocks_of(DRAM) == 2
    tree.check()


def test_a_node_that_has_left_the_tree_is_refused(tree: RadixTree) -> None:
    node = tree.insert("n", key("a", "b"), HBM, slots(2)).node
    tree.evict(HBM, 2)
    with pytest.raises(ValueError, match="no longer in the tree"):
        tree.lock(node, HBM)
    with pytest.raises(ValueError, match="no longer in the tree"):
        tree.place(node, DRAM, [0, 1])
    assert tree.node_count == 0
    tree.check()


@pytest.mark.parametrize("cut", [-1, 0, 3, 4])
def test_a_cut_outside_a_node_is_refused(tree: RadixTree, cut: int) -> None:
    node = tree.insert("n", key("a", "b", "c"), HBM, slots(3)).node
    with pytest.raises(ValueError, match="cannot cut"):
        tree.split(node, cut)
    assert tree.node_count == 1


def test_a_cut_keeps_the_tail_the_same_node(tree: RadixTree) -> None:
    node = tree.insert("n", key("a", "b", "c"), HBM, slots(3)).node
    upper = tree.split(node, 2)
    assert (upper.blocks, node.blocks, node.parent) == (2, 1, upper)
    assert tree.match("n", key("a", "b", "c")).path == [upper, node]
    tree.check()


def test_removing_takes_what_continues_it_but_not_from_others(tree: RadixTree) -> None:
    tree.insert("n", key("a", "b"), HBM, slots(2))
    tree.insert("n", key("a", "b", "c"), HBM, slots(3))
    tree.insert("n", key("a", "b", "d"), HBM, slots(3))
    tree.insert("n", key("a", "b", "c"), PEER)
    node = tree.match("n", key("a", "b")).node
    gone = tree.remove(node, HBM)
    assert sorted(evicted.blocks for evicted in gone) == [1, 1, 2]
    assert gone[-1].node is node
    assert tree.remove(node, HBM) == []
    assert (tree.blocks_of(HBM), tree.blocks_of(PEER), tree.node_count) == (0, 3, 2)
    assert tree.remove(tree.match("n", b"").node, PEER) == []
    tree.check()


def test_removing_lets_the_parent_go_next(tree: RadixTree) -> None:
    tree.insert("n", key("a"), HBM, slots(1))
    tree.insert("n", key("a", "b"), HBM, slots(2))
    tree.evict(HBM, 1)  # takes the end and looks at the rest
    tree.insert("n", key("a", "b"), HBM, slots(2))
    tree.remove(tree.match("n", key("a", "b")).node, HBM)
    assert sum(evicted.blocks for evicted in tree.evict(HBM, 5)) == 1
    assert tree.node_count == 0


def test_a_dropped_holder_may_come_back(tree: RadixTree) -> None:
    for holder in (HBM, PEER):
        tree.insert("n", key("a", "b"), holder)
    assert tree.drop_holder(HBM) == 2
    assert (tree.known_holders(), tree.blocks_of(HBM), tree.node_count) == ([PEER], 0, 1)
    tree.insert("n", key("a", "b"), HBM)
    tree.check()
    assert sum(evicted.blocks for evicted in tree.evict(HBM, 5)) == 2, "evictable like anything else"


# -- namespaces -------------------------------------------------------------------------------------


def test_roots_go_with_the_last_block_of_their_namespace(tree: RadixTree) -> None:
    spaces = [("tenant", number) for number in range(500)]
    for number, space in enumerate(spaces):
        tree.insert(space, key("a", "b"), HBM, slots(2, start=number * 2 * BLOCK))
    assert set(tree.roots) == set(spaces)
    assert tree.node_count == 500
    for number, space in enumerate(spaces):
        match = tree.match(space, key("a", "b"))
        assert match.node.placements[HBM][0] == number * 2 * BLOCK, "another namespace's blocks"
    assert tree.match(("tenant", 500), key("a", "b")).blocks == 0
    assert len(tree.evict(HBM, 600)) == 300
    assert len(tree.roots) == 200
    tree.check()
    assert tree.drop_holder(HBM) == 400
    assert dict(tree.roots) == {}
    tree.check()


# -- locks ------------------------------------------------------------------------------------------


def test_a_lock_keeps_the_whole_prefix_and_nothing_behind_it(tree: RadixTree) -> None:
    tree.insert("n", key("a", "b", "c", "d"), HBM, slots(4))
    node = tree.match("n", key("a", "b")).node
    assert tree.lock(node, HBM) == 2
    assert tree.lock(node, HBM) == 0
    assert sum(evicted.blocks for evicted in tree.evict(HBM, 9)) == 2
    assert tree.unlock(node, HBM) == 0
    assert tree.evict(HBM, 9) == []
    assert (tree.blocks_of(HBM), tree.locked_blocks_of(HBM)) == (2, 2)
    assert tree.unlock(node, HBM) == 2
    with pytest.raises(ValueError, match="is not locked for"):
        tree.unlock(node, HBM)
    tree.check()
    assert sum(evicted.blocks for evicted in tree.evict(HBM, 9)) == 2


def test_a_lock_holds_over_splits(tree: RadixTree) -> None:
    end = tree.insert("n", key("a", "b", "c", "d"), HBM, slots(4)).node
    tree.lock(end, HBM)
    for prompt in (key("a", "b", "x"), key("a"), key("a", "b", "c")):
        tree.match("n", prompt)
        tree.check()
    assert len(tree.match("n", key("a", "b", "c", "d")).path) == 4
    assert tree.evict(HBM, 9) == []
    assert tree.unlock(end, HBM) == 4
    assert tree.locked_blocks_of(HBM) == 0
    assert sum(evicted.blocks for evicted in tree.evict(HBM, 3)) == 3
    tree.check()


def test_a_lock_is_one_holders(tree: RadixTree) -> None:
    node = tree.insert("n", key("a", "b"), HBM, slots(2)).node
    tree.insert("n", key("a", "b"), PEER)
    tree.lock(node, HBM)
    assert len(tree.evict(PEER, 9)) == 1
    assert tree.evict(HBM, 9) == []
    with pytest.raises(ValueError, match="is not locked for"):
        tree.unlock(node, PEER)
    tree.check()


def test_a_lock_counts_what_is_placed_under_it_later(tree: RadixTree) -> None:
    node = tree.insert("n", key("a", "b"), HBM, slots(2)).node
    assert tree.lock(node, DRAM) == 0
    tree.place(node, DRAM, [0, 1])
    assert tree.locked_blocks_of(DRAM) == 2
    assert tree.evict(DRAM, 9) == []
    assert tree.unlock(node, DRAM) == 2
    assert len(tree.evict(DRAM, 9)) == 1
    tree.check()


def test_a_lock_outlives_the_removal_of_what_it_was_on(tree: RadixTree) -> None:
    tree.insert("n", key("a"), HBM, slots(1))
    end = tree.insert("n", key("a", "b"), HBM, slots(2)).node
    tree.lock(end, HBM)
    tree.remove(end, HBM)
    tree.check()
    again = tree.insert("n", key("a", "b"), HBM, slots(2)).node
    assert again is not end
    assert tree.locked_blocks_of(HBM) == 1, "a new insertion is not locked"
    assert tree.unlock(end, HBM) == 1
    assert sum(evicted.blocks for evicted in tree.evict(HBM, 9)) == 2
    tree.check()


def test_locks_survive_a_dropped_holder(tree: RadixTree) -> None:
    end = tree.insert("n", key("a", "b"), HBM, slots(2)).node
    tree.insert("n", key("a", "b"), PEER)
    tree.lock(end, HBM)
    tree.drop_holder(HBM)
    tree.check()
    assert tree.unlock(end, HBM) == 0
    tree.insert("n", key("a", "b"), HBM, slots(2))
    assert tree.locked_blocks_of(HBM) == 0
    tree.check()


# -- the rest ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1])
def test_a_block_has_a_token(size: int) -> None:
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        RadixTree(size)


def test_priorities_are_kept_as_given_and_only_raised(tree: RadixTree) -> None:
    node = tree.insert("n", key("a", "b"), HBM, priority=-3).node
    assert node.priority == -3
    tree.insert("n", key("a", "c"), HBM, priority=2)
    first = tree.match("n", key("a")).node
    assert (first.priority, node.priority) == (2, -3)
    tree.insert("n", key("a", "b"), HBM, priority=-5)
    assert (first.priority, node.priority) == (2, -3)


def test_repr_shows_the_counts(tree: RadixTree) -> None:
    node = tree.insert("n", key("a", "b"), HBM, slots(2)).node
    tree.lock(node, HBM)
    assert repr(tree) == "RadixTree(block_size=4, nodes=1, {a/1/HBM: 2 blocks (2 locked)})"
    assert repr(node) == "Node(blocks=2, children=0, held=[a/1/HBM], locks={a/1/HBM: 1})"


def test_nodes_come_parents_first(tree: RadixTree) -> None:
    for ends in ("ab", "abc", "abd", "x", "xy"):
        tree.insert("n", key(*ends), HBM)
    seen: set[int] = set()
    for node in tree.nodes():
        assert node.parent is not None
        assert node.parent.is_root or id(node.parent) in seen
        seen.add(id(node))
    assert len(seen) == tree.node_count == 5


@pytest.mark.parametrize("policy", ["lru", "slru", "priority"])
def test_churn_leaves_nothing_behind(policy: str) -> None:
    """Insert and take away for long: neither nodes nor queues nor references may pile up."""
    tree = RadixTree(BLOCK, policy=policy_by_name(policy))
    watched = tree.insert("n", key("z"), HBM, slots(1)).node
    references = sys.getrefcount(watched)
    for number in range(3_000):
        result = tree.insert("n", encode_tokens([number + 1000] * 2 * BLOCK), HBM, slots(2))
        tree.insert("n", encode_tokens([number + 1000] * 2 * BLOCK), PEER)
        tree.lock(result.node, HBM)
        tree.unlock(result.node, HBM)
        tree.remove(result.node, HBM)
        if number % 3 == 0:
            tree.evict(PEER, 3)
        elif number % 3 == 1:
            tree.drop_holder(PEER)
        else:
            tree.remove(result.node, PEER)
        longest = max(len(usage.queue) for usage in tree._usage.values())
        assert longest <= 2 * 3 + SLACK, "there are never more than three nodes"
    assert tree.node_count <= 3
    assert sys.getrefcount(watched) == references
    tree.check()


# -- holders that go --------------------------------------------------------------------------------


def test_a_holder_without_blocks_is_dropped_without_a_walk(tree: RadixTree) -> None:
    """A router drops holders every half second, of a tree that may have a hundred thousand conversations."""
    for name in "abcdefgh":
        tree.insert(None, key(name), HBM)
        tree.insert(None, key(name), PEER)
    tree.evict(HBM, 100)
    looked_at = 0

    class Counting(dict[bytes, Any]):
        def values(self) -> Any:
            nonlocal looked_at
            looked_at += 1
            return super().values()

    root = tree.roots[None]
    root.children = Counting(root.children)
    assert tree.drop_holder(HBM) == 0
    assert looked_at == 0
    assert tree.drop_holder(PEER) == 8
    assert looked_at > 0
    assert tree.known_holders() == []
    tree.check()

"""Blocks held back for announced requests, against a model that looks at every block."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.engine.tiers.retention import MOST_HINTS, Retention, from_most
from sglang_ext.keys import encode_tokens
from sglang_ext.radix_global import Holder, Node, RadixTree
from sglang_ext.tiers import Tier

HBM = Holder.of("a", 1, Tier.HBM)
DRAM = Holder.of("a", 1, Tier.DRAM)
MARKER = Holder.of("a announced", 1, Tier.HBM)
BLOCK = 2


def key(text: str) -> bytes:
    """A prompt of blocks of two tokens, each block a letter."""
    return encode_tokens([ord(letter) for letter in text for _ in range(BLOCK)])


def make() -> tuple[RadixTree, Retention]:
    clock = itertools.count(1)
    tree = RadixTree(BLOCK, clock=lambda: float(next(clock)))
    return tree, Retention(tree, MARKER)


def always(node: Node) -> bool:
    return True


def letters(tree: RadixTree, holder: Holder) -> set[str]:
    """Every prefix whose last block the holder has."""
    found = set()
    for node in tree.nodes():
        if holder in node.placements:
            whole = _text(node)
            found.update(whole[:end] for end in range(len(whole) - node.blocks + 1, len(whole) + 1))
    return found


def _text(node: Node) -> str:
    parts: list[bytes] = []
    current: Node | None = node
    while current is not None:
        parts.append(current.key)
        current = current.parent
    encoded = b"".join(reversed(parts))
    width = len(key("x"))
    return "".join(
        chr(int.from_bytes(encoded[at : at + 4], "little")) for at in range(0, len(encoded), width)
    )


@dataclass
class Announced:
    text: str
    priority: int
    until: float
    number: int


class Model:
    """The same hints, block by block."""

    def __init__(self) -> None:
        self.hints: dict[str, Announced] = {}
        self.number = 0

    def expect(self, id: str, text: str, priority: int, until: float) -> None:
        known = self.hints.get(id)
        if known is not None and known.text == text:
            known.priority, known.until = priority, max(known.until, until)
        else:
            self.number += 1
            self.hints[id] = Announced(text, priority, until, self.number)

    def strength(self, prefix: str) -> tuple[float, ...] | None:
        """The strength of the strongest hint that names a block."""
        naming = [
            (hint.priority, hint.until, hint.number)
            for hint in self.hints.values()
            if hint.text.startswith(prefix)
        ]
        return max(naming, default=None)


@pytest.mark.parametrize("seed", range(40))
def test_random_histories(seed: int) -> None:
    rnd = random.Random(seed)
    tree, retention = make()
    model = Model()
    now = 0.0
    for _ in range(120):
        now += 1.0
        text = "".join(rnd.choice("abc") for _ in range(rnd.randrange(1, 7)))
        id = f"h{rnd.randrange(5)}"
        match rnd.randrange(6):
            case 0 | 1:
                tree.insert("n", key(text), HBM, list(text))
                for known in model.hints:
                    retention.look(known)
            case 2:
                priority, until = rnd.randrange(3), now + rnd.randrange(1, 30)
                retention.expect(id, "n", key(text), priority=priority, until=until)
                model.expect(id, text, priority, until)
            case 3:
                retention.forget(id)
                model.hints.pop(id, None)
            case 4:
                retention.expire(now)
                model.hints = {id: hint for id, hint in model.hints.items() if hint.until > now}
            case 5:
                _evict(rnd, tree, retention, model)
        tree.check()
        assert len(retention) == len(model.hints)
        for node in tree.nodes():
            assert (node in retention) == (model.strength(_text(node)) is not None)
    retention.clear()
    assert not any(node.locks for node in tree.nodes())


def _evict(rnd: random.Random, tree: RadixTree, retention: Retention, model: Model) -> None:
    wanted = rnd.randrange(1, 5)
    before = letters(tree, HBM)
    gone = tree.evict(HBM, wanted, spare=retention)
    freed = sum(evicted.blocks for evicted in gone)
    after = letters(tree, HBM)
    assert not [text for text in before - after if model.strength(text)], "announced blocks stay"
    if freed < wanted:
        # Ends of prefixes only: each unannounced block that is left is continued by an announced one.
        assert all(
            model.strength(text) or any(other.startswith(text) and model.strength(other) for other in after)
            for text in after
        )
    most = rnd.choice([math.inf, 1, 2])
    taken = retention.give_up(HBM, wanted - freed, always, below=most)
    left = letters(tree, HBM)
    lost = after - left
    assert len(lost) == sum(evicted.blocks for evicted in taken) <= max(0, wanted - freed)
    strengths = {text: model.strength(text) for text in after}
    for text in lost:
        own = strengths[text]
        assert own is not None
        assert own[0] < most
        ends = [
            other
            for other in left
            if strengths[other] is not None and not any(o != other and o.startswith(other) for o in left)
        ]
        assert all(strengths[end] >= own for end in ends if strengths[end]), "the weakest first"


def test_marks_follow_splits_and_come_with_what_is_inserted_later() -> None:
    tree, retention = make()
    retention.expect("h", "n", key("abcd"))
    tree.insert("n", key("ab"), HBM, list("ab"))
    assert not any(node in retention for node in tree.nodes())
    retention.look("h")
    tree.insert("n", key("ax"), HBM, list("ax"))
    assert {_text(node) for node in tree.nodes() if node in retention} == {"a", "ab"}
    tree.insert("n", key("abcde"), HBM, list("abcde"))
    retention.look("h")
    assert {_text(node) for node in tree.nodes() if node in retention} == {"a", "ab", "abcd"}


def test_what_has_left_the_tree_and_comes_again_is_held_back_again() -> None:
    tree, retention = make()
    tree.insert("n", key("abc"), HBM, list("abc"))
    retention.expect("h", "n", key("abc"))
    assert [e.blocks for e in retention.give_up(HBM, 9, always)] == [3]
    assert tree.node_count == 0
    tree.insert("n", key("abc"), HBM, list("abc"))
    retention.look("h")
    assert tree.evict(HBM, 9, spare=retention) == []
    retention.forget("h")
    assert not any(node.locks for node in tree.nodes())
    assert sum(e.blocks for e in tree.evict(HBM, 9, spare=retention)) == 3


def test_what_may_not_go_protects_what_it_continues() -> None:
    tree, retention = make()
    tree.insert("n", key("ab"), HBM, list("ab"))
    tree.insert("n", key("a"), DRAM, list("a"))
    retention.expect("h", "n", key("ab"))
    assert retention.give_up(HBM, 2, lambda node: DRAM in node.placements) == []
    assert sum(e.blocks for e in retention.give_up(HBM, 2, always)) == 2


def test_only_so_many_are_held_back() -> None:
    _, retention = make()
    for number in range(MOST_HINTS + 5):
        retention.expect(str(number), "n", key("a"), priority=int(number >= 5))
    assert len(retention) == MOST_HINTS
    retention.forget("0")
    assert len(retention) == MOST_HINTS, "the weakest are gone"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=20))
def test_tenants_with_the_most_give_up_first(owned: list[tuple[str, int]]) -> None:
    order = from_most(owned)
    assert sorted(order) == [*range(len(owned))]
    left = Counter[str]()
    for owner, blocks in owned:
        left[owner] += blocks
    for index in order:
        owner, blocks = owned[index]
        assert left[owner] == max(left.values())
        left[owner] -= blocks
    for tenant in "abc":
        theirs = [index for index in order if owned[index][0] == tenant]
        assert theirs == sorted(theirs), "the oldest first"


def test_a_small_tenant_keeps_its_blocks_while_a_large_one_has_more() -> None:
    assert from_most([("small", 2), ("large", 3), ("large", 3)]) == [1, 2, 0]


@given(
    st.lists(st.tuples(st.text("abc", min_size=1, max_size=5), st.sampled_from([-math.inf, 1, 2, 3]))),
    st.integers(1, 12),
)
def test_deferred_sessions_give_up_what_is_theirs_alone(hints: list[tuple[str, float]], wanted: int) -> None:
    tree, retention = make()
    for number, (text, earliest) in enumerate(hints):
        tree.insert("n", key(text), HBM, list(text))
        retention.expect(str(number), "n", key(text))
        retention.defer(str(number), earliest)
    for number in range(len(hints)):
        retention.look(str(number))
    before = letters(tree, HBM)
    gone = retention.give_up_deferred(HBM, wanted, always)
    lost = before - letters(tree, HBM)
    assert sum(evicted.blocks for evicted in gone) == len(lost) <= wanted
    tree.check()
    whose = {block: [n for n, (text, _) in enumerate(hints) if text.startswith(block)] for block in before}
    for block in lost:
        (owner,) = whose[block]
        assert hints[owner][1] > -math.inf
        later = [n for n, (_, earliest) in enumerate(hints) if earliest > hints[owner][1]]
        assert not [
            left
            for left in before - lost
            if whose[left] and whose[left][0] in later and len(whose[left]) == 1
        ], "the latest first"

"""Random operations on the tree against an oracle that knows only token tuples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tree_oracle import Lock, Oracle, Units, full_key, units_of

from sglang_ext.keys import encode_tokens
from sglang_ext.radix_global import Evicted, Holder, Node, RadixTree, policy_by_name
from sglang_ext.tiers import Tier
from tests.support.sources import from_sources

pytestmark = pytest.mark.slow

HOLDERS = [
    Holder.of("a", 1, Tier.HBM),
    Holder.of("a", 1, Tier.DRAM),
    Holder.of("b", 7, Tier.HBM),
]
NAMESPACES = ["plain", ("salted", 1)]
EVERYTHING = 10**9

holders = st.sampled_from(HOLDERS)
namespaces = st.sampled_from([NAMESPACES[0], *NAMESPACES])
picks = st.integers(0, 10**6)
Draw = tuple[int, int, list[str], int]
prompts = st.tuples(
    picks, st.integers(0, 6), st.lists(st.sampled_from("abc"), max_size=3), st.integers(0, 15)
)
"""The earlier prompt to continue, after how many of its blocks, with which blocks (by name), and how many
tokens of one more block follow. Prompts that share nothing would leave the tree flat."""


def spell(names: Sequence[str], tail: int, block_size: int) -> list[int]:
    """The tokens of a prompt. Blocks a and b differ in their last token, a and c in their first."""
    alphabet = {
        "a": [0] * block_size,
        "b": [0] * (block_size - 1) + [1],
        "c": [2] + [0] * (block_size - 1),
    }
    tokens = [token for name in names for token in alphabet[name]]
    return tokens + [0] * (tail % block_size)


def at_least(nodes: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Offer a rule only when the tree has so many nodes, so that runs are not spent on empty trees."""
    return precondition(lambda self: self.tree.node_count >= nodes)


class TreeMachine(RuleBasedStateMachine):
    """Every operation of the tree, each judged by the oracle, and ``check()`` after each."""

    tree_class: ClassVar[type[RadixTree]] = RadixTree
    policy_by_name: ClassVar[Callable[[str], Any]] = staticmethod(policy_by_name)
    steps: ClassVar[int] = 0

    @initialize(block_size=st.sampled_from([1, 2, 16]), policy=st.sampled_from(["lru", "slru", "priority"]))
    def start(self, block_size: int, policy: str) -> None:
        clock = itertools.count(1)
        self.tree = self.tree_class(
            block_size, policy=self.policy_by_name(policy), clock=lambda: float(next(clock))
        )
        self.oracle = Oracle(block_size, policy)
        self.units = itertools.count()
        self.earlier: list[list[str]] = [[]]

    def done(self) -> None:
        type(self).steps += 1
        self.tree.check()
        self.oracle.compare(self.tree, HOLDERS)

    def tokens(self, draw: Draw) -> list[int]:
        pick, keep, more, tail = draw
        names = self.earlier[pick % len(self.earlier)][:keep] + more
        self.earlier.append(names)
        return spell(names, tail, self.oracle.block_size)

    def address(self, blocks: int, each: int, kind: str) -> tuple[Any, list[Units]]:
        """An address that no other block has, and how the oracle sees it."""
        if blocks == 0 or kind == "unknown":
            return None, [None] * blocks
        entries = list(itertools.islice(self.units, blocks * each))
        address = np.array(entries) if kind == "array" else entries
        return address, units_of(entries, blocks)

    addresses = st.tuples(st.integers(1, 3), st.sampled_from(["array", "list", "unknown"]))

    # -- rules ----------------------------------------------------------------------------------

    @rule(
        namespace=namespaces,
        prompt=prompts,
        holder=holders,
        how=addresses,
        priority=st.integers(-1, 2),
        again=st.booleans(),
    )
    def insert(
        self,
        namespace: Any,
        prompt: Draw,
        holder: Holder,
        how: tuple[int, str],
        priority: int,
        again: bool,
    ) -> None:
        tokens = self.tokens(prompt)
        address, units = self.address(len(tokens) // self.oracle.block_size, *how)
        result = self.tree.insert(
            namespace, encode_tokens(tokens), holder, address, priority=priority, same_request=again
        )
        self.oracle.insert(namespace, tokens, holder, units, priority, again, result)
        self.done()

    @at_least(1)
    @rule(namespace=namespaces, prompt=prompts)
    def match(self, namespace: Any, prompt: Draw) -> None:
        tokens = self.tokens(prompt)
        match = self.tree.match(namespace, encode_tokens(tokens))
        self.oracle.match(namespace, tokens, match)
        self.done()

    @at_least(1)
    @rule(namespace=namespaces, prompt=prompts)
    def ask_holders(self, namespace: Any, prompt: Draw) -> None:
        tokens = self.tokens(prompt)
        nodes = self.tree.node_count
        self.oracle.holders(namespace, tokens, self.tree.holders(namespace, encode_tokens(tokens)))
        assert self.tree.node_count == nodes
        self.done()

    @at_least(1)
    @rule(namespace=namespaces, prompt=prompts)
    def touch(self, namespace: Any, prompt: Draw) -> None:
        tokens = self.tokens(prompt)
        nodes = self.tree.node_count
        self.tree.touch(namespace, encode_tokens(tokens))
        assert self.tree.node_count == nodes
        self.oracle.touch(namespace, tokens)
        self.done()

    def known_node(self, namespace: Any, prompt: Draw, pick: int) -> Node | None:
        """A node on the path of a prompt."""
        tokens = self.tokens(prompt)
        match = self.tree.match(namespace, encode_tokens(tokens))
        self.oracle.match(namespace, tokens, match)
        return match.path[pick % len(match.path)] if match.path else None

    @at_least(1)
    @rule(namespace=namespaces, prompt=prompts, pick=picks, holder=holders, how=addresses)
    def place(self, namespace: Any, prompt: Draw, pick: int, holder: Holder, how: tuple[int, str]) -> None:
        node = self.known_node(namespace, prompt, pick)
        if node is None:
            return
        address, units = self.address(node.blocks, *how)
        assert node.parent is not None
        if holder in node.placements or not (node.parent.is_root or holder in node.parent.placements):
            with pytest.raises(ValueError, match=r"already has|lacks the prefix"):
                self.tree.place(node, holder, address)
        else:
            self.tree.place(node, holder, address)
            self.oracle.place(namespace, node, holder, units)
        self.done()

    @at_least(1)
    @rule(namespace=namespaces, prompt=prompts, pick=picks, cut=st.integers(-1, 7))
    def split(self, namespace: Any, prompt: Draw, pick: int, cut: int) -> None:
        node = self.known_node(namespace, prompt, pick)
        if node is None:
            return
        if 0 < cut < node.blocks:
            assert self.tree.split(node, cut).blocks == cut
        else:
            with pytest.raises(ValueError, match="cannot cut"):
                self.tree.split(node, cut)
        self.done()

    @at_least(3)
    @rule(namespace=namespaces, prompt=prompts, pick=picks, holder=holders)
    def remove(self, namespace: Any, prompt: Draw, pick: int, holder: Holder) -> None:
        node = self.known_node(namespace, prompt, pick)
        if node is None:
            return
        held = holder in node.placements
        names = self.oracle.prefixes(full_key(node))[-node.blocks :]
        gone = self.tree.remove(node, holder)
        if held:
            self.oracle.remove(namespace, names, holder, gone)
        else:
            assert gone == []
        self.done()

    @at_least(2)
    @rule(holder=holders)
    def drop_holder(self, holder: Holder) -> None:
        self.oracle.drop(holder, self.tree.drop_holder(holder))
        self.done()

    @at_least(1)
    @rule(holder=holders, blocks=st.integers(0, 8))
    def evict(self, holder: Holder, blocks: int) -> None:
        gone = self.tree.evict(holder, blocks)
        self.oracle.evict(holder, blocks, None, True, gone)
        self.done()

    @at_least(1)
    @rule(
        holder=holders,
        blocks=st.integers(1, 8),
        other=holders,
        look_past=st.sampled_from([0, 1, EVERYTHING]),
    )
    def evict_what_has_a_copy(self, holder: Holder, blocks: int, other: Holder, look_past: int) -> None:
        asked: list[Node] = []

        def has_copy(node: Node) -> bool:
            asked.append(node)
            return other in node.placements

        gone = self.tree.evict(holder, blocks, only=has_copy, look_past=look_past)
        assert len(asked) <= len(gone) + look_past + 1
        self.oracle.evict(holder, blocks, other, look_past == EVERYTHING, gone)
        self.done()

    @at_least(1)
    @rule(namespace=namespaces, prompt=prompts, holder=holders)
    def lock(self, namespace: Any, prompt: Draw, holder: Holder) -> None:
        tokens = self.tokens(prompt)
        match = self.tree.match(namespace, encode_tokens(tokens))
        self.oracle.match(namespace, tokens, match)
        newly = self.tree.lock(match.node, holder)
        self.oracle.lock(Lock(namespace, holder, match.node), newly)
        self.done()

    @precondition(lambda self: self.oracle.locks)
    @rule(pick=picks, down=st.integers(1, 3))
    def move_lock_onward(self, pick: int, down: int) -> None:
        lock = self.oracle.locks[pick % len(self.oracle.locks)]
        node = lock.node
        for _ in range(down):
            children = list(node.children.values())
            node = children[pick % len(children)] if children else node
        if node is not lock.node:
            self.tree.move_lock(lock.node, node, lock.holder)
            self.oracle.move(lock, node)
        self.done()

    @precondition(lambda self: self.oracle.locks)
    @rule(pick=picks, prompt=prompts)
    def move_lock_anywhere(self, pick: int, prompt: Draw) -> None:
        lock, tokens = self.oracle.locks[pick % len(self.oracle.locks)], self.tokens(prompt)
        match = self.tree.match(lock.namespace, encode_tokens(tokens))
        self.oracle.match(lock.namespace, tokens, match)
        self.tree.move_lock(lock.node, match.node, lock.holder)
        self.oracle.move(lock, match.node)
        self.done()

    @precondition(lambda self: self.oracle.locks)
    @rule(pick=picks)
    def unlock(self, pick: int) -> None:
        self.release(pick)
        self.done()

    def release(self, pick: int) -> None:
        lock = self.oracle.locks[pick % len(self.oracle.locks)]
        self.oracle.unlock(lock, self.tree.unlock(lock.node, lock.holder))

    @at_least(10)
    @rule()
    def drain(self) -> None:
        """Once nothing is locked, everything can go, and nothing is left."""
        while self.oracle.locks:
            self.release(0)
        for holder in HOLDERS:
            self.oracle.evict(holder, EVERYTHING, None, True, self.tree.evict(holder, EVERYTHING))
        self.done()
        assert self.tree.node_count == 0
        assert list(self.tree.nodes()) == []


def run(tree_class: type[RadixTree], examples: int, steps: int, **settings: Any) -> int:
    """Run the machine on a tree. Returns the steps made; raises the error of a failed judgement."""
    changed: dict[str, Any] = {"tree_class": tree_class, "steps": 0}
    if tree_class is not RadixTree:
        changed["policy_by_name"] = staticmethod(PYTHON_POLICIES)
    machine = type("Machine", (TreeMachine,), changed)
    run_state_machine_as_test(
        machine,
        settings=hypothesis.settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            **settings,
        ),
    )
    return machine.steps


def test_model_short() -> None:
    assert run(RadixTree, 150, 50) >= 1_000


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_model_long() -> None:
    assert run(RadixTree, 1_500, 80) >= 10_000


# -- twins: trees with one fault each, which the same run must find ---------------------------------

PythonTree: Any = from_sources("sglang_ext.radix_global.tree").RadixTree
PYTHON_POLICIES = from_sources("sglang_ext.radix_global.eviction").policy_by_name


class SplitsOneBlockOff(PythonTree):
    def _split(self, node: Node, blocks: int) -> Node:
        return super()._split(node, min(blocks + 1, node.blocks - 1))


class LocksTheEndOnly(PythonTree):
    def lock(self, node: Node, holder: Holder) -> int:
        parent, node.parent = node.parent, None if node.parent is None else self.root
        try:
            return super().lock(node, holder)
        finally:
            node.parent = parent


class ForgetsLocks(PythonTree):
    def lock(self, node: Node, holder: Holder) -> int:
        newly = super().lock(node, holder)
        self._forgotten = [*getattr(self, "_forgotten", []), (node, holder)]
        return newly

    def evict(self, holder: Holder, blocks: int, **options: Any) -> list[Evicted]:
        for node, owner in getattr(self, "_forgotten", []):
            if node.locks.get(owner):
                super().unlock(node, owner)
        return super().evict(holder, blocks, **options)


class ReplacesWhatWasHeld(PythonTree):
    def insert(self, namespace: Any, key: bytes, holder: Holder, address: Any = None, **options: Any) -> Any:
        result = super().insert(namespace, key, holder, address, **options)
        if address is not None and result.held_blocks == result.blocks > 0 and result.node.parent is not None:
            result.node.placements[holder] = address[-result.node.blocks :]
        return result


class CutsAddressesElsewhere(PythonTree):
    """Splits between the same blocks, but gives each part the other's slots."""

    def _split(self, node: Node, blocks: int) -> Node:
        upper = super()._split(node, blocks)
        for holder, address in node.placements.items():
            if address is not None and len(address) == len(upper.placements[holder]):
                node.placements[holder], upper.placements[holder] = upper.placements[holder], address
        return upper


class EvictsTheNewest(PythonTree):
    def __init__(self, block_size: int, *, policy: Any, clock: Any) -> None:
        super().__init__(block_size, policy=lambda node: tuple(-part for part in policy(node)), clock=clock)

    def check(self) -> None:
        """The reversed policy breaks the queue's order, which this twin does not test."""


class EvictsWholeNodes(PythonTree):
    def evict(self, holder: Holder, blocks: int, **options: Any) -> list[Evicted]:
        gone = super().evict(holder, blocks, **options)
        if gone and gone[-1].node.parent is not None and holder in gone[-1].node.parent.placements:
            more = gone[-1].node.parent
            if more.can_go(holder):
                gone += self.remove(more, holder)
        return gone


class MixesNamespaces(PythonTree):
    def match(self, namespace: Any, key: bytes) -> Any:
        return super().match(namespace if namespace in self.roots else next(iter(self.roots), None), key)


class CountsOneTokenLess(PythonTree):
    def holders(self, namespace: Any, key: bytes) -> dict[Holder, int]:
        return {holder: max(0, tokens - 1) for holder, tokens in super().holders(namespace, key).items()}


class LeavesQueueMarks(PythonTree):
    """A holder that is dropped and comes back would never be evicted again."""

    def drop_holder(self, holder: Holder) -> int:
        marked = [node for node in self.nodes() if holder in node.queued]
        dropped = super().drop_holder(holder)
        for node in marked:
            node.queued.add(holder)
        return dropped


@pytest.mark.parametrize(
    "twin",
    [
        SplitsOneBlockOff,
        LocksTheEndOnly,
        ForgetsLocks,
        ReplacesWhatWasHeld,
        CutsAddressesElsewhere,
        EvictsTheNewest,
        EvictsWholeNodes,
        MixesNamespaces,
        CountsOneTokenLess,
        LeavesQueueMarks,
    ],
)
def test_a_broken_tree_is_found_out(twin: type[RadixTree]) -> None:
    with pytest.raises((AssertionError, ValueError)):
        run(
            twin,
            300,
            40,
            derandomize=True,
            phases=[hypothesis.Phase.generate],
            report_multiple_bugs=False,
        )

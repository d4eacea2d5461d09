"""The conformance suite of the tiers of a `mempool.store.Store`, and a model test of its reservations.

    class TestMyTier(StoreContract):
        def open_rig(self, blocks):
            store = Store(RadixTree(BLOCK))
            return Rig(store, Tier.DRAM, MyTier(store, blocks))

`run_store_model` makes random calls, and compares each block of the index with the bytes that the calls
wrote.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sglang_ext.keys import TOKEN_BYTES, encode_tokens
from sglang_ext.mempool.ledger import Call, Reservation, StoreTier, Use
from sglang_ext.mempool.store import Refusal, Store
from sglang_ext.radix_global import Node
from sglang_ext.tiers import Tier

BLOCK = 4
CAPACITY = 12
STEP = BLOCK * TOKEN_BYTES
NAMESPACE = ("space",)


@dataclass
class Rig:
    """A store with the tier under test, empty. close: releases resources that Python does not collect, such
    as memory and files.
    """

    store: Store
    level: Tier
    close: Callable[[], None] = lambda: None

    @property
    def tier(self) -> StoreTier:
        return self.store.ledger.tiers[self.level]

    def reserve(self, key: bytes, use: Use = Use.FETCH, **how: Any) -> Reservation:
        """A reservation that there must be."""
        found = self.store.reserve(self.level, NAMESPACE, key, use, **how)
        assert isinstance(found, Reservation), found
        return found

    def available(self) -> int:
        """Blocks that are free, or in the index and not locked."""
        holder, tree = self.tier.holder, self.store.tree
        return self.tier.free_blocks + tree.blocks_of(holder) - tree.locked_blocks_of(holder)

    def put(self, key: bytes) -> Node:
        """Have a prompt in the index."""
        done = self.reserve(key).commit(onward=False)
        assert done is not None
        return done.node

    def blocks_of(self, key: bytes) -> int:
        """How many leading blocks of a prompt the tier has."""
        path = self.store.tree.match(NAMESPACE, key).path
        return sum(node.blocks for node in path if self.tier.holder in node.placements)

    def check(self) -> None:
        self.store.tree.check()
        self.store.ledger.check()


def prompt(number: int, blocks: int) -> bytes:
    """The key of a prompt of so many blocks; those of one number begin alike, others share nothing."""
    return encode_tokens([100 * number + at for at in range(blocks * BLOCK)])


class StoreContract(abc.ABC):
    """Subclass, implement `open_rig`, and let pytest collect it."""

    @abc.abstractmethod
    def open_rig(self, blocks: int) -> Rig:
        """A new store, with a tier of so many blocks."""

    @pytest.fixture
    def rig(self) -> Iterator[Rig]:
        rig = self.open_rig(CAPACITY)
        yield rig
        rig.check()
        for reservation in rig.store.ledger.reservations:
            reservation.abort()
        rig.store.ledger.clear()
        rig.close()

    def test_blocks_are_taken_once_and_given_back(self, rig: Rig) -> None:
        tier = rig.tier
        assert (tier.n_blocks, tier.free_blocks) == (CAPACITY, CAPACITY)
        first, second = (rig.reserve(prompt(number, 5)).places for number in (1, 2))
        assert (tier.count(first), tier.count(second), tier.free_blocks) == (5, 5, CAPACITY - 10)
        both = tier.join([first, second])
        assert len({str(tier.part(both, at, at + 1)) for at in range(10)}) == 10
        assert str(tier.part(both, 5, 10)) == str(tier.part(second, 0, 5))
        assert rig.store.ledger.reserved(rig.level, Use.FETCH) == 10
        rig.check()
        third = rig.reserve(prompt(3, 5))
        assert third.blocks == CAPACITY - 10, "as many as there are"
        assert rig.store.reserve(rig.level, NAMESPACE, prompt(4, 1), Use.FETCH) is Refusal.NO_ROOM
        for each in rig.store.ledger.reservations[:2]:
            each.abort()
        assert (tier.free_blocks, rig.store.ledger.reserved(rig.level)) == (10, CAPACITY - 10)
        assert (
            rig.store.reserve(rig.level, NAMESPACE, prompt(4, 11), Use.FETCH, whole=True) is Refusal.NO_ROOM
        )
        assert tier.free_blocks == 10
        third.abort()
        assert rig.store.calls[Call.ALLOC_MEM] == rig.store.calls[Call.FREE_MEM] == 3

    def test_a_committed_reservation_is_known(self, rig: Rig) -> None:
        reservation = rig.reserve(prompt(1, 4))
        assert (reservation.start, reservation.blocks) == (0, 4)
        assert rig.blocks_of(prompt(1, 4)) == 0
        done = reservation.commit(onward=False)
        assert done is not None
        assert (done.fresh, done.held, rig.blocks_of(prompt(1, 5))) == (4, 0, 4)
        assert rig.store.ledger.reserved(rig.level) == 0
        assert rig.store.reserve(rig.level, NAMESPACE, prompt(1, 4), Use.FETCH) is Refusal.KNOWN
        assert rig.store.reserve(rig.level, ("other",), prompt(1, 4), Use.FETCH) is not Refusal.KNOWN
        with pytest.raises(ValueError, match="has ended already"):
            reservation.abort()

    def test_what_was_not_filled_is_free_again(self, rig: Rig) -> None:
        assert rig.reserve(prompt(1, 4)).commit(3, onward=False) is not None
        assert (rig.blocks_of(prompt(1, 4)), rig.tier.free_blocks) == (3, CAPACITY - 3)
        rig.reserve(prompt(2, 4)).abort()
        assert rig.reserve(prompt(2, 4)).commit(0) is None
        assert (rig.blocks_of(prompt(2, 4)), rig.tier.free_blocks) == (0, CAPACITY - 3)

    def test_a_reservation_continues_what_is_there_and_keeps_it(self, rig: Rig) -> None:
        rig.put(prompt(1, 3))
        reservation = rig.reserve(prompt(1, 5))
        assert (reservation.start, reservation.blocks) == (3, 2)
        rig.put(prompt(2, CAPACITY - 5))
        taken = rig.reserve(prompt(3, CAPACITY))
        assert taken.blocks == CAPACITY - 5, "all but the reservation's blocks and its prefix"
        assert (rig.blocks_of(prompt(1, 3)), rig.blocks_of(prompt(2, 1))) == (3, 0)
        assert reservation.commit(onward=False) is not None
        assert rig.blocks_of(prompt(1, 5)) == 5
        taken.abort()

    def test_the_least_recently_used_goes_first_and_nothing_that_is_locked(self, rig: Rig) -> None:
        old, new = rig.put(prompt(1, 5)), rig.put(prompt(2, 5))
        rig.put(prompt(3, 4))
        assert rig.blocks_of(prompt(1, 5)) == 3, "the end of the oldest"
        assert rig.store.calls[Call.DELETE] == 1
        rig.store.tree.lock(new, rig.tier.holder)
        assert rig.available() == CAPACITY - 5
        assert rig.store.reserve(rig.level, NAMESPACE, prompt(4, 9), Use.FETCH, whole=True) is Refusal.NO_ROOM
        assert rig.reserve(prompt(5, 9)).blocks == CAPACITY - 5
        assert rig.blocks_of(prompt(2, 5)) == 5
        rig.store.tree.unlock(new, rig.tier.holder)
        del old

    def test_last_copies_stay_where_they_may_not_be_lost(self, rig: Rig) -> None:
        rig.put(prompt(1, CAPACITY - 2))
        assert rig.reserve(prompt(2, 5), lose=False).blocks == 2
        assert rig.blocks_of(prompt(1, CAPACITY)) == CAPACITY - 2

    def test_what_somebody_else_has_inserted_is_kept_once(self, rig: Rig) -> None:
        reservation = rig.reserve(prompt(1, 5))
        rig.put(prompt(1, 3))
        done = reservation.commit(onward=False)
        assert done is not None
        assert (done.fresh, done.held, rig.blocks_of(prompt(1, 5))) == (2, 3, 5)
        assert rig.tier.free_blocks == CAPACITY - 5

    def test_a_use_has_its_share(self, rig: Rig) -> None:
        reservation = rig.reserve(prompt(1, 5), share=4)
        assert reservation.blocks == CAPACITY // 4
        budget = rig.store.reserve(rig.level, NAMESPACE, prompt(2, 1), Use.FETCH, share=4)
        assert budget is Refusal.BUDGET
        assert rig.reserve(prompt(2, 1), Use.RETURN, share=4).blocks == 1, "another use has its own"

    def test_what_gives_way_is_given_up_once_nobody_fills_it(self, rig: Rig) -> None:
        told: list[str] = []
        reservation = rig.store.reserve_spare(rig.level, NAMESPACE, prompt(1, 4), Use.PREFETCH, 0, 4)
        assert isinstance(reservation, Reservation)
        reservation.on_surrender = lambda: told.append("surrendered")
        assert (rig.store.ledger.yielding(rig.level), rig.store.ledger.surrender(rig.level)) == (4, 0)
        reservation.gives_way = True
        assert (rig.store.ledger.surrender(rig.level), told) == (4, ["surrendered"])
        assert (rig.store.ledger.yielding(rig.level), rig.tier.free_blocks) == (0, CAPACITY)
        late = rig.store.reserve_spare(rig.level, NAMESPACE, prompt(1, 4), Use.PREFETCH, 2, 2)
        assert isinstance(late, Reservation)
        assert late.commit(onward=False) is None, "its prefix is not there"

    def test_clearing_gives_all_back(self, rig: Rig) -> None:
        rig.put(prompt(1, 5))
        rig.store.ledger.clear()
        assert (rig.blocks_of(prompt(1, 5)), rig.store.tree.blocks_of(rig.tier.holder)) == (0, 0)

    def test_a_ledger_that_does_not_fit_is_found(self, rig: Rig) -> None:
        """The twin of every check above."""
        reservation = rig.reserve(prompt(1, 2))
        rig.store.ledger._taken[rig.level][Use.FETCH] += 1
        with pytest.raises(AssertionError, match=r"3 blocks of .* are taken for fetch, 2 reserved"):
            rig.store.ledger.check()
        rig.store.ledger._taken[rig.level][Use.FETCH] -= 1
        stolen = rig.tier.take(1)
        if rig.tier.exclusive:
            with pytest.raises(AssertionError, match="index and ledger know of"):
                rig.store.ledger.check()
        rig.tier.give_back(stolen)
        reservation.abort()


class StoreModel(RuleBasedStateMachine):
    """Random reservations against a dict of the bytes written to each place.
    Prompts share prefixes of all kinds."""

    def __init__(self, rig: Rig) -> None:
        super().__init__()
        self.rig = rig
        self.written: dict[str, bytes] = {}
        """Of each place, the prompt's beginning whose last block was written there."""
        self.reservations: list[Reservation] = []
        self.others: list[Reservation] = []

    keys = st.lists(st.booleans(), min_size=1, max_size=6).map(
        lambda blocks: encode_tokens([int(which) for which in blocks for _ in range(BLOCK)])
    )

    @rule(key=keys, whole=st.booleans(), lose=st.booleans())
    def reserve(self, key: bytes, whole: bool, lose: bool) -> None:
        store, level = self.rig.store, self.rig.level
        total, known = len(key) // STEP, self.rig.blocks_of(key)
        reservation = store.reserve(level, NAMESPACE, key, Use.FETCH, whole=whole, lose=lose)
        if isinstance(reservation, Refusal):
            if reservation is Refusal.KNOWN:
                assert known == total
            else:
                # Its own beginning was locked meanwhile.
                assert reservation is Refusal.NO_ROOM
                wanted = total - known if whole else 1
                assert not lose or self.rig.available() < wanted + known
            return
        assert reservation.start == known
        assert reservation.blocks == total - known if whole else 0 < reservation.blocks <= total - known
        for at, place in enumerate(self._places(reservation.places)):
            self.written[place] = key[: (known + at + 1) * STEP]
        self.reservations.append(reservation)

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        reservation = self.reservations.pop(data.draw(st.integers(0, len(self.reservations) - 1)))
        blocks = data.draw(st.integers(0, reservation.blocks))
        before = self.rig.blocks_of(reservation.key)
        done = reservation.commit(blocks, onward=False)
        assert (done is None) is (blocks == 0)
        if done is not None:
            assert done.fresh + done.held == blocks
            assert self.rig.blocks_of(reservation.key) == max(before, reservation.start + blocks)

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.reservations.pop(data.draw(st.integers(0, len(self.reservations) - 1))).abort()

    @rule(blocks=st.integers(1, CAPACITY))
    def take(self, blocks: int) -> None:
        """Another user reserves memory and overwrites it."""
        store = self.rig.store
        taken = store.reserve(self.rig.level, NAMESPACE, prompt(1, blocks), Use.RETURN)
        if isinstance(taken, Reservation):
            self.others.append(taken)
            self.written.update((place, b"another's") for place in self._places(taken.places))

    @precondition(lambda self: self.others)
    @rule()
    def give_back(self) -> None:
        self.others.pop().abort()

    @rule(key=keys)
    def use(self, key: bytes) -> None:
        self.rig.store.match(NAMESPACE, key)

    def _places(self, places: Any) -> list[str]:
        tier = self.rig.tier
        return [str(tier.part(places, at, at + 1)) for at in range(tier.count(places))]

    @invariant()
    def all_is_where_it_was_written(self) -> None:
        self.rig.check()
        held = [self._places(each.places) for each in (*self.reservations, *self.others)]
        beginnings: dict[Node, bytes] = {}
        for node in self.rig.store.tree.nodes():
            assert node.parent is not None
            before = beginnings.get(node.parent, b"")
            beginnings[node] = before + node.key
            places = self._places(node.placements[self.rig.tier.holder])
            held.append(places)
            for at, place in enumerate(places):
                assert self.written[place] == (before + node.key)[: len(before) + (at + 1) * STEP]
        every = [place for places in held for place in places]
        assert len(set(every)) == len(every), "a block has two owners"
        assert len(every) == self.rig.tier.n_blocks - self.rig.tier.free_blocks

    def teardown(self) -> None:
        for each in (*self.reservations, *self.others):
            each.abort()
        self.rig.close()


def run_store_model(open_rig: Callable[[int], Rig], *, examples: int = 60, shrink: bool = True) -> None:
    """Raises the error of the first oracle that fails."""

    class Opened(StoreModel):
        def __init__(self) -> None:
            super().__init__(open_rig(CAPACITY))

    phases = tuple(Phase) if shrink else (Phase.explicit, Phase.generate)
    run_state_machine_as_test(
        Opened,
        settings=settings(
            max_examples=examples, stateful_step_count=30, deadline=None, phases=phases, derandomize=True
        ),
    )

"""Prefixes that a full instance has others keep: one rule at a time, and over simulated fleets."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.router.policies.spilling import (
    LEAST_BLOCKS,
    NO_ROOM,
    TENANT_BUDGET,
    Memory,
    Prefix,
    Round,
    SpillTerms,
    spills,
)

FULL = Memory("full", used=98, size=100)
IDLE = Memory("idle", used=10, size=100, limit=50)
TERMS = SpillTerms(full=0.9, idle=0.75, tenant_blocks=1000)


def prefix(id: int = 1, blocks: int = 10, *, tenant: str = "t", durable: int = 0, **held: int) -> Prefix:
    return Prefix(id, tenant, held or {"full": blocks}, durable)


def chosen(
    *prefixes: Prefix,
    memories: tuple[Memory, ...] = (FULL, IDLE),
    taken: dict[str, int] | None = None,
    terms: SpillTerms = TERMS,
    apart: tuple[str, ...] = (),
) -> Round:
    """apart: instances from which, and to which, nothing can be fetched."""
    return spills(memories, prefixes, taken or {}, terms, lambda a, b: not {a, b} & set(apart))


def pairs(found: Round) -> list[tuple[int, str, str]]:
    return [(spill.prefix.id, spill.source, spill.target) for spill in found.spills]


def test_the_coldest_of_a_full_instance_goes_to_an_idle_one() -> None:
    assert pairs(chosen(prefix(1), prefix(2))) == [(1, "full", "idle"), (2, "full", "idle")]


def test_no_more_than_a_few_at_a_time_and_only_what_is_cold() -> None:
    many = [prefix(id, 5) for id in range(20)]
    assert [id for id, _, _ in pairs(chosen(*many))] == [0, 1, 2, 3]
    terms = SpillTerms(most=100)
    # A quarter of its DRAM: 25 blocks.
    assert [id for id, _, _ in pairs(chosen(*many, terms=terms))] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "memories",
    [
        (Memory("full", 89, 100), IDLE),
        (Memory("full", 98, 100, spilled=20), IDLE),
        (FULL, Memory("idle", 10, 100, limit=0)),
        (FULL, Memory("idle", 70, 100, limit=50)),
        (FULL, Memory("idle", 95, 100, limit=50)),
        (FULL, Memory("idle", 10, 100, limit=9)),
        (FULL,),
    ],
    ids=["not full", "full of others'", "keeps nothing", "half full", "full too", "small limit", "alone"],
)
def test_nothing_is_spilled(memories: tuple[Memory, ...]) -> None:
    assert not chosen(prefix(), memories=memories).spills


def test_what_is_safe_elsewhere_or_short_or_not_there_stays() -> None:
    assert not chosen(prefix(full=10, idle=9)).spills
    assert not chosen(prefix(durable=10)).spills
    assert not chosen(prefix(blocks=LEAST_BLOCKS - 1)).spills
    assert not chosen(prefix(idle=10)).spills
    # An instance that reports nothing of its memory is believed to hold it.
    assert pairs(chosen(prefix(full=10, silent=10))) == [(1, "full", "idle")]
    # Another full instance's copy is as good as none.
    other = Memory("other", 99, 100)
    found = chosen(prefix(full=10, other=8), memories=(FULL, other, IDLE))
    assert pairs(found) == [(1, "full", "idle")]


def test_only_what_is_lacking_counts() -> None:
    (spill,) = chosen(prefix(full=40, idle=20), terms=SpillTerms(tenant_blocks=20)).spills
    assert (spill.blocks, spill.new) == (40, 20)


def test_a_tenant_at_its_budget_has_nothing_more_kept_and_others_do() -> None:
    found = chosen(prefix(1, tenant="t"), prefix(2, tenant="u"), taken={"t": 995})
    assert pairs(found) == [(2, "full", "idle")]
    assert found.left == {TENANT_BUDGET: 1}
    assert not chosen(prefix(), terms=SpillTerms(tenant_blocks=0)).spills


def test_tenants_take_turns() -> None:
    """The tenant with the fewest spilled blocks comes first, each tenant's coldest before its others."""
    many = [prefix(id, 5, tenant="many") for id in range(4)]
    few = [prefix(id, 5, tenant="few") for id in (10, 11)]
    third = [prefix(20, 5, tenant="third")]
    terms = SpillTerms(most=4)
    room = Memory("full", 980, 1000)
    found = chosen(*many, *few, *third, memories=(room, IDLE), terms=terms)
    assert [id for id, _, _ in pairs(found)] == [0, 10, 20, 1]
    found = chosen(*many, *few, *third, memories=(room, IDLE), terms=terms, taken={"few": 7, "third": 3})
    assert [id for id, _, _ in pairs(found)] == [0, 20, 1, 10]
    # One tenant alone: the coldest first.
    assert [id for id, _, _ in pairs(chosen(*many, memories=(room, IDLE), taken={"many": 9}))] == [0, 1, 2, 3]


def test_turns_are_taken_among_what_is_cold_only() -> None:
    many = [prefix(id, 5, tenant="many") for id in range(5)]
    found = chosen(*many, prefix(9, 5, tenant="warm"))
    assert [id for id, _, _ in pairs(found)] == [0, 1, 2, 3]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(4, 9)), max_size=30),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 40)),
)
def test_each_spill_is_of_the_tenant_with_the_fewest(
    wanted: list[tuple[str, int]], taken: dict[str, int]
) -> None:
    """Against a plain loop over lists."""
    left = {tenant: [id for id, each in enumerate(wanted) if each[0] == tenant] for tenant in "abc"}
    has = {tenant: taken.get(tenant, 0) for tenant in "abc"}
    memories = (Memory("full", 9990, 10_000), Memory("idle", 0, 10_000, limit=5000))
    prefixes = [prefix(id, blocks, tenant=tenant) for id, (tenant, blocks) in enumerate(wanted)]
    terms = SpillTerms(most=12)
    for spill in chosen(*prefixes, memories=memories, taken=taken, terms=terms).spills:
        tenant = min((each for each in "abc" if left[each]), key=lambda each: (has[each], left[each][0]))
        assert spill.prefix.id == left[tenant].pop(0)
        has[tenant] += spill.new
    assert sum(map(len, left.values())) == max(0, len(wanted) - 12)


def test_what_a_round_places_counts_in_it() -> None:
    found = chosen(prefix(1, 20), prefix(2, 5), prefix(3, 5), taken={"t": 975})
    assert pairs(found) == [(1, "full", "idle"), (2, "full", "idle")]
    small = Memory("idle", 10, 100, limit=12)
    found = chosen(prefix(1, 10), prefix(2, 10), memories=(FULL, small))
    assert (pairs(found), found.left) == ([(1, "full", "idle")], {NO_ROOM: 1})


def test_who_keeps_it() -> None:
    busy = Memory("busy", 0, 100, limit=50, in_flight=3)
    assert pairs(chosen(prefix(), memories=(FULL, busy, IDLE))) == [(1, "full", "idle")]
    # Unused room goes before room that already keeps something.
    laden = Memory("laden", 55, 100, spilled=45, limit=50)
    assert pairs(chosen(prefix(), memories=(FULL, laden, busy))) == [(1, "full", "busy")]
    assert pairs(chosen(prefix(), memories=(FULL, laden))) == [(1, "full", "laden")]
    assert not chosen(prefix(), apart=("idle",)).spills


# -- simulated fleets ------------------------------------------------------------------------------------


class Simulated:
    """Instances with LRU memory of conversations of one size; copies kept for others go first."""

    SIZE = 100
    BLOCKS = 5

    def __init__(self, names: str, limit: int, terms: SpillTerms = TERMS) -> None:
        self.own: dict[str, OrderedDict[int, None]] = {name: OrderedDict() for name in names}
        self.kept: dict[str, OrderedDict[int, None]] = {name: OrderedDict() for name in names}
        self.limit, self.terms = limit, terms
        self.uses: dict[int, int] = {}
        self.last: OrderedDict[int, None] = OrderedDict()
        self.tenants: dict[int, str] = {}
        self.spilled = self.hits = self.misses = self.again = 0
        self.passed: set[tuple[int, str]] = set()

    def used(self, name: str) -> int:
        return self.BLOCKS * (len(self.own[name]) + len(self.kept[name]))

    def memories(self) -> list[Memory]:
        return [
            Memory(name, self.used(name), self.SIZE, self.BLOCKS * len(self.kept[name]), self.limit)
            for name in self.own
        ]

    def turn(self, conversation: int, at: str, tenant: str = "t") -> None:
        """A turn of a conversation; an instance that has it sends it."""
        self.tenants[conversation] = tenant
        found = any(conversation in held[name] for held in (self.own, self.kept) for name in self.own)
        if self.uses.get(conversation):
            self.hits, self.misses = self.hits + found, self.misses + (not found)
        self.uses[conversation] = self.uses.get(conversation, 0) + 1
        self.last[conversation] = None
        self.last.move_to_end(conversation)
        self.kept[at].pop(conversation, None)
        for kept in self.kept.values():
            if conversation in kept:  # it has been given back
                kept.move_to_end(conversation, last=False)
        self.own[at][conversation] = None
        self.own[at].move_to_end(conversation)
        while self.used(at) > self.SIZE:
            (self.kept[at] or self.own[at]).popitem(last=False)

    def taken(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for kept in self.kept.values():
            for conversation in kept:
                tenant = self.tenants[conversation]
                found[tenant] = found.get(tenant, 0) + self.BLOCKS
        return found

    def round(self) -> None:
        def prefixes() -> list[Prefix]:
            return [
                Prefix(
                    each,
                    self.tenants[each],
                    {
                        name: self.BLOCKS
                        for name in self.own
                        if each in self.own[name] or each in self.kept[name]
                    },
                )
                for each in self.last
                if self.uses[each] > 1
            ]

        for spill in spills(self.memories(), prefixes(), self.taken(), self.terms, lambda a, b: True).spills:
            self.spilled += 1
            kept = self.kept[spill.target]
            kept[spill.prefix.id] = None
            while self.BLOCKS * len(kept) > self.limit:
                kept.popitem(last=False)
            assert self.used(spill.target) <= self.SIZE


def load(fleet: Simulated, at: str, conversations: int, turns: int, seed: int = 1) -> None:
    rng = random.Random(seed)
    for _ in range(turns):
        fleet.turn(rng.randrange(conversations), rng.choice(at))
        fleet.round()


def test_an_idle_instance_s_memory_is_as_good_as_more_of_ones_own() -> None:
    alone, helped = Simulated("ab", limit=0), Simulated("ab", limit=70)
    for fleet in (alone, helped):
        load(fleet, "a", conversations=30, turns=2000)
    assert alone.spilled == 0
    assert helped.misses < alone.misses / 5


def test_full_instances_pass_nothing_to_and_fro() -> None:
    fleet = Simulated("ab", limit=70)
    # Each has more conversations than it can hold.
    rng = random.Random(2)
    for _ in range(1000):
        fleet.turn(rng.randrange(40), "a")
        fleet.turn(100 + rng.randrange(40), "b")
    before = fleet.spilled
    for _ in range(1000):
        fleet.turn(rng.randrange(40), "a")
        fleet.turn(100 + rng.randrange(40), "b")
        fleet.round()
    assert fleet.spilled == before


def test_what_is_kept_does_not_move_while_nothing_happens() -> None:
    fleet = Simulated("abc", limit=70)
    load(fleet, "a", conversations=60, turns=1000)
    for _ in range(50):
        fleet.round()
    before = fleet.spilled
    for _ in range(50):
        fleet.round()
    assert fleet.spilled == before


def test_no_tenant_has_more_kept_than_its_budget() -> None:
    fleet = Simulated("abc", limit=70, terms=SpillTerms(full=0.9, idle=0.75, tenant_blocks=40))
    rng = random.Random(3)
    for _ in range(2000):
        number = rng.randrange(60)
        fleet.turn(number, "a", "greedy" if number % 4 else "modest")
        fleet.round()
        assert all(blocks <= 40 for blocks in fleet.taken().values())
    assert set(fleet.taken()) == {"greedy", "modest"}


def test_a_tenant_with_many_conversations_leaves_others_their_share() -> None:
    """`few` has a tenth of the conversations, and as many of them are kept as of the other's, or all."""
    fleet = Simulated("ab", limit=50, terms=SpillTerms(full=0.9, idle=0.75, tenant_blocks=1000, most=1))
    rng = random.Random(4)
    for _ in range(3000):
        number = rng.randrange(66)
        fleet.turn(number, "a", "few" if number % 11 == 0 else "many")
        if rng.random() < 0.1:
            fleet.round()
    kept = Counter(fleet.tenants[each] for each in fleet.kept["b"])
    cold = sum(each not in fleet.own["a"] for each in range(0, 66, 11))
    assert kept["few"] >= min(cold, kept["many"]) - 1


def test_its_own_requests_take_the_memory_back() -> None:
    fleet = Simulated("ab", limit=70)
    load(fleet, "a", conversations=30, turns=1000)
    assert fleet.kept["b"]
    for number in range(100, 120):
        fleet.turn(number, "b")
    assert not fleet.kept["b"]
    assert len(fleet.own["b"]) == 20

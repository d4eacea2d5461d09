"""Matching looks at each holder only where its prefix ends, and finds the same as a look at every block."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping

import pytest
from test_router_index import NAMING, NS, Reporter, key
from test_stock_replica import Stock

from sglang_ext.keys import TOKEN_BYTES, decode_tokens
from sglang_ext.protocol.agent import Hello, Moved, NamesRemoved, NamesStored
from sglang_ext.radix_global import Holder, RadixTree
from sglang_ext.radix_global.sync.replica import State
from sglang_ext.radix_global.sync.runs import path_key
from sglang_ext.router.index.index import Index, names_of
from sglang_ext.router.index.prompt_trees import MANY_CHILDREN
from sglang_ext.router.index.stock_replica import StockReplica
from sglang_ext.router.policies import Match
from sglang_ext.router.policies.base import Role
from sglang_ext.testing.fakes import FakeClock
from sglang_ext.tiers import Tier, nearest_in

BLOCK = 4
STEP = BLOCK * TOKEN_BYTES
TENANT = (None, None)
UNKNOWN = 1 << 5
FAN = [key(9, number) for number in range(10, 12 + MANY_CHILDREN)]
"""More continuations of one beginning than are looked at."""


def held_by(tree: RadixTree, namespace: object, holders: Iterable[Holder]) -> dict[bytes, object]:
    """Every prefix of whole blocks that any of the holders has, and where."""
    found: dict[bytes, object] = {}
    for node in tree.nodes():
        for holder in holders:
            if node.namespace == namespace and holder in node.placements:
                path = path_key(node)
                for end in range(len(path) - len(node.key) + STEP, len(path) + STEP, STEP):
                    found[path[:end]] = node.placements[holder]
    return found


def ends_there(tree: RadixTree, namespace: object, prefix: bytes, held: Mapping[bytes, object]) -> bool:
    """Whether no holder has a block beyond a prefix, and the prefix has few continuations, so it is no common
    beginning."""
    everybody = held_by(tree, namespace, tree.known_holders())
    further = {path[: len(prefix) + STEP] for path in everybody if path.startswith(prefix)} - {prefix}
    return len(further) <= MANY_CHILDREN and not any(path in held for path in further)


def prefixes(prompt: bytes) -> list[bytes]:
    return [prompt[:end] for end in range(STEP, len(prompt) + 1, STEP)]


def believed(index: Index, prompt: bytes) -> dict[str, Match]:
    """The matches in the trees of prompts that passed by, instance by instance."""
    found = {}
    for name in {known.instance for known in index._live.values()}:
        holders = [holder for holder, known in index._live.items() if known.instance == name]
        held = held_by(index._tree, NS, holders)
        mine = [prefix for prefix in prefixes(prompt) if prefix in held]
        if mine:
            own = len(mine) == len(prefixes(prompt)) or ends_there(index._tree, NS, mine[-1], held)
            found[name] = Match(len(mine) * BLOCK, own)
    return found


def told(index: Index, prompt: bytes) -> dict[str, Match]:
    """The matches in each instance's reports, block by block."""
    found = {}
    for name, known in index._known.items():
        replica = known.replica
        if not known.alive or replica.state not in (State.LIVE, State.FILLING) or not known.covers(TENANT):
            continue
        tree = index._trees[known.role].tree
        held = held_by(tree, TENANT, [replica.holder])
        memory = depth = 0
        sets: dict[int, int] = {}
        for depth, prefix in enumerate([prefix for prefix in prefixes(prompt) if prefix in held], 1):
            tiers = held[prefix].run.tiers  # type: ignore[attr-defined]
            if tiers & Tier.HBM.bit:
                memory = depth
            else:
                sets[tiers] = depth
        below: dict[Tier, int] = {}
        for tiers, end in sets.items():
            if (tier := nearest_in(tiers)) is None:
                break
            if end > memory:
                below[tier] = below.get(tier, 0) + end - memory
                memory = end
        count = memory
        names = names_of(replica.naming, TENANT, prompt, BLOCK)[memory:] if replica.naming else []
        for block in names:
            there = [tier for tier, has in sorted(replica.named.items()) if block in has]
            if not there:
                break
            below[there[0]] = below.get(there[0], 0) + 1
            count += 1
        whole = len(prefixes(prompt))
        if isinstance(replica, StockReplica):
            count -= count % replica.page_blocks
            whole -= whole % replica.page_blocks
        own = count == whole or (
            count == depth
            and replica.state is State.LIVE
            and ends_there(tree, TENANT, prompt[: depth * STEP], held)
        )
        if count:
            found[name] = Match(count * BLOCK, own, {tier: blocks * BLOCK for tier, blocks in below.items()})
    return found


def contradictory(index: Index, prompt: bytes) -> set[str]:
    """Instances that report of a prompt a block in a tier, and a block before it not: none does, but random
    events say so. An index need not notice, and may take either for true."""
    found = set()
    for name, known in index._known.items():
        held = held_by(index._trees[known.role].tree, TENANT, [known.replica.holder])
        sets = [held[prefix].run.tiers for prefix in prefixes(prompt) if prefix in held]  # type: ignore[attr-defined]
        if any(after & ~before for before, after in itertools.pairwise(sets)):
            found.add(name)
    return found


def agrees(index: Index, prompt: bytes, expected: Mapping[str, Match] | None = None) -> dict[str, Match]:
    """An index finds the same as a plain look at every block."""
    if expected is None:
        expected = told(index, prompt)
        for name, guess in believed(index, prompt).items():
            if name not in expected or guess.tokens > expected[name].tokens:
                expected[name] = guess
    apart = contradictory(index, prompt)
    found, right = (
        {name: match for name, match in of.items() if name not in apart}
        for of in (index.match(NS, prompt), expected)
    )
    assert found == right
    return right


class Filling(Reporter):
    """A reporter whose snapshots come in parts."""

    def half(self) -> None:
        """A snapshot begins, and half of it is in."""
        sends, number = self.stream.hello(b"r", Hello("r"))
        assert number is not None
        events = self.log.truth()
        half = len(events) // 2
        self.rest = number, events[half:]
        self._receive([*sends, *self.stream.begin(number), *self.stream.part(number, events[:half])])

    def full(self) -> None:
        """The other half is."""
        number, events = self.rest
        self._receive([*self.stream.part(number, events), *self.stream.end(number)])


class Scene:
    """An index under random events of all kinds. stock: of stock instances too."""

    def __init__(self, seed: int, *, stock: bool = True) -> None:
        self.rng = random.Random(seed)
        self.clock = FakeClock()
        self.index = Index(self.clock, block_size=BLOCK, ttl_s=20.0)
        roles = [Role.COLOCATED, Role.COLOCATED, *self.rng.choices(list(Role), k=3)]
        self.tellers = [
            Filling(self.index, f"told-{number}", role, naming=NAMING) for number, role in enumerate(roles)
        ]
        self.filling: set[str] = set()
        pages = (2, BLOCK, 2 * BLOCK) if stock else ()
        self.stock = [Stock(self.index, f"stock-{page}", page) for page in pages]
        self.prompts = [key(*self.rng.choices(range(3), k=self.rng.randrange(1, 9))) for _ in range(40)]
        if seed % 2:
            for prompt in FAN:
                self.tellers[0].insert(prompt)
            self.tellers[1].insert(key(9))
            self.prompts += [key(9), key(9, 1)]

    def step(self) -> None:
        rng, prompt = self.rng, self.rng.choice(self.prompts)
        reporter, stock = rng.choice(self.tellers), rng.choice(self.stock or [None])
        passive = reporter.name in self.filling
        match rng.randrange(12):
            case 0 | 1 | 2 if not passive:
                reporter.insert(prompt, dram=rng.random() < 0.3)
            case 3 if not passive:
                reporter.evict(rng.randrange(1, 6), dram=rng.random() < 0.5)
            case 4 if not passive and (runs := reporter.log.truth()):
                tiers = rng.choice([UNKNOWN, UNKNOWN | Tier.DRAM.bit, Tier.DRAM.bit, 3])
                reporter.report(Moved(rng.choice(runs).run, tiers))
            case 5 if not passive:
                names = names_of(NAMING, TENANT, prompt, BLOCK)
                kind = rng.choice([NamesStored, NamesStored, NamesRemoved])
                reporter.report(kind(Tier.DISK.level, b"".join(names[: rng.randrange(9)])))
            case 6 if passive:
                reporter.full()
                self.filling.discard(reporter.name)
            case 6 if rng.random() < 0.3:
                reporter.half()
                self.filling.add(reporter.name)
            case 7:
                self.index.on_heartbeat(reporter.name, alive=rng.random() < 0.8)
            case 8 | 9 if stock is not None:
                stock.store(decode_tokens(prompt).tolist())
            case 10 if stock is not None and rng.random() < 0.5:
                stock.evict(decode_tokens(prompt).tolist(), stock.page * rng.randrange(3))
            case _:
                name = rng.choice(["told-0", "stock-4", "other", "another"])
                rng.choice([self.index.guess, self.index.confirm])(NS, prompt, name)
        if rng.random() < 0.1:
            self.clock.advance(rng.choice((0.5, 3.0)))
        while self.index.tidy():  # a dead block counts as a continuation until it is taken out
            pass


@pytest.mark.parametrize("stock", [True, False], ids=["stock", "agents"])
@pytest.mark.parametrize("seed", range(6))
def test_it_finds_what_a_look_at_every_block_finds(seed: int, stock: bool) -> None:
    scene = Scene(seed, stock=stock)
    seen: list[Match] = []
    for _ in range(250):
        scene.step()
        seen += agrees(scene.index, scene.rng.choice(scene.prompts)).values()
    scene.index.check()
    assert {True, False} == {match.own for match in seen}
    assert any(Tier.DRAM in match.below for match in seen)
    assert any(Tier.DISK in match.below for match in seen)


def test_a_holder_that_is_not_known_to_be_odd_is_found() -> None:
    """The index looks twice at instances with names on a disk, and at those that are not up to date."""
    scene, found = Scene(1, stock=False), 0
    for _ in range(300):
        scene.step()
        prompt = scene.rng.choice(scene.prompts)
        right = agrees(scene.index, prompt)
        places = scene.index._trees.values()
        odd = [place.odd for place in places]
        for place in places:
            place.odd = set()
        if scene.index.match(NS, prompt) != right:
            found += 1
            with pytest.raises(AssertionError, match="odd"):
                scene.index.check()
        for place, holders in zip(places, odd, strict=True):
            place.odd = holders
    assert found > 10


def test_a_change_that_is_not_looked_at_is_found() -> None:
    """Damage to any part of a match is found: tokens, whether it ends there, a tier, a holder."""
    scene = Scene(0)
    for _ in range(100):
        scene.step()
    prompt = next(p for p in scene.prompts if len(scene.index.match(NS, p)) > 2)
    right = agrees(scene.index, prompt)
    name, match = next(iter(right.items()))
    for wrong in (
        Match(match.tokens + BLOCK, match.own, match.below),
        Match(match.tokens, not match.own, match.below),
        Match(match.tokens, match.own, {Tier.DISK: 1}),
        None,
    ):
        damaged = {other: found for other, found in right.items() if other != name}
        if wrong is not None:
            damaged[name] = wrong
        with pytest.raises(AssertionError):
            agrees(scene.index, prompt, damaged)


def test_holders_of_the_same_part_share_one_match() -> None:
    """A thousand instances that hold a system prompt are a thousand names of it."""
    index = Index(FakeClock(), block_size=BLOCK)
    for number in range(8):
        reporter = Reporter(index, str(number))
        reporter.insert(key(1, 2))
        if number > 5:
            reporter.insert(key(1, 2, number))
    found = index.match(NS, key(1, 2, 3))
    assert [found[str(number)].own for number in range(8)] == [True] * 6 + [False] * 2
    assert len({id(match) for match in found.values()}) == 2

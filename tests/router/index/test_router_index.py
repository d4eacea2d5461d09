"""The index: blocks that instances report, blocks assumed of others, and the memory limit of both."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Hashable

import pytest

from sglang_ext.errors import InternalError
from sglang_ext.keys import block_keys, encode_tokens
from sglang_ext.protocol.agent import (
    FROM_AGENT,
    Events,
    Hello,
    Moved,
    NamesRemoved,
    NamesStored,
    Naming,
    PlacementEvent,
    Removed,
    Stored,
    Welcome,
)
from sglang_ext.radix_global import Holder, RadixTree
from sglang_ext.radix_global.sync.events import PlacementLog
from sglang_ext.radix_global.sync.replica import Outcome
from sglang_ext.radix_global.sync.stream import EventStream, Sends
from sglang_ext.router.fleet.facts import InstanceFacts, ModelFacts
from sglang_ext.router.fleet.fleet import Fleet, Load
from sglang_ext.router.index.index import Index, names_of, tenant_of
from sglang_ext.router.index.memory import TreeSize
from sglang_ext.router.index.prompt_trees import GUESS_SPAN_S, GUESS_TTL_S
from sglang_ext.router.policies import Match
from sglang_ext.router.policies.base import Role
from sglang_ext.testing.fakes import FakeClock
from sglang_ext.tiers import Tier

BLOCK = 4
NS = ("tokens", None, None, None)
NAMING = Naming("m", "w", "f32", "layout", "tp0of1")


def key(*blocks: int) -> bytes:
    """A prompt of whole blocks, each with one number for all its tokens."""
    return encode_tokens([block for block in blocks for _ in range(BLOCK)])


class Reporter:
    """An instance that reports every change to an index at once."""

    def __init__(
        self, index: Index, name: str, role: Role = Role.COLOCATED, *, naming: Naming | None = None
    ) -> None:
        self.index = index
        self.name = name
        self.tree = RadixTree(index.block_size)
        self.hbm, self.dram = Holder.of(name, 1, Tier.HBM), Holder.of(name, 1, Tier.DRAM)
        self.log = PlacementLog(self.tree, {self.hbm: Tier.HBM.bit, self.dram: Tier.DRAM.bit}, self._tenant)
        self.stream = EventStream(name, random.Random(name).randbytes(16), index.block_size, naming)
        index.attach(name, role)
        index.on_heartbeat(name, alive=True)
        sends, number = self.stream.hello(b"r", Hello("r"))
        assert number is not None
        self._receive([*sends, *self.stream.begin(number), *self.stream.end(number)])

    @staticmethod
    def _tenant(namespace: Hashable) -> tuple[str | None, str | None]:
        return namespace  # type: ignore[return-value]

    def insert(self, prompt: bytes, *, dram: bool = False, salt: str | None = None) -> None:
        self.tree.insert((None, salt), prompt, self.dram if dram else self.hbm)
        self.report()

    def evict(self, blocks: int, *, dram: bool = False) -> None:
        self.tree.evict(self.dram if dram else self.hbm, blocks)
        self.report()

    def report(self, *more: PlacementEvent) -> None:
        self._receive(self.stream.publish([*self.log.take(), *more]))

    def _receive(self, sends: Sends) -> None:
        for _, data in sends:
            message = FROM_AGENT.decode(data)
            if isinstance(message, Welcome):
                self.index.began(self.name, message.epoch, message.naming)
            else:
                outcome = self.index.apply(self.name, message)  # type: ignore[arg-type]
                assert outcome is Outcome.APPLIED


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def index(clock: FakeClock) -> Index:
    return Index(clock, block_size=BLOCK)


def test_each_instance_is_matched_with_its_tiers_whatever_its_role(index: Index) -> None:
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE), ("c", Role.COLOCATED)):
        reporter = Reporter(index, name, role)
        reporter.insert(key(1, 2, 3))
        reporter.insert(key(1, 2), dram=True)
        if role is not Role.PREFILL:
            reporter.evict(2)
    assert index.match(NS, key(1, 2, 3, 4)) == {
        "p": Match(12, own=True),
        "d": Match(8, own=True, below={Tier.DRAM: 4}),
        "c": Match(8, own=True, below={Tier.DRAM: 4}),
    }
    assert index.tokens_of("p") == 12
    index.check()


def test_a_match_in_mid_way_is_not_the_requests_own_past(index: Index) -> None:
    Reporter(index, "a").insert(key(1, 2, 3))
    assert index.match(NS, key(1, 2)) == {"a": Match(8, own=True)}  # all of it is there
    assert index.match(NS, key(1, 2, 9)) == {"a": Match(8, own=False)}
    assert index.match(NS, key(1, 2, 3, 9)) == {"a": Match(12, own=True)}
    assert index.match(NS, key(9)) == {}


def test_who_is_not_trusted_does_not_attract(index: Index) -> None:
    reporter = Reporter(index, "a")
    reporter.insert(key(1, 2))
    assert index.trusted("a")
    index.on_heartbeat("a", alive=False)
    assert not index.trusted("a")
    assert index.match(NS, key(1, 2)) == {}
    index.on_heartbeat("a", alive=True)
    assert index.match(NS, key(1, 2)) == {"a": Match(8, own=True)}
    gap = Events(reporter.stream.epoch, reporter.stream.next + 5, (NamesStored(Tier.DISK.level, b""),))
    assert index.apply("a", gap) is Outcome.BROKEN
    assert not index.trusted("a")


def test_guesses_are_for_both_and_live_two_seconds(index: Index, clock: FakeClock) -> None:
    Reporter(index, "a").insert(key(1))
    index.guess(NS, key(1, 2, 3), "a")
    index.guess(NS, key(1, 2), "stock")
    assert index.match(NS, key(1, 2, 3)) == {"a": Match(12, own=True), "stock": Match(8, own=True)}
    clock.advance(GUESS_TTL_S + GUESS_SPAN_S)
    assert index.match(NS, key(1, 2, 3)) == {"a": Match(4, own=True)}


def test_what_passes_by_counts_for_stock_servers_only(index: Index) -> None:
    Reporter(index, "a")
    for name in ("a", "stock"):
        index.confirm(NS, key(1, 2), name)
    assert index.match(NS, key(1, 2)) == {"stock": Match(8, own=True)}
    adapted = ("tokens", "adapter", None, None)
    index.confirm(adapted, key(1, 2), "a")  # its agent names the adapter's KV otherwise
    assert index.match(adapted, key(1, 2)) == {"a": Match(8, own=True)}


def test_the_index_learns_from_answers_of_instances_without_events(index: Index) -> None:
    Reporter(index, "a")
    text = ("text", None, None, None)
    assert not index.learns_of(NS, "a")
    assert index.learns_of(text, "a")  # the engine cannot tell it
    assert index.learns_of(NS, "stock")
    before = index.tokens_of("a")
    index.confirm(NS, key(1, 2, 3), "a")
    assert index.match(NS, key(1, 2, 3)) == {}
    assert index.tokens_of("a") == before


@pytest.mark.parametrize(
    ("mode", "reporter", "stock"), [("auto", 12, 8), ("exact", 12, 0), ("approximate", 8, 8)]
)
def test_what_is_looked_at_can_be_set(clock: FakeClock, mode: str, reporter: int, stock: int) -> None:
    index = Index(clock, block_size=BLOCK, mode=mode)
    Reporter(index, "a").insert(key(1, 2, 3))
    for name in ("a", "stock"):
        index.confirm(NS, key(1, 2), name)
    found = {name: match.tokens for name, match in index.match(NS, key(1, 2, 3)).items()}
    assert (found.get("a", 0), found.get("stock", 0)) == (reporter, stock)
    assert index.trusted("stock") == (mode != "exact")


@pytest.mark.parametrize(
    ("namespace", "tenant"),
    [
        (NS, (None, None)),
        (("tokens", None, "k", None), ("k", None)),
        (("tokens", None, None, "s"), (None, "s")),
        (("tokens", None, "", "s"), (None, "s")),
        (("tokens", "adapter", None, None), None),
        (("text", None, None, None), None),
    ],
)
def test_namespaces_of_router_and_engine_are_the_same(
    namespace: tuple[str | None, ...], tenant: tuple[str | None, str | None] | None
) -> None:
    assert tenant_of(namespace) == tenant


def test_a_disk_continues_what_is_in_memory(index: Index) -> None:
    reporter = Reporter(index, "a", naming=NAMING)
    prompt = key(1, 2, 3, 4)
    names = names_of(NAMING, (None, None), prompt, BLOCK)
    assert names != block_keys(b"", prompt, BLOCK)
    reporter.insert(key(1))
    reporter.report(NamesStored(Tier.DISK.level, b"".join(names[:3])))
    assert index.match(NS, prompt) == {"a": Match(12, own=False, below={Tier.DISK: 8})}
    reporter.report(NamesRemoved(Tier.DISK.level, names[2]))
    assert index.match(NS, prompt) == {"a": Match(8, own=False, below={Tier.DISK: 4})}
    reporter.evict(1)
    assert index.match(NS, prompt) == {"a": Match(8, own=False, below={Tier.DISK: 8})}
    assert index.match(("tokens", None, None, "s"), prompt) == {}


def test_history_says_what_left_which_tier_and_when(index: Index, clock: FakeClock) -> None:
    reporter = Reporter(index, "a")
    reporter.insert(key(1, 2, 3))
    reporter.insert(key(1, 2, 3), dram=True)
    clock.advance(5)
    reporter.evict(1)
    clock.advance(5)
    reporter.evict(2, dram=True)  # the second block's HBM copy is still there
    reporter.evict(2)
    reporter.evict(1, dram=True)
    gone = [(d.tier, d.tokens, d.still_in) for d in index.history(NS, key(1, 2, 3, 9))]
    assert gone == [
        ("hbm", 12, "dram"),
        ("dram", 12, ""),
        ("dram", 8, "hbm"),
        ("hbm", 8, ""),
        ("hbm", 4, "dram"),
        ("dram", 4, ""),
    ]
    first, *_, last = index.history(NS, key(1, 2, 3))
    assert last.at - first.at == 5
    assert index.history(NS, key(9)) == []
    assert index.history(("tokens", None, None, "s"), key(1)) == []


def test_an_index_without_history_remembers_nothing_and_matches_alike(clock: FakeClock) -> None:
    found = []
    for history in (True, False):
        index = Index(clock, block_size=BLOCK, history=history)
        reporter = Reporter(index, "a")
        reporter.insert(key(1, 2, 3))
        reporter.evict(1)
        found.append((index.match(NS, key(1, 2, 3)), len(index.history(NS, key(1, 2, 3)))))
    (matches, departures), without = found
    assert departures == 1
    assert without == (matches, 0)


def test_the_history_is_bounded_and_forgets_the_oldest(clock: FakeClock) -> None:
    index = Index(clock, block_size=BLOCK, max_bytes=400_000)
    reporter = Reporter(index, "a")
    for number in range(60):
        reporter.insert(key(number, 1))
        reporter.evict(2)
    assert index._past.size_bytes <= 400_000 // 16
    assert index.history(NS, key(0, 1)) == []
    assert [gone.tokens for gone in index.history(NS, key(59, 1))] == [4]


def test_an_instance_that_goes_leaves_nothing(index: Index) -> None:
    for name in "ab":
        Reporter(index, name).insert(key(1, 2, 3))
    index.detach("a")
    assert index.match(NS, key(1, 2)) == {"b": Match(8, own=True)}
    while index.tidy():
        pass
    index.check()
    assert index.blocks == 3
    index.detach("b")
    while index.tidy():
        pass
    assert index.blocks == index.nodes == 0


def prompts(count: int, seed: int = 3) -> list[bytes]:
    """Conversations over shared beginnings."""
    rng = random.Random(seed)
    found = []
    while len(found) < count:
        system = [rng.randrange(32_000) for _ in range(200)]
        for _ in range(4):
            turns = list(system)
            for _ in range(4):
                turns += [rng.randrange(32_000) for _ in range(80)]
                found.append(encode_tokens(turns))
    return found


def test_too_much_for_the_memory_is_known_in_part_and_never_more_than_there_is(clock: FakeClock) -> None:
    index = Index(clock, block_size=16, max_bytes=400_000)
    reporter = {name: Reporter(index, name) for name in "ab"}
    for number, prompt in enumerate(prompts(600)):
        clock.advance(0.01)
        name = "ab"[number % 2]
        reporter[name].insert(prompt)
        if number % 7 == 6:
            reporter[name].evict(9)
        assert index.size_bytes <= 400_000
    while index.tidy():
        pass
    index.check()
    assert index.given_up_blocks > 0
    partial = short = 0
    for prompt in prompts(600):
        found = index.match(NS, prompt)
        for name, instance in reporter.items():
            known = found[name].tokens if name in found else 0
            truth = instance.tree.holders((None, None), prompt).get(instance.hbm, 0)
            assert known <= truth
            short += known < truth
        partial += bool(found)
    assert partial > 0, "nothing at all is known any more"
    assert short > 0
    assert all(instance.index.trusted(name) for name, instance in reporter.items())


@pytest.mark.parametrize("instances", [1, 4])
def test_the_estimate_of_memory_is_near_the_truth(clock: FakeClock, instances: int) -> None:
    index = Index(clock, block_size=16)
    reporter = [Reporter(index, f"instance-{number}") for number in range(instances)]
    streams = [[data for each in prompts(400) for data in _reports(instance, each)] for instance in reporter]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for instance, messages in zip(reporter, streams, strict=True):
            for data in messages:
                index.apply(instance.name, FROM_AGENT.decode(data))  # type: ignore[arg-type]
        real = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.9 < index.size_bytes / real < 1.6


def _reports(instance: Reporter, prompt: bytes) -> list[bytes]:
    """The messages that an instance would send on an insertion."""
    instance.tree.insert((None, None), prompt, instance.hbm)
    return [data for _, data in instance.stream.publish(instance.log.take())]


def test_what_a_newer_peer_has_in_tiers_unknown_here_is_left_out(index: Index) -> None:
    """The index then holds less than the peer does; runs that continue the unknown ones, and later runs, are
    still understood."""
    unknown = 1 << 5
    reporter = Reporter(index, "a")
    reporter.insert(key(1))
    hbm = reporter.log.truth()[0].run
    reporter.report(Stored(50, hbm, key(2), unknown), Stored(51, 50, key(3), unknown))
    reporter.report(NamesStored(9, bytes(16)))
    assert index.trusted("a")
    assert index.match(NS, key(1, 2, 3)) == {"a": Match(BLOCK, own=False)}
    reporter.report(Moved(50, unknown | Tier.DRAM.bit))
    assert index.match(NS, key(1, 2, 3)) == {"a": Match(2 * BLOCK, own=False, below={Tier.DRAM: BLOCK})}
    reporter.report(NamesRemoved(9, bytes(16)), Removed(51))
    assert index.trusted("a")
    assert index.match(NS, key(1, 2, 3)) == {"a": Match(2 * BLOCK, own=True, below={Tier.DRAM: BLOCK})}


def test_the_estimate_of_names_on_disk_is_near_the_truth(clock: FakeClock) -> None:
    index = Index(clock, block_size=16)
    reporter = Reporter(index, "a")
    rng = random.Random(1)
    messages = [
        reporter.stream.publish([NamesStored(Tier.DISK.level, rng.randbytes(16 * 1000))])[0][1]
        for _ in range(40)
    ]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for data in messages:
            index.apply("a", FROM_AGENT.decode(data))  # type: ignore[arg-type]
        real = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.9 < index.size_bytes / real < 1.8


def test_a_wrong_count_of_memory_is_found() -> None:
    tree = RadixTree(BLOCK)
    size = TreeSize(tree)
    tree.insert(None, key(1, 2), Holder.of("a", 0, Tier.HBM))
    size.check()
    size.blocks += 1
    with pytest.raises(AssertionError):
        size.check()


def test_matches_are_what_each_tree_would_say(clock: FakeClock) -> None:
    """Random traffic on several instances, each judged by its own tree."""
    rng = random.Random(7)
    index = Index(clock, block_size=BLOCK)
    reporter = [Reporter(index, str(number), rng.choice(list(Role))) for number in range(5)]
    seen = [key(*(rng.randrange(3) for _ in range(rng.randrange(1, 9)))) for _ in range(60)]
    for _ in range(1500):
        instance = rng.choice(reporter)
        if rng.random() < 0.6:
            instance.insert(rng.choice(seen), dram=rng.random() < 0.3)
        else:
            instance.evict(rng.randrange(1, 6), dram=rng.random() < 0.5)
        prompt = rng.choice(seen)
        found = index.match(NS, prompt)
        for each in reporter:
            held = each.tree.holders((None, None), prompt)
            hbm, dram = held.get(each.hbm, 0), held.get(each.dram, 0)
            match = found.get(each.name, Match(0))
            assert (match.hbm, match.below.get(Tier.DRAM, 0)) == (hbm, max(0, dram - hbm))
    index.check()


FACTS = InstanceFacts(ModelFacts("m", "a", 32_000, 4096), "1", "x", "colocated", "")


def watched_fleet(clock: FakeClock, take_changed: Callable[[Index], Callable[[], set[str]]]) -> None:
    """A fleet over an index to which everything happens that can, checked after each step."""
    rng = random.Random(5)
    index = Index(clock, block_size=BLOCK, ttl_s=20.0, max_bytes=40_000, wait_s=1.0)
    fleet = Fleet(view=index.holdings_of, changed=take_changed(index))
    reporter: dict[str, Reporter] = {}
    names = ["a", "b", "c", "d"]
    for name in names:
        fleet.join(name)
        fleet.learnt(name, FACTS)
    prompts = [key(*(rng.randrange(3) for _ in range(6))) for _ in range(30)]
    loads: list[Load] = []
    for _ in range(600):
        name, prompt = rng.choice(names), rng.choice(prompts)
        match rng.randrange(12):
            case 0:
                index.confirm(NS, prompt, name)
            case 1:
                index.guess(NS, prompt, name)
            case 2:
                index.forget(name)
            case 3 if index.replica(name) is None:
                reporter[name] = Reporter(index, name)
            case 4 | 5 if (replica := index.replica(name)) is not None and replica.trusted:
                reporter[name].insert(prompt, dram=rng.random() < 0.3)
            case 6:
                index.on_heartbeat(name, alive=rng.random() < 0.7)
            case 7 if rng.random() < 0.3:
                index.lost_touch(name)
            case 8 if rng.random() < 0.3:
                index.detach(name)
            case 9:
                index.expect(name)
            case 10:
                clock.advance(rng.choice((0.1, 1.0, 5.0)))
                index.tidy()
            case _ if loads and rng.random() < 0.5:
                fleet.end(loads.pop())
            case _:
                loads.append(fleet.begin(name, 3))
        fleet.check()
        index.check()


def test_policies_see_what_the_index_tells_whatever_happens(clock: FakeClock) -> None:
    watched_fleet(clock, lambda index: index.take_changed)


def test_a_change_that_is_not_said_is_found(clock: FakeClock) -> None:
    def forgetful(index: Index) -> Callable[[], set[str]]:
        return lambda: index.take_changed() - {"c"}

    with pytest.raises(InternalError, match="policies see"):
        watched_fleet(clock, forgetful)

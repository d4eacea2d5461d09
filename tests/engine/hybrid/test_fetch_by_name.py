"""Windows and states from a peer's DRAM: two ranks of two instances in one process."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from engine_movers import until
from exchange_rig import EPOCH, Exchange
from hybrid_rig import COMPONENTS, PAGE, STATE, WINDOW, Rig, Tokens, names_of, pages

from sglang_ext.disagg.transfer.peer import Peer
from sglang_ext.engine.hybrid.components import FULL, Component
from sglang_ext.engine.hybrid.fetches import KEPT_SECONDS
from sglang_ext.engine.peers.fetch_link import FetchLink
from sglang_ext.engine.peers.fetch_results import FetchEnd, FetchResult
from sglang_ext.engine.ranks import Least
from sglang_ext.engine.weights import Weights
from sglang_ext.keys import decode_tokens, encode_tokens
from sglang_ext.protocol.agent import Advise, FetchSpan, PeerDead, Source
from sglang_ext.testing.fakes import FakeClock
from sglang_ext.testing.tiers import MemoryTier

pytestmark = pytest.mark.slow

MUCH = dict.fromkeys(COMPONENTS, 64)
PROMPT = pages(1, 7)


def names(namespace: Any, key: bytes) -> list[bytes]:
    found = names_of(tuple(decode_tokens(key).tolist()))
    tenant = b"" if namespace[1:] == (None, None) else repr(namespace[1:]).encode()
    return [hashlib.blake2b(name + tenant, digest_size=16).digest() for name in found] if tenant else found


class Server(Exchange):
    """One rank of an instance that exchanges blocks."""

    def __init__(
        self,
        number: int,
        *,
        blocks: dict[Component, int] = MUCH,
        least: Least | None = None,
        disks: bool = False,
        **more: Any,
    ) -> None:
        tiers = (lambda pool: MemoryTier(pool.layout, 1000)) if disks else None
        self.rig = Rig(blocks, tiers, least=least)
        self.store = self.rig.store
        self.weights = Weights("start", lambda: "other")
        self.clock = FakeClock()
        super().__init__(self.store, self.weights, names, self.clock, number=number, **more)
        self._closed = False

    def one_pass(self) -> None:
        self.rig.ranks.each_pass()
        self.peers.each_pass()
        self.store.check()

    def passes_until(self, condition: Callable[[], bool], what: str) -> None:
        def once() -> bool:
            self.one_pass()
            return condition()

        until(once, what)

    def export(self, tokens: Sequence[int] = PROMPT, seconds: float = 10.0, **tenant: str) -> None:
        super().export(tokens, seconds, **tenant)
        self.one_pass()

    def fetch_from(self, *owners: Server, tokens: Tokens = PROMPT, **tenant: str) -> None:
        self.fetch([(owner.address,) for owner in owners], tokens, **tenant)

    def fetched(self) -> FetchResult:
        self.passes_until(lambda: bool(self.results), "the end of the fetch")
        return self.results.pop()

    def forget(self) -> None:
        """As the cache does when its weights change, or it is flushed."""
        self.peers.drop_in_flight()
        self.store.forget()

    @property
    def used(self) -> int:
        """Blocks of DRAM with a name or a lock."""
        return sum(part.memory.arena.used_blocks for part in self.store.parts.values())

    @property
    def locks(self) -> int:
        return sum(int(part.memory._locks.sum()) for part in self.store.parts.values())

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            super().close()
            self.rig.close()


MakeServer = Callable[..., Server]


@pytest.fixture
def make() -> Iterator[MakeServer]:
    made: list[Server] = []

    def one(**more: Any) -> Server:
        made.append(Server(len(made), **more))
        return made[-1]

    yield one
    for server in reversed(made):  # readers first: they wait for a server that ends
        server.close()


def served(make: MakeServer, **more: Any) -> tuple[Server, Server]:
    """An owner that has a prompt of 7 pages, with states after 3 and 7 of them, and a reader."""
    owner, reader = make(), make(**more)
    owner.rig.compute(PROMPT[: 3 * PAGE])
    owner.rig.compute(PROMPT)
    return owner, reader


# -- blocks that come -------------------------------------------------------------------------------------


@pytest.mark.parametrize("damaged", [None, *COMPONENTS], ids=repr)
def test_every_row_comes(make: MakeServer, damaged: Component | None) -> None:
    owner, reader = served(make)
    if damaged is not None:  # the twin
        memory = owner.store.parts[damaged].memory
        memory.arena.blocks[memory._blocks[names_of(PROMPT)[-1]], 5] ^= 1
    owner.export()
    reader.fetch_from(owner)
    result = reader.fetched()
    assert (result.how, result.tokens) == (FetchEnd.DONE, 7 * PAGE)
    # All KV, the window of two pages, and one state: not the window and the state before.
    assert [len(part.memory) for part in reader.store.parts.values()] == [7, 2, 1]
    assert reader.rig.points(pages(1, 9)) == [7]
    wrong = {each.split()[0] for each in reader.rig.load(pages(1, 9), 7)}
    assert wrong == (set() if damaged is None else {damaged.name})
    owner.passes_until(lambda: not owner.peers.busy, "the leases to end")
    assert owner.locks == 0
    owner.transfers.endpoint.check()


def test_a_block_that_is_there_is_not_read(make: MakeServer) -> None:
    owner, reader = served(make)
    reader.rig.compute(PROMPT[: 6 * PAGE])
    owner.export()
    reader.fetch_from(owner)
    result = reader.fetched()
    assert (result.how, result.tokens) == (FetchEnd.DONE, PAGE)
    assert reader.fetches.counters.fetched_blocks == 3  # of each component one
    assert reader.rig.load(PROMPT, 7) == []


def test_blocks_of_both_make_a_resume_point(make: MakeServer) -> None:
    """The owner has lost the KV behind the third page, and the reader every state."""
    owner, reader = served(make)
    reader.rig.compute(PROMPT)
    reader.store.parts[STATE].memory.clear()
    full = owner.store.parts[FULL].memory
    full._forget(names_of(PROMPT)[3:])
    owner.export()
    reader.fetch_from(owner)
    # States beyond the owner's own KV are not exported.
    assert reader.fetched().tokens == 3 * PAGE
    assert reader.rig.points(PROMPT) == [3]
    assert reader.rig.load(PROMPT, 3) == []


@pytest.mark.parametrize("lost", [WINDOW, STATE], ids=repr)
def test_the_next_shorter_resume_point_is_taken(make: MakeServer, lost: Component) -> None:
    owner, reader = served(make)
    owner.store.parts[lost].memory._forget(names_of(PROMPT)[-1:])
    owner.export()
    reader.fetch_from(owner)
    assert reader.fetched().tokens == 3 * PAGE
    assert reader.rig.points(PROMPT) == [3]
    assert reader.rig.load(PROMPT, 3) == []


def test_nothing_comes_of_kv_without_a_state(make: MakeServer) -> None:
    owner, reader = served(make)
    owner.store.parts[STATE].memory.clear()
    owner.export()
    reader.fetch_from(owner)
    assert reader.fetched().how is FetchEnd.NEEDLESS
    assert reader.used == 0


def test_the_next_peer_brings_what_the_first_lacks(make: MakeServer) -> None:
    first, reader = served(make)
    second = make()
    second.rig.compute(pages(1, 9))
    for owner in (first, second):
        owner.export(pages(1, 9))
    reader.fetch_from(first, second, tokens=pages(1, 9))
    result = reader.fetched()
    assert [(span.how, span.tokens) for span in result.spans] == [
        (FetchEnd.DONE, 7 * PAGE),
        (FetchEnd.DONE, 2 * PAGE),
    ]
    assert reader.rig.load(pages(1, 9), 9) == []


def test_a_hint_fetches_and_is_carried_out_then(make: MakeServer) -> None:
    owner, reader = served(make)
    owner.export()
    spans = (FetchSpan(Source((owner.address,), "export"), len(PROMPT)),)
    points: list[int] = []
    hint = Advise("hint", encode_tokens(list(PROMPT)), ttl_s=30.0, spans=spans)
    reader.peers.fetch_ahead(hint, lambda: points.extend(reader.rig.points(PROMPT)))
    assert (reader.fetched().ahead, points) == (True, [7])


def test_another_tenant_gets_nothing(make: MakeServer) -> None:
    owner, reader = served(make)
    owner.export(cache_salt="other")
    reader.fetch_from(owner, cache_salt="other")
    assert reader.fetched().how is FetchEnd.NEEDLESS
    # The same words under two tenants: the names differ, so nothing is taken.
    owner.export()
    reader.fetch_from(owner, cache_salt="other")
    assert reader.fetched().how is FetchEnd.NEEDLESS
    assert reader.used == 0


def test_blocks_on_the_owners_disk_come_and_go_on_to_the_readers(make: MakeServer) -> None:
    owner, reader = make(disks=True), make(disks=True)
    owner.rig.compute(PROMPT)
    owner.store.settle()
    for part in owner.store.parts.values():
        part.memory.clear()
    owner.export()
    reader.fetch_from(owner)
    owner.passes_until(lambda: bool(owner.exports.exported_blocks), "the export")
    assert reader.fetched().tokens == 7 * PAGE
    reader.store.settle()
    for part in reader.store.parts.values():
        part.memory.clear()
    assert reader.rig.promote(PROMPT) == 7
    assert reader.rig.load(PROMPT, 7) == []


# -- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize("component", COMPONENTS, ids=repr)
def test_an_unequal_component_is_refused_by_name(
    make: MakeServer, component: Component, caplog: pytest.LogCaptureFixture
) -> None:
    owner, reader = served(make, facts={component: "float16"})
    owner.export()
    with caplog.at_level("INFO"):
        reader.fetch_from(owner)
        assert reader.fetched().how is FetchEnd.REFUSED
    assert f"the KV in 'dram {component}' is of 'same' there, 'float16' here" in caplog.text
    assert reader.used == 0


@pytest.mark.parametrize("side", ["owner", "reader"])
def test_other_weights_exchange_nothing(make: MakeServer, side: str) -> None:
    owner, reader = served(make)
    changed = {"owner": owner, "reader": reader}[side]
    changed.weights.begin()
    changed.weights.settle()
    owner.export()
    reader.fetch_from(owner)
    assert reader.fetched().how is (FetchEnd.NEEDLESS if side == "owner" else FetchEnd.REFUSED)
    assert reader.used == 0


@pytest.mark.parametrize("side", ["owner", "reader"])
def test_weights_that_change_in_mid_fetch_end_it(make: MakeServer, side: str) -> None:
    owner, reader = served(make)
    owner.export()
    reader.fetch_from(owner)
    reader.offered()
    changed = {"owner": owner, "reader": reader}[side]
    changed.weights.begin()
    changed.forget()
    assert reader.fetched().how is (FetchEnd.STALE if side == "owner" else FetchEnd.CANCELLED)
    assert reader.used == 0
    owner.passes_until(lambda: not owner.peers.busy, "the leases to end")
    assert owner.locks == 0


@pytest.mark.parametrize("event", ["weights", "end"])
def test_memory_that_is_written_is_not_released(
    make: MakeServer, event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event that ends a fetch in the middle of a read waits until nothing writes any more."""
    owner, reader = served(make)
    read, begun, used = FetchLink._read, threading.Event(), []

    async def slow(self: FetchLink, *args: Any) -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            used.append(reader.used)
            await read(self, *args)

    monkeypatch.setattr(FetchLink, "_read", slow)
    owner.export()
    reader.fetch_from(owner)
    reader.offered()
    reader.one_pass()
    assert begun.wait(10)
    {"weights": reader.forget, "end": reader.peers.close}[event]()
    assert used == [10]  # still reserved while something may write
    assert reader.used == 0
    assert reader.fetched().how is FetchEnd.CANCELLED


@pytest.mark.parametrize("component", COMPONENTS, ids=repr)
def test_a_component_without_room_takes_nothing_in_any(make: MakeServer, component: Component) -> None:
    owner, reader = served(make)
    memory = reader.store.parts[component].memory
    locked = memory.reserve(memory.arena.n_blocks)
    assert locked is not None
    owner.export()
    reader.fetch_from(owner)
    assert reader.fetched().how is FetchEnd.NO_ROOM
    assert reader.used == len(locked)
    assert reader.locks == len(locked)
    memory.unlock(locked)
    owner.passes_until(lambda: not owner.peers.busy, "the leases to end")


# -- changes meanwhile -------------------------------------------------------------------------


def reuse(owner: Server, component: Component) -> None:
    """The engine takes blocks back that a peer has been offered, and writes another prompt there."""
    (export,) = owner.exports._exports
    (lease,) = (each for each in export if each.part.component == component)
    owner.exports._leases[component].withdraw(lease.number)
    other = make_other(component, lease.part.memory.arena.blocks[lease.ids])
    lease.part.memory.arena.blocks[lease.ids] = other


def make_other(component: Component, blocks: np.ndarray) -> np.ndarray:
    """Blocks of another prompt."""
    return np.random.default_rng(1).integers(0, 256, blocks.shape, np.uint8)


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "the twin without the check"])
@pytest.mark.parametrize("component", COMPONENTS, ids=repr)
def test_a_block_that_was_reused_is_not_entered(
    make: MakeServer, component: Component, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reader = served(make)
    owner.export()
    reader.fetch_from(owner)
    reader.offered()
    reuse(owner, component)
    if not checked:
        transfer = Peer.transfer

        def unverified(self: Peer, request: str, runs: Any, *, expect: Any = None, **more: Any) -> None:
            transfer(self, request, runs, **more)

        monkeypatch.setattr(Peer, "transfer", unverified)
    result = reader.fetched()
    if checked:
        assert result.how is FetchEnd.STALE
        assert reader.used == 0
    else:
        wrong = {each.split()[0] for each in reader.rig.load(PROMPT, 7)}
        assert wrong == {component.name}


def test_an_owner_that_dies_is_a_miss(make: MakeServer) -> None:
    owner, reader = served(make)
    owner.export()
    reader.fetch_from(owner)
    reader.offered()
    owner.close()
    assert reader.fetched().how is FetchEnd.GONE
    assert reader.used == 0


def test_a_reader_that_dies_frees_what_was_exported(make: MakeServer) -> None:
    owner, reader = served(make)
    owner.export(seconds=60.0)
    reader.fetch_from(owner)
    reader.offered()
    assert owner.locks
    reader.close()
    owner.passes_until(lambda: not owner.peers.busy, "the leases to end")
    assert owner.locks == 0


def test_a_reader_that_is_called_dead_and_silent_frees_what_was_exported(make: MakeServer) -> None:
    owner, reader = served(make)
    owner.export(seconds=60.0)
    reader.fetch_from(owner)
    reader.offered()
    with silent(reader):
        owner.peers.takes_command(PeerDead("server 1", EPOCH), 0.0)
        owner.passes_until(lambda: not owner.peers.busy, "the leases to end")
    assert owner.locks == 0


@contextmanager
def silent(server: Server) -> Iterator[None]:
    """Its transfer thread sends nothing while the block runs, as if the process had died."""
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go_on.wait(30)

    server.transfers.loop.call_soon_threadsafe(hold)
    try:
        assert held.wait(10)
        yield
    finally:
        go_on.set()


# -- the request that waits -------------------------------------------------------------------------


def test_a_request_waits_for_its_fetch_and_no_longer(make: MakeServer) -> None:
    owner, reader = served(make)
    key = encode_tokens(list(pages(1, 9)))
    reader.fetch_from(owner, tokens=PROMPT)  # the owner exports nothing
    assert reader.peers.waits((0, None, None), key)
    assert not reader.peers.waits((0, None, "other"), key)
    assert not reader.peers.waits((0, None, None), encode_tokens(list(pages(2, 9))))
    reader.clock.advance(30.1)
    reader.one_pass()
    assert not reader.peers.waits((0, None, None), key)
    assert reader.fetches.counters.not_waited == 1


@pytest.mark.parametrize("how", ["admitted", "late"])
def test_what_came_stays_until_the_request_is_admitted(make: MakeServer, how: str) -> None:
    owner, reader = served(make)
    owner.export()
    reader.fetch_from(owner)
    reader.fetched()
    for part in reader.store.parts.values():
        arena = part.memory.arena
        assert part.memory.reserve(arena.n_blocks - len(part.memory) + 1) is None
    if how == "admitted":
        reader.fetches.admitted((0, None, None), encode_tokens(list(pages(1, 9))))
    else:
        reader.clock.advance(KEPT_SECONDS + 0.1)
        reader.one_pass()
    assert reader.locks == 0
    assert reader.rig.points(PROMPT) == [7]


# -- several ranks ----------------------------------------------------------------------------------


class Together:
    """The smallest numbers of two ranks, each in a thread of its own."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=20)
        self._said: dict[int, Sequence[int]] = {}

    def of(self, rank: int) -> Least:
        def least(numbers: Sequence[int]) -> Sequence[int]:
            self._said[rank] = numbers
            self._barrier.wait()
            agreed = [min(pair) for pair in zip(*self._said.values(), strict=True)]
            self._barrier.wait()
            return agreed

        return least


@pytest.mark.parametrize(
    ("unlike", "whole"),
    [("owners", 3), ("readers", 7), ("rooms", 0), ("peers", 3)],
    ids=["an owner lacks a state", "a reader has all", "a reader has no room", "an owner refuses"],
)
def test_ranks_whose_blocks_differ_stay_in_step(make: MakeServer, unlike: str, whole: int) -> None:
    """They take a resume point that both have, or none."""
    together = Together()
    other = {STATE: "other"} if unlike == "peers" else None
    owners = [make(rank=(0, 2)), make(rank=(1, 2), facts=other)]
    readers = [make(rank=(rank, 2), least=together.of(rank)) for rank in range(2)]
    for owner in owners:
        owner.rig.compute(PROMPT[: 3 * PAGE])
        owner.rig.compute(PROMPT)
    memory = readers[1].store.parts[STATE].memory
    if unlike == "owners":
        owners[1].store.parts[STATE].memory._forget(names_of(PROMPT)[-1:])
    elif unlike == "rooms":
        locked = memory.reserve(memory.arena.n_blocks)
    passes: list[int] = []

    def run(reader: Server) -> None:
        if unlike == "readers":
            reader.rig.compute(PROMPT if reader is readers[1] else pages(2, 7))
        if unlike == "peers":
            reader.rig.compute(PROMPT[: 3 * PAGE] if reader is readers[1] else pages(2, 3))
        reader.fetch([tuple(owner.address for owner in owners)], PROMPT)
        while not reader.results:
            reader.one_pass()
        passes.append(reader.rig.ranks.passes)

    for owner in owners:
        owner.export()
    threads = [threading.Thread(target=run, args=(reader,)) for reader in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(passes) == 2
    assert len(set(passes)) == 1
    for reader in readers:
        reader.rig.ranks._least = None
        assert (reader.results[0].how is FetchEnd.DONE) == bool(whole)
        assert reader.rig.points(PROMPT)[-1:] == ([whole] if whole else [])
        if whole:
            assert reader.rig.load(PROMPT, whole) == []
    if unlike == "rooms":
        memory.unlock(locked)
        assert [reader.locks for reader in readers] == [0, 0]

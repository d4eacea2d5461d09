"""Pools in GPU memory through pinned memory: the conformance of `shm` and `tcp` so, slots that become
another's, writers that go away, and the order in which transports are taken. The GPU is the host's memory
here; on the emulated GPU the suite runs by ``test_cuda_ipc.py``.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from sglang_ext.disagg.errors import (
    CancelledTransferError,
    PeerGoneError,
    PeerProtocolError,
    StaleReadError,
    TransportUnavailableError,
)
from sglang_ext.disagg.memory import MemoryKind, RegionTable
from sglang_ext.disagg.messages import Reserve, Reserved
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.engine import Endpoint
from sglang_ext.disagg.transfer.instance import Instance
from sglang_ext.disagg.transfer.link import Outcome
from sglang_ext.disagg.transports import CancelToken, TransportName
from sglang_ext.disagg.transports._gathering import GATHER, SLOTS, PinnedArena
from sglang_ext.disagg.transports.local import GuardedServed
from sglang_ext.disagg.transports.pinned import StagedChannel, StagedTransport
from sglang_ext.disagg.transports.select import make_transports
from sglang_ext.testing.transfer.host_device import HostDevice
from sglang_ext.testing.transfer.rig import NAMESPACE, Pool, Rank, Shape
from sglang_ext.testing.transfer.transports import SECONDS, TransportConformance
from sglang_ext.testing.waiting import until
from sglang_ext.wire import pack_ids

pytestmark = pytest.mark.slow

SMALL = 1 << 20
"""Slots of 64 KiB: a request takes several."""


def staged(endpoint: Endpoint) -> StagedTransport:
    found = next(t for t in endpoint.transports.values() if isinstance(t, StagedTransport))
    assert isinstance(found, StagedTransport)
    return found


def arena_of(rank: Rank) -> PinnedArena:
    return staged(rank.endpoint)._arena


class Staged(TransportConformance):
    memory = MemoryKind.CUDA

    def config(self, name: str, **changes: Any) -> EndpointConfig:
        return super().config(name, **{"device": HostDevice(), "staging_bytes": SMALL, **changes})

    @asynccontextmanager
    async def pair(
        self, *args: Any, **changes: Any
    ) -> AsyncIterator[tuple[list[Rank], list[Rank], list[Instance]]]:
        async with super().pair(*args, **changes) as (owners, readers, links):
            yield owners, readers, links
            for instance in links:
                await instance.close()
            for rank in owners + readers:
                await until(lambda rank=rank: arena_of(rank).idle)  # type: ignore[misc]
            devices = [rank.endpoint.config.device for rank in owners + readers]
            used = {name for each in devices if isinstance(each, HostDevice) for name, _ in each.calls}
            assert used <= {"gather", "scatter"}


class TestStagedShm(Staged):
    transport = TransportName.SHM


class TestStagedTcp(Staged):
    transport = TransportName.TCP


@pytest.mark.long
class TestStagedShmLong(TestStagedShm):
    seeds = 30
    rewrites = 1000


@pytest.mark.long
class TestStagedTcpLong(TestStagedTcp):
    seeds = 30
    rewrites = 1000


SHAPE = Shape(layers=2, heads=4, width=64, blocks=16, block_tokens=4, dtype="float32")
EVERY = np.arange(SHAPE.blocks)


@asynccontextmanager
async def two(
    transport: TransportName = TransportName.SHM, **changes: Any
) -> AsyncIterator[tuple[Rank, Rank, Instance]]:
    suite = Staged()
    suite.transport = transport  # type: ignore[misc]
    # A heart that beats seldom: the test is over before the next beat.
    values = {"lanes": 1, "heartbeat": 30.0, "dead_after": 120.0, **changes}
    async with TransportConformance.pair(suite, SHAPE, **values) as (owners, readers, links):
        owners[0].pool.fill(3)
        owners[0].owned.seal(EVERY)
        yield owners[0], readers[0], links[0]


async def read(owner: Rank, instance: Instance, name: str) -> Outcome:
    offer = owner.endpoint.publish("hbm", name, EVERY)
    instance.transfer(name, [offer], "hbm", EVERY)
    return await instance.complete(name, SECONDS)


def channel_of(instance: Instance) -> StagedChannel:
    channel = instance.links[0].peer.channel
    assert isinstance(channel, StagedChannel)
    return channel


# -- slots that become another's --------------------------------------------------------------------


@pytest.mark.parametrize("blind", [False, True], ids=["", "twin"])
async def test_a_slot_that_has_become_anothers_is_noticed(
    blind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader stands still between the owner's reply and its copy. Its session ends, and the slot gets the
    bytes of another request; the blocks that were asked for are as they were.

    Twin: without the slot's generation, other bytes are taken for them.
    """
    async with two() as (owner, reader, instance):
        carrier = channel_of(instance)._carrier
        reached, go, stock = threading.Event(), threading.Event(), carrier.read_then

        def late(*args: Any) -> None:
            reached.set()
            assert go.wait(SECONDS)
            stock(*args)

        monkeypatch.setattr(carrier, "read_then", late)
        if blind:
            word = PinnedArena.word
            arena, at = arena_of(reader), 0
            monkeypatch.setattr(
                PinnedArena,
                "word",
                lambda self, where: word(arena_of(owner), at + self.slot_bytes) if self is arena else 0,
            )
        offer = owner.endpoint.publish("hbm", "r", EVERY[:4])
        instance.transfer("r", [offer], "hbm", EVERY[:4])
        reading = asyncio.ensure_future(instance.complete("r", SECONDS))
        await until(reached.is_set)
        (session,) = owner.endpoint.owner.sessions
        await owner.endpoint.owner.end(session)
        mine = arena_of(owner)
        taken = mine.take(lambda: False, serving=True)
        assert taken is not None
        np.ctypeslib.as_array((ctypes.c_uint8 * 4096).from_address(mine.address(taken)))[:] = 7
        go.set()
        if blind:
            await reading
            assert not np.array_equal(reader.pool.view(0, "k")[:4], owner.pool.view(0, "k")[:4])
        else:
            # On a busy machine, the reader may notice the end of its session first.
            with pytest.raises(PeerGoneError, match=r"given the pinned memory to another|session is over"):
                await reading
        mine.give(taken)


async def test_a_damaged_byte_of_a_slot_is_seen() -> None:
    async with two() as (owner, reader, instance):
        await read(owner, instance, "r0")
        assert np.array_equal(reader.pool.bytes, owner.pool.bytes)
        carrier = channel_of(instance)._carrier
        stock = carrier.read_then

        def damaged(*args: Any) -> None:
            stock(*args)
            arena = arena_of(reader)
            np.ctypeslib.as_array((ctypes.c_uint8 * 9).from_address(arena.address(0)))[5] ^= 1

        carrier.read_then = damaged  # type: ignore[method-assign, assignment]
        arena_of(reader)._free[False] = [0]  # this one is taken
        await read(owner, instance, "r1")
        assert not np.array_equal(reader.pool.bytes, owner.pool.bytes)
        arena_of(reader)._free[False] = list(range(SLOTS))


async def test_rewritten_blocks_are_stale_whatever_is_in_the_slot() -> None:
    async with two(TransportName.TCP) as (owner, _, instance):
        offer = owner.endpoint.publish("hbm", "r", EVERY)
        owner.endpoint.withdraw("hbm", offer.lease)
        owner.owned.open(EVERY[:1])
        owner.owned.seal(EVERY[:1])
        instance.transfer("r", [offer], "hbm", EVERY)
        with pytest.raises(StaleReadError):
            await instance.complete("r", SECONDS)
        await until(lambda: arena_of(owner).idle)


# -- memory that is short ---------------------------------------------------------------------------


async def test_a_read_waits_for_a_slot_and_can_be_cancelled() -> None:
    async with two() as (owner, reader, instance):
        arena = arena_of(reader)
        held = [arena.take(lambda: False) for _ in range(SLOTS)]
        offer = owner.endpoint.publish("hbm", "r", EVERY)
        instance.transfer("r", [offer], "hbm", EVERY)
        task = asyncio.ensure_future(instance.complete("r", SECONDS))
        await asyncio.sleep(0.2)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        waiting = asyncio.ensure_future(read(owner, instance, "r1"))
        await asyncio.sleep(0.1)
        for at in held:
            assert at is not None
            arena.give(at)
        assert await waiting is Outcome.RELEASED
        assert np.array_equal(reader.pool.bytes, owner.pool.bytes)


async def test_an_owner_without_a_free_slot_lets_readers_wait() -> None:
    async with two(TransportName.TCP) as (owner, reader, instance):
        arena = arena_of(owner)
        held = [arena.take(lambda: False, serving=True) for _ in range(SLOTS)]
        waiting = asyncio.ensure_future(read(owner, instance, "r"))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        for at in held:
            assert at is not None
            arena.give(at)
        await waiting
        assert np.array_equal(reader.pool.bytes, owner.pool.bytes)


async def test_a_gpu_that_fails_ends_the_request_and_frees_its_slots() -> None:
    async with two() as (owner, reader, instance):
        device = owner.endpoint.config.device
        assert isinstance(device, HostDevice)

        def fails(call: str) -> None:
            raise RuntimeError("an illegal memory access")

        device.before = fails
        with pytest.raises(PeerGoneError, match="its GPU does not copy"):
            await read(owner, instance, "r0")
        device.before = lambda call: None
        await read(owner, instance, "r1")
        assert np.array_equal(reader.pool.bytes, owner.pool.bytes)
        await until(lambda: arena_of(owner).idle)
        await until(lambda: arena_of(reader).idle)


# -- writers ----------------------------------------------------------------------------------------


async def granted(receiver: Rank, instance: Instance, blocks: list[int]) -> tuple[int, int]:
    receiver.owned.open(np.array(blocks))
    receiver.receiver.aside = set(blocks)
    link = instance.links[0]
    held = await link.ask(Reserve(link.session, "r", "hbm", pack_ids(np.array(blocks))), SECONDS)
    assert isinstance(held, Reserved)
    return held.slot, held.grant


async def test_the_slot_of_a_writer_that_may_still_write_is_set_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its process runs, and its carrier is in a call, for all that is known."""
    still = threading.Event()
    monkeypatch.setattr(GuardedServed, "fence", lambda self: still.is_set())
    async with two() as (receiver, _, instance):
        await granted(receiver, instance, [4, 5])
        asks = channel_of(instance)._asks
        assert asks is not None
        at = await asyncio.to_thread(asks.take, 0, CancelToken())
        (session,) = receiver.endpoint.owner.sessions
        await receiver.endpoint.owner.end(session)
        arena = arena_of(receiver)
        others = [arena.take(lambda: False, serving=True) for _ in range(SLOTS - 1)]
        assert at not in others
        tries = iter(range(3))
        assert arena.take(lambda: next(tries, None) is None, serving=True) is None
        still.set()
        assert arena.take(lambda: False, serving=True) == at


async def test_nothing_is_scattered_without_a_grant() -> None:
    async with two() as (receiver, _, instance):
        slot, number = await granted(receiver, instance, [4, 5])
        asks, before = channel_of(instance)._asks, receiver.pool.bytes.copy()
        assert asks is not None
        run = np.array([(1, 0, 1, 0, 64)], np.int64)
        for grant in ((0, number), (slot, number + 1), (slot + 1, number), (slot, 0)):
            await asyncio.to_thread(asks.take, 0, CancelToken())
            with pytest.raises(PeerGoneError, match="the grant is over"):
                await asyncio.to_thread(asks.scatter, 0, run, CancelToken(), grant)
        await asyncio.to_thread(asks.gather, 0, run, CancelToken())
        with pytest.raises(PeerGoneError, match="the grant is over"):  # not a slot that it wrote
            await asyncio.to_thread(asks.scatter, 0, run, CancelToken(), (slot, number))
        assert np.array_equal(receiver.pool.bytes, before)
        await receiver.endpoint.owner.revoke("r")
        await until(lambda: receiver.owned.granted == 0)


async def test_a_fenced_writer_has_nothing_under_way() -> None:
    """A scatter that has begun is over when `fence` returns."""
    async with two() as (receiver, sender, instance):
        grant = await granted(receiver, instance, [4, 5])
        device = receiver.endpoint.config.device
        assert isinstance(device, HostDevice)
        begun, go = threading.Event(), threading.Event()

        def slow(call: str) -> None:
            begun.set()
            go.wait(SECONDS)

        device.before = slow
        sender.pool.fill(9)
        run = np.array([(1, 0, 1, 0, 64)], np.int64)
        writing = asyncio.ensure_future(
            asyncio.to_thread(channel_of(instance).write, 0, run, CancelToken(), grant)
        )
        await until(begun.is_set)
        (session,) = receiver.endpoint.owner.sessions
        (served,) = session.served.values()
        fencing = asyncio.ensure_future(asyncio.to_thread(served.fence))
        await asyncio.sleep(0.2)
        assert not fencing.done()
        go.set()
        await fencing
        after = receiver.pool.bytes.copy()
        with pytest.raises(PeerGoneError):
            await writing
        assert np.array_equal(receiver.pool.bytes, after)
        await receiver.endpoint.owner.revoke("r")
        await until(lambda: receiver.owned.granted == 0)


# -- asks of peers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row", [(1, -8, 1, 0, 64), (0, 0, 1, 0, 64), (2, 0, 1, 0, 64), (9, 0, 1, 0, 64), (-1, 0, 1, 0, 8)]
)
async def test_ranges_outside_of_gpu_memory_are_not_gathered(row: tuple[int, ...]) -> None:
    async with two() as (owner, _, instance):
        asks = channel_of(instance)._asks
        assert asks is not None
        with pytest.raises(PeerProtocolError, match="status 1"):
            await asyncio.to_thread(asks.gather, 0, np.array([row], np.int64), CancelToken())
        too_much = np.array([(1, 0, 1, 0, 4096)] * 17, np.int64)
        with pytest.raises(PeerProtocolError, match="status 1"):
            await asyncio.to_thread(asks.gather, 0, too_much, CancelToken())
        await read(owner, instance, "r")  # by a new connection
        await until(lambda: arena_of(owner).idle)


async def test_garbage_ends_a_connection_and_no_more() -> None:
    async with two() as (owner, _, instance):
        asks = channel_of(instance)._asks
        assert asks is not None
        sock = asks._connections.made(0)
        assert isinstance(sock, socket.socket)
        sock.sendall(b"\xff" * 32)
        with pytest.raises(PeerGoneError):
            await asyncio.to_thread(asks._ask, 0, GATHER, None, CancelToken())
        await read(owner, instance, "r")


async def test_a_cancelled_token_ends_a_gather() -> None:
    async with two() as (owner, _, instance):
        device, asks = owner.endpoint.config.device, channel_of(instance)._asks
        assert isinstance(device, HostDevice)
        assert asks is not None
        go, token = threading.Event(), CancelToken()

        def held(call: str) -> None:
            go.wait(SECONDS)

        device.before = held
        run = np.array([(1, 0, 1, 0, 64)], np.int64)
        asking = asyncio.ensure_future(asyncio.to_thread(asks.gather, 0, run, token))
        await asyncio.sleep(0.1)
        token.cancel()
        with pytest.raises(CancelledTransferError):
            await asking
        go.set()
        await until(lambda: arena_of(owner).idle)


# -- which transport is taken -----------------------------------------------------------------------


def in_gpu() -> RegionTable:
    regions = RegionTable()
    regions.add(1 << 30, 1 << 16, kind=MemoryKind.CUDA)
    return regions


def test_ways_without_staging_come_first() -> None:
    config = EndpointConfig("x", NAMESPACE, device=HostDevice(), staging_bytes=SMALL)
    made = make_transports(config, in_gpu())
    try:
        assert [name for name, each in made.items() if isinstance(each, StagedTransport)] == [
            TransportName.SHM,
            TransportName.VERBS,
            TransportName.TCP,
        ]
        assert list(made)[:2] == [TransportName.CMA, TransportName.CUDA_IPC]
        assert made[TransportName.TCP].unavailable() is None
        assert "cuda memory" in str(made[TransportName.CMA].unavailable())
    finally:
        for each in made.values():
            each.close()


@pytest.mark.parametrize(
    "changes", [{"staging_bytes": 0}, {"device": None}, {"device": HostDevice(pins=False)}]
)
async def test_without_pinned_memory_nothing_is_left(changes: dict[str, Any]) -> None:
    names = (TransportName.SHM, TransportName.TCP)
    values: dict[str, Any] = {"device": HostDevice(), "staging_bytes": SMALL, **changes}
    config = EndpointConfig("x", NAMESPACE, transports=names, **values)
    pool = Pool("hbm", SHAPE, shared=True, kind=MemoryKind.CUDA)
    with pytest.raises(TransportUnavailableError, match="no transport can carry"):
        await Endpoint.start(config, [pool.spec])
    pool.close()


async def test_memory_is_unpinned_at_the_end() -> None:
    async with two() as (owner, _, _instance):
        device = owner.endpoint.config.device
        assert isinstance(device, HostDevice)
        assert len(device.pinned) == 1
    assert not device.pinned


async def test_pools_in_host_memory_of_such_a_server_are_read_by_one_without_a_gpu() -> None:
    """And the other way round: ranges in host memory on both sides need no staging."""
    hbm, dram = Pool("hbm", SHAPE, shared=True, kind=MemoryKind.CUDA), Pool("dram", SHAPE, shared=True)
    plain = Pool("dram", SHAPE, shared=True)
    config = EndpointConfig("gpu", NAMESPACE, device=HostDevice(), staging_bytes=SMALL)
    gpu = await Endpoint.start(config, [hbm.spec, dram.spec])
    host = await Endpoint.start(dataclasses.replace(config, instance="host", device=None), [plain.spec])
    try:
        for owner, reader, source, target in ((gpu, host, dram, plain), (host, gpu, plain, dram)):
            source.fill(5 if owner is gpu else 6)
            owner.pools["dram"].seal(EVERY)
            offer = owner.publish("dram", "r", EVERY)
            instance = await reader.connect([owner.address])
            assert instance.links[0].peer.channel.name is TransportName.TCP
            instance.transfer("r", [offer], "dram", EVERY)
            assert await instance.complete("r", SECONDS) is Outcome.RELEASED
            assert np.array_equal(source.bytes, target.bytes)
            device = config.device
            assert isinstance(device, HostDevice)
            assert not device.calls
            owner.pools["dram"].open(EVERY)
    finally:
        await host.close()
        await gpu.close()
        for pool in (hbm, dram, plain):
            pool.close()


async def test_a_gpus_pool_is_read_into_dram_and_dram_into_it() -> None:
    """As KV returns to prefill's DRAM: `plan` and a batch of its own for each pair of pools."""
    pools = [[Pool(n, SHAPE, shared=True, kind=k) for n, k in PAIRS] for _ in range(2)]
    ends = [
        await Endpoint.start(
            EndpointConfig(f"e{i}", NAMESPACE, device=HostDevice(), staging_bytes=SMALL),
            [pool.spec for pool in mine],
        )
        for i, mine in enumerate(pools)
    ]
    try:
        instance = await ends[1].connect([ends[0].address])
        assert instance.links[0].peer.channel.name is TransportName.SHM
        for at, (there, here) in enumerate((("hbm", "dram"), ("dram", "hbm"))):
            source = next(p for p in pools[0] if p.spec.name == there)
            target = next(p for p in pools[1] if p.spec.name == here)
            source.fill(20 + at)
            ends[0].pools[there].seal(EVERY)
            offer = ends[0].publish(there, f"r{at}", EVERY)
            instance.plan(there, here)
            instance.transfer(f"r{at}", [offer], here, EVERY)
            await instance.complete(f"r{at}", SECONDS)
            assert np.array_equal(source.bytes, target.bytes)
            target.bytes[3] ^= 1
            assert not np.array_equal(source.bytes, target.bytes)
    finally:
        for end in reversed(ends):
            await end.close()
        for pool in (pool for mine in pools for pool in mine):
            pool.close()


PAIRS = (("hbm", MemoryKind.CUDA), ("dram", MemoryKind.HOST))

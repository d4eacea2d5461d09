"""Conformance suite of transports. Derive from it, name the transport, and pytest runs every test over it:

    class TestShm(TransportConformance):
        transport = TransportName.SHM

Both ends live in one process, which every transport has to allow; tests with two processes are beside it.
Needs pytest with pytest-asyncio in its auto mode.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from sglang_ext.disagg import reshard
from sglang_ext.disagg.errors import (
    CancelledTransferError,
    PeerGoneError,
    RangeError,
    RefusedError,
    StaleReadError,
    TransferError,
)
from sglang_ext.disagg.memory import MemoryKind
from sglang_ext.disagg.messages import Reserve, Reserved, Written
from sglang_ext.disagg.runs import Runs
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.instance import Instance
from sglang_ext.disagg.transfer.leases import LeaseEnd
from sglang_ext.disagg.transfer.link import Outcome
from sglang_ext.disagg.transfer.transactions import Direction
from sglang_ext.disagg.transports import CancelToken, TransportName
from sglang_ext.mempool.ledger import Call
from sglang_ext.mempool.remote import RemoteMemory
from sglang_ext.testing.transfer.rig import NAMESPACE, Rank, Shape, fill_alike, planes_of, start_instance
from sglang_ext.testing.waiting import until
from sglang_ext.wire import pack_ids

SECONDS = 20.0
"""Deadline, in seconds, of calls that are expected to succeed."""


class TransportConformance:
    """The requirements that every transport meets. See the contract in `sglang_ext.disagg.transports`."""

    transport: ClassVar[TransportName]
    memory: ClassVar[MemoryKind] = MemoryKind.HOST
    """Of the pools."""
    seeds: ClassVar[int] = 4
    """How many random cases each test takes; raise it in a long run."""
    rewrites: ClassVar[int] = 150
    """Blocks that the owner rewrites under the reader's eyes."""

    def config(self, name: str, **changes: Any) -> EndpointConfig:
        """The endpoints' configuration; override it for a transport that needs other values."""
        values: dict[str, Any] = {"lanes": 2, "piece_bytes": 1 << 16, "heartbeat": 1.0, "dead_after": 10.0}
        return EndpointConfig(name, NAMESPACE, transports=(self.transport,), **{**values, **changes})

    async def start(self, config: EndpointConfig, shape: Shape, **parts: Any) -> list[Rank]:
        """The ranks of an instance, with pools in memory that the transport reaches."""
        shared = self.transport is TransportName.SHM or self.memory is not MemoryKind.HOST
        return await start_instance(config, shape, shared=shared, kind=self.memory, **parts)

    @asynccontextmanager
    async def pair(
        self,
        shape: Shape,
        owner: tuple[int, int] = (1, 1),
        reader: tuple[int, int] = (1, 1),
        *,
        arena: tuple[bool, bool] = (False, False),
        **changes: Any,
    ) -> AsyncIterator[tuple[list[Rank], list[Rank], list[Instance]]]:
        """Owner ranks, reader ranks, and each reader's connection to all owners; checked and closed at the
        end.
        """
        owners = await self.start(
            self.config("owner", **changes), shape, tp=owner[0], pp=owner[1], arena=arena[0]
        )
        readers = await self.start(
            self.config("reader", **changes), shape, tp=reader[0], pp=reader[1], arena=arena[1]
        )
        try:
            links = [await r.endpoint.connect([o.endpoint.address for o in owners]) for r in readers]
            assert {x.peer.channel.name for i in links for x in i.links} == {self.transport}
            yield owners, readers, links
            for rank in owners + readers:
                rank.endpoint.check()
        finally:
            for rank in readers + owners:
                await rank.close()

    @staticmethod
    async def read(
        owners: list[Rank], links: list[Instance], request: str, there: list[int], here: list[int]
    ) -> list[Outcome]:
        """Publish at every owner rank, read at every reader rank, COMPLETE."""
        outcomes = []
        for index, instance in enumerate(links):
            name = f"{request}/{index}"
            offers = [o.endpoint.publish("hbm", name, np.array(there)) for o in owners]
            instance.transfer(name, offers, "hbm", np.array(here))
            outcomes.append(await instance.complete(name, SECONDS))
            for owner, offer in zip(owners, offers, strict=True):
                owner.endpoint.withdraw("hbm", offer.lease)  # of ranks that this reader did not need
        return outcomes

    async def test_scattered_blocks_arrive_byte_by_byte(self) -> None:
        for seed in range(self.seeds):
            shape, choose = Shape.random(seed), random.Random(seed)
            arena = (choose.random() < 0.5, choose.random() < 0.5)
            async with self.pair(shape, arena=arena) as (owners, readers, links):
                fill_alike(owners, shape, seed)
                fill_alike(readers, shape, seed + 1000)
                owners[0].owned.seal(np.arange(shape.blocks))
                n = choose.randint(1, shape.blocks)
                there = choose.sample(range(shape.blocks), n)
                here = choose.sample(range(shape.blocks), n)
                before = planes_of(readers, shape)
                assert await self.read(owners, links, "r", there, here) == [Outcome.RELEASED]
                source, after = planes_of(owners, shape), planes_of(readers, shape)
                others = sorted(set(range(shape.blocks)) - set(here))
                for key, plane in after.items():
                    assert np.array_equal(plane[here], source[key][there])
                    assert np.array_equal(plane[others], before[key][others])
                stats = links[0].links[0].peer.stats
                assert stats.bytes == n * readers[0].pool.geometry.block_bytes
                assert stats.transactions <= stats.runs

    async def test_unequal_parallelism(self) -> None:
        choose = random.Random(5)
        cases = [((1, 1), (2, 2)), ((4, 1), (1, 2)), ((2, 2), (4, 1)), ((8, 1), (2, 1)), ((1, 4), (8, 1))]
        for seed, (a, b) in enumerate(cases[: max(2, self.seeds)]):
            shape = Shape.random(seed + 50)
            async with self.pair(shape, a, b) as (owners, readers, links):
                fill_alike(owners, shape, seed)
                for o in owners:
                    o.owned.seal(np.arange(shape.blocks))
                there = choose.sample(range(shape.blocks), 5)
                here = choose.sample(range(shape.blocks), 5)
                outcomes = await self.read(owners, links, "r", there, here)
                assert set(outcomes) == {Outcome.RELEASED}
                source, after = planes_of(owners, shape), planes_of(readers, shape)
                for key, plane in after.items():
                    assert np.array_equal(plane[here], source[key][there])

    async def test_long_runs_are_moved_in_parts(self) -> None:
        shape = Shape(layers=1, heads=4, width=256, blocks=40, block_tokens=256, dtype="float32")
        async with self.pair(shape, arena=(True, True), piece_bytes=64 << 20) as (owners, readers, links):
            owners[0].pool.fill(1)
            owners[0].owned.seal(np.arange(shape.blocks))
            every = list(range(shape.blocks))
            await self.read(owners, links, "r", every, every)
            assert links[0].links[0].peer.stats.transactions == 1  # 80 MiB in one run
            assert np.array_equal(owners[0].pool.bytes, readers[0].pool.bytes)

    async def test_many_requests_at_a_time(self) -> None:
        shape = Shape(blocks=64, block_tokens=16, width=32)
        async with self.pair(shape) as (owners, readers, links):
            owners[0].pool.fill(2)
            owners[0].owned.seal(np.arange(shape.blocks))
            order = random.Random(2).sample(range(shape.blocks), shape.blocks)
            for i in range(16):
                there = np.array(order[4 * i : 4 * i + 4])
                offer = owners[0].endpoint.publish("hbm", f"r{i}", there)
                links[0].transfer(f"r{i}", [offer], "hbm", there)
            outcomes = await asyncio.gather(*(links[0].complete(f"r{i}", SECONDS) for i in range(16)))
            assert set(outcomes) == {Outcome.RELEASED}
            assert np.array_equal(owners[0].pool.bytes, readers[0].pool.bytes)
            # Sixteen requests of four blocks, merged across requests and planes: both sides are contiguous.
            assert links[0].links[0].peer.stats.transactions == 1
            assert [e.how for e in owners[0].ended] == [LeaseEnd.COMPLETED] * 16
            assert owners[0].owned.pinned == 0

    async def test_layers_may_come_one_by_one(self) -> None:
        shape = Shape(layers=3)
        async with self.pair(shape) as (owners, readers, links):
            fill_alike(owners, shape, 7)
            owners[0].owned.seal(np.arange(shape.blocks))
            offer = owners[0].endpoint.publish("hbm", "r", np.array([3, 1]))
            source = planes_of(owners, shape)
            for layer in range(3):
                links[0].transfer("r", [offer], "hbm", np.array([0, 2]), layers=[layer])
                if layer < 2:
                    await links[0].landed("r", SECONDS)
                else:
                    assert await links[0].complete("r", SECONDS) is Outcome.RELEASED
                assert np.array_equal(
                    planes_of(readers, shape)[layer, "k"][[0, 2]], source[layer, "k"][[3, 1]]
                )
                later = planes_of(readers, shape).get((layer + 1, "k"))
                assert later is None or not later.any()

    async def test_a_reused_block_is_never_taken_for_the_published_one(self) -> None:
        async with self.pair(Shape(), lease_ttl=0.01) as (owners, _readers, links):
            owned = owners[0].owned
            owned.seal(np.arange(8))
            offer = owners[0].endpoint.publish("hbm", "r", np.array([1, 2, 3]))
            with pytest.raises(RangeError, match="block 2 is leased"):
                owned.open(np.array([2]))
            await until(lambda: bool(owners[0].ended))
            assert owners[0].ended[0].how is LeaseEnd.EXPIRED
            owned.open(np.array([2]))  # being rewritten: odd
            links[0].transfer("r", [offer], "hbm", np.array([1, 2, 3]))
            with pytest.raises(StaleReadError, match="1 of 3"):
                await links[0].complete("r", SECONDS)
            owned.seal(np.array([2]))  # rewritten: even, but another
            links[0].transfer("r", [offer], "hbm", np.array([1, 2, 3]))
            with pytest.raises(StaleReadError, match="1 of 3"):
                await links[0].complete("r", SECONDS)
            assert links[0].links[0].peer.stats.stale == 2
            again = owners[0].endpoint.publish("hbm", "r2", np.array([1, 2, 3]), ttl=5)
            links[0].transfer("r2", [again], "hbm", np.array([1, 2, 3]))
            assert await links[0].complete("r2", SECONDS) is Outcome.RELEASED

    async def test_an_expired_lease_over_unchanged_blocks_still_reads_right(self) -> None:
        async with self.pair(Shape(), lease_ttl=0.01) as (owners, readers, links):
            owners[0].pool.fill(3)
            owners[0].owned.seal(np.arange(8))
            offer = owners[0].endpoint.publish("hbm", "r", np.array([4]))
            await until(lambda: bool(owners[0].ended))
            links[0].transfer("r", [offer], "hbm", np.array([5]))
            assert await links[0].complete("r", SECONDS) is Outcome.LEASE_OVER
            view = readers[0].pool.view(0, "k")[5]
            assert np.array_equal(view, owners[0].pool.view(0, "k")[4])

    async def test_a_writer_under_the_readers_eyes_is_always_noticed(self) -> None:
        """The owner rewrites blocks while they are read. Every accepted read is whole and of its generation.

        The pattern is the generation itself, and the lease is withdrawn at once, so that nothing but the
        generation check stands between the reader and torn bytes.
        """
        shape = Shape(layers=2, heads=4, width=64, blocks=4, block_tokens=256, dtype="float32")
        async with self.pair(shape, piece_bytes=1 << 20) as (owners, readers, links):
            owned, stop, go = owners[0].owned, threading.Event(), threading.Event()
            rewriting = threading.Event()
            every = np.arange(4)
            pool = owners[0].pool.bytes.view(np.uint32)
            pool[:] = 2
            owned.seal(every)
            written = [2]

            def rewrite() -> None:
                while go.wait(SECONDS) and not stop.is_set():
                    go.clear()
                    owned.open(every)
                    pool[:] = written[0] + 2
                    written[0] = int(owned.seal(every)[0])
                    rewriting.clear()

            accepted = stale = 0
            writer = threading.Thread(target=rewrite)
            got = readers[0].pool.bytes.view(np.uint32)
            try:
                writer.start()
                for i in range(self.rewrites):
                    await until(lambda: not rewriting.is_set())
                    offer = owners[0].endpoint.publish("hbm", f"r{i}", every)
                    owners[0].endpoint.withdraw("hbm", offer.lease)
                    if i >= 3:
                        rewriting.set()
                        go.set()  # rewrite now, while we read
                    links[0].transfer(f"r{i}", [offer], "hbm", every)
                    try:
                        await links[0].complete(f"r{i}", SECONDS)
                    except StaleReadError:
                        stale += 1
                        continue
                    accepted += 1
                    generation = int(np.frombuffer(offer.generations, np.int64)[0])
                    assert (got == generation).all()
            finally:
                stop.set()
                go.set()
                writer.join()
            assert accepted >= 3
            assert stale > 0

    async def test_cancelling_at_any_moment_leaves_nothing_behind(self) -> None:
        shape = Shape(layers=2, blocks=32, block_tokens=64, width=64)
        async with self.pair(shape, piece_bytes=1 << 15) as (owners, readers, links):
            owners[0].pool.fill(4)
            owners[0].owned.seal(np.arange(shape.blocks))
            every = np.arange(shape.blocks)
            finished = cancelled = 0
            for moment in range(8 * self.seeds):
                offer = owners[0].endpoint.publish("hbm", f"c{moment}", every)
                links[0].transfer(f"c{moment}", [offer], "hbm", every)
                task = asyncio.ensure_future(links[0].complete(f"c{moment}", SECONDS))
                for _ in range(moment // 2):
                    await asyncio.sleep(0)
                task.cancel()
                try:
                    await task
                    finished += 1
                except asyncio.CancelledError:
                    cancelled += 1
                if moment < 2:
                    await links[0].drop(f"c{moment}")  # `complete` never ran
                # Nothing writes to our blocks any more: bytes that we put there stay in place while a later
                # read runs.
                readers[0].pool.bytes[:] = 0xAA
                await links[0].links[0].ask(_ping(links[0]), SECONDS)
                assert (readers[0].pool.bytes == 0xAA).all()
                links[0].links[0].peer.check()
            assert cancelled > 0
            await until(lambda: owners[0].owned.pinned == 0)  # every lease was released
            await self.read(owners, links, "last", every.tolist(), every.tolist())
            assert np.array_equal(owners[0].pool.bytes, readers[0].pool.bytes)

    async def test_a_cancelled_token_ends_a_read(self) -> None:
        async with self.pair(Shape()) as (owners, _, links):
            channel, token = links[0].links[0].peer.channel, CancelToken()
            token.cancel()
            with pytest.raises(CancelledTransferError):
                channel.read(1, _whole_pool(owners[0]), token)

    async def test_ranges_outside_of_a_region_are_refused_before_they_are_tried(self) -> None:
        async with self.pair(Shape()) as (owners, readers, links):
            owners[0].owned.seal(np.arange(8))
            readers[0].pool.bytes[:] = 0x55
            peer, size = links[0].links[0].peer, owners[0].pool.bytes.size
            for row in ((1, size, 1, 0, 1), (1, 0, 1, size - 3, 4), (9, 0, 1, 0, 4), (1, 0, 9, 0, 4)):
                with pytest.raises(RangeError, match="leaves its region"):
                    peer.transfer("bad", np.array([row], np.int64))
            offer = owners[0].endpoint.publish("hbm", "r", np.array([1]))
            for here in ([24], [-1], [1, 2]):
                with pytest.raises(RangeError):
                    links[0].transfer("r", [offer], "hbm", np.array(here))
            assert (readers[0].pool.bytes == 0x55).all()

    async def test_a_pushed_request_is_granted_and_written(self) -> None:
        for seed in range(max(1, self.seeds // 2)):
            shape = Shape.random(seed + 80)
            # The writer connects; the owner of the memory receives.
            async with self.pair(shape) as (receivers, senders, links):
                receiver, endpoint, (link,) = receivers[0].receiver, senders[0].endpoint, links[0].links
                fill_alike(senders, shape, seed)
                there, here, calls = np.array([7, 3, 5]), np.array([2, 0, 4]), Counter[Call]()
                (part,) = reshard.push_plan(
                    endpoint.pools["hbm"].meta, endpoint.regions.locate, [link.pools["hbm"]], [link.locate]
                ).ranks
                with pytest.raises(RefusedError, match="not set aside"):
                    await RemoteMemory.alloc_mem(link, "r", "hbm", there, calls)
                assert not calls
                receiver.aside = {7, 3, 5, 1}
                memory = await RemoteMemory.alloc_mem(link, "r", "hbm", there, calls)
                memory.transfer(part.runs(there, here))
                await memory.landed()
                await memory.end()
                assert receiver.written == [[7, 3, 5]]
                source, after = planes_of(senders, shape), planes_of(receivers, shape)
                for key, plane in after.items():
                    assert np.array_equal(plane[[7, 3, 5]], source[key][here])
                    assert not plane[[0, 1, 2, 4, 6]].any()
                # Given back, they may be granted again.
                memory = await RemoteMemory.alloc_mem(link, "s", "hbm", np.array([1]), calls)
                await memory.free_mem()
                await until(lambda receiver=receiver: receiver.aside == {1})  # type: ignore[misc]
                with pytest.raises(RefusedError, match="the grant is over"):
                    await memory.end()
                assert calls == {Call.ALLOC_MEM: 2, Call.TRANSFER: 1, Call.FREE_MEM: 1}
                assert receivers[0].endpoint.owner.grants == 0
                assert receivers[0].owned.granted == 0

    async def test_several_writers_fill_one_rank(self) -> None:
        """TP 4 to 1 and 2 to 1: the blocks stay held until the last has filled its heads."""
        for seed, ranks in enumerate((2, 4)):
            shape = replace(Shape.random(seed + 90), mla=False)
            async with self.pair(shape, reader=(ranks, 1)) as (receivers, senders, links):
                receiver, owned = receivers[0].receiver, receivers[0].owned
                fill_alike(senders, shape, seed)
                there, here, calls = np.array([7, 3, 5]), np.array([2, 0, 4]), Counter[Call]()
                receiver.aside, receiver.writers = {7, 3, 5}, ranks
                granted = []
                for sender, instance in zip(senders, links, strict=True):
                    (link,), endpoint = instance.links, sender.endpoint
                    (part,) = reshard.push_plan(
                        endpoint.pools["hbm"].meta,
                        endpoint.regions.locate,
                        [link.pools["hbm"]],
                        [link.locate],
                    ).ranks
                    granted.append((part, await RemoteMemory.alloc_mem(link, "r", "hbm", there, calls)))
                with pytest.raises(RefusedError, match="not set aside"):
                    await RemoteMemory.alloc_mem(links[0].links[0], "r", "hbm", there, calls)
                receivers[0].endpoint.owner.check()
                assert owned.granted == 3
                for part, memory in granted:
                    assert (owned.granted, receiver.written) == (3, [])
                    memory.transfer(part.runs(there, here))
                    await memory.landed()
                    await memory.end()
                assert (owned.granted, receiver.written) == (0, [[7, 3, 5]])
                source, after = planes_of(senders, shape), planes_of(receivers, shape)
                for key, plane in after.items():
                    assert np.array_equal(plane[[7, 3, 5]], source[key][here])
                    assert not plane[[0, 1, 2, 4, 6]].any()

    async def test_blocks_of_several_writers_are_held_until_the_last_has_stopped(self) -> None:
        async with self.pair(Shape(), reader=(2, 1)) as (receivers, _, links):
            receiver, owned, owner = receivers[0].receiver, receivers[0].owned, receivers[0].endpoint.owner
            receiver.aside, receiver.writers, calls = {4, 5}, 2, Counter[Call]()
            first, second = [
                await RemoteMemory.alloc_mem(instance.links[0], "r", "hbm", np.array([4, 5]), calls)
                for instance in links
            ]
            await first.free_mem()
            await until(lambda: receiver.discarded == 1)
            assert (owned.granted, receiver.aside) == (2, set())
            await owner.revoke("r")
            await until(lambda: owned.granted == 0)
            assert (receiver.aside, receiver.discarded, owner.grants, owner.set_aside) == ({4, 5}, 2, 0, 0)
            with pytest.raises(RefusedError, match="the grant is over"):
                await second.end()

    async def test_a_revoked_grant_is_over_for_its_writer(self) -> None:
        async with self.pair(Shape()) as (receivers, senders, links):
            receiver, owner = receivers[0].receiver, receivers[0].endpoint.owner
            senders[0].pool.fill(5)
            link = links[0].links[0]
            receiver.aside = {4, 5}
            held = await link.ask(Reserve(link.session, "r", "hbm", pack_ids(np.array([4, 5]))), SECONDS)
            assert isinstance(held, Reserved)
            assert receivers[0].owned.granted == 2
            await owner.revoke("r")
            await until(lambda: receivers[0].owned.granted == 0)
            assert receiver.aside == {4, 5}
            grant = (held.slot, held.grant)
            run = np.array([(1, 0, 1, 0, 16)], np.int64)
            with pytest.raises(RefusedError, match="revoked"):
                link.peer.transfer("r", run, direction=Direction.WRITE, grant=grant)
            with pytest.raises(RefusedError, match="the grant is over"):
                await link.ask(Written(link.session, "r", held.grant), SECONDS)
            assert not receivers[0].pool.bytes.any()
            assert (owner.grants, owner.set_aside) == (0, 0)

    async def test_an_owner_that_leaves_ends_reads_with_an_error(self) -> None:
        async with self.pair(Shape(), heartbeat=0.05, dead_after=0.2) as (owners, _, links):
            owners[0].owned.seal(np.arange(8))
            offer = owners[0].endpoint.publish("hbm", "r", np.array([1]))
            await owners[0].endpoint.close()
            await until(lambda: links[0].gone)
            with pytest.raises(PeerGoneError):
                links[0].transfer("r", [offer], "hbm", np.array([1]))

    async def test_a_reader_that_leaves_holds_nothing(self) -> None:
        async with self.pair(Shape()) as (owners, readers, links):
            owners[0].owned.seal(np.arange(8))
            owners[0].endpoint.publish("hbm", "r", np.array([1]), ttl=600, reader=readers[0].endpoint.epoch)
            await links[0].close()
            await until(lambda: owners[0].owned.pinned == 0)
            assert owners[0].ended[0].how is LeaseEnd.READER_DEAD
            assert owners[0].endpoint.owner.sessions == ()

    async def test_what_differs_is_named(self) -> None:
        shape = Shape()
        async with self.pair(shape) as (owners, _, _):
            address = [owners[0].endpoint.address]
            stranger = await self.start(replace(self.config("x"), namespace="another model"), shape)
            other = await self.start(self.config("y"), Shape(dtype="float32"))
            try:
                with pytest.raises(RefusedError, match="namespace: 'another model' there"):
                    await stranger[0].endpoint.connect(address)
                with pytest.raises(RefusedError, match="dtype: KV there is float32, here float16"):
                    await other[0].endpoint.connect(address)
                for rank in stranger + other:
                    rank.endpoint.check()
            finally:
                for rank in stranger + other:
                    await rank.close()


def _whole_pool(owner: Rank) -> Runs:
    return np.array([(1, 0, 1, 0, owner.pool.bytes.size)], np.int64)


def _ping(instance: Instance):  # type: ignore[no-untyped-def]
    from sglang_ext.disagg.messages import Ping

    return Ping(instance.links[0].session, instance.links[0].peer.channel.name)


__all__ = ["SECONDS", "TransferError", "TransportConformance", "until"]

"""Grants: their lifetime, and that no write happens under an expired grant, over every transport.

Races are forced: a writer is stopped between its last check of the grant and its first byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import mmap
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from sglang_ext.disagg.errors import RefusedError, TransferError
from sglang_ext.disagg.memory import PeerMapping, RegionTable, SharedMemory
from sglang_ext.disagg.messages import Reserve, Reserved, Revoke, Written
from sglang_ext.disagg.runs import Ids, Runs
from sglang_ext.disagg.transfer import owner as owner_module
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.link import Link
from sglang_ext.disagg.transfer.peer import Peer
from sglang_ext.disagg.transfer.transactions import Direction
from sglang_ext.disagg.transports import CancelToken, TransportName
from sglang_ext.disagg.transports._guard import GuardPages
from sglang_ext.testing.transfer.rig import NAMESPACE, Rank, Shape, start_instance
from sglang_ext.testing.waiting import until
from sglang_ext.wire import pack_ids

TRANSPORTS = [TransportName.SHM, TransportName.CMA, TransportName.TCP]
SHAPE = Shape(blocks=32)
OURS, ANOTHERS = 0x11, 0x77


@dataclass
class Two:
    """A receiver, and a writer that is connected to it. granted: blocks by grant."""

    receiver: Rank
    writer: Rank
    link: Link
    granted: dict[int, Ids] = field(default_factory=dict)

    async def reserve(self, *blocks: int) -> Reserved:
        """A grant on blocks that the receiver's engine has set aside under the name `r`."""
        self.receiver.receiver.aside |= set(blocks)
        named = np.array(blocks, np.int64)
        held = await self.link.ask(Reserve(self.link.session, "r", "hbm", pack_ids(named)), 5)
        assert isinstance(held, Reserved)
        self.granted[held.grant] = named
        return held

    def runs(self, held: Reserved) -> Runs:
        """The writer's first block to each granted one: all planes."""
        shape, pool = SHAPE, self.receiver.pool
        planes = len(pool.geometry.planes)
        size = pool.bytes.size // planes
        block = size // shape.blocks
        return np.array(
            [
                (1, plane * size + int(b) * block, 1, plane * size, block)
                for b in self.granted[held.grant]
                for plane in range(planes)
            ],
            np.int64,
        )

    @property
    def bytes(self) -> set[int]:
        """The distinct byte values in the receiver's pool."""
        return set(np.unique(self.receiver.pool.bytes).tolist())


@asynccontextmanager
async def two(transport: TransportName, **changes: Any) -> AsyncIterator[Two]:
    values = {"heartbeat": 0.1, "dead_after": 1.0, **changes}
    ranks = []
    for name in ("receiver", "writer"):
        config = EndpointConfig(name, NAMESPACE, transports=(transport,), **values)
        ranks += await start_instance(config, SHAPE)
    receiver, writer = ranks
    try:
        writer.pool.bytes[:] = OURS
        instance = await writer.endpoint.connect([receiver.endpoint.address])
        link = instance.links[0]
        await until(lambda: receiver.endpoint.owner.sessions[0].transport == transport, 60)
        yield Two(receiver, writer, link)
        receiver.endpoint.check()
        writer.endpoint.check()
    finally:
        for rank in (writer, receiver):
            await rank.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_grant_lives_as_long_as_its_receiver_wants(transport: TransportName) -> None:
    async with two(transport, grant_ttl=0.1) as pair:
        pair.receiver.receiver.claim_seconds = math.inf
        held = await pair.reserve(4, 5)
        pair.receiver.receiver.aside = {9}
        pair.receiver.receiver.claim_seconds = None
        # Another grant begins later, lives for `grant_ttl`, and is over.
        await pair.link.ask(Reserve(pair.link.session, "other", "hbm", pack_ids(np.array([9]))), 5)
        assert pair.receiver.owned.granted == 3
        await until(lambda: pair.receiver.owned.granted == 2, 60)
        pair.link.peer.transfer(
            "r", pair.runs(held), direction=Direction.WRITE, grant=(held.slot, held.grant)
        )
        await pair.link.peer.landed("r", asyncio.get_running_loop().time() + 5)
        await pair.link.ask(Written(pair.link.session, "r", held.grant), 5)
        assert pair.receiver.receiver.written == [[4, 5]]
        for plane in pair.receiver.pool.geometry.planes:
            view = pair.receiver.pool.view(plane.layer, plane.kind)
            assert (view[[4, 5]] == OURS).all()
            assert not view[[3, 6, 9]].any()


def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that reports that it has stopped, and goes on writing."""

    async def stop_writes(self: Peer, grant: int) -> None:
        pass

    monkeypatch.setattr(Peer, "stop_writes", stop_writes)


def unbarred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Receivers that do not keep a late writer out."""
    monkeypatch.setattr(GuardPages, "revoke_slot", lambda self, slot: None)
    stock = owner_module.Owner._forget

    def forget(self: Any, grant: Any) -> None:
        writer = self._writers[grant.number]
        slot = writer.slots[grant.number]
        stock(self, grant)
        writer.grants[slot] = grant.number

    monkeypatch.setattr(owner_module.Owner, "_forget", forget)


@pytest.mark.parametrize("kept_out", [True, False], ids=["kept out", "twin"])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_late_writer_is_refused_before_its_first_byte(
    transport: TransportName, kept_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked, was held, and goes on when the blocks are another's: by its channel, past its own checks."""
    deaf(monkeypatch)
    if not kept_out:
        unbarred(monkeypatch)
    async with two(transport, grant_ttl=600.0) as pair:
        held = await pair.reserve(4, 5)
        runs, grant = pair.runs(held), (held.slot, held.grant)
        await pair.receiver.endpoint.owner.revoke("r")
        await until(lambda: pair.receiver.owned.granted == 0, 60)
        pair.receiver.pool.bytes[:] = ANOTHERS
        channel = pair.link.peer.channel
        if kept_out:
            with pytest.raises(TransferError, match="grant is over"):
                await asyncio.to_thread(channel.write, 0, runs, CancelToken(), grant)
            assert pair.bytes == {ANOTHERS}
            # The slot is another grant's now; the old number opens nothing.
            again = await pair.reserve(6)
            assert again.slot == held.slot
            assert again.grant != held.grant
        else:
            await asyncio.to_thread(channel.write, 0, runs, CancelToken(), grant)
            assert pair.bytes == {ANOTHERS, OURS}


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_writer_whose_grant_was_withdrawn_writes_nothing_more(transport: TransportName) -> None:
    """A stopped writer drops queued writes and refuses later ones; the receiver waits for a write under
    way."""
    async with two(transport, grant_ttl=600.0, lanes=1, coalescing=False) as pair:
        held, other = await pair.reserve(4, 5), await pair.reserve(8)
        channel, begun, go = pair.link.peer.channel, threading.Event(), threading.Event()
        stock, writes = channel.write, []

        def gated(lane: int, runs: Runs, token: CancelToken, grant: tuple[int, int]) -> None:
            writes.append(grant[1])
            begun.set()
            assert go.wait(20)
            stock(lane, runs, token, grant)

        channel.write = gated  # type: ignore[method-assign]
        peer, loop = pair.link.peer, asyncio.get_running_loop()
        try:
            # The only lane is held up by another grant's write; ours is queued behind it.
            peer.transfer("o", pair.runs(other), direction=Direction.WRITE, grant=(other.slot, other.grant))
            await until(begun.is_set, 60)
            write = {"direction": Direction.WRITE, "grant": (held.slot, held.grant)}
            peer.transfer("r", pair.runs(held), **write)  # type: ignore[arg-type]
            landing = asyncio.ensure_future(peer.landed("r", loop.time() + 20))
            await asyncio.sleep(0)
            pair.link.unasked(Revoke(held.grant))
            with pytest.raises(RefusedError, match="revoked"):
                await landing
            await until(lambda: pair.receiver.owned.granted == 1, 60)
            assert not pair.receiver.pool.bytes.any()
            with pytest.raises(RefusedError, match="revoked"):
                peer.transfer("late", pair.runs(held), **write)  # type: ignore[arg-type]
        finally:
            go.set()
        await peer.landed("o", loop.time() + 20)
        assert set(writes) == {other.grant}
        view = pair.receiver.pool.view(0, "k")
        assert (view[8] == OURS).all()
        assert not view[[4, 5]].any()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_write_under_way_keeps_its_blocks(transport: TransportName) -> None:
    """Over tcp the receiver cuts it off; over shm and cma the blocks stay set aside until it has returned."""
    async with two(transport, grant_ttl=600.0, lanes=1, dead_after=0.5) as pair:
        held = await pair.reserve(4, 5)
        channel, begun, go = pair.link.peer.channel, threading.Event(), threading.Event()
        stock = channel.write
        owner = pair.receiver.endpoint.owner

        def gated(lane: int, runs: Runs, token: CancelToken, grant: tuple[int, int]) -> None:
            begun.set()
            assert go.wait(20)
            stock(lane, runs, CancelToken(), grant)

        channel.write = gated  # type: ignore[method-assign]
        peer, loop = pair.link.peer, asyncio.get_running_loop()
        grant = (held.slot, held.grant)
        peer.transfer("r", pair.runs(held), direction=Direction.WRITE, grant=grant)
        landing = asyncio.ensure_future(peer.landed("r", loop.time() + 20))
        try:
            await until(begun.is_set, 60)
            await owner.revoke("r")
            assert owner.set_aside == 2
            if transport is TransportName.TCP:
                await until(lambda: pair.receiver.owned.granted == 0, 60)
            else:
                looks = asyncio.Event()
                fence = owner.sessions[0].served[transport].fence

                def looked() -> bool:
                    loop.call_soon_threadsafe(looks.set)
                    return fence()

                owner.sessions[0].served[transport].fence = looked  # type: ignore[method-assign]
                async with asyncio.timeout(10):
                    await looks.wait()
                assert pair.receiver.owned.granted == 2
                # Set aside is at most a part of the pool, for one writer: then it is granted nothing more.
                owner._grants._grants[held.grant] = grow(owner, held.grant, 9)
                with pytest.raises(RefusedError, match="wait for this writer"):
                    await pair.reserve(20)
                owner._grants._grants[held.grant] = grow(owner, held.grant, 2)
            pair.receiver.pool.bytes[:] = ANOTHERS
        finally:
            go.set()
        with pytest.raises(TransferError):
            await landing
        await until(lambda: pair.receiver.owned.granted == 0, 60)
        assert owner.set_aside == 0
        assert pair.bytes == {ANOTHERS}


def grow(owner: Any, number: int, blocks: int) -> Any:
    import dataclasses

    return dataclasses.replace(owner._grants.get(number), blocks=np.arange(4, 4 + blocks))


async def test_a_reservation_that_fails_gives_its_blocks_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way that `Reserve` can end after the receiver has let the blocks go."""
    monkeypatch.setattr(owner_module, "MAX_GRANTS", 2)
    async with two(TransportName.TCP, grant_ttl=600.0) as pair:
        receiver, owned = pair.receiver.receiver, pair.receiver.owned
        receiver.aside = {3, 7, 8}

        def reserve(block: int) -> Reserve:
            return Reserve(pair.link.session, "r", "hbm", pack_ids(np.array([block])))

        assert isinstance(await pair.link.ask(reserve(3), 5), Reserved)
        with pytest.raises(RefusedError, match="already holds 1 grants"):
            await pair.link.ask(reserve(7), 5)
        assert receiver.aside == {7, 8}
        monkeypatch.setattr(owner_module, "MAX_GRANTS", 9)
        # The receiver breaks the rules and releases a sealed block: the block still returns to it.
        owned.seal(np.array([7]))
        with pytest.raises(RefusedError):
            await pair.link.ask(reserve(7), 5)
        assert receiver.aside == {7, 8}
        assert (owned.granted, pair.receiver.endpoint.owner.grants) == (1, 1)
        owned.open(np.array([7]))
        # The session ends while the receiver looks.
        looking, go = asyncio.Event(), asyncio.Event()
        stock: Callable[..., Any] = receiver.claim

        async def gated(pool: str, blocks: Ids, request: str) -> float | None:
            looking.set()
            await go.wait()
            found: float | None = await stock(pool, blocks, request)
            return found

        receiver.claim = gated  # type: ignore[method-assign]
        asking = asyncio.ensure_future(pair.link.ask(reserve(8), 5))
        await looking.wait()
        await pair.receiver.endpoint.owner.end(pair.receiver.endpoint.owner.sessions[0])
        go.set()
        with pytest.raises(TransferError):
            await asking
        await until(lambda: receiver.aside == {3, 7, 8}, 60)
        assert owned.granted == 0


def test_each_grant_has_a_guard_of_its_own() -> None:
    guard = GuardPages(os.getpid(), 8)
    try:
        guard.admit(2)
        guard.admit(5)
        guard.revoke_slot(2)
        assert readable(guard.address, 5)
        assert not readable(guard.address, 2)
        assert not readable(guard.address, 0)
        guard.revoke_slot(2)  # a second time, and a block that was never admitted
        guard.revoke_slot(3)
        guard.close()
        assert not readable(guard.address, 5)
        guard.admit(5)
        assert not readable(guard.address, 5), "a session that is over admits nothing"
    finally:
        guard.close()


def readable(address: int, slot: int) -> bool:
    """As the kernel sees it: whether the process's own memory can be read there."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            low, high = (int(part, 16) for part in line.split()[0].split("-"))
            if low <= address + slot * mmap.PAGESIZE < high:
                return line.split()[1].startswith("rw")
    return False


def test_shared_memory_is_mapped_for_reading_and_by_its_owner_alone() -> None:
    memory = SharedMemory(1 << 16)
    table = RegionTable()
    table.add(memory.address, memory.nbytes, fd=memory.fd)
    memory.array[:] = 5
    mapped = PeerMapping(os.getpid(), table.metas()[0])
    try:
        assert os.fstat(memory.fd).st_mode & 0o777 == 0o600
        words = mapped.words()
        assert words is not None
        assert (words.view(np.uint8) == 5).all()
        with open("/proc/self/maps", encoding="utf-8") as maps:
            lines = [line.split() for line in maps]
        (access,) = [
            parts[1]
            for parts in lines
            if int(parts[0].split("-")[0], 16) <= mapped.address < int(parts[0].split("-")[1], 16)
        ]
        assert access == "r--s"
        del words
    finally:
        mapped.close()
        with contextlib.suppress(BufferError):
            memory.close()

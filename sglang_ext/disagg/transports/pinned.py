"""Pinned staging: `shm`, `verbs` and `tcp` for pools in a GPU's memory, which they do not reach themselves.

    read    the owner gathers ranges into a slot of its pinned memory ─> the carrier reads that into a slot
            of the reader ─> the reader scatters it into its pool
    write   the writer gathers ranges into a slot of its own ─> the carrier writes that to a slot of the
            owner ─> the owner scatters it into its pool, under the grant

The carrier is the transport whose name this one has; it sees regions in host memory only, of which the slots
are one. Ranges in host memory on both sides go by the carrier alone.

Why a counter read later is enough: the owner replies behind the event of its kernel, by which each byte was
loaded, and the slot is read after the reply. A slot may meanwhile have become another's, as this process may
stand still for any time: its generation, read by the carrier after its bytes, differs then.

A write is over when the owner has scattered it. So the owner fences a writer by ending its connection for
asks, which waits for a scatter under way, and the carrier as ever. Its slots are set aside until then.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from sglang_ext.compiled import fence
from sglang_ext.disagg.errors import (
    PeerGoneError,
    PeerProtocolError,
    TransportUnavailableError,
)
from sglang_ext.disagg.memory import MAX_REGIONS, MemoryKind, RegionMeta, RegionTable
from sglang_ext.disagg.runs import BYTES, LOCAL, LOCAL_AT, REMOTE, REMOTE_AT, Runs, coalesce, steps
from sglang_ext.disagg.transports import CancelToken, Channel, PeerInfo, Served, Transport
from sglang_ext.disagg.transports._gathering import (
    MAX_RANGES,
    Asks,
    GatherServed,
    GatherTransport,
    PinnedArena,
    on_device,
    packed,
)
from sglang_ext.disagg.transports.tcp import Connections, served_on
from sglang_ext.wire import Codec, Message, WireError

STAGING_BYTES = 64 << 20
"""Of pinned memory, unless configured otherwise."""


class _Offer(Message, frozen=True, tag="po"):
    carrier: bytes
    """The carrier's offer."""


class _Answer(Message, frozen=True, tag="pa"):
    carrier: bytes
    asks: bytes
    region: int
    slot_bytes: int


_OFFER: Codec[_Offer] = Codec(_Offer, 1 << 17)
_ANSWER: Codec[_Answer] = Codec(_Answer, 1 << 19)


class StagedChannel(Channel):
    """Copies through pinned memory on both sides. See the top of this file.

    far: the peer's staging region. asks: None where the peer has no pool in GPU memory.
    """

    def __init__(
        self,
        carrier: Channel,
        regions: RegionTable,
        arena: PinnedArena,
        peer: PeerInfo,
        asks: Asks | None,
        far: int,
    ) -> None:
        self.name, self.lanes, self.gap, self.counters = (
            carrier.name,
            carrier.lanes,
            carrier.gap,
            carrier.counters,
        )
        self._carrier, self._regions, self._arena = carrier, regions, arena
        self._asks, self._far_region = asks, far
        self._near = on_device(regions)
        self._far = np.zeros(MAX_REGIONS, np.bool_)
        self._far[: len(peer.regions)] = [meta.kind is MemoryKind.CUDA for meta in peer.regions]
        self._limit = arena.slot_bytes if asks is None else min(arena.slot_bytes, asks.slot_bytes)
        self._gone = False

    @property
    def broken(self) -> bool:
        return self._gone or self._carrier.broken

    def read(self, lane: int, runs: Runs, token: CancelToken) -> None:
        for rows, far, near in self._parts(runs):
            if not far and not near:
                self._carrier.read(lane, rows, token)
                continue
            for step in steps(rows, self._limit, MAX_RANGES):
                self._read_step(lane, step, token, far, near)
        fence()

    def write(self, lane: int, runs: Runs, token: CancelToken, grant: tuple[int, int]) -> None:
        fence()
        for rows, far, near in self._parts(runs):
            if not far and not near:
                self._carrier.write(lane, rows, token, grant)
                continue
            for step in steps(rows, self._limit, MAX_RANGES):
                self._write_step(lane, step, token, grant, far, near)

    def close(self) -> None:
        self.counters = None
        if self._asks is not None:
            self._asks.close()
        self._carrier.close()

    def _parts(self, runs: Runs) -> list[tuple[Runs, bool, bool]]:
        """Runs by the memory of their ends: whether the remote, the local one is a GPU's."""
        there, here = self._far[runs[:, REMOTE]], self._near[runs[:, LOCAL]]
        parts = []
        for far, near in ((False, False), (False, True), (True, False), (True, True)):
            chosen = (there == far) & (here == near)
            if chosen.any():
                parts.append((runs if chosen.all() else np.ascontiguousarray(runs[chosen]), far, near))
        return parts

    def _read_step(self, lane: int, rows: Runs, token: CancelToken, far: bool, near: bool) -> None:
        asks = self._asking() if far else None
        with self._arena.own(token) as slot:
            wire, places = rows.copy(), packed(rows[:, BYTES])
            if near:
                wire[:, LOCAL], wire[:, LOCAL_AT] = self._arena.region, slot + places
            if asks is None:
                self._carrier.read(lane, coalesce(wire)[0], token)
            else:
                at, generation = asks.gather(lane, rows, token)
                try:
                    wire[:, REMOTE], wire[:, REMOTE_AT] = self._far_region, at + places
                    self._read_slot(lane, wire, (at, generation), slot, token)
                finally:
                    asks.done(lane)
            if near:
                self._by_gpu(rows, self._arena.address(slot) + places, into_pool=True)

    def _read_slot(self, lane: int, wire: Runs, slot: tuple[int, int], own: int, token: CancelToken) -> None:
        """Read a slot of the peer, then whether it was still the same. slot: its offset and generation."""
        assert self._asks is not None
        landing = self._arena.landing_at(own)
        word = (self._far_region, slot[0] + self._asks.slot_bytes, self._arena.region, landing, 8)
        self._carrier.read_then(lane, coalesce(wire)[0], np.array([word], np.int64), token)
        fence()
        if self._arena.word(landing) != slot[1]:
            raise PeerGoneError(f"{self.name}: the peer has given the pinned memory to another session")

    def _write_step(
        self, lane: int, rows: Runs, token: CancelToken, grant: tuple[int, int], far: bool, near: bool
    ) -> None:
        asks = self._asking() if far else None
        with self._arena.own(token) as slot:
            wire, places = rows.copy(), packed(rows[:, BYTES])
            if near:
                self._by_gpu(rows, self._arena.address(slot) + places, into_pool=False)
                wire[:, LOCAL], wire[:, LOCAL_AT] = self._arena.region, slot + places
            if asks is None:
                self._carrier.write(lane, coalesce(wire)[0], token, grant)
                return
            at = asks.take(lane, token)
            wire[:, REMOTE], wire[:, REMOTE_AT] = self._far_region, at + places
            try:
                self._carrier.write(lane, coalesce(wire)[0], token, grant)
                asks.scatter(lane, rows, token, grant)
            except BaseException:
                asks.done(lane)  # the carrier writes no more, however it ended
                raise

    def _by_gpu(self, rows: Runs, staged: npt.NDArray[np.int64], *, into_pool: bool) -> None:
        pool = self._regions.bases[rows[:, LOCAL]] + rows[:, LOCAL_AT]
        source, target = (staged, pool) if into_pool else (pool, staged)
        ranges = np.stack([source, target, rows[:, BYTES]], 1)
        device = self._arena.device
        try:
            (device.scatter if into_pool else device.gather)(ranges)
        except RuntimeError as error:
            # After an error of a kernel no call of this process' driver succeeds.
            self._gone = True
            raise PeerGoneError(f"{self.name}: {error}") from None

    def _asking(self) -> Asks:
        if self._asks is None:
            raise PeerProtocolError(f"{self.name}: the peer does not stage a region in GPU memory")
        return self._asks


class StagedServed(Served):
    """A session of the carrier, and the asks that go with it."""

    def __init__(self, carrier: Served, asks: GatherServed) -> None:
        self._carrier, self._asks = carrier, asks
        asks.carrier = carrier

    def admit(self, slot: int) -> None:
        self._carrier.admit(slot)

    def revoke_slot(self, slot: int) -> None:
        self._carrier.revoke_slot(slot)

    def fence(self) -> bool:
        """End the connections for asks, behind their copies under way; then as the carrier does."""
        self._asks.fence()
        return self._carrier.fence()

    def close(self) -> None:
        self._asks.close()
        self._carrier.close()
        self._asks.ended = True


class StagedTransport(Transport):
    """A carrier with staging on its sides.

    regions: all of the endpoint's; the carrier has those in host memory.
    """

    def __init__(
        self, carrier: Transport, regions: RegionTable, arena: PinnedArena, asks: GatherTransport
    ) -> None:
        super().__init__(regions)
        self.name = carrier.name
        self.carrier = carrier
        self._arena, self._asks = arena, asks
        arena.users += 1

    def unavailable(self) -> str | None:
        return self.carrier.unavailable() or self._arena.unavailable()

    def offer(self) -> bytes:
        return _OFFER.encode(_Offer(self.carrier.offer()))

    def withdraw(self, offer: bytes) -> None:
        self.carrier.withdraw(_OFFER.decode(offer).carrier)

    def accept(self, session: bytes, offer: bytes, grants: npt.NDArray[np.int64]) -> tuple[bytes, Served]:
        if (reason := self._arena.unavailable()) is not None:
            raise TransportUnavailableError(f"{self.name}: {reason}")
        try:
            theirs = _OFFER.decode(offer).carrier
        except WireError:
            # A reader whose pools are in host memory: the carrier shows it ours that are.
            return self.carrier.accept(session, offer, grants)
        answer, served = self.carrier.accept(session, theirs, grants)
        key = hashlib.sha256(session + self.name.encode()).digest()[: len(session)]
        port, asks = self._asks.accept(key, b"tcp", grants)
        assert isinstance(asks, GatherServed)
        found = _Answer(answer, port, self._arena.region, self._arena.slot_bytes)
        return _ANSWER.encode(found), StagedServed(served, asks)

    def open(self, peer: PeerInfo, session: bytes, offer: bytes, answer: bytes) -> Channel:
        own = _OFFER.decode(offer).carrier
        on_host = replace(peer, regions=tuple(_host_only(meta) for meta in peer.regions))
        try:
            found = _ANSWER.decode(answer)
        except WireError:
            # An owner without a pool in GPU memory.
            carrier = self.carrier.open(on_host, session, own, answer)
            return StagedChannel(carrier, self.regions, self._arena, peer, None, 0)
        if not 0 < found.region < len(peer.regions) or found.slot_bytes < 1:
            raise PeerProtocolError(f"{self.name}: the peer has no region {found.region} to stage in")
        port, secret = served_on(found.asks)
        key = hashlib.sha256(session + self.name.encode()).digest()[: len(session)]
        carrier = self.carrier.open(on_host, session, own, found.carrier)
        try:
            connections = Connections((peer.address, port), key, secret, carrier.lanes)
        except BaseException:
            carrier.close()
            raise
        asks = Asks(connections, peer.regions[found.region].nbytes, found.slot_bytes)
        return StagedChannel(carrier, self.regions, self._arena, peer, asks, found.region)

    def close(self) -> None:
        self.carrier.close()
        if self._arena.users == 1:
            self._asks.close()
        self._arena.close()


def _host_only(meta: RegionMeta) -> RegionMeta:
    return meta if meta.kind is MemoryKind.HOST else RegionMeta(0, 0, MemoryKind.HOST, -1, 0, 0, 0)

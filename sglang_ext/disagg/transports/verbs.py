"""`verbs`: RDMA READ and WRITE over RC queue pairs, by pyverbs. The owner's processor takes no part.

Why a counter read later is enough: a read's completion says that the responder's adapter fetched the bytes
and that they are in place here. `read` polls the completions of all its requests before it returns, and the
counter is asked for by a request posted after that. (Two reads in flight on one queue pair would not do:
their fetches over the owner's bus may overtake each other.) A write is followed by a read of the owner's
header, by which the bus has delivered the earlier writes.

Several lanes are several queue pairs, each with a completion queue of its own, polled in the lane's thread.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from sglang_ext.disagg.errors import (
    CancelledTransferError,
    PeerGoneError,
    PeerProtocolError,
    TransferError,
    TransportUnavailableError,
)
from sglang_ext.disagg.memory import MemoryKind, RegionTable
from sglang_ext.disagg.numa import node_of
from sglang_ext.disagg.runs import BYTES, LOCAL, LOCAL_AT, REMOTE, REMOTE_AT, Runs, cut
from sglang_ext.disagg.transports import CancelToken, Channel, PeerInfo, Served, Transport, TransportName
from sglang_ext.disagg.transports._rdma import (
    BATCH,
    Device,
    QueuePair,
    QueuePairInfo,
    import_pyverbs,
)
from sglang_ext.disagg.transports.cuda_ipc import DeviceMemory
from sglang_ext.disagg.transports.rails import NOWHERE, Place, Rail, choose, topology
from sglang_ext.wire import Codec, Message, WireError

log = logging.getLogger(__name__)

MAX_MESSAGE: Final = 1 << 30
"""Bytes of one request; the specification allows 2**31."""
PATIENCE: Final = 10.0
"""Seconds without a completion after which the peer is gone: longer than the adapter's own retries take."""


class _Offer(Message, frozen=True, tag="vo"):
    pairs: tuple[QueuePairInfo, ...]


class _Answer(Message, frozen=True, tag="va"):
    pairs: tuple[QueuePairInfo, ...]
    keys: tuple[int, ...]
    """Remote key of each region; 0 where it is not registered."""
    bases: tuple[int, ...]
    """The address that the adapter knows each region by."""


_OFFER: Codec[_Offer] = Codec(_Offer, 1 << 16)
_ANSWER: Codec[_Answer] = Codec(_Answer, 1 << 18)


class VerbsChannel(Channel):
    """One queue pair per lane. A request that fails takes its queue pair with it, and the channel."""

    name = TransportName.VERBS
    gap = 1024

    def __init__(
        self,
        device: Device,
        pairs: list[QueuePair],
        answer: _Answer,
    ) -> None:
        self.lanes = len(pairs)
        self._pairs: list[QueuePair | None] = list(pairs)
        # By region: key and address.
        self._remote: npt.NDArray[np.int64] = np.array(
            [*zip(answer.keys, answer.bases, strict=True)], np.int64
        ).reshape(-1, 2)
        self._local: npt.NDArray[np.int64] = np.zeros((1 + max(device.memory, default=0), 2), np.int64)
        for i, registered in device.memory.items():
            self._local[i] = registered.lkey, device.bases[i]
        self._broken = False

    @property
    def broken(self) -> bool:
        return self._broken

    def read(self, lane: int, runs: Runs, token: CancelToken) -> None:
        self._move(lane, runs, token, write=False)

    def write(self, lane: int, runs: Runs, token: CancelToken, grant: tuple[int, int]) -> None:
        self._move(lane, runs, token, write=True)

    def close(self) -> None:
        for i in range(self.lanes):
            self._destroy(i)

    def _move(self, lane: int, runs: Runs, token: CancelToken, *, write: bool) -> None:
        pair = self._pairs[lane]
        if pair is None:
            raise PeerGoneError("verbs: this queue pair has failed; connect again")
        requests = self._requests(runs)
        batches = [requests[i : i + BATCH] for i in range(0, len(requests), BATCH)]
        flying = 0
        try:
            for batch in batches:
                if token.cancelled:
                    break
                # The send queue is counted here: adapters free a slot only when a later completion is polled.
                if (flying + 1) * BATCH > pair.depth:
                    pair.wait(time.monotonic() + PATIENCE)
                    flying -= 1
                pair.post(batch, write=write)
                flying += 1
            while flying:
                pair.wait(time.monotonic() + PATIENCE)
                flying -= 1
        except BaseException:
            # Whatever is still posted must not land later: without its queue pair it cannot.
            self._broken = True
            self._destroy(lane)
            raise
        if token.cancelled:
            raise CancelledTransferError("verbs: the transfer was cancelled")

    def _requests(self, runs: Runs) -> npt.NDArray[np.int64]:
        """As `Poster.post` takes them."""
        if len(runs) and int(runs[:, BYTES].max()) > MAX_MESSAGE:
            runs = cut(runs, MAX_MESSAGE)[0]
        there, here = self._remote[runs[:, REMOTE]], self._local[runs[:, LOCAL]]
        return np.column_stack(
            (
                there[:, 0],
                there[:, 1] + runs[:, REMOTE_AT],
                here[:, 0],
                here[:, 1] + runs[:, LOCAL_AT],
                runs[:, BYTES],
            )
        )

    def _destroy(self, lane: int) -> None:
        pair, self._pairs[lane] = self._pairs[lane], None
        if pair is not None:
            pair.close()


class _Session(Served):
    """The owner's ends of a reader's queue pairs. They serve by themselves."""

    def __init__(self, pairs: list[QueuePair]) -> None:
        self.pairs = pairs

    def admit(self, slot: int) -> None:
        """Nothing to do: the adapter knows no grants; `fence` ends the queue pairs."""

    def revoke_slot(self, slot: int) -> None:
        """As `admit`."""

    def fence(self) -> bool:
        self.close()
        return True

    def close(self) -> None:
        while self.pairs:
            self.pairs.pop().close()


def verbs_reason() -> str | None:
    """Why this host has no verbs; None when it has a device and pyverbs. Opens nothing."""
    reason = import_pyverbs()
    if reason is None and not topology().nics:
        reason = "no RDMA device (/sys/class/infiniband is empty)"
    return reason


class VerbsTransport(Transport):
    """See the top of this file.

    lanes: queue pairs per connection. rank: of this endpoint, which spreads ranks over equally near adapters.
    place: of this rank's accelerator; unknown for one whose memory is the host's, which is looked up.
    devices: as `--kv-rdma-devices` names them.
    """

    name = TransportName.VERBS

    def __init__(
        self,
        regions: RegionTable,
        lanes: int = 1,
        rank: int = 0,
        place: Place = NOWHERE,
        devices: Sequence[str] = (),
    ) -> None:
        super().__init__(regions)
        self._lanes = lanes
        self._rank = rank
        self._place = place
        self._devices = tuple(devices)
        self.gpu: DeviceMemory | None = None
        self.rail: Rail | None = None
        """The adapter in use, and why it is that one; None before the first peer."""
        self._device: Device | None = None
        self._offered: dict[bytes, list[QueuePair]] = {}

    def __repr__(self) -> str:
        return f"<VerbsTransport device={self._device.name if self._device else None}>"

    def unavailable(self) -> str | None:
        reason = verbs_reason()
        if reason is not None:
            return reason
        try:
            self._open()
        except TransferError as error:
            return str(error)
        return None

    def offer(self) -> bytes:
        pairs = [QueuePair(self._open()) for _ in range(self._lanes)]
        data = _OFFER.encode(_Offer(tuple(p.info() for p in pairs)))
        self._offered[data] = pairs
        return data

    def withdraw(self, offer: bytes) -> None:
        for pair in self._offered.pop(offer, ()):
            pair.close()

    def accept(self, session: bytes, offer: bytes, grants: npt.NDArray[np.int64]) -> tuple[bytes, Served]:
        reason = self.unavailable()
        if reason is not None:
            raise TransportUnavailableError(f"{self.name}: {reason}")
        try:
            theirs = _OFFER.decode(offer).pairs
        except WireError as error:
            raise PeerProtocolError(f"verbs: {error}") from None
        if not 1 <= len(theirs) <= 64:
            raise PeerProtocolError(f"verbs: {len(theirs)} queue pairs offered")
        device = self._open()
        pairs: list[QueuePair] = []
        try:
            for info in theirs:
                pairs.append(QueuePair(device))
                pairs[-1].connect(info)
        except BaseException:
            _Session(pairs).close()
            raise
        every = range(len(self.regions.metas()))
        answer = _Answer(
            tuple(p.info() for p in pairs),
            tuple(device.memory[i].rkey if i in device.memory else 0 for i in every),
            tuple(device.bases.get(i, 0) for i in every),
        )
        return _ANSWER.encode(answer), _Session(pairs)

    def open(self, peer: PeerInfo, session: bytes, offer: bytes, answer: bytes) -> Channel:
        try:
            found = _ANSWER.decode(answer)
        except WireError as error:
            raise PeerProtocolError(f"verbs: {error}") from None
        pairs = self._offered.get(offer, [])
        described = len(peer.regions)
        if len(found.pairs) != len(pairs) or {len(found.keys), len(found.bases)} != {described}:
            raise PeerProtocolError("verbs: the peer's answer does not match the offer")
        for pair, info in zip(pairs, found.pairs, strict=True):
            pair.connect(info)
        del self._offered[offer]
        return self._channel(pairs, found)

    def _channel(self, pairs: list[QueuePair], answer: _Answer) -> Channel:
        return VerbsChannel(self._open(), pairs, answer)

    def close(self) -> None:
        for offer in list(self._offered):
            self.withdraw(offer)
        if self._device is not None:
            self._device.close()
            self._device = None

    def _open(self) -> Device:
        if self._device is None:
            rail = choose(topology(), self._memory_place(), self._rank, self._devices)
            self._device = Device(rail.nic.name, rail.nic.port, self.regions, self.gpu)
            self.rail = rail
            log.info("rank %d moves KV over RDMA device %s", self._rank, rail)
        return self._device

    def _memory_place(self) -> Place:
        """Of the accelerator, or of the largest range of host memory."""
        if self._place != NOWHERE:
            return self._place
        largest = max(self.regions, key=lambda region: region.nbytes, default=None)
        if largest is None or largest.kind is not MemoryKind.HOST:
            return NOWHERE
        return Place((), node_of(largest.address, largest.nbytes))


class GpuDirectChannel(VerbsChannel):
    """As `VerbsChannel`, into GPU memory and out of it."""

    name = TransportName.GPUDIRECT

    def __init__(self, device: Device, pairs: list[QueuePair], answer: _Answer, gpu: DeviceMemory) -> None:
        super().__init__(device, pairs, answer)
        self._gpu = gpu

    def read(self, lane: int, runs: Runs, token: CancelToken) -> None:
        super().read(lane, runs, token)
        self._gpu.flush()


class _GpuDirectSession(_Session):
    def __init__(self, pairs: list[QueuePair], gpu: DeviceMemory) -> None:
        super().__init__(pairs)
        self._gpu = gpu

    def landed(self) -> None:
        self._gpu.flush()


class GpuDirectTransport(VerbsTransport):
    """GPUDirect RDMA: pools in GPU memory that the adapter reaches itself, registered by dma-buf, else by
    nvidia-peermem. It has never run: no adapter and GPU were there. Used only where it is named.

    A read's completion says that the adapter has written; `flush` orders that before kernels launched later.
    The owner publishes blocks behind the event of the pass that wrote them, so its adapter loads these bytes.
    """

    name = TransportName.GPUDIRECT

    def __init__(self, regions: RegionTable, lanes: int, rank: int, place: Place, devices: Sequence[str],
                 gpu: DeviceMemory | None) -> None:  # fmt: skip
        super().__init__(regions, lanes, rank, place, devices)
        self.gpu = gpu

    def unavailable(self) -> str | None:
        if all(region.kind is MemoryKind.HOST for region in self.regions):
            return "no pool is in GPU memory"
        if self.gpu is None:
            return "CUDA is not used by this process"
        reason = verbs_reason()
        if reason is None:
            with contextlib.suppress(TransportUnavailableError):
                self.gpu.prepare()
            reason = super().unavailable()
        return reason

    def accept(self, session: bytes, offer: bytes, grants: npt.NDArray[np.int64]) -> tuple[bytes, Served]:
        answer, served = super().accept(session, offer, grants)
        assert isinstance(served, _Session)
        assert self.gpu is not None
        return answer, _GpuDirectSession(served.pairs, self.gpu)

    def _channel(self, pairs: list[QueuePair], answer: _Answer) -> Channel:
        assert self.gpu is not None
        return GpuDirectChannel(self._open(), pairs, answer, self.gpu)

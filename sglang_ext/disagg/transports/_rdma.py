"""Operations of `verbs` on a device: opening it, registering memory, and connecting queue pairs.

Everything that touches pyverbs is in this file and in `verbs`; both import it late, so that a host without
it only loses the transport. Traps of pyverbs 44 that the code works around are named where they are met.
"""

from __future__ import annotations

import logging
import os
import random
import time
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_ext.disagg.errors import (
    PeerGoneError,
    PeerProtocolError,
    TransferError,
    TransportUnavailableError,
)
from sglang_ext.disagg.memory import MemoryKind, Region, RegionTable
from sglang_ext.disagg.transports._posting import Poster, queue_pair_address
from sglang_ext.disagg.transports.cuda_ipc import DeviceMemory

DEPTH: Final = 256
"""Send queue of a queue pair, in work requests."""
BATCH: Final = 64
"""Work requests per doorbell; the last of each is signaled."""
TIMEOUT: Final = 14
"""Acknowledgement timeout, 4.096 us * 2**14: about 67 ms, seven retries."""
RETRIES: Final = 7


def import_pyverbs() -> str | None:
    """Import pyverbs; why not, or None. Its import configures the root logger, which is undone here."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        import pyverbs.device  # noqa: F401
    except ImportError as error:
        return f"pyverbs cannot be imported ({error}): install python3-pyverbs of this distribution"
    finally:
        root.handlers[:], root.level = handlers, level
    return None


def enums() -> Any:
    """The module of constants, which changed its name after rdma-core 58."""
    try:
        import pyverbs.enums as e
    except ImportError:  # pragma: no cover - newer rdma-core
        import pyverbs.libibverbs_enums as e
    return e


class QueuePairInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters with which the other side connects to a queue pair."""

    number: int
    sequence: int
    gid: str
    lid: int
    mtu: int
    reads: int


class Device:
    """An open device with a protection domain, and every region registered in it."""

    def __init__(self, name: str, port: int, regions: RegionTable, gpu: DeviceMemory | None = None) -> None:
        """gpu: the GPU whose memory is registered too."""
        from pyverbs.device import Context
        from pyverbs.pd import PD
        from pyverbs.pyverbs_error import PyverbsError

        e = enums()
        self.name = name
        self.access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_WRITE
        self.port = port
        try:
            self.context = Context(name=name)
            self.limits = self.context.query_device()
            self.attributes = self.context.query_port(self.port)
            self.gid_index, self.gid = self._address(e)
            self.domain = PD(self.context)
        except PyverbsError as error:
            raise TransportUnavailableError(f"verbs: {name} cannot be opened: {error}") from None
        self.memory: dict[int, Any] = {}
        """By region."""
        self.bases: dict[int, int] = {}
        """By region, the address that the adapter knows it by."""
        try:
            for region in regions:
                self._register(region, gpu)
        except BaseException:
            self.close()
            raise

    def _register(self, region: Region, gpu: DeviceMemory | None) -> None:
        from pyverbs.mr import MR
        from pyverbs.pyverbs_error import PyverbsError

        reason = ""
        if region.kind is MemoryKind.CUDA:
            reason = self._register_dmabuf(region, gpu) or ""
            if not reason:
                return
        try:
            # A memory region holds no reference to the memory: the region table keeps the owner. A GPU's is
            # registered so by nvidia-peermem.
            registered = MR(self.domain, region.nbytes, self.access, address=region.address)
        except PyverbsError as error:
            hint = (
                "Load nvidia-peermem, or leave out gpudirect: pinned memory carries the KV then"
                if region.kind is MemoryKind.CUDA
                else "Raise the memlock limit (ulimit -l unlimited)"
            )
            raise TransportUnavailableError(
                f"verbs: {region.nbytes} bytes of {region.kind} memory cannot be registered: "
                f"{reason and reason + '; '}{error}",
                hint=hint,
            ) from None
        self.memory[region.index], self.bases[region.index] = registered, region.address

    def _register_dmabuf(self, region: Region, gpu: DeviceMemory | None) -> str | None:
        """Register GPU memory by a dma-buf; why that cannot be, or None."""
        from pyverbs.pyverbs_error import PyverbsError

        if gpu is None:
            return "CUDA is not used by this process"
        try:
            from pyverbs.mr import DmaBufMR

            fd, at = gpu.dmabuf(region.address, region.nbytes)
            try:
                registered = DmaBufMR(self.domain, region.nbytes, self.access, dmabuf=fd, offset=at)
            finally:
                os.close(fd)  # the registration holds the memory
        except (ImportError, TransportUnavailableError, PyverbsError) as error:
            return f"by dma-buf: {error}"
        # pyverbs registers it at its offset in the dma-buf, not at its address.
        self.memory[region.index], self.bases[region.index] = registered, at
        return None

    def close(self) -> None:
        """Deregister everything and close the device."""
        for region in self.memory.values():
            region.close()
        self.memory.clear()
        self.domain.close()
        self.context.close()

    def _address(self, e: Any) -> tuple[int, str]:
        """The GID to use: RoCE v2 with an IPv4 address where there is one."""
        best: tuple[tuple[bool, bool], int, str] | None = None
        for entry in self.context.query_gid_table(64):
            gid = entry.gid_str()
            rank = (entry.gid_type == e.IBV_GID_TYPE_ROCE_V2, gid.startswith("0000:0000:0000:0000:0000:ffff"))
            if best is None or rank > best[0]:
                best = (rank, entry.gid_index, gid)
        if best is None:
            return 0, str(self.context.query_gid(self.port, 0))
        return best[1], best[2]


class QueuePair:
    """One RC queue pair with its completion queue."""

    def __init__(self, device: Device) -> None:
        from pyverbs.cq import CQ
        from pyverbs.pyverbs_error import PyverbsError
        from pyverbs.qp import QPCap, QPEx, QPInitAttrEx

        e = self._e = enums()
        self._device = device
        limits = device.limits
        self.depth = min(DEPTH, limits.max_qp_wr)
        self.reads = max(1, min(limits.max_qp_rd_atom, limits.max_qp_init_rd_atom, 255))
        self.sequence = random.SystemRandom().randrange(1 << 24)
        try:
            self._cq = CQ(device.context, self.depth + 8, None, None, 0)
            capacity = QPCap(max_send_wr=self.depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
            self._qp = QPEx(
                device.context,
                QPInitAttrEx(
                    qp_type=e.IBV_QPT_RC,
                    scq=self._cq,
                    rcq=self._cq,
                    cap=capacity,
                    pd=device.domain,
                    send_ops_flags=e.IBV_QP_EX_WITH_RDMA_READ | e.IBV_QP_EX_WITH_RDMA_WRITE,
                    comp_mask=e.IBV_QP_INIT_ATTR_PD | e.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                ),
            )
        except PyverbsError as error:
            raise TransportUnavailableError(f"verbs: no queue pair on {device.name}: {error}") from None
        try:
            self._poster = Poster(queue_pair_address(self._qp), BATCH)
        except BaseException:
            self.close()
            raise

    def info(self) -> QueuePairInfo:
        """For the other side."""
        d = self._device
        return QueuePairInfo(
            self._qp.qp_num, self.sequence, d.gid, d.attributes.lid, int(d.attributes.active_mtu), self.reads
        )

    def connect(self, peer: QueuePairInfo) -> None:
        """To ready-to-send, towards the peer's queue pair.

        Raises:
            PeerProtocolError: the peer's description makes no sense to the device.
        """
        from pyverbs.addr import GID, AHAttr, GlobalRoute
        from pyverbs.pyverbs_error import PyverbsError
        from pyverbs.qp import QPAttr

        d = self._device
        attr = QPAttr(port_num=d.port)
        try:
            attr.qp_access_flags = d.access
            attr.pkey_index = 0
            self._qp.to_init(attr)
            attr.path_mtu = min(int(d.attributes.active_mtu), peer.mtu)
            attr.dest_qp_num = peer.number
            attr.rq_psn = peer.sequence
            attr.max_dest_rd_atomic = self.reads
            attr.min_rnr_timer = 12
            route = GlobalRoute(dgid=GID(peer.gid), sgid_index=d.gid_index, hop_limit=64)
            attr.ah_attr = AHAttr(port_num=d.port, is_global=1, gr=route, dlid=peer.lid)
            self._qp.to_rtr(attr)
            attr.sq_psn = self.sequence
            # The responder serves as many reads as it announced; more may be refused by hardware.
            attr.max_rd_atomic = max(1, min(self.reads, peer.reads))
            attr.timeout = TIMEOUT
            attr.retry_cnt = RETRIES
            attr.rnr_retry = 7
            self._qp.to_rts(attr)
        except (PyverbsError, ValueError, OverflowError) as error:
            raise PeerProtocolError(f"verbs: cannot connect to queue pair {peer.number}: {error}") from None

    def post(self, requests: npt.NDArray[np.int64], *, write: bool) -> None:
        """One doorbell, see `Poster.post`."""
        self._poster.post(requests, write=write)

    def poll(self) -> int | None:
        """The status of the next completion, None when there is none yet."""
        n, completions = self._cq.poll(1)
        return int(completions[0].status) if n else None

    def wait(self, deadline: float) -> None:
        """Return with the next completion.

        Raises:
            PeerGoneError: the peer did not acknowledge. PeerProtocolError: it refused the address or key.
        """
        spins = 0
        while (status := self.poll()) is None:
            spins += 1
            if spins > 50:
                # Sleeping gives the interpreter to others; the first polls catch operations that complete at
                # once.
                time.sleep(20e-6)
                if time.monotonic() > deadline:
                    raise PeerGoneError("verbs: no completion within the retries of the queue pair")
        if status:
            raise self._error(status)

    def close(self) -> None:
        """Destroy the queue pair: nothing moves through it when this has returned."""
        self._qp.close()
        self._cq.close()

    def _error(self, status: int) -> TransferError:
        e = self._e
        if status in (e.IBV_WC_REM_ACCESS_ERR, e.IBV_WC_REM_INV_REQ_ERR, e.IBV_WC_REM_OP_ERR):
            return PeerProtocolError(f"verbs: the peer's memory is not what it described (status {status})")
        return PeerGoneError(f"verbs: the request failed (status {status})")

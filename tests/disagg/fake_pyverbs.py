"""pyverbs over an adapter that copies memory of this process, for transports of RDMA on hosts without one.

It has the names and arguments of pyverbs 44 that the product uses, keys that are checked, and ``post_send``
behind the pointers by which programs in C call it. Nothing is asynchronous, nothing is lost, and it takes
requests that a real adapter refuses: for those there is the guest of tests/rdma.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_ext.disagg.transports import verbs
from sglang_ext.disagg.transports.rails import Nic, Place, Topology

READ, WRITE = 4, 0
SIGNALED = 2
REMOTE_ACCESS, LOCAL_PROTECTION, FLUSHED = 10, 4, 5
RESET, INIT, READY_TO_RECEIVE, READY, BROKEN = 0, 1, 2, 3, 6


class PyverbsError(Exception):
    """As pyverbs has it."""


class WorkRequest(ctypes.Structure):
    """``struct ibv_send_wr`` of `infiniband/verbs.h`, for RDMA."""

    _fields_ = (
        ("wr_id", ctypes.c_uint64),
        ("next", ctypes.c_void_p),
        ("sg_list", ctypes.c_void_p),
        ("num_sge", ctypes.c_int),
        ("opcode", ctypes.c_uint),
        ("send_flags", ctypes.c_uint),
        ("imm_data", ctypes.c_uint32),
        ("remote_addr", ctypes.c_uint64),
        ("rkey", ctypes.c_uint32),
    )


class Entry(ctypes.Structure):
    """``struct ibv_sge``."""

    _fields_ = (("addr", ctypes.c_uint64), ("length", ctypes.c_uint32), ("lkey", ctypes.c_uint32))


class Fabric:
    """Registered memory and queue pairs of all adapters. doorbells: how many requests each had."""

    def __init__(self) -> None:
        self.numbers = itertools.count(100)
        self.memory: dict[int, tuple[int, int, int]] = {}
        """By key: the address that requests name, its bytes, and where it really is."""
        self.pairs: dict[int, Pair] = {}
        """By the address of their struct."""
        self.doorbells: list[int] = []
        self.lock = threading.RLock()
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        self._call = kind(self._post)
        self.context = (ctypes.c_uint64 * 40)()
        self.context[1 + 25] = ctypes.cast(self._call, ctypes.c_void_p).value or 0

    def _post(self, pair: int, first: int | None, bad: int) -> int:
        with self.lock:
            count, own = 0, self.pairs[pair]
            while first:
                request, count = WorkRequest.from_address(first), count + 1
                own.perform(request)
                first = request.next
            self.doorbells.append(count)
        return 0

    def find(self, key: int, address: int, nbytes: int) -> int | None:
        base, size, real = self.memory.get(key, (0, -1, 0))
        inside = base <= address and address + nbytes <= base + size
        return real + address - base if inside else None


class Pair(ctypes.Structure):
    """pyverbs' `QPEx`, with its ``struct ibv_qp``."""

    _fields_ = (
        ("context", ctypes.c_uint64),
        ("pointers", ctypes.c_uint64 * 5),
        ("numbers", ctypes.c_uint32 * 4),
    )
    fabric: Fabric
    qp_num = property(lambda self: self.numbers[1])
    qp_state = property(lambda self: self.numbers[2])
    qp_type = property(lambda self: self.numbers[3])

    def __init__(self, context: Any, attributes: Any) -> None:
        super().__init__(ctypes.addressof(self.fabric.context))
        self.numbers[1], self.numbers[3] = next(self.fabric.numbers), attributes.qp_type
        self.completions: list[int] = attributes.scq.statuses
        self.peer = 0
        self.fabric.pairs[ctypes.addressof(self)] = self

    def to_init(self, attributes: Any) -> None:
        self.numbers[2] = INIT

    def to_rtr(self, attributes: Any) -> None:
        self.peer, self.numbers[2] = attributes.dest_qp_num, READY_TO_RECEIVE

    def to_rts(self, attributes: Any) -> None:
        self.numbers[2] = READY

    def close(self) -> None:
        with self.fabric.lock:
            self.fabric.pairs.pop(ctypes.addressof(self), None)
            self.numbers[2] = RESET

    def perform(self, request: WorkRequest) -> None:
        """Copy, and complete where it is signaled or fails."""
        entry = Entry.from_address(request.sg_list)
        here = self.fabric.find(entry.lkey, entry.addr, entry.length)
        there = self.fabric.find(request.rkey, request.remote_addr, entry.length)
        peers = [pair for pair in self.fabric.pairs.values() if pair.qp_num == self.peer]
        status = 0
        if self.numbers[2] != READY or not peers:
            status = FLUSHED
        elif here is None:
            status = LOCAL_PROTECTION
        elif there is None:
            status = REMOTE_ACCESS
        elif request.opcode == READ:
            ctypes.memmove(here, there, entry.length)
        else:
            assert request.opcode == WRITE
            ctypes.memmove(there, here, entry.length)
        if status:
            self.numbers[2] = BROKEN
        if status or request.send_flags & SIGNALED:
            self.completions.append(status)


class Completions:
    """pyverbs' `CQ`."""

    def __init__(self, context: Any, size: int, *_rest: Any) -> None:
        self.statuses: list[int] = []

    def poll(self, count: int) -> tuple[int, list[Any]]:
        if not self.statuses:
            return 0, []
        return 1, [SimpleNamespace(status=self.statuses.pop(0))]

    def close(self) -> None:
        self.statuses.clear()


class Context:
    """pyverbs' `Context`."""

    def __init__(self, *, name: str) -> None:
        assert name == "fake0"

    def query_device(self) -> Any:
        return SimpleNamespace(max_qp_wr=1024, max_qp_rd_atom=16, max_qp_init_rd_atom=16)

    def query_port(self, port: int) -> Any:
        return SimpleNamespace(lid=0, active_mtu=5)

    def query_gid_table(self, count: int) -> list[Any]:
        return [
            SimpleNamespace(
                gid_type=2, gid_index=1, gid_str=lambda: "0000:0000:0000:0000:0000:ffff:7f00:0001"
            )
        ]

    def close(self) -> None:
        pass


def _registered(fabric: Fabric, base: int, nbytes: int, real: int) -> Any:
    key = next(fabric.numbers)
    fabric.memory[key] = (base, nbytes, real)
    return SimpleNamespace(lkey=key, rkey=key, close=lambda: fabric.memory.pop(key, None))


def install(patch: pytest.MonkeyPatch) -> Fabric:
    """Put it in place of pyverbs, with an adapter on this host, for as long as the patch lasts."""
    fabric = Fabric()

    def memory(domain: Any, nbytes: int, access: int, *, address: int) -> Any:
        return _registered(fabric, address, nbytes, address)

    values: dict[str, dict[str, Any]] = {
        "": {},
        "device": {"Context": Context},
        "pd": {"PD": lambda context: SimpleNamespace(close=lambda: None)},
        "mr": {"MR": memory},
        "cq": {"CQ": Completions},
        "qp": {
            "QPCap": lambda **sizes: sizes,
            "QPEx": type("QPEx", (Pair,), {"fabric": fabric}),
            "QPInitAttrEx": lambda **given: SimpleNamespace(**given),
            "QPAttr": lambda **given: SimpleNamespace(**given),
        },
        "addr": {name: lambda *_, **__: None for name in ("GID", "AHAttr", "GlobalRoute")},
        "pyverbs_error": {"PyverbsError": PyverbsError},
        "enums": {
            **{f"IBV_ACCESS_{name}": 1 for name in ("LOCAL_WRITE", "REMOTE_READ", "REMOTE_WRITE")},
            **{f"IBV_QP_{name}": 1 for name in ("EX_WITH_RDMA_READ", "EX_WITH_RDMA_WRITE", "INIT_ATTR_PD")},
            "IBV_QP_INIT_ATTR_SEND_OPS_FLAGS": 2,
            "IBV_QPT_RC": 2,
            "IBV_GID_TYPE_ROCE_V2": 2,
            "IBV_WC_REM_ACCESS_ERR": REMOTE_ACCESS,
            "IBV_WC_REM_INV_REQ_ERR": 9,
            "IBV_WC_REM_OP_ERR": 11,
        },
    }
    for name, content in values.items():
        module = ModuleType(f"pyverbs.{name}".rstrip("."))
        vars(module).update(content)
        patch.setitem(sys.modules, module.__name__, module)
    adapter = Topology((Nic("fake0", 1, Place((), -1)),))
    patch.setattr(verbs, "topology", lambda: adapter)
    return fabric

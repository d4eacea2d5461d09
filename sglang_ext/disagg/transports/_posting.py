"""Posting work requests by libibverbs' own call: a doorbell for many, and a call of Python for all of them.

pyverbs takes a call and more for each request. Here the requests of a doorbell are rows of arrays in the
layout of ``struct ibv_send_wr`` and ``struct ibv_sge`` (`infiniband/verbs.h`), filled by numpy.
``ibv_post_send`` is an inline function there, so we do as it does: call a pointer in the device's table
of operations. These layouts are compiled into every program that uses libibverbs, so that they stay.

pyverbs keeps the address of its ``struct ibv_qp`` to itself. It is one of the words of the object; it is
taken for it only if the memory there has the number, state and kind of the queue pair.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sglang_ext.disagg.errors import PeerGoneError, TransportUnavailableError

WORK_REQUEST: Final = np.dtype(
    {
        "names": ["id", "next", "entries", "count", "operation", "flags", "address", "key"],
        "formats": ["<u8", "<u8", "<u8", "<i4", "<u4", "<u4", "<u8", "<u4"],
        "offsets": [0, 8, 16, 24, 28, 32, 40, 48],
        "itemsize": 128,
    }
)
ENTRY: Final = np.dtype([("address", "<u8"), ("length", "<u4"), ("key", "<u4")])
RDMA_WRITE: Final = 0
RDMA_READ: Final = 4
SIGNALED: Final = 2
_QP: Final = struct.Struct("<QQQQQQIIII")
"""Context, the caller's pointer, domain, two completion queues, shared receive queue; handle, number, state,
kind."""
_POST_SEND: Final = 8 + 25 * 8
"""Of the pointer in ``struct ibv_context``: behind the device, the 26th operation."""
_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class Poster:
    """Posts to one queue pair. Not thread-safe.

    Args:
        queue_pair: address of its ``struct ibv_qp``.
        most: requests of a doorbell.
    """

    def __init__(self, queue_pair: int, most: int) -> None:
        self._queue_pair = queue_pair
        context = int.from_bytes(ctypes.string_at(queue_pair, 8), "little")
        operation = int.from_bytes(ctypes.string_at(context + _POST_SEND, 8), "little")
        self._call = _CALL(operation)
        self._requests = np.zeros(most, WORK_REQUEST)
        self._entries = np.zeros(most, ENTRY)
        first, entries = int(self._requests.ctypes.data), int(self._entries.ctypes.data)
        self._next = first + WORK_REQUEST.itemsize * np.arange(1, most + 1, dtype=np.uint64)
        self._requests["id"] = np.arange(most)
        self._requests["entries"] = entries + ENTRY.itemsize * np.arange(most, dtype=np.uint64)
        self._requests["count"] = 1
        self._bad = ctypes.c_void_p()

    def post(self, requests: npt.NDArray[np.int64], *, write: bool) -> None:
        """One doorbell, whose last request is signaled.

        Args:
            requests: int64, shape (n, 5): remote key, remote address, local key, local address, bytes.

        Raises:
            PeerGoneError: the device takes no more.
        """
        count = len(requests)
        chain, entries = self._requests[:count], self._entries[:count]
        chain["operation"] = RDMA_WRITE if write else RDMA_READ
        chain["key"], chain["address"] = requests[:, 0], requests[:, 1]
        chain["next"], chain["flags"] = self._next[:count], 0
        chain["next"][-1], chain["flags"][-1] = 0, SIGNALED
        entries["key"], entries["address"], entries["length"] = requests[:, 2], requests[:, 3], requests[:, 4]
        code = self._call(self._queue_pair, chain.ctypes.data, ctypes.addressof(self._bad))
        if code:
            raise PeerGoneError(f"verbs: requests cannot be posted: {os.strerror(abs(code))}")


def queue_pair_address(pair: Any) -> int:
    """Where pyverbs has the ``struct ibv_qp`` of an object.

    Raises:
        TransportUnavailableError: it is another pyverbs than those that we know.
    """
    count = type(pair).__basicsize__ // 8
    words = struct.unpack(f"<{count}Q", ctypes.string_at(id(pair), 8 * count))
    wanted = (pair.qp_num, int(pair.qp_state), int(pair.qp_type))
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for word in words:
            # Read by the kernel, which refuses a word that is no address.
            found = _read(memory.fileno(), word, _QP.size)
            if found and _QP.unpack(found)[7:] == wanted and _read(memory.fileno(), _QP.unpack(found)[0], 8):
                return int(word)
    raise TransportUnavailableError(
        "verbs: this pyverbs keeps its queue pairs in a way that we do not know",
        hint="Use python3-pyverbs of the distribution",
    )


def _read(fd: int, address: int, count: int) -> bytes:
    if not 4096 <= address < 1 << 47:
        return b""
    try:
        data = os.pread(fd, count, address)
    except OSError:
        return b""
    return data if len(data) == count else b""

"""Requests of RDMA as rows of memory, posted by one call. The adapter is a fake in the layout of libibverbs'
header; on Soft-RoCE the suite of tests/rdma posts them.
"""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_ext.disagg.errors import PeerGoneError, TransportUnavailableError
from sglang_ext.disagg.transports import CancelToken
from sglang_ext.disagg.transports._posting import Poster, queue_pair_address
from sglang_ext.disagg.transports._rdma import BATCH, QueuePair
from sglang_ext.disagg.transports.verbs import VerbsChannel, _Answer
from tests.disagg.fake_pyverbs import Entry, WorkRequest


class Pair(ctypes.Structure):
    """A queue pair: its object holds the address of its memory, as one of pyverbs does."""

    _fields_ = (
        ("context", ctypes.c_uint64),
        ("pointers", ctypes.c_uint64 * 5),
        ("numbers", ctypes.c_uint32 * 4),
    )
    qp_num = property(lambda self: self.numbers[1])
    qp_state = property(lambda self: self.numbers[2])
    qp_type = property(lambda self: self.numbers[3])


class Verbs:
    """A device whose ``post_send`` walks the chain."""

    def __init__(self, code: int = 0) -> None:
        self.doorbells: list[list[tuple[int, ...]]] = []
        self.code = code
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        self._call = kind(self._post)
        operations = (ctypes.c_uint64 * 40)()
        operations[1 + 25] = ctypes.cast(self._call, ctypes.c_void_p).value or 0
        self._operations = operations
        self.pair = Pair(ctypes.addressof(operations))
        self.pair.numbers[:] = (3, 77, 3, 2)

    def _post(self, pair: int, first: int | None, bad: int) -> int:
        assert pair == ctypes.addressof(self.pair)
        posted = []
        while first:
            request = WorkRequest.from_address(first)
            entry = Entry.from_address(request.sg_list)
            assert request.num_sge == 1
            fields = (request.rkey, request.remote_addr, entry.lkey, entry.addr, entry.length)
            posted.append((*fields, request.opcode, request.send_flags))
            first = request.next
        self.doorbells.append(posted)
        return self.code


def requests(count: int) -> Any:
    rng = np.random.default_rng(count)
    return rng.integers(1, 1 << 31, (count, 5), dtype=np.int64) * np.array([1, 1 << 15, 1, 1 << 15, 1])


@pytest.mark.parametrize("write", [False, True])
def test_every_field_of_every_request_is_posted(write: bool) -> None:
    verbs = Verbs()
    poster = Poster(ctypes.addressof(verbs.pair), BATCH)
    for count in (BATCH, 3, BATCH, 1):
        wanted = requests(count)
        poster.post(wanted, write=write)
        found = verbs.doorbells.pop()
        assert [row[:5] for row in found] == [tuple(row) for row in wanted.tolist()]
        assert {row[5] for row in found} == {0 if write else 4}
        assert [row[6] for row in found] == [0] * (count - 1) + [2]
        wanted[0, 1] += 1
        assert found[0][:5] != tuple(wanted[0].tolist())


def test_a_device_that_takes_no_more_is_an_error() -> None:
    verbs = Verbs(12)
    with pytest.raises(PeerGoneError, match="Cannot allocate memory"):
        Poster(ctypes.addressof(verbs.pair), 4).post(requests(2), write=False)


def test_a_queue_pair_is_found_in_its_object_by_its_numbers() -> None:
    verbs = Verbs()
    assert queue_pair_address(verbs.pair) == ctypes.addressof(verbs.pair)

    class Other(Pair):
        qp_num = property(lambda self: self.numbers[1] + 1)

    other = Other(verbs.pair.context)
    other.numbers[:] = verbs.pair.numbers
    with pytest.raises(TransportUnavailableError, match="this pyverbs"):
        queue_pair_address(other)


def test_a_thousand_requests_take_few_calls_of_python() -> None:
    """Of functions, Python's and compiled ones. Soft-RoCE: tests/rdma/guest/verbs_suite.py."""
    fake, calls = Verbs(), 0
    pair = QueuePair.__new__(QueuePair)
    pair.depth, pair._poster = 256, Poster(ctypes.addressof(fake.pair), BATCH)
    pair._poster._call = lambda *_: 0  # type: ignore[assignment]
    pair._cq = SimpleNamespace(poll=lambda count: (1, [SimpleNamespace(status=0)]))
    device: Any = SimpleNamespace(memory={2: SimpleNamespace(lkey=6)}, bases={2: 64})
    channel = VerbsChannel(device, [pair], _Answer((), (11, 12), (0, 4096)))
    runs = np.zeros((1000, 5), np.int64)
    runs[:, 0], runs[:, 1], runs[:, 2] = 1, np.arange(1000) * 512, 2
    runs[:, 3], runs[:, 4] = np.arange(1000) * 1024, 256

    def count(_frame: object, event: str, _of: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        channel.read(0, runs, CancelToken())
    finally:
        sys.setprofile(None)
    assert 0 < calls < 300

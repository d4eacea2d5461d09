"""The conformance suite over real verbs: RC queue pairs on a Soft-RoCE device. Runs in the guest."""

import logging
import sys
from typing import Any

import numpy as np
import pytest

from sglang_ext.disagg.errors import PeerGoneError, PeerProtocolError
from sglang_ext.disagg.memory import MemoryKind, RegionTable
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transports import CancelToken, PeerInfo, TransportName
from sglang_ext.disagg.transports.verbs import VerbsTransport
from sglang_ext.testing.transfer.host_device import HostDevice
from sglang_ext.testing.transfer.transports import TransportConformance


class TestVerbs(TransportConformance):
    transport = TransportName.VERBS
    seeds = 2
    rewrites = 25


class TestStagedVerbs(TestVerbs):
    """Through pinned memory: pools that are said to be in a GPU's memory, of which verbs sees nothing."""

    memory = MemoryKind.CUDA
    seeds = 1
    rewrites = 10

    def config(self, name: str, **changes: Any) -> EndpointConfig:
        # The guest is interpreted: to connect with staging takes longer there than peers are given elsewhere.
        changes["dead_after"] = 5 * changes.get("dead_after", 2.0)
        return super().config(name, **{"device": HostDevice(), "staging_bytes": 8 << 20, **changes})


def connect(size: int = 1 << 16):  # type: ignore[no-untyped-def]
    """Two transports with a region each, and a channel from the second to the first."""
    sides = []
    for value in (7, 0):
        memory, regions = np.full(size, value, np.uint8), RegionTable()
        regions.add(memory.ctypes.data, size, keep=memory)
        sides.append((memory, regions, VerbsTransport(regions, lanes=2)))
    (_, there, owner), (_, _, reader) = sides
    assert reader.unavailable() is None
    offer = reader.offer()
    answer, served = owner.accept(b"s" * 16, offer, np.zeros(4, np.int64))
    peer = PeerInfo("owner", b"e" * 16, "", "", 1, there.metas())
    return sides, reader.open(peer, b"s" * 16, offer, answer), served


def close(sides, channel, served) -> None:  # type: ignore[no-untyped-def]
    channel.close()
    served.close()
    for _, _, transport in sides:
        transport.close()


def test_a_range_that_the_owner_did_not_register_is_refused_and_ends_the_queue_pair() -> None:
    sides, channel, served = connect()
    channel._remote[:, 1] += 1 << 30
    with pytest.raises(PeerProtocolError, match="not what it described"):
        channel.read(0, np.array([(0, 0, 0, 0, 64)], np.int64), CancelToken())
    assert channel.broken
    with pytest.raises(PeerGoneError, match="connect again"):
        channel.read(0, np.array([(0, 0, 0, 0, 64)], np.int64), CancelToken())
    assert not sides[1][0].any()
    close(sides, channel, served)


def test_an_owner_that_fences_is_gone_for_the_reader() -> None:
    sides, channel, served = connect()
    channel.read(0, np.array([(0, 0, 0, 0, 64)], np.int64), CancelToken())
    assert served.fence()
    with pytest.raises(PeerGoneError):
        channel.write(1, np.array([(0, 0, 0, 64, 64)], np.int64), CancelToken(), (0, 0))
    assert (sides[0][0] == 7).all()
    close(sides, channel, served)


def test_more_requests_than_the_send_queue_holds() -> None:
    sides, channel, served = connect(1 << 20)
    order = np.random.default_rng(1).permutation(4096)
    runs = np.zeros((4096, 5), np.int64)
    runs[:, 1], runs[:, 3], runs[:, 4] = order * 256, np.arange(4096) * 256, 256
    source = sides[0][0]
    source[:] = np.random.default_rng(2).integers(0, 256, source.size, dtype=np.uint8)
    channel.read(1, runs, CancelToken())
    assert np.array_equal(sides[1][0].reshape(4096, 256), source.reshape(4096, 256)[order])
    close(sides, channel, served)


def test_importing_pyverbs_leaves_the_root_logger_alone() -> None:
    from sglang_ext.disagg.transports._rdma import import_pyverbs

    before = (logging.getLogger().handlers[:], logging.getLogger().level)
    assert import_pyverbs() is None
    assert (logging.getLogger().handlers, logging.getLogger().level) == before


def test_a_thousand_requests_take_few_calls_of_python() -> None:
    """Calls of functions, Python's and compiled ones, while a thousand scattered ranges are read."""
    sides, channel, served = connect(1 << 20)
    runs = np.zeros((1000, 5), np.int64)
    order = np.random.default_rng(1).permutation(2000)[:1000]
    runs[:, 1], runs[:, 3], runs[:, 4] = order * 512, np.arange(1000) * 1024, 256
    calls = 0

    def count(_frame: object, event: str, _of: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        channel.read(0, runs, CancelToken())
    finally:
        sys.setprofile(None)
    print(f"calls per 1,000 requests: {calls}")
    close(sides, channel, served)
    assert calls < 500

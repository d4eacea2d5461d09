"""The conformance suite over the transports that every host has. `verbs` runs in tests/rdma."""

from typing import Any

import numpy as np
import pytest

from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transports import TransportName
from sglang_ext.disagg.transports._stream import MAX_RANGES, _next_request
from sglang_ext.testing.transfer.transports import TransportConformance

pytestmark = pytest.mark.slow


class TestShm(TransportConformance):
    transport = TransportName.SHM


class TestCma(TransportConformance):
    transport = TransportName.CMA


class TestTcp(TransportConformance):
    transport = TransportName.TCP


class ByLanes(TransportConformance):
    """Every read by a lane, as the large ones are."""

    def config(self, name: str, **changes: Any) -> EndpointConfig:
        return super().config(name, **{"inline_bytes": 0, **changes})


class TestShmByLanes(ByLanes):
    transport = TransportName.SHM


class TestCmaByLanes(ByLanes):
    transport = TransportName.CMA


@pytest.mark.parametrize("barrier", [0, 1, 3, 1500, 2000])
def test_what_is_asked_for_after_a_barrier_is_a_request_of_its_own(barrier: int) -> None:
    runs = np.zeros((2000, 5), np.int64)
    runs[:, 4] = np.random.default_rng(barrier).integers(1, 9000, 2000)
    ranges = np.zeros((MAX_RANGES, 3), np.int64)
    at, moved = (0, 0), 0
    while at[0] < 2000:
        first = at[0]
        count, total, *rest = _next_request(runs, at, ranges, True, barrier)
        at = tuple(rest)
        assert count
        assert not first < barrier < at[0]
        moved += total
    assert moved == runs[:, 4].sum()


@pytest.mark.long
class TestShmLong(TestShm):
    seeds = 60
    rewrites = 4000


@pytest.mark.long
class TestCmaLong(TestCma):
    seeds = 60
    rewrites = 4000


@pytest.mark.long
class TestTcpLong(TestTcp):
    seeds = 60
    rewrites = 4000


@pytest.mark.long
class TestShmByLanesLong(TestShmByLanes):
    seeds = 60
    rewrites = 4000


@pytest.mark.long
class TestCmaByLanesLong(TestCmaByLanes):
    seeds = 60
    rewrites = 4000

"""The conformance suite over the transports that every host has. `verbs` runs in tests/rdma."""

import pytest

from sglang_ext.disagg.transports import TransportName
from sglang_ext.testing.transports import TransportConformance


class TestShm(TransportConformance):
    transport = TransportName.SHM


class TestCma(TransportConformance):
    transport = TransportName.CMA


class TestTcp(TransportConformance):
    transport = TransportName.TCP


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

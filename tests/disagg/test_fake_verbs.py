"""The conformance suite over verbs on hosts without an adapter, plain and through pinned memory. pyverbs is a
fake that copies (`fake_pyverbs`); on Soft-RoCE the suite runs in the guest of tests/rdma.
"""

from __future__ import annotations

from typing import Any

import pytest

from sglang_ext.disagg.memory import MemoryKind
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transports import TransportName
from sglang_ext.testing.transfer.host_device import HostDevice
from sglang_ext.testing.transfer.transports import TransportConformance
from tests.disagg.fake_pyverbs import Fabric, install

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fabric(monkeypatch: pytest.MonkeyPatch) -> Fabric:
    return install(monkeypatch)


class TestVerbs(TransportConformance):
    transport = TransportName.VERBS
    seeds = 2
    rewrites = 40


class TestStagedVerbs(TestVerbs):
    memory = MemoryKind.CUDA

    def config(self, name: str, **changes: Any) -> EndpointConfig:
        return super().config(name, **{"device": HostDevice(), "staging_bytes": 1 << 20, **changes})

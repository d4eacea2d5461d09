"""Transfers between hosts that share nothing but a network (``tests.support.lab``)."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from sglang_ext.testing.waiting import wait_until
from tests.support.lab.hosts import Host, Lab, stop, why_not

pytestmark = pytest.mark.slow

PORTS = (31_000, 31_001)


CUT_S = 3.0
"""A switch may take as long to fail over."""


@contextmanager
def endpoint(host: Host, **options: Any) -> Iterator[Endpoint]:
    """An endpoint on a host, with the first line that it prints once it serves."""
    command = [sys.executable, "-m", "sglang_ext.testing.transfer.owner", json.dumps(options)]
    process = host.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield Endpoint(process.stdout, json.loads(process.stdout.readline()))
    finally:
        stop(process)


@dataclass
class Endpoint:
    """A process with its first line of output, and a reader for later ones."""

    out: IO[bytes]
    found: dict[str, Any]

    def more(self, seconds: float) -> str:
        """The next line of its output; empty if none comes in time."""
        ready, _, _ = select.select([self.out], [], [], seconds)
        return self.out.readline().decode() if ready else ""


def sent(host: Host) -> int:
    """Bytes that a host has sent on its network."""
    (line,) = (each for each in host.run("cat", "/proc/net/dev").splitlines() if "lan:" in each)
    return int(line.split()[9])


MASK = "10.77.0.99"


@pytest.mark.parametrize(
    ("family", "network", "masked"),
    [
        pytest.param(4, "kv", False, id="network-for-KV"),
        pytest.param(4, "lan", True, id="masked"),
        pytest.param(6, "lan", False, id="IPv6"),
    ],
)
def test_hosts_reach_each_other_where_they_say(
    key_file: Path, family: int, network: str, masked: bool
) -> None:
    """Bound to every address, on ports that may be used, while all others are closed; over tcp, as they share
    no memory. masked: the owner is behind another address, whose ports lead to its own."""
    if reason := why_not():
        pytest.skip(reason)
    wildcard = "::" if family == 6 else "0.0.0.0"
    with (
        Lab("a", "b", shared=[key_file], families=(family,), networks=("lan", "kv")) as lab,
        ExitStack() as stack,
    ):
        for host in ("a", "b"):
            lab.close_ports(host, but=PORTS)
        if masked:
            lab.mask("b", MASK)
        common = {"bind": wildcard, "ports": PORTS, "key_file": str(key_file)}
        there = MASK if masked else lab["b"].address(network, family)
        owner = stack.enter_context(endpoint(lab["b"], announce=there, **common))
        host = f"[{there}]" if family == 6 else there
        assert owner.found["address"].rpartition(":")[0] == host
        assert int(owner.found["address"].rpartition(":")[2]) in PORTS
        here = lab["a"].address(network, family)
        reader = stack.enter_context(
            endpoint(lab["a"], announce=here, connect=owner.found["address"], **common)
        )
        assert reader.found["transport"] == "tcp"


def test_a_network_that_fails_over_ends_nothing(key_file: Path) -> None:
    """The patient writer continues when the network is back; with the hasty peer, the session has ended."""
    if reason := why_not():
        pytest.skip(reason)
    with Lab("a", "b", shared=[key_file], families=(4,)) as lab, ExitStack() as stack:
        a, b = lab["a"], lab["b"]
        writers = {}
        for name, far_after in (("patient", 8.0), ("hasty", 1.0)):
            common = {"name": name, "bind": "0.0.0.0", "far_after": far_after, "key_file": str(key_file)}
            owner = stack.enter_context(endpoint(b, announce=b.address(), aside=[0], **common))
            writes = {"connect": owner.found["address"], "reserve": [0], "write": 1 << 10}
            writers[name] = stack.enter_context(endpoint(a, announce=a.address(), **common, **writes))
        lab.cut("a", "b")
        time.sleep(CUT_S)
        lab.wire("a", "b")
        assert "ended" in writers["hasty"].more(30)
        before = sent(a)
        wait_until(lambda: sent(a) > before + (1 << 16), seconds=30, what="the patient writer goes on")
        assert writers["patient"].more(0) == ""

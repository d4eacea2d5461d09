"""Transfers between hosts that share nothing but a network (``sglang_ext.testing.lab``)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.testing.lab.hosts import Host, Lab, stop, why_not

PORTS = (31_000, 31_001)


@contextmanager
def endpoint(host: Host, **options: Any) -> Iterator[dict[str, Any]]:
    """An endpoint on a host; what it says when it serves."""
    command = [sys.executable, "-m", "sglang_ext.testing.transfer.owner", json.dumps(options)]
    process = host.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
    finally:
        stop(process)


@pytest.mark.parametrize(("family", "network"), [(4, "kv"), (6, "lan")])
def test_hosts_reach_each_other_where_they_say(key_file: Path, family: int, network: str) -> None:
    """Bound to every address, on ports that may be used; over tcp, as they share no memory."""
    if reason := why_not():
        pytest.skip(reason)
    wildcard = "::" if family == 6 else "0.0.0.0"
    with Lab("a", "b", shared=[key_file], networks=("lan", "kv")) as lab, ExitStack() as stack:
        common = {"bind": wildcard, "ports": PORTS, "key_file": str(key_file)}
        there = lab["b"].address(network, family)
        owner = stack.enter_context(endpoint(lab["b"], announce=there, **common))
        host = f"[{there}]" if family == 6 else there
        assert owner["address"].rpartition(":")[0] == host
        assert int(owner["address"].rpartition(":")[2]) in PORTS
        here = lab["a"].address(network, family)
        reader = stack.enter_context(endpoint(lab["a"], announce=here, connect=owner["address"], **common))
        assert reader["transport"] == "tcp"

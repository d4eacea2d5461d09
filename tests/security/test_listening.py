"""The store through which ranks meet listens where they meet, and nowhere else."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from listening import (
    HTTP,
    ROWS,
    SERVERS,
    STORE,
    UNKNOWN,
    beyond_loopback,
    ports_in,
    rows,
)

from sglang_ext.patches import rendezvous
from tests.support.servers.ports import free_port

pytestmark = pytest.mark.slow

RANK = """
import sys, time, datetime, os
from sglang_ext.patches import rendezvous
if sys.argv[2] == "ours":
    rendezvous.apply()
import torch.distributed as dist
host, port = sys.argv[1], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=0, world_size=1)
store = dist.distributed_c10d._get_default_store()
store.set("key", "value")
print(store.get("key"), os.environ.get("GLOO_SOCKET_IFNAME"), flush=True)
sys.stdin.readline()
"""


PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"


def test_the_page_lists_what_tests_of_clusters_look_for() -> None:
    """These deployments are compared with it: `test_cluster`, `test_pd_cluster`, `test_pd_tp`,
    `test_migration` (a change of role), `test_ray` and `test_workers` (a router of several processes)."""
    text = PAGE.read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| socket \| address \|.*?\n\n", text, re.M | re.S)
    listed = [re.split(r" \(| \|", line[2:])[0] for line in table.splitlines()[2:] if line]
    assert listed == [*ROWS, "SGLang's processes among each other"]


OPEN = """
import socket, sys
sockets = [socket.create_server((address, 0)) for address in sys.argv[1:]]
print(*[each.getsockname()[1] for each in sockets], flush=True)
sys.stdin.readline()
"""


def test_a_socket_that_is_in_no_row_or_open_to_other_machines_is_seen() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OPEN, "127.0.0.1", "127.0.0.1", "0.0.0.0"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        known, _, outside = map(int, process.stdout.readline().split())
        assert rows([process.pid], {known: HTTP}) == Counter({HTTP: 1, UNKNOWN: 2})
        assert [each[1:] for each in beyond_loopback([process.pid])] == [("0.0.0.0", outside)]
        process.communicate("\n", timeout=60)


def test_ports_are_read_from_command_lines() -> None:
    assert ports_in(["-m", "x", "--port", "5", "--nccl-port=6", "--x", "7"], SERVERS) == {5: HTTP, 6: STORE}


def listens(pid: int) -> Iterator[tuple[str, int]]:
    """Addresses and ports at which a process and its descendants listen."""
    process = psutil.Process(pid)
    for each in (process, *process.children(recursive=True)):
        for connection in each.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                yield connection.laddr.ip, connection.laddr.port


@pytest.mark.parametrize("whose", ["ours", "torch's"])
def test_the_store_of_ranks_listens_where_they_meet(whose: str) -> None:
    """torch's own listens on every address."""
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-c", RANK, "0.0.0.0" if whose == "ours" else "127.0.0.1", whose, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = {address for address, there in listens(process.pid) if there == port}
        process.communicate("\n", timeout=60)
    if whose == "ours":
        assert (said, found) == ("b'value' lo\n", {"127.0.0.1"})
    else:
        assert found == {"::"}


def test_where_a_store_listens() -> None:
    assert rendezvous.address_of("127.0.0.1") == rendezvous.address_of("0.0.0.0") == "127.0.0.1"
    assert rendezvous.address_of("::") == "::1"
    assert rendezvous.address_of("192.0.2.7") == "192.0.2.7"
    with rendezvous.listening("127.0.0.1", 0) as taken, pytest.raises(OSError, match="in use"):
        rendezvous.listening("127.0.0.1", taken.getsockname()[1])
    there: dict[str, str] = {"NCCL_SOCKET_IFNAME": "eth0"}
    rendezvous.stay_on_loopback("192.0.2.7", there)
    assert there == {"NCCL_SOCKET_IFNAME": "eth0"}
    rendezvous.stay_on_loopback("127.0.0.1", there)
    assert there == {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "lo"}

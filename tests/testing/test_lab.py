"""Hosts made of namespaces: their shared state, and the behaviour of the wires between them."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_ext.testing.waiting import wait_until
from tests.support.lab import clock
from tests.support.lab.hosts import Host, Lab, stop, why_not
from tests.support.lab.switch import QUEUE_S, Wire

pytestmark = pytest.mark.slow

WAIT_S = 0.2
"""For a packet that may never come: it would take a millisecond."""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


@pytest.fixture
def lab(shared: Path) -> Iterator[Lab]:
    if reason := why_not():
        pytest.skip(reason)
    with Lab("a", "b", hostnames={"a": "node", "b": "node"}, shared=[shared], networks=("lan", "kv")) as lab:
        yield lab


class Probe:
    """Datagrams between two hosts, one socket each."""

    def __init__(self, source: Host, target: Host, *, network: str = "", family: int = 4) -> None:
        kind = socket.AF_INET if family == 4 else socket.AF_INET6
        with target.network():
            self._in = socket.socket(kind, socket.SOCK_DGRAM)
        self._in.bind((target.address(network, family), 0))
        with source.network():
            self._out = socket.socket(kind, socket.SOCK_DGRAM)
        self._to = self._in.getsockname()

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self._in.close()
        self._out.close()

    def took(self, nbytes: int = 8) -> float | None:
        """Seconds that a datagram takes; None when it does not come."""
        self._in.settimeout(WAIT_S)
        began = time.monotonic()
        self._out.sendto(bytes(nbytes), self._to)
        try:
            self._in.recv(1 << 16)
        except TimeoutError:
            return None
        return time.monotonic() - began

    def arrived(self, count: int, nbytes: int = 1000) -> int:
        """How many of so many datagrams come."""
        self._in.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        for _ in range(count):
            self._out.sendto(bytes(nbytes), self._to)
        self._in.settimeout(WAIT_S)
        found = 0
        try:
            while self._in.recv(1 << 16):
                found += 1
        except TimeoutError:
            return found
        return found


def test_hosts_share_neither_names_nor_memory_nor_processes(lab: Lab, shared: Path) -> None:
    a, b = lab["a"], lab["b"]
    assert a.run("hostname") == b.run("hostname") == "node\n" != socket.gethostname()
    boot_ids = {host.run("cat", "/proc/sys/kernel/random/boot_id") for host in (a, b)}
    assert len(boot_ids | {Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")}) == 3
    for folder in ("/tmp", "/dev/shm"):
        a.run("touch", f"{folder}/of-a")
        assert "of-a" in a.run("ls", folder)
        assert "of-a" not in b.run("ls", folder)
        assert not Path(folder, "of-a").exists()
    (shared / "model").write_text("shared")
    assert a.run("cat", str(shared / "model")) == b.run("cat", str(shared / "model")) == "shared"
    sleeper = a.popen(["sleep", "60"])
    wait_until(lambda: "sleep" in _names(a), seconds=10, what="a process on a")
    assert "sleep" not in _names(b)
    stop(sleeper)
    assert sleeper.returncode == -signal.SIGTERM


def _names(host: Host) -> str:
    return host.run("sh", "-c", "cat /proc/[0-9]*/comm")


@pytest.mark.parametrize("family", [4, 6])
def test_hosts_reach_each_other_by_numbers_only(lab: Lab, family: int) -> None:
    """The name of the other means nothing; its addresses do, on each network."""
    for network in ("lan", "kv"):
        with Probe(lab["a"], lab["b"], network=network, family=family) as probe:
            # The first may be lost while hosts still look for each other.
            assert any(probe.took() is not None for _ in range(5))
    look_up = f"import socket; print(socket.gethostbyname({lab['a'].hostname!r}))"
    assert lab["b"].run(sys.executable, "-I", "-S", "-c", look_up) == "127.0.1.1\n"


def test_a_thread_is_on_a_hosts_network_inside_the_block_only(lab: Lab) -> None:
    network = Path("/proc/thread-self/ns/net")
    before = network.readlink()
    with lab["a"].network():
        inside = network.readlink()
        with lab["b"].network():
            assert network.readlink() not in (before, inside)
        assert network.readlink() == inside != before
    assert network.readlink() == before


def test_a_wire_delays_in_one_direction_or_both(lab: Lab) -> None:
    with Probe(lab["a"], lab["b"]) as there, Probe(lab["b"], lab["a"]) as back:
        lab.wire("a", "b", both=False, delay_s=0.05)
        assert (there.took() or 0) >= 0.05 > (back.took() or 1)
        lab.wire("a", "b", delay_s=0.05)
        assert (back.took() or 0) >= 0.05


def test_a_wire_loses_about_as_many_as_configured(lab: Lab) -> None:
    with Probe(lab["a"], lab["b"]) as probe:
        assert probe.arrived(200) == 200
        lab.wire("a", "b", loss=0.25)
        assert 120 <= probe.arrived(200) <= 180


def test_a_partition_heals_and_has_two_sides(lab: Lab) -> None:
    with Probe(lab["a"], lab["b"]) as there, Probe(lab["b"], lab["a"]) as back:
        lab.cut("a", "b", both=False)
        assert there.took() is None
        assert back.took() is not None
        lab.cut("a", "b")
        assert back.took() is None
        lab.wire("a", "b")
        assert None not in (there.took(), back.took())


def test_one_network_may_be_cut_alone(lab: Lab) -> None:
    with Probe(lab["a"], lab["b"], network="kv") as kv, Probe(lab["a"], lab["b"]) as lan:
        lab.cut("a", "b", network="kv")
        assert kv.took() is None
        assert lan.took() is not None


def test_a_connection_survives_a_cut(lab: Lab) -> None:
    """TCP repeats the bytes that the wire did not carry."""
    with lab["b"].network():
        server = socket.create_server((lab["b"].address(), 0))
    with server, lab["a"].network(), socket.create_connection(server.getsockname(), timeout=10) as client:
        accepted, _ = server.accept()
        with accepted:
            lab.cut("a", "b")
            client.sendall(b"held up")
            accepted.settimeout(WAIT_S)
            with pytest.raises(TimeoutError):
                accepted.recv(16)
            lab.wire("a", "b")
            accepted.settimeout(10)
            assert accepted.recv(16) == b"held up"


WAITS = """
import ctypes, sys, threading, time
began = time.monotonic()
threading.Event().wait(0.2)
class At(ctypes.Structure):
    _fields_ = [("s", ctypes.c_long), ("ns", ctypes.c_long)]
semaphore = ctypes.create_string_buffer(64)
libc = ctypes.CDLL(None)
libc.sem_init(semaphore, 0, 0)
libc.sem_timedwait(semaphore, ctypes.byref(At(int(time.time()) + 1, 0)))
print(time.time(), time.monotonic() - began < 20)
"""


def test_a_clock_that_is_off_is_off_for_all_that_tell_the_time_of_day(shared: Path) -> None:
    if reason := why_not() or clock.why_not():
        pytest.skip(reason)
    with Lab("a", "b", "c", shared=[shared], clocks={"a": 90, "b": -90}) as lab:
        for name, off in (("a", 90.0), ("b", -90.0), ("c", 0.0)):
            before = time.time()
            told, *_ = lab[name].run("date", "+%s").split()
            python, in_time = lab[name].run(sys.executable, "-I", "-S", "-c", WAITS).split()
            after = time.time()
            assert before - 1 <= int(told) - off <= after
            assert before <= float(python) - off <= after
            # A process that waits until a time of day waits by its own.
            assert in_time == "True"


def test_who_is_masked_is_known_by_another_address(lab: Lab) -> None:
    """It reaches others and is answered; its own address is unreachable there."""
    a, b = lab["a"], lab["b"]
    lab.mask("b", "10.77.0.99")
    with a.network():
        server = socket.create_server((a.address(), 0))
        hidden = socket.socket()
    with b.network():
        inner = socket.create_server(("0.0.0.0", 0))
        client = socket.create_connection(server.getsockname(), timeout=10)
    with server, inner, client, hidden:
        accepted, who = server.accept()
        with accepted:
            assert who[0] == "10.77.0.99"
            client.sendall(b"there" * 5000)
            assert _all(accepted, 25_000) == b"there" * 5000
            accepted.sendall(b"back")
            assert client.recv(16) == b"back"
        with (
            a.network(),
            socket.create_connection(("10.77.0.99", inner.getsockname()[1]), timeout=10) as outer,
        ):
            reached, who = inner.accept()
            with reached:
                assert who[0] == a.address()
                outer.sendall(b"in")
                assert reached.recv(16) == b"in"
        hidden.settimeout(WAIT_S)
        with pytest.raises(TimeoutError):
            hidden.connect((b.address(), inner.getsockname()[1]))


def _all(connection: socket.socket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        found += connection.recv(nbytes - len(found))
    return found


@pytest.mark.parametrize("family", [4, 6])
def test_closed_ports_are_closed_for_others(lab: Lab, family: int) -> None:
    a, b = lab["a"], lab["b"]
    kind = socket.AF_INET if family == 4 else socket.AF_INET6
    with b.network():
        servers = [
            socket.create_server((b.address(family=family), port), family=kind) for port in (7001, 7002)
        ]
    lab.close_ports("b", but=[7001])
    with servers[0], servers[1]:
        for port, host in ((7001, a), (7001, b), (7002, b)):
            with host.network():
                socket.create_connection((b.address(family=family), port), timeout=10).close()
        with a.network(), pytest.raises(TimeoutError):
            socket.create_connection((b.address(family=family), 7002), timeout=WAIT_S)
        # Answers to its own requests come from any port.
        with a.network():
            theirs = socket.create_server((a.address(family=family), 0), family=kind)
        with theirs, b.network():
            socket.create_connection(theirs.getsockname()[:2], timeout=10).close()


def test_a_lab_leaves_nothing(shared: Path) -> None:
    """Neither a program that it ran, nor a program that takes no notice of signals."""
    if reason := why_not():
        pytest.skip(reason)
    with Lab("a", shared=[shared]) as lab:
        pid = lab["a"].pid
        deaf = lab["a"].popen(["sh", "-c", "trap '' TERM; sleep 60"])
    assert deaf.returncode is not None
    assert not Path(f"/proc/{pid}").exists()


def test_a_lab_whose_host_cannot_be_made_is_none(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with pytest.raises((RuntimeError, subprocess.SubprocessError)), Lab("a", shared=[tmp_path / "none"]):
        raise AssertionError


def test_bandwidth_is_a_queue_that_overflows() -> None:
    wire = Wire(bytes_per_s=1000.0, delay_s=1.0)
    assert wire.arrival(10.0, 100, 0.0) == pytest.approx(11.1)
    assert wire.arrival(10.0, 100, 0.0) == pytest.approx(11.2)
    waiting = sum(wire.arrival(10.0, 1, 0.0) is not None for _ in range(1000))
    assert waiting / 1000.0 <= QUEUE_S
    assert wire.arrival(10.0, 100, 0.0) is None
    assert wire.arrival(20.0, 100, 0.0) == pytest.approx(21.1)
    assert Wire(cut=True).arrival(0.0, 1, 0.9) is None
    assert Wire(loss=0.5).arrival(0.0, 1, 0.4) is None
    assert Wire(loss=0.5).arrival(0.0, 1, 0.5) == 0.0

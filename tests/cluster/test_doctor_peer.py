"""``sglang-ext doctor --peer`` against ``--listen``: two ends on loopback, and other programs in their
place."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from zmq.asyncio import Context

from sglang_ext.addresses import split_port
from sglang_ext.cluster.doctor import peer_ends, peer_messages, peer_station
from sglang_ext.cluster.doctor.command import PORT, main
from sglang_ext.cluster.doctor.findings import Finding, Level
from sglang_ext.cluster.doctor.peer import Seen, Trouble, as_json, findings, ranges
from sglang_ext.cluster.doctor.peer_ends import call
from sglang_ext.cluster.doctor.peer_messages import MESSAGES, End, Examine, Examined, Hail, Publish
from sglang_ext.cluster.doctor.peer_ports import sample
from sglang_ext.cluster.doctor.peer_station import BLOCK_BYTES, Own, Station, open_station
from sglang_ext.cluster_key import ClusterKey
from sglang_ext.disagg.errors import RefusedError
from sglang_ext.disagg.transfer.control import ControlClient
from sglang_ext.testing.waiting import wait_until
from tests.support.lab.hosts import Lab, stop, why_not

pytestmark = pytest.mark.slow

HERE, THERE = "127.0.0.1", "127.0.0.2"
KEY, OTHER_KEY = (ClusterKey(secrets.token_hex(32).encode()) for _ in range(2))
RANGE = 8
SPEAKS = Own(key=KEY, announce=HERE)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures mean nothing here: one block is read over each transport."""
    monkeypatch.setattr(peer_station, "MEASURE_S", 0.0)


@pytest.fixture
def free_range(free_port: Callable[[], int]) -> Callable[[], str]:
    """Some free ports in a row."""

    def find() -> str:
        while True:
            first = free_port()
            with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
                for port in range(first, first + RANGE):
                    stack.enter_context(socket.create_server(("", port)))
                return f"{first}-{first + RANGE - 1}"

    return find


@contextlib.contextmanager
def listening(
    own: Own,
    host: str = THERE,
    lines: list[str] | None = None,
    prepare: Callable[[Station, Callable[[], None]], None] = lambda station, end: None,
) -> Iterator[tuple[str, int]]:
    """A listener in a thread; ends it. prepare: called with it, and a function that ends it at once, on its
    event loop."""
    started: list[Any] = []
    is_started = threading.Event()

    async def serve() -> None:
        task = asyncio.current_task()
        assert task is not None
        with contextlib.suppress(asyncio.CancelledError):
            async with open_station(own, host, 0, ([] if lines is None else lines).append) as station:
                prepare(station, task.cancel)
                started.extend((asyncio.get_running_loop(), task, station.endpoint.address))
                is_started.set()
                await asyncio.Event().wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert is_started.wait(120)  # compiled loops are built where they are not cached
        name, port = split_port(started[2])
        yield name, int(port)
    finally:
        with contextlib.suppress(RuntimeError):  # its loop has ended
            started[0].call_soon_threadsafe(started[1].cancel)
        thread.join()


@contextlib.contextmanager
def stranger(reply: bytes | None) -> Iterator[int]:
    """A port of another program: it answers a connection with some bytes, and closes it; None: sends
    nothing."""
    held: list[socket.socket] = []
    with socket.create_server((HERE, 0)) as door:

        def serve() -> None:
            with contextlib.suppress(OSError):
                sock, _ = door.accept()
                held.append(sock)
                if reply is not None:
                    sock.recv(1)
                    sock.sendall(reply)
                    sock.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield int(door.getsockname()[1])
        finally:
            with contextlib.suppress(OSError):
                door.shutdown(socket.SHUT_RDWR)
            thread.join()
            for sock in held:
                sock.close()


def wrong(seen: Seen) -> list[Finding]:
    return [finding for finding in findings(seen) if finding.level is not Level.OK]


def texts(seen: Seen, subject: str) -> list[str]:
    return [finding.text for finding in findings(seen) if finding.subject == subject]


def test_all_is_well_in_both_directions(free_range: Callable[[], str]) -> None:
    mine, theirs = free_range(), free_range()
    lines: list[str] = []
    with listening(Own(key=KEY, kv_ports=theirs, announce=THERE), lines=lines) as (host, port):
        seen = call(host, port, dataclasses.replace(SPEAKS, kv_ports=mine))
    assert wrong(seen) == []
    assert {finding.subject for finding in findings(seen)} == {
        *("connection", "cluster key", "clocks", "transport"),
        *("address there", "address here", "ports there", "ports here"),
    }
    assert texts(seen, "ports here") == [f"{RANGE} ports of {mine}: reached from the peer"]
    assert texts(seen, "ports there") == [f"{RANGE} ports of {theirs}: reached from here"]
    assert texts(seen, "address there")[0].startswith(
        f"servers of the peer announce {THERE}, which is reached"
    )
    # One process, one kernel: the transport of servers on one machine, and the others' speed.
    for examined in (seen.here, seen.there):
        assert examined is not None
        assert list(examined.speeds) == ["shm", "cma", "tcp"]
        assert min(examined.speeds.values()) > 0
        assert examined.reasons.keys() == {"cuda_ipc", "verbs"}
    assert all("travel over shm, " in text and "tcp " in text for text in texts(seen, "transport"))
    assert [line.rpartition(": ")[2] for line in lines] == ["begun", "done"]
    figures = json.dumps(as_json(seen))
    assert seen.target in figures


def test_without_keys_on_loopback_and_ports_that_others_have(free_range: Callable[[], str]) -> None:
    mine = free_range()
    first = int(mine.partition("-")[0])
    with listening(Own()) as (host, port), socket.create_server(("", first)):
        seen = call(host, port, Own(kv_ports=mine))
        assert wrong(seen) == []
        assert texts(seen, "ports here") == [f"{RANGE - 1} ports of {mine} (1 in use): reached from the peer"]
        # All ports are in use.
        seen = call(host, port, Own(kv_ports=f"{first}-{first}"))
    assert [(f.level, f.subject) for f in wrong(seen)] == [(Level.WARNING, "ports here")]
    assert "Stop the servers here" in wrong(seen)[0].advice


def test_bytes_that_are_not_those_that_lie_there_are_a_problem() -> None:
    """The damaged twin of the reads above: one byte of the listener's memory changes after it was summed."""

    def damage(station: Station, end: Callable[[], None]) -> None:
        station.blocks[0, BLOCK_BYTES // 2] ^= 1

    with listening(Own(key=KEY, announce=THERE), prepare=damage) as (host, port):
        seen = call(host, port, SPEAKS)
    assert [(f.level, f.subject) for f in wrong(seen)] == [(Level.PROBLEM, "transport")]
    assert "no KV would travel from the peer" in wrong(seen)[0].text
    assert seen.here is not None
    assert seen.here.speeds == {}
    for name in ("shm", "cma", "tcp"):
        assert "not those that lie there" in seen.here.reasons[name]
    assert seen.there is not None
    assert seen.there.speeds


def test_other_ports_and_addresses_that_both_need(free_port: Callable[[], int]) -> None:
    """HTTP and bootstrap: free, in use, and in use but unreachable. Redis: reached, and not."""
    free, used, elsewhere, closed, ours = (free_port() for _ in range(5))
    theirs = Own(key=KEY, announce=THERE, services=(free, used, elsewhere))
    with (
        socket.create_server((THERE, used)),
        socket.create_server((HERE, elsewhere)),  # binding to every address finds the port in use
        socket.create_server((HERE, 0)) as redis,
        listening(theirs, "0.0.0.0") as (_, port),
    ):
        there = f"{HERE}:{redis.getsockname()[1]}"
        mine = dataclasses.replace(
            SPEAKS, services=(ours,), reach=(there, f"{HERE}:{closed}", "no.such.name:1")
        )
        seen = call(THERE, port, mine)
    assert texts(seen, "services here") == [f"{ours}: reached from the peer"]
    reached, unreached = texts(seen, "services there")
    assert reached == f"{ranges((free, used))}: reached from here (in use: {used})"
    assert unreached.startswith(f"{elsewhere} not reached from here: ")
    assert [text for text in texts(seen, "reach") if text.endswith("reached from here")] == [
        f"{there}: reached from here"
    ]
    for whence in ("from here", "from the peer"):
        assert any(
            f"{HERE}:{closed} is not reached {whence}: Connection refused" in t for t in texts(seen, "reach")
        )
        assert any(f"no.such.name:1 is not reached {whence}: " in text for text in texts(seen, "reach"))
    assert {finding.subject for finding in wrong(seen)} == {"services there", "reach"}
    assert all(finding.advice for finding in wrong(seen))
    assert as_json(seen)["reach"]["from_here"].keys() == {f"{HERE}:{closed}", "no.such.name:1"}


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--service-ports", "0"),
        ("--service-ports", "30000;8998"),
        ("--reach", "redis"),
        ("--reach", "redis:0"),
        ("--service-ports", ",".join(map(str, range(1, 18)))),
    ],
)
def test_a_list_that_is_none_is_refused(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--peer", HERE, flag, value])
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize(("offset", "text"), [(42.0, "s ahead"), (-90.0, "s behind")])
def test_another_clock_is_reported_and_is_no_fault(offset: float, text: str) -> None:
    now = 1e9  # Both stand still, so that the offset is known to the digit.
    with listening(Own(key=KEY, announce=THERE, wall=lambda: now + offset)) as (host, port):
        seen = call(host, port, dataclasses.replace(SPEAKS, wall=lambda: now))
    assert wrong(seen) == []
    assert seen.rtt is not None
    assert seen.ahead == pytest.approx(offset - seen.rtt / 2)
    assert text in texts(seen, "clocks")[0]


def test_an_address_at_which_an_end_is_not_reached() -> None:
    """No peer can connect to the broadcast address. The other direction is as it should be."""
    with listening(Own(key=KEY, announce=THERE)) as (host, port):
        seen = call(host, port, dataclasses.replace(SPEAKS, announce="255.255.255.255"))
    first = wrong(seen)[0]
    assert (first.level, first.subject) == (Level.PROBLEM, "address here")
    assert "announce 255.255.255.255" in first.text
    assert f"come from {HERE}" in first.text
    assert "--kv-announce-host" in first.advice
    assert "which is reached from here" in texts(seen, "address there")[0]


@pytest.mark.parametrize(
    ("key_here", "key_there", "kind", "says"),
    [
        (KEY, OTHER_KEY, Trouble.KEY, "keys of the two ends differ"),
        (None, KEY, Trouble.NO_KEY, "the caller was given no cluster key"),
        (KEY, None, Trouble.NO_KEY, "the listener was given no cluster key"),
    ],
)
def test_another_key_is_named_and_nothing_else_is_done(
    key_here: ClusterKey | None, key_there: ClusterKey | None, kind: Trouble, says: str
) -> None:
    with listening(Own(key=key_there)) as (host, port):
        seen = call(host, port, Own(key=key_here))
    assert seen.trouble is not None
    assert seen.trouble.kind is kind
    assert [(f.level, f.subject) for f in findings(seen)] == [(Level.PROBLEM, "cluster key")]
    assert says in wrong(seen)[0].text
    assert wrong(seen)[0].advice
    assert (seen.rtt, seen.ours, seen.theirs) == (None, None, None)


def test_a_key_that_is_being_changed() -> None:
    """A listener that accepts the caller's beside its own, and a caller that does so too."""
    both, old = ClusterKey(b"new" * 12 + b"01234567", b"old" * 12 + b"01234567"), b"old" * 12 + b"01234567"
    with listening(Own(key=both, announce=THERE)) as (host, port):
        seen = call(host, port, Own(key=ClusterKey(old), announce=HERE))
        assert seen.trouble is not None
        assert seen.trouble.kind is Trouble.KEY
        seen = call(host, port, Own(key=ClusterKey(old, b"new" * 12 + b"01234567"), announce=HERE))
        assert wrong(seen) == []


def test_a_closed_port_is_named(free_port: Callable[[], int]) -> None:
    port = free_port()
    seen = call(HERE, port, SPEAKS)
    assert [(f.level, f.subject) for f in findings(seen)] == [(Level.PROBLEM, "connection")]
    assert f"{HERE}:{port}: Connection refused" in wrong(seen)[0].text
    assert "doctor --listen" in wrong(seen)[0].advice


@pytest.mark.parametrize("reply", [b"HTTP/1.1 400 Bad Request\r\n" + b"x" * 99, b"", b"\0" * 200, None])
def test_a_peer_that_is_not_ours(reply: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_ends, "CONNECT_S", 0.2)
    with stranger(reply) as port:
        seen = call(HERE, port, SPEAKS)
    assert seen.trouble is not None
    assert seen.trouble.kind is Trouble.NOT_OURS
    assert "doctor --listen" in wrong(seen)[0].advice


def test_a_member_that_is_no_doctor(free_port: Callable[[], int]) -> None:
    """A server of this cluster answers there, which does not know a doctor's messages."""

    def forget(station: Station, end: Callable[[], None]) -> None:
        station.endpoint.serve((Hail, Examine, Publish), None)

    with listening(SPEAKS, prepare=forget) as (host, port):
        seen = call(host, port, SPEAKS)
    assert seen.trouble is not None
    assert seen.trouble.kind is Trouble.NOT_OURS


def test_a_listener_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(peer_ends, "VERSION", 0)
    with listening(SPEAKS, lines=lines) as (host, port):
        seen = call(host, port, SPEAKS)
    assert seen.trouble is not None
    assert seen.trouble.kind is Trouble.VERSION
    assert "speaks version 0" in wrong(seen)[0].text
    assert "same release" in wrong(seen)[0].advice
    assert "refused" in lines[0]


@pytest.mark.parametrize(
    ("moment", "doing", "known"),
    [
        (Hail, "clocks", set()),
        (Publish, "look from there", {"clocks", "address there", "ports there"}),
        (Examine, "look from there", {"clocks", "address there", "ports there", "transport"}),
    ],
)
def test_a_listener_that_dies_in_the_middle(
    moment: type, doing: str, known: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The findings until then are reported, with the moment of the loss."""
    monkeypatch.setattr(peer_ends, "SILENCE_S", 1.0)

    def prepare(station: Station, end: Callable[[], None]) -> None:
        hails = 0

        async def answer(identity: bytes, message: Any) -> Any:
            nonlocal hails
            hails += isinstance(message, Hail)
            if type(message) is moment and (moment is not Hail or hails > 1):
                end()
                await asyncio.Event().wait()
            return await station._answer(identity, message)

        station.endpoint.serve((Hail, Examine, Publish), answer)

    with listening(Own(key=KEY, announce=THERE), prepare=prepare) as (host, port):
        seen = call(host, port, SPEAKS)
    assert seen.trouble is not None
    assert seen.trouble.kind is Trouble.ENDED
    (ended,) = (f for f in wrong(seen) if f.subject == "connection")
    assert doing in ended.text
    assert ended.advice
    assert known <= {f.subject for f in findings(seen) if f.level is Level.OK}


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\0", b"\xff" * 4096, b"GET / HTTP/1.1\r\n\r\n" + b"x" * 99, (5).to_bytes(4, "big") + b"-" * 69],
)
def test_garbage_gets_nothing_and_stops_nothing(garbage: bytes) -> None:
    """A stranger receives a part of ZeroMQ's greeting, as from any server's port, and no more."""
    with listening(Own(key=KEY, announce=THERE)) as (host, port):
        with socket.create_connection((host, port), timeout=10) as sock:
            received = b""
            with contextlib.suppress(OSError):  # it may have closed before all was sent
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
                while more := sock.recv(4096):
                    received += more
        assert len(received) <= 64
        assert wrong(call(host, port, SPEAKS)) == []


def ask(host: str, port: int, *messages: Any) -> list[Any]:
    """Answers that a member gets which asks all of it at a time."""

    async def run() -> list[Any]:
        context = Context()
        client = ControlClient(context, f"{host}:{port}", KEY, messages=MESSAGES)
        try:
            return await asyncio.gather(*(client.ask(message, 60) for message in messages))
        finally:
            await client.close()
            context.destroy(linger=0)

    return asyncio.run(run())


def test_examinations_are_made_one_at_a_time() -> None:
    """Two requests come together; the second examination begins when the first is done."""
    lines: list[str] = []
    with listening(Own(key=KEY, announce=THERE)) as (far, far_port):
        (end,) = ask(far, far_port, Hail(peer_messages.VERSION, "1", HERE))
        with listening(SPEAKS, HERE, lines=lines) as (host, port):
            found = ask(host, port, Examine(end, ()), Examine(end, ()))
    assert [list(each.speeds) for each in found] == [["shm", "cma", "tcp"]] * 2
    assert [line.rpartition(": ")[2] for line in lines] == ["begun", "done"] * 2


def test_an_examination_of_nonsense_ends_by_name() -> None:
    """The endpoint of another member, addresses that are none, and a name that is too long."""
    with listening(Own(key=KEY, announce=THERE)) as (host, port):
        (end,) = ask(host, port, Hail(peer_messages.VERSION, "1", HERE))
        assert isinstance(end, End)
        other = msgspec.structs.replace(end, epoch=bytes(16))
        (found,) = ask(host, port, Examine(other, ("redis", "redis:x")))
        assert isinstance(found, Examined)
        assert found.speeds == {}
        assert "another member" in found.reasons["tcp"]
        assert found.unreached == {"redis": "it is no address", "redis:x": "it is no address"}
        with pytest.raises(RefusedError):
            ask(host, port, Publish("x" * 600, 1))


def test_ports_that_are_not_reached() -> None:
    end = End(
        "a", HERE, HERE, f"{HERE}:1", bytes(16), 0.0, "1-3", (1, 2, 3), 0, 0, (), ()
    )  # fmt: skip
    failed = {2: "Connection refused", 3: "nothing came back in 2 s"}
    found = Examined(failed, {}, {"tcp": 1e9}, {})
    seen = Seen("a:1", keyed=True, ours=end, theirs=end, here=found)
    assert [(f.level, f.subject) for f in wrong(seen)] == [(Level.PROBLEM, "ports there")]
    assert "Connection refused; nothing came back" in wrong(seen)[0].text
    assert "2-3 of 3 ports of 1-3" in wrong(seen)[0].text


def test_two_hosts_that_share_nothing(tmp_path: Path) -> None:
    """Processes on hosts of the lab, one of whose flags names an address that leads nowhere."""
    if reason := why_not():
        pytest.skip(reason)
    key = tmp_path / "cluster.key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    doctor = [sys.executable, "-m", "sglang_ext.cli", "doctor", "--cluster-key-file", str(key)]
    with Lab("a", "b", shared=[key]) as lab:
        listener = lab["b"].popen([*doctor, "--listen", "--kv-ports", "31000-31003"])
        try:
            is_open = lambda: f":{PORT:04X} " in lab["b"].run("cat", "/proc/net/tcp")  # noqa: E731
            wait_until(is_open, seconds=30, what="the listener")
            asking = [
                *doctor,
                "--json",
                "--kv-announce-host",
                "10.99.99.99",
                "--peer",
                lab["b"].address("", 4),
            ]
            caller = lab["a"].popen(asking, stdout=subprocess.PIPE)
            report = json.loads(caller.communicate(timeout=120)[0])
        finally:
            stop(listener)
    assert caller.returncode == 1
    assert report["peer"]["there"]["announced"] == split_port(report["peer"]["target"])[0]
    assert report["peer"]["there"]["not_reached"] == {}
    assert report["peer"]["transport"]["from"]["name"] == "tcp"
    assert "another host" in report["peer"]["transport"]["from"]["not"]["shm"]
    # The other direction has nowhere to go.
    assert report["peer"]["transport"]["to"]["name"] is None
    faults = [each["subject"] for each in report["findings"] if each["level"] == "problem"]
    assert faults == ["address here", "transport"]


def test_ports_in_words_and_a_sample_of_many() -> None:
    assert ranges([31002, 31000, 31001, 31009]) == "31000-31002, 31009"
    assert ranges(range(1, 99, 2)).endswith("15, ...")
    assert sample(range(5, 8), 4) == (5, 6, 7)
    some = sample(range(1, 60001), 256)
    assert (len(set(some)), some[0], some[-1]) == (256, 1, 60000)


def test_the_command_line(
    tmp_path: Path, free_port: Callable[[], int], capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "cluster.key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    flags = ["--cluster-key-file", str(key), "--kv-announce-host", HERE]
    with listening(Own(key=ClusterKey(key.read_bytes()), announce=THERE)) as (host, port):
        assert main(["--peer", f"{host}:{port}", "--json", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == 0
    assert report["peer"]["transport"]["from"]["name"] == "shm"
    assert main(["--peer", f"{HERE}:{free_port()}"]) == 1
    assert "1 problems between here" in capsys.readouterr().out
    assert main(["--listen", f"{HERE}:{free_port()},for=0.1"]) == 0
    assert "Listening at 127.0.0.1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--listen", "0.0.0.0"], "will not listen on 0.0.0.0 without a key"),
        (["--listen", "--kv-announce-host", "10.0.0.1"], "without a key, no peer is answered at 10.0.0.1"),
        (["--listen", "--peer", "a"], "exclude each other"),
        (["--peer", ":30900"], "names no host"),
        (["--peer", "a:0"], "no port"),
    ],
)
def test_flags_that_make_no_sense(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err

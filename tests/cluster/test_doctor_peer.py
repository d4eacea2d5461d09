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

import pytest

from sglang_ext.addresses import split_port
from sglang_ext.cluster.doctor import peer_ends, peer_probe, peer_wire
from sglang_ext.cluster.doctor.command import PORT, main
from sglang_ext.cluster.doctor.findings import Finding, Level
from sglang_ext.cluster.doctor.peer import Seen, as_json, findings, ranges
from sglang_ext.cluster.doctor.peer_ends import Listener, Own, call
from sglang_ext.cluster.doctor.peer_probe import CHUNK, Doors, Reading, knock_all, sample, take_stream
from sglang_ext.cluster.doctor.peer_wire import (
    End,
    Knock,
    Meet,
    Message,
    Ping,
    Pong,
    Pull,
    ReadMine,
    Trouble,
    TroubleError,
    Wire,
)
from sglang_ext.cluster_key import ClusterKey
from sglang_ext.disagg.transports import TransportName
from sglang_ext.testing.waiting import wait_until
from tests.support.lab.hosts import Lab, stop, why_not

pytestmark = pytest.mark.slow

HERE, THERE = "127.0.0.1", "127.0.0.2"
KEY, OTHER_KEY = (ClusterKey(secrets.token_hex(32).encode()) for _ in range(2))
RANGE = 8
SPEAKS = Own(key=KEY, announce=HERE)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams measure nothing here."""
    monkeypatch.setattr(peer_probe, "STREAM_S", 0.01)


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
def listening(own: Own, host: str = THERE, said: list[str] | None = None) -> Iterator[tuple[str, int]]:
    """A listener in a thread; ends it."""
    listener = Listener(host, 0, own, ([] if said is None else said).append)
    started: list[Any] = []
    is_started = threading.Event()

    async def serve() -> None:
        started.extend((asyncio.get_running_loop(), asyncio.current_task()))
        is_started.set()
        with contextlib.suppress(asyncio.CancelledError):
            await listener.serve(60)

    name, port = split_port(listener.address)
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert is_started.wait(10)
        yield name, int(port)
    finally:
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
    said: list[str] = []
    with listening(Own(key=KEY, kv_ports=theirs, announce=THERE), said=said) as (host, port):
        seen = call(host, port, dataclasses.replace(SPEAKS, kv_ports=mine))
        wait_until(lambda: said, seconds=10, what="the listener's line")
    assert wrong(seen) == []
    assert {finding.subject for finding in findings(seen)} == {
        *("connection", "cluster key", "clocks", "bandwidth", "transport"),
        *("address there", "address here", "ports there", "ports here"),
    }
    assert texts(seen, "ports here") == [f"{RANGE} ports of {mine}: reached from the peer"]
    assert texts(seen, "ports there") == [f"{RANGE} ports of {theirs}: reached from here"]
    assert texts(seen, "address there")[0].startswith(
        f"servers of the peer announce {THERE}, which is reached"
    )
    assert seen.there is not None
    assert seen.here is not None
    assert min(seen.there.nbytes, seen.here.nbytes) >= CHUNK
    # One process, one kernel: the transport of servers on one machine.
    assert [chosen and chosen.name for chosen in (seen.reads_theirs, seen.reads_ours)] == ["shm", "shm"]
    assert [line.partition(": ")[2] for line in said] == ["done"]
    figures = json.dumps(as_json(seen))
    assert "ticket" not in figures
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


def test_other_ports_and_addresses_that_both_need(free_port: Callable[[], int]) -> None:
    """HTTP and bootstrap: free, in use, and in use but unreachable. Redis: reached, and not."""
    free, used, deaf, nobody, ours = (free_port() for _ in range(5))
    theirs = Own(key=KEY, announce=THERE, services=(free, used, deaf))
    with (
        socket.create_server((THERE, used)),
        socket.create_server((HERE, deaf)),  # binding to every address finds the port in use
        socket.create_server((HERE, 0)) as redis,
        listening(theirs) as (host, port),
    ):
        there = f"{HERE}:{redis.getsockname()[1]}"
        mine = dataclasses.replace(
            SPEAKS, services=(ours,), reach=(there, f"{HERE}:{nobody}", "no.such.name:1")
        )
        seen = call(host, port, mine)
    assert texts(seen, "services here") == [f"{ours}: reached from the peer"]
    reached, closed = texts(seen, "services there")
    assert reached == f"{ranges((free, used))}: reached from here (in use: {used})"
    assert closed.startswith(f"{deaf} not reached from here: ")
    assert [text for text in texts(seen, "reach") if text.endswith("reached from here")] == [
        f"{there}: reached from here"
    ]
    for whence in ("from here", "from the peer"):
        assert any(
            f"{HERE}:{nobody} is not reached {whence}: Connection refused" in t for t in texts(seen, "reach")
        )
        assert any(f"no.such.name:1 is not reached {whence}: " in text for text in texts(seen, "reach"))
    assert {finding.subject for finding in wrong(seen)} == {"services there", "reach"}
    assert all(finding.advice for finding in wrong(seen))
    assert as_json(seen)["reach"]["from_here"].keys() == {f"{HERE}:{nobody}", "no.such.name:1"}


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
def test_another_clock_is_said_and_is_no_fault(offset: float, text: str) -> None:
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
    assert texts(seen, "address there")[0].endswith("reached from here")


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
    said: list[str] = []
    with listening(Own(key=key_there), said=said) as (host, port):
        seen = call(host, port, Own(key=key_here))
        wait_until(lambda: said, seconds=10, what="the listener's line")
    assert seen.trouble is not None
    assert seen.trouble.kind is kind
    assert [(f.level, f.subject) for f in findings(seen)] == [(Level.PROBLEM, "cluster key")]
    assert says in wrong(seen)[0].text
    assert wrong(seen)[0].advice
    assert says in said[0]
    assert "refused" in said[0]
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
    assert f"port {port} is closed" in wrong(seen)[0].text
    assert "doctor --listen" in wrong(seen)[0].advice


@pytest.mark.parametrize("reply", [b"HTTP/1.1 400 Bad Request\r\n" + b"x" * 99, b"", b"\0" * 200, None])
def test_a_peer_that_is_not_ours(reply: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_ends, "GREETING_S", 0.2)
    with stranger(reply) as port:
        seen = call(HERE, port, SPEAKS)
    assert seen.trouble is not None
    assert seen.trouble.kind is Trouble.NOT_OURS
    assert "doctor --listen" in wrong(seen)[0].advice


def test_a_listener_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older(Wire):
        async def greet(self, release: str) -> None:
            await self.send(peer_wire.Hello(0, "0.0.9", bytes(16)))
            await self.receive(peer_wire.Challenge)

    monkeypatch.setattr(peer_ends, "Wire", Older)
    with listening(SPEAKS) as (host, port):
        seen = call(host, port, SPEAKS)
    assert seen.trouble is not None
    assert seen.trouble.kind is Trouble.VERSION
    assert "0.0.9" in wrong(seen)[0].text
    assert "same release" in wrong(seen)[0].advice


@pytest.mark.parametrize(
    ("moment", "doing", "known"),
    [
        (Ping, "clocks", set()),
        (Meet, "addresses", {"clocks"}),
        (Knock, "addresses", {"clocks"}),
        (Pull, "bandwidth", {"clocks", "address there", "ports here"}),
        (ReadMine, "transport", {"clocks", "address there", "ports here", "bandwidth"}),
    ],
)
def test_a_listener_that_dies_in_the_middle(
    moment: type[Message], doing: str, known: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The findings until then are reported, with the moment of the loss."""

    class Dying(Wire):
        async def next(self) -> Message:
            message = await super().next()
            if isinstance(message, moment):
                self.sock.shutdown(socket.SHUT_RDWR)
            return message

    with listening(Own(key=KEY, announce=THERE)) as (host, port):
        monkeypatch.setattr(peer_ends, "Wire", Dying)
        seen = call(host, port, SPEAKS)
        assert seen.trouble is not None
        assert seen.trouble.kind is Trouble.ENDED
        assert [f.subject for f in wrong(seen)] == ["connection"]
        assert doing in wrong(seen)[0].text
        assert wrong(seen)[0].advice
        assert known <= {f.subject for f in findings(seen) if f.level is Level.OK}
        # The listener has ended that session, and serves the next caller.
        monkeypatch.setattr(peer_ends, "Wire", Wire)
        assert wrong(call(host, port, SPEAKS)) == []


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\0", b"\xff" * 4096, b"GET / HTTP/1.1\r\n\r\n" + b"x" * 99, (5).to_bytes(4, "big") + b"-" * 69],
)
def test_garbage_is_refused_and_told_nothing(garbage: bytes) -> None:
    said: list[str] = []
    with listening(SPEAKS, said=said) as (host, port):
        with socket.create_connection((host, port), timeout=10) as sock:
            with contextlib.suppress(OSError):  # it may have closed before all was sent
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
            told = b""
            with contextlib.suppress(ConnectionError):
                told = sock.recv(1)
            assert told == b""
        assert wrong(call(host, port, SPEAKS)) == []
    assert "refused" in said[0]


def greeted(host: str, port: int, then: Callable[[Wire], Any], key: ClusterKey = KEY) -> Any:
    """The steps of a member of our own after its proof."""

    async def run() -> Any:
        with await peer_probe.connect(host, port, 5) as sock:
            wire = Wire(sock, key)
            await wire.greet("test")
            return await then(wire)

    return asyncio.run(run())


def test_a_message_that_was_changed_on_its_way_is_refused() -> None:
    async def repeat(wire: Wire) -> None:
        sent: list[bytes] = []
        wire.put = sent.append  # type: ignore[method-assign,assignment]
        with contextlib.suppress(TypeError):
            await wire.send(Ping())
        del wire.put
        await wire.put(sent[0])
        await wire.receive(Pong)
        await wire.put(sent[0])  # once more
        await wire.receive(Pong)

    with listening(SPEAKS) as (host, port), pytest.raises(TroubleError, match="changed on its way"):
        greeted(host, port, repeat)


def test_what_is_out_of_turn_is_refused() -> None:
    async def knock(wire: Wire) -> None:
        await wire.ask(Knock(), peer_wire.Knocked)

    with listening(SPEAKS) as (host, port), pytest.raises(TroubleError, match="out of turn"):
        greeted(host, port, knock)


def test_one_caller_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_ends, "GREETING_S", 0.5)
    with listening(Own(key=KEY, announce=THERE)) as (host, port):

        async def hold(wire: Wire) -> Seen:
            await wire.ask(Ping(), Pong)
            return await asyncio.to_thread(call, host, port, SPEAKS)

        seen = greeted(host, port, hold)
    assert seen.trouble is not None
    assert seen.trouble.kind is Trouble.BUSY


def test_connections_are_bounded() -> None:
    with listening(SPEAKS) as (host, port), contextlib.ExitStack() as stack:
        for _ in range(peer_ends.MOST_CALLERS):
            stack.enter_context(socket.create_connection((host, port)))
        last = stack.enter_context(socket.create_connection((host, port), timeout=2))
        assert last.recv(1) == b""


def test_a_stream_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_probe, "STREAM_BYTES", 2 * CHUNK)

    async def run() -> None:
        a, b = socket.socketpair()
        with a, b:
            for sock in (a, b):
                sock.setblocking(False)
            sending = asyncio.create_task(Wire(a, None).put((b"\x01" + bytes(CHUNK)) * 3))
            try:
                await take_stream(Wire(b, None))
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    with pytest.raises(TroubleError, match="longer than was agreed"):
        asyncio.run(run())


def test_ports_are_told_apart(free_port: Callable[[], int]) -> None:
    """A port that answers, a closed port, a port of another program."""
    closed = free_port()

    async def run(strange: int) -> tuple[int, dict[int, str]]:
        doors = Doors(HERE, (0,))
        try:
            (door,) = doors.ports
            failed = await knock_all(HERE, (door, closed, strange), doors.ticket, doors.answer)
            # Without the ticket the port answers nothing.
            assert await knock_all(HERE, (door,), bytes(16), doors.answer)
            return door, failed
        finally:
            await doors.close()

    with stranger(b"220 mail.example.org ESMTP\r\n") as strange:
        door, failed = asyncio.run(run(strange))
    assert failed == {closed: "Connection refused", strange: "another program answers there"}
    end = End("a", HERE, HERE, "1-3", (door, closed, strange), 0, 0, {}, bytes(16), bytes(16))
    seen = Seen("a:1", keyed=True, ours=end, theirs=end, failed_there=failed, failed_here={})
    assert [(f.level, f.subject) for f in wrong(seen)] == [(Level.PROBLEM, "ports there")]
    assert "Connection refused; another program" in wrong(seen)[0].text
    assert "3 ports of 1-3" in wrong(seen)[0].text


def test_a_transport_is_one_by_which_bytes_were_read() -> None:
    """The twin: an owner whose bytes are others is reached by none, and each says why."""
    owner, reader = Reading(HERE, (0,)), Reading(HERE, (0,))
    try:
        answer = owner.accept(reader.offers())
        assert reader.open(answer, HERE).name == TransportName.SHM
        answer = owner.accept(reader.offers())
        memory = peer_wire.Memory(
            bytes(16), answer.memory.host, answer.memory.pid, answer.memory.session, answer.memory.regions
        )
        chosen = reader.open(peer_wire.Answer(memory, answer.answers, answer.reasons), HERE)
        assert chosen.name == ""
        assert "not the peer's memory" in chosen.reasons["tcp"]
        seen = Seen("a:1", keyed=True, reads_theirs=chosen)
        assert [(f.level, f.subject) for f in wrong(seen)] == [(Level.PROBLEM, "transport")]
    finally:
        reader.close()
        owner.close()


def test_another_host_leaves_tcp() -> None:
    owner, reader = Reading(HERE, (0,)), Reading(HERE, (0,))
    try:
        offers = reader.offers()
        for name in ("shm", "cma"):
            offers[name] = b"another boot/1 1"
        chosen = reader.open(owner.accept(offers), HERE)
        assert chosen.name == TransportName.TCP
        assert "another host" in chosen.reasons["shm"]
        assert "another host" in chosen.reasons["cma"]
    finally:
        reader.close()
        owner.close()


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
            told = json.loads(caller.communicate(timeout=60)[0])
        finally:
            stop(listener)
    assert caller.returncode == 1
    assert told["peer"]["there"]["announced"] == split_port(told["peer"]["target"])[0]
    assert told["peer"]["there"]["not_reached"] == {}
    assert told["peer"]["transport"]["from"]["name"] == "tcp"
    assert "another host" in told["peer"]["transport"]["from"]["not"]["shm"]
    # The other direction has nowhere to go.
    assert told["peer"]["transport"]["to"]["name"] is None
    faults = [each["subject"] for each in told["findings"] if each["level"] == "problem"]
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
    told = json.loads(capsys.readouterr().out)
    assert told["problems"] == 0
    assert told["peer"]["transport"]["from"]["name"] == "shm"
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

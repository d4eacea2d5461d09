"""Peers that die, stop, lie or send garbage: the right error within the deadline, and no byte out of
place.
"""

import asyncio
import json
import mmap
import os
import secrets
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from sglang_ext.disagg.errors import (
    PeerGoneError,
    PeerProtocolError,
    RangeError,
    RefusedError,
    StaleReadError,
    TransferDeadlineError,
    TransferError,
    TransportUnavailableError,
)
from sglang_ext.disagg.memory import RegionTable
from sglang_ext.disagg.messages import (
    REPLIES,
    REQUESTS,
    VERSION,
    Connect,
    Connected,
    Ping,
    Refused,
    Reserve,
    Written,
)
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.control import CurveKeys
from sglang_ext.disagg.transfer.leases import LeaseEnd
from sglang_ext.disagg.transfer.link import Link, Outcome, Silence
from sglang_ext.disagg.transports import CancelToken, Channel, TransportName, _stream, tcp
from sglang_ext.disagg.transports._guard import GuardPages
from sglang_ext.disagg.transports.local import ADDRESS
from sglang_ext.disagg.transports.select import reasons
from sglang_ext.disagg.transports.tcp import _ANSWER, TcpChannel, TcpTransport, _proof
from sglang_ext.errors import ConfigError
from sglang_ext.testing.fakes import Stopwatch
from sglang_ext.testing.transfer.rig import NAMESPACE, Rank, Shape, start_instance
from sglang_ext.testing.waiting import until
from sglang_ext.wire import pack_ids

pytestmark = pytest.mark.slow

SHAPE = {"layers": 2, "heads": 4, "width": 64, "blocks": 64, "block_tokens": 64, "dtype": "float32"}
TRANSPORTS = [TransportName.SHM, TransportName.CMA, TransportName.TCP]


@asynccontextmanager
async def process(**options: object) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict]]:
    """An endpoint in another process; killed at the end, whatever state it is in."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "sglang_ext.testing.transfer.owner",
        json.dumps({"shape": SHAPE, **options}),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        async with asyncio.timeout(240):
            line = await child.stdout.readline()
        yield child, json.loads(line)
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
        child._transport.close()  # type: ignore[attr-defined]


@asynccontextmanager
async def reader(*transports: TransportName, shape: Shape | None = None, **changes) -> AsyncIterator[Rank]:
    values = {"heartbeat": 0.1, "dead_after": 1.0, "connect_timeout": 5.0, **changes}
    config = EndpointConfig("reader", NAMESPACE, transports=transports or tuple(TRANSPORTS), **values)
    (rank,) = await start_instance(config, shape or Shape(**SHAPE))
    try:
        yield rank
        rank.endpoint.check()
    finally:
        await rank.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_owner_killed_in_mid_read(transport: TransportName) -> None:
    async with process(transports=[transport], requests=400) as (child, found), reader(transport) as me:
        instance = await me.endpoint.connect([found["address"]])
        every = np.arange(64)
        offers = [await instance.offer(0, f"r{i}", "hbm") for i in range(3)]
        instance.transfer("r0", offers[:1], "hbm", every)
        assert await instance.complete("r0", 10) is Outcome.RELEASED
        expected = me.pool.bytes.copy()
        instance.transfer("r1", offers[1:2], "hbm", every)
        child.send_signal(signal.SIGKILL)
        with Stopwatch() as noticed:
            try:
                outcome = await instance.complete("r1", 30)
                # The bytes had landed, or could be read without the owner; then they are right.
                assert outcome in (Outcome.UNACKNOWLEDGED, Outcome.RELEASED)
                assert np.array_equal(me.pool.bytes, expected)
            except PeerGoneError:
                pass
            await until(lambda: instance.gone, 30)
        assert noticed.seconds < 5
        with pytest.raises(PeerGoneError):
            instance.transfer("r2", offers[2:3], "hbm", every)


def test_what_a_process_without_a_core_did_not_hear_is_no_silence() -> None:
    silence = Silence(2.5)
    assert not silence.unanswered(1.5, late=3.0), "the answer may lie in our socket"
    assert not silence.unanswered(1.5, late=0.0)
    assert not silence.unanswered(1.5, late=0.3)
    assert silence.unanswered(1.5, late=0.1)
    silence.answered()
    assert not silence.unanswered(1.5, late=0.0)
    assert Silence(2.5).unanswered(3.0, late=0.0), "what matters is the time, not how many"


@pytest.mark.parametrize("delay", [0.0, 0.15, 5.0])
async def test_a_peer_that_answers_late_lives_and_one_that_does_not_is_dead(delay: float) -> None:
    """An answer after its question's deadline is as good as one in time; only silence leads to a verdict."""
    async with (
        reader(TransportName.CMA, dead_after=30.0) as owner,
        reader(TransportName.CMA, heartbeat=0.2, dead_after=0.5) as me,
    ):
        instance = await me.endpoint.connect([owner.endpoint.address])
        server = owner.endpoint._server
        assert server is not None
        answer, asked = server._handler, 0

        async def late(identity: bytes, message: object) -> object:
            if isinstance(message, Ping):
                nonlocal asked
                asked += 1
                await asyncio.sleep(delay)
            return await answer(identity, message)

        server._handler = late
        if delay > 1:
            await until(lambda: instance.gone, 60)
        else:
            await until(lambda: asked > 8, 20)
            assert not instance.gone


async def test_two_stalls_of_our_own_put_the_verdict_off_by_little() -> None:
    """A question that we noticed late is not unanswered, and costs one interval, for a question is short."""
    async with (
        reader(TransportName.CMA, dead_after=30.0) as owner,
        reader(TransportName.CMA, heartbeat=0.4, dead_after=1.0) as me,
    ):
        instance = await me.endpoint.connect([owner.endpoint.address])
        server = owner.endpoint._server
        assert server is not None
        ask, stalls = instance.links[0].client.ask, [0.3, 0.3]

        async def silent(identity: bytes, message: object) -> object:
            return await asyncio.Event().wait()

        async def stalled(message: object, seconds: float | None) -> object:
            try:
                return await ask(message, seconds)
            except TransferDeadlineError:
                if stalls:
                    time.sleep(stalls.pop())  # noqa: ASYNC251 - the stall itself: nothing of this process runs
                raise

        server._handler = silent
        instance.links[0].client.ask = stalled  # type: ignore[method-assign]
        with Stopwatch() as verdict:
            await until(lambda: instance.gone, 10)
        # Two intervals and stalls, the verdict, its wait for the next interval, and an interval already
        # begun.
        assert verdict.seconds < 2 * (0.4 + 0.3) + 1.2 + 0.4 + 0.4


async def test_a_dead_owners_memory_is_not_kept() -> None:
    """A reader that has it mapped would keep all of it allocated, and its successor might find no room."""

    def mapped() -> int:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            return sum("/memfd:hbm" in line for line in maps)

    async with reader(TransportName.SHM) as me:
        before = mapped()
        async with process(transports=["shm"]) as (child, found):
            instance = await me.endpoint.connect([found["address"]])
            offer = await instance.offer(0, "r0", "hbm")
            instance.transfer("r0", [offer], "hbm", np.arange(64))
            assert await instance.complete("r0", 10) is Outcome.RELEASED
            assert mapped() == before + 1
            child.send_signal(signal.SIGKILL)
            await until(lambda: instance.gone, 60)
            await until(lambda: mapped() == before, 60)
        with pytest.raises(PeerGoneError):
            instance.transfer("r0", [offer], "hbm", np.arange(64))
        instance.check()
        await instance.close()


async def test_an_owner_that_stops_answering_is_a_deadline() -> None:
    async with (
        process(transports=["tcp"], requests=2) as (child, found),
        reader(TransportName.TCP, dead_after=30.0) as me,
    ):
        instance = await me.endpoint.connect([found["address"]])
        offer = await instance.offer(0, "r0", "hbm")
        child.send_signal(signal.SIGSTOP)
        instance.transfer("r0", [offer], "hbm", np.arange(64))
        instance.transfer("other", [offer], "hbm", np.arange(64))
        with Stopwatch() as deadline:
            late = asyncio.ensure_future(instance.complete("other", 0.8))
            start = time.monotonic()
            with pytest.raises(TransferDeadlineError):
                await instance.complete("r0", 0.3)
        assert time.monotonic() - start > 0.2
        assert deadline.seconds < 2.0
        me.pool.bytes[:] = 0x33  # ours again: nothing may write here, even when the owner goes on
        with pytest.raises(TransferError):
            await late
        child.send_signal(signal.SIGCONT)
        await until(lambda: instance.links[0].peer.gone is None, 60)
        offer = await instance.offer(0, "r1", "hbm")  # the session has outlived its owner's absence
        assert (me.pool.bytes == 0x33).all()
        instance.transfer("r1", [offer], "hbm", np.arange(64))  # the lane connects again
        assert await instance.complete("r1", 10) is Outcome.RELEASED


async def test_a_reader_that_is_killed_holds_nothing() -> None:
    async with reader() as owner:
        owner.owned.seal(np.arange(64))
        owner.endpoint.publish("hbm", "r0", np.arange(64), ttl=600)
        async with process(name="victim", connect=owner.endpoint.address) as (child, found):
            assert found["lease"] == 1
            assert owner.owned.pinned == 64
            child.send_signal(signal.SIGKILL)
            with Stopwatch() as noticed:
                await until(lambda: owner.owned.pinned == 0, 30)
            assert noticed.seconds < 3
        assert [e.how for e in owner.ended] == [LeaseEnd.READER_DEAD]
        assert owner.endpoint.owner.sessions == ()


async def test_a_restarted_owner_is_another() -> None:
    async with reader() as me:
        async with process() as (_, found):
            first = await me.endpoint.connect([found["address"]])
            old = await first.offer(0, "r0", "hbm")
        async with process(bind=found["address"]) as (_, again):
            assert again["address"] == found["address"]
            await until(lambda: first.gone, 30)  # the heartbeat met another epoch, or a session unknown there
            await first.close()
            second = await me.endpoint.connect([again["address"]])
            with pytest.raises(PeerGoneError, match="another epoch"):
                second.transfer("r0", [old], "hbm", np.arange(64))


async def test_memory_with_another_epoch_is_not_believed() -> None:
    """The owner's pid is alive, but its memory is another process's, as after a pid was recycled."""
    async with reader(TransportName.CMA) as me, reader(TransportName.CMA) as owner:
        owner.owned.seal(np.arange(64))
        instance = await me.endpoint.connect([owner.endpoint.address])
        offer = owner.endpoint.publish("hbm", "r", np.arange(64))
        owner.endpoint._control.array[8:24] = 7
        instance.transfer("r", [offer], "hbm", np.arange(64))
        with pytest.raises(PeerGoneError, match="another epoch"):
            await instance.complete("r", 10)


@pytest.mark.parametrize("moment", ["while it opens", "with one rank of two"])
async def test_closing_ends_what_connects_meanwhile(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Otherwise its lanes, sockets and mapped memory would have no owner: the leak guard would report
    them."""
    made, reached, go = [], threading.Event(), threading.Event()
    async with reader() as owner, reader() as me:
        connector = me.endpoint._connector
        stock_open, stock_connect = connector._open, connector.connect

        def opens(*args: object) -> Channel:
            reached.set()
            assert go.wait(30)
            made.append(stock_open(*args))  # type: ignore[arg-type]
            return made[-1]

        async def connects(address: str, *only: object) -> Link:
            if made:
                reached.set()
                await asyncio.Event().wait()
            link = await stock_connect(address, *only)  # type: ignore[arg-type]
            made.append(link.peer.channel)
            return link

        if moment == "while it opens":
            monkeypatch.setattr(connector, "_open", opens)
        else:
            monkeypatch.setattr(connector, "connect", connects)
        ranks = 1 if moment == "while it opens" else 2
        connecting = asyncio.create_task(me.endpoint.connect([owner.endpoint.address] * ranks))
        await asyncio.to_thread(reached.wait, 30)
        closing = asyncio.create_task(me.endpoint.close())
        await asyncio.sleep(0)
        go.set()
        await closing
        with pytest.raises(PeerGoneError, match="has been closed"):
            await connecting
        assert len(made) == 1
        assert me.endpoint.instances == []
        with pytest.raises(PeerGoneError, match="has been closed"):
            await me.endpoint.connect([owner.endpoint.address])


@asynccontextmanager
async def fake_owner(answer) -> AsyncIterator[str]:
    """A control socket that answers every request with answer(request frames) -> bytes."""
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    async def serve() -> None:
        while True:
            identity, number, data = await router.recv_multipart()
            await router.send_multipart([identity, number, answer(data)])

    task = asyncio.create_task(serve())
    try:
        yield f"127.0.0.1:{port}"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        context.destroy(linger=0)


@pytest.mark.parametrize(
    "noise", [b"", b"\xff" * 50, b"\x81\xa1t\xa4pong", msgspec.msgpack.encode({"t": "no"})]
)
async def test_an_owner_that_answers_garbage(noise: bytes) -> None:
    async with reader() as me, fake_owner(lambda data: noise) as address:
        with pytest.raises(PeerProtocolError):
            await me.endpoint.connect([address])


def lying(**changes):  # type: ignore[no-untyped-def]
    """An answer to CONNECT that copies the reader's own description, with changes to it."""

    def answer(data: bytes) -> bytes:
        request = REQUESTS.decode(data)
        if not isinstance(request, Connect):
            return REPLIES.encode(Connected(request, b"s" * 16, {}, {})) if False else b"\xff"
        guards = ADDRESS.pack(mmap.PAGESIZE)
        who = msgspec.structs.replace(request.who, **{k: v(request.who) for k, v in changes.items()})
        return REPLIES.encode(Connected(who, b"s" * 16, dict.fromkeys(request.transports, guards), {}))

    return answer


def grow(who, **fields):  # type: ignore[no-untyped-def]
    return tuple(msgspec.structs.replace(r, **fields) for r in who.regions)


def move(who, **fields):  # type: ignore[no-untyped-def]
    pool = who.pools[0]
    tensors = tuple(msgspec.structs.replace(t, **fields) for t in pool.tensors)
    return (msgspec.structs.replace(pool, tensors=tensors),)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"epoch": lambda w: b"x" * 16}, TransportUnavailableError),
        ({"regions": lambda w: ()}, TransferError),
        ({"regions": lambda w: grow(w, nbytes=1 << 50)}, TransferError),
        ({"regions": lambda w: grow(w, fd=999)}, TransferError),
        ({"regions": lambda w: grow(w, address=64, fd=-1)}, TransferError),
        ({"pools": lambda w: move(w, address=1 << 60)}, PeerProtocolError),
        ({"pools": lambda w: move(w, shape=(1 << 40, 4, 64))}, PeerProtocolError),
        ({"pools": lambda w: move(w, dims=("T", "T", "D"))}, PeerProtocolError),
        ({"version": lambda w: 99}, RefusedError),
        ({"namespace": lambda w: "other"}, RefusedError),
    ],
)
async def test_an_owner_that_lies_is_not_connected(changes: dict, error: type[Exception]) -> None:
    async with (
        reader(TransportName.SHM) as me,
        fake_owner(lying(**changes)) as address,
    ):
        before = len(me.endpoint.instances)
        with pytest.raises(error):
            await me.endpoint.connect([address])
        assert len(me.endpoint.instances) == before


@pytest.mark.parametrize("side", ["reader", "owner"])
async def test_servers_of_other_releases_refuse_each_other_by_name(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the two is newer; the twin is every other test here."""
    from sglang_ext.disagg.transfer import connecting, owner

    module = {"reader": connecting, "owner": owner}[side]
    monkeypatch.setattr(module, "VERSION", module.VERSION + 1)
    async with reader() as me, reader() as other:
        with pytest.raises(RefusedError, match=f"protocol {module.VERSION - 1}.*run one release"):
            await me.endpoint.connect([other.endpoint.address])
        assert not me.endpoint.instances


@pytest.mark.parametrize("version", [VERSION + 1, VERSION])
async def test_a_newer_release_is_refused_by_its_version_also_where_its_fields_are_others(
    version: int,
) -> None:
    """The twin, with our version, is refused as no message."""
    async with reader() as owner, reader() as me:
        connect = msgspec.to_builtins(Connect(me.endpoint.identity(), {}), builtin_types=(bytes,))
        connect["who"] |= {"version": version, "datacenter": "eu"}
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"tcp://{owner.endpoint.address}")
        await dealer.send_multipart([b"x" * 8, msgspec.msgpack.encode({**connect, "hops": 3})])
        _, answer = await dealer.recv_multipart()
        context.destroy(linger=0)
        refused = REPLIES.decode(answer)
        assert isinstance(refused, Refused)
        if version == VERSION:
            assert refused.reason == "protocol"
            assert "not a message" in refused.text
        else:
            assert refused.reason == "version"
            assert f"protocol {version} there, {VERSION} here; run one release" in refused.text
        assert not owner.endpoint.owner.sessions


async def test_garbage_to_the_control_socket_does_no_harm() -> None:
    async with reader() as owner, reader() as me:
        host, port = owner.endpoint.address.split(":")
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"tcp://{owner.endpoint.address}")
        for frames in ([b"x"], [b"x" * 8, b"\xff" * 1000], [b""] * 5, [b"x" * 8, b""]):
            await dealer.send_multipart(frames)
        # A frame that announces 4 GiB, after a proper ZMTP 3 greeting and READY.
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(b"\xff" + b"\0" * 8 + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32)
            body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
            raw.sendall(b"\x04" + bytes([len(body)]) + body)
            raw.sendall(b"\x02" + struct.pack(">Q", 4 << 30) + b"x" * 65536)
            raw.settimeout(10)
            seen = 0
            while data := await asyncio.to_thread(_quiet_recv, raw):
                seen += len(data)
        assert seen < 1000  # a greeting, then the connection was cut
        await until(lambda: owner.endpoint._server.refused >= 3, 60)
        context.destroy(linger=0)
        instance = await me.endpoint.connect([owner.endpoint.address])
        owner.owned.seal(np.arange(64))
        offer = owner.endpoint.publish("hbm", "r", np.arange(64))
        instance.transfer("r", [offer], "hbm", np.arange(64))
        assert await instance.complete("r", 10) is Outcome.RELEASED


def _quiet_recv(raw: socket.socket) -> bytes:
    try:
        return raw.recv(4096)
    except ConnectionResetError:
        return b""


class DataOwner:
    """A TcpTransport that serves one region, and raw authenticated connections to it."""

    def __init__(self) -> None:
        self.memory = np.full(1 << 16, 0x77, np.uint8)
        self.guard = self.memory.copy()
        self.regions = RegionTable()
        self.regions.add(self.memory.ctypes.data + 4096, 8192)
        self.transport = TcpTransport(self.regions)
        self.session = secrets.token_bytes(16)
        self.grants = np.zeros(8, np.int64)
        self.answer, self.served = self.transport.accept(self.session, b"", self.grants)

    def dial(self, secret: bytes | None = None) -> socket.socket:
        found = _ANSWER.decode(self.answer)
        sock = socket.create_connection(("127.0.0.1", found.port), timeout=5)
        sock.sendall(self.session + _proof(secret or found.secret, sock.recv(16)))
        return sock

    def close(self) -> None:
        self.served.close()
        self.transport.close()


def request(op: int, rows: list[tuple[int, int, int]], *, magic=_stream.MAGIC, total=None, grant=0) -> bytes:
    total = sum(r[2] for r in rows) if total is None else total
    head = struct.pack("<6q", magic, op, 0, len(rows), total, grant)
    return head + b"".join(struct.pack("<3q", *r) for r in rows)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (request(_stream.READ, [(0, 0, 8193)]), _stream.BAD_RANGE),
        (request(_stream.READ, [(0, 8192, 1)]), _stream.BAD_RANGE),
        (request(_stream.READ, [(0, -1, 4)]), _stream.BAD_RANGE),
        (request(_stream.READ, [(1, 0, 4)]), _stream.BAD_RANGE),
        (request(_stream.READ, [(-1, 0, 4)]), _stream.BAD_RANGE),
        (request(_stream.READ, [(5000, 0, 4)]), _stream.BAD_RANGE),
        (request(_stream.READ, [(0, 2**62, 2**62)], total=4), _stream.BAD_RANGE),
        (request(_stream.WRITE, [(0, 0, 4)]) + b"evil", _stream.NO_GRANT),
        (request(_stream.WRITE, [(0, 0, 4)], grant=1 | 9 << 16) + b"evil", _stream.NO_GRANT),
        (request(_stream.WRITE, [(0, 0, 4)], grant=-1) + b"evil", _stream.NO_GRANT),
        (request(_stream.WRITE, [(0, 0, 4)], grant=3) + b"evil", _stream.NO_GRANT),
        (request(3, [(0, 0, 4)]), None),
        (request(_stream.READ, [(0, 0, 4)], magic=1), None),
        (request(_stream.READ, [(0, 0, 4)], total=5), None),
        (request(_stream.READ, [(0, 0, 4)], total=4 << 30), None),
        (struct.pack("<6q", _stream.MAGIC, 1, 0, 1 << 40, 4, 0), None),
        (struct.pack("<6q", _stream.MAGIC, 1, 0, 0, 0, 0), None),
        (b"\xff" * 48, None),
    ],
)
def test_a_data_connection_that_lies_is_cut(data: bytes, status: int | None) -> None:
    owner = DataOwner()
    try:
        with owner.dial() as sock:
            assert sock.recv(1) == b"\x01"
            sock.sendall(data)
            reply = b""
            while part := _quiet_recv(sock):
                reply += part
        if status is None:
            assert reply == b""
        else:
            assert struct.unpack("<4q", reply) == (_stream.MAGIC, status, 0, 0)
        assert np.array_equal(owner.memory, owner.guard)
    finally:
        owner.close()


def test_a_data_connection_needs_the_secret() -> None:
    owner = DataOwner()
    try:
        with owner.dial(secret=b"wrong") as sock:
            assert _quiet_recv(sock) == b""
    finally:
        owner.close()


def test_slow_handshakes_keep_no_peer_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """More strangers connect than there are places, and send nothing."""
    monkeypatch.setattr(tcp, "MAX_HANDSHAKES", 4)
    owner = DataOwner()
    found = _ANSWER.decode(owner.answer)
    strangers = []
    try:
        for _ in range(6):
            sock = socket.create_connection(("127.0.0.1", found.port), timeout=5)
            strangers.append(sock)
            assert len(sock.recv(16)) == 16
        for first in strangers[:2]:
            assert _quiet_recv(first) == b"", "the oldest have given their places up"
        with owner.dial() as sock:
            assert sock.recv(1) == b"\x01"
        for late in strangers[3:]:
            late.setblocking(False)
            with pytest.raises(BlockingIOError):
                late.recv(1)
    finally:
        for sock in strangers:
            sock.close()
        owner.close()


def test_a_handshake_has_one_deadline_for_all_of_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then does not prolong it."""
    monkeypatch.setattr(tcp, "HANDSHAKE_SECONDS", 0.5)
    owner = DataOwner()
    found = _ANSWER.decode(owner.answer)
    try:
        with socket.create_connection(("127.0.0.1", found.port), timeout=5) as sock:
            assert len(sock.recv(16)) == 16
            sock.settimeout(0.1)
            sent = 0
            while True:
                try:
                    sock.sendall(b"x")
                    sent += 1
                    assert sock.recv(1) == b""
                    break
                except TimeoutError:
                    continue
                except ConnectionError:
                    break
            assert sent < 48, "not cut because all of it had come"
    finally:
        owner.close()


@pytest.mark.parametrize(
    "reply",
    [
        struct.pack("<4q", 1, 0, 0, 64),
        struct.pack("<4q", _stream.MAGIC, 0, 7, 64),
        struct.pack("<4q", _stream.MAGIC, 0, 0, 4 << 30),
        struct.pack("<4q", _stream.MAGIC, 0, 0, 63),
        struct.pack("<4q", _stream.MAGIC, 999, 0, 0),
        struct.pack("<4q", _stream.MAGIC, -1, 0, 0),
        struct.pack("<4q", _stream.MAGIC, _stream.BAD_RANGE, 0, 0),
    ],
)
def test_an_owner_that_lies_about_sizes_writes_nowhere(reply: bytes) -> None:
    memory = np.full(4096, 0x66, np.uint8)
    regions = RegionTable()
    regions.add(memory.ctypes.data + 1024, 1024)
    with socket.create_server(("127.0.0.1", 0)) as server:
        import threading

        def liar() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(b"n" * 16)
                sock.recv(48)
                sock.sendall(b"\x01")
                sock.recv(4096)
                sock.sendall(reply + b"\x99" * 4096)
                _quiet_recv(sock)

        thread = threading.Thread(target=liar)
        thread.start()
        channel = TcpChannel(regions, server.getsockname()[:2], b"s" * 16, b"k" * 32, 1)
        with pytest.raises(PeerProtocolError):
            channel.read(0, np.array([(0, 0, 0, 128, 64)], np.int64), CancelToken())
        channel.close()
        thread.join()
    assert (memory == 0x66).all()


async def test_a_cut_connection_is_made_again() -> None:
    async with reader(TransportName.TCP) as owner, reader(TransportName.TCP) as me:
        owner.pool.fill(3)
        owner.owned.seal(np.arange(64))
        instance = await me.endpoint.connect([owner.endpoint.address])
        (session,) = owner.endpoint.owner.sessions
        assert await asyncio.to_thread(session.served["tcp"].fence)
        offer = owner.endpoint.publish("hbm", "r", np.arange(64))
        instance.transfer("r", [offer], "hbm", np.arange(64))
        with pytest.raises(PeerGoneError):
            await instance.complete("r", 10)
        offer = owner.endpoint.publish("hbm", "s", np.arange(64))
        instance.transfer("s", [offer], "hbm", np.arange(64))
        assert await instance.complete("s", 10) is Outcome.RELEASED
        assert np.array_equal(me.pool.bytes, owner.pool.bytes)


@pytest.mark.parametrize("transport", [TransportName.SHM, TransportName.TCP])
async def test_an_expired_grant_frees_nothing_while_its_writer_may_write(transport: TransportName) -> None:
    async with reader(transport, grant_ttl=0.1) as me, reader(transport) as writer:
        instance = await writer.endpoint.connect([me.endpoint.address])
        link = instance.links[0]
        stopped, going_on = asyncio.Event(), asyncio.Event()

        async def stop_slowly(grant: int) -> None:
            stopped.set()
            await going_on.wait()

        link.peer.stop_writes = stop_slowly  # type: ignore[method-assign]
        await until(lambda: me.endpoint.owner.sessions[0].transport == transport, 60)
        me.receiver.aside = {4, 5}
        await link.ask(Reserve(link.session, "r", "hbm", pack_ids(np.array([4, 5]))), 5)
        assert me.owned.granted == 2
        with pytest.raises(RangeError, match="granted to a writer"):
            me.owned.open(np.array([4]))
        if transport is TransportName.SHM:
            # Only the writer itself can report that it has stopped.
            async with asyncio.timeout(240):
                await stopped.wait()
            assert me.owned.granted == 2
            going_on.set()
        await until(lambda: me.owned.granted == 0, 60)
        assert me.receiver.aside == {4, 5}
        with pytest.raises(RefusedError, match="the grant is over"):
            await link.ask(Written(link.session, "r", 1), 5)


@asynccontextmanager
async def granted_writer(
    me: Rank, transport: TransportName, **options: object
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that has blocks 4 and 5 of ``me`` granted."""
    me.receiver.aside = {4, 5}
    # It takes the lease of this request first.
    me.owned.seal(np.array([9]))
    me.endpoint.publish("hbm", "r0", np.array([9]))
    about = {"name": "writer", "connect": me.endpoint.address, "transports": [transport], "reserve": [4, 5]}
    async with process(**about, **options) as (child, _):
        assert me.owned.granted == 2
        yield child


async def test_a_writer_that_dies_is_fenced() -> None:
    async with reader(TransportName.SHM, grant_ttl=600.0) as me:
        async with granted_writer(me, TransportName.SHM) as child:
            child.send_signal(signal.SIGKILL)
            await until(lambda: me.owned.granted == 0, 60)
        assert me.receiver.aside == {4, 5}
        assert me.endpoint.owner.grants == 0


async def test_a_writer_that_is_stopped_is_fenced_and_writes_nothing_when_it_goes_on() -> None:
    """Over cma, and in the middle of writing."""
    async with (
        reader(TransportName.CMA, grant_ttl=600.0) as me,
        granted_writer(me, TransportName.CMA, write=int(me.pool.bytes.size)) as child,
    ):
        await until(lambda: bool(me.pool.bytes.any()), 60)
        child.send_signal(signal.SIGSTOP)
        await until(lambda: me.owned.granted == 0, 60)
        assert me.receiver.aside == {4, 5}
        me.pool.bytes[:] = 7
        child.send_signal(signal.SIGCONT)
        assert child.stdout is not None
        async with asyncio.timeout(20):
            ended = json.loads(await child.stdout.readline())["ended"]
        assert "Bad address" in ended
        assert (me.pool.bytes == 7).all()
        assert me.endpoint.owner.grants == 0


async def test_a_writer_that_runs_is_asked_to_stop() -> None:
    """Not fenced by its guard page: a call may be under way."""
    guard = GuardPages(os.getpid(), 4)
    guard.admit(1)
    assert not guard.holds
    guard.close()
    assert not guard.holds
    assert GuardPages(2**22 + 1, 4).writer_gone


@pytest.mark.parametrize("leaves", [False, True], ids=["still connected", "connects anew"])
@pytest.mark.parametrize("transport", [TransportName.SHM, TransportName.CMA])
async def test_a_grant_ends_when_both_have_taken_the_other_for_dead(
    transport: TransportName, leaves: bool
) -> None:
    """Both stood still for a while, as on a machine without memory, and live."""
    async with reader(transport, grant_ttl=600.0) as me, reader(transport) as writer:
        instance = await writer.endpoint.connect([me.endpoint.address])
        link = instance.links[0]
        await until(lambda: me.endpoint.owner.sessions[0].transport == transport, 60)
        me.receiver.aside = {4, 5}
        await link.ask(Reserve(link.session, "r", "hbm", pack_ids(np.array([4, 5]))), 5)
        link.fail(PeerGoneError("the receiver was silent"))
        await me.endpoint.owner.end(me.endpoint.owner.sessions[0])
        if leaves:
            assert me.owned.granted == 2
            await instance.close()
        await until(lambda: me.owned.granted == 0, 60)
        assert me.receiver.aside == {4, 5}
        assert me.endpoint.owner.grants == 0


async def test_nothing_listens_beyond_loopback_without_a_key() -> None:
    shape = Shape()
    for fields in ({"bind": "0.0.0.0"}, {"bind": "[::]"}):
        with pytest.raises(ConfigError, match="without a key"):
            await start_instance(EndpointConfig("x", NAMESPACE, **fields), shape)


async def test_only_members_get_past_the_key() -> None:
    public, secret = zmq.curve_keypair()
    keys = CurveKeys(public, secret)
    assert secret.decode() not in repr(EndpointConfig("x", NAMESPACE, keys=keys))
    async with reader(keys=keys) as owner, reader(keys=keys) as member:
        assert (await member.endpoint.connect([owner.endpoint.address])).name == "reader"
        other = CurveKeys(*zmq.curve_keypair())
        for strange in (None, other):
            async with reader(keys=strange, connect_timeout=0.5) as stranger:
                with pytest.raises(TransferDeadlineError):
                    await stranger.endpoint.connect([owner.endpoint.address])


async def test_reasons_for_every_transport_are_given() -> None:
    async with reader(TransportName.SHM, TransportName.CMA) as me:
        (owner,) = await start_instance(
            EndpointConfig("o", NAMESPACE, transports=(TransportName.SHM,)), Shape(**SHAPE), shared=False
        )
        try:
            with pytest.raises(
                RefusedError, match=r"shm: a pool is not in shared memory.*cma: the owner does not"
            ):
                await me.endpoint.connect([owner.endpoint.address])
        finally:
            await owner.close()


async def test_counts_name_the_transport_and_outlive_the_peer() -> None:
    async with reader(TransportName.TCP) as owner, reader(TransportName.TCP) as me:
        owner.owned.seal(np.arange(64))
        instance = await me.endpoint.connect([owner.endpoint.address])
        offer = owner.endpoint.publish("hbm", "r", np.arange(4))
        instance.transfer("r", [offer], "hbm", np.arange(4))
        await instance.complete("r", 10)
        await instance.close()
        assert not me.endpoint.instances
        (found,) = me.endpoint.totals().items()
        name, stats = found
        assert (name, stats.completed, stats.bytes) == ("tcp", 1, 4 * me.pool.geometry.block_bytes)


def test_every_transport_says_why_it_cannot_be_used() -> None:
    found = reasons()
    assert set(found) == set(TransportName)
    assert found[TransportName.SHM] is None
    assert found[TransportName.TCP] is None
    verbs = found[TransportName.VERBS]
    assert verbs is None or "pyverbs" in verbs or "RDMA device" in verbs


def test_the_error_classes_say_who_must_act() -> None:
    assert StaleReadError("r", 1, 2).actor.value == "peer"
    assert TransferDeadlineError("x").actor.value == "deadline"

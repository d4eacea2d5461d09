"""The HTTP server against real sockets: cut input, pipelines, limits, times, and clients that go away."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator

import pytest
from http_rig import CLOSE, GET, Rig, chunked, post, running

from sglang_ext.router.http.server import OTHER_FILES, limits_within, raise_file_limit
from sglang_ext.router.http.state import HttpLimits


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running() as rig:
        yield rig


async def test_a_request_and_its_answer(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(GET)
    status, headers, body = await wire.answer()
    assert (status, body) == (200, b"GET /x?y=1 0")
    assert headers["content-type"] == "text/plain"
    assert headers["date"].endswith("GMT")
    request = rig.echo.requests[0]
    assert (request.path, request.query, request.headers["host"]) == ("/x", "y=1", "h")


@pytest.mark.parametrize(
    "message", [GET, post("/x", b"12345"), chunked("/x", b"123", b"45", trailers=b"T: u\r\n")]
)
async def test_bytes_one_by_one(message: bytes, rig: Rig) -> None:
    wire = await rig.connect()
    for _ in range(2):
        await wire.dribble(message)
        assert (await wire.answer())[0] == 200
    first, second = rig.echo.requests
    assert first == second
    assert first.body in (b"", b"12345")
    assert "t" not in first.headers


async def test_many_requests_on_one_connection_one_after_another(rig: Rig) -> None:
    wire = await rig.connect()
    for number in range(20):
        wire.send(post(f"/{number}", b"x" * number))
        assert (await wire.answer())[2] == b"POST /%d %d" % (number, number)
    assert len(rig.server.state.connections) == 1


async def test_pipelined_requests_are_answered_in_order(rig: Rig) -> None:
    wire = await rig.connect()
    count = 200  # more than may wait: reading stops, and goes on
    wire.send(
        b"GET /gate HTTP/1.1\r\nHost: h\r\n\r\n" + b"".join(post(f"/{n}", b"z" * n) for n in range(count))
    )
    await rig.echo.gate.reached()
    assert len(rig.echo.requests) == 1, "the next one begins when the one before it is answered"
    rig.echo.gate.open()
    assert (await wire.answer())[2] == b"GET /gate 0"
    for number in range(count):
        assert (await wire.answer())[2] == b"POST /%d %d" % (number, number)


async def test_a_refused_request_is_answered_after_those_before_it(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(GET + b"nonsense\r\n\r\n" + GET)
    assert (await wire.answer())[0] == 200
    assert (await wire.answer())[0] == 400
    assert await wire.ended() == b""
    await wire.close()
    await rig.until_empty()
    assert len(rig.echo.requests) == 1


async def test_the_connection_ends_when_either_side_says_so(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(CLOSE + GET)
    status, headers, _ = await wire.answer()
    assert (status, headers["connection"]) == (200, "close")
    assert await wire.ended() == b""
    assert len(rig.echo.requests) == 1


async def test_http_1_0(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(b"GET /stream/3 HTTP/1.0\r\n\r\n")
    status, headers, body = await wire.answer()
    assert (status, body) == (200, b"abc")
    assert "transfer-encoding" not in headers


async def test_head_is_answered_without_a_body(rig: Rig) -> None:
    wire = await rig.connect()
    for path, length in (("/x", "8"), ("/stream/3", None)):
        wire.send(f"HEAD {path} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
        head = await wire.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        if length is not None:
            assert f"content-length: {length}".encode() in head
    wire.send(GET)
    assert (await wire.answer())[2] == b"GET /x?y=1 0"


async def test_an_answer_without_a_body(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(b"GET /nothing HTTP/1.1\r\nHost: h\r\n\r\n" + GET)
    status, headers, _ = await wire.answer()
    assert status == 204
    assert "content-length" not in headers
    assert (await wire.answer())[0] == 200


async def test_a_piece_of_a_stream_is_sent_before_the_next_is_there(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(b"GET /held-stream HTTP/1.1\r\nHost: h\r\n\r\n")
    await wire.reader.readuntil(b"\r\n\r\n")
    assert await asyncio.wait_for(wire.reader.readuntil(b"first\r\n"), 30) == b"5\r\nfirst\r\n"
    rig.echo.gate.open()
    assert await wire.reader.readuntil(b"0\r\n\r\n") == b"4\r\nlast\r\n0\r\n\r\n"


# -- limits and times --------------------------------------------------------------------------------


async def test_one_connection_too_many() -> None:
    async with running(HttpLimits(max_connections=2)) as rig:
        first, second = await rig.connect(), await rig.connect()
        for wire in (first, second):
            wire.send(GET)
            await wire.answer()
        third = await rig.connect()
        status, headers, body = await third.answer()
        assert (status, headers["retry-after"]) == (503, "1")
        assert b"--max-concurrent-requests connections" in body
        await third.close()
        await first.close()
        await rig.until(lambda: len(rig.server.state.connections) == 1)
        fourth = await rig.connect()
        fourth.send(GET)
        assert (await fourth.answer())[0] == 200


async def test_one_request_too_many() -> None:
    async with running(HttpLimits(max_concurrent_requests=1)) as rig:
        first, second = await rig.connect(), await rig.connect()
        first.send(b"GET /gate HTTP/1.1\r\nHost: h\r\n\r\n")
        await rig.echo.gate.reached()
        second.send(GET)
        status, headers, body = await second.answer()
        assert (status, headers["retry-after"]) == (429, "1")
        assert b"--max-concurrent-requests" in body
        second.send(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (await second.answer())[0] == 200
        rig.echo.gate.open()
        await first.answer()
        second.send(GET)
        assert (await second.answer())[0] == 200


LIMITS = HttpLimits(
    head_timeout_s=10, body_grace_s=30, body_bytes_per_s=100, idle_timeout_s=60, stall_timeout_s=100
)


@pytest.mark.parametrize(
    ("sent", "in_time", "late"),
    [
        (b"GET / HT", 9.0, 2.0),
        (b"\r\n", 9.0, 2.0),
        (post("/x", bytes(4000))[:-1000], 59.0, 2.0),
        (b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n", 29.0, 2.0),
    ],
)
async def test_a_request_that_does_not_come_is_given_up(sent: bytes, in_time: float, late: float) -> None:
    async with running(LIMITS) as rig:
        wire = await rig.connect()
        wire.send(sent)
        (connection,) = await _connections(rig, 1)
        await rig.until(lambda: "IDLE" not in repr(connection) and _read(connection) >= len(sent))
        rig.later(in_time)
        assert len(rig.server.state.connections) == 1
        assert rig.echo.refused == []
        rig.later(late)
        assert (await wire.answer())[0] == 408
        assert await wire.ended() == b""
        await wire.close()
        await rig.until_empty()


async def _connections(rig: Rig, count: int) -> list[object]:
    await rig.until(lambda: len(rig.server.state.connections) == count)
    return list(rig.server.state.connections)


def _read(connection: object) -> int:
    return connection._reader._raw  # type: ignore[attr-defined,no-any-return]


async def test_a_slow_body_is_waited_for_while_it_comes() -> None:
    async with running(LIMITS) as rig:
        wire = await rig.connect()
        message = post("/x", bytes(4000))
        wire.send(message[:-4000])
        (connection,) = await _connections(rig, 1)
        for part in range(4):
            wire.send(bytes(1000))
            expected = len(message) - 3000 + 1000 * part
            # A complete body is read no more.
            ends = (0, expected) if part == 3 else (expected,)
            await rig.until(lambda ends=ends: _read(connection) in ends)  # type: ignore[misc]
            rig.later(9.0)
        assert (await wire.answer())[0] == 200


async def test_an_idle_connection_is_closed_and_a_busy_one_is_not() -> None:
    async with running(LIMITS) as rig:
        idle, busy, fresh = await rig.connect(), await rig.connect(), await rig.connect()
        idle.send(GET)
        await idle.answer()
        busy.send(b"GET /gate HTTP/1.1\r\nHost: h\r\n\r\n")
        await rig.echo.gate.reached()
        await _connections(rig, 3)
        rig.later(61.0)
        assert await idle.ended() == b""
        assert await fresh.ended() == b""
        assert len(rig.server.state.connections) == 1
        rig.echo.gate.open()
        assert (await busy.answer())[0] == 200


async def test_who_does_not_read_is_waited_for_and_then_cut() -> None:
    async with running(LIMITS) as rig:
        size = 64 << 20
        wire = await rig.connect(limit=1024)
        wire.send(f"GET /big/{size} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
        (connection,) = await _connections(rig, 1)
        await rig.until(lambda: connection.drain is not None)  # type: ignore[attr-defined]
        assert rig.echo.written < size, "the handler waits for the client"
        rig.later(99.0)
        assert rig.echo.present == 1
        rig.later(2.0)
        await rig.until_empty()
        assert rig.echo.cancelled == 1


async def test_who_reads_slowly_gets_everything() -> None:
    async with running(LIMITS) as rig:
        size = 16 << 20
        wire = await rig.connect(limit=16 << 10)
        wire.send(f"GET /big/{size} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n".encode())
        (connection,) = await _connections(rig, 1)
        await rig.until(lambda: connection.drain is not None)  # type: ignore[attr-defined]
        assert (await wire.answer())[2] == bytes(size)
        assert await wire.ended() == b""


# -- going away --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["reset", "close", "half-close"])
@pytest.mark.parametrize(
    "stage", ["connected", "head", "body", "handling", "streaming", "pipelined", "stalled"]
)
async def test_a_client_that_goes_away_leaves_nothing(stage: str, how: str, rig: Rig) -> None:
    wire = await rig.connect(limit=1024)
    running_request = stage in ("handling", "streaming", "pipelined", "stalled")
    wire.send({
        "connected": b"",
        "head": b"POST /x HTTP/1.1\r\nHo",
        "body": post("/x", bytes(100))[:-10],
        "handling": b"GET /gate HTTP/1.1\r\nHost: h\r\n\r\n",
        "streaming": b"GET /held-stream HTTP/1.1\r\nHost: h\r\n\r\n",
        "pipelined": b"GET /gate HTTP/1.1\r\nHost: h\r\n\r\n" + GET * 5,
        "stalled": b"GET /big/67108864 HTTP/1.1\r\nHost: h\r\n\r\n",
    }[stage])  # fmt: skip
    (connection,) = await _connections(rig, 1)
    if stage == "stalled":
        await rig.until(lambda: connection.drain is not None)  # type: ignore[attr-defined]
    elif running_request:
        await rig.echo.gate.reached()
    elif stage in ("head", "body"):
        await rig.until(lambda: stage.upper() in repr(connection))
    if how == "reset":
        wire.reset()
    elif how == "close":
        await wire.close()
    else:
        wire.writer.write_eof()
        if stage == "stalled":
            wire.reset()
    await rig.until_empty()
    assert rig.echo.cancelled == int(running_request)
    assert len(rig.echo.requests) == int(running_request), "requests behind it are not begun"


async def test_a_handler_that_cuts_its_answer(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(b"GET /cut HTTP/1.1\r\nHost: h\r\n\r\n")
    assert b"0\r\n\r\n" not in await wire.ended()
    await rig.until_empty()


async def test_a_handler_that_fails_costs_its_connection_only(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    wire, other = await rig.connect(), await rig.connect()
    wire.send(b"GET /fail HTTP/1.1\r\nHost: h\r\n\r\n")
    assert await wire.ended() == b""
    assert "on purpose" in caplog.text
    other.send(GET)
    assert (await other.answer())[0] == 200


async def test_stopping_lets_an_answer_end_and_tells_the_client() -> None:
    async with running() as rig:
        wire, idle = await rig.connect(), await rig.connect()
        wire.send(b"GET /gate HTTP/1.1\r\nHost: h\r\n\r\n")
        await rig.echo.gate.reached()
        await _connections(rig, 2)
        stopping = asyncio.create_task(rig.server.stop())
        assert await idle.ended() == b""
        rig.echo.gate.open()
        status, headers, _ = await wire.answer()
        assert (status, headers["connection"]) == (200, "close")
        await stopping


async def test_stopping_cuts_what_does_not_end() -> None:
    async with running() as rig:
        wire = await rig.connect()
        wire.send(b"GET /gate HTTP/1.1\r\nHost: h\r\n\r\n")
        await rig.echo.gate.reached()
        await rig.server.stop()
        assert rig.echo.cancelled == 1
        assert await wire.ended() == b""


@pytest.mark.parametrize("hurried", [False, True])
async def test_stopping_waits_for_the_grace_period_or_until_it_is_hurried(hurried: bool) -> None:
    async with running(grace_s=3600.0) as rig:
        wire = await rig.connect()
        wire.send(b"GET /held-stream HTTP/1.1\r\nHost: h\r\n\r\n")
        await rig.echo.gate.reached()
        stopping = asyncio.create_task(rig.server.stop())
        await rig.until(lambda: rig.server.state.stopping)
        if hurried:
            rig.server.hurry()
        else:
            rig.echo.gate.open()
        text = await wire.ended()
        await stopping
    assert b"first" in text
    assert text.endswith(b"4\r\nlast\r\n0\r\n\r\n") is not hurried


async def test_no_delay(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(GET)
    await wire.answer()
    (connection,) = rig.server.state.connections
    sock = connection.transport.get_extra_info("socket")  # type: ignore[attr-defined]
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_as_many_files_as_connections_need() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], 900), before[1]))
        wanted = HttpLimits(max_connections=400, max_concurrent_requests=200, more_refused=100)
        raised = raise_file_limit(wanted)
        assert raised == resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 700 + OTHER_FILES
        assert limits_within(wanted, raised) is wanted
        few = HttpLimits(max_connections=1, max_concurrent_requests=1, more_refused=1)
        assert raise_file_limit(few) == raised, "it is never lowered"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("files", [64, 256, 1024, 4096, 16_384])
def test_limits_are_what_open_files_serve(files: int) -> None:
    asked = HttpLimits()
    limits = limits_within(asked, files)
    for_clients = limits.max_connections + limits.more_refused
    assert for_clients + limits.max_concurrent_requests + min(OTHER_FILES, files // 5) <= files
    assert min(limits.max_connections, limits.max_concurrent_requests, limits.more_refused) > 0
    assert for_clients > files // 2, "a connection that is not accepted is reset"
    assert limits.open_files == files
    assert limits_within(asked, None) == limits_within(asked, 1 << 20) == asked


async def test_beyond_what_open_files_serve_is_a_503() -> None:
    async with running(HttpLimits(max_concurrent_requests=1, open_files=64)) as rig:
        first, second = await rig.connect(), await rig.connect()
        first.send(b"GET /gate HTTP/1.1\r\nHost: h\r\n\r\n")
        await rig.until(lambda: rig.server.state.active == 1)
        second.send(GET)
        status, headers, body = await second.answer()
        assert (status, headers["retry-after"]) == (503, "1")
        assert b"ulimit -n" in body
        rig.echo.gate.open()
        assert (await first.answer())[0] == 200

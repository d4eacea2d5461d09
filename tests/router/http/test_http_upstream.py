"""The HTTP client against scripted workers: connections kept, requests repeated, names of failures."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from sglang_ext.errors import InternalError
from sglang_ext.router.http import upstream as http_upstream
from sglang_ext.router.http.types import ConnectFailed, ConnectionLost, RequestTimeout, UpstreamResponse
from sglang_ext.router.http.upstream import HttpUpstream
from sglang_ext.router.http.worker_connection import BUFFERED_BYTES
from sglang_ext.testing.waiting import until

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
WAIT_S = 10.0
LIMIT_S = 0.2


class Worker:
    """Answers the requests of each connection as its script says: bytes are sent, ``None`` closes, ``Gate``
    stand-ins are awaited. A connection without a script is answered with OK every time."""

    def __init__(self) -> None:
        self.scripts: list[list[bytes | asyncio.Event | None]] = []
        self.requests: list[bytes] = []
        self.connections = 0
        self.ended = 0
        self.url = ""
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        script = self.scripts.pop(0) if self.scripts else None
        self.connections += 1
        try:
            while script is None or script:
                self.requests.append(await self._request(reader))
                self._changed.set()
                if script is None:
                    writer.write(OK)
                    continue
                while script:
                    step = script.pop(0)
                    if isinstance(step, asyncio.Event):
                        await step.wait()
                    elif step is None:
                        return
                    elif step == b"":
                        break  # the next request
                    else:
                        writer.write(step)
                        await writer.drain()
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.ended += 1
            self._changed.set()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _request(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        return head + (await reader.readexactly(int(length[0].split(b":")[1])) if length else b"")


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker()
    handlers: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        await worker.serve(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    worker.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield worker
    server.close()
    for task in handlers:
        task.cancel()
    await asyncio.gather(*handlers, return_exceptions=True)


@pytest.fixture
async def upstream() -> AsyncIterator[HttpUpstream]:
    upstream = HttpUpstream()
    yield upstream
    await upstream.close()
    assert upstream.open_connections == 0


async def ask(upstream: HttpUpstream, url: str, method: str = "GET", body: bytes = b"") -> bytes:
    response = await upstream.open(method, url, body=body, timeout_s=WAIT_S)
    try:
        return await response.read()
    finally:
        response.close()


async def test_a_connection_is_used_again(upstream: HttpUpstream, worker: Worker) -> None:
    for _ in range(3):
        assert await ask(upstream, worker.url + "/a?b", "POST", b"body") == b"ok"
    assert worker.connections == 1
    host = worker.url.removeprefix("http://").encode()
    assert worker.requests[0] == b"POST /a?b HTTP/1.1\r\nhost: %b\r\ncontent-length: 4\r\n\r\nbody" % host


async def test_requests_at_once_have_connections_of_their_own(upstream: HttpUpstream, worker: Worker) -> None:
    assert await asyncio.gather(*(ask(upstream, worker.url + "/") for _ in range(20))) == [b"ok"] * 20
    before = worker.connections
    assert before > 1
    await asyncio.gather(*(ask(upstream, worker.url + "/") for _ in range(20)))
    assert worker.connections == before


@pytest.mark.parametrize(
    ("answer", "body", "kept"),
    [
        (OK, b"ok", True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", b"abc", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", b"", True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"ok", True),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK, b"ok", True),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok", b"ok", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", b"ok", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("cut", [False, True])
async def test_answers(
    answer: bytes, body: bytes, kept: bool, cut: bool, upstream: HttpUpstream, worker: Worker
) -> None:
    worker.scripts = [[*([bytes([b]) for b in answer] if cut else [answer]), b"", OK]]
    assert await ask(upstream, worker.url + "/") == body
    assert await ask(upstream, worker.url + "/") == b"ok"
    assert worker.connections == (1 if kept else 2)


async def test_a_body_that_ends_with_the_connection(upstream: HttpUpstream, worker: Worker) -> None:
    worker.scripts = [[b"HTTP/1.1 200 OK\r\n\r\nab", b"cd", None]]
    assert await ask(upstream, worker.url + "/") == b"abcd"


async def test_head(upstream: HttpUpstream, worker: Worker) -> None:
    worker.scripts = [[b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"]]
    assert await ask(upstream, worker.url + "/", "HEAD") == b""
    assert await ask(upstream, worker.url + "/") == b"ok"


async def test_headers_are_joined_and_those_of_the_connection_left_out(
    upstream: HttpUpstream, worker: Worker
) -> None:
    worker.scripts = [[b"HTTP/1.1 418 T\r\nA: 1\r\na: 2\r\nKeep-Alive: x\r\nContent-Length: 0\r\n\r\n"]]
    response = await upstream.open("GET", worker.url + "/")
    assert (response.status, dict(response.headers)) == (418, {"a": "1, 2", "content-length": "0"})
    response.close()


async def test_pieces_are_passed_on_as_they_come(upstream: HttpUpstream, worker: Worker) -> None:
    go_on = asyncio.Event()
    worker.scripts = [
        [
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"5\r\nfirst\r\n",
            go_on,
            b"4\r\nlast\r\n0\r\n\r\n",
        ]
    ]
    response = await upstream.open("GET", worker.url + "/")
    assert await response.piece() == b"first"
    go_on.set()
    assert [await response.piece(), await response.piece()] == [b"last", b""]
    response.close()


async def test_a_reader_that_is_slow_slows_the_worker(upstream: HttpUpstream, worker: Worker) -> None:
    size = 64 << 20
    piece = bytes(1 << 20)
    worker.scripts = [[b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size, *[piece] * 64]]
    response = await upstream.open("GET", worker.url + "/")
    connection = response._connection  # type: ignore[attr-defined]
    async with asyncio.timeout(WAIT_S):
        while not connection._paused:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert connection._size < BUFFERED_BYTES * 3
    assert len(await response.read()) == size
    response.close()


# -- failures ----------------------------------------------------------------------------------------


async def test_a_refused_connection_is_an_error(upstream: HttpUpstream, unused_tcp_port: int) -> None:
    with pytest.raises(ConnectFailed, match="cannot connect"):
        await upstream.open("POST", f"http://127.0.0.1:{unused_tcp_port}/")


@pytest.mark.parametrize("stalls", [[3 * LIMIT_S], [LIMIT_S * 0.3] * 6], ids=["once", "again and again"])
async def test_a_limit_that_this_process_slept_through_says_nothing_of_the_worker(
    stalls: list[float], worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that stands still finds its own limit over before it sees that the connection stands."""
    loop = asyncio.get_running_loop()
    create = loop.create_connection

    async def connect(*args: Any, **kwargs: Any) -> Any:
        while stalls:
            time.sleep(stalls.pop())  # noqa: ASYNC251
            await asyncio.sleep(0)
        return await create(*args, **kwargs)

    async def never(*args: object, **kwargs: object) -> None:
        await asyncio.Event().wait()

    upstream = HttpUpstream(LIMIT_S)
    monkeypatch.setattr(loop, "create_connection", connect)
    assert await ask(upstream, worker.url + "/") == b"ok"
    assert not stalls
    await upstream.close()
    monkeypatch.setattr(loop, "create_connection", never)
    with pytest.raises(ConnectFailed, match="within"):
        await upstream.open("POST", worker.url + "/")


async def test_a_connection_that_stands_when_its_request_is_given_up_is_closed(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    create, made = loop.create_connection, asyncio.Event()
    upstream = HttpUpstream()

    async def connect(*args: Any, **kwargs: Any) -> Any:
        found = await create(*args, **kwargs)
        made.set()
        return found

    monkeypatch.setattr(loop, "create_connection", connect)
    request = asyncio.ensure_future(ask(upstream, worker.url + "/"))
    await made.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    await until(lambda: upstream.open_connections == 0)
    await upstream.close()


async def test_too_few_files_for_a_connection_say_nothing_of_the_worker(
    upstream: HttpUpstream, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def exhausted(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "create_connection", exhausted)
        with pytest.raises(RequestTimeout, match="Too many open files"):
            await upstream.open("POST", worker.url + "/")
    assert await ask(upstream, worker.url + "/") == b"ok"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
    ],
)
async def test_an_answer_that_breaks_off_or_is_none(
    answer: bytes, upstream: HttpUpstream, worker: Worker
) -> None:
    worker.scripts = [[answer or None, None]]
    with pytest.raises(ConnectionLost):
        await ask(upstream, worker.url + "/", "POST", b"x")
    assert len(worker.requests) == 1


async def test_a_head_without_an_end(upstream: HttpUpstream, worker: Worker) -> None:
    worker.scripts = [[b"HTTP/1.1 200 OK\r\nX: ", *[b"x" * 65536] * 8]]
    with pytest.raises(ConnectionLost, match="without an end"):
        await ask(upstream, worker.url + "/")


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_kept_connection_that_ends_with_the_request_on_its_way(
    method: str, upstream: HttpUpstream, worker: Worker
) -> None:
    """Only requests that do no harm twice are sent again; the worker may have died of anything else."""
    worker.scripts = [[OK, b"", None], [OK]]
    await ask(upstream, worker.url + "/")
    if method == "GET":
        assert await ask(upstream, worker.url + "/") == b"ok"
    else:
        with pytest.raises(ConnectionLost):
            await ask(upstream, worker.url + "/", "POST", b"x")
    assert len(worker.requests) == (3 if method == "GET" else 2)


async def test_a_new_connection_that_ends_is_not_tried_again(upstream: HttpUpstream, worker: Worker) -> None:
    worker.scripts = [[None]]
    with pytest.raises(ConnectionLost):
        await ask(upstream, worker.url + "/")
    assert worker.connections == 1


async def test_a_kept_connection_that_has_ended_is_not_used(
    upstream: HttpUpstream, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end waits to be read, and the event loop has not yet come to it."""
    monkeypatch.setattr(http_upstream, "LOOK_AFTER_S", -1.0)
    worker.scripts = [[OK, None]]
    await ask(upstream, worker.url + "/")
    (connection,) = upstream._pools[worker.url].idle
    connection.transport.pause_reading()  # stands for a loop that is busy
    await worker.until(lambda: worker.ended == 1)
    assert await ask(upstream, worker.url + "/", "POST", b"x") == b"ok"
    assert len(worker.requests) == 2


async def test_what_comes_unasked_ends_the_connection(upstream: HttpUpstream, worker: Worker) -> None:
    """It could be taken for the answer to the next request."""
    worker.scripts = [[OK + b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad"], [OK]]
    assert await ask(upstream, worker.url + "/") == b"ok"
    assert await ask(upstream, worker.url + "/", "POST", b"x") == b"ok"
    assert worker.connections == 2


async def test_old_connections_are_given_up(
    upstream: HttpUpstream, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asyncio.gather(*(ask(upstream, worker.url + "/") for _ in range(3)))
    monkeypatch.setattr(http_upstream, "KEEP_ALIVE_S", 0.0)
    before = worker.connections
    await ask(upstream, worker.url + "/")
    assert worker.connections == before + 1
    await worker.until(lambda: worker.ended == before)
    assert upstream.open_connections == 1


@pytest.mark.parametrize("stage", ["head", "body"])
async def test_time_is_over(stage: str, upstream: HttpUpstream, worker: Worker) -> None:
    never = asyncio.Event()
    begun = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\no" if stage == "body" else b"HTTP/1.1 "
    worker.scripts = [[begun, never]]
    with pytest.raises(RequestTimeout, match="within"):
        await (await upstream.open("POST", worker.url + "/", timeout_s=0.1)).read()
    never.set()
    await worker.until(lambda: worker.ended == 1)


async def _cancelled_open(upstream: HttpUpstream, worker: Worker) -> UpstreamResponse | None:
    opening = asyncio.create_task(upstream.open("POST", worker.url + "/", timeout_s=WAIT_S))
    await worker.until(lambda: len(worker.requests) == 1)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    return None


async def _closed_response(upstream: HttpUpstream, worker: Worker) -> UpstreamResponse | None:
    response = await upstream.open("POST", worker.url + "/", timeout_s=WAIT_S)
    response.close()
    return response


@pytest.mark.parametrize("how", [_cancelled_open, _closed_response])
async def test_giving_up_closes_the_connection(
    how: Callable[[HttpUpstream, Worker], Awaitable[UpstreamResponse | None]],
    upstream: HttpUpstream,
    worker: Worker,
) -> None:
    """On which the worker aborts the request."""
    begun = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\no" if how is _closed_response else b"HTTP/1.1 "
    worker.scripts = [[begun]]
    response = await how(upstream, worker)
    await worker.until(lambda: worker.ended == 1)
    if response is not None:
        with pytest.raises(InternalError):
            await response.read()


async def test_a_line_break_does_not_become_a_header(upstream: HttpUpstream, worker: Worker) -> None:
    for url, headers in (
        (worker.url + "/a b", {}),
        (worker.url + "/", {"x": "1\r\ny: 2"}),
        (worker.url + "/\n", {}),
    ):
        with pytest.raises(InternalError):
            await upstream.open("GET", url, headers=headers)
    assert worker.requests == []


async def test_an_answer_that_was_closed_is_not_read_again(upstream: HttpUpstream, worker: Worker) -> None:
    """Its connection may carry another one by then."""
    response = await upstream.open("GET", worker.url, timeout_s=WAIT_S)
    assert await response.read() == b"ok"
    response.close()
    response.close()
    assert response.status == 200
    with pytest.raises(InternalError, match="closed already"):
        await response.read()
    assert await ask(upstream, worker.url) == b"ok"

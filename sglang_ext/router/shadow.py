"""``sglang-ext router --shadow``: in front of today's fleet, whatever serves there.

Requests and answers pass as they are. Beside that, each request is noted for ``--record``: its prompt as
names of blocks, the length of its answer, its times. All that can fail, or take time, is in the thread that
writes the file; the rest is guarded, so that no fault of it changes or delays an answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import orjson
import uvloop

from sglang_ext.clock import Clock, SystemClock
from sglang_ext.cluster_key import read_cluster_key
from sglang_ext.errors import ConfigError
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.protocol.recording import VERSION, AnyLine, Head, Member, Namer, Writer
from sglang_ext.protocol.recording import Request as RequestLine
from sglang_ext.router.api.dialect import DIALECTS
from sglang_ext.router.clients.rules import SessionRow, rules_of
from sglang_ext.router.clients.sessions import session_of
from sglang_ext.router.config import RouterConfig
from sglang_ext.router.estimate.prompts import LIMITS, Reader, Tokens, Units
from sglang_ext.router.http.server import HttpServer, limits_within, raise_file_limit
from sglang_ext.router.http.tls import server_context, worker_context
from sglang_ext.router.http.types import (
    EVENT_STREAM_TYPE,
    HOP_BY_HOP,
    JSON_TYPE,
    ClientGone,
    ConnectFailed,
    ConnectionLost,
    Request,
    RequestRefused,
    RequestTimeout,
    Responder,
    Upstream,
)
from sglang_ext.router.http.upstream import HttpUpstream
from sglang_ext.router.telemetry.logs import configure_logging
from sglang_ext.router.telemetry.record_file import RecordFile, recording_key, yield_to_others

logger = logging.getLogger("router.shadow")

T = TypeVar("T")
TAIL_BYTES: Final = 16 << 10
"""The end of an answer, in which its usage stands."""
MANY: Final = 1 << 20
_NOT_PASSED: Final = HOP_BY_HOP | {"host", "content-length", "content-encoding", "expect"}
_NOT_RETURNED: Final = HOP_BY_HOP | {"content-length"}
_ANSWERED: Final = re.compile(rb'"(?:completion_tokens|output_tokens|eval_count)"\s*:\s*(\d+)')
_CACHED: Final = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d+)')


class Seen:
    """One exchange, as far as it is noted."""

    def __init__(self, request: Request, at: float) -> None:
        self.request, self.at = request, at
        self.status = 0
        self.worker = ""
        self.stream = False
        self.first_byte_s: float | None = None
        self.tail = b""
        self.events = 0
        """Events of a stream; about as many as tokens, where its end does not say how many."""

    def begin(self, worker: str, status: int, headers: Mapping[str, str]) -> None:
        """The head of the answer has come."""
        self.worker, self.status = worker, status
        self.stream = headers.get("content-type", "").startswith(EVENT_STREAM_TYPE)

    def feed(self, data: bytes, now: float) -> None:
        """A piece of the answer has passed."""
        if self.first_byte_s is None:
            self.first_byte_s = now - self.at
        self.tail = (self.tail + data)[-TAIL_BYTES:] if len(data) < TAIL_BYTES else data[-TAIL_BYTES:]
        if self.stream:
            self.events += data.count(b"data:")


class Notes:
    """Writes the requests that have passed to a recording.

    Args:
        tokenizer_path: a folder with the model's tokenizer; None for units of 4 bytes.
        sessions: where clients name their sessions.
    """

    def __init__(
        self, file: RecordFile, clock: Clock, tokenizer_path: str | None, sessions: tuple[SessionRow, ...]
    ) -> None:
        self.file = file
        self._clock = clock
        self._zero = clock.wall() - clock.monotonic()
        self._path, self._sessions = tokenizer_path, sessions
        self._reader: Reader | None = None
        self._workers: set[str] = set()
        self.failures = 0
        """Exchanges that passed and could not be noted."""

    def begin(self, request: Request) -> Seen | None:
        """A request has come; None if it is no generation, or cannot be noted."""
        if request.path not in DIALECTS or not request.body:
            return None
        return self._guarded(lambda: Seen(request, self._clock.monotonic()))

    def head(self, seen: Seen | None, worker: str, status: int, headers: Mapping[str, str]) -> None:
        """The head of its answer has come."""
        if seen is not None:
            self._guarded(lambda: seen.begin(worker, status, headers))

    def piece(self, seen: Seen | None, data: bytes) -> None:
        """A piece of its answer has passed."""
        if seen is not None:
            self._guarded(lambda: seen.feed(data, self._clock.monotonic()))

    def end(self, seen: Seen | None) -> None:
        """The exchange has ended."""
        if seen is not None:
            self._guarded(lambda: self._put(seen, self._clock.monotonic() - seen.at))

    def _put(self, seen: Seen, took_s: float) -> None:
        size = len(seen.request.body) + len(seen.tail)
        self.file.put(lambda namer, writer: self._lines(seen, took_s, namer, writer), size)

    def _guarded(self, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except Exception:
            self.failures += 1
            if self.failures == 1:
                logger.exception("a request is not noted; it has passed")
            return None

    # -- in the thread of the file ------------------------------------------------------------------

    def _lines(self, seen: Seen, took_s: float, namer: Namer, writer: Writer) -> Iterator[AnyLine]:
        request = seen.request
        body: Any = orjson.loads(request.body)
        if self._reader is None:
            self._reader = Units() if self._path is None else Tokens(self._path)
        prompts = DIALECTS[request.path].parse(body, LIMITS).prompts
        found = []
        for prompt in prompts:
            key = self._reader.encode(prompt)
            space = namer.word(repr((prompt.namespace, prompt.media)))
            names = namer.names(space, key)
            exact = self._path is not None or prompt.ids is not None
            found.append(writer.blocks(space, len(key) // TOKEN_BYTES, names, exact=exact))
        at = round(self._zero + seen.at, 6)
        if seen.worker not in self._workers:
            self._workers.add(seen.worker)
            yield Member(at, seen.worker, "colocated")
        answered, cached = _ANSWERED.findall(seen.tail), _CACHED.findall(seen.tail)
        yield RequestLine(
            at,
            id="",
            path=request.path,
            status=seen.status,
            prompts=tuple(found),
            session=namer.word(session_of(request.headers, body, self._sessions) or ""),
            stream=seen.stream,
            completion_tokens=int(answered[-1]) if answered else seen.events or None,
            cached=int(cached[-1]) if cached else None,
            instance=seen.worker,
            first_byte_s=seen.first_byte_s,
            ended_s=took_s,
        )


class Shadow:
    """Passes requests on to workers, one after the other. A ``Handler`` of the HTTP server.

    Args:
        workers: their URLs.
        timeout_s: for a request in all.
    """

    def __init__(self, workers: tuple[str, ...], upstream: Upstream, notes: Notes, timeout_s: float) -> None:
        self._workers = workers
        self._upstream = upstream
        self._notes = notes
        self._timeout_s = timeout_s
        self._next = 0

    def turn_away(self, request: Request) -> RequestRefused | None:
        """See ``Handler``: the workers check keys."""
        return None

    async def refuse(self, request: Request, responder: Responder, refused: RequestRefused) -> None:
        """See ``Handler``: the request could not be read."""
        await _error(responder, refused.status, refused.message)

    async def handle(self, request: Request, responder: Responder) -> None:
        """See ``Handler``."""
        seen = self._notes.begin(request)
        headers = {name: value for name, value in request.headers.items() if name not in _NOT_PASSED}
        self._next = (self._next + 1) % len(self._workers)
        failure: Exception | None = None
        for turn in range(len(self._workers)):
            worker = self._workers[(self._next + turn) % len(self._workers)]
            try:
                await self._pass(worker, request, headers, responder, seen)
                return
            except ConnectFailed as error:
                failure = error
            except (ConnectionLost, RequestTimeout) as error:
                failure = error
                break
            except ClientGone:
                return
        if responder.started:
            responder.cut()
        else:
            status = 504 if isinstance(failure, RequestTimeout) else 502
            await _error(responder, status, str(failure))

    async def _pass(
        self,
        worker: str,
        request: Request,
        headers: Mapping[str, str],
        responder: Responder,
        seen: Seen | None,
    ) -> None:
        response = await self._upstream.open(
            request.method,
            worker + request.target,
            headers=headers,
            body=request.body,
            timeout_s=self._timeout_s,
        )
        try:
            self._notes.head(seen, worker, response.status, response.headers)
            back = {name: value for name, value in response.headers.items() if name not in _NOT_RETURNED}
            if (whole := response.arrived()) is not None:
                self._notes.piece(seen, whole)
                await responder.send(response.status, back, whole)
                return
            piece = await response.piece()
            self._notes.piece(seen, piece)
            await responder.start(response.status, back, piece)
            while piece := await response.piece():
                self._notes.piece(seen, piece)
                await responder.write(piece)
            await responder.finish()
        finally:
            response.close()
            self._notes.end(seen)


async def _error(responder: Responder, status: int, message: str) -> None:
    body = orjson.dumps({"error": {"message": message, "type": "server_error", "code": "shadow"}})
    await responder.send(status, {"content-type": JSON_TYPE}, body)


class ShadowRouter:
    """The proxy with its parts: ``async with ShadowRouter(config) as shadow`` serves at ``shadow.url``."""

    def __init__(self, config: RouterConfig, clock: Clock | None = None) -> None:
        self.config = config
        clock = clock or SystemClock()
        key = read_cluster_key(config.cluster_key_file, looks=False) if config.cluster_key_file else None
        file = RecordFile(
            Path(config.record or ""),
            config.record_size,
            config.record_files,
            Namer(recording_key(key), config.block_size, yield_to_others),
        )
        self.notes = Notes(file, clock, config.tokenizer_path, rules_of(config.client_rules).sessions)
        self._upstream = HttpUpstream(
            config.connect_timeout_secs, tls=lambda: worker_context(config.tls_worker_ca_file)
        )
        shadow = Shadow(config.worker_urls, self._upstream, self.notes, config.request_timeout_secs)
        limits = dataclasses.replace(
            config.http_limits(), max_body_bytes=config.max_total_payload_bytes, max_concurrent_requests=MANY
        )
        self.server = HttpServer(
            shadow,
            limits_within(limits, raise_file_limit(limits)),
            tls=server_context(config.tls_cert_file, config.tls_key_file or "")
            if config.tls_cert_file
            else None,
            grace_s=config.shutdown_grace_period_secs,
        )

    @property
    def url(self) -> str:
        """Where it listens, once started."""
        scheme = "https" if self.config.tls_cert_file else "http"
        return f"{scheme}://{self.config.host}:{self.server.port}"

    def _head(self) -> tuple[AnyLine, ...]:
        at = SystemClock.wall()
        return (Head(at, VERSION, "shadow", self.notes.file.key_id, self.config.block_size, "shadow"),)

    async def __aenter__(self) -> ShadowRouter:
        self.notes.file.start(self._head)
        try:
            await self.server.start(self.config.host, self.config.port)
        except OSError as error:
            await asyncio.to_thread(self.notes.file.close)
            raise ConfigError(
                f"cannot listen on {self.config.host}:{self.config.port}: {error.strerror or error}",
                field="--port",
            ) from error
        logger.info("passing on at %s, noting to %s", self.url, self.notes.file.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop()
        await self._upstream.close()
        await asyncio.to_thread(self.notes.file.close)


async def _serve(config: RouterConfig) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with ShadowRouter(config):
        await stop.wait()


def run_shadow(config: RouterConfig) -> None:
    """Run until SIGINT or SIGTERM.

    Raises:
        ConfigError: it cannot start as configured.
    """
    configure_logging(config.log_level, config.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config))

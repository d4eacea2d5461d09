"""The server side of HTTP, on aiohttp: reads requests, hands them to the service, writes what it answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from aiohttp import web

from router.exchange import JSON_TYPE, ClientGone, Request, RequestRefused, Responder
from router.service import Service
from sglang_ext.errors import InternalError

SHUTDOWN_GRACE_S = 1.0
"""How long running requests may take to end when the router stops; then they are cut."""


class HttpServer:
    """Listens on one address until stopped.

    Args:
        service: answers the requests.
        max_body_bytes: longer bodies are answered with 413, without reading them to the end.
    """

    def __init__(self, service: Service, *, max_body_bytes: int) -> None:
        self._service = service
        self._max_body_bytes = max_body_bytes
        self._runner: web.ServerRunner | None = None
        self.port = 0
        """The port it listens on, once started."""

    async def start(self, host: str, port: int) -> None:
        """Listen.

        Raises:
            OSError: the address is taken or not ours.
        """
        # handler_cancellation: a client that goes away cancels its handler, which closes the connection
        # to the worker. TCP_NODELAY is aiohttp's default.
        server = web.Server(self._handle, access_log=None, handler_cancellation=True)
        runner = web.ServerRunner(server, shutdown_timeout=SHUTDOWN_GRACE_S)
        await runner.setup()
        site = web.TCPSite(runner, host, port, reuse_address=True)
        try:
            await site.start()
        except BaseException:
            await runner.cleanup()
            raise
        self._runner = runner
        self.port = runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop listening and cut what is still running."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, raw: web.BaseRequest) -> web.StreamResponse:
        responder = _Responder(raw)
        try:
            body = await self._read(raw)
        except RequestRefused as refused:
            head = Request(raw.method, raw.path, raw.raw_path, _headers(raw))
            await self._service.refuse(head, responder, refused)
        else:
            request = Request(raw.method, raw.path, raw.raw_path, _headers(raw), body)
            await self._service.handle(request, responder)
        return responder.response

    async def _read(self, raw: web.BaseRequest) -> bytes:
        if raw.content_length is not None and raw.content_length > self._max_body_bytes:
            raise self._too_large()
        if raw.headers.get("expect", "").lower() == "100-continue" and raw.transport is not None:
            raw.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # curl waits for it with long bodies
        pieces: list[bytes] = []
        size = 0
        try:
            while piece := await raw.content.readany():
                size += len(piece)
                if size > self._max_body_bytes:
                    raise self._too_large()
                pieces.append(piece)
        except web.HTTPRequestEntityTooLarge as error:  # a compressed body that unpacks to too much
            raise self._too_large() from error
        return b"".join(pieces)

    def _too_large(self) -> RequestRefused:
        return RequestRefused(
            f"the request body is larger than {self._max_body_bytes} bytes (--max-payload-bytes)",
            status=413,
            code="request_too_large",
            headers={"connection": "close"},
        )


def _headers(raw: web.BaseRequest) -> Mapping[str, str]:
    return {name.lower(): value for name, value in raw.headers.items()}


class _Responder(Responder):
    def __init__(self, raw: web.BaseRequest) -> None:
        self._raw = raw
        self._response: web.StreamResponse | None = None

    @property
    def response(self) -> web.StreamResponse:
        if self._response is None:
            raise InternalError(f"{self._raw.method} {self._raw.path} was not answered")
        return self._response

    @property
    def started(self) -> bool:
        return self._response is not None

    async def send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        response = web.Response(status=status, headers=headers, body=body)
        if "content-type" not in headers:
            response.content_type = JSON_TYPE
        self._response = response
        with _client_gone():
            await response.prepare(self._raw)
            await response.write_eof()

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self._response = web.StreamResponse(status=status, headers=headers)
        with _client_gone():
            await self._response.prepare(self._raw)

    async def write(self, data: bytes) -> None:
        with _client_gone():
            await self.response.write(data)

    async def finish(self) -> None:
        with _client_gone():
            await self.response.write_eof()

    def cut(self) -> None:
        if self._raw.transport is not None:
            self._raw.transport.abort()


@contextlib.contextmanager
def _client_gone() -> Iterator[None]:
    try:
        yield
    except ConnectionError as error:
        raise ClientGone("the client closed the connection") from error

"""The client side of HTTP: connections to workers, on aiohttp. Knows nothing of routing."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncGenerator, Mapping

import aiohttp

from router.exchange import (
    HOP_BY_HOP,
    ConnectFailed,
    ConnectionLost,
    RequestTimeout,
    Upstream,
    UpstreamResponse,
)

KEEP_ALIVE_S = 3.0
"""Idle connections are closed after this time: before the worker closes them (SGLang's uvicorn: 5 s), or
a request could meet a connection that is just being closed."""

LARGE_BODY_BYTES = 1 << 20


class HttpUpstream(Upstream):
    """Workers over HTTP/1.1 with connections kept alive.

    Args:
        connect_timeout_s: seconds to establish a connection.
    """

    def __init__(self, connect_timeout_s: float = 2.0) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._session: aiohttp.ClientSession | None = None

    def _sessions(self) -> aiohttp.ClientSession:
        if self._session is None:
            # TCP_NODELAY is aiohttp's default; no limit, because the workers queue, not the router.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None, connect=self._connect_timeout_s),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
                trust_env=False,
            )
        return self._session

    async def open(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        timeout_s: float | None = None,
    ) -> UpstreamResponse:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._sessions().request(
                    method, url, headers=headers, data=_payload(body), allow_redirects=False
                )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise ConnectFailed(f"cannot connect to {url}: {error}") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ConnectionLost(f"{url} closed the connection: {error or type(error).__name__}") from error
        except TimeoutError as error:
            raise RequestTimeout(f"{url} did not answer within {timeout_s} s") from error
        return _Response(response, url, deadline)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def _payload(body: bytes) -> bytes | io.BytesIO | None:
    """The body as aiohttp wants it: large ones in pieces, so that writing them does not hold up the loop."""
    if len(body) > LARGE_BODY_BYTES:
        return io.BytesIO(body)
    return body or None


class _Response(UpstreamResponse):
    def __init__(self, response: aiohttp.ClientResponse, url: str, deadline: float | None) -> None:
        self._response = response
        self._url = url
        self._deadline = deadline
        self._headers = {
            name.lower(): value for name, value in response.headers.items() if name.lower() not in HOP_BY_HOP
        }

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._headers

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        content = self._response.content
        try:
            while True:
                async with asyncio.timeout(self._remaining()):
                    data = await content.readany()
                if not data:
                    return
                yield data
        except TimeoutError as error:
            raise RequestTimeout(f"{self._url} did not finish its answer in time") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ConnectionLost(
                f"{self._url} broke off its answer: {error or type(error).__name__}"
            ) from error

    def _remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])

    def close(self) -> None:
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()

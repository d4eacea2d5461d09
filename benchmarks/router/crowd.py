"""Clients that do nothing but hold streams, `python -m benchmarks.router.crowd JSON`.

It opens them, prints the outcome as JSON once all have begun, and holds them until its input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

import orjson
import uvloop

AT_ONCE = 256
"""Streams that are being opened at a time."""
BEGIN_S = 60.0


class Client(asyncio.Protocol):
    """A stream of which nothing more is read once it has begun."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.begun: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.begun.done():
            self._transport.pause_reading()
            self.begun.set_result(data[9:12])

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.begun.done():
            self.begun.set_result(b"closed")


async def hold(port: int, count: int, text: str) -> None:
    """Hold `count` streams of a chat that says `text`."""
    messages = [{"role": "user", "content": text}]
    body = orjson.dumps({"model": "stand-in", "stream": True, "max_tokens": 16, "messages": messages})
    request = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    loop = asyncio.get_running_loop()
    gate = asyncio.Semaphore(AT_ONCE)

    # An event loop drops, and so closes, a connection that has no reference and does not read.
    clients: list[Client] = []

    async def begin() -> str:
        async with gate, asyncio.timeout(BEGIN_S):
            _, client = await loop.create_connection(lambda: Client(request), "127.0.0.1", port)
            clients.append(client)
            return (await client.begun).decode()

    answers = await asyncio.gather(*(begin() for _ in range(count)))
    statuses = {status: answers.count(status) for status in set(answers)}
    sys.stdout.write(json.dumps(statuses) + "\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(hold(**json.loads(sys.argv[1])))

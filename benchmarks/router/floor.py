"""The lower bound for a router in Python: `python -m benchmarks.router.floor PORT WORKER_PORT...`.

A proxy that passes bytes on over uvloop and looks at them with httptools only to see where messages end: no
checks, no choice but turns, no headers of its own, no limits, no errors. It runs until it is killed.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import httptools
import uvloop


class Worker(asyncio.Protocol):
    """A connection to a worker, which is in its pool while no client waits for an answer."""

    def __init__(self, pool: list[Worker]) -> None:
        self.pool = pool
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)
        self.client: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.client is not None:
            self.client.write(data)
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self.client = None
        self.pool.append(self)


class Client(asyncio.Protocol):
    """A connection of a client."""

    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._parser = httptools.HttpRequestParser(self)
        self._message = b""
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._message += data
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        message, self._message = self._message, b""
        self._floor.send(message, self._transport)


class Floor:
    """Workers in turns."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = ports
        self._pools: list[list[Worker]] = [[] for _ in ports]
        self._turn = 0
        self._connecting: set[asyncio.Task[None]] = set()

    def send(self, message: bytes, client: asyncio.Transport) -> None:
        """To the next worker; its answer goes to the client."""
        self._turn = (self._turn + 1) % len(self._ports)
        pool = self._pools[self._turn]
        if pool:
            self._use(pool.pop(), message, client)
            return
        task = asyncio.get_running_loop().create_task(self._connect(self._turn, message, client))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, turn: int, message: bytes, client: asyncio.Transport) -> None:
        _, worker = await asyncio.get_running_loop().create_connection(
            lambda: Worker(self._pools[turn]), "127.0.0.1", self._ports[turn]
        )
        self._use(worker, message, client)

    def _use(self, worker: Worker, message: bytes, client: asyncio.Transport) -> None:
        worker.client = client
        worker.transport.write(message)


async def serve(port: int, workers: list[int]) -> None:
    """Listen until the process is killed."""
    floor = Floor(workers)
    await asyncio.get_running_loop().create_server(lambda: Client(floor), "127.0.0.1", port, backlog=1024)
    await asyncio.Event().wait()


if __name__ == "__main__":
    listening, *behind = map(int, sys.argv[1:])
    uvloop.run(serve(listening, behind))

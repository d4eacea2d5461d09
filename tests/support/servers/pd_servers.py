"""Prefill and decode servers for tests and benchmarks, and the router's part between them: send a request to
one of each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from threading import Barrier
from typing import Any

from tests.support.compare import Answer
from tests.support.servers.ports import free_port
from tests.support.servers.server import ServerProcess, ServerSpec

THREADS = 24
BACKEND = ("--disaggregation-transfer-backend", "global")


def prefill_spec(base: ServerSpec, bootstrap_port: int) -> ServerSpec:
    """`base` as a prefill server."""
    mode = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(bootstrap_port))
    return replace(base, flags=(*mode, *BACKEND, *base.flags))


def decode_spec(base: ServerSpec) -> ServerSpec:
    """`base` as a decode server."""
    return replace(base, flags=("--disaggregation-mode", "decode", *BACKEND, *base.flags))


def _started_pool(threads: int) -> ThreadPoolExecutor:
    """A pool that has all of its threads already: a test that uses it leaves none behind."""
    pool, all_there = ThreadPoolExecutor(threads), Barrier(threads)
    for started in [pool.submit(all_there.wait) for _ in range(threads)]:
        started.result()
    return pool


@dataclass
class Prefill:
    """A prefill server and its bootstrap port."""

    server: ServerProcess
    bootstrap_port: int


@dataclass
class PdServers:
    """Prefill and decode servers that run. `prefill[0]` and `decode[0]` serve by default."""

    prefill: list[Prefill]
    decode: list[ServerProcess]
    numbers: random.Random = field(default_factory=lambda: random.Random())
    pool: ThreadPoolExecutor = field(default_factory=lambda: _started_pool(THREADS))

    @property
    def servers(self) -> list[ServerProcess]:
        return [*(each.server for each in self.prefill), *self.decode]

    def pair(self, prefill: int = 0) -> dict[str, Any]:
        """The fields that a router adds to a request, the same for both servers."""
        return {
            "bootstrap_host": self.prefill[prefill].server.address,
            "bootstrap_port": self.prefill[prefill].bootstrap_port,
            "bootstrap_room": self.numbers.randrange(1, 1 << 63),
        }

    def start(
        self, prompt: Sequence[int], *, max_new_tokens: int, prefill: int = 0, decode: int = 0, **fields: Any
    ) -> tuple[Future[Answer], Future[Answer]]:
        """Send a request to both; the answers of prefill and of decode."""
        body = {**self.pair(prefill), **fields}
        both = (self.prefill[prefill].server, self.decode[decode])
        sent = [
            self.pool.submit(server.generate, prompt, max_new_tokens=max_new_tokens, **body)
            for server in both
        ]
        return sent[0], sent[1]

    def generate(self, prompt: Sequence[int], **arguments: Any) -> Answer:
        """The answer that a client gets, decode's. Raises the error that either server answered with."""
        first, second = self.start(prompt, **arguments)
        answer = second.result()
        first.result()
        return answer

    def wait_idle(self) -> None:
        """Return when no request runs or waits anywhere."""
        for server in self.servers:
            server.wait_idle()

    def close(self) -> None:
        self.pool.shutdown()


@contextmanager
def pd_servers(
    prefill: Sequence[ServerSpec],
    decode: Sequence[ServerSpec],
    others: Sequence[ServerSpec] = (),
    place: Callable[[ServerSpec], ServerProcess] = ServerProcess,
) -> Iterator[tuple[PdServers, list[ServerProcess]]]:
    """Start servers, all at once, and end them. `others` are servers beside them, such as a colocated one;
    `place` makes each, and so chooses where it runs."""
    ports = [free_port() for _ in prefill]
    first = [place(prefill_spec(spec, port)) for spec, port in zip(prefill, ports, strict=True)]
    second = [place(decode_spec(spec)) for spec in decode]
    rest = [place(spec) for spec in others]
    with ExitStack() as stack:
        for server in (*first, *second, *rest):
            stack.callback(server.stop)
        with ThreadPoolExecutor(len(first) + len(second) + len(rest)) as pool:
            list(pool.map(ServerProcess.start, (*first, *second, *rest)))
        pairs = [Prefill(server, port) for server, port in zip(first, ports, strict=True)]
        servers = PdServers(pairs, second)
        stack.callback(servers.close)
        yield servers, rest

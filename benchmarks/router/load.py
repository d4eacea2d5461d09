"""A load generator for routers, `python -m benchmarks.router.load`: a job per line in, a result per line out.

Closed loop: each connection sends its next request when the answer to the last has arrived. Latencies are
taken here, in the process that waits. Requests are made before the clock starts; answers are only looked at
for their status and their end.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import sys
import time
from dataclasses import dataclass
from typing import Any, cast

import httptools
import orjson
import uvloop

from benchmarks.lib.common import SEED

DISTINCT = 64
"""Different prompts of a load; they are asked again and again in random order."""
WARMUP_S = 0.2
ANSWER_S = 60.0
"""Most that the first answer may take."""


@dataclass(frozen=True)
class Job:
    """One measurement.

    Args:
        port: where the router, or a worker, listens.
        path: of the endpoint.
        prompt_bytes: length of each prompt.
        stream: whether to ask for streams.
        connections: at the same time.
        seconds: how long, after `warmup_s`; longer where nothing has been answered by then.
        warmup_s: before that, uncounted; not with fresh prompts.
        fresh: how many prompts to make that no job before has sent; 0 for those that all jobs share.
        first: the number of the first of them.
        shared_bytes: length of the beginning that they share.
        reconnect: each request has a connection of its own.
    """

    port: int
    path: str
    prompt_bytes: int
    stream: bool
    connections: int
    seconds: float
    warmup_s: float = WARMUP_S
    fresh: int = 0
    first: int = 0
    shared_bytes: int = 0
    reconnect: bool = False


def prompt(number: int, size: int) -> str:
    """Text of ordinary words that shares no beginning with another prompt."""
    words = random.Random(SEED + number)
    parts = [f"{number:x} "]
    length = len(parts[0])
    while length < size:
        word = _WORDS[words.randrange(len(_WORDS))]
        parts.append(word)
        length += len(word)
    return "".join(parts)[:size]


_TEXT = """the a of to in is that it was for on are with as his they at be this from have or by one had not
but all were when we there can your which their said if do will each about how up out them then many would"""
_WORDS = [f"{word} " for word in _TEXT.split()]


@functools.cache
def _long_text() -> str:
    return prompt(0, 1 << 21)


def fresh_prompt(number: int, size: int, shared: int = 0) -> str:
    """As `prompt`, made faster: `shared` characters that all have, a number, then a part of a long text from
    anywhere in it."""
    text = _long_text()
    start = random.Random(number).randrange(len(text) - size)
    return f"{text[:shared]}{number:x} {text[start : start + size]}"[:size]


def message(job: Job, number: int) -> bytes:
    """A whole request."""
    size = job.prompt_bytes
    text = fresh_prompt(number, size, job.shared_bytes) if job.fresh else prompt(number, size)
    body: dict[str, Any] = {"stream": job.stream}
    if job.path == "/generate":
        body |= {"text": text, "sampling_params": {"max_new_tokens": 16, "temperature": 0}}
    else:
        body |= {"model": "stand-in", "messages": [{"role": "user", "content": text}], "max_tokens": 16}
    data = orjson.dumps(body)
    return (
        f"POST {job.path} HTTP/1.1\r\nHost: 127.0.0.1:{job.port}\r\nUser-Agent: load\r\nAccept: */*\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    ).encode() + data


class Load:
    """All connections of one job."""

    def __init__(self, job: Job, messages: list[bytes]) -> None:
        self.job = job
        self.messages = messages
        self.latencies: list[float] = []
        self.first_bytes: list[float] = []
        self.statuses: dict[int, int] = {}
        self.counting = False
        self.running = True
        self.random = random.Random(SEED)
        self.sent = 0
        self.last = 0.0
        self.answered = asyncio.Event()

    @property
    def exhausted(self) -> bool:
        """Whether every fresh prompt has been sent."""
        return 0 < self.job.fresh <= self.sent

    def next(self) -> bytes:
        if self.job.fresh:
            self.sent += 1
            return self.messages[self.sent - 1]
        return self.messages[self.random.randrange(len(self.messages))]


class Connection(asyncio.Protocol):
    """Asks again and again."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._sent = 0.0
        self._first = 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def _ask(self) -> None:
        if not self._load.running or self._load.exhausted:
            self._transport.close()
            return
        data = self._load.next()
        self._first = 0.0
        self._sent = time.perf_counter()
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, piece: bytes) -> None:
        if not self._first:
            self._first = time.perf_counter()

    def on_message_complete(self) -> None:
        now = time.perf_counter()
        load = self._load
        if load.counting:
            status = self._parser.get_status_code()
            load.statuses[status] = load.statuses.get(status, 0) + 1
            load.last = now
            load.latencies.append(now - self._sent)
            load.first_bytes.append((self._first or now) - self._sent)
            load.answered.set()
        if load.job.reconnect:
            self._transport.close()
        elif self._parser.should_keep_alive():
            self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def _connected(load: Load) -> None:
    """One connection while the load runs, or one after the other."""
    loop = asyncio.get_running_loop()
    while True:
        _, one = await loop.create_connection(lambda: Connection(load), "127.0.0.1", load.job.port)
        await one.ended
        if not (load.job.reconnect and load.running):
            return


async def run(job: Job) -> dict[str, Any]:
    """Carry out a job. Times in seconds.

    Raises TimeoutError when nothing is answered within `ANSWER_S`.
    """
    numbers = range(job.first, job.first + job.fresh) if job.fresh else range(DISTINCT)
    load = Load(job, [message(job, number) for number in numbers])
    # Each fresh prompt is sent once, so the first ones count, too.
    load.counting = job.fresh > 0
    begin = time.perf_counter()
    connections = [asyncio.ensure_future(_connected(load)) for _ in range(job.connections)]
    if not job.fresh:
        await asyncio.sleep(job.warmup_s)
        load.counting = True
        begin = time.perf_counter()
    await asyncio.sleep(job.seconds)
    # On a busy machine that may be too little for a single answer, and there is no rate of none.
    async with asyncio.timeout(ANSWER_S):
        await load.answered.wait()
    load.counting = False
    # Fresh prompts may have run out before.
    elapsed = (load.last if load.exhausted else time.perf_counter()) - begin
    load.running = False
    async with asyncio.timeout(30):
        await asyncio.gather(*connections)
    ordered, firsts = sorted(load.latencies), sorted(load.first_bytes)

    def at(values: list[float], share: float) -> float:
        return values[min(len(values) - 1, int(len(values) * share))]

    return {
        "requests": len(ordered),
        "seconds": elapsed,
        "p50": at(ordered, 0.5),
        "p99": at(ordered, 0.99),
        "first_p50": at(firsts, 0.5),
        "first_p99": at(firsts, 0.99),
        "statuses": {str(status): number for status, number in load.statuses.items()},
    }


def main() -> None:
    """Jobs from standard input, one JSON object per line."""
    for line in sys.stdin:
        result = uvloop.run(run(Job(**json.loads(line))))
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

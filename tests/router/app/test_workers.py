"""A router of several processes at one port."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from listening import ALONE, ROUTER, beyond_loopback, rows

from sglang_ext.cluster.guard import descendants
from sglang_ext.errors import ConfigError
from sglang_ext.router.config import RouterConfig
from sglang_ext.testing.waiting import until
from tests.support.servers.ports import free_port

pytestmark = pytest.mark.slow

START_S = 120.0
STARTED = re.compile(r"worker (\d+) is process (\d+), alone at (http://127\.0\.0\.1:\d+)")
BODY = {"text": "Hello", "sampling_params": {"max_new_tokens": 2}}


@dataclass
class Workers:
    """A running router."""

    process: asyncio.subprocess.Process
    url: str
    log: Path
    client: Any

    def started(self) -> list[tuple[int, int, str]]:
        """Number, process id and own address of each worker that was ever started."""
        found = STARTED.findall(self.log.read_text())
        return [(int(number), int(pid), own) for number, pid, own in found]

    async def ready(self, own: str) -> bool:
        try:
            async with self.client.get(f"{own}/ready") as answer:
                return answer.status == 200
        except OSError:
            return False

    async def are_ready(self, count: int) -> None:
        """Until so many have been started, and the last of each number answers."""
        async with asyncio.timeout(START_S):
            while True:
                latest = {number: own for number, _, own in self.started()}
                asked = [await self.ready(url) for url in (self.url, *latest.values())]
                if len(self.started()) >= count and all(asked):
                    return
                await asyncio.sleep(0.05)

    async def ask(self) -> int:
        headers = {"connection": "close"}  # the next one may come to another worker
        async with self.client.post(f"{self.url}/generate", json=BODY, headers=headers) as answer:
            await answer.read()
            return int(answer.status)

    async def answered(self) -> dict[str, float]:
        """How many requests each has answered, by its own address."""
        counts = {}
        for own in {own for _, _, own in self.started()}:
            async with self.client.get(f"{own}/metrics") as answer:
                text = await answer.text()
            found = re.findall(
                r'^sglang_ext_router_requests_total\{.*endpoint="/generate".*\} (\S+)$', text, re.M
            )
            counts[own] = sum(map(float, found))
        return counts


@pytest.fixture
def start(client, tmp_path: Path) -> Callable[..., Any]:
    @asynccontextmanager
    async def running(*flags: str) -> AsyncIterator[Workers]:
        port, log, temporary = free_port(), tmp_path / "log", tmp_path / "tmp"
        temporary.mkdir()
        command = ("-m", "sglang_ext.router", "--workers", "2", "--port", str(port), *flags)
        with log.open("w") as file:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *command, stderr=file, env={**os.environ, "TMPDIR": str(temporary)}
            )
        workers = Workers(process, f"http://127.0.0.1:{port}", log, client)
        try:
            yield workers
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            await until(lambda: not any(map(lives, (pid for _, pid, _ in workers.started()))), 60)
        if process.returncode == 0:
            assert list(temporary.iterdir()) == []

    return running


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_both_answer_and_one_that_is_killed_comes_back(start: Any, start_worker: Any) -> None:
    worker = await start_worker()
    async with start("--worker-urls", worker.url) as router:
        await until(lambda: len(router.started()) == 2, START_S)
        router.process.send_signal(signal.SIGHUP)  # their files are unchanged, and no process dies of it
        await router.are_ready(2)
        before = dict.fromkeys((own for _, _, own in router.started()), 0.0)
        async with asyncio.timeout(START_S):
            while not all(count > before[own] for own, count in (await router.answered()).items()):
                assert set(await asyncio.gather(*(router.ask() for _ in range(8)))) == {200}
        pids = descendants(router.process.pid)
        own_ports = {int(own.rpartition(":")[2]): ALONE for _, _, own in router.started()}
        port = {int(router.url.rpartition(":")[2]): ROUTER}
        assert beyond_loopback(pids) == []
        assert rows(pids, own_ports | port) == Counter({ROUTER: 1, ALONE: 2})
        victim = router.started()[0]
        os.kill(victim[1], signal.SIGKILL)
        for _ in range(20):
            assert await router.ask() == 200
        await router.are_ready(3)
        assert [number for number, _, _ in router.started()] == [0, 1, 0]
        router.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(router.process.wait(), 60) == 0
    assert "Traceback" not in router.log.read_text()


async def test_a_worker_knows_the_documents_of_the_other(start: Any, start_worker: Any) -> None:
    worker = await start_worker()
    async with start("--worker-urls", worker.url) as router:
        await router.are_ready(2)
        one, two = (own for _, _, own in router.started())
        async with router.client.put(f"{one}/v1/documents/manual", json={"text": "The manual."}) as answer:
            assert answer.status in (200, 201)

        async def known() -> bool:
            async with router.client.get(f"{two}/v1/documents/manual") as answer:
                return bool(answer.status == 200)

        async with asyncio.timeout(60):
            while not await known():  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_a_session_is_found_from_both(start: Any, start_worker: Any) -> None:
    servers = [await start_worker() for _ in range(2)]
    for server in servers:
        server.answers = {"/open_session": (200, "s"), "/close_session": (200, None)}
    async with start("--worker-urls", *(server.url for server in servers)) as router:
        await router.are_ready(2)
        one, two = (own for _, _, own in router.started())
        for number in range(6):
            body = {"capacity_of_str_len": 100, **({"session_id": f"s{number}"} if number % 2 else {})}
            async with router.client.post(f"{one}/open_session", json=body) as answer:
                name, home = await answer.json(), answer.headers["x-kv-instance"]
            for own in (one, two):
                request = {**BODY, "session_params": {"id": name}}
                async with router.client.post(f"{own}/generate", json=request) as answer:
                    assert (answer.status, answer.headers["x-kv-instance"]) == (200, home)


async def test_they_end_with_who_started_them(start: Any, start_worker: Any) -> None:
    """However it dies: the fixture waits for the end of the workers."""
    worker = await start_worker()
    async with start("--worker-urls", worker.url) as router:
        await router.are_ready(2)
        router.process.kill()
        await router.process.wait()


async def test_workers_that_cannot_start_end_it_with_the_reason(start: Any, start_worker: Any) -> None:
    one, two = await start_worker(vocab_size=10), await start_worker(vocab_size=20)
    async with start("--worker-urls", one.url, two.url) as router:
        assert await asyncio.wait_for(router.process.wait(), START_S) == 2
    assert "vocab_size" in router.log.read_text()
    assert "Traceback" not in router.log.read_text()


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (("--workers", "2", "--listen-fds", "3"), "--listen-fds"),
        (("--workers", "2", "--member-port", "1"), "--member-port"),
        (("--workers", "2", "--standby-fd", "3"), "--standby-fd"),
    ],
)
def test_what_does_not_go_together_is_refused(flags: tuple[str, ...], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RouterConfig.parse(flags)
    assert caught.value.field == field

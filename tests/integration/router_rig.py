"""For tests of the router in front of real servers: the servers' flags, routers, and running programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sglang_ext.router import Router, RouterConfig
from tests.support.servers.programs import run_program
from tests.support.servers.server import ServerProcess, ServerSpec

FLAGS = ("--radix-cache-backend", "global", "--max-total-tokens", "8192")
KEPT = (*FLAGS, "--enable-response-store")
"""Flags of servers that keep responses; servers that only prefill or only decode cannot."""
SPECS = (ServerSpec(flags=KEPT), ServerSpec(flags=(*KEPT, "--random-seed", "7")))
ROOT = Path(__file__).resolve().parents[2]


def running(servers: list[ServerProcess]) -> int:
    """Requests that the servers have."""
    loads = [load for server in servers for load in server.get("/v1/loads?include=core")["loads"]]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until a condition that takes a blocking call to see holds."""
    async with asyncio.timeout(seconds):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@asynccontextmanager
async def routers_before(server: ServerProcess) -> AsyncIterator[Callable[..., Awaitable[Router]]]:
    """A function that starts a router with the given settings in front of the flushed server. The routers are
    checked and stopped at the end."""
    routers: list[Router] = []

    async def begin(**options: Any) -> Router:
        await until(lambda: running([server]) == 0)
        server.flush()
        router = Router(RouterConfig(worker_urls=(server.url,), port=0, **options))
        await router.start()
        routers.append(router)
        return router

    yield begin
    for router in routers:
        router.check()
        await router.stop()


async def sglang_program(kind: str, name: str, *arguments: str, cwd: Path, seconds: float = 240.0) -> str:
    """Run a program that imports SGLang, forked as servers are. Returns its output.

    Args:
        kind: ``module`` or ``script``.
    """
    words = [*(("-m",) if kind == "module" else ()), name, *arguments]
    code, printed = await asyncio.to_thread(run_program, words, cwd, seconds)
    assert code == 0, printed[-4000:]
    return printed

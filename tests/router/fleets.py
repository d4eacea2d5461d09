"""Fixtures for conftest.py of folders with tests of a router: routers in front of stand-in workers, over real
sockets."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sglang_ext.router import Router, RouterConfig
from sglang_ext.testing.servers.workers import StandInWorker, running_worker
from sglang_ext.testing.waiting import until

StartWorker = Callable[..., Awaitable[StandInWorker]]
StartRouter = Callable[..., Awaitable[Router]]


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Any:
    """The tiny model's tokenizer."""
    from sglang_ext.router.tokens.prompt_tokenizer import load_tokenizer

    return load_tokenizer(str(tokenizer_dir), trust_remote_code=False)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def start_worker(stack: AsyncExitStack, tokenizer: Any, tokenizer_dir: Path) -> StartWorker:
    """Start a stand-in; arguments are ``StandInWorker``'s."""

    async def start(*, port: int = 0, **options: Any) -> StandInWorker:
        options.setdefault("tokenizer", tokenizer)
        options.setdefault("tokenizer_path", str(tokenizer_dir))
        return await stack.enter_async_context(running_worker(StandInWorker(**options), port))

    return start


def no_failures(router: Router) -> None:
    assert not router.rounds.failures


@pytest.fixture
def start_router(stack: AsyncExitStack) -> StartRouter:
    """Start a router in front of workers (stand-ins or URLs); options are ``RouterConfig``'s."""

    async def start(*workers: StandInWorker | str, **options: Any) -> Router:
        urls = tuple(w if isinstance(w, str) else w.url for w in workers)
        options.setdefault("health_check_interval_secs", 0.05)
        options.setdefault("port", 0)
        router = Router(RouterConfig(worker_urls=urls, **options))
        await stack.enter_async_context(router)
        stack.callback(router.check)
        stack.callback(no_failures, router)
        return router

    return start


@pytest.fixture
async def client(stack: AsyncExitStack) -> aiohttp.ClientSession:
    """A client that gives up only where something hangs."""
    return await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)))


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], Awaitable[float]]:
    """Wait until a condition that nobody announces holds."""
    return until


@pytest.fixture(autouse=True)
def router_logs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Let ``caplog`` see what the router logs."""
    logger = logging.getLogger("router")
    before = logger.level, logger.propagate
    logger.setLevel(logging.DEBUG)
    logger.propagate = True
    yield
    logger.level, logger.propagate = before

"""Fixtures for conftest.py of folders with tests of a router: routers in front of stand-in workers, over real
sockets."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sglang_ext.router import Router, RouterConfig
from sglang_ext.testing.waiting import until
from tests.support.servers.workers import StandInWorker, running_worker

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


def _signature(path: str) -> tuple[tuple[str, int, int], ...]:
    """The files of a tokenizer: a rewritten one is loaded anew."""
    found = sorted(file for file in Path(path).glob("*") if file.is_file())
    return tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in found)


@pytest.fixture(scope="session")
def loads_once() -> Iterator[None]:
    """Routers of this process load each tokenizer once: loading is half of the CPU time of their tests.

    Each router gets a copy, for its chat template; the copies share the backend, which a router only reads.
    Tests load tokenizers in the main thread, where each is loaded anew, since they may change its backend.
    """
    from transformers import PreTrainedTokenizerFast

    load = PreTrainedTokenizerFast.from_pretrained.__func__
    loaded: dict[Any, Any] = {}

    def from_pretrained(cls: type, path: str, *args: Any, **options: Any) -> Any:
        if cls is not PreTrainedTokenizerFast or threading.current_thread() is threading.main_thread():
            return load(cls, path, *args, **options)
        key = (path, _signature(path), repr((args, options)))
        if key not in loaded:
            loaded[key] = load(cls, path, *args, **options)
        return copy.copy(loaded[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreTrainedTokenizerFast, "from_pretrained", classmethod(from_pretrained))
        yield


@pytest.fixture
def start_router(stack: AsyncExitStack, loads_once: None) -> StartRouter:
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
    """Wait until a condition without a notification holds."""
    return until


@pytest.fixture(autouse=True)
def router_logs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Let ``caplog`` see the router's log."""
    logger = logging.getLogger("router")
    before = logger.level, logger.propagate
    logger.setLevel(logging.DEBUG)
    logger.propagate = True
    yield
    logger.level, logger.propagate = before

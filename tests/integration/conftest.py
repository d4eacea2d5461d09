"""Servers that the integration tests share."""

from __future__ import annotations

import os
import random
import re
import runpy
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest

from sglang_ext import native
from sglang_ext.native import is_compiled
from sglang_ext.patches.versions import follows_hybrids, installed_sglang_version
from sglang_ext.router.http import reader
from tests.support.leaks import LeakGuard
from tests.support.servers import preloaded
from tests.support.servers.server import ServerPool, ServerProcess, ServerSpec

if TYPE_CHECKING:
    from places import Place

HERE = Path(__file__).parent
# Helpers in this folder, and what tests of a folder take from each other, are imported by their own names.
sys.path[:0] = map(str, (HERE, *sorted(HERE.glob("[a-z]*/"))))
sys.path.append(str(Path(__file__).parents[1] / "router"))  # for api_fuzz.py
sys.path.append(str(Path(__file__).parents[1] / "fuzz"))  # for http_bodies.py


_HYBRID = re.compile(r"hybrid|tiny-(gdn|kda|lfm2|mamba2|spark|swa)|[\[-](windows?|states?)\b")


_EMULATED = re.compile(r"emulated_gpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Servers of models with windows or states, and those on an emulated GPU, start with some versions of
    SGLang only."""
    installed = installed_sglang_version()
    if follows_hybrids(installed):
        return
    for pattern, reason in (
        (_HYBRID, f"SGLang {installed} is not served with windows or states"),
        (_EMULATED, f"the emulated GPU has no flashinfer, which SGLang {installed} imports on CUDA"),
    ):
        for item in items:
            if HERE in item.path.parents and pattern.search(f"{item.path.name} {item.name}"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def compiled_modules() -> Iterator[None]:
    """Servers and routers run compiled modules, as users do, where there is a C compiler."""
    obstacle = runpy.run_path(str(HERE.parents[1] / "scripts" / "compile_router.py"))["obstacle"]
    with pytest.MonkeyPatch.context() as patch:
        if native.SWITCH not in os.environ and not obstacle():
            patch.setenv(native.SWITCH, native.REQUIRED)
            assert is_compiled(reader), f"run `make compile`, or set {native.SWITCH}=0 to test the sources"
        yield


@pytest.fixture(scope="session", autouse=True)
def preloaded_servers(leak_guard: LeakGuard, compiled_modules: None) -> Iterator[None]:
    """Servers are forked from one process, unless SGLANG_EXT_TESTS_PRELOAD=0 asks for fresh ones."""
    if os.environ.get("SGLANG_EXT_TESTS_PRELOAD") == "0":
        yield
        return
    with ExitStack() as stack:
        with leak_guard.adopting():
            stack.enter_context(preloaded.use())
        yield


@pytest.fixture(scope="session")
def server_pool(preloaded_servers: None) -> Iterator[ServerPool]:
    pool = ServerPool(limit=2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def get_server(server_pool: ServerPool, leak_guard: LeakGuard) -> Callable[[ServerSpec], ServerProcess]:
    """A running server of a spec, shared with other tests that ask for an equal one."""

    def get(spec: ServerSpec) -> ServerProcess:
        with leak_guard.adopting():
            return server_pool.get(spec)

    return get


@pytest.fixture(scope="session")
def truth(preloaded_servers: None) -> Iterator[ServerProcess]:
    """A server without a cache, whose answers are those that prefill and decode apart have to give."""
    from pd_fleet import TRUTH

    with ServerProcess(TRUTH) as server:
        yield server


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """This machine; a module whose tests run in a lab too has a fixture of its own."""
    from places import Place

    return Place(tmp_path_factory.mktemp("place"))


def client_session(place: Place, seconds: float) -> aiohttp.ClientSession:
    """A client with any number of connections, that waits for an answer for so long."""
    # SGLang closes a connection that is idle for 5 s, which a client on a busy machine notices too late.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    timeout = aiohttp.ClientTimeout(total=seconds)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=place.headers)


@pytest.fixture
async def client(place: Place) -> AsyncIterator[aiohttp.ClientSession]:
    """Waits as long as a busy machine may take."""
    async with client_session(place, 120) as session:
        yield session


@pytest.fixture
async def patient_client(place: Place) -> AsyncIterator[aiohttp.ClientSession]:
    """Waits for servers on an emulated GPU: they compute 15 tokens of a prompt in a second, and on a busy
    machine 5."""
    async with client_session(place, 900) as session:
        yield session


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """The same numbers whenever this test runs."""
    return random.Random(request.node.name)

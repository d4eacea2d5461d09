"""Servers that the integration tests share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_ext.testing.leaks import LeakGuard
from sglang_ext.testing.servers import ServerPool, ServerProcess, ServerSpec

# Modules beside the tests are imported by their own names.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "router"))  # for api_fuzz.py


@pytest.fixture(scope="session")
def server_pool() -> Iterator[ServerPool]:
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

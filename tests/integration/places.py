"""Where the servers of a test run: on this machine, or each on a host of a lab, with the router on another.

The same tests run in both. In a lab, the test itself is on the router's host while it has its place.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_ext.addresses import bracketed
from sglang_ext.cluster.plan import LOOPBACK
from tests.support.compare import Answer
from tests.support.lab import clock
from tests.support.lab.hosts import Lab, why_not
from tests.support.leaks import LeakGuard
from tests.support.servers.host_server import HostServer
from tests.support.servers.server import ServerProcess, ServerSpec

API_KEY = "the-key-of-clients"
CLOCKS_OFF_S = (90.0, -90.0)
"""Deviations of the clocks of the servers' hosts, in turn: the time of day decides nothing."""
CLUSTER_KEY = "the-key-of-a-test-0123456789-abcdefghijklmnop"
ROUTER = "router"
DATA = "kv"
"""The lab's network for KV alone."""
PORTS = "31000-31009"


@dataclass
class Place:
    """This machine, for tests without a lab.

    folder: visible to all servers.
    """

    folder: Path
    fetches_by: frozenset[str] = frozenset({"shm"})
    """How a server reads another's DRAM: on one host they map it."""
    address: str = LOOPBACK
    """The router's address."""
    flags: tuple[str, ...] = ()
    """Flags of servers beside `--kv-router`."""
    router_options: dict[str, Any] = field(default_factory=dict)
    """Options of its configuration."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers of every client."""
    lab: Lab | None = None
    outside: Callable[..., Any] = lambda call, *args, **kwargs: call(*args, **kwargs)
    """Calls a function with the network of this machine."""

    def server(self, spec: ServerSpec, name: str) -> ServerProcess:
        """A server, not started yet; in a lab on the host of that name."""
        return ServerProcess(spec)

    def router_url(self, port: int) -> str:
        return f"http://{bracketed(self.address)}:{port}"


class Outside:
    """A server on this machine whose answers are the truth, for a test that is in a lab."""

    def __init__(self, server: ServerProcess, place: Place) -> None:
        self._server, self._place = server, place

    def generate(self, prompt: Sequence[int], **arguments: Any) -> Answer:
        return self._place.outside(self._server.generate, prompt, **arguments)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._place.outside(self._server.post, path, body)


class LabPlace(Place):
    """Hosts of a lab."""

    def server(self, spec: ServerSpec, name: str) -> ServerProcess:
        assert self.lab is not None
        return HostServer(spec, self.lab[name])


KINDS = ("here", pytest.param("lab", marks=pytest.mark.long))
"""Parameters of a fixture that yields the result of `place_of`."""


@contextmanager
def place_of(kind: str, names: Sequence[str], folder: Path, leak_guard: LeakGuard) -> Iterator[Place]:
    """This machine, or a lab with a host for each of these servers."""
    if kind == "here":
        yield Place(folder)
        return
    with ExitStack() as stack:
        with leak_guard.adopting():
            place = stack.enter_context(in_lab(names, folder))
        yield place


def clock_off_s(server: ServerProcess) -> float:
    """By how much the time of day of a server that runs is off this process's, to a few seconds."""
    answer = httpx.get(f"{server.url}/health", trust_env=False, timeout=60)
    return parsedate_to_datetime(answer.headers["date"]).timestamp() - time.time()


@contextmanager
def in_lab(names: Sequence[str], folder: Path, *, family: int = 4) -> Iterator[LabPlace]:
    """A lab with a host for the router and these for servers, two networks, a key, host names that mean
    nothing, and clocks that are minutes apart. This thread is on the router's host meanwhile, with all that
    it starts. folder: shared with all.
    """
    if reason := why_not():
        pytest.skip(reason)
    key_file = folder / "cluster.key"
    key_file.touch(mode=0o600)
    key_file.write_text(CLUSTER_KEY)
    hosts = (ROUTER, *names)
    with (
        ThreadPoolExecutor(1) as outside,
        Lab(
            *hosts,
            hostnames=dict.fromkeys(hosts, "node"),
            shared=[folder],
            families=(family,),
            networks=("lan", DATA),
            clocks={} if clock.why_not() else dict(zip(names, itertools.cycle(CLOCKS_OFF_S), strict=False)),
        ) as lab,
    ):
        outside.submit(int).result()  # its thread is there before this one leaves
        with lab[ROUTER].network():
            yield LabPlace(
                folder,
                fetches_by=frozenset({"tcp"}),
                address=lab[ROUTER].address(),
                flags=(
                    *("--kv-cluster-key-file", str(key_file)),
                    *("--kv-data-interface", DATA, "--kv-ports", PORTS),
                ),
                router_options={
                    "host": lab[ROUTER].address(),
                    "api_key": API_KEY,
                    "cluster_key_file": str(key_file),
                },
                headers={"authorization": f"Bearer {API_KEY}"},
                lab=lab,
                outside=lambda call, *args, **kwargs: outside.submit(call, *args, **kwargs).result(),
            )

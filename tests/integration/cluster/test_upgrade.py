"""A cluster is upgraded one server after the other, under load; the servers of other releases are installed,
each from a wheel of its own, beside the checkout.

The next release speaks the same protocols, so old and new serve together and read each other's KV. A release
with other protocols is refused by name, and the rest serve on.
"""

from __future__ import annotations

import asyncio
import random
import re
import runpy
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from pd_fleet import ANSWER_TOKENS, COMMON, RETURNED, TRUTH, count, nothing_is_left, prompt_of
from router_rig import FLAGS, until
from test_fetching import TOKENS, busy, cold, fetched, said_at
from test_real_members import PATIENCE, Load

from sglang_ext.engine.pd.messages import PROTOCOL as PD_PROTOCOL
from sglang_ext.protocol.cluster import PROTOCOL, instance_path
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.fleet.lifecycle import State
from sglang_ext.testing.waiting import wait_until
from tests.support.compare import assert_same
from tests.support.leaks import LeakGuard
from tests.support.servers.pd_servers import pd_servers
from tests.support.servers.ports import free_port
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1800)]

DIST = runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "dist.py"))


@dataclass(frozen=True)
class ReleasedSpec(ServerSpec):
    """A server of an installed release.

    Args:
        python: of its environment.
    """

    python: str = sys.executable

    def command(self, port: int) -> list[str]:
        return [self.python, *super().command(port)[1:]]


def released(folder: Path, version: str, *changes: tuple[str, str, str]) -> str:
    """Install a release of the checkout under another version; its Python.

    Args:
        changes: (file, regular expression for its one match, replacement in this release).
    """
    source, out = folder / "source", folder / "out"
    out.mkdir(parents=True)
    DIST["copy_to"](source)
    names = ("pyproject.toml", r'(?m)^version = ".*"', f'version = "{version}"')
    says = ("sglang_ext/launch_server.py", r"(?m)^def main\(.*\n", rf"\g<0>    print('this is {version}')\n")
    for name, before, after in (names, says, *changes):
        text, count = re.subn(before, after, (source / name).read_text())
        assert count == 1, (name, before)
        (source / name).write_text(text)
    DIST["run"](sys.executable, "-c", DIST["BUILD"], out, "wheel", cwd=source)
    (wheel,) = out.glob(f"sglang_ext-{version}-*.whl")
    return str(Path(DIST["install"](wheel, folder)) / "bin" / "python")


class Fleet:
    """Servers a and b, and where they look for their router."""

    def __init__(self, leak_guard: LeakGuard) -> None:
        self.port = free_port()
        self.servers: dict[str, ServerProcess] = {}
        self._leak_guard = leak_guard

    def start(self, python: str, *names: str) -> None:
        """Start servers of a release."""
        for name in names:
            flags = (
                *FLAGS, "--kv-router", f"http://127.0.0.1:{self.port}", "--kv-instance-id", name,
                "--kv-dram-size", "64MB", "--kv-load-policy", "always", "--enable-metrics",
                "--enable-cache-report",
            )  # fmt: skip
            # Of its own environment alone, and not forked from the checkout's.
            spec = ReleasedSpec(flags=flags, environment={"PYTHONSAFEPATH": "1"}, python=python)
            self.servers[name] = ServerProcess(spec)
        with self._leak_guard.adopting(), ThreadPoolExecutor() as pool:
            list(pool.map(lambda name: self.servers[name].start(), names))

    async def replace(self, router: Router, client: aiohttp.ClientSession, python: str, name: str) -> None:
        """Drain a server, stop it, and start one of a release in its place."""
        url = self.servers[name].url
        async with client.post(router.url + instance_path(name, "drain"), json={}) as answer:
            assert answer.status == 200
        await until(lambda: router.fleet.rows[url].state is State.LEFT, seconds=120)
        await asyncio.to_thread(self.servers.pop(name).stop)
        await asyncio.to_thread(self.start, python, name)

    def says(self, name: str, text: str) -> bool:
        """Whether it stands in a server's log."""
        return text in self.servers[name].log.read_text()

    def at(self, url: str) -> ServerProcess:
        return next(server for server in self.servers.values() if server.url == url)

    def stop(self) -> None:
        for server in self.servers.values():
            server.stop()


@pytest.fixture
def fleet(leak_guard: LeakGuard) -> Iterator[Fleet]:
    found = Fleet(leak_guard)
    try:
        yield found
    finally:
        found.stop()


async def reads_what_the_other_has(
    router: Router, client: aiohttp.ClientSession, fleet: Fleet, rng: random.Random
) -> None:
    """One is busy, and the other reads the KV of a prompt from it: the same answer as with no cache."""
    async with busy(client, router, fleet) as owner:
        prompt, answer, headers = await fetched(
            client, router, owner, rng, lambda prompt: said_at(client, router, owner, prompt)
        )
        assert headers["x-kv-fetch-source"] == owner.url
        assert answer.dram_tokens == TOKENS
    for server in fleet.servers.values():
        assert_same(await cold(client, server, prompt), answer)


@dataclass(frozen=True)
class Releases:
    """Their Pythons. next: speaks the checkout's protocols. stranger: others, and other fields."""

    next: str
    stranger: str


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Releases:
    folder = tmp_path_factory.mktemp("releases")

    def another(file: str, spoken: int) -> tuple[str, str, str]:
        return file, r"(?m)^PROTOCOL: Final = .*", f"PROTOCOL: Final = {spoken + 1}"

    return Releases(
        released(folder / "next", "9.1.0"),
        released(
            folder / "stranger", "9.2.0",
            another("sglang_ext/protocol/cluster.py", PROTOCOL),
            another("sglang_ext/engine/pd/messages.py", PD_PROTOCOL),
            (
                "sglang_ext/engine/pd/messages.py",
                r"(?m)^    protocol: int = PROTOCOL\n", r"\g<0>    hops: int = 3\n",
            ),
        ),
    )  # fmt: skip


def test_prefill_and_decode_may_be_of_two_releases_that_speak_the_same(
    releases: Releases, leak_guard: LeakGuard
) -> None:
    """Either way, with returns; a pair that speaks other protocols is refused by name, whichever is newer."""
    flags = (*COMMON, "--kv-pd-caching", "3", "--kv-dram-size", "64MB")
    ours, next_one, stranger = (
        ReleasedSpec(flags=flags, environment={"PYTHONSAFEPATH": "1"}, python=python)
        for python in (sys.executable, releases.next, releases.stranger)
    )
    with ExitStack() as stack:
        with leak_guard.adopting():
            pd, (truth,) = stack.enter_context(
                pd_servers([ours, next_one, stranger], [ours, next_one, stranger], [TRUTH])
            )
        for decode, prefill in ((0, 1), (1, 0)):
            before = count(pd.prefill[prefill].server, RETURNED)
            prompt = prompt_of(prefill, 200)
            for _ in range(2):
                answer = pd.generate(prompt, max_new_tokens=ANSWER_TOKENS, prefill=prefill, decode=decode)
                assert_same(truth.generate(prompt, max_new_tokens=ANSWER_TOKENS), answer)
                prompt = [*prompt, *answer.tokens, *prompt_of(7 + prefill, 40)]
            wait_until(
                lambda before=before, at=pd.prefill[prefill].server: count(at, RETURNED) > before,
                seconds=30,
                what="a return",
            )
        for decode, prefill in ((0, 2), (2, 0)):
            there, here = (PD_PROTOCOL + (side == 2) for side in (prefill, decode))
            answers = pd.start(prompt_of(20, 60), max_new_tokens=2, prefill=prefill, decode=decode)
            said = [str(answer.exception(120)) for answer in answers]
            assert f"protocol {there} there, {here} here; run one release" in said[1], said
        prompt = prompt_of(30, 60)
        assert_same(truth.generate(prompt, max_new_tokens=2), pd.generate(prompt, max_new_tokens=2))
        nothing_is_left(pd.servers, 60)


async def test_one_server_after_the_other_is_replaced_by_another_release(
    fleet: Fleet, client: aiohttp.ClientSession, releases: Releases, rng: random.Random
) -> None:
    fleet.start(sys.executable, "a", "b")
    config = RouterConfig(port=fleet.port, policy="least-load", **PATIENCE)
    async with Router(config) as router:
        router.fetching.least_wait_s = 8.0  # on a busy machine, each event is awaited for as long as it takes

        async def both_serve() -> None:
            await until(lambda: len(router.fleet.usable()) == 2, seconds=60)
            await until(lambda: all(each.trusted for each in router.fleet.usable()), seconds=60)

        await both_serve()
        for name in ("b", "a"):
            async with Load(router, client).going_on() as load:
                await fleet.replace(router, client, releases.next, name)
                await both_serve()
                await load.more()
            assert load.ends["broken off"] == 0
            assert fleet.says(name, "this is 9.1.0")
            assert fleet.says("a", "this is 9.1.0") is (name == "a"), "first they are mixed, then not"
            await reads_what_the_other_has(router, client, fleet, rng)

        async with Load(router, client).going_on() as load:
            await fleet.replace(router, client, releases.stranger, "b")
            assert fleet.says("b", "this is 9.2.0")
            why = f"protocol: {PROTOCOL + 1} is spoken there, {PROTOCOL} here; run one release"
            await until(lambda: fleet.says("b", why), seconds=60)
            await load.more()
        assert load.ends["broken off"] == 0
        assert [row.name for row in router.fleet.usable()] == [fleet.servers["a"].url]
        assert fleet.servers["b"].generate([1, 2, 3], max_new_tokens=2).tokens, "it serves, by itself"
        router.check()

"""``sglang-ext top``: its view of a router's recorded documents, and a run in a terminal."""

from __future__ import annotations

import asyncio
import os
import pty
import subprocess
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pexpect
import pytest
from pexpect.fdpexpect import fdspawn
from rich.console import Console

from sglang_ext.cluster.top import Seen, main, read_metrics, view
from sglang_ext.errors import PeerError
from sglang_ext.protocol.cluster import PATH, Cluster, Registration, TierFill
from sglang_ext.router import Router, RouterConfig
from sglang_ext.testing.waiting import until
from tests.support.servers.ports import free_port
from tests.support.servers.workers import StandInWorker, running_worker

KEY = "an-administrators-key"
BODY = {"input_ids": list(range(64)), "sampling_params": {"max_new_tokens": 4}}


@asynccontextmanager
async def cluster(tokenizer_dir: Path, **options: Any) -> AsyncIterator[tuple[Router, list[StandInWorker]]]:
    """A router, two stand-ins that have registered, and three requests that they have answered."""
    from sglang_ext.router.tokens.prompt_tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(tokenizer_dir), trust_remote_code=False)
    workers = [StandInWorker(tokenizer=tokenizer, tokenizer_path=str(tokenizer_dir)) for _ in range(2)]
    async with (
        running_worker(workers[0]),
        running_worker(workers[1]),
        Router(RouterConfig(port=0, health_check_interval_secs=0.05, **options)) as router,
        aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as session,
    ):
        for number, worker in enumerate(workers):
            said = Registration(url=worker.url, instance=f"server-{number}", epoch=f"{number:032x}")
            async with session.post(router.url + PATH, json=msgspec.to_builtins(said)) as answer:
                assert answer.status == 200
        await until(lambda: len(router.fleet.usable()) == 2)
        for _ in range(3):
            async with session.post(router.url + "/generate", json=BODY) as answer:
                assert answer.status == 200
                await answer.read()
        yield router, workers


async def recorded(router: Router, at: float = 0.0) -> Seen:
    """The documents of a real router, as they come over the wire."""
    async with aiohttp.ClientSession() as session:
        async with session.get(router.url + "/cluster") as answer:
            seen = msgspec.json.decode(await answer.read(), type=Cluster)
        async with session.get(router.url + "/metrics") as answer:
            return Seen(at, seen, read_metrics(await answer.text()))


def shown(seen: Seen, before: Seen | None = None) -> str:
    console = Console(file=StringIO(), width=200)
    console.print(view(seen, before))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.fixture
async def seen(tokenizer_dir: Path) -> Seen:
    async with cluster(tokenizer_dir) as (router, _):
        return await recorded(router)


def counted(seen: Seen, at: float, **more: dict[tuple[tuple[str, str], ...], float]) -> Seen:
    """Another reading of the same router, with more of some metrics."""
    samples = dict(seen.samples)
    for name, grown in more.items():
        there = {tuple(sorted(labels.items())): value for labels, value in samples.get(name, ())}
        for labels, value in grown.items():
            there[labels] = there.get(labels, 0.0) + value
        samples[name] = [(dict(labels), value) for labels, value in there.items()]
    return Seen(at, seen.cluster, samples)


async def test_what_a_real_router_tells_is_shown(seen: Seen) -> None:
    text = shown(seen)
    assert "2 of 2 instances usable" in text
    assert "requests 3 in all" in text
    for name in ("server-0", "server-1", "colocated", "ready", "queue 0"):
        assert name in text
    assert "192 prompt tokens since the router's start" in text
    assert "hints: 0 in all" in text
    assert "KV from" not in text, "nothing was read from others"


async def test_rates_hits_hints_and_transfers_are_of_the_time_between(seen: Seen) -> None:
    one, two = (each.url for each in seen.cluster.instances)
    name = "sglang_ext_router_"
    later = counted(
        seen,
        2.0,
        **{
            name + "decisions_total": {(("policy", "x"), ("reason", "prefix")): 8},
            name + "prompt_tokens_total": {(): 1000},
            name + "cached_tokens_total": {(): 750},
            name + "tier_tokens_total": {(("tier", "dram"),): 250, (("tier", "hbm"),): 500},
            name + "hints_used_total": {
                (("when", when),): count for when, count in (("ready", 5), ("early", 2), ("never", 1))
            },
            name + "transferred_tokens_total": {(("how", "fetch"), ("source", one), ("target", two)): 960},
        },
    )  # fmt: skip
    text = shown(later, seen)
    assert "requests 4.0/s" in text
    assert "hits: 75% of 1,000 prompt tokens (" in text
    assert "dram 25%" in text
    assert "hbm 50%" in text
    assert "kept 5 in time and 2 before all was moved, missed 1" in text
    (row,) = [line for line in text.splitlines() if line.startswith("server-0") and "960" in line]
    assert row.split() == ["server-0", "server-1", "960", "480"]
    assert "requests 3 in all" in shown(Seen(9.0, seen.cluster, seen.samples), later), "a router started anew"


async def test_tiers_states_and_notes_are_shown(seen: Seen) -> None:
    first, second = seen.cluster.instances
    first = msgspec.structs.replace(
        first, tiers={"hbm": TierFill(used=5, size=10), "dram": TierFill(used=9, size=10)}, awaited=True
    )
    second = msgspec.structs.replace(second, state="down", why="is silent [0.5 s]", usable=False)
    told = msgspec.structs.replace(seen.cluster, instances=(first, second), unusable="nobody decodes")
    text = shown(Seen(0.0, told, seen.samples))
    assert " 50%" in text
    assert " 90%" in text
    assert "awaited" in text
    assert "server-1: is silent [0.5 s]" in text
    assert "no request can be served: nobody decodes" in text


def test_what_are_no_metrics_is_said() -> None:
    with pytest.raises(PeerError, match="not a page of metrics"):
        read_metrics("<html>{")


async def test_errors_say_what_is_wrong(
    tokenizer_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    assert await asyncio.to_thread(main, ["--router", nobody, "--interval", "0"]) == 1
    assert f"cannot reach {nobody}" in capsys.readouterr().err
    async with cluster(tokenizer_dir, api_key=KEY) as (router, workers):
        monkeypatch.setenv("SGLANG_EXT_API_KEY", "wrong")
        assert await asyncio.to_thread(main, ["--router", router.url, "--interval", "0"]) == 1
        assert "key" in capsys.readouterr().err
        assert await asyncio.to_thread(main, ["--router", workers[0].url, "--interval", "0"]) == 1
        assert "top: " in capsys.readouterr().err
        monkeypatch.setenv("SGLANG_EXT_API_KEY", KEY)
        assert await asyncio.to_thread(main, ["--router", router.url, "--interval", "0"]) == 0
        assert "server-1" in capsys.readouterr().out


@pytest.mark.parametrize("term", ["xterm", "dumb"])
async def test_it_runs_in_a_terminal_until_q(tokenizer_dir: Path, term: str) -> None:
    """Under a pty: it draws, draws again as things change, and leaves the terminal as it was. A terminal that
    cannot be redrawn shows it once.
    """
    async with cluster(tokenizer_dir) as (router, _):

        def watch() -> tuple[int | None, bytes]:
            command = (sys.executable, "-m", "sglang_ext.cli", "top")
            options = ("--router", router.url, "--interval", "50ms")
            master, terminal = pty.openpty()
            termios.tcsetwinsize(terminal, (40, 160))
            # Not pexpect.spawn: it forks the interpreter, and a lock that a thread of the router holds then
            # stays locked in the child.
            with subprocess.Popen(
                (*command, *options),
                stdin=terminal,
                stdout=terminal,
                stderr=terminal,
                env={**os.environ, "TERM": term},
                start_new_session=True,
            ) as process:
                os.close(terminal)
                screen = fdspawn(master, timeout=240)
                try:
                    screen.expect_exact(b"server-0")
                    if term != "dumb":
                        screen.expect_exact(b"/s")  # a second reading: rates instead of counts
                        screen.send(b"q")
                    screen.expect(pexpect.EOF)
                    return process.wait(), screen.before
                finally:
                    process.kill()
                    screen.close()

        status, rest = await asyncio.to_thread(watch)
        assert status == 0
        assert (b"\x1b[?1049l" in rest) == (term != "dumb"), "the screen is given back"

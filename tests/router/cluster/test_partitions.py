"""A router and instances on hosts of their own, whose clocks are minutes apart, and links that are cut.

Instances are stand-ins with real agents. With real servers, and for each pair of them:
`tests/integration/cluster/test_partitions.py` (long form).
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import pytest
from index_truth import assert_right
from streams import Streams

from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.fleet.lifecycle import State
from sglang_ext.testing.waiting import until
from tests.support import ROOT
from tests.support.lab import clock
from tests.support.lab.hosts import Lab, why_not
from tests.support.leaks import LeakGuard

pytestmark = pytest.mark.slow

PROGRAM = "tests.support.servers.instance_process"
PORT, API_KEY = 30_000, "the-key-of-clients"
HARMLESS_S = 3.0
"""As long as a switch may take to fail over."""
AT_ONCE_S = 5.0
"""After which the index is the truth again; a second, where the machine is not busy."""
FOREVER_S = 40.0
"""Longer than any verdict takes, on a busy machine too."""


@dataclass
class Instance:
    """One process on a host."""

    url: str


@dataclass
class Rig:
    lab: Lab
    key_file: Path
    one: Instance
    two: Instance


@pytest.fixture
def rig(key_file: Path, tokenizer_dir: Path, leak_guard: LeakGuard) -> Iterator[Rig]:
    """A router's host, where this thread is, and two instances that look for it."""
    if reason := why_not() or clock.why_not():
        pytest.skip(reason)
    shared = [key_file, tokenizer_dir]
    with Lab(
        *("router", "one", "two"),
        shared=shared,
        families=(4,),
        hostnames=dict.fromkeys(("router", "one", "two"), "node"),
        clocks={"one": 90.0, "two": -90.0},
    ) as lab:
        found = []
        for name in ("one", "two"):
            process = lab[name].popen(
                [
                    *(sys.executable, "-W", "ignore", "-m", PROGRAM, name),
                    *(f"http://{lab['router'].address()}:{PORT}", str(tokenizer_dir)),
                    *(lab[name].address(), str(key_file)),
                ],
                stdout=subprocess.PIPE,
                environment={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            assert process.stdout is not None
            found.append(Instance(msgspec.json.decode(process.stdout.readline())["url"]))
        with lab["router"].network():
            yield Rig(lab, key_file, *found)


async def test_an_instance_that_is_cut_off_is_not_missed_or_declared_dead_in_time(rig: Rig) -> None:
    """For as long as networks fail over: no request fails, no instance is dead. For longer: the others
    answer, requests that had begun end with an error, and when the instance is back the router trusts its
    present reports."""
    config = RouterConfig(
        host=rig.lab["router"].address(), port=PORT, api_key=API_KEY, cluster_key_file=str(rig.key_file)
    )
    headers = {"authorization": f"Bearer {API_KEY}"}
    timeout = aiohttp.ClientTimeout(total=120)
    async with (
        Router(config) as router,
        aiohttp.ClientSession(headers=headers, timeout=timeout) as client,
    ):
        await until(lambda: len(router.fleet.usable()) == 2, FOREVER_S, "both instances")
        row = router.fleet.rows[rig.one.url]

        streams = Streams(router, client)
        async with streams.going_on():
            await until(lambda: row.in_flight > 0, FOREVER_S, "a request at the first")
            rig.lab.cut("router", "one")
            await asyncio.sleep(HARMLESS_S)
            rig.lab.wire("router", "one")
            assert row.state in (State.READY, State.SUSPECT)
        assert (streams.failures, streams.ends["broken off"]) == ([], 0)
        assert row.state in (State.READY, State.SUSPECT)
        for each in (rig.one, rig.two):
            await assert_right(router, each, AT_ONCE_S)

        streams = Streams(router, client)
        async with streams.going_on():
            await until(lambda: row.in_flight > 0, FOREVER_S, "a request at the first")
            rig.lab.cut("router", "one")
            await until(lambda: row.state is State.DOWN, FOREVER_S, "the verdict")
            await streams.more()
            rig.lab.wire("router", "one")
            await until(lambda: row.state is State.READY, FOREVER_S, "its return")
            await until(lambda: row.in_flight > 0, FOREVER_S, "a request at the first")
        assert streams.failures == []
        for each in (rig.one, rig.two):
            await assert_right(router, each, AT_ONCE_S)
        assert all(each.in_flight == 0 for each in router.fleet.rows.values())
        router.check()


def ask_there(rig: Rig, first: int) -> None:
    """A request at the first instance, from its own host."""
    body = {"input_ids": list(range(first, first + 64)), "sampling_params": {"max_new_tokens": 6}}
    headers = {"authorization": f"Bearer {API_KEY}", "content-type": "application/json"}
    with rig.lab["one"].network():
        url = f"{rig.one.url}/generate"
        urllib.request.urlopen(urllib.request.Request(url, msgspec.json.encode(body), headers)).read()


@pytest.mark.parametrize(
    "seconds", [4, *(pytest.param(each, marks=pytest.mark.long) for each in (1, 10, 60))]
)
async def test_what_changed_behind_a_cut_is_known_at_once_when_it_heals(rig: Rig, seconds: int) -> None:
    """However long it took: TCP would repeat lost bytes as late as the cut was long."""
    config = RouterConfig(
        host=rig.lab["router"].address(), port=PORT, api_key=API_KEY, cluster_key_file=str(rig.key_file)
    )
    async with Router(config) as router:
        await until(lambda: len(router.fleet.usable()) == 2, FOREVER_S, "both instances")
        ask_there(rig, 100)
        await assert_right(router, rig.one, AT_ONCE_S)
        rig.lab.cut("router", "one")
        for number in range(seconds * 2):
            ask_there(rig, 1000 + 10 * number)
            await asyncio.sleep(0.5)
        rig.lab.wire("router", "one")
        healed = time.monotonic()
        replica = router.trees.replica(rig.one.url)
        assert replica is not None
        before = replica.next
        await until(lambda: replica.trusted and replica.next > before, AT_ONCE_S, "what changed meanwhile")
        heard = time.monotonic() - healed
        await assert_right(router, rig.one, AT_ONCE_S)
        right = time.monotonic() - healed
        print(f"{seconds} s: the router hears of it {heard:.2f} s after the cut, is right by {right:.2f} s")
        router.check()

"""Several prefill and decode servers: any pair serves, and a death takes nothing of the others along.

Deaths are placed: a hand-over is held at a step, and then one of its sides is killed or stopped.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from urllib.parse import quote

import aiohttp
import pytest
from hooked_server import holding, is_held
from pd_faults import Cell, ended, place, serves, stopped
from pd_fleet import (
    ANSWER_TOKENS,
    BROKEN_OFF,
    COMMON,
    DECODE_IS_GONE,
    PREFILL_IS_GONE,
    WAS_GIVEN_UP,
    WRITING_FAILED,
    FaultySpec,
    Rig,
    assert_failed,
    conversations_are_answered_alike,
    count,
    fault,
    kill,
    nothing_is_left,
    prompt_of,
)
from token_requests import advise, generate

from sglang_ext.router import Router, RouterConfig
from sglang_ext.testing.waiting import until, wait_until
from tests.support.compare import assert_same
from tests.support.leaks import LeakGuard
from tests.support.servers.pd_servers import pd_servers
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

End = Callable[[Router, aiohttp.ClientSession], Awaitable[None]]
FREED_SECONDS = 20.0
"""The time within which a survivor has freed the resources of a dead peer's requests, on a machine with other
work; the answers name the verdict, so that nothing else can have ended them. `pd_faults` holds it to five
seconds."""


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, truth: ServerProcess) -> Iterator[Rig]:
    """Two prefill and two decode servers; the second of each is for killing."""
    folder = tmp_path_factory.mktemp("faults")
    # Aggregated and in pages of one token; `test_pd` has the rest.
    layout = ("--kv-transfer-layout", "aggregated", "--page-size", "1")
    spec = FaultySpec(flags=(*COMMON, "--kv-pd-caching", "2", *layout))
    names = ("prefill0", "prefill1", "decode0", "decode1")
    folders = [folder / name for name in names]
    specs = [spec.looking_at(each) for each in folders]
    with pd_servers(specs[:2], specs[2:]) as (servers, _):
        yield Rig(servers, truth, folders[:2], folders[2:])


def test_a_late_report_of_one_hold_is_no_arrival_at_the_next(tmp_path: Path) -> None:
    """A scheduler that is stopped between looking for a hold and reporting it reports too late."""
    with holding(tmp_path, "writing") as late:
        pass
    late.touch()
    with holding(tmp_path, "writing") as arrival:
        assert not arrival.exists()
        assert is_held(tmp_path, "writing")
        assert arrival.exists()
    assert not is_held(tmp_path, "writing")


def test_any_pair_serves_and_some_at_the_same_time(rig: Rig) -> None:
    prompts = {
        (prefill, decode, number): prompt_of(1, 120) + prompt_of(100 * prefill + 10 * decode + number, 90)
        for prefill, decode, number in product(range(2), range(2), range(2))
    }
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = {
            pair: pool.submit(
                rig.pd.generate, prompt, max_new_tokens=ANSWER_TOKENS, prefill=pair[0], decode=pair[1]
            )
            for pair, prompt in prompts.items()
        }
    for pair, prompt in prompts.items():
        assert_same(rig.expected(prompt), answers[pair].result())


async def test_a_hinted_request_outlives_the_draining_of_who_was_to_decode(rig: Rig) -> None:
    gone, other = rig.pd.decode

    async def is_drained(router: Router, client: aiohttp.ClientSession) -> None:
        await drain(router, gone.url, client)

    await a_hinted_request_outlives(rig, gone, other, rig.pd.prefill[0].server, is_drained)


@pytest.mark.parametrize("step", ["ready", "reading"])
def test_a_stopped_decode_server_holds_prefill_for_seconds_only(rig: Rig, step: str) -> None:
    prefill, decode = rig.pd.prefill[0].server, rig.pd.decode[0]
    (scheduler,) = decode.processes("sglang::scheduler")
    with fault(rig.decode_faults[0], f"hold-{step}") as at:
        both = rig.pd.start(prompt_of(2, 200), max_new_tokens=ANSWER_TOKENS)
        wait_until(at.exists, seconds=60, what=step)
        os.kill(scheduler, signal.SIGSTOP)
        try:
            stopped = time.monotonic()
            assert_failed(both[0], DECODE_IS_GONE, seconds=FREED_SECONDS)
            nothing_is_left([prefill], seconds=FREED_SECONDS - (time.monotonic() - stopped) + 1.0)
            # Its pages are given to others, and are not taken for the request's when decode goes on.
            other = prompt_of(3, 200)
            assert_same(rig.expected(other), rig.pd.generate(other, max_new_tokens=ANSWER_TOKENS, decode=1))
        finally:
            os.kill(scheduler, signal.SIGCONT)
    assert_failed(both[1], WAS_GIVEN_UP)
    nothing_is_left([decode])
    again = prompt_of(4, 100)
    assert_same(rig.expected(again), rig.pd.generate(again, max_new_tokens=ANSWER_TOKENS))


def test_a_stopped_prefill_server_fails_its_requests_in_seconds(rig: Rig) -> None:
    decode = rig.pd.decode[0]
    (scheduler,) = rig.pd.prefill[0].server.processes("sglang::scheduler")
    with fault(rig.decode_faults[0], "hold-ready") as at:
        both = rig.pd.start(prompt_of(5, 200), max_new_tokens=ANSWER_TOKENS)
        wait_until(at.exists, seconds=60, what="ready")
        os.kill(scheduler, signal.SIGSTOP)
        try:
            assert_failed(both[1], PREFILL_IS_GONE, seconds=FREED_SECONDS)
            nothing_is_left([decode])
        finally:
            os.kill(scheduler, signal.SIGCONT)
    assert_failed(both[0], DECODE_IS_GONE, "decode gave the request up")
    again = prompt_of(6, 100)
    assert_same(rig.expected(again), rig.pd.generate(again, max_new_tokens=ANSWER_TOKENS))


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_router_that_dies_or_stands_still_leaves_nothing(rig: Rig, how: str) -> None:
    place(rig, Cell("reading", "router", how), 20 + ("SIGKILL", "SIGSTOP").index(how))


def test_a_killed_decode_server_frees_prefill_and_the_other_serves(rig: Rig) -> None:
    with fault(rig.decode_faults[1], "hold-reading") as at:
        both = rig.pd.start(prompt_of(7, 200), max_new_tokens=ANSWER_TOKENS, decode=1)
        wait_until(at.exists, seconds=60, what="reading")
        kill(rig.pd.decode[1])
        killed = time.monotonic()
        assert_failed(both[0], DECODE_IS_GONE, seconds=FREED_SECONDS)
        nothing_is_left([rig.pd.prefill[0].server], seconds=FREED_SECONDS - (time.monotonic() - killed) + 1.0)
    assert_failed(both[1], BROKEN_OFF)
    prompt = prompt_of(8, 100)
    assert_same(rig.expected(prompt), rig.pd.generate(prompt, max_new_tokens=ANSWER_TOKENS))


def test_a_killed_prefill_server_frees_decode_and_the_other_serves(rig: Rig) -> None:
    """Also with a hint for the killed server: the request of the hint is served all the same."""
    decode, (other, gone) = rig.pd.decode[0], (each.server for each in rig.pd.prefill)

    def dies_in_a_hand_over() -> None:
        prompt = prompt_of(9, 200)
        expected = rig.expected(prompt)
        with fault(rig.decode_faults[0], "hold-reading") as at:
            both = rig.pd.start(prompt, max_new_tokens=ANSWER_TOKENS, prefill=1)
            wait_until(at.exists, seconds=60, what="reading")
            kill(gone)
        ended(both[1], expected, FREED_SECONDS)  # over shm, all may have been read by then
        assert_failed(both[0], BROKEN_OFF)
        nothing_is_left([decode])

    async def dies(_router: Router, _client: aiohttp.ClientSession) -> None:
        await asyncio.to_thread(dies_in_a_hand_over)

    asyncio.run(a_hinted_request_outlives(rig, gone, other, decode, dies))
    prompt = prompt_of(10, 100)
    assert_same(rig.expected(prompt), rig.pd.generate(prompt, max_new_tokens=ANSWER_TOKENS))


async def drain(router: Router, url: str, client: aiohttp.ClientSession, *, cancel: bool = False) -> None:
    path = f"{router.url}/cluster/instances/{quote(url, safe='')}/drain"
    async with client.post(path, json={"cancel": cancel}) as answer:
        assert answer.status == 200, await answer.text()


async def a_hinted_request_outlives(
    rig: Rig, gone: ServerProcess, other: ServerProcess, beside: ServerProcess, end: End
) -> None:
    """A hint names ``gone``, which is dead or drained when its request comes: ``other`` takes its place.

    beside: the server of the other kind. end: drains or kills ``gone``.
    """
    prefills = beside not in (each.server for each in rig.pd.prefill)

    def pair(server: ServerProcess) -> tuple[str, str]:
        return (server.url, beside.url) if prefills else (beside.url, server.url)

    config = RouterConfig(worker_urls=(beside.url, gone.url, other.url), port=0)
    timeout = aiohttp.ClientTimeout(total=60)
    async with Router(config) as router, aiohttp.ClientSession(timeout=timeout) as client:
        await drain(router, other.url, client)
        prompt = prompt_of(sum(gone.url.encode()), 150)
        answer, _ = await generate(client, router.url, prompt, session="s")
        told = await advise(client, router, session="s")
        assert (told["instance"], told["decode"]) == pair(gone)
        await drain(router, other.url, client, cancel=True)
        await until(lambda: len(router.fleet.usable()) == 3, 20, "the drained one to be back")
        await end(router, client)
        turn = [*prompt, *answer.tokens, 7]
        got, headers = await generate(client, router.url, turn, session="s")
        assert (headers["x-kv-prefill-instance"], headers["x-kv-instance"]) == pair(other)
        expected = await asyncio.to_thread(rig.expected, turn)
        assert_same(expected, got)
        router.check()


def test_a_decode_server_that_joins_while_others_serve_is_served(rig: Rig) -> None:
    """And when it dies, a request with a hint for it goes to another one."""
    with ServerProcess(ServerSpec(flags=rig.pd.decode[0].spec.flags)) as joined:
        rig.pd.decode.append(joined)
        try:
            prompt = prompt_of(11, 150)
            answer = rig.pd.generate(prompt, max_new_tokens=ANSWER_TOKENS, decode=len(rig.pd.decode) - 1)
            assert_same(rig.expected(prompt), answer)
        finally:
            rig.pd.decode.pop()

        async def dies(_router: Router, _client: aiohttp.ClientSession) -> None:
            kill(joined)

        prefill = rig.pd.prefill[0].server
        asyncio.run(a_hinted_request_outlives(rig, joined, rig.pd.decode[0], prefill, dies))
    nothing_is_left([rig.pd.prefill[0].server])


@pytest.fixture(scope="module")
def pushing(
    tmp_path_factory: pytest.TempPathFactory, truth: ServerProcess, leak_guard: LeakGuard
) -> Iterator[Rig]:
    """A pair that pushes by layer and keeps no KV."""
    kept = ("--kv-pd-caching", "basic")
    spec = FaultySpec(flags=(*COMMON, *kept, "--kv-transfer-mode", "push-by-layer", "--page-size", "16"))
    folder = tmp_path_factory.mktemp("pushing")
    folders = [folder / name for name in ("prefill", "decode")]
    with (
        leak_guard.adopting(),
        pd_servers([spec.looking_at(folders[0])], [spec.looking_at(folders[1])]) as (pd, _),
    ):
        yield Rig(pd, truth, folders[:1], folders[1:], leak_guard)


def test_layers_leave_while_the_next_are_computed(pushing: Rig) -> None:
    """MemServe, section 5.2. The twin sends no layer ahead: the answer is the same, the count is not."""
    assert pushed_ahead(pushing, prompt_of(14, PAGES * 16)) == (PAGES * LAYERS, 0)
    with fault(pushing.prefill_faults[0], "no-layers"):
        assert pushed_ahead(pushing, prompt_of(15, PAGES * 16)) == (0, PAGES * LAYERS)


PAGES = 12
LAYERS = 4
"""Layers of the model `tiny`."""
PUSHED = 'sglang_ext_pd_pushed_layers_total{tp_rank="0",when='


def pushed_ahead(rig: Rig, prompt: list[int]) -> tuple[int, int]:
    """Pages times layers that were sent before a request was computed, and after."""
    prefill = rig.pd.prefill[0].server

    def counted() -> dict[str, int]:
        return {when: int(count(prefill, f'{PUSHED}"{when}"')) for when in ("ahead", "after")}

    before = counted()
    assert_same(rig.expected(prompt), rig.pd.generate(prompt, max_new_tokens=ANSWER_TOKENS))
    wait_until(lambda: counted() != before, seconds=30, what="the hand-over to be counted")
    now = counted()
    return now["ahead"] - before["ahead"], now["after"] - before["after"]


def test_deaths_while_prefill_writes_into_decode(pushing: Rig) -> None:
    """Push by layer: the writer stands still, and its reader may have the pages for other requests; then the
    reader dies. Before, they give right answers, and keep no KV."""
    pd, folders = pushing.pd, pushing.prefill_faults
    prefill, decode, prompt = pd.prefill[0].server, pd.decode[0], prompt_of(12, 200)
    calls = prefill.pool_calls()
    conversations_are_answered_alike(pd, pushing.truth, count=2)
    prefill.wait_for_pool_calls(calls, "alloc_mem@peer", "transfer@peer")
    assert not prefill.pool_calls()["free_mem@peer"]
    with fault(folders[0], "hold-writing") as at:
        both = pd.start(prompt, max_new_tokens=ANSWER_TOKENS)
        wait_until(at.exists, seconds=60, what="writing")
        with stopped(prefill):
            assert_failed(both[1], PREFILL_IS_GONE, seconds=FREED_SECONDS)
            nothing_is_left([decode])
    assert_failed(both[0], DECODE_IS_GONE, WRITING_FAILED)
    serves(pushing, 0, 0, 1)
    with fault(folders[0], "hold-writing") as at:
        both = pd.start(prompt_of(13, 200), max_new_tokens=ANSWER_TOKENS)
        wait_until(at.exists, seconds=60, what="writing")
        kill(decode)
        assert_failed(both[0], DECODE_IS_GONE, WRITING_FAILED, seconds=FREED_SECONDS)
        nothing_is_left([prefill])
        prefill.wait_for_pool_calls(calls, "free_mem@peer")
    assert_failed(both[1], BROKEN_OFF)

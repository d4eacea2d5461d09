"""Prefill and decode apart with a model that has windows or states: the answers are those of one server.

The window's rows of a request, or its state, come beside the KV of all tokens, from a pool of their own.
Prefill keeps its KV in HBM, DRAM and on disk (``--kv-pd-caching 1``); decode keeps nothing. Prefill registers
with a router, which some tests have there, and which gets decode's URL.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest
from index_truth import assert_right
from pd_faults import ended
from pd_fleet import FaultySpec, Rig, fault, kill, nothing_is_left, prompt_of
from token_requests import advise, generate, settled

from sglang_ext.keys import encode_tokens
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.policies import Match
from sglang_ext.testing.models import RECIPES
from sglang_ext.testing.waiting import until, wait_until
from sglang_ext.tiers import Tier
from tests.support.compare import Answer, assert_same
from tests.support.leaks import LeakGuard
from tests.support.servers.pd_servers import pd_servers, prefill_spec
from tests.support.servers.ports import free_port
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ANSWER_TOKENS = 8
LIMITS = ("--max-total-tokens", "2048", "--max-running-requests", "4", "--chunked-prefill-size", "128")
WINDOW: int = RECIPES["tiny-spark"].config["sliding_window"]
LENGTHS = (5, WINDOW - 1, WINDOW, WINDOW + 1, 300, 417)
"""Of the first turns: less than the window and more, less than a chunk and more."""
TURN = 90
DRAM = "32MB"
"""For some prompts more than HBM has."""
NS = ("tokens", None, None, None)


@dataclass(frozen=True)
class Kind:
    """A model.

    Args:
        pool: of the rows that its requests have beside the KV of all tokens.
        resumed: of how many tokens less than its prompt a turn leaves a place to resume.
    """

    model: str
    pool: str
    flags: tuple[str, ...]
    resumed: int


WINDOWS = Kind("tiny-spark", "window", ("--page-size", "16", "--swa-full-tokens-ratio", "0.5"), 15)
STATES = Kind(
    "tiny-gdn",
    "state",
    (
        *("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule", "--page-size", "1"),
        # A second turn has more than a chunk, and a repeated prompt has no state at the end of one.
        *("--max-mamba-cache-size", "24", "--chunked-prefill-size", "512"),
    ),
    8,
)
LISTED = replace(WINDOWS, flags=(*WINDOWS.flags, "--attention-backend", "intel_amx"))
KINDS = [
    pytest.param(WINDOWS, id="windows"),
    pytest.param(STATES, id="states", marks=pytest.mark.long),
    *(
        pytest.param(replace(kind, model=model), id=model, marks=pytest.mark.long)
        for model, kind in (("tiny-mimo", LISTED), ("tiny-gemma4", LISTED), ("tiny-step", WINDOWS))
    ),
]


@dataclass
class HybridRig(Rig):
    """The pair, and two turns of conversations with the answers of a server of SGLang alone."""

    kind: Kind = WINDOWS
    port: int = 0
    """Where prefill looks for a router."""
    base: ServerSpec | None = None
    """The prefill server's, without its part in the pair, name, disk and faults."""

    turns: tuple[tuple[list[int], Answer], ...] = ()
    second: tuple[tuple[list[int], Answer], ...] = ()
    repeated: tuple[tuple[list[int], Answer], ...] = ()


def conversations(server: ServerProcess) -> list[tuple[tuple[list[int], Answer], ...]]:
    """The first turns, the second ones, and a prompt for itself, with their answers."""

    def answered(prompts: list[list[int]]) -> tuple[tuple[list[int], Answer], ...]:
        return tuple((prompt, server.generate(prompt, max_new_tokens=ANSWER_TOKENS)) for prompt in prompts)

    first = answered([prompt_of(length, length) for length in LENGTHS])
    second = [[*prompt, *answer.tokens, *prompt_of(7 * len(prompt), TURN)] for prompt, answer in first]
    return [first, answered(second), answered([prompt_of(1, 400)])]


@pytest.fixture(scope="module", params=KINDS)
def rig(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    preloaded_servers: None,
    leak_guard: LeakGuard,
) -> Iterator[HybridRig]:
    kind: Kind = request.param
    folder, flags = tmp_path_factory.mktemp("faults"), (*LIMITS, *kind.flags)
    alone = ServerSpec(model=kind.model, flags=(*flags, "--disable-radix-cache"))
    with ServerProcess(alone) as truth:
        turns = conversations(truth)
    spec = FaultySpec(
        model=kind.model, flags=(*flags, "--kv-pd-caching", "1", "--kv-check", "--enable-metrics")
    )
    disk = ("--kv-disk-path", str(folder / "disk"), "--kv-disk-size", "1GB")
    port = free_port()
    registers = ("--kv-dram-size", DRAM, "--kv-router", f"http://127.0.0.1:{port}")
    base = replace(spec, flags=(*spec.flags, *registers))
    prefill, decode = base.looking_at(folder / "prefill"), spec.looking_at(folder / "decode")
    prefill = replace(prefill, flags=(*prefill.flags, "--kv-instance-id", "prefill", *disk))
    with leak_guard.adopting(), pd_servers([prefill], [decode]) as (servers, _):
        faults = [folder / "prefill"], [folder / "decode"]
        yield HybridRig(servers, servers.decode[0], *faults, None, kind, port, base, *turns)
        # A test may have started it anew.
        servers.prefill[0].server.stop()


def answered(rig: HybridRig, turns: tuple[tuple[list[int], Answer], ...]) -> list[Answer]:
    """The answers of the pair, two prompts at a time; each is the lone server's."""
    with ThreadPoolExecutor(2) as pool:
        asked = lambda prompt: rig.pd.generate(prompt, max_new_tokens=ANSWER_TOKENS)  # noqa: E731
        answers = list(pool.map(asked, [prompt for prompt, _ in turns]))
    for (_, expected), answer in zip(turns, answers, strict=True):
        assert_same(expected, answer)
    return answers


def loaded(server: ServerProcess) -> float:
    """Blocks that have come from DRAM; metrics are a moment old."""
    name = "sglang_ext_cache_dram_blocks"
    samples = server.metrics().items()
    return sum(value for sample, value in samples if sample.startswith(name) and '"loaded"' in sample)


def assert_first_turns_found(kind: Kind, answers: list[Answer]) -> None:
    """Prefill has computed the long first turns no more than it must again."""
    found = [answer.cached_tokens for answer in answers]
    assert all(
        tokens >= length - kind.resumed for tokens, length in list(zip(found, LENGTHS, strict=True))[-2:]
    ), found


def test_conversations_get_the_answers_of_one_server(rig: HybridRig) -> None:
    """First turns, second ones that prefill finds in HBM, and these again, from DRAM or disk."""
    answered(rig, rig.turns)
    found = answered(rig, rig.second)
    assert_first_turns_found(rig.kind, found)
    for seed in range(6):
        rig.pd.generate(prompt_of(1000 + seed, 500), max_new_tokens=1)
    found = answered(rig, rig.second)
    assert_first_turns_found(rig.kind, found)
    rig.pd.wait_idle()
    wait_until(lambda: loaded(rig.pd.prefill[0].server) > 0, seconds=10, what="blocks from DRAM")
    assert nothing_is_left(rig.pd.servers)


def test_an_exact_repeat_is_found_and_handed_over(rig: HybridRig) -> None:
    """With states, prefill is cut near the end of a prompt that it has seen, so that the next one resumes."""
    ((prompt, expected),) = rig.repeated
    answers = [rig.pd.generate(prompt, max_new_tokens=ANSWER_TOKENS) for _ in range(3)]
    for answer in answers:
        assert_same(expected, answer)
    assert answers[-1].cached_tokens >= len(prompt) - 16
    assert nothing_is_left(rig.pd.servers)


def test_one_block_of_zeros_is_seen(rig: HybridRig) -> None:
    """The twin: if this did not fail, the test above would prove nothing."""
    for prompt, expected in rig.turns[-2:]:
        with fault(rig.decode_faults[0], f"zero-{rig.kind.pool}"):
            damaged = rig.pd.generate(prompt, max_new_tokens=ANSWER_TOKENS)
        with pytest.raises(AssertionError):
            assert_same(expected, damaged)


def test_decode_goes_on_after_prefill_was_killed_in_a_hand_over(
    rig: HybridRig, leak_guard: LeakGuard
) -> None:
    prompt, expected = rig.turns[-1]
    prefill = rig.pd.prefill[0]
    with fault(rig.decode_faults[0], "hold-reading") as reading:
        _, answer = rig.pd.start(prompt, max_new_tokens=ANSWER_TOKENS)
        wait_until(reading.exists, seconds=60, what="reading")
        kill(prefill.server)
    ended(answer, expected, 30)  # over shm, all may have been read by then
    assert nothing_is_left(rig.pd.decode)
    with leak_guard.adopting():
        prefill.server.stop()
        prefill.server = ServerProcess(prefill.server.spec)
        prefill.server.start()
    assert_same(expected, rig.pd.generate(prompt, max_new_tokens=ANSWER_TOKENS))


@asynccontextmanager
async def routing(rig: HybridRig, servers: int, **options: Any) -> AsyncIterator[Router]:
    """A router that has so many servers, decode by its URL and the others by their registrations."""
    config = RouterConfig(port=rig.port, worker_urls=(rig.pd.decode[0].url,), **options)
    async with Router(config) as router:
        router.agents.verdict_s = 20.0
        router.fetching.least_wait_s = 60.0  # the machine may be busy
        await until(lambda: len(router.fleet.usable()) == servers, 60, "the servers")
        registered = [url for url in router.fleet.rows if url != rig.pd.decode[0].url]
        await until(lambda: all(map(router.trees.trusted, registered)), 60, "their indexes")
        yield router
        router.check()


def there(router: Router, url: str, prompt: list[int]) -> Match:
    return router.trees.match(NS, encode_tokens(prompt)).get(url, Match(0))


async def test_a_router_sends_pairs_and_knows_what_prefill_has(
    rig: HybridRig, client: aiohttp.ClientSession
) -> None:
    prefill, decode = rig.pd.prefill[0].server, rig.pd.decode[0]
    (first, expected), (second, expected_second) = rig.turns[-1], rig.second[-1]
    before = len(first) - rig.kind.resumed
    async with routing(rig, 2, policy="prompt-tree") as router:
        answer, headers = await generate(client, router.url, first)
        assert headers["x-kv-instance"] == decode.url
        assert headers["x-kv-prefill-instance"] == prefill.url
        assert_same(expected, answer)
        await until(lambda: there(router, prefill.url, first).tokens >= before, 30, "the index to have it")
        answer, _ = await generate(client, router.url, second)
        assert answer.cached_tokens >= before
        assert_same(expected_second, answer)
    assert nothing_is_left(rig.pd.servers)


def in_memory(router: Router, url: str, prompt: list[int]) -> int:
    match = there(router, url, prompt)
    return match.hbm + match.below.get(Tier.DRAM, 0)


def pushed_out(rig: HybridRig, remembered: Callable[[], int]) -> None:
    """Have prefill compute other prompts until it announces nothing of a prompt in memory."""
    for seed in itertools.count(5000):
        if not remembered():
            return
        assert seed < 5200, "it stays in memory"
        rig.pd.generate(prompt_of(seed, 400), max_new_tokens=1)
        time.sleep(0.2)


@pytest.mark.long
async def test_a_hint_brings_a_conversation_that_is_handed_over(
    rig: HybridRig, client: aiohttp.ClientSession
) -> None:
    """Its copy of prefill's index is right. A hint brings a conversation from disk to DRAM, and its next turn
    is handed over from there."""
    prefill, decode = rig.pd.prefill[0].server, rig.pd.decode[0]
    (first, expected), (second, expected_second) = rig.turns[-1], rig.second[-1]
    before = len(first) - rig.kind.resumed
    prefill.flush()  # blocks that other tests have used often stay in DRAM for long
    async with routing(rig, 2, policy="prompt-tree") as router:
        answer, headers = await generate(client, router.url, first, session="s")
        assert headers["x-kv-instance"] == decode.url
        assert headers["x-kv-prefill-instance"] == prefill.url
        assert_same(expected, answer)
        await until(lambda: there(router, prefill.url, first).tokens >= before, 30, "the index to have it")
        await assert_right(router, prefill, 30)

        await asyncio.to_thread(pushed_out, rig, lambda: in_memory(router, prefill.url, first))
        assert there(router, prefill.url, first).below.get(Tier.DISK, 0) >= before, "announced on disk"
        told = await advise(client, router, session="s")
        assert (await settled(client, router, told["id"]))["state"] == "ready"
        await until(
            lambda: there(router, prefill.url, first).below.get(Tier.DRAM, 0) >= before, 30, "it in DRAM"
        )
        loads = loaded(prefill)
        answer, _ = await generate(client, router.url, second, session="s")
        assert answer.cached_tokens >= before
        assert_same(expected_second, answer)
        await asyncio.to_thread(
            wait_until, lambda: loaded(prefill) > loads, seconds=10, what="blocks from DRAM"
        )
        with fault(rig.decode_faults[0], f"zero-{rig.kind.pool}"):
            damaged, _ = await generate(client, router.url, second, session="s")
        with pytest.raises(AssertionError):
            assert_same(expected_second, damaged)
        await assert_right(router, prefill, 30)
    assert nothing_is_left(rig.pd.servers)


@pytest.mark.long
async def test_a_second_prefill_server_fetches_and_hands_over(
    rig: HybridRig, client: aiohttp.ClientSession
) -> None:
    """A second prefill server reads the blocks of the first by name from its DRAM."""
    assert rig.base is not None
    (first, _), (second, expected) = rig.turns[-1], rig.second[-1]
    spec = replace(rig.base, flags=(*rig.base.flags, "--kv-instance-id", "another"))
    with ServerProcess(prefill_spec(spec, free_port())) as another:
        async with routing(rig, 3, policy="round-robin", explain_routing=True) as router:
            await asyncio.to_thread(rig.pd.prefill[0].server.flush)
            _, headers = await generate(client, router.url, first)
            owner = headers["x-kv-prefill-instance"]
            before = len(first) - rig.kind.resumed
            await until(lambda: there(router, owner, first).tokens >= before, 30, "the index to have it")
            answer, headers = await generate(client, router.url, second)
            assert {owner, headers["x-kv-prefill-instance"]} == {another.url, rig.pd.prefill[0].server.url}
            assert headers["x-kv-fetch"] in ("done", "under-way")
            assert headers["x-kv-fetch-source"] == owner
            assert answer.cached_tokens >= before
            assert_same(expected, answer)
        await asyncio.to_thread(rig.pd.wait_idle)
        assert nothing_is_left([another, *rig.pd.servers])

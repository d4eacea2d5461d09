"""Several samples of a prompt (``n`` above 1), prefill and decode apart, behind a router.

The answers are those of one server without a cache, each choice with its own index and end; the prompt's KV
comes once; and when the client goes away, no sample is left running.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
from pd_fleet import COMMON, FaultySpec, Rig, count, fault, nothing_is_left, prompt_of
from router_rig import running, until

from sglang_ext.router import Router, RouterConfig
from tests.support.leaks import LeakGuard
from tests.support.servers.pd_servers import pd_servers
from tests.support.servers.server import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

Json = dict[str, Any]
PAGE = 16
TOKEN_BYTES = 4096
READ_BYTES = "sglang_ext_pd_read_bytes"
ARRIVED = 'sglang_ext_pd_handovers_total{end="held",side="decode"'
ABORTED = "sglang:num_aborted_requests"
KINDS = [
    pytest.param(("3", "pull")),
    pytest.param(("basic", "pull"), marks=pytest.mark.long),
    pytest.param(("1", "push"), marks=pytest.mark.long),
    pytest.param(("2", "push-by-layer"), marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def rig(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    truth: ServerProcess,
    leak_guard: LeakGuard,
) -> Iterator[Rig]:
    caching, mode = request.param
    folder = tmp_path_factory.mktemp("samples")
    folders = [folder / name for name in ("prefill", "decode")]
    flags = ("--kv-pd-caching", caching, "--kv-transfer-mode", mode, "--page-size", str(PAGE))
    specs = [FaultySpec(flags=(*COMMON, *flags)).looking_at(each) for each in folders]
    with leak_guard.adopting(), pd_servers(specs[:1], specs[1:]) as (pd, _):
        yield Rig(pd, truth, folders[:1], folders[1:])


@pytest.fixture
async def router(rig: Rig) -> AsyncIterator[Router]:
    urls = tuple(server.url for server in rig.pd.servers)
    async with Router(RouterConfig(worker_urls=urls, port=0)) as router:
        yield router
        router.check()


TEXT = "A traveller asks the librarian for a map of the town, and then for another one. " * 3
TOKENS = 12
LIMITS: Json = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
SAMPLED = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": TEXT}]
BODIES: dict[str, tuple[str, Json]] = {
    "prompt": ("/generate", {"text": TEXT, "sampling_params": {**SAMPLED, "n": 3}}),
    "prompt with rid": ("/generate", {"text": TEXT, "rid": "a", "sampling_params": {**SAMPLED, "n": 3}}),
    "batch": (
        "/generate",
        {"input_ids": [prompt_of(1, 200), prompt_of(2, 90)], "sampling_params": {**SAMPLED, "n": 2}},
    ),
    "batch with rids": (
        "/generate",
        {"text": [TEXT, "One day"], "rid": ["b", "c"], "sampling_params": {**SAMPLED, "n": 2}},
    ),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "n": 2, **LIMITS}),
    "chat with rid": ("/v1/chat/completions", {"messages": MESSAGES, "n": 3, "rid": "d", **LIMITS}),
    "completions": ("/v1/completions", {"prompt": TEXT, "n": 3, **LIMITS}),
    "completions of a batch": ("/v1/completions", {"prompt": [TEXT, "One day"], "n": 2, **LIMITS}),
}


async def answered(client: aiohttp.ClientSession, url: str, path: str, body: Json, stream: bool) -> Json:
    """By choice: text and reasons of its ends; and the usage."""
    body = {**body, "stream": stream}
    if stream and path != "/generate":
        body["stream_options"] = {"include_usage": True}
    async with client.post(url + path, json=body) as answer:
        data = await answer.read()
        assert answer.status == 200, data
    if not stream:
        values = [json.loads(data)]
    else:
        events = [event.removeprefix(b"data: ") for event in data.split(b"\n\n") if event]
        assert events.pop() == b"[DONE]"
        values = [json.loads(event) for event in events]
    texts: dict[int, str] = {}
    ends: dict[int, list[Any]] = {}
    usage: Any = None
    for value in values:
        if path == "/generate":
            for index, one in enumerate([value] if stream else value):
                index = one.get("index", index)
                texts[index] = one["text"]  # all of it so far
                ends.setdefault(index, []).append(one["meta_info"]["finish_reason"])
                usage = {**(usage or {}), index: one["meta_info"]["completion_tokens"]}
            continue
        for choice in value["choices"]:
            part = choice.get("delta") or choice.get("message") or {}
            texts.setdefault(choice["index"], "")
            texts[choice["index"]] += choice.get("text") or part.get("content") or ""
            ends.setdefault(choice["index"], []).append(choice["finish_reason"])
        if found := value.get("usage"):
            usage = [found[each] for each in ("prompt_tokens", "completion_tokens", "total_tokens")]
    return {
        "texts": texts,
        "ends": {index: [each for each in reasons if each] for index, reasons in ends.items()},
        "usage": usage,
    }


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", BODIES)
async def test_samples_are_those_of_one_server(
    kind: str, stream: bool, rig: Rig, router: Router, client: aiohttp.ClientSession
) -> None:
    path, body = BODIES[kind]
    expected = await answered(client, rig.truth.url, path, body, stream)
    got = await answered(client, router.url, path, body, stream)
    assert got == expected
    samples = body.get("n") or body["sampling_params"]["n"]
    prompts = next(
        (len(each) for each in map(body.get, ("input_ids", "text", "prompt")) if isinstance(each, list)), 1
    )
    assert sorted(got["texts"]) == list(range(samples * prompts))
    assert all(len(reasons) == 1 for reasons in got["ends"].values()), got["ends"]
    await asyncio.to_thread(nothing_is_left, rig.pd.servers)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_one_damaged_bit_is_seen(
    stream: bool, rig: Rig, router: Router, client: aiohttp.ClientSession
) -> None:
    """The twin of the test above."""
    body = {"input_ids": prompt_of(3, 203), "sampling_params": {**SAMPLED, "n": 3}}
    expected = await answered(client, rig.truth.url, "/generate", body, stream)
    with fault(rig.decode_faults[0], "damage"):
        damaged = await answered(client, router.url, "/generate", body, stream)
    assert damaged["usage"] == expected["usage"]
    assert all(damaged["texts"][index] != text for index, text in expected["texts"].items())
    await asyncio.to_thread(rig.pd.wait_idle)
    for server in rig.pd.servers:
        await asyncio.to_thread(server.flush)


@pytest.mark.parametrize("samples", [1, 3])
async def test_the_kv_of_a_prompt_comes_once(
    samples: int, rig: Rig, router: Router, client: aiohttp.ClientSession
) -> None:
    """Where decode keeps KV, each sample brings the tokens after the last whole page. Where decode keeps
    none, each sample brings all of it."""
    decode = rig.pd.decode[0]
    flags = decode.spec.flags
    keeps = flags[flags.index("--kv-pd-caching") + 1] in "23"
    if "pull" not in flags:
        pytest.skip("bytes are counted where they are read")
    prompt = prompt_of(10 + samples, 200)
    pages = -(-len(prompt) // PAGE)
    before = [await asyncio.to_thread(count, decode, name) for name in (ARRIVED, READ_BYTES)]
    body = {"input_ids": prompt, "sampling_params": {**SAMPLED, "n": samples}}
    async with client.post(f"{router.url}/generate", json=body) as answer:
        assert answer.status == 200
    requests = 1 + samples if samples > 1 else 1
    come = pages + (requests - 1) * (1 if keeps else pages)

    def moved() -> list[float]:
        now = [count(decode, name) for name in (ARRIVED, READ_BYTES)]
        return [after - then for after, then in zip(now, before, strict=True)]

    await until(lambda: moved() == [requests, come * PAGE * TOKEN_BYTES], seconds=30)


# -- clients that go away -------------------------------------------------------------------------------

LONG = 1200
"""Tokens of a sample that, at `faulty_pd_server.SLOW_PASS_SECONDS` a token, take longer than a test waits."""
ENDLESS = {"max_new_tokens": LONG, "ignore_eos": True}
STREAMS: dict[str, tuple[str, Json]] = {
    "generate": ("/generate", {"input_ids": prompt_of(20, 300), "sampling_params": {**ENDLESS, "n": 3}}),
    "batch": (
        "/generate",
        {"input_ids": [prompt_of(21, 60), prompt_of(22, 90)], "sampling_params": {**ENDLESS, "n": 2}},
    ),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "n": 3, "max_tokens": LONG, "ignore_eos": True}),
    "completions": ("/v1/completions", {"prompt": TEXT, "n": 3, "max_tokens": LONG, "ignore_eos": True}),
}


@pytest.mark.parametrize("events", [1, 6])
@pytest.mark.parametrize("kind", STREAMS)
async def test_no_sample_runs_on_when_the_client_has_gone(
    kind: str, events: int, rig: Rig, router: Router, client: aiohttp.ClientSession
) -> None:
    path, body = STREAMS[kind]
    with fault(rig.decode_faults[0], "slow"):
        answer = await client.post(router.url + path, json={**body, "stream": True})
        assert answer.status == 200
        for _ in range(events):
            assert await answer.content.readuntil(b"\n\n")
        answer.close()
        await until(lambda: running(rig.pd.servers) == 0, seconds=40)
    await asyncio.to_thread(nothing_is_left, rig.pd.servers, 30)
    assert all(row.in_flight == 0 for row in router.fleet.rows.values())


async def test_an_abort_by_its_name_ends_all_samples(
    rig: Rig, router: Router, client: aiohttp.ClientSession
) -> None:
    body = {**STREAMS["generate"][1], "rid": "several", "stream": True}
    with fault(rig.decode_faults[0], "slow"):
        async with client.post(f"{router.url}/generate", json=body) as answer:
            await answer.content.readuntil(b"\n\n")
            async with client.post(f"{router.url}/abort_request", json={"rid": "several"}) as aborted:
                assert await aborted.json() == {"aborted": 1}
            await until(lambda: running(rig.pd.servers) == 0, seconds=40)
    await asyncio.to_thread(nothing_is_left, rig.pd.servers, 30)


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "twin"])
async def test_samples_end_whose_kv_comes_before_the_client_goes(
    ends: bool, rig: Rig, router: Router, client: aiohttp.ClientSession
) -> None:
    """The client goes when the KV of each sample has arrived, and the scheduler has not noticed it yet. The
    twin goes on with such requests."""
    decode, folder = rig.pd.decode[0], rig.decode_faults[0]
    arrived, aborted = [await asyncio.to_thread(count, decode, name) for name in (ARRIVED, ABORTED)]
    if not ends:
        (folder / "late-abort").touch()
    try:
        with fault(folder, "hold-held"):
            body = {**STREAMS["generate"][1], "stream": True}
            # The router answers when there is a first event.
            answer = asyncio.ensure_future(client.post(f"{router.url}/generate", json=body))
            await until(lambda: count(decode, ARRIVED) == arrived + 4, seconds=60)
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
            await until(lambda: count(decode, ABORTED) == aborted + 3, seconds=60)
            if ends:
                await until(lambda: running(rig.pd.servers) == 0, seconds=60)
        if not ends:
            await until(lambda: generating(decode) == 3, seconds=60)
            await asyncio.to_thread(decode.post, "/abort_request", {"abort_all": True})
            await until(lambda: running(rig.pd.servers) == 0, seconds=60)
    finally:
        (folder / "late-abort").unlink(missing_ok=True)
    await asyncio.to_thread(nothing_is_left, rig.pd.servers, 30)


def generating(server: ServerProcess) -> int:
    """Requests that a server generates tokens for."""
    return sum(load["num_running_reqs"] for load in server.get("/v1/loads?include=core")["loads"])

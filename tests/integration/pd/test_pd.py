"""Prefill and decode apart: the answers are those of one server without a cache, whatever moves between.

One prefill and one decode server, whose hand-overs can be stopped at each step, and a colocated server whose
answers are the truth.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pd_fleet import (
    ANSWER_TOKENS,
    COMMON,
    NO_TOKEN,
    POOL_TOKENS,
    RETURNED,
    WAS_GIVEN_UP,
    FaultySpec,
    Rig,
    ask_both,
    assert_alike,
    assert_failed,
    conversations_are_answered_alike,
    count,
    fault,
    logprobs_of,
    nothing_is_left,
    one_side_is_updated_first,
    prompt_of,
    why_it_failed,
)
from places import Outside, place_of
from token_requests import GREEDY, generate
from tuned_model import tuned

from sglang_ext.disagg.errors import RefusedError
from sglang_ext.disagg.messages import Complete, Completed, Renew, Reserve, Want, Written
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.engine import Endpoint
from sglang_ext.engine.pd.messages import MESSAGES, Abort, Done, Lookup, Push
from sglang_ext.router import Router, RouterConfig
from sglang_ext.stages import STAGES, StageTimes
from sglang_ext.testing.models import RECIPES, model_path
from sglang_ext.testing.transfer.rig import Pool, Shape
from sglang_ext.testing.waiting import wait_until
from sglang_ext.wire import pack_ids
from tests.support.compare import assert_same
from tests.support.leaks import LeakGuard
from tests.support.servers.pd_servers import pd_servers
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


KINDS = [
    pytest.param(("3", 16, "pull", "blocks", "here")),
    pytest.param(("basic", 1, "pull", "blocks", "here"), marks=pytest.mark.long),
    pytest.param(("1", 16, "push", "blocks", "here"), marks=pytest.mark.long),
    pytest.param(("2", 1, "push-by-layer", "blocks", "here"), marks=pytest.mark.long),
    pytest.param(("3", 1, "push-by-layer", "blocks", "here"), marks=pytest.mark.long),
    # Pulled and aggregated, with pages of one token: `test_pd_fleet`.
    pytest.param(("3", 16, "pull", "aggregated", "here"), marks=pytest.mark.long),
    pytest.param(("3", 1, "push", "aggregated", "here"), marks=pytest.mark.long),
]


FAMILIES = ("tiny-moe", "tiny-mla", "tiny-mla-moe", "tiny-gemma3")


def name_of(kind: tuple[str, int, str, str, str]) -> str:
    caching, page, mode, layout, where = kind
    return f"caching-{caching}-page{page}-{mode}-{layout}" + ("" if where == "here" else f"-{where}")


IN_A_LAB = [
    pytest.param(("3", 16, mode, "blocks", "lab"), marks=pytest.mark.long) for mode in ("pull", "push")
]
OF_EACH_FAMILY = [
    pytest.param(("3", 16, "pull", "blocks", name), marks=pytest.mark.long) for name in FAMILIES
]
between_hosts_too = pytest.mark.parametrize("rig", [*KINDS, *IN_A_LAB], ids=name_of, indirect=True)
everywhere = pytest.mark.parametrize("rig", [*KINDS, *IN_A_LAB, *OF_EACH_FAMILY], ids=name_of, indirect=True)


@pytest.fixture(scope="module", params=KINDS, ids=name_of)
def rig(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    truth: ServerProcess,
    leak_guard: LeakGuard,
) -> Iterator[Rig]:
    caching, page, mode, layout, where = request.param
    model, where = (where, "here") if where in FAMILIES else ("tiny", where)
    if model != "tiny":
        truth = request.getfixturevalue("get_server")(replace(truth.spec, model=model))
    with place_of(where, ("prefill", "decode"), tmp_path_factory.mktemp("place"), leak_guard) as place:
        spec = FaultySpec(
            model=model,
            flags=(
                *(*COMMON, "--kv-pd-caching", caching, "--page-size", str(page)),
                *("--kv-transfer-mode", mode, "--kv-transfer-layout", layout, *place.flags),
            ),
        )

        def looking(name: str) -> ServerSpec:
            found = spec.looking_at(place.folder / name)
            if place.lab is None:
                return found
            return replace(found, flags=(*found.flags, "--kv-announce-host", place.lab[name].address()))

        hosts = iter(("prefill", "decode"))
        with (
            leak_guard.adopting(),
            pd_servers(
                [looking("prefill")], [looking("decode")], (), lambda each: place.server(each, next(hosts))
            ) as (servers, _),
        ):
            alone = truth if place.lab is None else Outside(truth, place)
            yield Rig(servers, alone, [place.folder / "prefill"], [place.folder / "decode"])


@everywhere
def test_conversations_get_the_answers_of_one_server(rig: Rig, long_run: bool) -> None:
    many = long_run and rig.pd.decode[0].spec.model == "tiny"
    conversations_are_answered_alike(rig.pd, rig.truth, count=50 if many else 5)


@everywhere
def test_one_damaged_bit_is_seen(rig: Rig) -> None:
    """The twin: if this did not fail, the test above would prove nothing."""
    prompt = prompt_of(5, 203)
    with fault(rig.decode_faults[0], "damage"):
        damaged = rig.pd.generate(prompt, max_new_tokens=ANSWER_TOKENS)
    with pytest.raises(AssertionError):
        assert_same(rig.expected(prompt), damaged)
    decode = rig.pd.decode[0]
    calls = decode.pool_calls()
    decode.flush()
    if design_of(rig) in "23":
        decode.wait_for_pool_calls(calls, "delete")


def test_prefill_computes_while_decode_holds_nothing(rig: Rig) -> None:
    """Pull: a decode server that has no room for a request does not keep prefill from computing it."""
    if not pulls(rig):
        pytest.skip("pushing, decode allocates first")
    with (
        fault(rig.decode_faults[0], "hold-ready") as at,
        fault(rig.prefill_faults[0], "hold-computed") as computed,
    ):
        prompt = prompt_of(6, 300)
        _, answer = rig.pd.start(prompt, max_new_tokens=ANSWER_TOKENS)
        wait_until(lambda: at.exists() and computed.exists(), seconds=30, what="prefill done, decode waiting")
        assert not answer.done()
    assert_same(rig.expected(prompt), answer.result(30))


def took(rig: Rig, prompt: list[int], held: str = "", *, tokens: int = 2) -> tuple[StageTimes, float]:
    """The stages of a request that is held at a step of decode's for a second after prefill has computed it,
    and how long its client waited."""
    rig.pd.wait_idle()
    since = time.monotonic()
    with (
        fault(rig.decode_faults[0], f"hold-{held}") if held else nullcontext() as at,
        fault(rig.prefill_faults[0], "hold-computed") as computed,
    ):
        _, answer = rig.pd.start(prompt, max_new_tokens=tokens)
        if at is not None:
            wait_until(lambda: at.exists() and computed.exists(), seconds=30, what=held)
            until = time.monotonic() + HELD
            wait_until(lambda: time.monotonic() > until, seconds=10, what="a second")
    stages = answer.result(60).stages
    assert stages is not None
    return stages, time.monotonic() - since


HELD = 1.0


def test_the_stages_of_a_request_add_up_over_both_servers(rig: Rig) -> None:
    stages, seconds = took(rig, prompt_of(90, 600), tokens=100)
    assert 0.9 * seconds <= stages.total <= seconds, stages
    assert (
        min(stages.prefill_queue, stages.prefill, stages.transfer, stages.decode_queue, stages.decode) > 0.0
    )
    counted = {
        (stage, role): sum(
            value
            for name, value in server.metrics().items()
            if name.startswith("sglang_ext_request_stage_seconds_count")
            and f'"{stage}"' in name
            and f'"{role}"' in name
        )
        for server, role in zip(rig.pd.servers, ("prefill", "decode"), strict=True)
        for stage in STAGES
    }
    assert all(
        (counted[stage, "prefill"] > 0, counted[stage, "decode"] > 0) == where
        for stage, where in {
            "prefill_queue": (True, False),
            "prefill": (True, False),
            "transfer": (True, True),
            "decode_queue": (False, True),
            "decode": (False, True),
        }.items()
    ), counted


@pytest.mark.parametrize(("step", "stage"), [("ready", "decode_queue"), ("reading", "transfer")])
def test_a_delay_shows_in_its_stage_only(rig: Rig, step: str, stage: str) -> None:
    if not pulls(rig):
        pytest.skip("these are steps of reading")
    stages, seconds = took(rig, prompt_of(92, 300), step)
    assert dict(stages.items())[stage] > 0.9 * HELD, stages
    # So no other has counted that second too.
    assert stages.total <= seconds


STEPS = {
    "pull": ("joining", "waiting", "ready", "reading"),
    "push": ("joining", "ready", "granted", "writing"),
}


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_at_any_step_frees_both_sides(rig: Rig, number: int, side: str) -> None:
    step = STEPS["pull" if pulls(rig) else "push"][number]
    folders = rig.prefill_faults if step == "writing" else rig.decode_faults
    server = rig.pd.prefill[0].server if side == "prefill" else rig.pd.decode[0]
    rid = f"abort-{step}-{side}"
    with fault(folders[0], f"hold-{step}") as at:
        both = rig.pd.start(prompt_of(hash_of(rid), 150), max_new_tokens=4, rid=rid)
        wait_until(at.exists, seconds=30, what=step)
        server.post("/abort_request", {"rid": rid})
        if step == "joining" and not pulls(rig):
            # Decode has not met prefill yet; a router aborts on both.
            rig.pd.prefill[0].server.post("/abort_request", {"rid": rid})
        # Held up at the end of its read, decode has all: that message may reach prefill before the abort.
        over = (side, step) == ("decode", "reading")
        if side == "prefill" or step != "joining":
            # Without waiting for the step that is held up.
            why = why_it_failed(both[0])
            assert why is not None or over
    assert_failed(both[1], f"the request was aborted on {side}", WAS_GIVEN_UP)
    why = why_it_failed(both[0])
    if why is None:
        assert over
        assert both[0].result().tokens == rig.expected(prompt_of(hash_of(rid), 150)).tokens[:1]
    elif side == "prefill":
        assert why in (NO_TOKEN, "the request was aborted on prefill")
    elif (side, step) == ("decode", "joining"):
        # Decode had not joined yet. It never will, or the abort reaches it just after it has joined.
        assert why.startswith(
            (
                "no decode server has asked for this request",
                "decode gave the request up: the request was aborted on decode",
                # Where prefill pushes, it was aborted on prefill too.
                *(() if pulls(rig) else ("the request was aborted on prefill",)),
            )
        )
    else:
        assert "decode gave the request up: the request was aborted on decode" in why
    rig.pd.wait_idle()
    assert nothing_is_left(rig.pd.servers)
    prompt = prompt_of(hash_of(rid) + 1, 100)
    assert_same(rig.expected(prompt), rig.pd.generate(prompt, max_new_tokens=ANSWER_TOKENS))


def test_a_handover_that_the_other_side_does_not_know_is_given_up(rig: Rig) -> None:
    """Prefill gets a request, decode does not; then decode gets one, prefill does not."""
    for server in rig.pd.servers:
        lonely = rig.pd.pool.submit(
            server.generate, prompt_of(8, 60), max_new_tokens=2, rid=f"lonely-{server.port}", **rig.pd.pair()
        )
        assert_failed(lonely, "no decode server has asked for", "is unknown here", seconds=40)
    rig.pd.wait_idle()
    assert nothing_is_left(rig.pd.servers)


def test_two_requests_cannot_have_one_handover(rig: Rig) -> None:
    if not pulls(rig):
        pytest.skip("pushing, the second would wait for slots before it asks for the hand-over")
    number = rig.pd.pair()["bootstrap_room"]
    with fault(rig.decode_faults[0], "hold-ready") as at:
        prompt = prompt_of(9, 80)
        first = rig.pd.start(prompt, max_new_tokens=ANSWER_TOKENS, bootstrap_room=number)
        wait_until(at.exists, seconds=30, what="the first request")
        second = rig.pd.start(prompt_of(10, 80), max_new_tokens=2, bootstrap_room=number)
        assert_failed(second[0], "is in use by another request")
        assert_failed(second[1], "another decode server takes part in this hand-over")
    assert_same(rig.expected(prompt), first[1].result(30))


def hash_of(text: str) -> int:
    return sum(text.encode())


@pytest.mark.parametrize("tokens", [64, 65, 79])
def test_a_prompt_that_decode_has_already(rig: Rig, tokens: int) -> None:
    """All of it, when it is whole pages: then nothing is sent but the first token."""
    prompt = prompt_of(50 + tokens, tokens)
    expected = rig.expected(prompt)
    for _ in range(3):
        assert_same(expected, rig.pd.generate(prompt, max_new_tokens=ANSWER_TOKENS))
    rig.pd.wait_idle()
    assert nothing_is_left(rig.pd.servers)


@everywhere
def test_the_next_turn_finds_what_its_design_keeps(rig: Rig) -> None:
    """MemServe, table 4: 1 keeps prompts on prefill; 2 sends decode the missing blocks; 3 returns answers."""
    caching = design_of(rig)
    decode = rig.pd.decode[0]
    prompt = prompt_of(40, 100)
    earlier = [count(server, RETURNED) for server in rig.pd.servers]
    calls = [server.pool_calls() for server in rig.pd.servers]
    first = rig.pd.generate(prompt, max_new_tokens=60)
    if caching == "3":
        wait_until(lambda: all(returned(rig, earlier)), seconds=10, what="the return")
    rig.pd.wait_idle()
    before = count(decode, "sglang_ext_pd_read_bytes")
    history = prompt + first.tokens + prompt_of(41, 40)
    both = rig.pd.start(history, max_new_tokens=ANSWER_TOKENS)
    assert_same(rig.expected(history), both[1].result())
    prefill_calls, decode_calls = calls
    if caching in "23":  # received, and put into its index
        decode.wait_for_pool_calls(decode_calls, "match", "transfer", "transfer_with_insert", "insert")
    if caching == "3":  # set aside for the return, and put into its index
        rig.pd.servers[0].wait_for_pool_calls(prefill_calls, "match", "alloc_mem", "transfer_with_insert")
        decode.wait_for_pool_calls(decode_calls, "transfer_with_insert@peer")
    if not pulls(rig):  # decode's pages are granted to prefill
        rig.pd.servers[0].wait_for_pool_calls(prefill_calls, "alloc_mem@peer", "transfer@peer")
    found = both[0].result().cached_tokens
    kept = {"basic": range(1), "1": range(96, 101), "2": range(96, 101), "3": range(144, 161)}[caching]
    assert found in kept
    token_bytes = 4 * RECIPES[decode.spec.model].kv_elements_per_token
    if not pulls(rig):
        return  # bytes are counted where they are read
    sent = wait_until(
        lambda: count(decode, "sglang_ext_pd_read_bytes") - before, seconds=30, what="bytes to be counted"
    )
    # A page more or less: whether the last generated token's KV was computed is the scheduler's affair.
    least = len(history) - (160 if caching in "23" else 0)
    most = len(history) - (144 if caching in "23" else 0) + 16
    assert least * token_bytes <= sent <= most * token_bytes


@between_hosts_too
@pytest.mark.parametrize(("tokens", "outcome"), [(1600, "budget"), (100, "known")], ids=["no room", "known"])
def test_what_cannot_be_inserted_is_not_returned(rig: Rig, tokens: int, outcome: str) -> None:
    """MemServe, table 1: there is no memory for it, or the destination has it already, all whole blocks being
    the prompt's. The answers are the same, and nothing stays set aside."""
    if design_of(rig) != "3":
        pytest.skip("nothing is returned")
    decode, prompt = rig.pd.decode[0], prompt_of(400 + tokens, tokens)
    expected = rig.expected(prompt)
    rig.pd.wait_idle()
    assert nothing_is_left(rig.pd.servers)
    before, back = skipped(decode, outcome), count(decode, RETURNED)
    assert_same(expected, rig.pd.generate(prompt, max_new_tokens=ANSWER_TOKENS))
    wait_until(lambda: skipped(decode, outcome) > before, seconds=15, what=f"a return that is {outcome}")
    assert nothing_is_left(rig.pd.servers)
    assert (skipped(decode, outcome), count(decode, RETURNED)) == (before + 1, back)


RETURNS = "sglang_ext_pd_returns_total"
HELD_NOW = 'sglang_ext_pd_handovers_total{end="held",side="decode"'


def skipped(server: ServerProcess, outcome: str) -> float:
    """Returns that have ended like that."""
    return sum(
        value
        for name, value in server.metrics().items()
        if name.startswith(RETURNS) and f'outcome="{outcome}"' in name
    )


@between_hosts_too
def test_what_two_requests_bring_at_once_is_kept_once(rig: Rig) -> None:
    """MemServe, table 1: an insert of blocks that are cached already. The other's memory is free again."""
    decode, prompt = rig.pd.decode[0], prompt_of(81, 320)
    expected = rig.expected(prompt)
    rig.pd.wait_idle()
    for server in rig.pd.servers:
        server.flush()
    calls, came = decode.pool_calls(), count(decode, HELD_NOW)
    with fault(rig.decode_faults[0], "hold-held"):  # both have been matched before either is inserted
        both = [rig.pd.start(prompt, max_new_tokens=ANSWER_TOKENS)[1] for _ in range(2)]
        wait_until(lambda: count(decode, HELD_NOW) == came + 2, seconds=30, what="the KV of both")
    for answer in both:
        assert_same(expected, answer.result(60))
    rig.pd.wait_idle()
    assert nothing_is_left(rig.pd.servers)
    if design_of(rig) not in "23":
        return
    decode.wait_for_pool_calls(calls, "transfer", "transfer_with_insert", "transfer_with_insert")
    whole = (len(prompt) + ANSWER_TOKENS) // 16
    cached = 'sglang_ext_cache_blocks{tier="hbm"'
    wait_until(
        lambda: whole - 1 <= count(decode, cached) <= whole,
        seconds=30,
        what=f"{whole} blocks, not twice as many",
    )


async def test_what_is_unknown_is_refused_by_name(rig: Rig) -> None:
    """MemServe, table 1: requests, leases and blocks that are unknown to the instance; it serves on."""
    prefill = f"127.0.0.1:{rig.pd.prefill[0].bootstrap_port}"
    memory = Pool("a stranger's", Shape(), shared=False)
    try:
        async with stranger(memory, "another model") as (me, ranks):
            with pytest.raises(RefusedError, match=r"^namespace: .*other model") as refused:
                await me.connect(await ranks(prefill))
        _, theirs = re.findall(r"'([^']*)' (?:there|here)", str(refused.value))
        async with stranger(memory, theirs) as (me, ranks):
            (link,) = (await me.connect(await ranks(prefill))).links
            asked: list[tuple[Any, str]] = [
                (Want(link.session, "nobody's", "hbm"), "nothing is published"),
                (Reserve(link.session, "nobody's", "hbm", pack_ids([1, 2])), NOT_GRANTED),
                (Written(link.session, "nobody's", 7), NOT_GRANTED),
                (Done(1 << 40, me.epoch), "is unknown here"),
                (Push(1 << 40, me.epoch, me.address, b"", 0), "is unknown here"),
                (Abort(1 << 40, me.epoch, "none"), "is unknown here"),
            ]
            for message, why in asked:
                with pytest.raises(RefusedError, match=why):
                    await link.ask(message, 10)
            for lease in (Complete(link.session, "nobody's", 99), Renew(link.session, 99, 1000)):
                assert await link.ask(lease, 10) == Completed(False)
    finally:
        memory.close()
    prompt = prompt_of(82, 100)
    answer = await asyncio.to_thread(rig.pd.generate, prompt, max_new_tokens=ANSWER_TOKENS)
    assert_same(await asyncio.to_thread(rig.expected, prompt), answer)
    assert await asyncio.to_thread(nothing_is_left, rig.pd.servers)


NOT_GRANTED = "accepts no transfers|no such pages were set aside|the grant is over"
"""The first where servers pull."""


@asynccontextmanager
async def stranger(
    memory: Pool, namespace: str
) -> AsyncIterator[tuple[Endpoint, Callable[[str], Awaitable[list[str]]]]]:
    """An endpoint that speaks as servers do, and a function that looks up a prefill server's ranks."""
    me = await Endpoint.start(EndpointConfig("stranger", namespace), [memory.spec], messages=MESSAGES)

    async def ranks(bootstrap: str) -> list[str]:
        client = me.client(bootstrap)
        try:
            found = await client.ask(Lookup(), 10)
        finally:
            await client.close()
        return [rank.endpoint for rank in found.ranks]

    try:
        yield me, ranks
    finally:
        await me.close()


def returned(rig: Rig, earlier: list[float]) -> list[bool]:
    """Whether each server has counted another return."""
    return [count(server, RETURNED) > before for server, before in zip(rig.pd.servers, earlier, strict=True)]


def design_of(rig: Rig) -> str:
    flags = rig.pd.decode[0].spec.flags
    return flags[flags.index("--kv-pd-caching") + 1]


def pulls(rig: Rig) -> bool:
    flags = rig.pd.decode[0].spec.flags
    return flags[flags.index("--kv-transfer-mode") + 1] == "pull"


def test_weights_updated_on_one_side_end_requests_until_the_other_has_them_too(
    rig: Rig, tmp_path: Path
) -> None:
    one_side_is_updated_first(rig.pd, rig.truth, tmp_path)


async def test_a_decode_server_that_starts_with_another_fine_tune_is_refused(
    rig: Rig, client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """By both servers, by name, and a router's client gets the reason; the other pair serves on."""
    first, prompt = rig.pd.decode[0], prompt_of(71, 150)
    # By a name of its own the router would not take it.
    named = ("--served-model-name", str(model_path("tiny")))
    flags = (*first.spec.flags, *named, "--model-path", str(tuned(model_path("tiny"), tmp_path / "tuned")))
    with ServerProcess(replace(first.spec, flags=flags)) as other:
        rig.pd.decode.append(other)
        try:
            for answer in rig.pd.start(prompt, max_new_tokens=ANSWER_TOKENS, decode=1):
                assert_failed(answer, "the weights differ")
        finally:
            rig.pd.decode.pop()
        prefill = rig.pd.prefill[0].server
        async with Router(RouterConfig(worker_urls=(prefill.url, other.url), port=0)) as router:
            body = {"input_ids": prompt, "sampling_params": GREEDY}
            async with client.post(f"{router.url}/generate", json=body) as refused:
                text = await refused.text()
                assert (refused.status, "the weights differ" in text) == (500, True), text
        async with Router(RouterConfig(worker_urls=(prefill.url, first.url), port=0)) as router:
            answered, _ = await generate(client, router.url, prompt)
    assert_same(rig.expected(prompt), answered)
    nothing_is_left(rig.pd.servers)


@between_hosts_too
@pytest.mark.parametrize("room", [pytest.param(400, marks=pytest.mark.long), 40])
def test_a_prompt_that_all_but_fills_the_pool_is_answered(rig: Rig, room: int) -> None:
    """SGLang's decode keeps room for 512 tokens of any answer, and such a prompt waited for ever."""
    prompt = prompt_of(420, POOL_TOKENS - room)
    assert_same(rig.expected(prompt, 4), rig.pd.start(prompt, max_new_tokens=4)[1].result(120))
    nothing_is_left(rig.pd.servers)


@between_hosts_too
def test_a_prompt_that_no_pool_holds_is_refused_with_its_length(rig: Rig) -> None:
    for each in rig.pd.start(prompt_of(421, POOL_TOKENS + 10), max_new_tokens=4):
        with pytest.raises(AssertionError, match=rf": 400: .*{POOL_TOKENS + 10} tokens.*maximum allowed"):
            each.result(120)
    nothing_is_left(rig.pd.servers)


@between_hosts_too
@pytest.mark.parametrize("prompts", [1, 2])
def test_samples_of_a_prompt_are_those_of_one_server(rig: Rig, prompts: int) -> None:
    """``n`` samples of each prompt: greedy, so all are equal."""
    ids = [prompt_of(400 + number, 200) for number in range(prompts)]
    body = {
        "input_ids": ids[0] if prompts == 1 else ids,
        "sampling_params": {"n": 3, "temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True},
    }
    pair = rig.pd.pair()
    servers = (rig.pd.prefill[0].server, rig.pd.decode[0])
    sent = [rig.pd.pool.submit(server.post, "/generate", {**body, **pair}) for server in servers]
    expected = rig.truth.post("/generate", body)
    answers = [each.result(120) for each in sent]
    assert [each["output_ids"] for each in answers[1]] == [each["output_ids"] for each in expected]
    nothing_is_left(servers)


GRAMMARS = {
    "regular expression": {"regex": "(cat|dog|[0-9]{4,8})( and [a-z]{3,5}){2}"},
    "JSON schema": {
        "json_schema": json.dumps(
            {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        )
    },
}


@between_hosts_too
@pytest.mark.parametrize("kind", GRAMMARS)
def test_an_answer_by_a_grammar_is_that_of_one_server(rig: Rig, kind: str) -> None:
    """Prefill takes the first token by the grammar, and decode goes on behind it."""
    prompt, body = prompt_of(430, 200), {"temperature": 0, "max_new_tokens": 24, **GRAMMARS[kind]}
    got = rig.pd.generate(prompt, max_new_tokens=24, sampling_params=body)
    assert_same(rig.truth.generate(prompt, max_new_tokens=24, sampling_params=body), got)
    # The twin: the same prompt without the grammar.
    with pytest.raises(AssertionError):
        assert_same(rig.expected(prompt, len(got.tokens)), got)
    nothing_is_left(rig.pd.servers)


LOGPROBS = [
    {"logprob_start_len": 0},
    {"logprob_start_len": 300, "top_logprobs_num": 3},
    {"logprob_start_len": 0, "token_ids_logprob": [200, 30_000]},
    {"logprob_start_len": 799, "top_logprobs_num": 2, "token_ids_logprob": [7]},
    {"token_ids_logprob": [200, 30_000]},
]


@between_hosts_too
@pytest.mark.parametrize(
    "stream", [pytest.param(False, marks=pytest.mark.long), True], ids=["whole", "stream"]
)
def test_log_probabilities_of_the_prompt_are_those_of_one_server(rig: Rig, stream: bool) -> None:
    """Cold, and with the KV that the request before has left in the caches."""
    for asked in LOGPROBS:
        body = {
            "input_ids": prompt_of(430 + 10 * stream, 800),
            "sampling_params": {**GREEDY, "max_new_tokens": 4},
            "extra_key": f"{stream}",
            "return_logprob": True,
            **asked,
        }
        expected = logprobs_of(rig.truth.post("/generate", body))
        _, answer = ask_both(rig.pd, {**body, "stream": stream})
        assert_alike(expected, logprobs_of(answer))
        if asked == LOGPROBS[0]:
            # The twin: one bit of the transferred values.
            with fault(rig.decode_faults[0], "damage-logprobs"):
                _, damaged = ask_both(rig.pd, {**body, "stream": stream})
            with pytest.raises(AssertionError):
                assert_alike(expected, logprobs_of(damaged))
    nothing_is_left(rig.pd.servers)


MANY = 600
"""Ids for which log probabilities are asked: with 128 others, those of 1,500 positions take 8.7 MB."""
MOST_TOP = 128
"""Log probabilities of the first token for which a metadata row of SGLang's has room."""


def test_log_probabilities_that_no_message_holds_are_refused_by_their_fields(rig: Rig) -> None:
    prompt = prompt_of(440, 1500)
    asked = {"top_logprobs_num": MOST_TOP, "token_ids_logprob": list(range(1000, 1000 + MANY))}
    for answer in rig.pd.start(prompt, max_new_tokens=4, logprob_start_len=0, **asked):
        with pytest.raises(AssertionError, match=r": 400: .*take \d+ bytes.*raise logprob_start_len, lower"):
            answer.result(120)
    rig.pd.wait_idle()
    assert nothing_is_left(rig.pd.servers, 30)
    # As the error advises.
    body = {
        "input_ids": prompt,
        "sampling_params": {**GREEDY, "max_new_tokens": 4},
        "return_logprob": True,
        "logprob_start_len": 1450,
        **asked,
    }
    expected = logprobs_of(rig.truth.post("/generate", body))
    answered = logprobs_of(ask_both(rig.pd, body)[1])
    for kind in ("input_token_logprobs", "input_token_ids_logprobs", "output_token_ids_logprobs"):
        assert_alike(expected[kind], answered[kind])
    # Among so many, rounding decides about places.
    lengths = [len(row or ()) for row in answered["input_top_logprobs"]]
    assert lengths == [len(row or ()) for row in expected["input_top_logprobs"]]
    assert set(lengths) == {0, MOST_TOP}


def test_more_top_log_probabilities_than_a_metadata_row_takes_are_refused(rig: Rig) -> None:
    """SGLang's prefill server ended at such a request."""
    prompt = prompt_of(441, 60)
    for answer in rig.pd.start(prompt, max_new_tokens=4, top_logprobs_num=MOST_TOP + 1):
        with pytest.raises(AssertionError, match=f": 400: .*top_logprobs_num must be from 0 to {MOST_TOP} "):
            answer.result(60)
    rig.pd.wait_idle()
    assert nothing_is_left(rig.pd.servers, 30)
    assert_same(rig.expected(prompt), rig.pd.generate(prompt, max_new_tokens=ANSWER_TOKENS))

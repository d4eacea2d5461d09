"""Prefill and decode servers with disks: blocks on disk stream into a forward pass, or are waited for."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from dram_damage import arena_files, last_change, make_huge, snapshot
from hooked_server import FOLDER
from pd_fleet import ask_both, assert_alike, count, logprobs_of, nothing_is_left, prompt_of

from sglang_ext.testing.waiting import wait_until
from tests.support.compare import Answer, assert_same
from tests.support.servers.pd_servers import PdServers, pd_servers
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

BLOCK = 16
BLOCKS = 20
TOKENS = 50
"""More than were on their way to a client when a scheduler stopped."""
QUIET_S = 10.0
"""Without a token, after which an answer has stopped: a busy machine has paused one for 1.5 s."""
AGAIN = "run again"


class Disks:
    """One prefill and one decode server, and the folders in which they look for faults."""

    def __init__(self, pd: PdServers, faults: dict[str, Path]) -> None:
        self.pd = pd
        self.faults = faults
        self.prefill, self.decode = pd.prefill[0].server, pd.decode[0]

    def ask(self, prompt: list[int], tokens: int = 8, **fields: str) -> Answer:
        return self.pd.generate(prompt, max_new_tokens=tokens, **fields)

    def cold(self, prompt: list[int]) -> Answer:
        return self.ask(prompt, cache_salt="cold")

    def to_disk_only(self, prompt: list[int], seed: int) -> None:
        """Let a prompt be on the disks and in no memory."""
        answer = self.ask(prompt, 1)
        assert answer.durability in ("durable", "refused")
        self.pushed_out(5, seed)  # more than HBM and DRAM hold

    def pushed_out(self, prompts: int, seed: int) -> None:
        """Let other prompts push out the cached ones, at the speed of the disk."""
        rng = random.Random(seed)
        for _ in range(prompts):
            self.ask([rng.randrange(100, 30_000) for _ in range(1000)], 1)
            for server in (self.prefill, self.decode):
                wait_until(
                    lambda server=server: count(server, "sglang_ext_cache_disk_backlog_bytes") == 0,
                    seconds=20,
                    what="everything written",
                )


@pytest.fixture(scope="module")
def disks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disks]:
    faults = {role: tmp_path_factory.mktemp(f"{role}-faults") for role in ("prefill", "decode")}

    def spec(role: str, *more: str) -> ServerSpec:
        return ServerSpec(
            run=(str(Path(__file__).parents[1].joinpath("servers", "faulty_disk_server.py")),),
            flags=(
                *("--kv-check", "--kv-load-policy", "always", "--kv-dram-size", "16MB"),
                *("--kv-disk-path", str(tmp_path_factory.mktemp(f"{role}-kv")), "--kv-disk-size", "1GB"),
                *("--max-total-tokens", "2400", "--chunked-prefill-size", "256", "--enable-metrics", *more),
            ),
            environment={FOLDER: str(faults[role]), **STRICT},
        )

    with pd_servers([spec("prefill")], [spec("decode", "--kv-durability", "acked")]) as (pd, _):
        yield Disks(pd, faults)


@contextmanager
def fault(folder: Path, name: str, text: str = "") -> Iterator[None]:
    (folder / name).write_text(text)
    try:
        yield
    finally:
        (folder / name).unlink()


def restarts(server: ServerProcess) -> int:
    return server.log.read_text(errors="replace").count(AGAIN)


def events_of(server: ServerProcess, event: str) -> float:
    samples = server.metrics().items()
    name = "sglang_ext_cache_disk_blocks_total{"
    return sum(value for sample, value in samples if sample.startswith(name) and f'"{event}"' in sample)


def test_prefill_streams_its_disk_into_the_forward_pass(disks: Disks) -> None:
    """And decode, which sends the end, sends it when its own disk has the answer."""
    prompt = prompt_of(81, BLOCKS * BLOCK + 4)
    with fault(disks.faults["decode"], "full"):
        disks.to_disk_only(prompt, 1)
    streamed, before = events_of(disks.prefill, "streamed"), restarts(disks.prefill)
    answer = disks.ask([*prompt, 7, 8, 9])
    assert answer.durability == "durable"
    wait_until(
        lambda: events_of(disks.prefill, "streamed") >= streamed + BLOCKS, seconds=10, what="streamed blocks"
    )
    assert restarts(disks.prefill) == before
    assert_same(disks.cold([*prompt, 7, 8, 9]), answer)
    nothing_is_left(disks.pd.servers)


def test_a_damaged_layer_at_prefill_restarts_the_batch(disks: Disks) -> None:
    """A batch of several chunks and requests, whose KV decode does not have. The twin does not look."""
    prompt = prompt_of(82, BLOCKS * BLOCK + 4)
    with fault(disks.faults["decode"], "full"):
        disks.to_disk_only(prompt, 2)
    longer, other = [*prompt, *prompt[:300]], list(reversed(prompt))
    before = restarts(disks.prefill)
    with fault(disks.faults["prefill"], "damage"):
        sent = [disks.pd.start(each, max_new_tokens=8) for each in (longer, other)]
        answers = [pair[1].result() for pair in sent]
        for pair in sent:
            pair[0].result()
    assert restarts(disks.prefill) > before
    for each, answer in zip((longer, other), answers, strict=True):
        assert_same(disks.cold(each), answer)
    nothing_is_left(disks.pd.servers)
    with fault(disks.faults["decode"], "full"):
        disks.to_disk_only(prompt, 3)
    with fault(disks.faults["prefill"], "damage"), fault(disks.faults["prefill"], "blind"):
        damaged = disks.ask([*prompt, 7, 8, 9])
    with pytest.raises(AssertionError):
        assert_same(disks.cold([*prompt, 7, 8, 9]), damaged)
    disks.pd.wait_idle()


KNOWN = BLOCKS * BLOCK


def with_logprobs(prompt: list[int]) -> dict[str, Any]:
    """A request for log probabilities of the tokens after a known prefix of a prompt."""
    return {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": KNOWN,
        "top_logprobs_num": 3,
        "token_ids_logprob": [200, 30_000],
    }


def from_below(
    disks: Disks, known: list[int], body: dict[str, Any], tier: str, *, damaged: bool
) -> dict[str, Any]:
    """Log probabilities for a body whose known prefix prefill has in DRAM or on disk only."""
    for server in (disks.prefill, disks.decode):
        server.flush()
    (arena,) = arena_files(disks.prefill.pid)

    def written(prompt: list[int]) -> int:
        before = snapshot(arena)
        disks.ask(prompt, 1)
        return wait_until(lambda: last_change(arena, before), seconds=30, what="a copy in DRAM")

    if damaged:  # Another prompt takes the blocks that have the bytes of `known` since the call before.
        written(prompt_of(88, KNOWN))
    last = written(known)
    disks.pushed_out(3 if tier == "dram" else 5, 6)
    with ExitStack() as faults:
        if damaged and tier == "dram":
            make_huge(arena, last)
        elif damaged:
            for name in ("damage", "blind"):
                faults.enter_context(fault(disks.faults["prefill"], name))
        prefilled, answered = ask_both(disks.pd, body)
    found = prefilled["meta_info"]["cached_tokens_details"]
    assert found["host" if tier == "dram" else "storage"] == KNOWN, found
    return logprobs_of(answered)


@pytest.mark.parametrize("tier", ["dram", "disk"])
def test_log_probabilities_of_a_prompt_whose_prefix_comes_from_below(
    tier: str, disks: Disks, truth: ServerProcess
) -> None:
    """Prefill computes the requested positions and loads earlier KV. The twin: one damaged bit of that KV."""
    known = prompt_of(84 + (tier == "disk"), KNOWN + 4)
    body = with_logprobs([*known[:KNOWN], *prompt_of(86, 300)])
    expected = logprobs_of(truth.post("/generate", body))
    assert_alike(expected, from_below(disks, known, body, tier, damaged=False))
    # From its beginning on: cached tokens are computed again.
    of_all = body | {"logprob_start_len": 0}
    whole = logprobs_of(truth.post("/generate", of_all))
    assert_alike(whole, logprobs_of(ask_both(disks.pd, of_all)[1]))
    damaged = from_below(disks, known, body, tier, damaged=True)
    with pytest.raises(AssertionError):
        assert_alike(expected, damaged)
    disks.pd.wait_idle()
    for server in (disks.prefill, disks.decode):
        server.flush()
    nothing_is_left(disks.pd.servers)


def goes_on(disks: Disks, prompt: list[int]) -> bool:
    """Whether another request gets tokens while a prompt's copy from decode's DRAM to HBM does not end."""
    faults, arrived = disks.faults["decode"], 0
    (faults / "copying").unlink(missing_ok=True)
    body = {
        "input_ids": prompt_of(len(prompt), 40),
        "sampling_params": {"temperature": 0, "max_new_tokens": 1200, "ignore_eos": True},
        "stream": True,
        **disks.pd.pair(),
    }
    ended = threading.Event()

    def read() -> None:
        nonlocal arrived
        url = f"{disks.decode.url}/generate"
        with httpx.stream("POST", url, json=body, trust_env=False, timeout=60) as response:
            for line in response.iter_lines():
                arrived += line.startswith("data: {")
                if ended.is_set():
                    break

    first = disks.pd.pool.submit(disks.prefill.post, "/generate", {**body, "stream": False})
    reading = disks.pd.pool.submit(read)
    wait_until(lambda: arrived >= 20, seconds=60, what="an answer that has begun")
    with fault(faults, "hold-copies"):
        other = disks.pd.pool.submit(disks.ask, prompt)
        wait_until((faults / "copying").exists, seconds=60, what="a copy that has begun")
        wanted, seen, since = arrived + TOKENS, arrived, time.monotonic()
        while arrived < wanted and time.monotonic() - since < QUIET_S:
            time.sleep(0.01)
            if arrived > seen:
                seen, since = arrived, time.monotonic()
        went_on = arrived >= wanted
    answer = other.result()
    ended.set()
    for each in (first, reading):
        each.result()
    assert_same(disks.cold(prompt), answer)
    return went_on


def test_decode_goes_on_while_a_prompt_comes_from_its_own_tiers(disks: Disks) -> None:
    prompt = prompt_of(83, BLOCKS * BLOCK + 4)
    longer = [*prompt, 7, 8, 9]
    disks.to_disk_only(prompt, 4)
    assert goes_on(disks, longer)
    disks.pd.wait_idle()
    disks.to_disk_only(prompt, 5)
    with fault(disks.faults["decode"], "blocking"):
        assert not goes_on(disks, longer), "the twin"
    disks.pd.wait_idle()
    nothing_is_left(disks.pd.servers)

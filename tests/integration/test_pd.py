"""Prefill and decode apart: the answers are those of one server without a cache, whatever moves between.

One prefill and one decode server, whose hand-overs can be stopped at each step, and a colocated server whose
answers are the truth.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from faulty_pd_server import FAULTS

from sglang_ext.testing.compare import Answer, assert_same, random_conversations
from sglang_ext.testing.pd import PdServers, pd_servers
from sglang_ext.testing.servers import ServerProcess, ServerSpec, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

ANSWER_TOKENS = 8
POOL_TOKENS = 6000
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
}
COMMON = (
    *("--max-total-tokens", str(POOL_TOKENS), "--chunked-prefill-size", "256"),
    *("--max-running-requests", "8", "--kv-check", "--enable-metrics"),
)


@dataclass(frozen=True)
class FaultySpec(ServerSpec):
    """A server whose hand-overs can be stopped and damaged."""

    def command(self, port: int) -> list[str]:
        script = Path(__file__).with_name("faulty_pd_server.py")
        return [sys.executable, str(script), *super().command(port)[3:]]


class Faults:
    """The folders in which the two servers look for what is wrong."""

    def __init__(self, folder: Path) -> None:
        self.prefill, self.decode = folder / "prefill", folder / "decode"
        self.prefill.mkdir()
        self.decode.mkdir()

    @contextmanager
    def on(self, folder: Path, what: str) -> Iterator[Path]:
        (folder / what).touch()
        marker = folder / what.replace("hold-", "at-")
        try:
            yield marker
        finally:
            (folder / what).unlink()
            if marker.name.startswith("at-"):
                marker.unlink(missing_ok=True)


@dataclass
class Rig:
    pd: PdServers
    truth: ServerProcess
    faults: Faults

    def expected(self, prompt: list[int], tokens: int = ANSWER_TOKENS) -> Answer:
        return self.truth.generate(prompt, max_new_tokens=tokens)


@pytest.fixture(
    scope="module",
    params=[
        ("3", 16),
        pytest.param(("basic", 1), marks=pytest.mark.long),
        pytest.param(("1", 16), marks=pytest.mark.long),
        pytest.param(("2", 1), marks=pytest.mark.long),
    ],
    ids=lambda p: f"caching-{p[0]}-page{p[1]}",
)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    caching, page = request.param
    faults = Faults(tmp_path_factory.mktemp("faults"))
    flags = (*COMMON, "--kv-pd-caching", caching, "--page-size", str(page))
    prefill = FaultySpec(flags=flags, environment={**STRICT, FAULTS: str(faults.prefill)})
    decode = replace(prefill, environment={**STRICT, FAULTS: str(faults.decode)})
    truth = ServerSpec(flags=("--disable-radix-cache", "--max-total-tokens", "8000"))
    with pd_servers([prefill], [decode], [truth]) as (servers, others):
        yield Rig(servers, others[0], faults)


def prompt_of(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 30_000) for _ in range(tokens)]


def test_conversations_get_the_answers_of_one_server(rig: Rig, long_run: bool) -> None:
    conversations = random_conversations(
        seed=3, count=50 if long_run else 5, turns=(2, 3), tokens=(8, 500), system_tokens=100
    )

    def play(turns: list[list[int]]) -> list[tuple[list[int], Answer]]:
        history: list[int] = []
        played: list[tuple[list[int], Answer]] = []
        for added in turns:
            history = history + added
            answer = rig.pd.generate(history, max_new_tokens=ANSWER_TOKENS)
            played.append((history, answer))
            history = history + answer.tokens
        return played

    with ThreadPoolExecutor(3) as pool:
        for played in pool.map(play, conversations):
            for prompt, answer in played:
                assert_same(rig.expected(prompt), answer)
    rig.pd.wait_idle()


def test_one_damaged_bit_is_seen(rig: Rig) -> None:
    """The twin: if this did not fail, the test above would prove nothing."""
    prompt = prompt_of(5, 203)
    with rig.faults.on(rig.faults.decode, "damage"):
        damaged = rig.pd.generate(prompt, max_new_tokens=ANSWER_TOKENS)
    with pytest.raises(AssertionError):
        assert_same(rig.expected(prompt), damaged)
    rig.pd.decode[0].flush()


def test_prefill_computes_while_decode_holds_nothing(rig: Rig) -> None:
    """Pull: a decode server that has no room for a request does not keep prefill from computing it."""
    with (
        rig.faults.on(rig.faults.decode, "hold-ready") as at,
        rig.faults.on(rig.faults.prefill, "hold-computed") as computed,
    ):
        prompt = prompt_of(6, 300)
        _, answer = rig.pd.start(prompt, max_new_tokens=ANSWER_TOKENS)
        wait_until(lambda: at.exists() and computed.exists(), seconds=30, what="prefill done, decode waiting")
        assert not answer.done()
    assert_same(rig.expected(prompt), answer.result(30))


STEPS_OF_DECODE = ("joining", "waiting", "ready", "reading")


@pytest.mark.parametrize("step", STEPS_OF_DECODE)
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_at_any_step_frees_both_sides(rig: Rig, step: str, side: str) -> None:
    server = rig.pd.prefill[0].server if side == "prefill" else rig.pd.decode[0]
    rid = f"abort-{step}-{side}"
    with rig.faults.on(rig.faults.decode, f"hold-{step}") as at:
        both = rig.pd.start(prompt_of(hash_of(rid), 150), max_new_tokens=4, rid=rid)
        wait_until(at.exists, seconds=30, what=step)
        server.post("/abort_request", {"rid": rid})
        if side == "prefill" or step != "joining":
            # Without waiting for what is held up.
            assert ends_in_error(both[0])
    assert ends_in_error(both[1])
    assert ends_in_error(both[0])
    rig.pd.wait_idle()
    assert nothing_is_left(rig.pd)
    prompt = prompt_of(hash_of(rid) + 1, 100)
    assert_same(rig.expected(prompt), rig.pd.generate(prompt, max_new_tokens=ANSWER_TOKENS))


def test_a_room_that_nobody_else_hears_of_is_given_up(rig: Rig) -> None:
    """Prefill gets a request, decode does not; then decode gets one, prefill does not."""
    for server in rig.pd.servers:
        lonely = rig.pd.pool.submit(
            server.generate, prompt_of(8, 60), max_new_tokens=2, rid=f"lonely-{server.port}", **rig.pd.pair()
        )
        assert ends_in_error(lonely, seconds=40)
    rig.pd.wait_idle()
    assert nothing_is_left(rig.pd)


def test_two_requests_cannot_have_one_room(rig: Rig) -> None:
    room = rig.pd.pair()["bootstrap_room"]
    with rig.faults.on(rig.faults.decode, "hold-ready") as at:
        prompt = prompt_of(9, 80)
        first = rig.pd.start(prompt, max_new_tokens=ANSWER_TOKENS, bootstrap_room=room)
        wait_until(at.exists, seconds=30, what="the first request")
        second = rig.pd.start(prompt_of(10, 80), max_new_tokens=2, bootstrap_room=room)
        assert ends_in_error(second[0])
        assert ends_in_error(second[1])
    assert_same(rig.expected(prompt), first[1].result(30))


def hash_of(text: str) -> int:
    return sum(text.encode())


def ends_in_error(answer: Future[Answer], seconds: float = 30) -> bool:
    """Whether a request ended as one that a client may try again: an error, or no token."""
    try:
        found = answer.result(seconds)
    except (AssertionError, KeyError):
        return True
    return not found.tokens


def nothing_is_left(servers: PdServers) -> bool:
    """Whether no room, lease or page of a hand-over is left; the metrics are a second old at most."""
    names = ("sglang_ext_pd_rooms", "sglang_ext_pd_leased_pages")

    def held() -> float:
        return sum(
            value
            for server in servers.servers
            for sample, value in server.metrics().items()
            if sample.startswith(names)
        )

    wait_until(lambda: held() == 0, seconds=5, what="rooms and leases to end")
    return True

"""Servers whose hand-overs can be stopped, and checks, for tests of prefill-decode disaggregation."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hooked_server import FOLDER, holding
from places import Outside
from tuned_model import tuned

from sglang_ext.cluster.guard import descendants
from sglang_ext.testing.models import model_path
from sglang_ext.testing.waiting import wait_until
from tests.support.compare import Answer, assert_same, random_conversations
from tests.support.leaks import LeakGuard
from tests.support.servers.pd_servers import PdServers
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

ANSWER_TOKENS = 8
POOL_TOKENS = 6000
COMMON = (
    *("--max-total-tokens", str(POOL_TOKENS), "--chunked-prefill-size", "256"),
    *("--max-running-requests", "8", "--kv-check", "--enable-metrics"),
)
HAND_OVER_FAILED = re.compile(r': 500: .*KVTransferError\(bootstrap_room=\d+\): (.*?)(?:","type":|$)')
BROKEN_OFF = "the server went in mid-request"
NO_TOKEN = "aborted before its first token"
DECODE_IS_GONE = "the decode server is gone|reader_dead"
"""Why prefill fails a request."""
WRITING_FAILED = "writing to decode failed"
"""Why prefill fails a request, where it writes."""
PREFILL_IS_GONE = (
    "has not answered for too long|the prefill server .* is gone|the peer's memory cannot be read"
)
"""Why decode fails a request."""
WAS_GIVEN_UP = "this session is over|have another generation now|is unknown here"
"""Errors that a server gets when it goes on after the other side took it for dead."""
RETURNED = "sglang_ext_pd_returned_tokens"
SETTLED_SECONDS = 2.5
"""Longer than between two updates of a scheduler's metrics."""
TRUTH = ServerSpec(flags=("--disable-radix-cache", "--max-total-tokens", "8000"))


@dataclass(frozen=True)
class FaultySpec(ServerSpec):
    """A server whose hand-overs can be stopped and damaged."""

    run: tuple[str, ...] = (str(Path(__file__).parent.joinpath("servers", "faulty_pd_server.py")),)

    def looking_at(self, folder: Path) -> ServerSpec:
        """The same, looking for its faults in a folder of its own."""
        folder.mkdir()
        return replace(self, environment={**STRICT, FOLDER: str(folder)})


@contextmanager
def fault(folder: Path, what: str) -> Iterator[Path]:
    """Place a fault into the server that uses a folder. `hold-STEP` yields the file that reports the step."""
    kind, _, step = what.partition("-")
    if kind == "hold":
        with holding(folder, step) as arrival:
            yield arrival
        return
    (folder / what).touch()
    try:
        yield folder / what
    finally:
        (folder / what).unlink()


@dataclass
class Rig:
    """Servers, the folders in which they look for faults, and a server whose answers are the truth.

    leak_guard: adopts the servers that are started anew, which outlive their test.
    """

    pd: PdServers
    truth: ServerProcess | Outside
    prefill_faults: list[Path]
    decode_faults: list[Path]
    leak_guard: LeakGuard | None = None

    def expected(self, prompt: list[int], tokens: int = ANSWER_TOKENS) -> Answer:
        return self.truth.generate(prompt, max_new_tokens=tokens)

    def revive(self, kind: str) -> ServerProcess:
        """The second server of a kind, started anew if it was killed."""
        server = self.pd.prefill[1].server if kind == "prefill" else self.pd.decode[1]
        if server.processes("sglang::scheduler"):
            return server
        with self.leak_guard.adopting() if self.leak_guard is not None else nullcontext():
            server.stop()
            fresh = ServerProcess(server.spec)
            fresh.start()
        if kind == "prefill":
            self.pd.prefill[1].server = fresh
        else:
            self.pd.decode[1] = fresh
        return fresh


def count(server: ServerProcess, name: str) -> float:
    return sum(value for sample, value in server.metrics().items() if sample.startswith(name))


def settled(server: ServerProcess, name: str) -> float:
    """A counter once it stands still: schedulers publish their counts a moment after they made them, and on a
    busy machine not all in one moment."""
    last, since = count(server, name), time.monotonic()
    while time.monotonic() - since < SETTLED_SECONDS:
        time.sleep(0.2)
        if (now := count(server, name)) != last:
            last, since = now, time.monotonic()
    return last


def kill(server: ServerProcess) -> None:
    """SIGKILL to everything of a server at once, its schedulers first."""
    for pid in (*server.processes("sglang::scheduler"), *descendants(server.pid)):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def prompt_of(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 30_000) for _ in range(tokens)]


def conversations_are_answered_alike(
    pd: PdServers, truth: ServerProcess | Outside, *, count: int, seed: int = 3, atol: float = 1e-4
) -> None:
    """Hold conversations of several turns, three at a time; every answer is the truth's."""
    conversations = random_conversations(
        seed=seed, count=count, turns=(2, 3), tokens=(8, 500), system_tokens=100
    )

    def play(turns: list[list[int]]) -> list[tuple[list[int], Answer]]:
        history: list[int] = []
        played: list[tuple[list[int], Answer]] = []
        for added in turns:
            history = history + added
            answer = pd.generate(history, max_new_tokens=ANSWER_TOKENS)
            played.append((history, answer))
            history = history + answer.tokens
        return played

    with ThreadPoolExecutor(3) as pool:
        for played in pool.map(play, conversations):
            for prompt, answer in played:
                expected = truth.generate(prompt, max_new_tokens=ANSWER_TOKENS)
                assert_same(expected, answer, atol=atol)
    pd.wait_idle()


def one_side_is_updated_first(
    pd: PdServers,
    truth: ServerProcess | Outside,
    folder: Path,
    model_name: str = "tiny",
    updated: Callable[[], None] = lambda: None,
) -> None:
    """Weights that differ in one layer end requests, and both servers report the reason; when both have them
    they answer again, and the answers of the first weights are back with these.

    Args:
        updated: waits until all of a server goes by its new weights.
    """
    prompt = prompt_of(70, 150)
    expected = truth.generate(prompt, max_new_tokens=ANSWER_TOKENS)
    first_model = model_path(model_name)
    fine_tune = tuned(first_model, folder / "tuned")

    def update(server: ServerProcess, model: Path) -> None:
        server.post("/update_weights_from_disk", {"model_path": str(model), "flush_cache": False})

    for model in (fine_tune, first_model):
        pd.wait_idle()
        update(pd.decode[0], model)
        for answer in pd.start(prompt, max_new_tokens=ANSWER_TOKENS):
            assert_failed(answer, "the weights differ")
        pd.wait_idle()
        update(pd.prefill[0].server, model)
        updated()
        answered = pd.generate(prompt, max_new_tokens=ANSWER_TOKENS)
        if model is fine_tune:
            # The twin: it is the new weights that answer.
            with pytest.raises(AssertionError):
                assert_same(expected, answered, atol=1e-3)
    # Sums over two ranks round otherwise than sums over one.
    assert_same(expected, answered, atol=1e-3)
    pd.wait_idle()
    nothing_is_left(pd.servers)


def why_it_failed(answer: Future[Answer], seconds: float = 30) -> str | None:
    """The reason why a request ended so that a client may try again: the hand-over's error, `BROKEN_OFF` or
    `NO_TOKEN`. None for an answered request.

    Raises:
        AssertionError, httpx.HTTPError: it failed otherwise.
        TimeoutError: it hangs.
    """
    try:
        found = answer.result(seconds)
    except (httpx.NetworkError, httpx.RemoteProtocolError):
        return BROKEN_OFF
    except AssertionError as error:
        if reason := HAND_OVER_FAILED.search(str(error)):
            return reason[1]
        raise
    return None if found.tokens else NO_TOKEN


def assert_failed(answer: Future[Answer], *because: str, seconds: float = 30) -> None:
    """A request has failed for one of these reasons, which are regular expressions."""
    why = why_it_failed(answer, seconds)
    assert why is not None, "it was answered"
    assert re.search("|".join(because), why), f"it failed because: {why}"


def nothing_is_left(servers: Sequence[ServerProcess], seconds: float = 5) -> bool:
    """Whether no hand-over, lease, metadata row or place of a hand-over is left; metrics are a moment old."""
    names = tuple(
        f"sglang_ext_pd_{name}"
        for name in ("live_handovers", "leased_pages", "metadata_rows", "set_aside_tokens")
    )

    def held() -> float:
        return sum(
            value
            for server in servers
            for sample, value in server.metrics().items()
            if sample.startswith(names)
        )

    wait_until(lambda: held() == 0, seconds=seconds, what="hand-overs to end")
    return True


# -- log probabilities of prompts ------------------------------------------------------------------


KINDS_OF_LOGPROBS = ("token_logprobs", "top_logprobs", "token_ids_logprobs")


def logprobs_of(answer: dict[str, Any]) -> dict[str, Any]:
    """The log probabilities of an answer's prompt and tokens, ids apart from log probabilities."""
    return {
        f"{part}_{kind}": answer["meta_info"].get(f"{part}_{kind}")
        for part in ("input", "output")
        for kind in KINDS_OF_LOGPROBS
    }


def assert_alike(expected: Any, got: Any, atol: float = 2e-3) -> None:
    """Equal, but for rounding of log probabilities."""
    if isinstance(expected, float) and isinstance(got, float):
        assert abs(expected - got) < atol
    elif isinstance(expected, list) and isinstance(got, list):
        assert len(expected) == len(got)
        for one, other in zip(expected, got, strict=True):
            assert_alike(one, other, atol)
    elif isinstance(expected, dict) and isinstance(got, dict):
        assert expected.keys() == got.keys()
        for name, value in expected.items():
            assert_alike(value, got[name], atol)
    else:
        assert expected == got


def ask_both(pd: PdServers, body: dict[str, Any], seconds: float = 120) -> tuple[Any, Any]:
    """The answers of prefill and decode to a body of ``/generate``; for a stream, its last event."""
    body = {**body, **pd.pair()}
    servers = (pd.prefill[0].server, pd.decode[0])
    sent = [
        pd.pool.submit(server.last_event if body.get("stream") else server.post, "/generate", body)
        for server in servers
    ]
    decoded = sent[1].result(seconds)
    return sent[0].result(seconds), decoded

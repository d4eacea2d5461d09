"""Requests of low priority give way on real servers, and their answers do not change.

The server has two places and slots for 800 tokens; answers are compared with those of SGLang without a cache.
The long form does the same without overlap, and on two ranks.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hooked_server import FOLDER

from sglang_ext.testing.waiting import wait_until
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

BLOCK = 16
SLOTS = 800
WAIT = 4.0
SLOW = 0.02
LONG = 300
"""Tokens of an answer that takes longer than WAIT where each takes SLOW."""
SHORT = 40
"""Tokens of an answer that takes less than WAIT where each takes SLOW."""
FEW, STEADY = 30, 0.04
"""Tokens of an answer, and seconds for each: long enough for the next request to come while it runs."""
PATIENT = 600.0
"""Seconds that an answer of FEW tokens does not take, however busy the machine is."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disturbed")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((), id="overlap"),
        pytest.param(("--disable-overlap-schedule",), id="no-overlap", marks=pytest.mark.long),
        pytest.param(("--tp-size", "2"), id="two-ranks", marks=pytest.mark.long),
    ],
)
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[ServerProcess]:
    spec = ServerSpec(
        run=(str(Path(__file__).parents[1].joinpath("servers", "retracting_server.py")),),
        flags=(
            *("--radix-cache-backend", "global", "--kv-check", "--kv-load-policy", "always"),
            *("--kv-dram-size", "16MB", "--kv-retract-wait", str(WAIT), "--enable-priority-scheduling"),
            *("--default-priority-value", "0", "--priority-scheduling-preemption-threshold", "0"),
            *(
                "--max-total-tokens",
                str(SLOTS),
                "--max-running-requests",
                "2",
                "--chunked-prefill-size",
                "256",
            ),
            *("--enable-metrics", "--incremental-streaming-output", *request.param),
        ),
        environment={
            FOLDER: str(folder),
            **STRICT,
            **({"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if "--tp-size" in request.param else {}),
        },
    )
    with ServerProcess(spec) as server:
        yield server


@pytest.fixture(autouse=True)
def rested(server: ServerProcess) -> Iterator[None]:
    yield
    server.wait_idle()
    server.flush()


@contextmanager
def disturbed(folder: Path, name: str, text: str = "") -> Iterator[None]:
    (folder / name).write_text(text)
    try:
        yield
    finally:
        (folder / name).unlink()


class Talk(threading.Thread):
    """One request, whose answer is taken as a stream."""

    def __init__(self, server: ServerProcess, prompt: list[int], answer: int, priority: int) -> None:
        super().__init__(name=f"talk {priority}")
        self.tokens: list[int] = []
        self.finish: Any = None
        self._url = f"{server.url}/generate"
        self._body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": answer, "ignore_eos": True},
            "priority": priority,
            "stream": True,
        }
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, trust_env=False, timeout=120) as response:
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if data and data != "[DONE]":
                    event = json.loads(data)
                    self.tokens += event["output_ids"]
                    self.finish = event["meta_info"]["finish_reason"]

    def has(self, tokens: int) -> None:
        """Wait until it has generated so many."""
        wait_until(lambda: len(self.tokens) >= tokens, seconds=60, what=f"{tokens} tokens")

    def answer(self) -> list[int]:
        self.join(timeout=120)
        assert not self.is_alive()
        assert self.finish is not None
        assert self.finish["type"] == "length", self.finish
        return self.tokens


@pytest.fixture
def prompts(request: pytest.FixtureRequest) -> Callable[[int], list[int]]:
    rng = random.Random(request.node.originalname)
    return lambda tokens: [rng.randrange(100, 30_000) for _ in range(tokens)]


def found(server: ServerProcess) -> dict[str, float]:
    """The server's counters of retractions, and of blocks loaded from DRAM."""
    names = ("retractions_total{", "retracted_tokens_total{", 'dram_blocks_total{event="loaded"')
    return {
        sample.split('event="')[1].split('"')[0]: value
        for sample, value in server.metrics().items()
        if any(sample.startswith(f"sglang_ext_cache_{name}") for name in names)
    }


def more(server: ServerProcess, before: dict[str, float], event: str, least: float) -> dict[str, float]:
    """The counters since ``before``, once this one has grown so much: they are exported once a second."""
    wait_until(
        lambda: found(server).get(event, 0) - before.get(event, 0) >= least, seconds=10, what=f"{event}"
    )
    return {name: value - before.get(name, 0) for name, value in found(server).items()}


def truth_of(truth: ServerProcess, prompt: list[int], answer: int) -> list[int]:
    return truth.generate(prompt, max_new_tokens=answer).tokens


def test_a_low_priority_gives_way_and_its_answer_stays_what_it_was(
    server: ServerProcess, truth: ServerProcess, folder: Path, prompts: Callable[[int], list[int]]
) -> None:
    """No place is free: one of two long answers stops, and goes on behind the token sent last."""
    texts = [prompts(70), prompts(100), prompts(50)]
    before = found(server)
    with disturbed(folder, "slow", str(SLOW)):
        lows = [Talk(server, text, LONG, 0) for text in texts[:2]]
        for low in lows:
            low.has(20)
        high = Talk(server, texts[2], SHORT, 5)
        assert high.answer() == truth_of(truth, texts[2], SHORT)
        assert all(len(low.tokens) < LONG for low in lows)
    for low, text in zip(lows, texts, strict=False):
        assert low.answer() == truth_of(truth, text, LONG)
    counted = more(server, before, "resumed", 1)
    assert counted["retracted"] == counted["resumed"] == 1
    assert counted.get("recomputed", 0) < BLOCK
    assert counted["found"] >= 70 + 20 - BLOCK


def test_slots_are_given_up_too_and_kv_comes_back_from_dram(
    server: ServerProcess, truth: ServerProcess, folder: Path, prompts: Callable[[int], list[int]]
) -> None:
    """A place is free, and not enough slots: SGLang itself retracts no request then."""
    texts = [prompts(200), prompts(620)]
    before = found(server)
    with disturbed(folder, "slow", str(SLOW)):
        low = Talk(server, texts[0], LONG, 0)
        low.has(60)
        high = Talk(server, texts[1], SHORT, 5)
        assert high.answer() == truth_of(truth, texts[1], SHORT)
        assert len(low.tokens) < LONG
    assert low.answer() == truth_of(truth, texts[0], LONG)
    counted = more(server, before, "resumed", 1)
    assert counted["retracted"] == counted["resumed"] == 1
    assert counted.get("recomputed", 0) < BLOCK
    assert counted["loaded"] > 0


def test_the_twin_with_one_damaged_bit_answers_otherwise(
    server: ServerProcess, truth: ServerProcess, folder: Path, prompts: Callable[[int], list[int]]
) -> None:
    texts = [prompts(200), prompts(620)]
    before = found(server)
    with disturbed(folder, "slow", str(SLOW)), disturbed(folder, "damage"):
        low = Talk(server, texts[0], LONG, 0)
        low.has(60)
        high = Talk(server, texts[1], SHORT, 5)
        assert high.answer() == truth_of(truth, texts[1], SHORT)
    tokens = low.answer()
    assert more(server, before, "resumed", 1)["retracted"] == 1
    expected = truth_of(truth, texts[0], LONG)
    assert tokens[:60] == expected[:60]
    assert tokens != expected


def test_no_request_gives_way_where_the_wait_is_short(
    server: ServerProcess, truth: ServerProcess, folder: Path, prompts: Callable[[int], list[int]]
) -> None:
    texts = [prompts(70), prompts(100), prompts(50)]
    before = found(server)
    with disturbed(folder, "patient", str(PATIENT)), disturbed(folder, "slow", str(STEADY)):
        lows = [Talk(server, text, FEW, 0) for text in texts[:2]]
        for low in lows:
            low.has(4)
        high = Talk(server, texts[2], FEW, 5)
        high.has(1)  # when another answer has ended, which its client may see a little later
    for talk, text in zip([*lows, high], texts, strict=True):
        assert talk.answer() == truth_of(truth, text, FEW)
    counted = more(server, before, "avoided", 1)
    assert counted["avoided"] == 1
    assert counted.get("retracted", 0) == 0


def test_one_that_is_aborted_while_it_waits_leaves_nothing(
    server: ServerProcess, folder: Path, prompts: Callable[[int], list[int]]
) -> None:
    before = found(server)
    with disturbed(folder, "slow", str(SLOW)):
        low = Talk(server, prompts(200), LONG, 0)
        low.has(40)
        high = Talk(server, prompts(500), LONG // 2, 5)
        high.has(1)
        more(server, before, "retracted", 1)
        server.post("/abort_request", {"abort_all": True})
        for talk in (low, high):
            talk.join(timeout=60)
            assert not talk.is_alive()
            assert talk.finish["type"] == "abort"

"""Deaths at chosen states of hand-overs: the list of cases, their set-up, and the checks afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import httpx
from pd_fleet import ANSWER_TOKENS, NO_TOKEN, Rig, fault, nothing_is_left, prompt_of, why_it_failed

from sglang_ext.cluster.guard import descendants
from sglang_ext.disagg.handover import JOIN_SECONDS, VERDICT_SECONDS
from sglang_ext.testing.waiting import wait_until
from tests.support.compare import Answer, assert_same
from tests.support.servers.ports import free_port
from tests.support.servers.server import ServerProcess

FREED_SECONDS = 5.0
"""The time within which a survivor has freed the resources of a dead peer's requests."""
SLACK_SECONDS = 2.0
"""Metrics are a moment old, and the machine has other work."""
UNKNOWN_SECONDS = JOIN_SECONDS + FREED_SECONDS
"""Where prefill has no decode server for a request yet: no death can be seen, a deadline ends it."""

PULLED = ("joining", "waiting", "ready", "reading", "held", "returning")
PUSHED = ("joining", "ready", "granted", "writing", "held")
BY_LAYER = ("joining", "ready", "granted", "layers", "writing", "held")
STATES = {"pull": PULLED, "push": PUSHED, "push-by-layer": BY_LAYER}
NOT_MET = ("joining", "waiting")
"""States in which prefill has no message from the decode server yet."""
SEEN_BY_DECODE = ("ready", "layers", "writing")
"""States in which a decode server that is held in them, or waits for them, can see that prefill is dead."""
HELD_ON_PREFILL = ("layers", "writing", "returning")
"""States in which it is prefill that is held."""
HOLDS_PREFILL = ("layers", "returning")
"""In them, prefill can do nothing else."""
PROMPT_TOKENS = 203
"""With the answer, another block of 16 is full, which prefill lacks: it comes back."""
VICTIMS = ("prefill", "decode", "router")
SIGNALS = ("SIGKILL", "SIGSTOP")


@dataclass(frozen=True)
class Cell:
    """state: where the hand-over is held when the signal comes."""

    state: str
    victim: str
    signal: str

    def __str__(self) -> str:
        return f"{self.state}-{self.victim}-{self.signal}"


def cells(mode: str) -> list[Cell]:
    """Every death in every state of a hand-over. mode: pull, push or push-by-layer."""
    return [Cell(*each) for each in product(STATES[mode], VICTIMS, SIGNALS)]


def place(rig: Rig, cell: Cell, number: int) -> None:
    """Bring one death about, and check everything that must be true then."""
    if cell.victim == "router":
        _router_dies(rig, cell, number)
    else:
        _server_dies(rig, cell, number)
    serves(rig, 0, 0, number)


def serves(rig: Rig, prefill: int, decode: int, number: int) -> None:
    """A pair serves, gives the right answer, and holds nothing then."""
    prompt = prompt_of(10_000 + number, 100)
    answer = rig.pd.generate(prompt, max_new_tokens=ANSWER_TOKENS, prefill=prefill, decode=decode)
    assert_same(rig.expected(prompt), answer)
    servers = [rig.pd.prefill[prefill].server, rig.pd.decode[decode]]
    nothing_is_left(servers)
    assert all(server.running for server in servers)


def _gate(rig: Rig, cell: Cell, prefill: int, decode: int) -> Any:
    """Holds hand-overs in the cell's state."""
    if cell.state in HELD_ON_PREFILL:
        step = "reading" if cell.state == "returning" else cell.state
        return fault(rig.prefill_faults[prefill], f"hold-{step}")
    return fault(rig.decode_faults[decode], f"hold-{cell.state}")


def _server_dies(rig: Rig, cell: Cell, number: int) -> None:
    # The second of each kind is for killing, and its partner survives.
    prefill, decode = (1, 0) if cell.victim == "prefill" else (0, 1)
    victim = rig.revive(cell.victim)
    survivor = rig.pd.decode[0] if cell.victim == "prefill" else rig.pd.prefill[0].server
    prompt = prompt_of(number, PROMPT_TOKENS)
    expected = rig.expected(prompt)
    not_met = cell.victim == "decode" and cell.state in NOT_MET
    limit = SLACK_SECONDS + (UNKNOWN_SECONDS if not_met else FREED_SECONDS)
    with ExitStack() as stack:
        at = stack.enter_context(_gate(rig, cell, prefill, decode))
        both = rig.pd.start(prompt, max_new_tokens=ANSWER_TOKENS, prefill=prefill, decode=decode)
        wait_until(at.exists, seconds=60, what=str(cell))
        stack.enter_context(stopped(victim) if cell.signal == "SIGSTOP" else killed(victim))
        since = time.monotonic()
        acts = cell.state not in HOLDS_PREFILL if cell.victim == "decode" else cell.state in SEEN_BY_DECODE
        if acts:
            ended(both[1] if cell.victim == "prefill" else both[0], expected, limit)
            left = limit - (time.monotonic() - since)
            nothing_is_left([survivor], seconds=max(left, 1.0))
        elif cell.signal == "SIGSTOP":
            # The gate holds up the survivor too. It learns of the death, and acts when it goes on.
            time.sleep(VERDICT_SECONDS + SLACK_SECONDS)
        if cell.victim == "decode" and cell.state not in HELD_ON_PREFILL:
            # Nothing holds up the survivors: they serve meanwhile, with slots that were the request's.
            serves(rig, 0, 0, number)
    for answer in both:
        ended(answer, expected, UNKNOWN_SECONDS + SLACK_SECONDS)
    nothing_is_left([survivor], seconds=UNKNOWN_SECONDS)
    if cell.signal == "SIGSTOP":
        # It finds that it was given up, and goes on.
        nothing_is_left([victim], seconds=UNKNOWN_SECONDS)
        serves(rig, prefill, decode, number + 1)


def ended(answer: Future[Answer], expected: Answer, seconds: float) -> None:
    """A request has ended in time: with an error that allows another try, or with the right answer."""
    try:
        if why_it_failed(answer, seconds) not in (None, NO_TOKEN):
            return
    except TimeoutError:
        raise AssertionError(f"a request hangs for more than {seconds:.0f} s") from None
    found = answer.result()
    if len(found.tokens) == len(expected.tokens):
        assert_same(expected, found)
    else:
        # Prefill's own answer is the first token; an aborted one has none.
        assert found.tokens == expected.tokens[: len(found.tokens)]


@contextmanager
def stopped(server: ServerProcess) -> Iterator[None]:
    """All processes of a server stand still."""
    pids = descendants(server.pid)
    _signal(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(pids, signal.SIGCONT)


@contextmanager
def killed(server: ServerProcess) -> Iterator[None]:
    """All processes of a server are killed, its schedulers first. It stays dead."""
    _signal([*server.processes("sglang::scheduler"), *descendants(server.pid)], signal.SIGKILL)
    yield


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _router_dies(rig: Rig, cell: Cell, number: int) -> None:
    prompt = prompt_of(number, PROMPT_TOKENS)
    expected = rig.expected(prompt)
    servers = [rig.pd.prefill[0].server, rig.pd.decode[0]]
    with ExitStack() as stack:
        url, process = stack.enter_context(router(servers))
        with _gate(rig, cell, 0, 0) as at:
            answer = rig.pd.pool.submit(ask, url, prompt)
            wait_until(at.exists, seconds=60, what=str(cell))
            process.send_signal(signal.Signals[cell.signal])
        try:
            # The client is gone or waits; the servers finish, or abort, and hold nothing.
            nothing_is_left(servers, seconds=FREED_SECONDS + SLACK_SECONDS + UNKNOWN_SECONDS)
            for server in servers:
                server.wait_idle()
        finally:
            process.send_signal(signal.SIGCONT)
        if cell.signal == "SIGKILL":
            try:
                found = answer.result(FREED_SECONDS)
            except (AssertionError, httpx.HTTPError):
                pass
            else:
                # Only a request that is returning has been answered.
                assert (cell.state, found) == ("returning", expected.tokens)
            url, _ = stack.enter_context(router(servers))
        else:
            assert answer.result(30) == expected.tokens
        assert ask(url, prompt) == expected.tokens


def ask(url: str, prompt: list[int]) -> list[int]:
    """The greedy answer of whom a router chooses."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True},
    }
    response = httpx.post(f"{url}/generate", json=body, timeout=60, trust_env=False)
    if response.status_code != 200:
        raise AssertionError(f"{response.status_code}: {response.text[:300]}")
    found: list[int] = response.json()["output_ids"]
    return found


@contextmanager
def router(servers: list[ServerProcess]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A router as a process of its own, and its URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "sglang_ext.router", "--port", str(port)),
            *("--worker-urls", *(server.url for server in servers)),
            # The health of servers is not tested here; a slow server is only slow.
            *("--health-failure-threshold", "40"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def serves_requests() -> bool:
        assert process.poll() is None, "the router has ended"
        try:
            return httpx.get(f"{url}/health", timeout=2, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        wait_until(serves_requests, seconds=60, what="the router")
        yield url, process
    finally:
        process.kill()
        process.wait()

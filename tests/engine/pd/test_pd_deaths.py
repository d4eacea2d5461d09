"""The survivor's side when the other side's process is killed or stopped, at each state of a hand-over."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from pd_rig import METADATA, PAGES, Planes, Rows, held, pool, transfer_thread

from sglang_ext.disagg.handover import VERDICT_SECONDS, ReceiverState, SenderState, pins
from sglang_ext.disagg.messages import Complete
from sglang_ext.engine.pd.agent import Agent, AgentConfig
from sglang_ext.engine.pd.bootstrap import BootstrapService
from sglang_ext.engine.pd.landing import Wanted
from sglang_ext.engine.pd.peers import Local
from sglang_ext.engine.pd.receiving_handover import ReceivingHandover
from sglang_ext.engine.pd.sending_handover import SendingHandover
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.testing.waiting import wait_until

pytestmark = pytest.mark.slow

PAGE = 4
FREED_SECONDS = 9.0
"""The time within which a survivor frees the resources of the dead side's requests, on a machine with other
work; on an idle machine it takes at most `VERDICT_SECONDS`. The deadlines that would end them otherwise are
longer."""
ROUNDS_SECONDS = 90.0
"""Time for which a prefill server is stopped and continued by turns."""
NUMBERS = itertools.count(1)
SIGNALS = [signal.SIGKILL, signal.SIGSTOP]


class Victim:
    """The side that will die."""

    def __init__(self, role: str, mode: str, address: str, rank: int = 0, ranks: int = 1) -> None:
        options = json.dumps({"role": role, "mode": mode, "address": address, "rank": rank, "ranks": ranks})
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parents[1].joinpath("pd_process.py")), options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        assert self._answer() == "started"

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def do(self, command: str = "") -> str:
        """Send a command; the state of the hand-over after it."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._answer()

    def until(self, state: str) -> None:
        wait_until(lambda: self.do("look") == state, seconds=20, what=state)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue


@dataclass
class Scene:
    """A survivor and a victim that are about to hand a request over."""

    survivor: Agent
    victim: Victim
    address: str
    number: int
    planes: Planes
    """The survivor's pool."""

    def die(self, how: signal.Signals) -> float:
        os.kill(self.victim.process.pid, how)
        return time.monotonic()


@pytest.fixture
def stage() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def scene(stack: ExitStack, victim: str, mode: str) -> Scene:
    bootstrap = BootstrapService("127.0.0.1", 0, None)
    stack.callback(bootstrap.close)
    role = "decode" if victim == "prefill" else "prefill"
    spec, planes = pool(0, 1, PAGE, seed=2)
    local = Local(0, 1, PAGE, METADATA, mode)
    own = bootstrap.address if role == "prefill" else ""
    transfers = transfer_thread(role, [spec])
    stack.callback(transfers.close)
    agent = Agent(AgentConfig(local, "weights", bootstrap=own), transfers, Rows())
    stack.callback(agent.close)
    process = Victim(victim, mode, bootstrap.address)
    stack.callback(process.close)
    return Scene(agent, process, bootstrap.address, next(NUMBERS), planes)


def same_kv(planes: Planes, pages: list[int], other: Planes, other_pages: list[int]) -> bool:
    """Whether pages of two pools hold the same, byte for byte."""
    ours, theirs = (
        (np.asarray(each)[:, None] * PAGE + np.arange(PAGE)).ravel() for each in (pages, other_pages)
    )
    return all(np.array_equal(plane[ours], other[name][theirs]) for name, plane in planes.items())


@pytest.mark.parametrize("how", SIGNALS, ids=lambda how: how.name)
@pytest.mark.parametrize("state", [SenderState.COMPUTING, SenderState.OFFERED])
def test_prefill_survives_decode(stage: ExitStack, state: SenderState, how: signal.Signals) -> None:
    found = scene(stage, "decode", "pull")
    sender = found.survivor.sender
    handover = sender.open(found.number)
    found.victim.do(f"open {found.number}")
    wait_until(lambda: handover.readers, seconds=20, what="decode to join")
    if state is SenderState.OFFERED:
        sender.complete(handover, np.array([1, 2]), bytes(METADATA))
        found.victim.until("ready")
    assert handover.state is state
    assert_over(found, handover, found.die(how))


@pytest.mark.parametrize("how", SIGNALS, ids=lambda how: how.name)
@pytest.mark.parametrize("state", [ReceiverState.WAITING, ReceiverState.READY])
def test_decode_survives_prefill(stage: ExitStack, state: ReceiverState, how: signal.Signals) -> None:
    found = scene(stage, "prefill", "pull")
    found.victim.do(f"open {found.number}")
    handover = found.survivor.receiver.open(found.address, found.number)
    if state is ReceiverState.READY:
        found.victim.do("complete")
    wait_until(lambda: handover.state is state, seconds=20, what=state.value)
    died = found.die(how)
    if state is ReceiverState.READY:
        # SGLang may find slots for it in this very moment: a read then reads memory that is still there, or
        # fails.
        found.survivor.receiver.read(handover, Wanted(np.array([3, 4]), 0, 0))
        wait_until(
            lambda: handover.state in (ReceiverState.HELD, ReceiverState.FAILED),
            seconds=FREED_SECONDS,
            what="an end",
        )
        assert_nothing_is_held(found)
        if handover.state is ReceiverState.HELD:
            # All of it came: the bytes equal those of the other side's pages.
            assert same_kv(found.planes, [3, 4], pool(0, 1, PAGE, seed=1)[1], [1, 2])
            assert not same_kv(found.planes, [3, 4], pool(0, 1, PAGE, seed=2)[1], [3, 4])
        return
    assert_over(found, handover, died)


@pytest.mark.parametrize("how", SIGNALS, ids=lambda how: how.name)
@pytest.mark.parametrize("late", [True, False], ids=["late", "twin"])
def test_prefill_survives_decode_whose_complete_is_under_way(
    stage: ExitStack, late: bool, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow link: decode has gone on, and dies before its message reaches prefill. The message arrives
    when the pages belong to another request, and frees nothing. The twin: the message arrives in time, so
    that the death ends nothing."""
    found = scene(stage, "decode", "pull")
    agent, pages = found.survivor, np.array([1, 2])
    owner, arrives, handled = agent.endpoint.owner, asyncio.Event(), threading.Event()
    stock = owner.handle

    async def handle_complete(identity: bytes, message: object) -> object:
        try:
            return await stock(identity, message)  # type: ignore[arg-type]
        finally:
            if isinstance(message, Complete):
                handled.set()

    monkeypatch.setattr(owner, "handle", held(handle_complete, Complete, arrives))
    handover = agent.sender.open(found.number)
    found.victim.do(f"open {found.number}")
    wait_until(lambda: handover.readers, seconds=20, what="decode to join")
    agent.sender.complete(handover, pages, bytes(METADATA))
    found.victim.until("ready")
    found.victim.do("read")
    found.victim.until("held")
    assert handover.state is SenderState.OFFERED
    if not late:
        agent.transfers.loop.call_soon_threadsafe(arrives.set)
        wait_until(lambda: handover.state is SenderState.RELEASED, seconds=20, what="COMPLETE")
        found.die(how)
        assert_nothing_is_held(found)
        return
    assert_over(found, handover, found.die(how))
    another = agent.endpoint.publish(HBM_POOL, "another", pages, 60.0, bytes(16))
    agent.transfers.loop.call_soon_threadsafe(arrives.set)
    assert handled.wait(20)
    assert agent.endpoint.pools[HBM_POOL].is_sealed(pages).all()
    agent.endpoint.withdraw(HBM_POOL, another.lease)
    assert_nothing_is_held(found)


@pytest.mark.parametrize("how", SIGNALS, ids=lambda how: how.name)
def test_decode_has_what_it_read_of_prefill_that_dies_before_it_hears_so(
    stage: ExitStack, how: signal.Signals
) -> None:
    """On a slow link: COMPLETE is under way when prefill dies, and decode has gone on."""
    found = scene(stage, "prefill", "pull")
    found.victim.do("deaf")
    found.victim.do(f"open {found.number}")
    handover = found.survivor.receiver.open(found.address, found.number)
    found.victim.do("complete")
    wait_until(lambda: handover.state is ReceiverState.READY, seconds=20, what="an offer")
    found.survivor.receiver.read(handover, Wanted(np.array([3, 4]), 0, 0))
    wait_until(lambda: handover.state is ReceiverState.HELD, seconds=20, what="the KV")
    assert found.victim.do("look") == "offered"
    found.die(how)
    (peer,) = found.survivor.endpoint.instances
    wait_until(lambda: peer.gone, seconds=FREED_SECONDS, what="the verdict")
    assert handover.state is ReceiverState.HELD
    assert_nothing_is_held(found)
    assert same_kv(found.planes, [3, 4], pool(0, 1, PAGE, seed=1)[1], [1, 2])
    assert not same_kv(found.planes, [3, 4], pool(0, 1, PAGE, seed=2)[1], [3, 4])


@pytest.mark.parametrize("how", SIGNALS, ids=lambda how: how.name)
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_pushing_survives(stage: ExitStack, victim: str, how: signal.Signals) -> None:
    """The pages are decode's to write for prefill when one of them dies."""
    found = scene(stage, victim, "push")
    handover: SendingHandover | ReceivingHandover
    if victim == "decode":
        handover = given = found.survivor.sender.open(found.number)
        found.victim.do(f"open {found.number}")
        found.victim.until("waiting")
        found.victim.do("read")
        wait_until(lambda: given.granted() is not None, seconds=20, what="decode's pages")
    else:
        found.victim.do(f"open {found.number}")
        handover = taken = found.survivor.receiver.open(found.address, found.number)
        wait_until(lambda: taken.state is ReceiverState.WAITING, seconds=20, what="a connection")
        found.survivor.receiver.read(taken, Wanted(np.array([3, 4]), 0, 0))
        wait_until(lambda: writers(found.survivor, taken), seconds=20, what="prefill's claim")
    died = found.die(how)
    # Over cma, a writer that only stands still is kept from going on by its guard page.
    assert_over(found, handover, died)


def given_up(stage: ExitStack, mode: str) -> Scene:
    """Prefill stands still, and decode has taken it for dead."""
    found = scene(stage, "prefill", mode)
    found.victim.do(f"open {found.number}")
    handover = found.survivor.receiver.open(found.address, found.number)
    wait_until(lambda: handover.state is ReceiverState.WAITING, seconds=20, what="a connection")
    found.die(signal.SIGSTOP)
    wait_until(lambda: handover.state is ReceiverState.FAILED, seconds=FREED_SECONDS, what="decode's verdict")
    return found


def gives_up(found: Scene, seconds: float) -> None:
    """Prefill goes on, and ends its hand-over."""
    os.kill(found.victim.process.pid, signal.SIGCONT)
    wait_until(lambda: found.victim.do("look") == "lost", seconds=seconds, what="prefill's verdict")


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_prefill_that_stood_still_gives_up_though_decode_connects_again(stage: ExitStack, mode: str) -> None:
    found = given_up(stage, mode)
    found.survivor.receiver.open(found.address, next(NUMBERS))
    gives_up(found, FREED_SECONDS)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_prefill_that_stands_still_again_and_again_gives_up_too(stage: ExitStack, mode: str) -> None:
    """It never runs for long enough to miss decode; decode's message ends the request. On a busy machine the
    first moments can be too short for that, so each is longer than the one before."""
    found = given_up(stage, mode)
    ends = time.monotonic() + ROUNDS_SECONDS
    for part in itertools.count(0.25, 0.05):
        if time.monotonic() > ends:
            break
        with contextlib.suppress(TimeoutError):
            return gives_up(found, VERDICT_SECONDS * min(part, 0.9))
        found.die(signal.SIGSTOP)
        time.sleep(VERDICT_SECONDS * 0.6)
    pytest.fail("prefill keeps a request without a reader")


def assert_over(found: Scene, handover: SendingHandover | ReceivingHandover, died: float) -> None:
    """The hand-over has ended within the time, and nothing of it is held."""
    wait_until(
        lambda: not pins(handover.state) and handover.state in (SenderState.LOST, ReceiverState.FAILED),
        seconds=FREED_SECONDS - (time.monotonic() - died),
        what=f"the end of a hand-over that is {handover.state.value}",
    )
    assert_nothing_is_held(found)


def writers(agent: Agent, taken: ReceivingHandover) -> int:
    """Prefill ranks that may be writing to a hand-over's pages."""
    return agent.claims.writers(f"{taken.number:x}")


def assert_nothing_is_held(found: Scene) -> None:
    """No hand-over has a task, no page is sealed or granted."""
    agent = found.survivor
    wait_until(lambda: agent.sender.live == agent.receiver.live == 0, seconds=20, what="hand-overs to end")
    pages = agent.endpoint.pools[HBM_POOL]
    assert not pages.is_sealed(np.arange(PAGES)).any()
    assert pages.granted == 0
    agent.sender.check()

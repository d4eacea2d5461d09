"""Instances that change between prefill and decode in a simulation, as the router's controller decides."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from sglang_ext.cost_model import CostModel
from sglang_ext.errors import ConfigError
from sglang_ext.router.policies.base import Role
from sglang_ext.simulator.instance import Instance
from sglang_ext.simulator.outcome import Outcome
from sglang_ext.simulator.run import Simulation
from sglang_ext.simulator.settings import Settings, changed
from sglang_ext.simulator.virtual_time import VirtualLoop
from sglang_ext.simulator.workload import Session, Turn

FLEET = "prefill=2,decode=2,pd_caching=3,hbm=2500,dram=4000,policy=cost,fetch=off,requests=100000,running=24"
AFTER_S = 5.0
"""In which the returns of the last answers end."""
ON = "role_controller=on,role_dwell_secs=10,role_switch_s=1"


@dataclass(frozen=True)
class One:
    """A session of one request."""

    name: str
    start_s: float
    turn: Turn
    tenant: int = 0

    def turns(self) -> Iterator[Turn]:
        return iter((self.turn,))


@dataclass(frozen=True)
class Phase:
    """A load. rate: requests a second. prompt, answer: tokens of each on average."""

    seconds: float
    rate: float
    prompt: int
    answer: int


LONG_PROMPTS, LONG_ANSWERS = Phase(150.0, 2.6, 9000, 8), Phase(120.0, 5.0, 200, 700)


SHORT = Phase(60.0, 2.6, 9000, 8)


def load(*phases: Phase) -> Iterator[Session]:
    draw, now, end, number = random.Random("phases"), 0.0, 0.0, 0
    for phase in phases:
        end += phase.seconds
        while (now := now + draw.expovariate(phase.rate)) < end:
            prompt, answer = (round(mean * draw.uniform(0.6, 1.4)) for mean in (phase.prompt, phase.answer))
            turn = Turn(draw.randbytes(4 * prompt), draw.randbytes(4 * max(2, answer)))
            yield One(f"one-{number}", now, turn)
            number += 1
        now = end


def simulated(text: str, *phases: Phase) -> tuple[Simulation, Outcome]:
    """A checked run."""
    loop = VirtualLoop()
    settings = changed(Settings(), f"{FLEET},{text}")
    run = Simulation(settings, CostModel(), loop, load(*phases))
    try:
        loop.run_until_complete(run.run())
        loop.run_until_complete(asyncio.sleep(AFTER_S))
        run.check()
    finally:
        loop.close()
    return run, run.outcome


def test_instances_follow_a_load_whose_phase_changes() -> None:
    run, outcome = simulated(ON, LONG_PROMPTS, LONG_ANSWERS)
    flips = [(at, role) for at, _, role in outcome.role_changes]
    assert [role for _, role in flips] == ["prefill", "decode"]
    assert flips[0][0] < LONG_PROMPTS.seconds < flips[1][0]
    for role in ("prefill", "decode"):
        assert outcome.counts[f"changes to {role}, done"] == 1
    assert outcome.as_json()["role_changes"] == [list(each) for each in outcome.role_changes]
    for _, name, role in outcome.role_changes:
        assert run.instances[name].role.value == run.router.fleet.rows[name].role.value == role
    # The twin, in which the controller is off: long prompts wait for the two that prefill.
    fixed, without = simulated("role_controller=off", LONG_PROMPTS, LONG_ANSWERS)
    assert not without.role_changes
    assert [i.role.value for i in fixed.instances.values()] == ["prefill", "prefill", "decode", "decode"]
    assert without.requests == outcome.requests
    assert mean(outcome.ttft) < 0.3 * mean(without.ttft)
    assert mean(outcome.jct) < 0.5 * mean(without.jct)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def test_a_dry_run_changes_nothing_and_counts_what_it_would() -> None:
    run, outcome = simulated(ON.replace("=on", "=dry-run"), SHORT)
    assert outcome.counts["changes to prefill, dry-run"] > 0
    assert not outcome.role_changes
    fixed, without = simulated("role_controller=off", SHORT)
    assert list(outcome.ttft) == list(without.ttft)
    assert [i.role for i in run.instances.values()] == [i.role for i in fixed.instances.values()]


def test_an_instance_keeps_its_cache_and_the_index_learns_it_anew() -> None:
    loop = VirtualLoop()
    settings = changed(Settings(), f"{FLEET},{ON}")
    run = Simulation(settings, CostModel(), loop, load(SHORT))
    held, known = list[int](), list[int]()
    switch = Instance.switch

    class Watched(Instance):
        def switch(self, role: Role) -> None:
            switch(self, role)
            held.append(self.engine.tree.blocks_of(self.engine.hbm))
            loop.call_later(1.0, lambda: known.append(run.router.index.tokens_of(self.name)))

    run.instance_type = Watched
    try:
        loop.run_until_complete(run.run())
        run.check()
    finally:
        loop.close()
    ((_, _, role),) = run.outcome.role_changes
    assert role == "prefill"
    assert held[0] > 100, "of what it has decoded"
    assert known[0] >= 16 * held[0] / 2, "a second later"


def test_changes_go_on_beside_deaths_returns_and_fetches() -> None:
    text = f"{ON},fetch=on,failures=30,restart_s=5"
    run, outcome = simulated(text, SHORT, Phase(60.0, 4.0, 200, 500))
    assert outcome.counts["deaths"] > 1
    assert outcome.counts["returned blocks"] > 0
    assert outcome.counts["changes to prefill, done"] > 0
    sent = sum(1 for _ in load(SHORT, Phase(60.0, 4.0, 200, 500)))
    assert outcome.requests + outcome.failed.total() == sent
    for instance in run.instances.values():
        assert instance.idle


def test_a_seed_gives_the_same_outcome() -> None:
    one, other = (simulated(ON, SHORT)[1].as_json() for _ in range(2))
    assert one == other
    assert one["role_changes"]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("role_controller=on", "needs prefill and decode"),
        ("role_controller=on,prefill=1,decode=2", "pd_caching=2 or 3"),
        ("role_controller=maybe", "off, dry-run, on"),
        ("role_dwell_secs=0", "role_dwell_secs"),
    ],
)
def test_impossible_controllers_are_refused(what: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        changed(Settings(), what)

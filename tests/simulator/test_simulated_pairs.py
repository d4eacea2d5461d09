"""Prefill and decode apart, simulated: the router's pair choice, hand-overs over the network, and deaths."""

from __future__ import annotations

import asyncio

import pytest

from sglang_ext.cost_model import CostModel
from sglang_ext.errors import ConfigError
from sglang_ext.router.policies.base import Role
from sglang_ext.simulator.outcome import Outcome
from sglang_ext.simulator.run import Simulation
from sglang_ext.simulator.settings import Settings, changed, checked
from sglang_ext.simulator.virtual_time import VirtualLoop
from sglang_ext.simulator.workload import mixed
from sglang_ext.tiers import Tier

AFTER_S = 5.0
"""In which the returns of the last answers end."""
FLEET = "requests=80,policy=cost,hbm=1000,dram=1200,fetch=off,rate=1"


def run(what: str) -> tuple[Simulation, Outcome]:
    """A checked run of the fleet with such changes."""
    loop = VirtualLoop()
    settings = checked(changed(Settings(), f"{FLEET},{what}"))
    simulation = Simulation(settings, CostModel(), loop, mixed(settings))
    try:
        loop.run_until_complete(simulation.run())
        loop.run_until_complete(asyncio.sleep(AFTER_S))
        simulation.check()
    finally:
        loop.close()
    return simulation, simulation.outcome


def test_prefill_computes_and_decode_generates() -> None:
    simulation, outcome = run("prefill=2,decode=1")
    assert outcome.requests == 80
    for instance in simulation.instances.values():
        computes = instance.role is Role.PREFILL
        assert bool(instance.work.computed_tokens) is computes
        assert bool(instance.work.steps) is not computes
        if not computes:
            assert instance.engine.hbm_tier.total == 0, "decode keeps nothing with --kv-pd-caching 1"
    moved = outcome.prompt_tokens * CostModel().kv_bytes_per_token
    assert outcome.link_bytes["between instances"] == pytest.approx(moved)


def test_decode_is_handed_what_it_lacks() -> None:
    _, without = run("prefill=1,decode=1")
    _, kept = run("prefill=1,decode=1,pd_caching=2")
    assert kept.link_bytes["between instances"] < 0.8 * without.link_bytes["between instances"]


def test_prefill_gets_answers_back() -> None:
    """With fewer tokens to compute in later turns, of which decode alone had the KV."""
    kept, returned = run("prefill=2,decode=1,pd_caching=2"), run("prefill=2,decode=1,pd_caching=3")
    assert kept[1].counts["returned blocks"] == 0
    blocks = returned[1].counts["returned blocks"]
    assert blocks > 300
    assert sum(returned[1].hits.values()) > sum(kept[1].hits.values())
    nbytes = [found.link_bytes["between instances"] for _, found in (kept, returned)]
    lent = 16 * CostModel().kv_bytes_per_token
    assert nbytes[1] > nbytes[0] + 0.5 * blocks * lent
    for instance in returned[0].instances.values():
        tree = instance.engine.tree
        assert tree.locked_blocks_of(instance.engine.hbm) == 0, "nothing stays locked for a return"


def test_a_return_whose_decode_instance_dies_leaves_nothing_behind() -> None:
    for seed in range(3):
        simulation, outcome = run(
            f"prefill=2,decode=2,failures=400,restart_s=2,pd_caching=3,network=1e9,seed={seed}"
        )
        assert outcome.counts["deaths"] > 3
        assert outcome.counts["returned blocks"] > 0
        for instance in simulation.instances.values():
            assert instance.engine.store.ledger.reserved(Tier.HBM) == 0


def test_first_tokens_wait_for_the_network() -> None:
    _, fast = run("prefill=1,decode=1")
    _, slow = run("prefill=1,decode=1,network=5e8")
    # 128 KiB a token, 2,500 tokens on average: 0.03 and 0.65 s each.
    assert sum(slow.ttft) / 80 > sum(fast.ttft) / 80 + 0.3


def test_requests_survive_the_death_of_either_half() -> None:
    simulation, outcome = run("prefill=2,decode=2,failures=400,restart_s=2,pd_caching=2")
    assert outcome.requests + sum(outcome.failed.values()) == 80
    assert outcome.retried > 0
    assert {instance.role for instance in simulation.instances.values()} <= {Role.PREFILL, Role.DECODE}


def test_a_seed_gives_the_same_outcome() -> None:
    assert run("prefill=1,decode=2")[1].as_json() == run("prefill=1,decode=2")[1].as_json()


@pytest.mark.parametrize("what", ["prefill=1", "decode=1", "prefill=1,decode=1,pd_caching=4"])
def test_impossible_fleets_are_refused(what: str) -> None:
    with pytest.raises(ConfigError):
        changed(Settings(), what)

"""Disks of simulated instances: the engine's own writes and reads over blocks without bytes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from sglang_ext.cost_model import CostModel
from sglang_ext.geometry import BlockLayout
from sglang_ext.simulator.disk import NamedDisk
from sglang_ext.simulator.outcome import Outcome
from sglang_ext.simulator.run import DETECTION_S, Simulation, url
from sglang_ext.simulator.settings import Settings, changed
from sglang_ext.simulator.virtual_time import VirtualLoop
from sglang_ext.simulator.workload import mixed
from sglang_ext.tiered_store.tier import Get, Put
from sglang_ext.tiered_store.tier import Outcome as Ended
from sglang_ext.tiers import Tier

LAYOUT = BlockLayout.uniform(n_layers=1, planes_per_layer=1, row_bytes=64, block_tokens=16)
FLEET = "instances=2,requests=120,policy=cost,hbm=1000,dram=1200"
SPACE = b"s" * 16


def run(what: str, look: Callable[[Simulation], None] = lambda run: None) -> tuple[Simulation, Outcome]:
    """A checked run of the fleet with such changes; ``look`` is called in the middle of it."""
    loop = VirtualLoop()
    settings = changed(Settings(), f"{FLEET},{what}")
    simulation = Simulation(settings, CostModel(), loop, mixed(settings))
    loop.call_at(15.0, look, simulation)
    try:
        loop.run_until_complete(simulation.run())
        simulation.check()
    finally:
        loop.close()
    return simulation, simulation.outcome


def test_blocks_that_left_memory_are_found_on_disk() -> None:
    known: list[tuple[int, int]] = []

    def look(run: Simulation) -> None:
        for name, instance in run.instances.items():
            replica, drive = run.router.index.replica(name), instance.engine.drive
            assert replica is not None
            assert drive is not None
            known.append((len(replica.named[Tier.DISK]), drive.tier.stats().blocks))

    _, with_disk = run("disk=9000", look)
    _, without = run("disk=0")
    assert with_disk.hits[Tier.DISK] > 1000
    assert without.hits[Tier.DISK] == 0
    assert with_disk.counts["computed tokens"] < without.counts["computed tokens"]
    assert with_disk.counts["evicted blocks of disk"] == 0
    assert with_disk.link_bytes["from disk"] > 0
    for by_router, on_disk in known:
        assert on_disk - 400 < by_router <= on_disk, "the router knows the names on each disk, a little later"
    assert len(known) == 2


def test_a_small_disk_gives_up_its_oldest_segments() -> None:
    simulation, outcome = run("disk=1500")
    assert outcome.counts["evicted blocks of disk"] > 1000
    for instance in simulation.instances.values():
        assert instance.engine.drive is not None
        assert instance.engine.drive.tier.used_blocks <= 1500


def test_a_slow_disk_delays_no_request_for_long() -> None:
    """Reads that take longer than computing are given up, or not begun."""
    _, fast = run("disk=9000")
    _, slow = run("disk=9000,disk_read=2e7")
    assert slow.requests == fast.requests == 120
    assert slow.hits[Tier.DISK] < fast.hits[Tier.DISK]


def test_a_seed_gives_the_same_outcome() -> None:
    assert run("disk=1500")[1].as_json() == run("disk=1500")[1].as_json()


def test_an_instance_that_dies_is_checked_too() -> None:
    _, outcome = run("disk=3000,failures=200,hints=0.5,restart_s=5")
    assert outcome.requests + sum(outcome.failed.values()) == 120


@pytest.mark.parametrize("keeps", [True, False])
def test_an_instance_that_dies_finds_its_disk_again(keeps: bool) -> None:
    """And the router gets to know the names on it; the twin loses the disk as well."""
    known: list[tuple[int, int]] = []

    def look(run: Simulation) -> None:
        replica, drive = run.router.index.replica(url(0)), run.instances[url(0)].engine.drive
        assert replica is not None
        assert drive is not None
        known.append((drive.tier.stats().blocks, len(replica.named.get(Tier.DISK, ()))))

    def die(run: Simulation) -> None:
        look(run)
        tasks.append(asyncio.ensure_future(run._restart(0)))
        if not keeps:
            asyncio.get_running_loop().call_soon(run._disks.clear)
        asyncio.get_running_loop().call_later(DETECTION_S + 1 + 0.5, look, run)

    tasks: list[asyncio.Task[None]] = []
    simulation, outcome = run("disk=9000,restart_s=1,requests=150", die)
    (blocks, _), (after, by_router) = known
    assert blocks > 300
    assert outcome.counts["deaths"] == 1
    drive = simulation.instances[url(0)].engine.drive
    assert drive is not None
    if keeps:
        assert after >= blocks
        assert by_router >= blocks
        assert drive.reading.moved > 0
    else:
        assert after < blocks


def put(disk: NamedDisk, keys: list[bytes]) -> Ended:
    """Write blocks at once."""
    found = disk.prepare_put(SPACE, keys)
    if not isinstance(found, Put):
        return found
    return disk.complete_puts([found])[0]


def get(disk: NamedDisk, keys: list[bytes]) -> Get:
    found = disk.prepare_get(SPACE, keys)
    disk.complete_get(found)
    return found


def test_random_use_keeps_the_invariants() -> None:
    draw, now = random.Random("disk"), [0.0]
    disk = NamedDisk(256, LAYOUT, lambda: now[0])
    there: set[bytes] = set()

    def watch(stored: object, removed: object) -> None:
        there.update(stored)  # type: ignore[call-overload]
        there.difference_update(removed)  # type: ignore[call-overload]

    disk.watch(watch)
    prompts = [[draw.randbytes(16) for _ in range(draw.randint(1, 40))] for _ in range(60)]
    for _ in range(2000):
        now[0] += draw.expovariate(1)
        keys = draw.choice(prompts)
        if draw.random() < 0.5:
            put(disk, keys)
        elif draw.random() < 0.9:
            assert get(disk, keys).blocks == disk.match(SPACE, keys)
        else:
            disk.drop(SPACE, keys[draw.randrange(len(keys)) :])
        disk.check()
        assert there == set(disk.names())
    assert disk.evicted > 0


@pytest.mark.parametrize("pinned", [True, False])
def test_what_is_read_stays(pinned: bool) -> None:
    disk = NamedDisk(64, LAYOUT, lambda: 0.0)
    first = [b"%016d" % n for n in range(4)]
    put(disk, first)
    if pinned:
        disk.prepare_get(SPACE, first)
    for start in range(100, 600, 4):
        put(disk, [b"%016d" % n for n in range(start, start + 4)])
    assert (disk.match(SPACE, first) == 4) is pinned

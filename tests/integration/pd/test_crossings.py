"""Hints, disaggregation, the disk, moving requests, changing roles, tenants and updated weights, all crossed.

Random programmes (`tests.support.programmes`) on a small fleet, whose answers are a stock server's: a
programme with each pair of these, a damaged twin, and earlier failures. The long form draws them for half an
hour, and prints the seed of each that fails. To run some seeds again:

    SGLANG_EXT_CROSSINGS=7,40 python -m pytest --long tests/integration/pd/test_crossings.py -k drawn
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Iterator

import aiohttp
import httpx
import pytest
from crossing_fleet import Fleet, Front, Models, fleet_of, front_of
from crossings import Differs, NotItsOwn, Played, Player, stock_answers
from disk_damage import damage_last_layer, runs, spoil_values

from sglang_ext.testing.waiting import wait_until
from tests.support.leaks import LeakGuard
from tests.support.programmes import (
    KEPT,
    SHORT,
    Ask,
    Fill,
    Hint,
    Kept,
    Mechanism,
    Programme,
    Step,
    Turn,
    crossings,
    draw,
    shortened,
)
from tests.support.servers.server import ServerProcess

LONG_SECONDS = 1800
SEEDS = "SGLANG_EXT_CROSSINGS"
"""The environment variable with seeds to run instead of new ones."""

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, leak_guard: LeakGuard) -> Iterator[Fleet]:
    models = Models.made(tmp_path_factory.mktemp("models"))
    with leak_guard.adopting(), fleet_of(tmp_path_factory.mktemp("crossings"), models) as fleet:
        yield fleet


@pytest.fixture(autouse=True)
def log_of_moves(caplog: pytest.LogCaptureFixture) -> None:
    """A test that fails shows the outcome of each move."""
    caplog.set_level(logging.INFO, "router.moving")


async def played(
    programme: Programme,
    fleet: Fleet,
    front: Front,
    stock: ServerProcess,
    *,
    at_least: Counter[str] | None = None,
) -> Played:
    """Run a programme. That all its turns were handed over and all its roles changed is seen to here.

    at_least: further counts that must be reached.
    """
    must = Counter({"handed over": len(list(programme.turns)), "role changes done": programme.role_changes})
    expected = await asyncio.to_thread(stock_answers, programme, stock, fleet.models)
    return await Player(programme, fleet, front).play(expected, at_least=must + Counter(at_least))


FIRST, SECOND, OTHERS = Turn(0, 0, 0), Turn(0, 1, 0), Turn(0, 0, 1)


async def test_everything_crossed_changes_no_answer(fleet: Fleet, truth: ServerProcess) -> None:
    """The twin, with the first turn of the same programme: decode does not verify the bytes that it reads of
    a prompt, so the answer has to show one damaged byte."""
    programme = draw(SHORT.seed, SHORT.steps)
    async with front_of(fleet, programme.policy) as front:
        happened = Counter({"moves moved": 1, "hints ready": 1, "prefetched": 1, "from disk": 1})
        found = await played(programme, fleet, front, truth, at_least=happened)
        assert any(cached for turn, cached in found.cached.items() if turn.number > 0)
        await handed_over_damaged(shortened(programme, Ask((FIRST,))), fleet, front, truth)


@pytest.mark.long
@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: str(kept.seed))
async def test_what_has_failed_once(kept: Kept, fleet: Fleet, truth: ServerProcess) -> None:
    """Seed 685 has a short twin: `tests/router/fleet/test_health.py`, an instance with updated weights."""
    programme = draw(kept.seed, kept.steps)
    async with front_of(fleet, programme.policy) as front:
        await played(programme, fleet, front, truth)


@pytest.mark.long
async def test_tenants_that_share_are_noticed(fleet: Fleet, truth: ServerProcess) -> None:
    """The twin of the tenants: without salts, the second one finds the first one's KV."""
    both = shortened(draw(SHORT.seed, SHORT.steps), Ask((FIRST,)), Ask((OTHERS,)))
    expected = await asyncio.to_thread(stock_answers, both, truth, fleet.models)
    async with front_of(fleet, both.policy, isolated=False) as front:
        with pytest.raises(NotItsOwn):
            await Player(both, fleet, front).play(expected)


@pytest.mark.long
async def test_one_damaged_byte_is_another_answer_or_is_noticed(fleet: Fleet, truth: ServerProcess) -> None:
    """Bytes that decode reads of a moving request are not verified either. Bytes from disk are, for a hint
    too."""
    whole = draw(SHORT.seed, SHORT.steps)
    async with front_of(fleet, whole.policy) as front:
        await handed_over_damaged(shortened(whole, Ask((FIRST,), moves=True)), fleet, front, truth)
        loaded = shortened(whole, Ask((FIRST,)), Fill(0), Hint(0, 0, waits=True), Ask((SECOND,)))
        expected = await asyncio.to_thread(stock_answers, loaded, truth, fleet.models)

        async def damage(_: int, step: Step) -> None:
            if isinstance(step, Hint):
                await asyncio.to_thread(damage_disks, fleet)

        noticed = Counter({"damaged on disk": 1, "hints ready": 1})
        found = await Player(loaded, fleet, front).play(expected, at_least=noticed, before=damage)
        assert found.cached[SECOND] == 0
        assert not found.did["from disk"]


async def handed_over_damaged(programme: Programme, fleet: Fleet, front: Front, stock: ServerProcess) -> None:
    """One bit of the bytes that decode reads is flipped; with moves, only of the moving request."""
    expected = await asyncio.to_thread(stock_answers, programme, stock, fleet.models)
    (step,) = programme.steps
    assert isinstance(step, Ask)
    faults = [folder / "damage" for folder in fleet.faults.values()]

    def damage() -> None:
        for each in faults:
            each.touch()

    async def at_once(*_: object) -> None:
        if not step.moves:
            damage()

    try:
        with pytest.raises(Differs):
            await Player(programme, fleet, front, on_drain=damage).play(expected, before=at_once)
    finally:
        for each in faults:
            each.unlink(missing_ok=True)


def damage_disks(fleet: Fleet) -> None:
    """One bit of the last layer of every block on every disk."""
    backlog = "sglang_ext_cache_disk_backlog_bytes"
    wait_until(lambda: fleet.total(backlog) == 0, seconds=30, what="everything written")
    for folder in fleet.disks.values():
        damage_last_layer(runs(folder), spoil_values, forge=False)


@pytest.mark.long
@pytest.mark.timeout(LONG_SECONDS + 900)
async def test_drawn_programmes(fleet: Fleet, truth: ServerProcess) -> None:
    """Whatever their seeds: half an hour of new ones, or those that are named."""
    named = [int(seed) for seed in os.environ.get(SEEDS, "").split(",") if seed]
    seeds = iter(named) if named else (random.SystemRandom().randrange(1 << 32) for _ in itertools.count())
    deadline = time.monotonic() + LONG_SECONDS
    did: Counter[str] = Counter()
    crossed: set[frozenset[Mechanism]] = set()
    failed: list[int] = []
    for seed in seeds:
        if time.monotonic() > deadline:
            break
        programme = draw(seed)
        try:
            async with front_of(fleet, programme.policy) as front:
                did += (await played(programme, fleet, front, truth)).did
        except (AssertionError, OSError, aiohttp.ClientError, httpx.HTTPError):
            failed.append(seed)
            print(f"\nseed {seed} fails:\n{traceback.format_exc()}", flush=True)
            ended = [server for server in fleet.servers.values() if not server.running]
            for server in ended:
                lines = server.log.read_text(errors="replace").splitlines()[-300:]
                print("\n".join(("the log of one that has ended:", *lines)), flush=True)
            assert not ended, f"a server has ended: {failed}"
        else:
            crossed |= crossings(programme)
            print(f"\nseed {seed} passes, {len(crossed)} crossings so far; {dict(did)}", flush=True)
    assert not failed

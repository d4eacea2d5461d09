"""Windows and states in our store below SGLang's own tree: DRAM and a disk for each component.

After each pass, besides the checks of `test_oracle_hybrids`: every block in DRAM of a prefix that the tree
has had equals the oracle's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_hybrid_store import StoreBelow, our_store
from engine_hybrids import OVERLAP, SCENARIOS, HybridKind, HybridRank, HybridScenario, MakeCache, drive
from engine_pools import WrongKvError
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from test_oracle_matches import KINDS, same_matches

from sglang_ext.engine.movers.copies import Copies
from sglang_ext.patches.adapter.hybrid.cache import HybridRadixCache

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

WINDOW = HybridScenario("window", HybridKind(window=32), window_tokens=200)
PAGED = HybridScenario("window, page 16", HybridKind(window=32, page=16), 480, window_tokens=256)
STATES = HybridScenario("states", HybridKind(states=14))
BOTH = HybridScenario("window and states", HybridKind(window=32, states=24), window_tokens=240)
PROMPT = [at % 5 for at in range(64)]


def stored(scenario: HybridScenario, **sizes: Any) -> HybridRank:
    return HybridRank(scenario, make_cache=HybridRadixCache, make_below=our_store(**sizes))


def store_of(rank: HybridRank) -> StoreBelow:
    assert isinstance(rank.below, StoreBelow)
    return rank.below


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_every_row_that_a_model_reads_is_right(scenario: HybridScenario) -> None:
    with stored(scenario, full=600, other=400, disk=4000) as rank:
        drive(rank, seed=2, steps=100)
        assert len(rank.scheduler.finished) > 10
        assert store_of(rank).store.counters.saved > 0


SIZES: dict[str, dict[str, Any]] = {
    "DRAM": {},
    "little DRAM, a disk": {"full": 120, "other": 60, "disk": 4000},
    "a small faulty disk, the real mover": {
        "full": 200,
        "other": 100,
        "disk": 300,
        "faults": 0.1,
        "threaded": True,
    },
}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_every_row_that_a_model_reads_is_right_for_long(
    scenario: HybridScenario, sizes: str, seed: int
) -> None:
    """180 runs, 54,000 passes of the loop."""
    with stored(scenario, **SIZES[sizes]) as rank:
        drive(rank, seed=300 + seed, steps=300)
        assert len(rank.scheduler.finished) > 20


def leave_hbm(rank: HybridRank, prompt: Sequence[int] = PROMPT, **options: Any) -> None:
    """Have a prompt in DRAM, and on disk, and not in HBM."""
    rank.serve(prompt, **options)
    rank.settle()
    rank.cache.check_hicache_events()
    everything = rank.pools.tokens
    rank.cache.evict(EvictParams(everything, swa_num_tokens=everything, mamba_num=everything))
    assert not list(rank.nodes())


@pytest.mark.parametrize("scenario", [WINDOW, PAGED, STATES, BOTH], ids=str)
def test_a_prompt_is_found_in_dram(scenario: HybridScenario) -> None:
    with stored(scenario) as rank:
        leave_hbm(rank)
        rank.serve([*PROMPT, 1, 2, 3])
        assert rank.scheduler.loaded == 64


@pytest.mark.parametrize("scenario", [WINDOW, PAGED, STATES, BOTH], ids=str)
def test_a_prompt_is_found_on_disk(scenario: HybridScenario) -> None:
    with stored(scenario, disk=4000) as rank:
        leave_hbm(rank)
        for part in store_of(rank).store.parts.values():
            part.memory.clear()
        rank.serve([*PROMPT, 1, 2, 3])
        assert rank.scheduler.disk_tokens >= 64
        assert rank.scheduler.loaded == 64


@pytest.mark.parametrize("scenario", [WINDOW, PAGED, STATES, BOTH], ids=str)
def test_a_prompt_that_was_flushed_is_computed_again(scenario: HybridScenario) -> None:
    with stored(scenario, disk=4000) as rank:
        rank.serve(PROMPT)
        rank.settle()
        assert rank.scheduler.flush()
        rank.serve([*PROMPT, 1, 2, 3])
        assert rank.scheduler.reused == 0


def damage(
    rank: HybridRank, component: str, change: Callable[[np.ndarray], None], plane: int | None = None
) -> None:
    """Change the blocks of a component in DRAM, in one plane.

    Args:
        change: takes bytes of shape (blocks, ...), the block that was saved last at the end.
        plane: None for the first of the last layer.
    """
    part = next(p for p in store_of(rank).store.parts.values() if p.component.name == component)
    arena = part.memory.arena
    if plane is None:
        plane = arena.layout.planes_of(arena.layout.n_layers - 1)[0]
    names = list(part.memory._blocks)
    ids = part.memory.take(names)
    assert ids is not None
    part.memory.unlock(ids)
    blocks = arena.plane(plane)[ids]
    change(blocks)
    arena.plane(plane)[ids] = blocks


def flip_a_bit(blocks: np.ndarray) -> None:
    blocks.reshape(len(blocks), -1)[0, 3] ^= 1


def exchange(blocks: np.ndarray) -> None:
    """Every block becomes its neighbour: a window row or a state of another time."""
    blocks[:] = np.roll(blocks, 1, axis=0)


DAMAGE: dict[str, tuple[HybridScenario, str, Callable[[np.ndarray], None]]] = {
    "one bit": (WINDOW, "full", flip_a_bit),
    "one bit of a model with states": (STATES, "full", flip_a_bit),
    "stale window rows": (WINDOW, "window", exchange),
    "stale window pages": (PAGED, "window", exchange),
    "states of another chunk": (STATES, "state", exchange),
    "one bit of a state": (BOTH, "state", lambda blocks: flip_a_bit(blocks[-1:])),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_in_dram_is_seen(what: str) -> None:
    scenario, component, change = DAMAGE[what]
    with stored(scenario) as rank:
        leave_hbm(rank)
        damage(rank, component, change)
        rank.look_inside = False
        with pytest.raises(WrongKvError, match="in forward"):
            rank.serve([*PROMPT, 1, 2, 3])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_match_lengths_are_those_of_sglang(kind: HybridKind) -> None:
    same_matches(kind, [UnifiedRadixCache, HybridRadixCache], ["python"] * 2, seed=3, operations=1000)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_match_lengths_are_those_of_sglang_for_long(kind: HybridKind) -> None:
    same_matches(kind, [UnifiedRadixCache, HybridRadixCache], ["python"] * 2, seed=4, operations=100_000)


def late_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies end late, unless they are waited for: nodes stay locked."""
    look, turns = Copies.look, itertools.cycle(range(7))
    monkeypatch.setattr(Copies, "look", lambda copies: None if next(turns) else look(copies))


def test_states_that_are_being_saved_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    late_saves(monkeypatch)
    with stored(STATES) as rank:
        drive(rank, seed=3, steps=250)
        assert len(rank.scheduler.finished) > 30


def test_a_cache_that_does_not_wait_for_saves_has_no_state_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: SGLang's scheduler ends."""
    late_saves(monkeypatch)
    monkeypatch.setattr(HybridRadixCache, "_end_saves", lambda cache: False)
    with stored(STATES) as rank, pytest.raises(AssertionError, match="Can not alloc mamba cache"):
        drive(rank, seed=3, steps=250)


@pytest.mark.parametrize("scenario", [WINDOW, STATES], ids=str)
def test_kv_of_former_weights_is_not_found(scenario: HybridScenario) -> None:
    """A request that decodes keeps its prompt in HBM while the weights change."""
    with stored(scenario) as rank:
        rank.scheduler.submit(list(PROMPT), new_tokens=30)
        for _ in range(6):
            rank.step()
        rank.scheduler.change_weights()
        rank.scheduler.submit([*PROMPT, 1, 2, 3], new_tokens=1)
        rank.run_out()


def a_prefill_comes_between(make_cache: MakeCache, passes: int) -> None:
    """A request ends one token before its next state is kept; after so many passes another comes."""
    scenario = HybridScenario("states on a grid, overlap", HybridKind(states=40, grid=8), settings=OVERLAP)
    with HybridRank(scenario, make_cache=make_cache) as rank:
        rank.scheduler.submit(PROMPT[:20], new_tokens=12)
        for _ in range(passes):
            rank.step()
        rank.scheduler.submit([3] * 6, new_tokens=1)
        rank.run_out()


def test_the_pass_after_a_request_does_not_overwrite_its_state() -> None:
    for passes in range(1, 12):
        a_prefill_comes_between(HybridRadixCache, passes)


def test_the_pass_after_a_request_overwrites_its_state_in_sglang() -> None:
    """The twin: of two slots for states, SGLang 0.5.23 writes the same one twice."""
    with pytest.raises(WrongKvError, match="MAMBA of node"):
        a_prefill_comes_between(UnifiedRadixCache, 4)


AGAIN = replace(
    next(each for each in SCENARIOS if each.kind.grid == 16 and each.settings.overlap), repeats=0.1
)


def requests_come_again(rank: HybridRank, seed: int) -> None:
    with rank:
        traffic = drive(rank, seed, steps=200)
        assert traffic.counts["repeat"] > 5


MEET_THE_FAULT = 2, 10, 11
"""Of 12 seeds, those that keep a wrong state in SGLang's own cache."""


@pytest.mark.parametrize("seed", MEET_THE_FAULT)
def test_states_of_requests_that_come_again_are_right(seed: int) -> None:
    requests_come_again(stored(AGAIN, full=600, other=400, disk=4000), seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12, 62))
def test_states_of_requests_that_come_again_are_right_for_long(seed: int) -> None:
    requests_come_again(stored(AGAIN, full=600, other=400, disk=4000), seed)


def test_states_of_requests_that_come_again_are_wrong_in_sglang() -> None:
    """The same fault in random traffic."""
    with pytest.raises(WrongKvError, match="MAMBA of node"):
        requests_come_again(HybridRank(AGAIN), MEET_THE_FAULT[0])

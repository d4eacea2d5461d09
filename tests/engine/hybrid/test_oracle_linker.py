"""Windows and states that come from memory below HBM by SGLang's linker, before the model reads each layer.

Saved are pages as late as SGLang's locks allow. A layer is loaded when the model reads it and not before, so
that a read which does not wait is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_hybrids import FULL, MAMBA, SCENARIOS, HybridKind, HybridRank, HybridScenario, drive
from engine_linkers import DictLinker, dictionary
from engine_pools import WrongKvError
from sglang.srt.mem_cache.hicache_storage import PoolName

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

WINDOW = HybridScenario("window", HybridKind(window=32), window_tokens=200)
STATES = HybridScenario("states", HybridKind(states=14))
PAGED = HybridScenario(
    "window and states, page 16", HybridKind(window=32, states=24, grid=16, page=16), 480, window_tokens=256
)
PROMPT = [at % 5 for at in range(64)]


def linked(scenario: HybridScenario, seed: int = 0, **options: Any) -> HybridRank:
    return HybridRank(scenario, make_below=dictionary(seed=seed, **options))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_every_row_that_a_model_reads_is_right(scenario: HybridScenario) -> None:
    with linked(scenario, seed=1) as rank:
        drive(rank, seed=2, steps=130)
        assert rank.scheduler.loaded > 0
        assert len(rank.scheduler.finished) > 10


@pytest.mark.parametrize("scenario", [WINDOW, STATES], ids=str)
def test_a_load_that_fails_reaches_its_own_requests_only(scenario: HybridScenario) -> None:
    with linked(scenario, seed=1, failing=0.5) as rank:
        drive(rank, seed=2, steps=200)
        assert rank.scheduler.failed
        assert rank.scheduler.loaded > 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_every_row_that_a_model_reads_is_right_for_long(scenario: HybridScenario, seed: int) -> None:
    """120 runs: all is kept, little is kept, or loads fail."""
    options = ({}, {"most": 400}, {"failing": 0.2})[seed % 3]
    with linked(scenario, seed=seed, **options) as rank:
        drive(rank, seed=200 + seed, steps=400)
        assert len(rank.scheduler.finished) > 30


def only_below(rank: HybridRank) -> DictLinker:
    """Have `PROMPT` below HBM and nowhere else."""
    rank.serve(PROMPT)
    rank.settle()
    assert rank.scheduler.flush()
    linker = rank.cache.linker.cache_linker
    assert isinstance(linker, DictLinker)
    return linker


@pytest.mark.parametrize("scenario", [WINDOW, STATES, PAGED], ids=str)
def test_a_prompt_is_found_below_hbm_after_a_flush(scenario: HybridScenario) -> None:
    with linked(scenario) as rank:
        only_below(rank)
        rank.serve([*PROMPT, 1, 2, 3])
        assert rank.scheduler.loaded == 64


def flip_a_bit(linker: DictLinker) -> None:
    page = next(page for (name, _), page in linker.store.items() if name is PoolName.KV)
    page[1][0].view(torch.uint8).view(-1)[3] ^= 1


def make_window_row_stale(linker: DictLinker) -> None:
    """The last page of the window becomes that before."""
    keys = [key for name, key in linker.store if name is PoolName.SWA]
    linker.store[PoolName.SWA, keys[-1]] = linker.store[PoolName.SWA, keys[-2]]


def shift_state(linker: DictLinker) -> None:
    """The state of the end becomes that of one chunk before."""
    keys = [key for name, key in linker.store if name is PoolName.MAMBA]
    linker.store[PoolName.MAMBA, keys[-1]] = linker.store[PoolName.MAMBA, keys[-2]]


DAMAGE: dict[str, tuple[HybridScenario, Callable[[DictLinker], None]]] = {
    "one bit": (WINDOW, flip_a_bit),
    "one bit of a page of 16": (PAGED, flip_a_bit),
    "a stale window row": (WINDOW, make_window_row_stale),
    "a stale window page of 16": (PAGED, make_window_row_stale),
    "a state of an earlier chunk": (STATES, shift_state),
    "a state of an earlier chunk on a grid": (PAGED, shift_state),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_below_hbm_is_seen(what: str) -> None:
    scenario, damage = DAMAGE[what]
    with linked(scenario) as rank:
        damage(only_below(rank))
        with pytest.raises(WrongKvError, match="in forward"):
            rank.serve([*PROMPT, 1, 2, 3])


@pytest.mark.parametrize(("scenario", "part"), [(WINDOW, FULL), (STATES, MAMBA)], ids=str)
def test_a_layer_that_is_not_waited_for_is_seen(scenario: HybridScenario, part: Any) -> None:
    with linked(scenario) as rank:
        only_below(rank)
        never = SimpleNamespace(consumer_index=-1, wait_until=lambda layer: None)
        owner = rank.pools.requests if part is MAMBA else rank.pools.kvcache
        owner.register_layer_transfer_counter(never)
        with pytest.raises(WrongKvError, match="in forward"):
            rank.serve([*PROMPT, 1, 2, 3])

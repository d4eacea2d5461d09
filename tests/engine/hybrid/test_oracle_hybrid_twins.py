"""The twins of the oracle for windows and states: memory and caches with one fault each, which it detects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engine_hybrids import (
    FULL,
    MAMBA,
    SWA,
    HybridKind,
    HybridPools,
    HybridRank,
    HybridScenario,
    drive,
)
from engine_pools import WrongKvError, chain_of
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool
from sglang.srt.mem_cache.unified_cache.components import MambaComponent
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_ext.patches.adapter.hbm import pool_planes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

WINDOW = HybridScenario("window", HybridKind(window=32), window_tokens=200)
STATES = HybridScenario("states", HybridKind(states=14))
GRID = HybridScenario("states on a grid", HybridKind(states=24, grid=8))
PROMPT = [at % 5 for at in range(64)]
OTHER = [at % 3 for at in range(64)]


class Kept:
    """The part of `PROMPT` in a tree: its slots in each pool, and the hashes of its tokens."""

    def __init__(self, rank: HybridRank) -> None:
        self.pools: HybridPools = rank.pools
        parts = []
        for node, chain in rank.nodes():
            assert chain == self.chain(chain_of((0, None, None), PROMPT), len(chain))
            parts.append((len(chain), node))
        self.nodes = [node for _, node in sorted(parts, key=lambda each: each[0])]
        self.slots = np.concatenate([node.component_data[FULL].value.numpy() for node in self.nodes])
        self.hashes = np.array(chain_of((0, None, None), PROMPT), np.uint64)

    @staticmethod
    def chain(hashes: list[int], tokens: int) -> list[int]:
        return hashes[:tokens]

    def flip_a_bit(self, token: int) -> None:
        plane = pool_planes(self.pools.kvcache.full_kv_pool)[1][0]
        plane.view(torch.uint8).reshape(len(plane), -1)[self.slots[token], 3] ^= 1

    def make_window_row_stale(self, token: int) -> None:
        """As if the row of the slot's last owner were still there."""
        stale = np.array(chain_of((0, None, None), OTHER), np.uint64)[token : token + 1]
        assert self.pools.window is not None
        self.pools.window.write(self.pools.window_rows(self.slots[token : token + 1]), stale, 1)

    def shift_state(self, tokens: int) -> None:
        """The last state becomes that of so many tokens before."""
        (node,) = [node for node in self.nodes if node.component_data[MAMBA].value is not None][-1:]
        end = sum(len(each.key) for each in self.nodes[: self.nodes.index(node) + 1])
        assert self.pools.state is not None
        slot = node.component_data[MAMBA].value.numpy()
        self.pools.state.write(slot, self.hashes[end - 1 - tokens : end - tokens], 1)


DAMAGE = {
    "one bit of a row": (WINDOW, lambda kept: kept.flip_a_bit(5)),
    "one bit of a row of a model with states": (STATES, lambda kept: kept.flip_a_bit(63)),
    "the oldest row of the window": (WINDOW, lambda kept: kept.make_window_row_stale(64 - 32)),
    "the newest row of the window": (WINDOW, lambda kept: kept.make_window_row_stale(63)),
    "a state one token late": (STATES, lambda kept: kept.shift_state(1)),
    "a state on a grid one token late": (GRID, lambda kept: kept.shift_state(1)),
    "a state on a grid one step late": (GRID, lambda kept: kept.shift_state(8)),
}


@pytest.mark.parametrize("look_inside", [False, True], ids=["by the model", "in the tree"])
@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_seen(what: str, look_inside: bool) -> None:
    scenario, damage = DAMAGE[what]
    with HybridRank(scenario) as rank:
        rank.serve(PROMPT)
        damage(Kept(rank))
        rank.look_inside = look_inside
        if look_inside:
            with pytest.raises(WrongKvError, match=" of node "):
                rank.check()
        else:
            with pytest.raises(WrongKvError, match="in forward"):
                rank.serve([*PROMPT, 1, 2, 3])


def test_what_a_model_does_not_read_is_not_compared() -> None:
    """The last row before the window may be anything."""
    with HybridRank(WINDOW) as rank:
        rank.serve(PROMPT)
        Kept(rank).make_window_row_stale(64 - 33)
        rank.look_inside = False
        rank.serve([*PROMPT, 1, 2, 3])
        assert rank.scheduler.reused == 64


def short_matches(params: CacheInitParams) -> UnifiedRadixCache:
    """Finds a prefix of which HBM has all but the oldest rows of the window."""
    cache = UnifiedRadixCache(params)
    cache.components[SWA].sliding_window_size -= 4
    return cache


def short_decodes(params: CacheInitParams) -> UnifiedRadixCache:
    """Frees rows of the window that the next token reads."""
    cache = UnifiedRadixCache(params)
    cache._sliding_window_size -= 4
    return cache


@pytest.mark.parametrize("make_cache", [short_matches, short_decodes])
def test_a_window_too_short_is_seen(make_cache: Callable[[CacheInitParams], UnifiedRadixCache]) -> None:
    with HybridRank(WINDOW, make_cache=make_cache) as rank:
        rank.look_inside = False
        with pytest.raises(WrongKvError, match="in forward"):
            drive(rank, seed=1, steps=400)


def take_the_state_up(self: MambaComponent, new_parent: Any, child: Any) -> None:
    """A split that gives the state of the end to the beginning."""
    above, below = new_parent.component_data[MAMBA], child.component_data[MAMBA]
    above.value, below.value = below.value, None
    above.lock_ref = 0


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "a split moves the state": (MambaComponent, "redistribute_on_node_split", take_the_state_up),
    "the matched state is not copied": (
        HybridReqToTokenPool,
        "copy_mamba_state",
        lambda *_: None,
    ),
    "a new state is not cleared": (MambaPool, "clear_slots", lambda *_: None),
    "the kept state is the live one": (MambaPool, "copy_from", lambda *_: None),
    "states are not freed": (MambaComponent, "_free_mamba_value", lambda *_: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_handling_of_states_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, twin = FAULTS[fault]
    monkeypatch.setattr(owner, name, twin)
    with HybridRank(STATES) as rank, pytest.raises(AssertionError, match=r"is wrong|is not empty|no owner"):
        drive(rank, seed=1, steps=400)

"""Two trees over the same operations must find the same lengths, and have the same room left, after each.

Compared are the lengths in HBM alone, at pages of the size of a block. A cache under test is held to SGLang's
tree by `same_matches`; here SGLang's tree in Rust is held to that in Python.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from engine_hybrid_pools import MAMBA, SWA, HybridKind, HybridPools, process_settings
from engine_hybrids import KEEPS_ON_A_GRID, MakeCache
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

TOKENS, WINDOW_TOKENS = 320, 192
KINDS = [
    HybridKind(window=24),
    HybridKind(window=32, page=16),
    HybridKind(states=16),
    HybridKind(window=24, states=16),
]
KINDS += [HybridKind(window=32, states=16, grid=16, page=16)] if KEEPS_ON_A_GRID else []


class BareTree:
    """A cache without requests: prompts are put into it whole."""

    def __init__(self, kind: HybridKind, make_cache: MakeCache, tree_core: str) -> None:
        self.pools = HybridPools(kind, tokens=TOKENS, window_tokens=WINDOW_TOKENS, tree_core=tree_core)
        self.cache = make_cache(self.pools.params())

    def find(self, key: RadixKey) -> Any:
        return self.cache.match_prefix(MatchPrefixParams(key=key))

    def lengths(self, key: RadixKey) -> tuple[int | None, ...]:
        """The match of a request with this prompt: tokens, tokens by full attention alone, and the places
        where windows or states would have made more of them useful."""
        found = self.find(key)
        branching = found.swa_branching_seqlen, found.mamba_branching_seqlen
        return (found.device_prefix_len, found.full_kv_hit_length, *branching)

    def put(self, key: RadixKey, dead: int) -> int | None:
        """Insert a prompt of whole pages, whose first ``dead`` tokens have no rows of a window any more.

        Returns how many tokens were there, None without room.
        """
        found = self.find(key)
        lock = self.cache.lock(found.last_device_node)
        before = self.cache.path_device_indices(found.last_device_node)[: found.device_prefix_len]
        added = self._put(key, before, dead)
        self.cache.unlock(lock)
        return added

    def _put(self, key: RadixKey, before: torch.Tensor, dead: int) -> int | None:
        pools, known = self.pools, len(before)
        state = self._state() if pools.kind.states else None
        slots = self._alloc(before, len(key))
        if slots is None or (pools.kind.states and state is None):
            if slots is not None:
                pools.allocator.free(slots)
            if state is not None:
                pools.requests.mamba_allocator.free(state)
            return None
        params = InsertParams(
            key=key, value=torch.cat([before, slots]), prev_prefix_len=known, mamba_value=state
        )
        if pools.kind.window and dead > known:
            pools.allocator.free_swa_segment(slots[: dead - known], start_pos=known)
            params.set_evicted_seqlen(SWA, dead)
        result = self.cache.insert(params)
        if state is not None and result.mamba_exist:
            pools.requests.mamba_allocator.free(state)
        return int(result.prefix_len)

    def _state(self) -> Any:
        slot = self.pools.requests.mamba_allocator.alloc(1)
        if slot is None:
            self.cache.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=1))
            slot = self.pools.requests.mamba_allocator.alloc(1)
        return slot

    def _alloc(self, before: torch.Tensor, end: int) -> Any:
        allocator, page, known = self.pools.allocator, self.pools.kind.page, len(before)
        if end == known:
            return torch.zeros(0, dtype=torch.int64)
        evict_from_tree_cache(self.cache, end - known)
        if page == 1:
            return allocator.alloc(end - known)
        last = before[-1:] if known else torch.tensor([-1])
        start, stop = torch.tensor([known]), torch.tensor([end])
        return allocator.alloc_extend(start, start, stop, stop, last, end - known)

    def evict(self, tokens: int, window: int, states: int) -> None:
        parts = self.pools.oracles
        swa, mamba = window * (SWA in parts), states * (MAMBA in parts)
        self.cache.evict(EvictParams(tokens, swa_num_tokens=swa, mamba_num=mamba))

    def room(self) -> dict[str, int]:
        """Free slots of each component."""
        return {part.name: len(self.pools.free(part)) for part in self.pools.oracles}


def prompts(seed: int, page: int) -> Callable[[], RadixKey]:
    """Draws prompts of whole pages that continue or fork earlier ones."""
    rnd = random.Random(seed)
    known: list[list[int]] = [[0] * page]

    def draw() -> RadixKey:
        begin = rnd.choice(known[-40:])
        begin = begin[: rnd.choice((len(begin), rnd.randrange(1, len(begin) + 1)))]
        more = [rnd.randrange(3) for _ in range(rnd.choice((0, 1, 5, 17, 40, 80)))]
        whole = ([*begin, *more][:160] + [0] * page)[: max(page, (len(begin) + len(more)) // page * page)]
        whole = whole[: len(whole) // page * page]
        known.append(whole)
        return RadixKey(array("q", whole), rnd.choice((None, None, None, "lora")))

    return draw


def same_matches(
    kind: HybridKind, caches: Sequence[MakeCache], cores: Sequence[str], seed: int, operations: int
) -> dict[str, int]:
    """Do the same to two caches and compare their matches after each operation.

    Returns how many operations of each kind there were, and the tokens found.
    """
    rnd, draw = random.Random(seed + 1), prompts(seed, kind.page)
    counts = {"match": 0, "put": 0, "full": 0, "evict": 0, "tokens": 0}
    with process_settings(kind):
        trees = [BareTree(kind, make, core) for make, core in zip(caches, cores, strict=True)]
        for at in range(operations):
            what, key = rnd.random(), draw()
            if what < 0.6:
                found = [tree.lengths(key) for tree in trees]
                counts["match"] += 1
                counts["tokens"] += found[0][0] or 0
            elif what < 0.95:
                # Some prompts come without the rows that left the window while they were decoded.
                slid = max(0, len(key) - kind.window) // kind.page * kind.page
                dead = slid if rnd.random() < 0.5 else 0
                found = [tree.put(key, dead) for tree in trees]
                counts["full" if found[0] is None else "put"] += 1
            else:
                amount = rnd.randrange(60), rnd.randrange(60), rnd.randrange(4)
                found = [tree.evict(*amount) for tree in trees]
                counts["evict"] += 1
            assert found[0] == found[1], f"operation {at}: {found}"
            room = [tree.room() for tree in trees]
            assert room[0] == room[1], f"operation {at}: {room}"
    return counts


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_both_trees_of_sglang_find_the_same(kind: HybridKind) -> None:
    counts = same_matches(kind, [UnifiedRadixCache] * 2, ["python", "rust"], seed=1, operations=1500)
    assert all(counts[what] for what in ("match", "put", "evict"))
    assert counts["tokens"] > 1000


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_both_trees_of_sglang_find_the_same_for_long(kind: HybridKind) -> None:
    same_matches(kind, [UnifiedRadixCache] * 2, ["python", "rust"], seed=2, operations=100_000)


def generous(params: CacheInitParams) -> UnifiedRadixCache:
    """A cache that asks for fewer tokens before the end of a match."""
    cache = UnifiedRadixCache(params)
    cache.components[SWA].sliding_window_size -= 4
    return cache


def forgetful(params: CacheInitParams) -> UnifiedRadixCache:
    """A cache that takes any state for the least recently used one."""
    cache = UnifiedRadixCache(params)
    cache.components[MAMBA].refresh_lru = lambda *_: None
    return cache


TWINS = {"a window too short": (KINDS[0], generous), "states are not refreshed": (KINDS[2], forgetful)}


@pytest.mark.parametrize("what", TWINS)
def test_a_cache_that_finds_other_lengths_is_seen(what: str) -> None:
    kind, twin = TWINS[what]
    with pytest.raises(AssertionError, match="operation"):
        same_matches(kind, [UnifiedRadixCache, twin], ["python"] * 2, seed=1, operations=1500)

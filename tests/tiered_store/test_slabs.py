"""One memory for blocks of several sizes: chunks pass between arenas, and bytes move with their blocks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.errors import ConfigError
from sglang_ext.geometry import BlockLayout
from sglang_ext.tiered_store.dram.slabs import LEAST_CHUNKS, MOST_CHUNKS, Slabs, chunking

KV, STATE = BlockLayout(1, ((16,),)), BlockLayout(1, ((100, 60),))


@pytest.fixture
def slabs() -> Iterator[Slabs]:
    made = Slabs([KV, STATE], 6 * 160, shared=False, pin=False)
    yield made
    made.check()
    made.close()


@given(st.lists(st.integers(1, 1 << 26), min_size=1, max_size=3), st.integers(28, 40))
def test_blocks_fill_chunks(sizes: list[int], bits: int) -> None:
    chunk, strides = chunking(sizes, 1 << bits)
    for size, stride in zip(sizes, strides, strict=True):
        assert stride >= size
        assert chunk % stride == 0
        assert stride % math.gcd(size & -size, 512) == 0
    assert (1 << bits) // chunk <= 2 * MOST_CHUNKS


@pytest.mark.parametrize(
    ("what", "sizes"),
    [
        ("Qwen3-Next: a state and the KV of a token", [24 << 10, 36 * ((2 << 20) + (48 << 10))]),
        ("Kimi-Linear: a state and the KV of 64 tokens", [64 * 7 * 1152, 20 * ((2 << 20) + (72 << 10))]),
        ("gpt-oss: pages of both kinds of layers", [64 * 36 << 10, 64 * 36 << 10]),
        ("Gemma 4: pages of unlike heads", [64 * 10 * 4096, 64 * 50 * 2048]),
    ],
)
def test_little_of_a_chunk_is_lost(what: str, sizes: list[int]) -> None:
    chunk, strides = chunking(sizes, 64 << 30)
    assert max(1 - size / stride for size, stride in zip(sizes, strides, strict=True)) < 0.04, what
    assert (64 << 30) // chunk >= LEAST_CHUNKS
    assert chunking(sizes, 512 << 30)[1] == strides, (
        "instances with more memory exchange blocks with this one"
    )


def test_memory_for_less_than_a_block_of_each_is_refused() -> None:
    with pytest.raises(ConfigError, match="do not hold a block of each component"):
        Slabs([KV, STATE], 300, shared=False, pin=False)


def test_chunks_pass_from_one_arena_to_another(slabs: Slabs) -> None:
    kv, state = slabs.arenas
    everything = kv.alloc(60)
    assert everything is not None
    assert (kv.available, state.available, state.alloc(1)) == (0, 0, None)
    kv.free(everything[10:30])
    assert (kv.free_blocks, slabs.free_chunks, state.available) == (0, 2, 2)
    taken = state.alloc(2)
    assert taken is not None
    assert kv.alloc(1) is None
    state.free(taken)
    assert kv.available == 20


def test_scattered_blocks_move_together_with_their_bytes(slabs: Slabs) -> None:
    kv, state = slabs.arenas
    ids = kv.alloc(60)
    assert ids is not None
    kv.blocks[ids] = ids[:, None] % 251
    kv.free(ids[::6])
    fixed = np.zeros(kv.n_blocks, np.bool_)
    fixed[1] = True
    assert (kv.free_blocks, kv.lacks_for_a_chunk) == (10, 1)
    moved = kv.consolidate(fixed)
    assert moved is not None
    assert 1 not in moved[0]
    assert (kv.blocks[moved[1]] == moved[0][:, None] % 251).all()
    assert state.alloc(1) is not None
    assert kv.consolidate(fixed) is None


def test_blocks_that_are_read_stay(slabs: Slabs) -> None:
    kv = slabs.arenas[0]
    ids = kv.alloc(60)
    assert ids is not None
    kv.free(ids[::3])
    assert kv.consolidate(np.ones(kv.n_blocks, np.bool_)) is None


def test_no_block_is_freed_twice(slabs: Slabs) -> None:
    kv = slabs.arenas[0]
    ids = kv.alloc(3)
    assert ids is not None
    with pytest.raises(ValueError, match="double free"):
        kv.free([int(ids[0]), int(ids[0])])
    kv.free(ids)
    with pytest.raises(ValueError, match="double free"):
        kv.free(ids)


@pytest.mark.parametrize("seed", range(5))
def test_random_use_keeps_bytes_and_books(slabs: Slabs, seed: int) -> None:
    rng = random.Random(seed)
    held: list[dict[int, int]] = [{}, {}]
    """The contents of the blocks of each arena."""
    for _ in range(400):
        at = rng.randrange(2)
        arena, own = slabs.arenas[at], held[at]
        if own and rng.random() < 0.5:
            going = rng.sample(sorted(own), rng.randint(1, len(own)))
            arena.free(going)
            for block in going:
                del own[block]
        elif (ids := arena.alloc(rng.randint(1, 1 + 8 * (1 - at)))) is not None:
            for block in ids.tolist():
                own[block] = rng.randrange(256)
                arena.blocks[block] = own[block]
        fixed = np.array([rng.random() < 0.05 for _ in range(arena.n_blocks)])
        moved = arena.consolidate(fixed)
        for block, to in zip(*(ids.tolist() for ids in moved or ()), strict=True):
            own[to] = own.pop(block)
        slabs.check()
        for arena, own in zip(slabs.arenas, held, strict=True):
            assert all((arena.blocks[block] == value).all() for block, value in own.items())

"""Prompts, and whether their KV is in HBM, for the tests of this folder."""

from __future__ import annotations

from engine_simulation import Rank
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_ext.keys import encode_tokens

BLOCK = 4


def prompt(number: int, blocks: int) -> list[int]:
    """Prompts that share nothing; one token more than whole blocks, so that all of them may match."""
    return [1000 * number + i for i in range(blocks * BLOCK + 1)]


def leave_hbm(rank: Rank) -> None:
    """Everything that was computed is in DRAM, or on disk, and not in HBM."""
    rank.settle()
    rank.cache.evict(EvictParams(num_tokens=rank.pools.tokens))
    assert rank.cache.total_size() == 0


def in_hbm(rank: Rank, tokens: list[int]) -> int:
    """Tokens, found without counting as a use."""
    return rank.tree.holders((0, None, None), encode_tokens(tokens)).get(rank.hbm, 0)

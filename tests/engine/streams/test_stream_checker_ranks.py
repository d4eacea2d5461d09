"""The stream checker over two ranks of one instance, which agree on ends of copies.

There is no memory of a device that both use, so that each rank's trace is checked by itself (`stream_ranks`).
"""

from __future__ import annotations

from typing import Any

import pytest
from engine_pools import PoolKind
from stream_engine import EARLY, FAST, LAYERS, NORMAL, PLAIN, SLOW, Loop
from stream_ranks import OneOfMany, serve_together

pytestmark = pytest.mark.usefixtures("sglang_config")

AHEAD = {"prefetch": 0.5, "hbm_tokens": 140}
KINDS: dict[PoolKind, dict[str, Any]] = {PLAIN: {}, PoolKind(page=4, layers=LAYERS): AHEAD}
"""With sizes for which requests load."""
PACES = (SLOW, FAST)
"""The first rank's queries find its copies complete later than the second's."""
SEED, STEPS = 6, 60


def races(each: OneOfMany) -> list[str]:
    return [str(race) for race in each.cuda.trace.races.values()]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("loop", [NORMAL, EARLY], ids=str)
def test_accesses_of_each_rank_are_ordered(loop: Loop, kind: PoolKind) -> None:
    both = serve_together(loop, PACES, SEED, STEPS, kind=kind, **KINDS[kind])
    for each in both:
        assert not races(each), races(each)
        each.cuda.replay(1)
    first, second = both
    assert first.rank.ranks.vectors == second.rank.ranks.vectors > 0
    assert first.rank.scheduler.loaded_tokens == second.rank.scheduler.loaded_tokens > 0
    assert first.rank.tier is not None
    assert first.rank.tier.copies.counters.written > 10


def test_ranks_share_no_memory_and_no_clock() -> None:
    """Each rank's operations are on its own streams, in memory that the other one does not know."""
    first, second = serve_together(NORMAL, PACES, SEED, 8)
    assert first.cuda.trace is not second.cuda.trace
    for each, other in ((first, second), (second, first)):
        own = {id(timeline) for timeline in each.cuda.trace.timelines}
        assert {id(operation.timeline) for operation in each.cuda.trace.operations} <= own
        for operation in each.cuda.trace.operations:
            for memory, _ in (*operation.reads, *operation.writes):
                known = other.cuda.at(memory.address)
                assert known is None, f"{operation} uses {memory.name}, which is {known.name} of another rank"


def test_a_copy_that_only_the_other_rank_has_completed_is_noticed() -> None:
    """The twin, whose ranks act on the greatest of their numbers. Their trees stay alike, but on the slower
    rank the disk and a load read blocks that its own stream still writes, and passes store to slots that it
    still reads."""
    slower, _ = serve_together(EARLY, PACES, SEED, STEPS, agree=max, dram_blocks=40)
    found = " ".join(races(slower))
    assert "| write to disk on host" in found
    assert "copy_ on stream 3 | copy_rows on stream 2" in found
    assert "copy_rows on stream 3 | pass, layer 0 on forward" in found


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", [*KINDS, PoolKind("mla", 4, LAYERS)], ids=str)
def test_accesses_of_each_rank_are_ordered_for_long(kind: PoolKind, seed: int) -> None:
    for loop in (NORMAL, EARLY):
        for each in serve_together(loop, (SLOW, FAST, 0.3), 100 + seed, 80, kind=kind, **AHEAD):
            assert not races(each), races(each)
            each.cuda.replay(1)

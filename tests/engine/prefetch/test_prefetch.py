"""Bringing KV to HBM ahead of its request: blocks loaded, order of eviction, no request waits."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from engine_movers import until
from engine_pools import PoolKind, WrongKvError
from engine_scheduler import Settings
from engine_simulation import Rank, Scenario, finish
from prefetch_rig import BLOCK, in_hbm, leave_hbm, prompt
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_ext.engine.prefetch.hbm_prefetch import (
    MOST_WAITING,
    PrefetchEnd,
    Prefetcher,
    PrefetchResult,
)
from sglang_ext.engine.prefetch.pieces import PIECE_BLOCKS
from sglang_ext.keys import encode_tokens
from sglang_ext.tiered_store.loading.layer_cache import LayerCache
from sglang_ext.tiered_store.tier import BlockTier

pytestmark = pytest.mark.usefixtures("sglang_config")

LONG = Scenario(
    "a DRAM larger than HBM",
    hbm_tokens=240,
    dram_blocks=300,
    settings=Settings(chunk=None, new_token_ratio=0.05),
)


MakeRank = Callable[..., Rank]


@pytest.fixture
def make_rank() -> Iterator[MakeRank]:
    made: list[Rank] = []

    def make(scenario: Scenario = LONG, disk: Callable[[BlockTier], BlockTier] = lambda tier: tier) -> Rank:
        made.append(Rank(scenario, disk_class=disk))
        return made[-1]

    yield make
    for rank in made:
        rank.close()


def prefetcher_of(rank: Rank) -> Prefetcher:
    found = rank.cache.find(Prefetcher)
    assert found is not None
    return found


def in_dram(rank: Rank, *prompts: list[int]) -> Rank:
    """A rank that has served these, and has them in DRAM only."""
    for tokens in prompts:
        rank.serve(tokens)
    leave_hbm(rank)
    return rank


def leave_memory(rank: Rank) -> None:
    """Everything that was computed is on disk only."""
    leave_hbm(rank)
    assert rank.tier is not None
    assert rank.arena is not None
    ids = rank.tier.take(rank.arena.n_blocks)
    rank.tier.give_back(ids)
    assert rank.tier.used_blocks == 0


def passes(rank: Rank) -> list[PrefetchResult]:
    """Passes of an idle scheduler until nothing is prefetched any more."""
    prefetcher = prefetcher_of(rank)
    for _ in range(200):
        rank.scheduler.step()
        rank.check()
        if not prefetcher.busy:
            return prefetcher.take_ended()
        if rank.promotions is not None and rank.promotions.reads.open:
            until(lambda: not _reading(rank), "the disk")
        rank.settle()
    raise AssertionError(f"it does not end: {prefetcher!r}")


def _reading(rank: Rank) -> bool:
    assert rank.promotions is not None
    rank.ranks.each_pass()
    return bool(rank.promotions.reads.open)


def prefetch(rank: Rank, tokens: list[int], id: str = "session", **terms: Any) -> PrefetchResult:
    prefetcher_of(rank).prefetch(id, tokens, **terms)
    (result,) = passes(rank)
    return result


# -- loading ----------------------------------------------------------------------------------------


def test_what_is_in_dram_is_hit_in_hbm(make_rank: MakeRank) -> None:
    tokens = prompt(1, 20)
    rank = in_dram(make_rank(), tokens)
    assert prefetch(rank, tokens) == PrefetchResult("session", PrefetchEnd.DONE, 80, 80)
    req = rank.serve(tokens)
    assert (req.cached_tokens_device, req.cached_tokens_host) == (80, 0)
    assert rank.scheduler.loaded_tokens == 0
    finish(rank)


def test_what_is_on_disk_is_hit_in_hbm(make_rank: MakeRank) -> None:
    rank = make_rank(Scenario("disk", hbm_tokens=240, dram_blocks=60, disk_blocks=400))
    tokens = prompt(1, 20)
    rank.serve(tokens)
    leave_memory(rank)
    assert prefetch(rank, tokens).brought == 80
    assert rank.promotions is not None
    assert rank.promotions.counters.promoted == 20
    req = rank.serve(tokens)
    assert (req.cached_tokens_device, req.cached_tokens_host) == (80, 0)
    finish(rank)


@pytest.mark.parametrize("plane", [None, 1, 6], ids=["sound", "wrong index keys", "wrong keys of the draft"])
def test_index_keys_of_model_and_draft_are_brought_from_disk(make_rank: MakeRank, plane: int | None) -> None:
    """The twins damage a plane in HBM."""
    kind = PoolKind("dsa", 64, layers=3, draft_layers=1)
    rank = make_rank(
        Scenario("dsa", kind, 64, hbm_tokens=64 * 8, dram_blocks=8, disk_blocks=40, settings=LONG.settings)
    )
    tokens = prompt(1, 2 * 64 // BLOCK)
    rank.serve(tokens)
    leave_memory(rank)
    assert prefetch(rank, tokens).brought == 128
    if plane is not None:
        rank.look_inside = False
        planes = [each for layer in rank.pools.tensors for each in layer]
        planes[plane].view(torch.uint8)[:] ^= 1
    with pytest.raises(WrongKvError, match="in forward") if plane is not None else nullcontext():
        req = rank.serve(tokens)
        assert (req.cached_tokens_device, req.cached_tokens_host) == (128, 0)
        finish(rank)


def test_what_comes_later_gets_hbm_shortly_before_and_dram_at_once(make_rank: MakeRank) -> None:
    rank = make_rank(Scenario("disk", hbm_tokens=240, dram_blocks=60, disk_blocks=400))
    tokens = prompt(1, 20)
    rank.serve(tokens)
    leave_memory(rank)
    prefetcher = prefetcher_of(rank)
    now = time.monotonic()
    prefetcher.expire(now)
    prefetcher.prefetch("session", tokens, earliest=now + 3600)
    assert passes(rank) == [], "it rests, and an idle scheduler may sleep"
    assert rank.promotions is not None
    assert (rank.promotions.counters.promoted, in_hbm(rank, tokens), prefetcher.prompts.resting) == (20, 0, 1)
    assert now + 3590 < prefetcher.prompts.next_due < now + 3600
    assert rank.tier is not None
    assert all(not node.locks.get(rank.tier.holder) for node in rank.tree.nodes()), "DRAM may take it back"
    prefetcher.expire(prefetcher.prompts.next_due)
    assert prefetcher.prompts.next_due == math.inf
    assert passes(rank) == [PrefetchResult("session", PrefetchEnd.DONE, 80, 80)]
    assert in_hbm(rank, tokens) == 80
    finish(rank)


def test_what_comes_earlier_than_announced_is_served_at_once(make_rank: MakeRank) -> None:
    tokens = prompt(1, 20)
    rank = in_dram(make_rank(), tokens)
    prefetcher_of(rank).prefetch("session", tokens, earliest=math.inf)
    assert passes(rank) == []
    assert prefetcher_of(rank).cancel("session")
    req = rank.serve(tokens)
    assert (req.cached_tokens_device, req.cached_tokens_host) == (0, 80)
    assert (prefetcher_of(rank).prompts.resting, prefetcher_of(rank).busy) == (0, False)
    finish(rank)


def test_what_may_come_first_is_brought_first_and_a_later_word_counts(make_rank: MakeRank) -> None:
    late, soon, now = prompt(1, 5), prompt(2, 5), prompt(3, 5)
    rank = in_dram(make_rank(), late, soon, now)
    prefetcher = prefetcher_of(rank)
    base = time.monotonic()
    prefetcher.prefetch("late", late, earliest=base + 2000)
    prefetcher.prefetch("soon", soon, earliest=base + 1000)
    prefetcher.prefetch("now", now)
    assert [result.id for result in passes(rank)] == ["now"]
    prefetcher.expire(base + 3000)
    assert [result.id for result in passes(rank)] == ["soon", "late"]
    leave_hbm(rank)
    prefetcher.prefetch("late", late, earliest=base + 9000)
    assert passes(rank) == []
    prefetcher.prefetch("late", late, earliest=base + 3000)
    assert [result.id for result in passes(rank)] == ["late"]


def test_what_comes_later_makes_room_for_what_comes_now(make_rank: MakeRank) -> None:
    """At any priority: HBM is not for requests that are far off."""
    far, near = prompt(1, 40), prompt(2, 40)
    rank = in_dram(make_rank(), far, near)
    prefetch(rank, far, "far", priority=5)
    prefetcher_of(rank).prefetch("far", far, priority=5, earliest=math.inf)
    assert (passes(rank), in_hbm(rank, far)) == ([], 160)
    assert prefetch(rank, near, "near").end is PrefetchEnd.DONE
    assert (in_hbm(rank, near), in_hbm(rank, far) < 160) == (160, True)
    prefetch(rank, far, "far", priority=5)
    assert in_hbm(rank, far) == 160, "the twin: when it is due, its priority counts"
    assert in_hbm(rank, near) < 160


def test_a_flipped_byte_is_served_as_it_is(make_rank: MakeRank) -> None:
    """The twin: a request hits the blocks that the prefetch has copied."""
    tokens = prompt(1, 20)
    rank = in_dram(make_rank(), tokens)
    assert rank.arena is not None
    rank.look_inside = False
    rank.arena.blocks[:, 0] ^= 1
    prefetch(rank, tokens)
    with pytest.raises(WrongKvError, match=r"prefix of .* in forward"):
        rank.serve(tokens)


def test_more_than_a_piece_comes_piece_by_piece(make_rank: MakeRank) -> None:
    tokens = prompt(1, 40)
    rank = in_dram(make_rank(Scenario("pieces", hbm_tokens=1200, dram_blocks=300, rows=2)), tokens)
    prefetcher_of(rank).pieces.most_blocks = 16
    arriving = []
    prefetcher_of(rank).prefetch("s", tokens)
    while prefetcher_of(rank).busy:
        rank.scheduler.step()
        rank.check()
        arriving.append(prefetcher_of(rank).pieces.arriving_tokens())
        rank.settle()
    assert [tokens for tokens in arriving if tokens] == [64, 64, 32]
    assert PIECE_BLOCKS >= 16


@pytest.mark.parametrize("ahead", [False, True])
def test_what_hbm_alone_has_does_not_hide_what_is_on_disk_behind_it(make_rank: MakeRank, ahead: bool) -> None:
    """With ``--kv-durability off``: DRAM gets the beginning from HBM, so that the disk can continue it."""
    inner: list[BlockTier] = []

    def shared(tier: BlockTier) -> BlockTier:
        inner.append(inner[0] if inner else tier)
        return inner[-1]

    first = Scenario("disk", hbm_tokens=240, dram_blocks=60, disk_blocks=400)
    rank = make_rank(first, disk=shared)
    tokens = prompt(1, 20)
    rank.serve(tokens)
    rank.settle()
    again = make_rank(dataclasses.replace(first, name="off", durability="off"), disk=shared)
    inner[0].clear = lambda namespace=None: 0  # type: ignore[method-assign]
    assert again.writes is not None
    assert rank.writes is not None
    assert again.writes.names.digest((0, None, None)) == rank.writes.names.digest((0, None, None))
    assert again.tier is not None
    assert again.promotions is not None
    again.promotions.policy._least_tokens = 1000
    again.serve(tokens[:25])  # computed: HBM alone has six blocks now
    again.promotions.policy._least_tokens = 0
    assert (in_hbm(again, tokens), again.tier.used_blocks) == (24, 0)
    if ahead:
        assert prefetch(again, tokens).tokens == 80
    else:
        assert again.serve(tokens).cached_tokens == 80
    assert again.promotions.counters.promoted == 14


def test_an_unknown_prompt_is_not_brought(make_rank: MakeRank) -> None:
    rank = make_rank(Scenario("disk", hbm_tokens=240, dram_blocks=60, disk_blocks=400))
    assert prefetch(rank, prompt(9, 5)) == PrefetchResult("session", PrefetchEnd.DONE, 0, 0)
    assert prefetch(rank, [1, 2]).tokens == 0


def test_another_tenants_kv_is_not_brought(make_rank: MakeRank) -> None:
    rank = make_rank()
    rank.serve(prompt(1, 5), salt="tenant")
    leave_hbm(rank)
    assert prefetch(rank, prompt(1, 5)).tokens == 0
    prefetcher_of(rank).prefetch("theirs", prompt(1, 5), cache_salt="tenant")
    assert passes(rank)[0].tokens == 20


# -- eviction ---------------------------------------------------------------------------------------


def announced(
    rank: Rank, *sizes: int, until: Sequence[float] = (), priority: Sequence[int] = ()
) -> list[list[int]]:
    """Prompts of so many blocks, announced and brought in this order."""
    prompts = [prompt(10 + i, blocks) for i, blocks in enumerate(sizes)]
    for tokens in prompts:
        rank.serve(tokens)
    leave_hbm(rank)
    for i, tokens in enumerate(prompts):
        result = prefetch(
            rank,
            tokens,
            f"s{i}",
            until=until[i] if until else math.inf,
            priority=priority[i] if priority else 0,
        )
        assert result.end is PrefetchEnd.DONE
    return prompts


def beside(rank: Rank, blocks: int) -> list[int]:
    """A prompt without an announcement, cached in HBM with a copy in DRAM."""
    tokens = prompt(30, blocks)
    rank.serve(tokens)
    rank.settle()
    assert in_hbm(rank, tokens) == blocks * BLOCK
    return tokens


def take(rank: Rank, blocks: int) -> None:
    """SGLang needs so many blocks more than are free."""
    rank.cache.evict(EvictParams(num_tokens=blocks * BLOCK))
    rank.check()


def test_what_is_announced_goes_after_everything_else(make_rank: MakeRank) -> None:
    rank = make_rank()
    (waiting,) = announced(rank, 12)
    ordinary = beside(rank, 10)
    rank.tree.match((0, None, None), encode_tokens(ordinary))  # used since
    take(rank, 10)
    assert (in_hbm(rank, ordinary), in_hbm(rank, waiting)) == (0, 48)
    take(rank, 3)
    assert in_hbm(rank, waiting) == 36, "and yet goes, end first"
    assert prefetcher_of(rank).retention.given_up == 3
    finish(rank)


def test_after_its_time_it_is_as_anything_else(make_rank: MakeRank) -> None:
    rank = make_rank()
    (waiting,) = announced(rank, 12, until=[10.0])
    ordinary = beside(rank, 10)
    prefetcher_of(rank).expire(9.9)
    take(rank, 4)
    assert (in_hbm(rank, ordinary), in_hbm(rank, waiting)) == (24, 48)
    prefetcher_of(rank).expire(10.0)
    rank.tree.match((0, None, None), encode_tokens(ordinary))
    take(rank, 4)
    assert (in_hbm(rank, ordinary), in_hbm(rank, waiting)) == (24, 32)
    finish(rank)


def test_withdrawn_it_is_as_anything_that_was_used_now(make_rank: MakeRank) -> None:
    rank = make_rank()
    (waiting,) = announced(rank, 12)
    ordinary = beside(rank, 10)
    prefetcher_of(rank).cancel("s0")
    take(rank, 11)
    assert (in_hbm(rank, ordinary), in_hbm(rank, waiting)) == (0, 44)
    finish(rank)


def test_low_priority_goes_first_then_what_expires_soonest(make_rank: MakeRank) -> None:
    rank = make_rank()
    prompts = announced(rank, 8, 8, 8, 8, until=[5.0, 9.0, 7.0, 1.0], priority=[0, 0, 0, 1])
    take(rank, 10)
    assert [in_hbm(rank, tokens) for tokens in prompts] == [0, 32, 24, 32]
    take(rank, 14)
    assert [in_hbm(rank, tokens) for tokens in prompts] == [0, 0, 0, 32]
    take(rank, 1)
    assert in_hbm(rank, prompts[3]) == 28
    finish(rank)


def test_a_beginning_that_hints_share_stays_with_the_stronger(make_rank: MakeRank) -> None:
    rank = make_rank()
    shared = prompt(40, 6)[:-1]
    weak, strong = [*shared, *prompt(41, 4)], [*shared, *prompt(42, 4)]
    for tokens in (weak, strong):
        rank.serve(tokens)
    leave_hbm(rank)
    prefetch(rank, weak, "weak", priority=-1)
    prefetch(rank, strong, "strong")
    take(rank, 6)
    assert (in_hbm(rank, weak), in_hbm(rank, strong)) == (24, 32)
    prefetcher_of(rank).cancel("strong")
    prefetcher_of(rank).cancel("weak")
    finish(rank)


def test_a_higher_priority_takes_the_place_of_a_lower_one(make_rank: MakeRank) -> None:
    rank = in_dram(
        make_rank(Scenario("full", hbm_tokens=160, dram_blocks=300)),
        *(prompt(number, 30) for number in (1, 2, 3)),
    )
    assert prefetch(rank, prompt(1, 30), "low").tokens == 120
    assert prefetch(rank, prompt(2, 30), "high", priority=1).end is PrefetchEnd.DONE
    assert (in_hbm(rank, prompt(1, 30)), in_hbm(rank, prompt(2, 30))) == (40, 120)
    assert prefetch(rank, prompt(3, 30), "as high", priority=1).end is PrefetchEnd.NO_ROOM
    assert in_hbm(rank, prompt(2, 30)) == 120
    finish(rank)


def test_a_high_priority_is_brought_first(make_rank: MakeRank) -> None:
    rank = in_dram(make_rank(), *(prompt(number, 10) for number in (1, 2, 3)))
    prefetcher = prefetcher_of(rank)
    prefetcher.pieces.most_blocks = 4
    prefetcher.prefetch("a", prompt(1, 10))
    prefetcher.prefetch("b", prompt(2, 10))
    rank.scheduler.step()  # the first piece of the first
    prefetcher.prefetch("c", prompt(3, 10), priority=5)
    assert [result.id for result in passes(rank)] == ["c", "a", "b"]
    finish(rank)


def test_it_is_held_back_in_dram_too(make_rank: MakeRank) -> None:
    rank = make_rank(Scenario("a small DRAM", hbm_tokens=240, dram_blocks=60, disk_blocks=4000))
    tokens = prompt(1, 20)
    rank.serve(tokens)
    rank.settle()
    prefetcher_of(rank).expect("s", tokens)
    for number in range(2, 8):
        rank.serve(prompt(number, 20))
        rank.settle()
    assert rank.tree.holders((0, None, None), encode_tokens(tokens))[rank.dram_holder] == 80
    prefetcher_of(rank).cancel("s")
    for number in range(8, 12):
        rank.serve(prompt(number, 20))
        rank.settle()
    assert rank.dram_holder not in rank.tree.holders((0, None, None), encode_tokens(tokens))
    finish(rank)


def test_a_higher_priority_takes_the_place_of_a_lower_one_in_dram(make_rank: MakeRank) -> None:
    rank = make_rank(Scenario("a small DRAM", hbm_tokens=240, dram_blocks=40, disk_blocks=4000))
    for number in (1, 2, 3):
        for blocks in (10, 20, 30):  # the disk is not to be behind
            rank.serve(prompt(number, blocks))
            rank.settle()
    leave_memory(rank)
    assert prefetch(rank, prompt(1, 30), "low").tokens == 120
    assert prefetch(rank, prompt(2, 30), "as low").tokens == 40, "DRAM has ten blocks left"
    assert prefetch(rank, prompt(3, 30), "high", priority=1).tokens == 120
    finish(rank)


def test_running_requests_get_all_that_is_announced(make_rank: MakeRank) -> None:
    rank = make_rank()
    prompts = announced(rank, 20, 20, 18)
    long = prompt(50, 45)
    req = rank.serve(long, new_tokens=10)
    assert len(req.output_ids) == 10
    assert sum(in_hbm(rank, tokens) for tokens in prompts) <= 240 - 45 * BLOCK
    finish(rank)


def test_a_repeated_hint_lives_longer_and_brings_what_has_gone(make_rank: MakeRank) -> None:
    rank = make_rank()
    (waiting,) = announced(rank, 12, until=[5.0])
    take(rank, 12)
    assert in_hbm(rank, waiting) == 0
    assert prefetch(rank, waiting, "s0", until=50.0).brought == 48
    prefetcher_of(rank).expire(6.0)
    assert len(prefetcher_of(rank).retention) == 1
    finish(rank)


def test_what_a_running_request_uses_stays(make_rank: MakeRank) -> None:
    rank = make_rank()
    (tokens,) = announced(rank, 10)
    rank.scheduler.submit([*tokens, 7], new_tokens=30)
    for _ in range(4):
        rank.scheduler.step()
        rank.check()
    before = in_hbm(rank, tokens)
    rank.cache.evict(EvictParams(num_tokens=rank.pools.tokens))
    assert in_hbm(rank, tokens) >= before == 40
    finish(rank)


def test_all_that_is_brought_counts_as_free_for_sglang(make_rank: MakeRank) -> None:
    """Also while it is on its way."""
    rank = in_dram(make_rank(), prompt(1, 20))
    prefetcher_of(rank).prefetch("s", prompt(1, 20))
    rank.scheduler.step()
    assert prefetcher_of(rank).pieces.arriving_tokens() == 80
    free = rank.pools.allocator.available_size()
    assert free + rank.cache.evictable_size() == rank.pools.tokens
    rank.check()
    rank.cache.evict(EvictParams(num_tokens=rank.pools.tokens))
    assert rank.pools.allocator.available_size() == rank.pools.tokens
    rank.check()
    (result,) = passes(rank)
    assert (result.end, result.brought) == (PrefetchEnd.GIVEN_UP, 0)


def test_the_layer_cache_keeps_the_lowest_layer_of_what_went(make_rank: MakeRank) -> None:
    """Later layers go first: HBM and DRAM give a prompt up, and its lowest layer is still in memory."""
    caches: list[LayerCache] = []

    def with_cache(tier: BlockTier) -> BlockTier:
        caches.append(LayerCache(tier, 1 << 20, 1))
        return caches[-1]

    rank = make_rank(Scenario("disk", hbm_tokens=240, dram_blocks=60, disk_blocks=400), disk=with_cache)
    tokens = prompt(1, 20)
    rank.serve(tokens)
    leave_memory(rank)
    prefetch(rank, tokens)
    leave_memory(rank)
    hits = caches[0].stats().extra["layer_cache_hits"]
    rank.serve(tokens)
    assert caches[0].stats().extra["layer_cache_hits"] == hits + 20


# -- room -------------------------------------------------------------------------------------------


def test_it_takes_the_place_of_what_was_used_before_and_has_a_copy(make_rank: MakeRank) -> None:
    rank = make_rank(Scenario("full", hbm_tokens=160, dram_blocks=300))
    first, second = prompt(1, 20), prompt(2, 38)
    rank.serve(first)
    rank.serve(second)  # takes the place of the first
    rank.settle()
    assert in_hbm(rank, first) < 80
    assert prefetch(rank, first).tokens == 80
    assert in_hbm(rank, second) > 0
    assert rank.tier is not None
    finish(rank)


def test_it_does_not_take_the_place_of_what_was_brought(make_rank: MakeRank) -> None:
    rank = in_dram(
        make_rank(Scenario("full", hbm_tokens=160, dram_blocks=300)),
        *(prompt(number, 30) for number in (1, 2)),
    )
    assert prefetch(rank, prompt(1, 30), "first").tokens == 120
    result = prefetch(rank, prompt(2, 30), "second")
    assert (result.end, result.tokens) == (PrefetchEnd.NO_ROOM, 40)
    assert in_hbm(rank, prompt(1, 30)) == 120


def test_it_never_takes_the_last_copy(make_rank: MakeRank) -> None:
    rank = in_dram(make_rank(Scenario("a small DRAM", hbm_tokens=160, dram_blocks=24)), prompt(1, 20))
    rank.serve(prompt(2, 38))
    rank.settle()
    before = in_hbm(rank, prompt(2, 38))
    held = rank.tree.holders((0, None, None), encode_tokens(prompt(2, 38)))
    prefetch(rank, prompt(1, 20))
    assert in_hbm(rank, prompt(2, 38)) >= before - held.get(rank.dram_holder, 0)


# -- no request waits -------------------------------------------------------------------------------


def test_a_batch_does_not_wait_for_a_piece(make_rank: MakeRank) -> None:
    """The mover does nothing that it is not made to do."""
    rank = make_rank()
    rank.serve(prompt(1, 10))
    rank.serve(prompt(2, 10))
    leave_hbm(rank)
    prefetcher_of(rank).prefetch("s", prompt(1, 10))
    rank.scheduler.step()
    assert prefetcher_of(rank).pieces.arriving_tokens() == 40
    rank.serve(prompt(3, 10))  # computed
    assert rank.serve(prompt(2, 10)).cached_tokens_host == 40  # loaded
    assert prefetcher_of(rank).pieces.arriving_tokens() == 40
    passes(rank)
    finish(rank)


def test_a_request_that_comes_too_early_loads_by_itself(make_rank: MakeRank) -> None:
    tokens = prompt(1, 20)
    rank = in_dram(make_rank(), tokens)
    prefetcher_of(rank).prefetch("s", tokens)
    rank.scheduler.step()
    assert rank.serve(tokens).cached_tokens_host == 80
    (result,) = passes(rank)
    assert (result.end, result.tokens, result.brought) == (PrefetchEnd.DONE, 80, 0)
    finish(rank)


def test_a_request_that_comes_while_the_disk_is_read_shares_the_read(make_rank: MakeRank) -> None:
    rank = make_rank(Scenario("disk", hbm_tokens=240, dram_blocks=60, disk_blocks=400))
    tokens = prompt(1, 20)
    rank.serve(tokens)
    leave_memory(rank)
    prefetcher_of(rank).prefetch("s", tokens)
    prefetcher_of(rank).each_pass()
    req = rank.serve(tokens)
    assert rank.promotions is not None
    assert rank.promotions.counters.promoted == 20
    assert req.cached_tokens == 80
    passes(rank)
    finish(rank)


# -- ends -------------------------------------------------------------------------------------------


def test_cancelling_and_asking_anew(make_rank: MakeRank) -> None:
    rank = in_dram(make_rank(), *(prompt(number, 10) for number in (1, 2)))
    prefetcher = prefetcher_of(rank)
    prefetcher.prefetch("a", prompt(1, 10))
    prefetcher.prefetch("b", prompt(2, 10))
    prefetcher.prefetch("b", prompt(1, 10))
    assert prefetcher.cancel("a")
    assert not prefetcher.cancel("a")
    assert [(r.id, r.end) for r in passes(rank)] == [
        ("b", PrefetchEnd.CANCELLED),
        ("a", PrefetchEnd.CANCELLED),
        ("b", PrefetchEnd.DONE),
    ]
    assert (in_hbm(rank, prompt(1, 10)), in_hbm(rank, prompt(2, 10))) == (40, 0)


def test_only_so_many_may_wait(make_rank: MakeRank) -> None:
    rank = make_rank()
    prefetcher = prefetcher_of(rank)
    for number in range(MOST_WAITING + 3):
        prefetcher.prefetch(str(number), prompt(number, 1))
    assert [(r.id, r.end) for r in prefetcher.take_ended()] == [
        (str(number), PrefetchEnd.DROPPED) for number in range(3)
    ]
    prefetcher.drop_in_flight()
    assert not prefetcher.busy


def test_prompts_of_one_tenant_push_out_no_others(make_rank: MakeRank) -> None:
    rank = make_rank()
    prefetcher = prefetcher_of(rank)
    prefetcher.prefetch("b", prompt(0, 1), cache_salt="b")
    for number in range(MOST_WAITING + 3):
        prefetcher.prefetch(str(number), prompt(number, 1), cache_salt="a", extra_key=str(number), priority=9)
    ended = [each.id for each in prefetcher.take_ended()]
    assert ended == [str(number) for number in range(4)], "a has all other places"
    prefetcher.drop_in_flight()


def test_a_flush_in_the_middle_leaves_nothing(make_rank: MakeRank) -> None:
    rank = in_dram(make_rank(), prompt(1, 20))
    prefetcher_of(rank).prefetch("s", prompt(1, 20))
    rank.scheduler.step()
    assert rank.scheduler.flush()
    rank.check()
    assert not prefetcher_of(rank).busy
    assert rank.cache.total_size() == 0
    assert np.array_equal(rank.pools.free_slots(), rank.pools.all_slots())


def test_new_weights_leave_what_was_brought_unfound(make_rank: MakeRank) -> None:
    tokens = prompt(1, 20)
    rank = in_dram(make_rank(), tokens)
    prefetcher_of(rank).prefetch("s", tokens)
    rank.scheduler.step()
    rank.scheduler.change_weights()
    assert len(prefetcher_of(rank).retention) == 0, "announced KV is computed anew"
    assert not prefetcher_of(rank).busy, "a piece that was being copied is given up"
    rank.check()
    passes(rank)
    assert rank.serve(tokens).cached_tokens == 0

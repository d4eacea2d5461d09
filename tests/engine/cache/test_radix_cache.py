"""The cache, call by call, over SGLang's own pools; a whole server's traffic is in test_simulation.py."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_movers import HandMover
from engine_pools import PoolKind, chain_of
from engine_scheduler import Settings
from engine_shapes import found_slots, found_tokens
from engine_simulation import Rank, Scenario
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.runtime_context import get_serving

from sglang_ext.engine.cache.rank_cache import CacheParts
from sglang_ext.engine.events.router_commands import Replies
from sglang_ext.engine.movers.mover import NOTHING_TO_WAIT_FOR
from sglang_ext.patches.adapter.own_requests import SglangHost
from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache
from sglang_ext.tiers import Tier

pytestmark = pytest.mark.usefixtures("sglang_config")

BLOCK = 4
TOKENS = [i % 11 for i in range(24)]
"""Six blocks."""

MakeRank = Callable[..., Rank]


@pytest.fixture
def make_rank() -> Iterator[MakeRank]:
    ranks: list[Rank] = []

    def make(**changes: Any) -> Rank:
        rank = Rank(Scenario("calls", block=BLOCK, **{"hbm_tokens": 128, "dram_blocks": 40, **changes}))
        ranks.append(rank)
        return rank

    yield make
    for rank in ranks:
        rank.close()


def key(tokens: list[int], **fields: Any) -> RadixKey:
    return RadixKey(array("q", tokens), **fields)


def match(rank: Rank, tokens: list[int], **fields: Any) -> MatchResult:
    return rank.cache.match_prefix(MatchPrefixParams(key=key(tokens, **fields)))


def fill(rank: Rank, tokens: list[int], **fields: Any) -> torch.Tensor:
    """Insert a prompt whose KV has been computed; returns its slots."""
    slots = rank.pools.allocator.alloc(len(tokens) // BLOCK * BLOCK)
    namespace = (rank.scheduler.weights, fields.get("extra_key"), fields.get("cache_salt"))
    chain = np.array(chain_of(namespace, tokens[: len(slots)]), np.uint64)
    for layer in range(rank.pools.oracle.layers):
        rank.pools.oracle.write(slots.numpy(), chain, layer)
    result = rank.cache.insert(InsertParams(key=key(tokens, **fields), value=slots))
    assert result.prefix_len == 0
    return slots


def hand(rank: Rank) -> HandMover:
    assert isinstance(rank.mover, HandMover)
    return rank.mover


def evict(rank: Rank, tokens: int) -> int:
    return int(rank.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted)


# -- matching and inserting -----------------------------------------------------------------------


def test_only_whole_blocks_match(make_rank: MakeRank) -> None:
    rank = make_rank()
    slots = fill(rank, TOKENS)
    for asked in (0, 3, 4, 7, 21, 24):
        result = match(rank, TOKENS[:asked])
        whole = asked // BLOCK * BLOCK
        assert found_slots(result, rank.cache).tolist() == slots[:whole].tolist()
        assert found_slots(result, rank.cache).dtype == torch.int64
        assert result.host_hit_length == 0
        assert rank.cache.is_root(result.last_device_node) == (whole == 0)
    rank.check()


@pytest.mark.parametrize("bit", [0, 29, 31, 40, 60])
def test_pictures_match_by_all_bits_of_their_ids(make_rank: MakeRank, bit: int) -> None:
    rank = make_rank()
    pads = [(1 << 61) + at % 4 for at in range(14)]
    other = [pad ^ (1 << bit) for pad in pads] if bit else [(1 << 61) + (at + 1) % 4 for at in range(14)]
    slots = fill(rank, [*TOKENS[:9], *pads, 1])
    assert found_slots(match(rank, [*TOKENS[:9], *pads, 1]), rank.cache).tolist() == slots.tolist()
    assert found_tokens(match(rank, [*TOKENS[:9], *pads[:6], 5])) == 12
    assert found_tokens(match(rank, [*TOKENS[:9], *other, 1])) == 8
    rank.cache.touch_prefix(key([*TOKENS[:9], *pads]))
    rank.look_inside = False  # the oracle goes by tokens, and a digest has none
    rank.check()


def test_the_limit_of_a_key_cuts_the_match(make_rank: MakeRank) -> None:
    rank = make_rank()
    fill(rank, TOKENS)
    assert found_tokens(match(rank, TOKENS, limit=13)) == 12


def test_what_is_handed_out_may_be_changed(make_rank: MakeRank) -> None:
    rank = make_rank()
    slots = fill(rank, TOKENS)
    found_slots(match(rank, TOKENS), rank.cache).fill_(0)
    slots_now = found_slots(match(rank, TOKENS), rank.cache)
    assert slots_now.tolist() == slots.tolist()


def test_insert_tells_what_was_there_and_keeps_it(make_rank: MakeRank) -> None:
    rank = make_rank()
    first = fill(rank, TOKENS[:16])
    other = rank.pools.allocator.alloc(24)
    for layer in range(rank.pools.oracle.layers):
        chain = np.array(chain_of((0, None, None), TOKENS), np.uint64)
        rank.pools.oracle.write(other.numpy(), chain, layer)
    result = rank.cache.insert(InsertParams(key=key(TOKENS), value=other))
    assert result.prefix_len == 16
    rank.pools.allocator.free(other[:16])  # the tree had the first 16 already, so the caller keeps its own
    assert found_slots(match(rank, TOKENS), rank.cache).tolist() == [*first.tolist(), *other[16:].tolist()]
    rank.check()


def test_an_insert_without_a_key_is_refused(make_rank: MakeRank) -> None:
    with pytest.raises(ValueError, match="key"):
        make_rank().cache.insert(InsertParams(value=torch.arange(4)))


def test_namespaces_do_not_match_each_other(make_rank: MakeRank) -> None:
    rank = make_rank()
    fill(rank, TOKENS[:16], extra_key="a")
    others: list[dict[str, Any]] = [
        {},
        {"extra_key": "b"},
        {"cache_salt": "a"},
        {"extra_key": "a", "cache_salt": "b"},
    ]
    for fields in others:
        assert found_tokens(match(rank, TOKENS, **fields)) == 0, fields
    assert found_tokens(match(rank, TOKENS, extra_key="a")) == 16
    rank.scheduler.change_weights()
    assert found_tokens(match(rank, TOKENS, extra_key="a")) == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 4, 6])
def test_of_a_request_that_saw_the_weights_change_nothing_more_is_cached(
    make_rank: MakeRank, steps: int, overlap: bool
) -> None:
    """After a chunk, at the end of its prefill, and while it decodes. Earlier cached KV stays."""
    rank = make_rank(settings=Settings(chunk=8, overlap=overlap))
    rank.scheduler.submit(TOKENS, new_tokens=8)
    for _ in range(steps):
        rank.scheduler.step()
    before = rank.cache.total_size()
    rank.scheduler.change_weights()
    while not rank.scheduler.idle:
        rank.scheduler.step()
        rank.check()
    assert rank.cache.total_size() == before
    assert found_tokens(match(rank, TOKENS)) == 0
    rank.serve(TOKENS)
    assert found_tokens(match(rank, TOKENS)) == 24


def test_kv_computed_while_weights_change_is_not_shared(make_rank: MakeRank) -> None:
    """They may change from outside at any time, from request to request."""
    rank = make_rank()
    rank.scheduler.begin_to_change_weights()
    rank.serve(TOKENS)
    assert rank.cache.total_size() == 0
    rank.cache.weights_changed()
    assert rank.serve(TOKENS).cached_tokens == 0
    assert rank.cache.total_size() == 24


def test_kv_of_overridden_embeddings_is_not_shared(make_rank: MakeRank) -> None:
    """It does not follow from the tokens: neither the whole prompt nor a chunk of it may enter the tree."""
    rank = make_rank(settings=Settings(chunk=8))
    for new_tokens in (1, 9):
        rank.serve(TOKENS, new_tokens=new_tokens, private=True)
        assert rank.cache.total_size() == 0
    rank.serve(TOKENS)
    assert found_tokens(match(rank, TOKENS)) == 24
    rank.serve(TOKENS, private=True)
    assert rank.cache.total_size() == 24


def test_two_requests_that_compute_the_same_end_on_one_copy(make_rank: MakeRank) -> None:
    rank = make_rank(settings=Settings(chunk=None))
    reqs = [rank.scheduler.submit(TOKENS, new_tokens=6) for _ in range(2)]
    rank.scheduler.step()
    rank.check()
    rows = [rank.pools.requests.req_to_token[req.kv.req_pool_idx, :24].tolist() for req in reqs]
    assert rows[0] == rows[1] == found_slots(match(rank, TOKENS), rank.cache).tolist()
    assert rank.cache.protected_size() == 24
    assert rank.pools.allocator.available_size() == 128 - 24


def test_a_request_that_has_to_forget_what_it_found_ends_on_what_is_there(make_rank: MakeRank) -> None:
    rank = make_rank()
    rank.serve(TOKENS)
    before = found_slots(match(rank, TOKENS), rank.cache).tolist()
    with envs.SGLANG_RADIX_FORCE_MISS.override(True):
        req = rank.serve(TOKENS, new_tokens=6)
    assert req.cached_tokens == 0
    assert found_slots(match(rank, TOKENS), rank.cache).tolist() == before


def test_the_tail_shorter_than_a_block_goes_with_its_request(make_rank: MakeRank) -> None:
    rank = make_rank()
    rank.serve([*TOKENS, 1, 2, 3], new_tokens=1)
    assert rank.cache.total_size() == 24
    assert rank.pools.allocator.available_size() == 128 - 24


def test_a_retracted_request_gives_back_what_it_did_not_share(make_rank: MakeRank) -> None:
    rank = make_rank(settings=Settings(max_running=4))
    req = rank.scheduler.submit(TOKENS, new_tokens=20)
    for _ in range(8):
        rank.scheduler.step()
    rank.scheduler.retract_all()
    rank.check()
    assert req.kv.req_pool_idx is None
    assert rank.cache.protected_size() == 0
    assert rank.cache.total_size() == 24
    rank.serve(TOKENS)
    assert req.finished()


def test_thinking_that_is_not_kept_is_freed_once_also_after_retraction(make_rank: MakeRank) -> None:
    """A request that comes back has put its output into the tree; at its end only the prompt is its own.

    SGLang's own cache frees such output twice.
    """
    rank = make_rank()
    with get_serving().override(strip_thinking_cache=True):
        req = rank.scheduler.submit(TOKENS, new_tokens=20)
        for _ in range(12):
            rank.scheduler.step()
        rank.scheduler.retract_all()
        rank.scheduler.step()
        assert req.kv.cache_protected_len > len(TOKENS)
        while not rank.scheduler.idle:
            rank.scheduler.step()
            rank.check()
        assert req.finished()
        rank.serve([5] * 24, new_tokens=12)
    assert found_tokens(match(rank, [5] * 40)) == 24


# -- eviction -------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [0, 1, 4, 5, 24, 1000])
def test_eviction_frees_whole_blocks_and_says_how_many_tokens(make_rank: MakeRank, asked: int) -> None:
    rank = make_rank(dram_blocks=None)
    fill(rank, TOKENS)
    expected = min(-(-asked // BLOCK) * BLOCK, 24)
    available = rank.pools.allocator.available_size()
    assert evict(rank, asked) == expected
    assert rank.pools.allocator.available_size() == available + expected
    assert rank.cache.evictable_size() == 24 - expected
    assert found_tokens(match(rank, TOKENS)) == 24 - expected
    rank.check()


@pytest.mark.skipif(not hasattr(BasePrefixCache, "touch_prefix"), reason="SGLang does so from 0.5.22 on")
@pytest.mark.parametrize(("touched", "left"), [(True, [16, 0]), (False, [0, 16])])
def test_what_waiting_requests_have_in_the_cache_is_evicted_last(
    make_rank: MakeRank, touched: bool, left: list[int]
) -> None:
    from sglang.srt.mem_cache.common import touch_waiting_prefix

    rank = make_rank(dram_blocks=None)
    prompts = [[number * 100 + at for at in range(16)] for number in (1, 2)]
    for prompt in prompts:
        fill(rank, prompt, extra_key="a")
    if touched:
        waiting = SimpleNamespace(
            origin_input_ids=array("q", prompts[0]), output_ids=array("q"), extra_key="a", cache_salt=None
        )
        touch_waiting_prefix(waiting, rank.cache)
    assert evict(rank, 16) == 16
    assert [found_tokens(match(rank, prompt, extra_key="a")) for prompt in prompts] == left
    rank.check()


def test_locked_blocks_stay_and_sizes_say_so(make_rank: MakeRank) -> None:
    rank = make_rank()
    fill(rank, TOKENS)
    node = match(rank, TOKENS[:8]).last_device_node
    assert rank.cache.inc_lock_ref(node).delta == -8
    assert rank.cache.inc_lock_ref(node).delta == 0
    assert (rank.cache.protected_size(), rank.cache.evictable_size()) == (8, 16)
    assert evict(rank, 100) == 16
    assert rank.cache.dec_lock_ref(node).delta == 0
    assert rank.cache.dec_lock_ref(node).delta == 8
    assert (rank.cache.protected_size(), rank.cache.evictable_size()) == (0, 8)
    assert evict(rank, 100) == 8
    assert rank.cache.inc_lock_ref(rank.cache.root_node_handle()).delta == 0
    assert rank.cache.dec_lock_ref(rank.cache.root_node_handle()).delta == 0


def test_eviction_takes_first_what_has_a_copy(make_rank: MakeRank) -> None:
    """The older prompt has no copy in DRAM: the younger one goes, and nothing is lost."""
    rank = make_rank(dram_blocks=6)
    older, younger = [1] * 24, [2] * 24
    fill(rank, older)
    hand(rank).settle()
    rank.cache.check_hicache_events()
    fill(rank, younger)  # its copy pushes the older one's out of DRAM
    hand(rank).settle()
    rank.cache.check_hicache_events()
    assert evict(rank, 8) == 8
    assert found_tokens(match(rank, older)) == 24
    result = match(rank, younger)
    assert (found_tokens(result), result.host_hit_length) == (16, 8)
    rank.check()


def test_eviction_waits_for_copies_under_way_before_it_loses_anything(make_rank: MakeRank) -> None:
    rank = make_rank()
    fill(rank, TOKENS)
    assert rank.tier is not None
    assert rank.tier.copies.writing
    assert evict(rank, 24) == 24
    assert not rank.tier.copies.writing
    result = match(rank, TOKENS)
    assert (found_tokens(result), result.host_hit_length) == (0, 24)
    rank.check()


def test_eviction_does_not_wait_while_others_have_copies(make_rank: MakeRank) -> None:
    rank = make_rank()
    fill(rank, [1] * 24)
    hand(rank).settle()
    fill(rank, [2] * 24)
    assert evict(rank, 24) == 24
    assert rank.tier is not None
    assert rank.tier.copies.writing
    assert found_tokens(match(rank, [2] * 24)) == 24


def test_what_has_no_copy_is_lost_in_the_end(make_rank: MakeRank) -> None:
    rank = make_rank(dram_blocks=2)
    fill(rank, TOKENS)
    assert rank.tier is not None
    assert rank.write_down.skipped == 4
    assert evict(rank, 1000) == 24
    result = match(rank, TOKENS)
    assert (found_tokens(result), result.host_hit_length) == (0, 8)
    rank.check()


# -- loading back ---------------------------------------------------------------------------------


def in_dram(rank: Rank, tokens: list[int], keep: int = 0) -> None:
    """Have all of ``tokens`` in DRAM and the first ``keep`` in HBM."""
    fill(rank, tokens)
    assert evict(rank, len(tokens) - keep) == len(tokens) - keep
    rank.pools.oracle.spoil(rank.pools.free_slots())


def load_back(rank: Rank, result: MatchResult) -> tuple[torch.Tensor, Any]:
    node, tokens = result.best_match_node, result.host_hit_length
    slots, end = rank.cache.start_load(node, tokens, None)
    return (torch.empty(0, dtype=torch.int64) if slots is None else slots), end


def test_a_load_comes_in_layer_by_layer_through_the_gate(make_rank: MakeRank) -> None:
    rank = make_rank(kind=PoolKind("mla", 1, 3, 4))
    in_dram(rank, TOKENS, keep=8)
    result = match(rank, TOKENS)
    assert (found_tokens(result), result.host_hit_length) == (8, 16)
    slots, node = load_back(rank, result)
    assert node is result.best_match_node
    assert len(slots) == 16
    ticket = rank.cache.ready_to_load_host_cache()
    assert ticket == 0
    gate = rank.pools.kvcache.layer_transfer_counter
    gate.set_consumer(ticket)
    chain = np.array(chain_of((0, None, None), TOKENS), np.uint64)
    whole = torch.cat([found_slots(result, rank.cache), slots]).numpy()
    for layer in range(3):
        with pytest.raises(AssertionError, match="wrong"):
            rank.pools.oracle.compare(whole, chain, layer, "before the wait")
        rank.pools.kvcache.get_key_buffer(4 + layer)
        rank.pools.oracle.compare(whole, chain, layer, "after the wait")
    assert rank.cache.protected_size() == 24
    rank.cache.check_hicache_events()
    assert rank.cache.protected_size() == 0
    assert rank.cache.ready_to_load_host_cache() == NOTHING_TO_WAIT_FOR
    assert found_slots(match(rank, TOKENS), rank.cache).tolist() == whole.tolist()
    rank.check()


def test_a_later_request_finds_what_is_being_loaded_and_waits_for_it(make_rank: MakeRank) -> None:
    rank = make_rank()
    in_dram(rank, TOKENS)
    slots, _ = load_back(rank, match(rank, TOKENS))
    again = match(rank, TOKENS)
    assert found_slots(again, rank.cache).tolist() == slots.tolist()
    assert again.host_hit_length == 0
    assert rank.cache.ready_to_load_host_cache() == 0
    assert evict(rank, 1000) == 0, "slots are being written"


def test_loads_split_and_join_at_forks(make_rank: MakeRank) -> None:
    """Two prompts part after 8 tokens; each loads the tokens that it lacks."""
    rank = make_rank()
    other = TOKENS[:8] + [9] * 16
    chain = np.array(chain_of((0, None, None), other), np.uint64)
    fill(rank, TOKENS)
    slots = rank.pools.allocator.alloc(24)
    for layer in range(2):
        rank.pools.oracle.write(slots.numpy(), chain, layer)
    assert rank.cache.insert(InsertParams(key=key(other), value=slots)).prefix_len == 8
    rank.pools.allocator.free(slots[:8])
    assert evict(rank, 1000) == 40
    rank.check()
    first = match(rank, TOKENS)
    assert first.host_hit_length == 24
    load_back(rank, first)
    second = match(rank, other)
    assert (found_tokens(second), second.host_hit_length) == (8, 16)
    loaded, _ = load_back(rank, second)
    hand(rank).wait_layer(rank.cache.ready_to_load_host_cache(), 1)
    whole = torch.cat([found_slots(second, rank.cache), loaded])
    rank.pools.oracle.compare(whole.numpy(), chain, 1, "the fork")
    rank.check()


def test_a_load_evicts_what_it_needs_room_for(make_rank: MakeRank) -> None:
    rank = make_rank(hbm_tokens=24)
    in_dram(rank, [1] * 24)
    fill(rank, [2] * 24)
    slots, _ = load_back(rank, match(rank, [1] * 24))
    assert len(slots) == 24
    result = match(rank, [2] * 24)
    assert (found_tokens(result), result.host_hit_length) == (0, 24)
    rank.check()


def test_without_room_nothing_is_loaded_and_the_rest_is_computed(make_rank: MakeRank) -> None:
    rank = make_rank(hbm_tokens=32)
    in_dram(rank, TOKENS, keep=8)
    taken = rank.pools.allocator.alloc(12)
    result = match(rank, TOKENS)
    rank.cache.inc_lock_ref(result.last_device_node)
    slots, node = load_back(rank, result)
    assert len(slots) == 0
    assert node is result.last_device_node
    assert rank.cache.ready_to_load_host_cache() == NOTHING_TO_WAIT_FOR
    rank.cache.dec_lock_ref(result.last_device_node)
    rank.pools.allocator.free(taken)
    rank.check()


def test_short_hits_are_computed_instead(make_rank: MakeRank) -> None:
    rank = make_rank(load_min_tokens=16)
    in_dram(rank, TOKENS, keep=8)
    assert match(rank, TOKENS).host_hit_length == 16
    result = match(rank, TOKENS[:20])
    assert result.host_hit_length == 0
    assert result.best_match_node is result.last_device_node
    assert found_tokens(result) == 8


def test_a_request_reports_what_it_took_from_which_tier(make_rank: MakeRank) -> None:
    rank = make_rank()
    in_dram(rank, TOKENS, keep=8)
    req: Req = rank.serve([*TOKENS, 1, 2, 3, 4], new_tokens=2)
    assert (req.cached_tokens, req.cached_tokens_device, req.cached_tokens_host) == (24, 8, 16)


# -- whole ----------------------------------------------------------------------------------------


def test_reset_empties_every_tier_while_copies_are_under_way(make_rank: MakeRank) -> None:
    rank = make_rank()
    fill(rank, TOKENS)
    evict(rank, 8)
    load_back(rank, match(rank, TOKENS))
    fill(rank, [7] * 12, extra_key="other")
    rank.cache.reset()
    rank.pools.allocator.clear()
    assert rank.cache.total_size() == 0
    assert rank.arena is not None
    assert rank.arena.free_blocks == rank.arena.n_blocks
    assert match(rank, TOKENS).host_hit_length == 0
    rank.check()
    rank.serve(TOKENS)


def test_settle_leaves_no_copy_under_way(make_rank: MakeRank) -> None:
    rank = make_rank()
    fill(rank, TOKENS)
    rank.cache.settle()
    assert rank.tier is not None
    assert not rank.tier.copies.writing
    make_rank(dram_blocks=None).cache.settle()


def test_release_ends_the_mover(make_rank: MakeRank) -> None:
    rank = make_rank()
    fill(rank, TOKENS)
    rank.cache.release_host_resources()
    assert hand(rank).closed
    make_rank(dram_blocks=None).cache.release_host_resources()


def test_blocks_by_tier_count_what_is_held_and_what_fits(make_rank: MakeRank) -> None:
    rank = make_rank()
    fill(rank, TOKENS)
    evict(rank, 8)
    assert rank.cache.blocks_by_tier() == {Tier.HBM: (4, 32), Tier.DRAM: (6, 40)}
    without = make_rank(dram_blocks=None)
    assert without.cache.blocks_by_tier() == {Tier.HBM: (0, 32)}


def test_waiting_requests_are_ordered_by_the_weight_of_their_subtree(make_rank: MakeRank) -> None:
    """SGLang's dfs-weight policy walks our tree, over all namespaces."""
    rank = make_rank()
    fill(rank, [1] * 8)
    fill(rank, [2] * 8)
    fill(rank, [3] * 8, extra_key="other")
    nodes = [
        match(rank, [1] * 8).last_device_node,
        match(rank, [2] * 8).last_device_node,
        match(rank, [5] * 8).last_device_node,
        match(rank, [2] * 8).last_device_node,
        match(rank, [3] * 8, extra_key="other").last_device_node,
        match(rank, [2] * 4).last_device_node,
    ]
    order = rank.cache.dfs_weight_order(nodes)
    assert sorted(order) == list(range(len(nodes)))
    assert abs(order.index(1) - order.index(3)) == 1
    assert order.index(5) == max(order.index(1), order.index(3)) + 1
    assert order[-1] == 2, "a request without a match comes last"


def test_check_finds_a_slot_count_that_does_not_fit(make_rank: MakeRank) -> None:
    """The twin of every check above: the check finds a damaged cache."""
    rank = make_rank()
    fill(rank, TOKENS)
    assert rank.arena is not None
    stolen = rank.arena.alloc(1)
    with pytest.raises(AssertionError, match="7 blocks of DRAM are in use, index and ledger know of 6"):
        rank.cache.check()
    assert stolen is not None
    rank.arena.free(stolen)
    rank.cache.check()


def test_the_idle_check_runs_only_when_asked_for_and_after_a_change(make_rank: MakeRank) -> None:
    rank = make_rank()
    looks: list[int] = []

    class Counting(GlobalRadixCache):
        def check(self) -> None:
            looks.append(1)
            super().check()

    for check, expected in ((False, 0), (True, 1)):
        parts = CacheParts(rank.store, rank.cache.hbm_tier, rank.cache.planners, check=check)
        cache = Counting(rank.pools.params(), parts, SglangHost(rank.pools.allocator), Replies())
        cache.sanity_check()
        cache.sanity_check()
        assert len(looks) == expected
    fill(rank, TOKENS)
    cache.sanity_check()
    assert len(looks) == 2


def test_a_simulated_cache_needs_no_pools() -> None:
    cache = GlobalRadixCache.create_simulated(block_size=4)
    result = cache.insert(InsertParams(key=key(TOKENS), value=torch.arange(24)))
    assert result.prefix_len == 0
    found = cache.match_prefix(MatchPrefixParams(key=key(TOKENS[:9])))
    assert found_slots(found, cache).tolist() == list(range(8))
    assert cache.evict(EvictParams(num_tokens=4)).num_tokens_evicted == 4
    assert cache.total_size() == 20
    cache.check()

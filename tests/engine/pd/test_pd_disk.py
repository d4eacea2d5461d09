"""Blocks on decode's disk count as cached: they come to DRAM while prefill computes, and then to HBM."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_pools import PoolKind, chain_of
from engine_shapes import found_slots, look_up
from engine_simulation import Rank, Scenario, finish
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_ext.engine.pd.disk_loads import PATIENCE_SECONDS, LocalAhead
from sglang_ext.patches.adapter.pd.kv_hooks import match_on_decode
from sglang_ext.testing.fakes import FakeClock
from sglang_ext.testing.tiers import GatedTier
from sglang_ext.testing.waiting import wait_until
from sglang_ext.tiered_store.tier import BlockTier
from sglang_ext.tiers import Tier

NAMESPACE = (0, None, None)
PROMPT = list(range(100, 153))
BLOCK = 4


class Decode:
    """A rank whose disk alone has the prompt, and a request for it in SGLang's queue."""

    def __init__(self, pace: random.Random | None = None) -> None:
        self.disk: GatedTier | None = None

        def gated(disk: BlockTier) -> BlockTier:
            self.disk = GatedTier(disk)
            return self.disk

        scenario = Scenario(
            "decode", PoolKind(page=4), hbm_tokens=128, dram_blocks=20, disk_blocks=100, memory=4
        )
        self.clock = FakeClock()
        self.rank = Rank(scenario, pace=pace, disk_class=gated, clock=self.clock)
        self.cache = self.rank.cache
        assert self.rank.promotions is not None
        self.rank.serve(PROMPT)
        self.cache.settle()
        assert self.rank.writes is not None
        self.rank.writes.settle()
        # Now, while nothing has to be brought: a colocated scheduler would look at the disk itself.
        req = self.rank.scheduler.submit(PROMPT, new_tokens=1)
        # The writer may be behind with the rest.
        self.whole = self.rank.promotions.stats()[Tier.DISK].blocks * BLOCK
        assert self.whole >= 8 * BLOCK
        self.cache.evict(EvictParams(num_tokens=128))
        assert self.rank.tier is not None
        self.rank.tier.give_back(self.rank.tier.take(20))  # everything leaves DRAM
        self.ahead = LocalAhead(self.cache)
        self.waiting = SimpleNamespace(req=req, waiting_for_input=False)

    def may_have_slots(self) -> bool:
        """One pass of SGLang's loop, with prefill done."""
        self.cache.check_hicache_events()
        self.waiting.waiting_for_input = True
        self.ahead.each_pass([self.waiting])
        return bool(self.waiting.waiting_for_input)

    def matched(self) -> Any:
        """As decode's queue does it."""

        def stock(queue: Any, req: Any) -> Any:
            found = look_up(req, queue.tree_cache, req.origin_input_ids)
            return SimpleNamespace(
                prefix_indices=found_slots(found, self.cache), l2_host_hit_length=found.host_hit_length
            )

        return match_on_decode(stock, SimpleNamespace(tree_cache=self.cache), self.waiting.req)

    def copies(self) -> bool:
        """Another pass, and whether it left a copy to HBM under way."""
        assert not self.may_have_slots()
        return any(each.tier is Tier.HBM for each in self.cache.store.ledger.reservations)

    def nothing_is_held(self) -> bool:
        assert self.rank.promotions is not None
        self.cache.check_hicache_events()
        held = (
            self.rank.promotions.reads.open
            or self.rank.promotions._waits
            or self.cache.store.ledger.reservations
        )
        return not held


@pytest.fixture
def decode(sglang_config: None) -> Iterator[Decode]:
    """Its copies progress whenever their progress is read."""
    found = Decode(random.Random(3))
    yield found
    finish(found.rank)
    found.rank.close()


@pytest.fixture
def still(sglang_config: None) -> Iterator[Decode]:
    """Its copies stand still until a caller waits for them."""
    found = Decode()
    yield found
    finish(found.rank)
    found.rank.close()


def test_the_disk_is_read_before_slots_are_set_aside(decode: Decode) -> None:
    assert not len(decode.matched().prefix_indices)
    # While prefill computes.
    decode.ahead.each_pass([decode.waiting])
    wait_until(decode.may_have_slots, seconds=20, what="the blocks on disk")
    match = decode.matched()
    assert (len(match.prefix_indices), match.l2_host_hit_length) == (decode.whole, 0)
    chain = np.array(chain_of(NAMESPACE, PROMPT), np.uint64)[: decode.whole]
    for layer in range(decode.rank.pools.oracle.layers):
        decode.rank.pools.oracle.compare(match.prefix_indices.numpy(), chain, layer, "from disk")
    assert decode.ahead.given_up == 0
    assert decode.nothing_is_held()


def test_a_slow_disk_is_not_waited_for(decode: Decode) -> None:
    assert decode.disk is not None
    decode.disk.close_gate("get_layer")
    for _ in range(3):
        assert not decode.may_have_slots()
    decode.clock.advance(PATIENCE_SECONDS + 0.1)
    assert decode.may_have_slots()
    assert not len(decode.matched().prefix_indices)
    # It is not held back again.
    assert decode.may_have_slots()
    decode.disk.open_gate("get_layer")
    assert decode.ahead.given_up == 1
    wait_until(decode.nothing_is_held, seconds=20, what="the read")


def test_a_request_that_is_gone_holds_nothing(decode: Decode) -> None:
    decode.ahead.each_pass([decode.waiting])
    wait_until(decode.may_have_slots, seconds=20, what="the blocks on disk")
    assert not decode.nothing_is_held()
    decode.ahead.each_pass([])
    assert decode.nothing_is_held()


def test_a_copy_from_dram_holds_back_its_request_and_no_other(still: Decode) -> None:
    """The scheduler goes on, however slow the copy is; the tree does not have it before it has arrived."""
    wait_until(still.copies, seconds=20, what="a copy")
    for _ in range(50):
        assert not still.may_have_slots()
    assert not len(still.matched().prefix_indices)
    still.cache.settle()
    assert not len(still.matched().prefix_indices), "it would have changed in the middle of an admission"
    assert still.may_have_slots()
    assert len(still.matched().prefix_indices) == still.whole
    assert still.nothing_is_held()


def test_a_copy_is_given_up_when_the_cache_is_emptied(still: Decode) -> None:
    wait_until(still.copies, seconds=20, what="a copy")
    still.ahead.before_clear()
    assert not still.cache.store.ledger.reservations
    assert still.may_have_slots()
    assert not len(still.matched().prefix_indices)


def test_a_request_that_is_gone_leaves_its_copy_to_others(still: Decode) -> None:
    wait_until(still.copies, seconds=20, what="a copy")
    still.ahead.each_pass([])
    still.cache.settle()
    assert still.nothing_is_held()
    assert len(still.matched().prefix_indices) == still.whole


def test_what_is_too_short_or_finds_no_room_is_left_to_prefill(still: Decode) -> None:
    assert still.disk is not None
    still.ahead = LocalAhead(still.cache, least_tokens=still.whole + 1)
    wait_until(still.may_have_slots, seconds=20, what="the blocks on disk")
    assert not len(still.matched().prefix_indices)
    still.ahead = LocalAhead(still.cache)
    taken = still.cache.hbm_tier.take_free(still.cache.hbm_tier.free)
    wait_until(still.may_have_slots, seconds=20, what="the blocks on disk")
    still.cache.token_to_kv_pool_allocator.free(taken)
    assert not len(still.matched().prefix_indices)

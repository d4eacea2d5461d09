"""What decode has on disk counts as cached: it comes to DRAM while prefill computes, and then to HBM."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_pools import PoolKind, chain_of
from engine_simulation import Rank, Scenario, finish
from sglang.srt.managers.schedule_policy import match_prefix_for_req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_ext.engine.pd.disk_loads import PATIENCE_SECONDS, DiskAhead
from sglang_ext.patches.adapter.kv_manager import match_on_decode
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

    def __init__(self) -> None:
        self.disk: GatedTier | None = None

        def gated(disk: BlockTier) -> BlockTier:
            self.disk = GatedTier(disk)
            return self.disk

        scenario = Scenario(
            "decode", PoolKind(page=4), hbm_tokens=128, dram_blocks=20, disk_blocks=100, memory=4
        )
        self.rank = Rank(scenario, disk_class=gated)
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
        self.clock = FakeClock()
        self.ahead = DiskAhead(self.cache, self.rank.promotions, self.clock)
        self.cache.ranks.add(self.ahead)
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
            found = match_prefix_for_req(queue.tree_cache, req, req.origin_input_ids, include_req=True)
            return SimpleNamespace(
                prefix_indices=found.device_indices, l2_host_hit_length=found.host_hit_length
            )

        return match_on_decode(stock, SimpleNamespace(tree_cache=self.cache), self.waiting.req)

    def nothing_is_held(self) -> bool:
        assert self.rank.promotions is not None
        self.cache.check_hicache_events()
        return not self.rank.promotions.reading and not self.rank.promotions._arrived


@pytest.fixture
def decode(sglang_config: None) -> Iterator[Decode]:
    found = Decode()
    yield found
    finish(found.rank)
    found.rank.close()


def test_the_disk_is_read_before_slots_are_set_aside(decode: Decode) -> None:
    assert not len(decode.matched().prefix_indices)
    # While prefill computes.
    decode.ahead.each_pass([decode.waiting])
    wait_until(decode.may_have_slots, seconds=20, what="what is on disk")
    match = decode.matched()
    assert (len(match.prefix_indices), match.l2_host_hit_length) == (decode.whole, 0)
    chain = np.array(chain_of(NAMESPACE, PROMPT), np.uint64)[: decode.whole]
    for layer in range(decode.rank.pools.oracle.layers):
        decode.rank.pools.oracle.compare(match.prefix_indices.numpy(), chain, layer, "from disk")
    assert decode.ahead.late == 0
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
    assert decode.ahead.late == 1
    wait_until(decode.nothing_is_held, seconds=20, what="the read")


def test_a_request_that_is_gone_holds_nothing(decode: Decode) -> None:
    decode.ahead.each_pass([decode.waiting])
    wait_until(decode.may_have_slots, seconds=20, what="what is on disk")
    assert not decode.nothing_is_held()
    decode.ahead.each_pass([])
    assert decode.nothing_is_held()

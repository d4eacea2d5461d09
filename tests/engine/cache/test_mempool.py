"""The memory pool over SGLang's slots and the DRAM tier of a simulated rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from engine_pools import PoolKind, WrongKvError, chain_of
from engine_simulation import Rank, Scenario, finish

from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.pool_transfer import TransferFlag
from sglang_ext.mempool import Hold, MemPool, MemType, Outcome, OutOfBlocksError, serve
from sglang_ext.mempool.store import Call, Use
from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache
from sglang_ext.tiered_store.tier import BlockTier
from sglang_ext.tiers import Tier

NAMESPACE = (0, None, None)
PROMPT = list(range(100, 133))


class Served:
    """A rank that has served PROMPT, and the pool over it."""

    def __init__(self, kind: PoolKind, disk_blocks: int | None = None) -> None:
        self.disk: list[BlockTier] = []
        self.rank = Rank(
            Scenario("pool", kind, hbm_tokens=64, dram_blocks=20, disk_blocks=disk_blocks, pool=1),
            disk_class=self._keep,
        )
        self.pool: MemPool = self.rank.pool
        self.rank.serve(PROMPT)
        self.blocks = len(PROMPT) // self.rank.scenario.block

    def _keep(self, disk: BlockTier) -> BlockTier:
        self.disk.append(disk)
        return disk

    def compare(self, hold: Hold) -> None:
        """What a hold has in HBM is what the model computed."""
        chain = np.array(chain_of(NAMESPACE, PROMPT), np.uint64)
        for i, address in enumerate(hold.addresses):
            assert address.tier is Tier.HBM
            own = chain[i * self.rank.scenario.block :][: self.rank.scenario.block]
            for layer in range(self.rank.pools.oracle.layers):
                self.rank.pools.oracle.compare(np.array(address.place), own, layer, f"block {i}")

    def close(self) -> None:
        self.pool.reset()
        self.pool.check()
        finish(self.rank)
        self.rank.close()


@pytest.fixture(params=[PoolKind(), PoolKind(page=4), PoolKind("mla")], ids=str)
def served(request: pytest.FixtureRequest, sglang_config: None) -> Iterator[Served]:
    served = Served(request.param)
    yield served
    served.close()


def test_what_sglang_computed_is_matched_where_it_lies(served: Served) -> None:
    with served.pool.match(PROMPT, id="r") as hold:
        assert hold.tiers == [Tier.HBM] * served.blocks
        served.compare(hold)
        assert served.rank.cache.protected_size() == served.blocks * served.rank.scenario.block
    assert served.rank.cache.protected_size() == 0
    assert served.pool.match(PROMPT, id="r", namespace=(0, "tenant", None)).blocks == 0


def test_blocks_go_to_dram_and_come_back_as_they_were(served: Served) -> None:
    pool = served.pool
    assert pool.swap_out(3) == 3
    assert not pool.store.calls[Call.DELETE], "they are in DRAM"
    served.rank.check()
    hold = pool.match(PROMPT, id="r")
    assert hold.tiers == [Tier.HBM] * (served.blocks - 3) + [Tier.DRAM] * 3
    assert all(each.outcome is Outcome.DONE for each in pool.swap_in(hold.addresses))
    served.compare(hold)
    served.rank.check()
    pool.check()


def test_a_flipped_byte_in_dram_would_be_noticed(served: Served) -> None:
    served.pool.swap_out(served.blocks)
    hold = served.pool.match(PROMPT, id="r")
    assert served.rank.arena is not None
    served.rank.look_inside = False
    served.rank.arena.blocks[hold.addresses[-1].place[0], 0] ^= 1
    served.pool.swap_in(hold.addresses)
    with pytest.raises(WrongKvError, match=f"block {served.blocks - 1}"):
        served.compare(hold)
    hold.release()
    served.pool.delete(PROMPT)


def owned_tokens(cache: GlobalRadixCache) -> int:
    """Of HBM, what owners have."""
    return cache.store.reserved(Tier.HBM, Use.OWNER) * cache.block_size


def test_allocating_evicts_what_sglang_cached_and_gives_all_back(served: Served) -> None:
    pool, cache = served.pool, served.rank.cache
    everything = pool.store.tiers[Tier.HBM].n_blocks
    found = pool.alloc_mem(everything, id="r")
    tokens = everything * served.rank.scenario.block
    assert (owned_tokens(cache), cache.total_size(), cache.evictable_size()) == (tokens, tokens, 0)
    served.rank.check()
    assert served.pool.match(PROMPT, id="r").tiers == [Tier.DRAM] * served.blocks
    with pytest.raises(OutOfBlocksError, match=f"1 blocks of HBM asked for, 0 of {everything} are free"):
        pool.alloc_mem(1, id="r")
    assert pool.alloc_mem(2, MemType.DRAM, id="r")
    pool.check()
    served.rank.cache.check()  # the DRAM tier knows of the blocks that the pool has taken
    assert len({slot for address in found for slot in address.place}) == owned_tokens(cache)
    pool.free_mem(id="r")
    assert owned_tokens(cache) == 0


def test_what_the_pool_inserts_is_hit_by_requests(served: Served) -> None:
    pool, rank = served.pool, served.rank
    prompt = list(range(500, 500 + 3 * rank.scenario.block))
    chain = np.array(chain_of(NAMESPACE, prompt), np.uint64)
    found = pool.alloc_mem(3, id="r")
    slots = np.array([slot for address in found for slot in address.place])
    for layer in range(rank.pools.oracle.layers):
        rank.pools.oracle.write(slots, chain, layer)
    assert pool.insert(prompt, found).new == 3
    rank.check()
    req = rank.serve([*prompt, 1, 2])
    assert req.cached_tokens == len(prompt)


def test_what_the_cache_wrote_to_disk_is_found_there_by_the_pool(sglang_config: None) -> None:
    """Cache and pool name blocks on disk alike, and note them in the tree alike."""
    served = Served(PoolKind(), disk_blocks=100)
    pool, rank = served.pool, served.rank
    assert rank.writes is not None
    rank.cache.settle()
    rank.writes.settle()
    assert served.disk[0].stats().blocks == served.blocks
    pool.swap_out(served.blocks)
    pool.alloc_mem(pool.store.tiers[Tier.DRAM].n_blocks, MemType.DRAM, id="all")
    assert pool.tiers.counters.lost == pool.tiers.counters.written == 0
    pool.free_mem(id="all")
    with pool.match(PROMPT, id="r") as hold:
        assert hold.tiers == [Tier.DISK] * served.blocks
        assert all(each.outcome is Outcome.DONE for each in pool.swap_in(hold.addresses))
        served.compare(hold)
        rank.check()
    assert rank.serve([*PROMPT, 1]).cached_tokens == served.blocks * rank.scenario.block
    served.close()


def test_blocks_of_an_endpoint_are_pages(served: Served) -> None:
    region = served.pool.tiers.regions[Tier.HBM]
    with served.pool.match(PROMPT, id="r") as hold:
        places = [address.place for address in hold.addresses]
        ids = region.to_ids(places)
        page = served.rank.cache.page_size
        assert len(ids) == served.blocks * served.rank.scenario.block // page
        assert region.from_ids(ids) == places


@pytest.mark.parametrize("flag", [TransferFlag.PULL, TransferFlag.PUSH])
@pytest.mark.parametrize("damaged", [False, True], ids=["sound", "damaged"])
async def test_slots_of_one_engine_are_sent_into_slots_of_another(
    served: Served, flag: TransferFlag, damaged: bool
) -> None:
    """And are hit by a request there. Before and after, both engines may reuse them without telling."""
    other = Served(served.rank.scenario.kind)
    other.rank.scheduler.flush()
    one, two = served.pool, other.pool
    endpoints = [
        await serve(pool, EndpointConfig(name, "m/w"), each.rank.pools.geometry())
        for pool, name, each in ((one, "one", served), (two, "two", other))
    ]
    peer = await endpoints[0].connect([endpoints[1].address])
    with one.match(PROMPT, id="r") as hold:
        if damaged:
            other.rank.look_inside = served.rank.look_inside = False
            rows = one.read(hold.addresses[-1:])[0]
            rows[0, 3] ^= 1
            one.tiers.regions[Tier.HBM].copy_in([hold.addresses[-1].place], rows)
        sent = await one.transfer_with_insert(peer, PROMPT, hold.addresses, id="r", flags=flag)
        ids = one.tiers.regions[Tier.HBM].to_ids([address.place for address in hold.addresses])
    assert sent.inserted
    assert not endpoints[0].pools["hbm"].is_sealed(ids).any()
    assert two.store.calls[Call.TRANSFER_WITH_INSERT] == 1
    other.rank.check()
    with two.match(PROMPT, id="r") as hold:
        if damaged:
            with pytest.raises(WrongKvError, match=f"block {served.blocks - 1}"):
                other.compare(hold)
        else:
            other.compare(hold)
    if damaged:
        two.delete(PROMPT)
        one.delete(PROMPT)
    else:
        req = other.rank.serve([*PROMPT, 1])
        assert req.cached_tokens == other.blocks * other.rank.scenario.block
    del peer
    while endpoints:
        await endpoints.pop().close()
    for pool in (one, two):
        pool.detach()
    other.close()


def test_a_flush_takes_everything_back_from_owners(served: Served) -> None:
    pool, rank = served.pool, served.rank
    pool.alloc_mem(3, id="r")
    pool.alloc_mem(2, MemType.DRAM, id="r")
    pool.match(PROMPT, id="r")
    assert rank.scheduler.flush()
    rank.check()
    assert pool.owned_blocks(Tier.HBM) == pool.owned_blocks(Tier.DRAM) == 0
    assert rank.pools.allocator.available_size() == rank.pools.tokens


def test_new_weights_are_a_new_namespace_for_the_pool_too(served: Served) -> None:
    served.rank.scheduler.change_weights()
    assert served.pool.match(PROMPT, id="r").blocks == 0
    assert served.pool.match(PROMPT, id="r", namespace=NAMESPACE).blocks == served.blocks


def test_a_request_runs_beside_what_owners_have(served: Served) -> None:
    """SGLang's own count of slots holds, and it does not ask for more than it can get."""
    pool, rank = served.pool, served.rank
    free = pool.store.tiers[Tier.HBM].n_blocks
    pool.alloc_mem(free // 2, id="r")
    req = rank.serve(list(range(700, 700 + rank.pools.tokens // 2 - 8)), new_tokens=2)
    assert req.finished()
    assert pool.owned_blocks(Tier.HBM) == free // 2

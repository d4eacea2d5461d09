"""KV of one instance kept in another's idle DRAM: arrival, costs, and its early eviction."""

from __future__ import annotations

import dataclasses

import pytest
from engine_pools import WrongKvError
from peer_rig import (
    BLOCK,
    EPOCH,
    SCENARIO,
    MakeServer,
    Server,
    exported,
    fetched,
    lend_and_fetch,
    offered,
    prompt,
    silent,
    spans,
)
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_ext.engine.cache.metrics import CacheMetrics
from sglang_ext.engine.peers.fetch_results import FetchEnd
from sglang_ext.engine.tiers.spilled import Spilled
from sglang_ext.keys import encode_tokens
from sglang_ext.protocol.agent import Export, Fetch, PeerDead

pytestmark = pytest.mark.usefixtures("sglang_config")

IDLE = dataclasses.replace(SCENARIO, for_others=60)
SMALL = dataclasses.replace(SCENARIO, dram_blocks=90, for_others=60)


def spilled_of(server: Server) -> Spilled:
    found = server.rank.spilled
    assert found is not None
    return found


def spill(owner: Server, keeper: Server, tokens: list[int], *, salt: str | None = None) -> FetchEnd:
    """Send both servers a router's messages; returns how the fetch ended."""
    begin_to_spill(owner, keeper, tokens, salt=salt)
    fetched(keeper)
    owner.passes_until(lambda: not owner.peers.busy, "the lease to end")
    return keeper.results[-1].how


def begin_to_spill(owner: Server, keeper: Server, tokens: list[int], *, salt: str | None = None) -> None:
    key = encode_tokens(tokens)
    owner.receive(Export("spill", key, cache_salt=salt, spills=True))
    source = spans((owner.link.address,), "spill")
    keeper.receive(Fetch("s1", key, source, cache_salt=salt, for_others=True))


def kept(server: Server) -> int:
    """Blocks that it keeps for others."""
    assert server.rank.tier is not None
    server.rank.tier.check()
    return spilled_of(server).kept_blocks


def lose(server: Server) -> None:
    """Everything leaves its HBM and DRAM, as under pressure."""
    server.rank.cache.evict(EvictParams(num_tokens=10_000))
    assert server.rank.tier is not None
    server.rank.tier._evict(10_000)


def both(make_server: MakeServer, keeper: object = IDLE) -> tuple[Server, Server, list[int]]:
    owner, other, tokens = make_server(), make_server(keeper), prompt(1, 20)
    owner.serve(tokens)
    return owner, other, tokens


# -- arrival ----------------------------------------------------------------------------------------


def test_what_is_kept_there_is_fetched_back_when_it_has_gone_here(make_server: MakeServer) -> None:
    owner, keeper, tokens = both(make_server)
    assert spill(owner, keeper, tokens) is FetchEnd.DONE
    assert kept(keeper) == 20
    assert keeper.rank.cache.total_size() == 0, "nothing is brought to HBM"
    lose(owner)
    assert owner.in_dram(tokens) == 0
    lend_and_fetch(keeper, owner, tokens)
    req = owner.finish(owner.rank.scheduler.submit(tokens, new_tokens=2))
    assert req.cached_tokens == 20 * BLOCK
    counters = spilled_of(keeper).counters
    assert (counters.kept, counters.exported, counters.used, counters.given_up) == (20, 20, 0, 0)
    assert kept(keeper) == 20


def test_one_damaged_byte_of_what_is_kept_is_a_wrong_answer(make_server: MakeServer) -> None:
    """The twin of the test above."""
    owner, keeper, tokens = both(make_server)
    spill(owner, keeper, tokens)
    (node,) = (n for n in keeper.rank.tree.nodes() if keeper.rank.dram_holder in n.placements)
    assert keeper.rank.arena is not None
    keeper.rank.arena.blocks[node.placements[keeper.rank.dram_holder][7], 5] ^= 1
    lose(owner)
    lend_and_fetch(keeper, owner, tokens)
    with pytest.raises(WrongKvError):
        owner.finish(owner.rank.scheduler.submit(tokens, new_tokens=2))


def test_a_request_there_uses_it_and_makes_it_its_own(make_server: MakeServer) -> None:
    owner, keeper, tokens = both(make_server)
    spill(owner, keeper, tokens)
    req = keeper.finish(keeper.rank.scheduler.submit([*tokens[: 12 * BLOCK], 7], new_tokens=1))
    assert req.cached_tokens == 12 * BLOCK
    assert kept(keeper) == 8
    spilled = spilled_of(keeper)
    assert sum(gone.blocks for gone in spilled.make_room(60, 300)) == 8
    assert (spilled.counters.used, spilled.counters.given_up) == (12, 8)


def test_only_what_is_lacking_is_kept_for_the_other(make_server: MakeServer) -> None:
    owner, keeper, tokens = both(make_server)
    keeper.serve([*tokens[: 8 * BLOCK], 7])
    assert spill(owner, keeper, tokens) is FetchEnd.DONE
    assert kept(keeper) == 12
    assert spill(owner, keeper, tokens) is FetchEnd.NEEDLESS


def test_tenants_stay_apart(make_server: MakeServer) -> None:
    owner, keeper, tokens = both(make_server)
    assert spill(owner, keeper, tokens, salt="other") is FetchEnd.NEEDLESS
    assert spill(owner, keeper, tokens) is FetchEnd.DONE
    assert keeper.in_dram(tokens, salt="other") == 0


# -- costs that it must not cause -------------------------------------------------------------------


def test_nothing_is_kept_where_nothing_may_be(make_server: MakeServer) -> None:
    owner, keeper, tokens = both(make_server, SCENARIO)
    assert spill(owner, keeper, tokens) is FetchEnd.NO_ROOM
    assert keeper.in_dram(tokens) == 0


def test_no_more_is_kept_than_may_be_and_the_newest_stays(make_server: MakeServer) -> None:
    owner, keeper = make_server(), make_server(dataclasses.replace(IDLE, for_others=50))
    prompts = [prompt(number, 20) for number in range(1, 4)]
    for tokens in prompts:
        owner.serve(tokens)
        assert spill(owner, keeper, tokens) is FetchEnd.DONE
        assert kept(keeper) <= 50
    assert [keeper.in_dram(tokens) // BLOCK for tokens in prompts] == [10, 20, 20]


def test_the_instances_own_need_pushes_it_out_first(make_server: MakeServer) -> None:
    owner, keeper, tokens = both(make_server, SMALL)
    mine = prompt(2, 40)
    keeper.serve(mine)
    spill(owner, keeper, tokens)
    assert kept(keeper) == 20
    keeper.serve(prompt(3, 44))
    assert keeper.in_dram(mine) == 40 * BLOCK, "older, and its own"
    assert kept(keeper) == 6
    assert keeper.in_dram(tokens) == 6 * BLOCK, "from the end"
    keeper.serve(prompt(4, 6))
    assert kept(keeper) == 0
    assert keeper.in_dram(mine) == 40 * BLOCK


def test_nothing_of_the_instances_own_goes_for_it(make_server: MakeServer) -> None:
    owner, keeper, tokens = both(make_server, SMALL)
    mine = prompt(2, 55)
    keeper.serve(mine)
    keeper.serve(prompt(4, 20))
    assert spill(owner, keeper, tokens) is FetchEnd.DONE
    assert kept(keeper) == 15, "as much as is free"
    assert keeper.in_dram(mine) == 55 * BLOCK
    keeper.serve(prompt(3, 15))
    assert spill(owner, keeper, tokens) is FetchEnd.NO_ROOM


def test_it_does_not_go_on_to_the_disk(make_server: MakeServer) -> None:
    owner, keeper, tokens = both(make_server, dataclasses.replace(IDLE, disk_blocks=400))
    spill(owner, keeper, tokens)
    keeper.settle()
    assert keeper.rank.writes is not None
    assert keeper.rank.writes.counters.written == 0


def test_to_be_spilled_is_no_use(make_server: MakeServer) -> None:
    owner = make_server(dataclasses.replace(SCENARIO, dram_blocks=50))
    keeper = make_server(IDLE)
    cold, warm = prompt(1, 20), prompt(2, 20)
    for tokens in (cold, warm):
        owner.serve(tokens)
    assert spill(owner, keeper, cold[: 10 * BLOCK]) is FetchEnd.DONE
    owner.serve(prompt(3, 20))
    assert owner.in_dram(warm) == 20 * BLOCK
    assert owner.in_dram(cold) == 10 * BLOCK, "it goes as if it had not been looked up"


def test_what_is_only_in_hbm_is_not_copied_to_be_spilled(make_server: MakeServer) -> None:
    owner = make_server(dataclasses.replace(SCENARIO, durability="off"))
    keeper, tokens = make_server(IDLE), prompt(1, 20)
    owner.serve(tokens)
    assert spill(owner, keeper, tokens) is FetchEnd.NEEDLESS
    assert owner.in_dram(tokens) == 0


# -- failures ---------------------------------------------------------------------------------------


def test_a_keeper_that_dies_meanwhile_costs_nothing(make_server: MakeServer) -> None:
    owner, keeper, tokens = both(make_server)
    begin_to_spill(owner, keeper, tokens)
    offered(keeper)
    with silent(keeper):
        assert exported(owner) == 20
        owner.receive(PeerDead("server 1", EPOCH))
        owner.passes_until(lambda: exported(owner) == 0, "the lease to end")
    assert owner.in_dram(tokens) == 20 * BLOCK
    req = owner.finish(owner.rank.scheduler.submit(tokens, new_tokens=2))
    assert req.cached_tokens == 20 * BLOCK


def test_a_flush_forgets_what_is_kept(make_server: MakeServer) -> None:
    owner, keeper, tokens = both(make_server)
    spill(owner, keeper, tokens)
    keeper.rank.cache.reset()  # nothing of it is in HBM
    assert kept(keeper) == 0
    assert spill(owner, keeper, tokens) is FetchEnd.DONE
    assert kept(keeper) == 20


def test_what_comes_behind_what_was_given_up_is_the_instances_own(make_server: MakeServer) -> None:
    owner, keeper, tokens = both(make_server)
    spill(owner, keeper, tokens)
    tier = keeper.rank.tier
    assert tier is not None
    tier.delete(spilled_of(keeper).give_up(12))
    assert kept(keeper) == 8
    keeper.serve(tokens)
    assert kept(keeper) == 0
    assert keeper.in_dram(tokens) == 20 * BLOCK
    assert spilled_of(keeper).give_up(20) == []


def test_the_tenant_with_the_most_gives_up_first(make_server: MakeServer) -> None:
    """Even though the other tenant's KV is older."""
    owner, keeper = make_server(), make_server(IDLE)
    of_small, of_large = prompt(1, 8), prompt(2, 20)
    for salt, tokens in (("small", of_small), ("large", of_large)):
        owner.rank.serve(tokens, salt=salt)
        owner.settle()
        assert spill(owner, keeper, tokens, salt=salt) is FetchEnd.DONE
    assert kept(keeper) == 28
    tier = keeper.rank.tier
    assert tier is not None
    tier.delete(spilled_of(keeper).give_up(10))
    assert [keeper.in_dram(of_small, salt="small"), keeper.in_dram(of_large, salt="large")] == [
        8 * BLOCK,
        10 * BLOCK,
    ]


def test_it_is_seen(make_server: MakeServer) -> None:
    owner, keeper, tokens = both(make_server)
    spill(owner, keeper, tokens)
    metrics = CacheMetrics(0)
    metrics.update(keeper.rank.cache)
    sample, rank = metrics.registry.get_sample_value, {"tp_rank": "0"}
    assert sample("sglang_ext_cache_spilled_blocks", rank) == 20
    assert keeper.rank.arena is not None
    assert sample("sglang_ext_cache_spilled_bytes", rank) == 20 * keeper.rank.arena.block_bytes
    assert sample("sglang_ext_cache_spilled_blocks_events_total", rank | {"event": "kept"}) == 20
    assert repr(spilled_of(keeper)).startswith("Spilled(20/60 blocks of 1 prompts")

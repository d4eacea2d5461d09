"""Another tier, registered only here: a second disk below the first, in another directory.

Router, cost model, events and metrics have it from the list of tiers alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from engine_simulation import Rank, Scenario
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_ext.config import KvConfig
from sglang_ext.engine.cache.metrics import CacheMetrics
from sglang_ext.engine.events.agent import AgentFacts
from sglang_ext.engine.tiers.load_policy import DiskPolicy, PrefillCost
from sglang_ext.engine.tiers.load_report import answer_details
from sglang_ext.engine.tiers.opening import open_below
from sglang_ext.geometry import BlockLayout
from sglang_ext.keys import Namespace, encode_tokens
from sglang_ext.patches.adapter.build_agent import attach_agent, naming_of
from sglang_ext.patches.adapter.build_disk import names_on
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.api.usage import Usage
from sglang_ext.router.policies import Match, PolicyOptions
from sglang_ext.router.policies.base import Prompt
from sglang_ext.router.policies.cost import cost
from sglang_ext.testing.waiting import until
from sglang_ext.tiered_store.disk.state import DiskConfig
from sglang_ext.tiered_store.disk.tier import DiskTier
from sglang_ext.tiered_store.tier import BlockTier
from sglang_ext.tiers import Tier, register, withdraw
from tests.support.servers.ports import free_port
from tests.support.servers.workers import StandInWorker, running_worker

pytestmark = pytest.mark.usefixtures("sglang_config")

ARCHIVE = Tier(
    "archive",
    3,
    "archive",
    load_latency_s=0.004,
    load_bytes_per_s=1e9,
    opens=f"{__name__}:open_archive",
)


def open_archive(config: KvConfig, instance: str, shard: str, layout: BlockLayout) -> BlockTier:
    """All that a tier of this kind needs besides its registration."""
    assert config.disk_path is not None
    folder = Path(config.disk_path).parent / "archive" / shard
    return DiskTier(DiskConfig(folder, 64 << 20, instance=instance), layout, tier=ARCHIVE)


BLOCK = 4
SCENARIO = Scenario("three tiers below HBM", hbm_tokens=240, dram_blocks=100, disk_blocks=1, memory=30)
PROMPT = [1000 + n for n in range(24 * BLOCK + 1)]
NS = ("tokens", None, None, None)
IDENTITY = Namespace("model", "weights", "float32", "layout", shard="tp0of1")


@pytest.fixture(autouse=True)
def archive() -> Iterator[None]:
    register(ARCHIVE)
    yield
    withdraw(ARCHIVE)


@pytest.fixture
def make_rank(tmp_path: Path) -> Iterator[Callable[[], Rank]]:
    """Ranks over the same two directories, one after another."""
    ranks: list[Rank] = []

    def below(stand_in: BlockTier) -> BlockTier:
        config = KvConfig(disk_path=str(tmp_path / "disk"), disk_size=64 << 20, dram_size=1 << 20)
        made = open_below(config, "simulated", "tp0of1", stand_in.layout)
        assert made is not None
        return made

    def make() -> Rank:
        if ranks:
            ranks.pop().close()
        ranks.append(Rank(SCENARIO, disk_class=below, routed=True))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.close()


def parts_of(rank: Rank) -> tuple[BlockTier, BlockTier]:
    """The disk, and the tier below it."""
    assert rank.promotions is not None
    disk, archive = rank.promotions._tier.parts
    assert (disk.tier, archive.tier) == (Tier.DISK, ARCHIVE)
    return disk, archive


def written(rank: Rank) -> None:
    """Return when all that is in HBM is below it, as far down as it goes."""
    assert rank.tier is not None
    assert rank.writes is not None
    rank.tier.copies.settle()
    rank.writes.settle()


def in_archive_only(rank: Rank) -> None:
    """Drop everything from memory and from the disk."""
    assert rank.tier is not None
    rank.cache.evict(EvictParams(num_tokens=rank.pools.tokens))
    rank.tier.give_back(rank.tier.take(rank.tier.n_blocks))
    parts_of(rank)[0].clear()


def test_blocks_reach_it_and_are_promoted_from_it_with_the_same_bytes(make_rank: Callable[[], Rank]) -> None:
    """The simulated forward pass compares every byte that it reads with the computed one."""
    rank = make_rank()
    rank.serve(PROMPT)
    written(rank)
    disk, archive = parts_of(rank)
    assert (disk.stats().blocks, archive.stats().blocks) == (24, 24)
    in_archive_only(rank)
    assert (disk.stats().blocks, archive.stats().blocks) == (0, 24)
    req = rank.serve(PROMPT)
    assert req.cached_tokens == 24 * BLOCK
    assert rank.promotions is not None
    assert rank.promotions.counters.promoted == 24
    # And the disk has them again, for the next time.
    written(rank)
    assert (disk.stats().blocks, archive.stats().blocks) == (24, 24)
    assert rank.cache.blocks_by_tier()[ARCHIVE][0] == 24
    told = answer_details({"device": 0, "host": 0, "storage": 24 * BLOCK}, req)
    assert told is not None
    assert told[ARCHIVE.usage_key] == 24 * BLOCK
    usage = Usage()
    usage.add_tiers(told)
    assert usage.tiers == {"archive": 24 * BLOCK}


def test_a_prefix_of_which_each_tier_has_a_part_is_read_from_both(make_rank: Callable[[], Rank]) -> None:
    rank = make_rank()
    rank.serve(PROMPT)
    written(rank)
    assert rank.writes is not None
    names = rank.writes.names
    namespace = rank.cache.namespace(None, None)
    in_archive_only(rank)
    rank.serve(PROMPT[: 10 * BLOCK + 1])
    written(rank)
    keys = names.following(namespace, b"", encode_tokens(PROMPT))
    disk, archive = parts_of(rank)
    digest = names.digest(namespace)
    assert (disk.match(digest, keys), archive.match(digest, keys)) == (10, 24)
    assert rank.tier is not None
    rank.cache.evict(EvictParams(num_tokens=rank.pools.tokens))
    rank.tier.give_back(rank.tier.take(rank.tier.n_blocks))
    req = rank.serve(PROMPT)
    assert req.cached_tokens == 24 * BLOCK
    told = answer_details({"device": 0, "host": 0, "storage": 24 * BLOCK}, req)
    assert told is not None
    assert (told[Tier.DISK.usage_key], told[ARCHIVE.usage_key]) == (10 * BLOCK, 14 * BLOCK)


def test_a_flipped_byte_of_it_is_a_miss(make_rank: Callable[[], Rank], tmp_path: Path) -> None:
    """The twin of the same bytes: damaged blocks are computed again, and counted under the tier's name."""
    rank = make_rank()
    rank.serve(PROMPT)
    written(rank)
    in_archive_only(rank)
    (segment,) = [file for file in (tmp_path / "archive").rglob("*.seg") if file.stat().st_size]
    data = bytearray(segment.read_bytes())
    at = next(place for place in range(len(data) - 1, 0, -1) if data[place])
    with segment.open("r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ 1]))
    req = rank.serve(PROMPT)
    assert req.cached_tokens < 24 * BLOCK
    metrics = CacheMetrics(0)
    metrics.update(rank.cache)
    labels = {"tier": "archive", "tp_rank": "0"}
    sample = metrics.registry.get_sample_value
    assert (sample("sglang_ext_cache_tier_blocks_total", labels | {"event": "got_damaged"}) or 0) >= 1
    decided = labels | {"decision": "load", "reason": "always"}
    assert sample("sglang_ext_cache_load_decisions_total", decided) == 1
    assert (sample("sglang_ext_cache_blocks", labels) or 0) >= 1


def test_a_slow_tier_does_not_make_a_fast_one_look_slow() -> None:
    cost = PrefillCost()
    for tokens in (100, 200, 400):
        cost.observe(tokens, tokens * tokens / 2, tokens * 1e-3)
    policy = DiskPolicy(16, 1 << 20, cost=cost)
    policy.measured([(Tier.DISK, 10)], 0.01)
    policy.measured([(ARCHIVE, 10)], 10.0)
    assert policy.blocks_to_read([(Tier.DISK, 10)], 0) == 10
    assert policy.blocks_to_read([(ARCHIVE, 10)], 0) == 0
    assert policy.blocks_to_read([(Tier.DISK, 10), (ARCHIVE, 10)], 0) == 0
    policy.measured([(Tier.DISK, 10), (ARCHIVE, 10)], 5.0)  # as expected for the disk, for the archive faster
    disk, archive = (policy.bandwidths[tier].bytes_per_second for tier in (Tier.DISK, ARCHIVE))
    assert disk is not None
    assert archive is not None
    assert disk / archive > 100


async def test_a_router_finds_prices_chooses_and_shows_it(make_rank: Callable[[], Rank]) -> None:
    """Over real events: after a server's restart, and after the loss of its disk's blocks."""
    before = make_rank()
    before.serve(PROMPT)
    written(before)
    rank = make_rank()
    assert rank.writes is not None
    names = rank.writes.names
    port = free_port()
    async with AsyncExitStack() as stack:
        holder, other = [await stack.enter_async_context(running_worker(StandInWorker())) for _ in range(2)]
        host, _, number = holder.url.removeprefix("http://").partition(":")
        arguments = SimpleNamespace(
            host=host,
            device="cpu",
            port=int(number),
            disaggregation_mode="null",
            served_model_name="stand-in",
            tp_size=1,
            pp_size=1,
        )
        assert rank.promotions is not None
        assert rank.router_commands is not None
        facts = AgentFacts("simulated", (1).to_bytes(16, "big"), BLOCK, naming_of(names))
        attach_agent(
            rank.cache,
            arguments,
            KvConfig(router=f"http://127.0.0.1:{port}"),
            facts,
            router_commands=rank.router_commands,
            named=names_on(rank.promotions._tier),
            namespace=IDENTITY,
            settings={},
            handover={},
        )
        stack.callback(rank.cache.listeners.before_end)
        config = RouterConfig(port=port, block_size=BLOCK, policy="cost", worker_urls=(other.url,))
        router = await stack.enter_async_context(Router(config))
        key = encode_tokens(PROMPT)

        def held() -> Match:
            rank.cache.check_hicache_events()
            return router.trees.match(NS, key).get(holder.url, Match(0))

        # The snapshot lists both tiers; blocks that both have are found in the nearer one.
        await until(lambda: held().below == {Tier.DISK: 24 * BLOCK})
        parts_of(rank)[0].clear()
        await until(lambda: held().below == {ARCHIVE: 24 * BLOCK})
        assert held().in_memory == held().hbm == 0

        await until(lambda: len(router.fleet.usable()) == 2)
        fleet = router.fleet.usable()
        here = next(instance for instance in fleet if instance.name == holder.url)
        model = router.costs.model
        loading = router.costs.load_s(here, ARCHIVE, 24 * BLOCK)
        assert loading == pytest.approx(0.004 + 24 * BLOCK * model.kv_bytes_per_token / 1e9)
        # Long enough for loading to be sooner than computing.
        long, options = 1024 * BLOCK, PolicyOptions(tie_tokens=0)
        prompt, matches = Prompt(long), {holder.url: Match(long, own=True, below={ARCHIVE: long})}
        for _ in range(2):
            fleet = (*fleet[1:], fleet[0])
            decision = cost(prompt, fleet, matches, router.costs, options)
            assert decision.instance == holder.url
        assert decision.scores[holder.url] > decision.scores[other.url]

        client = await stack.enter_async_context(aiohttp.ClientSession())
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
        async with client.post(f"{router.url}/generate", json=body, headers={"x-request-id": "r"}) as answer:
            assert answer.status == 200
        read = functools.partial(_read, client)
        told = await read(f"{router.url}/explain/r")
        # Computing so short a prompt takes no longer than loading it: either server may get it, at that cost.
        scores = told["routing"][0]["scores"]
        assert scores[holder.url] >= scores[other.url]
        assert told["routing"][0]["holders"][holder.url] == {
            "hbm": 0, "dram": 0, "disk": 0, "archive": 24 * BLOCK,
        }  # fmt: skip
        assert {"tier": "disk", "instance": holder.url}.items() <= told["evictions"][0].items()
        members = await read(f"{router.url}/cluster/instances")
        (member,) = [each for each in members["instances"] if each["url"] == holder.url]
        assert member["tiers"]["archive"]["used"] == 24
        async with client.get(f"{router.url}/metrics") as answer:
            shown = await answer.text()
        url = holder.url
        assert f'sglang_ext_router_index_blocks{{instance="{url}",where="archive"}} 24.0' in shown
        assert f'sglang_ext_router_tier_blocks{{instance="{url}",tier="archive",what="used"}} 24.0' in shown


async def _read(client: aiohttp.ClientSession, url: str) -> Any:
    async with client.get(url) as answer:
        assert answer.status == 200
        return await answer.json()

"""A whole router and two instances without servers: from registration to fetched KV.

A loop that takes commands (``patches/commands``) and goes round stands in for SGLang.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import engine_simulation
import pytest
from engine_scheduler import Settings
from engine_simulation import Rank, Scenario

from sglang_ext.config import KvConfig
from sglang_ext.engine.events.agent import AgentFacts
from sglang_ext.engine.peers.arena_leases import arena_pool
from sglang_ext.engine.peers.peer_kv import PeerKv
from sglang_ext.engine.transfer_thread import TransferThread
from sglang_ext.keys import Namespace, encode_tokens
from sglang_ext.patches.adapter.build_agent import attach_agent
from sglang_ext.patches.adapter.build_transfers import endpoint_config, make_peers, start_fetching
from sglang_ext.protocol.agent import Advise
from sglang_ext.radix_global import Holder
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.placing.placing import PlacingOptions, gathering_plan, place
from sglang_ext.router.policies import Decision, Fetch, Instance, Match, PolicyOptions, Prompt, Reason
from sglang_ext.router.tokens.encoded import Encoded
from sglang_ext.tiers import Tier
from tests.support.servers.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

BLOCK = 4
SCENARIO = Scenario(
    "two instances",
    hbm_tokens=240,
    dram_blocks=300,
    settings=Settings(chunk=None, new_token_ratio=0.05),
)
IDENTITY = Namespace("model", "weights", "float32", "layout", shard="tp0of1")
TENANT = ("tokens", None, None, "salt")
TOKENS = [1000 + i for i in range(20 * BLOCK + 1)]


class Node:
    """An instance as the factory puts it together, and a scheduler's loop that the test drives."""

    def __init__(
        self, name: str, port: int, router_port: int, key_file: Path, scenario: Scenario = SCENARIO
    ) -> None:
        config = KvConfig(
            dram_size=1 << 20,
            block_size=BLOCK,
            router=f"http://127.0.0.1:{router_port}",
            cluster_key_file=str(key_file),
            instance_id=name,
            announce_host="127.0.0.1",
        )
        self.url = f"http://127.0.0.1:{port}"
        arguments = SimpleNamespace(
            host="127.0.0.1",
            port=port,
            device="cpu",
            disaggregation_mode="null",
            served_model_name="m",
            tp_size=1,
            pp_size=1,
        )

        def transfers(rank: Rank) -> TransferThread:
            assert rank.arena is not None
            endpoint = endpoint_config(config, arguments, "model", epoch=port.to_bytes(16, "big"), rank=0)
            dram = arena_pool(rank.arena, rank.pools.geometry(), IDENTITY.digest().hex())
            made = start_fetching(endpoint, [dram])
            assert made is not None
            return made

        def peers(rank: Rank, transfers: TransferThread) -> PeerKv:
            assert rank.write_down is not None
            assert rank.router_commands is not None
            on_result = rank.router_commands.reply_to_fetch
            return make_peers(
                rank.store,
                rank.write_down,
                transfers,
                rank.weights,
                rank.ranks,
                rank.moves,
                endpoints=1,
                on_result=on_result,
            )

        # Every simulated rank has one name, and members of a cluster have different ones.
        named = SimpleNamespace(of=lambda _name, _epoch, tier: Holder.of(name, port, tier))
        with patch.object(engine_simulation, "Holder", named):
            self.rank = Rank(scenario, routed=True, takes_hints=True, transfers=transfers, peers=peers)
        self.cache = self.rank.cache
        assert self.rank.router_commands is not None
        assert self.cache.transfers is not None
        attach_agent(
            self.cache,
            arguments,
            config,
            AgentFacts(name, port.to_bytes(16, "big"), BLOCK),
            router_commands=self.rank.router_commands,
            named={},
            namespace=IDENTITY,
            settings={},
            handover={},
            endpoints=(self.cache.transfers.endpoint.address,),
        )

    def go_round(self) -> None:
        """One pass of the scheduler's loop, with the agent's commands."""
        assert self.cache.command_queue is not None
        for command in self.cache.command_queue.take():
            self.cache.commands.handle(command.payload, command.at)
        self.rank.scheduler.step()
        assert self.rank.tier is not None
        self.rank.tier.copies.settle()

    def in_dram(self) -> int:
        holders = self.rank.tree.holders((0, None, "salt"), encode_tokens(TOKENS))
        return holders.get(self.rank.tier.holder, 0) if self.rank.tier is not None else 0


@pytest.fixture
def router_port() -> int:
    return free_port()


@pytest.fixture
def nodes(router_port: int, key_file: Path) -> Iterator[list[Node]]:
    made = [Node(name, free_port(), router_port, key_file) for name in ("one", "two")]
    yield made
    for node in made:
        node.rank.close()


async def until(condition: Callable[[], Any], nodes: list[Node], what: str) -> None:
    """Wait for a condition while the instances go round."""
    try:
        async with asyncio.timeout(20):
            while not condition():
                for node in nodes:
                    node.go_round()
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"{what} does not come") from None


async def test_from_registration_to_a_hit(router_port: int, key_file: Path, nodes: list[Node]) -> None:
    owner, reader = nodes
    key = encode_tokens(TOKENS)
    config = RouterConfig(port=router_port, cluster_key_file=str(key_file), block_size=BLOCK)
    async with Router(config) as router:
        await until(lambda: router.agents.can_fetch(owner.url, reader.url), nodes, "registration")
        owner.rank.serve(TOKENS, salt="salt")

        def held() -> dict[str, Match]:
            return router.trees.match(TENANT, key)

        await until(lambda: held().get(owner.url, Match(0)).tokens == 20 * BLOCK, nodes, "the index")
        fleet = tuple(Instance(node.url, 0, 0, 0, 0) for node in nodes)
        decision = Decision(reader.url, Reason.FETCH, fetch=(Fetch(owner.url, 20 * BLOCK),))
        options = PlacingOptions(policy=lambda *_: decision, thresholds=PolicyOptions())
        placed = place(Prompt(len(TOKENS)), fleet, held(), router.costs, options)
        router.fetching.least_wait_s = 8.0  # no request waits for it here
        note = router.fetching.carry_out(placed.plan, [Encoded(TENANT, key, len(TOKENS))])
        assert note is not None
        await router.fetching.acknowledged(note)
        assert note.acknowledged.is_set()
        await until(lambda: reader.in_dram() == 20 * BLOCK, nodes, "the KV")
        # The router receives the event, too.
        await until(
            lambda: held().get(reader.url, Match(0)).below.get(Tier.DRAM) == 20 * BLOCK, nodes, "the event"
        )
        req = reader.rank.serve(TOKENS, salt="salt")
        assert req.cached_tokens == 20 * BLOCK
        router.check()


async def test_a_hint_comes_with_its_source(router_port: int, key_file: Path, nodes: list[Node]) -> None:
    owner, reader = nodes
    key = encode_tokens(TOKENS)
    config = RouterConfig(port=router_port, cluster_key_file=str(key_file), block_size=BLOCK)
    async with Router(config) as router:
        await until(lambda: router.agents.can_fetch(owner.url, reader.url), nodes, "registration")
        owner.rank.serve(TOKENS, salt="salt")
        owner.go_round()
        fleet = tuple(Instance(node.url, 0, 0, 0, 0) for node in nodes)
        matches = {owner.url: Match(20 * BLOCK)}
        plan = gathering_plan(len(TOKENS), reader.url, fleet, matches, router.costs)
        spans = router.fetching.export(plan, TENANT, key, "hint")
        assert [span.tokens for span in spans] == [20 * BLOCK]
        hint = Advise("hint", key, cache_salt="salt", ttl_s=30.0, spans=spans)
        assert router.agents.send(reader.url, hint)
        await until(lambda: reader.rank.cache.total_size() == 20 * BLOCK, nodes, "the KV in HBM")


async def test_what_a_full_instance_is_about_to_evict_an_idle_one_keeps(
    router_port: int, key_file: Path
) -> None:
    small = dataclasses.replace(SCENARIO, hbm_tokens=120, dram_blocks=100)
    idle = dataclasses.replace(SCENARIO, for_others=150)
    full, keeper = nodes = [
        Node(name, free_port(), router_port, key_file, scenario)
        for name, scenario in (("full", small), ("keeper", idle))
    ]
    config = RouterConfig(port=router_port, cluster_key_file=str(key_file), block_size=BLOCK)
    try:
        async with Router(config) as router:
            await until(lambda: router.agents.can_fetch(full.url, keeper.url), nodes, "registration")
            # Nothing answers over HTTP here.
            usable = tuple(Instance(node.url, 0, 0, 0, 0) for node in nodes)
            fleet: Any = SimpleNamespace(usable=lambda: usable)
            router.spilling._fleet = fleet
            await until(lambda: router.spilling.is_on, nodes, "the first heartbeats")

            def say(number: int) -> bytes:
                tokens = [1000 * number + i for i in range(20 * BLOCK + 1)]
                full.rank.serve(tokens, salt="salt")
                record = SimpleNamespace(request_id=f"r{number}", caller=SimpleNamespace(tenant="t"))
                flight: Any = SimpleNamespace(
                    prompts=[None], record=record, admitted=SimpleNamespace(session=f"s{number}")
                )
                router.spilling.learn(flight, TENANT, encode_tokens(tokens))
                return encode_tokens(tokens)

            keys = [say(number) for number in range(1, 6)]

            def kept(key: bytes) -> int:
                match = router.trees.match(TENANT, key).get(keeper.url, Match(0))
                return match.below.get(Tier.DRAM, 0)

            await until(lambda: kept(keys[0]) == 20 * BLOCK, nodes, "the coldest")
            await until(lambda: router.spilling.taken() == {"t": 20}, nodes, "the keeper's report")
            keys += [say(number) for number in range(6, 9)]
            await until(lambda: router.trees.match(TENANT, keys[0]).keys() == {keeper.url}, nodes, "eviction")
            await until(lambda: any(map(kept, keys[1:])), nodes, "the next")
            assert kept(keys[-1]) == 0
            (told,) = router.spilling.copies_of(TENANT, keys[0], float("inf"))
            assert (told["end"], told["moved_tokens"]) == ("done", 20 * BLOCK)
            for node in nodes:
                node.rank.check()
            router.spilling.conversations.check()
    finally:
        for node in nodes:
            node.rank.close()

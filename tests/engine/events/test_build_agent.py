"""An instance's agent, built from the scheduler's facts when SGLang starts."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from agent_rig import until
from engine_shapes import with_prefix
from engine_simulation import SCENARIOS, Rank, Traffic

from sglang_ext.addresses import SystemNetwork, place
from sglang_ext.config import KvConfig
from sglang_ext.engine.events.agent import AgentFacts
from sglang_ext.engine.events.events import PlacementFeed
from sglang_ext.errors import ConfigError
from sglang_ext.keys import Namespace, encode_tokens, tenant_salt
from sglang_ext.patches.adapter.build_agent import SchedulerGauges, attach_agent, naming_of
from sglang_ext.router import Router, RouterConfig
from sglang_ext.tiers import Tier
from tests.support.servers.ports import free_port

pytestmark = pytest.mark.usefixtures("sglang_config")

IDENTITY = Namespace("model", "weights", "float32", "layout")


def server_args(**more: Any) -> SimpleNamespace:
    fields = {
        "host": "127.0.0.1",
        "port": 12_345,
        "device": "cpu",
        "disaggregation_mode": "null",
        "served_model_name": "tiny",
        "tp_size": 1,
        "pp_size": 1,
    }
    return SimpleNamespace(**{**fields, **more})


def facts(rank: Rank) -> AgentFacts:
    return AgentFacts("simulated", (1).to_bytes(16, "big"), rank.scenario.block)


def attach(rank: Rank, config: KvConfig, args: SimpleNamespace) -> Any:
    assert rank.router_commands is not None
    config = place(config, args, SystemNetwork())
    return attach_agent(
        rank.cache, args, config, facts(rank), router_commands=rank.router_commands, named={},
        namespace=IDENTITY, settings={"rope_theta": "10000.0"}, handover={},
    )  # fmt: skip


async def test_a_router_follows_a_simulated_server() -> None:
    rank = Rank(SCENARIOS[0], routed=True)
    port = free_port()
    try:
        attach(rank, KvConfig(router=f"http://127.0.0.1:{port}"), server_args())
        config = RouterConfig(port=port, block_size=rank.scenario.block)
        async with Router(config) as router:
            name = "http://127.0.0.1:12345"

            def goes_round() -> bool:
                rank.cache.check_hicache_events()
                replica = router.trees.replica(name)
                return replica is not None and replica.trusted

            await until(goes_round)
            row = router.fleet.rows[name].registration
            assert row is not None
            assert (row.instance, row.model, row.role) == ("simulated", "tiny", "colocated")
            assert (row.settings, row.weights) == ({"rope_theta": "10000.0"}, "weights")
            assert re.fullmatch("cpu, [0-9]+ cores", row.device)
            assert row.device_bytes > 1 << 30
            traffic = Traffic(rank.scenario, 4)
            for _ in range(60):
                traffic.act(rank.scheduler)
                rank.scheduler.step()
                rank.check()
            req = rank.serve([3] * 40) if rank.scheduler.idle else None
            replica = router.trees.replica(name)
            assert replica is not None
            feed = rank.cache.find(PlacementFeed)
            assert feed is not None
            truth = feed.log

            def as_told() -> bool:
                rank.cache.check_hicache_events()
                blocks = sum(len(event.tokens) for event in truth.truth()) // rank.tree.block_bytes
                return replica.trusted and replica.blocks == blocks

            await until(as_told)
            replica.check()
            if req is not None:
                namespace = ("tokens", None, None, None)
                assert router.trees.match(namespace, encode_tokens([3] * 40))[name].tokens >= 36
            rank.cache.listeners.before_end()
            assert feed.queue.closed
            rank.check()
    finally:
        rank.close()


def test_what_the_server_says_of_itself() -> None:
    with Rank(SCENARIOS[0]) as rank:
        gauges = SchedulerGauges(rank.cache)
        assert gauges.load().running == 0
        req = SimpleNamespace(origin_input_ids=[1] * 7)
        running = SimpleNamespace(
            waiting_queue=[req, req],
            running_batch=SimpleNamespace(reqs=[req]),
            chunked_req=None,
            disagg_decode_prealloc_queue=SimpleNamespace(queue=[SimpleNamespace(req=req)]),
        )
        rank.cache.meet(running)
        load = gauges.load()
        assert (load.running, load.queued, load.queued_tokens) == (1, 3, 21)
        rank.cache.scheduler.chunked_req = SimpleNamespace(origin_input_ids=[1] * 90, **with_prefix(50))
        load = gauges.load()
        assert (load.running, load.queued, load.queued_tokens) == (1, 4, 21 + 40)
        assert gauges.fills()[Tier.HBM.level].size == rank.scenario.hbm_tokens // rank.scenario.block


def test_names_on_disk_are_made_from_the_parts_sent_to_routers() -> None:
    scenario = next(s for s in SCENARIOS if s.disk_blocks is not None)
    with Rank(scenario) as rank:
        assert rank.writes is not None
        names = rank.writes.names
        naming = naming_of(names)
        for tenant in ((None, None), ("key", None), (None, "salt")):
            told = Namespace(
                naming.model,
                naming.weights,
                naming.dtype,
                naming.geometry,
                naming.shard,
                tenant_salt(*tenant),
            )
            assert told.digest() == names.digest((0, *tenant))
            assert told.digest() != names.digest((1, *tenant))


def test_the_agent_listens_on_the_port_that_was_asked_for() -> None:
    first, second = (Rank(SCENARIOS[0], routed=True) for _ in range(2))
    try:
        config = KvConfig(router="http://127.0.0.1:1", agent_port=free_port())
        agent = attach(first, config, server_args())
        assert agent.socket.port == config.agent_port
        with zmq.Context() as context, context.socket(zmq.DEALER) as client:
            client.linger = 0
            watch = client.get_monitor_socket(zmq.EVENT_CONNECTED)
            client.connect(f"tcp://127.0.0.1:{config.agent_port}")
            assert watch.poll(10_000), "the agent does not listen"
            client.disable_monitor()
            watch.close()
        with pytest.raises(ConfigError, match="--kv-ports agent"):
            attach(second, config, server_args())
        anywhere = attach(second, KvConfig(router="http://127.0.0.1:1"), server_args())
        assert anywhere.socket.port not in (0, config.agent_port)
    finally:
        first.close()
        second.close()


def test_a_key_that_cannot_be_read_names_its_flag(tmp_path: Path) -> None:
    with Rank(SCENARIOS[0], routed=True) as rank:
        config = KvConfig(router="http://127.0.0.1:1", cluster_key_file=str(tmp_path / "none"))
        with pytest.raises(ConfigError, match="--kv-cluster-key-file"):
            attach(rank, config, server_args())

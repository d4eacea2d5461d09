"""The place of each part of a cluster on Ray, as a pure function of its nodes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.cluster import ray_cluster
from sglang_ext.cluster.config import ClusterConfig, flag_value
from sglang_ext.cluster.ray_plan import (
    Demand,
    Node,
    Place,
    demands,
    fits,
    router_part,
    server_parts,
    unplaced,
)
from sglang_ext.errors import ConfigError

CPUS = (Node("127.0.0.2", 8), Node("127.0.0.3", 8), Node("127.0.0.4", 8))
GPUS = tuple(Node(f"127.0.1.{number}", 64, 8) for number in range(3))


def config_of(**values: Any) -> ClusterConfig:
    return ClusterConfig(**{"model_path": "m", "ray": "auto", **values})


def place(number: int = 3) -> Place:
    return Place(f"127.0.0.{number}", (41, 42, 43, 44), f"/tmp/made-{number}")


def test_servers_on_cpus_get_equal_shares_and_the_router_a_core() -> None:
    *servers, routers = demands(config_of(colocated=3), CPUS)
    assert [server.bundles for server in servers] == [({"CPU": 7.0},)] * 3
    assert routers == Demand("routers", ({"CPU": 1.0},))


def test_parts_that_are_started_again_leave_room_for_a_lost_node() -> None:
    assert demands(config_of(), CPUS)[0].bundles == ({"CPU": 8.0},)
    two = config_of(colocated=2)
    assert demands(two, CPUS)[0].bundles == ({"CPU": 8.0},)
    again = config_of(colocated=2, restart=1)
    assert demands(again, CPUS)[0].bundles == ({"CPU": 7.0},)
    assert demands(again, CPUS[:1])[0].bundles == ({"CPU": 3.0},), "there is no other node"


def test_a_server_gets_a_gpu_for_each_rank() -> None:
    config = config_of(colocated=0, prefill=1, decode=2, server_args=("--tp-size", "4"))
    assert [demand.bundles for demand in demands(config, GPUS)[:-1]] == [({"GPU": 4.0},)] * 3
    on_cpus = config_of(server_args=("--device", "cpu"))
    assert demands(on_cpus, GPUS)[0].bundles == ({"CPU": 64.0},)


def test_a_server_over_several_nodes_has_a_part_on_each() -> None:
    config = config_of(server_args=("--tp-size", "16", "--nnodes", "2"))
    assert demands(config, GPUS)[0].bundles == ({"GPU": 8.0},) * 2
    parts = server_parts(config, 0, GPUS, [place(3), place(4)])
    assert [flag_value(part.command, "--node-rank") for part in parts] == ["0", "1"]
    assert {flag_value(part.command, "--dist-init-addr") for part in parts} == {"127.0.0.3:44"}
    assert {flag_value(part.command, "--nnodes") for part in parts} == {"2"}
    with pytest.raises(ConfigError) as caught:
        demands(config_of(server_args=("--node-rank", "1")), GPUS)
    assert caught.value.field == "--node-rank"


def test_what_does_not_fit_is_said_with_the_nodes() -> None:
    with pytest.raises(ConfigError, match=r"do not fit the nodes: 127.0.1.0 \(64 cores, 8 GPUs\)") as caught:
        demands(config_of(colocated=4, server_args=("--tp-size", "8")), GPUS)
    assert caught.value.field == "--ray"
    with pytest.raises(ConfigError):
        demands(config_of(server_args=("--tp-size", "32", "--nnodes", "4")), GPUS)
    with pytest.raises(ConfigError, match="none"):
        demands(config_of(), ())


@pytest.mark.parametrize(
    ("bundles", "room"),
    [
        ([({"CPU": 8.0},)] * 3, True),
        ([({"CPU": 8.0},)] * 4, False),
        ([({"CPU": 5.0},), ({"CPU": 3.0},)] * 3, True),
        ([({"CPU": 5.0},)] * 4, False),
        ([({"CPU": 2.0},) * 3], True),
        ([({"CPU": 2.0},) * 4], False),  # a node for each
        ([({"GPU": 1.0},)], False),
    ],
)
def test_there_is_room_or_not(bundles: list[Any], room: bool) -> None:
    assert fits([Demand(str(number), each) for number, each in enumerate(bundles)], CPUS) is room


def test_a_server_listens_where_it_is_placed_and_registers_wherever_the_router_is() -> None:
    config = config_of(colocated=2, server_args=("--kv-dram-size", "1GiB"))
    (part,) = server_parts(config, 1, CPUS, [place()])
    assert part.name == "server-1"
    assert part.url == "http://127.0.0.3:41"
    wanted = {
        "--host": "127.0.0.3",
        "--port": "41",
        "--nccl-port": "43",
        "--kv-router": "http://127.0.0.2:30000,http://127.0.0.3:30000,http://127.0.0.4:30000",
        "--kv-cluster-key-file": "/tmp/made-3/cluster.key",
        "--api-key-file": "/tmp/made-3/servers.key",
        "--kv-dram-size": "1GiB",
        "--base-gpu-id": None,
    }
    assert {name: flag_value(part.command, name) for name in wanted} == wanted
    (on_gpus,) = server_parts(config_of(), 0, GPUS, [place()])
    assert flag_value(on_gpus.command, "--base-gpu-id") == "0", "Ray shows it its own only"
    decode = server_parts(config_of(colocated=0, prefill=1, decode=1), 1, CPUS, [place()])[0]
    assert flag_value(decode.command, "--disaggregation-bootstrap-port") == "42"
    with pytest.raises(ConfigError, match="would not register"):
        server_parts(config_of(server_args=("--disable-radix-cache",)), 0, CPUS, [place()])


def test_the_router_listens_where_it_is_placed_and_servers_register_with_it() -> None:
    router = router_part(config_of(colocated=2, policy="least-load"), 0, place())
    assert (router.name, router.url, router.ready_path) == ("router", "http://127.0.0.3:30000", "/ready")
    assert flag_value(router.command, "--host") == "127.0.0.3"
    assert flag_value(router.command, "--policy") == "least-load"
    assert flag_value(router.command, "--cluster-key-file") == "/tmp/made-3/cluster.key"
    assert "--worker-urls" not in router.command
    everywhere = router_part(config_of(host="0.0.0.0"), 0, place())
    assert flag_value(everywhere.command, "--host") == "0.0.0.0"
    assert everywhere.url == "http://127.0.0.3:30000"


def test_routers_start_after_the_servers() -> None:
    shared = ("--cluster", "redis://127.0.0.1")
    parts = unplaced(config_of(colocated=0, prefill=1, decode=1, routers=2, router_args=shared))
    assert [part.name for part in parts] == ["prefill-0", "decode-0", "router-0", "router-1"]
    assert parts[-1].needs == ("prefill-0", "decode-0")
    assert demands(config_of(routers=2, router_args=shared), CPUS)[-1].bundles == ({"CPU": 1.0},) * 2


@pytest.mark.parametrize(
    ("values", "nodes", "field"),
    [
        ({"port": 0}, CPUS, "--port"),
        ({"routers": 2}, CPUS, "--routers"),
        ({"router_args": ("--tls-cert-file", "c")}, CPUS, "--tls-cert-file"),
        ({}, (Node("10.0.0.1", 8),), "--router-args"),
        ({"server_args": ("--nnodes", "two")}, CPUS, "--nnodes"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    values: dict[str, Any], nodes: tuple[Node, ...], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        demands(config_of(**values), nodes)
    assert caught.value.field == field


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError) as caught:
        ray_cluster.library()
    assert caught.value.field == "--ray"
    assert "ray>=2.40" in str(caught.value)


def test_keys_of_a_node_beyond_loopback() -> None:
    config = config_of(router_args=("--api-key-file", "/etc/key"))
    assert demands(config, (Node("10.0.0.1", 8),))[0].bundles == ({"CPU": 7.0},)
    router = router_part(config, 0, Place("10.0.0.1", (30000,), "/tmp/made"))
    assert flag_value(router.command, "--worker-api-key-file") == str(Path("/tmp/made/servers.key"))

"""From a configuration to processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.cluster.command import RUNTIME_FOLDER_PREFIX, made_keys, running_cluster
from sglang_ext.cluster.config import ClusterConfig, flag_value
from sglang_ext.cluster.plan import Door, HostFacts, Keys, Part, given_key, make_plan, with_environment
from sglang_ext.cluster.process import environment_of
from sglang_ext.cluster.ranks import MEETING_PORTS, meeting_ports
from sglang_ext.cluster_key import read_cluster_key
from sglang_ext.errors import ConfigError

CPU = HostFacts(cores=8, accelerators=0)
MADE = Keys(Path("/run/made/cluster.key"), Path("/run/made/servers.key"))


def plan(facts: HostFacts = CPU, **values: Any) -> tuple[Part, ...]:
    config = ClusterConfig(**{"model_path": "m", "colocated": 2, **values})
    return make_plan(config, facts, 30_000, range(30_001, 30_001 + config.ports))


def gpu_ids(parts: tuple[Part, ...]) -> list[str | None]:
    return [flag_value(part.command, "--base-gpu-id") for part in parts[:-1]]


def test_servers_and_their_router() -> None:
    first, second, router = plan(policy="least-load", router_args=("--block-size", "32"))
    assert [part.name for part in (first, second, router)] == ["server-0", "server-1", "router"]
    assert first.command[:3] == (sys.executable, "-m", "sglang_ext.launch_server")
    assert flag_value(first.command, "--model-path") == "m"
    assert (first.url, second.url) == ("http://127.0.0.1:30001", "http://127.0.0.1:30002")
    assert flag_value(second.command, "--port") == "30002"
    assert flag_value(second.command, "--host") == "127.0.0.1"
    assert router.needs == ("server-0", "server-1")
    assert router.command[1:6] == ("-m", "sglang_ext.router", "--worker-urls", first.url, second.url)
    assert flag_value(router.command, "--policy") == "least-load"
    assert flag_value(router.command, "--block-size") == "32"
    assert router.url == "http://127.0.0.1:30000"
    assert (first.ready_path, router.ready_path) == ("/health", "/ready")


def test_each_server_has_a_port_for_the_rendezvous_of_its_ranks() -> None:
    """Without one, SGLang takes a port that a connection may have by the time it listens there."""
    *servers, _ = plan(colocated=1, prefill=1, decode=1, instance_args={2: ("--nccl-port", "7")})
    given = [
        flag_value(part.command, flag)
        for part in servers
        for flag in ("--port", "--disaggregation-bootstrap-port", "--nccl-port")
        if flag_value(part.command, flag) is not None
    ]
    assert [flag_value(part.command, "--nccl-port") for part in servers] == ["30006", "30007", "7"]
    assert len(set(given)) == len(given) == 8


@pytest.mark.parametrize(
    ("flags", "backend"),
    [
        ((), "global"),
        (("--kv-dram-size", "1GiB"), "global"),
        (("--disable-radix-cache",), None),
        (("--enable-hierarchical-cache",), None),
        (("--radix-cache-backend", "other"), "other"),
    ],
)
def test_our_cache_unless_another_is_chosen(flags: tuple[str, ...], backend: str | None) -> None:
    assert flag_value(plan(server_args=flags)[0].command, "--radix-cache-backend") == backend


@pytest.mark.parametrize("flags", [("--attn-cp-size", "2"), ("--attention-context-parallel-size=2",)])
def test_context_parallelism_of_a_pair_is_refused_before_anything_starts(flags: tuple[str, ...]) -> None:
    pair: dict[str, Any] = {"colocated": 0, "prefill": 1, "decode": 1}
    for more in ((), ("--kv-pd-caching", "basic")):
        with pytest.raises(ConfigError, match=r"--attn-cp-size.*does not go with .*--tp-size"):
            plan(**pair, server_args=(*flags, *more))
    plan(server_args=flags)
    plan(**pair, server_args=(flags[0].partition("=")[0], "1"))


REPLICAS = [
    ("--dp-size", "2"),
    ("--data-parallel-size=2",),
    ("--dp", "2"),
]
ATTENTION = [
    ("--tp-size", "2", "--dp-size=2", "--enable-dp-attention"),
    ("--tp-size", "2", "--attn-dp-size", "2"),
    ("--tp-size", "2", "--attention-data-parallel-size", "2"),
]


@pytest.mark.parametrize("flags", [*REPLICAS, *ATTENTION])
@pytest.mark.parametrize("roles", [{"colocated": 2}, {"colocated": 0, "prefill": 1, "decode": 1}])
def test_servers_have_replicas(flags: tuple[str, ...], roles: dict[str, int]) -> None:
    """They register with the router, have cores of their own, and keep their roles."""
    *servers, _ = plan(server_args=flags, **roles)
    for part, cores in zip(servers, ("0,1|2,3", "4,5|6,7"), strict=True):
        assert flag_value(part.command, "--kv-router") == "http://127.0.0.1:30000"
        assert flag_value(part.command, "--enable-pd-role-switch") is None
        assert part.environment["SGLANG_CPU_OMP_THREADS_BIND"] == cores


@pytest.mark.parametrize("flags", REPLICAS)
def test_the_ranks_of_each_replica_meet_where_sglang_has_them_meet(flags: tuple[str, ...]) -> None:
    """One port for all of them would end the server: each replica binds it."""
    for cache in ((), ("--disable-radix-cache",)):
        for part in plan(server_args=(*flags, *cache))[:-1]:
            assert flag_value(part.command, "--nccl-port", "--dist-init-addr") is None


@pytest.mark.parametrize("flags", ATTENTION)
def test_servers_with_dp_attention_meet_at_ports_of_their_own(flags: tuple[str, ...]) -> None:
    """SGLang takes them at fixed distances from the server's port, where the next server's would be."""
    config = ClusterConfig(model_path="m", colocated=2, server_args=flags)
    assert [meeting_ports(config, index) for index in range(2)] == [MEETING_PORTS] * 2
    *servers, _ = plan(server_args=flags, instance_args={1: ("--dist-init-addr", "127.0.0.1:7")})
    assert [flag_value(part.command, "--nccl-port") for part in servers] == [None, None]
    assert [flag_value(part.command, "--dist-init-addr") for part in servers] == [
        "127.0.0.1:30003",
        "127.0.0.1:7",
    ]
    assert meeting_ports(ClusterConfig(model_path="m", colocated=1), 0) == 1


@pytest.mark.parametrize("flags", [*REPLICAS, *ATTENTION])
def test_replicas_that_the_router_would_not_know_are_refused(flags: tuple[str, ...]) -> None:
    pair = {"colocated": 0, "prefill": 1, "decode": 1}
    for caching in ("basic", "1"):
        with pytest.raises(ConfigError, match=rf"--kv-pd-caching {caching}.*2 or 3"):
            plan(server_args=(*flags, "--kv-pd-caching", caching), **pair)
    with pytest.raises(ConfigError, match="speaks TLS"):
        plan(server_args=flags, router_args=("--tls-cert-file", "c", "--tls-key-file", "k"))
    plan(server_args=(*flags, "--disable-radix-cache"))


def test_each_replica_has_a_gpu() -> None:
    two = HostFacts(cores=8, accelerators=4)
    assert gpu_ids(plan(two, server_args=("--dp-size", "2"))) == ["0", "2"]
    assert gpu_ids(plan(two, server_args=ATTENTION[0])) == ["0", "2"]
    with pytest.raises(ConfigError, match="GPUs"):
        plan(two, server_args=("--dp-size", "2", "--tp-size", "2"))


def test_the_users_key_is_the_clusters() -> None:
    def given(**values: Any) -> str | None:
        return given_key(ClusterConfig(**{"model_path": "m", "colocated": 2, **values}))

    assert given() is None
    assert given(router_args=("--cluster-key-file", "mine")) == "mine"
    assert given(server_args=("--kv-cluster-key-file", "mine")) == "mine"
    with pytest.raises(ConfigError, match="one key"):
        given(
            router_args=("--cluster-key-file", "mine"), instance_args={1: ("--kv-cluster-key-file", "yours")}
        )


def test_the_key_goes_to_every_member() -> None:
    config = ClusterConfig(model_path="m", colocated=2)
    first, second, router = make_plan(config, CPU, 30_000, range(30_001, 30_005), MADE)
    assert flag_value(first.command, "--kv-cluster-key-file") == str(MADE.cluster)
    assert flag_value(second.command, "--kv-cluster-key-file") == str(MADE.cluster)
    assert flag_value(router.command, "--cluster-key-file") == str(MADE.cluster)
    for given in (
        {"router_args": ("--cluster-key-file", "mine")},
        {"server_args": ("--kv-cluster-key-file", "mine")},
    ):
        (server, router) = plan(colocated=1, **given)
        assert flag_value(server.command, "--kv-cluster-key-file") == "mine"
        assert flag_value(router.command, "--cluster-key-file") == "mine"


def test_who_hands_kv_over_and_keeps_none_has_the_key_too() -> None:
    config = ClusterConfig(
        model_path="m", colocated=0, prefill=1, decode=1, server_args=("--kv-pd-caching", "basic")
    )
    *servers, _ = make_plan(config, CPU, 30_000, range(30_001, 30_001 + config.ports), MADE)
    assert [flag_value(server.command, "--kv-cluster-key-file") for server in servers] == [
        str(MADE.cluster)
    ] * 2


def test_another_cache_is_given_no_key() -> None:
    config = ClusterConfig(model_path="m", server_args=("--disable-radix-cache",))
    server, _ = make_plan(config, CPU, 30_000, range(30_001, 30_001 + config.ports), MADE)
    assert flag_value(server.command, "--kv-cluster-key-file") is None


def test_servers_ask_for_a_key_that_the_router_has() -> None:
    """A key made for the cluster, or a key that the user names for either side."""

    def keys(**values: Any) -> list[str | None]:
        config = ClusterConfig(**{"model_path": "m", "colocated": 0, "prefill": 1, "decode": 1, **values})
        *servers, router = make_plan(config, CPU, 30_000, range(30_001, 30_001 + config.ports), MADE)
        named = [flag_value(server.command, "--api-key-file") for server in servers]
        return [*named, flag_value(router.command, "--worker-api-key-file")]

    assert keys() == keys(server_args=("--disable-radix-cache",)) == [str(MADE.servers)] * 3
    assert keys(server_args=("--api-key-file", "mine")) == ["mine"] * 3
    assert keys(router_args=("--worker-api-key-file", "mine")) == ["mine"] * 3
    with pytest.raises(ConfigError, match="have one key"):
        keys(instance_args={1: ("--api-key-file", "mine")})
    # A user who names the router's key takes care of the servers' keys, too.
    assert keys(router_args=("--worker-api-key", "k")) == [None] * 3
    assert keys(router_args=("--worker-api-key", "k"), server_args=("--api-key-file", "mine")) == [
        "mine",
        "mine",
        None,
    ]


def test_keys_are_readable_by_their_owner_only_and_are_deleted() -> None:
    before = os.umask(0)
    try:
        with made_keys() as keys:
            for path in (keys.cluster, keys.servers):
                assert path.stat().st_mode & 0o777 == 0o600
                assert path.parent.stat().st_mode & 0o777 == 0o700
            assert read_cluster_key(keys.cluster)
            assert keys.cluster.read_text() != keys.servers.read_text()
    finally:
        os.umask(before)
    assert not keys.cluster.parent.exists()


def test_the_key_of_a_cluster_that_was_killed_goes_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    folders = [tmp_path / f"{RUNTIME_FOLDER_PREFIX}{pid}-x" for pid in (ended.pid, os.getpid())]
    for folder in folders:
        folder.mkdir()
    with made_keys():
        assert [folder.exists() for folder in folders] == [False, True]


def test_prefill_and_decode_apart() -> None:
    *servers, router = plan(colocated=0, prefill=2, decode=1)
    assert [part.name for part in servers] == ["prefill-0", "prefill-1", "decode-0"]
    assert router.needs == ("prefill-0", "prefill-1", "decode-0")

    def values(flag: str) -> list[str | None]:
        return [flag_value(part.command, flag) for part in servers]

    assert values("--disaggregation-mode") == ["prefill", "prefill", "decode"]
    assert values("--disaggregation-transfer-backend") == ["global"] * 3
    assert values("--port") == ["30001", "30002", "30003"]
    assert values("--disaggregation-bootstrap-port") == ["30004", "30005", "30006"]
    assert values("--enable-pd-role-switch") == [""] * 3
    assert values("--radix-cache-backend") == [None] * 3, "--kv-pd-caching chooses"
    assert values("--kv-router") == [router.url] * 3


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"fixed_roles": True}, "--fixed-roles"),
        ({"server_args": ("--kv-pd-caching", "1")}, "--kv-pd-caching 1"),
        ({"server_args": ("--kv-transfer-mode=push-by-layer",)}, "push-by-layer"),
        ({"server_args": ("--disaggregation-transfer-backend", "mooncake")}, "backend mooncake"),
        ({"server_args": ("--speculative-algorithm", "EAGLE")}, "--speculative-algorithm EAGLE"),
        ({"server_args": ("--dp-size", "2")}, "--dp-size"),
        ({"server_args": ATTENTION[1]}, "--attn-dp-size"),
        ({"instance_args": {1: ("--pp", "2")}}, "--pp-size 2"),
        ({"instance_args": {1: ("--tp", "2")}}, "different numbers of ranks"),
    ],
)
def test_servers_stay_what_they_are_where_sglang_cannot_change_them(values: dict[str, Any], why: str) -> None:
    apart = {"colocated": 0, "prefill": 2, "decode": 1, **values}
    *servers, _ = plan(**apart)
    for part in servers:
        assert flag_value(part.command, "--enable-pd-role-switch") is None
        assert (flag_value(part.command, "--disaggregation-bootstrap-port") is None) == (
            part.name == "decode-0"
        )
    with pytest.raises(ConfigError, match=f"no server could change its role.*{why}"):
        plan(**apart, router_args=("--role-controller", "on"))


@pytest.mark.parametrize(
    ("given", "binds"), [((), True), (("--kv-pd-caching", "3"), False), (("--kv-pd-caching=basic",), True)]
)
async def test_what_the_environment_says_of_roles_counts_unless_a_flag_does(
    given: tuple[str, ...], binds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers that it configures to keep nothing would refuse the switch of roles."""
    environment = {"SGLANG_EXT_KV_PD_CACHING": "basic", "SGLANG_EXT_KV_DRAM_SIZE": "1GB"}
    config = ClusterConfig(model_path="m", colocated=0, prefill=1, decode=1, port=0, server_args=given)
    *servers, _ = make_plan(
        with_environment(config, environment), CPU, 30_000, range(30_001, 30_001 + config.ports)
    )
    for part in servers:
        assert (flag_value(part.command, "--enable-pd-role-switch") is None) == binds
        assert (flag_value(part.command, "--kv-router") is None) == binds, (
            "a server that keeps nothing reports nothing"
        )
        assert flag_value(part.command, "--kv-dram-size") is None, "it is the servers' affair"
    if binds:
        monkeypatch.setenv("SGLANG_EXT_KV_PD_CACHING", "basic")
        controlled = replace(config, router_args=("--role-controller", "on"))
        with pytest.raises(ConfigError, match="no server could change its role: --kv-pd-caching basic"):
            async with running_cluster(controlled, tmp_path, host=CPU):
                pass


@pytest.mark.parametrize("roles", [{"colocated": 2}, {"colocated": 0, "prefill": 1, "decode": 1}])
def test_a_disk_named_in_the_environment_is_no_folder_of_two_servers(roles: dict[str, int]) -> None:
    environment = {
        "SGLANG_EXT_KV_DISK_PATH": "/kv",
        "SGLANG_EXT_KV_BLOCK_SIZE": "32",
        "SGLANG_EXT_KV_CLUSTER_KEY_FILE": "/keys/cluster",
    }
    config = with_environment(ClusterConfig(model_path="m", **roles), environment)
    *servers, router = make_plan(config, CPU, 30_000, range(30_001, 30_001 + config.ports))
    disks = [flag_value(part.command, "--kv-disk-path") for part in servers]
    assert disks == [f"/kv/{part.name}" for part in servers]
    assert flag_value(router.command, "--block-size") == "32"
    assert flag_value(router.command, "--cluster-key-file") == "/keys/cluster"


def test_another_cache_gets_no_settings_of_ours() -> None:
    environment = {"SGLANG_EXT_KV_DISK_PATH": "/kv"}
    config = ClusterConfig(model_path="m", colocated=2, server_args=("--disable-radix-cache",))
    assert with_environment(config, environment) == config


def test_the_environment_is_left_alone_where_there_are_no_roles_of_ours() -> None:
    environment = {"SGLANG_EXT_KV_PD_CACHING": "basic"}
    for values in (
        {"colocated": 2},
        {"prefill": 1, "decode": 1, "server_args": ("--disaggregation-transfer-backend", "mooncake")},
    ):
        config = ClusterConfig(model_path="m", **values)
        assert with_environment(config, environment) == config


def test_a_role_controller_wants_servers_that_can_change() -> None:
    *_, router = plan(colocated=0, prefill=1, decode=2, router_args=("--role-controller", "dry-run"))
    assert flag_value(router.command, "--role-controller") == "dry-run"
    with pytest.raises(ConfigError, match="none that only prefill or decode"):
        plan(router_args=("--role-controller=on",))
    plan(router_args=("--role-controller", "off"))
    *servers, _ = plan(colocated=1, prefill=1, decode=1, server_args=("--ep", "1", "--tp", "2"))
    assert [flag_value(part.command, "--enable-pd-role-switch") for part in servers] == [None, "", ""]


@pytest.mark.parametrize(("caching", "told"), [("basic", 0), ("1", 1), ("2", 2), ("3", 2)])
def test_who_keeps_nothing_tells_nothing(caching: str, told: int) -> None:
    parts = plan(colocated=0, prefill=1, decode=1, server_args=("--kv-pd-caching", caching))[:-1]
    assert sum(flag_value(part.command, "--kv-router") is not None for part in parts) == told


def test_another_transfer_backend_is_the_users_choice() -> None:
    chosen = ("--disaggregation-transfer-backend", "mooncake")
    first, second, _ = plan(colocated=0, prefill=1, decode=1, server_args=chosen)
    for part in (first, second):
        assert flag_value(part.command, chosen[0]) == "mooncake"
        assert flag_value(part.command, "--radix-cache-backend") == "global"


def test_servers_tell_the_router_what_they_hold() -> None:
    first, _, router = plan(host="0.0.0.0", router_args=("--api-key", "k"))
    assert flag_value(first.command, "--kv-router") == router.url == "http://127.0.0.1:30000"


@pytest.mark.parametrize(
    ("server_args", "router_args", "told"),
    [
        (("--kv-router", "http://other:1"), (), "http://other:1"),
        (("--radix-cache-backend", "other"), (), None),
        (("--disable-radix-cache",), (), None),
        ((), ("--tls-cert-file", "c"), None),
    ],
)
def test_what_the_user_says_of_routers_stays(
    server_args: tuple[str, ...], router_args: tuple[str, ...], told: str | None
) -> None:
    first, *_ = plan(server_args=server_args, router_args=router_args)
    assert flag_value(first.command, "--kv-router") == told


def test_the_router_has_the_servers_blocks() -> None:
    *_, router = plan(server_args=("--kv-block-size", "32"))
    assert flag_value(router.command, "--block-size") == "32"
    *_, router = plan(server_args=("--kv-block-size", "32"), router_args=("--block-size", "8"))
    assert flag_value(router.command, "--block-size") == "8"


def test_each_server_has_a_folder_of_its_own_on_disk() -> None:
    first, second, _ = plan(server_args=("--kv-disk-path", "/kv", "--kv-disk-size", "1GB"))
    assert flag_value(first.command, "--kv-disk-path") == "/kv/server-0"
    assert flag_value(second.command, "--kv-disk-path") == "/kv/server-1"
    assert all(flag_value(part.command, "--kv-disk-path") is None for part in plan())


def test_flags_of_one_server_come_last() -> None:
    first, second, _ = plan(
        server_args=("--max-total-tokens", "9"), instance_args={1: ("--max-total-tokens", "7")}
    )
    assert flag_value(first.command, "--max-total-tokens") == "9"
    assert flag_value(second.command, "--max-total-tokens") == "7"


@pytest.mark.parametrize(
    ("cores", "servers", "flags", "threads"),
    [
        (8, 2, (), "4"),
        (8, 3, (), "2"),
        (2, 2, (), "1"),
        (1, 4, (), "1"),
        (8, 2, ("--tp", "2"), "2"),
    ],
)
def test_cores_are_shared_evenly(cores: int, servers: int, flags: tuple[str, ...], threads: str) -> None:
    parts = plan(HostFacts(cores, 0), colocated=servers, server_args=flags)
    assert {part.environment["OMP_NUM_THREADS"] for part in parts[:-1]} == {threads}
    assert "OMP_NUM_THREADS" not in parts[-1].environment


def test_ranks_on_a_cpu_get_cores_of_their_own() -> None:
    first, second, _ = plan(server_args=("--tp-size", "2"))
    assert first.environment["SGLANG_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    assert second.environment["SGLANG_CPU_OMP_THREADS_BIND"] == "4,5|6,7"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in plan()[0].environment


@pytest.mark.parametrize(
    ("accelerators", "values", "expected"),
    [
        (2, {}, ["0", "1"]),
        (4, {"server_args": ("--tp", "2")}, ["0", "2"]),
        (4, {"instance_args": {0: ("--tp", "2", "--pp-size", "1")}}, ["0", "2"]),
        (1, {"server_args": ("--mem-fraction-static", "0.4")}, ["0", "0"]),
        (2, {"instance_args": {1: ("--base-gpu-id", "0")}}, ["0", "0"]),
        (2, {"server_args": ("--device", "cpu")}, [None, None]),
    ],
)
def test_gpus(accelerators: int, values: dict[str, Any], expected: list[str | None]) -> None:
    parts = plan(HostFacts(8, accelerators), **values)
    assert gpu_ids(parts) == expected
    assert ("OMP_NUM_THREADS" in parts[0].environment) == ("--device" in parts[0].command)


@pytest.mark.parametrize(
    ("accelerators", "flags", "field"),
    [
        (1, (), "--colocated"),
        (3, ("--tp", "2"), "--colocated"),
        (1, ("--tp", "2", "--mem-fraction-static", "0.4"), "--colocated"),
        (2, ("--tp", "x"), "--tp-size"),
    ],
)
def test_too_few_gpus(accelerators: int, flags: tuple[str, ...], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(HostFacts(8, accelerators), server_args=flags)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:30000"),
        ("::", "http://127.0.0.1:30000"),
        ("::1", "http://[::1]:30000"),
        ("10.0.0.5", "http://10.0.0.5:30000"),
    ],
)
def test_the_router_is_probed_where_it_listens(host: str, url: str) -> None:
    assert plan(host=host)[-1].url == url


def test_servers_on_a_cpu_get_more_time_for_probes() -> None:
    flag = "--health-check-timeout-secs"
    assert flag_value(plan()[-1].command, flag) == "5"
    assert flag_value(plan(router_args=(flag, "1"))[-1].command, flag) == "1"
    assert flag_value(plan(HostFacts(8, 2))[-1].command, flag) is None


@pytest.mark.parametrize(
    ("given", "named"),
    [(("--queue-policy", "nothing"), "--queue-policy"), (("--polcy", "cost"), "--polcy")],
)
async def test_what_the_router_refuses_starts_no_server(
    given: tuple[str, ...], named: str, tmp_path: Path
) -> None:
    config = ClusterConfig(model_path="m", port=0, router_args=given)
    with pytest.raises(ConfigError, match=named) as caught:
        async with running_cluster(config, tmp_path, host=CPU):
            pass
    assert caught.value.field == "--router-args"
    assert not os.listdir(tmp_path), "no part has a log"


def test_keys_are_not_shown() -> None:
    """Nor passed on a command line, where every user of the machine could read them."""
    router = plan(router_args=("--api-key", "secret", "--worker-api-key=hidden", "--queue-size", "3"))[-1]
    assert not {"secret", "hidden", "--api-key", "--worker-api-key=hidden"} & {*router.command}
    assert "secret" not in repr(router)
    assert flag_value(router.command, "--queue-size") == "3"
    found = environment_of(router, {"SGLANG_EXT_ROUTER_API_KEY": "what the user uses elsewhere"})
    assert (found["SGLANG_EXT_ROUTER_API_KEY"], found["SGLANG_EXT_WORKER_API_KEY"]) == ("secret", "hidden")
    server = plan(server_args=("--admin-api-key", "admin"))[0]
    assert "--admin-api-key ***" in server.shown_command


def test_a_router_asks_servers_with_their_key() -> None:
    *servers, router = plan(server_args=("--api-key-file", "/k"))
    assert [flag_value(server.command, "--api-key-file") for server in servers] == ["/k"] * 2
    assert flag_value(router.command, "--worker-api-key-file") == "/k"
    router = plan(server_args=("--api-key-file", "/k"), router_args=("--worker-api-key-file", "/other"))[-1]
    assert flag_value(router.command, "--worker-api-key-file") == "/other"
    with pytest.raises(ConfigError, match="one key"):
        plan(instance_args={1: ("--api-key-file", "/k")})


def routers_of(**values: Any) -> tuple[Part, ...]:
    config = ClusterConfig(model_path="m", **values)
    ports = range(30_010, 30_010 + config.ports)
    return make_plan(config, CPU, 30_000, ports, door=Door((7,), (30_001, 30_002), Path("/run/made/routers")))


def test_several_routers_share_a_port_and_what_they_know() -> None:
    server, *routers = routers_of(routers=2, restart=1)
    assert [router.name for router in routers] == ["router-0", "router-1"]
    assert flag_value(server.command, "--kv-router") == "http://127.0.0.1:30001,http://127.0.0.1:30002"
    for router, port in zip(routers, ("30001", "30002"), strict=True):
        assert router.url == "http://127.0.0.1:30000"
        assert router.own_url == f"http://127.0.0.1:{port}", "at the port of both, the other may answer"
        assert flag_value(router.command, "--listen-fds") == "7"
        assert flag_value(router.command, "--member-port") == port
        assert flag_value(router.command, "--cluster") == "local:///run/made/routers"
        assert router.sockets == (7,)
        assert not router.slots, "the others serve while one starts again"


@pytest.mark.parametrize("flags", [("--workers", "2"), ("--workers=3",)])
def test_workers_of_a_router_are_refused_before_anything_starts(flags: tuple[str, ...]) -> None:
    """The router would refuse them itself, when all servers were ready: after minutes."""
    for routers in (1, 2):
        with pytest.raises(ConfigError, match="give --routers N") as caught:
            routers_of(routers=routers, router_args=flags)
        assert caught.value.field == "--workers"
    routers_of(router_args=("--workers", "1"))
    assert flag_value(plan(router_args=flags)[-1].command, "--workers"), "on Ray, it binds its own port"


def test_routers_share_through_what_the_user_names() -> None:
    _, router, _ = routers_of(routers=2, router_args=("--cluster", "redis://127.0.0.1"))
    assert router.command.count("--cluster") == 1
    assert flag_value(router.command, "--cluster") == "redis://127.0.0.1"


def test_routers_over_tls_are_asked_over_tls() -> None:
    server, router, _ = routers_of(routers=2, router_args=("--tls-cert-file", "c", "--tls-key-file", "k"))
    assert router.own_url == "https://127.0.0.1:30001"
    assert flag_value(server.command, "--kv-router") is None


def test_there_is_a_router() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(routers=0)
    assert caught.value.field == "--routers"

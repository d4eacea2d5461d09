"""Where a server listens and which address it announces: decided from its flags and its machine's
addresses."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from sglang_ext.addresses import (
    SystemNetwork,
    bind_one,
    bracketed,
    connectable,
    host_of,
    is_loopback,
    listen_host,
    of_replica,
    place,
    split_port,
)
from sglang_ext.config import KvConfig
from sglang_ext.errors import ConfigError


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.1", "::1", "[::1]"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.1", "127.example.org", "127.0.0.1.nip.io"])
def test_reachable_by_others(host: str) -> None:
    """A name may begin with the digits of loopback."""
    assert not is_loopback(host)


@dataclass
class Server:
    """The fields of ``ServerArgs`` in use."""

    host: str
    port: int = 30000


@dataclass
class Wired:
    """A machine's network. names: known ones. routes: its own address on the way to others."""

    names: Mapping[str, str] = field(default_factory=dict)
    routes: Mapping[str, str] = field(default_factory=dict)
    interfaces: Mapping[str, str] = field(default_factory=dict)
    identity: str = "ab12cd34"

    def resolve(self, host: str) -> str | None:
        if host == "localhost":
            return "127.0.0.1"
        return host if host[:1].isdigit() or ":" in host else self.names.get(host)

    def route(self, host: str) -> str | None:
        address = self.resolve(host)
        return None if address is None else "127.0.0.1" if is_loopback(address) else self.routes.get(address)

    def interface(self, name: str) -> str | None:
        return self.interfaces.get(name)

    def machine(self) -> str:
        return self.identity


ROUTER = "http://10.0.0.1:30000"
WIRED = Wired(
    names={"node7": "10.0.0.7", "router.cluster": "10.0.0.1", "gpu": "10.0.0.7"},
    routes={
        "10.0.0.1": "10.0.0.7",
        "10.0.0.7": "10.0.0.7",
        "192.0.2.1": "192.168.1.7",
        "fd00::1": "fd00::7",
        "2001:db8::1": "fd00::7",
    },
    interfaces={"ib0": "10.9.0.7", "ib6": "fd09::7"},
)


def placed(host: str, *, key: str | None = "key", network: Wired = WIRED, **flags: str | None) -> KvConfig:
    return place(KvConfig(cluster_key_file=key, **flags), Server(host), network)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("host", "router", "announced"),
    [
        ("0.0.0.0", ROUTER, "10.0.0.7"),
        ("", ROUTER, "10.0.0.7"),
        ("0.0.0.0", "http://router.cluster:30000", "10.0.0.7"),
        ("::", "http://[fd00::1]:30000", "fd00::7"),
        ("::", ROUTER, "fd00::7"),
        ("node7", ROUTER, "10.0.0.7"),
        ("10.0.0.7", ROUTER, "10.0.0.7"),
        # The router is here, others are not: the address that they reach is announced.
        ("0.0.0.0", "http://127.0.0.1:30000", "192.168.1.7"),
        # One router here, one there; and one whose name means nothing yet.
        ("0.0.0.0", f"http://127.0.0.1:1,{ROUTER}", "10.0.0.7"),
        ("0.0.0.0", "http://not-yet:30000", "192.168.1.7"),
        # No router: a prefill or decode server that is listed.
        ("0.0.0.0", None, "192.168.1.7"),
        ("127.0.0.1", "http://127.0.0.1:30000", "127.0.0.1"),
        ("127.0.0.1", "http://10.0.0.7:30000", "127.0.0.1"),
        ("localhost", None, "127.0.0.1"),
    ],
)
def test_a_server_announces_what_others_can_reach(host: str, router: str | None, announced: str) -> None:
    config = placed(host, router=router)
    assert config.announce_host == announced
    assert place(config, Server(host), WIRED) == config


def test_each_replica_of_a_server_has_a_name_a_directory_and_a_port_of_its_own() -> None:
    config = KvConfig(
        instance_id="a", dram_size=1, disk_path="/kv", router="http://127.0.0.1:1", ports="5000-5009"
    )
    named, first, second = (of_replica(config, rank) for rank in (None, 0, 1))
    assert named == config
    assert (first.instance_id, second.instance_id) == ("a.dp0", "a.dp1")
    assert (first.disk_path, second.disk_path) == ("/kv/dp0", "/kv/dp1")
    assert (first.agent_port, second.agent_port) == (0, 0), "any of --kv-ports"
    fixed = replace(config, agent_port=5000)
    assert [of_replica(fixed, rank).agent_port for rank in range(2)] == [5000, 5001]
    assert of_replica(KvConfig(instance_id="a"), 1).disk_path is None


def test_what_is_given_is_announced() -> None:
    assert placed("127.0.0.1", router=ROUTER, announce_host="node7.cluster").announce_host == "node7.cluster"
    assert placed("0.0.0.0", router=ROUTER, announce_host="203.0.113.9").announce_host == "203.0.113.9"


@pytest.mark.parametrize(
    ("host", "flags", "says"),
    [
        # SGLang's default host, with a router elsewhere.
        (
            "127.0.0.1",
            {"router": ROUTER},
            ("--host", "10.0.0.1", "Give --host 0.0.0.0", "--kv-announce-host"),
        ),
        ("localhost", {"router": ROUTER}, ("--host", "Give --host 0.0.0.0")),
        ("0.0.0.0", {"router": ROUTER, "key": None}, ("--kv-cluster-key-file", "10.0.0.1")),
        (
            "0.0.0.0",
            {"announce_host": "10.0.0.7", "key": None},
            ("--kv-announce-host", "--kv-cluster-key-file"),
        ),
        ("0.0.0.0", {"data_interface": "ib0", "key": None}, ("--kv-data-interface", "--kv-cluster-key-file")),
        ("0.0.0.0", {"data_interface": "ib1", "router": ROUTER}, ("--kv-data-interface", "ib1")),
        ("0.0.0.0", {"router": ROUTER, "network": Wired()}, ("--host", "--kv-announce-host ADDRESS")),
    ],
)
def test_an_unreachable_address_is_refused_with_the_way_out(
    host: str, flags: dict[str, str | None], says: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        placed(host, **flags)  # type: ignore[arg-type]
    for each in says:
        assert each in str(error.value)


def test_without_a_key_everything_is_on_loopback() -> None:
    assert placed("0.0.0.0", key=None, router="http://127.0.0.1:1").announce_host == "127.0.0.1"
    assert placed("::", key=None).announce_host == "::1"
    assert listen_host("10.0.0.7", keyed=False) == "127.0.0.1"
    assert listen_host("0.0.0.0", keyed=False) == "127.0.0.1"
    assert listen_host("127.0.0.2", keyed=False) == "127.0.0.2"


def test_a_member_listens_where_its_server_does() -> None:
    assert listen_host("0.0.0.0", keyed=True) == "0.0.0.0"
    assert listen_host("::", keyed=True) == "::"
    assert listen_host("localhost", keyed=True) == "127.0.0.1"
    assert listen_host("10.0.0.7", keyed=True) == "10.0.0.7"
    assert [connectable(host) for host in ("0.0.0.0", "::", "10.0.0.7")] == ["127.0.0.1", "::1", "10.0.0.7"]


def test_kv_may_have_a_network_of_its_own() -> None:
    assert placed("0.0.0.0", router=ROUTER, data_interface="ib0").data_interface == "10.9.0.7"
    assert placed("0.0.0.0", router=ROUTER, data_interface="ib6").data_interface == "fd09::7"
    assert placed("0.0.0.0", router=ROUTER, data_interface="10.9.0.8").data_interface == "10.9.0.8"


def test_an_instance_is_named_by_where_it_is_reached_and_by_its_machine() -> None:
    """Two machines may have one address each in a network of their own."""
    assert placed("127.0.0.1").instance_id == "127.0.0.1:30000"
    assert placed("0.0.0.0", router=ROUTER).instance_id == "10.0.0.7:30000-ab12cd34"
    other = Wired(routes=WIRED.routes, identity="00000000")
    assert placed("0.0.0.0", router=ROUTER, network=other).instance_id == "10.0.0.7:30000-00000000"
    assert placed("::", router="http://[fd00::1]:1").instance_id == "ipv6-fd00--7:30000-ab12cd34"
    assert placed("0.0.0.0", router=ROUTER, instance_id="mine").instance_id == "mine"


def test_addresses_with_and_without_ports() -> None:
    assert split_port("10.0.0.1:80") == ("10.0.0.1", "80")
    assert split_port("[fd00::1]:80") == ("fd00::1", "80")
    assert [host_of(each) for each in ("fd00::1", "[fd00::1]", "10.0.0.1", "node")] == [
        *("fd00::1", "fd00::1", "10.0.0.1", "node")
    ]
    assert [bracketed(each) for each in ("fd00::1", "10.0.0.1")] == ["[fd00::1]", "10.0.0.1"]


def test_the_first_free_port_of_a_range_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with bind_one((port, 0), lambda port: socket.create_server(("127.0.0.1", port))) as found:
            assert found.getsockname()[1] != port
        with pytest.raises(OSError, match="in use") as error:
            bind_one((port, port), lambda port: socket.create_server(("127.0.0.1", port)))
        assert error.value.errno == errno.EADDRINUSE
    assert KvConfig(ports="31000-31002").port_range == (31000, 31001, 31002)
    assert KvConfig().port_range == (0,)


def test_the_system_says_its_addresses() -> None:
    network = SystemNetwork()
    assert (
        network.interface("lo") == network.route("127.0.0.2") == network.resolve("localhost") == "127.0.0.1"
    )
    assert network.interface("there-is-none") is network.resolve("a" * 64) is None
    assert network.machine() == SystemNetwork().machine()

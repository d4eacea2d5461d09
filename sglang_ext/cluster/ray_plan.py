"""Placement of a cluster on Ray, and the parts to run there. Pure: nodes and places come in as arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_ext.addresses import bracketed, is_loopback
from sglang_ext.cluster.config import ClusterConfig, flag_value
from sglang_ext.cluster.plan import (
    LOOPBACK,
    MEMBERSHIP_FLAG,
    HostFacts,
    Keys,
    Part,
    make_plan,
    speaks_tls,
)
from sglang_ext.cluster.ranks import ranks
from sglang_ext.errors import ConfigError

NODES_FLAG = "--nnodes"
"""SGLang's: one server over so many nodes."""
GIVEN = ("--node-rank", "--dist-init-addr")
"""Flags of each node of such a server, known only when it is placed."""
PORTS = 4
"""Of each node of a server: HTTP, bootstrap, the rendezvous of its ranks, and that of its nodes."""
ROUTER_KEYS = ("--api-key", "--api-key-file", "--api-keys-file")


@dataclass(frozen=True)
class Node:
    """A machine of the Ray cluster."""

    address: str
    cpus: float
    gpus: float = 0.0


@dataclass(frozen=True)
class Demand:
    """The placement group that a server, or all routers together, need."""

    name: str
    bundles: tuple[Mapping[str, float], ...]
    """Resources, each on a node of its own."""


@dataclass(frozen=True)
class Place:
    """Where something was placed."""

    address: str
    ports: tuple[int, ...]
    """Held for it."""
    folder: str
    """On that node, private, with the keys."""


def demands(config: ClusterConfig, nodes: Sequence[Node]) -> tuple[Demand, ...]:
    """Demand of each server, then of the routers: a GPU per rank, or without GPUs a share of the cores.

    Raises:
        ConfigError: the nodes do not have it; names the flag.
    """
    _check(config, nodes)
    most = int(max((node.cpus for node in nodes), default=0.0))
    largest = max(nodes, key=lambda node: (node.gpus, node.cpus), default=None)
    without = [node for node in nodes if node is not largest]
    # Where parts are started again there is to be room when a node is lost, if that can be had.
    for left in (without, nodes) if config.restart else (nodes,):
        for share in range(max(1, most), 0, -1):
            found = tuple(_demands(config, nodes, share))
            if fits(found, left):
                return found
    have = ", ".join(f"{node.address} ({node.cpus:g} cores, {node.gpus:g} GPUs)" for node in nodes) or "none"
    raise ConfigError(
        f"{config.servers} servers and {config.routers} routers do not fit the nodes: {have}",
        field="--ray",
        hint="Give fewer, or add nodes with ray start",
    )


def _demands(config: ClusterConfig, nodes: Sequence[Node], share: int) -> Iterator[Demand]:
    for index in range(config.servers):
        flags = config.flags_of(index)
        count = nodes_of(flags)
        each = -(-ranks(flags) // count)
        resources = {"GPU": float(each)} if _on_gpus(flags, nodes) else {"CPU": float(share * each)}
        yield Demand(name_of(config, index), (resources,) * count)
    yield Demand("routers", ({"CPU": 1.0},) * config.routers)


def _on_gpus(flags: Sequence[str], nodes: Sequence[Node]) -> bool:
    return flag_value(flags, "--device") != "cpu" and any(node.gpus for node in nodes)


def nodes_of(flags: Sequence[str]) -> int:
    """Over how many nodes a server goes.

    Raises:
        ConfigError: that is no number.
    """
    value = flag_value(flags, NODES_FLAG) or "1"
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"{value!r} is not a number of nodes", field=NODES_FLAG)
    return int(value)


def name_of(config: ClusterConfig, index: int) -> str:
    """The name of a server, as on one machine."""
    role, number = config.role_of(index)
    return f"server-{index}" if role == "colocated" else f"{role}-{number}"


def fits(wanted: Sequence[Demand], nodes: Sequence[Node]) -> bool:
    """Whether there is room: the largest first, each on the fullest node that has room for it."""
    left = [{"CPU": node.cpus, "GPU": node.gpus} for node in nodes]
    for demand in sorted(wanted, key=lambda each: sum(sum(b.values()) for b in each.bundles), reverse=True):
        taken: set[int] = set()
        for bundle in demand.bundles:
            able = [
                place
                for place, free in enumerate(left)
                if place not in taken and all(free.get(kind, 0.0) >= much for kind, much in bundle.items())
            ]
            if not able:
                return False
            best = min(able, key=lambda place: [left[place].get(kind, 0.0) for kind in sorted(bundle)])
            taken.add(best)
            for kind, much in bundle.items():
                left[best][kind] -= much
    return True


def _check(config: ClusterConfig, nodes: Sequence[Node]) -> None:
    if not config.port:
        raise ConfigError(
            "servers have to know it before the router is placed", field="--port", hint="Give a port"
        )
    if speaks_tls(config):
        raise ConfigError(
            "servers on other nodes do not know the router's certificate",
            field="--tls-cert-file",
            hint="End TLS in front of the router",
        )
    if config.routers > 1 and flag_value(config.router_args, MEMBERSHIP_FLAG) is None:
        raise ConfigError(
            "routers on several nodes share through Redis",
            field="--routers",
            hint="Give --router-args '--cluster redis://…', or one router",
        )
    for index in range(config.servers):
        for name in GIVEN:
            if flag_value(config.flags_of(index), name) is not None:
                raise ConfigError("it is set when a server is placed", field=name, hint="Leave it out")
    beyond = [node.address for node in nodes if not is_loopback(node.address)]
    if beyond and all(flag_value(config.router_args, name) is None for name in ROUTER_KEYS):
        raise ConfigError(
            f"the router can be reached from other machines ({beyond[0]}), and asks for no key",
            field="--router-args",
            hint="Give --router-args '--api-key-file FILE', a file that is on every node",
        )


def keys_in(folder: str) -> Keys:
    """Where a node has the keys of the cluster."""
    return Keys(Path(folder) / "cluster.key", Path(folder) / "servers.key")


def server_parts(
    config: ClusterConfig, index: int, nodes: Sequence[Node], places: Sequence[Place]
) -> tuple[Part, ...]:
    """Server ``index``, a part for each of its nodes; the first one answers.

    Args:
        nodes: of the Ray cluster: the router may be at any.
        places: one per node of the server, with ``PORTS`` ports each.
    """
    flags = config.flags_of(index)
    on_gpus = _on_gpus(flags, nodes)
    if on_gpus and flag_value(flags, "--base-gpu-id") is None:
        # Ray shows it its own GPUs only.
        config = replace(config, server_args=("--base-gpu-id", "0", *config.server_args))
    registers_with = ",".join(f"http://{bracketed(node.address)}:{config.port}" for node in nodes)
    found = []
    for rank, place in enumerate(places):
        http, bootstrap, rendezvous, _ = place.ports
        ports = [http] * config.servers
        ports += [bootstrap] * (config.prefill + config.decode) + [rendezvous] * config.servers
        cores = int(max(node.cpus for node in nodes))
        facts = HostFacts(max(1, cores), int(max(node.gpus for node in nodes)) if on_gpus else 0)
        part = make_plan(
            replace(config, routers=1, restart=None),
            facts,
            config.port,
            ports,
            keys_in(place.folder),
            address=place.address,
            registers_with=registers_with,
        )[index]
        if flag_value(part.command, "--kv-router") is None:
            raise ConfigError(
                f"{part.name} would not register with the router, which cannot know where it is",
                field="--ray",
                hint="Let it have the cache of the cluster: leave out the flags that choose another one",
            )
        if len(places) > 1:
            meets = f"{bracketed(places[0].address)}:{places[0].ports[3]}"
            part = replace(part, command=(*part.command, "--node-rank", str(rank), "--dist-init-addr", meets))
        found.append(part)
    return tuple(found)


def router_part(config: ClusterConfig, number: int, place: Place) -> Part:
    """A router, where it was placed."""
    host = place.address if config.host == LOOPBACK else config.host
    *_, router = make_plan(
        replace(config, host=host, routers=1, restart=None),
        HostFacts(1, 0),
        config.port,
        range(1, 1 + config.ports),
        keys_in(place.folder),
        registers_with="",
    )
    return replace(
        router,
        name=router_name(config, number),
        url=f"http://{bracketed(place.address)}:{config.port}",
        needs=(),
    )


def router_name(config: ClusterConfig, number: int) -> str:
    """The name of a router, as on one machine."""
    return "router" if config.routers == 1 else f"router-{number}"


def unplaced(config: ClusterConfig) -> tuple[Part, ...]:
    """The parts as far as they are known before they are placed: names, and which parts they need."""
    servers = tuple(name_of(config, index) for index in range(config.servers))
    return *(Part(name, (), {}, "") for name in servers), *(
        Part(router_name(config, number), (), {}, "", needs=servers, ready_path="/ready")
        for number in range(config.routers)
    )

"""From a configuration to the processes of the cluster. Pure: the host's facts come in as arguments."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sglang_ext.cluster.config import ClusterConfig, flag_value
from sglang_ext.cluster.ranks import (
    ATTENTION_FLAGS,
    CACHING_FLAG,
    DP_FLAGS,
    meeting,
    ranks,
    refuse_context,
    refuse_unknown_replicas,
)
from sglang_ext.errors import ConfigError, InternalError

LOOPBACK = "127.0.0.1"
ROUTER_RESTARTS = 5
"""Of a router that was ready, unless ``--restart`` says otherwise."""
DISK_FLAG = "--kv-disk-path"
ROUTER_TLS_FLAG = "--tls-cert-file"
"""With it, the servers do not register: they would have to trust a certificate that they do not know."""
TRANSFER_FLAG = "--disaggregation-transfer-backend"
ROUTER_KEY_FLAG = "--cluster-key-file"
SERVER_KEY_FLAG = "--kv-cluster-key-file"
CACHE_FLAGS = ("--radix-cache-backend", "--disable-radix-cache", "--enable-hierarchical-cache")
"""Flags by which a user chooses a cache; any of them keeps ours from being set."""
ROLE_SWITCH_FLAG = "--enable-pd-role-switch"
MEMBERSHIP_FLAG = "--cluster"
CONTROLLER_FLAG = "--role-controller"
WORKERS_FLAG = "--workers"
BOUND_TO_A_ROLE = (
    ("--speculative-algorithm",),
    ("--pp-size", "--pipeline-parallel-size", "--pp"),
    ("--ep-size", "--expert-parallel-size", "--ep"),
    DP_FLAGS,
    ATTENTION_FLAGS,
    ("--moe-a2a-backend",),
    ("--dcp-size", "--decode-context-parallel-size"),
    ("--disaggregation-decode-host-receive-threshold",),
)
"""Flags with state that SGLang does not rebuild for another role, or that it refuses with the switch."""
CACHE_VARIABLES = {
    "SGLANG_EXT_KV_BLOCK_SIZE": "--kv-block-size",
    "SGLANG_EXT_KV_CLUSTER_KEY_FILE": SERVER_KEY_FLAG,
    "SGLANG_EXT_KV_DISK_PATH": DISK_FLAG,
    "SGLANG_EXT_KV_ROUTER": "--kv-router",
}
"""Settings that servers read from the environment, but that differ per server or that the router needs."""
ROLE_VARIABLES = {
    "SGLANG_EXT_KV_PD_CACHING": CACHING_FLAG,
    "SGLANG_EXT_KV_TRANSFER_MODE": "--kv-transfer-mode",
}
"""Settings that servers read from the environment, and that bind them to a role or choose their cache."""
ENVIRONMENT = {
    # `python -m` would look for modules in the current folder first, and take any folder named router there.
    "PYTHONSAFEPATH": "1",
    # Logs are read while the process runs.
    "PYTHONUNBUFFERED": "1",
}
CPU_PROBE_TIMEOUT_S = "5"
"""Seconds that a server on a CPU has for the router's probe, more than the router's default: its HTTP process
competes with the models for the cores, and a server taken out for being busy makes the others busier."""
SECRET_FLAGS = ("--admin-api-key", "--ssl-keyfile-password")
"""Flags of SGLang's with secrets, which are not shown."""
ROUTER_SECRETS = {"--api-key": "SGLANG_EXT_ROUTER_API_KEY", "--worker-api-key": "SGLANG_EXT_WORKER_API_KEY"}
"""Flags of the router's with secrets, by which others could see them in a list of processes, and the
variables that carry them instead."""
SERVER_API_KEY_FLAG = "--api-key-file"
WORKER_API_KEY_FLAG = "--worker-api-key-file"


@dataclass(frozen=True)
class HostFacts:
    """Properties of this machine that the plan needs."""

    cores: int
    """Cores this process may use."""
    accelerators: int
    """GPUs or the like that torch sees; 0 means that servers run on the CPU."""


@dataclass(frozen=True)
class Part:
    """One process of the cluster."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    """Added to the supervisor's environment; variables that the user has set there stay."""
    url: str
    """Where it listens; it is ready when ``url + ready_path`` answers 200."""
    own_url: str = ""
    """Where it answers alone, if another part listens at ``url`` too."""
    needs: tuple[str, ...] = ()
    """Parts that have to be ready before this one starts."""
    ready_path: str = "/health"
    sockets: tuple[int, ...] = ()
    """Descriptors that its processes inherit: bound sockets, in which connections wait while none accepts."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """As ``environment``, but overrides variables that the user has set."""
    slots: tuple[tuple[str, ...], ...] = ()
    """Further flags for each of its two processes: one serves, and the other stands by to take over at once
    when the first dies. Empty for a part of one process."""
    restarts: int = 0
    """Times that it is started again after it was ready, unless the user has set a number."""

    @property
    def shown_command(self) -> str:
        """The command for people and logs, without secrets."""
        words = list(self.command)
        for position, word in enumerate(words):
            name, equals, _ = word.partition("=")
            if name in SECRET_FLAGS and equals:
                words[position] = f"{name}=***"
            elif name in SECRET_FLAGS and position + 1 < len(words):
                words[position + 1] = "***"
        return " ".join(words)


@dataclass(frozen=True)
class Keys:
    """Files with keys made for one run of the cluster; each is used unless the user has named another."""

    cluster: Path
    servers: Path
    """The key that servers require over HTTP; the router has it."""


@dataclass(frozen=True)
class Door:
    """The clients' entrance: sockets held open by the supervisor."""

    sockets: tuple[int, ...]
    """Descriptors of sockets that are bound to the router's address."""
    member_ports: tuple[int, ...] = ()
    """Ports at which servers register: one for each router, including a router that stands by."""
    shared: Path | None = None
    """The folder through which several routers share their membership."""


def make_plan(
    config: ClusterConfig,
    host: HostFacts,
    router_port: int,
    server_ports: Sequence[int],
    keys: Keys | None = None,
    door: Door | None = None,
    *,
    address: str = LOOPBACK,
    registers_with: str | None = None,
) -> tuple[Part, ...]:
    """The servers, then the routers.

    Args:
        server_ports: one per server, then one more per server that prefills or decodes, then per server the
            first of those at which its ranks meet (``ranks.meeting_ports``).
        keys: made for the cluster, used unless the user has named others.
        door: sockets and ports that the router inherits; without it, the router binds ``router_port`` itself.
        address: address at which the servers listen.
        registers_with: router addresses with which the servers register; None if the router gets their
            URLs.

    Raises:
        ConfigError: this machine cannot run it.
    """
    if len(server_ports) != config.ports:
        raise InternalError(
            f"{len(server_ports)} ports for {config.servers} servers, which need {config.ports}"
        )
    if door is not None:
        _refuse_workers(config.router_args)
    fixed = fixed_roles(config)
    if fixed and flag_value(config.router_args, CONTROLLER_FLAG) not in (None, "off"):
        raise ConfigError(
            f"no server could change its role: {fixed}",
            field=CONTROLLER_FLAG,
            hint="Give --prefill and --decode, and leave out what binds servers to a role",
        )
    access = _access(config, keys)
    router_url = f"{_scheme(config)}://{_connectable(config.host)}:{router_port}"
    bootstrap_ports = server_ports[config.servers :][: config.prefill + config.decode]
    rendezvous_ports = server_ports[config.servers + len(bootstrap_ports) :]
    servers = tuple(
        _server(
            config, host, index, port, bootstrap_ports, rendezvous_ports[index],
            _registers_with(config, door, registers_with, router_url), access.key, access.server_key,
            changes=not fixed, address=address,
        )
        for index, port in enumerate(server_ports[: config.servers])
    )  # fmt: skip
    args = _with_servers_settings(config, host, access.router_args)
    listed = servers if registers_with is None else ()
    router = _router(config, router_url, router_port, args, access.hidden, servers, listed, door)
    if config.routers == 1:
        return (*servers, router)
    if door is None or door.shared is None:
        raise InternalError("several routers need a folder that they share")
    return *servers, *_routers(config, router, args, door.shared, door.member_ports)


def _scheme(config: ClusterConfig) -> str:
    return "https" if speaks_tls(config) else "http"


def _registers_with(
    config: ClusterConfig, door: Door | None, given: str | None, router_url: str
) -> str | None:
    """The router addresses with which servers register; None for a router that speaks TLS."""
    if speaks_tls(config):
        return None
    if door is not None and door.member_ports:
        return ",".join(f"http://{LOOPBACK}:{port}" for port in door.member_ports)
    return given or router_url


@dataclass(frozen=True)
class _Access:
    """Keys of a cluster. key: file of the cluster's key; None without. server_key: file of the servers' API
    key. router_args: the router's flags with both, without secrets. hidden: the secrets, for its
    environment."""

    key: str | None
    server_key: str | None
    router_args: tuple[str, ...]
    hidden: Mapping[str, str]


def _access(config: ClusterConfig, keys: Keys | None) -> _Access:
    """The keys that servers and routers get: the user's, else those made for the cluster."""
    router_args = config.router_args
    key = given_key(config) or (None if keys is None else str(keys.cluster))
    if key is not None and flag_value(router_args, ROUTER_KEY_FLAG) is None:
        router_args = (ROUTER_KEY_FLAG, key, *router_args)
    router_args, hidden = without_secrets(router_args)
    says_another = bool(hidden.get(ROUTER_SECRETS["--worker-api-key"]))
    server_key = _given_server_key(config)
    if server_key is None and keys is not None and not says_another:
        server_key = str(keys.servers)
    if server_key is not None and flag_value(router_args, WORKER_API_KEY_FLAG) is None and not says_another:
        router_args = (WORKER_API_KEY_FLAG, server_key, *router_args)
    return _Access(key, server_key, router_args, hidden)


def _with_servers_settings(
    config: ClusterConfig, host: HostFacts, router_args: tuple[str, ...]
) -> tuple[str, ...]:
    """The router's flags with those that follow from the servers': patience on CPUs, and the block size."""
    patience = "--health-check-timeout-secs"
    on_cpu = any(_on_cpu(config, host, index) for index in range(config.servers))
    if on_cpu and flag_value(router_args, patience) is None:
        router_args = (patience, CPU_PROBE_TIMEOUT_S, *router_args)
    block_size = flag_value(config.flags_of(0), "--kv-block-size")
    if block_size is not None and flag_value(router_args, "--block-size") is None:
        router_args = ("--block-size", block_size, *router_args)
    return router_args


def _router(
    config: ClusterConfig,
    url: str,
    port: int,
    args: tuple[str, ...],
    hidden: Mapping[str, str],
    servers: tuple[Part, ...],
    listed: tuple[Part, ...],
    door: Door | None,
) -> Part:
    """One router. hidden: secrets for its environment. servers: started before it. listed: servers whose URLs
    it gets by its flags."""
    return Part(
        name="router",
        command=(
            sys.executable, "-m", "sglang_ext.router",
            *(("--worker-urls", *(server.url for server in listed)) if listed else ()),
            "--host", config.host, "--port", str(port), "--policy", config.policy,
            *(("--listen-fds", ",".join(map(str, door.sockets))) if door is not None else ()),
            *args,
        ),
        environment=ENVIRONMENT,
        url=url,
        ready_path="/ready",
        restarts=ROUTER_RESTARTS,
        needs=tuple(server.name for server in servers),
        sockets=() if door is None else door.sockets,
        secrets=hidden,
        slots=_slots(config, door),
    )  # fmt: skip


def _routers(
    config: ClusterConfig, router: Part, args: tuple[str, ...], shared: Path, ports: Sequence[int]
) -> Iterator[Part]:
    """Several routers like ``router`` that share their membership through a folder."""
    shares = flag_value(args, MEMBERSHIP_FLAG) is None
    sharing = (MEMBERSHIP_FLAG, f"local://{shared}") if shares else ()
    for number, port in enumerate(ports):
        yield replace(
            router,
            name=f"router-{number}",
            command=(*router.command, *sharing, "--member-port", str(port)),
            own_url=f"{_scheme(config)}://{LOOPBACK}:{port}",
        )


def with_environment(config: ClusterConfig, environment: Mapping[str, str]) -> ClusterConfig:
    """The configuration, with environment variables that servers would read and the plan depends on turned
    into flags. Flags that were given win."""
    hands_over = (flag_value(config.server_args, TRANSFER_FLAG) or "global") == "global"
    is_ours = all(flag_value(config.server_args, name) is None for name in CACHE_FLAGS)
    variables: dict[str, str] = {}
    if hands_over if config.prefill else is_ours:
        variables |= CACHE_VARIABLES
    if hands_over and config.prefill:
        variables |= ROLE_VARIABLES
    found = [
        word
        for variable, flag in variables.items()
        if variable in environment
        for word in (flag, environment[variable])
    ]
    return replace(config, server_args=(*found, *config.server_args))


def speaks_tls(config: ClusterConfig) -> bool:
    """Whether the router answers over TLS only."""
    return any(word.startswith(ROUTER_TLS_FLAG) for word in config.router_args)


def _slots(config: ClusterConfig, door: Door | None) -> tuple[tuple[str, ...], ...]:
    """Two routers where one is to be started again when it dies: starting takes seconds."""
    if door is None or not config.restart or config.routers > 1:
        return ()
    return tuple(("--member-port", str(port)) for port in door.member_ports) or ((), ())


def without_secrets(arguments: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The router's arguments without those that hold secrets, and these as variables."""
    kept: list[str] = []
    hidden: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name in ROUTER_SECRETS:
            hidden[ROUTER_SECRETS[name]] = value if equals else next(words, "")
        else:
            kept.append(word)
    return tuple(kept), hidden


def _given_server_key(config: ClusterConfig) -> str | None:
    """The file with the servers' API key that the user named, for all servers or for the router.

    Raises:
        ConfigError: they name several.
    """
    found = {flag_value(config.flags_of(index), SERVER_API_KEY_FLAG) for index in range(config.servers)}
    if len(found) > 1:
        raise ConfigError(
            "the servers of one router have one key",
            field=SERVER_API_KEY_FLAG,
            hint="Give it after --, for all of them",
        )
    return found.pop() or flag_value(config.router_args, WORKER_API_KEY_FLAG)


def given_key(config: ClusterConfig) -> str | None:
    """The file with the cluster's key that the user named, for the router or for all servers.

    Raises:
        ConfigError: they name several, which could not reach each other.
    """
    named = [flag_value(config.router_args, ROUTER_KEY_FLAG)]
    named += [flag_value(config.flags_of(index), SERVER_KEY_FLAG) for index in range(config.servers)]
    found = {path for path in named if path is not None}
    if len(found) > 1:
        raise ConfigError(
            f"the members of one cluster have one key, and {' and '.join(sorted(found))} are named",
            field=SERVER_KEY_FLAG,
            hint=f"Give --router-args '{ROUTER_KEY_FLAG} FILE' alone: the servers get the same",
        )
    return next(iter(found), None)


def _server(
    config: ClusterConfig,
    host: HostFacts,
    index: int,
    port: int,
    bootstrap_ports: Sequence[int],
    rendezvous_port: int,
    registers_with: str | None,
    key: str | None,
    server_key: str | None,
    *,
    changes: bool,
    address: str,
) -> Part:
    """One server. registers_with: the router with which it registers and shares its index. key, server_key:
    the files with the cluster's key and with the servers'. changes: whether it can change between prefill and
    decode. address: the address at which it listens."""
    flags = config.flags_of(index)
    role, number = config.role_of(index)
    ours = ["--model-path", config.model_path, "--host", address, "--port", str(port)]
    ours += meeting(flags, rendezvous_port, LOOPBACK)
    if role != "colocated":
        ours += ["--disaggregation-mode", role]
        if flag_value(flags, TRANSFER_FLAG) is None:
            ours += [TRANSFER_FLAG, "global"]
        if role == "prefill" or changes:
            place = number if role == "prefill" else config.prefill + number
            ours += ["--disaggregation-bootstrap-port", str(bootstrap_ports[place])]
        if changes and flag_value(flags, ROLE_SWITCH_FLAG) is None:
            ours += [ROLE_SWITCH_FLAG]
    hands_over = flag_value((*ours, *flags), TRANSFER_FLAG) == "global"
    if not hands_over and all(flag_value(flags, name) is None for name in CACHE_FLAGS):
        ours += ["--radix-cache-backend", "global"]
    # With our transfer backend, --kv-pd-caching chooses the cache.
    keeps = ("1", "2", "3") if role == "prefill" else ("2", "3")
    is_global = (
        (flag_value(flags, CACHING_FLAG) or "3") in keeps
        if hands_over
        else flag_value((*ours, *flags), CACHE_FLAGS[0]) == "global"
    )
    if is_global or hands_over:
        if hands_over:
            refuse_context(flags)
        routed = registers_with is not None or flag_value(flags, "--kv-router") is not None
        refuse_unknown_replicas(flags, keeps=is_global, registers=routed)
    if is_global and registers_with is not None and flag_value(flags, "--kv-router") is None:
        ours += ["--kv-router", registers_with]
    # A server that hands KV over requires it too, also without a cache.
    if (is_global or hands_over) and key is not None and flag_value(flags, SERVER_KEY_FLAG) is None:
        ours += [SERVER_KEY_FLAG, key]
    if server_key is not None and flag_value(flags, SERVER_API_KEY_FLAG) is None:
        ours += [SERVER_API_KEY_FLAG, server_key]
    on_cpu = _on_cpu(config, host, index)
    if not on_cpu:
        ours += _devices(config, host, index)
    name = f"server-{index}" if role == "colocated" else f"{role}-{number}"
    return Part(
        name=name,
        command=(sys.executable, "-m", "sglang_ext.launch_server", *ours, *flags, *_own_disk(flags, name)),
        environment={**ENVIRONMENT, **(_cpu_environment(config, host, index) if on_cpu else {})},
        url=f"http://{_connectable(address)}:{port}",
    )


def fixed_roles(config: ClusterConfig) -> str:
    """Why servers cannot change between prefill and decode; empty when they can.

    All of them or none: a server's peers are to have the shape that they had before it changed.
    """
    if not config.prefill:
        return "there are none that only prefill or decode"
    if config.fixed_roles:
        return "--fixed-roles"
    sizes = set()
    for index in range(config.colocated, config.servers):
        flags = config.flags_of(index)
        sizes.add(ranks(flags))
        if (flag_value(flags, TRANSFER_FLAG) or "global") != "global":
            return f"{TRANSFER_FLAG} {flag_value(flags, TRANSFER_FLAG)}"
        if (caching := flag_value(flags, CACHING_FLAG) or "3") not in ("2", "3"):
            return f"{CACHING_FLAG} {caching} does not keep what both roles have"
        if flag_value(flags, "--kv-transfer-mode") == "push-by-layer":
            return "--kv-transfer-mode push-by-layer"
        for names in BOUND_TO_A_ROLE:
            if (value := flag_value(flags, *names)) is not None and value not in ("0", "1", "none"):
                return f"{names[0]} {value}".rstrip()
    return "they have different numbers of ranks" if len(sizes) > 1 else ""


def _refuse_workers(router_args: Sequence[str]) -> None:
    """Refuse worker counts that a router with inherited sockets refuses, before any server starts."""
    workers = flag_value(router_args, WORKERS_FLAG)
    if workers not in (None, "1"):
        raise ConfigError(
            f"{workers} workers listen at sockets of their own, and the router gets those of the cluster",
            field=WORKERS_FLAG,
            hint="Leave it out of --router-args, and give --routers N",
        )


def _own_disk(flags: Sequence[str], name: str) -> list[str]:
    """A folder of its own in the disk tier's directory, the same at every start; the last value counts."""
    path = flag_value(flags, DISK_FLAG)
    return [DISK_FLAG, str(Path(path) / name)] if path else []


def _on_cpu(config: ClusterConfig, host: HostFacts, index: int) -> bool:
    return host.accelerators == 0 or flag_value(config.flags_of(index), "--device") == "cpu"


def _devices(config: ClusterConfig, host: HostFacts, index: int) -> list[str]:
    """A GPU of its own for each rank of each server, or the user's word on how to share."""
    flags = config.flags_of(index)
    if flag_value(flags, "--base-gpu-id") is not None:
        return []
    first = sum(ranks(config.flags_of(other)) for other in range(index))
    if first + ranks(flags) <= host.accelerators:
        return ["--base-gpu-id", str(first)]
    if ranks(flags) <= host.accelerators and flag_value(flags, "--mem-fraction-static") is not None:
        places = host.accelerators // ranks(flags)
        return ["--base-gpu-id", str(index % places * ranks(flags))]
    raise ConfigError(
        f"{config.servers} servers need more than the {host.accelerators} GPUs there are",
        field="--colocated",
        hint="Give fewer, or let servers share GPUs with --mem-fraction-static after --, "
        "such as 0.4 for two on one GPU",
    )


def _cpu_environment(config: ClusterConfig, host: HostFacts, index: int) -> Mapping[str, str]:
    """An equal share of the cores for each rank of each server, at least one.

    More OpenMP threads than cores make every matrix product wait for threads that are not running. With one
    rank the kernel places the threads; with several, SGLang wants the cores of each rank spelled out.
    """
    flags = config.flags_of(index)
    share = max(1, host.cores // sum(ranks(config.flags_of(i)) for i in range(config.servers)))
    found = {"OMP_NUM_THREADS": str(share)}
    if (count := ranks(flags)) > 1:
        first = index * count * share
        cores = [[(first + rank * share + k) % host.cores for k in range(share)] for rank in range(count)]
        found["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, some)) for some in cores)
    return found


def _connectable(host: str) -> str:
    """An address that clients on this machine can use for a server bound to ``host``."""
    if host in ("", "0.0.0.0", "::"):
        return LOOPBACK
    return f"[{host}]" if ":" in host else host


def log_path(folder: Path, part: Part) -> Path:
    """Where the output of a part goes."""
    return folder / f"{part.name}.log"

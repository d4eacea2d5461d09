"""Where a server listens, and by which address others reach it: found once, when it starts. And free ports.

A server announces a numeric address unless ``--kv-announce-host`` gives a name: other machines may not
resolve its host name. The announced address may differ from the bound one, so that a proxy in between can
forward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import ipaddress
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import urlsplit

from sglang_ext.config import KvConfig
from sglang_ext.errors import ConfigError

T = TypeVar("T")

LOOPBACK: Final = "127.0.0.1"
LAST_PORT: Final = 65535
WILDCARDS: Final = {"": "0.0.0.0", "0.0.0.0": "0.0.0.0", "::": "::"}
ELSEWHERE: Final = {4: "192.0.2.1", 6: "2001:db8::1"}
"""Documentation addresses (RFC 5737, RFC 3849): packets to them take the default route."""
MACHINE_ID: Final = Path("/etc/machine-id")
_SIOCGIFADDR: Final = 0x8915
KEY_FLAG: Final = "--kv-cluster-key-file"


class Server(Protocol):
    """The attributes of SGLang's ``ServerArgs`` that are read here."""

    host: str
    port: int


class Network(Protocol):
    """The network of this machine, as the operating system describes it."""

    def resolve(self, host: str) -> str | None:
        """A name's address, and an address itself; None for a name that means nothing here."""

    def route(self, host: str) -> str | None:
        """This machine's address on the way to a host; None where there is no way."""

    def interface(self, name: str) -> str | None:
        """The address of a network interface; None where there is none of that name, or it has none."""

    def machine(self) -> str:
        """Tells this machine from others, the same after a restart: a few hexadecimal digits."""


class SystemNetwork:
    """``Network``, as the system says."""

    def resolve(self, host: str) -> str | None:
        if host == "localhost":
            return LOOPBACK
        with contextlib.suppress(OSError, UnicodeError):
            return str(socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][4][0])
        return None

    def route(self, host: str) -> str | None:
        address = self.resolve(host)
        if address is None:
            return None
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            return str(probe.getsockname()[0])
        return None

    def interface(self, name: str) -> str | None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            return socket.inet_ntoa(found[20:24])
        with contextlib.suppress(OSError):
            for line in Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines():
                digits, _, _, scope, _, device = line.split()
                if device == name and scope == "00":  # global
                    return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
        return None

    def machine(self) -> str:
        facts = socket.gethostname().encode()
        with contextlib.suppress(OSError):
            facts += MACHINE_ID.read_bytes()
        return hashlib.blake2b(facts, digest_size=4).hexdigest()


def place(config: KvConfig, server: Server, network: Network) -> KvConfig:
    """``config`` with the settings filled in that depend on this machine: ``announce_host``, the address of
    ``data_interface``, and ``instance_id``. A setting that the user gave stays.

    Raises:
        ConfigError: the server could not be reached by others; names the flag, and the way out.
    """
    keyed = config.cluster_key_file is not None
    routers = (
        [] if config.router is None else [urlsplit(url).hostname or "" for url in config.router.split(",")]
    )
    announced = _announced(config.announce_host, server.host, routers, network, keyed=keyed)
    data = config.data_interface
    if data is not None:
        if not keyed:
            raise ConfigError(
                "without a key, KV travels on loopback only",
                field="--kv-data-interface",
                hint=f"Give {KEY_FLAG}",
            )
        found = data if is_address(data) else network.interface(data)
        if found is None:
            raise ConfigError(
                f"there is no network interface {data!r} with an address",
                field="--kv-data-interface",
                hint="`ip address` lists them",
            )
        data = found
    name = config.instance_id or _instance_id(announced, server.port, network)
    return dataclasses.replace(config, announce_host=announced, data_interface=data, instance_id=name)


def of_replica(config: KvConfig, dp_rank: int | None) -> KvConfig:
    """The settings of one replica of a server with ``--dp-size`` above 1, which is an instance of its own:
    its name, its directory on disk, and its agent's port. None: of a server without replicas.
    """
    if dp_rank is None:
        return config
    return dataclasses.replace(
        config,
        instance_id=f"{config.instance_id}.dp{dp_rank}",
        disk_path=config.disk_path and str(Path(config.disk_path) / f"dp{dp_rank}"),
        agent_port=config.agent_port and config.agent_port + dp_rank,
    )


def _announced(given: str | None, host: str, routers: Sequence[str], network: Network, *, keyed: bool) -> str:
    remote = [each for each in routers if not _is_here(each, network)]
    if remote and not keyed:
        raise ConfigError(
            f"the router at {remote[0]} is on another machine, and this server has no key of the cluster",
            field=KEY_FLAG,
            hint="Give the file with the key, the same on every member",
        )
    if given is not None:
        if not keyed and not is_loopback(given):
            raise ConfigError(
                f"without a key, no peer is answered at {given}",
                field="--kv-announce-host",
                hint=f"Give {KEY_FLAG}",
            )
        return given
    if host not in WILDCARDS:
        address = network.resolve(host) or host
        if remote and is_loopback(address):
            raise ConfigError(
                f"this server listens on {host}, where the router at {remote[0]} cannot reach it",
                field="--host",
                hint="Give --host 0.0.0.0 or an address of this machine; or --kv-announce-host, where "
                "something in between forwards",
            )
        return address
    family = 6 if host == "::" else 4
    loopback = "::1" if family == 6 else LOOPBACK
    if not keyed:
        return loopback
    for each in (*remote, ELSEWHERE[family]):
        address = network.route(each) or ""
        # A wildcard of one family is not listened to in the other one.
        if address and not is_loopback(address) and (":" in address) == (family == 6):
            return address
    if routers and not remote:
        return loopback
    raise ConfigError(
        f"listens on {host or 'every address'}, and none is found by which others reach this machine",
        field="--host",
        hint="Give --kv-announce-host ADDRESS",
    )


def _is_here(host: str, network: Network) -> bool:
    """Whether a router's host is this machine."""
    if is_loopback(host):
        return True
    address = network.resolve(host)
    return address is not None and (is_loopback(address) or network.route(address) == address)


def _instance_id(announced: str, port: int, network: Network) -> str:
    """Where it is reached, and beyond loopback on which machine: an address may be given twice."""
    host = f"ipv6-{announced.replace(':', '-')}" if ":" in announced else announced
    return f"{host}:{port}" if is_loopback(announced) else f"{host}:{port}-{network.machine()}"


def listen_host(host: str, *, keyed: bool) -> str:
    """Where a member listens whose server listens at ``host``: an address, on loopback unless a key guards
    it.
    """
    if host in WILDCARDS:
        return WILDCARDS[host] if keyed else "::1" if host == "::" else LOOPBACK
    address = host if is_address(host) else SystemNetwork().resolve(host) or host
    return address if keyed or is_loopback(address) else LOOPBACK


def bind_one(ports: Sequence[int], bind: Callable[[int], T]) -> T:
    """Bind to the first free one of some ports.

    Raises:
        Exception: raised by ``bind`` for the last port, if all are taken.
    """
    for port in ports[:-1]:
        try:
            return bind(port)
        except Exception as error:  # ZeroMQ's is no OSError
            if getattr(error, "errno", None) != errno.EADDRINUSE:
                raise
    return bind(ports[-1])


def connectable(host: str) -> str:
    """Where this machine reaches what listens at ``host``."""
    return {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)


def bracketed(host: str) -> str:
    """A host as it stands in front of a port."""
    return f"[{host}]" if ":" in host else host


def host_of(address: str) -> str:
    """The host of ``host``, ``host:port`` or ``[host]:port``."""
    return split_port(address)[0]


def split_port(address: str) -> tuple[str, str]:
    """Host and port of an address; no port where it has none."""
    if address.startswith("["):
        host, _, port = address[1:].partition("]")
        return host, port.removeprefix(":")
    if address.count(":") > 1:
        return address, ""
    host, _, port = address.partition(":")
    return host, port


def is_address(host: str) -> bool:
    """Whether a host is given by number."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether a socket bound to ``host`` (a name or an address) can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Ports:
    """Free ports, held until the block ends, so that no other program gets them while the servers start.

    A held port is bound and not listened on, with SO_REUSEADDR: the kernel then gives it to no other socket,
    a second cluster passes over it, and a server that sets SO_REUSEADDR, as all of ours do, may listen on it.
    """

    def __init__(self) -> None:
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Ports:
        return self

    def __exit__(self, *exc: object) -> None:
        self._held.close()

    def take(self, host: str, port: int, flag: str) -> int:
        """Hold the port that the user named, or any free one for 0.

        Raises:
            ConfigError: it is in use, or the address is not ours; names ``flag``.
        """
        return int(self.open(host, port, flag)[0].getsockname()[1])

    def open(self, host: str, port: int, flag: str) -> list[socket.socket]:
        """Like ``take``, but returns the sockets that hold the port, one per address of ``host``: a child
        that inherits them can listen there. They are closed when the block ends.

        Raises:
            ConfigError: as ``take``.
        """
        try:
            return self._hold_all(host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"port {port} on {host} is in use by another process",
                    field=flag,
                    hint=f"Stop it (`ss -ltnp 'sport = :{port}'` names it), or give another port",
                ) from None
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror or error}",
                field="--host" if error.errno != errno.EACCES else flag,
            ) from None

    def free_after(self, port: int, count: int, *, run: int = 1) -> list[int]:
        """Hold ports on loopback, the first free ones above ``port``.

        Args:
            count: how many are returned.
            run: how many in a row are held from each of these on.

        Raises:
            ConfigError: there are not as many.
        """
        found = list(self._free(port, count, run))
        if len(found) < count:
            raise ConfigError(
                f"fewer than {count * run} free ports above {port}", field="--port", hint="Give a lower port"
            )
        return found

    def _free(self, port: int, count: int, run: int) -> Iterator[int]:
        while count and port + run <= LAST_PORT:
            port += 1
            row = range(port, port + run)
            with contextlib.suppress(OSError):
                # Without SO_REUSEADDR: a port that another cluster holds is not free.
                with contextlib.ExitStack() as probes:
                    for each in row:
                        probes.enter_context(socket.socket(socket.AF_INET)).bind((LOOPBACK, each))
                for each in row:
                    self._hold(*_addresses(LOOPBACK, each)[0])
                count, port = count - 1, row[-1]
                yield row[0]

    def _hold_all(self, host: str, port: int) -> list[socket.socket]:
        found: list[socket.socket] = []
        missing: OSError | None = None
        for family, address in _addresses(host, port):
            # Whatever port the first one got.
            place = (address[0], found[0].getsockname()[1] if found else port, *address[2:])
            try:
                found.append(self._hold(family, place))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing = error
        if missing is not None and not found:
            raise missing
        return found

    def _hold(self, family: int, address: tuple[Any, ...]) -> socket.socket:
        with contextlib.ExitStack() as undo:
            # The bind fails if a program listens on the port, even with SO_REUSEADDR.
            holder = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            holder.bind(address)
            self._held.enter_context(undo.pop_all())
        return holder


def _addresses(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """(family, address) of each address that a host stands for."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def client_network(host: str) -> str:
    """The key of a client's budget: its IPv4 address, or its IPv6 /64 network, which is one customer's."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))

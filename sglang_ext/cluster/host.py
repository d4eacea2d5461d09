"""What the plan has to ask of this machine: cores, accelerators, free ports."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from typing import Any

from sglang_ext.cluster.plan import LOOPBACK, HostFacts
from sglang_ext.errors import ConfigError

LAST_PORT = 65535


def host_facts() -> HostFacts:
    """Cores from the scheduler's affinity, accelerators from torch."""
    from sglang_ext.patches.cpu import runtime

    accelerators = 0
    if runtime.accelerator_available():
        import torch

        accelerators = torch.accelerator.device_count()
    return HostFacts(cores=len(os.sched_getaffinity(0)), accelerators=accelerators)


class Ports:
    """Free ports, held until the block ends, so that nobody else is given them while the servers start.

    A held port is bound and not listened on, with SO_REUSEADDR: the kernel then hands it out to nobody, a
    second cluster passes over it, and a server that sets SO_REUSEADDR, as all of ours do, may listen on it.
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
        """As ``take``, but returns what holds it, a bound socket per address of ``host``: who inherits them
        can listen there. They are closed when the block ends.

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

    def free_after(self, port: int, count: int) -> list[int]:
        """Hold ``count`` ports on loopback, the first free ones above ``port``.

        Raises:
            ConfigError: there are not as many.
        """
        found = list(self._free(port, count))
        if len(found) < count:
            raise ConfigError(
                f"fewer than {count} free ports above {port}", field="--port", hint="Give a lower port"
            )
        return found

    def _free(self, port: int, count: int) -> Iterator[int]:
        while count and (port := port + 1) <= LAST_PORT:
            with contextlib.suppress(OSError):
                # Without SO_REUSEADDR: a port that another cluster holds is not free.
                with socket.socket(socket.AF_INET) as probe:
                    probe.bind((LOOPBACK, port))
                self._hold(*_addresses(LOOPBACK, port)[0])
                count -= 1
                yield port

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
            # Whoever listens on it makes the bind fail, with SO_REUSEADDR too.
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

"""Bind torch's store to the address that the ranks connect to, and keep gloo and NCCL on loopback with it.

Change: the ranks of a server, one alone too, meet through torch's ``TCPStore``, at ``--nccl-port`` or
``--dist-init-addr``. It listens on every address of the machine and asks for no key: any process that reaches
the port can set keys and fill the scheduler's memory. The patch binds a socket to the host that the ranks
connect to (loopback for a wildcard address) and passes it to the store. If that host is loopback, gloo and
NCCL use the loopback interface too, unless the user has named another one.

Why no extension point serves: torch's store takes a socket (``master_listen_fd``), its own function does not.

For: any device.
Can go: when torch binds its store to the host that it is given.
"""

from __future__ import annotations

import inspect
import ipaddress
import os
import socket
from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any

from sglang_ext.patches.base import Patch, PatchMismatchError, Scope, is_in_place, put_in_place, resolve

_MODULE = "torch.distributed.rendezvous"
_FUNCTION = "_create_c10d_store"
_NAME = "rendezvous"
_PARAMETERS = ["hostname", "port", "rank", "world_size", "timeout", "use_libuv"]
LOOPBACK = "127.0.0.1"
BACKLOG = 2048
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that name the network interface of gloo and of NCCL."""


def address_of(host: str) -> str:
    """Where the store of a host listens: an address in place of a name, loopback in place of all addresses.

    A name may be that of this machine, which some resolve to loopback for itself alone; its other addresses
    come first, since ranks on other machines are to connect.

    Raises:
        OSError: it has no address.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found]
    first = min(addresses, key=lambda each: each.is_loopback and host != "localhost")
    if first.is_unspecified:
        return LOOPBACK if first.version == 4 else "::1"
    return str(first)


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens at an address, for the store to take over.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(BACKLOG)
    except BaseException:
        found.close()
        raise
    return found


def stay_on_loopback(host: str, environment: MutableMapping[str, str]) -> None:
    """Have gloo and NCCL use the loopback interface, where the ranks meet there."""
    if ipaddress.ip_address(host).is_loopback:
        for name in INTERFACES:
            environment.setdefault(name, "lo")


def create_store(
    hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True
) -> Any:
    """In place of ``_create_c10d_store``."""
    from torch.distributed import TCPStore

    module = resolve(_MODULE)
    host = address_of(hostname)
    stay_on_loopback(host, os.environ)
    is_agents = module._torchelastic_use_agent_store()  # torchrun's: it listens
    taken = {} if rank != 0 or is_agents else {"master_listen_fd": listening(host, port).detach()}
    return TCPStore(
        host_name=host,
        port=port,
        world_size=world_size,
        is_master=bool(taken),
        timeout=timeout,
        multi_tenant=not is_agents,
        use_libuv=use_libuv,
        **taken,
    )


def apply() -> None:
    """Put ours in the place of torch's.

    Raises:
        PatchMismatchError: torch's has other parameters.
    """
    if applied():
        return
    module = resolve(_MODULE)
    there = list(inspect.signature(getattr(module, _FUNCTION)).parameters)
    if there != _PARAMETERS:
        raise PatchMismatchError(f"{_MODULE}.{_FUNCTION} takes {there}, not {_PARAMETERS}")
    put_in_place(module, _FUNCTION, create_store, _NAME)


def applied() -> bool:
    """Whether torch calls ours."""
    return is_in_place(resolve(_MODULE), _FUNCTION, _NAME)


PATCH = Patch(
    name=_NAME,
    summary="the store through which ranks meet listens at its own address, not on all of them",
    scope=Scope.SERVER,
    targets=(),
    apply=apply,
    applied=applied,
)

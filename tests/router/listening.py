"""Where a tree of processes listens, by the rows of the table "What listens" in docs/security.md."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import psutil

from tests.support.servers.server import threads_of

ROUTER, ALONE, HTTP = "router", "router alone", "server's HTTP"
AGENT, TRANSFER, BOOTSTRAP = "agent", "transfer of KV", "bootstrap of PD"
STORE, GLOO, QUEUE = "torch's store", "gloo and NCCL", "SGLang's queue of ranks"
ROWS = (ROUTER, ALONE, HTTP, AGENT, TRANSFER, BOOTSTRAP, STORE, GLOO, QUEUE)
"""First words of the rows that are TCP sockets."""
UNKNOWN = "unknown"
"""A socket that is in no row."""
ROUTERS = {"--port": ROUTER, "--member-port": ALONE}
SERVERS = {"--port": HTTP, "--disaggregation-bootstrap-port": BOOTSTRAP, "--nccl-port": STORE}
"""Flags whose values are ports."""
SCHEDULER = "sglang::scheduler"
FIRST_RANK = f"{SCHEDULER}_TP0"
"""The title of the first of several ranks."""
TORCH = "gloo_tcp_loop"
"""Name of a thread of gloo, each of which has a port."""


def sockets(pids: Iterable[int]) -> Iterator[tuple[int, str, int]]:
    """(process, address, port) of each TCP socket that listens, and of each UDP socket."""
    for pid in pids:
        try:
            found = psutil.Process(pid).net_connections("inet")
        except psutil.NoSuchProcess:
            continue
        for each in found:
            if each.status in (psutil.CONN_LISTEN, psutil.CONN_NONE) and each.laddr:
                yield pid, each.laddr.ip, each.laddr.port


def beyond_loopback(pids: Iterable[int]) -> list[tuple[str, str, int]]:
    """Sockets that other machines reach: of which process, and where."""
    return [
        (psutil.Process(pid).name(), address, port)
        for pid, address, port in sockets(pids)
        if not ipaddress.ip_address(address).is_loopback
    ]


def ports_in(words: Sequence[str], flags: Mapping[str, str]) -> dict[int, str]:
    """The ports on a command line, and their rows."""
    found = {}
    for name, row in flags.items():
        for place, word in enumerate(words):
            if word == name and place + 1 < len(words):
                found[int(words[place + 1])] = row
            elif word.startswith(f"{name}="):
                found[int(word.partition("=")[2])] = row
    return found


def ports_of(pids: Iterable[int]) -> dict[int, str]:
    """The ports on the command lines of routers and servers, and their rows."""
    found: dict[int, str] = {}
    for pid in pids:
        words = psutil.Process(pid).cmdline()
        if "sglang_ext.router" in words:
            found |= ports_in(words, ROUTERS)
        elif "sglang_ext.launch_server" in words:
            found |= ports_in(words, SERVERS)
    return found


def rows(pids: Sequence[int], known: Mapping[int, str] | None = None) -> Counter[str]:
    """How many sockets of these processes are in which row. An address that several processes share counts
    once. Of a scheduler's sockets, as many are gloo's as it has threads of gloo. Each rank has two for the
    transfer of KV. Rank 0 has one more, its agent's, where it registers with a router, and the first of
    several ranks has the queue's.

    known: ports whose command lines do not show them, and their rows.
    """
    named = ports_of(pids) | dict(known or {})
    found: Counter[str] = Counter()
    counted: set[tuple[str, int]] = set()
    for pid in pids:
        other = 0
        for _, address, port in sockets([pid]):
            if (address, port) in counted:
                continue
            counted.add((address, port))
            if port in named:
                found[named[port]] += 1
            else:
                other += 1
        if not other:
            continue
        title = " ".join(psutil.Process(pid).cmdline())
        if SCHEDULER not in title:
            found[UNKNOWN] += other
            continue
        gloo, queue = threads_of(pid).count(TORCH), int(FIRST_RANK in title)
        other -= gloo + queue
        agent = other % 2
        transfer = min(2, other - agent)
        unknown = other - agent - transfer
        found += Counter({GLOO: gloo, QUEUE: queue, AGENT: agent, TRANSFER: transfer, UNKNOWN: unknown})
    return found


def ports_of_server(info: Mapping[str, object]) -> dict[int, str]:
    """The ports in the ``/server_info`` of a server, and their rows."""
    names = {"port": HTTP, "nccl_port": STORE, "disaggregation_bootstrap_port": BOOTSTRAP}
    return {value: row for name, row in names.items() if isinstance(value := info.get(name), int)}

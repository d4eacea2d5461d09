"""Ports that are held, and queries to the host."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest

from sglang_ext.addresses import LAST_PORT, Ports
from sglang_ext.cluster.host import host_facts
from sglang_ext.errors import ConfigError

LOOPBACK = "127.0.0.1"


def listen(port: int) -> socket.socket:
    """Listen as aiohttp and uvicorn do, with SO_REUSEADDR."""
    found = socket.create_server((LOOPBACK, port), reuse_port=False)
    assert found.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
    return found


def test_a_held_port_can_be_listened_on_and_is_given_out_once(free_port: Callable[[], int]) -> None:
    with Ports() as ours, Ports() as theirs:
        port = ours.take(LOOPBACK, free_port(), "--port")
        (after,) = ours.free_after(port, 1)
        assert after > port
        assert theirs.free_after(port, 1) > [after]
        with listen(after) as server, socket.create_connection((LOOPBACK, after)):
            assert server.getsockname()[1] == after


def test_ports_are_free_again_afterwards(free_port: Callable[[], int]) -> None:
    with Ports() as ports:
        taken = ports.free_after(free_port(), 3)
        assert len(set(taken)) == 3
    with Ports() as ports:
        assert ports.free_after(taken[0] - 1, 1) == [taken[0]]


def test_ports_in_a_row_are_held(free_port: Callable[[], int]) -> None:
    with Ports() as ports, Ports() as others:
        first, second = ports.free_after(free_port(), 2, run=3)
        assert second >= first + 3
        for port in range(first, first + 3):
            assert others.free_after(port - 1, 1)[0] > first + 2


def test_a_port_in_use_is_named_with_its_flag(free_port: Callable[[], int]) -> None:
    port = free_port()
    with listen(port), Ports() as ports, pytest.raises(ConfigError, match=f"port {port} .* in use") as caught:
        ports.take(LOOPBACK, port, "--port")
    assert caught.value.field == "--port"


def test_any_port() -> None:
    with Ports() as ports:
        assert ports.take(LOOPBACK, 0, "--port") > 0


def test_an_address_that_is_not_ours() -> None:
    with Ports() as ports, pytest.raises(ConfigError) as caught:
        ports.take("192.0.2.1", 0, "--port")
    assert caught.value.field == "--host"


def test_no_port_is_left() -> None:
    with Ports() as ports, pytest.raises(ConfigError, match="Give a lower port"):
        ports.free_after(LAST_PORT - 1, 2)


def test_cores_are_those_this_process_may_use() -> None:
    assert host_facts().cores == len(os.sched_getaffinity(0))

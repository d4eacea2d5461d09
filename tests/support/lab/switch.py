"""The network between a lab's hosts: one process that carries packets from TUN device to TUN device.

Run as a script, without the package. Each host has a device per network, opened inside its namespace; a
packet goes to the device of the same network that has its destination, over the wire of that direction, which
may delay, lose and drop packets and pass so many bytes per second. Packets without a device at their
destination are dropped in silence.

A host may be behind an address that is not its own (``mask``): packets that leave it carry that address,
packets to that address are passed on to it, port by port, and its own address cannot be reached. A host may
have its ports closed but for some: other hosts can open no TCP connection to the closed ports, and no
datagram arrives there.

Standard input takes a line of JSON per order, each answered by a line; at its end, the switch ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import ipaddress
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x1, 0x1000
CLONE_NEWNET = 0x40000000
MTU = 9000
"""Jumbo frames, as networks for KV have: a packet costs the switch about 15 us whatever its size."""
QUEUE_S = 0.2
"""Queue of a wire with a bandwidth, in seconds of its bytes; packets beyond it are dropped."""


@dataclass
class Wire:
    """One direction between two hosts on one network.

    Args:
        delay_s: added to each packet.
        loss: share of packets that get lost, by chance.
        bytes_per_s: 0 for as many as come.
        cut: whether nothing passes.
    """

    delay_s: float = 0.0
    loss: float = 0.0
    bytes_per_s: float = 0.0
    cut: bool = False
    _free_at: float = field(default=0.0, repr=False)

    def arrival(self, now: float, nbytes: int, chance: float) -> float | None:
        """When a packet that is sent now arrives; None for never.

        Args:
            now: seconds, monotonic.
            chance: drawn from [0, 1).
        """
        if self.cut or chance < self.loss:
            return None
        if not self.bytes_per_s:
            return now + self.delay_s
        begins = max(now, self._free_at)
        if begins - now > QUEUE_S:
            return None
        self._free_at = begins + nbytes / self.bytes_per_s
        return self._free_at + self.delay_s


@dataclass(frozen=True)
class Port:
    """One device of one host."""

    host: str
    network: str
    descriptor: int


def destination(packet: bytes) -> bytes:
    """The destination of an IPv4 or IPv6 packet; empty for other packets."""
    version = packet[0] >> 4
    return packet[16:20] if version == 4 else packet[24:40] if version == 6 else b""


TCP, UDP = 6, 17
SYN, ACK = 0x02, 0x10


def opens(packet: bytes) -> int | None:
    """The port to which a packet opens a TCP connection or carries a datagram; None of any other packet."""
    start = (packet[0] & 15) * 4 if packet[0] >> 4 == 4 else 40
    kind = packet[9] if packet[0] >> 4 == 4 else packet[6]
    if kind == UDP or (kind == TCP and packet[start + 13] & (SYN | ACK) == SYN):
        return int.from_bytes(packet[start + 2 : start + 4])
    return None


def readdressed(packet: bytes, address: bytes, *, source: bool) -> bytes:
    """An IPv4 packet with another source or destination, and the checksums that go with it."""
    at = 12 if source else 16
    changed = bytearray(packet)
    changed[at : at + 4] = address
    start = (packet[0] & 15) * 4
    sums = [10, *([start + 16] if packet[9] == TCP else [start + 6] if packet[9] == UDP else [])]
    for place in sums:  # the address is part of both (RFC 1624)
        total = ~int.from_bytes(packet[place : place + 2]) & 0xFFFF
        for word in (slice(at, at + 2), slice(at + 2, at + 4)):
            total += (~int.from_bytes(packet[word]) & 0xFFFF) + int.from_bytes(changed[word])
        while total >> 16:
            total = (total & 0xFFFF) + (total >> 16)
        changed[place : place + 2] = (~total & 0xFFFF).to_bytes(2)
    return bytes(changed)


class Switch:
    """See the module's docstring."""

    def __init__(self, seed: int) -> None:
        self._ports: dict[int, Port] = {}
        self._places: dict[tuple[str, bytes], Port] = {}
        """(network, address) -> the port that has it."""
        self._wires: dict[tuple[str, str, str], Wire] = {}
        """(network, from, to)."""
        self._masks: dict[tuple[str, str], tuple[bytes, bytes]] = {}
        """(network, host) -> (its own address, the address that other hosts see)."""
        self._open: dict[str, frozenset[int]] = {}
        """The open ports of hosts whose other ports are closed."""
        self._due: list[tuple[float, int, int, bytes]] = []
        self._count = 0
        self._chance = random.Random(seed).random

    def plug(self, host: str, network: str, pid: int, device: str, addresses: list[str]) -> None:
        """Open a device in the network namespace of a process, and give it addresses ("10.0.0.1/24")."""
        enter_network(f"/proc/{pid}/ns/net")
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
        run("ip", "link", "set", device, "addrgenmode", "none", "mtu", str(MTU), "up")
        port = Port(host, network, descriptor)
        for each in addresses:
            nodad = ("nodad",) if ":" in each else ()
            run("ip", "address", "add", each, "dev", device, *nodad)
            self._places[network, ipaddress.ip_interface(each).ip.packed] = port
        self._ports[descriptor] = port

    def wire(self, network: str, source: str, target: str, **settings: float) -> None:
        """Set the properties of one direction from now on; packets under way keep the old ones."""
        self._wires[network, source, target] = Wire(**settings)  # type: ignore[arg-type]

    def mask(self, network: str, host: str, address: str) -> None:
        """Put a host behind an address."""
        (own,) = (packed for (on, packed), port in self._places.items()
                  if (on, port.host) == (network, host) and len(packed) == 4)  # fmt: skip
        known = ipaddress.ip_address(address).packed
        self._masks[network, host] = own, known
        self._places[network, known] = self._places.pop((network, own))

    def close_ports(self, host: str, but: list[int]) -> None:
        """Let others reach these ports of a host only."""
        self._open[host] = frozenset(but)

    def handle_command(self, order: dict[str, Any]) -> None:
        """Carry out the command of one line."""
        doing: dict[str, Callable[..., None]] = {
            "wire": self.wire,
            "mask": self.mask,
            "close_ports": self.close_ports,
        }
        doing[order.pop("do")](**order)

    def serve(self, orders: int) -> None:
        """Carry packets until there are no more orders."""
        pending = b""
        while True:
            wait = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            ready, _, _ = select.select([orders, *self._ports], [], [], wait)
            for descriptor in ready:
                if descriptor != orders:
                    self._take(self._ports[descriptor])
                    continue
                data = os.read(orders, 1 << 16)
                if not data:
                    return
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self.handle_command(json.loads(line))
                    say("done")
            self._deliver()

    def _take(self, port: Port) -> None:
        now = time.monotonic()
        for _ in range(64):  # then the others', and orders
            try:
                packet = os.read(port.descriptor, MTU + 64)
            except BlockingIOError:
                return
            target = self._places.get((port.network, destination(packet)))
            if target is None or not self._lets_in(port.host, target.host, packet):
                continue
            packet = self._translated(port, target, packet)
            wire = self._wires.get((port.network, port.host, target.host))
            at = now if wire is None else wire.arrival(now, len(packet), self._chance())
            if at is None:
                continue
            if at <= now:
                send(target.descriptor, packet)
            else:
                self._count += 1
                heapq.heappush(self._due, (at, self._count, target.descriptor, packet))

    def _lets_in(self, source: str, target: str, packet: bytes) -> bool:
        ports = self._open.get(target)
        if ports is None or source == target:
            return True
        wanted = opens(packet)
        return wanted is None or wanted in ports

    def _translated(self, source: Port, target: Port, packet: bytes) -> bytes:
        if packet[0] >> 4 != 4:
            return packet
        if mask := self._masks.get((source.network, source.host)):
            packet = readdressed(packet, mask[1], source=True)
        if mask := self._masks.get((target.network, target.host)):
            packet = readdressed(packet, mask[0], source=False)
        return packet

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, _, descriptor, packet = heapq.heappop(self._due)
            send(descriptor, packet)


def send(descriptor: int, packet: bytes) -> None:
    """Write a packet to a host's device; the packet is lost if the device cannot take it."""
    try:
        os.write(descriptor, packet)
    except OSError:
        return


def enter_network(namespace: str) -> None:
    """Make a network namespace this thread's, by its file.

    Raises:
        OSError: it is gone, or the machine forbids it.
    """
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(descriptor)


def say(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


def run(*words: str) -> None:
    subprocess.run(words, check=True)


if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    switch = Switch(plan["seed"])
    for each in plan["ports"]:
        switch.plug(**each)
    say("ready")
    switch.serve(sys.stdin.fileno())

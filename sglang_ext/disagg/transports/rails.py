"""The choice of a rank's RDMA adapter: the one nearest to its memory (KVDirect, section 4.2).

    named by --kv-rdma-devices          rank i takes entry i of the list, round and round
    on the PCI switch of its GPU        the longest path that adapter and GPU share below a root port
    below the same PCI root             the same, no deeper than the host bridge
    on the NUMA node of its memory      the GPU's node, or that of the pool in host memory
    on the nearest NUMA node            by the distances that the firmware tells
    by rank                             nothing of that is known

Ranks that are equally near to several take turns, in the order of the PCI bus. So GPU i of one host and GPU i
of another that is built alike use the same rail, and ranks spread over all rails.

Everything is decided from files below ``/sys``, whose place is an argument.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sglang_ext.disagg.errors import TransportUnavailableError

SYS: Final = Path("/sys")
FLAG: Final = "--kv-rdma-devices"
_NVIDIA: Final = 0x10DE
_DISPLAY: Final = 0x03
"""PCI vendor and base class of GPUs."""


@dataclass(frozen=True)
class Place:
    """Where memory is. path: of its PCI device, from the host bridge on, such as
    ``("pci0000:00", "0000:00:01.0", "0000:01:00.0")``; empty for host memory. numa: -1 where it is unknown.
    """

    path: tuple[str, ...] = ()
    numa: int = -1


NOWHERE: Final = Place()


@dataclass(frozen=True)
class Nic:
    """A port of an RDMA device. active: whether its link is up."""

    name: str
    port: int
    place: Place
    active: bool = True

    def __str__(self) -> str:
        return f"{self.name}:{self.port}"


@dataclass(frozen=True)
class Rail:
    """The adapter of a rank, and why it is that one."""

    nic: Nic
    why: str

    def __str__(self) -> str:
        return f"{self.nic}, {self.why}"


@dataclass(frozen=True)
class Topology:
    """nics: of this host, in the order of the PCI bus. distances: between NUMA nodes, 10 to itself."""

    nics: tuple[Nic, ...]
    distances: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    gpus: tuple[Place, ...] = ()


def choose(topology: Topology, place: Place, rank: int, named: Sequence[str] = ()) -> Rail:
    """The rail of a rank whose memory is at `place`.

    Args:
        named: the value of `--kv-rdma-devices`, each ``device`` or ``device:port``.

    Raises:
        TransportUnavailableError: there is no adapter, or not the named one.
    """
    if named:
        return Rail(_named(topology.nics, named[rank % len(named)]), f"named by {FLAG}")
    # A port without a link is taken only where none has one: opening it gives the reason.
    nics = [nic for nic in topology.nics if nic.active] or list(topology.nics)
    if not nics:
        raise TransportUnavailableError("verbs: no RDMA device")
    nics, why = _nearest(nics, place, topology.distances)
    if len(nics) > 1:
        why += f"; one of {len(nics)}, by rank"
    return Rail(nics[rank % len(nics)], why)


def _nearest(
    nics: list[Nic], place: Place, distances: Mapping[int, Mapping[int, int]]
) -> tuple[list[Nic], str]:
    shared = [_shared(nic.place.path, place.path) for nic in nics]
    if most := max(shared):
        nics = [nic for nic, steps in zip(nics, shared, strict=True) if steps == most]
        return nics, "on the PCI switch of its GPU" if most > 1 else "below the same PCI root as its GPU"
    known = [nic for nic in nics if nic.place.numa >= 0]
    if place.numa < 0 or not known:
        return nics, "nothing says which is nearer"
    of = distances.get(place.numa, {})
    far = [10 if nic.place.numa == place.numa else of.get(nic.place.numa, 255) for nic in known]
    least = min(far)
    known = [nic for nic, steps in zip(known, far, strict=True) if steps == least]
    if least <= 10:
        return known, f"on NUMA node {place.numa}, as its memory"
    return known, f"at distance {least} from NUMA node {place.numa}, where its memory is"


def _shared(a: Sequence[str], b: Sequence[str]) -> int:
    """How many steps two PCI paths have in common, from the host bridge on."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _named(nics: Sequence[Nic], wanted: str) -> Nic:
    name, _, port = wanted.partition(":")
    found = [nic for nic in nics if nic.name == name and port in ("", str(nic.port))]
    if not found:
        there = ", ".join(map(str, nics)) or "none"
        raise TransportUnavailableError(
            f"verbs: there is no RDMA device {wanted!r}, which {FLAG} names; there are: {there}",
            hint=f"Correct {FLAG}, or leave it out to have the nearest",
        )
    return next((nic for nic in found if nic.active), found[0])


# -- values of sysfs -----------------------------------------------------------------------------


def topology(root: Path = SYS) -> Topology:
    """The adapters, NUMA nodes and GPUs of this host."""
    nics = [nic for entry in _entries(root / "class/infiniband") for nic in _ports(entry, root)]
    nodes = {
        int(entry.name[4:]): entry
        for entry in _entries(root / "devices/system/node")
        if re.fullmatch(r"node\d+", entry.name)
    }
    # The kernel lists distances in the order of the nodes that are online.
    distances = {
        node: dict(zip(sorted(nodes), map(int, _text(entry / "distance").split()), strict=False))
        for node, entry in nodes.items()
    }
    nics.sort(key=lambda nic: (nic.place.path, nic.name, nic.port))
    return Topology(tuple(nics), distances, _gpus(root))


def pci_place(address: str, root: Path = SYS) -> Place:
    """Where a PCI device is, by its address, such as ``0000:1b:00.0``."""
    return _place(root / "bus/pci/devices" / address.lower(), root)


def _ports(entry: Path, root: Path) -> list[Nic]:
    place = _place(entry / "device", root)
    ports = [port for port in _entries(entry / "ports") if port.name.isdigit()]
    found = [
        Nic(entry.name, int(port.name), place, "ACTIVE" in (_text(port / "state") or "ACTIVE"))
        for port in ports
    ]
    return found or [Nic(entry.name, 1, place)]


def _gpus(root: Path) -> tuple[Place, ...]:
    """NVIDIA's, in the order of the PCI bus."""
    return tuple(
        _place(entry, root)
        for entry in _entries(root / "bus/pci/devices")
        if _number(entry / "vendor", 16) == _NVIDIA and _number(entry / "class", 16) >> 16 == _DISPLAY
    )


def _place(device: Path, root: Path) -> Place:
    if not device.exists():
        return NOWHERE
    parts = device.resolve().relative_to(root.resolve()).parts
    # devices/pci0000:00/0000:00:01.0/...; a software device has no such path.
    path = parts[1:] if len(parts) > 1 and parts[1].startswith("pci") else ()
    return Place(path, _number(device / "numa_node"))


def _number(path: Path, base: int = 10) -> int:
    try:
        return int(_text(path), base)
    except ValueError:
        return -1


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []

"""The choice of a rank's RDMA adapter, from files laid out as in sysfs: no adapter is needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sglang_ext.disagg.errors import TransportUnavailableError
from sglang_ext.disagg.memory import RegionTable
from sglang_ext.disagg.numa import node_of
from sglang_ext.disagg.transports.rails import NOWHERE, Place, choose, pci_place, topology
from sglang_ext.disagg.transports.verbs import VerbsTransport


class Sysfs:
    """A tree that is written by hand."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def nodes(self, *rows: str) -> None:
        for node, row in enumerate(rows):
            self.write(f"devices/system/node/node{node}/distance", row)
        self.write("devices/system/node/possible", f"0-{len(rows) - 1}")

    def device(self, path: str, numa: int, vendor: str = "0x15b3", kind: str = "0x020700") -> str:
        """A PCI device by its path below /sys/devices; returns its address."""
        for name, text in (("numa_node", numa), ("vendor", vendor), ("class", kind)):
            self.write(f"devices/{path}/{name}", text)
        address = path.rpartition("/")[2]
        self.link(f"bus/pci/devices/{address}", f"devices/{path}")
        return address

    def gpu(self, path: str, numa: int) -> str:
        return self.device(path, numa, "0x10de", "0x030200")

    def nic(self, name: str, path: str, numa: int, ports: tuple[str, ...] = ("4: ACTIVE",)) -> None:
        self.device(path, numa)
        for port, state in enumerate(ports, 1):
            self.write(f"class/infiniband/{name}/ports/{port}/state", state)
        self.link(f"class/infiniband/{name}/device", f"devices/{path}")

    def link(self, here: str, there: str) -> None:
        link = self.root / here
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.root / there)


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path / "sys")


def dgx(sysfs: Sysfs) -> list[str]:
    """Two sockets, four PCI switches, two GPUs and two adapters on each; and one adapter for storage. Names
    do not go along with places, as on real machines."""
    sysfs.nodes("10 21", "21 10")
    gpus = []
    names = iter((5, 4, 10, 2, 7, 6, 1, 0))
    for switch in range(4):
        root = f"pci0000:{0x10 * (switch + 1):02x}/0000:{0x10 * (switch + 1):02x}:01.0"
        bus = 0x10 * (switch + 1)
        for at in range(2):
            gpus.append(
                sysfs.gpu(f"{root}/0000:{bus + 1:02x}:00.0/0000:{bus + 2 + at:02x}:00.0", switch // 2)
            )
        for at in range(2):
            path = f"{root}/0000:{bus + 1:02x}:00.0/0000:{bus + 6 + at:02x}:00.0"
            sysfs.nic(f"mlx5_{next(names)}", path, switch // 2)
    sysfs.nic("mlx5_3", "pci0000:f0/0000:f0:01.0/0000:f1:00.0", 1)
    return gpus


def test_each_gpu_has_an_adapter_of_its_own_on_its_switch(sysfs: Sysfs) -> None:
    gpus, found = dgx(sysfs), None
    found = topology(sysfs.root)
    rails = [choose(found, pci_place(gpu, sysfs.root), rank) for rank, gpu in enumerate(gpus)]
    assert [rail.nic.name for rail in rails] == [f"mlx5_{n}" for n in (5, 4, 10, 2, 7, 6, 1, 0)]
    assert {rail.why for rail in rails} == {"on the PCI switch of its GPU; one of 2, by rank"}
    # ``doctor`` lists the GPUs in the order of the bus.
    assert found.gpus == tuple(pci_place(gpu, sysfs.root) for gpu in gpus)


def test_gpu_i_pairs_with_gpu_i_of_a_host_that_is_built_alike(tmp_path: Path) -> None:
    here, there = Sysfs(tmp_path / "a"), Sysfs(tmp_path / "b")
    gpus = dgx(here)
    assert dgx(there) == gpus
    for rank, gpu in enumerate(gpus):
        ours, theirs = (
            choose(topology(each.root), pci_place(gpu, each.root), rank) for each in (here, there)
        )
        assert ours == theirs


def test_a_damaged_tree_gives_another_rail(sysfs: Sysfs) -> None:
    """The twin: it is the paths that decide, not the order."""
    gpus = dgx(sysfs)
    right = choose(topology(sysfs.root), pci_place(gpus[0], sysfs.root), 0)
    wrong = choose(topology(sysfs.root), pci_place(gpus[6], sysfs.root), 0)
    assert right.nic != wrong.nic


def test_host_memory_takes_the_adapters_of_its_node_in_turn(sysfs: Sysfs) -> None:
    dgx(sysfs)
    found = topology(sysfs.root)
    first = [choose(found, Place(numa=0), rank) for rank in range(5)]
    assert [rail.nic.name for rail in first] == ["mlx5_5", "mlx5_4", "mlx5_10", "mlx5_2", "mlx5_5"]
    assert first[0].why == "on NUMA node 0, as its memory; one of 4, by rank"
    assert choose(found, Place(numa=1), 4).nic.name == "mlx5_3"


def test_the_nearest_node_counts_where_the_own_one_has_none(sysfs: Sysfs) -> None:
    sysfs.nodes("10 21 31 41", "21 10 21 31", "31 21 10 21", "41 31 21 10")
    sysfs.nic("near", "pci0000:20/0000:20:01.0/0000:21:00.0", 1)
    sysfs.nic("far", "pci0000:10/0000:10:01.0/0000:11:00.0", 3)
    rail = choose(topology(sysfs.root), Place(numa=0), 1)
    assert str(rail) == "near:1, at distance 21 from NUMA node 0, where its memory is"
    assert choose(topology(sysfs.root), Place(numa=2), 0).why.endswith("one of 2, by rank")


def test_a_gpu_without_an_adapter_near_takes_that_of_its_root_or_node(sysfs: Sysfs) -> None:
    sysfs.nodes("10 21", "21 10")
    under_root = sysfs.gpu("pci0000:10/0000:10:02.0/0000:12:00.0", 0)
    elsewhere = sysfs.gpu("pci0000:50/0000:50:01.0/0000:51:00.0", 1)
    sysfs.nic("a", "pci0000:10/0000:10:01.0/0000:11:00.0", 0)
    sysfs.nic("b", "pci0000:30/0000:30:01.0/0000:31:00.0", 0)
    sysfs.nic("c", "pci0000:60/0000:60:01.0/0000:61:00.0", 1)
    found = topology(sysfs.root)
    rail = choose(found, pci_place(under_root, sysfs.root), 7)
    assert (rail.nic.name, rail.why) == ("a", "below the same PCI root as its GPU")
    rail = choose(found, pci_place(elsewhere, sysfs.root), 0)
    assert (rail.nic.name, rail.why) == ("c", "on NUMA node 1, as its memory")


@pytest.mark.parametrize(
    ("ports", "taken"),
    [
        (("4: ACTIVE", "4: ACTIVE"), ["x:1", "x:2", "x:1"]),
        (("1: DOWN", "4: ACTIVE"), ["x:2", "x:2", "x:2"]),
        (("1: DOWN", "1: DOWN"), ["x:1", "x:2", "x:1"]),
    ],
)
def test_the_ports_of_one_adapter_are_two_rails(
    sysfs: Sysfs, ports: tuple[str, ...], taken: list[str]
) -> None:
    sysfs.nodes("10")
    sysfs.nic("x", "pci0000:10/0000:10:01.0/0000:11:00.0", 0, ports)
    found = topology(sysfs.root)
    assert [str(choose(found, NOWHERE, rank).nic) for rank in range(3)] == taken


def test_without_numa_ranks_take_turns(sysfs: Sysfs) -> None:
    """A virtual machine: no nodes, -1 everywhere, a software device without a bus, no state."""
    sysfs.nic("b", "virtual/net/eth0", -1, ())
    sysfs.nic("a", "pci0000:00/0000:00:05.0", -1)
    found = topology(sysfs.root)
    assert [choose(found, Place(numa=0), rank).nic.name for rank in range(3)] == ["b", "a", "b"]
    assert choose(found, NOWHERE, 0).why == "nothing says which is nearer; one of 2, by rank"
    assert pci_place("0000:99:00.0", sysfs.root) == NOWHERE


def test_devices_may_be_named(sysfs: Sysfs) -> None:
    dgx(sysfs)
    found = topology(sysfs.root)
    names = ("mlx5_3", "mlx5_0:1")
    assert [choose(found, Place(numa=0), rank, names).nic.name for rank in range(3)] == [
        "mlx5_3", "mlx5_0", "mlx5_3"
    ]  # fmt: skip
    for wrong in ("mlx5_9", "mlx5_0:2", ":1", ""):
        with pytest.raises(TransportUnavailableError, match="--kv-rdma-devices names; there are: mlx5_5:1"):
            choose(found, NOWHERE, 0, (wrong,))


def test_a_host_without_adapters(sysfs: Sysfs) -> None:
    with pytest.raises(TransportUnavailableError, match="no RDMA device"):
        choose(topology(sysfs.root), NOWHERE, 0)


def test_a_transport_looks_where_its_memory_is() -> None:
    small, large = np.ones(1 << 12, np.uint8), np.ones(1 << 20, np.uint8)
    regions = RegionTable()
    for memory in (small, large):
        regions.add(memory.ctypes.data, memory.nbytes, keep=memory)
    expected = Place(numa=node_of(large.ctypes.data, large.nbytes))
    assert VerbsTransport(regions)._memory_place() == expected
    gpu = Place(("pci0000:10",), 1)
    assert VerbsTransport(regions, place=gpu)._memory_place() == gpu

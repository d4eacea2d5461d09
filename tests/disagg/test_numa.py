"""On which NUMA node memory lies, and shall lie."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.config import KvConfig
from sglang_ext.disagg.numa import arena_node, cpus_by_node, node_of, place_arena, put
from sglang_ext.errors import ConfigError
from sglang_ext.geometry import BlockLayout
from sglang_ext.tiered_store.dram.arena import DramArena

TWO = {0: frozenset({0, 1, 4, 5}), 1: frozenset({2, 3})}
ANY = frozenset(range(6))


def test_the_nodes_of_a_host_and_their_processors(tmp_path: Path) -> None:
    for node, cpus in enumerate(("0-1,4-5", "2-3", "")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    assert cpus_by_node(tmp_path) == {**TWO, 2: frozenset()}
    assert cpus_by_node(tmp_path / "nothing") == {}


@pytest.mark.parametrize(
    ("wanted", "gpu", "cpus", "node"),
    [
        ("auto", 1, ANY, 1),
        ("auto", 1, frozenset({0}), 1),
        ("auto", -1, frozenset({2, 3}), 1),
        ("auto", -1, frozenset({0, 5}), 0),
        ("auto", -1, ANY, None),
        ("auto", 7, ANY, None),
        ("auto", -1, frozenset(), None),
        ("none", 1, frozenset({2}), None),
        ("0", 1, frozenset({2}), 0),
        ("1", -1, ANY, 1),
    ],
)
def test_where_an_arena_shall_lie(wanted: str, gpu: int, cpus: frozenset[int], node: int | None) -> None:
    assert arena_node(wanted, gpu, cpus, TWO) == node


def test_with_one_node_or_none_the_kernel_decides() -> None:
    for nodes in ({}, {0: ANY}):
        assert arena_node("auto", 0, frozenset({1}), nodes) is None


def test_a_node_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="no NUMA node 2; there are: 0, 1") as refused:
        arena_node("2", -1, ANY, TWO)
    assert refused.value.field == "--kv-numa"
    with pytest.raises(ConfigError, match="none that the kernel tells of"):
        arena_node("0", -1, ANY, {})
    for wrong in ("-1", "left", "1.5"):
        with pytest.raises(ConfigError, match="--kv-numa"):
            KvConfig.from_user({"numa": wrong}, {})


def test_the_node_of_memory_that_is_there_is_known() -> None:
    memory = np.ones(1 << 20, np.uint8)
    node = node_of(memory.ctypes.data, memory.nbytes)
    nodes = [int(entry.name[4:]) for entry in Path("/sys/devices/system/node").glob("node[0-9]*")]
    assert node in (nodes or [0])
    # Pages that were never written have no physical memory on any node yet.
    with mmap.mmap(-1, 1 << 20) as untouched:
        address = np.frombuffer(untouched, np.uint8).ctypes.data
        assert node_of(address, 1 << 20) == -1
    assert node_of(memory.ctypes.data, 0) == -1


def test_an_arena_is_placed_before_it_is_touched() -> None:
    seen: list[int] = []

    def place(address: int, nbytes: int) -> None:
        seen.append(node_of(address, nbytes))

    arena = DramArena(BlockLayout(4, ((64, 64),)), 1 << 20, pin=False, place=place)
    try:
        assert seen == [-1], "it had memory already"
        assert node_of(arena.address, 1 << 19) >= 0
    finally:
        arena.close()


@pytest.mark.skipif(0 not in cpus_by_node(), reason="this kernel tells of no NUMA node")
def test_memory_goes_where_it_is_put_and_what_the_kernel_refuses_is_said() -> None:
    with mmap.mmap(-1, 1 << 20) as memory:
        address = np.frombuffer(memory, np.uint8).ctypes.data
        if refused := put(address, 1 << 20, 0, strict=True):
            pytest.skip(f"mbind: {refused}")
        memory[:] = b"x" * (1 << 20)
        assert node_of(address, 1 << 20) == 0
        assert put(address, 1 << 20, 1023, strict=True) != ""
        place_arena("0", -1, address, 1 << 20)
        with pytest.raises(ConfigError, match="no NUMA node 999"):
            place_arena("999", -1, address, 1 << 20)

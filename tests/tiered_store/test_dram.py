"""The DRAM arena: allocation, generations, shared memory, and its fate when its owner is killed."""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_ext.errors import ConfigError, MediumError
from sglang_ext.geometry import BlockLayout
from sglang_ext.tiered_store.dram import memory as arena_memory
from sglang_ext.tiered_store.dram.arena import DramArena
from sglang_ext.tiered_store.dram.memory import ArenaMemory, ArenaMemoryError

pytestmark = pytest.mark.slow

LAYOUT = BlockLayout.uniform(n_layers=2, planes_per_layer=2, row_bytes=32, block_tokens=4)


def make(blocks: int, layout: BlockLayout = LAYOUT, **options: bool) -> DramArena:
    return DramArena(layout, blocks * (layout.block_bytes + 8) + 8, **options)  # type: ignore[arg-type]


def test_size_is_fixed_and_usage_exact() -> None:
    with make(10) as arena:
        assert arena.n_blocks == 10
        assert arena.blocks.shape == (10, LAYOUT.block_bytes)
        assert not arena.blocks.any()
        first = arena.alloc(3)
        assert first is not None
        assert first.tolist() == [0, 1, 2]
        assert (arena.used_blocks, arena.free_blocks, arena.used_bytes) == (3, 7, 3 * LAYOUT.block_bytes)
        assert arena.alloc(8) is None
        assert arena.used_blocks == 3
        rest = arena.alloc(7)
        assert rest is not None
        assert sorted([*first, *rest]) == list(range(10))
        assert arena.alloc(0) is not None
        arena.free(rest)
        arena.free(first)
        assert arena.free_blocks == 10
        assert repr(arena) == f"<DramArena 0/10 blocks of 512 bytes{' pinned' if arena.pinned else ''}>"
        arena.check()


def test_too_small_and_too_large_arenas_are_refused_with_the_flag() -> None:
    with pytest.raises(ConfigError, match="--kv-dram-size"):
        DramArena(LAYOUT, LAYOUT.block_bytes)
    with pytest.raises(ArenaMemoryError, match=r"--kv-dram-size: .*GiB are available.*Make it smaller"):
        DramArena(LAYOUT, 1 << 50)
    assert issubclass(ArenaMemoryError, MediumError)


def test_memory_that_cannot_be_mapped_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_memory, "available_bytes", lambda: 1 << 62)
    for shared in (True, False):
        with pytest.raises(ArenaMemoryError, match="--kv-dram-size"):
            DramArena(LAYOUT, 1 << 60, shared=shared)


@pytest.mark.parametrize("bad", [[0, 0], [5, -1], [10], [7]])
def test_a_wrong_free_takes_nothing_back(bad: list[int]) -> None:
    with make(10) as arena:
        assert arena.alloc(7) is not None
        with pytest.raises(ValueError, match=r"double free|outside|twice"):
            arena.free([1, *bad])
        assert arena.used_blocks == 7
        assert not arena.generations.any()
        arena.check()


def test_generation_grows_when_a_block_is_taken_back() -> None:
    with make(4) as arena:
        ids = arena.alloc(2)
        assert ids is not None
        arena.free(ids[:1])
        assert arena.generations.tolist() == [1, 0, 0, 0]
        again = arena.alloc(1)
        assert again is not None
        assert again.tolist() == [0]
        assert arena.generations.tolist() == [1, 0, 0, 0]
        with pytest.raises(ValueError, match="read-only"):
            arena.generations[0] = 7


def test_plane_and_layer_views_are_the_bytes_of_the_block() -> None:
    layout = BlockLayout(4, ((8, 2), (6,)))
    with make(3, layout) as arena:
        arena.blocks[1] = np.arange(layout.block_bytes, dtype=np.uint8)
        assert arena.plane(1).shape == (3, 4, 2)
        assert arena.plane(1)[1].ravel().tolist() == list(range(32, 40))
        assert arena.layer(1)[1].tolist() == list(range(40, 64))
        arena.plane(2)[2, 3, :] = 9
        assert arena.blocks[2].tolist() == [0] * 58 + [9] * 6
        assert arena.generations.ctypes.data % 8 == 0


def open_arenas() -> int:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum("memfd:sglang-ext" in os.readlink(link) for link in links if os.path.lexists(link))


def test_views_survive_close_and_calls_do_not() -> None:
    arena = make(4)
    ids = arena.alloc(1)
    assert ids is not None
    view = arena.blocks
    view[0] = 5
    arena.close()
    arena.close()
    assert view[0].tolist() == [5] * LAYOUT.block_bytes
    with pytest.raises(ValueError, match="closed"):
        arena.alloc(1)
    assert open_arenas() == 1
    del view
    assert open_arenas() == 0  # though the arena object is still there
    with pytest.raises(ValueError, match="closed"):
        arena.free(ids)


def test_private_memory_lies_on_huge_pages_where_the_kernel_allows() -> None:
    with open("/sys/kernel/mm/transparent_hugepage/enabled", encoding="utf-8") as file:
        allowed = "[never]" not in file.read()
    memory = ArenaMemory(64 << 20, shared=False)
    memory.touch(threads=2)
    assert memory.address % arena_memory.HUGE_PAGE == 0
    assert (memory.huge_bytes() > 0) == allowed
    assert memory.fd == -1
    memory.close()


def flags_of(address: int) -> set[str]:
    """The kernel's ``VmFlags`` of the mapping at an address."""
    is_it = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, end = (int(each, 16) for each in first.split("-"))
            is_it = start <= address < end
        elif is_it and first == "VmFlags:":
            return set(rest)
    raise AssertionError(f"nothing is mapped at {address:#x}")


@pytest.mark.parametrize("shared", [True, False])
def test_kv_is_left_out_of_core_dumps(shared: bool) -> None:
    memory = ArenaMemory(1 << 20, shared=shared)
    try:
        assert "dd" in flags_of(memory.address)
    finally:
        memory.close()
    with mmap.mmap(-1, 1 << 21) as other:
        assert "dd" not in flags_of(np.frombuffer(other, dtype=np.uint8).ctypes.data), "the twin"


def test_touching_is_reported() -> None:
    calls: list[tuple[int, int]] = []
    memory = ArenaMemory(600 << 20, shared=True)
    memory.touch(progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (600 << 20, 600 << 20)
    memory.close()


def test_touching_works_on_kernels_without_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_memory, "_MADV_POPULATE_WRITE", 9999)
    memory = ArenaMemory(4 << 20, shared=True)
    memory.touch()
    assert not memory.bytes.any()
    memory.close()


def test_without_a_gpu_nothing_is_pinned() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this host has a GPU")
    with make(4, pin=True) as arena:
        assert not arena.pinned


class Cuda:
    """The part of torch.cuda.cudart() for cudaHostRegister, answering with `code`."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.code:
            self.registered[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def test_with_a_gpu_the_arena_is_pinned_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(0)
    monkeypatch.setattr(arena_memory, "_cuda_runtime", lambda: cuda)
    with make(4) as arena:
        assert arena.pinned
        assert cuda.registered == {arena.address: arena_memory.HUGE_PAGE}
        assert "pinned" in repr(arena)
    with make(4, pin=False) as unpinned:
        assert not unpinned.pinned
    assert cuda.registered == {}


def test_a_gpu_that_refuses_to_pin_is_an_error_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_memory, "_cuda_runtime", lambda: Cuda(2))
    with pytest.raises(arena_memory.PinError, match=r"--kv-dram-size: .*cudaHostRegister: 2.*ulimit -l"):
        make(4)


OWNER = """
import sys
from sglang_ext.geometry import BlockLayout
from sglang_ext.tiered_store.dram.arena import DramArena
arena = DramArena(BlockLayout.uniform(n_layers=2, planes_per_layer=2, row_bytes=32, block_tokens=4), 1 << 20)
print(arena.memory.fd, flush=True)
sys.stdin.read()
"""


def named_segments(pid: int) -> set[Path]:
    """The files in /dev/shm that a process maps: other processes of this machine have theirs."""
    lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    found = {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    return {Path(path) for path in found if path.startswith("/dev/shm/") and not path.endswith(" (deleted)")}


def test_a_segment_with_a_name_is_seen() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            assert Path(file.name) in named_segments(os.getpid())
        assert Path(file.name) not in named_segments(os.getpid())


def test_nothing_is_left_after_a_kill() -> None:
    child = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert int(child.stdout.readline()) >= 0, "in shared memory"
        named = named_segments(child.pid)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=30)
        child.stdin.close()
        child.stdout.close()
    assert [path for path in named if path.exists()] == []


@pytest.mark.parametrize("steps", [20_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_no_fragmentation_after_random_use(steps: int) -> None:
    with make(500) as arena:
        random_ = random.Random(0)
        held: list[np.ndarray] = []
        for _ in range(steps):
            if random_.random() < 0.52 or not held:
                ids = arena.alloc(random_.randrange(1, 9))
                if ids is not None:
                    held.append(ids)
                else:  # refused only when that many are really not there
                    assert arena.free_blocks < 8
                    arena.free(held.pop(random_.randrange(len(held))))
            else:
                arena.free(held.pop(random_.randrange(len(held))))
        assert arena.used_blocks == sum(map(len, held))
        for ids in held:
            arena.free(ids)
        arena.check()
        whole = arena.alloc(500)
        assert whole is not None
        assert np.array_equal(np.sort(whole), np.arange(500))


def test_threads_never_share_a_block() -> None:
    with make(64) as arena:
        clashes: list[int] = []

        def work(me: int) -> None:
            for _ in range(400):
                ids = arena.alloc(3)
                if ids is None:
                    continue
                arena.blocks[ids] = me
                if not (arena.blocks[ids] == me).all():
                    clashes.append(me)
                arena.free(ids)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert clashes == []
        assert arena.used_blocks == 0
        arena.check()


class ArenaModel(RuleBasedStateMachine):
    """The arena against a plain set and a dict of generations."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = make(12, touch=False, pin=False)
        self.used: set[int] = set()
        self.generation = dict.fromkeys(range(12), 0)

    @rule(n=st.integers(0, 14))
    def alloc(self, n: int) -> None:
        ids = self.arena.alloc(n)
        if n > 12 - len(self.used):
            assert ids is None
            return
        assert ids is not None
        assert ids.tolist() == sorted({*range(12)} - self.used)[:n]
        self.used |= {*ids.tolist()}

    @rule(ids=st.lists(st.integers(-1, 12), max_size=6))
    def free(self, ids: list[int]) -> None:
        if len(set(ids)) == len(ids) and set(ids) <= self.used:
            self.arena.free(ids)
            self.used -= set(ids)
            for block in ids:
                self.generation[block] += 1
        else:
            with pytest.raises(ValueError, match=r"."):
                self.arena.free(ids)

    @invariant()
    def agrees(self) -> None:
        self.arena.check()
        assert self.arena.used_blocks == len(self.used)
        assert self.arena.generations.tolist() == list(self.generation.values())

    def teardown(self) -> None:
        self.arena.close()


TestArenaModel = ArenaModel.TestCase
TestArenaModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)

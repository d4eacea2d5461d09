"""Many copies by one call of CUDA's runtime: arguments by the calling convention of each version, and layers
of a load by it. The runtime is the emulator's; a real one has never been called.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_ext.engine.movers import layer_copies
from sglang_ext.engine.movers.batch_copies import BatchCopy, batch_copy
from sglang_ext.engine.movers.gpu_memory import GpuMemory
from sglang_ext.engine.movers.layer_copies import Blocks, PlainCopies, word_of, word_rows
from sglang_ext.engine.movers.mover import MoverError
from sglang_ext.geometry import mha_geometry
from tests.fake_gpu.batch import Library


def ranges(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    source = rng.integers(0, 256, 1 << 14, dtype=np.uint8)
    target = np.zeros(1 << 14, np.uint8)
    starts = np.array([0, 4096, 9000, 12000])
    columns = [
        starts + source.ctypes.data,
        np.array([13500, 9000, 4096, 0]) + target.ctypes.data,
        np.array([64, 4000, 1, 900]),
    ]
    return source, target, columns


@pytest.mark.parametrize("version", [12_080, 12_090, 13_000, 13_010])
def test_all_copies_are_one_call(version: int) -> None:
    library = Library(version)
    source, target, (here, there, sizes) = ranges(np.random.default_rng(1))
    BatchCopy(library)(here, there, sizes, 9)
    assert library.calls == [4]
    for at, to, nbytes in zip(here - source.ctypes.data, there - target.ctypes.data, sizes, strict=True):
        assert np.array_equal(source[at : at + nbytes], target[to : to + nbytes])
    assert target.astype(bool).sum() <= sizes.sum()
    BatchCopy(library)(here[:0], there[:0], sizes[:0], 9)
    assert library.calls == [4]


def test_an_older_runtime_has_none_and_errors_are_told() -> None:
    assert batch_copy(Library(12_060)) is None
    _, _, columns = ranges(np.random.default_rng(1))
    with pytest.raises(MoverError, match="CUDA error 700"):
        BatchCopy(Library(13_000, fails=700))(*columns, 9)  # type: ignore[call-arg]
    with pytest.raises(MoverError, match="CUDA error 1"):  # the default stream
        BatchCopy(Library(13_000))(*columns, 0)  # type: ignore[call-arg]


class Runtime:
    """Without the call for rows at a pitch, which is not to be used."""

    def __init__(self, library: Library) -> None:
        self.batch = BatchCopy(library)

    def copy_2d(self, *_: int) -> None:
        raise AssertionError("a call for each run")


def test_a_layer_of_scattered_blocks_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(cuda_stream=9)
    monkeypatch.setattr(layer_copies.torch.cuda, "current_stream", lambda device: stream)
    pool = [[torch.zeros(64, 2, 8) for _ in range(2)] for _ in range(3)]
    geometry = mha_geometry(
        k_addresses=tuple(layer[0].data_ptr() for layer in pool),
        v_addresses=tuple(layer[1].data_ptr() for layer in pool),
        slots=64, heads=2, head_dim=8, dtype="float32", first_layer=0, model_layers=3, first_head=0,
        model_heads=2, block_tokens=4, page_tokens=4,
    )  # fmt: skip
    layout = geometry.layout
    blocks = np.random.default_rng(3).integers(0, 256, (16, layout.block_bytes), dtype=np.uint8)
    arena: Any = SimpleNamespace(
        layout=layout, n_blocks=16, block_bytes=layout.block_bytes, address=int(blocks.ctypes.data),
        pinned=True, blocks=blocks,
    )  # fmt: skip
    word = word_of(layout, layout.block_bytes)
    planes = [[word_rows(plane, word) for plane in layer] for layer in pool]
    library = Library(13_000)
    copies = PlainCopies(planes, arena, Runtime(library))  # type: ignore[arg-type]
    ids = np.array([11, 3, 7, 4, 0])
    slots = torch.randperm(64)[: len(ids) * 4]
    for layer in range(3):
        copies.load(slots, Blocks(ids, torch.from_numpy), layer, layer)
    assert library.calls == [5, 5, 5]
    for layer in range(3):
        for kind in range(2):
            low, high = layout.plane_offsets[2 * layer + kind : 2 * layer + kind + 2]
            wanted = blocks[ids, low:high].reshape(len(slots), -1)
            rows = pool[layer][kind].view(64, -1).view(torch.uint8)[slots].numpy()
            assert np.array_equal(rows, wanted)
            rows[0, 0] ^= 1
            assert not np.array_equal(rows, wanted)
    blocks[ids] = 0
    before, library.calls = blocks.copy(), []
    for layer in range(3):
        copies.store(slots, Blocks(ids, torch.from_numpy), layer)
    assert library.calls == [5, 5, 5]
    for layer in range(3):
        for kind in range(2):
            low, high = layout.plane_offsets[2 * layer + kind : 2 * layer + kind + 2]
            rows = pool[layer][kind].view(64, -1).view(torch.uint8)[slots].numpy()
            assert np.array_equal(rows, blocks[ids, low:high].reshape(len(slots), -1))
    others = np.setdiff1d(np.arange(16), ids)
    assert np.array_equal(blocks[others], before[others])


def test_ranges_between_processes_are_one_call_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    library = Library(12_080)
    gpu = GpuMemory.__new__(GpuMemory)
    gpu._device = torch.device("cuda", 0)
    gpu._runtime = SimpleNamespace(batch=BatchCopy(library))  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(gpu, "_all_of_it", nullcontext)
    monkeypatch.setattr(gpu, "_stream", lambda: SimpleNamespace(cuda_stream=9))
    source, target, columns = ranges(np.random.default_rng(2))
    gpu.copy_mixed(np.stack(columns, 1))
    assert library.calls == [4]
    assert np.array_equal(source[4096 : 4096 + 4000], target[9000 : 9000 + 4000])

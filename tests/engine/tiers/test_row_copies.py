"""The kernel that copies KV on a GPU: its bytes in Triton's interpreter, and that it compiles for GPUs.

Its bytes and its speed on a GPU are for tests/gpu and ``sglang-ext gpu-check``.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sglang.kernels.ops.kvcache import hicache

from sglang_ext.engine.movers import layer_copies, row_copies
from sglang_ext.engine.movers.layer_copies import Blocks, gather_blocks, word_of, word_rows
from sglang_ext.engine.movers.row_copies import RowCopies
from sglang_ext.geometry import BlockLayout
from sglang_ext.gpu_check.copies import SglangsKernel
from sglang_ext.tiered_store.dram.arena import DramArena

triton = pytest.importorskip("triton", reason="Triton is not installed")

SLOTS, COUNT = 64, 3
KERNEL = Path(row_copies.__file__).with_name("row_kernel.py")
TARGETS = (80, 89, 90, 100)
"""Compute capabilities: A100, L4 and RTX 4090, H100 and H200, B200."""


def kernel_module(name: str) -> Any:
    """The kernel's module anew: it takes Triton's interpreter or its compiler when it is imported."""
    spec = importlib.util.spec_from_file_location(name, KERNEL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield partial(row_copies.launch, kernel_module("interpreted_row_kernel"))


class Pool:
    """Planes with random bytes and an arena of their layout. gap: bytes between the rows of a plane."""

    def __init__(self, layout: BlockLayout, arena: DramArena, gap: int) -> None:
        self.layout, self.arena = layout, arena
        self.rng = np.random.default_rng(1)
        arena.blocks[:] = self.rng.integers(0, 256, arena.blocks.shape, dtype=np.uint8)
        self.planes = [
            torch.from_numpy(self.rng.integers(0, 256, (SLOTS, row + gap), dtype=np.uint8))[:, :row]
            for row in layout.row_bytes
        ]
        word = word_of(layout, arena.block_bytes) if not gap else torch.uint8
        ends = layout.first_plane
        self.rows = [
            [word_rows(plane, word) for plane in self.planes[ends[at] : ends[at + 1]]]
            for at in range(layout.n_layers)
        ]
        self.copies = self.made_by(RowCopies)

    def made_by(self, kind: type[RowCopies]) -> RowCopies:
        return kind(self.rows, self.arena, self.arena.address, torch.from_numpy, NO_STREAM)

    def slots(self) -> torch.Tensor:
        return torch.from_numpy(self.rng.permutation(SLOTS)[: COUNT * self.layout.block_tokens])

    def kv(self, slots: torch.Tensor, layer: int | None = None) -> torch.Tensor:
        first, last = (0, len(self.planes)) if layer is None else self.layout.first_plane[layer : layer + 2]
        return torch.cat([plane[slots] for plane in self.planes[first:last]], 1)


NO_STREAM: Any = None


@contextmanager
def pool_of(
    launch: Any, layers: tuple[tuple[int, ...], ...], block_tokens: int, gap: int = 0
) -> Iterator[Pool]:
    layout = BlockLayout(block_tokens, layers)
    with (
        pytest.MonkeyPatch.context() as patch,
        DramArena(layout, 12 * (layout.block_bytes + 8) + 8, shared=False, pin=False) as arena,
    ):
        patch.setattr(row_copies, "launcher", lambda: launch)
        yield Pool(layout, arena, gap)


LAYOUTS = {
    "K and V": (((256, 256),) * 3, 4, 0),
    "latents": (((1152,),) * 2, 16, 0),
    "K wider than V": (((384, 256),) * 2, 4, 0),
    "latents and index keys": (((1152, 132), (1152,)), 4, 0),
    "rows of one byte more": (((33,),) * 2, 4, 0),
    "one state for each block": (((40_000, 96),) * 2, 1, 0),
    "rows that lie apart": (((64, 64),) * 2, 4, 16),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_are_the_same_after_dram_and_others_stay(interpreted: Any, name: str) -> None:
    with pool_of(interpreted, *LAYOUTS[name]) as pool:
        source, layout, blocks = pool.slots(), pool.layout, np.array([7, 2, 9])
        staging = pool.copies.gather(source, COUNT)
        assert torch.equal(
            staging[:, : layout.block_bytes],
            gather_blocks(pool.rows, layout, source, pool.arena.block_bytes)[:, : layout.block_bytes],
        )
        pool.arena.blocks[blocks] = staging.numpy()
        others = Blocks(np.array([3, 11, 0]), torch.from_numpy)
        for layer in range(layout.n_layers):
            pool.copies.store(source, others, layer)
        assert np.array_equal(
            pool.arena.blocks[others.ids, : layout.block_bytes],
            pool.arena.blocks[blocks, : layout.block_bytes],
        )
        before, target = pool.kv(source).clone(), pool.slots()
        wanted = [plane.clone() for plane in pool.planes]
        for plane, whole in zip(pool.planes, wanted, strict=True):
            whole[target] = plane[source].clone()
            plane[target] = 0
        for layer in range(layout.n_layers):
            pool.copies.load(target, Blocks(blocks, torch.from_numpy), layer, layer)
        assert all(torch.equal(plane, whole) for plane, whole in zip(pool.planes, wanted, strict=True))
        # The twin: a byte that DRAM changes shows.
        pool.arena.blocks[9, layout.block_bytes - 1] ^= 1
        pool.copies.load(target, Blocks(blocks, torch.from_numpy), layout.n_layers - 1, layout.n_layers - 1)
        assert not torch.equal(pool.kv(target), before)


def test_a_layer_goes_to_the_planes_of_another_and_back(interpreted: Any) -> None:
    with pool_of(interpreted, ((256, 256),) * 3, 4) as pool:
        home, blocks = torch.arange(12), np.array([7, 2, 9])
        pool.arena.blocks[blocks] = pool.copies.gather(home, COUNT).numpy()
        strip, target = torch.arange(20, 32), torch.arange(63, 51, -1)
        pool.copies.load(strip, Blocks(blocks, torch.from_numpy), 1, 2)
        assert torch.equal(pool.kv(strip, 2), pool.kv(home, 1))
        pool.copies.within(2, 1, strip, target)
        assert torch.equal(pool.kv(target, 1), pool.kv(home, 1))


def test_what_does_not_fit_is_refused(interpreted: Any) -> None:
    with pool_of(interpreted, ((64, 64), (64,)), 4) as pool:
        blocks = Blocks(np.array([7, 2, 9]), torch.from_numpy)
        with pytest.raises(ValueError, match="do not fit in the planes of layer 1"):
            pool.copies.load(torch.arange(12), blocks, 0, 1)
        with pytest.raises(ValueError, match="12 tokens do not go to 11 units"):
            pool.copies.load(torch.arange(11), blocks, 0, 0)
        with pytest.raises(ValueError, match="dense int64"):
            pool.copies.load(torch.arange(24)[::2], blocks, 0, 0)


def test_a_writes_staging_is_bounded(interpreted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_copies, "STAGING_BYTES", 5000)
    with pool_of(interpreted, ((256, 256),) * 3, 4) as pool:
        assert len(pool.copies._staging) == 1
        assert pool.copies._staging.nbytes == pool.arena.block_bytes > 5000


@pytest.mark.parametrize("name", ["K and V", "latents"])
def test_sglangs_kernel_gets_the_arguments_that_it_describes(
    interpreted: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other candidate, which ``gpu-check`` measures: a function that follows its docstring."""

    def k_and_v(k: Any, v: Any, source: Any, tokens: Any, slots: Any, layer: int) -> None:
        page, within = tokens // source.shape[4], tokens % source.shape[4]
        for plane, rows in enumerate((k, v)):
            rows.view(len(rows), -1)[slots] = source[page, 0, layer, plane, within].flatten(1)

    def latent(rows: Any, source: Any, tokens: Any, slots: Any, layer: int) -> None:
        page, within = tokens // source.shape[2], tokens % source.shape[2]
        rows.view(len(rows), -1)[slots] = source[page, layer, within]

    monkeypatch.setattr(hicache, "transfer_hicache_one_layer_page_unified_lf", k_and_v)
    monkeypatch.setattr(hicache, "transfer_hicache_one_layer_mla_page_unified_lf", latent)
    with pool_of(interpreted, *LAYOUTS[name]) as pool:
        source, target, ids = pool.slots(), pool.slots(), np.array([7, 2, 9])
        pool.arena.blocks[ids] = pool.copies.gather(source, COUNT).numpy()
        before, other = pool.kv(source).clone(), pool.made_by(SglangsKernel)
        for plane in pool.planes:
            plane[target] = 0
        blocks = Blocks(ids, torch.from_numpy)
        for layer in range(pool.layout.n_layers):
            other.load(target, blocks, layer, layer)
        assert torch.equal(pool.kv(target), before)


COMPILED = {
    # Rows of 2 KiB (8 KV heads), of one KV head, of a latent, and of rows that no 16 bytes divide.
    "8 KV heads": (torch.int64, 256, 2),
    "one KV head": (torch.int64, 32, 2),
    "latent": (torch.int64, 256, 2),
    "rows of 132 bytes": (torch.int32, 512, 1),
}


@pytest.mark.parametrize("capability", TARGETS)
def test_the_kernel_compiles_for_gpus(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To machine code, by the assembler of Triton's wheel; accesses of 16 bytes where rows allow it."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = kernel_module("compiled_row_kernel")
    names = list(COMPILED) if capability == 90 else ["8 KV heads"]
    for name in names:
        word, wide, aligned = COMPILED[name]
        found = compiled(kernel, capability, word, wide, aligned)
        assert found.asm["cubin"]
        kinds = set(re.findall(r"(ld\.global\.cg|st\.global)((?:\.v\d)?\.b\d+)", found.asm["ptx"]))
        widest = ".v2.b64" if aligned == 2 else ".b32"
        assert kinds == {("ld.global.cg", widest), ("st.global", widest)}, name
        assert found.metadata.shared == 0


def compiled(kernel: Any, capability: int, word: torch.dtype, wide: int, aligned: int) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tile = {"WIDE": wide, "ROWS": row_copies.TILE_WORDS // wide, "ALIGNED": aligned}
    constants = {"WORD": kernel.WORDS[word], "WORD_BYTES": word.itemsize, **tile}
    constants |= {"SOURCE_TOKENS": 16, "TARGET_TOKENS": 1}
    names = kernel.copy_rows.arg_names
    tables = ("sources", "source_units", "targets", "target_units")
    signature = dict.fromkeys(tables, "*i64") | dict.fromkeys(("pieces", "tokens"), "i32")
    signature |= dict.fromkeys(constants, "constexpr")
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel.copy_rows, signature=signature, constexprs=places, attrs={})
    options = {"num_warps": kernel.WARPS, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)

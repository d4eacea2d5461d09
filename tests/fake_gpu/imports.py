"""Changes to modules of SGLang and of the product, made when they are imported: the places where tensors in
host memory and a runtime without CUDA would show.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_ext.engine.movers.batch_copies import BatchCopy
from tests.fake_gpu import interpreter, ipc, runtime_kernels, torch_cuda
from tests.fake_gpu.batch import Library

VERDICT_SECONDS = 30.0
"""After which a silent peer is gone, not 2.5 s: a pass in Triton's interpreter keeps Python's lock and a core
busy for seconds, and where other programs want the cores, heartbeats come late."""
LAYER_SECONDS = 120.0
"""Limit between two layers that a peer computes, not 10 s: Triton's interpreter computes 5 to 15 tokens a
second."""


class _Runtime:
    """In place of ``CudaRuntime``; a copy is complete when the call returns."""

    def __init__(self) -> None:
        self.batch = BatchCopy(Library(13_000))

    def copy_2d(self, to: int, to_pitch: int, at: int, pitch: int, width: int, rows: int, _: int) -> None:
        for row in range(rows):
            ctypes.memmove(to + row * to_pitch, at + row * pitch, width)

    def mapped(self, address: int) -> int:
        return address


def _on_layer_copies(module: Any) -> None:
    module.CudaRuntime = _Runtime


def _on_hbm(module: Any) -> None:
    module.EnginePool.device = property(lambda self: torch.device("cuda", torch_cuda.current_device()))


def _on_loader(module: Any) -> None:
    module.load_jit = runtime_kernels.load_jit


def _on_embedding(module: Any) -> None:
    module.vocab_parallel_embedding = interpreter.vocab_parallel_embedding


def _on_transfers(module: Any) -> None:
    module.VERDICT_SECONDS = VERDICT_SECONDS


def _on_fetches(module: Any) -> None:
    module.LAYER_SECONDS = LAYER_SECONDS


_CHANGES: dict[str, Callable[[Any], None]] = {
    "sglang.kernels.jit.utils.compile.loader": _on_loader,
    "sglang.kernels.ops.embeddings.vocab_parallel_embedding": _on_embedding,
    "sglang_ext.patches.adapter.hbm": _on_hbm,
    "sglang_ext.patches.adapter.build_transfers": _on_transfers,
    "sglang_ext.engine.peers.fetch_link": _on_fetches,
    "sglang_ext.engine.movers.layer_copies": _on_layer_copies,
    "sglang_ext.engine.movers.gpu_memory": ipc.change,
}


_CUTE = "sglang.kernels.ops.gemm.cutedsl_dual_gemm"
_SITE = Path(__file__).parents[2] / "scripts" / "gpu" / "site"


class _Finder:
    """Finds modules as the others do, and changes some after their import."""

    def __init__(self) -> None:
        self._finding: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        change = _CHANGES.get(name)
        if change is None or name in self._finding:
            return None
        self._finding.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding.discard(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _without_cutlass() -> None:
    """A module that SGLang imports for every Llama and Qwen on CUDA, and that imports cutlass for a kernel of
    SM100, as the archive for GPU machines replaces it."""
    spec = importlib.util.spec_from_file_location(_CUTE, _SITE / "cutedsl_dual_gemm.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[_CUTE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def install() -> None:
    """Watch for imports; modules that are there already are changed at once."""
    _without_cutlass()
    for name, change in _CHANGES.items():
        if name in sys.modules:
            change(sys.modules[name])
    sys.meta_path.insert(0, _Finder())

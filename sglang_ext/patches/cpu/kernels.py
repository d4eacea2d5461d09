"""A module ``sgl_kernel`` for hosts where the kernel library cannot be installed.

Change: SGLang imports about ten names from ``sgl_kernel`` at start on a CPU (``SGLANG_USE_CPU_ENGINE=1``).
Without speculative decoding none of them is called for dense Llama- and Qwen-like models or for MLA models;
without Intel AMX operators SGLang takes its own plain-torch paths. The stand-in has the kernels of
speculative decoding in torch (`speculative`), and answers every other import with a function that raises
``NotImplementedError`` with the kernel's name and the way out. In ``torch.ops.sgl_kernel`` it declares the
operators that SGLang's Qwen3.5 names at import, without a form for any device: the processors of Qwen's
vision models import that module. It does not declare the operator by which SGLang recognises AMX.

Why no extension point serves: the imports stand at the top of SGLang's modules, before any plugin.

The wheel ``sglang-kernel`` is CUDA only. Not applied where ``sgl_kernel`` imports.
Can go: when a CPU wheel of ``sgl_kernel`` is published.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from sglang_ext.patches.base import Patch, Scope

MODULE = "sgl_kernel"

_LINEAR_ATTENTION = "serve a model without linear-attention layers"

# Kernel -> way out, for the names that SGLang imports on a CPU.
_WAY_OUT = {
    "causal_conv1d_fn_cpu": _LINEAR_ATTENTION,
    "causal_conv1d_update_cpu": _LINEAR_ATTENTION,
    "chunk_gated_delta_rule_cpu": _LINEAR_ATTENTION,
}
_NAMED_AT_IMPORT = (
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
)
"""Operators that ``sglang.srt.models.qwen3_5`` names when it is imported."""
_DEFAULT_WAY_OUT = (
    "use a dense Llama-, Qwen- or DeepSeek-V2-like model in float32, float16 or bfloat16, unquantised, "
    "or a host with a GPU"
)


def missing_kernel(name: str) -> Callable[..., NoReturn]:
    """A function in place of the kernel ``name``, which raises when it is called."""

    def kernel(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} has no CPU form in this runtime; {_WAY_OUT.get(name, _DEFAULT_WAY_OUT)}."
        )

    kernel.__name__ = kernel.__qualname__ = name
    kernel.__module__ = MODULE
    return kernel


class _StandIn(ModuleType):
    """``sgl_kernel`` without kernels: any public name is a function that raises when called."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("_"):
            raise AttributeError(f"module {MODULE!r} has no attribute {name!r}")
        kernel = missing_kernel(name)
        setattr(self, name, kernel)
        return kernel


def _importable() -> bool:
    """Whether a real ``sgl_kernel`` works here. A CUDA build on a host without CUDA does not."""
    try:
        importlib.import_module(MODULE)
    except (ImportError, OSError, RuntimeError):
        for name in [m for m in sys.modules if m == MODULE or m.startswith(f"{MODULE}.")]:
            del sys.modules[name]
        return False
    return True


def apply() -> None:
    """Put the stand-in into ``sys.modules``, unless a real ``sgl_kernel`` works here."""
    if applied() or _importable():
        return
    module = _StandIn(MODULE, "Stand-in for SGLang's kernel library on a CPU host.")
    module.__spec__ = importlib.machinery.ModuleSpec(MODULE, loader=None, origin="sglang_ext")
    sys.modules[MODULE] = module
    _add_kernels(module)
    _declare_operators()


def _add_kernels(module: ModuleType) -> None:
    from sglang_ext.patches.cpu.speculative import KERNELS

    vars(module).update(KERNELS)


def _declare_operators() -> None:
    import torch

    for name in _NAMED_AT_IMPORT:
        if not hasattr(torch.ops.sgl_kernel, name):
            torch.library.define(f"{MODULE}::{name}", "(Tensor x) -> Tensor")


def in_use() -> bool:
    """Whether this process uses the stand-in, and not a real ``sgl_kernel``."""
    return isinstance(sys.modules.get(MODULE), _StandIn)


def applied() -> bool:
    """Whether this process has an ``sgl_kernel``, ours or a real one."""
    return MODULE in sys.modules


PATCH = Patch(
    name="sgl_kernel_stand_in",
    summary="a module sgl_kernel whose kernels say that they have no CPU form",
    scope=Scope.PROCESS,
    targets=(
        "sglang.srt.utils.common.is_cpu",
        "sglang.srt.utils.common._is_intel_amx_backend_available",
    ),
    apply=apply,
    applied=applied,
)

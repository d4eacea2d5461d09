"""A package ``sgl_kernel`` for hosts where the kernel library cannot be installed.

Change: SGLang imports about ten names from ``sgl_kernel`` at start on a CPU (``SGLANG_USE_CPU_ENGINE=1``),
and three from ``sgl_kernel.mamba`` where a model has states. Without speculative decoding none of them is
called for dense Llama- and Qwen-like models or for MLA models; without Intel AMX operators SGLang takes its
own plain-torch paths. The stand-in has the kernels of speculative decoding (`speculative`), the short
convolution (`short_conv`) and the gated delta rule (`delta_rule`) in torch, and answers every other import
with a function that raises ``NotImplementedError`` with the kernel's name and the way out. In
``torch.ops.sgl_kernel`` it puts the operators of gated delta layers and of Qwen3.5 (`qwen_operators`), which
SGLang names when it imports them: the processors of Qwen's vision models import Qwen3.5, every model with
states imports gated delta layers. It has not the operator by which SGLang recognises AMX.

Why no extension point serves: the imports stand at the top of SGLang's modules, before any plugin.

The wheel ``sglang-kernel`` is CUDA only. Not applied where ``sgl_kernel`` imports.
Can go: when a CPU wheel of ``sgl_kernel`` is published.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NoReturn

from sglang_ext.patches.base import Patch, Scope

MODULE = "sgl_kernel"
MAMBA = "sgl_kernel.mamba"

_WAY_OUT = (
    "use a dense Llama-, Qwen- or DeepSeek-V2-like model in float32, float16 or bfloat16, unquantised, "
    "or a host with a GPU"
)


def missing_kernel(name: str, module: str = MODULE) -> Callable[..., NoReturn]:
    """A function in place of the kernel ``name``, which raises when it is called."""

    def kernel(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{module}.{name} has no CPU form in this runtime; {_WAY_OUT}.")

    kernel.__name__ = kernel.__qualname__ = name
    kernel.__module__ = module
    return kernel


class _StandIn(ModuleType):
    """A module with some kernels: any other public name is a function that raises when called."""

    def __init__(self, name: str, kernels: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(name, "Stand-in for SGLang's kernel library on a CPU host.")
        self.__spec__ = importlib.machinery.ModuleSpec(
            name, loader=None, origin="sglang_ext", is_package=name == MODULE
        )
        self.__path__: list[str] = []
        vars(self).update(kernels)

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("_"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        kernel = missing_kernel(name, self.__name__)
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
    import torch

    from sglang_ext.patches.cpu import delta_rule, qwen_operators, short_conv, speculative

    mamba = {**short_conv.KERNELS, **delta_rule.GDN_KERNELS}
    sys.modules[MODULE] = _StandIn(MODULE, speculative.KERNELS)
    sys.modules[MAMBA] = vars(sys.modules[MODULE])["mamba"] = _StandIn(MAMBA, mamba)
    # As functions: SGLang passes different options to them from release to release.
    for name, operator in {**delta_rule.GDN_OPERATORS, **qwen_operators.QWEN_OPERATORS}.items():
        setattr(torch.ops.sgl_kernel, name, operator)


def in_use() -> bool:
    """Whether this process uses the stand-in, and not a real ``sgl_kernel``."""
    return isinstance(sys.modules.get(MODULE), _StandIn)


def applied() -> bool:
    """Whether this process has an ``sgl_kernel``, ours or a real one."""
    return MODULE in sys.modules


PATCH = Patch(
    name="sgl_kernel_stand_in",
    summary="a package sgl_kernel: some kernels in torch, the others say that they have no CPU form",
    scope=Scope.PROCESS,
    targets=(
        "sglang.srt.utils.common.is_cpu",
        "sglang.srt.utils.common._is_intel_amx_backend_available",
    ),
    apply=apply,
    applied=applied,
)

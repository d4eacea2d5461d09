"""A package ``sgl_kernel`` for the emulated GPU, with the operators that a dense model calls, in torch.

The real wheel is CUDA only and has more than a gigabyte. The schemas of the operators are defined here, in
this process, and only of those that have a form here: ``convert_weight_packed``, by which SGLang recognises
Intel AMX, stays unknown. Any other name of the package is a function that raises when it is called.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

_SCHEMAS = (
    "rmsnorm(Tensor! output, Tensor input, Tensor weight, float eps, bool enable_pdl) -> ()",
    "fused_add_rmsnorm(Tensor! input, Tensor! residual, Tensor weight, float eps, bool enable_pdl) -> ()",
    "silu_and_mul(Tensor! out, Tensor input) -> ()",
)
_libraries: list[torch.library.Library] = []
"""Registrations end with their library."""


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * weight.float()).to(x.dtype)


def _rmsnorm(output: Any, input: Any, weight: Any, eps: float, enable_pdl: bool) -> None:
    output.copy_(_norm(input, weight, eps))


def _fused_add_rmsnorm(input: Any, residual: Any, weight: Any, eps: float, enable_pdl: bool) -> None:
    residual.add_(input)
    input.copy_(_norm(residual, weight, eps))


def _silu_and_mul(out: Any, input: Any) -> None:
    half = input.shape[-1] // 2
    out.copy_(torch.nn.functional.silu(input[..., :half]) * input[..., half:])


def rmsnorm(input: Any, weight: Any, eps: float = 1e-6, out: Any = None, enable_pdl: Any = None) -> Any:
    """As ``sgl_kernel.rmsnorm``."""
    out = torch.empty_like(input) if out is None else out
    torch.ops.sgl_kernel.rmsnorm(out, input, weight, eps, False)
    return out


def fused_add_rmsnorm(
    input: Any, residual: Any, weight: Any, eps: float = 1e-6, enable_pdl: Any = None
) -> None:
    """As ``sgl_kernel.fused_add_rmsnorm``."""
    torch.ops.sgl_kernel.fused_add_rmsnorm(input, residual, weight, eps, False)


def silu_and_mul(input: Any, out: Any = None) -> Any:
    """As ``sgl_kernel.silu_and_mul``."""
    if out is None:
        out = input.new_empty((*input.shape[:-1], input.shape[-1] // 2))
    torch.ops.sgl_kernel.silu_and_mul(out, input)
    return out


def transfer_kv_direct(
    src_layers: Sequence[Any],
    dst_layers: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    page_size: int,
) -> None:
    """As ``sgl_kernel.kvcacheio.transfer_kv_direct``, HiCache's copies with ``--hicache-io-backend direct``:
    rows of planes, in whole pages."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def _missing(module: str, name: str) -> Callable[..., Any]:
    def kernel(*_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"{module}.{name} has no form on the emulated GPU")

    kernel.__name__ = kernel.__qualname__ = name
    return kernel


class _Package(ModuleType):
    """A module with some kernels, whose other public names are functions that raise."""

    def __init__(self, name: str, kernels: Mapping[str, Any]) -> None:
        super().__init__(name, "sgl_kernel of the emulated GPU.")
        self.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, origin="fake_gpu", is_package=True)
        self.__path__: list[str] = []
        self.__version__ = "0.4.10"
        vars(self).update(kernels)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        kernel = _missing(self.__name__, name)
        setattr(self, name, kernel)
        return kernel


class _Anything:
    """Constants that are named when SGLang is imported, and never used here."""

    def __getattr__(self, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return name


_MODULES: Mapping[str, Mapping[str, Any]] = {
    "sgl_kernel": {
        "rmsnorm": rmsnorm,
        "fused_add_rmsnorm": fused_add_rmsnorm,
        "silu_and_mul": silu_and_mul,
    },
    "sgl_kernel.kvcacheio": {"transfer_kv_direct": transfer_kv_direct},
    # Programmatic dependent launch: its instructions are not in Triton's interpreter.
    "sgl_kernel.utils": {"is_arch_support_pdl": lambda: False},
    "sgl_kernel.scalar_type": {"scalar_types": _Anything()},
}


class _Finder:
    """Any other module of the package: SGLang imports many, and calls few."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not name.startswith("sgl_kernel."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Package(spec.name, {})

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it is complete."""


def install() -> None:
    """Define the operators and put the package into ``sys.modules``."""
    defined = torch.library.Library("sgl_kernel", "DEF")
    for schema in _SCHEMAS:
        defined.define(schema)
    forms = torch.library.Library("sgl_kernel", "IMPL", "CPU")
    for form in (_rmsnorm, _fused_add_rmsnorm, _silu_and_mul):
        forms.impl(form.__name__.removeprefix("_"), form)
    _libraries.extend((defined, forms))
    for name, kernels in _MODULES.items():
        module = sys.modules[name] = _Package(name, kernels)
        parent, _, own = name.rpartition(".")
        if parent:
            vars(sys.modules[parent])[own] = module
    sys.meta_path.append(_Finder())  # type: ignore[arg-type]
    _operators_of_sglang()


def _operators_of_sglang() -> None:
    """Operators that SGLang registers for CUDA have their tensors in host memory here."""
    impl = torch.library.Library.impl

    def also_on_host(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **kwargs: Any) -> None:
        impl(self, op_name, fn, dispatch_key, **kwargs)
        if dispatch_key == "CUDA":
            try:
                impl(self, op_name, fn, "CPU", **kwargs)
            except RuntimeError:
                return  # it has one

    torch.library.Library.impl = also_on_host

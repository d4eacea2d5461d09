"""Let torchvision be imported beside a CPU build of torch.

Change: torchvision's wheel on PyPI is built for CUDA; beside a CPU torch its library ``_C.so`` cannot be
loaded, the operators ``torchvision::nms`` and ``torchvision::qnms`` stay undefined, and its import fails
while it registers their meta kernels. With it fail transformers' image processors and SGLang. Defining
the two schemas before the import is enough; the operators themselves are not needed for text.

Why no extension point serves: the failure comes while SGLang is being imported, before any plugin.

For: torchvision 0.28.0 beside torch 2.13.0. Not applied where ``_C.so`` loads.
Can go: when PyPI offers torchvision for CPU torch, or SGLang no longer imports it for text models.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from sglang_ext.patches.base import Patch, Scope

_SCHEMAS = {
    "torchvision::nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "torchvision::qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def _defined(name: str) -> bool:
    import torch

    namespace, _, operator = name.partition("::")
    return hasattr(getattr(torch.ops, namespace), operator)


def _native_library_loads() -> bool:
    """Whether torchvision's own library defines the operators; loading it twice is harmless."""
    import torch

    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True  # torchvision is not installed: nothing to mend
    library = Path(spec.origin).parent / "_C.so"
    if not library.exists():
        return False
    try:
        torch.ops.load_library(str(library))
    except OSError:
        return False
    return True


def apply() -> None:
    """Define the operators' schemas, unless they are defined or torchvision can do it itself."""
    import torch

    if applied() or _native_library_loads():
        return
    for name, schema in _SCHEMAS.items():
        if not _defined(name):
            torch.library.define(name, schema)


def applied() -> bool:
    """Whether both operators are known to torch."""
    return all(_defined(name) for name in _SCHEMAS)


PATCH = Patch(
    name="torchvision_operators",
    summary="define torchvision::nms and ::qnms so that a CUDA build of torchvision imports beside CPU torch",
    scope=Scope.PROCESS,
    targets=(),
    apply=apply,
    applied=applied,
)

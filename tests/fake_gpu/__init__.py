"""SGLang's CUDA branches, and the product's, run on a CPU: ``install`` changes this process alone.

``torch.cuda`` answers as on machines with H100s, every tensor that asks for "cuda" lies in host memory,
Triton kernels run in Triton's interpreter, collective calls go over gloo, and the operators and run-time
kernels that a dense model needs have forms in torch (`operators`, `runtime_kernels`). SGLang's scheduler
makes the choices of one on a GPU: allocators, attention metadata, overlap loop, ``CudaMover``.

Right answers mean that the Python side fits together. Not said by it:
- speed, of anything;
- races: streams and events do nothing, all work is done when it is called (see the stream checker for order);
- CUDA graphs: capture and replay are turned off by flags;
- the bytes that real kernels write, NCCL, pinned memory, and the reach of a network adapter.

On a machine with a GPU nothing here is needed, and ``install`` refuses.
"""

from __future__ import annotations

import os

__all__ = ["ENVIRONMENT", "FLAGS", "install"]

ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    "SGLANG_NCCL_SO_PATH": "none-on-a-cpu",
    # The tree of SGLang's own cache, written in C++, is compiled against CUDA.
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
}
"""Read when torch, Triton and SGLang are imported."""
FLAGS = (
    *("--device", "cuda", "--attention-backend", "triton", "--sampling-backend", "pytorch"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
    *("--disable-custom-all-reduce", "--sleep-on-idle"),
)
"""Of a server on the emulated GPU. Graphs cannot be captured; custom all-reduce maps memory of other GPUs."""


def install(gpus: int = 2, *, sglang: bool = True) -> None:
    """Change torch, Triton, ``sgl_kernel`` and the loader of run-time kernels here. Call it before SGLang
    and the product's engine are imported.

    Args:
        gpus: how many ``torch.cuda`` counts.
        sglang: whether SGLang runs here. Otherwise its modules are not imported, which takes seconds.

    Raises:
        RuntimeError: there is a real GPU.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import torch

    if torch.cuda.is_available():
        raise RuntimeError("this machine has a GPU; the emulator is for machines without one")
    from tests.fake_gpu import interpreter, tensors, torch_cuda

    if sglang:
        from sglang_ext.patches.cpu import torchvision

        torchvision.apply()
    torch_cuda.install(gpus)
    tensors.install()
    interpreter.install()
    if sglang:
        _for_sglang()
    else:
        from tests.fake_gpu import product

        product.install()


def _for_sglang() -> None:
    from tests.fake_gpu import distributed, imports, operators

    distributed.install()
    operators.install()
    imports.install()

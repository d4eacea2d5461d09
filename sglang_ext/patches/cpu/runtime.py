"""The CPU runtime: the setup needed before SGLang is imported on a host without an accelerator."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from sglang_ext.patches.cpu import kernels as sgl_kernel_stand_in
from sglang_ext.patches.cpu import torchvision as torchvision_operators

ACTIVE = "SGLANG_EXT_CPU_RUNTIME"
"""Set to 1 in the server's process and inherited by its children when the CPU runtime is on."""

COMPILING = "TORCHDYNAMO_DISABLE"
"""0 lets ``torch.compile`` compile. SGLang wraps functions in it that a server first calls for some request:
that request stopped all others for seconds, and ended the server where there is no C++ compiler."""
COMPILING_FLAG = "--enable-torch-compile"
"""SGLang's, with which it compiles the model before it is ready."""

CONVOLUTION_STATES = "SGLANG_MAMBA_CONV_DTYPE"
"""The type of the states of short convolutions. SGLang's default is bfloat16 whatever the model's type is: a
float32 model would answer otherwise behind a state from the cache than behind the same tokens computed. In
float32 a state is exact for every type."""

ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_USE_CPU_ENGINE": "1",
    COMPILING: "1",
    CONVOLUTION_STATES: "float32",
}
"""Environment of a CPU server; variables that the user has set stay."""

NCCL_LIBRARY = "SGLANG_NCCL_SO_PATH"
"""From where SGLang loads NCCL. A CUDA build of torch brings an NCCL that loads without a GPU; with several
ranks SGLang would then take the CPU for a CUDA device."""

FLAG_DEFAULTS: Mapping[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    # An idle scheduler spins one core otherwise.
    "sleep_on_idle": True,
}
"""Defaults of SGLang's flags on a CPU, by the name of the parsed argument; flags the user gives win."""


def accelerator_available() -> bool:
    """Whether torch sees a device other than the CPU."""
    import torch

    return bool(torch.accelerator.is_available())


def wanted(argv: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a server started with these arguments runs on the CPU.

    ``--device`` decides when given, then ``SGLANG_USE_CPU_ENGINE``, then whether there is an accelerator.
    """
    for i, argument in enumerate(argv):
        if argument == "--device" and i + 1 < len(argv):
            return argv[i + 1] == "cpu"
        if argument.startswith("--device="):
            return argument == "--device=cpu"
    if environment.get("SGLANG_USE_CPU_ENGINE") == "1":
        return True
    return not accelerator_available()


def active(environment: Mapping[str, str]) -> bool:
    """Whether the CPU runtime is on in this process."""
    return environment.get(ACTIVE) == "1"


def unsupported_host(machine: str) -> str | None:
    """Why a CPU of this kind (``platform.machine()``) cannot serve, with the way out; None when it can.

    On Arm, SGLang calls operators of ``sgl_kernel`` that the stand-in does not have.
    """
    if machine.lower() in ("x86_64", "amd64") or not sgl_kernel_stand_in.in_use():
        return None
    return f"the CPU runtime serves x86-64 hosts, not {machine}; install a CPU build of sgl_kernel for it"


def prepare_process(environment: MutableMapping[str, str]) -> None:
    """Make SGLang importable on a CPU in this process, and in its children through their environment.

    Must run before SGLang is first imported. Safe to call again.
    """
    environment[ACTIVE] = "1"
    for name, value in ENVIRONMENT.items():
        environment.setdefault(name, value)
    if _torch_brings_nccl():
        environment.setdefault(NCCL_LIBRARY, "none-on-a-cpu")
    torchvision_operators.apply()
    sgl_kernel_stand_in.apply()


def _torch_brings_nccl() -> bool:
    import torch

    return torch.version.cuda is not None

"""Tensors that ask for "cuda" lie in host memory and still say that they are on a GPU where SGLang asks."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

_TAKES_DEVICE = frozenset(
    ("to", "new_empty", "new_zeros", "new_full", "new_tensor", "new_ones", "empty_like", "type")
)
"""Methods that take a device as a positional argument."""
OWN_ALLOCATION = 64 << 10
"""Bytes from which ``torch.zeros`` has an allocation of its own."""
_local = threading.local()


def in_host_memory(device: Any) -> Any:
    """The device on which a tensor is made in place of ``device``; other values as they are."""
    if isinstance(device, str) and device.startswith("cuda"):
        return torch.device("cpu")
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    return device


class _InHostMemory(TorchFunctionMode):  # type: ignore[misc]
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        on_gpu = str(kwargs.get("device")).startswith("cuda")
        if "device" in kwargs:
            kwargs["device"] = in_host_memory(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if name in _TAKES_DEVICE:
            args = tuple(in_host_memory(each) for each in args)
        if name in ("cuda", "pin_memory"):
            return args[0]
        if name == "is_pinned":
            return True
        if name == "record_stream":
            return None
        if name == "__get__" and getattr(func, "__self__", None) is torch.Tensor.is_cuda:
            return True
        made = func(*args, **kwargs)
        return _in_memfd(made) if func is torch.zeros and on_gpu else made


def _in_memfd(zeros: torch.Tensor) -> torch.Tensor:
    """The same in memory of its own that other processes can map, as they can a GPU's: pools are made so."""
    if zeros.nbytes < OWN_ALLOCATION:
        return zeros
    fd = os.memfd_create("gpu", os.MFD_CLOEXEC)
    os.ftruncate(fd, zeros.nbytes)
    memory = np.frombuffer(mmap.mmap(fd, zeros.nbytes), np.uint8)
    weakref.finalize(memory, os.close, fd)
    return torch.from_numpy(memory).view(zeros.dtype).view(zeros.shape)


def enter() -> None:
    """Have this thread make its tensors in host memory from now on."""
    if getattr(_local, "mode", None) is None:
        _local.mode = _InHostMemory()
        _local.mode.__enter__()


def install() -> None:
    """Enter the mode in this thread and in each that is started; modes belong to threads."""
    enter()
    run = threading.Thread.run

    def entered(self: threading.Thread) -> None:
        enter()
        run(self)

    setattr(threading.Thread, "run", entered)  # noqa: B010 - mypy knows it as a method
    _on_module()
    generator: Any = torch.Generator

    class Generator(generator):  # type: ignore[misc]
        def __new__(cls, device: Any = "cpu") -> Any:
            return generator(device=in_host_memory(device))

    torch.Generator = Generator
    torch.Tensor.record_stream = lambda self, stream: None


def _on_module() -> None:
    to = torch.nn.Module.to

    def to_host(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = in_host_memory(kwargs["device"])
        return to(self, *(in_host_memory(each) for each in args), **kwargs)

    torch.nn.Module.to = to_host
    torch.nn.Module.cuda = lambda self, device=None: self

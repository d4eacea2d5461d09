"""``torch.cuda`` as on a machine with H100s: facts, streams and events that do nothing, and free memory."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import torch

NAME = "NVIDIA H100 80GB HBM3"
CAPABILITY = (9, 0)
CUDA_VERSION = "13.0"
FREE_BYTES, TOTAL_BYTES = 8 << 30, 84 << 30
"""As ``mem_get_info`` says: SGLang sizes its pools by it unless flags do."""
_local = threading.local()


class Event:
    """Recorded and complete as soon as it is made."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._at = time.perf_counter()
        self.cuda_event = id(self)

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing: the work before it is done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing, as ``wait``."""

    def elapsed_time(self, other: Event) -> float:
        return max(1e-3, 1000 * (other._at - self._at))


class Stream:
    """A stream on which nothing is ever pending."""

    def __init__(self, device: Any = None, priority: int = 0, **_kwargs: Any) -> None:
        self.device = torch.device("cuda", current_device())
        self.device_index = current_device()
        self.cuda_stream = self.stream_id = id(self) & 0xFFFFFFFF
        self.priority = priority

    def wait_stream(self, other: Any) -> None:
        """Nothing: work is done when it is called."""

    def wait_event(self, event: Any) -> None:
        """As ``wait_stream``."""

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """As ``wait_stream``."""

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class StreamContext:
    """``torch.cuda.stream``; SGLang keeps one and enters it again and again."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._before: list[Any] = []

    def __enter__(self) -> Any:
        self._before.append(current_stream())
        if self.stream is not None:
            _local.stream = self.stream
        return self.stream

    def __exit__(self, *_: object) -> None:
        _local.stream = self._before.pop()


class Guard:
    """``torch.cuda.device`` and its like."""

    def __init__(self, device: Any = None) -> None:
        self.device = device

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Runtime:
    """``torch.cuda.cudart()``: pinning succeeds and pins nothing."""

    cudaError = SimpleNamespace(success=0)

    def cudaHostRegister(self, *_args: Any) -> int:
        return 0

    def cudaHostUnregister(self, *_args: Any) -> int:
        return 0

    def cudaMemGetInfo(self, _device: Any) -> tuple[int, int]:
        return FREE_BYTES, TOTAL_BYTES


_state = SimpleNamespace(device=0, default=None)


def current_device() -> int:
    """The GPU of this process, as ``set_device`` chose it."""
    return int(_state.device)


def set_device(device: Any) -> None:
    """As torch's: an index, or a device with one."""
    index = getattr(device, "index", device)
    _state.device = torch.device(device).index or 0 if isinstance(index, str) else int(index or 0)


def current_stream(_device: Any = None) -> Any:
    """Of this thread."""
    return getattr(_local, "stream", None) or _state.default


def _set_stream(stream: Any) -> None:
    _local.stream = stream


def _properties() -> SimpleNamespace:
    return SimpleNamespace(
        name=NAME,
        major=9,
        minor=0,
        total_memory=TOTAL_BYTES,
        multi_processor_count=132,
        L2_cache_size=52_428_800,
        shared_memory_per_block_optin=232_448,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65_536,
        gcnArchName="",
        shared_memory_per_block=49_152,
        shared_memory_per_multiprocessor=233_472,
        is_integrated=0,
        uuid="GPU-emulated",
        pci_domain_id=0,
        pci_bus_id=1,
        pci_device_id=0,
    )


def install(gpus: int) -> None:
    """Put everything in place of torch's own."""
    cuda: Any = torch.cuda
    _state.default = Stream()
    properties = _properties()
    classes = {"Stream": Stream, "Event": Event, "stream": StreamContext, "StreamContext": StreamContext}
    classes |= {"ExternalStream": Stream, "device": Guard, "device_of": Guard, "_DeviceGuard": Guard}
    facts = {
        "is_available": lambda: True,
        "device_count": lambda: gpus,
        "current_device": current_device,
        "set_device": set_device,
        "is_initialized": lambda: True,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_name": lambda device=None: NAME,
        "get_arch_list": lambda: ["sm_90"],
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (FREE_BYTES, TOTAL_BYTES),
        "is_current_stream_capturing": lambda: False,
        "can_device_access_peer": lambda a, b: True,
        "cudart": Runtime,
        "current_stream": current_stream,
        "default_stream": lambda device=None: _state.default,
        "set_stream": _set_stream,
    }
    for name, value in {**classes, **facts}.items():
        setattr(cuda, name, value)
    for name in (
        *("init", "_lazy_init", "synchronize", "empty_cache", "reset_peak_memory_stats", "ipc_collect"),
        *("reset_max_memory_allocated", "set_per_process_memory_fraction", "manual_seed", "manual_seed_all"),
        *("check_error", "_sleep"),
    ):
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    _outside_cuda()


def _outside_cuda() -> None:
    """Other names for the accelerator."""
    anything: Any = torch
    anything.version.cuda = CUDA_VERSION  # by which SGLang knows a build for CUDA
    anything.Stream, anything.Event = Stream, Event
    accelerator: Any = torch.accelerator
    accelerator.is_available = lambda: True
    accelerator.current_accelerator = lambda *args, **kwargs: torch.device("cuda")
    accelerator.current_device_index = current_device
    accelerator.synchronize = lambda *args, **kwargs: None
    accelerator.current_stream = current_stream
    accelerator.set_stream = _set_stream
    inner: Any = torch._C
    inner._cuda_getCurrentRawStream = lambda device: 0
    inner._cuda_setDevice = lambda device: None
    inner._cuda_getDevice = current_device
    inner._cuda_getDeviceCount = lambda: torch.cuda.device_count()

"""Step 1: the card, its driver and its libraries, and transports of KV."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from sglang_ext.cluster.doctor.findings import Finding, Level, size
from sglang_ext.disagg.memory import MemoryKind, RegionTable
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transports.pinned import StagedTransport
from sglang_ext.disagg.transports.rails import pci_place, topology
from sglang_ext.disagg.transports.select import make_transports, reasons, way_out
from sglang_ext.engine.gpu_link import Reasons
from sglang_ext.engine.movers.gpu_memory import GpuMemory

LEAST_FREE_BYTES = 8 << 30
"""Of the GPU's memory, for the pools and the server of this command."""
_PEER = (
    "import ast, sys\n"
    "import torch\n"
    "torch.cuda.init()\n"
    "storage = torch.UntypedStorage._new_shared_cuda(*ast.literal_eval(sys.stdin.read()))\n"
    "print(int(torch.empty(0, dtype=torch.int32, device='cuda').set_(storage).sum()))\n"
)


def no_gpu() -> Finding | None:
    """Why there is nothing to check; None on a machine with a GPU that torch can use."""
    if torch.cuda.is_available() and torch.cuda.device_count():
        return None
    built = torch.version.cuda
    why = f"torch {torch.__version__} is built {f'for CUDA {built}' if built else 'without CUDA'}"
    return Finding(
        Level.PROBLEM,
        "GPU",
        f"torch sees no GPU on this machine; {why}",
        "Nothing was checked. Run this where the servers will run, with `pip install '.[gpu]'` beside a "
        "stock sglang; without a GPU, `sglang-ext doctor` checks the machine",
    )


def facts() -> Iterator[Finding]:
    """A finding for each."""
    yield _card()
    yield _libraries()
    yield _placement()
    yield from _memory_lock()
    yield _sharing()
    yield _transports("DRAM tier", reasons(), "KV is neither fetched from other servers nor exported")
    yield pairs()


def _card() -> Finding:
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    free, total = torch.cuda.mem_get_info()
    text = f"{found.name}, sm_{found.major}{found.minor}, {size(free)} of {size(total)} free, {_driver()}"
    if free < LEAST_FREE_BYTES:
        advice = "Other programs hold its memory: end them, or choose another with CUDA_VISIBLE_DEVICES"
        return Finding(Level.WARNING, "GPU", text, advice)
    return Finding(Level.OK, "GPU", text)


def _driver() -> str:
    """The driver and the link, as nvidia-smi has them."""
    fields = "driver_version,pcie.link.gen.max,pcie.link.width.max"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", timeout=10, check=True
        ).stdout
        driver, generation, width = (part.strip() for part in found.splitlines()[0].split(","))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return "nvidia-smi does not answer"
    return f"driver {driver}, PCIe {generation} x{width} at most"


def _libraries() -> Finding:
    text = f"torch {torch.__version__} (CUDA {torch.version.cuda}), sglang {_version('sglang')}"
    # In a process of its own: a library built for another torch may end it.
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import sgl_kernel"], capture_output=True, timeout=120, check=False
    )
    if done.returncode:
        reason = (done.stderr.decode().strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        advice = "Install the sglang-kernel that this sglang and this torch ask for"
        return Finding(Level.PROBLEM, "libraries", f"{text}; sgl_kernel does not load: {reason}", advice)
    return Finding(Level.OK, "libraries", f"{text}, sglang-kernel {_version('sglang-kernel')}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _placement() -> Finding:
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    parts: list[Any] = [getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in parts:
        return Finding(Level.WARNING, "NUMA", "torch does not say where the GPU is", "RDMA goes by rank")
    place = pci_place("{:04x}:{:02x}:{:02x}.0".format(*parts))
    return Finding(Level.OK, "NUMA", "unknown" if place.numa < 0 else f"the GPU is on node {place.numa}")


def _memory_lock() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Finding(Level.OK, "locked memory", "unlimited")
    elif topology().nics:
        text = f"{size(soft)} at most, and RDMA locks whole pools"
        yield Finding(Level.WARNING, "locked memory", text, "`ulimit -l unlimited`, or memlock=-1")
    else:
        yield Finding(Level.OK, "locked memory", f"{size(soft)} at most; CUDA pins without asking for it")


def _sharing() -> Finding:
    """Whether another process can map this one's GPU memory."""
    try:
        shared = torch.ones(1 << 16, dtype=torch.int32, device="cuda")
        handle = repr(shared.untyped_storage()._share_cuda_())  # numbers and bytes
        done = subprocess.run(
            [sys.executable, "-c", _PEER], input=handle, capture_output=True, encoding="utf-8", timeout=60,
            check=False,
        )  # fmt: skip
        seen = done.stdout.strip()
        if seen == str(shared.numel()):
            return Finding(Level.OK, "shared memory", "another process can map the GPU's memory (CUDA IPC)")
        reason = (done.stderr.strip().splitlines() or [f"it read {seen or 'nothing'}"])[-1]
    except Exception as error:  # noqa: BLE001 - torch raises many kinds
        reason = f"{type(error).__name__}: {error}"
    advice = "Prefill and decode on one host then need RDMA. Containers need --ipc=host for it"
    return Finding(
        Level.WARNING, "shared memory", f"no other process maps the GPU's memory: {reason}", advice
    )


def _transports(subject: str, against: Reasons, without: str) -> Finding:
    usable = [str(name) for name, reason in against.items() if reason is None]
    others = "; ".join(f"{name}: {reason}" for name, reason in against.items() if reason is not None)
    if usable:
        return Finding(Level.OK, subject, f"travels by {', '.join(usable)}{f' ({others})' if others else ''}")
    return Finding(
        Level.WARNING, subject, f"{without}: {others}", "`sglang-ext doctor` names the missing package"
    )


def pairs() -> Finding:
    """Whether prefill and decode can be apart, by the transports that carry a pool in this GPU's
    memory, which is really exported, and registered with the adapter, where there is one."""
    pool = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    regions = RegionTable()
    regions.add(pool.data_ptr(), pool.nbytes, kind=MemoryKind.CUDA, keep=pool)
    device = GpuMemory(torch.cuda.current_device())
    made = make_transports(EndpointConfig("gpu-check", "gpu-check", device=device), regions)
    try:
        against = {name: transport.unavailable() for name, transport in made.items()}
    finally:
        for transport in made.values():
            transport.close()
    staged = {name for name, transport in made.items() if isinstance(transport, StagedTransport)}
    usable = [
        f"{name} through pinned memory" if name in staged else str(name)
        for name, reason in against.items()
        if reason is None
    ]
    if usable:
        text = f"can be apart: the GPU's memory travels by {', '.join(usable)}"
        return Finding(Level.OK, "prefill/decode", text)
    text = "; ".join(f"{name}: {reason}" for name, reason in against.items())
    advice = way_out(list(regions)) or ""
    return Finding(Level.WARNING, "prefill/decode", f"cannot be apart here: {text}", advice)

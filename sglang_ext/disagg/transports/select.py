"""The transports of an endpoint, and the reasons why it lacks the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

from sglang_ext.addresses import host_of
from sglang_ext.compiled import COMPILED
from sglang_ext.disagg.errors import TransportUnavailableError
from sglang_ext.disagg.memory import MemoryKind, Region, RegionMeta, RegionTable
from sglang_ext.disagg.transports import TRIED, Transport, TransportName
from sglang_ext.disagg.transports._gathering import GatherTransport, PinnedArena
from sglang_ext.disagg.transports.cuda_ipc import CudaIpcTransport, DeviceMemory
from sglang_ext.disagg.transports.local import CmaTransport, ShmTransport
from sglang_ext.disagg.transports.pinned import StagedTransport
from sglang_ext.disagg.transports.rails import Place
from sglang_ext.disagg.transports.tcp import TcpTransport
from sglang_ext.disagg.transports.verbs import GpuDirectTransport, VerbsTransport, verbs_reason

TCP_LANES = 8
"""Lanes of a tcp connection, unless configured: requests in flight share the way to a peer and back, where
one lane goes it for each of them."""
STAGED_LANES = 4
"""Lanes of other connections through pinned memory, unless configured."""
_CARRIERS: Final = frozenset({TransportName.SHM, TransportName.VERBS, TransportName.TCP})
"""Transports of host memory through which GPUs are reached by staging."""
NO_TRANSPORT: Final = "transport"
"""The reason of an owner's refusal that can use none of the transports offered."""


class TransportConfig(Protocol):
    """The settings that a transport may read."""

    @property
    def bind(self) -> str: ...
    @property
    def ports(self) -> Sequence[int]: ...
    @property
    def transports(self) -> Sequence[TransportName]: ...
    @property
    def lanes(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def place(self) -> Place: ...
    @property
    def rdma_devices(self) -> Sequence[str]: ...
    @property
    def device(self) -> DeviceMemory | None: ...
    @property
    def staging_bytes(self) -> int: ...


def make_transports(config: TransportConfig, regions: RegionTable) -> dict[TransportName, Transport]:
    """The transports of an endpoint in order of preference, also those that this host cannot use.

    Those give the reason in `unavailable`, are not offered, and cost nothing. Pools in GPU memory that a
    transport does not reach are staged for it; those that reach them come first.
    """
    names = tuple(config.transports) or TRIED
    staging = _staging(config, regions, names)
    seen = regions if staging is None else regions.on_host()
    made = {name: _make(name, config, regions, seen, staged=staging is not None) for name in names}
    if staging is None:
        return made
    asks = GatherTransport(staging, regions, seen, host_of(config.bind), config.ports)
    through = {name: StagedTransport(made.pop(name), regions, staging, asks) for name in _CARRIERS & {*names}}
    return made | {name: through[name] for name in names if name in through}


def _staging(
    config: TransportConfig, regions: RegionTable, names: Sequence[TransportName]
) -> PinnedArena | None:
    """The memory in which pools of the GPU are staged; None where none is needed, or no transport uses it."""
    in_gpu = any(region.kind is MemoryKind.CUDA for region in regions)
    if config.device is None or not in_gpu or not config.staging_bytes or not _CARRIERS & {*names}:
        return None
    return PinnedArena(regions, config.device, config.staging_bytes)


def _make(
    name: TransportName, config: TransportConfig, regions: RegionTable, seen: RegionTable, *, staged: bool
) -> Transport:
    """seen: the regions that a carrier of staged bytes sees."""
    # Lanes gather, carry and scatter at the same time.
    lanes = config.lanes or (STAGED_LANES if staged else 1)
    match name:
        case TransportName.SHM:
            return ShmTransport(seen, lanes)
        case TransportName.CMA:
            return CmaTransport(regions, config.lanes or 1)
        case TransportName.CUDA_IPC:
            return CudaIpcTransport(regions, config.lanes or 1, config.device)
        case TransportName.VERBS:
            return VerbsTransport(seen, lanes, config.rank, config.place, config.rdma_devices)
        case TransportName.TCP:
            return TcpTransport(seen, host_of(config.bind), config.lanes or TCP_LANES, config.ports)
        case TransportName.GPUDIRECT:
            lanes = config.lanes or 1
            return GpuDirectTransport(
                regions, lanes, config.rank, config.place, config.rdma_devices, config.device
            )


def reasons() -> dict[TransportName, str | None]:
    """Why this host cannot use each transport for pools in host memory, None where it can: `sglang-ext
    doctor` prints this."""
    regions = RegionTable()
    return {
        TransportName.SHM: ShmTransport(regions).unavailable(),
        TransportName.CMA: CmaTransport(regions).unavailable(),
        TransportName.CUDA_IPC: "for pools in GPU memory only: see `sglang-ext gpu-check`",
        TransportName.VERBS: verbs_reason(),
        TransportName.TCP: None if COMPILED else "numba is missing: pip install numba",
        TransportName.GPUDIRECT: "for pools in GPU memory, where --kv-transports names it; it has never run",
    }


def by_side(instance: str, reasons: Mapping[TransportName, str] | Mapping[str, str]) -> str:
    """The reasons of an instance against transports, to be appended to a sentence; empty without any."""
    if not reasons:
        return ""
    return f"; {instance}: " + "; ".join(f"{n}: {r.removeprefix(f'{n}: ')}" for n, r in reasons.items())


def way_out(regions: Iterable[Region | RegionMeta]) -> str | None:
    """The advice for regions in a GPU's memory that no transport carries; None where all are the host's."""
    if all(region.kind is MemoryKind.HOST for region in regions):
        return None
    return (
        "KV in GPU memory travels by cuda_ipc between servers on one host whose GPUs reach each other, and "
        "through pinned host memory by shm, verbs and tcp: allow one of them, with CUDA in this process and "
        "a memlock limit that lets it pin (ulimit -l unlimited). Without any, start servers without "
        "--disaggregation-mode: with --kv-router and --kv-dram-size they fetch each other's KV from DRAM"
    )


def require_transport(reasons: Mapping[TransportName, str | None], regions: RegionTable) -> None:
    """Refuse an endpoint that can use no transport with any peer, for its host or its regions.

    reasons: against each transport that is allowed; None for a usable one.

    Raises:
        TransportUnavailableError: with each reason, and the way out.
    """
    if any(reason is None for reason in reasons.values()):
        return
    against = "; ".join(f"{n}: {(r or '').removeprefix(f'{n}: ')}" for n, r in reasons.items())
    raise TransportUnavailableError(
        f"no transport can carry the KV of this server: {against}",
        field="--kv-transports",
        hint=way_out(regions) or "Allow others: not given, all are tried",
    )

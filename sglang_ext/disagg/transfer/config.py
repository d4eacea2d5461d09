"""How one rank takes part in transfers."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_ext.addresses import host_of, is_loopback
from sglang_ext.disagg.transfer.control import MemberKeys
from sglang_ext.disagg.transports import TransportName
from sglang_ext.disagg.transports.cuda_ipc import DeviceMemory
from sglang_ext.disagg.transports.pinned import STAGING_BYTES
from sglang_ext.disagg.transports.rails import NOWHERE, Place
from sglang_ext.errors import ConfigError


@dataclass(frozen=True)
class EndpointConfig:
    """How one rank takes part. Times in seconds.

    namespace: model, weights version, dtype and tenant salt, without the shard: ranks that cut the model
        another way have the same. Endpoints of other namespaces are refused.
    bind: address of the control plane and of `tcp`'s data connections, with a port of the control plane or
        without; beyond loopback only with `keys`. ports: for both where none is named: the first free port is
        taken; 0 is any. announce: the host that peers use to reach both; empty for `bind`'s.
    transports: the transports to use, best first; empty for all, in the order of TransportName.
    place: of this rank's accelerator: its RDMA adapter is the nearest. rdma_devices: named ones instead.
    device: this rank's GPU, for pools in its memory; None without one. staging_bytes: of pinned memory, in
        which such pools are staged where no transport reaches them itself; 0 for none.
    lanes: threads, and connections or queue pairs, per connected rank; 0 for one, and over tcp, where a lane
        waits for the network, for eight.
    piece_bytes: bytes that a lane moves at a time. inline_bytes: reads up to this are made by the event
        loop's own thread, if no lane is at work and the transport does not block (shm up to 32 MiB, cma
        16); 0 for never.
    verifications: lanes of all connections that may compare generations at a time.
    dead_after: a peer on this machine that is silent for so long is gone: its leases end, reads from it fail.
    far_after: the same of peers on other machines, where a network may fail over; 0 for `dead_after`.
    """

    instance: str
    namespace: str
    rank: int = 0
    bind: str = "127.0.0.1"
    ports: tuple[int, ...] = (0,)
    announce: str = ""
    keys: MemberKeys | None = None
    transports: tuple[TransportName, ...] = ()
    place: Place = NOWHERE
    rdma_devices: tuple[str, ...] = ()
    device: DeviceMemory | None = None
    staging_bytes: int = STAGING_BYTES
    lanes: int = 0
    piece_bytes: int = 8 << 20
    inline_bytes: int = 64 << 20
    coalescing: bool = True
    verifications: int = 8
    lease_ttl: float = 30.0
    grant_ttl: float = 30.0
    connect_timeout: float = 10.0
    heartbeat: float = 0.5
    dead_after: float = 2.0
    far_after: float = 0.0

    def patience(self, *, near: bool) -> float:
        """For how long a peer may be silent, in seconds. near: whether it is on this machine."""
        return self.dead_after if near or not self.far_after else self.far_after

    def __post_init__(self) -> None:
        if self.lanes < 0:
            raise ConfigError("lanes must be at least 0", field="lanes")
        for name in ("piece_bytes", "verifications"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", field=name)
        for name in ("lease_ttl", "grant_ttl", "connect_timeout", "heartbeat", "dead_after"):
            if not 0 < getattr(self, name) <= 3600:
                raise ConfigError(f"{name} must be above 0 and at most an hour", field=name)
        if self.keys is None and not is_loopback(host_of(self.bind)):
            raise ConfigError(f"will not listen on {self.bind} without a key", field="bind")
        if not 0 <= self.far_after <= 3600:
            raise ConfigError("far_after must be at least 0 and at most an hour", field="far_after")
        if self.dead_after < 2 * self.heartbeat:
            raise ConfigError("dead_after must be at least two heartbeats", field="dead_after")

"""The transfer backend `global`: SGLang's manager, sender, receiver and bootstrap over `disagg`.

SGLang's schedulers, queues and retraction stay as they are; a sender says at once that it may compute, and a
receiver says only when prefill is done that it may allocate (KVDirect, section 4.3). What happens between is
in `pd_agent`, on a thread of its own; SGLang polls.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
from dataclasses import dataclass
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import (
    BaseKVBootstrapServer,
    BaseKVManager,
    BaseKVReceiver,
    BaseKVSender,
    KVPoll,
    KVTransferDestination,
    KVTransferMetric,
)
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.runtime_context import get_parallel
from zmq.constants import POLLIN

from sglang_ext.cluster_key import read_cluster_key
from sglang_ext.config import KvConfig, with_instance_id
from sglang_ext.disagg.control import CurveKeys
from sglang_ext.disagg.errors import RefusedError
from sglang_ext.disagg.handover import Giving, Taking
from sglang_ext.disagg.memory import MemoryKind
from sglang_ext.disagg.pools import MemoryRange, PoolSpec
from sglang_ext.engine.hbm import pool_geometry, pool_planes
from sglang_ext.engine.model_identity import config_digest
from sglang_ext.engine.pd_agent import Agent, AgentConfig
from sglang_ext.engine.pd_bootstrap import BootstrapService, listen_host
from sglang_ext.engine.pd_giving import POOL, Room
from sglang_ext.engine.pd_peers import Local
from sglang_ext.engine.pd_taking import TakingRoom, Wanted, pages_of
from sglang_ext.errors import ConfigError

logger = logging.getLogger(__name__)

BACKEND = "global"
FLAG = f"--disaggregation-transfer-backend {BACKEND}"
IDLE_MILLISECONDS = 5
"""How long a scheduler that only waits for transfers sleeps at most before it looks again."""

_GIVING_POLL = {
    Giving.COMPUTING: KVPoll.WaitingForInput,
    Giving.COMPLETE: KVPoll.Transferring,
    Giving.OFFERED: KVPoll.Transferring,
    Giving.WRITING: KVPoll.Transferring,
    Giving.RELEASED: KVPoll.Success,
    Giving.LOST: KVPoll.Failed,
}
_TAKING_POLL = {
    Taking.JOINING: KVPoll.Bootstrapping,
    Taking.WAITING: KVPoll.Bootstrapping,
    Taking.READY: KVPoll.WaitingForInput,
    Taking.GRANTED: KVPoll.Transferring,
    Taking.READING: KVPoll.Transferring,
    # Its slots are in use until the transport has stopped, so SGLang must not take them back yet.
    Taking.STOPPING: KVPoll.Transferring,
    Taking.HELD: KVPoll.Success,
    Taking.FAILED: KVPoll.Failed,
}


@dataclass
class _Process:
    """What this process knows: the settings, and in a scheduler process the scheduler and its agent."""

    config: KvConfig | None = None
    scheduler: Any = None
    manager: GlobalKVManager | None = None


_process = _Process()


def configure(config: KvConfig, scheduler: Any = None) -> None:
    """Settings for the classes below, which SGLang constructs without any. Called by the patch."""
    _process.config = config
    if scheduler is not None:
        _process.scheduler = scheduler


def settings() -> KvConfig:
    """The settings of this process."""
    return _process.config or KvConfig.from_user({}, os.environ)


def keys_of(config: KvConfig) -> CurveKeys | None:
    """The cluster's CURVE pair, or None, with which nothing listens beyond loopback.

    Raises:
        ConfigError: the key file cannot be used.
    """
    path = getattr(config, "cluster_key_file", None)
    if not path:
        return None
    return CurveKeys(*read_cluster_key(path, field="--kv-cluster-key-file").curve_pair())


class MetadataBuffers:
    """SGLang's metadata buffers as rows of bytes: first token, log probabilities, counts."""

    def __init__(self, pointers: list[int], item_bytes: list[int]) -> None:
        self._buffers = list(zip(pointers, item_bytes, strict=True))
        self.row_bytes = sum(item_bytes)

    def read(self, row: int) -> bytes:
        """One row, buffer after buffer."""
        return b"".join(ctypes.string_at(at + row * size, size) for at, size in self._buffers)

    def write(self, row: int, metadata: bytes) -> None:
        """Fill one row. Its last buffer holds the room, by which SGLang sees that the row is complete.

        Raises:
            ValueError: it has another size.
        """
        if len(metadata) != self.row_bytes:
            raise ValueError(f"a metadata row has {self.row_bytes} bytes, got {len(metadata)}")
        start = 0
        for at, size in self._buffers:
            ctypes.memmove(at + row * size, metadata[start : start + size], size)
            start += size


class AnyPrefill:
    """SGLang asks here whether it knows a prefill server's layout; the agent finds out, without being waited
    for.
    """

    dp_size = 1
    follow_bootstrap_room = True

    def get(self, _address: str) -> AnyPrefill:
        return self


class GlobalKVManager(BaseKVManager):  # type: ignore[misc]
    """One rank's manager, on either side."""

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        self.kv_args = args
        self.disaggregation_mode = disaggregation_mode
        self.server_args = server_args
        self.prefill_info_table = AnyPrefill()
        scheduler = _process.scheduler
        if scheduler is None:
            raise RuntimeError(f"{FLAG}: the hook before Scheduler.init_disaggregation did not take")
        config = settings()
        require_supported(args, server_args)
        self.buffers = MetadataBuffers(args.aux_data_ptrs, args.aux_item_lens)
        self.page_bytes = sum(args.kv_item_lens)
        parallel = get_parallel()
        prefill = disaggregation_mode.value == "prefill"
        keys = keys_of(config)
        host = listen_host(server_args.host, keys)
        port = server_args.disaggregation_bootstrap_port
        self.agent = Agent(
            AgentConfig(
                str(with_instance_id(config, server_args, socket.gethostname()).instance_id),
                _namespace(scheduler, server_args),
                Local(parallel.attn_tp_rank, parallel.attn_tp_size, args.page_size, self.buffers.row_bytes),
                host=_reachable(host),
                keys=keys,
                bootstrap=f"{_reachable(host)}:{port}" if prefill else "",
                metrics=server_args.enable_metrics,
            ),
            _pool(scheduler, args.page_size),
            self.buffers,
        )
        _process.manager = self
        poller = getattr(getattr(scheduler, "idle_sleeper", None), "poller", None)
        if poller is not None:
            poller.register(self.agent.wake_fd, POLLIN)
        logger.info("KV transfer backend %s: %r", BACKEND, self.agent)

    def register_to_bootstrap(self) -> None:
        """The agent does, again and again."""

    def try_ensure_parallel_info(self, _address: str) -> bool:
        return True

    def submit_prefill_recompute(self, receiver: Any, payload: Any) -> None:
        raise NotImplementedError(f"{FLAG} does not support pause_generation(mode='retract') with requests")


class GlobalKVSender(BaseKVSender):  # type: ignore[misc]
    """Prefill's end of one request."""

    def __init__(
        self,
        mgr: GlobalKVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        dest_tp_ranks: list[int],
        pp_rank: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        self._pages: list[Any] = []
        self._row: int | None = None
        self._last = False
        self._error = ""
        self._room: Room | None = None
        try:
            self._room = mgr.agent.giving.open(bootstrap_room)
        except RefusedError as error:
            self._error = str(error)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self._row = aux_index

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        self._last = last_chunk
        return num_pages > 0 or last_chunk

    def send(
        self, kv_indices: Any, state_indices: list[Any] | None = None, num_kv_tokens: int | None = None
    ) -> None:
        """Pages of a chunk are computed; with the last one the request is offered."""
        self._pages.append(pages_of(kv_indices))
        if not self._last or self._room is None:
            return
        assert self._row is not None
        self.kv_mgr.agent.giving.complete(
            self._room, np.concatenate(self._pages), self.kv_mgr.buffers.read(self._row)
        )

    def poll(self) -> int:
        return int(KVPoll.Failed if self._room is None else _GIVING_POLL[self._room.state])

    def get_transfer_metric(self) -> KVTransferMetric:
        pages = sum(len(part) for part in self._pages)
        return KVTransferMetric(transfer_total_bytes=pages * self.kv_mgr.page_bytes)

    def failure_exception(self) -> None:
        """Raise why it failed. SGLang frees the slots next: nobody may read them as this request's then."""
        self.clear()
        raise KVTransferError(self.bootstrap_room, self._error or (self._room.reason if self._room else ""))

    def clear(self) -> None:
        if self._room is not None:
            self.kv_mgr.agent.giving.forget(self._room)

    def abort(self) -> None:
        if self._room is not None:
            self.kv_mgr.agent.giving.abort(self._room, "the request was aborted on prefill")


class GlobalKVReceiver(BaseKVReceiver):  # type: ignore[misc]
    """Decode's end of one request."""

    require_staging = False
    abort_notified = False

    def __init__(self, mgr: GlobalKVManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.kv_mgr = mgr
        self.bootstrap_addr = bootstrap_addr
        self.bootstrap_room = bootstrap_room
        self._room: TakingRoom | None = None

    def init(self, prefill_dp_rank: int) -> None:
        assert self.bootstrap_room is not None
        self._room = self.kv_mgr.agent.taking.open(self.bootstrap_addr, self.bootstrap_room)

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: Any = KVTransferDestination.DEVICE,
    ) -> None:
        """Slots are there: read into them what follows the prefix that is here already."""
        assert self._room is not None
        assert aux_index is not None
        skip, rest = divmod(decode_prefix_len or 0, self.kv_mgr.kv_args.page_size)
        assert rest == 0, "a cached prefix is whole pages"
        self.kv_mgr.agent.taking.read(self._room, Wanted(pages_of(kv_indices), skip, aux_index))

    def poll(self) -> int:
        return int(KVPoll.Bootstrapping if self._room is None else _TAKING_POLL[self._room.state])

    def failure_exception(self) -> None:
        """Raise why it failed, when nothing uses the slots any more: SGLang frees them next."""
        self.clear()
        raise KVTransferError(self.bootstrap_room, self._room.reason if self._room else "not started")

    def clear(self) -> None:
        if self._room is not None:
            self.kv_mgr.agent.taking.settle(self._room)

    def abort(self) -> None:
        if self._room is None:
            # It never began; from now on it polls as failed.
            assert self.bootstrap_room is not None
            self._room = TakingRoom(self.bootstrap_addr, self.bootstrap_room, Taking.FAILED, "aborted")
            return
        self.kv_mgr.agent.taking.abort(self._room, "the request was aborted on decode")

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """The agent tells prefill."""


class GlobalKVBootstrapServer(BaseKVBootstrapServer):  # type: ignore[misc]
    """The bootstrap port of a prefill server, in its HTTP process."""

    def __init__(self, host: str, port: int) -> None:
        self._service = BootstrapService(host, port, keys_of(settings()))

    def close(self) -> None:
        self._service.close()


def idle(scheduler: Any) -> None:
    """Nothing to compute: when only transfers are waited for, sleep until one moves or a request comes."""
    manager = _process.manager
    if manager is None or scheduler is not _process.scheduler:
        return
    poller = getattr(getattr(scheduler, "idle_sleeper", None), "poller", None)
    if poller is not None and not scheduler.is_fully_idle():
        poller.poll(IDLE_MILLISECONDS)
    manager.agent.slept()


def require_supported(args: Any, server_args: Any) -> None:
    """Refuse what this backend cannot move.

    Raises:
        ConfigError: naming it.
    """
    if args.state_types:
        raise ConfigError(
            f"does not move the state of this model's layers ({', '.join(map(str, args.state_types))})",
            field=FLAG,
            hint="Use another transfer backend",
        )
    for value, flag in (
        (server_args.pp_size, "--pp-size"),
        (server_args.dp_size, "--dp-size"),
        (server_args.nnodes, "--nnodes"),
    ):
        if value > 1:
            raise ConfigError(f"does not support {flag} above 1", field=FLAG, hint="Use --tp-size")
    if args.num_draft_entries:
        raise ConfigError(
            "does not move the KV of a draft model", field=FLAG, hint="Use --speculative-algorithm NGRAM"
        )


def _reachable(host: str) -> str:
    """An address that peers can use for a server that listens everywhere."""
    if host not in ("0.0.0.0", "::"):
        return host
    from sglang.srt.utils.network import get_local_ip_auto

    return str(get_local_ip_auto())


def _namespace(scheduler: Any, server_args: Any) -> str:
    """What prefill and decode must share, however each cuts the model."""
    dtype = scheduler.token_to_kv_pool_allocator.get_kvcache().dtype
    return f"{config_digest(scheduler.model_config.hf_config)} {server_args.weight_version} {dtype}"


def _pool(scheduler: Any, page_tokens: int) -> PoolSpec:
    """The engine's pool in pages, as peers may read it."""
    parallel = get_parallel()
    kvcache = scheduler.token_to_kv_pool_allocator.get_kvcache()
    planes = pool_planes(kvcache)
    geometry = pool_geometry(
        planes,
        block_tokens=page_tokens,
        page_tokens=page_tokens,
        first_layer=kvcache.start_layer,
        model_layers=scheduler.model_config.num_hidden_layers,
        tp_rank=parallel.attn_tp_rank,
        tp_size=parallel.attn_tp_size,
        model_kv_heads=scheduler.model_config.get_total_num_kv_heads(),
    )
    kind = MemoryKind.HOST if planes[0][0].device.type == "cpu" else MemoryKind.CUDA
    memory = [
        MemoryRange(plane.data_ptr(), plane.nbytes, kind, keep=plane) for layer in planes for plane in layer
    ]
    # Every request may be leased: its slots are held by the engine anyway.
    return PoolSpec.of_geometry(POOL, geometry, memory, lease_budget=geometry.slots)

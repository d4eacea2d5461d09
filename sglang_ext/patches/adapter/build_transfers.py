"""Puts together what moves a rank's KV to and from other servers: its transfer thread, and fetching by it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from zmq.error import ZMQError

from sglang_ext.addresses import bracketed, listen_host
from sglang_ext.config import KvConfig
from sglang_ext.disagg.handover import HEARTBEAT_SECONDS, LEASE_SECONDS, VERDICT_SECONDS
from sglang_ext.disagg.memory import MemoryKind
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.pools import PoolSpec
from sglang_ext.disagg.transfer.staging import Staging
from sglang_ext.disagg.transports import TransportName
from sglang_ext.disagg.transports.rails import NOWHERE, SYS, Place, pci_place
from sglang_ext.engine.model_identity import config_digest, kv_dtype
from sglang_ext.engine.movers.gpu_memory import GpuMemory
from sglang_ext.engine.moves.moves import Moves
from sglang_ext.engine.pd.messages import MESSAGES
from sglang_ext.engine.peers.arena_leases import ArenaLeases
from sglang_ext.engine.peers.fetch_link import FetchLink, peer_name
from sglang_ext.engine.peers.fetch_results import FetchResult
from sglang_ext.engine.peers.peer_kv import PeerKv
from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.tiers.promotions import Promotions
from sglang_ext.engine.tiers.write_down import WriteDown
from sglang_ext.engine.transfer_thread import HBM_POOL, TransferThread
from sglang_ext.engine.weights import Weights
from sglang_ext.errors import ConfigError, SglangExtError
from sglang_ext.geometry import Geometry
from sglang_ext.mempool.store import Store
from sglang_ext.patches.adapter.admission import BACKEND, HYBRID_POOLS, unexchanged
from sglang_ext.patches.adapter.hbm import Drafts, EnginePool
from sglang_ext.patches.adapter.hybrid.handed_over import handed_over_pools
from sglang_ext.patches.adapter.hybrid.pools import ComponentPool, ShareStates
from sglang_ext.patches.adapter.hybrid.sharing import convolution_of, of_states
from sglang_ext.patches.adapter.pd.pd_setup import keys_of, on_all_ranks
from sglang_ext.patches.process import PROCESS

logger = logging.getLogger(__name__)


def may_fetch(config: KvConfig, *, adapters: bool, stages: int = 1, contexts: int = 1) -> bool:
    """Whether a server, in whichever role, exchanges KV with peers: when a router can send it `Fetch`. Not
    where that is `unexchanged`.
    """
    exchanged = unexchanged(adapters=adapters, stages=stages, contexts=contexts) is None
    return config.router is not None and config.dram_size > 0 and exchanged


def hands_over(server_args: Any) -> bool:
    """Whether a server takes part in hand-overs by our transfer backend."""
    ours = server_args.disaggregation_mode != "null"
    return ours and bool(server_args.disaggregation_transfer_backend == BACKEND)


def returns_by_name(config: KvConfig, server_args: Any, *, adapters: bool) -> bool:
    """Whether blocks of a model with windows or states go back from decode to prefill, from DRAM to DRAM.

    Not with adapters, see `may_fetch`.
    """
    return hands_over(server_args) and config.pd_caching == "3" and config.dram_size > 0 and not adapters


def handover_settings(config: KvConfig, server_args: Any, page_tokens: int) -> dict[str, str]:
    """Settings besides the model that both halves of a pair must share; empty for a server in no pair."""
    if not hands_over(server_args):
        return {}
    return {
        "--page-size": str(page_tokens),
        "--kv-transfer-mode": config.transfer_mode,
        "--kv-transfer-layout": config.transfer_layout,
    }


def endpoint_config(
    config: KvConfig, server_args: Any, namespace: str, *, epoch: bytes, rank: int
) -> EndpointConfig:
    """How a rank takes part in transfers. namespace: see ``kv_namespace``.

    Raises:
        ConfigError: the cluster's key cannot be used.
    """
    keys = keys_of(config)
    listen = listen_host(server_args.host, keyed=keys is not None)
    return EndpointConfig(
        peer_name(str(config.instance_id), epoch),
        namespace,
        rank=rank,
        bind=bracketed(config.data_interface or listen),
        ports=config.port_range,
        announce=config.data_interface or (config.announce_host if keys is not None else None) or "",
        keys=keys,
        coalescing=config.transfer_coalescing == "on",
        transports=tuple(TransportName(name) for name in config.transports.split(",") if name),
        place=accelerator_place(server_args.device),
        rdma_devices=tuple(name.strip() for name in config.rdma_devices.split(",") if name.strip()),
        device=gpu_memory(server_args.device),
        lease_ttl=LEASE_SECONDS,
        heartbeat=HEARTBEAT_SECONDS,
        dead_after=VERDICT_SECONDS,
        far_after=max(VERDICT_SECONDS, config.silence),
    )


def gpu_memory(device: str) -> GpuMemory | None:
    """This rank's GPU, for transfers between processes on one host; None on a CPU."""
    if device != "cuda":
        return None
    from torch import cuda

    return GpuMemory(cuda.current_device())


def accelerator_place(device: str, root: Path = SYS) -> Place:
    """Where this rank's GPU is, as PCI and NUMA have it; on a CPU nowhere: it is the memory that counts."""
    if device != "cuda":
        return NOWHERE
    from torch import cuda

    found = cuda.get_device_properties(cuda.current_device())
    numbers: list[Any] = [getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in numbers:
        logger.warning("torch does not say where the GPU is: RDMA devices are taken by rank")
        return NOWHERE
    return pci_place("{:04x}:{:02x}:{:02x}.0".format(*numbers), root)


def kv_namespace(kvcache: Any, model_config: Any, drafts: Drafts) -> str:
    """The properties that servers must share to exchange KV, however each cuts the model: configuration and
    dtype, and the draft models. Their weights may change (``pd_setup.weights_of``).
    """
    return f"{config_digest(model_config.hf_config, *drafts.configs)} {kv_dtype(model_config, kvcache.dtype)}"


def start_transfers(
    endpoint: EndpointConfig,
    config: KvConfig,
    pool: EnginePool,
    memory: Sequence[PoolSpec] = (),
) -> TransferThread:
    """The transfer thread of a rank that hands over: over the engine's pool, and pools of memory beside it.

    Raises:
        ConfigError: the pool is on a device, and the layout `aggregated`. Also the errors of
            ``Endpoint.start``.
    """
    pools = [pool.spec(HBM_POOL), *memory]
    staging = staging_of(config, pool.pages, pool.kind)
    return TransferThread(endpoint, pools, staging=staging, messages=MESSAGES)


def staging_of(config: KvConfig, geometry: Geometry, kind: MemoryKind) -> Staging | None:
    """Where requests are packed; None with the layout `blocks`. geometry: of a pool, in pages.

    Raises:
        ConfigError: the pool is on a device.
    """
    if config.transfer_layout != "aggregated":
        return None
    if kind is not MemoryKind.HOST:
        raise ConfigError(
            "aggregated is for pools in host memory", field="--kv-transfer-layout", hint="Use blocks"
        )
    return Staging(geometry, config.transfer_staging_size)


def components_of(scheduler: Any, page_tokens: int) -> dict[str, ComponentPool]:
    """The pools of a model with windows or states that hand-overs move, as endpoints call them; none of
    another model.

    Raises:
        ConfigError: see ``handed_over_pools``.
    """
    allocator = scheduler.token_to_kv_pool_allocator
    if type(allocator.get_kvcache()).__name__ not in HYBRID_POOLS:
        return {}
    params = SimpleNamespace(
        token_to_kv_pool_allocator=allocator,
        page_size=page_tokens,
        req_to_token_pool=scheduler.req_to_token_pool,
    )
    states = states_shared(scheduler.model_config)
    return handed_over_pools(params, scheduler.sliding_window_size, Drafts(PROCESS.drafts), states)


def states_shared(model_config: Any) -> ShareStates:
    """How the ranks of this server share states."""
    return lambda mamba_pool: of_states(mamba_pool, convolution_of(model_config), engine_ranks())


def specs_of(components: Mapping[str, ComponentPool]) -> list[PoolSpec]:
    """Pools of this rank, as endpoints have them."""
    rank, ranks = engine_rank(), engine_ranks()
    return [pool.spec(name, rank, ranks) for name, pool in components.items()]


def transfers_of(
    scheduler: Any, config: KvConfig, page_tokens: int, components: Mapping[str, ComponentPool]
) -> TransferThread:
    """The transfer thread of a scheduler's rank; one of its own where its cache is SGLang's.

    Args:
        components: see `components_of`.
    """
    shared = getattr(scheduler.tree_cache, "transfers", None)  # of a cache of ours
    if isinstance(shared, TransferThread):
        return shared
    kvcache, drafts = scheduler.token_to_kv_pool_allocator.get_kvcache(), Drafts(PROCESS.drafts)
    endpoint = endpoint_config(
        config,
        scheduler.server_args,
        kv_namespace(kvcache, scheduler.model_config, drafts),
        epoch=secrets.token_bytes(16),
        rank=instance_rank(),
    )
    if components:
        return TransferThread(endpoint, specs_of(components), messages=MESSAGES)
    pool = EnginePool.of(
        kvcache,
        scheduler.model_config,
        drafts=drafts.pools,
        block_tokens=page_tokens,
        page_tokens=page_tokens,
    )
    return start_transfers(endpoint, config, pool)


def engine_rank() -> int:
    """This process's place among the ranks of its stage, in its replica."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().attn_tp_rank)


def engine_ranks() -> int:
    """The number of ranks of a stage, in a replica."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().attn_tp_size)


def context_rank() -> int:
    """This process's place among the ranks of its stage that have the same KV (``--attn-cp-size``)."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().attn_cp_rank)


def context_ranks() -> int:
    """How many ranks of a stage have the same KV: they share the tokens of a prompt while it is computed."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().attn_cp_size)


def instance_rank() -> int:
    """This process's place among the ranks of its instance, stage by stage."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().pp_rank * engine_ranks() + engine_rank())


def instance_ranks() -> int:
    """The number of ranks of this process's instance, of all stages."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().pp_size * engine_ranks())


def dp_rank() -> int | None:
    """The rank of this process's replica among those of its server; None for a server without replicas. With
    DP attention, the groups of ranks that share no KV are the replicas."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.attn_dp_size > 1:
        return int(parallel.attn_dp_rank)
    return None if parallel.dp_size == 1 else int(parallel.dp_rank)


def rank_on_server() -> int:
    """This process's place among the ranks of all stages of all replicas of its server."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    stage = (dp_rank() or 0) * parallel.pp_size + parallel.pp_rank
    context = stage * context_ranks() + context_rank()
    return int(context * engine_ranks() + engine_rank())


def in_step() -> bool:
    """Whether the passes of this process's replica are those of all replicas of its server (DP attention)."""
    from sglang.srt.runtime_context import get_parallel

    return bool(get_parallel().attn_dp_size > 1)


def start_fetching(endpoint: EndpointConfig, memory: Sequence[PoolSpec]) -> TransferThread | None:
    """The transfer thread of a rank that fetches and exports only; None where it cannot listen."""
    try:
        return TransferThread(endpoint, memory, messages=MESSAGES)
    except (SglangExtError, OSError, ZMQError) as error:
        logger.warning("KV is neither fetched from other instances nor exported to them: %s", error)
        return None


def on_all_ranks_or_none(
    transfers: TransferThread | None, group: Any
) -> tuple[TransferThread | None, tuple[str, ...]]:
    """This rank's thread, and the addresses of all ranks, if each has one. Called in every rank at once."""
    mine = "" if transfers is None else transfers.endpoint.address
    addresses = tuple(each.decode() for each in on_all_ranks(mine.encode(), group))
    if transfers is None or all(addresses):
        return transfers, addresses if all(addresses) else ()
    transfers.close()
    return None, ()


def make_peers(
    store: Store,
    write_down: WriteDown,
    transfers: TransferThread,
    weights: Weights,
    ranks: Ranks,
    moves: Moves,
    *,
    endpoints: int,
    below: Sequence[Promotions] = (),
    on_result: Callable[[FetchResult], None] = lambda result: None,
) -> PeerKv:
    """The `PeerKv` of a rank whose instance has so many endpoints."""
    return PeerKv(
        store,
        write_down,
        ArenaLeases(transfers),
        FetchLink(transfers),
        ranks,
        moves,
        namespace=weights.namespace,
        below=below,
        fresh=lambda: weights.as_started,
        on_result=on_result,
        rank=transfers.endpoint.config.rank,
        endpoints=endpoints,
    )

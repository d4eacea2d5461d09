"""What the backend `global` learns from SGLang when it starts: pool, metadata rows, names, limits."""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import msgspec
import torch
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_parallel

from sglang_ext.cluster_key import read_cluster_key
from sglang_ext.config import KvConfig
from sglang_ext.disagg.transfer.control import MemberKeys
from sglang_ext.disagg.transfer.pools import PoolSpec
from sglang_ext.engine.cache.mempool import SlotRegion
from sglang_ext.engine.model_identity import config_digest, element_sums, kv_dtype, model_digest
from sglang_ext.engine.pd.leases import POOL
from sglang_ext.engine.pd.pushing import LayerFeed
from sglang_ext.engine.pd.reservations import DRAM_POOL
from sglang_ext.engine.pd.staging import Staging
from sglang_ext.errors import ConfigError
from sglang_ext.geometry import Geometry
from sglang_ext.patches.adapter.hbm import pool_geometry, pool_planes
from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache
from sglang_ext.patches.adapter.support import unsupported_parallelism
from sglang_ext.tiered_store.dram.arena import DramArena

BACKEND = "global"
FLAG = f"--disaggregation-transfer-backend {BACKEND}"

log = logging.getLogger(__name__)


def keys_of(config: KvConfig) -> MemberKeys | None:
    """The cluster's keys, or None, with which nothing listens beyond loopback.

    Raises:
        ConfigError: the key file cannot be used.
    """
    path = getattr(config, "cluster_key_file", None)
    if not path:
        return None
    return read_cluster_key(path, field="--kv-cluster-key-file")


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


def require_supported(args: Any, server_args: Any, parallel: Any) -> None:
    """Refuse what this backend cannot move.

    Args:
        args: SGLang's ``KVArgs``.
        server_args: the server's.
        parallel: SGLang's ``get_parallel()``, which knows what has become of the flags.

    Raises:
        ConfigError: naming it.
    """
    if args.state_types:
        raise ConfigError(
            f"does not move the state of this model's layers ({', '.join(map(str, args.state_types))})",
            field=FLAG,
            hint="Use another transfer backend",
        )
    reason = unsupported_parallelism(
        FLAG,
        dp_size=parallel.dp_size,
        attn_dp_size=parallel.attn_dp_size,
        attn_cp_size=parallel.attn_cp_size,
    )
    if reason is not None:
        raise ConfigError(reason)
    for value, flag in (
        (server_args.pp_size, "--pp-size"),
        (server_args.nnodes, "--nnodes"),
    ):
        if value > 1:
            raise ConfigError(f"does not support {flag} above 1", field=FLAG, hint="Use --tp-size")
    if envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get():
        raise ConfigError(
            "registers the whole pool, of which SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1 backs a part",
            field=FLAG,
            hint="Unset that variable",
        )
    if args.num_draft_entries:
        raise ConfigError(
            "does not move the KV of a draft model", field=FLAG, hint="Use --speculative-algorithm NGRAM"
        )


def watch_layers(kvcache: Any, feed: LayerFeed) -> None:
    """Tell a feed whenever the pool is about to be given a layer's KV.

    Raises:
        ConfigError: the pool is on a device, where a layer that was launched is not yet written.
    """
    if kvcache.device != "cpu":
        raise ConfigError(
            "push-by-layer is for pools in host memory",
            field="--kv-transfer-mode",
            hint="Use pull, or push",
        )
    for name in ("set_kv_buffer", "set_mla_kv_buffer"):
        stock = getattr(kvcache, name, None)
        if stock is None:
            continue

        def told(layer: Any, *args: Any, _stock: Any = stock, **kwargs: Any) -> Any:
            feed.layer_begins(layer.layer_id)
            return _stock(layer, *args, **kwargs)

        setattr(kvcache, name, told)


def reachable(host: str) -> str:
    """An address that peers can use for a server that listens everywhere."""
    if host not in ("", "0.0.0.0", "::"):
        return host
    from sglang.srt.utils.network import get_local_ip_auto

    return str(get_local_ip_auto())


def namespace_of(scheduler: Any) -> str:
    """What prefill and decode must share from start to end, however each cuts the model: configuration and
    dtype. Their weights may change (``weights_of``).
    """
    dtype = scheduler.token_to_kv_pool_allocator.get_kvcache().dtype
    config = config_digest(scheduler.model_config.hf_config)
    return f"{config} {kv_dtype(scheduler.model_config, dtype)}"


def weights_of(scheduler: Any) -> str:
    """The digest of the whole model's weights as they are now. Called in all ranks at once, and never raises:
    empty where a rank cannot read its part.
    """
    try:
        sums = dict(element_sums(scheduler.tp_worker.model_runner.model))
    except Exception:
        log.exception("the weights cannot be read; no KV is exchanged until they are updated")
        sums = {}
    data = msgspec.json.encode({name: [str(part) for part in sum_] for name, sum_ in sums.items()})
    ranks = [msgspec.json.decode(each) for each in _on_all_ranks(scheduler, data)]
    if not all(ranks):
        return ""
    return model_digest([{name: (int(s), int(n)) for name, (s, n) in rank.items()} for rank in ranks])


def _on_all_ranks(scheduler: Any, data: bytes) -> list[bytes]:
    """What each rank says, in the order of ranks."""
    ranks = get_parallel().attn_tp_size
    if ranks == 1:
        return [data]
    group = scheduler.attn_tp_cpu_group
    longest = torch.tensor([len(data)])
    torch.distributed.all_reduce(longest, op=torch.distributed.ReduceOp.MAX, group=group)
    # Spaces after JSON say nothing.
    mine = torch.frombuffer(bytearray(data.ljust(int(longest))), dtype=torch.uint8)
    said = [torch.zeros_like(mine) for _ in range(ranks)]
    torch.distributed.all_gather(said, mine, group=group)
    return [each.numpy().tobytes() for each in said]


def first_rank_address(scheduler: Any, address: str) -> str:
    """The first rank's address, told to all ranks; ``address`` is this one's."""
    parallel = get_parallel()
    if parallel.attn_tp_size == 1:
        return address
    text = torch.zeros(256, dtype=torch.uint8)
    if parallel.attn_tp_rank == 0:
        data = address.encode()
        text[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    torch.distributed.all_reduce(text, op=torch.distributed.ReduceOp.MAX, group=scheduler.attn_tp_cpu_group)
    return bytes(text.tolist()).rstrip(b"\0").decode()


def _geometry(scheduler: Any, page_tokens: int, block_tokens: int | None = None) -> Geometry:
    parallel = get_parallel()
    kvcache = scheduler.token_to_kv_pool_allocator.get_kvcache()
    return pool_geometry(
        pool_planes(kvcache),
        block_tokens=block_tokens or page_tokens,
        page_tokens=page_tokens,
        first_layer=kvcache.start_layer,
        model_layers=scheduler.model_config.num_hidden_layers,
        tp_rank=parallel.attn_tp_rank,
        tp_size=parallel.attn_tp_size,
        model_kv_heads=scheduler.model_config.get_total_num_kv_heads(),
    )


def staging_of(scheduler: Any, page_tokens: int, config: KvConfig) -> Staging | None:
    """Where requests are packed; None with the layout `blocks`.

    Raises:
        ConfigError: the pool is on a device.
    """
    if config.transfer_layout != "aggregated":
        return None
    if scheduler.token_to_kv_pool_allocator.get_kvcache().device != "cpu":
        raise ConfigError(
            "aggregated is for pools in host memory",
            field="--kv-transfer-layout",
            hint="Use blocks",
        )
    return Staging(_geometry(scheduler, page_tokens), config.transfer_staging_size)


def arena_pool(scheduler: Any, cache: GlobalRadixCache) -> PoolSpec | None:
    """The cache's DRAM arena, as what comes back may be read into it; None where it has none."""
    arena = cache.dram.arena if cache.dram is not None else None
    if not isinstance(arena, DramArena):
        return None
    geometry = _geometry(scheduler, cache.page_size, cache.block_size)
    return PoolSpec.of_arena(DRAM_POOL, geometry, arena)


def pool_of(scheduler: Any, page_tokens: int) -> PoolSpec:
    """The engine's pool in pages, as peers may read it."""
    geometry = _geometry(scheduler, page_tokens)
    planes = pool_planes(scheduler.token_to_kv_pool_allocator.get_kvcache())
    return SlotRegion(planes, geometry.layout, page_tokens=page_tokens).spec(POOL, geometry)

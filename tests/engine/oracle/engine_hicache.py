"""Stores as SGLang's HiCache writes them: by its own file backend, hashes, key scheme and host pools.

HiCache itself does not run on a CPU. So the bytes of a page come from the page methods of its host pools,
over a buffer of the shape that they give it. As a program, this module writes the store that a file of
`tests.support.hicache` asks for. It needs SGLang 0.5.23.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

if __name__ == "__main__":  # SGLang cannot be imported on a CPU before
    from sglang_ext.patches.cpu import runtime

    runtime.prepare_process(os.environ)

import torch
from sglang.srt.mem_cache.hicache_key_scheme import derive_namespace, namespace_digest
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from tests.support.hicache import HiCacheServer


def page(server: HiCacheServer, rows: npt.NDArray[np.uint8]) -> Any:
    """A page as the host pool gives it to the file backend.

    Args:
        rows: shape (planes, layers, tokens, bytes).
    """
    data = torch.from_numpy(np.ascontiguousarray(rows))
    heads = max(server.heads, 1)
    data = data.reshape(*rows.shape[:3], heads, server.row_bytes // heads)
    if server.order == "page_unified":
        # Its pool leaves pages to others than the file backend: the shape is that of `page_dims`.
        return data.transpose(0, 1).contiguous().flatten()
    if server.order == "page_first":
        data = data.transpose(1, 2)
    elif server.order == "page_first_direct":
        data = data.unsqueeze(1)
    pool = SimpleNamespace(layout=server.order, page_size=server.page_tokens)
    pool._storage_page_index = lambda index: index
    pool.kv_buffer = data.contiguous() if server.heads else data[0].contiguous()
    kind = MHATokenToKVPoolHost if server.heads else MLATokenToKVPoolHost
    return kind.get_data_page(pool, 0, flat=True)


def backend(server: HiCacheServer) -> Any:
    """SGLang's file backend of this rank."""
    config = HiCacheStorageConfig(
        tp_rank=server.tp_rank,
        tp_size=server.tp_size,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=not server.heads,
        enable_storage_metrics=False,
        is_page_first_layout=server.order == "page_first",
        model_name=server.model,
    )
    return HiCacheFile(config, str(server.folder))


def coordinate(server: HiCacheServer) -> str:
    """The text after the hash in a key of the unified scheme; empty in other orders."""
    if server.order != "page_unified":
        return ""
    space = derive_namespace(
        model_id=server.model,
        dtype=server.dtype,
        page_size=server.page_tokens,
        rank_replicated=not server.heads,
        total_kv_heads=server.heads * server.tp_size,
        head_group=server.heads,
    )
    group = f"_H{server.tp_rank}" if server.heads else ""
    return f"_{namespace_digest(space)}_L0-{server.layers}{group}"


def write(
    server: HiCacheServer, tokens: list[int], kv: npt.NDArray[np.uint8], extra_key: str | None = None
) -> list[str]:
    """Write the whole pages of a prompt; returns their keys.

    Args:
        kv: shape (planes, layers, tokens, bytes).
    """
    store, step = backend(server), server.page_tokens
    whole = kv.shape[2] // step * step
    key = RadixKey(tokens[:whole], extra_key=extra_key)
    names = [name + coordinate(server) for name in get_storage_hash_str(key, page_size=step)]
    for index, name in enumerate(names):
        assert store.set(name, page(server, kv[:, :, index * step : (index + 1) * step]))
    return names


if __name__ == "__main__":
    write(*pickle.loads(Path(sys.argv[1]).read_bytes()))

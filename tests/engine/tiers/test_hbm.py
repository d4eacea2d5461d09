"""SGLang's pools as planes: the supported pools, and whether the geometry describes where their rows lie."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from engine_pools import PoolKind, Pools
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import FP4MXBlock16KVCacheMethod
from sglang.srt.mem_cache.memory_pool import (
    MHATokenToKVPool,
    MHATokenToKVPoolFP4,
    MHATokenToKVPoolMXFP8,
    MLATokenToKVPool,
    MLATokenToKVPoolFP4,
    NoOpMHATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_ext.disagg.tensors import PoolMeta, pool_strided, shard_tuple, tensors_of
from sglang_ext.errors import ConfigError
from sglang_ext.geometry import Geometry, PlaneKind
from sglang_ext.patches.adapter.hbm import pool_geometry, pool_planes

pytestmark = pytest.mark.usefixtures("sglang_config")

SLOTS = 32
COMMON = {"size": SLOTS, "page_size": 1, "layer_num": 2, "device": "cpu", "enable_memory_saver": False}
MHA = {**COMMON, "dtype": torch.bfloat16, "head_num": 2, "head_dim": 32}
MLA = {**COMMON, "dtype": torch.bfloat16, "kv_lora_rank": 16, "qk_rope_head_dim": 16}


def geometry_of(planes: list[list[torch.Tensor]], **changes: Any) -> Geometry:
    facts = {
        "block_tokens": 16,
        "page_tokens": 1,
        "first_layer": 0,
        "model_layers": len(planes),
        "tp_rank": 0,
        "tp_size": 1,
        "model_kv_heads": 2,
    }
    return pool_geometry(planes, **{**facts, **changes})


KINDS = {
    "mha": [PlaneKind.K, PlaneKind.V],
    "mla": [PlaneKind.LATENT],
    "dsa": [PlaneKind.LATENT, PlaneKind.INDEX],
}


def test_index_keys_of_a_page_are_the_rows_of_its_slots() -> None:
    """The last layer uses the choice of the one before, and has no index keys."""
    pools = Pools(PoolKind("dsa", 64, 3), 128, block=64, rows=1, context=8)
    geometry = pools.geometry()
    planes = [geometry.layer_planes(layer) for layer in range(3)]
    assert [[plane.kind for plane in layer] for layer in planes] == [KINDS["dsa"], KINDS["dsa"], KINDS["mla"]]
    pages = pools.kvcache.index_k_with_scale_buffer[1]
    pages.copy_(torch.randint(0, 256, pages.shape, dtype=torch.uint8))
    index = planes[1][1]
    for page in range(geometry.slots // 64):
        rows = ctypes.string_at(index.address + page * 64 * index.slot_stride, 64 * index.row_bytes)
        assert rows == pages[page].numpy().tobytes()


def test_layers_of_a_draft_follow_those_of_the_model() -> None:
    draft = MHATokenToKVPool(**{**MHA, "head_num": 1, "head_dim": 8, "layer_num": 1})
    planes = [*pool_planes(MHATokenToKVPool(**MHA)), *pool_planes(draft)]
    geometry = geometry_of(planes, tp_rank=1, tp_size=2, model_kv_heads=4)
    assert [plane.layer for plane in geometry.planes] == [0, 0, 1, 1, 2, 2]
    assert (geometry.shard.first_head, geometry.shard.heads, geometry.shard.model_layers) == (2, 2, 3)
    assert geometry.layout.layers[2] == (16, 16)
    pool = PoolMeta("hbm", 2, 16, tensors_of(geometry), shard_tuple(geometry.shard), 0)
    assert [each.first_head for each in pool_strided(pool)] == [2, 2, 2, 2, 1, 1]


@pytest.mark.parametrize("heads", [1, 4], ids=["divided", "replicated"])
def test_ranks_that_share_the_draft_otherwise_are_refused(heads: int) -> None:
    """The model's two heads are on four ranks, twice each."""
    planes = pool_planes(MHATokenToKVPool(**{**MHA, "head_num": 1}))
    draft = pool_planes(MHATokenToKVPool(**{**MHA, "head_num": heads}))
    if heads == 1:
        geometry_of(planes + draft, tp_size=4)
        return
    with pytest.raises(ConfigError, match="draft model"):
        geometry_of(planes + draft, tp_size=4)


@pytest.mark.parametrize("kind", [PoolKind("mha", 1, 3, 2), PoolKind("mla", 16, 2, 0)], ids=str)
def test_rows_lie_where_the_geometry_says(kind: PoolKind) -> None:
    """Every slot of every plane, read through address and stride as a transfer would."""
    pools = Pools(kind, SLOTS, block=16, rows=1, context=8)
    for layer in pools.tensors:
        for plane in layer:
            plane.copy_(torch.randn(plane.shape))
    geometry = pools.geometry()
    assert geometry.slots == SLOTS + kind.page
    assert geometry.n_layers == kind.layers
    assert geometry.shard.first_layer == kind.start_layer
    buffers = (
        list(zip(pools.kvcache.k_buffer, pools.kvcache.v_buffer, strict=True))
        if kind.attention == "mha"
        else [(latent,) for latent in pools.kvcache.kv_buffer]
    )
    for layer in range(kind.layers):
        described = geometry.layer_planes(layer)
        assert [plane.kind for plane in described] == KINDS[kind.attention]
        for plane, buffer in zip(described, buffers[layer], strict=True):
            for slot in range(geometry.slots):
                row = ctypes.string_at(plane.address + slot * plane.slot_stride, plane.row_bytes)
                assert row == buffer[slot].contiguous().view(torch.uint8).numpy().tobytes()


def test_keys_and_values_may_differ_in_size() -> None:
    geometry = Pools(PoolKind("mha"), SLOTS, block=16, rows=1, context=8).geometry()
    assert geometry.layout.row_bytes == (2 * 4 * 4, 2 * 6 * 4) * 2


@pytest.mark.parametrize(
    ("tp_size", "model_heads", "local_heads", "expected"),
    [
        (1, 8, 8, [(0, 8, 8)]),
        (4, 8, 2, [(0, 2, 8), (2, 2, 8), (4, 2, 8), (6, 2, 8)]),
        (4, 2, 1, [(0, 1, 2), (0, 1, 2), (1, 1, 2), (1, 1, 2)]),
    ],
    ids=["whole", "divided", "replicated"],
)
def test_each_rank_knows_its_heads(
    tp_size: int, model_heads: int, local_heads: int, expected: list[tuple[int, int, int]]
) -> None:
    planes = pool_planes(MHATokenToKVPool(**{**MHA, "head_num": local_heads}))
    shards = [
        geometry_of(planes, tp_rank=rank, tp_size=tp_size, model_kv_heads=model_heads).shard
        for rank in range(tp_size)
    ]
    assert [(shard.first_head, shard.heads, shard.model_heads) for shard in shards] == expected


def test_kinds_of_float8_are_distinguished() -> None:
    """SGLang stores both as bytes; their KV must not be taken for each other's."""
    for arguments, pool in ((MHA, MHATokenToKVPool), (MLA, MLATokenToKVPool)):
        digests = set()
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            kvcache = pool(**{**arguments, "dtype": dtype})
            planes = pool_planes(kvcache)
            assert planes[0][0].dtype == dtype
            stored = kvcache.k_buffer if pool is MHATokenToKVPool else kvcache.kv_buffer
            assert planes[1][0].data_ptr() == stored[1].data_ptr()
            digests.add(geometry_of(planes).digest())
        assert len(digests) == 2


@pytest.mark.parametrize(
    ("pool", "arguments", "named"),
    [
        (MHATokenToKVPoolFP4, MHA, "MHATokenToKVPoolFP4"),
        (MHATokenToKVPoolMXFP8, {**MHA, "dtype": torch.float8_e4m3fn}, "MHATokenToKVPoolMXFP8"),
        (NoOpMHATokenToKVPool, MHA, "NoOpMHATokenToKVPool"),
        (MLATokenToKVPoolFP4, MLA, "MLATokenToKVPoolFP4"),
        (MHATokenToKVPool, {**MHA, "kv_cache_layout": "hnd"}, "layout 'hnd'"),
        (MHATokenToKVPool, {**MHA, "quant_method": FP4MXBlock16KVCacheMethod()}, "--kv-cache-dtype auto"),
        (
            SWAKVPool,
            {
                **{name: value for name, value in MHA.items() if name not in ("layer_num",)},
                "size_swa": 16,
                "swa_attention_layer_ids": [0],
                "full_attention_layer_ids": [1],
            },
            "SWAKVPool",
        ),
    ],
)
def test_other_pools_are_refused_by_name(pool: type[Any], arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        pool_planes(pool(**arguments))
    assert named in str(refused.value)
    assert refused.value.field == "--radix-cache-backend global"
    assert "SGLang's own cache" in str(refused.value.hint)

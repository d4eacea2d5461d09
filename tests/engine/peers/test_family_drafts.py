"""Draft models of each algorithm, and beside models with experts or pictures: every row that the draft reads,
from HBM, DRAM, disk and from another server.

SGLang makes the pools itself, from the configurations of a model and of its draft. Experts have no KV, and a
picture's KV is that of its tokens: the pools are those of a dense model, with heads (GQA) or latents (MLA).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engine_configured import Checkpoint, ConfiguredKind
from engine_pools import PoolKind, WrongKvError
from engine_scheduler import Settings
from engine_simulation import Rank, Scenario, run
from engine_verifying import VerifyingScheduler
from peer_rig import MakeServer, Server, fetched, forget, lend_and_fetch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_ext.patches.adapter.admission import Facts
from sglang_ext.patches.adapter.families import TABLE
from sglang_ext.patches.adapter.hbm import pool_planes
from sglang_ext.patches.model_check import _family
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier, Get, Ids, LayerRead
from sglang_ext.tiered_store.wrapped import WrappedTier

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

BLOCK, BLOCKS = 16, 6
LAYERS = 3
"""Of a model in these tests; heads, latents and drafts are as in the published configurations."""
_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}


def of_glm(layers: int) -> Checkpoint:
    """GLM-4.5, whose files have one MTP layer."""
    more = {"num_attention_heads": 96, "num_nextn_predict_layers": 1, "num_hidden_layers": layers}
    return Checkpoint("glm4_moe", "Glm4MoeForCausalLM", _HEADS | more)


def of_deepseek(layers: int) -> Checkpoint:
    """DeepSeek-V3, whose files have one MTP layer (NextN)."""
    more = {"num_nextn_predict_layers": 1, "num_hidden_layers": layers}
    return Checkpoint("deepseek_v3", "DeepseekV3ForCausalLM", more)


def of_qwen(layers: int) -> Checkpoint:
    """Qwen3-VL-8B."""
    return Checkpoint("qwen3_vl", "Qwen3VLForConditionalGeneration", _HEADS | {"num_hidden_layers": layers})


EAGLE3 = Checkpoint("llama", "LlamaForCausalLMEagle3", _HEADS | {"num_hidden_layers": 1})
"""One layer, fed with hidden states of three layers of the model."""
KINDS = {
    "gqa-moe": ConfiguredKind("mha", 1, LAYERS, draft_layers=1, model=of_glm(LAYERS), draft=of_glm(LAYERS)),
    "mla-moe": ConfiguredKind(
        "mla", 16, LAYERS, draft_layers=1, model=of_deepseek(LAYERS), draft=of_deepseek(LAYERS)
    ),
    "vision": ConfiguredKind(
        "mha", 1, LAYERS, draft_layers=1, model=of_qwen(LAYERS), draft=EAGLE3, algorithm="EAGLE3"
    ),
}
_BESIDE_QWEN = ("qwen3", "Qwen3ForCausalLM", _HEADS | {"num_hidden_layers": LAYERS})
QWEN = Checkpoint(*_BESIDE_QWEN)
"""Qwen3-8B."""


def beside_qwen(algorithm: str, draft: Checkpoint | None, layers: int) -> ConfiguredKind:
    return ConfiguredKind("mha", 1, LAYERS, draft_layers=layers, model=QWEN, draft=draft, algorithm=algorithm)


def of_five_layers(architecture: str) -> Checkpoint:
    """A draft that proposes a block of tokens at once, of the hidden states of some layers of Qwen3-8B."""
    return Checkpoint("qwen3", architecture, _HEADS | {"num_hidden_layers": 5})


KINDS |= {
    "EAGLE3": beside_qwen("EAGLE3", EAGLE3, 1),
    "EAGLE3, latents": ConfiguredKind(
        "mla",
        16,
        LAYERS,
        draft_layers=1,
        model=of_deepseek(LAYERS),
        draft=Checkpoint(
            "deepseek_v3",
            "Eagle3DeepseekV2ForCausalLM",
            {"num_nextn_predict_layers": 0, "num_hidden_layers": 1},
        ),
        algorithm="EAGLE3",
    ),
    "DFLASH": beside_qwen("DFLASH", of_five_layers("DFlashDraftModel"), 5),
    "DSPARK": beside_qwen("DSPARK", of_five_layers("Qwen3DSparkModel"), 5),
    "FROZEN_KV_MTP": beside_qwen("FROZEN_KV_MTP", None, 0),
}
DRAFTS = pytest.mark.parametrize("family", KINDS)
FAMILIES = pytest.mark.parametrize("family", ["gqa-moe", "mla-moe", "vision"])
SHAPES: dict[str, tuple[Callable[[int], Checkpoint], int, list[tuple[int, ...]]]] = {
    "gqa-moe": (of_glm, 92, [(8, 128), (8, 128)]),
    "mla-moe": (of_deepseek, 61, [(1, 512 + 64)]),
    "vision": (of_qwen, 36, [(8, 128), (8, 128)]),
}
"""The layers of the published models, and the row of a token in each plane of a layer."""


def scenario(family: str, **more: Any) -> Scenario:
    sizes: dict[str, Any] = {"hbm_tokens": 20 * BLOCK, "dram_blocks": 60, "disk_blocks": 200} | more
    return Scenario(
        family,
        KINDS[family],
        BLOCK,
        make_scheduler=VerifyingScheduler,
        settings=Settings(chunk=48, new_token_ratio=0.05),
        **sizes,
    )


def prompt_of(family: str) -> list[int]:
    """Six blocks and a token; with pictures, two of them, whose tokens are digests of the pictures."""
    tokens = [at % 5 for at in range(BLOCKS * BLOCK + 1)]
    if family == "vision":
        tokens[20:50] = [(1 << 60) + 77] * 30
        tokens[60:90] = [(1 << 60) + 78] * 30
    return tokens


def server_of(make_server: MakeServer, family: str, **more: Any) -> Server:
    """A tree has digests in place of a picture's tokens, so that forward passes alone compare its rows."""
    server = make_server(scenario(family), **more)
    server.rank.look_inside = family != "vision"
    return server


def ask(server: Server, tokens: list[int]) -> Req:
    """A request with an answer of some passes, which needs the prompt's last block again."""
    return server.finish(server.rank.scheduler.submit([*tokens, 3, 1], new_tokens=30))


# -- pools ------------------------------------------------------------------------------------------


@FAMILIES
def test_the_pools_are_those_of_the_family_without_experts_or_pictures(family: str) -> None:
    """The published model with all its layers: SGLang's pool is the one of dense models, and the draft's has
    rows of the same slots."""
    made, layers, rows = SHAPES[family]
    published, kind, page = made(layers), KINDS[family], KINDS[family].page
    config = published.config()
    assert _family(config, Facts()) is TABLE[family]
    pool = published.pool(4 * page, page, algorithm=kind.algorithm)
    assert type(pool) is type(PoolKind(kind.attention).build(4))
    (draft,) = kind.build_drafts(4 * page)
    assert len(pool_planes(pool)) == layers
    assert len(pool_planes(draft)) == 1
    slots = 4 * page + page
    for planes in (*pool_planes(pool), *pool_planes(draft)):
        assert [(len(each), *each.shape[1:]) for each in planes] == [(slots, *row) for row in rows]
        assert all(each.dtype == torch.bfloat16 for each in planes)


# -- rows -------------------------------------------------------------------------------------------


@DRAFTS
def test_every_row_of_a_draft_from_hbm_dram_disk_and_a_peer_is_right(
    make_server: MakeServer, family: str
) -> None:
    owner, reader = server_of(make_server, family), server_of(make_server, family)
    rank, tokens, known = owner.rank, prompt_of(family), BLOCKS * BLOCK
    owner.serve(tokens)
    in_hbm = ask(owner, tokens)
    assert (in_hbm.cached_tokens_device, in_hbm.cached_tokens_host) == (known, 0)
    rank.settle()
    rank.cache.evict(EvictParams(num_tokens=rank.pools.tokens))
    assert (ask(owner, tokens).cached_tokens, rank.scheduler.loaded_tokens) == (known, known)
    assert rank.scheduler.disk_tokens == 0
    forget(owner)
    assert ask(owner, tokens).cached_tokens == rank.scheduler.disk_tokens == known
    owner.settle()
    lend_and_fetch(owner, reader, tokens)
    fetched(reader)
    assert reader.in_dram(tokens) == known
    assert ask(reader, tokens).cached_tokens == known
    assert reader.peers.fetches.counters.fetched_blocks == BLOCKS
    assert rank.scheduler.drafted > 30
    owner.passes_until(lambda: not owner.peers.busy, "the lease to end")


@FAMILIES
def test_every_row_of_a_draft_is_right_in_traffic(family: str) -> None:
    """Random requests over a DRAM that evicts and over a disk."""
    with Rank(scenario(family, dram_blocks=16, memory=20), pace=random.Random(1)) as rank:
        run(rank, 1, 70)
        assert len(rank.scheduler.finished) > 10
        assert rank.scheduler.drafted > 50
        assert rank.scheduler.disk_tokens > 0


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize("seed", range(3))
@DRAFTS
def test_every_row_of_a_draft_is_right_in_traffic_for_long(family: str, seed: int, overlap: bool) -> None:
    busy = scenario(family, dram_blocks=16, memory=20, threaded=True, prefetch=0.2, stream=seed == 1)
    busy = dataclasses.replace(busy, settings=dataclasses.replace(busy.settings, overlap=overlap))
    with Rank(busy) as rank:
        run(rank, 30 + seed, 300)
        assert len(rank.scheduler.finished) > 30


def test_another_picture_of_the_same_size_is_not_found(make_server: MakeServer) -> None:
    server, tokens = server_of(make_server, "vision"), prompt_of("vision")
    server.serve(tokens)
    tokens[60:90] = [(1 << 60) + 79] * 30
    assert ask(server, tokens).cached_tokens == 60 // BLOCK * BLOCK


# -- twins ------------------------------------------------------------------------------------------


class DamagesDrafts(WrappedTier):
    """Hands over one wrong byte of a draft's row and reports success."""

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        read = super().get_layer(get, layer, memory, ids)
        if layer == LAYERS and read.blocks:
            memory.rows(layer, ids)[-1][-1] ^= np.uint8(1)
        return read


def damage_dram(rank: Rank) -> None:
    """One byte of the draft's row of one token."""
    assert rank.arena is not None
    (plane, *_) = rank.arena.layout.planes_of(LAYERS)
    (node, *_) = [each for each in rank.tree.nodes() if rank.dram_holder in each.placements]
    block = int(node.placements[rank.dram_holder][-1])
    rank.arena.plane(plane)[block].reshape(BLOCK, -1)[5, 1] ^= 1


def damage_hbm(rank: Rank) -> None:
    """One byte of the draft's row of one token."""
    (node, *_) = [each for each in rank.tree.nodes() if rank.hbm in each.placements]
    slot = int(node.placements[rank.hbm][-11])
    rank.pools.tensors[LAYERS][0].view(torch.uint8)[slot].view(-1)[1] ^= 1


@pytest.mark.parametrize("where", ["HBM", "DRAM", "disk", "peer"])
@pytest.mark.parametrize("family", [name for name, kind in KINDS.items() if kind.draft_layers])
def test_one_damaged_row_of_a_draft_is_seen(make_server: MakeServer, family: str, where: str) -> None:
    disk_class: Callable[[BlockTier], BlockTier] = DamagesDrafts if where == "disk" else lambda disk: disk
    owner, tokens = server_of(make_server, family, disk_class=disk_class), prompt_of(family)
    owner.serve(tokens)
    asked = owner
    if where == "HBM":
        damage_hbm(owner.rank)
    elif where == "disk":
        forget(owner)
    else:
        damage_dram(owner.rank)
        owner.rank.cache.evict(EvictParams(num_tokens=owner.rank.pools.tokens))
    if where == "peer":
        asked = server_of(make_server, family)
        asked.rank.look_inside = False
        lend_and_fetch(owner, asked, tokens)
        fetched(asked)
    asked.rank.look_inside = False
    with pytest.raises(WrongKvError, match=rf"^draft of .* in forward: layer {LAYERS}"):
        ask(asked, tokens)

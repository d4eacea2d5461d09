"""Hand-overs of windows and states between servers of one rank and of two, over SGLang's own pools.

Two ranks share heads as SGLang's own transfer backends cut them: the parts of a convolution each for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_hybrid_pools import HybridKind, process_settings
from engine_page_pools import QsaPools
from pd_rig import METADATA, Rows, transfer_thread
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.disaggregation.utils import compute_mamba_state_slice_blocks
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_ext.disagg.errors import RefusedError
from sglang_ext.disagg.handover import ReceiverState, SenderState
from sglang_ext.engine.pd.agent import Agent, AgentConfig
from sglang_ext.engine.pd.bootstrap import BootstrapService
from sglang_ext.engine.pd.landing import PoolRows, Wanted
from sglang_ext.engine.pd.messages import PROTOCOL
from sglang_ext.engine.pd.peers import Local, require_fit
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.patches.adapter.hbm import Drafts
from sglang_ext.patches.adapter.hybrid.handed_over import REQUEST, handed_over_pools
from sglang_ext.patches.adapter.hybrid.pools import STATE, WINDOW, ComponentPool
from sglang_ext.patches.adapter.hybrid.sharing import convolution_of, of_states
from sglang_ext.testing.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

LAYERS, STATE_LAYERS = [0, 3], [1, 2]
HEADS, HEAD_DIM = 4, 8
SLOTS, WINDOW_SLOTS, STATES = 160, 96, 6
DTYPES = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)


@dataclass(frozen=True)
class Model:
    """A model whose memory ranks share.

    Args:
        params: of its states, by the number of ranks; None without states.
        parts: channels of the parts of its convolution in all ranks.
        listed: whether SGLang lists these parts.
        indexed: whether K and V have an index key for 4 tokens each, and other layers keep something beside
            the states (Qwen3.8-Flash-Next). Each rank has all of both.
    """

    window: int = 0
    page: int = 1
    latents: bool = False
    params: Callable[[int], Any] | None = None
    parts: tuple[int, ...] = ()
    listed: bool = True
    indexed: bool = False


def gdn(ranks: int, groups: Sequence[int] | None = (8, 8, 16)) -> Any:
    shape = Mamba2StateShape.create(
        tp_world_size=ranks,
        intermediate_size=16,
        n_groups=2,
        num_heads=4,
        head_dim=4,
        state_size=4,
        conv_kernel=4,
        conv_shard_groups=None if groups is None else list(groups),
    )
    return Mamba2CacheParams(shape=shape, layers=STATE_LAYERS, dtype=DTYPES)


def kda(ranks: int) -> Any:
    shape = KimiLinearStateShape.create(tp_world_size=ranks, num_heads=4, head_dim=4)
    return KimiLinearCacheParams(shape=shape, layers=STATE_LAYERS, dtype=DTYPES)


def short_convolution(ranks: int) -> Any:
    shape = Mamba2StateShape.create(
        tp_world_size=ranks,
        intermediate_size=32,
        n_groups=1,
        num_heads=ranks,
        head_dim=32,
        state_size=0,
        conv_kernel=3,
    )
    return Mamba2CacheParams(shape=shape, layers=STATE_LAYERS, dtype=DTYPES)


MODELS = {
    "window": Model(window=32, page=16),
    "gdn": Model(params=gdn, parts=(8, 8, 16)),
    "kda": Model(params=kda, parts=(16, 16, 16), latents=True),
    "mamba2": Model(params=partial(gdn, groups=None), parts=(16, 8, 8), listed=False),
    "short-convolution": Model(params=short_convolution, parts=(32,), listed=False),
    "indexed-gdn": Model(page=16, params=gdn, parts=(8, 8, 16), indexed=True),
    "window-gdn": Model(window=32, page=16, params=gdn, parts=(8, 8, 16)),
}


class OneRank:
    """SGLang's pools of one of so many ranks, and the same as endpoints have them."""

    def __init__(self, model: Model, rank: int, ranks: int, parts: Sequence[int] | None = None) -> None:
        self.model, self.rank, self.ranks = model, rank, ranks
        self.requests: Any = ReqToTokenPool(4, 256, "cpu", enable_memory_saver=False)
        if model.params is not None:
            self.requests = HybridReqToTokenPool(
                size=4,
                mamba_size=STATES,
                mamba_spec_state_size=4,
                max_context_len=256,
                device="cpu",
                enable_memory_saver=False,
                cache_params=model.params(ranks),
                mamba_layer_ids=STATE_LAYERS,
                enable_mamba_extra_buffer=False,
                enable_overlap_schedule=False,
                **(QsaPools.side_states if model.indexed else {}),
            )
        common: dict[str, Any] = {"page_size": model.page, "dtype": torch.bfloat16, "device": "cpu"}
        common |= {"head_num": HEADS // ranks, "head_dim": HEAD_DIM}
        if model.window:
            self.kvcache: Any = SWAKVPool(
                size=SLOTS,
                size_swa=WINDOW_SLOTS,
                swa_attention_layer_ids=[4, 5],
                full_attention_layer_ids=LAYERS,
                **common,
            )
        elif model.indexed:
            self.kvcache = self._indexed(**common)
        else:
            latents = {"use_mla": True, "kv_lora_rank": 8, "qk_rope_head_dim": 4} if model.latents else {}
            mamba_pool = self.requests.mamba_pool
            self.kvcache = HybridLinearKVPool(
                size=SLOTS, full_attention_layer_ids=LAYERS, mamba_pool=mamba_pool, **common, **latents
            )
        params = SimpleNamespace(
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: self.kvcache),
            page_size=model.page,
            req_to_token_pool=self.requests,
        )
        parts = model.parts if parts is None else parts
        convolution = None if model.listed else parts
        self.found: dict[str, ComponentPool] = handed_over_pools(
            params,
            model.window or None,
            Drafts(),
            lambda mamba_pool: of_states(mamba_pool, convolution, ranks),
        )

    def _indexed(self, **common: Any) -> Any:
        from sglang.srt.mem_cache.qsa_kv_pool import QSATokenToKVPool

        return QSATokenToKVPool(
            size=SLOTS,
            full_attention_layer_ids=LAYERS,
            mamba_pool=self.requests.mamba_pool,
            qsa_index_kv_heads=1,
            qsa_index_head_dim=16,
            qsa_compress_ratio=4,
            qsa_token_topk=2048,
            num_request_slots=8,
            **common,
        )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of slots, with how ranks share it: `head`, `conv`, or not (`whole`)."""
        kind = "whole" if self.model.latents else "head"
        pools = [self.kvcache.full_kv_pool, *([self.kvcache.swa_kv_pool] if self.model.window else [])]
        for pool in pools:
            for plane in (*pool.k_buffer, *pool.v_buffer) if kind == "head" else pool.kv_buffer:
                yield kind, plane
        if self.model.indexed:
            for plane in (
                *self.kvcache.qsa_compressed_k_buffer_pool,
                *self.kvcache.qsa_key_state_buffer_pool,
                self.kvcache.qsa_rope_position_buffer,
                *self.requests.short_conv_pool.conv_state,
                self.requests.ngram_pool.context,
            ):
                yield "whole", plane
        if self.model.params is not None:
            cache = self.requests.mamba_pool.mamba_cache
            for layer in range(len(STATE_LAYERS)):
                if cache.temporal.numel():
                    yield "head", cache.temporal[layer]
                for conv in cache.conv:
                    yield "conv", conv[layer]

    def filled(self, seed: int) -> OneRank:
        rng = torch.Generator().manual_seed(seed)
        for _, tensor in self.tensors():
            tensor.copy_(1000 * torch.randn(tensor.shape, generator=rng))
        return self

    def is_part_of(self, whole: OneRank) -> OneRank:
        """Fill this rank's memory with its part of a lone rank's."""
        for (kind, mine), (_, all_of_it) in zip(self.tensors(), whole.tensors(), strict=True):
            mine.copy_(self._part(kind, all_of_it, len(mine[0])))
        return self

    def _part(self, kind: str, tensor: torch.Tensor, heads: int) -> torch.Tensor:
        if kind == "whole":
            return tensor
        if kind == "head":
            return tensor[:, self.rank * heads : (self.rank + 1) * heads]
        axis = 1 + self.requests.mamba_pool.conv_slice_axis
        channels = tensor.shape[axis]
        blocks = compute_mamba_state_slice_blocks(
            channels, channels // self.ranks, 1, self.ranks, self.rank, 0, list(self.model.parts)
        )
        return torch.cat([tensor.narrow(axis, start, count) for start, _, count in blocks], axis)

    def specs(self) -> list[Any]:
        return [pool.spec(name, self.rank, self.ranks) for name, pool in self.found.items()]

    def described(self) -> dict[str, str]:
        return {name: pool.described(self.ranks) for name, pool in self.found.items()}

    def rows(self, seed: int) -> tuple[np.ndarray, tuple[PoolRows, ...]]:
        """Blocks of a request, as its server has chosen them: alike on all ranks."""
        rng = np.random.default_rng(seed)
        pages = rng.permutation(np.arange(1, SLOTS // self.model.page))[:7]
        beside = []
        if self.model.window:
            beside.append(PoolRows(WINDOW, rng.permutation(np.arange(1, WINDOW_SLOTS // 16))[:3]))
        if self.model.params is not None:
            beside.append(PoolRows(STATE.name, np.array([1 + seed % STATES])))
        if self.model.indexed:
            beside.append(PoolRows(REQUEST, np.array([seed])))
        return pages, tuple(beside)

    def bytes_of(self, seed: int) -> dict[str, list[torch.Tensor]]:
        """All bytes of a request's blocks, by pool and plane."""
        pages, beside = self.rows(seed)
        found = {}
        for each in (PoolRows(HBM_POOL, pages), *beside):
            pool = self.found[each.pool]
            count = pool.block_rows
            slots = torch.from_numpy((each.rows[:, None] * count + np.arange(count)).ravel())
            found[each.pool] = [plane[slots] for layer in pool.planes_by_layer for plane in layer]
        return found


def ranks_of(whole: OneRank, ranks: int) -> list[OneRank]:
    return [OneRank(whole.model, rank, ranks).is_part_of(whole) for rank in range(ranks)]


@contextmanager
def servers(prefill: list[OneRank], decode: list[OneRank]) -> Iterator[tuple[list[Agent], list[Agent], str]]:
    with ExitStack() as stack:
        bootstrap = BootstrapService("127.0.0.1", 0, None)
        stack.callback(bootstrap.close)
        sides: list[list[Agent]] = []
        for name, ranks, address in (("prefill", prefill, bootstrap.address), ("decode", decode, "")):
            sides.append([])
            for each in ranks:
                transfers = transfer_thread(name, each.specs(), rank=each.rank)
                stack.callback(transfers.close)
                page, described = each.model.page, each.described()
                local = Local(each.rank, each.ranks, page, METADATA, components=described)
                agent = Agent(AgentConfig(local, "weights", bootstrap=address), transfers, Rows())
                stack.callback(agent.close)
                sides[-1].append(agent)
        yield sides[0], sides[1], bootstrap.address
        for agent in (*sides[0], *sides[1]):
            agent.endpoint.check()
            agent.sender.check()
        sides.clear()


def handed_over(prefill: list[OneRank], decode: list[OneRank], here: int, there: int) -> None:
    """Move a request's blocks, `here` at prefill and `there` at decode."""
    with servers(prefill, decode) as (givers, takers, address):
        taken = [agent.receiver.open(address, 7) for agent in takers]
        given = [agent.sender.open(7) for agent in givers]
        for agent, each, handover in zip(givers, prefill, given, strict=True):
            pages, beside = each.rows(here)
            agent.sender.complete(handover, pages, bytes(METADATA), beside=beside)
        for agent, each, handover in zip(takers, decode, taken, strict=True):
            wait_until(
                lambda handover=handover: handover.over or handover.state is ReceiverState.READY,
                seconds=20,
                what="the offer",
            )
            assert not handover.over, handover.reason
            pages, beside = each.rows(there)
            agent.receiver.read(handover, Wanted(pages, 0, 0, beside=beside))
        for handover in taken:
            wait_until(lambda handover=handover: handover.over, seconds=20, what="the KV")
            assert handover.state is ReceiverState.HELD, handover.reason
        for agent, handover in zip(givers, given, strict=True):
            wait_until(
                lambda handover=handover: handover.state is SenderState.RELEASED, seconds=20, what="release"
            )
            agent.sender.forget(handover)
        for agent in givers:
            assert [pool.pinned for pool in agent.endpoint.pools.values()] == [0] * len(prefill[0].found)


def assert_received(decode: list[OneRank], expected: list[OneRank], here: int, there: int) -> None:
    for mine, true in zip(decode, expected, strict=True):
        sent = true.bytes_of(here)
        for name, planes in mine.bytes_of(there).items():
            for number, (one, other) in enumerate(zip(planes, sent[name], strict=True)):
                assert torch.equal(one, other), f"{name}: plane {number} of rank {mine.rank}"


@contextmanager
def settings(model: Model) -> Iterator[None]:
    with process_settings(HybridKind(window=model.window, states=STATES, page=model.page)):
        yield


SIZES = [pytest.param((2, 1), id="2 to 1"), pytest.param((1, 2), id="1 to 2"), pytest.param((2, 2), id="2")]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_each_rank_gets_its_heads(model: Model, sizes: tuple[int, int]) -> None:
    """The twin: a byte of any plane at prefill that is another one is seen."""
    with settings(model):
        whole = OneRank(model, 0, 1).filled(1)
        prefill, expected = ranks_of(whole, sizes[0]), ranks_of(whole, sizes[1])
        decode = [OneRank(model, rank, sizes[1]).filled(2) for rank in range(sizes[1])]
        assert prefill[0].described() == decode[0].described()
        with pytest.raises(AssertionError):
            assert_received(decode, expected, 3, 4)
        handed_over(prefill, decode, 3, 4)
        assert_received(decode, expected, 3, 4)
        for name, pool in expected[0].found.items():
            rows = {HBM_POOL: expected[0].rows(3)[0], **{at.pool: at.rows for at in expected[0].rows(3)[1]}}
            for layer in pool.planes_by_layer:
                for plane in layer:
                    plane[int(rows[name][0]) * pool.block_rows][-1] ^= 1
                    with pytest.raises(AssertionError):
                        assert_received(decode, expected, 3, 4)
                    plane[int(rows[name][0]) * pool.block_rows][-1] ^= 1


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["2 to 1", "1 to 2"])
def test_parts_in_another_order_are_seen(sizes: tuple[int, int]) -> None:
    """A twin: B and C are taken for the beginning of a convolution, and not for its end."""
    model = MODELS["mamba2"]
    with settings(model):
        whole = OneRank(model, 0, 1).filled(1)
        prefill, expected = ranks_of(whole, sizes[0]), ranks_of(whole, sizes[1])
        wrong = model.parts[::-1]
        prefill = [OneRank(model, r, sizes[0], wrong).is_part_of(whole) for r in range(sizes[0])]
        decode = [OneRank(model, r, sizes[1], wrong).filled(2) for r in range(sizes[1])]
        handed_over(prefill, decode, 3, 4)
        with pytest.raises(AssertionError, match="state"):
            assert_received(decode, expected, 3, 4)


@pytest.mark.parametrize("parts", [(), (12, 20), (33,)], ids=str)
def test_a_convolution_of_unknown_parts_is_refused_with_another_size(parts: tuple[int, ...]) -> None:
    """Each rank has rows of its own then, which servers of one size exchange."""
    model = Model(params=partial(gdn, groups=None), parts=parts, listed=False)
    with settings(model):
        one, two = OneRank(model, 0, 1), OneRank(model, 1, 2)
        assert (one.found[STATE.name].sharing is None) == (parts != (12, 20))
        infos: Any = [SimpleNamespace(**{**LIKE, "components": one.described()})]
        local = Local(0, 2, 1, METADATA, components=two.described())
        if parts == (12, 20):
            require_fit(infos, local)
        else:
            with pytest.raises(RefusedError, match="those of one of 2 ranks"):
                require_fit(infos, local)


LIKE = {
    "page_tokens": 1, "mode": "pull", "layout": "blocks", "settings": {}, "metadata_bytes": METADATA,
    "protocol": PROTOCOL,
}  # fmt: skip


def test_the_parts_of_mamba2_are_its_inputs_b_and_c() -> None:
    shape = gdn(2, None).shape
    config = SimpleNamespace(
        architectures=["FalconH1ForCausalLM"], mamba2_cache_params=SimpleNamespace(shape=shape)
    )
    assert convolution_of(SimpleNamespace(hf_config=config)) == (16, 8, 8)
    config.architectures = ["JetNemotronForCausalLM"]
    assert convolution_of(SimpleNamespace(hf_config=config)) is None

"""Draft models of models with windows or states: every row that a draft reads, in SGLang's tree, in our DRAM
and on disk.

The checks are those of `test_oracle_hybrids` and `test_oracle_store`, also of the draft's rows.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_drafts import (
    DFLASH,
    DRAFTED,
    FROZEN,
    GRID,
    PAGED_WINDOW,
    STATES,
    WINDOW,
    DraftingScheduler,
    with_draft,
)
from engine_hybrid_pools import FULL, runner_of
from engine_hybrid_store import Sizes, StoreBelow
from engine_hybrids import HybridRank, HybridScenario, drive
from engine_page_pools import COMPRESSED, GROUPED, LOW_RATIO, PAGE, QSA, whole
from engine_pools import Hashes, WrongKvError
from engine_scheduler import Computed
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from test_oracle_pages import flip_a_late_bit
from test_oracle_store import damage, leave_hbm, store_of, stored
from transformers import PretrainedConfig

from sglang_ext.engine.weights import Weights
from sglang_ext.errors import ConfigError
from sglang_ext.patches.adapter.hbm import Drafts
from sglang_ext.patches.adapter.hybrid.build import _Building
from sglang_ext.patches.adapter.hybrid.cache import HybridRadixCache
from sglang_ext.patches.adapter.hybrid.pools import component_pools

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

PROMPT = [at % 5 for at in range(65)]


@pytest.mark.parametrize("scenario", DRAFTED, ids=str)
def test_every_row_from_dram_and_disk_is_right(scenario: HybridScenario) -> None:
    with stored(scenario, full=600, other=400, disk=4000) as rank:
        drive(rank, seed=2, steps=70)
        assert len(rank.scheduler.finished) > 10
        assert rank.scheduler.drafted > 50
        assert store_of(rank).store.counters.saved > 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scenario", DRAFTED, ids=str)
def test_every_row_is_right_for_long(scenario: HybridScenario, seed: int) -> None:
    """60 runs, 18,000 passes of the loop; in HBM alone, with much DRAM, and with little."""
    sizes = ({}, {"full": 120, "other": 60, "disk": 4000}, {"disk": 300, "faults": 0.1, "threaded": True})
    made = stored(scenario, **sizes[seed - 1]) if seed else HybridRank(scenario)
    with made as rank:
        drive(rank, seed=400 + seed, steps=300)
        assert len(rank.scheduler.finished) > 20
        assert rank.scheduler.reused > 500


@pytest.mark.parametrize(
    ("pages", "seed", "draft"),
    [
        pytest.param(COMPRESSED, 2, {}, id="compressed"),
        pytest.param(LOW_RATIO, 2, {}, id="low-ratio"),
        pytest.param(GROUPED, 4, {}, id="grouped"),
        pytest.param(QSA, 4, {}, id="qsa"),
        pytest.param(COMPRESSED, 2, {"bigrams": False, "method": "DSPARK"}, id="compressed, DSPARK"),
    ],
)
def test_every_row_of_a_draft_with_pages_is_right(
    pages: HybridScenario, seed: int, draft: dict[str, Any]
) -> None:
    with stored(with_draft(pages, **draft), full=16, other=8, disk=2000, backlog=1 << 26) as rank:
        drive(rank, seed=seed, steps=60)
        assert len(rank.scheduler.finished) > 10
        assert rank.scheduler.drafted > 50
        assert rank.scheduler.loaded > PAGE


LONG_PROMPT = [at % 5 for at in range(4 * PAGE + 1)]
FOUND = [(each, PROMPT) for each in (WINDOW, PAGED_WINDOW, STATES, GRID, DFLASH, FROZEN)]
FOUND += [(with_draft(whole(pages)), LONG_PROMPT) for pages in (COMPRESSED, LOW_RATIO, GROUPED, QSA)]


@pytest.mark.parametrize("on_disk", [False, True], ids=["in DRAM", "on disk"])
@pytest.mark.parametrize(("scenario", "prompt"), FOUND, ids=lambda each: str(each)[:30])
def test_a_prompt_is_found(scenario: HybridScenario, prompt: list[int], on_disk: bool) -> None:
    """A prompt of whole pages and a token: EAGLE's keys are pairs, of which there is one less than tokens."""
    with stored(scenario, full=200, other=100, disk=400, backlog=1 << 26) as rank:
        leave_hbm(rank, prompt)
        for part in store_of(rank).store.parts.values() if on_disk else ():
            part.memory.clear()
        rank.serve([*prompt, 1, 2, 3])
        tokens = len(prompt) - (rank.pools.kind.page > 1 or not rank.pools.kind.states)
        assert rank.scheduler.loaded == tokens
        assert rank.scheduler.disk_tokens >= tokens * on_disk


def flip_a_bit(blocks: np.ndarray) -> None:
    blocks.reshape(len(blocks), -1)[-1, 3] ^= 1


def zero_the_last_row(blocks: np.ndarray) -> None:
    blocks[-1, -1] = 0


def shift(blocks: np.ndarray) -> None:
    """Each row becomes that of the token before."""
    rows = blocks.reshape(-1, blocks.shape[-1])
    rows[1:] = rows[:-1].copy()


DAMAGE = {"one bit": flip_a_bit, "a row of zeros": zero_the_last_row, "rows one token late": shift}
TWINS = [
    (scenario, component, what)
    for scenario, components in (
        (PAGED_WINDOW, ("full", "window")),
        (DFLASH, ("full", "window")),
        (STATES, ("full",)),
        (GRID, ("full",)),
    )
    for component in components
    for what in DAMAGE
]


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: f"{twin[0]}: {twin[1]}, {twin[2]}")
def test_damage_of_a_draft_in_dram_is_seen(twin: tuple[HybridScenario, str, str]) -> None:
    scenario, component, what = twin
    with stored(scenario) as rank:
        leave_hbm(rank, PROMPT)
        damage(rank, component, DAMAGE[what])
        rank.look_inside = False
        with pytest.raises(WrongKvError, match=r"^draft of .* in forward"):
            rank.serve([*PROMPT, 1, 2, 3])


@pytest.mark.parametrize("pages", [COMPRESSED, LOW_RATIO, GROUPED, QSA], ids=str)
def test_one_bit_of_a_draft_with_pages_is_seen(pages: HybridScenario) -> None:
    component = "full" if pages in (GROUPED, QSA) else "window"
    with stored(with_draft(whole(pages)), full=120, other=60) as rank:
        leave_hbm(rank, LONG_PROMPT)
        damage(rank, component, flip_a_late_bit)
        rank.look_inside = False
        with pytest.raises(WrongKvError, match=r"^draft of .* in forward"):
            rank.serve([*LONG_PROMPT, 1, 2, 3])


def test_a_draft_without_kv_reads_the_model_s_from_dram() -> None:
    """FROZEN_KV_MTP. SGLang gives its runner a pool of 64 slots, which nothing reads and no tier keeps; the
    twin damages a row of the model after the prompt was computed."""
    with stored(FROZEN) as rank:
        assert not rank.pools.drafts.runners
        leave_hbm(rank, PROMPT)
        rank.serve([*PROMPT, 1, 2, 3], new_tokens=8)
        assert rank.scheduler.frozen_reads > 2 * len(PROMPT)
        rank.look_inside = False
        rank.scheduler.submit([*PROMPT, 1, 2, 3], new_tokens=8)
        rank.scheduler.step()
        rank.pools.oracles[FULL].spoil(rank.pools.all(FULL))
        with pytest.raises(WrongKvError, match=r"^draft of .* in forward"):
            rank.scheduler.step()


def test_a_draft_without_kv_has_no_pool_that_is_kept() -> None:
    """SGLang names no runner with draft KV for FROZEN_KV_MTP; its pool would be refused by name."""
    frozen = SimpleNamespace(spec_algorithm=SpeculativeAlgorithm.FROZEN_KV_MTP)
    with HybridRank(FROZEN) as rank:
        small = MHATokenToKVPool(
            size=64,
            page_size=16,
            dtype=torch.float32,
            head_num=1,
            head_dim=4,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
        )
        runner = runner_of(small, rank.pools)
        worker = SimpleNamespace(
            target_worker=SimpleNamespace(model_runner=frozen),
            draft_worker=SimpleNamespace(draft_runners=[runner]),
        )
        assert BaseSpecWorker._draft_model_runners(worker) == ()
        with pytest.raises(ConfigError, match="fewer slots than the model"):
            component_pools(rank.pools.params(), 32, Drafts((runner,)))


class WithoutDrafts(StoreBelow):
    """Keeps the model's rows alone."""

    def __init__(self, pools: Any, *more: Any) -> None:
        drafts, pools.drafts = pools.drafts, Drafts()
        super().__init__(pools, *more)
        pools.drafts = drafts


class DefersDraftKv(DraftingScheduler):
    """Computes a draft's rows in the next pass, as SGLang with ``SGLANG_DSPARK_DEFER_CONTEXT_KV``."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._late: list[Computed] = []

    def _forward(self, batch: ScheduleBatch) -> list[Any]:
        late, self._late = self._late, []
        for each in late:
            super()._draft(each)
        return super()._forward(batch)

    def _draft(self, work: Computed) -> None:
        self._late.append(work)


class OneTokenLate(DraftingScheduler):
    """Keeps states of one token before."""

    def _keep_state(self, slot: int, chain: Hashes, tokens: int) -> None:
        super()._keep_state(slot, chain, tokens - 1)


def test_a_draft_whose_rows_are_not_kept_is_seen() -> None:
    below = lambda pools, cache: WithoutDrafts(pools, cache, Sizes())  # noqa: E731
    with HybridRank(PAGED_WINDOW, make_cache=HybridRadixCache, make_below=below) as rank:
        rank.look_inside = False
        leave_hbm(rank, PROMPT)
        with pytest.raises(WrongKvError, match=r"^draft of .* in forward"):
            rank.serve([*PROMPT, 1, 2, 3])


@pytest.mark.parametrize(
    ("scenario", "twin"),
    [(PAGED_WINDOW, DefersDraftKv), (GRID, OneTokenLate)],
    ids=["deferred", "late state"],
)
def test_what_is_saved_too_early_or_late_is_seen(
    scenario: HybridScenario, twin: type[DraftingScheduler]
) -> None:
    with stored(replace(scenario, make_scheduler=twin)) as rank, pytest.raises(WrongKvError):
        drive(rank, seed=2, steps=100)


def namespace(drafts: tuple[str, ...], algorithm: str = "EAGLE") -> bytes | None:
    """Of a server's files of KV of all tokens, by the activations of its draft models."""
    with HybridRank(WINDOW) as rank:
        build = object.__new__(_Building)
        build.weights, build.shard = Weights("as started", lambda: "as started"), "tp0of1"
        build.kvcache = SimpleNamespace(dtype=torch.float32)
        model = SimpleNamespace(hf_config=PretrainedConfig(), dtype=torch.float32)
        args = SimpleNamespace(speculative_algorithm=algorithm)
        build.ctx = SimpleNamespace(model_config=model, server_args=args)
        configs = [PretrainedConfig(hidden_act=each) for each in drafts]
        models = [SimpleNamespace(hf_config=each) for each in configs]
        build.drafts = Drafts([SimpleNamespace(model_config=each) for each in models])
        return build._namespace(component_pools(rank.pools.params(), 32)[0])


def test_servers_with_unequal_drafts_share_no_files() -> None:
    assert namespace(("silu",)) == namespace(("silu",))
    assert namespace((), "NGRAM") == namespace((), "None")
    others = {namespace(("silu",)), namespace(("gelu",)), namespace(()), namespace(("silu",), "STANDALONE")}
    assert len(others) == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"req_to_token_pool": SimpleNamespace(mamba_pool=object())}, "states of their own"),
        ({"sliding_window_size": 64}, "a longer window than the model's"),
    ],
    ids=["states", "a longer window"],
)
def test_other_drafts_are_refused_by_name(change: dict[str, Any], words: str) -> None:
    with HybridRank(WINDOW) as rank:
        (runner,) = rank.pools.drafts.runners
        other = Drafts((SimpleNamespace(**vars(runner) | change),))
        with pytest.raises(ConfigError, match=words):
            component_pools(rank.pools.params(), 32, other)


def test_a_draft_whose_window_has_slots_of_its_own_is_refused_or_is_as_full_attention() -> None:
    with HybridRank(PAGED_WINDOW) as rank:
        drafts, params = rank.pools.drafts, rank.pools.params()
        (pool,) = drafts.pools
        assert [len(each.planes_by_layer) for each in component_pools(params, 32, drafts)] == [3, 3]
        pool.register_mapping(torch.arange(rank.pools.tokens + 1))
        with pytest.raises(ConfigError, match="slots of its own"):
            component_pools(params, 32, drafts)
        pool.swa_uses_full_indices = True
        with pytest.raises(ConfigError, match="fewer slots"):
            component_pools(params, 32, drafts)
        pool.swa_kv_pool = pool.full_kv_pool
        assert [len(each.planes_by_layer) for each in component_pools(params, 32, drafts)] == [4, 2]

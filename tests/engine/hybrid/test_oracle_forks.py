"""States where prompts fork and repeat, in SGLang's own tree: tokens that are reused, and every row right."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from engine_hybrid_pools import MAMBA
from engine_hybrid_store import our_store
from engine_hybrids import SCENARIOS, HybridKind, HybridRank, HybridScenario, drive
from engine_pools import WrongKvError
from engine_scheduler import Settings
from fork_traces import CONTEXT, FORKS, TRACES, PlainModel
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from test_oracle_hybrid_twins import Kept
from test_oracle_store import damage, exchange, leave_hbm

from sglang_ext.engine.hybrid.forks import TAIL, Forks
from sglang_ext.patches.adapter.hybrid.cache import HybridRadixCache
from sglang_ext.patches.adapter.hybrid.chunks import Chunks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

AT_ENDS = HybridKind(states=20)
ON_A_GRID = HybridKind(states=200, grid=16, page=16)
SMALL = Forks(known=4, ahead=12)
"""So that most prompts of random traffic are cut."""


def forking(forks: Forks) -> Callable[[Any], HybridRadixCache]:
    """Makes our cache with another rule."""

    def make(params: Any) -> HybridRadixCache:
        cache = HybridRadixCache(params)
        assert isinstance(cache.chunks, Chunks)
        cache.chunks.forks = forks
        return cache

    return make


@dataclass(frozen=True)
class Reuse:
    """The work of serving a trace. reused: tokens; plain: those that a plain model reuses in the same memory.
    computed: tokens of prompts. passes: for them."""

    reused: int
    plain: int
    computed: int
    passes: int

    @property
    def share(self) -> float:
        return self.reused / self.plain


def reuse(trace: str, kind: HybridKind, tokens: int, make_cache: Callable[[Any], Any]) -> Reuse:
    scenario = HybridScenario(
        "forks",
        kind,
        tokens,
        settings=Settings(chunk=512, max_prefill=2048, new_token_ratio=0.05),
        stretch=CONTEXT // 200,
    )
    with HybridRank(scenario, make_cache=make_cache) as rank:
        rank.look_inside = False
        kv = sum(rank.pools.kvcache.get_kv_size_bytes()) / (tokens + kind.page)
        plain = PlainModel(tokens + int(rank.pools.requests.mamba_pool.get_kv_size_bytes() / kv))

        def serve(prompt: Sequence[int], new_tokens: int) -> list[int]:
            req = rank.scheduler.submit(list(prompt), new_tokens=new_tokens)
            while not rank.scheduler.idle:
                rank.scheduler.step()
            rank.check()
            plain.serve(prompt, req.output_ids)
            return list(req.output_ids)

        TRACES[trace](serve, random.Random(7))
        scheduler = rank.scheduler
        rank.finish()
        return Reuse(scheduler.reused, plain.reused, scheduler.computed, scheduler.passes)


@pytest.mark.parametrize("trace", TRACES)
def test_reuse_is_near_that_of_a_plain_model(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    stock = reuse(trace, AT_ENDS, 2500, UnifiedRadixCache)
    ours = reuse(trace, AT_ENDS, 2500, forking(FORKS))
    with capsys.disabled():
        print(f"\n{trace}: SGLang {stock.share:.2f}, ours {ours.share:.2f} of a plain model", end="; ")
        print(f"tokens computed {stock.computed} -> {ours.computed}, passes {stock.passes} -> {ours.passes}")
    assert ours.share >= 0.9
    assert ours.share > stock.share + 0.1
    assert ours.computed < stock.computed


@pytest.mark.parametrize("trace", TRACES)
def test_states_on_a_grid_are_reused_as_sglang_keeps_them(trace: str) -> None:
    """``extra_buffer``, in which chunks are not cut."""
    assert reuse(trace, ON_A_GRID, 20_000, HybridRadixCache).share >= 0.9


STATES = [each for each in SCENARIOS if each.kind.states and not each.kind.grid]


@pytest.mark.parametrize("scenario", STATES, ids=str)
def test_every_row_that_a_model_reads_is_right(scenario: HybridScenario) -> None:
    below = our_store(full=600, other=400, disk=4000)
    with HybridRank(scenario, make_cache=forking(SMALL), make_below=below) as rank:
        drive(rank, seed=5, steps=100)
        assert rank.cache.chunks.cuts > 5


@pytest.mark.long
@pytest.mark.parametrize("chunk", [32, 90, None])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("scenario", STATES, ids=str)
def test_every_row_that_a_model_reads_is_right_for_long(
    scenario: HybridScenario, seed: int, chunk: int | None
) -> None:
    """90 runs, 27,000 passes of the loop."""
    scenario = replace(scenario, settings=Settings(chunk=chunk, new_token_ratio=0.05))
    below = our_store(full=200, other=100, disk=300, faults=0.1)
    with HybridRank(scenario, make_cache=forking(SMALL), make_below=below) as rank:
        drive(rank, seed=500 + seed, steps=300)
        assert (rank.cache.chunks.cuts > 0) == (chunk is not None)


PROMPT = [at % 5 for at in range(64)]
OTHER = [*PROMPT[:40], *(8 for _ in range(24))]
TURNS = HybridScenario("states", HybridKind(states=14), settings=Settings(chunk=200, new_token_ratio=0.05))


def test_a_repeat_is_computed_from_the_state_before_the_end() -> None:
    with HybridRank(TURNS, make_cache=forking(SMALL)) as rank:
        rank.serve(PROMPT, new_tokens=4)
        rank.serve(PROMPT, new_tokens=4)
        assert rank.scheduler.reused == len(PROMPT) - TAIL
        # One at the end of the answer and one before the prompt's end: as many as SGLang keeps.
        assert rank.cache.mamba_evictable_size() == 2


def test_a_state_one_token_late_is_seen() -> None:
    with HybridRank(TURNS, make_cache=forking(SMALL)) as rank:
        rank.serve(PROMPT)
        kept = Kept(rank)
        kept.nodes = [node for node in kept.nodes if node.component_data[MAMBA].value is not None][:1]
        kept.shift_state(1)
        rank.look_inside = False
        with pytest.raises(WrongKvError, match="in forward"):
            rank.serve(PROMPT)


def test_a_state_kept_for_the_wrong_place_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of a cut: the state of the whole chunk enters as that of its beginning."""
    publish = UnifiedRadixCache.checkpoint_into_tree

    def too_early(cache: Any, req: Any, *, up_to: int, **kwargs: Any) -> None:
        publish(cache, req, up_to=up_to - (0 if req.finished() else 1), **kwargs)

    monkeypatch.setattr(UnifiedRadixCache, "checkpoint_into_tree", too_early)
    with HybridRank(TURNS, make_cache=forking(SMALL)) as rank:
        rank.look_inside = False
        rank.serve(PROMPT)
        with pytest.raises(WrongKvError, match="in forward"):
            rank.serve(PROMPT)


@pytest.mark.parametrize("damaged", [False, True])
def test_the_state_at_a_fork_is_found_in_dram(damaged: bool) -> None:
    """The KV at the fork was saved before its state was."""
    with HybridRank(TURNS, make_cache=forking(Forks(4, 1000)), make_below=our_store()) as rank:
        rank.serve(PROMPT)
        rank.settle()
        leave_hbm(rank, OTHER)
        third = [*PROMPT[:40], 9, 9, 9]
        if damaged:
            damage(rank, "state", exchange)
            rank.look_inside = False
            with pytest.raises(WrongKvError, match="in forward"):
                rank.serve(third)
        else:
            rank.serve(third)
            assert rank.scheduler.loaded == 40


def test_kv_in_dram_shows_a_fork() -> None:
    """All KV has left HBM before the second prompt comes."""
    with HybridRank(TURNS, make_cache=forking(Forks(4, 1000)), make_below=our_store()) as rank:
        leave_hbm(rank)
        leave_hbm(rank, OTHER)
        rank.serve([*PROMPT[:40], 9, 9, 9])
        assert rank.scheduler.loaded == 40


def test_the_rest_of_a_cut_prompt_keeps_its_memory() -> None:
    """Prompts that are admitted in the pass of a cut leave room for the rest of the cut prompt."""
    scenario = replace(TURNS, hbm_tokens=120)
    with HybridRank(scenario, make_cache=forking(Forks(4, 1000))) as rank:
        rank.serve(PROMPT[:30])
        rank.scheduler.submit([*PROMPT[:20], *(9 for _ in range(60))], new_tokens=1)
        rank.scheduler.submit([at % 3 for at in range(60)], new_tokens=1)
        rank.step()
        assert rank.cache.chunks.cuts == 1
        assert len(rank.scheduler.waiting) == 1
        rank.finish()

"""Pictures in prompts of models with windows or states: KV, windows and states are found by their content.

Families: Qwen3.5 and later (states), Gemma 4, Llama 4 and Muse (windows), Inkling (both), Kimi K3 (states and
latents), GLM-5.3-Flash (index keys for groups). The checks are those of `test_oracle_store`. A prompt is 32
words that other prompts begin with, a picture of 20 tokens and 12 words; in pages of 256 tokens 16 times as
many.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from engine_drafts import GRID
from engine_hybrid_announced import announced_store
from engine_hybrid_pools import HybridPools
from engine_hybrid_store import Sizes, StoreBelow
from engine_hybrids import PAGED as IN_CHUNKS
from engine_hybrids import SCENARIOS, HybridKind, HybridRank, HybridScenario, HybridScheduler, drive
from engine_page_pools import GROUPED, PAGE, whole
from engine_pictures import PicturedTraffic, pad_of
from engine_pools import WrongKvError
from sglang.srt.managers.schedule_batch import Modality
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from test_oracle_fetches import Pair, engines, fetch
from test_oracle_hints import advise
from test_oracle_store import BOTH, PAGED, STATES, WINDOW, damage, flip_a_bit, leave_hbm, store_of, stored

from sglang_ext.engine.peers.fetch_results import FetchEnd
from sglang_ext.patches.adapter.hybrid.cache import HybridRadixCache
from sglang_ext.testing.tiers import WrappedTier
from sglang_ext.tiered_store.tier import BlockTier

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

ON_A_GRID = HybridScenario(
    "states on a grid, page 16", HybridKind(states=40, grid=16, page=16), hbm_tokens=480, settings=IN_CHUNKS
)
LATENTS = HybridScenario("states, latents", HybridKind(states=24, latents=True))
KINDS: dict[str, HybridScenario] = {
    "window": WINDOW,
    "window-pages": PAGED,
    "states": STATES,
    "grid": ON_A_GRID,
    "both": BOTH,
    "latents": LATENTS,
    "grouped": whole(GROUPED),
}
EACH = pytest.mark.parametrize("kind", KINDS)
FIRST, OTHER = pad_of(1), pad_of(2)
MORE = [1, 2, 3]


class Prompts:
    """Prompts of one kind of model."""

    def __init__(self, kind: str) -> None:
        self.scenario = KINDS[kind]
        self.large = self.scenario.kind.page == PAGE
        self._times = PAGE // 16 if self.large else 1
        self.system = [at % 5 for at in range(32 * self._times)]

    def about(self, picture: int) -> list[int]:
        words = [at % 4 for at in range(12 * self._times)]
        return [*self.system, *[picture] * 20 * self._times, *words]

    def stored(self, **sizes: Any) -> HybridRank:
        return stored(self.scenario, **self.room(**sizes))

    def room(self, *, disk: bool = False, **others: Any) -> dict[str, Any]:
        sizes = {"full": 120, "other": 60} if self.large else {}
        sizes |= {"disk": 200 if self.large else 4000, "backlog": 1 << 26} if disk else {}
        return sizes | others

    def keep_below(self, rank: HybridRank, picture: int = FIRST) -> None:
        """Have the system prompt and a prompt with a picture below HBM alone."""
        rank.serve(self.system)
        leave_hbm(rank, self.about(picture))


def forget_dram(rank: HybridRank) -> None:
    for part in store_of(rank).store.parts.values():
        part.memory.clear()


def found(rank: HybridRank, prompt: list[int]) -> tuple[int, int, int]:
    """The tokens that a request finds: in all, below HBM, and of these on disk."""
    scheduler = rank.scheduler
    before = scheduler.reused, scheduler.loaded, scheduler.disk_tokens
    rank.serve([*prompt, *MORE])
    now = scheduler.reused, scheduler.loaded, scheduler.disk_tokens
    return now[0] - before[0], now[1] - before[1], now[2] - before[2]


@EACH
def test_a_picture_is_found_in_hbm_and_another_is_not(kind: str) -> None:
    prompts = Prompts(kind)
    with prompts.stored() as rank:
        rank.serve(prompts.system)
        rank.serve(prompts.about(FIRST))
        assert found(rank, prompts.about(OTHER))[:2] == (len(prompts.system), 0)
        assert found(rank, prompts.about(FIRST))[:2] == (len(prompts.about(FIRST)), 0)


@pytest.mark.parametrize("on_disk", [False, True], ids=["in DRAM", "on disk"])
@EACH
def test_a_picture_is_found_below_hbm_and_another_is_not(kind: str, on_disk: bool) -> None:
    prompts = Prompts(kind)
    length, shared = len(prompts.about(FIRST)), len(prompts.system)
    for asked, tokens in ((FIRST, length), (OTHER, shared)):
        with prompts.stored(disk=on_disk) as rank:
            prompts.keep_below(rank)
            if on_disk:
                forget_dram(rank)
            assert found(rank, prompts.about(asked)) == (tokens, tokens, tokens * on_disk)


@pytest.mark.parametrize("bit", [0, 29, 31, 32, 40, 60])
@pytest.mark.parametrize("kind", ["window-pages", "states"])
def test_pictures_whose_ids_differ_in_one_bit_are_two(kind: str, bit: int) -> None:
    prompts = Prompts(kind)
    with prompts.stored() as rank:
        prompts.keep_below(rank)
        near = FIRST ^ (1 << bit)
        assert found(rank, prompts.about(near))[0] == len(prompts.system)
        assert found(rank, prompts.about(FIRST))[0] == len(prompts.about(FIRST))


@pytest.mark.parametrize("modality", [Modality.VIDEO, Modality.AUDIO], ids=["video", "sound"])
@pytest.mark.parametrize("kind", ["window-pages", "states"])
def test_videos_and_sounds_are_found_by_their_content(kind: str, modality: Modality) -> None:
    prompts = Prompts(kind)
    with prompts.stored() as rank:
        prompts.keep_below(rank, pad_of(1, modality))
        assert found(rank, prompts.about(pad_of(2, modality)))[0] == len(prompts.system)
        assert found(rank, prompts.about(pad_of(1, modality)))[0] == len(prompts.about(FIRST))


class Borrowed(WrappedTier):
    """A disk that another instance closes."""

    def close(self) -> None:
        pass


class RestartedBelow(StoreBelow):
    """A store over the disks of an earlier one."""

    def __init__(
        self, pools: HybridPools, cache: UnifiedRadixCache, sizes: Sizes, earlier: StoreBelow
    ) -> None:
        self._earlier = iter(earlier.tiers)
        super().__init__(pools, cache, sizes)

    def _tier(self, layout: Any) -> BlockTier:
        return Borrowed(next(self._earlier))


@EACH
def test_a_restart_finds_the_picture_on_disk_and_no_other(kind: str) -> None:
    prompts = Prompts(kind)
    with prompts.stored(disk=True) as first:
        prompts.keep_below(first)
        sizes, earlier = Sizes(**prompts.room(disk=True)), store_of(first)
        for asked, length in ((pad_of(1), len(prompts.about(FIRST))), (pad_of(2), len(prompts.system))):
            make_below = lambda pools, cache: RestartedBelow(pools, cache, sizes, earlier)  # noqa: E731
            with HybridRank(prompts.scenario, make_cache=HybridRadixCache, make_below=make_below) as again:
                assert found(again, prompts.about(asked)) == (length, length, length)


@EACH
def test_one_wrong_bit_of_a_picture_is_seen(kind: str) -> None:
    """The twin: answers come from the bytes of the picture's KV, windows and states."""
    prompts = Prompts(kind)
    with prompts.stored() as whole_again:
        names = [part.component.name for part in store_of(whole_again).store.parts.values()]
    for name in names:
        with prompts.stored() as rank:
            prompts.keep_below(rank)
            damage(rank, name, lambda blocks: flip_a_bit(blocks[-1:]))
            rank.look_inside = False
            with pytest.raises(WrongKvError, match="in forward"):
                rank.serve([*prompts.about(FIRST), *MORE])


@pytest.mark.parametrize("damaged", [False, True], ids=["sound", "one wrong bit"])
@EACH
def test_the_words_before_a_picture_are_fetched(kind: str, damaged: bool) -> None:
    """As far as a router knows the tokens. The picture and the tokens behind it are computed."""
    prompts = Prompts(kind)
    with engines(prompts.scenario, Sizes(**prompts.room())) as (owner, reader):
        owner.rank.serve(prompts.system)
        owner.rank.serve(prompts.about(FIRST))
        owner.rank.settle()
        if damaged:
            for part in owner.store.parts.values():
                damage(owner.rank, part.component.name, flip_a_bit)
            owner.rank.below.check = lambda rank: None  # the reader is to notice it
        fetch(owner, reader, prompts.system)
        req = reader.rank.scheduler.submit([*prompts.about(OTHER), *MORE], new_tokens=1)
        with pytest.raises(WrongKvError) if damaged else nullcontext():
            reader.passes_until(lambda: req.finished() and reader.rank.scheduler.idle, "the request")
            assert req.cached_tokens == reader.rank.scheduler.loaded == len(prompts.system)
        assert reader.exchange.fetches.counters.ends[FetchEnd.DONE] == 1


@pytest.mark.parametrize("kind", ["window", "window-pages", "states"])
def test_a_prompt_that_is_sent_with_its_picture_is_computed(kind: str) -> None:
    """Ids of pictures cannot be had back from an encoded prompt, so that no page of it has a name."""
    prompts = Prompts(kind)
    pair: Pair
    with engines(prompts.scenario, Sizes(**prompts.room())) as pair:
        owner, reader = pair
        owner.rank.serve(prompts.about(FIRST))
        owner.rank.settle()
        fetch(owner, reader, prompts.about(FIRST))
        req = reader.rank.scheduler.submit([*prompts.about(FIRST), *MORE], new_tokens=1)
        reader.passes_until(lambda: req.finished() and reader.rank.scheduler.idle, "the request")
        assert req.cached_tokens == 0
        assert reader.exchange.fetches.counters.fetched_blocks == 0


@EACH
def test_a_hint_brings_the_words_before_a_picture(kind: str) -> None:
    prompts = Prompts(kind)
    with prompts.stored(disk=True, hints=True) as rank:
        prompts.keep_below(rank)
        forget_dram(rank)
        advise(rank, prompts.system)
        advise(rank, prompts.about(FIRST))  # brings nothing, and does no harm
        shared = len(prompts.system)
        assert found(rank, prompts.about(OTHER)) == (shared, shared, 0)


AMONG_PICTURES: dict[str, HybridScenario] = KINDS | {
    "grouped": GROUPED,
    "draft": replace(GRID, name="a draft, states on a grid"),
    "draft-window": HybridScenario(
        "a draft, window",
        HybridKind(window=32, page=16, verified=3, draft=("full",)),
        hbm_tokens=480,
        window_tokens=256,
        settings=IN_CHUNKS,
        make_scheduler=GRID.make_scheduler,
    ),
}


@pytest.mark.parametrize("kind", AMONG_PICTURES)
def test_every_row_is_right_among_pictures(kind: str) -> None:
    traffic_among_pictures(AMONG_PICTURES[kind], seed=3, steps=60)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", AMONG_PICTURES)
def test_every_row_is_right_among_pictures_for_long(kind: str, seed: int) -> None:
    traffic_among_pictures(AMONG_PICTURES[kind], seed=800 + seed, steps=300, faults=0.1, threaded=True)


def traffic_among_pictures(scenario: HybridScenario, seed: int, steps: int, **sizes: Any) -> None:
    room = {"full": 120, "other": 60, "disk": 2000}
    if scenario.kind.page == PAGE:
        room = {"full": 16, "other": 8, "disk": 200}
    with stored(scenario, **room, backlog=1 << 26, **sizes) as rank:
        drive(rank, seed, steps, make_traffic=PicturedTraffic)
        assert len(rank.scheduler.finished) > 8
        pictured = [req for req in rank.scheduler.finished if max(req.origin_input_ids) > 1 << 60]
        assert any(req.cached_tokens for req in pictured)


ANNOUNCED = {each.name: each for each in SCENARIOS if each.tree_core == "python"}


@pytest.mark.parametrize(
    "name",
    ["states", *(pytest.param(each, marks=pytest.mark.long) for each in ANNOUNCED if each != "states")],
)
def test_prompts_with_pictures_are_announced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers know each prefix that can be resumed and no other, by the digests of its pictures."""
    monkeypatch.setattr(HybridScheduler, "change_weights", lambda scheduler: None)
    make_below: Callable[..., Any] = announced_store(full=300, other=200, disk=4000)
    with HybridRank(ANNOUNCED[name], make_cache=HybridRadixCache, make_below=make_below) as rank:
        drive(rank, seed=2, steps=50, make_traffic=PicturedTraffic)
        assert len(rank.scheduler.finished) > 3

"""Two ranks of one instance with a model with windows or states: one tree above unlike tiers.

One rank has less DRAM, or a disk that fails. A prefix is resumed only where both have all that it needs: the
ranks intersect the lengths that they find, as SGLang does for linkers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_hybrid_store import Sizes, StoreBelow
from engine_hybrids import SCENARIOS, HybridRank, HybridScenario
from engine_page_pools import COMPRESSED, GROUPED, PAGE, QSA
from engine_ranks import RANKS, DriftedApart, Together
from engine_simulation import Traffic
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_ext.engine.hybrid.components import FULL
from sglang_ext.engine.hybrid.forks import Forks
from sglang_ext.patches.adapter.hybrid.cache import HybridRadixCache

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

BY_NAME = {str(scenario): scenario for scenario in (*SCENARIOS, COMPRESSED, GROUPED, QSA)}
SHORT = ("window, page 16", "states", "window and states on a grid, page 16, overlap")
MUCH, LITTLE = Sizes(full=600, other=400, disk=4000), Sizes(full=200, other=60, disk=4000, seed=2)
FAILING = Sizes(full=600, other=400, disk=2000, faults=0.15, threaded=True)
FEW_PAGES = Sizes(full=16, other=8, disk=200, backlog=1 << 26)
UNLIKE = {"less DRAM": (MUCH, LITTLE), "a failing disk": (LITTLE, FAILING)}
"""The tiers of each rank."""


def tiers(scenario: HybridScenario, unlike: str) -> tuple[Sizes, Sizes]:
    """Pages of 256 tokens are large: there are few of them."""
    if scenario.kind.page < PAGE:
        return UNLIKE[unlike]
    return FEW_PAGES, replace(FEW_PAGES, full=12, seed=2, faults=FAILING.faults * (unlike != "less DRAM"))


class Ranked:
    """One rank in a thread of its own.

    Args:
        common: whether match lengths are compared between the ranks.
        alone: whether the rank takes note of its own copies and reads without the other.
    """

    def __init__(
        self,
        number: int,
        together: Together,
        scenario: HybridScenario,
        sizes: Sizes,
        *,
        common: bool = True,
        alone: bool = False,
    ) -> None:
        self.number, self.together = number, together
        self.error: BaseException | None = None

        def least(numbers: Sequence[int]) -> Sequence[int]:
            said = together.everyone(number, list(numbers))
            return [min(each) for each in zip(*said, strict=True)]

        self.rank = HybridRank(
            scenario,
            make_cache=HybridRadixCache,
            make_below=lambda pools, cache: StoreBelow(pools, cache, sizes, None if alone else least),
        )

        def reduce(tensor: torch.Tensor, op: Any) -> None:
            assert op == torch.distributed.ReduceOp.MIN
            tensor.copy_(torch.tensor(least(tensor.tolist()), dtype=tensor.dtype))

        if common:
            self.rank.cache._all_reduce_attn_groups = reduce

    def picture(self) -> Any:
        """The tree, and free slots, and the lengths of all matches."""
        rank = self.rank
        nodes = []
        for node, chain in rank.nodes():
            values = [node.component_data[part].value for part in rank.pools.oracles]
            locks = [node.component_data[part].lock_ref for part in rank.pools.oracles]
            nodes.append((chain[-1], [None if each is None else each.tolist() for each in values], locks))
        free = [rank.pools.free(part).tolist() for part in rank.pools.oracles]
        return sorted(nodes), free, rank.scheduler.reused, rank.scheduler.loaded

    def step(self) -> None:
        """One pass, after which both ranks have the same tree."""
        self.rank.step()
        pictures = self.together.everyone(self.number, self.picture())
        if pictures[0] != pictures[1]:
            raise DriftedApart("the ranks have different trees")

    def serve(self, tokens: Sequence[int]) -> Req:
        """One request alone."""
        req = self.rank.scheduler.submit(list(tokens), new_tokens=1)
        while not self.rank.scheduler.idle:
            self.step()
        return req

    def run(self, play: Play) -> None:
        try:
            play(self)
            self.rank.finish()
        except BaseException as error:  # noqa: BLE001 - raised again by the test
            self.error = error
            self.together.give_up()


Play = Callable[[Ranked], None]


def traffic(seed: int, steps: int) -> Play:
    """Random requests, the same on all ranks."""

    def play(ranked: Ranked) -> None:
        rank = ranked.rank
        if rank.cache.chunks is not None:
            rank.cache.chunks.forks = Forks(known=4, ahead=12)  # so that most prompts are cut
        drawn = Traffic(rank.scenario, seed, rank.scenario.stretch)
        for _ in range(steps):
            drawn.act(rank.scheduler)
            ranked.step()

    return play


def on_two(scenario: HybridScenario, sizes: tuple[Sizes, Sizes], play: Play, **how: Any) -> list[HybridRank]:
    """Have two ranks do the same."""
    together = Together()
    with ExitStack() as stack:
        ranks = [Ranked(number, together, scenario, sizes[number], **how) for number in range(RANKS)]
        for each in ranks:
            stack.enter_context(each.rank)
        threads = [threading.Thread(target=each.run, args=(play,)) for each in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=300)
            assert not thread.is_alive()
        errors = [each.error for each in ranks if each.error is not None]
        errors.sort(key=lambda error: isinstance(error, DriftedApart))
        if errors:  # the other rank raises `DriftedApart` when one gives up
            raise errors[0]
        return [each.rank for each in ranks]


@pytest.mark.parametrize("unlike", UNLIKE)
@pytest.mark.parametrize("name", SHORT)
def test_ranks_keep_equal_trees_above_unlike_tiers(name: str, unlike: str) -> None:
    scenario = BY_NAME[name]
    ranks = on_two(scenario, tiers(scenario, unlike), traffic(seed=1, steps=60))
    assert ranks[0].scheduler.reused == ranks[1].scheduler.reused > 0


@pytest.mark.parametrize("name", [str(COMPRESSED), str(GROUPED), str(QSA)])
def test_ranks_keep_equal_trees_above_unlike_tiers_of_large_pages(name: str) -> None:
    scenario = BY_NAME[name]
    ranks = on_two(scenario, tiers(scenario, "a failing disk"), traffic(seed=1, steps=50))
    assert ranks[0].scheduler.reused == ranks[1].scheduler.reused > 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("unlike", UNLIKE)
@pytest.mark.parametrize("name", [name for name, each in BY_NAME.items() if each.tree_core == "python"])
def test_ranks_keep_equal_trees_above_unlike_tiers_for_long(name: str, unlike: str, seed: int) -> None:
    scenario = BY_NAME[name]
    ranks = on_two(scenario, tiers(scenario, unlike), traffic(seed=10 + seed, steps=300))
    assert ranks[0].scheduler.loaded == ranks[1].scheduler.loaded


def second_rank_lacks_an_end(ranked: Ranked) -> None:
    """Both ranks have a prompt of two turns below HBM, but one has lost its last KV, behind the
    state at 96 tokens."""
    rank, first = ranked.rank, [at % 5 for at in range(64)]
    whole = [*first, *(at % 3 for at in range(64))]
    for prompt in (first, whole):
        ranked.serve(prompt)
    rank.settle()
    rank.cache.check_hicache_events()
    everything = rank.pools.tokens
    rank.cache.evict(EvictParams(everything, swa_num_tokens=everything, mamba_num=everything))
    if ranked.number:
        assert isinstance(rank.below, StoreBelow)
        memory = rank.below.store.parts[FULL].memory
        memory._forget(list(memory._blocks)[-1:])
    assert ranked.serve([*whole, 1, 2, 3]).host_loaded_length == 96


DRAM = Sizes(), Sizes(seed=2)


def test_a_prefix_is_resumed_where_both_ranks_can() -> None:
    on_two(BY_NAME["states"], DRAM, second_rank_lacks_an_end)


def test_ranks_that_go_by_their_own_lookups_drift_apart() -> None:
    """The twin without the intersection."""
    with pytest.raises(AssertionError):
        on_two(BY_NAME["states"], DRAM, second_rank_lacks_an_end, common=False)


def test_ranks_that_go_by_their_own_copies_drift_apart() -> None:
    with pytest.raises(DriftedApart):
        on_two(BY_NAME["states"], UNLIKE["less DRAM"], traffic(seed=1, steps=60), alone=True)

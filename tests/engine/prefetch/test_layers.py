"""The lowest layers of announced sessions in HBM, where whole sessions do not fit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from engine_pools import PoolKind, WrongKvError
from engine_scheduler import Settings
from engine_simulation import Rank, Scenario, finish
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_ext.engine.movers.layer_copies import word_rows
from sglang_ext.engine.prefetch.hbm_prefetch import Prefetcher
from sglang_ext.engine.prefetch.layer_fill import LayerFill
from sglang_ext.engine.tiers.layer_region import LayerRegion
from sglang_ext.engine.tiers.load_policy import layers_to_hold
from sglang_ext.engine.tiers.load_report import details_of
from sglang_ext.geometry import BlockLayout
from sglang_ext.keys import encode_tokens
from sglang_ext.mempool.ledger import Use
from sglang_ext.tiers import Tier

pytestmark = pytest.mark.usefixtures("sglang_config")

BLOCK = 4
LAYERS = 4
NARROW = Scenario(
    "three sessions fit",
    kind=PoolKind(layers=LAYERS),
    hbm_tokens=256,
    dram_blocks=300,
    layers=1 << 30,
    settings=Settings(chunk=None, new_token_ratio=0.05),
)
SESSION = 20
"""Blocks of a session; HBM has 64, and a strip 2."""


def prompt(number: int, blocks: int = SESSION) -> list[int]:
    """Prompts that share nothing; one token more than whole blocks, so that all of them may match."""
    return [1000 * number + i for i in range(blocks * BLOCK + 1)]


@pytest.fixture
def rank() -> Iterator[Rank]:
    with Rank(NARROW) as rank:
        yield rank


def prefetcher_of(rank: Rank) -> Prefetcher:
    found = rank.cache.find(Prefetcher)
    assert found is not None
    return found


def region_of(rank: Rank) -> LayerRegion:
    return fill_of(rank).region


def fill_of(rank: Rank) -> LayerFill:
    found = rank.cache.find(LayerFill)
    assert found is not None
    return found


def passes(rank: Rank, after: Callable[[], None] = lambda: None) -> None:
    """Passes of an idle scheduler until nothing more is brought."""
    for _ in range(400):
        rank.scheduler.step()
        rank.check()
        after()
        if not rank.cache.keeps_awake:
            return
        rank.settle()
    raise AssertionError(f"it does not end: {prefetcher_of(rank)!r}")


def leave_hbm(rank: Rank) -> None:
    rank.settle()
    rank.cache.evict(EvictParams(num_tokens=rank.pools.tokens))
    assert rank.cache.total_size() == 0


def announced(rank: Rank, sizes: list[int], after: Callable[[], None] = lambda: None) -> None:
    """Sessions of so many blocks that were served, are in DRAM only, and then announced."""
    for number, blocks in enumerate(sizes, 1):
        rank.serve(prompt(number, blocks))
    leave_hbm(rank)
    for number, blocks in enumerate(sizes, 1):
        prefetcher_of(rank).prefetch(f"session {number}", prompt(number, blocks))
    passes(rank, after)


def wants(rank: Rank, layers: int) -> None:
    """Make so many layers of each session the number that hides the loading of the rest."""
    fill_of(rank)._layers_for = lambda blocks, before: layers  # type: ignore[method-assign]


def holds(rank: Rank, session: int) -> set[int]:
    """The layers of a session in the region."""
    return {cell.layer for cell in region_of(rank).cells if cell.session == f"session {session}"}


def in_hbm(rank: Rank, tokens: list[int]) -> int:
    return rank.tree.holders((0, None, None), encode_tokens(tokens)).get(rank.hbm, 0)


def test_layer_0_of_all_comes_where_whole_sessions_do_not_fit(rank: Rank) -> None:
    announced(rank, [SESSION] * 8)
    for number in range(1, 9):
        whole = in_hbm(rank, prompt(number)) == SESSION * BLOCK
        assert whole or 0 in holds(rank, number), f"session {number} would wait for its first layer"
    assert not all(in_hbm(rank, prompt(number)) for number in range(1, 9))
    assert region_of(rank).blocks == rank.store.ledger.reserved(Tier.HBM, Use.LAYERS)


def test_layer_0_of_all_comes_before_layer_1_of_any(rank: Rank) -> None:
    wants(rank, 3)
    most = 0

    def in_order() -> None:
        nonlocal most
        held = [holds(rank, number) for number in range(1, 6)]
        most = max([most, *(max(layers, default=0) for layers in held)])
        for number, layers in enumerate(held, 1):
            # Sessions whose evicted ends have just made room for this layer get theirs in the next pass.
            some = in_hbm(rank, prompt(number)) > 0
            assert some or most == 0 or most - 1 in layers, held

    announced(rank, [SESSION] * 5, in_order)
    assert most >= 1


def test_what_is_here_is_not_loaded_again_and_the_answer_is_right(rank: Rank) -> None:
    """The oracle looks at every row that the forward pass reads."""
    announced(rank, [SESSION] * 8)
    session = next(number for number in range(1, 9) if not in_hbm(rank, prompt(number)))
    req = rank.serve(prompt(session))
    assert req.cached_tokens_host == SESSION * BLOCK
    assert region_of(rank).counters.used == SESSION
    assert details_of(req)["host_layers_in_hbm"] == 1
    finish(rank)


def test_a_flipped_byte_in_the_region_is_seen(rank: Rank) -> None:
    """The twin: the forward pass reads those layers from the region."""
    announced(rank, [SESSION] * 8)
    rank.look_inside = False
    session = next(number for number in range(1, 9) if not in_hbm(rank, prompt(number)))
    cell = next(cell for cell in region_of(rank).cells if cell.session == f"session {session}")
    word_rows(rank.pools.tensors[cell.place][0], torch.uint8)[int(cell.strip.reservation.places[0]), 1] ^= 1
    with pytest.raises(WrongKvError):
        rank.serve(prompt(session))


def test_the_engine_gets_its_slots_back_later_layers_first(rank: Rank) -> None:
    wants(rank, 2)
    announced(rank, [SESSION] * 4)
    region = region_of(rank)
    assert {cell.layer for cell in region.cells} == {0, 1}
    worths = []
    while region.blocks:
        going = set(region.cells)
        assert region.give_up(1) == region.strip_blocks
        going -= set(region.cells)
        worths.append(max(-cell.layer for cell in going))
    assert worths == sorted(worths), "a strip with lower layers went before one with only higher ones"
    assert len(set(worths)) == 2
    rank.check()
    rank.cache.evict(EvictParams(num_tokens=rank.pools.tokens))
    rank.check()
    assert (region.blocks, rank.cache.total_size()) == (0, 0)
    finish(rank)


def test_a_block_that_leaves_dram_is_forgotten(rank: Rank) -> None:
    announced(rank, [SESSION] * 8)
    assert rank.tier is not None
    region = region_of(rank)
    assert region.cells
    for number in range(1, 9):
        prefetcher_of(rank).cancel(f"session {number}")
    rank.cache.evict(EvictParams(num_tokens=rank.pools.tokens - region.blocks * BLOCK))
    ids = rank.tier.take(rank.tier.n_blocks)
    rank.tier.give_back(ids)
    rank.check()
    assert not region.cells
    assert region.blocks == 0


@pytest.mark.parametrize("layers", [1, 2])
def test_the_smallest_session_goes_first_of_equal_layers(layers: int) -> None:
    with Rank(dataclasses.replace(NARROW, pressure="smallest-first", hbm_tokens=320)) as rank:
        wants(rank, layers)
        announced(rank, [24, 16, 30, 12, 26, 20])
        region = region_of(rank)
        sizes = [{cell.session for cell in region.cells if cell.layer == layers - 1}]
        while region.displace(region.free_places() + 1, layers - 2):
            sizes.append({cell.session for cell in region.cells if cell.layer == layers - 1})
        gone = [next(iter(a - b)) for a, b in itertools.pairwise(sizes) if a - b]
        blocks = [{1: 24, 2: 16, 3: 30, 4: 12, 5: 26, 6: 20}[int(id[-1])] for id in gone]
        assert len(blocks) >= 2
        assert blocks == sorted(blocks)
        rank.check()


def test_new_weights_and_a_flush_empty_it(rank: Rank) -> None:
    announced(rank, [SESSION] * 8)
    assert region_of(rank).blocks
    rank.scheduler.change_weights()
    rank.check()
    assert region_of(rank).blocks == 0
    finish(rank)


def test_without_hints_nothing_is_taken(rank: Rank) -> None:
    for number in range(1, 9):
        rank.serve(prompt(number))
    passes(rank)
    assert region_of(rank).blocks == 0
    assert region_of(rank).counters.filled == 0


@pytest.mark.parametrize(
    ("load", "compute", "layers"),
    [
        *((None, 1.0, 0), (1.0, None, 0), (0.5, 1.0, 0), (0.7, 1.0, 1), (1.0, 1.0, 1)),
        *((2.0, 1.0, 17), (1000.0, 1.0, 31)),
    ],
)
def test_as_many_layers_as_hide_the_loading_of_the_rest(
    load: float | None, compute: float | None, layers: int
) -> None:
    assert layers_to_hold(32, load, compute) == layers


def test_models_whose_layers_differ_have_no_region() -> None:
    assert LayerRegion.fits(BlockLayout(4, ((8, 6), (8, 6))))
    assert not LayerRegion.fits(BlockLayout(4, ((8, 6), (8, 8))))
    assert not LayerRegion.fits(BlockLayout(4, ((8, 6),)))

"""Pictures in prompts of models with one slot of KV for each token: blocks are found by their content.

Families: Kimi K2.5 (latents), Qwen3-VL (keys and values), latents with index keys. A prompt is two blocks of
words that other prompts begin with, a picture that ends within the fourth block, and words to its end. Each
row that a forward pass reads is compared, as in `engine_simulation`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
from engine_movers import until
from engine_pictures import pad_of
from engine_pools import PoolKind, WrongKvError
from engine_scheduler import Settings
from engine_simulation import Rank, Scenario
from peer_rig import MakeServer, lend_and_fetch

from sglang_ext.engine.prefetch.hbm_prefetch import Prefetcher
from sglang_ext.testing.tiers import WrappedTier
from sglang_ext.tiered_store.tier import BlockTier

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

KINDS = {"mla": PoolKind("mla", 16), "mha": PoolKind("mha", 4), "dsa": PoolKind("dsa", 64, layers=3)}
EACH = pytest.mark.parametrize("kind", KINDS)
FIRST, OTHER = pad_of(1), pad_of(2)
MORE = [1, 2, 3]


def scenario_of(kind: str, *, disk: bool = False) -> Scenario:
    page = KINDS[kind].page
    return Scenario(
        kind,
        KINDS[kind],
        page,
        hbm_tokens=20 * page,
        dram_blocks=40,
        disk_blocks=200 if disk else None,
        settings=Settings(chunk=None, new_token_ratio=0.05),
    )


def system(kind: str) -> list[int]:
    return [at % 5 for at in range(2 * KINDS[kind].page)]


def about(kind: str, picture: int) -> list[int]:
    page = KINDS[kind].page
    tokens = page + page // 4
    return [*system(kind), *[picture] * tokens, *(at % 4 for at in range(2 * page - tokens))]


def open_rank(scenario: Scenario, disk: Callable[[BlockTier], BlockTier] = lambda own: own) -> Rank:
    """A rank; the oracle cannot look into its tree, where digests stand for pictures."""
    rank = Rank(scenario, disk_class=disk)
    rank.look_inside = False
    return rank


class Borrowed(WrappedTier):
    """A disk that another instance closes."""

    def close(self) -> None:
        pass


def keep_below(rank: Rank, kind: str, *, on_disk: bool = False) -> None:
    """Have the words alone and a prompt with a picture in DRAM, or on disk, alone."""
    for prompt in (system(kind), about(kind, FIRST)):
        rank.serve(prompt)
    rank.leave_hbm(on_disk=on_disk)


def found(rank: Rank, prompt: list[int]) -> tuple[int, int, int]:
    """The tokens that a request finds: in all, below HBM, and of these on disk."""
    scheduler = rank.scheduler
    before = scheduler.loaded_tokens, scheduler.disk_tokens
    req = rank.serve([*prompt, *MORE])
    return req.cached_tokens, scheduler.loaded_tokens - before[0], scheduler.disk_tokens - before[1]


@EACH
def test_a_picture_is_found_in_hbm_and_another_is_not(kind: str) -> None:
    with open_rank(scenario_of(kind)) as rank:
        rank.serve(about(kind, FIRST))
        assert found(rank, about(kind, OTHER))[:2] == (len(system(kind)), 0)
        assert found(rank, about(kind, FIRST))[:2] == (len(about(kind, FIRST)), 0)


@pytest.mark.parametrize("on_disk", [False, True], ids=["in DRAM", "on disk"])
@EACH
def test_a_picture_is_found_below_hbm_and_another_is_not(kind: str, on_disk: bool) -> None:
    for picture, length in ((FIRST, len(about(kind, FIRST))), (OTHER, len(system(kind)))):
        with open_rank(scenario_of(kind, disk=on_disk)) as rank:
            keep_below(rank, kind, on_disk=on_disk)
            assert found(rank, about(kind, picture)) == (length, length, length * on_disk)


@EACH
def test_a_restart_finds_the_picture_on_disk_and_no_other(kind: str) -> None:
    scenario = scenario_of(kind, disk=True)
    disks: list[BlockTier] = []

    def kept(disk: BlockTier) -> BlockTier:
        disks.append(disk)
        return disk

    with open_rank(scenario, kept) as rank:
        keep_below(rank, kind)
        for content, length in ((1, len(about(kind, FIRST))), (2, len(system(kind)))):
            with open_rank(scenario, lambda _: Borrowed(disks[0])) as again:
                assert found(again, about(kind, pad_of(content))) == (length, length, length)


@EACH
def test_one_wrong_bit_behind_a_picture_is_seen(kind: str) -> None:
    """The twin: answers come from the bytes of the picture's KV."""
    with open_rank(scenario_of(kind)) as rank:
        keep_below(rank, kind)
        assert rank.arena is not None
        (end,) = (node for node in rank.tree.nodes() if not node.children)
        rank.arena.blocks[int(end.placements[rank.dram_holder][-1]), 5] ^= 1
        with pytest.raises(WrongKvError):
            rank.serve([*about(kind, FIRST), *MORE])


@pytest.mark.parametrize("damaged", [False, True], ids=["sound", "one wrong bit"])
@EACH
def test_the_words_before_a_picture_are_fetched(kind: str, make_server: MakeServer, damaged: bool) -> None:
    """As far as a router knows the tokens."""
    scenario = replace(scenario_of(kind), shared_dram=True)
    owner, reader = (make_server(scenario) for _ in range(2))
    for server in (owner, reader):
        server.rank.look_inside = False
    owner.serve(about(kind, FIRST))
    if damaged:
        assert owner.rank.arena is not None
        (node,) = (each for each in owner.rank.tree.nodes() if owner.rank.dram_holder in each.placements)
        owner.rank.arena.blocks[int(node.placements[owner.rank.dram_holder][1]), 5] ^= 1
    lend_and_fetch(owner, reader, system(kind))
    req = reader.rank.scheduler.submit([*about(kind, OTHER), *MORE], new_tokens=2)
    with pytest.raises(WrongKvError) if damaged else nullcontext():
        reader.finish(req)
        assert req.cached_tokens == reader.rank.scheduler.loaded_tokens == len(system(kind))


@EACH
def test_a_hint_brings_the_words_before_a_picture(kind: str) -> None:
    with open_rank(scenario_of(kind, disk=True)) as rank:
        keep_below(rank, kind, on_disk=True)
        prefetcher = rank.cache.find(Prefetcher)
        assert prefetcher is not None
        prefetcher.prefetch("session", system(kind))

        def ended() -> bool:
            rank.scheduler.step()
            rank.check()
            rank.settle()
            return not prefetcher.busy

        until(ended, "the hint")
        assert found(rank, about(kind, OTHER)) == (len(system(kind)), 0, 0)

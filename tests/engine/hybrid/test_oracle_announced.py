"""After each pass, routers know each prefix that can be resumed, and no other."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from engine_hybrid_announced import BLOCK, AnnouncedBelow, announced_store
from engine_hybrids import SCENARIOS, HybridKind, HybridRank, HybridScenario, HybridScheduler, drive
from engine_simulation import Traffic

from sglang_ext.patches.adapter.hybrid.cache import HybridRadixCache
from sglang_ext.tiers import Tier

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]
SHORT = {"window", "window, page 16", "states", "window and states on a grid, page 16, overlap"}
LOOKED_INTO = [
    pytest.param(each, marks=() if each.name in SHORT else pytest.mark.long, id=each.name)
    for each in SCENARIOS
    if each.tree_core == "python"
]
IN_RUST = [each for each in SCENARIOS if each.tree_core == "rust"]


def followed(scenario: HybridScenario) -> HybridRank:
    return HybridRank(
        scenario,
        make_cache=HybridRadixCache,
        make_below=announced_store(full=300, other=200, disk=4000),
    )


@pytest.mark.parametrize("scenario", LOOKED_INTO)
def test_each_resume_point_is_announced_and_no_other(
    scenario: HybridScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one kind of weights: nodes of others stay in SGLang's tree, and are not announced."""
    monkeypatch.setattr(HybridScheduler, "change_weights", lambda scheduler: None)
    with followed(scenario) as rank:
        drive(rank, seed=2, steps=100)
        assert len(rank.scheduler.finished) > 10
        assert isinstance(rank.below, AnnouncedBelow)
        assert all(rank.below.most[tier] for tier in (Tier.HBM, Tier.DRAM, Tier.DISK))


@pytest.mark.parametrize("scenario", IN_RUST, ids=str)
def test_the_tree_in_rust_is_followed(scenario: HybridScenario) -> None:
    """SGLang's tree in Rust takes the steps of the one in Python, and the same is announced of it."""
    told: list[list[dict[Any, int]]] = [[], []]
    for core, seen in zip(("python", "rust"), told, strict=True):
        with followed(dataclasses.replace(scenario, tree_core=core)) as rank:
            below, traffic = rank.below, Traffic(scenario, 2)
            assert isinstance(below, AnnouncedBelow)
            for _ in range(80):
                traffic.act(rank.scheduler)
                rank.step()
                below.follow()
                seen.append(below.follower.replica.contents())
    assert any(told[1])
    assert told[0] == told[1]


WINDOW = HybridScenario("window", HybridKind(window=32), window_tokens=200)
PROMPT = [at % 5 for at in range(64)]


def test_new_weights_leave_nothing_announced() -> None:
    with followed(WINDOW) as rank:
        below = rank.below
        assert isinstance(below, AnnouncedBelow)
        rank.serve(PROMPT)
        below.settle()
        below.follow()
        assert below.follower.replica.contents()
        tiers = rank.cache.blocks_by_tier()
        assert (tiers[Tier.HBM], tiers[Tier.DRAM][0]) == ((4, 15), 4)
        assert 300 // BLOCK <= tiers[Tier.DRAM][1] < 500 // BLOCK
        assert tiers[Tier.DISK] == (4, 4000 // BLOCK)
        rank.look_inside = False  # the oracle knows one kind of weights
        rank.cache.weights_changing()
        below.follower.follow()
        assert not below.follower.replica.contents(), "told at once, without a pass"
        rank.serve([*PROMPT, 1, 2])
        assert not any(below.follow().values()), "nothing is cached while they change"
        rank.cache.weights_changed()
        rank.serve([*PROMPT, 1, 2], extra_key="tenant")
        told = below.follow()[Tier.HBM]
        assert {space for space, _ in told} == {(2, "tenant", None)}
        assert {space for space, _ in below.follower.replica.contents()} == {("tenant", None)}

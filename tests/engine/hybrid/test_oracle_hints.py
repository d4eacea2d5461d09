"""Advisory requests to models with windows or states: every row that a hint brought from disk is right.

The planners are those of a member of a cluster; the checks are those of `test_oracle_store`.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from engine_drafts import GRID
from engine_hybrids import HybridRank, HybridScenario, drive
from engine_movers import until
from engine_page_pools import COMPRESSED, GROUPED, PAGE, QSA
from engine_pools import WrongKvError
from test_oracle_fetches import PROMPTS
from test_oracle_store import (
    BOTH,
    PROMPT,
    WINDOW,
    damage,
    flip_a_bit,
    leave_hbm,
    store_of,
    stored,
)

from sglang_ext.engine.prefetch.disk_hints import DiskHints
from sglang_ext.keys import encode_tokens
from sglang_ext.protocol.agent import Advise

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]


def hinted(scenario: HybridScenario, **sizes: Any) -> HybridRank:
    return stored(scenario, hints=True, **sizes)


def advise(rank: HybridRank, prompt: list[int]) -> None:
    """A router's hint, and passes of an idle scheduler until it has ended."""
    message = Advise("session", encode_tokens(prompt), ttl_s=60.0)
    assert any(planner.takes_command(message, 0.0) for planner in rank.cache.planners)
    hints = rank.cache.find(DiskHints)
    assert hints is not None

    def once() -> bool:
        rank.step()
        return not hints.busy

    until(once, "the hint")


@pytest.mark.parametrize("damaged", [False, True], ids=["sound", "one wrong bit"])
@pytest.mark.parametrize(("scenario", "prompt"), PROMPTS)
def test_blocks_that_a_hint_brings_are_right(
    scenario: HybridScenario, prompt: list[int], damaged: bool
) -> None:
    """They are in DRAM before their request comes, which reads nothing from disk. The twin damages them."""
    with hinted(
        scenario, full=200, other=100, disk=4000 if prompt is PROMPT else 200, backlog=1 << 26
    ) as rank:
        leave_hbm(rank, prompt)
        for part in store_of(rank).store.parts.values():
            part.memory.clear()
        advise(rank, prompt)
        if damaged:
            for part in store_of(rank).store.parts.values():
                damage(rank, part.component.name, flip_a_bit)
            rank.look_inside = False
        with pytest.raises(WrongKvError, match="in forward") if damaged else nullcontext():
            rank.serve([*prompt, 1, 2, 3])
            assert rank.scheduler.loaded == len(prompt)
            assert not rank.scheduler.disk_tokens


HINTED = {
    "window": replace(WINDOW, prefetch=0.3),
    "window and states": replace(BOTH, prefetch=0.3),
    "a draft, states on a grid": replace(GRID, prefetch=0.3),
    "compressed": replace(COMPRESSED, prefetch=0.3),
    "grouped": replace(GROUPED, prefetch=0.3),
    "qsa": replace(QSA, prefetch=0.3),
}


@pytest.mark.parametrize("name", HINTED)
def test_every_row_is_right_among_hints(name: str) -> None:
    traffic_among_hints(HINTED[name], seed=3, steps=60)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", HINTED)
def test_every_row_is_right_among_hints_for_long(name: str, seed: int) -> None:
    traffic_among_hints(HINTED[name], seed=700 + seed, steps=300, faults=0.1, threaded=True)


def traffic_among_hints(scenario: HybridScenario, seed: int, steps: int, **sizes: Any) -> None:
    """Prompts are announced that come soon, or never, or are withdrawn."""
    large = scenario.kind.page == PAGE
    room = {"full": 16, "other": 8, "disk": 200} if large else {"full": 120, "other": 60, "disk": 2000}
    with hinted(scenario, **room, backlog=1 << 26, **sizes) as rank:
        traffic = drive(rank, seed, steps)
        assert len(rank.scheduler.finished) > 8
        assert traffic.counts["prefetch"] > 8

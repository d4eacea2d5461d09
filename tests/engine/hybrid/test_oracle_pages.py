"""The oracle over pools with a row for each page: in SGLang's tree, and below it in our DRAM and on disk.

The checks are those of `test_oracle_hybrids` and `test_oracle_store`; prompts have several pages of 256
tokens.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine_hybrids import HybridRank, HybridScenario, drive
from engine_page_pools import COMPRESSED, GROUPED, LOW_RATIO, PAGE, QSA, REPLAYED, whole
from engine_pools import WrongKvError
from test_oracle_store import damage, leave_hbm, store_of, stored

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

EACH = pytest.mark.parametrize(
    "scenario",
    [COMPRESSED, LOW_RATIO, REPLAYED, GROUPED, QSA],
    ids=["compressed", "low-ratio", "replayed", "grouped", "qsa"],
)
PROMPT = [at % 5 for at in range(4 * PAGE)]
MORE = [1, 2, 3]
ROOM = {"full": 120, "other": 60}


@EACH
def test_every_row_that_a_model_reads_is_right(scenario: HybridScenario) -> None:
    with HybridRank(scenario) as rank:
        drive(rank, seed=1, steps=80)
        assert len(rank.scheduler.finished) > 15
        assert rank.scheduler.reused > PAGE
        assert rank.evicted.num_tokens_evicted


@EACH
def test_every_row_from_dram_and_disk_is_right(scenario: HybridScenario) -> None:
    with stored(scenario, full=10, other=8, disk=2000, backlog=1 << 26) as rank:
        drive(rank, seed=2, steps=100)
        assert len(rank.scheduler.finished) > 15
        assert rank.scheduler.loaded > PAGE
        assert rank.scheduler.disk_tokens >= PAGE


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
@EACH
def test_every_row_is_right_for_long(scenario: HybridScenario, seed: int) -> None:
    """24 runs, 7,200 passes of the loop."""
    with stored(scenario, full=16, other=8, disk=100, faults=0.1, threaded=True, backlog=1 << 26) as rank:
        drive(rank, seed=300 + seed, steps=300)
        assert len(rank.scheduler.finished) > 40


@EACH
def test_a_prompt_is_found_in_dram(scenario: HybridScenario) -> None:
    with stored(whole(scenario), **ROOM) as rank:
        leave_hbm(rank, PROMPT)
        rank.serve([*PROMPT, *MORE])
        assert rank.scheduler.loaded == len(PROMPT)


@EACH
def test_a_prompt_is_found_on_disk(scenario: HybridScenario) -> None:
    with stored(whole(scenario), **ROOM, disk=200, backlog=1 << 26) as rank:
        leave_hbm(rank, PROMPT)
        for part in store_of(rank).store.parts.values():
            part.memory.clear()
        rank.serve([*PROMPT, *MORE])
        assert rank.scheduler.disk_tokens >= len(PROMPT)
        assert rank.scheduler.loaded == len(PROMPT)


PLANES = (
    (COMPRESSED, "full", 3),
    (COMPRESSED, "window", 5),
    (LOW_RATIO, "full", 4),
    (LOW_RATIO, "window", 3),
    (REPLAYED, "full", 4),
    (GROUPED, "full", 4),
    (GROUPED, "state", 6),
    (QSA, "full", 6),
    (QSA, "state", 8),
)


def flip_a_late_bit(blocks: np.ndarray) -> None:
    """In the share of the last token of the last block, or near the beginning of a state."""
    last = blocks.reshape(len(blocks), -1)[-1]
    last[(PAGE - 1) * (len(last) // PAGE) + 3] ^= 1


@pytest.mark.parametrize(
    "twin",
    [(scenario, part, plane) for scenario, part, planes in PLANES for plane in range(planes)],
    ids=lambda twin: f"{twin[0]}: {twin[1]} {twin[2]}",
)
def test_one_bit_in_dram_is_seen(twin: tuple[HybridScenario, str, int]) -> None:
    scenario, component, plane = twin
    with stored(scenario, **ROOM) as rank:
        leave_hbm(rank, PROMPT)
        damage(rank, component, flip_a_late_bit, plane)
        rank.look_inside = False
        with pytest.raises(WrongKvError, match="in forward"):
            rank.serve([*PROMPT, *MORE])


def test_the_twins_are_of_all_planes() -> None:
    for scenario, component, planes in PLANES:
        with stored(scenario, **ROOM) as rank:
            parts = {part.component.name: part for part in store_of(rank).store.parts.values()}
            assert parts.keys() == {name for of, name, _ in PLANES if of is scenario}
            assert len(parts[component].memory.arena.layout.row_bytes) == planes

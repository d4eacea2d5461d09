"""LoRA adapters of models with windows or states: no two share anything, in HBM, DRAM or on disk.

The oracle's rows depend on the adapter, so that a row of another adapter is a wrong one.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine_hybrids import HybridScenario
from engine_page_pools import COMPRESSED, GROUPED, LOW_RATIO, PAGE, REPLAYED, whole
from engine_pools import WrongKvError
from test_oracle_store import BOTH, PAGED, STATES, damage, leave_hbm, store_of, stored

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

EACH = pytest.mark.parametrize(
    "scenario",
    [PAGED, STATES, BOTH, COMPRESSED, LOW_RATIO, REPLAYED, whole(GROUPED)],
    ids=["window", "states", "both", "compressed", "low-ratio", "replayed", "grouped"],
)


def prompt_of(scenario: HybridScenario) -> list[int]:
    return [at % 5 for at in range(4 * PAGE if scenario.kind.page == PAGE else 64)]


@pytest.mark.parametrize("on_disk", [False, True], ids=["in DRAM", "on disk"])
@EACH
def test_adapters_share_nothing(scenario: HybridScenario, on_disk: bool) -> None:
    prompt, large = prompt_of(scenario), scenario.kind.page == PAGE
    room = {"full": 120, "other": 60} if large else {"full": 600, "other": 400}
    with stored(scenario, **room, disk=200 if large else 4000, backlog=1 << 26) as rank:
        leave_hbm(rank, prompt, adapter="one")
        if on_disk:
            for part in store_of(rank).store.parts.values():
                part.memory.clear()
        for adapter, length in (("two", 0), (None, 0), ("one", len(prompt))):
            req = rank.serve([*prompt, 1, 2, 3], adapter=adapter)
            assert req.cached_tokens == rank.scheduler.loaded == length
        assert rank.scheduler.disk_tokens == len(prompt) * on_disk
        found = [
            rank.serve([*prompt, 1, 2, 4], adapter=adapter).cached_tokens for adapter in ("three", "one")
        ]
        assert found[0] == 0 < found[1]


@EACH
def test_one_wrong_bit_of_an_adapter_is_seen(scenario: HybridScenario) -> None:
    """The twin: an adapter finds the bytes below HBM again."""

    def flip_a_bit(blocks: np.ndarray) -> None:
        blocks.reshape(len(blocks), -1)[0, 3] ^= 1

    room = {"full": 120, "other": 60} if scenario.kind.page == PAGE else {}
    with stored(scenario, **room) as rank:
        leave_hbm(rank, prompt_of(scenario), adapter="one")
        damage(rank, "full", flip_a_bit)
        rank.look_inside = False
        with pytest.raises(WrongKvError, match="in forward"):
            rank.serve([*prompt_of(scenario), 1, 2, 3], adapter="one")

"""Windows and states under a whole server's traffic: SGLang's scheduling, pools and tree, all rows compared.

After each pass of the scheduler's loop: SGLang's count of slots, one owner for every slot of every pool, and
in the tree the oracle's rows and states. Free slots are spoilt, so that reading one is seen.
"""

from __future__ import annotations

import pytest
from engine_hybrids import FULL, MAMBA, SCENARIOS, SWA, HybridRank, HybridScenario, drive

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_every_row_that_a_model_reads_is_right(scenario: HybridScenario) -> None:
    with HybridRank(scenario) as rank:
        traffic = drive(rank, seed=1, steps=80)
        assert len(rank.scheduler.finished) > 15
        assert traffic.counts["submit"] > 10
        assert rank.scheduler.reused > 100
        gone = {
            FULL: rank.evicted.num_tokens_evicted,
            SWA: rank.evicted.swa_num_tokens_evicted,
            MAMBA: rank.evicted.mamba_num_evicted,
        }
        assert all(gone[component] for component in rank.pools.oracles), gone


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_every_row_that_a_model_reads_is_right_for_long(scenario: HybridScenario, seed: int) -> None:
    """120 runs, 48,000 passes of the loop."""
    with HybridRank(scenario) as rank:
        traffic = drive(rank, seed=100 + seed, steps=400)
        assert len(rank.scheduler.finished) > 30
        assert traffic.counts["abort"] > 0
        assert rank.scheduler.reused > 1000


@pytest.mark.long
def test_traffic_reaches_what_it_is_meant_to_reach() -> None:
    """Aborts, retraction, flushes, and eviction of each component."""
    seen: dict[str, int] = {}
    for scenario in SCENARIOS:
        with HybridRank(scenario) as rank:
            counts = dict(drive(rank, seed=3, steps=300).counts)
            counts["retracted"] = rank.scheduler.retracted
            counts["tokens evicted"] = rank.evicted.num_tokens_evicted
            counts["window evicted"] = rank.evicted.swa_num_tokens_evicted
            counts["states evicted"] = rank.evicted.mamba_num_evicted
        for what, count in counts.items():
            seen[what] = seen.get(what, 0) + count
    wanted = ("submit", "abort", "retract all", "flush", "retracted")
    wanted += ("tokens evicted", "window evicted", "states evicted")
    assert not [what for what in wanted if not seen.get(what)], seen

"""The stream checker finds each wait, record and question of the product that is deleted or moved.

A site is noticed when the drill of the mover and of the fence fails without it. Moves that change nothing are
argued here.
"""

from __future__ import annotations

import pytest
from stream_drill import Drill
from stream_mutants import Site, all_sites, module_of, mutants_of

MOVER, FENCE = "engine/movers/cuda_mover.py", "engine/forward_fence.py"
PACES = (0.0, 0.3, 1.0)
"""Nothing ends until the host waits; some has; all has."""

ELSEWHERE = {
    "calibration/reductions.py": "times reductions in a process of its own; no cache is there",
    "engine/movers/gpu_memory.py": "tests/engine/tiers/test_gpu_memory.py has both in their order",
    "engine/gpu_link.py": "times copies when a server starts; no cache is there yet",
    "engine/pd/granting.py": "tests/engine/pd/test_forward_fence.py, whose twin has no fence",
    "engine/pd/reading.py": "tests/engine/pd/test_forward_fence.py, whose twin has no fence",
    "engine/pd/returns/return_sender.py": "tests/engine/pd/test_pd_returns.py, where pages come late",
    "engine/pd/returns/return_receiver.py": "tests/engine/pd/test_pd_returns.py, whose twin has no fence",
    "gpu_check/copies.py": "times copies and compares them in a process of its own; no cache is there",
}
"""Sites that the drill does not reach, and their tests."""

NOTHING_BETWEEN = "no work is queued between the two statements"
SAME_EVENT = "the list has the event itself, and the event is not read between"
ASKED_AGAIN = "counts are asked again by whoever reads them"
ARGUED = {
    ("__call__: event.record(stream)", "down"): SAME_EVENT,
    ("write: self._follow_engine(self._write_stream, slots)", "up"): NOTHING_BETWEEN,
    ("write: self._follow_engine(self._write_stream, slots)", "down"): NOTHING_BETWEEN,
    ("_follow_engine: stream.wait_stream(self._forward_stream)", "down"): NOTHING_BETWEEN,
    ("_follow_engine: stream.wait_stream(torch.cuda.current_stream(self._device))", "up"): NOTHING_BETWEEN,
    ("_follow_engine: stream.wait_stream(torch.cuda.current_stream(self._device))", "down"): NOTHING_BETWEEN,
    ("_follow_engine: slots.record_stream(stream)", "up"): NOTHING_BETWEEN,
    ("_copy_in: self._follow_engine(stream, slots)", "down"): NOTHING_BETWEEN,
    ("load: self._follow_engine(self._load_stream, slots)", "up"): NOTHING_BETWEEN,
    ("load: self._follow_engine(self._load_stream, slots)", "down"): NOTHING_BETWEEN,
    ("into: self._follow_engine(self._load_stream, slots)", "down"): NOTHING_BETWEEN,
    ("_copy_in: event.record(stream)", "down"): SAME_EVENT,
    ("settle: self._load_stream.synchronize()", "down"): NOTHING_BETWEEN,
    ("settle: self._write_stream.synchronize()", "up"): NOTHING_BETWEEN,
    ("settle: self._write_stream.synchronize()", "down"): ASKED_AGAIN,
    ("wait_writes: self._writes.popleft().synchronize()", "down"): NOTHING_BETWEEN,
}
SITES = all_sites()
DRILLED = [site for site in SITES if site.path in (MOVER, FENCE)]


def test_all_sites_are_known() -> None:
    assert len(DRILLED) == 22
    assert len(SITES) == 38
    assert {site.path for site in SITES} == {MOVER, FENCE, *ELSEWHERE}


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "plain"])
@pytest.mark.parametrize("pace", PACES)
def test_the_product_passes_the_drill(pace: float, kernel: bool) -> None:
    drill = Drill(pace, kernel=kernel)
    drill.run()
    assert bool(drill.mover.blocks_without_kernel) is not kernel


@pytest.mark.parametrize("site", DRILLED, ids=str)
def test_a_site_that_is_deleted_or_moved_is_noticed(site: Site) -> None:
    changes = dict(mutants_of(site))
    assert "deleted" in changes
    survived = set()
    for change, tree in changes.items():
        with module_of(tree, site) as mutant:
            about = {"module": mutant} if site.path == MOVER else {"fence_class": mutant.ForwardFence}
            if not any(fails(Drill(pace, **about)) for pace in PACES):
                survived.add((str(site), change))
    assert survived == {key for key in ARGUED if key[0] == str(site)}


def fails(drill: Drill) -> bool:
    """Whether a race, wrong bytes or an exception shows."""
    try:
        drill.run()
    except Exception:  # noqa: BLE001 - whatever shows is a finding
        return True
    return False

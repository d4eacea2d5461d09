"""The stream checker finds each wait, record and question of the product that is deleted or moved.

A site is noticed when the drill of the mover and of the fence, or that of two processes, fails without it.
Moves that change nothing are argued here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from stream_drill import Drill
from stream_engine import GRAPHS, PLAIN, PREFILL
from stream_mutants import Site, all_sites, module_of, mutants_of
from stream_pair import pair
from stream_pd import PARTS, PdDrill

MOVER, FENCE = "engine/movers/cuda_mover.py", "engine/forward_fence.py"
ENDS = "patches/adapter/pd/kv_requests.py"
"""Both ends of a hand-over, as the loops of two servers poll them."""
PACES = (0.0, 0.3, 1.0)
"""Nothing ends until the host waits; some has; all has."""

ELSEWHERE = {
    "calibration/reductions.py": "times reductions in a process of its own; no cache is there",
    "engine/gpu_link.py": "times copies when a server starts; no cache is there yet",
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
    ("_write_computed: self._follow_engine(self._write_stream, slots)", "down"): NOTHING_BETWEEN,
    ("settle: self._load_stream.synchronize()", "up"): NOTHING_BETWEEN,
    ("settle: self._load_stream.synchronize()", "down"): NOTHING_BETWEEN,
    ("settle: self._write_stream.synchronize()", "up"): NOTHING_BETWEEN,
    ("settle: self._write_stream.synchronize()", "down"): ASKED_AGAIN,
    ("wait_writes: self._writes.popleft().synchronize()", "down"): NOTHING_BETWEEN,
    ("receive: until_passed(wanted.passed)", "up"): NOTHING_BETWEEN,
    ("_read: until_passed(wanted.passed)", "up"): NOTHING_BETWEEN,
    ("_read: until_passed(wanted.passed)", "down"): NOTHING_BETWEEN,
    ("_read: until_passed(passed)", "up"): NOTHING_BETWEEN,
}
SITES = all_sites()
DRILLED = [site for site in SITES if site.path in (MOVER, FENCE, ENDS, *PARTS)]


def test_all_sites_are_known() -> None:
    assert len(DRILLED) == 38
    assert len(SITES) == 48
    assert {site.path for site in SITES} == {MOVER, FENCE, ENDS, *PARTS, *ELSEWHERE}


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "plain"])
@pytest.mark.parametrize("pace", PACES)
def test_the_product_passes_the_drill(pace: float, kernel: bool) -> None:
    drill = Drill(pace, kernel=kernel)
    drill.run()
    assert bool(drill.mover.blocks_without_kernel) is not kernel


@pytest.mark.parametrize("pace", PACES[1:])
def test_the_product_passes_the_drill_of_two_processes(pace: float) -> None:
    PdDrill(pace).run()


def test_an_offer_of_kv_that_is_not_computed_is_noticed() -> None:
    """The twin, whose prefill does not wait for the result of its pass."""
    assert fails(PdDrill(1.0, computed=False))


@pytest.mark.usefixtures("sglang_config")
@pytest.mark.parametrize("site", DRILLED, ids=str)
def test_a_site_that_is_deleted_or_moved_is_noticed(site: Site) -> None:
    changes = dict(mutants_of(site))
    assert "deleted" in changes
    survived = set()
    for change, tree in changes.items():
        with module_of(tree, site) as mutant:
            if not any(fails(drill) for drill in drills(site.path, mutant)):
                survived.add((str(site), change))
    assert survived == {key for key in ARGUED if key[0] == str(site)}


class Loops:
    """The loops of a prefill and a decode server, with a module in place of `ENDS`."""

    def __init__(self, ends: Any) -> None:
        self._ends = ends

    def run(self) -> None:
        about = {"seed": 9, "decode_tokens": 112}
        with pair(PREFILL, GRAPHS, pace=0.3, kind=PLAIN, requests=self._ends, **about) as both:
            both.serve(60)
            races = [str(race) for race in both.cuda.trace.races.values()]
            assert not races, "; ".join(races[:3])


def drills(path: str, mutant: Any) -> Iterator[Drill | Loops]:
    """The drills that call a module, with a mutant of it."""
    if path == ENDS:
        yield Loops(mutant)
        return
    if path in PARTS:
        yield from (PdDrill(pace, {path: mutant}) for pace in PACES[1:])
        return
    about = {"module": mutant} if path == MOVER else {"fence_class": mutant.ForwardFence}
    yield from (Drill(pace, **about) for pace in PACES)


def fails(drill: Drill | Loops) -> bool:
    """Whether a race, wrong bytes or an exception shows."""
    try:
        drill.run()
    except Exception:  # noqa: BLE001 - whatever shows is a finding
        return True
    return False

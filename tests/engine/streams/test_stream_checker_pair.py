"""The stream checker over a prefill and a decode server, each in SGLang's disaggregated loop: hand-overs by
reads and by writes, returns, decode's own loads, and requests that are given up on the way.

The pass of prefill that computes the KV, the passes of both that use the slots before and after, and the NIC
are ordered by our fences, states and messages alone.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress

import pytest
from engine_pools import PoolKind, WrongKvError
from sglang.srt.managers.schedule_batch import ScheduleBatch
from stream_engine import EARLY, FAST, GRAPHS, LAYERS, NORMAL, OVERLAP, PLAIN, PREFILL, SLOW, Loop
from stream_pair import Pair, PrefillLoop, pair

from sglang_ext.engine.pd.messages import ReturnEnd

pytestmark = pytest.mark.usefixtures("sglang_config")

PAGED = PoolKind(page=4, layers=LAYERS)
RUNS = [
    *((PREFILL, GRAPHS, kind) for kind in (PLAIN, PAGED)),
    (EARLY, GRAPHS, PLAIN),
    (NORMAL, NORMAL, PLAIN),
]
WAYS = pytest.mark.parametrize("pushes", [False, True], ids=["pull", "push"])


def races(both: Pair) -> list[str]:
    return [str(race) for race in both.cuda.trace.races.values()]


@WAYS
@pytest.mark.parametrize(("prefill", "decode", "kind"), RUNS, ids=str)
def test_all_accesses_of_both_servers_are_ordered(
    prefill: Loop, decode: Loop, kind: PoolKind, pushes: bool
) -> None:
    with pair(prefill, decode, pace=0.3, kind=kind, pushes=pushes) as both:
        both.serve(50)
        ends = [side.rank.scheduler for side in (both.prefill, both.decode)]
        assert min(len(each.finished) for each in ends) > 4
        assert both.decode.rank.scheduler.aborted > 0
        assert both.decode.rank.scheduler.loaded_tokens > 0, "decode has had no prefix"
        assert both.decode.returns.outcomes[ReturnEnd.RETURNED] > 1
        assert not races(both), races(both)
        both.cuda.replay(1)


@pytest.mark.long
@WAYS
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [PLAIN, PAGED, PoolKind("mla", 4, LAYERS)], ids=str)
def test_all_accesses_of_both_servers_are_ordered_for_long(kind: PoolKind, seed: int, pushes: bool) -> None:
    for prefill, decode in ((NORMAL, NORMAL), (PREFILL, GRAPHS), (EARLY, GRAPHS), (OVERLAP, OVERLAP)):
        for pace in (SLOW, FAST):
            with pair(prefill, decode, pace=pace, seed=100 + seed, kind=kind, pushes=pushes) as both:
                both.serve(120)
                assert not races(both), races(both)
                both.cuda.replay(1)


@pytest.mark.parametrize("fenced", [True, False], ids=["fenced", "twin"])
@WAYS
def test_slots_are_filled_behind_the_passes_of_their_former_requests(pushes: bool, fenced: bool) -> None:
    """Decode has few slots, and gives those of a request that has ended to the next one at once. In the twin,
    which has no fences, a graph of the former request stores over what the NIC brings."""
    seed, slots = (3, 140) if pushes else (9, 112)
    about = {"pushes": pushes, "fenced": fenced, "decode_tokens": slots}
    with pair(PREFILL, GRAPHS, pace=0.3, seed=seed, kind=PLAIN, **about) as both:
        with nullcontext() if fenced else suppress(WrongKvError):
            both.serve(60)
        found = races(both)
        if fenced:
            assert not found, found
        else:
            assert any("decode's forward" in race and "on nic" in race for race in found), found


class Hasty(PrefillLoop):
    """Hands KV over without waiting for the result of its pass, which its stream does not follow."""

    def _process(self, batch: ScheduleBatch, tokens: list[int]) -> None:
        self._done[0].clock = {}
        super()._process(batch, tokens)


@WAYS
def test_kv_that_is_handed_over_before_it_is_computed_is_noticed(pushes: bool) -> None:
    """The twin of prefill."""
    with pair(EARLY, GRAPHS, pace=0.3, kind=PLAIN, pushes=pushes, make_prefill=Hasty) as both:
        both.serve(50)
        assert any("prefill's forward" in race and "on nic" in race for race in races(both)), races(both)

"""Uncached tokens of an announced prompt are computed while the server is otherwise idle, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engine_scheduler import Settings
from engine_simulation import Rank, Scenario, finish
from prefetch_rig import in_hbm, leave_hbm, prompt

from sglang_ext.engine.prefetch.hbm_prefetch import PrefetchEnd, Prefetcher, PrefetchResult
from sglang_ext.keys import encode_tokens
from sglang_ext.patches.adapter.compute_ahead import MOST_WAITING, ComputeAhead

pytestmark = pytest.mark.usefixtures("sglang_config")

PIECE = 16
"""Tokens; a block has four."""


class Host:
    """The simulated scheduler."""

    piece_tokens = PIECE

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.started: list[int] = []
        self.refuses = False

    def idle(self) -> bool:
        return self._rank.scheduler.idle

    def start(self, name: str, tokens: list[int], extra_key: str | None, cache_salt: str | None) -> Any:
        if self.refuses:
            return None
        self.started.append(len(tokens))
        return self._rank.scheduler.submit(tokens, new_tokens=1, extra_key=extra_key, salt=cache_salt)


class Rig:
    """A rank that computes ahead, as ``advice`` drives it."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        prefetcher = rank.cache.find(Prefetcher)
        assert prefetcher is not None
        self.prefetcher = prefetcher
        self.host = Host(rank)
        self.computes = ComputeAhead(
            rank.tree, rank.hbm, rank.cache.hbm_tier, prefetcher, rank.cache.namespace, self.host
        )

    def hint(self, id: str, tokens: list[int], priority: int = 0, **tenant: Any) -> bool:
        """A hint whose prefetch has ended."""
        key = encode_tokens(tokens)
        self.prefetcher.expect(id, key, priority=priority, **tenant)
        result = PrefetchResult(id, PrefetchEnd.DONE, in_hbm(self.rank, tokens), 0)
        return self.computes.takes(result, key, tenant.get("extra_key"), tenant.get("cache_salt"), priority)

    def step(self) -> None:
        self.computes.drain()
        self.rank.scheduler.step()
        self.rank.check()
        self.rank.settle()

    def until_done(self) -> list[PrefetchResult]:
        for _ in range(200):
            if not self.computes.busy:
                return self.computes.take_ended()
            self.step()
        raise AssertionError(f"it does not end: {self.computes!r}")


@pytest.fixture
def rig() -> Iterator[Rig]:
    rank = Rank(Scenario("DRAM", hbm_tokens=240, dram_blocks=300, settings=Settings(chunk=None)))
    yield Rig(rank)
    rank.close()


def test_uncached_tokens_are_computed_and_hit(rig: Rig) -> None:
    tokens = prompt(1, 10)
    assert rig.hint("h", tokens)
    assert rig.until_done() == [PrefetchResult("h", PrefetchEnd.COMPUTED, 40, 0, computed=40)]
    assert rig.host.started == [16, 32, 40], "a piece each"
    assert rig.rank.serve(tokens).cached_tokens_device == 40
    rig.prefetcher.cancel("h")
    finish(rig.rank)


def test_only_what_is_missing_is_computed(rig: Rig) -> None:
    rig.rank.serve(prompt(1, 6))
    rig.rank.settle()
    assert rig.hint("h", prompt(1, 10))
    (result,) = rig.until_done()
    assert (result.end, result.computed, rig.host.started) == (PrefetchEnd.COMPUTED, 16, [40])
    assert not rig.hint("h", prompt(1, 10)), "nothing is missing"


def test_a_request_that_comes_waits_for_one_piece_and_finds_it(rig: Rig) -> None:
    tokens = prompt(1, 10)
    rig.hint("h", tokens)
    rig.step()
    assert rig.host.started == [16]
    rig.computes.cancel("h")
    rig.prefetcher.cancel("h")
    req = rig.rank.serve(tokens)
    assert req.cached_tokens_device == 16
    assert rig.host.started == [16]
    assert [result.end for result in rig.until_done()] == [PrefetchEnd.CANCELLED]
    finish(rig.rank)


def test_nothing_is_started_while_others_run(rig: Rig) -> None:
    rig.hint("h", prompt(1, 10))
    running = rig.rank.scheduler.submit(prompt(2, 5), new_tokens=8)
    while not running.finished():
        rig.step()
        assert rig.host.started == []
    assert rig.until_done()[0].end is PrefetchEnd.COMPUTED
    finish(rig.rank)


def test_a_high_priority_is_computed_first(rig: Rig) -> None:
    rig.hint("low", prompt(1, 10))
    rig.hint("high", prompt(2, 4), priority=1)
    assert [result.id for result in rig.until_done()] == ["high", "low"]


def test_it_takes_no_room_from_what_matters_as_much(rig: Rig) -> None:
    rank = rig.rank
    waiting = prompt(1, 30)
    rank.serve(waiting)
    rank.settle()
    rig.prefetcher.expect("waiting", waiting)
    rig.hint("h", prompt(2, 40))
    (result,) = rig.until_done()
    assert result.end is PrefetchEnd.NO_ROOM
    assert 0 < result.tokens < 160
    assert in_hbm(rank, waiting) == 120
    rig.hint("paid", prompt(3, 40), priority=1)
    assert rig.until_done()[0].tokens == 160
    assert in_hbm(rank, waiting) < 120
    for id in ("waiting", "h", "paid"):
        rig.prefetcher.cancel(id)
    finish(rank)


def test_it_ends_with_its_hint(rig: Rig) -> None:
    key = encode_tokens(prompt(1, 10))
    rig.prefetcher.expect("h", key, until=5.0)
    assert rig.computes.takes(PrefetchResult("h", PrefetchEnd.DONE, 0, 0), key, None, None, 0)
    rig.step()
    rig.prefetcher.expire(5.0)
    assert [result.end for result in rig.until_done()] == [PrefetchEnd.CANCELLED]
    assert rig.host.started == [16]
    assert not rig.computes.takes(PrefetchResult("h", PrefetchEnd.DONE, 0, 0), key, None, None, 0)


def test_what_is_refused_or_lost_ends_it(rig: Rig) -> None:
    rig.host.refuses = True
    rig.hint("h", prompt(1, 10))
    assert [result.end for result in rig.until_done()] == [PrefetchEnd.GIVEN_UP]
    rig.host.refuses = False
    rig.hint("i", prompt(1, 10))
    rig.computes.drain()
    rig.rank.scheduler.abort(rig.rank.scheduler.waiting[0])
    for _ in range(5):
        rig.step()
    assert [result.end for result in rig.until_done()] == [PrefetchEnd.GIVEN_UP]


def test_only_so_many_wait(rig: Rig) -> None:
    taken = [rig.hint(str(number), prompt(number, 2)) for number in range(MOST_WAITING + 2)]
    assert taken == [True] * MOST_WAITING + [False] * 2
    rig.computes.drop_in_flight()
    assert not rig.computes.busy


def test_tenants_take_turns(rig: Rig) -> None:
    """B's prompt comes behind three of A's, and is done before the first of these."""
    for number in range(3):
        rig.hint(f"a{number}", prompt(number + 1, 10), cache_salt="a")
    rig.step()
    rig.hint("b", prompt(9, 4), cache_salt="b")
    ended = [result.id for result in rig.until_done()]
    assert ended == ["b", "a0", "a1", "a2"]
    assert rig.host.started[:4] == [16, 32, 16, 40]


def test_a_tenant_with_all_places_makes_room_for_another(rig: Rig) -> None:
    for number in range(MOST_WAITING):
        assert rig.hint(f"a{number}", prompt(number + 1, 2), cache_salt="a")
    assert not rig.hint("more", prompt(100, 2), cache_salt="a"), "the tenant's own places are taken"
    assert rig.hint("b", prompt(101, 2), cache_salt="b")
    assert [result.end for result in rig.computes.take_ended()] == [PrefetchEnd.DROPPED]
    assert rig.computes.busy
    rig.computes.drop_in_flight()


def test_a_tenants_own(rig: Rig) -> None:
    tokens = prompt(1, 5)
    rig.hint("h", tokens, cache_salt="tenant")
    assert rig.until_done()[0].computed == 20
    leave = rig.rank.serve(tokens)
    assert leave.cached_tokens == 0
    assert rig.rank.serve(tokens, salt="tenant").cached_tokens_device == 20
    rig.prefetcher.cancel("h")
    leave_hbm(rig.rank)

"""A fault in a call from the scheduler to the cache is a miss: requests go on, and no slot is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_simulation import Rank, Scenario

from sglang_ext.engine.cache.faults import MOST_LOGGED, CacheFaults
from sglang_ext.errors import OutOfStepError

pytestmark = pytest.mark.usefixtures("sglang_config")

BLOCK = 4
PROMPT = [i % 11 for i in range(26)]


@pytest.fixture
def rank() -> Iterator[Rank]:
    with Rank(Scenario("faults", block=BLOCK, hbm_tokens=128, dram_blocks=40)) as rank:
        rank.expects_faults = True
        yield rank


def failing(function: Callable[..., Any], *, after: bool = False) -> Callable[..., Any]:
    """The same function, which raises before or after its work."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if after:
            function(*args, **kwargs)
        raise OSError("placed by a test")

    return call


def test_a_lookup_that_fails_finds_nothing_and_its_request_leaves_nothing(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(rank.store, "match", failing(rank.store.match))
        rank.serve(PROMPT, new_tokens=3)  # the simulation compares the KV it read
    assert set(rank.cache.faults.counts) == {"match_prefix"}
    assert "match_prefix failed in the KV cache" in caplog.text
    assert rank.tree.blocks_of(rank.hbm) == 0
    rank.serve(PROMPT, new_tokens=3)
    assert rank.tree.blocks_of(rank.hbm) == len(PROMPT) // BLOCK + 1
    rank.check()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_insertion_that_fails_leaves_each_slot_with_one_owner(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """The simulation checks owners after each step."""
    with monkeypatch.context() as patch:
        patch.setattr(rank.store, "insert", failing(rank.store.insert, after=after))
        rank.serve(PROMPT, new_tokens=9)
    assert rank.cache.faults.counts["insert"] == 1, "a request on which it has failed is not inserted again"
    assert rank.tree.blocks_of(rank.hbm) == (len(PROMPT) // BLOCK if after else 0)
    rank.settle()
    rank.serve(PROMPT, new_tokens=9)
    rank.serve([*PROMPT[:9], *range(9)], new_tokens=2)
    rank.check()


def test_an_insertion_that_fails_beside_a_prefix_of_others(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.serve(PROMPT[:13], new_tokens=1)
    with monkeypatch.context() as patch:
        patch.setattr(rank.store, "insert", failing(rank.store.insert, after=True))
        rank.serve(PROMPT, new_tokens=2)
    assert rank.tree.blocks_of(rank.hbm) == len(PROMPT) // BLOCK
    rank.check()


def test_a_pass_goes_on_when_a_part_of_it_fails(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(rank.cache, "each_pass", failing(rank.cache.each_pass))
        rank.serve(PROMPT, new_tokens=3)
    assert rank.cache.faults.counts["each_pass"] > 0
    rank.serve(PROMPT, new_tokens=3)
    rank.check()


def test_with_kv_check_a_fault_is_raised() -> None:
    faults = CacheFaults(strict=True)
    with pytest.raises(OSError, match="placed"), faults.guard("insert"):
        raise OSError("placed by a test")


def test_many_faults_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    faults = CacheFaults()
    for _ in range(3 * MOST_LOGGED):
        with faults.guard("touch_prefix"):
            raise OSError("placed by a test")
    assert faults.counts == {"touch_prefix": 3 * MOST_LOGGED}
    assert len(caplog.records) == MOST_LOGGED + 2


def test_ranks_out_of_step_end_the_server(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def each_pass() -> None:
        raise OutOfStepError("placed by a test")

    with monkeypatch.context() as patch:
        patch.setattr(rank.ranks, "each_pass", each_pass)
        with pytest.raises(OutOfStepError):
            rank.cache.check_hicache_events()
    assert not rank.cache.faults.counts

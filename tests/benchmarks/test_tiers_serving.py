"""The arithmetic of the tiers benchmark's server rows, and that a figure from the wrong tier is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.lib.common import Report
from benchmarks.tiers.lmcache import missing
from benchmarks.tiers.servers import Seen, WrongTierError, _seen
from benchmarks.tiers.timed_server import PARTS, Standstill, standstill
from benchmarks.tiers.ttft import SWEEPER_TOKENS, Length, Loads, hidden, report_lengths, sizes_for


def loads(
    tier: str = "dram", *, shown: tuple[float, ...] = (0.0, 1.0, 9.0), load: tuple[float, ...] = (4.0,) * 3
) -> Loads:
    parts = [dict.fromkeys(PARTS, 0.0) | {"layers": seconds} for seconds in shown]
    return Loads(tier, 1536, [10.0 + extra for extra in shown], [10.0] * len(shown), list(load), parts)


def test_hidden_is_the_share_of_the_median_load_that_ttft_does_not_show() -> None:
    assert hidden([loads()]) == 0.75
    assert hidden([loads(shown=(-3.0, -2.0, -1.0))]) == 1.0
    assert hidden([loads(shown=(5.0, 6.0, 7.0))]) == 0.0


def test_over_several_lengths_a_long_load_counts_for_more() -> None:
    assert hidden([loads(), loads(shown=(2.0,) * 3, load=(8.0,) * 3)]) == 0.75
    assert hidden([loads(shown=(4.0,) * 3), loads(shown=(0.0,) * 3, load=(36.0,) * 3)]) == 0.9


def test_what_a_sweep_has_to_push_out_fits_no_more() -> None:
    sizes = sizes_for(8192)
    # All prompts of a sweep of HBM stay in DRAM beside the longest prompt.
    assert sizes.dram >= (sizes.hbm // SWEEPER_TOKENS + 1) * SWEEPER_TOKENS + 8192


@pytest.mark.parametrize(
    ("tier", "seen"),
    [
        ("hbm", Seen(1.0, 2048, hbm=1520, dram=16, disk=0)),
        ("dram", Seen(1.0, 2048, hbm=1536, dram=0, disk=0)),
        ("dram", Seen(1.0, 2048, hbm=0, dram=1520, disk=16)),
        ("disk", Seen(1.0, 2048, hbm=0, dram=1536, disk=0)),
        ("disk", Seen(1.0, 2048, hbm=0, dram=0, disk=0)),
    ],
)
def test_an_answer_from_another_tier_is_refused(tier: str, seen: Seen) -> None:
    with pytest.raises(WrongTierError, match=f"from {tier}"):
        seen.require(tier, 1536, 0.9)


@pytest.mark.parametrize(
    ("tier", "seen"),
    [
        ("hbm", Seen(1.0, 2048, hbm=1536, dram=0, disk=0)),
        ("dram", Seen(1.0, 2048, hbm=64, dram=1472, disk=0)),
        ("disk", Seen(1.0, 2048, hbm=32, dram=32, disk=1472)),
    ],
)
def test_an_answer_from_the_right_tier_passes(tier: str, seen: Seen) -> None:
    seen.require(tier, 1536, 0.9)
    with pytest.raises(WrongTierError, match="to be computed"):
        seen.require_computed()


def test_cached_tokens_that_the_details_do_not_name_are_refused() -> None:
    meta = {"prompt_tokens": 32, "cached_tokens": 16, "cached_tokens_details": {"device": 16}}
    assert _seen(1.0, meta).hbm == 16
    with pytest.raises(WrongTierError, match="do not confirm"):
        _seen(1.0, meta | {"cached_tokens_details": None})


def test_the_report_of_one_length() -> None:
    report = Report("tiers")
    report_lengths(report, [Length(8192, [20.0, 44.0], loads(), loads("disk"))])
    assert report.summary == {
        "load_hidden_dram": 0.75,
        "load_hidden_disk": 0.75,
        "ttft_disk_vs_hbm_8k": 1.1,
        "ttft_disk_vs_recompute_8k": (10 / 20 + 11 / 44) / 2,
    }
    cases = [row["case"] for row in report.rows]
    assert "TTFT 8192 tokens, disk hit" in cases
    assert "load 1536 tokens from dram" in cases


def test_lmcache_is_left_out_with_the_reason(tmp_path: Path) -> None:
    assert "No such file" in str(missing(tmp_path / "python"))
    # Another interpreter that works and does not have it.
    assert "not installed there" in str(missing(Path(sys.executable)))


def test_standing_still_adds_up_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "standstill"
    assert standstill(path) == dict.fromkeys(PARTS, 0.0)
    still = Standstill(path)
    try:
        assert still.timed("layers", lambda value: value + 1)(1) == 2
        first = standstill(path)
        assert first == still.seconds
        assert [part for part, seconds in first.items() if seconds] == ["layers"]
        answers = iter([False, True, True])
        ask = still.from_here(lambda _cache, _handle: None)
        ready = still.to_here(lambda _cache, _handle: next(answers))
        ask("cache", 7)
        assert not ready("cache", 7)
        assert standstill(path) == first
        assert ready("cache", 7)
        waited = standstill(path)
        assert waited["admission"] > 0
        # A request waits once, however often it is asked for afterwards.
        assert ready("cache", 7)
        assert standstill(path) == waited == still.seconds
    finally:
        still.close()


def test_what_fails_counts_too(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    still = Standstill(tmp_path / "standstill")
    try:
        with pytest.raises(RuntimeError, match="no"):
            still.timed("verifying", fail)()
        assert still.seconds["verifying"] > 0
    finally:
        still.close()

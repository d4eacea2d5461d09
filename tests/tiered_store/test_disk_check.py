"""Checking and repairing a disk tier's directory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from sglang_ext.errors import ConfigError, MediumError
from sglang_ext.testing.blocks import LAYOUT, NAMESPACE, OTHER, get_all, prefix_keys, put_all
from sglang_ext.tiered_store.disk.check import check_directory, repair_directory
from sglang_ext.tiered_store.disk.segment_format import PAGE, decode_run_header
from sglang_ext.tiered_store.disk.speed import measure_disk
from sglang_ext.tiered_store.disk.state import DiskConfig
from sglang_ext.tiered_store.disk.tier import DiskTier
from sglang_ext.tiered_store.tier import Outcome


def open_tier(path: Path) -> DiskTier:
    return DiskTier(DiskConfig(path, 64 << 20, segment_bytes=64 << 10), LAYOUT)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Six prefixes of five blocks, in several segments."""
    tier = open_tier(tmp_path)
    for prefix in range(6):
        assert put_all(tier, (NAMESPACE, OTHER)[prefix % 2], prefix_keys(prefix, 5)) is Outcome.DONE
    get_all(tier, NAMESPACE, prefix_keys(0, 5))
    tier.close()
    return tmp_path


def found(tier: DiskTier) -> list[int]:
    return [get_all(tier, (NAMESPACE, OTHER)[prefix % 2], prefix_keys(prefix, 5)) for prefix in range(6)]


def damage_block(segment: Path, run: int, layer: int, position: int) -> None:
    data = bytearray(segment.read_bytes())
    offset = PAGE
    for _ in range(run):
        offset += decode_run_header(data[offset:]).shape.length
    header = decode_run_header(bytes(data[offset:]))
    data[offset + header.shape.offset(layer, position) + 5] ^= 1
    segment.write_bytes(data)


def test_a_sound_directory(path: Path) -> None:
    report = check_directory(path, deep=True)
    assert report.sound
    assert (report.blocks, report.runs) == (30, 6)
    assert report.segments == len(list(path.glob("*.seg"))) > 1
    assert report.verified_bytes == 6 * 4 * PAGE
    assert report.free_bytes > 0
    assert report.index_bytes > 0
    assert check_directory(path).verified_bytes == 0


def test_dropped_blocks_are_no_problem(path: Path) -> None:
    tier = open_tier(path)
    tier.drop(OTHER, prefix_keys(1, 5))
    tier.drop(NAMESPACE, prefix_keys(0, 5)[:2])
    tier.close()
    report = check_directory(path, deep=True)
    assert report.sound
    assert (report.blocks, report.dead) == (23, 5)


def test_damage_is_found_and_located(path: Path) -> None:
    segments = sorted(path.glob("*.seg"))
    damage_block(segments[0], run=1, layer=2, position=3)
    os.truncate(segments[1], segments[1].stat().st_size - PAGE)
    report = check_directory(path)
    assert [problem.text for problem in report.problems] == ["the segment ends before the run does"]
    report = check_directory(path, deep=True)
    assert sorted((problem.blocks, problem.where.split(",")[0]) for problem in report.problems) == [
        (1, segments[0].name),
        (5, segments[1].name),
    ]
    segments[0].unlink()
    assert any("missing" in problem.text for problem in check_directory(path).problems)


def test_a_directory_in_use_is_left_alone(path: Path) -> None:
    tier = open_tier(path)
    for call in (check_directory, repair_directory):
        with pytest.raises(ConfigError, match="in use by instance 'unnamed'"):
            call(path)
    tier.close()


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MediumError, match="no directory"):
        check_directory(tmp_path / "nothing")


@pytest.mark.parametrize("how", ["missing", "garbage", "lost and used since"])
def test_a_lost_index_is_rebuilt(path: Path, how: str) -> None:
    if how == "garbage":
        (path / "index" / "data.mdb").write_bytes(os.urandom(40_000))
    else:
        shutil.rmtree(path / "index")
    if how == "lost and used since":
        tier = open_tier(path)
        assert put_all(tier, NAMESPACE, prefix_keys(9, 4)) is Outcome.DONE
        assert put_all(tier, NAMESPACE, prefix_keys(0, 5)) is Outcome.DONE  # now on the disk twice
        tier.close()
    report = check_directory(path)
    assert not report.sound
    assert report.recoverable == 30
    repaired = repair_directory(path)
    assert repaired.blocks == (34 if how == "lost and used since" else 30)
    assert (repaired.set_aside is None) == (how == "missing")
    tier = open_tier(path)
    assert found(tier) == [5] * 6
    assert put_all(tier, NAMESPACE, prefix_keys(20, 5)) is Outcome.DONE
    tier.check()
    tier.close()
    tier = open_tier(path)
    assert found(tier) == [5] * 6
    assert get_all(tier, NAMESPACE, prefix_keys(20, 5)) == 5
    tier.close()
    assert check_directory(path, deep=True).sound


def test_repair_leaves_out_what_is_damaged(path: Path) -> None:
    segments = sorted(path.glob("*.seg"))
    damage_block(segments[0], run=0, layer=1, position=2)
    with segments[0].open("r+b") as file:  # the first page too: the run headers repeat its fields
        file.seek(30)
        file.write(b"\xff")
    os.truncate(segments[-1], segments[-1].stat().st_size - 100)
    shutil.rmtree(path / "index")
    repaired = repair_directory(path)
    assert repaired.blocks == 24
    assert repaired.lost == {"does not verify": 6}
    tier = open_tier(path)
    assert sorted(found(tier)) == [0, 2, 5, 5, 5, 5]
    tier.check()
    tier.close()
    assert check_directory(path, deep=True).problems == []


def test_repair_keeps_the_times_of_use(path: Path) -> None:
    tier = open_tier(path)
    before = {run.row.offset: run.use for run in tier._state.runs.values() if run.row.segment == 1}
    tier.close()
    repair_directory(path)
    tier = open_tier(path)
    after = {run.row.offset: run.use for run in tier._state.runs.values() if run.row.segment == 1}
    tier.close()
    assert after == before
    assert sum(use.hits for use in before.values()) == 1


def test_kv_that_looks_like_a_header_is_not_taken_for_one(path: Path) -> None:
    """A run's bytes are whatever the model computed; even a copy of a header inside of them is not a run."""
    segment = sorted(path.glob("*.seg"))[0]
    data = bytearray(segment.read_bytes())
    header = bytes(data[PAGE : 2 * PAGE])
    data[3 * PAGE : 4 * PAGE] = header  # inside the first run
    segment.write_bytes(data)
    shutil.rmtree(path / "index")
    assert repair_directory(path).runs == 5  # the run that it was written over does not verify


def test_disk_speed_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    speed = measure_disk(tmp_path, 16 << 20)
    assert speed.write > 0
    assert speed.buffered > 0
    assert speed.direct is None or speed.direct > 0
    assert list(tmp_path.iterdir()) == []

"""A failing medium causes misses with a counted reason, never wrong bytes, never a crash."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.testing.blocks import (
    LAYOUT,
    NAMESPACE,
    OTHER,
    contents,
    get_all,
    memory_of,
    prefix_keys,
    put_all,
    read_all,
)
from sglang_ext.testing.fakes import FakeClock
from sglang_ext.tiered_store.disk.files import Files
from sglang_ext.tiered_store.disk.owner import DirectoryOwner
from sglang_ext.tiered_store.disk.segment_format import PAGE, decode_run_header
from sglang_ext.tiered_store.disk.state import DiskConfig, DiskHealth
from sglang_ext.tiered_store.disk.tier import DiskTier
from sglang_ext.tiered_store.tier import Outcome, Put
from tests.support.files import FaultyFiles

pytestmark = pytest.mark.slow

LIMIT = 64 << 20


def open_tier(path: Path, files: Files | None = None, clock: FakeClock | None = None) -> DiskTier:
    return DiskTier(DiskConfig(path, LIMIT, retry_seconds=30.0), LAYOUT, files=files, clock=clock)


def filled(path: Path, prefixes: int = 4, blocks: int = 5) -> None:
    """A directory with some prefixes, each a run of its own."""
    tier = open_tier(path)
    for prefix in range(prefixes):
        assert put_all(tier, NAMESPACE, prefix_keys(prefix, blocks)) is Outcome.DONE
    tier.close()


def the_segment(path: Path) -> Path:
    (segment,) = path.glob("*.seg")
    return segment


def damage(file: Path, offset: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)
        opened.seek(offset)
        opened.write(bytes([byte[0] ^ 0x10]))


def runs_of(path: Path) -> list[tuple[int, int, int]]:
    """(offset, header bytes, length) of each run in the only segment."""
    data = the_segment(path).read_bytes()
    offset, found = PAGE, []
    while offset + PAGE <= len(data):
        header = decode_run_header(data[offset:])
        found.append((offset, header.shape.header_bytes, header.shape.length))
        offset += header.shape.length
    return found


# --- damaged data ---


@pytest.mark.parametrize("layer", range(LAYOUT.n_layers))
def test_a_flipped_bit_in_any_layer_costs_that_block_and_no_other(tmp_path: Path, layer: int) -> None:
    filled(tmp_path)
    offset, header_bytes, _ = runs_of(tmp_path)[1]
    part = offset + header_bytes + layer * PAGE
    damage(the_segment(tmp_path), part + 3 * LAYOUT.layer_bytes(layer) + 17)
    tier = open_tier(tmp_path)
    keys = prefix_keys(1, 5)
    assert tier.match(NAMESPACE, keys) == 5  # nothing was read yet
    get = tier.prepare_get(NAMESPACE, keys)
    count, blocks, outcome = read_all(tier, get)
    tier.complete_get(get)
    assert (count, outcome) == (3, Outcome.DAMAGED)
    for row, key in zip(blocks, keys, strict=False):
        assert np.array_equal(row, contents(LAYOUT, NAMESPACE, key))
    assert tier.stats().got == {Outcome.ABSENT: 0, Outcome.DONE: 3, Outcome.DAMAGED: 2}
    # The block is gone, its neighbours are not, and it can be put again.
    assert tier.match(NAMESPACE, keys) == 3
    assert get_all(tier, NAMESPACE, keys[4:]) == 1
    assert get_all(tier, NAMESPACE, prefix_keys(2, 5)) == 5
    assert put_all(tier, NAMESPACE, keys) is Outcome.DONE
    assert get_all(tier, NAMESPACE, keys) == 5
    tier.check()
    tier.close()


@pytest.mark.parametrize("at", [0, 9, 13, 60, 100, 400, PAGE - 3])
def test_a_flipped_bit_in_a_header_costs_that_run(
    tmp_path: Path, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path)
    offset, _, _ = runs_of(tmp_path)[1]
    damage(the_segment(tmp_path), offset + at)
    tier = open_tier(tmp_path)
    get = tier.prepare_get(NAMESPACE, prefix_keys(1, 5))
    assert (get.blocks, *read_all(tier, get)[::2]) == (5, 0, Outcome.DAMAGED)
    tier.complete_get(get)
    assert tier.match(NAMESPACE, prefix_keys(1, 5)) == 0
    assert tier.stats().got[Outcome.DAMAGED] == 5
    assert "dropped" in caplog.text
    assert [get_all(tier, NAMESPACE, prefix_keys(i, 5)) for i in (0, 2, 3)] == [5, 5, 5]
    tier.check()
    tier.close()


def test_a_flipped_bit_in_the_first_page_costs_nothing(tmp_path: Path) -> None:
    filled(tmp_path)
    damage(the_segment(tmp_path), 20)
    tier = open_tier(tmp_path)
    assert [get_all(tier, NAMESPACE, prefix_keys(i, 5)) for i in range(4)] == [5] * 4
    tier.close()


def test_stale_bytes_of_another_run_do_not_pass(tmp_path: Path) -> None:
    """A whole run in the place of another, checksums and all: a lost write on a disk that lies."""
    filled(tmp_path)
    (first, _, length), (second, _, _), *_ = runs_of(tmp_path)
    file = the_segment(tmp_path)
    data = bytearray(file.read_bytes())
    data[second : second + length] = data[first : first + length]
    file.write_bytes(data)
    tier = open_tier(tmp_path)
    get = tier.prepare_get(NAMESPACE, prefix_keys(1, 5))
    assert read_all(tier, get)[::2] == (0, Outcome.DAMAGED)
    tier.complete_get(get)
    assert get_all(tier, NAMESPACE, prefix_keys(0, 5)) == 5
    tier.close()


def test_a_truncated_segment_costs_what_was_cut_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path)
    third = runs_of(tmp_path)[2]
    os.truncate(the_segment(tmp_path), third[0] + third[2] - 1)
    tier = open_tier(tmp_path)
    assert "too early" in caplog.text
    assert tier.stats().extra["lost_at_start_blocks"] == 10
    assert [get_all(tier, NAMESPACE, prefix_keys(i, 5)) for i in range(4)] == [5, 5, 0, 0]
    assert put_all(tier, NAMESPACE, prefix_keys(3, 5)) is Outcome.DONE
    tier.check()
    tier.close()
    again = open_tier(tmp_path)
    assert [get_all(again, NAMESPACE, prefix_keys(i, 5)) for i in range(4)] == [5, 5, 0, 5]
    again.check()
    again.close()


def test_a_segment_truncated_under_a_running_server(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    for prefix in range(3):
        put_all(tier, NAMESPACE, prefix_keys(prefix, 5))
    tier._state._headers.clear()
    offset = max(run.row.offset for run in tier._state.runs.values())
    os.truncate(the_segment(tmp_path), offset + PAGE + 100)
    get = tier.prepare_get(NAMESPACE, prefix_keys(2, 5))
    assert read_all(tier, get)[::2] == (0, Outcome.DAMAGED)
    tier.complete_get(get)
    assert get_all(tier, NAMESPACE, prefix_keys(0, 5)) == 5
    tier.close()


def test_a_missing_segment_costs_its_blocks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path)
    the_segment(tmp_path).unlink()
    tier = open_tier(tmp_path)
    assert "missing" in caplog.text
    assert tier.stats().blocks == 0
    assert tier.match(NAMESPACE, prefix_keys(1, 5)) == 0
    assert put_all(tier, NAMESPACE, prefix_keys(1, 5)) is Outcome.DONE
    assert get_all(tier, NAMESPACE, prefix_keys(1, 5)) == 5
    tier.check()
    tier.close()


# --- a damaged or missing index ---


def test_a_missing_index_costs_the_blocks_and_says_how_to_get_them_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path)
    shutil.rmtree(tmp_path / "index")
    tier = open_tier(tmp_path)
    assert "doctor --kv-disk-path" in caplog.text
    assert "--verify repair" in caplog.text
    assert get_all(tier, NAMESPACE, prefix_keys(1, 5)) == 0
    assert tier.stats().used_bytes > 0  # the old segments count, until they are needed or repaired
    assert put_all(tier, NAMESPACE, prefix_keys(1, 5)) is Outcome.DONE
    assert get_all(tier, NAMESPACE, prefix_keys(1, 5)) == 5
    assert len(list(tmp_path.glob("*.seg"))) == 2
    tier.check()
    tier.close()


def test_segments_of_a_lost_index_go_first_when_room_is_needed(tmp_path: Path) -> None:
    limit = DiskConfig(tmp_path, 24 * (16 << 10))
    tier = DiskTier(limit, LAYOUT)
    for prefix in range(12):
        put_all(tier, NAMESPACE, prefix_keys(prefix, 4))
    tier.close()
    shutil.rmtree(tmp_path / "index")
    tier = DiskTier(limit, LAYOUT)
    old = {path.name for path in tmp_path.glob("*.seg")}
    for prefix in range(12):
        assert put_all(tier, NAMESPACE, prefix_keys(prefix, 4)) is Outcome.DONE
        assert tier.stats().used_bytes <= limit.limit_bytes
    assert len(old & {path.name for path in tmp_path.glob("*.seg")}) < len(old)
    assert tier.stats().evicted == 0
    tier.close()


def test_an_index_that_leads_to_another_block_is_not_believed(tmp_path: Path) -> None:
    """The bytes there verify, but they are those of another key."""
    tier = open_tier(tmp_path)
    keys = prefix_keys(1, 4)
    put_all(tier, NAMESPACE, keys)
    index = tier._state.index
    with index._env.begin(write=True) as txn:
        entries = [txn.get(NAMESPACE + key, db=index._blocks) for key in keys]
        txn.put(NAMESPACE + keys[2], entries[3], db=index._blocks)
        txn.put(NAMESPACE + keys[3], entries[2], db=index._blocks)
    get = tier.prepare_get(NAMESPACE, keys)
    count, blocks, outcome = read_all(tier, get)
    tier.complete_get(get)
    assert (count, outcome) == (2, Outcome.DAMAGED)
    assert np.array_equal(blocks[1], contents(LAYOUT, NAMESPACE, keys[1]))
    assert tier.match(NAMESPACE, keys) == 2
    tier.close()


def test_rows_of_a_wrong_size_are_misses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A sound LMDB file with senseless rows in it."""
    tier = open_tier(tmp_path)
    for prefix in range(3):
        put_all(tier, NAMESPACE, prefix_keys(prefix, 4))
    index = tier._state.index
    with index._env.begin(write=True) as txn:
        txn.put(NAMESPACE + prefix_keys(0, 4)[1], b"short", db=index._blocks)
        txn.put((2).to_bytes(8, "big"), b"", db=index._use)
        txn.put((3).to_bytes(8, "big"), b"no run", db=index._runs)
        txn.put(b"next", b"?", db=index._meta)
    assert get_all(tier, NAMESPACE, prefix_keys(0, 4)) == 1
    assert put_all(tier, NAMESPACE, prefix_keys(0, 4)) is Outcome.DONE
    assert get_all(tier, NAMESPACE, prefix_keys(0, 4)) == 4
    tier.close()
    tier = open_tier(tmp_path)
    assert [get_all(tier, NAMESPACE, prefix_keys(prefix, 4)) for prefix in range(3)] == [4, 4, 0]
    assert put_all(tier, NAMESPACE, prefix_keys(2, 4)) is Outcome.DONE
    with tier._state.index._env.begin(write=True) as txn:
        txn.put(b"stores", b"???", db=tier._state.index._meta)
    tier.close()
    caplog.clear()
    tier = open_tier(tmp_path)
    assert "--verify repair" in caplog.text
    assert tier.stats().blocks == 0
    assert put_all(tier, NAMESPACE, prefix_keys(2, 4)) is Outcome.DONE
    tier.close()


FUZZ = """
import sys, random, os, logging
from pathlib import Path
sys.path[:0] = [sys.argv[3]]
from tests.tiered_store.test_disk_faults import fuzz_index
logging.disable(logging.CRITICAL)
fuzz_index(Path(sys.argv[1]), int(sys.argv[2]))
"""


def fuzz_index(path: Path, seed: int) -> None:
    """Damage the index somewhere, start, read everything, and write: no crash and no wrong byte."""
    choose = random.Random(seed)
    file = path / "index" / "data.mdb"
    size = file.stat().st_size
    kind = choose.choice(("flip", "flips", "truncate", "garbage", "page"))
    if kind == "truncate":
        os.truncate(file, choose.randrange(size))
    elif kind == "garbage":
        with file.open("r+b") as opened:
            opened.seek(choose.randrange(size))
            opened.write(choose.randbytes(5000))
    elif kind == "page":
        with file.open("r+b") as opened:
            opened.seek(choose.randrange(size // 4096) * 4096)
            opened.write(bytes(4096))
    else:
        for _ in range(1 if kind == "flip" else 20):
            damage(file, choose.randrange(size))
    tier = open_tier(path)
    found = sum(get_all(tier, NAMESPACE, prefix_keys(i, 5)) for i in range(4))
    assert found <= 20
    for prefix in range(4):
        assert put_all(tier, NAMESPACE, prefix_keys(prefix, 6)) is Outcome.DONE, (kind, tier)
        count = get_all(tier, NAMESPACE, prefix_keys(prefix, 6))
        # A flipped bit may have led a key to the wrong place; reading it drops it, and then it can be put
        # again.
        if count < 6:
            assert put_all(tier, NAMESPACE, prefix_keys(prefix, 6)) is Outcome.DONE
            assert get_all(tier, NAMESPACE, prefix_keys(prefix, 6)) == 6
    tier.close()


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 200), marks=pytest.mark.long)])
def test_a_damaged_index_never_crashes_and_never_serves_wrong_bytes(tmp_path: Path, seeds: range) -> None:
    filled(tmp_path / "clean")
    root = str(Path(__file__).resolve().parents[2])
    for seed in seeds:
        copy = tmp_path / str(seed)
        shutil.copytree(tmp_path / "clean", copy)
        done = subprocess.run(
            [sys.executable, "-c", FUZZ, str(copy), str(seed), root],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"seed {seed}: {done.returncode}\n{done.stderr}"
        shutil.rmtree(copy)


# --- errors of the disk ---


def test_a_read_error_is_a_miss_and_the_blocks_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path)
    files, clock = FaultyFiles(), FakeClock()
    tier = open_tier(tmp_path, files, clock)
    keys = prefix_keys(1, 5)
    for method in ("pread", "preadv"):
        files.fail = {method: errno.EIO}
        get = tier.prepare_get(NAMESPACE, keys)
        assert read_all(tier, get)[::2] == (0, Outcome.IO_ERROR)
        tier.complete_get(get)
        assert "cannot read segment" in caplog.text
        files.fail = {}
        assert tier.match(NAMESPACE, keys) == 0  # left alone for a while
        assert get_all(tier, NAMESPACE, prefix_keys(2, 5)) == 5
        clock.advance(31)
        assert get_all(tier, NAMESPACE, keys) == 5
    assert tier.stats().got[Outcome.IO_ERROR] == 10
    tier.check()
    tier.close()


def test_blocks_that_cannot_be_read_may_be_put_again(tmp_path: Path) -> None:
    filled(tmp_path)
    files, clock = FaultyFiles(), FakeClock()
    tier = open_tier(tmp_path, files, clock)
    keys = prefix_keys(1, 5)
    files.fail = {"preadv": errno.EIO}
    get = tier.prepare_get(NAMESPACE, keys)
    read_all(tier, get)
    tier.complete_get(get)
    files.fail = {}
    assert put_all(tier, NAMESPACE, keys[:3]) is Outcome.DONE
    assert get_all(tier, NAMESPACE, keys) == 3
    clock.advance(31)
    assert get_all(tier, NAMESPACE, keys) == 5
    tier.check()
    tier.close()


def test_a_segment_that_cannot_be_read_at_start_is_tried_again_later(tmp_path: Path) -> None:
    filled(tmp_path)
    files = FaultyFiles()
    files.fail = {"pread": errno.EIO}
    tier = open_tier(tmp_path, files)
    files.fail = {}
    assert tier.stats().extra["unavailable_runs"] == 4
    assert tier.match(NAMESPACE, prefix_keys(1, 5)) == 0
    assert put_all(tier, NAMESPACE, prefix_keys(1, 5)) is Outcome.DONE
    assert get_all(tier, NAMESPACE, prefix_keys(1, 5)) == 5
    tier.check()
    tier.close()
    again = open_tier(tmp_path)
    assert [get_all(again, NAMESPACE, prefix_keys(i, 5)) for i in range(4)] == [5] * 4
    again.check()
    again.close()


@pytest.mark.parametrize("method", ["pwritev", "pwrite", "fdatasync", "sync_directory", "open", "truncate"])
def test_a_write_error_fails_the_put_and_nothing_else(tmp_path: Path, method: str) -> None:
    files, clock = FaultyFiles(), FakeClock()
    tier = open_tier(tmp_path, files, clock)
    files.fail = {method: errno.EIO}
    assert put_all(tier, NAMESPACE, prefix_keys(0, 5)) is Outcome.IO_ERROR
    assert tier.match(NAMESPACE, prefix_keys(0, 5)) == 0
    assert tier.stats().put[Outcome.IO_ERROR] == 5
    files.fail = {}
    assert put_all(tier, NAMESPACE, prefix_keys(1, 5)) is Outcome.DONE
    assert put_all(tier, NAMESPACE, prefix_keys(0, 5)) is Outcome.DONE
    tier.check()
    tier.close()
    again = open_tier(tmp_path)
    assert [get_all(again, NAMESPACE, prefix_keys(i, 5)) for i in range(2)] == [5] * 2
    again.close()


def test_nothing_is_added_to_a_segment_whose_sync_failed(tmp_path: Path) -> None:
    """The kernel may have dropped pages that it failed to write, and report the next sync as a success."""
    files = FaultyFiles()
    tier = open_tier(tmp_path, files)
    put_all(tier, NAMESPACE, prefix_keys(0, 5))
    files.fail = {"fdatasync": errno.EIO}
    assert put_all(tier, NAMESPACE, prefix_keys(1, 5)) is Outcome.IO_ERROR
    files.fail = {}
    assert put_all(tier, NAMESPACE, prefix_keys(1, 5)) is Outcome.DONE
    assert {run.row.segment for run in tier._state.runs.values()} == {1, 2}
    assert get_all(tier, NAMESPACE, prefix_keys(0, 5)) == 5
    tier.close()


@pytest.mark.parametrize("method", ["pwritev", "pwrite", "truncate", "open"])
def test_a_full_disk_is_a_state_that_ends(
    tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    files, clock = FaultyFiles(), FakeClock()
    tier = open_tier(tmp_path, files, clock)
    files.fail = {method: errno.ENOSPC}
    assert put_all(tier, NAMESPACE, prefix_keys(0, 5)) is Outcome.FULL
    assert tier.health is DiskHealth.FULL
    assert "--kv-disk-size" in caplog.text
    files.fail = {}
    before = files.calls.copy()
    assert put_all(tier, NAMESPACE, prefix_keys(0, 5)) is Outcome.FULL  # left alone for a while
    assert files.calls == before
    clock.advance(31)
    assert put_all(tier, NAMESPACE, prefix_keys(0, 5)) is Outcome.DONE
    assert tier.health is DiskHealth.OK
    assert get_all(tier, NAMESPACE, prefix_keys(0, 5)) == 5
    tier.check()
    tier.close()


def test_a_full_disk_takes_old_segments_before_new_blocks(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = DiskTier(DiskConfig(tmp_path, LIMIT, segment_bytes=64 << 10), LAYOUT, files=files)
    for prefix in range(12):
        put_all(tier, NAMESPACE, prefix_keys(prefix, 4))
    segments = len(tier._state.segments.by_number)
    real = files.pwritev
    failures = iter([True, True])  # the write, and its second try

    def once_full(fd: int, vectors: np.ndarray, offset: int) -> int:
        if next(failures, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, vectors, offset)

    files.pwritev = once_full  # type: ignore[method-assign]
    assert put_all(tier, NAMESPACE, prefix_keys(50, 4)) is Outcome.DONE
    assert len(tier._state.segments.by_number) < segments + 1
    assert tier.stats().evicted > 0
    assert get_all(tier, NAMESPACE, prefix_keys(50, 4)) == 4
    tier.check()
    tier.close()


def test_a_disk_that_turns_read_only_is_still_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path)
    files = FaultyFiles()
    tier = open_tier(tmp_path, files)
    files.fail = {"pwritev": errno.EROFS}
    assert put_all(tier, NAMESPACE, prefix_keys(9, 5)) is Outcome.READ_ONLY
    assert tier.health is DiskHealth.READ_ONLY
    assert "read-only" in caplog.text
    assert put_all(tier, NAMESPACE, prefix_keys(9, 5)) is Outcome.READ_ONLY
    assert get_all(tier, NAMESPACE, prefix_keys(1, 5)) == 5
    assert tier.drop(NAMESPACE, prefix_keys(1, 5)) == 0
    tier.close()


@pytest.mark.parametrize("seed", range(8))
def test_random_errors_never_give_wrong_bytes(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Every operation fails at random. Blocks that are found are right, and the tier recovers with the
    disk."""
    caplog.set_level(logging.CRITICAL, "sglang_ext")
    choose = random.Random(seed)
    files, clock = FaultyFiles(seed=seed), FakeClock()
    files.codes = (errno.EIO, errno.ENOSPC)
    limit = DiskConfig(tmp_path, 40 * (16 << 10), retry_seconds=5.0)
    tier = DiskTier(limit, LAYOUT, files=files, clock=clock)
    files.rate = 0.08
    done: set[bytes] = set()
    outcomes = set()
    for _ in range(300):
        namespace = choose.choice((NAMESPACE, OTHER))
        keys = prefix_keys(choose.randrange(9), choose.randrange(1, 7))
        action = choose.random()
        if action < 0.5:
            outcome = put_all(tier, namespace, keys)
            outcomes.add(outcome)
            done |= {namespace + key for key in keys} if outcome is Outcome.DONE else set()
        elif action < 0.9:
            count = get_all(tier, namespace, keys)
            assert all(namespace + key in done for key in keys[:count])
        elif action < 0.97:
            tier.drop(namespace, keys)
        clock.advance(choose.choice((0.0, 0.5, 4.0)))
        tier.check()
        assert tier.stats().used_bytes <= limit.limit_bytes
    assert files.faults > 20
    assert outcomes >= {Outcome.DONE, Outcome.IO_ERROR, Outcome.FULL}
    files.rate = 0.0
    clock.advance(60.0)
    assert put_all(tier, NAMESPACE, prefix_keys(70, 5)) is Outcome.DONE
    assert get_all(tier, NAMESPACE, prefix_keys(70, 5)) == 5
    tier.close()
    again = DiskTier(limit, LAYOUT, clock=clock)
    assert get_all(again, NAMESPACE, prefix_keys(70, 5)) == 5
    again.check()
    again.close()


# --- real file systems ---


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "tmpfs", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True, capture_output=True)


def test_a_really_full_disk(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Others fill the disk while we use it: data and index both run out of room. The tier shrinks and goes
    on.
    """
    clock = FakeClock()
    tier = open_tier(small_disk, clock=clock)
    assert "so that is the limit" in caplog.text
    outcomes = []
    for prefix in range(400):
        if prefix == 150:
            fill_up(small_disk / "ballast")
            caplog.clear()
        outcomes.append(put_all(tier, NAMESPACE, prefix_keys(prefix, 8)))
        clock.advance(31)
        if prefix % 20 == 0:
            tier.check()
    assert "--kv-disk-size" in caplog.text
    assert outcomes[:150].count(Outcome.DONE) == 150
    assert outcomes[150:].count(Outcome.DONE) > 100
    last = max(i for i, outcome in enumerate(outcomes) if outcome is Outcome.DONE)
    assert last > 390, "the tier stopped taking blocks for good"
    assert get_all(tier, NAMESPACE, prefix_keys(last, 8)) == 8
    tier.check()
    found = [get_all(tier, NAMESPACE, prefix_keys(prefix, 8)) for prefix in range(400)]
    tier.close()
    (small_disk / "ballast").unlink()
    again = open_tier(small_disk, clock=clock)
    assert [get_all(again, NAMESPACE, prefix_keys(prefix, 8)) for prefix in range(400)] == found
    again.check()
    again.close()


def fill_up(file: Path) -> None:
    """Write a file until the disk is full."""
    with file.open("wb", buffering=0) as opened, contextlib.suppress(OSError):
        while True:
            opened.write(bytes(4096))


def test_a_read_only_disk(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(small_disk)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True, capture_output=True)
    tier = open_tier(small_disk)
    assert tier.health is DiskHealth.READ_ONLY
    assert "read-only" in caplog.text
    assert [get_all(tier, NAMESPACE, prefix_keys(i, 5)) for i in range(4)] == [5] * 4
    assert put_all(tier, NAMESPACE, prefix_keys(9, 5)) is Outcome.READ_ONLY
    tier.close()
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True, capture_output=True)
    tier = open_tier(small_disk)
    assert put_all(tier, NAMESPACE, prefix_keys(9, 5)) is Outcome.DONE
    tier.close()


# --- a directory that goes while it is used ---


def emptied(path: Path) -> None:
    for entry in path.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def replaced(path: Path) -> None:
    path.rename(path.with_name("old"))
    path.mkdir()


def without_index(path: Path) -> None:
    shutil.rmtree(path / "index")


def but_for_its_lock(path: Path) -> None:
    shutil.rmtree(path / "index")
    the_segment(path).unlink()


def under_way_in(tier: DiskTier) -> Put:
    """A put whose layers are written."""
    put = tier.prepare_put(NAMESPACE, prefix_keys(7, 1))
    assert isinstance(put, Put)
    memory, _ = memory_of(LAYOUT, NAMESPACE, put.wanted)
    for layer in range(LAYOUT.n_layers):
        assert tier.put_layer(put, layer, memory, np.arange(1)) is Outcome.DONE
    return put


@pytest.mark.parametrize("change", [emptied, but_for_its_lock, replaced, shutil.rmtree])
def test_a_tier_whose_directory_goes_goes_on_in_a_new_one(
    tmp_path: Path, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "kv"
    filled(path)
    tier = open_tier(path)
    there = set(tier.names_after(b"", 100)[0])
    tier.watch(lambda stored, removed: (there.update(stored), there.difference_update(removed)))
    keys = prefix_keys(1, 5)
    under_way, read = under_way_in(tier), tier.prepare_get(NAMESPACE, keys)
    change(path)
    # Nothing is reported as durable that no restart would find, also of a put that had begun before.
    assert tier.complete_puts([under_way]) == [Outcome.IO_ERROR]
    assert tier.health is DiskHealth.LOST
    assert tier.stats().limit_bytes == 0
    assert (tier.renewals, tier.match(NAMESPACE, keys)) == (0, 5)
    fresh = prefix_keys(9, 5)
    assert put_all(tier, NAMESPACE, fresh) is Outcome.DONE
    assert (tier.health, tier.renewals, tier.stats().limit_bytes) == (DiskHealth.OK, 1, LIMIT)
    assert caplog.text.count("was removed, emptied or replaced") == 1
    # A get under way reads the files that it has open; after it, nothing from before is found.
    assert read_all(tier, read)[0] == 5
    tier.complete_get(read)
    assert there == {*fresh}
    assert get_all(tier, NAMESPACE, keys) == 0
    assert put_all(tier, NAMESPACE, keys) is Outcome.DONE
    tier.check()
    tier.close()
    again = open_tier(path)
    assert (get_all(again, NAMESPACE, keys), get_all(again, NAMESPACE, fresh)) == (5, 5)
    again.check()
    again.close()


@pytest.mark.parametrize("change", [emptied, replaced])
def test_a_put_under_way_does_not_end_in_a_new_directory(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    tier = open_tier(tmp_path / "kv")
    assert put_all(tier, NAMESPACE, prefix_keys(1, 5)) is Outcome.DONE
    under_way = under_way_in(tier)
    known = tier.prepare_put(NAMESPACE, prefix_keys(1, 5))
    unreserved = tier.prepare_put(NAMESPACE, prefix_keys(8, 2))
    assert isinstance(known, Put)
    assert isinstance(unreserved, Put)
    change(tmp_path / "kv")
    assert put_all(tier, NAMESPACE, prefix_keys(9, 5)) is Outcome.DONE
    memory, _ = memory_of(LAYOUT, NAMESPACE, unreserved.wanted)
    assert tier.put_layer(unreserved, 0, memory, np.arange(2)) is Outcome.IO_ERROR
    tier.abort_put(unreserved)
    assert tier.complete_puts([under_way, known]) == [Outcome.IO_ERROR] * 2
    assert tier.match(NAMESPACE, prefix_keys(7, 1)) == tier.match(NAMESPACE, prefix_keys(1, 5)) == 0
    tier.check()
    tier.close()


def of_others(path: Path) -> None:
    emptied(path)
    (path / "notes.txt").write_text("keep me")


def elsewhere(path: Path) -> None:
    path.rename(path.with_name("old"))
    path.with_name("else").mkdir()
    path.symlink_to("else")


def in_use_by_another(path: Path) -> DirectoryOwner:
    replaced(path)
    return DirectoryOwner(path, "another")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (without_index, "which this server has not written there"),
        (of_others, "holds 'notes.txt'"),
        (elsewhere, "leads to another place"),
        (in_use_by_another, "is in use by instance 'another'"),
    ],
)
def test_a_directory_that_is_not_safe_to_use_is_left_alone_until_it_is(
    tmp_path: Path,
    change: Callable[[Path], DirectoryOwner | None],
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path, clock = tmp_path / "kv", FakeClock()
    filled(path)
    tier = open_tier(path, clock=clock)
    keys = prefix_keys(1, 5)
    other = change(path)
    before = sorted(entry.name for entry in path.iterdir())
    for _ in range(3):
        assert put_all(tier, NAMESPACE, prefix_keys(9, 5)) is Outcome.IO_ERROR
    assert tier.health is DiskHealth.LOST
    assert tier.stats().limit_bytes == 0
    assert tier.stats().put[Outcome.IO_ERROR] == 15
    assert caplog.text.count(why) == 1
    # Answers stay right: open files are still read.
    assert get_all(tier, NAMESPACE, keys) == 5
    assert sorted(entry.name for entry in path.iterdir()) == before
    if other is not None:
        other.release()
    path.unlink() if path.is_symlink() else shutil.rmtree(path)
    clock.advance(30.0)
    assert put_all(tier, NAMESPACE, prefix_keys(9, 5)) is Outcome.DONE
    tier.check()
    tier.close()


def test_a_disk_that_is_not_mounted_any_more_is_not_written_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the folder of the mount point is left, on another file system."""
    tier = open_tier(tmp_path / "kv")
    shutil.rmtree(tmp_path / "kv")
    tier._place = dataclasses.replace(tier._place, device=tier._place.device + 1)
    assert put_all(tier, NAMESPACE, prefix_keys(9, 5)) is Outcome.IO_ERROR
    assert "is its disk still mounted?" in caplog.text
    assert not (tmp_path / "kv").exists()
    tier.close()


def test_a_segment_that_is_removed_while_it_is_written_fails_its_puts_and_a_new_one_follows(
    tmp_path: Path,
) -> None:
    tier = open_tier(tmp_path)
    assert put_all(tier, NAMESPACE, prefix_keys(1, 5)) is Outcome.DONE
    the_segment(tmp_path).unlink()
    assert put_all(tier, NAMESPACE, prefix_keys(2, 5)) is Outcome.IO_ERROR
    assert put_all(tier, NAMESPACE, prefix_keys(2, 5)) is Outcome.DONE
    assert tier.health is DiskHealth.OK
    tier.close()
    again = open_tier(tmp_path)
    assert get_all(again, NAMESPACE, prefix_keys(2, 5)) == 5
    again.close()

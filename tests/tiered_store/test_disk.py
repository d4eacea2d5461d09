"""The disk tier: the contract, restart, the limit, the order of a commit, two owners."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.errors import ConfigError
from sglang_ext.geometry import BlockLayout
from sglang_ext.testing.blocks import (
    LAYOUT,
    NAMESPACE,
    OTHER,
    get_all,
    memory_of,
    prefix_keys,
    put_all,
    read_all,
    write_all,
)
from sglang_ext.testing.fakes import FakeClock
from sglang_ext.testing.tier_contract import DurableTierContract
from sglang_ext.tiered_store.disk import speed as disk_speed
from sglang_ext.tiered_store.disk.files import Files
from sglang_ext.tiered_store.disk.owner import LOCK_FILE
from sglang_ext.tiered_store.disk.segment_format import PAGE
from sglang_ext.tiered_store.disk.speed import DiskSpeed, choose_io
from sglang_ext.tiered_store.disk.state import DiskConfig, IoMode
from sglang_ext.tiered_store.disk.tier import DiskTier
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier, Outcome, Put
from tests.support.files import READS, FaultyFiles

pytestmark = pytest.mark.slow

RUN_BYTES = 16 << 10
"""A run of a few blocks of the test layout: a page for the header and one for each of three layers."""


def config(path: Path, capacity: int = 24, **options: object) -> DiskConfig:
    return DiskConfig(path, capacity * RUN_BYTES, **options)  # type: ignore[arg-type]


class TestDiskTier(DurableTierContract):
    def open_tier(self, layout: BlockLayout, capacity: int, tmp_path: Path) -> BlockTier:
        return DiskTier(config(tmp_path, capacity), layout)


class TestDiskTierPastThePageCache(DurableTierContract):
    def open_tier(self, layout: BlockLayout, capacity: int, tmp_path: Path) -> BlockTier:
        return DiskTier(config(tmp_path, capacity, io=IoMode.DIRECT), layout)


class TestDiskTierOnAShortWindedKernel(DurableTierContract):
    """Reads and writes that move fewer bytes than asked for are continued."""

    def open_tier(self, layout: BlockLayout, capacity: int, tmp_path: Path) -> BlockTier:
        files = FaultyFiles()
        files.short = 100
        return DiskTier(config(tmp_path, capacity), layout, files=files)


# --- reading past the page cache ---


def test_what_the_page_cache_has_is_read_from_it(tmp_path: Path) -> None:
    layout = BlockLayout(16, ((128, 128), (256,)))
    tier = DiskTier(DiskConfig(tmp_path, 32 << 20, io=IoMode.DIRECT), layout)
    assert put_all(tier, NAMESPACE, prefix_keys(1, 9)) is Outcome.DONE
    segment = next(iter(tier._state.segments.by_number.values()))
    if segment.direct_fd < 0 or not tier._state.files.in_page_cache(segment.fd, 0, PAGE):
        pytest.skip("no O_DIRECT here, or a kernel that does not tell what the page cache has")
    run = next(iter(tier._state.runs.values())).row.offset
    assert _fds_read(tier, layout) == [segment.fd]
    os.posix_fadvise(segment.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert not tier._state.files.in_page_cache(segment.fd, run, PAGE)
    assert _fds_read(tier, layout) == [segment.direct_fd]
    tier.close()


def _fds_read(tier: DiskTier, layout: BlockLayout) -> list[int]:
    """Read layer 1 of nine blocks into memory that O_DIRECT takes; returns the file descriptors used."""
    fds: list[int] = []
    files = tier._state.files
    real = type(files).preadv
    files.preadv = lambda fd, vectors, offset: (fds.append(fd), real(files, fd, vectors, offset))[1]  # type: ignore
    # numpy's memory need not be aligned as O_DIRECT wants it; an arena's is.
    buffer = np.zeros(9 * layout.block_bytes + PAGE, dtype=np.uint8)
    start = -buffer.ctypes.data % PAGE
    memory = BlockMemory.of_blocks(layout, buffer[start:][: 9 * layout.block_bytes].reshape(9, -1))
    get = tier.prepare_get(NAMESPACE, prefix_keys(1, 9))
    assert tier.get_layer(get, 1, memory, np.arange(9)).blocks == 9
    tier.complete_get(get)
    return fds


@pytest.mark.parametrize(
    ("direct", "chosen"), [(None, IoMode.BUFFERED), (1e9, IoMode.BUFFERED), (1.9e9, IoMode.DIRECT)]
)
def test_auto_is_what_was_measured_to_be_faster(
    direct: float | None, chosen: IoMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_speed, "measure_disk", lambda path, nbytes: DiskSpeed(1e9, 2e9, direct))
    tier = DiskTier(DiskConfig(tmp_path, 32 << 20, io=IoMode.AUTO), BlockLayout(16, ((128, 128), (256,))))
    assert tier.config.io is chosen
    tier.close()


def test_auto_measures_this_disk_and_leaves_nothing(tmp_path: Path) -> None:
    tier = DiskTier(DiskConfig(tmp_path, 32 << 20, io=IoMode.AUTO), BlockLayout(16, ((128, 128), (256,))))
    assert tier.config.io in (IoMode.BUFFERED, IoMode.DIRECT)
    assert list(tmp_path.glob("*.tmp")) == []
    tier.close()


@pytest.mark.parametrize("asked", [IoMode.AUTO, IoMode.DIRECT])
def test_blocks_that_o_direct_does_not_take_are_read_buffered(asked: IoMode, tmp_path: Path) -> None:
    assert choose_io(tmp_path, BlockLayout(1, ((100,),)), asked) is IoMode.BUFFERED
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_cannot_be_measured_is_read_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, nbytes: int) -> DiskSpeed:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(disk_speed, "measure_disk", full)
    assert choose_io(tmp_path, BlockLayout(16, ((128, 128),)), IoMode.AUTO) is IoMode.BUFFERED


def test_one_layer_of_a_long_prefix_is_one_read(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = DiskTier(DiskConfig(tmp_path, 64 << 20), LAYOUT, files=files)
    keys = prefix_keys(1, 300)
    put_all(tier, NAMESPACE, keys)
    files.calls.clear()
    assert get_all(tier, NAMESPACE, keys) == 300
    assert files.calls["preadv"] == LAYOUT.n_layers
    tier.close()


# --- restart ---


def fill_index(path: Path, blocks: int) -> None:
    """A tier of many tiny blocks, in runs of 100."""
    layout = BlockLayout(1, ((8,),))
    tier = DiskTier(DiskConfig(path, 1 << 30), layout)
    memory = BlockMemory.of_blocks(layout, np.zeros((100, 8), dtype=np.uint8))
    puts: list[Put] = []
    for prefix in range(blocks // 100):
        put = tier.prepare_put(NAMESPACE, prefix_keys(prefix, 100))
        assert isinstance(put, Put)
        tier.put_layer(put, 0, memory, np.arange(100))
        puts.append(put)
        if len(puts) == 100:
            tier.complete_puts(puts)
            puts.clear()
    tier.complete_puts(puts)
    tier.close()


@pytest.mark.parametrize("blocks", [10_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_a_restart_reads_no_data(tmp_path: Path, blocks: int) -> None:
    fill_index(tmp_path, blocks)
    for _ in range(3):
        files = FaultyFiles()
        tier = DiskTier(DiskConfig(tmp_path, 1 << 30), BlockLayout(1, ((8,),)), files=files)
        assert tier.stats().blocks == blocks
        segments = len(tier._state.segments.by_number)
        assert sum(files.calls[name] for name in READS) == segments  # one page of each, to identify it
        assert get_all_zero(tier, prefix_keys(5, 100)) == 100
        tier.close()


def get_all_zero(tier: DiskTier, keys: list[bytes]) -> int:
    get = tier.prepare_get(NAMESPACE, keys)
    count, blocks, _ = read_all(tier, get)
    tier.complete_get(get)
    assert not blocks.any()
    return count


def test_a_restart_goes_on_in_the_last_segment(tmp_path: Path) -> None:
    for prefix in range(5):
        tier = DiskTier(DiskConfig(tmp_path, 64 << 20), LAYOUT)
        assert put_all(tier, NAMESPACE, prefix_keys(prefix, 3)) is Outcome.DONE
        tier.close()
    assert len(list(tmp_path.glob("*.seg"))) == 1
    tier = DiskTier(DiskConfig(tmp_path, 64 << 20), LAYOUT)
    assert [get_all(tier, NAMESPACE, prefix_keys(prefix, 3)) for prefix in range(5)] == [3] * 5
    tier.check()
    tier.close()


def test_times_of_use_survive_a_restart(tmp_path: Path) -> None:
    clock = FakeClock()
    tier = DiskTier(config(tmp_path), LAYOUT, clock=clock)
    put_all(tier, NAMESPACE, prefix_keys(1, 2))
    clock.advance(500)
    for _ in range(3):
        get_all(tier, NAMESPACE, prefix_keys(1, 2))
    tier.close()
    again = DiskTier(config(tmp_path), LAYOUT, clock=clock)
    (run,) = again._state.runs.values()
    assert (run.use.hits, run.use.last) == (3, clock.wall())
    again.close()


def test_another_layout_is_another_namespace_on_the_same_disk(tmp_path: Path) -> None:
    tier = DiskTier(config(tmp_path), LAYOUT)
    put_all(tier, NAMESPACE, prefix_keys(1, 3))
    tier.close()
    other = BlockLayout(4, ((64,),))
    tier = DiskTier(config(tmp_path), other)
    assert put_all(tier, OTHER, prefix_keys(1, 3)) is Outcome.DONE
    assert get_all(tier, OTHER, prefix_keys(1, 3)) == 3
    assert tier.stats().blocks == 6
    tier.check()
    # A caller that reuses a namespace for another layout gets nothing, not garbage.
    get = tier.prepare_get(NAMESPACE, prefix_keys(1, 3))
    count, _, outcome = read_all(tier, get)
    assert (count, outcome) == (0, Outcome.DAMAGED)
    tier.complete_get(get)
    tier.close()


# --- the order of a commit ---


def test_data_is_synced_before_the_index_leads_to_it(tmp_path: Path) -> None:
    files = FaultyFiles()
    steps: list[tuple[str, int]] = []
    tier = DiskTier(
        DiskConfig(tmp_path, 64 << 20),
        LAYOUT,
        files=files,
        step=lambda name: steps.append((name, len(files.log))),
    )
    put_all(tier, NAMESPACE, prefix_keys(1, 4))
    assert [name for name, _ in steps] == [
        "reserved",
        *["layer_written"] * LAYOUT.n_layers,
        "header_written",
        "data_synced",
        "index_prepared",
        "index_committed",
        "published",
    ]
    at = dict(steps)
    writes = [i for i, (name, file) in enumerate(files.log) if name in ("pwritev", "pwrite") and file]
    syncs = [i for i, (name, _) in enumerate(files.log) if name in ("fdatasync", "sync_directory")]
    assert len(syncs) == 2
    assert max(writes) < min(syncs) < max(syncs) < at["index_prepared"] == at["index_committed"]
    # Several puts share one sync and one commit.
    files.log.clear()
    puts = []
    for prefix in (2, 3, 4):
        put = tier.prepare_put(NAMESPACE, prefix_keys(prefix, 2))
        assert isinstance(put, Put)
        memory, _ = memory_of(LAYOUT, NAMESPACE, put.wanted)
        for layer in range(LAYOUT.n_layers):
            tier.put_layer(put, layer, memory, np.arange(2))
        puts.append(put)
    commits = tier.stats().extra["commits"]
    assert tier.complete_puts(puts) == [Outcome.DONE] * 3
    assert [name for name, _ in files.log].count("fdatasync") == 1
    assert tier.stats().extra["commits"] == commits + 1
    tier.close()


def test_room_of_an_aborted_put_is_used_again(tmp_path: Path) -> None:
    tier = DiskTier(config(tmp_path), LAYOUT)
    put_all(tier, NAMESPACE, prefix_keys(1, 3))
    used = tier.stats().used_bytes
    for _ in range(30):
        put = tier.prepare_put(NAMESPACE, prefix_keys(2, 3))
        assert isinstance(put, Put)
        memory, _ = memory_of(LAYOUT, NAMESPACE, put.wanted)
        assert tier.put_layer(put, 0, memory, np.arange(3)) is Outcome.DONE
        assert tier.stats().used_bytes > used
        tier.abort_put(put)
        assert tier.stats().used_bytes == used
    tier.check()
    tier.close()


def test_a_long_prefix_is_cut_into_runs(tmp_path: Path) -> None:
    tier = DiskTier(config(tmp_path, 64, segment_bytes=64 << 10), LAYOUT)
    keys = prefix_keys(1, 200)
    assert put_all(tier, NAMESPACE, keys) is Outcome.DONE
    assert tier.stats().extra["runs"] > 1
    assert get_all(tier, NAMESPACE, keys) == 200
    put = tier.prepare_put(NAMESPACE, keys)
    assert isinstance(put, Put)
    assert put.missing == ()
    tier.abort_put(put)
    tier.check()
    tier.close()


# --- the limit ---


def test_a_hot_run_is_moved_out_of_a_cold_segment(tmp_path: Path) -> None:
    clock = FakeClock()
    tier = DiskTier(config(tmp_path, 64, segment_bytes=8 * RUN_BYTES), LAYOUT, clock=clock)
    put_all(tier, NAMESPACE, prefix_keys(0, 3))
    first = next(iter(tier._state.runs.values())).segment
    for prefix in range(1, 200):
        clock.advance(100)
        put_all(tier, NAMESPACE, prefix_keys(prefix, 4))
        if prefix % 4 == 0:
            assert get_all(tier, NAMESPACE, prefix_keys(0, 3)) == 3, f"the hot prefix was lost at {prefix}"
        assert tier.stats().used_bytes <= tier.stats().limit_bytes
        assert sum(s.end for s in tier._state.segments.by_number.values()) == tier.stats().used_bytes
    tier.check()
    assert first.removed
    assert tier.stats().extra["moved_blocks"] >= 3
    on_disk = sum(file.stat().st_blocks * 512 for file in tmp_path.glob("*.seg"))
    assert on_disk <= tier.stats().limit_bytes + PAGE * len(list(tmp_path.glob("*.seg")))
    tier.close()
    again = DiskTier(config(tmp_path, 64, segment_bytes=8 * RUN_BYTES), LAYOUT, clock=clock)
    assert get_all(again, NAMESPACE, prefix_keys(0, 3)) == 3
    again.check()
    again.close()


def test_nothing_may_go_while_everything_is_read(tmp_path: Path) -> None:
    tier = DiskTier(config(tmp_path), LAYOUT)
    gets = []
    for prefix in range(60):
        if put_all(tier, NAMESPACE, prefix_keys(prefix, 4)) is not Outcome.DONE:
            break
        gets.append(tier.prepare_get(NAMESPACE, prefix_keys(prefix, 4)))
    assert 10 < len(gets) < 30
    assert tier.stats().put[Outcome.FULL] == 4
    for get in gets:
        count, _, outcome = read_all(tier, get)
        assert (count, outcome) == (4, Outcome.DONE)
        tier.complete_get(get)
    assert put_all(tier, NAMESPACE, prefix_keys(99, 4)) is Outcome.DONE
    tier.check()
    tier.close()


def test_empty_segments_are_removed(tmp_path: Path) -> None:
    tier = DiskTier(config(tmp_path), LAYOUT)
    for prefix in range(8):
        put_all(tier, NAMESPACE, prefix_keys(prefix, 4))
    assert len(list(tmp_path.glob("*.seg"))) > 1
    get = tier.prepare_get(NAMESPACE, prefix_keys(3, 4))
    assert tier.clear() == 32
    assert list(tmp_path.glob("*.seg")) == []
    assert tier.stats().used_bytes == 0
    assert read_all(tier, get)[0] == 4  # unlinked, but held open by its reader
    tier.complete_get(get)
    assert open_segments(tmp_path) == []
    tier.close()


def open_segments(path: Path) -> list[str]:
    links = (os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if exists(fd))
    return [link for link in links if link.startswith(str(path)) and ".seg" in link]


def exists(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_a_tier_closes_every_file(tmp_path: Path) -> None:
    tier = DiskTier(config(tmp_path, io=IoMode.DIRECT), LAYOUT)
    for prefix in range(30):
        put_all(tier, NAMESPACE, prefix_keys(prefix, 4))
    get = tier.prepare_get(NAMESPACE, prefix_keys(29, 4))
    assert open_segments(tmp_path)
    tier.close()
    assert read_all(tier, get)[0] == 4
    tier.complete_get(get)
    assert open_segments(tmp_path) == []


def test_too_small_a_limit_is_refused_with_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-disk-size"):
        DiskTier(DiskConfig(tmp_path, 100_000), LAYOUT)


def test_a_large_tier_has_a_bounded_number_of_files(tmp_path: Path) -> None:
    for limit in (1 << 30, 100 << 30, 10 << 40):
        configured = DiskConfig(tmp_path, limit)
        assert limit / configured.segment_size <= 513
        assert limit / configured.segment_size >= 16


def test_names_of_another_size_are_refused(tmp_path: Path) -> None:
    tier = DiskTier(config(tmp_path), LAYOUT)
    with pytest.raises(ValueError, match="namespace of 3 bytes"):
        tier.prepare_put(b"abc", prefix_keys(1, 1))
    with pytest.raises(ValueError, match="key of 4 bytes"):
        tier.prepare_put(NAMESPACE, [b"four"])
    with pytest.raises(ValueError, match="namespace of 3 bytes"):
        tier.match(b"abc", prefix_keys(1, 1))
    tier.close()


# --- other users ---


def test_files_are_readable_by_their_owner_only_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        tier = DiskTier(config(tmp_path / "kv"), LAYOUT)
        try:
            assert put_all(tier, NAMESPACE, prefix_keys(0, 3)) is Outcome.DONE
        finally:
            tier.close()
    finally:
        os.umask(before)
    made = [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]
    assert len(made) > 4
    assert [path for path in made if path.stat().st_mode & 0o077] == []


@pytest.mark.parametrize("name", [LOCK_FILE, "00000001.seg"])
def test_it_writes_through_no_planted_link(tmp_path: Path, name: str) -> None:
    theirs = tmp_path / "precious"
    theirs.write_text("theirs")
    folder = tmp_path / "kv"
    folder.mkdir()
    (folder / name).symlink_to(theirs)
    if name == LOCK_FILE:
        with pytest.raises(ConfigError, match="is a symbolic link") as caught:
            DiskTier(config(folder), LAYOUT)
        assert caught.value.field == "--kv-disk-path"
    else:
        with pytest.raises(OSError, match="symbolic"):
            Files().open(folder / name, write=True)
    assert theirs.read_text() == "theirs"


# --- owners ---


def test_a_second_owner_is_refused_naming_the_first(tmp_path: Path) -> None:
    tier = DiskTier(config(tmp_path, instance="decode-7"), LAYOUT)
    with pytest.raises(ConfigError, match=rf"--kv-disk-path: .*'decode-7' \(process {os.getpid()} on "):
        DiskTier(config(tmp_path, instance="other"), LAYOUT)
    put_all(tier, NAMESPACE, prefix_keys(1, 2))
    tier.close()
    again = DiskTier(config(tmp_path, instance="other"), LAYOUT)
    assert get_all(again, NAMESPACE, prefix_keys(1, 2)) == 2
    again.close()


def test_a_killed_owner_lets_go(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from sglang_ext.tiered_store.disk.owner import DirectoryOwner\n"
        "owner = DirectoryOwner(Path(sys.argv[1]), 'gone'); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"'gone' \\(process {child.pid}"):
            DiskTier(config(tmp_path), LAYOUT)
        child.kill()
        child.wait(timeout=30)
    DiskTier(config(tmp_path), LAYOUT).close()


def test_a_path_that_is_no_directory_is_refused_with_the_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="--kv-disk-path"):
        DiskTier(config(tmp_path / "file"), LAYOUT)


def test_a_failed_open_lets_go_of_the_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ZeroDivisionError):
        DiskTier(config(tmp_path), LAYOUT, clock=BrokenClock())
    DiskTier(config(tmp_path), LAYOUT).close()


class BrokenClock(FakeClock):
    def __init__(self) -> None:
        raise ZeroDivisionError


def test_state_can_be_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tier = DiskTier(DiskConfig(tmp_path, 64 << 20), LAYOUT)
    put = tier.prepare_put(NAMESPACE, prefix_keys(1, 3))
    assert isinstance(put, Put)
    write_all(tier, put)
    assert repr(tier) == f"<DiskTier {tmp_path} ok, 1 runs in 1 segments, 0 of 64 MiB, 0 pins>"
    assert "opened in" in caplog.text
    tier.close()
    assert "closed" in repr(tier)


class OverNetwork(Files):
    """Everything is on a network file system."""

    def mountinfo(self) -> str:
        return "22 1 0:40 / / rw - nfs4 filer:/export rw"


def test_a_directory_on_a_network_file_system_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--kv-disk-path: .* network file system \(nfs4\)"):
        DiskTier(config(tmp_path), LAYOUT, files=OverNetwork())
    assert not (tmp_path / LOCK_FILE).exists()
    DiskTier(config(tmp_path), LAYOUT).close()

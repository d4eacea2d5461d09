"""A real server with a tier more below its disk, which is registered in `archive_server` and nowhere else."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from disk_damage import damage_last_layer, runs, spoil_values
from hooked_server import FOLDER

from sglang_ext.testing.waiting import wait_until
from sglang_ext.tiered_store.disk.check import repair_directory
from sglang_ext.tiered_store.disk.tier import INDEX_DIRECTORY
from tests.support.compare import assert_same
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

BLOCK = 16
BLOCKS = 20


def in_archive(server: ServerProcess, metric: str, label: str = "") -> float:
    return sum(
        value
        for sample, value in server.metrics().items()
        if sample.startswith(f"{metric}{{") and 'tier="archive"' in sample and label in sample
    )


def test_kv_comes_back_from_a_tier_that_was_only_registered(tmp_path: Path) -> None:
    """After a restart without the disk: the same answer; its twin, with forged checksums, another."""
    disk, archive = tmp_path / "disk", tmp_path / "archive"
    spec = ServerSpec(
        run=(str(Path(__file__).parents[1].joinpath("servers", "archive_server.py")),),
        flags=(
            *("--radix-cache-backend", "global", "--kv-check", "--kv-load-policy", "always"),
            *("--kv-dram-size", "16MB", "--kv-disk-path", str(disk), "--kv-disk-size", "1GB"),
            *("--max-total-tokens", "2400", "--chunked-prefill-size", "256", "--enable-metrics"),
        ),
        environment={FOLDER: str(archive), **STRICT},
    )
    rng = random.Random(11)
    sound, damaged = [[rng.randrange(100, 30_000) for _ in range(BLOCKS * BLOCK + 4)] for _ in range(2)]
    with ServerProcess(spec) as server:
        before = server.generate(sound, max_new_tokens=8)
        blocks = "sglang_ext_cache_blocks"
        wait_until(lambda: in_archive(server, blocks) >= BLOCKS, seconds=20, what="a prompt in the archive")
        kept = runs(archive)
        right = server.generate(damaged, max_new_tokens=8)
        wait_until(lambda: in_archive(server, blocks) >= 2 * BLOCKS, seconds=20, what="the other prompt")
    shutil.rmtree(disk)
    damage_last_layer(runs(archive) - kept, spoil_values, forge=True)
    (rank,) = archive.iterdir()
    shutil.rmtree(rank / INDEX_DIRECTORY)  # its checksums of the run headers would show the damage
    assert repair_directory(rank).blocks >= 2 * BLOCKS
    with ServerProcess(spec) as server:
        again = server.generate(sound, max_new_tokens=8)
        assert again.disk_tokens == BLOCKS * BLOCK
        assert_same(before, again)
        wrong = server.generate(damaged, max_new_tokens=8)
        assert wrong.disk_tokens == BLOCKS * BLOCK
        with pytest.raises(AssertionError):
            assert_same(right, wrong)
        got = "sglang_ext_cache_tier_blocks_total"
        wait_until(lambda: in_archive(server, got, "got_done") >= 2 * BLOCKS, seconds=20, what="the count")

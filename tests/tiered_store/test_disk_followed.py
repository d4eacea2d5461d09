"""A disk tier that another process writes, read beside it."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_ext.testing.blocks import LAYOUT, NAMESPACE, OTHER, get_all, prefix_keys, put_all, read_all
from sglang_ext.tiered_store.disk.followed import FollowedDisk
from sglang_ext.tiered_store.disk.state import DiskConfig
from sglang_ext.tiered_store.tier import Outcome

pytestmark = pytest.mark.slow

RUN_BYTES = 16 << 10
OWNER = """
import sys
from pathlib import Path
from sglang_ext.testing.blocks import LAYOUT, NAMESPACE, prefix_keys, put_all
from sglang_ext.tiered_store.disk.state import DiskConfig
from sglang_ext.tiered_store.disk.tier import DiskTier

tier = DiskTier(DiskConfig(Path(sys.argv[1]), int(sys.argv[2]), retry_seconds=0.0), LAYOUT)
print("open", flush=True)
for line in sys.stdin:
    word, *numbers = line.split()
    if word == "put":
        done = put_all(tier, NAMESPACE, prefix_keys(*map(int, numbers))).value
    elif word == "drop":
        done = tier.drop(NAMESPACE, prefix_keys(*map(int, numbers)))
    elif word == "renew":
        tier._state.look()
        tier._state.begin_anew()
        done = tier.renewals
    else:
        done = tier.stats().evicted
    print(done, flush=True)
tier.close()
"""


class Owner:
    """The process that has the directory."""

    def __init__(self, path: Path, limit: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(path), str(limit)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "open"

    def __call__(self, command: str) -> str:
        assert self._process.stdin is not None
        print(command, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(timeout=60) == 0


@pytest.fixture
def config(tmp_path: Path) -> DiskConfig:
    return DiskConfig(tmp_path / "disk", 24 * RUN_BYTES, retry_seconds=0.0)


@pytest.fixture
def owner(config: DiskConfig) -> Iterator[Owner]:
    process = Owner(config.path, config.limit_bytes)
    yield process
    process.close()


@pytest.fixture
def followed(owner: Owner, config: DiskConfig) -> Iterator[FollowedDisk]:
    tier = FollowedDisk(config, LAYOUT)
    yield tier
    tier.check()
    tier.close()


def files_of(config: DiskConfig) -> dict[str, bytes]:
    """All files but LMDB's table of readers."""
    found = [path for path in config.path.rglob("*") if path.is_file() and path.name != "lock.mdb"]
    return {str(path.relative_to(config.path)): path.read_bytes() for path in found}


def test_what_the_owner_has_put_is_read(owner: Owner, followed: FollowedDisk) -> None:
    keys = prefix_keys(1, 9)
    assert followed.match(NAMESPACE, keys) == 0
    assert owner("put 1 9") == "done"
    assert followed.match(NAMESPACE, keys) == get_all(followed, NAMESPACE, keys) == 9
    assert followed.match(OTHER, keys) == 0
    assert followed.held(NAMESPACE, [keys[8], prefix_keys(2, 1)[0], keys[0]]) == [True, False, True]
    assert owner("drop 1 9 4") == "5"
    assert get_all(followed, NAMESPACE, keys) == 4


def test_nothing_is_written(owner: Owner, config: DiskConfig, followed: FollowedDisk) -> None:
    assert owner("put 1 9") == "done"
    before = files_of(config)
    assert put_all(followed, NAMESPACE, prefix_keys(3, 5)) is Outcome.DONE
    assert followed.drop(NAMESPACE, prefix_keys(1, 9)) == followed.clear() == 0
    assert files_of(config) == before
    assert followed.match(NAMESPACE, prefix_keys(3, 5)) == 0, "the owner's answer counts"
    assert get_all(followed, NAMESPACE, prefix_keys(1, 9)) == 9


def test_a_get_outlives_its_segment(owner: Owner, config: DiskConfig, followed: FollowedDisk) -> None:
    owner("put 1 9")
    get = followed.prepare_get(NAMESPACE, prefix_keys(1, 9))
    number = 2
    while owner("evicted") == "0":
        owner(f"put {number} 9")
        number += 1
    assert followed.match(NAMESPACE, prefix_keys(1, 9)) == 0
    count, _, outcome = read_all(followed, get)
    assert (count, outcome) == (9, Outcome.DONE)
    followed.complete_get(get)
    followed.check()  # the segment's bytes are given back


def test_a_damaged_block_is_a_miss(owner: Owner, config: DiskConfig, followed: FollowedDisk) -> None:
    """The twin of the comparison in `get_all`: the last byte of the last block's first layer."""
    owner("put 1 4")
    segment = next(config.path.glob("*.seg"))
    get = followed.prepare_get(NAMESPACE, prefix_keys(1, 4))
    piece = get.pieces[-1]
    offset = followed._state.header(piece.run).shape.offset(0, piece.positions[-1])
    with segment.open("r+b") as file:
        file.seek(piece.run.row.offset + offset + LAYOUT.layer_bytes(0) - 1)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    count, _, outcome = read_all(followed, get)
    assert (count, outcome) == (3, Outcome.DAMAGED)
    followed.complete_get(get)


def test_a_directory_that_is_lost_is_followed_into_the_next(
    owner: Owner, config: DiskConfig, followed: FollowedDisk
) -> None:
    owner("put 1 9")
    assert get_all(followed, NAMESPACE, prefix_keys(1, 9)) == 9
    shutil.rmtree(config.path)
    assert owner("renew") == "1"
    assert followed.match(NAMESPACE, prefix_keys(1, 9)) == 0
    owner("put 2 9")
    assert get_all(followed, NAMESPACE, prefix_keys(2, 9)) == 9


def test_without_an_index_nothing_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    followed = FollowedDisk(DiskConfig(tmp_path, 24 * RUN_BYTES), LAYOUT)
    assert followed.match(NAMESPACE, prefix_keys(1, 9)) == 0
    assert "cannot be read" in caplog.text
    followed.close()
    assert followed.prepare_put(NAMESPACE, prefix_keys(1, 9)) is Outcome.CLOSED
    assert get_all(followed, NAMESPACE, prefix_keys(1, 9)) == 0


def test_reads_beside_writes_have_the_right_bytes(
    owner: Owner, followed: FollowedDisk, long_run: bool
) -> None:
    """`get_all` compares every byte, while the owner takes old blocks for new ones."""
    rng = random.Random(5)
    found = 0
    for step in range(2000 if long_run else 150):
        assert owner(f"put {rng.randrange(12)} {rng.randrange(1, 12)}") in ("done", "full")
        found += get_all(followed, NAMESPACE, prefix_keys(rng.randrange(12), 12))
        if step % 10 == 0:
            owner(f"drop {rng.randrange(12)} 12 {rng.randrange(12)}")
    assert int(owner("evicted")) > 0
    assert found > 100

"""Ranks of prefill context parallelism (``--attn-cp-size``): each has the KV of all tokens in its pools and
in its DRAM; one of them writes to disk, and all read from there.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_pools import PoolKind, WrongKvError
from engine_ranks import DriftedApart, RankThread, SharedDisk, Together, play
from engine_scheduler import Settings
from engine_simulation import Rank, Scenario

from sglang_ext.engine.ranks import Ranks
from sglang_ext.errors import ConfigError
from sglang_ext.patches.adapter.building import open_in_turn
from sglang_ext.testing.tiers import FaultyTier
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier, Get, Ids, LayerRead, Outcome
from sglang_ext.tiered_store.wrapped import WrappedTier

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

SMALL = Settings(overlap=True, new_token_ratio=0.05)
MHA = Scenario("mha", hbm_tokens=256, dram_blocks=30, disk_blocks=1, memory=40, settings=SMALL)
MLA = Scenario(
    "mla",
    kind=PoolKind("mla", 16, layers=3),
    block=16,
    hbm_tokens=480,
    dram_blocks=24,
    disk_blocks=1,
    memory=30,
    settings=Settings(chunk=48, policy="lpm"),
)
DSA = Scenario(
    "dsa",
    kind=PoolKind("dsa", 64, layers=3),
    block=64,
    hbm_tokens=64 * 16,
    dram_blocks=12,
    disk_blocks=1,
    memory=30,
    stretch=4,
    settings=Settings(chunk=128, new_token_ratio=0.05),
)
KINDS = {"mha": MHA, "mla": MLA, "dsa": DSA}
ROOMY = replace(MHA, name="roomy", hbm_tokens=8192, dram_blocks=2500, settings=Settings())
AHEAD = replace(MHA, name="brought ahead, layers too", kind=PoolKind(layers=4), prefetch=0.6, layers=1 << 30)
STREAM = replace(MHA, name="streams", threaded=True, stream=True)
RANKS = 2
Program = Callable[[RankThread, Rank], None]


def traffic(seed: int, steps: int) -> Program:
    return lambda thread, rank: thread.serve_traffic(rank, seed, steps)


def alone(prompt: list[int]) -> Program:
    """One request, whose KV is on disk in the end."""

    def program(thread: RankThread, rank: Rank) -> None:
        rank.serve(prompt)
        assert rank.writes is not None
        for _ in range(5000):
            if rank.writes.counters.written >= len(prompt) // rank.scenario.block:
                break
            rank.scheduler.step()
        assert rank.writes.counters.written >= len(prompt) // rank.scenario.block, rank.writes

    return program


def share(
    scenario: Scenario,
    path: Path,
    program: Program,
    *,
    count: int = RANKS,
    groups: int = 1,
    agree: bool = True,
    around: Callable[[BlockTier, int], BlockTier] = lambda tier, number: tier,
) -> list[SharedDisk]:
    """Run a program on ranks, of which each group has the same KV. Returns the groups' disks, closed.

    Args:
        around: wraps a rank's tier, by its number.
    """
    together = Together(count)
    disks = [SharedDisk(path / f"tp{group}of{groups}", together, around=around) for group in range(groups)]

    def make(number: int) -> Rank:
        def opened(memory: BlockTier) -> BlockTier:
            place, group = divmod(number, groups)
            return disks[group].open(number, memory.layout, place=place)

        least = together.least_of(number) if agree and count > 1 else None
        return Rank(scenario, pace=random.Random(1000 + number), least=least, disk_class=opened)

    play(together, make, program, count)
    return disks


def put_by(disk: SharedDisk) -> tuple[int, int]:
    """Blocks and bytes that the owner has written."""
    assert disk.owner is not None
    stats = disk.owner.stats()
    return stats.put[Outcome.DONE], int(stats.extra["bytes_written"])


def got_by(disk: SharedDisk) -> list[int]:
    """Blocks that each rank has read from disk."""
    assert disk.owner is not None
    return [tier.stats().got.get(Outcome.DONE, 0) for tier in (disk.owner, *disk.followers.values())]


@pytest.mark.parametrize("kind", ["mha", "mla", "dsa"])
def test_every_row_is_right_on_ranks_with_the_same_kv(kind: str, tmp_path: Path, long_run: bool) -> None:
    """Random requests, evictions, loads from DRAM and disk. After each pass, the ranks' trees are equal."""
    for seed in range(3, 13 if long_run else 4):
        (disk,) = share(KINDS[kind], tmp_path / f"{seed}", traffic(seed, 600 if long_run else 200))
        assert put_by(disk)[0] > 0
        assert min(got_by(disk)) > 0
        assert disk.followers[1].stats().put == {}


@pytest.mark.parametrize("scenario", [AHEAD, STREAM], ids=str)
def test_blocks_that_are_brought_ahead_or_streamed_are_right(scenario: Scenario, tmp_path: Path) -> None:
    (disk,) = share(scenario, tmp_path, traffic(3, 200))
    assert min(got_by(disk)) > 0


def test_ranks_share_heads_and_others_have_the_same_kv(tmp_path: Path) -> None:
    disks = share(MHA, tmp_path, traffic(3, 160), count=4, groups=2)
    for disk in disks:
        assert put_by(disk)[0] > 0
        assert min(got_by(disk)) > 0


@pytest.mark.parametrize("failing", range(RANKS), ids=["the one that writes", "one that reads"])
def test_a_disk_that_fails_on_one_rank_is_a_miss_on_all(failing: int, tmp_path: Path) -> None:
    faulty: list[FaultyTier] = []

    def around(tier: BlockTier, number: int) -> BlockTier:
        if number != failing:
            return tier
        # A slow machine reads few blocks, so that chance alone may let all reads pass.
        faulty.append(FaultyTier(tier, seed=5, rate=0.15, first=("get_layer",)))
        return faulty[0]

    (disk,) = share(MHA, tmp_path, traffic(3, 200), around=around)
    assert faulty[0].faults["get_layer"] > 0
    assert faulty[0].faults["complete_puts"] > 0
    assert min(got_by(disk)) > 0


def test_a_block_is_written_once(tmp_path: Path) -> None:
    """Memory for everything, so that neither computing nor writing depends on times."""
    put = {}
    for count in (1, 2, 3):
        (disk,) = share(ROOMY, tmp_path / f"{count}", traffic(3, 60), count=count)
        put[count] = put_by(disk)
    assert put[1] == put[2] == put[3] > (100, 0)
    # The twin: the same ranks as if each had heads of its own.
    apart = [put_by(disk) for disk in share(ROOMY, tmp_path / "apart", traffic(3, 60), groups=2)]
    assert sum(blocks for blocks, _ in apart) == 2 * put[1][0]


PROMPT = [number % 4 for number in range(120)]


def served(thread: RankThread, rank: Rank) -> None:
    rank.serve(PROMPT)


def test_a_restart_finds_everything_on_every_rank(tmp_path: Path) -> None:
    share(ROOMY, tmp_path, alone(PROMPT))
    (disk,) = share(ROOMY, tmp_path, served)
    assert got_by(disk) == [len(PROMPT) // ROOMY.block - 1] * RANKS


class Flipped(WrappedTier):
    """Damages the last byte that it has read, behind the check of the disk."""

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        read = super().get_layer(get, layer, memory, ids)
        if read.blocks:
            memory.layers[layer][ids[read.blocks - 1], -1] ^= 1
        return read


def test_a_damaged_byte_on_a_rank_that_reads_is_seen(tmp_path: Path) -> None:
    """The twin of all comparisons of rows above."""
    share(ROOMY, tmp_path, alone(PROMPT))
    with pytest.raises(WrongKvError):
        share(ROOMY, tmp_path, served, around=lambda tier, number: Flipped(tier) if number else tier)


def test_damage_on_disk_is_a_miss_on_every_rank(tmp_path: Path) -> None:
    (disk,) = share(ROOMY, tmp_path, alone(PROMPT))
    segment = next((tmp_path / "tp0of1").glob("*.seg"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    (disk,) = share(ROOMY, tmp_path, served)
    assert max(got_by(disk)) < 120 // ROOMY.block - 1


def test_a_rank_that_does_not_agree_drifts_apart(tmp_path: Path) -> None:
    """The twin: a reading rank believes itself that a block is on disk."""
    with pytest.raises(DriftedApart):
        share(MHA, tmp_path, traffic(3, 150), agree=False)


def test_a_directory_that_cannot_be_opened_is_refused_on_every_rank() -> None:
    class Tried(Exception):
        pass

    def opens(*, follows: bool) -> BlockTier | None:
        raise Tried

    with pytest.raises(Tried):
        open_in_turn(Ranks(lambda numbers: numbers), opens, follows=False)
    with pytest.raises(ConfigError, match="--kv-disk-path"):
        open_in_turn(Ranks(lambda numbers: [*numbers[:2], 0, *numbers[3:]]), opens, follows=True)


class RankProcess:
    """A rank in a process of its own, over a cache as a server builds it."""

    def __init__(self, folder: Path, rank: int) -> None:
        program = Path(__file__).parents[1] / "context_process.py"
        options = {
            "rank": rank,
            "ranks": RANKS,
            "dram": 1 << 17,
            "meeting": str(folder / "meeting"),
            "disk": str(folder / "disk"),
        }
        self._errors = (folder / f"errors-{rank}").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, str(program), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def ask(self, tokens: list[int]) -> None:
        assert self._process.stdin is not None
        print(json.dumps(tokens), file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            pytest.fail(self._errors.read()[-3000:])
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End it, if it serves: the rest of them is gone otherwise."""
        with self._errors, self._process as process:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(timeout=30)
            finally:
                process.kill()


@pytest.mark.long
def test_two_processes_build_their_caches_over_one_directory(tmp_path: Path) -> None:
    """They meet by torch.distributed. Each checks every row that it reads."""
    rng = random.Random(5)
    prompts = [[rng.randrange(4) for _ in range(160)] for _ in range(12)]
    with ExitStack() as stack:
        ranks = [RankProcess(tmp_path, rank) for rank in range(RANKS)]
        for rank in ranks:
            stack.callback(rank.close)

        def serve(tokens: list[int]) -> list[dict[str, Any]]:
            for rank in ranks:
                rank.ask(tokens)
            return [rank.answer() for rank in ranks]

        for prompt in prompts:
            seen = serve(prompt)
        assert [each["durable"] for each in seen] == [len(prompts) * 10] * RANKS
        assert [each["put"] for each in seen] == [len(prompts) * 10, 0]
        assert [each["got"] for each in seen] == [0, 0]
        seen = serve(prompts[0])
        assert seen[0]["got"] == seen[1]["got"] > 0
        assert seen[0]["loaded"] == seen[1]["loaded"] > 0
        assert [each["commands"] for each in seen] == [True, False]
        assert [path.name for path in (tmp_path / "disk").iterdir()] == ["tp0of1"]

"""Servers on an emulated GPU (``tests.fake_gpu``) with HBM, DRAM and disk, prompts for them, and damage."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from disk_damage import damage_last_layer, runs
from dram_damage import arena_files, flip_bit, snapshot

from sglang_ext.tiered_store.disk.check import repair_directory
from sglang_ext.tiered_store.disk.tier import INDEX_DIRECTORY
from tests import fake_gpu
from tests.support.compare import Answer
from tests.support.servers.server import ServerProcess, ServerSpec

SERVER = Path(__file__).parent / "servers" / "gpu_server.py"
HBM_TOKENS = 256
PROMPT_TOKENS = 5 * 16 + 4
"""Triton's interpreter computes 5 to 15 tokens of a prompt a second."""
ANSWER_TOKENS = 4
ANSWER = {"sampling_params": {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}}
TWO_RANKS = ("--tp", "2")
ATOL = 1e-3
"""Of log probabilities of one answer: batches of other sizes round otherwise."""


def spec(disk: Path, *flags: str, page: int = 1) -> ServerSpec:
    """A server with three tiers."""
    return ServerSpec(
        flags=(
            *("--radix-cache-backend", "global", "--kv-dram-size", "64MiB", "--kv-load-policy", "always"),
            *("--kv-disk-path", str(disk), "--kv-disk-size", "1GB", "--kv-check"),
            *("--max-total-tokens", str(HBM_TOKENS), "--page-size", str(page), "--skip-server-warmup"),
            *flags,
        ),
        # Not forked from a process that has imported SGLang for a CPU.
        environment=fake_gpu.ENVIRONMENT,
        run=(str(SERVER),),
    )


def prompt(seed: int = 3, tokens: int = PROMPT_TOKENS) -> list[int]:
    """Token ids, the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(100, 30_000) for _ in range(tokens)]


def ask(server: ServerProcess, ids: Sequence[int]) -> Answer:
    """The server's greedy answer."""
    return server.generate(ids, max_new_tokens=ANSWER_TOKENS)


def fill(server: ServerProcess) -> None:
    """Other prompts, so that HBM has nothing else."""
    for seed in range(100, 103):
        server.generate(prompt(seed), max_new_tokens=1)


def on_disk(disk: Path) -> bool:
    """Whether the disk tier has written, and writes no more."""
    before = runs(disk)
    return bool(before) and runs(disk) == before


@contextmanager
def damage(pid: int) -> Iterator[None]:
    """One bit of each block's end is other in the DRAM of a server, of which ``pid`` is an ancestor; whole
    again behind it."""
    arena = arena_files(pid)[0]
    full = snapshot(arena)
    # Of float32 values, the highest bit of the exponent where it is clear.
    places = [at for at in range(3, full.size, 4096) if full[at] and not full[at] & 1 << 6]
    for at in places:
        flip_bit(arena, at, bit=6)
    try:
        yield
    finally:
        for at in places:
            flip_bit(arena, at, bit=6)


def damage_disk(disk: Path) -> None:
    """Invert a bit of values of all blocks on a disk, whose server has ended; the checksums fit."""

    def invert(part: bytearray) -> None:
        for at in range(3, len(part), 512):
            part[at] ^= 1 << 6

    damage_last_layer(runs(disk), invert, forge=True)
    for rank in disk.iterdir():
        # The index has checksums of the headers too; a new one, made from the segments, has the forged ones.
        shutil.rmtree(rank / INDEX_DIRECTORY)
        repair_directory(rank)

"""Ranks with the same KV (``--attn-cp-size``): one writes to disk and has the agent, all load.

On a CPU, SGLang does not share the tokens of a prompt between them: both compute them all.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.compare import assert_same
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.long]

BLOCK = 16
TOKENS = 20 * BLOCK + 5


def spec(disk: Path, *flags: str, model: str = "tiny-moe") -> ServerSpec:
    return ServerSpec(
        model=model,
        flags=(
            *("--radix-cache-backend", "global", "--kv-dram-size", "64MiB", "--kv-check"),
            *("--kv-disk-path", str(disk), "--kv-disk-size", "1GB", "--kv-load-policy", "always"),
            *("--max-total-tokens", "4096", "--page-size", "16", "--tp", "2", *flags),
        ),
        environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    )


@pytest.mark.timeout(1200)
def test_a_restart_finds_what_one_rank_has_written(tmp_path: Path) -> None:
    prompt = [random.Random(5).randrange(100, 30_000) for _ in range(TOKENS)]
    flags = ("--attn-cp-size", "2")
    with ServerProcess(spec(tmp_path / "disk", *flags)) as server:
        cold = server.generate(prompt, max_new_tokens=8)
        assert cold.cached_tokens == 0
    with ServerProcess(spec(tmp_path / "disk", *flags)) as server:
        warm = server.generate(prompt, max_new_tokens=8)
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["tp0of1"]
    assert warm.disk_tokens == TOKENS // BLOCK * BLOCK
    assert_same(cold, warm, atol=1e-4)

"""Vectors of a model that embeds are the same whether a prefix comes from HBM, from DRAM, or is computed."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from dram_damage import arena_files, flip_bit, last_change, make_huge, snapshot

from sglang_ext.testing.waiting import wait_until
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

HBM_TOKENS = 2100
LENGTH = 1000
SPEC = ServerSpec(
    flags=(
        *("--is-embedding", "--enable-metrics", "--max-total-tokens", str(HBM_TOKENS)),
        *("--radix-cache-backend", "global", "--kv-dram-size", "64MiB"),
    )
)


def prompt(seed: int, length: int = LENGTH) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, 30_000) for _ in range(length)]


def vector(server: ServerProcess, ids: list[int]) -> npt.NDArray[np.float64]:
    answer = server.post("/v1/embeddings", {"input": ids})
    return np.array(answer["data"][0]["embedding"], float)


def cached(server: ServerProcess, source: str) -> float:
    """Tokens that were found in a tier, by SGLang's metrics."""
    return sum(
        value
        for name, value in server.metrics().items()
        if name.startswith("sglang:cached_tokens_total{") and f'cache_source="{source}"' in name
    )


def fill(server: ServerProcess, seed: int) -> None:
    """Have every other prefix leave HBM."""
    for each in range(3):
        vector(server, prompt(1000 * seed + each))


def test_a_prefix_from_dram_gives_the_same_vector(get_server: Callable[[ServerSpec], ServerProcess]) -> None:
    server = get_server(SPEC)
    server.flush()
    (arena,) = arena_files(server.pid)
    empty = snapshot(arena)
    ids = prompt(1)
    computed = vector(server, ids)
    written = wait_until(lambda: last_change(arena, empty), seconds=20, what="write-through")
    before = cached(server, "device")
    np.testing.assert_allclose(vector(server, ids), computed, atol=1e-5)
    assert cached(server, "device") - before > 0.8 * LENGTH

    fill(server, 2)
    before = cached(server, "host")
    np.testing.assert_allclose(vector(server, ids), computed, atol=1e-5)
    assert cached(server, "host") - before > 0.8 * LENGTH

    # The twin: one bit of the copy in DRAM.
    fill(server, 3)
    offset = make_huge(arena, written)
    before = cached(server, "host")
    damaged = vector(server, ids)
    flip_bit(arena, offset, bit=6)
    server.flush()
    assert cached(server, "host") - before > 0.8 * LENGTH
    assert not np.allclose(damaged, computed, atol=1e-3)

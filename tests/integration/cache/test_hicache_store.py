"""A real server on a store that HiCache wrote takes its first turn from there, and answers as a cold one.

HiCache does not run on a CPU. The KV is that of a server of ours, from its disk tier, and SGLang's own file
backend writes it (`tests/engine/oracle/engine_hicache.py`).
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from disk_damage import runs, spoil_values

from sglang_ext.geometry import BlockLayout
from sglang_ext.keys import block_keys, encode_tokens
from sglang_ext.patches.versions import installed_sglang_version
from sglang_ext.testing.models import model_path
from sglang_ext.testing.waiting import wait_until
from sglang_ext.tiered_store.disk.segment_format import decode_run_header, header_bytes_of
from sglang_ext.tiered_store.disk.state import DiskConfig
from sglang_ext.tiered_store.disk.tier import DiskTier
from sglang_ext.tiered_store.tier import BlockMemory
from tests.support.compare import assert_same
from tests.support.hicache import HiCacheServer, rows_of, write_elsewhere
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        installed_sglang_version() in ("0.5.21", "0.5.22"), reason="the store is written as 0.5.23 does"
    ),
]

BLOCK, BLOCKS, PAGE = 16, 20, 8


def spec(disk: Path, *more: str) -> ServerSpec:
    return ServerSpec(
        flags=(
            *("--radix-cache-backend", "global", "--kv-check", "--kv-load-policy", "always", *more),
            *("--kv-dram-size", "16MB", "--kv-disk-path", str(disk), "--kv-disk-size", "1GB"),
            *("--max-total-tokens", "2400", "--chunked-prefill-size", "256", "--enable-metrics"),
        ),
        environment=STRICT,
    )


def blocks_in(server: ServerProcess, tier: str) -> float:
    return sum(
        value
        for sample, value in server.metrics().items()
        if sample.startswith("sglang_ext_cache_blocks{") and f'tier="{tier}"' in sample
    )


def computed(folder: Path, layout: BlockLayout, prompts: list[list[int]]) -> list[npt.NDArray[np.uint8]]:
    """The KV of each prompt in the disk tier of a rank, in rows."""
    tier = DiskTier(DiskConfig(folder, 1 << 30), layout)
    try:
        found = []
        for prompt in prompts:
            keys = block_keys(namespace_of(folder), encode_tokens(prompt), BLOCK)
            get = tier.prepare_get(namespace_of(folder), keys)
            assert get.blocks == BLOCKS
            blocks = np.zeros((BLOCKS, layout.block_bytes), np.uint8)
            for layer in range(layout.n_layers):
                tier.get_layer(get, layer, BlockMemory.of_blocks(layout, blocks), np.arange(BLOCKS))
            tier.complete_get(get)
            found.append(rows_of(layout, blocks))
        return found
    finally:
        tier.close()


def namespace_of(folder: Path) -> bytes:
    """The namespace of the blocks in a disk tier."""
    segment, offset = min(runs(folder))
    with segment.open("rb") as file:
        file.seek(offset)
        start = file.read(16)
        return decode_run_header(start + file.read(header_bytes_of(start) - len(start))).namespace


@pytest.mark.long
def test_the_first_turn_comes_from_hicache(tmp_path: Path) -> None:
    """The twin: a flipped bit in a page of another prompt changes its answer."""
    rng = random.Random(8)
    sound, damaged = [[rng.randrange(100, 30_000) for _ in range(BLOCKS * BLOCK + 4)] for _ in range(2)]
    with ServerProcess(spec(tmp_path / "first")) as server:
        cold, right = [server.generate(prompt, max_new_tokens=8) for prompt in (sound, damaged)]
        assert (cold.cached_tokens, right.cached_tokens) == (0, 0)
        wait_until(lambda: blocks_in(server, "disk") >= 2 * BLOCKS, seconds=20, what="prompts on disk")
    (rank,) = tmp_path.joinpath("first").iterdir()
    model = model_path("tiny", "float32")
    config = json.loads((model / "config.json").read_text())
    layers, heads, dim = (config[word] for word in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
    layout = BlockLayout.uniform(
        n_layers=layers, planes_per_layer=2, row_bytes=4 * heads * dim, block_tokens=BLOCK
    )
    folder = tmp_path / "hicache"
    writer = HiCacheServer(folder, str(model), "page_first", PAGE, layers, heads, 4 * heads * dim)
    kv = computed(rank, layout, [sound, damaged])
    write_elsewhere(writer, sound, kv[0], tmp_path / "request")
    before = set(folder.iterdir())
    write_elsewhere(writer, damaged, kv[1], tmp_path / "request")
    for page in set(folder.iterdir()) - before:
        data = bytearray(page.read_bytes())
        spoil_values(data)
        page.write_bytes(data)
    assert len(list(folder.iterdir())) == 2 * BLOCKS * BLOCK // PAGE

    store = ("--kv-load-policy", f"hicache=page_first:{folder}")
    with ServerProcess(spec(tmp_path / "second", *store)) as server:
        again = server.generate(sound, max_new_tokens=8)
        assert again.disk_tokens == BLOCKS * BLOCK
        assert_same(cold, again)
        wrong = server.generate(damaged, max_new_tokens=8)
        assert wrong.disk_tokens == BLOCKS * BLOCK
        with pytest.raises(AssertionError):
            assert_same(right, wrong)
        # The blocks that were read are in the disk tier now.
        wait_until(lambda: blocks_in(server, "disk") >= 2 * BLOCKS, seconds=20, what="prompts on disk")
        assert blocks_in(server, "hicache") == 2 * BLOCKS
    with ServerProcess(spec(tmp_path / "second")) as server:
        last = server.generate(sound, max_new_tokens=8)
        assert last.disk_tokens == BLOCKS * BLOCK
        assert_same(cold, last)

"""Windows and states on real disks, of which the index is rebuilt while the server is down.

Each block is found again by its name. Where the data was damaged and its checksums made to fit, the rows that
a forward pass reads are wrong ones.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_hybrid_pools import HybridPools
from engine_hybrid_store import Sizes, StoreBelow
from engine_hybrids import HybridRank, HybridScenario
from engine_pools import WrongKvError
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from test_oracle_store import BOTH, PAGED, PROMPT, STATES

from sglang_ext.geometry import BlockLayout
from sglang_ext.patches.adapter.hybrid.cache import HybridRadixCache
from sglang_ext.tiered_store.disk.check import repair_directory
from sglang_ext.tiered_store.disk.segment_format import (
    checksum,
    decode_run_header,
    encode_run_header,
    header_bytes_of,
    run_offsets,
)
from sglang_ext.tiered_store.disk.state import DiskConfig
from sglang_ext.tiered_store.disk.tier import INDEX_DIRECTORY, DiskTier
from sglang_ext.tiered_store.tier import BlockTier

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]


class OnDisk(StoreBelow):
    """A store with a directory for each component."""

    def __init__(self, pools: HybridPools, cache: UnifiedRadixCache, folder: Path) -> None:
        self._folders = iter(folder / str(number) for number in range(3))
        super().__init__(pools, cache, Sizes(disk=4000, backlog=1 << 26))

    def _tier(self, layout: BlockLayout) -> BlockTier:
        return DiskTier(DiskConfig(next(self._folders), 1 << 28), layout)


@contextmanager
def server(scenario: HybridScenario, folder: Path) -> Iterator[HybridRank]:
    def below(pools: HybridPools, cache: Any) -> OnDisk:
        return OnDisk(pools, cache, folder)

    with HybridRank(scenario, make_cache=HybridRadixCache, make_below=below) as rank:
        yield rank


def damage(segment: Path) -> None:
    """Flip a bit of the last layer of every block, and make the checksums fit."""
    data = bytearray(segment.read_bytes())
    for offset in run_offsets(np.frombuffer(bytes(data), np.uint8)):
        size = header_bytes_of(bytes(data[offset : offset + 16]))
        header = decode_run_header(bytes(data[offset : offset + size]))
        sums, layer = header.sums.copy(), len(header.shape.layer_bytes) - 1
        for block in range(header.shape.blocks):
            first = offset + header.shape.offset(layer, block)
            end = first + header.shape.layer_bytes[layer]
            data[first + 3] ^= 1
            sums[layer, block] = checksum(bytes(data[first:end]))
        forged = encode_run_header(dataclasses.replace(header, sums=sums))
        data[offset : offset + len(forged)] = forged
    segment.write_bytes(data)


@pytest.mark.parametrize("damaged", [False, True], ids=["sound", "one wrong bit"])
@pytest.mark.parametrize("scenario", [PAGED, STATES, BOTH], ids=str)
def test_a_disk_with_a_rebuilt_index_has_all_that_was_written(
    scenario: HybridScenario, damaged: bool, tmp_path: Path
) -> None:
    with server(scenario, tmp_path) as rank:
        rank.serve(PROMPT)
        rank.settle()
    if damaged:
        for segment in tmp_path.rglob("*.seg"):
            damage(segment)
    for index in list(tmp_path.rglob(INDEX_DIRECTORY)):
        shutil.rmtree(index)
        assert repair_directory(index.parent).blocks
    with server(scenario, tmp_path) as again:
        again.look_inside = False
        with pytest.raises(WrongKvError, match="in forward") if damaged else nullcontext():
            req = again.serve([*PROMPT, 1, 2, 3])
            assert req.cached_tokens == again.scheduler.disk_tokens == len(PROMPT)
        assert again.scheduler.loaded == len(PROMPT)

"""Blocks for tests: keys, the contents that belong under each, and putting and getting them through a
tier.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sglang_ext.geometry import BlockLayout
from sglang_ext.keys import BLOCK_KEY_BYTES
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier, Get, Outcome, Put

LAYOUT = BlockLayout(4, ((32, 16), (24, 24), (48,)))
NAMESPACE = b"n" * 16
OTHER = b"m" * 16


def block_key(prefix: int, index: int) -> bytes:
    """The key of block `index` of test prefix `prefix`."""
    return prefix.to_bytes(8, "little") + index.to_bytes(BLOCK_KEY_BYTES - 8, "little")


def prefix_keys(prefix: int, blocks: int, start: int = 0) -> list[bytes]:
    """Keys of the first blocks of a test prefix."""
    return [block_key(prefix, i) for i in range(start, blocks)]


def contents(layout: BlockLayout, namespace: bytes, key: bytes) -> npt.NDArray[np.uint8]:
    """The contents of the block of a key: bytes that differ for every key, namespace and position in the
    block.
    """
    seed = int.from_bytes(key + namespace[:4], "little")
    return np.random.default_rng(seed).integers(0, 256, layout.block_bytes, dtype=np.uint8)


def memory_of(
    layout: BlockLayout, namespace: bytes, keys: Sequence[bytes]
) -> tuple[BlockMemory, npt.NDArray[np.uint8]]:
    """Memory that holds the right contents of `keys` as blocks 0, 1, ..."""
    blocks = np.zeros((len(keys), layout.block_bytes), dtype=np.uint8)
    for row, key in zip(blocks, keys, strict=True):
        row[:] = contents(layout, namespace, key)
    return BlockMemory.of_blocks(layout, blocks), blocks


def put_all(tier: BlockTier, namespace: bytes, keys: Sequence[bytes]) -> Outcome:
    """Put blocks with their right contents, in one go."""
    put = tier.prepare_put(namespace, keys)
    if isinstance(put, Outcome):
        return put
    return write_all(tier, put)


def write_all(tier: BlockTier, put: Put) -> Outcome:
    """Write all layers of a prepared put, last layer first, and complete it."""
    memory, _ = memory_of(tier.layout, put.namespace, put.wanted)
    ids = np.arange(len(put.missing))
    if put.missing:
        for layer in reversed(range(tier.layout.n_layers)):
            outcome = tier.put_layer(put, layer, memory, ids)
            if outcome is not Outcome.DONE:
                tier.abort_put(put)
                return outcome
    return tier.complete_puts([put])[0]


def read_all(tier: BlockTier, get: Get) -> tuple[int, npt.NDArray[np.uint8], Outcome]:
    """Read all layers of a prepared get; leading whole blocks, their bytes, and why it ended there."""
    layout = tier.layout
    blocks = np.full((get.blocks + 1, layout.block_bytes), 0xA5, dtype=np.uint8)
    memory = BlockMemory.of_blocks(layout, blocks)
    outcome = Outcome.DONE
    for layer in range(layout.n_layers):
        read = tier.get_layer(get, layer, memory, np.arange(get.blocks))
        if read.outcome is not Outcome.DONE:
            outcome = read.outcome
    assert (blocks[-1] == 0xA5).all(), "a tier wrote into memory that it was not given"
    return get.blocks, blocks[: get.blocks], outcome


def get_all(tier: BlockTier, namespace: bytes, keys: Sequence[bytes]) -> int:
    """Read the longest prefix that the tier has, verify every byte, and return its length."""
    get = tier.prepare_get(namespace, keys)
    try:
        count, blocks, _ = read_all(tier, get)
    finally:
        tier.complete_get(get)
    for row, key in zip(blocks, keys[:count], strict=True):
        assert np.array_equal(row, contents(tier.layout, namespace, key)), f"wrong bytes under {key.hex()}"
    return count

"""How long a load takes with nothing to hide behind: the servers' copying and reading, without a server."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.lib.common import SEED
from benchmarks.tiers.copy import touched
from benchmarks.tiers.disk import NAMESPACE, forget
from benchmarks.tiers.servers import BLOCK_TOKENS, MODEL, TOKEN_BYTES
from sglang_ext.engine.movers.mover import ThreadMover
from sglang_ext.geometry import mha_geometry
from sglang_ext.testing.models import RECIPES
from sglang_ext.tiered_store.copy import PoolCopier, warmup
from sglang_ext.tiered_store.disk.state import DiskConfig, IoMode
from sglang_ext.tiered_store.disk.tier import DiskTier
from sglang_ext.tiered_store.dram.arena import DramArena
from sglang_ext.tiered_store.loading.loader import Loader
from sglang_ext.tiered_store.loading.write_behind import WriteBehind
from sglang_ext.tiered_store.tier import BlockMemory, Outcome

LOAD_BYTES = 64 << 20
"""Bytes that a server's loader reads at once."""
COPIES = 3
"""Of the blocks in the arena, used in turn, so that none is still in the CPU's caches when it is loaded."""


class PlainLoad:
    """The load of a prefix of so many tokens into a pool with the geometry of the servers' model.

    Args:
        tokens: of the prefix; a multiple of a block.
        folder: for a disk tier with the prefix in it, on the same file system as the servers'.
        io: how the servers read from disk.
    """

    def __init__(self, tokens: int, folder: Path, io: IoMode) -> None:
        warmup()
        self.blocks = tokens // BLOCK_TOKENS
        self.nbytes = tokens * TOKEN_BYTES
        self.folder = folder
        config = RECIPES[MODEL].config
        layers = int(config["num_hidden_layers"])
        self._planes = [touched(self.nbytes // (2 * layers)) for _ in range(2 * layers)]
        geometry = mha_geometry(
            k_addresses=tuple(plane.ctypes.data for plane in self._planes[0::2]),
            v_addresses=tuple(plane.ctypes.data for plane in self._planes[1::2]),
            slots=tokens,
            heads=int(config["num_key_value_heads"]),
            head_dim=int(config["head_dim"]),
            dtype="float32",
            block_tokens=BLOCK_TOKENS,
        )
        layout = geometry.layout
        self._arena = DramArena(layout, COPIES * self.blocks * (layout.block_bytes + 8) + 64, name="load")
        self._arena.blocks[:] = 1
        self._memory = BlockMemory.of_arena(self._arena)
        self._mover = ThreadMover(PoolCopier(geometry, self._arena), layers)
        # Slots as a server that has run for a while hands them out: in no order, but whole blocks together.
        pool = np.random.default_rng(SEED).permutation(self.blocks)
        self._slots = (pool[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).ravel()
        self._turn = 0
        self._tier = DiskTier(DiskConfig(folder, 4 * self.nbytes + (64 << 20), io=io), layout)
        self._loader = Loader(LOAD_BYTES)
        self._keys = [number.to_bytes(16, "little") for number in range(self.blocks)]
        writer = WriteBehind(self._tier, backlog_bytes=2 * self.nbytes)
        accepted = writer.submit(NAMESPACE, self._keys, self._memory, self._ids())
        writer.close()
        if accepted is not Outcome.DONE or writer.counters != {Outcome.DONE: self.blocks}:
            raise RuntimeError(f"the prefix could not be written to {folder}: {writer.counters}")

    def _ids(self) -> npt.NDArray[np.int64]:
        self._turn = (self._turn + 1) % COPIES
        return np.arange(self._turn * self.blocks, (self._turn + 1) * self.blocks)

    def dram(self) -> float:
        """Seconds to bring it from DRAM to HBM."""
        ids = self._ids()
        begin = time.perf_counter()
        self._copy(ids)
        return time.perf_counter() - begin

    def disk(self) -> float:
        """Seconds to bring it from disk, which has to be asked, to DRAM, and then on to HBM."""
        ids = self._ids()
        forget(self.folder)
        begin = time.perf_counter()
        get = self._tier.prepare_get(NAMESPACE, self._keys)
        read = self._loader.load(self._tier, get, self._memory, ids).result()
        if read.blocks != self.blocks:
            raise RuntimeError(f"{read.blocks} of {self.blocks} blocks came from disk: {read.outcome}")
        self._copy(ids)
        return time.perf_counter() - begin

    def _copy(self, ids: npt.NDArray[np.int64]) -> None:
        self._mover.load(self._slots, ids)
        self._mover.settle()

    def close(self) -> None:
        self._mover.close()
        self._loader.close()
        self._tier.close()
        self._arena.close()

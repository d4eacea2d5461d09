"""DRAM over disk: blocks are written through, loaded back from where they are nearest, and never nowhere.

A block that is put lies in DRAM at once and is found there; the disk gets it behind, and until the disk has
it or has refused it, it is pinned in DRAM. DRAM gives up blocks that the disk has (which costs nothing)
before any others, which are those that the disk has refused, or has dropped since. So a lagging disk makes
new blocks be skipped, and a dead one turns the store into DRAM alone; both are counted.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_ext.tiered_store.arena_tier import ArenaTier
from sglang_ext.tiered_store.dram import DramArena
from sglang_ext.tiered_store.loader import Load, Loader, OnLayer
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier, Ids, Outcome, TierStats
from sglang_ext.tiered_store.write_behind import LagPolicy, WriteBehind, Written


class Durability(enum.Enum):
    """How far a block goes by itself. What is there already is found at every level."""

    OFF = "off"
    """Nowhere: the store takes nothing new."""
    DRAM = "dram"
    DISK = "disk"


@dataclass(frozen=True)
class StoreConfig:
    """Configuration of a store.

    durability, lag: see `Durability` and `LagPolicy`.
    backlog_bytes: most bytes in DRAM that wait for the disk.
    load_bytes: most bytes being read at once.
    load_threads: most reads at once.
    """

    durability: Durability = Durability.DISK
    lag: LagPolicy = LagPolicy.SKIP
    backlog_bytes: int = 1 << 30
    load_bytes: int = 64 << 20
    load_threads: int = 4


@dataclass(frozen=True, slots=True)
class Found:
    """Where the longest prefix lies: `dram` leading blocks in DRAM, then `disk` blocks on disk."""

    dram: int
    disk: int

    @property
    def blocks(self) -> int:
        return self.dram + self.disk


@dataclass(frozen=True, slots=True)
class StoreLoad:
    """A load from both tiers; either part may be None. Wait for a layer of both before it is used."""

    dram: Load | None
    disk: Load | None

    def wait(self, layer: int, timeout: float | None = None) -> int:
        """Return when a layer is in: how many leading blocks can be had. Raises as `Load.wait`."""
        return self._count(
            self.dram.wait(layer, timeout).blocks if self.dram else 0,
            self.disk.wait(layer, timeout).blocks if self.disk else 0,
        )

    def result(self, timeout: float | None = None) -> int:
        """Return when the load is over: leading blocks of which all layers are in. Raises as
        `Load.result`.
        """
        return self._count(
            self.dram.result(timeout).blocks if self.dram else 0,
            self.disk.result(timeout).blocks if self.disk else 0,
        )

    def _count(self, dram: int, disk: int) -> int:
        """A prefix that breaks off in DRAM does not go on on disk."""
        return dram if self.dram is not None and dram < self.dram.blocks else dram + disk


class TieredStore:
    """DRAM over disk, for whoever has blocks in memory; knows nothing of an engine.

    Args:
        arena: taken over; closed with the store.
        disk: the tier below; None for DRAM alone. Closed with the store.
        threaded: without threads, `writer.step()` writes; for tests.
    """

    def __init__(
        self, arena: DramArena, disk: BlockTier | None, config: StoreConfig, *, threaded: bool = True
    ) -> None:
        if disk is not None and disk.layout != arena.layout:
            raise ValueError(f"disk has layout {disk.layout.facts()}, the arena {arena.layout.facts()}")
        self.config = config
        self.layout = arena.layout
        self.disk = disk
        self.dram = ArenaTier(arena, durable_below=self._on_disk)
        self.writer: WriteBehind | None = None
        if disk is not None and config.durability is Durability.DISK:
            self.writer = WriteBehind(
                disk, backlog_bytes=config.backlog_bytes, lag=config.lag, threaded=threaded
            )
        self.loader = Loader(config.load_bytes, threads=config.load_threads)
        self.counters: Counter[str] = Counter()
        self._lock = threading.Lock()

    # --- in ---

    def put(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        memory: BlockMemory,
        ids: Ids | Sequence[int],
        *,
        timeout: float | None = None,
    ) -> list[Outcome]:
        """Keep blocks of a prefix: copy them into DRAM, and hand them to the disk's writer.

        Returns for each key `DONE` when it can be found now, else why not. Waits for the writer with
        `LagPolicy.WAIT`, at most `timeout` seconds (DeadlineError).
        """
        if self.config.durability is Durability.OFF:
            return [Outcome.ABSENT] * len(keys)
        outcomes = [Outcome.DONE] * len(keys)
        array = np.asarray(ids, dtype=np.int64)
        put = self.dram.prepare_put(namespace, keys)
        if isinstance(put, Outcome):
            return [Outcome.DONE if self._on_disk(namespace, key) else put for key in keys]
        for position in put.refused:
            on_disk = self._on_disk(namespace, keys[position])
            outcomes[position] = Outcome.DONE if on_disk else Outcome.FULL
        if put.missing:
            wanted = array[list(put.missing)]
            for layer in range(self.layout.n_layers):
                self.dram.put_layer(put, layer, memory, wanted)
        self.dram.complete_puts([put])
        if self.writer is not None:
            self._write_behind(self.writer, namespace, keys, timeout)
        return outcomes

    def _on_disk(self, namespace: bytes, key: bytes) -> bool:
        return self.disk is not None and self.disk.match(namespace, [key]) == 1

    def _write_behind(
        self, writer: WriteBehind, namespace: bytes, keys: Sequence[bytes], timeout: float | None
    ) -> None:
        """Pin what lies in DRAM and let it be written; unpin it when that is over."""
        assert self.disk is not None
        if self.disk.match(namespace, keys) == len(keys):
            return
        get = self.dram.prepare_get(namespace, keys)
        if not get.blocks:
            self.dram.complete_get(get)
            return

        def written(result: Written) -> None:
            self._note(result)
            self.dram.complete_get(get)

        accepted = Outcome.CLOSED
        try:
            accepted = writer.submit(
                namespace,
                keys[: get.blocks],
                self.dram.memory,
                get.ids,
                on_written=written,
                timeout=timeout,
            )
        finally:
            if accepted is not Outcome.DONE:
                outcomes = (accepted,) * get.blocks
                self._note(Written(namespace, tuple(keys[: get.blocks]), outcomes))
                self.dram.complete_get(get)

    def _note(self, result: Written) -> None:
        with self._lock:
            for outcome in result.outcomes:
                done = outcome is Outcome.DONE
                self.counters["written" if done else f"not_written_{outcome.value}"] += 1

    # --- out ---

    def find(self, namespace: bytes, keys: Sequence[bytes]) -> Found:
        """Where the longest prefix of `keys` lies now."""
        dram = self.dram.match(namespace, keys)
        disk = self.disk.match(namespace, keys[dram:]) if self.disk is not None and dram < len(keys) else 0
        return Found(dram, disk)

    def load(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        memory: BlockMemory,
        ids: Ids | Sequence[int],
        *,
        on_layer: OnLayer | None = None,
        on_disk_layer: OnLayer | None = None,
        priority: int = 0,
    ) -> StoreLoad:
        """Begin to load the longest prefix, layer by layer, from both tiers at once.

        Args:
            memory, ids: where the blocks go, one id for each key; as many are used as are found.
            on_layer, on_disk_layer: told each layer of the part from DRAM, and of the part from disk.
        """
        array = np.asarray(ids, dtype=np.int64)
        dram = disk = None
        get = self.dram.prepare_get(namespace, keys)
        start = get.blocks
        if start:
            dram = self.loader.load(
                self.dram, get, memory, array[:start], on_layer=on_layer, priority=priority
            )
        else:
            self.dram.complete_get(get)
        if self.disk is not None and start < len(keys):
            below = self.disk.prepare_get(namespace, keys[start:])
            if below.blocks:
                part = array[start : start + below.blocks]
                disk = self.loader.load(
                    self.disk, below, memory, part, on_layer=on_disk_layer, priority=priority
                )
            else:
                self.disk.complete_get(below)
        return StoreLoad(dram, disk)

    def durable(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        """How many leading blocks would be found after a crash now."""
        return self.disk.match(namespace, keys) if self.disk is not None and self.disk.durable else 0

    # --- away ---

    def drop(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        """Forget blocks in both tiers; what is being written is written all the same. How many there were."""
        held = {key for key in keys if self.dram.match(namespace, [key]) or self._on_disk(namespace, key)}
        self.dram.drop(namespace, keys)
        if self.disk is not None:
            self.disk.drop(namespace, keys)
        return len(held)

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything put so far is on disk or was refused. Raises DeadlineError."""
        if self.writer is not None:
            self.writer.flush(timeout)

    def stats(self) -> dict[str, TierStats]:
        """By tier: `dram`, and `disk` if there is one."""
        found = {"dram": self.dram.stats()}
        if self.disk is not None:
            found["disk"] = self.disk.stats()
        return found

    def check(self) -> None:
        """Verify both tiers, the writer and the loader. Raises AssertionError."""
        self.dram.check()
        if self.disk is not None:
            self.disk.check()
        if self.writer is not None:
            self.writer.check()
        self.loader.check()

    def close(self) -> None:
        """Finish loads and writes that have begun, then close both tiers. May be called twice."""
        self.loader.close()
        if self.writer is not None:
            self.writer.close()
        self.dram.close()
        if self.disk is not None:
            self.disk.close()

    def __repr__(self) -> str:
        return f"<TieredStore {self.dram!r} over {self.disk!r}, {self.writer!r}>"

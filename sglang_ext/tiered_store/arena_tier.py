"""Blocks in a DRAM arena, by key: the contract of `tier.py` over `DramArena`.

Eviction is by last use. Among the older half it takes blocks first that `durable_below` says exist below:
dropping those costs no copy and loses nothing. Other blocks go, and are counted as lost, only where the tier
may lose data (`may_lose`); otherwise a full arena refuses new blocks.

Within one prefix the deepest block counts as least recently used, so that eviction shortens prefixes from
their end and never leaves a tail without its beginning.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_ext.keys import Tier
from sglang_ext.tiered_store.copy import copy_vectors
from sglang_ext.tiered_store.dram.arena import DramArena
from sglang_ext.tiered_store.tier import (
    BlockMemory,
    BlockTier,
    Get,
    Ids,
    LayerRead,
    Outcome,
    Put,
    TierStats,
    check_get_layer,
    check_put_layer,
)

FullKey = tuple[bytes, bytes]
"""(namespace, block key)."""


@dataclass(slots=True, eq=False)
class _Entry:
    block: int
    pins: int = 0
    dropped: bool = False
    """No longer in the index; its block is freed when the last pin goes."""


@dataclass(slots=True, eq=False)
class ArenaPut(Put):
    """A put into the arena. blocks: arena ids of the missing blocks."""

    blocks: Ids
    layers: set[int]
    open: bool = True


@dataclass(slots=True, eq=False)
class ArenaGet(Get):
    """A get from the arena. ids: arena ids of the pinned blocks, for copies without a detour."""

    ids: Ids
    entries: list[_Entry]
    open: bool = True


class ArenaTier(BlockTier):
    """Blocks in DRAM.

    Args:
        arena: where the bytes lie; this tier is the only one that allocates in it.
        durable_below: whether a block has a durable copy below, so that it may be dropped for free.
        may_lose: whether blocks without one may be evicted too when there is no other way.
    """

    tier = Tier.DRAM
    durable = False

    def __init__(
        self,
        arena: DramArena,
        *,
        durable_below: Callable[[bytes, bytes], bool] = lambda namespace, key: False,
        may_lose: bool = True,
    ) -> None:
        self.arena = arena
        self.layout = arena.layout
        self.memory = BlockMemory.of_arena(arena)
        self._durable_below = durable_below
        self._may_lose = may_lose
        self._lock = threading.Lock()
        self._index: OrderedDict[FullKey, _Entry] = OrderedDict()  # least recently used first
        self._put: Counter[Outcome] = Counter()
        self._got: Counter[Outcome] = Counter()
        self._evicted = 0
        self._lost = 0
        self._pins = 0
        self._open_puts: set[ArenaPut] = set()
        self._closed = False

    # --- put ---

    def match(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        with self._lock:
            return self._match(namespace, keys)

    def _match(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        for count, key in enumerate(keys):
            if (namespace, key) not in self._index:
                return count
        return len(keys)

    def prepare_put(self, namespace: bytes, keys: Sequence[bytes]) -> ArenaPut | Outcome:
        with self._lock:
            if self._closed:
                self._put[Outcome.CLOSED] += len(keys)
                return Outcome.CLOSED
            first = {key: i for i, key in reversed(list(enumerate(keys)))}
            present = {key for key in first if (namespace, key) in self._index}
            wanted = sorted(i for key, i in first.items() if key not in present)
            self._touch((namespace, key) for key in keys if key in present)
            self._make_room(len(wanted), keep={(namespace, key) for key in present})
            fits = min(len(wanted), self.arena.free_blocks)
            self._put[Outcome.FULL] += len(wanted) - fits
            if wanted and not fits:
                return Outcome.FULL
            blocks = self.arena.alloc(fits)
            assert blocks is not None
            put = ArenaPut(namespace, tuple(keys), tuple(wanted[:fits]), tuple(wanted[fits:]), blocks, set())
            self._open_puts.add(put)
            return put

    def put_layer(self, put: Put, layer: int, memory: BlockMemory, ids: Ids) -> Outcome:
        check_put_layer(put, layer, memory, ids, self.layout)
        mine = self._own_put(put)
        if self._closed:
            return Outcome.CLOSED
        copy_vectors(self.memory.vectors(layer, mine.blocks), memory.vectors(layer, ids))
        mine.layers.add(layer)
        return Outcome.DONE

    def complete_puts(self, puts: Sequence[Put]) -> list[Outcome]:
        mine = [self._own_put(put) for put in puts]
        for put in mine:
            if put.missing and len(put.layers) < self.layout.n_layers:
                raise ValueError(f"put has {len(put.layers)} of {self.layout.n_layers} layers")
        with self._lock:
            return [self._complete(put) for put in mine]

    def _complete(self, put: ArenaPut) -> Outcome:
        self._end_put(put)
        if self._closed:
            return Outcome.CLOSED
        again = []
        for key, block in zip(put.wanted, put.blocks.tolist(), strict=True):
            if (put.namespace, key) in self._index:  # another put of the same block was faster
                again.append(block)
            else:
                self._index[put.namespace, key] = _Entry(block)
        self.arena.free(again)
        self._put[Outcome.DONE] += len(put.missing)
        self._touch((put.namespace, key) for key in put.keys)
        return Outcome.DONE

    def abort_put(self, put: Put) -> None:
        mine = self._own_put(put)
        with self._lock:
            self._end_put(mine)
            if not self._closed:
                self.arena.free(mine.blocks)

    def _own_put(self, put: Put) -> ArenaPut:
        if not isinstance(put, ArenaPut) or not put.open:
            raise ValueError("this put is not one of this tier, or has ended")
        return put

    def _end_put(self, put: ArenaPut) -> None:
        put.open = False
        self._open_puts.discard(put)

    # --- get ---

    def prepare_get(self, namespace: bytes, keys: Sequence[bytes]) -> ArenaGet:
        with self._lock:
            count = self._match(namespace, keys)
            entries = [self._index[namespace, key] for key in keys[:count]]
            for entry in entries:
                entry.pins += 1
            self._pins += count
            self._got[Outcome.ABSENT] += len(keys) - count
            ids = np.array([entry.block for entry in entries], dtype=np.int64)
            return ArenaGet(namespace, tuple(keys), count, ids, entries)

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        check_get_layer(get, layer, memory, ids, self.layout)
        mine = self._own_get(get)
        if self._closed:
            return LayerRead(0, Outcome.CLOSED)
        count = min(len(ids), mine.blocks)
        copy_vectors(memory.vectors(layer, ids[:count]), self.memory.vectors(layer, mine.ids[:count]))
        return LayerRead(count, Outcome.DONE if count == len(ids) else Outcome.ABSENT)

    def complete_get(self, get: Get) -> None:
        mine = self._own_get(get)
        with self._lock:
            mine.open = False
            self._pins -= len(mine.entries)
            freed = []
            for entry in mine.entries:
                entry.pins -= 1
                if entry.dropped and not entry.pins:
                    freed.append(entry.block)
            if self._closed:
                return
            self.arena.free(freed)
            self._got[Outcome.DONE] += len(mine.entries)
            self._touch((mine.namespace, key) for key in mine.keys[: len(mine.entries)])

    def _own_get(self, get: Get) -> ArenaGet:
        if not isinstance(get, ArenaGet) or not get.open:
            raise ValueError("this get is not one of this tier, or has ended")
        return get

    # --- eviction ---

    def _touch(self, prefix: Iterable[FullKey]) -> None:
        """Make a prefix the most recently used, its first block most of all."""
        for full in reversed(list(prefix)):
            if full in self._index:
                self._index.move_to_end(full)

    def _make_room(self, blocks: int, keep: set[FullKey]) -> None:
        """Evict until `blocks` are free, or nothing more may go."""
        shortage = min(blocks, self.arena.n_blocks) - self.arena.free_blocks
        if shortage <= 0:
            return
        free: list[FullKey] = []
        costly: list[FullKey] = []
        older = len(self._index) // 2
        for place, (full, entry) in enumerate(self._index.items()):
            if len(free) == shortage:
                break
            if self._may_lose and place >= older and len(free) + len(costly) >= shortage:
                break  # or what nobody uses would stay, and what was just put would go
            if entry.pins or full in keep:
                continue
            (free if self._durable_below(*full) else costly).append(full)
        lost = costly[: shortage - len(free)] if self._may_lose else []
        self.arena.free([self._index.pop(full).block for full in (*free, *lost)])
        self._lost += len(lost)
        self._evicted += len(free) + len(lost)

    def drop(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        with self._lock:
            return self._drop([(namespace, key) for key in keys])

    def clear(self, namespace: bytes | None = None) -> int:
        with self._lock:
            return self._drop([full for full in self._index if namespace in (None, full[0])])

    def _drop(self, fulls: Iterable[FullKey]) -> int:
        freed, count = [], 0
        for full in fulls:
            entry = self._index.pop(full, None)
            if entry is None:
                continue
            count += 1
            entry.dropped = True
            if not entry.pins:
                freed.append(entry.block)
        if freed:
            self.arena.free(freed)
        return count

    # --- whole ---

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(
                blocks=len(self._index),
                used_bytes=self.arena.used_bytes,
                limit_bytes=self.arena.n_blocks * self.arena.block_bytes,
                pins=self._pins,
                put=dict(self._put),
                got=dict(self._got),
                evicted=self._evicted,
                extra={"lost_blocks": self._lost},
            )

    def check(self) -> None:
        with self._lock:
            if self._closed:
                return
            self.arena.check()
            blocks = [entry.block for entry in self._index.values()]
            if len(set(blocks)) != len(blocks):
                raise AssertionError("two keys share an arena block")
            if not all(self.arena.is_used(block) for block in blocks):
                raise AssertionError("an indexed block is free in the arena")
            reserved = sum(len(put.blocks) for put in self._open_puts)
            if not self._pins and self.arena.used_blocks != len(blocks) + reserved:
                raise AssertionError(
                    f"{self.arena.used_blocks} arena blocks used, {len(blocks)} indexed, {reserved} reserved"
                )
            if sum(entry.pins for entry in self._index.values()) > self._pins:
                raise AssertionError("more pins on blocks than gets hold")

    def close(self) -> None:
        """Forget everything and close the arena. Wait for copies under way first: their memory goes."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._index.clear()
                nothing = np.empty((0, self.layout.block_bytes), dtype=np.uint8)
                self.memory = BlockMemory.of_blocks(self.layout, nothing)
                self.arena.close()

    def __repr__(self) -> str:
        return f"<ArenaTier {len(self._index)} blocks, {self._pins} pins, {self.arena!r}>"

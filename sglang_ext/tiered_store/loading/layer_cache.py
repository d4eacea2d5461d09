"""The layer cache: the lowest layers of many blocks in memory, in front of a slower tier that has them whole.

A forward pass needs layer 0 first and the others one after the other. With the lowest layers of a prefix at
hand it begins at once, while the rest streams from the tier below (Symphony, section 3.3). The same memory
holds a layer of many more sessions than it could hold whole.

Bytes come in when they are put, or when the tier below has read and verified them; blocks never change under
their key, so a copy is never stale. The least recently used copies are dropped first. The copies are no
placements: a block is found where the tier below finds it, and nowhere else.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sglang_ext.errors import ConfigError
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
)
from sglang_ext.tiered_store.wrapped import WrappedTier

_Name = tuple[bytes, bytes]


class LayerCache(WrappedTier):
    """See the module's docstring.

    Args:
        inner: closed with the cache.
        nbytes: memory for the copies.
        layers: how many of the lowest layers.

    Raises:
        ConfigError: not even one block's layers fit, or there are not so many layers.
    """

    def __init__(self, inner: BlockTier, nbytes: int, layers: int) -> None:
        super().__init__(inner)
        if not 0 < layers <= inner.layout.n_layers:
            raise ConfigError(
                f"{layers} layers of a model that has {inner.layout.n_layers}",
                field="--kv-layer-cache-size layers",
                hint=f"Use 1 to {inner.layout.n_layers}",
            )
        self._offsets = [0]
        for layer in range(layers):
            self._offsets.append(self._offsets[-1] + inner.layout.layer_bytes(layer))
        rows = nbytes // self._offsets[-1]
        if not rows:
            raise ConfigError(
                f"a layer cache of {nbytes} bytes holds no block: its {layers} lowest layers take "
                f"{self._offsets[-1]}",
                field="--kv-layer-cache-size",
                hint="Make it larger, or set it to 0",
            )
        self._layers = layers
        self._store: npt.NDArray[np.uint8] = np.zeros((rows, self._offsets[-1]), dtype=np.uint8)
        self._lock = threading.Lock()
        self._rows: OrderedDict[_Name, int] = OrderedDict()
        """Where a block's copies are, the least recently used first."""
        self._free = list(range(rows - 1, -1, -1))
        self._has = np.zeros((rows, layers), dtype=np.bool_)
        self._open: set[Get] = set()
        self._hits = 0
        self._misses = 0

    def put_layer(self, put: Put, layer: int, memory: BlockMemory, ids: Ids) -> Outcome:
        outcome = super().put_layer(put, layer, memory, ids)
        if outcome is Outcome.DONE and layer < self._layers:
            self._keep(put.namespace, put.wanted, layer, memory, ids)
        return outcome

    def prepare_get(self, namespace: bytes, keys: Sequence[bytes]) -> Get:
        get = super().prepare_get(namespace, keys)
        self._open.add(get)
        return get

    def complete_get(self, get: Get) -> None:
        self._open.discard(get)
        super().complete_get(get)

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        if layer >= self._layers:
            return super().get_layer(get, layer, memory, ids)
        check_get_layer(get, layer, memory, ids, self.layout)
        memory.vectors(layer, ids)  # raises where an id is out of range
        # A get that has ended is the tier's to refuse.
        if get in self._open and len(ids) <= get.blocks and self._copy(get, layer, memory, ids):
            return LayerRead(len(ids), Outcome.DONE)
        read = super().get_layer(get, layer, memory, ids)
        self._keep(get.namespace, get.keys[: read.blocks], layer, memory, ids[: read.blocks])
        return read

    def _copy(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> bool:
        """Bring a layer of all blocks into memory, if all are here."""
        names = [(get.namespace, key) for key in get.keys[: len(ids)]]
        start, end = self._offsets[layer : layer + 2]
        with self._lock:
            rows = [self._rows.get(name) for name in names]
            found = [row for row in rows if row is not None]
            here = len(found) == len(names) and bool(self._has[found, layer].all())
            self._hits += len(names) if here else 0
            self._misses += 0 if here else len(names)
            if here:
                memory.layers[layer][ids] = self._store[found, start:end]
                for name in names:
                    self._rows.move_to_end(name)
            return here

    def _keep(
        self, namespace: bytes, keys: Sequence[bytes], layer: int, memory: BlockMemory, ids: Ids
    ) -> None:
        start, end = self._offsets[layer : layer + 2]
        # Of a prefix that does not fit, the beginning is kept.
        count = min(len(keys), len(self._store))
        with self._lock:
            rows = [self._row((namespace, key)) for key in keys[:count]]
            self._store[rows, start:end] = memory.layers[layer][ids[:count]]
            self._has[rows, layer] = True

    def _row(self, name: _Name) -> int:
        row = self._rows.pop(name, None)
        if row is None:
            row = self._free.pop() if self._free else self._rows.popitem(last=False)[1]
            self._has[row] = False
        self._rows[name] = row
        return row

    def drop(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        with self._lock:
            for key in keys:
                self._forget((namespace, key))
        return super().drop(namespace, keys)

    def clear(self, namespace: bytes | None = None) -> int:
        with self._lock:
            for name in [name for name in self._rows if namespace in (None, name[0])]:
                self._forget(name)
        return super().clear(namespace)

    def _forget(self, name: _Name) -> None:
        row = self._rows.pop(name, None)
        if row is not None:
            self._free.append(row)

    def stats(self) -> TierStats:
        """Those of the tier below, and `layer_cache_blocks`, `_hits` and `_misses` (layers of blocks)."""
        below = super().stats()
        with self._lock:
            counts = {
                "layer_cache_blocks": len(self._rows),
                "layer_cache_hits": self._hits,
                "layer_cache_misses": self._misses,
            }
        return TierStats(
            below.blocks,
            below.used_bytes,
            below.limit_bytes,
            below.pins,
            below.put,
            below.got,
            below.evicted,
            {**below.extra, **counts},
        )

    def check(self) -> None:
        super().check()
        with self._lock:
            used = list(self._rows.values())
            if len(set(used)) != len(used) or set(used) & set(self._free):
                raise AssertionError("a row of the layer cache has two owners")
            if len(used) + len(self._free) != len(self._store):
                raise AssertionError("a row of the layer cache is lost")

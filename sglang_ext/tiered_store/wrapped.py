"""A tier around another tier, to add behaviour or to inject faults."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_ext.tiered_store.tier import (
    BlockMemory,
    BlockTier,
    Get,
    Ids,
    LayerRead,
    Outcome,
    Put,
    TierStats,
)
from sglang_ext.tiers import Tier


class WrappedTier(BlockTier):
    """Passes every call on to `inner`; subclasses override the calls that they change."""

    def __init__(self, inner: BlockTier) -> None:
        self.inner = inner
        self.tier = inner.tier
        self.durable = inner.durable
        self.layout = inner.layout

    @property
    def parts(self) -> tuple[BlockTier, ...]:
        return self.inner.parts

    def sources(self, get: Get) -> list[tuple[Tier, int]]:
        return self.inner.sources(get)

    def match(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        return self.inner.match(namespace, keys)

    def held(self, namespace: bytes, keys: Sequence[bytes]) -> list[bool]:
        return self.inner.held(namespace, keys)

    def prepare_put(self, namespace: bytes, keys: Sequence[bytes]) -> Put | Outcome:
        return self.inner.prepare_put(namespace, keys)

    def put_layer(self, put: Put, layer: int, memory: BlockMemory, ids: Ids) -> Outcome:
        return self.inner.put_layer(put, layer, memory, ids)

    def complete_puts(self, puts: Sequence[Put]) -> list[Outcome]:
        return self.inner.complete_puts(puts)

    def abort_put(self, put: Put) -> None:
        self.inner.abort_put(put)

    def prepare_get(self, namespace: bytes, keys: Sequence[bytes]) -> Get:
        return self.inner.prepare_get(namespace, keys)

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        return self.inner.get_layer(get, layer, memory, ids)

    def complete_get(self, get: Get) -> None:
        self.inner.complete_get(get)

    def drop(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        return self.inner.drop(namespace, keys)

    def clear(self, namespace: bytes | None = None) -> int:
        return self.inner.clear(namespace)

    def stats(self) -> TierStats:
        return self.inner.stats()

    def check(self) -> None:
        self.inner.check()

    def close(self) -> None:
        self.inner.close()

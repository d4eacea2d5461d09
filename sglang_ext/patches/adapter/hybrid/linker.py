"""SGLang's linker interface over our store: translates hashes and slots to names and rows."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.mem_cache.utils import get_storage_hash_str

from sglang_ext.engine.hybrid.components import FULL, AtSnapshot, Component
from sglang_ext.engine.hybrid.paths import Name
from sglang_ext.engine.hybrid.store import HybridStore, Rows
from sglang_ext.engine.movers.mover import NOTHING_TO_WAIT_FOR
from sglang_ext.keys import BLOCK_KEY_BYTES, decode_tokens
from sglang_ext.patches.adapter.hybrid.pools import ComponentPool


def page_name(hashed: str) -> Name:
    """The name of a page by SGLang's hash of its prefix, in which the tenant is."""
    return bytes.fromhex(hashed[: 2 * BLOCK_KEY_BYTES])


def page_names(hashes: Sequence[str]) -> list[Name]:
    """The names of pages."""
    return [page_name(each) for each in hashes]


def names_of_key(key: RadixKey, page_size: int, *, pairs: bool = False) -> list[Name]:
    """The names of the whole pages of a prompt, as SGLang's tree would give them. pairs: of tokens."""
    key, _ = key.maybe_to_bigram_view(pairs)
    return page_names(get_storage_hash_str(key.page_aligned(page_size), page_size=page_size))


def names_of_prompt(namespace: Any, key: bytes, page_size: int, *, pairs: bool = False) -> list[Name]:
    """Like `names_of_key`.

    Args:
        namespace: the prompt's weights' generation, ``extra_key`` and ``cache_salt`` (`Weights.namespace`).
        key: encoded.
    """
    _, extra_key, cache_salt = namespace
    ids = decode_tokens(key).tolist()
    if min(ids, default=0) < 0:
        return []  # ids of pictures cannot be had back from an encoded prompt
    prompt = RadixKey(array("q", ids), extra_key, cache_salt=cache_salt)
    return names_of_key(prompt, page_size, pairs=pairs)


class WholeLoads:
    """SGLang's counter of layers: a forward pass that reads any layer waits for the whole load."""

    num_layers = 1

    def __init__(self, store: HybridStore) -> None:
        self._store = store
        self.consumer_index = NOTHING_TO_WAIT_FOR

    def set_consumer(self, index: int) -> None:
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        if self.consumer_index != NOTHING_TO_WAIT_FOR:
            self._store.wait(self.consumer_index)

    def reset(self) -> None:
        self.consumer_index = NOTHING_TO_WAIT_FOR


class StoreLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """See the module's docstring. In the scheduler's thread.

    Args:
        pools: of the components of the store.
    """

    def __init__(self, store: HybridStore, pools: Sequence[ComponentPool]) -> None:
        self.store = store
        self.by_name: Mapping[PoolName, ComponentPool] = {_pool_name(pool.component): pool for pool in pools}
        self.pools = dict(self.by_name)
        self.layer_done_counter = WholeLoads(store)
        self.looked_up: dict[str, list[Name]] = {}
        """For each waiting request, the names of the pages that HBM lacks."""

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        names = page_names(next(each.keys for each in transfers if each.name == PoolName.KV))
        self.looked_up[rid] = names
        return self.store.lookup(names, rid)

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        return self.store.load(rid, self._rows(transfers))

    def _rows(self, transfers: Sequence[PoolTransfer]) -> dict[Component, Rows]:
        rows = {}
        for each in transfers:
            pool = self.by_name[each.name]
            rows[pool.component] = Rows(page_names(each.keys), pool.rows(each.device_indices))
        return rows

    def start_layer_wise_loading(self) -> int:
        return self.store.start_loads()

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """A load from DRAM cannot fail, and the forward pass has waited for it."""
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return self.store.cancel_load(rid)

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        self.store.save(self._rows(transfers))
        return True

    def num_completed_offloads(self) -> int:
        return self.store.ended_saves

    def pop_completed_offload(self) -> bool:
        self.store.forget_save()
        return True

    def reset(self) -> None:
        self.looked_up.clear()
        self.store.clear()
        self.layer_done_counter.reset()

    def close(self) -> None:
        self.store.close()


def _pool_name(component: Component) -> PoolName:
    if component == FULL:
        return PoolName.KV
    return PoolName.MAMBA if isinstance(component.coverage, AtSnapshot) else PoolName.SWA

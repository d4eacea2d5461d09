"""From SGLang's tree and our store to the tree that routers get (`engine/hybrid/announced.py`).

SGLang's tree may be in Rust, so its nodes are not looked into. After an insertion its path is read through
the tree's own interface. Slots that it gives up are freed by the cache, which passes them on to here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.unified_cache.cache_action import (
    FreeComponentDeviceSlot,
    FreeDeviceKV,
    FreeDeviceKVFullOnly,
)
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from sglang_ext.engine.events.events import PlacementFeed
from sglang_ext.engine.hybrid.announced import NOWHERE, Announced, Ids
from sglang_ext.engine.hybrid.components import FULL, AtSnapshot, Component, Flags, LastWindow
from sglang_ext.engine.hybrid.paths import Name
from sglang_ext.engine.hybrid.store import HybridStore
from sglang_ext.engine.planners import Planner
from sglang_ext.patches.adapter.hybrid.linker import page_names
from sglang_ext.patches.adapter.hybrid.pools import STATE
from sglang_ext.radix_global import Holder, RadixTree
from sglang_ext.tiers import Tier


def components_of(cache: Any) -> dict[ComponentType, Component]:
    """Our components of SGLang's tree, `FULL` first."""
    found = {ComponentType.FULL: FULL}
    if cache.is_swa_enabled:
        found[ComponentType.SWA] = Component("window", LastWindow(cache.sliding_window_size))
    if cache.is_mamba_enabled:
        found[ComponentType.MAMBA] = STATE
    return found


class Announcing(Planner):
    """See the module's docstring. In the scheduler's thread of rank 0.

    Args:
        cache: a `HybridRadixCache`, empty.
        holders: of the published tiers, this instance's.
        store: below HBM; None without.
    """

    def __init__(
        self, cache: Any, holders: dict[Tier, Holder], block_tokens: int, store: HybridStore | None
    ) -> None:
        self._cache = cache
        self._page = cache.page_size
        self._components = components_of(cache)
        parts = [] if store is None else list(store.parts.values())
        below: dict[tuple[Tier, Component], Callable[[Sequence[Name]], Flags]] = {
            (Tier.DRAM, part.component): part.memory.held for part in parts
        }
        for part in parts:
            if part.disk is not None and Tier.DISK in holders:
                below[Tier.DISK, part.component] = part.disk.known
        self.announced = Announced(
            RadixTree(block_tokens), holders, list(self._components.values()), self._page, below
        )
        self.feed = PlacementFeed(self.announced.tree, list(holders.values()))
        self._generation = 0
        for part in parts:
            part.memory.observe(partial(self.announced.below, Tier.DRAM, part.component))
            if part.disk is not None and Tier.DISK in holders:
                part.disk.observe(partial(self.announced.below, Tier.DISK, part.component))

    # -- SGLang's tree ----------------------------------------------------------------------------------

    def inserted(self, key: Any, own_extra_key: str | None, node_id: Any) -> None:
        """SGLang's tree has a path that ends at a node.

        Args:
            key: SGLang's, of which the path is a beginning.
            own_extra_key: without what tells weights apart.
        """
        tree = self._cache.tree_core
        (path,) = tree.collect_path_info([node_id])
        if not path:
            return
        pages = path[-1].path_end // self._page
        rows = {component: np.full(pages, NOWHERE, np.int64) for component in self._components.values()}
        names: list[Name] = []
        for node in path:
            names += page_names(tree.get_hash_values(node.node_id))
            self._read(node, rows)
        namespace = (self._generation, own_extra_key, key.cache_salt)
        tokens = key.raw_token_ids()[: pages * self._page]
        self.announced.in_hbm(namespace, tokens, names if len(names) == pages else (), rows)

    def _read(self, node: Any, rows: dict[Component, Ids]) -> None:
        """Where the pages of a node are."""
        tree, page = self._cache.tree_core, self._page
        first, end = node.path_start // page, node.path_end // page
        full = tree.get_component_device_value(node.node_id, ComponentType.FULL)
        if full is None:
            return
        pages = _rows(full, page)
        rows[FULL][first:end] = pages
        for kind, component in self._components.items():
            if component == FULL:
                continue
            value = tree.get_component_device_value(node.node_id, kind)
            if value is None:
                continue
            if isinstance(component.coverage, AtSnapshot):
                rows[component][end - 1] = int(value[0])
            else:
                # SGLang frees windows by the slots of all tokens.
                rows[component][first:end] = pages

    def freed(self, action: Any) -> None:
        """SGLang's cache frees slots."""
        if isinstance(action, FreeComponentDeviceSlot):
            component = self._components.get(action.component_type)
            gone = [] if component is None else [component]
        elif isinstance(action, FreeDeviceKVFullOnly):
            gone = [FULL]
        elif isinstance(action, FreeDeviceKV):
            gone = [each for each in self._components.values() if each != STATE]
        else:
            return
        for component in gone:
            size = 1 if component == STATE else self._page
            for slots in action.indices:
                self.announced.left_hbm(component, _rows(slots, size))

    # -- passes and weights -----------------------------------------------------------------------------

    def each_pass(self) -> None:
        self.announced.publish()

    def forget(self, generation: int | None = None) -> None:
        """Nothing that is cached matches any more. generation: of the weights from now on; None for the
        same. Routers learn it at once: a server that is paused has no passes.
        """
        if generation is None:
            self.feed.before_clear()
        else:
            self._generation = generation
            self.feed.weights_changed(generation)
        self.announced.clear()

    def check(self) -> None:
        self.announced.check()


def _rows(slots: torch.Tensor, page: int) -> Ids:
    """Of whole pages of slots."""
    rows: Ids = slots[::page].cpu().numpy().astype(np.int64, copy=False) // page
    return rows

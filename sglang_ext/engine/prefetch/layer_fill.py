"""Brings the lowest layers of announced sessions to HBM, where whole sessions do not fit.

Layer i of all sessions comes before layer i + 1 of any (Symphony, section 3.3). The prefetcher has brought
the sessions that fit as a whole, and the rest to DRAM. Each session left gets as many layers as hide the
loading of the others, by measured speeds: none where a wait for the first would not be noticed.

Room for them is, in this order: slots that are free, or cached without having been announced or used since;
ends of announced sessions that are there as a whole, which have the highest layers of all, and get their
lowest layers back here; cells of higher layers.

Copies go behind all that a request waits for. All methods run in the scheduler's thread, alike on all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from dataclasses import dataclass
from functools import partial

import numpy as np

from sglang_ext.engine.movers.mover import BlockIds
from sglang_ext.engine.planners import Planner
from sglang_ext.engine.prefetch.hbm_prefetch import Prefetcher
from sglang_ext.engine.rank_metrics import RankMetrics
from sglang_ext.engine.tiers.cell_index import Cell
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.hbm_tier import HbmTier
from sglang_ext.engine.tiers.layer_region import LayerRegion
from sglang_ext.engine.tiers.load_policy import Speeds, layers_to_hold
from sglang_ext.engine.tiers.prefill_clock import PrefillClock
from sglang_ext.engine.tiers.retention import Session
from sglang_ext.geometry import BlockLayout
from sglang_ext.mempool.store import Store
from sglang_ext.radix_global import Node, RadixTree

FILL_SECONDS = 0.002
"""Of copying at a time: the longest that the engine may have to wait when it takes slots back."""
LOOK_AGAIN_PASSES = 64
"""Passes before the next try, where there was no room."""
LOOK_AFTER_LOSS_PASSES = 16
"""Passes before the next try, where the engine has taken room: it may need more at once."""


@dataclass(frozen=True, eq=False)
class _Lacking:
    """A session that is not in HBM as a whole. ids: its blocks in DRAM behind those in HBM; last: their end.

    layers: how many it should have.
    """

    session: Session
    last: Node
    ids: BlockIds
    layers: int


class LayerFill(Planner):
    """See the module's docstring. Make it with `over`.

    Args:
        region: where the layers are. HBM takes blocks back from it, and loads from DRAM copy from it.
        speeds: of loading and computing, as the ranks have agreed.
        clock: measures how many tokens requests compute behind their cached prefix.
    """

    def __init__(
        self,
        region: LayerRegion,
        tree: RadixTree,
        tier: DramTier,
        hbm_tier: HbmTier,
        prefetcher: Prefetcher,
        speeds: Speeds,
        clock: PrefillClock,
    ) -> None:
        self.region = region
        self._tree = tree
        self._tier = tier
        tier.near.append(region)
        self._hbm_tier = hbm_tier
        hbm_tier.lent.append(region)
        self._prefetcher = prefetcher
        self._speeds = speeds
        self._clock = clock
        self._filling = 0
        self._due = False
        self._passes = 0
        self._short = False
        """Whether the last look found no room for all."""
        self._seen: tuple[int, ...] = ()
        """At the last look: sessions given up, cells given up, and sessions announced."""
        self._brought = 0
        """Prefetches that had ended by the last pass."""

    @classmethod
    def over(
        cls,
        limit: int | None,
        layout: BlockLayout,
        store: Store,
        tier: DramTier,
        hbm_tier: HbmTier,
        prefetcher: Prefetcher,
        speeds: Speeds,
        clock: PrefillClock,
    ) -> LayerFill | None:
        """Over a new region; None where there is none.

        Args:
            limit: most bytes of HBM for it: 0 for none, None for as many as pay off.
        """
        if limit == 0 or not LayerRegion.fits(layout):
            return None
        region = LayerRegion(store, layout, limit, tier.retention.knows)
        return cls(region, store.tree, tier, hbm_tier, prefetcher, speeds, clock)

    @property
    def busy(self) -> bool:
        """Whether the next passes have something to do."""
        return self._due or bool(self._filling) or self._brought != self._prefetcher.counters.total()

    def each_pass(self) -> None:
        """Start to fill the next cells, if no copy is under way."""
        brought = self._prefetcher.counters.total()
        if brought != self._brought:
            # Something may be lacking, or there may be room.
            self._brought, self._due = brought, True
        self._passes += 1
        retention = self._tier.retention
        if not len(retention):
            self._due = False
            return
        lost = (retention.given_up, self.region.counters.given_up, len(retention))
        if lost != self._seen:
            self._due = self._due or self._passes % LOOK_AFTER_LOSS_PASSES == 0
        elif self._short:
            self._due = self._due or self._passes % LOOK_AGAIN_PASSES == 0
        if self._filling or not self._due:
            return
        self._seen, self._short = lost, False
        lacking = self._lacking({each.id for each in self._prefetcher.prompts})
        for layer in range(max((each.layers for each in lacking), default=0)):
            begun, most = 0, self._most_at_once(layer)
            for each in lacking:
                missing = self.region.cells.missing(layer, each.ids)
                if layer >= each.layers or not len(missing):
                    continue
                cells = self._fill(each, layer, missing, most - begun)
                begun += cells
                if not cells or begun >= most:
                    self._short, self._due = not cells, bool(begun)
                    return
            if begun:
                return  # the layers above come when this one is there, of all
        self._due = False

    def _most_at_once(self, layer: int) -> int:
        """Cells that are filled at a time."""
        rate = self._speeds.bytes_per_second or 0.0
        return 1 + int(FILL_SECONDS * rate / self.region.cell_bytes(layer))

    def _lacking(self, bringing: Container[str]) -> list[_Lacking]:
        """Sessions that lack layers, the strongest first.

        bringing: sessions that are still being brought as a whole.
        """
        found: list[_Lacking] = []
        dram = self._tier.holder
        for session in self._tier.retention.strongest_first(dram):
            if session.id in bringing:
                continue
            in_hbm, below = self._tier.split(session.nodes)
            blocks = sum(node.blocks for node in below)
            before = sum(node.blocks for node in in_hbm)
            layers = self._layers_for(blocks, before) if blocks else 0
            if not layers:
                continue
            ids = np.concatenate([node.placements[dram] for node in below])
            # Ends of cells are waste: a session that would take more room in cells than as a whole stays in
            # DRAM.
            cells = -(-len(ids) // self.region.strip_blocks)
            if layers * cells * self.region.strip_blocks < len(ids) * self.region.n_layers:
                found.append(_Lacking(session, below[-1], ids, layers))
        return found

    def _layers_for(self, blocks: int, before: int) -> int:
        rate = self._speeds.bytes_per_second
        load = None if not rate else blocks * self._tier.block_bytes / rate
        new = self._clock.new_tokens
        compute = None
        if new is not None:
            compute = self._speeds.seconds(round(new), (before + blocks) * self._tree.block_size)
        return max(self.region.least, layers_to_hold(self.region.n_layers, load, compute))

    def _fill(self, lacking: _Lacking, layer: int, ids: BlockIds, most: int) -> int:
        """Start copying a layer of a session, its beginning first. Returns in how many cells: 0 without room
        for all of it.
        """
        step = self.region.strip_blocks
        parts = [ids[start : start + step] for start in range(0, len(ids), step)]
        if not self._room(lacking.session, layer, len(parts)):
            return 0
        for part in parts[:most]:
            cell, slots = self.region.begin(lacking.session.id, layer, part, lacking.session.order)
            self._filling += 1
            # The blocks stay in DRAM until they are copied.
            self._tree.lock(lacking.last, self._tier.holder)
            self._tier.copies.fill(
                slots, cell.ids, cell.layer, cell.place, partial(self._landed, lacking.last, cell)
            )
        return min(most, len(parts))

    def _room(self, session: Session, layer: int, places: int) -> bool:
        """Make places for so many cells. Returns whether there are enough."""
        region = self.region
        lacking = places - region.free_places()
        if lacking <= 0:
            return True
        strips = -(-lacking // region.n_layers)
        blocks = strips * region.strip_blocks
        if region.blocks + blocks <= region.limit:
            self._hbm_tier.make_room(blocks, unused_since=session.since, priority=session.priority)
            self._hbm_tier.thin_out(blocks, session.priority)
            if region.grow(strips):
                return True
        return region.displace(places, layer)

    def _landed(self, last: Node, cell: Cell) -> None:
        self._tree.unlock(last, self._tier.holder)
        self._filling -= 1
        self.region.landed(cell)

    def drop_in_flight(self) -> None:
        """Give everything back."""
        self._tier.copies.settle()
        self.region.clear()
        self._due, self._brought = False, self._prefetcher.counters.total()

    def check(self) -> None:
        self.region.check()

    def show(self, metrics: RankMetrics) -> None:
        metrics.count_events("layer_region_block_layers", dataclasses.asdict(self.region.counters))
        metrics.set("layer_region_blocks", self.region.blocks)

    def __repr__(self) -> str:
        return f"LayerFill({self.region!r}, filling={self._filling}, due={self._due})"

"""A model with two components on SGLang's own pools: attention to all tokens, and attention to a window.

The rules of HBM stand in for SGLang's: a request gets new slots for all of its tokens, and its window rows go
once no later token attends to them. Everything below HBM is ours: the tree, the store with the memory of each
component, the mover, disks, and transfers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from engine_movers import until
from engine_pools import Oracle, chain_of, node_chains
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_ext.engine.movers.mover import LayerGate, ThreadMover
from sglang_ext.keys import TOKEN_BYTES, block_keys, encode_tokens
from sglang_ext.mempool.ledger import Reservation, Use
from sglang_ext.mempool.store import Store
from sglang_ext.patches.adapter.hbm import EnginePool, layer_map, pool_geometry, pool_planes
from sglang_ext.radix_global import Holder, Node, RadixTree
from sglang_ext.radix_global.components import (
    FULL,
    Component,
    LastWindow,
    TableRows,
    resume_points,
    slot_rows,
)
from sglang_ext.tiered_store.copy import PoolCopier
from sglang_ext.tiered_store.disk.state import DiskConfig
from sglang_ext.tiered_store.disk.tier import DiskTier
from sglang_ext.tiered_store.dram.arena import DramArena
from sglang_ext.tiered_store.tier import BlockMemory, Outcome, Put
from sglang_ext.tiers import Tier

BLOCK = 4
WINDOW = Component("window", LastWindow(6))
LAYERS = {FULL: (0, 2), WINDOW: (1, 3)}
"""Model layers of each component, in the order of its local layers."""
SPACE = "space"
DIGEST = b"n" * 16

Ids = npt.NDArray[np.int64]


class Shelf:
    """The DRAM of one component: a `mempool.store.StoreTier` over an arena."""

    exclusive = True

    def __init__(self, store: Store, holder: Holder, arena: DramArena) -> None:
        self.holder = holder
        self.arena = arena
        self._store = store
        store.ledger.add(self)

    @property
    def n_blocks(self) -> int:
        return self.arena.n_blocks

    @property
    def free_blocks(self) -> int:
        return self.arena.free_blocks

    def take(self, blocks: int, *, lose: bool = True, rank: float = 0) -> Ids:
        shortage = blocks - self.free_blocks
        if shortage > 0:
            self._store.ledger.delete(self.holder, self._store.tree.evict(self.holder, shortage))
        taken = self.arena.alloc(min(blocks, self.free_blocks))
        assert taken is not None
        return taken

    def count(self, places: Ids) -> int:
        return len(places)

    def part(self, places: Ids, start: int, end: int) -> Ids:
        return places[start:end]

    def give_back(self, places: Ids) -> None:
        if len(places):
            self.arena.free(places)

    def join(self, parts: Sequence[Ids]) -> Ids:
        return np.concatenate(parts)

    def clear(self) -> None:
        for node in self._store.tree.nodes():
            if self.holder in node.placements:
                self.arena.free(node.placements[self.holder])
        self._store.tree.drop_holder(self.holder)


class ComponentCopier:
    """A `LayerCopier` over the copiers of components: slots and blocks come by component."""

    def __init__(
        self, copiers: Mapping[Component, PoolCopier], parts: Sequence[Sequence[tuple[Component, int]]]
    ):
        self._copiers = copiers
        self._parts = parts

    def plan(self, slots: Any, blocks: Any) -> Any:
        return {
            part: self._copiers[part].plan(slots[part], blocks[part]) for part in slots if len(blocks[part])
        }

    def gather(self, plan: Any, layer: int) -> int:
        parts = [(part, local) for part, local in self._parts[layer] if part in plan]
        return sum(self._copiers[part].gather(plan[part], local) for part, local in parts)

    def scatter(self, plan: Any, layer: int) -> int:
        parts = [(part, local) for part, local in self._parts[layer] if part in plan]
        return sum(self._copiers[part].scatter(plan[part], local) for part, local in parts)


class ComponentRank:
    """One rank of the model.

    Args:
        dram: blocks of each component.
        disks: a folder for a disk of each component.
    """

    def __init__(
        self, name: str, *, tokens: int = 256, dram: Mapping[Component, int], disks: Path | None = None
    ):
        window_tokens = tokens // 2
        self.kvcache = SWAKVPool(
            size=tokens,
            size_swa=window_tokens,
            page_size=1,
            dtype=torch.float32,
            head_num=2,
            head_dim=4,
            swa_attention_layer_ids=list(LAYERS[WINDOW]),
            full_attention_layer_ids=list(LAYERS[FULL]),
            device="cpu",
        )
        self.allocator = SWATokenToKVPoolAllocator(
            tokens, window_tokens, 1, torch.float32, "cpu", self.kvcache, need_sort=False
        )
        parts = {FULL: self.kvcache.full_kv_pool, WINDOW: self.kvcache.swa_kv_pool}
        table = self.allocator.full_to_swa_index_mapping
        self.rows = {FULL: slot_rows, WINDOW: TableRows(table.numpy())}
        self.pools: dict[Component, EnginePool] = {}
        self.oracles: dict[Component, Oracle] = {}
        for part, pool in parts.items():
            planes = pool_planes(pool)
            geometry = pool_geometry(
                planes,
                block_tokens=BLOCK,
                page_tokens=1,
                first_layer=0,
                model_layers=len(planes),
                tp_rank=0,
                tp_size=1,
                model_kv_heads=2,
            )
            self.pools[part] = EnginePool(planes, geometry, LAYERS[part], part, self.rows[part])
            self.oracles[part] = Oracle(planes, LAYERS[part])
        self.layers = layer_map(list(self.pools.values()))
        self.tree = RadixTree(BLOCK)
        self.store = Store(self.tree)
        self.arenas = {
            part: DramArena(
                self.pools[part].geometry.layout,
                dram[part] * (self.pools[part].geometry.block_bytes + 8) + 8,
                pin=False,
                name=f"{name} {part!r}",
            )
            for part in parts
        }
        self.holders = {part: Holder.of(name, 1, Tier.DRAM, part) for part in parts}
        self.shelves = {part: Shelf(self.store, self.holders[part], self.arenas[part]) for part in parts}
        copiers = {part: PoolCopier(self.pools[part].geometry, self.arenas[part]) for part in parts}
        self.mover = ThreadMover(ComponentCopier(copiers, self.layers.parts), self.layers.n_layers)
        self.gate = LayerGate(self.mover, self.layers.n_layers)
        self.kvcache.register_layer_transfer_counter(self.gate)
        self.disks: dict[Component, DiskTier] = {}
        if disks is not None:
            self.disks = {
                part: DiskTier(DiskConfig(disks / part.name, 1 << 22), self.pools[part].geometry.layout)
                for part in parts
            }
        self.resumed: list[int] = []
        """For each request, the number of tokens that it found."""

    # -- requests ---------------------------------------------------------------------

    def resume(self, tokens: Sequence[int]) -> tuple[Node, int]:
        """The deepest place below the end of a prompt from which a request can go on, and its blocks."""
        key = encode_tokens(tokens)
        path = self.store.match(SPACE, key).path
        held = {
            part: np.concatenate([np.full(node.blocks, holder in node.placements) for node in path])
            if path
            else np.zeros(0, np.bool_)
            for part, holder in self.holders.items()
        }
        points = resume_points(held, BLOCK)[: (len(tokens) - 1) // BLOCK + 1]
        blocks = int(np.flatnonzero(points)[-1])
        return self.tree.match(SPACE, key[: blocks * BLOCK * TOKEN_BYTES]).node, blocks

    def places(self, node: Node, blocks: int, part: Component) -> tuple[Ids, range]:
        """Where DRAM has the blocks of a component that a request needs to resume at a node, and which
        blocks of its prompt these are."""
        wanted = part.coverage.to_save(blocks * BLOCK, 0, BLOCK)
        if not wanted:
            return np.zeros(0, np.int64), wanted
        holder = self.holders[part]
        found = [each.placements[holder] for each in self.tree.tail(node, len(wanted))]
        return np.concatenate(found), wanted

    def serve(self, tokens: Sequence[int]) -> int:
        """Run one request: find, load, compute, save. Each row that attention reads is compared.

        Returns the number of tokens that it found.
        """
        node, blocks = self.resume(tokens)
        slots = self.allocator.alloc(len(tokens))
        assert slots is not None
        slots = slots.numpy()
        ticket = self._load(node, blocks, slots)
        self._forward(tokens, blocks * BLOCK, slots)
        if ticket is not None:
            until(lambda: self.mover.loads_done() > ticket, "a load")
            for holder in self.holders.values():
                self.tree.unlock(node, holder)
        # As SGLang does, whole blocks before the window of the last border stay.
        gone = max(0, (len(tokens) // BLOCK * BLOCK - WINDOW.coverage.tokens) // BLOCK * BLOCK)
        spoilt = self.rows[WINDOW](slots[:gone])
        self.allocator.free_swa(torch.from_numpy(slots[:gone]))
        self.oracles[WINDOW].spoil(spoilt[spoilt > 0])
        self._save(tokens, slots, gone)
        self.oracles[FULL].spoil(slots)
        rest = self.rows[WINDOW](slots[gone:])
        self.allocator.free_full(torch.from_numpy(slots[:gone]))
        self.allocator.free(torch.from_numpy(slots[gone:]))
        self.oracles[WINDOW].spoil(rest)
        self.resumed.append(blocks * BLOCK)
        return blocks * BLOCK

    def _load(self, node: Node, blocks: int, slots: Ids) -> int | None:
        if not blocks:
            return None
        targets: dict[Component, Ids] = {}
        sources: dict[Component, Ids] = {}
        for part, holder in self.holders.items():
            self.tree.lock(node, holder)
            sources[part], wanted = self.places(node, blocks, part)
            targets[part] = self.rows[part](slots[wanted.start * BLOCK : wanted.stop * BLOCK])
        ticket = self.mover.load(targets, sources)
        self.gate.set_consumer(ticket)
        return ticket

    def _forward(self, tokens: Sequence[int], start: int, slots: Ids) -> None:
        """Layer by layer: wait, compare the rows that attention reads, write the new ones."""
        chain = np.array(chain_of(SPACE, tokens), np.uint64)
        for layer, parts in enumerate(self.layers.parts):
            self.gate.wait_until(layer)
            for part, local in parts:
                rows = self.rows[part](slots)
                first = 0 if part is FULL else max(0, start + 1 - WINDOW.coverage.tokens)
                self.oracles[part].compare(
                    rows[first:start], chain[first:start], local, f"{part!r} of {tokens}"
                )
                self.oracles[part].write(rows[start:], chain[start:], local)
        self.gate.reset()

    def _save(self, tokens: Sequence[int], slots: Ids, gone: int) -> None:
        """Bring new blocks, and the window before the end, into DRAM."""
        key = encode_tokens(tokens)
        end = len(tokens) // BLOCK * BLOCK
        found = self.store.reserve(Tier.DRAM, SPACE, key, Use.PROMOTION)
        if isinstance(found, Reservation):
            first = found.start * BLOCK
            self._write(FULL, slots[first : first + found.blocks * BLOCK], found.places)
            found.commit(onward=False)
        self.attach(
            key,
            WINDOW.coverage.to_save(end, gone, BLOCK),
            lambda wanted, places: self._write(
                WINDOW, self.rows[WINDOW](slots[wanted.start * BLOCK : wanted.stop * BLOCK]), places
            ),
        )

    def attach(self, key: bytes, wanted: range, fill: Any) -> None:
        """Put a window into the index, if DRAM has the full component of all of its blocks.

        Args:
            wanted: the blocks of the window.
            fill: takes a range of blocks and the places to fill.
        """
        holder = self.holders[WINDOW]
        match = self.store.match(SPACE, key[: wanted.stop * BLOCK * TOKEN_BYTES])
        if not wanted or match.blocks < wanted.stop:
            return
        # Neither the prefix nor rows that are already there may be evicted to make room.
        self.tree.lock(match.node, self.holders[FULL])
        self.tree.lock(match.node, holder)
        start = wanted.start
        for node in self.tree.tail(match.node, len(wanted)):
            end = start + node.blocks
            if holder not in node.placements:
                places = self.store.ledger.alloc_mem(holder, node.blocks, Use.PROMOTION, whole=True)
                if places is not None:
                    fill(range(start, end), places)
                    self.store.ledger.attach(holder, [node], places, Use.PROMOTION)
            start = end
        self.tree.unlock(match.node, holder)
        self.tree.unlock(match.node, self.holders[FULL])

    def _write(self, part: Component, rows: Ids, places: Ids) -> None:
        ticket = self.mover.write({part: rows}, {part: places})
        until(lambda: self.mover.writes_done() > ticket, "a write")

    def evict(self, part: Component, blocks: int) -> int:
        """Have DRAM give up some blocks of a component."""
        holder = self.holders[part]
        return self.store.ledger.delete(holder, self.tree.evict(holder, blocks))

    # -- disk -------------------------------------------------------------------------------------

    def names(self, part: Component, key: bytes) -> list[bytes]:
        """The names of a component's blocks of a prompt."""
        return part.names(DIGEST, block_keys(DIGEST, key, BLOCK))

    def to_disk(self, tokens: Sequence[int]) -> None:
        """Write what DRAM has of a prompt to disk."""
        node, blocks = self.resume([*tokens, 0])
        for part, disk in self.disks.items():
            places, wanted = self.places(node, blocks, part)
            names = self.names(part, encode_tokens(tokens))[wanted.start : wanted.stop]
            put = disk.prepare_put(DIGEST, names)
            if not isinstance(put, Put) or not put.missing:
                continue
            memory = BlockMemory.of_arena(self.arenas[part])
            for layer in range(disk.layout.n_layers):
                assert disk.put_layer(put, layer, memory, places[list(put.missing)]) is Outcome.DONE
            assert disk.complete_puts([put]) == [Outcome.DONE]

    def from_disk(self, tokens: Sequence[int]) -> int:
        """Bring into DRAM the longest prefix on disk after which a request may resume. Returns its blocks."""
        key = encode_tokens(tokens)
        held = {
            part: np.array([disk.match(DIGEST, [name]) == 1 for name in self.names(part, key)], np.bool_)
            for part, disk in self.disks.items()
        }
        blocks = int(np.flatnonzero(resume_points(held, BLOCK))[-1])
        return self.bring(key, blocks, self._read)

    def bring(self, key: bytes, blocks: int, fill: Any) -> int:
        """Fill DRAM with the first blocks of a prompt.

        Args:
            fill: takes component, key, a range of blocks and places; returns the number of leading
                blocks that are good.
        """
        found = self.store.reserve(Tier.DRAM, SPACE, key[: blocks * BLOCK * TOKEN_BYTES], Use.PROMOTION)
        if isinstance(found, Reservation):
            wanted = range(found.start, found.start + found.blocks)
            good = fill(FULL, key, wanted, found.places)
            found.commit(good, onward=False)
            if good < found.blocks:
                blocks = found.start + good

        def fill_window(wanted: range, places: Ids) -> None:
            assert fill(WINDOW, key, wanted, places) == len(wanted)

        self.attach(key, WINDOW.coverage.to_save(blocks * BLOCK, 0, BLOCK), fill_window)
        return blocks

    def _read(self, part: Component, key: bytes, wanted: range, places: Ids) -> int:
        disk = self.disks[part]
        get = disk.prepare_get(DIGEST, self.names(part, key)[wanted.start : wanted.stop])
        for layer in range(disk.layout.n_layers):
            disk.get_layer(get, layer, BlockMemory.of_arena(self.arenas[part]), places[: get.blocks])
        disk.complete_get(get)
        return get.blocks

    # -- whole ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Tree, ledger, slots, and every row in DRAM."""
        self.tree.check()
        self.store.ledger.check()
        assert self.allocator.full_available_size() == self.allocator.size_full
        assert self.allocator.swa_available_size() == self.allocator.size_swa
        for node, chain in self._chains():
            for part, holder in self.holders.items():
                if holder in node.placements:
                    self._compare(part, node.placements[holder], chain)

    def _chains(self) -> list[tuple[Node, npt.NDArray[np.uint64]]]:
        roots = self.tree.roots
        found = [each for space, root in roots.items() for each in node_chains(root, space)]
        return [(node, np.array(chain, np.uint64)) for node, chain in found]

    def _compare(self, part: Component, places: Ids, chain: npt.NDArray[np.uint64]) -> None:
        arena, oracle = self.arenas[part], self.oracles[part]
        for layer in range(arena.layout.n_layers):
            for i, plane in enumerate(arena.layout.planes_of(layer)):
                oracle.compare_blocks(arena.plane(plane)[places], chain, layer, i, f"{part!r} in DRAM")

    def __enter__(self) -> ComponentRank:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.mover.close()
        for disk in self.disks.values():
            disk.close()
        for arena in self.arenas.values():
            arena.close()

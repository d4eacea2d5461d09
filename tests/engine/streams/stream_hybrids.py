"""The loops of `stream_engine` over models with windows and states: SGLang's own tree, our store below it,
and a `CudaMover` for each component.

A pass reads the places of windows (`full_to_swa_index_mapping`) with its other inputs, as SGLang makes its
metadata before it replays a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_hybrid_pools import FULL, MAMBA, SWA, HybridKind, HybridPools, Ids
from engine_hybrid_store import Sizes, StoreBelow
from engine_hybrids import HybridRank, HybridScenario, HybridScheduler
from engine_pools import Planes
from engine_scheduler import Computed, Settings
from fake_cuda import DEVICE, FakeCuda
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.allocator import swa
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.model_executor.model_runner import ModelRunner
from stream_engine import (
    Loop,
    PinnedArena,
    ReadOnceWritten,
    StreamScheduler,
    bytes_in,
    of_rows,
    on_device,
    page_kernels,
)
from stream_trace import Access
from torch.utils._python_dispatch import _disable_current_modes

from sglang_ext.engine.hybrid.memory import ComponentMemory
from sglang_ext.engine.hybrid.store import StoredComponent
from sglang_ext.engine.movers import cuda_mover
from sglang_ext.engine.ranks import Ranks
from sglang_ext.patches.adapter.hybrid.cache import HybridRadixCache
from sglang_ext.patches.adapter.hybrid.pools import ComponentPool

CELL = 16
"""Bytes of a cell of DRAM, whose chunks pass from one component to another."""


class DeviceHybridPools(HybridPools):
    """SGLang's pools, allocators and tables on the fake device."""

    device = DEVICE

    def __init__(self, kind: HybridKind, **sizes: Any) -> None:
        super().__init__(kind, **sizes)
        for plane in (plane for layers in self.planes.values() for layer in layers for plane in layer):
            of_rows(plane)
        of_rows(self.requests.req_to_token)
        if kind.states:
            of_rows(self.requests.req_index_to_mamba_index_mapping)
        if kind.grid:
            of_rows(self.requests.req_index_to_mamba_ping_pong_track_buffer_mapping)
        allocators = [self.allocator]
        if kind.window:
            of_rows(self.allocator.full_to_swa_index_mapping)
            allocators = [self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator]
        for each in allocators if kind.page > 1 else ():
            each.use_triton_kernels = True

    def seen(self, planes: Planes) -> Planes:
        return [[bytes_in(plane) for plane in layer] for layer in planes]

    def window_rows(self, slots: Ids) -> Ids:
        rows: Ids = bytes_in(self.allocator.full_to_swa_index_mapping).numpy()[slots]
        return rows

    def access(self, part: ComponentType, local: int, slots: Ids) -> list[Access]:
        """One layer of some slots of a component."""
        found = []
        for plane in self.planes[part][local]:
            memory = plane.lives.memory
            row = plane.inner.stride(0) * plane.inner.element_size()
            first = plane.inner.data_ptr() - memory.address
            found.append((memory, memory.cells[first + slots * row].astype(np.int64)))
        return found


class StreamHybridScheduler(StreamScheduler, HybridScheduler):
    """A loop that launches passes of such a model on a stream."""

    def _inputs(self, work: Sequence[Computed]) -> list[Access]:
        pools, found = self.pools, super()._inputs(work)
        if pools.kind.window:
            mapping = pools.allocator.full_to_swa_index_mapping
            found.append((mapping.lives.memory, np.unique(np.concatenate([each.row for each in work]))))
        if pools.kind.states:
            states = pools.requests.req_index_to_mamba_index_mapping
            found += [self.cuda.access(states[each.req.kv.req_pool_idx]) for each in work]
        return found

    def _before_layers(self, batch: ScheduleBatch, work: Sequence[Computed]) -> None:
        self._kept = self._kept_states(batch, work) if self.pools.kind.grid else []
        if self.pools.kind.states:
            runner = SimpleNamespace(req_to_token_pool=self.pools.requests, is_draft_worker=False)
            # A `ForwardBatch`, which lets go of the indices; the batch keeps them.
            ModelRunner._maybe_execute_deferred_mamba_cow_and_clear(runner, copy(batch))

    def _track_slots(self, batch: ScheduleBatch) -> list[int]:
        found: list[int] = bytes_in(batch.mamba_track_indices).tolist()
        return found

    def _slots(self, work: Computed, part: ComponentType) -> Ids:
        if part is not MAMBA:
            return super()._slots(work, part)
        states = bytes_in(self.pools.requests.req_index_to_mamba_index_mapping)
        return np.full(len(work.row), int(states.numpy()[work.req.kv.req_pool_idx]))

    def _layers(self) -> int:
        return len(self.pools.layers)

    def _read(self, layer: int) -> None:
        self.pools.read(self.pools.layers[layer][0])

    def _layer(self, work: Sequence[Computed], layer: int) -> None:
        _, part, local = self.pools.layers[layer]
        oracle, window = self.pools.oracles[part], self.pools.kind.window
        places = [self._slots(each, part) for each in work]
        back = {FULL: len, SWA: lambda chain: window, MAMBA: lambda chain: 1}[part]
        firsts = [max(0, each.start - back(each.chain)) for each in work]
        # A state is that of the last token.
        news = [len(each.row) - 1 if part is MAMBA else each.start for each in work]
        kept = self._kept if part is MAMBA else []

        def attend() -> None:
            for each, slots, first, new in zip(work, places, firsts, news, strict=True):
                what = f"prefix of {each.req.rid} in forward"
                oracle.compare(slots[first : each.start], each.chain[first : each.start], local, what)
                oracle.write(slots[new:], each.chain[new:], local)
            for slot, chain, tokens in kept:
                oracle.write(np.array([slot]), chain[tokens - 1 : tokens], local)

        access, reads, writes = self.pools.access, list[Access](), list[Access]()
        for each, slots, first, new in zip(work, places, firsts, news, strict=True):
            reads += access(part, local, slots[first : each.start])
            writes += access(part, local, slots[new:])
        writes += [each for slot, _, _ in kept for each in access(part, local, np.array([slot]))]
        self.cuda.launch(f"pass, {part.name} {local}", attend, reads, writes)


class ClearPlaces:
    """SGLang's kernel that takes slots out of windows: `get_and_clear_swa_pages`, one launch."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def __call__(self, slots: Any, mapping: Any, page: int, **_: Any) -> tuple[Any, Any, None]:
        pages = torch.empty(len(slots), dtype=mapping.dtype, device=DEVICE)
        mapped = torch.empty(len(slots), dtype=torch.bool, device=DEVICE)
        of, places, found, is_mapped = map(bytes_in, (slots, mapping, pages, mapped))

        def every() -> Any:
            return ((of // page * page)[:, None] + torch.arange(page)).ravel()

        def act() -> None:
            found.copy_(places[of] // page)
            is_mapped.copy_(places[of] > 0)
            places[every()] = 0

        with _disable_current_modes():
            cleared = mapping.lives.memory, np.unique(every().numpy())
        access = self._cuda.access
        writes = [cleared, access(pages), access(mapped)] if len(slots) else []
        self._cuda.launch("clear places", act, [access(slots), cleared] if len(slots) else [], writes)
        return pages, mapped, None


class Slabs(PinnedArena):
    """An arena of a component in memory that all of them share."""

    def __init__(self, arena: Any, cuda: FakeCuda, memory: Any) -> None:
        self._arena, self.memory = arena, memory

    def access(self, blocks: Any) -> Access:
        arena, cells = self._arena, []
        for block in np.asarray(blocks).tolist():
            first = arena.address - self.memory.address + block * arena.block_bytes
            cells.append(np.arange(first // CELL, -(-(first + arena.layout.block_bytes) // CELL)))
        return self.memory, np.concatenate(cells)


class DeviceBelow(StoreBelow):
    """Our store with movers of the fake device."""

    shared = False
    cuda: FakeCuda
    forward: Any
    module: Any

    def _part(self, pool: ComponentPool, memory: ComponentMemory) -> StoredComponent:
        if not hasattr(self, "_memory"):
            whole = torch.from_numpy(self.dram.slabs.memory.bytes)
            cells = np.arange(whole.numel(), dtype=np.int32) // CELL
            self._memory = self.cuda.register(whole, "DRAM", cells, pinned=True)
        arena: Any = Slabs(memory.arena, self.cuda, self._memory)
        mover = self.module.CudaMover(pool.planes_by_layer, arena, self.forward)
        copies = type("Disk", (ReadOnceWritten,), {"cuda": self.cuda, "arena": arena})
        return StoredComponent(pool.component, memory, copies(mover, Ranks()), None)


class StreamHybridRank(HybridRank):
    """A rank whose invariants are looked at unseen by the trace."""

    def check(self) -> None:
        pass


@contextmanager
def stream_hybrid(
    loop: Loop, kind: HybridKind, *, pace: float, seed: int = 0, module: Any = cuda_mover, **sizes: Any
) -> Iterator[tuple[StreamHybridRank, FakeCuda]]:
    """A rank on the fake device. module: with the `CudaMover` under test."""
    cuda = FakeCuda(seed, pace)
    forward = cuda.stream(name="forward")
    scheduler = type("Scheduler", (StreamHybridScheduler,), {"cuda": cuda, "loop": loop, "forward": forward})
    below = type("Below", (DeviceBelow,), {"cuda": cuda, "forward": forward, "module": module})
    scenario = HybridScenario(
        loop.name,
        kind,
        settings=Settings(overlap=loop.overlap, chunk=max(24, 3 * kind.page), new_token_ratio=0.05),
        make_pools=DeviceHybridPools,
        make_scheduler=scheduler,
        tenants=False,
        **{"hbm_tokens": 130, "window_tokens": 110, "memory": 30, **sizes},
    )
    pin_memory = torch.Tensor.pin_memory
    with on_device(cuda, module), page_kernels(), cuda.installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(swa, "get_and_clear_swa_pages", ClearPlaces(cuda), raising=False)
        rank = StreamHybridRank(
            scenario,
            make_cache=HybridRadixCache,
            make_below=lambda pools, cache: below(pools, cache, Sizes(full=150, other=150)),
        )
        # `process_settings`, which the rank leaves when it is closed, has replaced it for a CPU.
        with rank, pytest.MonkeyPatch.context() as pinned:
            pinned.setattr(torch.Tensor, "pin_memory", pin_memory)
            cuda.trace.synchronizations.clear()
            yield rank, cuda

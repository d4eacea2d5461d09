"""The mover for pools in GPU memory: copies on two streams of their own, from and to a pinned arena.

A load queues one kernel for each layer, which reads the layer of all blocks from pinned memory, and records
an event; the forward pass waits for a layer by making its stream wait for the event. A write gathers whole
blocks into a staging buffer on the device, in the arena's layout, with one kernel for each step of at most 64
MiB, and copies runs of neighbouring blocks to the host by a transfer each (`RowCopies`). Where that kernel
cannot be compiled or launched, copies are made without it from then on (`PlainCopies`), and counted.

A write of KV that a pass computes is queued layer by layer as the pass is launched, each behind the layer.

Nothing here waits on the host, but for loads that a pass reads while they still arrive: the thread that
launches the pass waits until each layer's copy is queued (`Arrivals`), and until the last one's has ended.

Ordering with the engine's streams: every copy starts after all work queued so far on the forward stream and
on the scheduler's. A batch under way may still write to slots that were freed and have now been given to a
load; and it may be writing the last token of a request whose end the batch before it has reported, while the
scheduler's stream follows a graph only until it has read its inputs. The scheduler's stream makes the slots.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from sglang_ext.engine.movers.arrivals import Arrivals
from sglang_ext.engine.movers.bandwidth import Bandwidth
from sglang_ext.engine.movers.layer_copies import (
    STAGING_BYTES,
    Blocks,
    CudaRuntime,
    HostArena,
    LayerCopies,
    PlainCopies,
    runs_of_blocks,
    scatter_layer,
    staging_blocks,
    word_of,
    word_rows,
)
from sglang_ext.engine.movers.mover import (
    BlockIds,
    Copied,
    LayerSink,
    MoverError,
    Near,
    Source,
    of_blocks,
    rest_of,
)
from sglang_ext.engine.movers.row_copies import RowCopies

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class _Load:
    nbytes: int
    begun: Any
    """Event at its beginning, with timing as the last layer's."""
    events: list[Any]
    """One per layer that has been queued."""


class _StreamedLoad(_Load):
    """A load whose layers are queued as they arrive. queue: queues one; None where other code does."""

    def __init__(self, source: Source, queue: Callable[[int], object] | None) -> None:
        super().__init__(0, None, [])
        self.source, self.queue = source, queue


class _ComputedWrite:
    """A write whose layers are queued as a pass computes them, and reported once they are copied: to the
    thread of arrivals, a layer arrives then. It stands in the list of writes for the event of its end.
    """

    def __init__(self, slots: torch.Tensor, blocks: Blocks, layers: int, copied: Copied, wait: Wait) -> None:
        self.slots, self.blocks, self.copied = slots, blocks, copied
        self._layers, self._wait = layers, wait
        self.queued: list[Any] = []
        """An event of each layer that has been queued."""
        self.events: list[Any] = []
        """Of each that has been reported."""
        self.source: Source = self

    def decided(self, layer: int) -> bool:
        """Whether a layer has been copied."""
        return layer < len(self.queued) and bool(self.queued[layer].query())

    def report(self) -> None:
        """The next layer has been copied. In the thread of arrivals."""
        layer = len(self.events)
        self.copied(layer)
        self.events.append(self.queued[layer])

    def query(self) -> bool:
        """Whether all layers have been copied and reported."""
        return len(self.events) == self._layers

    def synchronize(self) -> None:
        """Wait for that. Raises MoverError where the pass has not been launched."""
        if len(self.queued) < self._layers:
            raise MoverError("a write waits for a pass that has not been launched")
        self._wait(self.query)


Wait = Callable[[Callable[[], bool]], None]


class CudaMover:
    """See the module's docstring and the contract ``mover.Mover``.

    Args:
        planes: the pool's tensors by local layer, as ``hbm.pool_planes`` returns them.
        arena: pinned, with the layout of the pool's blocks.
        forward_stream: the stream on which the engine runs the model.
        by_kernel: the kernels of copies; ``gpu-check`` compares others with them.
    """

    streams = True

    def __init__(
        self,
        planes: list[list[torch.Tensor]],
        arena: HostArena,
        forward_stream: torch.cuda.Stream,
        by_kernel: type[RowCopies] = RowCopies,
    ) -> None:
        if not arena.pinned:
            raise MoverError("the arena is not pinned; copies to and from the GPU would block the engine")
        self._layout = arena.layout
        self._arena = arena
        self._host = torch.from_numpy(arena.blocks)
        word = word_of(arena.layout, arena.block_bytes)
        self._planes = [[word_rows(plane, word) for plane in layer] for layer in planes]
        self._device = planes[0][0].device
        self._forward_stream = forward_stream
        # A pass waits for loads: their kernels must not queue behind all of those of a batch under way.
        self._load_stream = torch.cuda.Stream(self._device, priority=-1)
        self._write_stream = torch.cuda.Stream(self._device)
        runtime = CudaRuntime()
        self._plain = PlainCopies(self._planes, arena, runtime)
        self._kernels: LayerCopies | None = None
        self._abandoned: LayerCopies | None = None
        """Copies under way may still read its tables, which other work would get if they were freed."""
        self.blocks_without_kernel = 0
        try:
            address = runtime.mapped(arena.address)
            self._kernels = by_kernel(self._planes, arena, address, self._on_device, self._write_stream)
        except Exception as error:  # noqa: BLE001 - without them copies are slower, and as right
            self.without_kernel(f"{type(error).__name__}: {error}")
        self._loads: deque[_Load] = deque()
        self._writes: deque[Any] = deque()
        self._computed: list[_ComputedWrite] = []
        """Writes that follow the pass under way."""
        self._loads_done = 0
        self._writes_done = 0
        self._rate = Bandwidth()
        self._arrivals = Arrivals(self._queue_layer, self._layout.n_layers)

    def write(
        self,
        slots: torch.Tensor,
        blocks: BlockIds,
        source: Source | None = None,
        copied: Copied | None = None,
    ) -> int:
        if source is not None and copied is not None:
            return self._write_computed(slots, blocks, copied)
        self._follow_engine(self._write_stream, slots)
        step, tokens = staging_blocks(self._arena), self._layout.block_tokens
        with torch.cuda.stream(self._write_stream):
            for start in range(0, len(blocks), step):
                part = blocks[start : start + step]
                rows = slots[start * tokens : (start + len(part)) * tokens]
                staging = self._gather(rows, len(part))
                for position, first, count in runs_of_blocks(part):
                    target = self._host[first : first + count]
                    target.copy_(staging[position : position + count], non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._write_stream)
        self._count(blocks)
        self._writes.append(event)
        return self._writes_done + len(self._writes) - 1

    def _write_computed(self, slots: torch.Tensor, blocks: BlockIds, copied: Copied) -> int:
        self._follow_engine(self._write_stream, slots)
        every = Blocks(blocks, self._on_device)
        write = _ComputedWrite(slots, every, self._layout.n_layers, copied, self._arrivals.until)
        self._writes.append(write)
        self._computed.append(write)
        self._arrivals.add(write)
        self._count(blocks)
        return self._writes_done + len(self._writes) - 1

    def computed(self, layer: int) -> None:
        for write in self._computed:
            while len(write.queued) <= layer:
                self._store(write)
        if layer == self._layout.n_layers - 1:
            self._computed.clear()

    def _store(self, write: _ComputedWrite) -> None:
        """Queue the next layer of a write, behind the launches of the pass so far."""
        stream = self._write_stream
        self._follow_engine(stream, write.slots)
        with torch.cuda.stream(stream):
            self._carry_out(lambda copies: copies.store(write.slots, write.blocks, len(write.queued)))
            event = torch.cuda.Event()
            event.record(stream)
        write.queued.append(event)

    def _gather(self, slots: torch.Tensor, count: int) -> torch.Tensor:
        return self._carry_out(lambda copies: copies.gather(slots, count))

    def _carry_out(self, copy: Callable[[LayerCopies], T]) -> T:
        """Queue a copy; without kernels where they fail."""
        if self._kernels is not None:
            try:
                return copy(self._kernels)
            except Exception as error:  # noqa: BLE001 - see `PlainCopies`
                self.without_kernel(f"{type(error).__name__}: {error}")
        return copy(self._plain)

    def _count(self, blocks: BlockIds) -> None:
        """Of a copy that has been queued."""
        if self._kernels is None:
            self.blocks_without_kernel += len(blocks)

    def without_kernel(self, reason: str) -> None:
        """Make all later copies by `PlainCopies`."""
        if self._kernels is not None:
            self._abandoned = self._kernels
        self._kernels = None
        logger.warning(
            "KV is copied between GPU and DRAM without our kernel from now on, which takes longer: %s", reason
        )

    def load(
        self,
        slots: torch.Tensor,
        blocks: BlockIds,
        source: Source | None = None,
        near: Sequence[Near] = (),
    ) -> int:
        if source is None:
            self._loads.append(self._copy_in(self._load_stream, slots, blocks, near))
            return self._loads_done + len(self._loads) - 1
        if near:
            raise ValueError("a load that is still arriving has no parts in HBM")
        self._follow_engine(self._load_stream, slots)
        every = Blocks(blocks, self._on_device)

        def queue(layer: int) -> None:
            self._copy_layer(slots, every, layer, layer)

        ticket = self._arrive(_StreamedLoad(source, queue))
        self._count(blocks)
        return ticket

    def bring(self, slots: torch.Tensor, blocks: BlockIds) -> int:
        """Copies on the stream of the writes, for which no forward pass waits."""
        self._writes.append(self._copy_in(self._write_stream, slots, blocks).events[-1])
        return self._writes_done + len(self._writes) - 1

    def fill(self, slots: torch.Tensor, blocks: BlockIds, layer: int, place: int) -> int:
        """On the stream of the writes, as ``bring``."""
        stream = self._write_stream
        self._follow_engine(stream, slots)
        with torch.cuda.stream(stream):
            self._copy_layer(slots, Blocks(blocks, self._on_device), layer, place)
            event = torch.cuda.Event()
            event.record(stream)
        self._count(blocks)
        self._writes.append(event)
        return self._writes_done + len(self._writes) - 1

    @property
    def load_bytes_per_second(self) -> float | None:
        return self._rate.bytes_per_second

    def _follow_engine(self, stream: torch.cuda.Stream, slots: torch.Tensor) -> None:
        """Make later work on a stream wait for the passes that may still write to these slots, and for the
        slots themselves."""
        stream.wait_stream(self._forward_stream)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        slots.record_stream(stream)

    def _copy_in(
        self, stream: torch.cuda.Stream, slots: torch.Tensor, blocks: BlockIds, near: Sequence[Near] = ()
    ) -> _Load:
        """Queue the copy of arena blocks to the pool, layer by layer, on a stream."""
        self._follow_engine(stream, slots)
        every, count = Blocks(blocks, self._on_device), len(blocks)
        within = {layer: (parts, far) for layer, parts, far in rest_of(near, count)}
        some: dict[bytes, tuple[Blocks, torch.Tensor]] = {}

        def at(positions: BlockIds) -> tuple[Blocks, torch.Tensor]:
            """These of the blocks, and their slots; layers with the same ones share an upload."""
            key = positions.tobytes()
            if key not in some:
                rows = of_blocks(slots, self._on_device(positions), count)
                some[key] = Blocks(blocks[positions], self._on_device), rows
            return some[key]

        last = self._layout.n_layers - 1
        load = _Load(0, torch.cuda.Event(enable_timing=True), [])
        with torch.cuda.stream(stream):
            load.begun.record(stream)
            for layer in range(self._layout.n_layers):
                parts, far = within.get(layer, ((), None))
                for part in parts:
                    self._copy_within(part, layer, at(part.positions)[1])
                if layer not in within:
                    load.nbytes += self._copy_layer(slots, every, layer, layer)
                elif far is not None:
                    others, rows = at(far)
                    load.nbytes += self._copy_layer(rows, others, layer, layer)
                event = torch.cuda.Event(enable_timing=layer == last)
                event.record(stream)
                load.events.append(event)
        self._count(blocks)
        return load

    def _copy_within(self, part: Near, layer: int, to: torch.Tensor) -> None:
        """Queue the part of a layer that is in HBM."""
        self._carry_out(lambda copies: copies.within(part.place, layer, part.slots, to))

    def _on_device(self, numbers: np.ndarray) -> torch.Tensor:
        """Copied on the current stream. From pinned memory: from any other, the host waits for the stream."""
        dense = np.ascontiguousarray(numbers, np.int64)
        return torch.from_numpy(dense).pin_memory().to(self._device, non_blocking=True)

    def _copy_layer(self, slots: torch.Tensor, blocks: Blocks, layer: int, place: int) -> int:
        """Queue one layer of arena blocks, to the planes of layer ``place``. Returns its bytes."""
        self._carry_out(lambda copies: copies.load(slots, blocks, layer, place))
        return len(blocks) * self._layout.layer_bytes(layer)

    def writes_done(self) -> int:
        self._arrivals.check()
        while self._writes and self._writes[0].query():
            self._writes.popleft()
            self._writes_done += 1
        return self._writes_done

    def follow(self, source: Source) -> int:
        return self._arrive(_StreamedLoad(source, None))

    def into(self, slots: torch.Tensor) -> LayerSink:
        self._follow_engine(self._load_stream, slots)
        blocks = len(slots) // self._layout.block_tokens

        def sink(layer: int, memory: Any, count: int) -> None:
            if count != blocks:
                return  # the batch is thrown away
            rows = torch.from_numpy(np.ascontiguousarray(memory.layers[layer][:blocks]))
            step = max(1, STAGING_BYTES // self._layout.layer_bytes(layer))
            tokens = self._layout.block_tokens
            with torch.cuda.device(self._device), torch.cuda.stream(self._load_stream):
                for start in range(0, blocks, step):
                    staging = rows[start : start + step].pin_memory().to(self._device, non_blocking=True)
                    part = slots[start * tokens : (start + len(staging)) * tokens]
                    scatter_layer(self._planes[layer], self._layout, staging, part)

        return sink

    # -- layers that are still arriving --------------------------------------------------------------

    def _arrive(self, load: _StreamedLoad) -> int:
        """Queue the layers of a load once its source has them."""
        self._loads.append(load)
        self._arrivals.add(load)
        return self._loads_done + len(self._loads) - 1

    def _queue_layer(self, load: _StreamedLoad | _ComputedWrite) -> None:
        """Queue the next layer of a load, which has arrived; report that of a write. In the thread of
        arrivals.
        """
        if isinstance(load, _ComputedWrite):
            load.report()
            return
        layer = len(load.events)
        with torch.cuda.device(self._device), torch.cuda.stream(self._load_stream):
            if load.queue is not None:
                load.queue(layer)
            event = torch.cuda.Event()
            event.record(self._load_stream)
        load.events.append(event)

    def loads_done(self) -> int:
        self._arrivals.check()
        while self._loads and self._has_ended(self._loads[0]):
            load = self._loads.popleft()
            if load.nbytes:  # nothing for a load that was near as a whole, or that waited for the disk
                self._rate.observe(load.nbytes, load.begun.elapsed_time(load.events[-1]) / 1000)
            self._loads_done += 1
        return self._loads_done

    def _has_ended(self, load: _Load) -> bool:
        return len(load.events) == self._layout.n_layers and bool(load.events[-1].query())

    def wait_layer(self, ticket: int, layer: int) -> None:
        newest = ticket - self._loads_done
        stream = torch.cuda.current_stream(self._device)
        for position in range(newest + 1):
            load = self._loads[position]
            streamed = isinstance(load, _StreamedLoad)
            if streamed:
                self._until_queued(load, layer + 1)
            # Other loads are queued as a whole, so that the newest one's layer comes after those before it.
            if streamed or position == newest:
                stream.wait_event(load.events[layer])
            # Once the pass is launched, the blocks may be given to others (`Moves.streams_hold`).
            if streamed and layer == self._layout.n_layers - 1:
                load.events[layer].synchronize()

    def _until_queued(self, load: _Load, layers: int) -> None:
        self._arrivals.until(lambda: len(load.events) >= layers)

    def wait_writes(self, count: int) -> None:
        while self._writes and self._writes_done < count:
            self._writes.popleft().synchronize()
            self._writes_done += 1

    def settle(self) -> None:
        for load in self._loads:
            self._until_queued(load, self._layout.n_layers)
        for write in self._writes:
            if isinstance(write, _ComputedWrite):
                write.synchronize()
        self._load_stream.synchronize()
        self._write_stream.synchronize()
        self.writes_done()
        self.loads_done()

    def close(self) -> None:
        try:
            self.settle()
        finally:
            self._arrivals.close()

    def __repr__(self) -> str:
        return (
            f"CudaMover(loads={self._loads_done}+{len(self._loads)}, "
            f"writes={self._writes_done}+{len(self._writes)})"
        )

"""Copies between the engine's pool and the DRAM arena, in the background, layer by layer.

Loads (DRAM to HBM) go in front of the forward pass: the attention of layer i waits for layer i only
(Symphony section 3.3, layer-wise reads). Among waiting loads the lowest unfinished layer goes first, so that
every request can start early. Writes (HBM to DRAM) go behind, one layer of one write at a time, and yield to
loads after each. Copies run without the interpreter lock.

A *ticket* names an operation; tickets of each direction count up from 0 and complete in that order.

Attention waits at the `LayerGate`, SGLang's layer transfer counter over a mover.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sglang_ext.clock import SystemClock
from sglang_ext.engine.movers.bandwidth import Bandwidth

Slots = Any
_now = SystemClock.monotonic
BlockIds = npt.NDArray[np.int64]


class Source(Protocol):
    """KV that still arrives while it is copied, layer by layer."""

    def decided(self, layer: int) -> bool:
        """Whether a layer has arrived, or will never arrive."""


@dataclass(frozen=True, eq=False)
class Near:
    """One layer of some blocks of a load that is in HBM already.

    place: the layer in whose planes the bytes are. slots: their slots, as the tree keeps slots. positions:
    int64, indices of these blocks in the load. cell: for the owner of the copy; the mover does not read it.
    """

    layer: int
    place: int
    slots: Slots
    positions: BlockIds
    cell: Any = None


def rest_of(near: Sequence[Near], blocks: int) -> Iterator[tuple[int, list[Near], BlockIds | None]]:
    """Yields each layer with near blocks, its near parts, and the positions of its other blocks (None if
    there are none).
    """
    by_layer: defaultdict[int, list[Near]] = defaultdict(list)
    for each in near:
        by_layer[each.layer].append(each)
    for layer, parts in by_layer.items():
        far = np.ones(blocks, dtype=np.bool_)
        for part in parts:
            far[part.positions] = False
        yield layer, parts, (np.flatnonzero(far) if far.any() else None)


def of_blocks(slots: Slots, positions: BlockIds, blocks: int) -> Slots:
    """The slots of the blocks at these positions; ``slots`` has those of ``blocks`` blocks."""
    return slots.reshape(blocks, -1)[positions].reshape(-1)


LayerSink = Callable[[int, Any, int], None]
"""Takes a layer, the ``BlockMemory`` of a staging buffer, and how many leading blocks of it are good."""


Copied = Callable[[int], None]
"""Called with each layer that has been copied."""


class MoverError(RuntimeError):
    """A background copy failed; the tier behind it can no longer be trusted."""


class Mover(Protocol):
    """Contract of the copying side.

    The caller keeps slots and blocks of an operation alive and unchanged (sources) or unread (targets)
    until the operation is complete. ``write`` and ``load`` never block. Every method but ``wait_layer``
    is called by the scheduler thread only.
    """

    streams: bool
    """Whether ``load`` and ``write`` take a source, and ``follow`` and ``into`` work."""
    blocks_without_kernel: int
    """Blocks that went between a GPU and DRAM the slower way, because the kernel for it could not be used."""

    @property
    def load_bytes_per_second(self) -> float | None:
        """The speed of recent loads; ``None`` before the first."""

    def bring(self, slots: Slots, blocks: BlockIds) -> int:
        """Like ``load``, at low priority: no forward pass waits for it. It is counted and completed among the
        writes, behind all loads.
        """

    def write(
        self, slots: Slots, blocks: BlockIds, source: Source | None = None, copied: Copied | None = None
    ) -> int:
        """Copy the tokens at ``slots`` into arena ``blocks``; returns a ticket.

        With a source, a layer is copied once the source has decided it, and `computed` was called; that must
        not depend on a later write. ``copied`` is called for each layer, in any thread.
        """

    def computed(self, layer: int) -> None:
        """The pass under way writes the KV of the layers up to this one, for which the sources of writes
        wait: called in the thread that launches it, behind the launch of that layer.
        """

    def fill(self, slots: Slots, blocks: BlockIds, layer: int, place: int) -> int:
        """Like ``bring``, one layer only: to the tokens at ``slots`` in the planes of layer ``place``."""

    def load(
        self, slots: Slots, blocks: BlockIds, source: Source | None = None, near: Sequence[Near] = ()
    ) -> int:
        """Copy arena ``blocks`` to the tokens at ``slots``; returns a ticket.

        With a source, a layer is copied once the source has decided it, even if the layer never arrived: the
        caller verifies the bytes. Parts in ``near`` are copied within HBM.
        """

    def follow(self, source: Source) -> int:
        """Register a load that other code carries out; returns its ticket."""

    def into(self, slots: Slots) -> LayerSink:
        """A function that copies layers from dense staging buffers to the tokens at ``slots``; callable in
        any thread.
        """

    def writes_done(self) -> int:
        """The number of complete writes: those with tickets below it."""

    def loads_done(self) -> int:
        """The number of complete loads: those with tickets below it."""

    def wait_layer(self, ticket: int, layer: int) -> None:
        """Return when every load up to ``ticket`` has brought local ``layer`` in.

        Raises:
            MoverError: copying has failed, and the layer will not come.
        """

    def wait_writes(self, count: int) -> None:
        """Return when ``count`` writes are complete, counted from the start. Raises MoverError as above."""

    def settle(self) -> None:
        """Return when no copy is under way. Raises MoverError as above."""

    def close(self) -> None:
        """Finish the copies under way and end. Safe to call twice."""


class LayerCopier(Protocol):
    """Copies one local layer of some blocks without the interpreter lock."""

    def plan(self, slots: Slots, blocks: BlockIds) -> Any:
        """Check and prepare a copy. Raises ValueError when a slot or block is out of range."""

    def plan_staging(self, slots: Slots) -> Any:
        """Like ``plan``, for blocks that lie densely in a staging buffer."""

    def scatter_staging(self, plan: Any, layer: int, rows: Any) -> int:
        """A staging buffer to HBM; returns bytes."""

    def gather(self, plan: Any, layer: int) -> int:
        """HBM to DRAM; returns bytes."""

    def scatter(self, plan: Any, layer: int) -> int:
        """DRAM to HBM; returns bytes."""

    def scatter_to(self, plan: Any, layer: int, place: int) -> int:
        """DRAM to HBM, to the planes of layer ``place``; returns bytes."""

    def plan_within(self, source: Slots, target: Slots) -> Any:
        """Check and prepare a copy within HBM. Raises ValueError when a slot is out of range."""

    def move_within(self, plan: Any, place: int, layer: int) -> None:
        """Copy within HBM from the planes of layer ``place`` to those of ``layer``."""


@dataclass
class _NearLayer:
    """A layer of which some blocks are in HBM. within: copies within HBM, each with the layer in whose
    planes its bytes are. rest: the copy of the other blocks from DRAM; None if there are none.
    """

    within: Sequence[tuple[int, Any]]
    rest: Any


@dataclass
class _Operation:
    plan: Any
    next_layer: int = 0
    inwards: bool = False
    """Copies to HBM, though it is queued among the writes."""
    source: Source | None = None
    near: Mapping[int, _NearLayer] = field(default_factory=dict)
    layer: int = 0
    place: int | None = None
    """Of a fill: ``layer`` is copied to the planes of layer ``place``."""
    copied: Copied | None = None

    @property
    def can_go_on(self) -> bool:
        return self.source is None or self.source.decided(self.next_layer)


def plan_near(
    copier: LayerCopier, slots: Slots, blocks: BlockIds, near: Sequence[Near]
) -> dict[int, _NearLayer]:
    """Plan the copies of each layer of which some blocks are in HBM."""
    rows = np.asarray(slots)
    plans: dict[int, _NearLayer] = {}
    rests: dict[bytes, Any] = {}
    for layer, parts, far in rest_of(near, len(blocks)):
        within = [
            (
                part.place,
                copier.plan_within(part.slots, of_blocks(rows, part.positions, len(blocks))),
            )
            for part in parts
        ]
        rest = None
        if far is not None:
            rest = rests.get(far.tobytes())
            if rest is None:
                rest = copier.plan(of_blocks(rows, far, len(blocks)), blocks[far])
                rests[far.tobytes()] = rest
        plans[layer] = _NearLayer(within, rest)
    return plans


_SOURCE_POLL_SECONDS = 0.0005
"""Interval at which sources are polled for their next layer while no other copy is ready."""


class ThreadMover:
    """A mover for pools in host memory: one thread that copies."""

    streams = True
    blocks_without_kernel = 0

    def __init__(self, copier: LayerCopier, n_layers: int, *, name: str = "kv-mover") -> None:
        self._copier = copier
        self._n_layers = n_layers
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._progress = threading.Condition(self._lock)
        self._loads: deque[_Operation] = deque()
        self._writes: deque[_Operation] = deque()
        self._loads_done = 0
        self._writes_done = 0
        self._rate = Bandwidth()
        self._failure: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def write(
        self, slots: Slots, blocks: BlockIds, source: Source | None = None, copied: Copied | None = None
    ) -> int:
        operation = _Operation(self._copier.plan(slots, blocks), source=source, copied=copied)
        return self._submit(self._writes, operation, lambda: self._writes_done)

    def computed(self, layer: int) -> None:
        """The thread asks the sources."""

    def bring(self, slots: Slots, blocks: BlockIds) -> int:
        operation = _Operation(self._copier.plan(slots, blocks), inwards=True)
        return self._submit(self._writes, operation, lambda: self._writes_done)

    @property
    def load_bytes_per_second(self) -> float | None:
        return self._rate.bytes_per_second

    def fill(self, slots: Slots, blocks: BlockIds, layer: int, place: int) -> int:
        plan = self._copier.plan(slots, blocks)
        operation = _Operation(plan, self._n_layers - 1, inwards=True, layer=layer, place=place)
        return self._submit(self._writes, operation, lambda: self._writes_done)

    def load(
        self, slots: Slots, blocks: BlockIds, source: Source | None = None, near: Sequence[Near] = ()
    ) -> int:
        operation = _Operation(self._copier.plan(slots, blocks), source=source)
        if near:
            operation.near = plan_near(self._copier, slots, blocks, near)
        return self._submit(self._loads, operation, lambda: self._loads_done)

    def follow(self, source: Source) -> int:
        operation = _Operation(None, source=source)
        return self._submit(self._loads, operation, lambda: self._loads_done)

    def into(self, slots: Slots) -> LayerSink:
        plan = self._copier.plan_staging(slots)

        def sink(layer: int, memory: Any, blocks: int) -> None:
            if blocks == plan.blocks:  # or the batch is thrown away
                self._copier.scatter_staging(plan, layer, memory.layers[layer])

        return sink

    def _submit(self, queue: deque[_Operation], operation: _Operation, done: Callable[[], int]) -> int:
        with self._lock:
            self._raise_failure()
            if self._closing:
                raise MoverError("the mover is closed")
            queue.append(operation)
            self._work.notify()
            return done() + len(queue) - 1

    def writes_done(self) -> int:
        with self._lock:
            self._raise_failure()
            return self._writes_done

    def loads_done(self) -> int:
        with self._lock:
            self._raise_failure()
            return self._loads_done

    def wait_layer(self, ticket: int, layer: int) -> None:
        # Without the lock: a stale answer only means that the lock is taken after all.
        if self._loads_done > ticket:
            return

        def has_layer() -> bool:
            loads = itertools.islice(self._loads, ticket - self._loads_done + 1)
            return self._failure is not None or all(load.next_layer > layer for load in loads)

        with self._lock:
            self._progress.wait_for(has_layer)
            self._raise_failure()

    def wait_writes(self, count: int) -> None:
        with self._lock:
            self._progress.wait_for(lambda: self._failure is not None or self._writes_done >= count)
            self._raise_failure()

    def settle(self) -> None:
        with self._lock:
            self._progress.wait_for(lambda: self._failure is not None or not (self._loads or self._writes))
            self._raise_failure()

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._work.notify()
        self._thread.join()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise MoverError("copying between HBM and DRAM failed") from self._failure

    def _run(self) -> None:
        try:
            while (step := self._next_step()) is not None:
                copy, operation = step
                if operation.plan is not None:
                    self._copy(copy, operation)
                if operation.copied is not None:
                    operation.copied(operation.next_layer)
                self._advance(operation)
        except BaseException as error:  # noqa: BLE001 - later calls raise it as a MoverError
            with self._lock:
                self._failure = error
                self._progress.notify_all()

    def _copy(self, copy: Callable[[Any, int], int], operation: _Operation) -> None:
        """Copy the next layer of an operation."""
        layer, plan = operation.next_layer, operation.plan
        near = operation.near.get(layer)
        if near is not None:
            for place, within in near.within:
                self._copier.move_within(within, place, layer)
            plan = near.rest
        begun = _now()
        if operation.place is not None:
            nbytes = self._copier.scatter_to(plan, operation.layer, operation.place)
        else:
            nbytes = 0 if plan is None else copy(plan, layer)
        if copy == self._copier.scatter and nbytes:
            self._rate.observe(nbytes, _now() - begun)

    def _next_step(self) -> tuple[Callable[[Any, int], int], _Operation] | None:
        """The next layer to copy; waits for one. ``None`` when closing and nothing is left."""
        with self._lock:
            while True:
                ready = [load for load in self._loads if load.next_layer < self._n_layers and load.can_go_on]
                if ready:
                    return self._copier.scatter, lowest_layer_first(ready)
                if self._writes and self._writes[0].can_go_on:
                    write = self._writes[0]
                    return (self._copier.scatter if write.inwards else self._copier.gather), write
                if self._closing and not (self._loads or self._writes):
                    return None
                self._work.wait(_SOURCE_POLL_SECONDS if self._loads or self._writes else None)

    def _advance(self, operation: _Operation) -> None:
        last = self._n_layers
        with self._lock:
            operation.next_layer += 1
            while self._loads and self._loads[0].next_layer == last:
                self._loads.popleft()
                self._loads_done += 1
            while self._writes and self._writes[0].next_layer == last:
                self._writes.popleft()
                self._writes_done += 1
            self._progress.notify_all()

    def __repr__(self) -> str:
        return (
            f"ThreadMover(loads={self._loads_done}+{len(self._loads)}, "
            f"writes={self._writes_done}+{len(self._writes)}, failed={self._failure is not None})"
        )


def lowest_layer_first(loads: Sequence[_Operation]) -> _Operation:
    """The load whose next layer is lowest; of equals, the oldest. Complete ones at the front are gone."""
    return min(loads, key=lambda operation: operation.next_layer)


NOTHING_TO_WAIT_FOR = -1


class LayerGate:
    """Registered with the KV pool, which calls ``wait_until`` before it hands out a layer's buffers.

    SGLang carries a batch's ``hicache_consumer_index`` to the forward pass and calls ``set_consumer`` with
    it: here, the ticket of the newest load that this batch may depend on. The forward pass of layer i then
    waits for layer i of the loads up to that ticket, and for no later load.

    Args:
        num_layers: of this rank. Before it replays a prefill as one CUDA graph, which calls no
            ``wait_until``, SGLang waits for the last of them.
    """

    def __init__(self, mover: Mover, num_layers: int) -> None:
        self._mover = mover
        self.num_layers = num_layers
        self._ticket = NOTHING_TO_WAIT_FOR

    def set_consumer(self, ticket: int) -> None:
        self._ticket = ticket

    @property
    def consumer_index(self) -> int:
        """The ticket, negative if the batch waits for nothing. SGLang reads it before it replays a prefill as
        one CUDA graph."""
        return self._ticket

    def wait_until(self, layer: int) -> None:
        """Return when ``layer`` may be read. Layers count from the rank's first."""
        if self._ticket != NOTHING_TO_WAIT_FOR:
            self._mover.wait_layer(self._ticket, layer)

    def reset(self) -> None:
        self._ticket = NOTHING_TO_WAIT_FOR

    def behind(self, layers: int) -> LaterLayers:
        """For a pool whose layers come after the first ``layers`` of this gate."""
        return LaterLayers(self, layers)


@dataclass(frozen=True)
class LaterLayers:
    """Registered with the KV pool of a draft model. SGLang sets the ticket at the gate of the model."""

    gate: LayerGate
    first: int

    @property
    def consumer_index(self) -> int:
        return self.gate.consumer_index

    def wait_until(self, layer: int) -> None:
        """The same as the gate's; layers count from the pool's first."""
        self.gate.wait_until(self.first + layer)

"""The real cache, tiers and CUDA mover over fakes of torch.cuda, under transcriptions of SGLang's loops.

Real are SGLang's pool, allocator (of pages too), table of requests, requests and batches
(`engine_scheduler`), all of our cache, and `CudaMover`. A pass is recorded layer by layer on the forward
stream: it reads the slots of prefixes and writes those of new tokens. Passes that decode are replayed graphs:
they call no Python of the pool, so that nothing waits for a layer in them.

The loops differ in how the scheduler's stream follows a pass (`Scheduler._apply_war_barrier`):

- ``normal``: passes run on the scheduler's own stream, and its results are read at once;
- ``overlap``: as soon as a pass is launched, the scheduler's stream waits for it;
- ``graphs``: after a graph that decodes, it waits only until the pass has read the memory that the scheduler
  shares with it (`shared_read_done_event`): the KV of the pass is written later;
- ``early``: so it does after each pass, as prefills publish that event too (`SharedReadEnds.PRE_REPLAY`);
- ``prefill``: `event_loop_overlap_disagg_prefill` waits for the pass once the result before it is processed;
  requests end with their prompts;
- ``decode``: as ``graphs``; slots are filled by a NIC, behind the product's own fence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_pools import Oracle, PoolKind, Pools
from engine_scheduler import Computed, Settings, SimulatedScheduler, token_at
from engine_simulation import Rank, Scenario, Traffic
from fake_cuda import DEVICE, DeviceTensor, FakeCuda, FakeEvent, FakeStream
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.allocator import paged
from stream_trace import Access, join

from sglang_ext.engine.commands import RankCommandQueue
from sglang_ext.engine.forward_fence import ForwardFence
from sglang_ext.engine.movers import cuda_mover, row_copies
from sglang_ext.engine.movers.arrivals import Arrivals
from sglang_ext.engine.movers.copies import Copies
from sglang_ext.engine.movers.mover import BlockIds, Mover
from sglang_ext.engine.ranks import Least
from sglang_ext.patches.seams import current
from sglang_ext.tiered_store.dram.arena import DramArena

LAYERS, HEADS, WIDTH = 3, 2, 4
BLOCK = 4
PLAIN = PoolKind(layers=LAYERS)
FAST, SLOW = 0.7, 0.05
"""Shares of queries that find a copy complete."""


def bytes_in(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a device tensor, unseen by the trace."""
    return tensor.inner if isinstance(tensor, DeviceTensor) else tensor


class DevicePools(Pools):
    """SGLang's pool, allocator and table on the fake device."""

    device = DEVICE

    def __init__(self, kind: PoolKind, tokens: int, **sizes: int) -> None:
        super().__init__(kind, tokens, **sizes)
        for plane in (plane for layer in self.tensors for plane in layer):
            of_rows(plane)
        of_rows(self.requests.req_to_token)
        if kind.page > 1:
            self.allocator.use_triton_kernels = True
        self.oracle = Oracle([[bytes_in(plane) for plane in layer] for layer in self.tensors])

    def access(self, layer: int, slots: np.ndarray) -> list[Access]:
        """One layer of some slots, as a pass reads or writes it."""
        found = []
        for plane in self.tensors[layer]:
            memory = plane.lives.memory
            row = plane.inner.stride(0) * plane.inner.element_size()
            first = plane.inner.data_ptr() - memory.address
            found.append((memory, memory.cells[first + slots * row].astype(np.int64)))
        return found


class PageKernel:
    """SGLang's kernel that takes pages for a batch: one launch, where its form in torch would wait for the
    device at times."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, grid: Any) -> PageKernel:
        return self

    def __call__(self, *args: Any) -> None:
        *tensors, _, page = args
        inner = [bytes_in(each) for each in tensors]
        *asked, free, out = inner

        def act() -> None:
            if self._name == "alloc_extend":
                paged.alloc_extend_naive(*asked, free, out, page, "cpu")
            else:
                taken = int(((asked[0] - 1) % page == 0).sum())
                paged.alloc_decode_naive(*asked, free, out, page, taken)

        cuda = tensors[-1].lives.cuda
        reads = [cuda.access(each) for each in tensors[:-1] if each.numel()]
        cuda.launch(self._name, act, reads, [cuda.access(tensors[-1])])


def of_rows(plane: DeviceTensor) -> None:
    """Let each row of memory be a cell."""
    row = plane.inner.stride(0) * plane.inner.element_size()
    memory = plane.lives.memory
    if memory.cells is None:
        memory.cells = np.repeat(np.arange(memory.nbytes // row, dtype=np.int32), row)
        memory.last_write.clear()


class PinnedArena:
    """The arena, as `cudaHostRegister` would have left it."""

    pinned = True

    def __init__(self, arena: DramArena, cuda: FakeCuda) -> None:
        self._arena = arena
        layout = arena.layout
        layer = np.zeros(arena.block_bytes, np.int32)
        for number in range(layout.n_layers):
            layer[layout.layer_offsets[number] : layout.layer_offsets[number + 1]] = number
        blocks = np.arange(arena.n_blocks, dtype=np.int32)[:, None] * layout.n_layers
        self.memory = cuda.register(
            torch.from_numpy(arena.blocks), "arena", (blocks + layer).ravel(), pinned=True
        )

    def access(self, blocks: BlockIds) -> Access:
        layers = self._arena.layout.n_layers
        return self.memory, (np.asarray(blocks)[:, None] * layers + np.arange(layers)).ravel()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._arena, name)


class ReadOnceWritten(Copies):
    """The disk: as soon as a write is known to be complete, the host reads the blocks."""

    cuda: FakeCuda
    arena: PinnedArena

    def write(self, slots: Any, blocks: BlockIds, done: Callable[[], None]) -> None:
        def written() -> None:
            done()
            trace = self.cuda.trace
            trace.run(trace.host, "write to disk", reads=[self.arena.access(blocks)])

        super().write(slots, blocks, written)


@dataclass(frozen=True)
class Loop:
    """One of SGLang's scheduling loops. See the module's docstring."""

    name: str
    overlap: bool = True
    graphs: bool = False
    early: bool = False
    deferred: bool = False
    nic: bool = False

    def __str__(self) -> str:
        return self.name


NORMAL = Loop("normal", overlap=False)
OVERLAP = Loop("overlap")
GRAPHS = Loop("graphs", graphs=True)
EARLY = Loop("early", graphs=True, early=True)
PREFILL = Loop("prefill", deferred=True)
DECODE = Loop("decode", graphs=True, nic=True)
LOOPS = (NORMAL, OVERLAP, GRAPHS, EARLY, PREFILL, DECODE)


class StreamScheduler(SimulatedScheduler):
    """A loop that launches passes on a stream. ``cuda`` and ``loop`` are set by `stream_rank`."""

    cuda: FakeCuda
    loop: Loop
    forward: FakeStream
    fence_class: Any = ForwardFence

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._done: deque[FakeEvent] = deque()
        self._barrier_pending = False
        self._recorded: deque[Any] = deque(maxlen=2)
        """`record_batch_in_overlap`: tensors of the scheduler's stream that passes use stay taken."""
        self._nic = self.cuda.trace.timeline("nic")
        self._transfer = self.cuda.trace.timeline("transfer thread")
        self._arriving: list[np.ndarray] = []

    def submit(self, tokens: list[int], *, new_tokens: int, **about: Any) -> Any:
        return super().submit(tokens, new_tokens=1 if self.loop.deferred else new_tokens, **about)

    def step(self) -> None:
        super().step()
        if self._barrier_pending:
            self._follow_pass()

    def flush(self) -> bool:
        if self.idle:  # SGLang's decode is idle only when hand-overs have ended too
            self._free_arrived()
        return super().flush()

    def _forward(self, batch: ScheduleBatch) -> list[int]:
        if self.loop.nic:
            self._receive()
        scheduler = self.cuda.default
        stream = self.forward if self.loop.overlap else scheduler
        if self.loop.overlap:
            self._recorded.append((batch, dict(vars(batch))))
            stream.wait_stream(scheduler)
        with torch.cuda.stream(stream):
            if self.gate is not None:
                self.gate.set_consumer(batch.hicache_consumer_index)
            work = self._rows_of(batch)
            self._before_layers(batch, work)
            self.cuda.launch("pass, inputs", lambda: None, self._inputs(work))
            read_done = torch.cuda.Event()
            read_done.record()
            for layer in range(self._layers()):
                if batch.forward_mode.is_extend():  # a graph is replayed without Python
                    self._read(layer)
                self._layer(work, layer)
            done = torch.cuda.Event()
            done.record()
        self._done.append(done)
        self._barrier_pending = self.loop.deferred
        if self.loop.early or (self.loop.graphs and batch.forward_mode.is_decode()):
            scheduler.wait_event(read_done)
        elif self.loop.overlap and not self.loop.deferred:
            self._follow_pass()
        return [token_at(req, end) for req, end in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True)]

    def _inputs(self, work: Sequence[Computed]) -> list[Access]:
        """The accesses of a pass before its layers."""
        table = self.pools.requests.req_to_token
        return [self.cuda.access(table[each.req.kv.req_pool_idx]) for each in work]

    def _before_layers(self, batch: ScheduleBatch, work: Sequence[Computed]) -> None:
        """The runner copies its own inputs."""

    def _layers(self) -> int:
        return self.pools.oracle.layers

    def _read(self, layer: int) -> None:
        self.pools.read(layer)

    def _follow_pass(self) -> None:
        self.cuda.default.wait_stream(self.forward)
        self._barrier_pending = False

    def _layer(self, work: Sequence[Computed], layer: int) -> None:
        oracle = self.pools.oracle

        def attend() -> None:
            for each in work:
                what = f"prefix of {each.req.rid} in forward"
                oracle.compare(each.row[: each.start], each.chain[: each.start], layer, what)
                oracle.write(each.row[each.start :], each.chain[each.start :], layer)

        access = self.pools.access
        reads = [part for e in work for part in access(layer, e.row[: e.start])]
        writes = [part for e in work for part in access(layer, e.row[e.start :])]
        self.cuda.launch(f"pass, layer {layer}", attend, reads, writes)

    def _rows_of(self, batch: ScheduleBatch) -> list[Computed]:
        """As the simulation's; the table is looked at unseen, since only the device reads it."""
        table = bytes_in(self.pools.requests.req_to_token)
        work: list[Computed] = []
        for i, req in enumerate(batch.reqs):
            end = int(batch.seq_lens_cpu[i])
            if batch.forward_mode.is_extend() and req not in (batch.decoding_reqs or ()):
                tokens, start = req.get_fill_ids(), current.prefix_tokens(req)
            else:
                tokens, start = [*req.origin_input_ids, *req.output_ids], end - 1
                if len(tokens) < end:  # with overlap, only the model has the newest token
                    tokens.append(token_at(req, start))
            chain = self._chain(req, tokens[:end], start)
            row = table[req.kv.req_pool_idx, :end].numpy().astype(np.int64)
            work.append(Computed(req, row, chain, start))
        return work

    def _process(self, batch: ScheduleBatch, tokens: list[int]) -> None:
        # SGLang waits for the result of each pass: `copy_done.synchronize()`.
        self.cuda.trace.wait(self._done.popleft().clock, "scheduler.py:result")
        super()._process(batch, tokens)

    def _receive(self) -> None:
        """Slots are allocated for a hand-over, and a NIC fills them once the fence has passed."""
        trace = self.cuda.trace
        self._free_arrived()
        some = max(2, self.pools.kind.page)
        slots = self.pools.allocator.alloc(some) if self.pools.allocator.available_size() > 40 else None
        if slots is None:
            return
        row = bytes_in(slots).numpy().copy()
        passed = self.fence_class(torch.cuda, (self.forward,))()
        self._transfer = trace.timeline("transfer thread", [trace.host])
        host, trace.host = trace.host, self._transfer
        try:
            while not passed():
                pass
            nic = trace.timeline("nic", [trace.host])
            parts = [p for layer in range(LAYERS) for p in self.pools.access(layer, row)]
            trace.run(nic, "write by a peer", writes=parts)
        finally:
            trace.host = host
        # The transfer thread reports that the KV is there.
        trace.wait(nic.clock, "scheduler.py:hand-over")
        self._arriving.append(row)

    def _free_arrived(self) -> None:
        for slots in self._arriving:
            self.pools.allocator.free_segment(torch.tensor(slots, device=DEVICE), start_pos=0)
        self._arriving = []


class StreamRank(Rank):
    """A rank whose invariants are looked at unseen by the trace."""

    def check(self) -> None:
        pass

    def _numbers(self, places: Any) -> list[int]:
        found: list[int] = np.asarray(bytes_in(places)).tolist()
        return found


@contextmanager
def stream_rank(
    loop: Loop,
    *,
    seed: int = 0,
    pace: float = 0.3,
    module: Any = cuda_mover,
    **about: Any,
) -> Iterator[tuple[StreamRank, FakeCuda]]:
    """A rank on the fake device. module: with the `CudaMover` under test. about: see `rank_on`."""
    cuda = FakeCuda(seed, pace)
    with on_device(cuda, module), page_kernels(), cuda.installed():
        rank = rank_on(cuda, loop, module=module, **about)
        yield rank, cuda
        rank.close()


def rank_on(
    cuda: FakeCuda,
    loop: Loop,
    *,
    module: Any = cuda_mover,
    fence_class: Any = ForwardFence,
    kind: PoolKind = PLAIN,
    make_scheduler: type[StreamScheduler] = StreamScheduler,
    forward_name: str = "forward",
    least: Least | None = None,
    commands: RankCommandQueue | None = None,
    **about: Any,
) -> StreamRank:
    """A rank of a device that stands for torch.cuda. about: fields of `Scenario`."""
    forward = cuda.stream(name=forward_name)
    kept: dict[str, Any] = {}

    def mover(pools: Pools, arena: DramArena) -> Mover:
        pinned = PinnedArena(arena, cuda)
        kept["arena"] = pinned
        made: Mover = module.CudaMover(pools.tensors, pinned, forward)
        return made

    names = {"cuda": cuda, "loop": loop, "forward": forward, "fence_class": fence_class}
    scheduler = type("Scheduler", (make_scheduler,), names)
    copies = type("Disk", (ReadOnceWritten,), {"cuda": cuda})
    scenario = Scenario(
        loop.name,
        kind=kind,
        block=max(BLOCK, kind.page),
        settings=Settings(overlap=loop.overlap, chunk=24, new_token_ratio=0.05),
        make_scheduler=scheduler,
        make_pools=DevicePools,
        make_mover=mover,
    )
    scenario = replace(
        scenario, **{"hbm_tokens": 130, "dram_blocks": 150, "memory": 30, "tenants": False, **about}
    )
    rank = StreamRank(scenario, copies_class=copies, least=least, commands=commands)
    copies.arena = kept["arena"]
    cuda.trace.synchronizations.clear()
    cuda.launches.clear()
    return rank


@contextmanager
def page_kernels() -> Iterator[None]:
    """Have SGLang's allocator of pages launch its kernels on the fake device."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("alloc_extend", "alloc_decode"):
            patch.setattr(paged, f"{name}_kernel", PageKernel(name))
        yield


@contextmanager
def on_device(cuda: FakeCuda, module: Any, *, kernel: bool = True) -> Iterator[None]:
    """Have the mover of ``module`` call the fake's runtime and kernel. kernel: whether it can be compiled."""

    def no_launcher() -> Any:
        raise RuntimeError("the kernel does not compile")

    thread = cuda.trace.timeline("kv-mover", [cuda.trace.host])

    class Looked(Arrivals):
        """Without its thread: a waiting caller runs its work, on a timeline of its own."""

        def add(self, load: Any) -> None:
            self._loads.append(load)

        def until(self, condition: Callable[[], bool]) -> None:
            trace = cuda.trace
            while not condition():
                join(thread.clock, trace.host.clock)
                for load in self._loads:
                    if hasattr(load.source, "bring"):
                        load.source.bring()
                host, trace.host = trace.host, thread
                try:
                    if not self.look():
                        self._ask_until_copied()
                finally:
                    trace.host = host
            join(trace.host.clock, thread.clock)

        def _ask_until_copied(self) -> None:
            """Of writes of computed layers, the thread asks their events again and again."""
            for load in self._loads:
                for event in getattr(load, "queued", [])[len(load.events) :]:
                    event.synchronize()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Arrivals", Looked)
        patch.setattr(module, "CudaRuntime", cuda.runtime)
        patch.setattr(row_copies, "launcher", cuda.launcher if kernel else no_launcher)
        yield


def serve(rank: StreamRank, seed: int, steps: int) -> Traffic:
    """Traffic for so many passes of the loop."""
    traffic = Traffic(rank.scenario, seed, rank.scenario.stretch)
    for _ in range(steps):
        traffic.act(rank.scheduler)
        rank.scheduler.step()
    return traffic

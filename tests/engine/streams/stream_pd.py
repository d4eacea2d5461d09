"""Peers of the stream checker: the transfer thread, adapters that read and write slots, and hand-overs' ends.

The event loop of the transfer thread is turned by hand, between passes, on a timeline of its own. Its
work comes after all that its caller had seen, and the scheduler comes after all that the thread had seen
when it rings.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import DEVICE, FakeCuda, unseen
from stream_drill import LAYERS, SLOTS, Drill, WrongBytesError
from stream_engine import BLOCK, HEADS, WIDTH
from stream_trace import Access, Clock, join

from sglang_ext.clock import SystemClock
from sglang_ext.disagg.handover import Event
from sglang_ext.disagg.messages import Offer
from sglang_ext.engine import forward_fence
from sglang_ext.engine.movers import gpu_memory
from sglang_ext.engine.pd import granting, pushing, reading
from sglang_ext.engine.pd.landing import Landing, Wanted
from sglang_ext.engine.pd.messages import Ready, Return, Returned, ReturnEnd
from sglang_ext.engine.pd.receiving_handover import ReceivingHandover
from sglang_ext.engine.pd.returns import reservations, return_receiver, return_sender
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.wire import pack_ids, unpack_ids


class _Loop(asyncio.SelectorEventLoop):
    """The event loop of a transfer thread, which comes after the callers of its calls."""

    def __init__(self, of: Wire) -> None:
        super().__init__()
        self._wire = of

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
        self._wire.follow_caller()
        return self.call_soon(callback, *args, context=context)


class Wire:
    """The transfer thread, and adapters that it has read and write."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._trace = cuda.trace
        self.loop = _Loop(self)
        self.thread = self._trace.timeline("transfer thread")
        self._rung: Clock = {}
        self._watched: dict[Any, tuple[Callable[[], Any], Any, Clock]] = {}

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """From the scheduler, or from the thread itself."""
        self.follow_caller()
        return self.loop.create_task(work)

    def follow_caller(self) -> None:
        """Order the thread's next work after its caller's work until now."""
        join(self.thread.clock, self._trace.host.clock)

    def watch(self, key: Any, look: Callable[[], Any]) -> None:
        """Note when the thread changes what ``look`` returns, of something that schedulers look at."""
        self._watched[key] = look, look(), {}

    def seen(self, key: Any) -> None:
        """A scheduler has looked: it comes after the change that it has found."""
        look, found, clock = self._watched[key]
        if look() == found:
            join(self._trace.host.clock, clock)

    def post(self, call: Callable[..., Any], *args: Any) -> None:
        """As the loop's `call_soon_threadsafe`, from the scheduler."""
        self.loop.call_soon_threadsafe(call, *args)

    def ring(self) -> None:
        """The scheduler may look at results."""
        join(self._rung, self.thread.clock)

    def heard(self) -> bool:
        """Whether it was rung since the scheduler asked last, which then is after it."""
        rung, self._rung = self._rung, {}
        join(self._trace.host.clock, rung)
        return bool(rung)

    def turn(self, times: int = 2) -> None:
        """Let the thread run for a while."""
        host, self._trace.host = self._trace.host, self.thread
        try:
            for _ in range(times):
                self.loop.call_soon(self.loop.stop)
                self.loop.run_forever()
                self._note_changes()
        finally:
            self._trace.host = host

    def _note_changes(self) -> None:
        for key, (look, found, _) in self._watched.items():
            now = look()
            if now != found:
                self._watched[key] = look, now, dict(self.thread.clock)

    def move(
        self,
        name: str,
        *,
        reads: Sequence[Access] = (),
        writes: Sequence[Access] = (),
        action: Callable[[], None] | None = None,
    ) -> None:
        """An adapter moves bytes on the thread's behalf, which waits for the end."""
        nic = self._trace.timeline("nic", [self.thread])
        self._trace.run(nic, name, reads=reads, writes=writes, action=action and unseen(action))
        join(self.thread.clock, nic.clock)

    def cancel(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.turn()

    def close(self) -> None:
        self.cancel()
        self.loop.close()


@contextmanager
def wire(cuda: FakeCuda) -> Iterator[Wire]:
    """A wire whose thread looks at fences in each of its turns, whatever the time."""
    made = Wire(cuda)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_fence, "POLL_SECONDS", 0)
        try:
            yield made
        finally:
            made.close()


class ReturningAgent:
    """The part of decode's agent that a `ReturnSender` uses. read: has an adapter read pages of a message. A
    peer discards bytes that it has read under a lease that was withdrawn: that is no read at all here.
    """

    def __init__(self, of: Wire, read: Callable[[Return, Any], None]) -> None:
        self._read = read
        self._leases: dict[int, Any] = {}
        self._numbers = itertools.count()
        pools = {HBM_POOL: SimpleNamespace(blocks=1 << 30, block_bytes=1)}
        self.endpoint = SimpleNamespace(
            config=SimpleNamespace(instance="decode"),
            pools=pools,
            address="decode",
            publish=self._publish,
            withdraw=lambda pool, lease: self._leases.pop(lease, None),
        )
        self.config = SimpleNamespace(local=SimpleNamespace(rank=0, ranks=1))
        self.weights: Any = None
        self.calls: Counter[Any] = Counter()
        self.alarm = of
        self.start = of.start

    def _publish(self, pool: str, name: str, pages: Any, seconds: float, epoch: bytes) -> Any:
        lease = next(self._numbers)
        self._leases[lease] = np.array(pages)
        return SimpleNamespace(lease=lease)

    def peer(self, address: str) -> Any:
        return SimpleNamespace(ranks=[SimpleNamespace(epoch=b"")], give_back=self._give_back)

    async def _give_back(self, message: Return, seconds: float) -> Returned:
        (offer,) = message.offers
        if offer.lease not in self._leases:
            return Returned(0, ReturnEnd.UNREAD)
        self._read(message, self._leases[offer.lease])
        return Returned(1)


ROWS = SimpleNamespace(write=lambda row, metadata: None)
PAGES = np.arange(30, 30 + 3 * BLOCK)
"""Of the pools of both processes, whose pages are single slots."""
KV = 10.0
"""The stamp of KV that prefill has computed."""
PARTS = {
    "engine/pd/reading.py": reading,
    "engine/pd/granting.py": granting,
    "engine/pd/pushing.py": pushing,
    "engine/pd/returns/reservations.py": reservations,
    "engine/pd/returns/return_sender.py": return_sender,
    "engine/pd/returns/return_receiver.py": return_receiver,
    "engine/movers/gpu_memory.py": gpu_memory,
}


class PdDrill(Drill):
    """Hand-overs and returns between a decode and a prefill process, each with passes beside them.

    parts: modules in place of `PARTS`, by path. computed: whether prefill offers KV that is computed; SGLang
    waits for the result of the pass.
    """

    def __init__(
        self, pace: float, parts: Mapping[str, Any] | None = None, *, computed: bool = True, **about: Any
    ) -> None:
        super().__init__(pace, **about)
        self._parts = {**PARTS, **(parts or {})}
        self._computed = computed

    def part(self, name: str) -> Any:
        """A module under test, by the end of its path."""
        return next(each for path, each in self._parts.items() if path.endswith(f"/{name}.py"))

    def _run(self) -> None:
        cuda = self.cuda
        self.theirs = [[torch.zeros(SLOTS, HEADS, WIDTH) for _ in "kv"] for _ in range(LAYERS)]
        self.their_planes = [
            [
                cuda.rows(plane, f"prefill's {name} of layer {at}")
                for name, plane in zip("KV", layer, strict=True)
            ]
            for at, layer in enumerate(self.theirs)
        ]
        self.their_host = cuda.trace.timeline("prefill's host", [cuda.trace.host])
        self.their_forward = cuda.stream(name="prefill's forward")
        self.fence = self._fence_class(torch.cuda, (self.forward,))
        self.gpu = self.part("gpu_memory").GpuMemory(0)
        self.gpu._launch = cuda.launcher()
        with wire(cuda) as self.wire:
            for by_gpu in (True, False):
                self._pull(by_gpu)
            self._push()
            self._take_back()
            self._give_back()
            self._push_by_layer()

    # -- the processes ---------------------------------------------------------------------------

    @contextmanager
    def at_prefill(self) -> Iterator[None]:
        """Its scheduler's thread."""
        trace = self.cuda.trace
        host, trace.host = trace.host, self.their_host
        try:
            yield
        finally:
            trace.host = host

    def their_pass(self, stamp: float, before: Callable[[int], None] = lambda layer: None) -> Clock:
        """Prefill's pass stores to its slots; when it has ended. before: called before each layer."""
        rows = PAGES.tolist()
        with self.at_prefill():
            for layer in range(LAYERS):
                before(layer)

                def store(layer: int = layer) -> None:
                    for at, plane in enumerate(self.theirs[layer]):
                        plane[rows] = stamped(stamp, layer, at, len(rows))

                writes = [(plane.lives.memory, PAGES) for plane in self.their_planes[layer]]
                self.cuda.launch(f"prefill's pass, layer {layer}", store, (), writes, self.their_forward)
            done = self.their_forward.record_event()
        return done.clock

    def offer(self) -> Offer:
        """Prefill has computed a request, and decode gets its offer."""
        ended = self.their_pass(KV)
        if self._computed:
            join(self.their_host.clock, ended)
        join(self.wire.thread.clock, self.their_host.clock)
        blocks, generations = pack_ids(PAGES), pack_ids(np.zeros(len(PAGES), np.int64))
        return Offer("prefill", 0, b"", HBM_POOL, "7", 1, blocks, generations, 1000)

    def completed(self) -> None:
        """Prefill hears that its pages were read, and uses them for others."""
        join(self.their_host.clock, self.wire.thread.clock)
        self.their_pass(-1.0)

    def under_way(self) -> None:
        """A graph of a request that has ended, which still stores to its slots."""
        self.compute(PAGES.tolist(), -1.0)

    def arrived(self, over: Callable[[], object]) -> None:
        """The scheduler hears that it is over, and passes read the KV."""
        for _ in range(80):
            if over():
                break
            self.wire.turn()
        assert over(), "it does not end"
        join(self.cuda.trace.host.clock, self.wire.thread.clock)
        self.attend(PAGES.tolist(), KV)
        self.forward.synchronize()

    # -- bytes -----------------------------------------------------------------------------------

    def copy_here(self, *, by_gpu: bool = False) -> None:
        """Prefill's pages to decode's slots: by decode's GPU, or by an adapter, whose end is waited for."""
        both = (chain.from_iterable(each) for each in (self.their_planes, self.planes))
        sides = list(zip(*both, strict=True))
        if by_gpu:
            size = HEADS * WIDTH * 4
            ranges = [
                (theirs.data_ptr() + page * size, ours.data_ptr() + page * size, size)
                for theirs, ours in sides
                for page in PAGES.tolist()
            ]
            self.gpu.copy(np.array(ranges))
            return
        rows = PAGES.tolist()

        def move() -> None:
            for theirs, ours in sides:
                ours.inner[rows] = theirs.inner[rows]

        self.wire.move(
            "write by a peer",
            reads=[(theirs.lives.memory, PAGES) for theirs, _ in sides],
            writes=[(ours.lives.memory, PAGES) for _, ours in sides],
            action=move,
        )

    def instance(self, *, by_gpu: bool = False) -> Any:
        """Of prefill, as readers have it."""

        async def finish(name: str, seconds: float) -> None:
            self.copy_here(by_gpu=by_gpu)
            self.completed()

        async def drop(name: str) -> None:
            return

        return SimpleNamespace(
            transfer=lambda *_: None, keeping=lambda *_: nullcontext(), finish=finish, drop=drop
        )

    # -- the five ways ---------------------------------------------------------------------------

    def handed_over(self, by: Any, peer: Any, ready: Sequence[Ready], *, reads: bool) -> None:
        handover = ReceivingHandover("prefill", 7, reads)
        handover.moved(Event.JOINED)
        task = self.wire.start(by.receive(handover, peer, ready))
        self.wire.turn()
        self.under_way()
        assert handover.allocated(Wanted(PAGES, 0, 0, self.fence()))
        self.wire.start(set_soon(handover.asked))
        self.arrived(task.done)
        task.result()

    def _pull(self, by_gpu: bool) -> None:
        peer = SimpleNamespace(
            instance=self.instance(by_gpu=by_gpu), gives=lambda *_: True, done=lambda *_: None
        )
        by = self.part("reading").Reading(Landing(ROWS, None, {HBM_POOL: 1}), b"", SystemClock())
        self.handed_over(by, peer, [Ready((self.offer(),), b"")], reads=True)

    def _push(self) -> None:
        module = self.part("granting")

        async def revoke(name: str) -> None:
            return

        claims = module.Claims(revoke)

        async def push(number: int, epoch: bytes, control: str, blocks: bytes, *_: Any) -> list[Ready]:
            await claims.claim(HBM_POOL, unpack_ids(blocks), f"{number:x}")
            self.copy_here()
            self.completed()
            await claims.filled(HBM_POOL, PAGES, f"{number:x}")
            return [Ready((), b"")]

        self.offer()
        peer = SimpleNamespace(gone=False, writers=1, push=push, ranks=[0])
        by = module.Granting(Landing(ROWS, None, {HBM_POOL: 1}), b"", claims, "decode")
        self.handed_over(by, peer, (), reads=False)

    def _take_back(self) -> None:
        """KV that comes back; here the other process is decode."""

        async def reach(*_: str) -> Any:
            return self.instance()

        sources: list[Any] = []
        cache = SimpleNamespace(
            moves=SimpleNamespace(fill=lambda move, found, source: sources.append(source)), namespace=ignored
        )
        blocks = SimpleNamespace(cache=cache, step=1, page=1, pages_of=lambda key: len(PAGES))
        places = SimpleNamespace(
            blocks=blocks,
            take=lambda *_, busy: SimpleNamespace(start=0, blocks=len(PAGES)),
            target=lambda reservation: (HBM_POOL, PAGES),
        )
        endpoint = SimpleNamespace(reach=reach, pools={HBM_POOL: SimpleNamespace(block_bytes=1)})
        transfers = SimpleNamespace(
            loop=SimpleNamespace(call_soon_threadsafe=self.wire.post), keep=self.wire.start
        )
        agent = SimpleNamespace(
            endpoint=endpoint,
            config=SimpleNamespace(local=SimpleNamespace(rank=0)),
            transfers=transfers,
            alarm=self.wire,
        )
        by = self.part("return_receiver").ReturnReceiver(places, agent, lambda: False, None, self.fence)
        part = SimpleNamespace(name="r", control="decode", offers=[self.offer()], tokens=b"")
        part.extra_key = part.cache_salt = None
        self.under_way()
        by._take_back([part], None)
        (source,) = sources
        self.arrived(lambda: source.blocks is not None)
        assert source.blocks == len(PAGES)

    def _give_back(self) -> None:
        """The request has ended; the pass under way computes the KV of its last token."""
        pages = PAGES.tolist()
        slots = torch.arange(pages[0], pages[-1] + 1, device=DEVICE)
        self.compute(pages, KV)
        node = SimpleNamespace(placements={"hbm": slots}, blocks=len(pages) // BLOCK)
        tree = SimpleNamespace(
            match=lambda *_: SimpleNamespace(path=[node]),
            root=None,
            block_bytes=4 * BLOCK,
            lock=ignored,
            unlock=ignored,
        )
        cache = SimpleNamespace(
            hbm="hbm", block_size=BLOCK, page_size=1, tree=tree, namespace=lambda *_: None
        )

        def read(message: Return, found: Any) -> None:
            assert found.tolist() == pages
            for layer in range(LAYERS):
                self.wire.move(
                    "read by a peer", reads=self.access(layer, pages), action=partial(self.look, pages, layer)
                )

        agent = ReturningAgent(self.wire, read)
        blocks = self.part("reservations").Blocks(cache)
        sender = self.part("return_sender").ReturnSender(blocks, agent, self.fence)
        req = SimpleNamespace(
            bootstrap_host="prefill", bootstrap_port=1, bootstrap_room=7, disagg_prefill_dp_rank=None
        )
        req.extra_key = req.cache_salt = None
        sender.ended(req, pages)
        for _ in range(80):
            self.wire.turn()
            # An idle scheduler passes when it is rung.
            if self.wire.heard():
                sender.act(sender.propose())
        assert sender.outcomes[ReturnEnd.RETURNED] == 1, sender.outcomes
        self.compute(pages, -1.0)

    def _push_by_layer(self) -> None:
        """An adapter of prefill's writes each layer while the pass computes the next."""
        module, default = self.part("pushing"), self.cuda.default
        both = [list(zip(*sides, strict=True)) for sides in zip(self.their_planes, self.planes, strict=True)]

        def transfer(runs: tuple[np.ndarray, np.ndarray, Sequence[int] | None]) -> None:
            target, pages, layers = runs
            for theirs, ours in (each for layer in layers or () for each in both[layer]):

                def move(theirs: Any = theirs, ours: Any = ours) -> None:
                    ours.inner[target] = theirs.inner[pages]

                reads, writes = [(theirs.lives.memory, pages)], [(ours.lives.memory, target)]
                self.wire.move("write of a layer", reads=reads, writes=writes, action=move)

        async def nothing() -> None:
            return

        part = SimpleNamespace(runs=lambda *which: which, layers=range(LAYERS))
        memory = SimpleNamespace(transfer=transfer, landed=nothing, end=nothing)
        writing = module.Writing(memory, part, PAGES, Counter())
        self.forward.synchronize()  # decode grants its slots behind its own passes, as `_push` does
        join(self.wire.thread.clock, self.cuda.trace.host.clock)
        with self.at_prefill():
            loop = SimpleNamespace(call_soon_threadsafe=self.wire.post)
            fence = self._fence_class(torch.cuda, (self.their_forward,))
            feed = module.LayerFeed(loop, 0, LAYERS, fence, self.wire.start)
            row = torch.arange(PAGES[0], PAGES[-1] + 1, device=DEVICE, dtype=torch.int32)
            pages = forward_fence.on_host(row[::1] // 1)
            feed.forward_begins([module.Computing(np.arange(len(PAGES)), pages, lambda: [writing])])
            self.their_forward.wait_stream(default)

            def begins(layer: int) -> None:
                feed.layer_begins(layer)
                self.wire.turn()

            ended = self.their_pass(KV, begins)
            feed.forward_ended()
            self.wire.turn()
            join(self.their_host.clock, ended)  # SGLang waits for the result of the pass
            task = self.wire.start(writing.finish(PAGES))
        self.arrived(task.done)
        task.result()
        assert writing.layers_ahead == len(PAGES) * LAYERS
        self.completed()

    def look(self, rows: list[int], layer: int) -> None:
        """An adapter compares the bytes that it reads."""
        for at, plane in enumerate(self.inner[layer]):
            if not torch.equal(plane[rows], stamped(KV, layer, at, len(rows)).expand(-1, HEADS, WIDTH)):
                raise WrongBytesError(f"layer {layer}")


def stamped(stamp: float, layer: int, at: int, rows: int) -> torch.Tensor:
    """KV as `Drill.compute` has it."""
    return stamp + layer + at / 2 + torch.arange(rows)[:, None, None] / 64


async def set_soon(event: asyncio.Event) -> None:
    event.set()


def ignored(*_: Any) -> None:
    return

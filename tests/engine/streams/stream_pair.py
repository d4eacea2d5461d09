"""A prefill and a decode server under the stream checker: SGLang's disaggregated loops around our real parts.

Both are processes of one trace, each with a scheduler's thread, streams, pools, a cache with DRAM and a
transfer thread of its own; a NIC reads and writes between their pools. Transcribed are
`event_loop_normal_disagg_prefill` and `_decode` and their forms with overlap, with the queues of requests
that wait for the other side. Ours are both ends of a hand-over as those queues poll them (`kv_requests`),
`PrefillSender`, `DecodeReceiver`, reading, granting and writing, the parts of the cache in each role
(`role_parts`) with returns and decode's own loads, the caches, and their movers. Messages between the
transfer threads, leases and the transport stand in for sockets: they carry the order that a message has.

A scheduler that finds a hand-over in a new state comes after what the transfer thread had done when it moved
it, and after nothing later.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from engine_pools import MODEL, PoolKind
from engine_scheduler import token_at
from engine_shapes import found_slots, found_tokens, look_up, publish
from fake_cuda import DEVICE, FakeCuda, FakeStream
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome
from sglang.srt.mem_cache.common import evict_from_tree_cache
from stream_engine import (
    DevicePools,
    Loop,
    StreamRank,
    StreamScheduler,
    bytes_in,
    on_device,
    page_kernels,
    rank_on,
)
from stream_pd import Wire, wire
from stream_trace import Clock, Timeline, join

from sglang_ext.clock import SystemClock
from sglang_ext.disagg.errors import RefusedError
from sglang_ext.disagg.messages import Offer
from sglang_ext.disagg.transfer.leases import Ended, LeaseEnd
from sglang_ext.engine.commands import RankCommandQueue
from sglang_ext.engine.forward_fence import ForwardFence, nothing_runs
from sglang_ext.engine.movers import cuda_mover
from sglang_ext.engine.pd.decode_receiver import DecodeReceiver
from sglang_ext.engine.pd.granting import Claims, Granting
from sglang_ext.engine.pd.landing import Landing
from sglang_ext.engine.pd.messages import RANK_COMMANDS, Join, Meet, Push, Ready, Return, Returned
from sglang_ext.engine.pd.prefill_sender import PrefillSender
from sglang_ext.engine.pd.pushing import Writing
from sglang_ext.engine.pd.reading import Reading
from sglang_ext.engine.pd.sending_handover import SendingRank
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.patches.adapter.pd import kv_requests
from sglang_ext.patches.adapter.pd.role_parts import PlainRole
from sglang_ext.patches.seams import current
from sglang_ext.wire import pack_ids, unpack_ids

WEIGHTS = "weights"
EPOCH = bytes(16)
ROW = bytes(8)
"""A metadata row: the model of the simulation needs no token of the other server."""


class Leases:
    """Pages of a rank that a peer may read: the part of an endpoint that offers use."""

    def __init__(self, name: str) -> None:
        self.address = name
        self.config = SimpleNamespace(instance=name)
        self.pools = {HBM_POOL: SimpleNamespace(blocks=1 << 30, block_bytes=1)}
        self.live: dict[int, tuple[str, Any]] = {}
        self._numbers = itertools.count(1)
        self.reach: Any = None

    def publish(self, pool: str, name: str, pages: Any, seconds: float, epoch: bytes) -> Offer:
        lease = next(self._numbers)
        blocks = np.array(pages, np.int64)
        self.live[lease] = name, epoch
        return Offer(
            self.config.instance, 0, EPOCH, pool, name, lease, pack_ids(blocks), pack_ids(blocks * 0), 10_000
        )

    def withdraw(self, pool: str, lease: int) -> None:
        self.live.pop(lease, None)


class Side:
    """One server: a process of the trace."""

    def __init__(self, pair: Pair, name: str) -> None:
        self.pair, self.name = pair, name
        trace = pair.cuda.trace
        self.host: Timeline = trace.timeline(f"{name}'s host", [trace.host])
        self.default = FakeStream(pair.cuda, f"{name}'s scheduler")
        self.wire: Wire
        self.rank: StreamRank
        self.leases = Leases(name)
        self.agent = SimpleNamespace(
            endpoint=self.leases,
            config=SimpleNamespace(local=SimpleNamespace(rank=0, ranks=1)),
            weights=WEIGHTS,
            calls=Counter(),
            receive_returns=lambda receiver: setattr(self, "returns", receiver),
            send_returns=lambda sender: setattr(self, "returns", sender),
            settle=self._settle,
        )
        self.returns: Any = None

    def use(self, wire: Wire) -> None:
        self.wire = wire
        self.agent.alarm, self.agent.start = wire, wire.start
        self.agent.transfers = SimpleNamespace(loop=wire.loop, keep=wire.start)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Its scheduler's thread runs."""
        cuda, trace = self.pair.cuda, self.pair.cuda.trace
        host, default = trace.host, cuda.default
        trace.host, cuda.default = self.host, self.default
        try:
            yield
        finally:
            trace.host, cuda.default = host, default

    def slots(self, pages: Any) -> np.ndarray:
        page = self.rank.pools.kind.page
        found: np.ndarray = (np.asarray(pages)[:, None] * page + np.arange(page)).ravel()
        return found

    def _settle(self, future: asyncio.Future[None]) -> None:
        self.wire.loop.call_soon_threadsafe(lambda: future.done() or future.set_result(None))


class Line:
    """Messages from the transfer thread of one side to the other's, and reads and writes of its pools."""

    def __init__(self, here: Side, there: Side) -> None:
        self.here, self.there = here, there

    async def ask(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """The answer of the other transfer thread."""
        loop, there = asyncio.get_running_loop(), self.there.wire.loop
        answer = loop.create_future()

        def over(task: asyncio.Task[Any]) -> None:
            # The answer comes after that thread's work.
            loop.call_soon_threadsafe(_settled, answer, task)

        def begin() -> None:
            there.create_task(work()).add_done_callback(over)

        there.call_soon_threadsafe(begin)
        return await answer

    def tell(self, call: Callable[..., Any], *args: Any) -> None:
        """A message whose answer is not waited for, and may be a refusal."""

        def called() -> None:
            with suppress(RefusedError):
                call(*args)

        self.there.wire.loop.call_soon_threadsafe(called)

    async def some_time(self) -> None:
        """A transfer waits for its turn."""
        for _ in range(self.here.pair.delay()):
            await asyncio.sleep(0)

    def move(self, name: str, of: Side, pages: Any, to: Side, target: Any) -> None:
        """The NIC copies pages of one side to the other's, on behalf of this side's thread."""
        source, places = of.slots(pages), to.slots(target)
        both = [
            (mine, theirs)
            for one, other in zip(of.rank.pools.tensors, to.rank.pools.tensors, strict=True)
            for mine, theirs in zip(one, other, strict=True)
        ]

        def copy() -> None:
            for mine, theirs in both:
                bytes_in(theirs)[places] = bytes_in(mine)[source]

        layers = range(len(of.rank.pools.tensors))
        self.here.wire.move(
            name,
            reads=[part for layer in layers for part in pools_of(of).access(layer, source)],
            writes=[part for layer in layers for part in pools_of(to).access(layer, places)],
            action=copy,
        )


def pools_of(side: Side) -> DevicePools:
    pools: Any = side.rank.pools
    return pools


def _settled(answer: asyncio.Future[Any], task: asyncio.Task[Any]) -> None:
    error = RefusedError("handover", "cancelled") if task.cancelled() else task.exception()
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(task.result())


class SchedulersLock:
    """The lock of prefill's hand-overs: the transfer thread comes after the scheduler's work under it.
    The scheduler comes after the thread where it looks at a hand-over (`Wire.seen`).
    """

    def __init__(self, side: Side) -> None:
        self._side = side
        self._clock: Clock = {}

    def __enter__(self) -> None:
        side = self._side
        if side.pair.cuda.trace.host is side.wire.thread:
            join(side.wire.thread.clock, self._clock)

    def __exit__(self, *_: object) -> None:
        if self._side.pair.cuda.trace.host is self._side.host:
            join(self._clock, self._side.host.clock)


class Reads:
    """A connection by which this side reads pages that the other has leased: `Instance`.

    completed: called on the other side's thread for a lease that was read.
    """

    def __init__(self, line: Line, completed: Callable[[int, tuple[str, Any]], None]) -> None:
        self._line, self._completed = line, completed
        self._wanted: dict[str, tuple[Sequence[Offer], Any]] = {}

    def transfer(self, name: str, offers: Sequence[Offer], pool: str, rows: Any) -> None:
        self._wanted[name] = offers, rows

    @asynccontextmanager
    async def _kept(self) -> Any:
        yield

    def keeping(self, offers: Sequence[Offer], seconds: float) -> Any:
        return self._kept()

    async def keep(self, offers: Sequence[Offer], seconds: float) -> None:
        return

    async def finish(self, name: str, seconds: float) -> None:
        (offer,), rows = self._wanted.pop(name)
        line = self._line
        await line.some_time()
        known = line.there.leases.live.get(offer.lease)
        if known is None:  # bytes that are read later are discarded: that is no read at all here
            raise RefusedError("lease", "the lease is over")
        line.move(f"read by {line.here.name}", line.there, unpack_ids(offer.blocks), line.here, rows)
        line.tell(self._completed, offer.lease, known)

    async def drop(self, name: str) -> None:
        self._wanted.pop(name, None)


class PrefillServer:
    """Prefill, as decode's transfer thread has it: `PrefillPeer`."""

    gone, writers = False, 1

    def __init__(self, line: Line, sender: PrefillSender, instance: Reads) -> None:
        self._line, self._sender, self.instance = line, sender, instance
        self.ranks = [SimpleNamespace(epoch=EPOCH)]

    async def join(self, number: int, epoch: bytes, weights: str) -> list[Ready]:
        message = Join(number, epoch, b"session", 0, 1, True, weights)
        return [await self._line.ask(lambda: self._sender.join(message))]

    async def meet(self, number: int, epoch: bytes, weights: str) -> None:
        message = Meet(number, epoch, b"session", 1, weights)
        await self._line.ask(lambda: self._sender.meet(message))

    async def push(
        self, number: int, epoch: bytes, control: str, blocks: bytes, skip: int, pool: str
    ) -> list[Ready]:
        message = Push(number, epoch, control, blocks, skip, pool)
        return [await self._line.ask(lambda: self._sender.push(message))]

    def gives(self, offer: Offer, pool: str) -> bool:
        return True

    def done(self, number: int, epoch: bytes, rest: Sequence[int]) -> None:
        for _ in rest:
            self._line.tell(self._sender.done, number, epoch)

    async def abort(self, number: int, epoch: bytes, reason: str) -> None:
        self._line.tell(self._sender.peer_aborts, number, epoch, reason)

    async def give_back(self, message: Return, seconds: float) -> Returned:
        answer: Returned = await self._line.ask(lambda: self._line.there.returns.take(message))
        return answer


class Grant:
    """Pages of decode that prefill writes: `RemoteMemory`."""

    def __init__(self, line: Line, claims: Claims, name: str, target: Any) -> None:
        self._line, self._claims, self._name, self._target = line, claims, name, target
        self._queued: list[tuple[Any, Any]] = []

    def transfer(self, runs: tuple[Any, Any]) -> None:
        self._queued.append(runs)

    async def landed(self) -> None:
        line, queued = self._line, self._queued
        self._queued = []
        await line.some_time()
        for target, pages in queued:
            line.move("write by prefill", line.here, pages, line.there, target)

    async def end(self) -> None:
        await self._line.ask(lambda: self._claims.filled(HBM_POOL, self._target, self._name))

    async def free_mem(self) -> None:
        await self._line.ask(lambda: self._claims.discard(HBM_POOL, self._target, self._name))


# -- prefill -----------------------------------------------------------------------------------------


class PrefillLoop(StreamScheduler):
    """`event_loop_normal_disagg_prefill` and `event_loop_overlap_disagg_prefill`."""

    pair: Pair

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.bootstrapping: list[Req] = []
        self.inflight: list[Req] = []
        """Requests with computed KV that decode has not taken yet."""
        self.lost = 0

    def _enqueue(self, reqs: list[Req]) -> None:
        """A request waits for `Pair.submit` to make its end of the hand-over."""

    def active(self) -> list[Req]:
        return list(dict.fromkeys([*super().active(), *self.inflight]))

    @property
    def idle(self) -> bool:
        return not (self.bootstrapping or self.inflight) and super().idle

    def _next_batch(self) -> ScheduleBatch | None:
        for req in list(self.bootstrapping):
            poll = self.pair.prefill_polls(req)
            if poll != KVPoll.Bootstrapping:
                self.bootstrapping.remove(req)
                req.start_send_idx = req.disagg_kv_sender.pop_decode_prefix_len()
                self.waiting.append(req)
        for req in list(self.waiting):  # `resolve_waiting_queue_bootstrap`
            if self.pair.prefill_polls(req) == KVPoll.Failed:
                self.waiting.remove(req)
                self._lost(req)
        return super()._next_batch()

    def _lost(self, req: Req) -> None:
        """Decode has given it up."""
        with suppress(KVTransferError):
            req.disagg_kv_sender.failure_exception()
        if req.kv.holds_kv:
            current.release(req, self.cache, keep=False)
        self.lost += 1
        self._forget(req)

    def _new_prefill_batch(self) -> ScheduleBatch | None:
        """``process_prefill_chunk`` comes before."""
        if (req := self.chunked) is not None:
            end = min(current.computed_end(req), len(req.origin_input_ids))
            if self.settings.overlap:
                req.tmp_end_idx = end
            else:
                self._send(req, end)
        return super()._new_prefill_batch()

    def _merge_last_batch(self) -> None:
        """Nothing decodes here."""

    def _process_prefill(self, req: Req, token: int, *, decoding: bool) -> None:
        if req.inflight_middle_chunks > 0:
            req.inflight_middle_chunks -= 1
            if self.settings.overlap:
                self._send(req, req.tmp_end_idx)
            return
        req.output_ids.append(token)
        publish(req, self.cache)
        self.inflight.append(req)
        self._send(req, len(req.origin_input_ids), last=True)

    def _send(self, req: Req, end: int, *, last: bool = False) -> None:
        page, start = self.pools.kind.page, req.start_send_idx
        end = end if last else end - end % page
        if end < start:
            return
        slots = self.pools.requests.req_to_token[req.kv.req_pool_idx, start:end]
        pages = slots.cpu().numpy()[::page] // page
        if req.disagg_kv_sender.should_send_kv_chunk(len(pages), last):
            req.disagg_kv_sender.send(pages, None)
        req.start_send_idx = end

    def complete(self, batch: ScheduleBatch | None) -> None:
        super().complete(batch)
        for req in list(self.inflight):  # `process_disagg_prefill_inflight_queue`
            poll = self.pair.prefill_polls(req)
            if poll in (KVPoll.WaitingForInput, KVPoll.Transferring):
                continue
            self.inflight.remove(req)
            if poll == KVPoll.Failed:
                self._lost(req)
                continue
            current.release(req, self.cache, keep=True)
            self.cache.finish(req.cache_request_handle, CacheRequestOutcome.SUCCESS)
            req.disagg_kv_sender.clear()
            self.finished.append(req)
            self._forget(req)


# -- decode ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Coming:
    """SGLang's ``DecodeRequest``."""

    req: Req
    kv_receiver: Any
    waiting_for_input: bool = False


class DecodeLoop(StreamScheduler):
    """`event_loop_normal_disagg_decode` and `event_loop_overlap_disagg_decode`."""

    pair: Pair

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.coming: list[Coming] = []
        """``disagg_decode_prealloc_queue``."""
        self.moving: list[Coming] = []
        """``disagg_decode_transfer_queue``."""
        self.aborted = 0

    def _enqueue(self, reqs: list[Req]) -> None:
        """As at prefill. None is retracted: `_fits`."""
        assert not any(req.kv.holds_kv or req.output_ids for req in reqs)

    def active(self) -> list[Req]:
        queued = [each.req for each in self.moving if each.req.kv.holds_kv]
        return list(dict.fromkeys([*super().active(), *queued, *self.waiting]))

    @property
    def idle(self) -> bool:
        return not (self.coming or self.moving) and super().idle

    def abort(self, req: Req) -> None:
        for each in [*self.coming, *self.moving]:
            if each.req is req:
                each.kv_receiver.abort()
                return
        super().abort(req)

    def _next_batch(self) -> ScheduleBatch | None:
        self.cache.check_hicache_events()
        self._pop_transferred()
        self._pop_preallocated()
        self._prebuilt()
        if not self.running.is_empty():
            self._update_running()
        return None if self.running.is_empty() else self.running

    def _pop_transferred(self) -> None:
        for each in list(self.moving):
            poll = self.pair.decode_polls(each)
            if poll == KVPoll.Failed:
                self.moving.remove(each)
                self._gone(each)
            elif poll == KVPoll.Success:
                self.moving.remove(each)
                req = each.req
                req.output_ids.append(token_at(req, len(req.origin_input_ids)))
                each.kv_receiver.clear()
                self.waiting.append(req)

    def _gone(self, each: Coming) -> None:
        self.aborted += 1
        if each.req.kv.holds_kv:
            current.release(each.req, self.cache, keep=False)
        each.kv_receiver.clear()
        self._forget(each.req)

    def _pop_preallocated(self) -> None:
        for each in list(self.coming):
            poll = self.pair.decode_polls(each)
            each.waiting_for_input = poll == KVPoll.WaitingForInput
            if poll == KVPoll.Failed:
                self.coming.remove(each)
                self._gone(each)
        self.pair.decode_role.bring_ahead(self.coming)
        for each in [each for each in self.coming if each.waiting_for_input]:
            if self.pools.requests.available_size() <= 0 or not self._fits(each.req):
                break
            self.coming.remove(each)
            self._preallocate(each)
            self.moving.append(each)

    def _fits(self, req: Req) -> bool:
        """Whether all requests can end without being retracted."""

        def most(one: Req) -> int:
            return len(one.origin_input_ids) + one.sampling_params.max_new_tokens + 2 * self.pools.kind.page

        growth = sum(max(0, most(one) - one.kv.kv_allocated_len) for one in self.active())
        free = self.pools.allocator.available_size() + self.cache.evictable_size()
        return most(req) + growth <= free

    def _preallocate(self, each: Coming) -> None:
        req, pools, page = each.req, self.pools, self.pools.kind.page
        served = self._served[req]
        served.namespace, served.weights = (self.weights, req.extra_key, req.cache_salt), self.weights
        match = look_up(req, self.cache, req.origin_input_ids)
        if hasattr(self.cache, "lock"):
            req.lock = self.cache.lock(match.last_device_node)
        else:
            self.cache.inc_lock_ref(match.last_device_node)
        start, end = found_tokens(match), len(req.origin_input_ids)
        prefix = found_slots(match, self.cache) if start else None
        (row,) = pools.requests.alloc([req])
        evict_from_tree_cache(self.cache, end - start + page)
        slots = self._slots_for(start, end, prefix)
        if prefix is not None:
            pools.requests.write((row, slice(0, start)), prefix)
        pools.requests.write((row, slice(start, end)), slots)
        req.kv.kv_committed_len = req.kv.kv_allocated_len = end
        req.kv.cache_protected_len = start
        req.full_untruncated_fill_ids = req.origin_input_ids + req.output_ids
        req.prefix_len, req.extend_end = start, end
        self.loaded_tokens += start
        pages = pools.requests.req_to_token[row, start:end].cpu().numpy()[::page] // page
        each.kv_receiver.send_metadata(pages, 0, None, start)

    def _slots_for(self, start: int, end: int, prefix: torch.Tensor | None) -> torch.Tensor:
        """``alloc_for_decode_prealloc``."""
        allocator = self.pools.allocator
        if self.pools.kind.page == 1:
            slots = allocator.alloc(end - start)
        else:
            last = torch.tensor([-1], device=DEVICE) if prefix is None else prefix[-1:].to(torch.int64)
            slots = allocator.alloc_extend(
                torch.tensor([start], device=DEVICE),
                torch.tensor([start]),
                torch.tensor([end], device=DEVICE),
                torch.tensor([end]),
                last,
                end - start,
            )
        assert slots is not None, "decode has admitted more than it has slots for"
        found: torch.Tensor = slots
        return found

    def _prebuilt(self) -> None:
        """``get_new_prebuilt_batch`` and what `get_next_disagg_decode_batch_to_run` does with it."""
        room = self.settings.max_running - self.running.batch_size()
        reqs, self.waiting = self.waiting[:room], self.waiting[room:]
        if not reqs:
            return
        for req in reqs:
            req.init_next_round_input(None)
            req.extend_end = req.kv.kv_committed_len
        batch = ScheduleBatch.init_new(
            reqs,
            self.pools.requests,
            self.pools.allocator,
            self.cache,
            MODEL,
            self.settings.overlap,
            self.algorithm,
        )
        batch.prepare_for_prebuilt()
        if self.settings.overlap:
            self.cuda.default.wait_stream(self.forward)
        batch.process_prebuilt(SimpleNamespace(stash=lambda *_: None))
        self.pools.allocator.free_group_begin()
        for req in reqs:
            req.update_finish_state()
            if req.finished():
                self._finish(req)
        self.pools.allocator.free_group_end()
        batch.filter_batch()
        if batch.is_empty():
            return
        if self.running.is_empty():
            self.running = batch
        else:
            self.running.merge_batch(batch)


class Pair:
    """The two servers."""

    def __init__(self, cuda: FakeCuda, seed: int) -> None:
        self.cuda = cuda
        self._rng = random.Random(seed)
        self._numbers = itertools.count(1)
        self.prefill, self.decode = Side(self, "prefill"), Side(self, "decode")
        self.managers: dict[Side, Any] = {}
        self.commands = RankCommandQueue()
        self.decode_role: PlainRole
        self.requests: Any = kv_requests
        self._known: list[list[int]] = [[0] * 8, self._words(40), self._words(70)]

    # -- connecting ------------------------------------------------------------------------------

    def connect(self, *, pushes: bool, fenced: bool) -> None:
        """As `GlobalKVManager` and the endpoints do."""
        prefill, decode = self.prefill, self.decode
        fences = {
            side: ForwardFence(torch.cuda, (side.rank.scheduler.forward,)) for side in (prefill, decode)
        }
        to_prefill, to_decode = Line(decode, prefill), Line(prefill, decode)

        async def revoke(name: str) -> None:
            """A writer ends when prefill hears that decode has given the request up."""

        claims = Claims(revoke)

        async def claim(number: int, message: Push) -> Writing | None:
            target, name = unpack_ids(message.pages), f"{number:x}"
            if not target.size:
                return None
            await to_decode.ask(lambda: claims.claim(message.pool, target, name))
            part: Any = SimpleNamespace(layers=range(1), runs=lambda to, of, layers: (to, of))
            memory: Any = Grant(to_decode, claims, name, target)
            return Writing(memory, part, target, Counter())

        clock, leases = SystemClock(), prefill.leases
        sender = PrefillSender(
            SendingRank(
                leases,  # type: ignore[arg-type]
                clock,
                prefill.wire.loop,
                connected=bool,
                wake=ignored,
                claim=claim,
                pushes=pushes,
                staging=None,
                lock=SchedulersLock(prefill),  # type: ignore[arg-type]
            )
        )

        def completed(lease: int, known: tuple[str, Any]) -> None:
            if leases.live.pop(lease, None) is not None:
                over: Any = SimpleNamespace(number=lease, request=known[0], reader=known[1])
                sender.lease_ended(Ended(over, LeaseEnd.COMPLETED, np.zeros(0, np.int64)))

        server = PrefillServer(to_prefill, sender, Reads(to_prefill, completed))

        async def get(address: str) -> PrefillServer:
            return server

        async def reach(*addresses: str) -> Reads:
            return Reads(to_decode, lambda lease, known: decode.leases.live.pop(lease, None))

        rows: Any = SimpleNamespace(write=ignored)
        landing, peers, epoch = Landing(rows, None, {HBM_POOL: 1}), SimpleNamespace(get=get), EPOCH
        receiver = DecodeReceiver(
            peers,  # type: ignore[arg-type]
            epoch,
            decode.wire.loop,
            lambda: None,
            Reading(landing, epoch, clock),
            Granting(landing, epoch, claims, "decode") if pushes else None,
        )
        sender.weights_changed(WEIGHTS)
        receiver.weights_changed(WEIGHTS)
        leases.reach = reach
        decode.agent.peer = lambda address: server
        for side in (prefill, decode):
            self.managers[side] = SimpleNamespace(
                agent=SimpleNamespace(sender=sender, receiver=receiver),
                pushes=pushes,
                kv_args=SimpleNamespace(page_size=side.rank.pools.kind.page),
                buffers=SimpleNamespace(read=lambda row: ROW),
                beside=lambda indices: (),
                page_bytes=1,
                migration=None,
                store=side.rank.cache.store,
                fence=fences[side] if fenced else lambda: nothing_runs,
            )
        agents: Any = prefill.agent, decode.agent
        role = PlainRole(prefill.rank.cache, agents[0], lambda: None)
        role.prefill(prefill.rank.scheduler, fences[prefill], returns=True)
        role.begin()
        self.decode_role = PlainRole(decode.rank.cache, agents[1], lambda: None)
        self.decode_role.decode(fences[decode], 0, returns=True)
        self.decode_role.begin()

    # -- requests --------------------------------------------------------------------------------

    def submit(self, prompt: list[int], new_tokens: int) -> None:
        """A request comes to both servers."""
        number = next(self._numbers)
        prefill, decode = self.prefill, self.decode
        with prefill.running():
            req = prefill.rank.scheduler.submit(prompt, new_tokens=1)
            sender = self.requests.GlobalKVSender(self.managers[prefill], "prefill:1", number)
            sender.init(0, 0)
            req.disagg_kv_sender = sender
            handover = sender.handover
            prefill.wire.watch(handover, lambda: (handover.state, handover.granted() is not None))
            prefill.rank.scheduler.bootstrapping.append(req)
        with decode.running():
            req = decode.rank.scheduler.submit(prompt, new_tokens=new_tokens)
            req.bootstrap_host, req.bootstrap_port, req.bootstrap_room = "prefill", 1, number
            req.disagg_prefill_dp_rank = None
            receiver = self.requests.GlobalKVReceiver(self.managers[decode], "prefill:1", number)
            receiver.init(0)
            taken = receiver.handover
            decode.wire.watch(taken, lambda: taken.state)
            decode.rank.scheduler.coming.append(Coming(req, receiver))

    def prefill_polls(self, req: Req) -> int:
        """Prefill's scheduler looks at the state of a hand-over."""
        self.prefill.wire.seen(req.disagg_kv_sender.handover)
        return int(req.disagg_kv_sender.poll())

    def decode_polls(self, each: Coming) -> int:
        """As decode's."""
        self.decode.wire.seen(each.kv_receiver.handover)
        return int(each.kv_receiver.poll())

    def delay(self) -> int:
        """How many turns of a transfer thread a transfer takes."""
        return self._rng.choice((0, 1, 5, 12))

    def _words(self, count: int) -> list[int]:
        return [self._rng.randrange(4) for _ in range(count)]

    # -- traffic ---------------------------------------------------------------------------------

    def serve(self, steps: int) -> None:
        """Random requests for so many passes of both, which then end."""
        rng = self._rng
        for _ in range(steps):
            draw = rng.random()
            if draw < 0.3 and len(self.decode.rank.scheduler.coming) < 8:
                known = rng.choice(self._known[-20:])
                prompt = (known[: rng.randrange(2, len(known) + 1)] + self._words(rng.choice((0, 1, 9, 30))))[
                    :90
                ]
                self.submit(prompt, rng.choice((1, 2, 6, 14)))
                self._known.append(prompt + self._words(9))
            elif draw < 0.36:
                self._abort()
            self.step()
        for _ in range(400):
            if self.idle:
                return
            self.step()
        raise AssertionError("the servers do not become idle")

    def step(self) -> None:
        """A pass of each server, and turns of their transfer threads between."""
        sides = [self.prefill, self.decode]
        self._rng.shuffle(sides)
        for side in sides:
            with side.running():
                side.wire.heard()
                if side is self.prefill:
                    for command in self.commands.take():
                        side.returns.takes_command(RANK_COMMANDS.decode(command.payload))
                side.rank.scheduler.step()
            for each in sides:
                each.wire.turn(self._rng.choice((1, 2, 4)))

    def hang_up(self) -> None:
        """Cancel the work of the transfer threads."""
        for _ in range(3):
            for side in (self.prefill, self.decode):
                side.wire.cancel()

    @property
    def idle(self) -> bool:
        return all(side.rank.scheduler.idle for side in (self.prefill, self.decode))

    def _abort(self) -> None:
        """Abort a waiting request of decode, as for a client that goes away."""
        decode = self.decode.rank.scheduler
        waiting = [each.req for each in (*decode.coming, *decode.moving)]
        if waiting:
            with self.decode.running():
                decode.abort(self._rng.choice(waiting))


def ignored(*_: Any) -> None:
    return


@contextmanager
def pair(
    prefill: Loop,
    decode: Loop,
    *,
    pace: float,
    seed: int = 0,
    kind: PoolKind,
    pushes: bool = False,
    requests: Any = kv_requests,
    fenced: bool = True,
    decode_tokens: int = 330,
    make_prefill: type[PrefillLoop] = PrefillLoop,
) -> Iterator[Pair]:
    """Both servers on the fake device.

    Args:
        prefill, decode: how the scheduler of each follows its passes.
        pushes: whether prefill writes, or decode reads.
        requests, make_prefill: under test.
        fenced: whether slots that a NIC fills have a fence.
        decode_tokens: slots of decode.
    """
    cuda = FakeCuda(seed, pace)
    with ExitStack() as stack:
        for each in (on_device(cuda, cuda_mover), page_kernels(), cuda.installed()):
            stack.enter_context(each)
        made = Pair(cuda, seed)
        made.requests = requests
        stack.callback(made.commands.close)
        for side, loop, scheduler, hbm in (
            (made.prefill, prefill, make_prefill, 200),
            (made.decode, decode, DecodeLoop, decode_tokens),
        ):
            side.use(stack.enter_context(wire(cuda)))
            with side.running():
                side.rank = rank_on(
                    cuda,
                    loop,
                    kind=kind,
                    make_scheduler=type("Loop", (scheduler,), {"pair": made}),
                    forward_name=f"{side.name}'s forward",
                    commands=made.commands if side is made.prefill else None,
                    hbm_tokens=hbm,
                )
            side.leases.pools[HBM_POOL].blocks = hbm // kind.page
            stack.callback(_closed, side)
        made.connect(pushes=pushes, fenced=fenced)
        stack.callback(made.hang_up)
        yield made


def _closed(side: Side) -> None:
    with side.running():
        side.rank.close()

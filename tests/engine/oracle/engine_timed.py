"""SGLang's scheduler on the simulator's clock: the reference of the simulator's instances.

A `TimedInstance` takes the place of the simulator's `Instance`, behind the same router. Requests, batches,
admission, chunks, retraction, the table of requests, the allocator of slots, and our cache in front of them
are those of a server (`SimulatedScheduler`, `GlobalRadixCache`). Below that are the engine's parts of an
instance, with memory that has no bytes, and a pass takes the cost model's time for its batch. There is no
KV, so there are no rows to compare.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from engine_pools import PoolKind
from engine_scheduler import Settings, SimulatedScheduler
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from sglang_ext.config import KvConfig
from sglang_ext.engine.cache.rank_cache import CacheParts
from sglang_ext.engine.events.router_commands import Replies
from sglang_ext.engine.movers.slots import slot_ops
from sglang_ext.patches.adapter.own_requests import SglangHost
from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache
from sglang_ext.protocol.agent import Load
from sglang_ext.simulator.engine import Engine
from sglang_ext.simulator.instance import LOOK_AGAIN_S, Instance, Job
from sglang_ext.simulator.settings import BLOCK_TOKENS
from sglang_ext.tiers import Tier

ROWS = 512
"""Of the table of requests."""


class SlotEngine(Engine):
    """The engine of an instance over SGLang's allocator of slots."""

    def make_slots(self, tokens: int) -> tuple[Any, Any]:
        slots = TokenToKVPoolAllocator(tokens, torch.float32, "cpu", None, False)
        return slots, slot_ops(torch.device("cpu"))


class TimedScheduler(SimulatedScheduler):
    """SGLang's scheduler over requests whose answers are known.

    Args:
        ended: takes each request that has ended, or was given up.
    """

    vocabulary = 1 << 31

    def __init__(self, pools: Any, cache: GlobalRadixCache, settings: Settings, ended: Callable[[Req], None]):
        super().__init__(pools, cache, None, settings)
        self.ratio = NewTokenRatioTracker.from_config()
        self.jobs: dict[Req, Job] = {}
        self._ended = ended

    def serve(self, job: Job, *, ignore_eos: bool) -> None:
        """A request arrives."""
        tokens = np.frombuffer(job.key, "<u4").tolist()
        _, extra_key, salt = job.namespace  # type: ignore[misc]
        req = self.submit(tokens, new_tokens=job.output, extra_key=extra_key, salt=salt)
        req.sampling_params.ignore_eos = ignore_eos
        self.jobs[req] = job

    @property
    def new_token_ratio(self) -> float:
        return self.ratio.current

    def _retracting(self, ratio: float) -> None:
        self.ratio.current = ratio

    def _update_running(self) -> None:
        before, size = self.retracted, self.running.batch_size()
        if self._results:
            # With overlap, a step that is the last one of a request still runs (`_reqs_finishing_inflight`).
            queued = set(self._results[0][0].reqs)
            ends = [
                req for req in self.running.reqs if req in queued and req.next_output_finishes_by_length()
            ]
            if ends:
                self.running.filter_batch(ends)
                self.running.batch_is_full = False
        super()._update_running()
        if size and before == self.retracted and not self.running.is_empty():
            self.ratio.decay_step()

    def launch(self) -> ScheduleBatch | None:
        batch = super().launch()
        if batch is None and self.idle:
            self.ratio.reset()
        return batch

    def _brought(self, req: Req, tokens: int, start: int | None) -> None:
        super()._brought(req, tokens, start)
        if tokens:
            req.storage_hit_length, req.storage_hit_start = tokens, start
            req.host_hit_is_storage = False

    def _forward(self, batch: ScheduleBatch) -> list[int]:
        tokens = []
        for req, end in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
            answer, at = self.jobs[req].answer, max(0, end - len(req.origin_input_ids)) * 4
            tokens.append(int.from_bytes(answer[at : at + 4], "little"))
        return tokens

    def _forget(self, req: Req) -> None:
        super()._forget(req)
        self._ended(req)


class TimedInstance(Instance):
    """See the module's docstring. For colocated instances without replays.

    overlap: as a server without ``--disable-overlap-schedule``.
    """

    engine_type = SlotEngine
    overlap = False
    load_min_tokens = KvConfig().load_min_tokens

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        engine, settings = self.engine, self._settings
        tokens = settings.hbm * BLOCK_TOKENS
        self.pools = SimpleNamespace(
            kind=PoolKind(),
            tokens=tokens,
            allocator=engine.slots,
            requests=ReqToTokenPool(min(ROWS, settings.running), tokens, "cpu", enable_memory_saver=False),
        )
        parts = CacheParts(
            engine.store,
            engine.hbm_tier,
            engine.planners,
            speeds=engine.loading.speeds,
            load_min_tokens=self.load_min_tokens,
            weights=engine.weights,
            ranks=engine.ranks,
            moves=engine.moves,
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.pools.requests,
            token_to_kv_pool_allocator=engine.slots,
            page_size=1,
        )
        self.cache = GlobalRadixCache(params, parts, SglangHost(engine.slots), Replies())
        flags = Settings(
            overlap=self.overlap, chunk=settings.chunk, max_prefill=16384, max_running=settings.running
        )
        self.scheduler = TimedScheduler(self.pools, self.cache, flags, self._req_ended)
        self._launched: list[ScheduleBatch] = []
        """Those that run or are to run, the first one now."""
        self._batch: ScheduleBatch | None = None
        """The batch of the last launch."""

    # -- requests -----------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        self.work.requests += 1
        job.came_at = self._loop.time()
        if self._admissible(job):
            self.scheduler.serve(job, ignore_eos=self._settings.ignore_eos)
            self.wake()

    def _req_ended(self, req: Req) -> None:
        job = self.scheduler.jobs.pop(req)
        self._note_hits(req, job)
        self._note_first(job)
        if not job.last.done():
            job.last.set_result(None)

    def _note_first(self, job: Job) -> None:
        if not job.first.done():
            job.computed_at = self._loop.time()
            job.first.set_result(None)

    def _note_hits(self, req: Req, job: Job) -> None:
        self.work.retracted = self.scheduler.retracted
        job.hits[Tier.HBM] = req.cached_tokens_device
        job.hits[Tier.DRAM] = req.cached_tokens_host
        job.hits[Tier.DISK] = req.cached_tokens_storage

    def load(self) -> Load:
        scheduler = self.scheduler
        queued = [*scheduler.waiting, *([scheduler.chunked] if scheduler.chunked is not None else ())]
        tokens = sum(len(req.origin_input_ids) + len(req.output_ids) - req.already_computed for req in queued)
        return Load(scheduler.running.batch_size(), len(queued), tokens)

    def wake(self) -> None:
        if not self._launched and not self._dead:
            self._turn_by(self._loop.time())

    @property
    def computing(self) -> bool:
        return bool(self._launched)

    # -- passes -------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """A pass of the scheduler's loop while nothing runs."""
        self._turn_at = None
        self._launch()
        if self.overlap and self._batch is not None:
            self.scheduler.complete(self._batch)
            self._launch()
        if self._launched:
            self._begin()
        else:
            self.scheduler.complete(None)
            if self.scheduler.waiting:
                self.wake_in(LOOK_AGAIN_S)
        self._published()

    def _launch(self) -> None:
        """Form the next batch; with overlap, while the one before runs."""
        self._batch = self.scheduler.launch()
        if self._batch is not None:
            self._launched.append(self._batch.copy())

    def _begin(self) -> None:
        """The first of the launched batches runs."""
        batch = self._launched[0]
        seconds = self._seconds(batch) + self.engine.copier.take_stall()
        self._turn_at = self._loop.call_later(seconds, self._over, batch)

    def _seconds(self, batch: ScheduleBatch) -> float:
        work = self.work
        if batch.forward_mode.is_decode():
            work.steps += 1
            work.generated_tokens += len(batch.reqs)
            return self._model.decode_s(len(batch.reqs))
        work.passes += 1
        work.prompts += len(batch.reqs)
        work.computed_tokens += sum(batch.extend_lens)
        for req in batch.reqs:
            job = self.scheduler.jobs[req]
            job.began_at = job.began_at or self._loop.time()
        return self._pass_s(list(zip(batch.extend_lens, batch.prefix_lens, strict=True)))

    def _over(self, batch: ScheduleBatch) -> None:
        """A pass has ended."""
        self._turn_at = None
        self._launched.pop(0)
        self.scheduler.complete(self._batch)
        for req in batch.reqs:
            job = self.scheduler.jobs.get(req)
            if job is not None and req.output_ids:
                self._note_first(job)
        self._pass_ended()
        if not self._launched:
            self._turn()
            return
        self._launch()
        self._begin()
        self._published()

    def check(self) -> None:
        self.engine.check()
        self.cache.check()
        assert not self.cache.faults.counts, self.cache.faults
        assert self.scheduler.idle
        assert not self.scheduler.jobs
        known = self.engine.slots.available_size() + self.engine.hbm_tier.total
        assert known == self.engine.slots.size, f"{known} of {self.engine.slots.size} slots are accounted for"

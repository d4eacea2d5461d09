"""SGLang's scheduler without a server: its own requests, batches, admission and release around our cache.

Real are ``Req``, ``ScheduleBatch``, ``PrefillAdder``, ``alloc_for_extend`` and ``alloc_for_decode``,
``retract_decode``, ``release_kv_cache``, the pools and the allocators. Simulated are the model (the oracle
writes and reads rows layer by layer, where a forward pass would), and the scheduler's loop, which follows
``Scheduler.event_loop_normal`` and ``event_loop_overlap``, ``get_next_batch_to_run`` and
``process_batch_result_prefill`` and ``_decode`` of SGLang without the parts that a plain generation server
does not use.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from engine_pools import MODEL, Pools, WrongKvError, extend_chain
from engine_shapes import publish
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch, retract_all
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder, SchedulePolicy
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_ext.engine.movers.mover import LayerGate
from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache
from sglang_ext.patches.hooks.restarts import take_back
from sglang_ext.patches.seams import current


@dataclass
class Served:
    """The simulation's state of a request besides SGLang's own ``Req``."""

    namespace: Hashable = None
    """Where its KV belongs: the weights in use when it was last matched, its extra key and its salt."""
    chain: list[int] = field(default_factory=list)
    """Hash of the prefix up to each token, as far as computed or matched."""
    weights: int = 0
    """The weights that computed the last of them."""


@dataclass(frozen=True)
class Computed:
    """The work of one pass on a request: ``row`` and ``chain`` have an entry for each of its tokens, and
    those before ``start`` are there. ``of_draft``: the hashes of the draft model's rows, where they are
    others than ``chain``."""

    req: Req
    row: np.ndarray
    chain: np.ndarray
    start: int
    of_draft: np.ndarray | None = None

    def hashes(self, *, draft: bool) -> np.ndarray:
        """The hashes of the rows of the model or of its draft model."""
        return self.of_draft if draft and self.of_draft is not None else self.chain


@dataclass(frozen=True)
class Settings:
    """How the simulated server was started."""

    overlap: bool = False
    chunk: int | None = 32
    max_prefill: int = 256
    new_token_ratio: float = 0.3
    preemption: bool = False
    retract_wait: float | None = None
    """``--kv-retract-wait``, with preemption; None where SGLang decides."""
    mixed: bool = False
    """Decode rides along with chunks of prefill (``--enable-mixed-chunk``)."""
    max_running: int = 8
    policy: str = "fcfs"
    """``--schedule-policy``; ``lpm`` and ``dfs-weight`` match waiting requests in every pass."""


class SimulatedScheduler:
    """One rank's scheduler loop over ``cache``; ``step`` is one pass of it.

    Args:
        pools: the rank's pools and oracle.
        cache: under test.
        gate: registered with the pool, as the cache's factory does.
        settings: as the server's flags.
    """

    algorithm = SpeculativeAlgorithm.NONE
    always_tries = False
    """Whether requests are tried even if the last one did not fit, as SGLang does for models with windows."""
    adder_class: type[PrefillAdder] = PrefillAdder
    vocabulary = MODEL.vocab_size

    def __init__(
        self,
        pools: Pools,
        cache: GlobalRadixCache,
        gate: LayerGate | None,
        settings: Settings,
    ) -> None:
        self.pools = pools
        self.cache = cache
        self.gate = gate
        self.settings = settings
        self.policy = SchedulePolicy(settings.policy, cache, True, settings.preemption, False)
        self.weights = 0
        self.waiting: list[Req] = []
        self.running = ScheduleBatch(reqs=[], batch_is_full=False)
        self.last_batch: ScheduleBatch | None = None
        self.chunked: Req | None = None
        self.finished: list[Req] = []
        self.loaded_tokens = 0
        self.disk_tokens = 0
        self.retracted = 0
        """Requests sent back because memory ran out."""
        self.preempted = 0
        self.processed_tokens_counter = 0
        self.retracting = getattr(cache, "retracting", None)
        if self.retracting is not None:
            cache.scheduler = self
        self.layer_written: Callable[[int], None] = lambda layer: None
        """Called when a pass has written a layer's KV."""
        self.restarted = 0
        """Requests whose batch was thrown away."""
        self._taken: list[Req] = []
        self._restarting: dict[int, list[Req]] = {}
        self._forwards = 0
        self._results: deque[tuple[ScheduleBatch, list[int]]] = deque()
        self._pending_chunked_abort: Req | None = None
        self._served: dict[Req, Served] = {}
        self._count = 0

    # -- actions of clients and operators -------------------------------------------------------

    def submit(
        self,
        tokens: list[int],
        *,
        new_tokens: int,
        extra_key: str | None = None,
        salt: str | None = None,
        priority: int = 0,
        private: bool = False,
        adapter: str | None = None,
    ) -> Req:
        """A request arrives. A private one brings embeddings of its own for some tokens.

        adapter: the id of a LoRA adapter.
        """
        parameters = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        parameters.normalize(None)
        self._count += 1
        req = Req(
            f"r{self._count}",
            "",
            array("q", tokens),
            parameters,
            extra_key=extra_key,
            cache_salt=salt,
            vocab_size=self.vocabulary,
            priority=priority,
            lora_id=adapter,
            positional_embed_overrides=PositionalEmbeds(torch.zeros(1, 4), [0]) if private else None,
        )
        req.reasoning_tokens = 1  # counts with --strip-thinking-cache only
        self._served[req] = Served()
        self._enqueue([req])
        return req

    def tenant_of(self, req: Req) -> tuple[str | None, str | None]:
        """The extra key and the salt with which a request came."""
        return req.extra_key, req.cache_salt

    def _enqueue(self, reqs: list[Req]) -> None:
        """``Scheduler._add_request_to_queue``."""
        for req in reqs:
            self._prefetch_kvcache(req)
            self.waiting.append(req)

    def _prefetch_kvcache(self, req: Req) -> None:
        """With storage below the host."""
        if self._uses_storage:
            req.init_next_round_input(self.cache, cow_mamba=False)
            matched = current.prefix_tokens(req) + req.host_hit_length
            tokens = req.full_untruncated_fill_ids
            self.cache.prefetch_from_storage(
                req.cache_request_handle,
                req.last_host_node,
                tokens[matched : req._compute_max_prefix_len(len(tokens))],
                self.cache.get_last_hash_value(req.last_host_node),
                None,
                matched_prefix_tokens=tokens[:matched],
                extra_key=req.extra_key,
                cache_salt=req.cache_salt,
                storage_hit_end=None,
            )

    @property
    def _uses_storage(self) -> bool:
        return self.cache.uses_storage

    @property
    def waiting_queue(self) -> list[Req]:
        """As SGLang names it."""
        return self.waiting

    @property
    def result_queue(self) -> deque[tuple[ScheduleBatch, list[int]]]:
        """As SGLang names it."""
        return self._results

    def abort(self, req: Req) -> None:
        """A client goes away: ``Scheduler.abort_request``."""
        if self.chunked is req:
            self._pending_chunked_abort = req
        if req in self.waiting:
            self.waiting.remove(req)
            self._withdraw(req)
            self._forget(req)
        elif req is not self.chunked and not req.finished():
            req.to_finish = FINISH_ABORT()

    def _withdraw(self, req: Req) -> None:
        """A waiting request goes away."""
        self.cache.finish(req.cache_request_handle, CacheRequestOutcome.ABORT)

    def change_weights(self) -> None:
        """The model's weights are replaced under running requests, without a flush."""
        self.begin_to_change_weights()
        self.cache.weights_changed()

    def begin_to_change_weights(self) -> None:
        """Begin to replace the weights; they are final once ``weights_changed`` is called."""
        self.cache.weights_changing()
        self.weights += 2  # as the cache counts: one number is theirs while they change

    def retract_all(self) -> None:
        """``pause_generation`` in mode "retract": every running request goes back to the queue."""
        self._drain_results()
        if self.last_batch is not None and self.last_batch.forward_mode.is_extend():
            self._merge_last_batch()
        self.last_batch = None
        if self.running.reqs:
            self.running.filter_batch()
            reqs = list(self.running.reqs)
            retract_all(
                reqs=reqs,
                req_to_token_pool=self.pools.requests,
                token_to_kv_pool_allocator=self.pools.allocator,
                tree_cache=self.cache,
                hisparse_coordinator=None,
            )
            self._enqueue(reqs)
            self.running.filter_batch(keep_indices=[])
            self.running.batch_is_full = False

    def flush(self) -> bool:
        """``/flush_cache``: only when nothing runs and nothing waits."""
        if not self.idle:
            return False
        self.cache.reset()
        self.pools.requests.clear()
        self.pools.allocator.clear()
        return True

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return (
            not (self.waiting or self._restarting or self.active())
            and self.last_batch is None
            and not self._results
        )

    def active(self) -> list[Req]:
        """Every request that holds slots."""
        batches = [self.running, self.last_batch, *(batch for batch, _ in self._results)]
        reqs = [req for batch in batches if batch is not None for req in batch.reqs]
        if self.chunked is not None:
            reqs.append(self.chunked)
        return [req for req in dict.fromkeys(reqs) if req.kv.holds_kv]

    # -- the loop -------------------------------------------------------------------------------

    def step(self) -> None:
        """One pass of ``event_loop_overlap`` or ``event_loop_normal``."""
        batch = self.launch()
        if batch is None and self.waiting:
            threading.Event().wait(0.0005)  # for the threads of the disk
        self.complete(batch)

    def launch(self) -> ScheduleBatch | None:
        """The first half of a pass: form a batch, and compute it."""
        batch = self._next_batch()
        if batch is not None:
            tokens = self._run(batch)
            self._results.append((batch.copy(), tokens))
        return batch

    def complete(self, batch: ScheduleBatch | None) -> None:
        """The second half, with the batch of the first: process the results, with overlap those of the batch
        before."""
        if self.settings.overlap:
            if self.last_batch is not None:
                self._process(*self._results.popleft())
        else:
            self._drain_results()
        self.last_batch = batch

    def _run(self, batch: ScheduleBatch) -> list[int]:
        """A forward pass. It may read wrong KV if the cache reports that afterwards."""
        self._forwards += 1
        batch.forward_iter = self._forwards
        wrong: WrongKvError | None = None
        tokens = [-1] * len(batch.reqs)
        try:
            tokens = self._forward(batch)
        except WrongKvError as error:
            wrong = error
            self._wait_for_all_layers()
        if batch.forward_mode.is_extend() and not self._pass_counts(batch):
            if self.chunked in batch.reqs:
                self.chunked = None
            self._taken = take_back(batch.reqs, self.cache)
            self._restarting[batch.forward_iter] = self._taken
            self.restarted += len(self._taken)
        elif wrong is not None:
            raise wrong
        return tokens

    def _pass_counts(self, batch: ScheduleBatch) -> bool:
        """Whether a prefill's KV is right, as far as the cache can tell."""
        return self.cache.streams_hold()

    def _wait_for_all_layers(self) -> None:
        for layer in range(self.pools.oracle.layers):
            self.pools.read(layer)

    def _drain_results(self) -> None:
        while self._results:
            self._process(*self._results.popleft())

    def _next_batch(self) -> ScheduleBatch | None:
        self._process_pending_chunked_abort()
        self.cache.check_hicache_events()
        if self._taken:
            assert self.last_batch is not None
            keep = [i for i, req in enumerate(self.last_batch.reqs) if req not in self._taken]
            self.last_batch.filter_batch(keep_indices=keep)
            self._taken = []
        chunked = self.chunked
        if chunked is not None and current.computed_end(chunked) > current.prefix_tokens(chunked):
            publish(chunked, self.cache)
        if self.last_batch is not None and self.last_batch.forward_mode.is_extend():
            self._merge_last_batch()
        before = self.running.batch_size()
        self.running.filter_batch()
        if self.running.batch_size() < before:
            self.running.batch_is_full = False
        batch = self._new_prefill_batch()
        if batch is not None:
            self._prefill_begins(batch)
            return batch
        if not self.running.is_empty():
            self._update_running()
        elif self.running.batch_is_full:
            self.running.batch_is_full = False
        return None if self.running.is_empty() else self.running

    def _prefill_begins(self, batch: ScheduleBatch) -> None:
        ticket = self.cache.ready_to_load_host_cache()
        batch.hicache_consumer_index = ticket
        lengths = list(zip(batch.extend_lens, batch.prefix_lens, strict=True))
        self.cache.prefill_begins(lengths, loads=ticket != -1)
        self.cache.pass_begins(batch.reqs)

    def _prefill_ended(self) -> None:
        self.cache.prefill_ended()

    def _merge_last_batch(self) -> None:
        last = self.last_batch
        assert last is not None
        out = [req for req in (self.chunked, last.chunked_req) if req is not None]
        before = last.batch_size()
        last.filter_batch(out)
        if last.batch_size() < before:
            self.running.batch_is_full = False
        if not last.is_empty():
            if self.running.is_empty():
                self.running = last
            else:
                self.running.merge_batch(last)

    def _process_pending_chunked_abort(self) -> None:
        req = self._pending_chunked_abort
        if req is None:
            return
        self._pending_chunked_abort = None
        if self.chunked is not req:
            if not req.finished() and req.kv.holds_kv:
                self.abort(req)
            return
        req.finished_reason = FINISH_ABORT()
        req.to_finish = None
        current.release(req, self.cache, keep=False)
        self.chunked = None
        self._forget(req)

    def _new_prefill_batch(self) -> ScheduleBatch | None:
        running = self.running
        if self.settings.preemption or self.always_tries:
            running.batch_is_full = False
        if (running.batch_is_full or not self.waiting) and self.chunked is None:
            return None
        self.policy.calc_priority(self.waiting, running)
        adder = self.adder_class(
            self.pools.kind.page,
            self.cache,
            self.pools.allocator,
            running,
            self.new_token_ratio,
            self.settings.max_prefill,
            self.settings.chunk,
            len(running.reqs) if self.settings.mixed else 0,
            max_running_requests=self.settings.max_running,
            waiting_queue_len=len(self.waiting),
        )
        if self.chunked is not None:
            self.chunked.init_next_round_input()
            self.chunked = adder.add_chunked_req(self.chunked)
        self._admission_begins()
        for req in list(self.waiting):
            if adder.budget_state() == AddReqResult.OTHER:
                break
            free_rows = self.pools.requests.available_size()
            allocatable = min(self.settings.max_running - len(running.reqs), free_rows)
            if len(adder.can_run_list) >= allocatable:
                running.batch_is_full = True
            if running.batch_is_full and not (self.settings.preemption and self._preempts(adder, req)):
                break
            if self._uses_storage:
                if not self.cache.check_prefetch_progress(req.cache_request_handle):
                    continue
                self._brought(req, *self.cache.pop_prefetch_loaded_span(req.cache_request_handle))
            self._match(req)
            result = self._add(adder, req)
            if result != AddReqResult.CONTINUE:
                if result == AddReqResult.NO_TOKEN:
                    running.batch_is_full = True
                if req not in adder.can_run_list:
                    self._refused(req)
                break
        self._admission_ends()
        admitted = adder.can_run_list
        self.preempted += len(adder.preempt_list)
        self.waiting = [req for req in self.waiting if req not in admitted]
        self._enqueue(adder.preempt_list)
        if self.retracting is not None:
            self.retracting.queue()
            self.retracting.admitted(admitted)
        if not admitted:
            return None
        if adder.new_chunked_req is not None:
            assert self.chunked is None
            self.chunked = adder.new_chunked_req
        if self.chunked is not None:
            self.chunked.inflight_middle_chunks += 1
        batch = ScheduleBatch.init_new(
            admitted,
            self.pools.requests,
            self.pools.allocator,
            self.cache,
            MODEL,
            self.settings.overlap,
            self.algorithm,
            chunked_req=self.chunked,
        )
        for req in admitted:
            self.loaded_tokens += req.host_loaded_length if req.extend_batch_idx == 0 else 0
        self._prepare(batch)
        batch.decoding_reqs = None
        if self.settings.mixed and not running.is_empty():
            self._mix(batch)
        return batch

    def _prepare(self, batch: ScheduleBatch) -> None:
        batch.prepare_for_extend()

    def _preempts(self, adder: PrefillAdder, req: Req) -> bool:
        """``preempt_to_schedule`` with its hook."""
        if self.retracting is None:
            return bool(adder.preempt_to_schedule(req))
        return self.retracting.make_room(adder, req, rows=1)

    def _add(self, adder: PrefillAdder, req: Req) -> AddReqResult:
        """``add_one_req`` with its hook."""
        about = {"has_chunked_req": self.chunked is not None, "truncation_align_size": None}
        if self.retracting is None:
            return adder.add_one_req(req, **about)
        return self.retracting.add(PrefillAdder.add_one_req, adder, req, **about)

    def _admission_begins(self) -> None:
        """SGLang's step for models with states before it takes requests from the queue."""

    def _admission_ends(self) -> None:
        """And afterwards."""

    def _brought(self, req: Req, tokens: int, start: int | None) -> None:
        """Tokens of a request have come from disk, from ``start`` on."""
        self.disk_tokens += tokens

    def _refused(self, req: Req) -> None:
        """A request was matched and is not admitted."""

    @property
    def new_token_ratio(self) -> float:
        """The share of the tokens that requests may still generate for which admission leaves room."""
        return self.settings.new_token_ratio

    def _retracting(self, ratio: float) -> None:
        """Requests were sent back. ratio: SGLang's new estimate of that share."""

    def _mix(self, batch: ScheduleBatch) -> None:
        running = self.running
        running.filter_batch()
        if not running.is_empty():
            running.prepare_for_decode()
            batch.mix_with_running(running)
            batch.decoding_reqs = running.reqs
            self.running = ScheduleBatch(reqs=[], batch_is_full=running.batch_is_full)

    def _match(self, req: Req) -> None:
        served = self._served[req]
        served.namespace = (self.weights, req.extra_key, req.cache_salt)
        if req.positional_embed_overrides is not None:
            served.namespace = ("private", req.rid)
        served.chain, served.weights = [], self.weights
        req.host_loaded_length = 0
        req.init_next_round_input(self.cache)

    def _update_running(self) -> None:
        running = self.running
        before = running.batch_size()
        running.filter_batch()
        if running.is_empty():
            running.batch_is_full = False
            return
        if not running.check_decode_mem():
            retracted, ratio, aborted = running.retract_decode()
            self._retracting(ratio)
            self.retracted += len(retracted)
            self._enqueue(retracted)
            for req in aborted:
                self._forget(req)
        if running.batch_size() < before:
            running.batch_is_full = False
        if not running.is_empty():
            running.prepare_for_decode()

    # -- the model ------------------------------------------------------------------------------

    def _forward(self, batch: ScheduleBatch) -> list[int]:
        """Compute a batch layer by layer, and read of each layer the rows that attention reads."""
        if self.gate is not None:
            self.gate.set_consumer(batch.hicache_consumer_index)
        work = self._rows_of(batch)
        oracle = self.pools.oracle
        for layer in range(oracle.layers):
            self.pools.read(layer)
            for each in work:
                self._compute(each, layer)
            self.layer_written(layer)
        return [token_at(req, end) for req, end in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True)]

    def _compute(self, work: Computed, layer: int) -> None:
        """Read one layer's rows of a request that are there, and write the others."""
        oracle, draft = self.pools.oracle, layer >= self.pools.kind.layers
        row, hashes, start = work.row, work.hashes(draft=draft), work.start
        what = f"{'draft' if draft else 'prefix'} of {work.req.rid} in forward"
        oracle.compare(row[:start], hashes[:start], layer, what)
        oracle.write(row[start : len(hashes)], hashes[start:], layer)

    def _rows_of(self, batch: ScheduleBatch) -> list[Computed]:
        """The part of each request that a pass computes."""
        work: list[Computed] = []
        taken: list[int] = []
        for i, req in enumerate(batch.reqs):
            end = int(batch.seq_lens_cpu[i])
            if batch.forward_mode.is_extend() and req not in (batch.decoding_reqs or ()):
                tokens = req.get_fill_ids()
                start = current.prefix_tokens(req)
                assert end == len(tokens) == current.computed_end(req)
            else:
                tokens = array("q", [*req.origin_input_ids, *req.output_ids])
                start = end - 1
                if len(tokens) < end:  # with overlap, only the model has the newest token
                    tokens.append(token_at(req, start))
            chain = self._chain(req, tokens[:end], start)
            row = self.pools.requests.req_to_token[req.kv.req_pool_idx, :end].numpy().astype(np.int64)
            work.append(Computed(req, row, chain, start))
            taken += row[start:].tolist()
        assert sorted(taken) == sorted(batch.out_cache_loc.tolist()), "the batch computes other slots"
        return work

    def _chain(self, req: Req, tokens: Sequence[int], start: int) -> np.ndarray:
        """The hashes of a text of which the tokens from ``start`` on are computed now."""
        served = self._served[req]
        del served.chain[start:]
        new = tokens[len(served.chain) :]
        if served.chain and served.weights != self.weights:
            # KV computed by these weights from KV of other weights equals no other KV.
            tail = [served.chain[-1] ^ (self.weights << 32)]
            extend_chain(tail, served.namespace, new)
            served.chain += tail[1:]
        else:
            extend_chain(served.chain, served.namespace, new)
        served.weights = self.weights
        return np.array(served.chain, np.uint64)

    # -- results --------------------------------------------------------------------------------

    def _process(self, batch: ScheduleBatch, tokens: list[int]) -> None:
        allocator = self.pools.allocator
        allocator.free_group_begin()
        if self.retracting is not None:
            retraction = self.retracting.retraction
            (retraction.decoded if batch.forward_mode.is_decode() else retraction.interrupted)()
        for i, (req, token) in enumerate(zip(batch.reqs, tokens, strict=True)):
            if batch.forward_mode.is_extend():
                self._process_prefill(req, token, decoding=req in (batch.decoding_reqs or ()))
            elif not (req.finished() or req.is_retracted):
                self._append(req, token)
                self._decoded(req, batch, i)
        allocator.free_group_end()
        if batch.forward_mode.is_extend():
            self._prefill_ended()
        self._enqueue(self._restarting.pop(batch.forward_iter, []))

    def _append(self, req: Req, token: int) -> None:
        """A decoding pass has made a token."""
        req.output_ids.append(token)
        req.update_finish_state(1)

    def _decoded(self, req: Req, batch: ScheduleBatch, i: int) -> None:
        """The request at ``i`` of a batch has a new token."""
        if req.finished():
            self._finish(req)

    def _process_prefill(self, req: Req, token: int, *, decoding: bool) -> None:
        if (req.finished() and req.inflight_middle_chunks <= 0) or req.is_retracted:
            return
        if req.inflight_middle_chunks > 0:
            req.inflight_middle_chunks -= 1
            return
        req.output_ids.append(token)
        req.update_finish_state()
        if req.finished():
            self._finish(req)
        elif not decoding:
            publish(req, self.cache)

    def _finish(self, req: Req) -> None:
        current.release(req, self.cache, keep=True)
        self.finished.append(req)
        self._forget(req)

    def _forget(self, req: Req) -> None:
        self._served.pop(req, None)


def token_at(req: Req, position: int) -> int:
    """The model's token at a position: equal prompts get equal answers."""
    return (position * 7 + sum(req.origin_input_ids[:8])) % 4

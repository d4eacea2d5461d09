"""Running requests give way to one of a higher priority, and go on from their KV (Symphony, 3.5).

`sglang_ext.engine.retraction` decides; this class passes it the scheduler's state and carries out its
decisions. Where SGLang frees the KV of requests that it preempts, whole blocks go to the tree here, and from
there to DRAM like any other: HBM evicts them only when it needs the slots. The request waits with its answer
so far, and is prefilled from cached KV when it is its turn again; the client's stream goes on behind the
token that it has seen last.

    make_room   no place is free for a request, in SGLang's pass over the waiting ones: decide, and retract
    add         a place is free, but slots may be lacking: the same
    queue       the pass is over: retracted requests wait
    admitted    the retracted requests in a prefill batch, and how much of their KV was found

All methods run in the scheduler's thread, at the same place of a pass on every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from sglang_ext.engine.retraction import Retraction, Running, Wanting, Why, obstacle
from sglang_ext.engine.tiers.load_policy import Speeds
from sglang_ext.keys import encode_tokens
from sglang_ext.radix_global import Holder, RadixTree

if TYPE_CHECKING:
    from sglang_ext.patches.adapter.request_rows import RequestRows

logger = logging.getLogger(__name__)

_HAD: Final = "sglang_ext_had_tokens"
"""Attribute of a request that was retracted: of how many tokens it had KV."""
_AVOIDED: Final = "sglang_ext_waits"
"""Attribute of a request that waits although others could give way: it is counted once."""


class RetractsFrom(Protocol):
    """The part of the rank's cache that retraction uses."""

    scheduler: Any
    tree: RadixTree
    hbm: Holder
    block_size: int
    speeds: Speeds
    priority_sign: int
    rows: RequestRows

    def namespace(self, extra_key: str | None, cache_salt: str | None) -> Hashable: ...


class Retracting:
    """See the module's docstring.

    Args:
        cache: the rank's, which knows the scheduler.
    """

    def __init__(self, cache: RetractsFrom, retraction: Retraction) -> None:
        self._cache = cache
        self.retraction = retraction
        self._retracted: list[Any] = []
        """In this pass; they are in no queue yet."""

    def __repr__(self) -> str:
        return f"Retracting({self.retraction!r}, retracted={len(self._retracted)})"

    def make_room(self, adder: Any, req: Any, *, rows: int) -> bool:
        """Whether others have given way to a request, so that it fits now.

        Args:
            adder: SGLang's ``PrefillAdder``, of this pass.
            req: waits, and does not fit.
            rows: places among the running requests that it lacks.
        """
        try:
            running = list(adder.running_batch.reqs)
            threshold, own = adder.priority_scheduling_preemption_threshold, self._priority(req)
            if not any(own - self._priority(each) > threshold for each in running):
                return False  # the usual case: its prompt need not be looked up
            want = self._wanting(adder, req, rows)
            verdict = self.retraction.judge(want, self._facts(adder, running), threshold)
        except Exception:
            logger.exception("whether requests give way to another one could not be decided")
            self.retraction.counters.error += 1
            return False
        if verdict is None:
            return False
        if verdict.why is Why.SHORT and not getattr(req, _AVOIDED, False):
            setattr(req, _AVOIDED, True)
            self.retraction.counters.avoided += 1
        if verdict.retract:
            self._retract(adder, [running[index] for index in verdict.retract])
        return bool(verdict.retract)

    def add(self, stock: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        """Admit a request by SGLang's ``add_one_req`` (`stock`, with its arguments); if slots are lacking,
        others may give way."""
        from sglang.srt.managers.schedule_policy import AddReqResult

        result = stock(adder, req, *args, **kwargs)
        # After an admitted request, the adder's answer is about the next one.
        if result is not AddReqResult.NO_TOKEN or req in adder.can_run_list:
            return result
        if not self.make_room(adder, req, rows=0):
            return result
        # Its prefix may be among the KV that the others had.
        req.init_next_round_input(adder.tree_cache)
        return stock(adder, req, *args, **kwargs)

    def queue(self) -> None:
        """Have those wait that were retracted in the pass that is over.

        SGLang itself queues the requests that it preempts only if another was admitted in their place, and
        aborts them when the queue is full (``--max-queued-requests``). These have been admitted before.
        """
        retracted, self._retracted = self._retracted, []
        scheduler = self._cache.scheduler
        for req in retracted:
            req.storage_prefetch_retry_attempts = 0
            req.storage_prefetch_last_match_len = None
            req.staged_prefetch_plan = None
            scheduler._prefetch_kvcache(req)
            scheduler.waiting_queue.append(req)
            req.time_stats.set_wait_queue_entry_time()
            req.arrival_processed_tokens = scheduler.processed_tokens_counter

    def admitted(self, reqs: Sequence[Any]) -> None:
        """These requests are about to be prefilled."""
        from sglang_ext.patches.seams import current

        counters = self.retraction.counters
        for req in reqs:
            had = getattr(req, _HAD, None)
            if had is not None:
                delattr(req, _HAD)
                found = min(current.prefix_tokens(req), had)
                counters.resumed += 1
                counters.found_tokens += found
                counters.recomputed_tokens += had - found

    # -- the scheduler's state ------------------------------------------------------------------------------

    def _wanting(self, adder: Any, req: Any, rows: int) -> Wanting:
        """The slots that a waiting request lacks, as ``PrefillAdder.add_one_req`` counts them."""
        from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

        cache = self._cache
        tokens = req.origin_input_ids + req.output_ids
        path = []
        if req.positional_embed_overrides is None:
            namespace = cache.namespace(req.extra_key, req.cache_salt)
            path = cache.tree.match(namespace, encode_tokens(tokens[:-1])).path
        known = sum(node.blocks for node in path) * cache.block_size
        in_hbm = [node for node in path if cache.hbm in node.placements]
        held = sum(node.blocks for node in in_hbm) * cache.block_size
        # Its own prefix does not leave HBM for it.
        pinned = sum(node.blocks for node in in_hbm if not node.locks.get(cache.hbm)) * cache.block_size
        most = min(max(req.sampling_params.max_new_tokens - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS)
        needs = len(tokens) - held + pinned + most + adder.per_req_token_overhead
        return Wanting(
            priority=self._priority(req),
            tokens=needs + 1 - adder.rem_total_tokens,  # SGLang wants one more than it needs
            rows=rows,
            compute_s=cache.speeds.seconds(len(tokens) - known, known),
        )

    def _facts(self, adder: Any, reqs: Sequence[Any]) -> list[Running]:
        arriving = self._arriving()
        return [self._fact(adder, req, arrived=req not in arriving) for req in reqs]

    def _fact(self, adder: Any, req: Any, *, arrived: bool) -> Running:
        reserved = adder._get_running_request_total_token_offset(req)
        if req.finished() or not req.kv.holds_kv:
            # It has given its KV back, and leaves the batch after this pass.
            return Running(self._priority(req), 0, 0, reserved, retractable=False)
        return Running(
            priority=self._priority(req),
            remaining=max(req.sampling_params.max_new_tokens - len(req.output_ids), 0),
            held=self._held(req),
            reserved=reserved,
            retractable=arrived
            and req.to_finish is None
            and not req.skip_radix_cache_insert
            and self._cache.rows.namespace_of(req) is not None
            and not obstacle(req),
        )

    def _held(self, req: Any) -> int:
        """Slots that no other request uses."""
        hbm, node = self._cache.hbm, req.last_node
        blocks = 0
        while node is not None and node.parent is not None and node.locks.get(hbm) == 1:
            blocks += node.blocks if hbm in node.placements else 0
            node = node.parent
        return (
            int(req.kv.kv_allocated_len) - int(req.kv.cache_protected_len) + blocks * self._cache.block_size
        )

    def _arriving(self) -> set[Any]:
        """The running requests whose prefill has been launched, and has no result yet (overlap)."""
        under_way = getattr(self._cache.scheduler, "result_queue", ())
        return {req for batch, _ in under_way if batch.forward_mode.is_extend() for req in batch.reqs}

    def _priority(self, req: Any) -> int:
        """Larger goes first."""
        return int(req.priority or 0) * self._cache.priority_sign

    # -- giving way ---------------------------------------------------------------------------------------

    def _retract(self, adder: Any, reqs: Sequence[Any]) -> None:
        batch = adder.running_batch
        gone: list[Any] = []
        try:
            for req in reqs:
                adder.memory_budget.total_offset -= adder._get_running_request_total_token_offset(req)
                gone.append(req)
                self._let_go(req)
        finally:
            batch.filter_batch(keep_indices=[at for at, req in enumerate(batch.reqs) if req not in gone])
            self._retracted += gone

    def _let_go(self, req: Any) -> None:
        from sglang_ext.patches.seams import current

        # Of the newest token there is no KV yet, or it is just being computed (overlap).
        had = len(req.origin_input_ids) + len(req.output_ids) - 1
        try:
            # It has not ended, so no listener is called.
            self._cache.rows.keep(req, (req.origin_input_ids + req.output_ids)[:had])
        except Exception:
            logger.exception("the KV of a retracted request could not be kept; it is computed again")
            self.retraction.counters.error += 1
        current.release(req, self._cache, keep=False)
        req.reset_for_retract()
        # Those have come, and SGLang would count from the beginning.
        req.sampling_params.min_new_tokens = 0
        setattr(req, _HAD, had)
        self.retraction.counters.retracted += 1

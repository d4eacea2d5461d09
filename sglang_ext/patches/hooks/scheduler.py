"""Let the scheduler call our cache where it calls HiCache.

Change: SGLang's scheduler informs a cache of its loop, of a prefill batch that is about to run, and of
idleness only when HiCache, LMCache, FlexKV or an external linker is on. These hooks call ours:

- once, after the pools of draft models are made and before the cache is: the drafts' runners are kept for the
  cache, because their KV is in the slots of the model's and belongs to the same blocks;
- once, at start: with a disk tier, the scheduler follows its protocol for storage below the host
  (``patches/adapter/storage_prefetch.py``) as it does with a HiCache storage backend;
- each pass of any of the scheduling loops, after requests came and before the next batch is chosen:
  ``check_hicache_events()``;
- a prefill batch was formed (prefixes matched, ``init_load_back`` called, slots allocated and written to the
  request table, forward not started): ``ready_to_load_host_cache()``, whose result goes to
  ``batch.hicache_consumer_index`` and from there to the layer counter's ``set_consumer`` just before forward;
- the length of a prompt's first chunk, or of the next one, is chosen: ``chunks`` may end it earlier, where
  the cache wants a state;
- an embedding batch is about to run: ``set_consumer`` with the same number. SGLang calls it only where tokens
  are generated, and the batch would read KV that is still being loaded;
- a beam search request came: refused where there is a DRAM tier, as SGLang refuses it beside HiCache;
- a prefill batch is about to run, and its result was processed: ``prefill_begins`` and ``prefill_ended``,
  from which the cache measures the cost of computing, and ``pass_begins``, which names the requests whose KV
  this pass computes;
- no prefill batch was formed and nothing runs: ``batch_is_full`` is taken back, as SGLang does for HiCache,
  because slots that a copy still locks come free without a request finishing;
- each idle pass, after SGLang's own leak check and before it sleeps: ``sanity_check()``, which SGLang itself
  calls only for models with sliding windows or Mamba layers. It sleeps for a moment only while the cache
  ``keeps_awake``, because it brings KV in ahead of requests.

Why no extension point serves: a registered cache backend is only constructed; the calls are guarded by the
flags of the built-in tiers.

Can go: when SGLang calls these for every cache that has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sglang_ext.patches.plugin_hooks import Hook, hook_patch
from sglang_ext.patches.process import PROCESS

NAP_MILLISECONDS = 1

BEAMS_REFUSED = "Beam search is not supported with --kv-dram-size. Send it to a server without a DRAM tier."

_SPEC_WORKER = "sglang.srt.speculative.base_spec_worker.BaseSpecWorker"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"


class CalledCache(Protocol):
    """The cache's methods that the hooks call. All calls come from the scheduler's thread and must not block
    it for long."""

    def check_hicache_events(self) -> None:
        """Take note of copies that have finished on every rank. Once per pass of the scheduling loop."""

    def ready_to_load_host_cache(self) -> int:
        """Start the loads that ``init_load_back`` queued for the batch; its number, or -1 for none."""

    def meet(self, scheduler: Any) -> None:
        """The scheduler is there. Once."""

    uses_storage: bool
    """Whether it follows the protocol for storage below the host."""

    dram: Any
    """The DRAM tier, or None."""

    def prefill_begins(self, lengths: Sequence[tuple[int, int]], *, loads: bool) -> None:
        """A prefill batch is about to run: of each request the tokens to compute and those before them, and
        whether it waits for loads.
        """

    def pass_begins(self, reqs: Sequence[Any]) -> None:
        """The same of the batch's requests: their slots are in the request table."""

    def streams_hold(self) -> bool:
        """A prefill batch has run: whether everything that streamed into it was verified."""

    def prefill_ended(self) -> None:
        """The result of the oldest such batch was processed."""

    def sanity_check(self) -> None:
        """Nothing runs and nothing waits. Every pass: about once a second with --sleep-on-idle, else
        thousands of times a second."""

    def leave_window(self, req: Any, chunk: int) -> None:
        """Free rows of an unshared prompt that no window reaches from its last chunk on.

        Args:
            chunk: most tokens of a chunk.
        """

    chunks: Any
    """Ends chunks of prefills where states are worth keeping (``patches/adapter/hybrid/chunks.py``)."""

    keeps_awake: bool
    """Whether the next passes have something to do though nothing runs and nothing waits."""

    def weights_changing(self) -> None:
        """The model's weights are about to change, and may until ``weights_changed``: KV from before must
        not match afterwards, and KV computed meanwhile must not be cached.
        """

    def weights_changed(self) -> None:
        """The weights stay as they are now."""

    def settle(self) -> None:
        """The pool's memory is about to go away: wait for every copy that reads or writes it."""


def called_cache(scheduler: Any) -> CalledCache | None:
    """The scheduler's cache when it is ours. None for any other, and before the scheduler has one."""
    cache: CalledCache | None = PROCESS.cache
    return cache if cache is not None and getattr(scheduler, "tree_cache", None) is cache else None


def after_ingest(_result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """After ``ingest_requests``, with which each pass of every loop begins, on all ranks alike."""
    cache = called_cache(scheduler)
    if cache is not None:
        cache.check_hicache_events()


def after_prefill_batch(result: tuple[Any, Any], scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """After ``_get_new_batch_prefill_raw``: start the batch's loads, or let the next pass try again."""
    cache = called_cache(scheduler)
    if cache is None:
        return
    batch, running_batch = result
    if batch is not None:
        ticket = cache.ready_to_load_host_cache()
        batch.hicache_consumer_index = ticket
        cache.prefill_begins(list(zip(batch.extend_lens, batch.prefix_lens, strict=True)), loads=ticket != -1)
        cache.pass_begins(batch.reqs)
    elif running_batch.is_empty():
        running_batch.batch_is_full = False


def around_selection(stock: Callable[..., Any], adder: Any, req: Any, **about: Any) -> Any:
    """Around ``_select_prefill_admission``: a request's first chunk."""
    cache = called_cache(adder)
    if cache is None or cache.chunks is None:
        return stock(adder, req, **about)
    return cache.chunks.admit(stock, adder, req, **about)


def around_chunk(stock: Callable[..., Any], adder: Any, req: Any) -> Any:
    """Around ``add_chunked_req``: the next chunk of a request, which is returned if more chunks follow."""
    from sglang.srt.runtime_context import get_schedule

    cache = called_cache(adder)
    if cache is None:
        return stock(adder, req)
    cache.leave_window(req, get_schedule().chunked_prefill_size)
    return stock(adder, req) if cache.chunks is None else cache.chunks.go_on(stock, adder, req)


def after_draft_plan(_result: None, worker: Any) -> None:
    """After ``init_hicache_draft_plan``: keep the runners of the draft models that have KV of their own."""
    PROCESS.drafts = tuple(worker._draft_model_runners())


def before_embedding(worker: Any, batch: Any) -> None:
    """Before ``forward_batch_embedding``, as ``forward_batch_generation`` does it itself."""
    if PROCESS.cache is not None:
        worker.set_hicache_consumer(batch.hicache_consumer_index)


def around_beam(stock: Callable[..., str | None], coordinator: Any, req: Any, recv_req: Any) -> str | None:
    """Around ``BeamCoordinator.validate_and_init``; returns the request's fault, or None."""
    cache = called_cache(coordinator)
    if cache is not None and cache.dram is not None:
        return BEAMS_REFUSED
    return stock(coordinator, req, recv_req)


def after_running_status(_result: None, scheduler: Any) -> None:
    """After ``init_running_status``, which comes once the cache is there and before any request."""
    cache = called_cache(scheduler)
    if cache is None:
        return
    cache.meet(scheduler)
    if cache.uses_storage:
        scheduler.enable_hicache_storage = True


def after_batch_result(_result: None, scheduler: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    """After ``process_batch_result``."""
    cache = called_cache(scheduler)
    if cache is not None and batch.forward_mode.is_extend():
        cache.prefill_ended()


def around_sleep(sleep: Callable[[Any], None], scheduler: Any) -> None:
    """Around ``maybe_sleep_on_idle``, the end of SGLang's idle work."""
    cache = called_cache(scheduler)
    if cache is None:
        sleep(scheduler)
        return
    cache.sanity_check()
    if not cache.keeps_awake:
        sleep(scheduler)
    elif scheduler.idle_sleeper is not None:
        # Until a request comes, or there may be something to do: a whole sleep takes a second.
        scheduler.idle_sleeper.poller.poll(NAP_MILLISECONDS)


PATCH = hook_patch(
    "scheduler_calls",
    "the scheduler tells our cache about its loop, prefill batches and idleness, as it tells HiCache",
    Hook(f"{_SCHEDULER}.ingest_requests", "after", after_ingest),
    Hook(f"{_SCHEDULER}._get_new_batch_prefill_raw", "after", after_prefill_batch),
    Hook(f"{_ADDER}._select_prefill_admission", "around", around_selection),
    Hook(f"{_ADDER}.add_chunked_req", "around", around_chunk),
    Hook(f"{_SCHEDULER}.init_running_status", "after", after_running_status),
    Hook(f"{_SCHEDULER}.process_batch_result", "after", after_batch_result),
    Hook("sglang.srt.managers.tp_worker.BaseTpWorker.forward_batch_embedding", "before", before_embedding),
    Hook("sglang.srt.beam_search.coordinator.BeamCoordinator.validate_and_init", "around", around_beam),
    Hook(f"{_SCHEDULER}.maybe_sleep_on_idle", "around", around_sleep),
    Hook(f"{_SPEC_WORKER}.init_hicache_draft_plan", "after", after_draft_plan),
)

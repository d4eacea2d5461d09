"""SGLang's scheduler over a model with windows or states, around a cache of the kind `UnifiedRadixCache`.

The pools, allocators, requests and batches are SGLang's, and so are the counts of slots and the choice of the
states that a prefill keeps. As in `engine_scheduler`, the model is simulated. For token i it writes rows of
tokens[:i + 1] in the layers with full attention and in those with a window, and after a pass the request's
state is that of all its tokens. Before, it compares each row that a real model reads: of all tokens, of the
window before the first new token through SGLang's mapping, and the state of exactly the tokens before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from engine_hybrid_pools import FULL, MAMBA, SWA, HybridKind, HybridPools, Ids, process_settings
from engine_pools import Hashes, WrongKvError, extend_chain
from engine_scheduler import Computed, Settings, SimulatedScheduler, token_at
from engine_simulation import CONTEXT, Traffic
from sglang.srt.layers.attention.mamba.prefill_track_metadata import build_prefill_track_plan
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.scheduler_components.invariant_checker import SchedulerInvariantChecker
from sglang.srt.managers.scheduler_components.pool_stats_observer import SchedulerPoolStatsObserver
from sglang.srt.mem_cache.base_prefix_cache import EvictResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_ext.patches.adapter.hybrid.cache import HybridRadixCache
from sglang_ext.patches.seams import current

SMALL = Settings(new_token_ratio=0.05)
OVERLAP = Settings(overlap=True, new_token_ratio=0.05)
PAGED = Settings(chunk=48, new_token_ratio=0.05)

MakeCache = Callable[[CacheInitParams], UnifiedRadixCache]


class Below(Protocol):
    """Memory below HBM."""

    def settle(self) -> None:
        """Wait for all copies."""

    def close(self) -> None:
        """End its threads."""

    def check(self, rank: HybridRank) -> None:
        """Compare its bytes with the oracle."""


MakeBelow = Callable[[HybridPools, UnifiedRadixCache], Below]


class HookedAdder(PrefillAdder):
    """With the hooks of `patches/hooks/scheduler.py`."""

    def _select_prefill_admission(self, req: Req, **about: Any) -> Any:
        stock = PrefillAdder._select_prefill_admission
        chunks = getattr(self.tree_cache, "chunks", None)
        return stock(self, req, **about) if chunks is None else chunks.admit(stock, self, req, **about)

    def add_chunked_req(self, req: Req) -> Req | None:
        stock = PrefillAdder.add_chunked_req
        if isinstance(self.tree_cache, HybridRadixCache):
            assert self.rem_chunk_tokens is not None
            self.tree_cache.leave_window(req, self.rem_chunk_tokens)
        chunks = getattr(self.tree_cache, "chunks", None)
        return stock(self, req) if chunks is None else chunks.go_on(stock, self, req)


class HybridScheduler(SimulatedScheduler):
    """The scheduler's loop for models with windows or states."""

    adder_class = HookedAdder

    def __init__(self, pools: Any, cache: Any, gate: Any, settings: Settings) -> None:
        super().__init__(pools, cache, gate, settings)
        self.ours = isinstance(cache, HybridRadixCache)
        if self.ours:
            cache.meet(self)
        self.always_tries = bool(pools.kind.window)
        self._wrong: dict[Req, WrongKvError] = {}
        self._weights_of: dict[str, int] = {}
        """The weights by what our cache writes before extra keys; those of the start have nothing."""
        self.reused = 0
        """Tokens that requests found when they were admitted."""
        self.loaded = 0
        """How many of them were below HBM."""
        self.computed = self.passes = 0
        """Tokens of prompts, and forward passes for them."""
        self.failed: list[Req] = []
        """Requests that ended because KV that was loaded for them did not arrive."""
        processor = dict.fromkeys(SchedulerBatchResultProcessor.__dataclass_fields__)
        processor |= {"tree_cache": cache, "req_to_token_pool": pools.requests}
        self._results_of_sglang = SchedulerBatchResultProcessor(**processor)

    # Calls that SGLang's own cache does not have.

    @property
    def _uses_storage(self) -> bool:
        return self.ours and super()._uses_storage

    def change_weights(self) -> None:
        """SGLang flushes its own cache for new weights, and `flush` is drawn by itself."""
        if self.ours:
            super().change_weights()
            self._weights_of[self.cache._weights_in_use] = self.weights

    def space_of(self, extra_key: str | None, salt: str | None) -> tuple[int, str | None, str | None]:
        """Weights and tenant of a request or a node."""
        weights, mark, own = (extra_key or "").partition("\0")
        if not mark:
            return 0, extra_key, salt
        return self._weights_of.get(weights, -1), own[1:] if own else None, salt

    def tenant_of(self, req: Req) -> tuple[str | None, str | None]:
        return self.space_of(req.extra_key, req.cache_salt)[1:]

    def _match(self, req: Req) -> None:
        super()._match(req)
        if req.positional_embed_overrides is None:
            self._served[req].namespace = self.space_of(req.extra_key, req.cache_salt)

    def _prefill_ended(self) -> None:
        if self.ours:
            super()._prefill_ended()

    def _prefill_begins(self, batch: ScheduleBatch) -> None:
        if self.ours:
            loads = batch.hicache_consumer_index != -1
            lengths = list(zip(batch.extend_lens, batch.prefix_lens, strict=True))
            self.cache.prefill_begins(lengths, loads=loads)
            self.cache.pass_begins(batch.reqs)

    def _wait_for_all_layers(self) -> None:
        for layer, _, _ in self.pools.layers:
            self.pools.read(layer)

    def _pass_counts(self, batch: ScheduleBatch) -> bool:
        return not self.ours or super()._pass_counts(batch)

    # As SGLang names them.

    @property
    def running_batch(self) -> ScheduleBatch:
        return self.running

    @property
    def chunked_req(self) -> Req | None:
        return self.chunked

    # SGLang's steps for states.

    def _withdraw(self, req: Req) -> None:
        self.cache.release_aborted_request(req.cache_request_handle)
        if req.kv.holds_mamba:
            current.release(req, self.cache, keep=False)

    def _admission_begins(self) -> None:
        if self.pools.kind.states:
            self.pools.requests.mamba_allocator.alloc_group_begin(len(self.waiting))

    def _admission_ends(self) -> None:
        if self.pools.kind.states:
            self.pools.requests.mamba_allocator.alloc_group_end()

    def _refused(self, req: Req) -> None:
        """``get_new_batch_prefill``: the state that was matched is given back."""
        req.kv.mamba_cow_src_index = None
        req.kv.mamba_needs_clear = False
        if req.kv.holds_mamba:
            self.pools.requests.mamba_allocator.free(req.kv.mamba_pool_idx.unsqueeze(-1))
            req.kv.mamba_pool_idx = None

    def _prepare(self, batch: ScheduleBatch) -> None:
        batch.hicache_consumer_index = self.cache.ready_to_load_host_cache()
        self.passes += 1
        self.computed += sum(req.extend_len for req in batch.reqs)
        for req in batch.reqs:
            if req.extend_batch_idx == 0:
                self.reused += req.prefix_len
                self.loaded += req.host_loaded_length
        super()._prepare(batch)

    def _process_prefill(self, req: Req, token: int, *, decoding: bool) -> None:
        reason = req.discard_output_reason
        over = req.finished() or req.is_retracted
        if reason is None or over or req.inflight_middle_chunks > 0:
            super()._process_prefill(req, token, decoding=decoding)
            return
        # KV that was loaded for it did not arrive.
        req.to_finish = reason
        req.update_finish_state(0)
        current.release(req, self.cache, keep=False)
        self.failed.append(req)
        self._forget(req)

    def _decoded(self, req: Req, batch: ScheduleBatch, i: int) -> None:
        nothing = SimpleNamespace(num_correct_drafts_per_req_cpu=None)
        self._results_of_sglang._handle_finish_state_updated_req(req, batch, nothing, i, None)
        if req.finished():
            self.finished.append(req)
            self._forget(req)

    # -- the model ------------------------------------------------------------------------------

    def _run(self, batch: ScheduleBatch) -> list[int]:
        tokens = super()._run(batch)
        if not self.ours and self.chunked in self.cache.finish_external_linker_loads(batch.reqs):
            self._pending_chunked_abort = self.chunked
        wrong, self._wrong = self._wrong, {}
        for req, error in wrong.items():
            # With overlap, a request whose load failed may be in one more batch.
            if req.discard_output_reason is None:
                raise error
        return tokens

    def _forward(self, batch: ScheduleBatch) -> list[int]:
        pools = self.pools
        if self.gate is not None:
            self.gate.set_consumer(batch.hicache_consumer_index)
        work = self._rows_of(batch)
        if pools.kind.states:
            runner = SimpleNamespace(req_to_token_pool=pools.requests, is_draft_worker=False)
            ModelRunner._maybe_execute_deferred_mamba_cow_and_clear(runner, batch)
        for layer, part, local in pools.layers:
            pools.read(layer)
            for each in work:
                try:
                    self._compare(each, part, local)
                except WrongKvError as error:
                    self._wrong[each.req] = error
                first = len(each.row) - 1 if part is MAMBA else each.start
                pools.oracles[part].write(self._slots(each, part)[first:], each.chain[first:], local)
            self.layer_written(layer)
        if pools.kind.grid:
            self._keep_states(batch, work)
        self._target_ended(work)
        return [token_at(req, end) for req, end in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True)]

    def _target_ended(self, work: list[Computed]) -> None:
        """The model has computed a batch."""

    def _compare(self, work: Computed, part: ComponentType, local: int, whose: str = "prefix") -> None:
        """Compare the rows of a request that a layer reads."""
        oracle, start, slots = self.pools.oracles[part], work.start, self._slots(work, part)
        what = f"{whose} of {work.req.rid} in forward"
        first = {FULL: 0, SWA: max(0, start - self.pools.kind.window), MAMBA: max(0, start - 1)}[part]
        oracle.compare(slots[first:start], work.chain[first:start], local, what)
        if part is MAMBA and not start and any(rows.any() for rows in oracle.rows(slots[:1], local)):
            raise WrongKvError(f"{what}: the first state is not empty")

    def _slots(self, work: Computed, part: ComponentType) -> Ids:
        """The slots of a component for each token; all tokens have the request's one state."""
        if part is FULL:
            return work.row
        if part is SWA:
            return self.pools.window_rows(work.row)
        state = self.pools.requests.get_mamba_indices(torch.tensor([work.req.kv.req_pool_idx]))
        return np.full(len(work.row), int(state))

    def _keep_states(self, batch: ScheduleBatch, work: list[Computed]) -> None:
        """Write the states that the batch asks for, as SGLang's kernels do."""
        for slot, chain, tokens in self._kept_states(batch, work):
            self._keep_state(slot, chain, tokens)

    def _kept_states(self, batch: ScheduleBatch, work: Sequence[Computed]) -> list[tuple[int, Hashes, int]]:
        """The slot of each state that the batch keeps, and of which text and how much of it it is."""
        slots = self._track_slots(batch)
        if batch.forward_mode.is_decode():
            due = [i for i, kept in enumerate(batch.mamba_track_mask_cpu) if kept]
            return [(slots[i], work[i].chain, len(work[i].chain)) for i in due]
        plan = build_prefill_track_plan(
            batch.mamba_prefill_track_mask_cpu,
            batch.mamba_track_seqlens_cpu,
            batch.extend_lens,
            batch.prefix_lens,
            self.pools.kind.grid,
            mamba2=False,
        )
        found = [(slots[i], work[i].chain, len(work[i].chain)) for i in plan.final_rows]
        for i in plan.h_rows:
            end = batch.prefix_lens[i] + plan.chunk_indices[i] * self.pools.kind.grid
            found.append((slots[i], work[i].chain, end))
        return found

    def _track_slots(self, batch: ScheduleBatch) -> list[int]:
        """Where the states of each request of a batch are kept."""
        found: list[int] = batch.mamba_track_indices.tolist()
        return found

    def _keep_state(self, slot: int, chain: Hashes, tokens: int) -> None:
        for local in range(self.pools.state.layers):
            self.pools.state.write(np.array([slot]), chain[tokens - 1 : tokens], local)


@dataclass(frozen=True)
class HybridScenario:
    """One server with such a model under one load; the fields are those of
    `engine_simulation.Scenario`."""

    name: str
    kind: HybridKind
    hbm_tokens: int = 240
    window_tokens: int = 0
    settings: Settings = SMALL
    rows: int = 6
    memory: int = 40
    tenants: bool = True
    prefetch: float = 0.0
    repeats: float = 0.0
    make_pools: type[HybridPools] = HybridPools
    stretch: int = 1
    """How many times longer than other traffic's the prompts are."""
    tree_core: str = "python"
    """SGLang's tree in Python or in Rust. Only the first can be looked into."""
    make_scheduler: type[HybridScheduler] = HybridScheduler

    def __str__(self) -> str:
        return self.name


class HybridRank:
    """One rank: pools, a cache, and the scheduler.

    Args:
        make_cache: makes the cache under test over the pools.
        make_below: attaches memory below HBM to the cache; None without such memory.
    """

    def __init__(
        self,
        scenario: HybridScenario,
        *,
        make_cache: MakeCache = UnifiedRadixCache,
        make_below: MakeBelow | None = None,
    ) -> None:
        self.scenario = scenario
        self._settings = ExitStack()
        self._settings.enter_context(process_settings(scenario.kind))
        self.pools = scenario.make_pools(
            scenario.kind,
            tokens=scenario.hbm_tokens,
            window_tokens=scenario.window_tokens,
            rows=scenario.rows,
            # As `get_req_to_token_extra_context_len` of SGLang: a draft's slots are rounded up to a page.
            context=CONTEXT * scenario.stretch + 64 + scenario.kind.page - 1,
            overlap=scenario.settings.overlap,
            tree_core=scenario.tree_core,
        )
        self.cache = make_cache(self.pools.params())
        gate = None
        self.below = None if make_below is None else make_below(self.pools, self.cache)
        if self.below is not None:
            gate = self.cache.linker.layer_done_counter
            self.pools.register(gate)
        self.look_inside = scenario.tree_core == "python"
        """Compare all rows that the tree lists after each step, not only those that a model reads."""
        self.scheduler = scenario.make_scheduler(self.pools, self.cache, gate, scenario.settings)
        self.evicted = EvictResult()
        """Slots of each component that the tree gave up to make room."""
        self._checker = self._sglang_checker()
        self._count_evictions()

    def _count_evictions(self) -> None:
        evict = self.cache._evict

        def counted(*args: Any, **options: Any) -> EvictResult:
            result = evict(*args, **options)
            for each in fields(result):
                before = getattr(self.evicted, each.name)
                setattr(self.evicted, each.name, before + getattr(result, each.name))
            return result

        self.cache._evict = counted

    def _sglang_checker(self) -> SchedulerInvariantChecker:
        """SGLang's own count of slots."""
        kind, cache = self.scenario.kind, self.cache
        facts = {
            "tree_cache": cache,
            "token_to_kv_pool_allocator": self.pools.allocator,
            "req_to_token_pool": self.pools.requests,
            "is_hybrid_swa": bool(kind.window),
            "is_hybrid_ssm": bool(kind.states),
            "full_tokens_per_layer": self.pools.tokens,
            "swa_tokens_per_layer": self.pools.window_tokens,
            "max_total_num_tokens": self.pools.tokens,
        }
        observer = SchedulerPoolStatsObserver(
            session_controller=None, hisparse_coordinator=None, enable_hisparse=False, **facts
        )
        return SchedulerInvariantChecker(
            disaggregation_mode=None,
            page_size=kind.page,
            pool_stats_observer=observer,
            get_last_batch=lambda: SimpleNamespace(reqs=[]),
            get_running_batch=lambda: SimpleNamespace(reqs=self.scheduler.active()),
            scheduler_stage_metrics=None,
            **facts,
        )

    def __enter__(self) -> HybridRank:
        return self

    def __exit__(self, *_: object) -> None:
        self.cache.release_host_resources()
        if self.below is not None:
            self.below.close()
        self._settings.close()

    def step(self) -> None:
        """One pass of the scheduler, and all checks."""
        self.scheduler.step()
        self.check()

    def serve(self, tokens: Sequence[int], *, new_tokens: int = 1, **options: Any) -> Req:
        """One request from arrival to end, alone; checked after each step."""
        req = self.scheduler.submit(list(tokens), new_tokens=new_tokens, **options)
        self.run_out()
        return req

    def run_out(self) -> None:
        """Let all requests end."""
        for _ in range(3000):
            if self.scheduler.idle:
                return
            self.step()
        raise AssertionError("the scheduler does not become idle")

    def settle(self) -> None:
        """Let everything end that is being copied below HBM."""
        if self.below is not None:
            self.below.settle()
        while self.cache.linker is not None and self.cache.linker.pending_offloads:
            self.cache.check_hicache_events()

    def finish(self) -> None:
        """Let all requests end, and check that nothing is held and that a flush empties all pools."""
        self.run_out()
        self.settle()
        for component in self.pools.oracles:
            locked = self.cache.tree_core.component_protected_size(component)
            assert not locked, f"{locked} {component.name} slots are still locked"
        self.cache.sanity_check()
        assert self.scheduler.flush()
        for component in self.pools.oracles:
            assert sorted(self.pools.free(component)) == self.pools.all(component).tolist()
        self.check()

    # -- invariants -----------------------------------------------------------------------------

    def check(self) -> None:
        """Verify everything that must be true between two passes of the loop."""
        SchedulerInvariantChecker.self_check_during_busy.__wrapped__(self._checker)
        owned = self._owned()
        for component in owned:
            self._check_owners(component, owned[component])
        if self.look_inside:
            for node, chain in self.nodes():
                self._compare(node, np.array(chain, np.uint64))
            if self.below is not None:
                self.below.check(self)
        # Free slots hold garbage from here on, so that a read of them cannot go unnoticed.
        for oracles in (self.pools.oracles, self.pools.draft_oracles):
            for component, oracle in oracles.items():
                oracle.spoil(self.pools.free(component))

    def nodes(self) -> Iterator[tuple[Any, list[int]]]:
        """Every node of SGLang's tree with the hashes of all tokens up to its end."""
        stack = [(child, []) for child in self.cache.tree_core.root_node.children.values()]
        while stack:
            node, before = stack.pop()
            chain = list(before)
            space = self.scheduler.space_of(node.key.extra_key, node.key.cache_salt)
            extend_chain(chain, space, node.key.raw_token_ids()[: len(node.key)])
            yield node, chain
            stack.extend((child, chain) for child in node.children.values())

    def _compare(self, node: Any, chain: Hashes) -> None:
        """The rows that a node lists are those of its tokens, and its state is that of its end."""
        for component, oracle in self.pools.oracles.items():
            value = node.component_data[component].value
            if value is None:
                continue
            rows, what = value.numpy(), f"{component.name} of node {node.id}"
            for layer in range(oracle.layers):
                oracle.compare(rows, chain[-len(rows) :], layer, what)
            draft = self.pools.draft_oracles.get(component)
            for layer in range(0 if draft is None else draft.layers):
                draft.compare(rows, self.draft_chain(node, chain)[-len(rows) :], layer, f"draft, {what}")

    def draft_chain(self, node: Any, chain: Hashes) -> Hashes:
        """The hashes of a draft model's rows of a node and of all before it."""
        return self.pools.kind.draft_chain(chain, node.key.raw_token_ids()[-1:])

    def _owned(self) -> dict[ComponentType, dict[str, Ids]]:
        """The owners of the slots of each component."""
        owned = {component: {"free": self.pools.free(component)} for component in self.pools.oracles}
        if self.look_inside:
            for node, _ in self.nodes():
                for component, of in owned.items():
                    value = node.component_data[component].value
                    if value is not None:
                        of[f"node {node.id}"] = value.numpy()
        else:
            owned[FULL]["tree"] = self.cache.all_values_flatten().numpy()
            if MAMBA in owned:
                owned[MAMBA]["tree"] = self.cache.all_mamba_values_flatten().numpy()
        for req in self.scheduler.active():
            row = self.pools.requests.req_to_token[req.kv.req_pool_idx]
            own = row[req.kv.cache_protected_len : req.kv.kv_allocated_len].numpy().astype(np.int64)
            owned[FULL][req.rid] = self.pools.whole_pages(own)
            if SWA in owned:
                window = self.pools.window_rows(own)
                owned[SWA][req.rid] = self.pools.whole_pages(window[window > 0])
        if MAMBA in owned:
            for req in {*self.scheduler.active(), *self.scheduler.waiting}:
                owned[MAMBA][req.rid] = _states_of(req)
        return owned

    def _check_owners(self, component: ComponentType, owned: dict[str, Ids]) -> None:
        slots = np.concatenate(list(owned.values()))
        everything = self.pools.all(component)
        counts = np.bincount(slots, minlength=int(everything[-1]) + 1)
        if counts.max(initial=0) > 1:
            twice = int(counts.argmax())
            owners = [who for who in owned if twice in owned[who]]
            raise AssertionError(f"{component.name} slot {twice} is owned by {owners}")
        if component == SWA and not self.look_inside:
            return
        nobody = np.setdiff1d(everything, slots)
        assert not nobody.size, f"{component.name} slots {nobody[:8]} have no owner"


def _states_of(req: Req) -> Ids:
    kv = req.kv
    own = [int(kv.mamba_pool_idx)] if kv.holds_mamba else []
    if kv.mamba_ping_pong_track_buffer is not None:
        own += [slot for slot in kv.mamba_ping_pong_track_buffer.tolist() if slot != -1]
    return np.array(own, np.int64)


KEEPS_ON_A_GRID = hasattr(schedule_batch, "_gather_mamba_track_indices")
"""Not in SGLang 0.5.22, which pins memory for the states that it keeps on a grid: a CPU cannot."""

_ALL = (
    HybridScenario("window", HybridKind(window=32), window_tokens=200),
    HybridScenario("a short window", HybridKind(window=9), window_tokens=120),
    HybridScenario("window, overlap", HybridKind(window=32), window_tokens=200, settings=OVERLAP),
    HybridScenario("window, latents", HybridKind(window=20, latents=True), window_tokens=200),
    HybridScenario("window, tree in Rust", HybridKind(window=32), window_tokens=200, tree_core="rust"),
    HybridScenario(
        "window, page 16", HybridKind(window=32, page=16), hbm_tokens=480, window_tokens=256, settings=PAGED
    ),
    HybridScenario("states", HybridKind(states=24)),
    HybridScenario("few states", HybridKind(states=14)),
    HybridScenario("states, latents", HybridKind(states=24, latents=True)),
    HybridScenario("states, tree in Rust", HybridKind(states=24), tree_core="rust"),
    HybridScenario("states on a grid", HybridKind(states=40, grid=8)),
    HybridScenario("states on a grid, overlap", HybridKind(states=40, grid=8), settings=OVERLAP),
    HybridScenario(
        "states on a grid, page 16",
        HybridKind(states=40, grid=16, page=16),
        hbm_tokens=480,
        settings=PAGED,
    ),
    HybridScenario("window and states", HybridKind(window=32, states=24), window_tokens=240),
    HybridScenario(
        "window and states on a grid, page 16, overlap",
        HybridKind(window=32, states=40, grid=16, page=16),
        hbm_tokens=480,
        window_tokens=320,
        settings=Settings(overlap=True, chunk=48, new_token_ratio=0.05),
    ),
)

SCENARIOS = tuple(each for each in _ALL if KEEPS_ON_A_GRID or not each.kind.grid)


def drive(
    rank: HybridRank, seed: int, steps: int, *, make_traffic: Callable[..., Traffic] = Traffic
) -> Traffic:
    """Random traffic for so many passes, with all checks after each; then everything ends."""
    traffic = make_traffic(rank.scenario, seed, rank.scenario.stretch)
    for _ in range(steps):
        traffic.act(rank.scheduler)
        rank.step()
    rank.finish()
    return traffic

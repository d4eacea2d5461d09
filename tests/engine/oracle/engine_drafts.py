"""SGLang's scheduler over a model with windows or states and a draft model, around a cache of the kind
`UnifiedRadixCache`.

As in `engine_hybrids`; and after the model, the draft model computes the same tokens. In a decoding pass the
model verifies several tokens, of which it accepts a random number: a request's rows and states are then those
of the accepted ones, and the rest is spoilt. SGLang allocates the slots, chooses the states to keep and says
of which step they are.

A draft's row belongs to its token and the next one with EAGLE, EAGLE3 and MTP, and to its token alone with
STANDALONE, and with DFLASH and DSPARK, which make it of the model's hidden states. FROZEN_KV_MTP has no rows:
before the model verifies, it reads those of the model's last layers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from engine_hybrid_pools import FULL, MAMBA, SWA, HybridKind
from engine_hybrids import OVERLAP, PAGED, HybridScenario, HybridScheduler
from engine_pools import WrongKvError, extend_chain
from engine_scheduler import Computed, Settings, token_at
from engine_verifying import relay, resolve
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import _verify_commit_step_indices, prepare_mamba_track_for_verify


class DraftingScheduler(HybridScheduler):
    """The scheduler's loop with a draft model."""

    def __init__(self, pools: Any, cache: Any, gate: Any, settings: Settings) -> None:
        super().__init__(pools, cache, gate, settings)
        self.algorithm = getattr(SpeculativeAlgorithm, pools.kind.algorithm)
        self.drafted = 0
        """Tokens of drafts that the model has accepted."""
        self.frozen_reads = 0
        """Rows of the model that a draft without KV of its own has read."""
        self._random = random.Random(3)
        self._accepted: dict[Req, int] = {}
        self._newest: dict[Req, int] = {}
        """The hash of each request's newest row of the draft."""
        self._of_old_weights: dict[Req, dict[int, int]] = {}
        """The hashes of a draft's last rows before new weights, by their places: of the next token as the old
        weights have it."""

    # -- passes ---------------------------------------------------------------------------------

    def _forward(self, batch: ScheduleBatch) -> list[Any]:
        if batch.forward_mode.is_decode():
            resolve(batch, self.algorithm)
        tokens = self._verify(batch) if batch.forward_mode.is_decode() else super()._forward(batch)
        relay(batch, self.algorithm)
        return tokens

    def _rows_of(self, batch: ScheduleBatch) -> list[Computed]:
        for req in batch.reqs:
            served = self._served[req]
            if not served.chain:
                self._of_old_weights.pop(req, None)
            elif served.weights != self.weights:
                self._of_old_weights.setdefault(req, {})[len(served.chain) - 1] = self._newest[req]
        return super()._rows_of(batch)

    def _verify(self, batch: ScheduleBatch) -> list[Any]:
        pools, width = self.pools, self.pools.kind.verified
        prepare_mamba_track_for_verify(batch)
        starts = batch.seq_lens_cpu.tolist()
        accepted = [self._random.randint(1, width) for _ in starts]
        work = [self._work(*each) for each in zip(batch.reqs, starts, accepted, strict=True)]
        if self.algorithm.is_frozen_kv_mtp():
            self._read_frozen(work)
        for layer, part, local in pools.layers:
            pools.read(layer)
            for each in work:
                self._check(each.req, partial(self._compare, each, part, local))
                if part is not MAMBA:
                    known = len(each.chain)
                    slots = self._slots(each, part)[each.start : known]
                    pools.oracles[part].write(slots, each.chain[each.start :], local)
        self._commit_states(batch, work, torch.tensor(accepted))
        self._target_ended(work)
        batch.seq_lens = batch.seq_lens + torch.tensor(accepted)
        batch.seq_lens_cpu = batch.seq_lens_cpu + torch.tensor(accepted)
        return [
            [self._text(each.req, at) for at in range(each.start + 1, len(each.chain) + 1)] for each in work
        ]

    def _read_frozen(self, work: list[Computed]) -> None:
        """A draft model without KV of its own reads the KV of the model's last layer of each kind."""
        for part in self.pools.oracles.keys() & {FULL, SWA}:
            for each in work:
                read = partial(self._compare, each, part, -1, "draft")
                self._check(each.req, read)
                self.frozen_reads += each.start

    def _work(self, req: Req, start: int, count: int) -> Computed:
        """Of the verified tokens of a request, those that are accepted; ``row`` has all."""
        served = self._served[req]
        del served.chain[start:]
        extend_chain(served.chain, served.namespace, [self._text(req, start + at) for at in range(count)])
        row = self.pools.requests.req_to_token[req.kv.req_pool_idx, : start + self.pools.kind.verified]
        return Computed(req, row.numpy().astype(np.int64), np.array(served.chain, np.uint64), start)

    @staticmethod
    def _text(req: Req, place: int) -> int:
        """The token at a place of a request's text, also of its future."""
        prompt = req.origin_input_ids
        return int(prompt[place]) if place < len(prompt) else token_at(req, place)

    def _commit_states(self, batch: ScheduleBatch, work: list[Computed], accepted: torch.Tensor) -> None:
        if not self.pools.kind.states:
            return
        width = self.pools.kind.verified
        steps, kept = _verify_commit_step_indices(
            batch=batch,
            accept_index=torch.arange(len(work) * width).view(-1, width),
            accept_lens=accepted,
            draft_token_num=width,
        )
        for i, each in enumerate(work):
            live = int(self._slots(each, MAMBA)[0])
            self._keep_state(live, each.chain, each.start + int(steps[i]) + 1)
            if kept is not None and kept[i] >= 0 and batch.mamba_track_indices[i] >= 0:
                self._keep_state(int(batch.mamba_track_indices[i]), each.chain, each.start + int(kept[i]) + 1)

    def _target_ended(self, work: list[Computed]) -> None:
        for each in work:
            known = len(each.chain)
            for oracles in (self.pools.oracles, self.pools.draft_oracles):
                for part in oracles.keys() & {FULL, SWA}:
                    oracles[part].spoil(self._slots(each, part)[known:])
            self._draft(each)

    def _draft(self, work: Computed) -> None:
        """The draft model computes the tokens that the model has computed."""
        kind, start = self.pools.kind, work.start
        chain = kind.draft_chain(work.chain, [self._text(work.req, len(work.chain))]).copy()
        for place, each in self._of_old_weights.get(work.req, {}).items():
            chain[place] = each
        self._newest[work.req] = int(chain[-1])
        for part, oracle in self.pools.draft_oracles.items():
            slots = self._slots(work, part)
            first = max(0, start - kind.window) if part is SWA else 0
            for layer in range(oracle.layers):
                read = slots[first:start], chain[first:start], layer, f"draft of {work.req.rid} in forward"
                self._check(work.req, partial(oracle.compare, *read))
                oracle.write(slots[start : len(chain)], chain[start:], layer)

    def _check(self, req: Req, compare: Callable[[], None]) -> None:
        try:
            compare()
        except WrongKvError as error:
            self._wrong.setdefault(req, error)

    # -- results --------------------------------------------------------------------------------

    def _append(self, req: Req, token: Any) -> None:
        req.kv.kv_committed_len += len(token)
        req.output_ids.extend(token)
        req.update_finish_state(len(token))
        self._accepted[req] = len(token) - 1
        self.drafted += len(token) - 1

    def _decoded(self, req: Req, batch: ScheduleBatch, i: int) -> None:
        result = SimpleNamespace(
            num_correct_drafts_per_req_cpu={i: self._accepted.pop(req)},
            num_non_draft_tokens_per_req=1,
            grammar_retained_tokens=None,
        )
        self._results_of_sglang._handle_finish_state_updated_req(req, batch, result, i, None)
        if req.finished():
            self.finished.append(req)
            self._forget(req)


def drafted(name: str, kind: HybridKind, **more: Any) -> HybridScenario:
    """A scenario with a draft model."""
    return HybridScenario(name, kind, make_scheduler=DraftingScheduler, **more)


BOTH = ("full", "window")
FULL_ONLY = BOTH[:1]
WINDOW = drafted("window", HybridKind(window=32, verified=4, draft=BOTH), window_tokens=240)
PAGED_WINDOW = drafted(
    "window, page 16",
    HybridKind(window=32, page=16, verified=4, draft=BOTH),
    hbm_tokens=480,
    window_tokens=320,
    settings=PAGED,
)
DFLASH = drafted(
    "window, page 16, DFLASH of three layers of each kind",
    replace(PAGED_WINDOW.kind, verified=8, depth=3, bigrams=False, method="DFLASH"),
    hbm_tokens=480,
    window_tokens=320,
    settings=PAGED,
)
FROZEN = drafted(
    "window, page 16, FROZEN_KV_MTP",
    replace(PAGED_WINDOW.kind, draft=(), method="FROZEN_KV_MTP"),
    hbm_tokens=480,
    window_tokens=320,
    settings=PAGED,
)
STATES = drafted("states", HybridKind(states=24, verified=4, draft=FULL_ONLY))
GRID = drafted(
    "states on a grid, page 16",
    HybridKind(states=40, grid=16, page=16, verified=4, draft=FULL_ONLY),
    hbm_tokens=480,
    settings=PAGED,
)
DRAFTED = (
    WINDOW,
    drafted("window, overlap", WINDOW.kind, window_tokens=240, settings=OVERLAP),
    PAGED_WINDOW,
    drafted(
        "window, page 16, a draft without one",
        HybridKind(window=32, page=16, verified=4, draft=FULL_ONLY),
        hbm_tokens=480,
        window_tokens=320,
        settings=PAGED,
    ),
    drafted(
        "window, a draft without others",
        HybridKind(window=32, verified=3, draft=BOTH[1:]),
        window_tokens=240,
    ),
    drafted(
        "window, single tokens",
        HybridKind(window=32, verified=4, draft=BOTH, bigrams=False),
        window_tokens=240,
    ),
    drafted(
        "window, page 16, EAGLE3",
        replace(PAGED_WINDOW.kind, draft=FULL_ONLY, method="EAGLE3"),
        hbm_tokens=480,
        window_tokens=320,
        settings=PAGED,
    ),
    DFLASH,
    drafted(
        "states on a grid, page 16, DSPARK of two layers",
        replace(GRID.kind, depth=2, bigrams=False, method="DSPARK"),
        hbm_tokens=480,
        settings=PAGED,
    ),
    FROZEN,
    drafted(
        "window, page 16, no draft model",
        HybridKind(window=32, page=16, verified=4),
        hbm_tokens=480,
        window_tokens=320,
        settings=PAGED,
    ),
    drafted(
        "states on a grid, page 16, no draft model",
        HybridKind(states=40, grid=16, page=16, verified=4),
        hbm_tokens=480,
        settings=PAGED,
    ),
    STATES,
    GRID,
    drafted(
        "states on a grid, page 16, overlap",
        GRID.kind,
        hbm_tokens=480,
        settings=Settings(overlap=True, chunk=48, new_token_ratio=0.05),
    ),
)


def with_draft(scenario: HybridScenario, **more: Any) -> HybridScenario:
    """The same with a draft model. more: of its kind."""
    kind = replace(scenario.kind, verified=4, draft=FULL_ONLY, **more)
    return replace(scenario, kind=kind, make_scheduler=DraftingScheduler)

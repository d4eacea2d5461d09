"""SGLang's scheduler with speculative decoding around our own cache.

As in `engine_scheduler`; but in a decoding pass the model verifies several tokens, of which it accepts a
random number. The rows of those that it does not accept are spoilt. SGLang allocates the slots. The draft
model's rows are beside the model's, in the same slots; with EAGLE and MTP they also depend on the next token.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from engine_pools import PoolKind, with_next
from engine_scheduler import Computed, SimulatedScheduler, token_at
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.runtime_context import get_schedule, get_spec
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

VERIFIED = 4
"""Tokens that the model verifies in a decoding pass."""


def relay(batch: ScheduleBatch, algorithm: SpeculativeAlgorithm) -> None:
    """After a pass, keep the draft inputs of DFLASH and DSPARK with the batch for the next one."""
    if algorithm.is_dflash_family():
        nothing = torch.zeros(len(batch.reqs), 1)
        ids = nothing.long()
        batch.spec_info = DFlashDraftInputV2(nothing, ids, ids[:, 0], batch.seq_lens, nothing)


def resolve(batch: ScheduleBatch, algorithm: SpeculativeAlgorithm) -> None:
    """Before a decoding pass: with DFLASH and DSPARK, the lengths that the pass before has published."""
    if algorithm.is_dflash_family():
        batch.seq_lens_cpu = batch.seq_lens.clone()


class VerifyingScheduler(SimulatedScheduler):
    """The scheduler's loop with a draft model."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.algorithm = SpeculativeAlgorithm[self.pools.kind.algorithm]
        self.drafted = 0
        """Tokens of drafts that the model has accepted."""
        self._random = random.Random(3)

    def _forward(self, batch: ScheduleBatch) -> list[Any]:
        if not batch.forward_mode.is_decode():
            tokens = [[token] for token in super()._forward(batch)]
            relay(batch, self.algorithm)
            return tokens
        resolve(batch, self.algorithm)
        starts = batch.seq_lens_cpu.tolist()
        accepted = torch.tensor([self._random.randint(1, VERIFIED) for _ in starts])
        work = [self._work(*each) for each in zip(batch.reqs, starts, accepted.tolist(), strict=True)]
        oracle = self.pools.oracle
        for each in work:
            self._propose(each)
        for layer in range(oracle.layers):
            self.pools.read(layer)
            for each in work:
                self._compute(each, layer)
            self.layer_written(layer)
        for each in work:
            oracle.spoil(each.row[len(each.chain) :])
        batch.seq_lens = batch.seq_lens + accepted
        batch.seq_lens_cpu = batch.seq_lens_cpu + accepted
        relay(batch, self.algorithm)
        return [[_text(each.req, at) for at in range(each.start + 1, len(each.chain) + 1)] for each in work]

    def _propose(self, work: Computed) -> None:
        """The draft model proposes tokens, and stores rows for them that do not last. FROZEN_KV_MTP stores
        none, and reads those of the model's last layer."""
        self.pools.oracle.spoil(work.row[work.start :])
        if self.algorithm.is_frozen_kv_mtp():
            read, last = slice(work.start), self.pools.kind.layers - 1
            what = f"draft of {work.req.rid} in forward"
            self.pools.oracle.compare(work.row[read], work.chain[read], last, what)

    def _work(self, req: Req, start: int, count: int) -> Computed:
        """Of the verified tokens of a request, those that are accepted; ``row`` has all."""
        tokens = [_text(req, at) for at in range(start + count)]
        chain = self._chain(req, tokens, start)
        row = self.pools.requests.req_to_token[req.kv.req_pool_idx, : start + VERIFIED]
        return self._with_draft(Computed(req, row.numpy().astype(np.int64), chain, start))

    def _rows_of(self, batch: ScheduleBatch) -> list[Computed]:
        return list(map(self._with_draft, super()._rows_of(batch)))

    def _with_draft(self, work: Computed) -> Computed:
        if not self.pools.kind.pairs:
            return work
        after = [_text(work.req, at + 1) for at in range(len(work.chain))]
        return replace(work, of_draft=with_next(work.chain, after, self.pools.block))

    def _append(self, req: Req, token: Any) -> None:
        req.kv.kv_committed_len += len(token)
        req.output_ids.extend(token)
        req.update_finish_state(len(token))
        self.drafted += len(token) - 1

    def _process_prefill(self, req: Req, token: Any, *, decoding: bool) -> None:
        super()._process_prefill(req, token[0], decoding=decoding)


def _text(req: Req, place: int) -> int:
    """The token at a place of a request's text, also of its future."""
    prompt = req.origin_input_ids
    return int(prompt[place]) if place < len(prompt) else token_at(req, place)


@contextmanager
def speculation(kind: PoolKind) -> Iterator[None]:
    """SGLang's process-wide settings for it."""
    drafts = {"speculative_algorithm": kind.algorithm, "speculative_num_steps": VERIFIED - 1}
    drafts |= {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": VERIFIED}
    with get_spec().override(**drafts), get_schedule().override(page_size=kind.page):
        yield

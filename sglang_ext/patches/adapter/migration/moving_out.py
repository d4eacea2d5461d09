"""The source of a move: a running request is stopped between two tokens, and its state and KV are offered.

It keeps its slots or its blocks until the router sends `Unpark`: then it ends here, or goes on here.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sglang_ext.disagg.errors import RefusedError
from sglang_ext.engine.pd.sending_handover import SendingHandover
from sglang_ext.engine.resume import AGAIN, obstacle, state_of
from sglang_ext.keys import encode_tokens
from sglang_ext.patches.adapter.migration.moving import MovingRank, Transfers
from sglang_ext.patches.adapter.pd.pd_setup import ScratchRow
from sglang_ext.patches.adapter.request_stages import request_stages
from sglang_ext.protocol.agent import Export, Park, Parked, Unpark

logger = logging.getLogger(__name__)

PARKED_SECONDS: Final = 30.0
"""After that a parked request goes on: the router that stopped it is gone."""
COPY_SECONDS: Final = 1.0
"""Timeout for DRAM copies of the newest blocks; blocks without a copy by then are computed again."""
EXPORT_SECONDS: Final = 20.0
BOOTSTRAP_ROOMS: Final = 1 << 47
GOES_ON: Final = "the request goes on at another instance"
JUST_ENDED: Final = "it has just ended"


@dataclass(eq=False)
class _Parked:
    """A request that was stopped. handover: offers its KV, on decode. tokens: those with KV."""

    id: str
    req: Any
    since: float
    tokens: bytes
    handover: SendingHandover | None = None
    answered: bool = False
    reminded: bool = False


class MovingOut:
    """The requests of one rank that are stopped, until the router has moved them."""

    def __init__(self, rank: MovingRank, clock: Callable[[], float] = time.monotonic) -> None:
        self._rank = rank
        self._clock = clock
        self._parked: dict[str, _Parked] = {}
        self._copying: list[_Parked] = []
        """Those of which the ranks agree on in this pass."""

    def __len__(self) -> int:
        """Stopped requests, whose memory is held and which the scheduler does not know."""
        return len(self._parked)

    def park(self, message: Park) -> None:
        """Stop a request and offer it, or answer why not."""
        if message.id in self._parked:
            return
        scheduler = self._rank.cache.scheduler
        req = next((req for req in scheduler.running_batch.reqs if req.rid == message.rid), None)
        why = self._problem(req, message.rid)
        if why or req is None:
            self._rank.counts["again" if why == AGAIN else "refused"] += 1
            self._rank.reply(Parked(self._rank.epoch, message.id, why))
            return
        batch = scheduler.running_batch
        batch.filter_batch(keep_indices=[at for at, other in enumerate(batch.reqs) if other is not req])
        batch.batch_is_full = False
        tokens = encode_tokens((req.origin_input_ids + req.output_ids)[:-1])
        parked = self._parked[message.id] = _Parked(message.id, req, self._clock(), tokens)
        self._rank.counts["parked"] += 1
        manager = self._rank.manager
        if manager is not None:
            self._offer(parked, manager)
            return
        self._rank.cache.stop(req)
        req.reset_for_retract()

    def unpark(self, message: Unpark) -> None:
        """The router is done with a stopped request."""
        if (parked := self._parked.get(message.id)) is not None:
            self._unpark(parked, stay=message.stay)

    def aborted(self, rid: str, *, every: bool) -> None:
        """A client aborts the request of this name, or all."""
        for parked in list(self._parked.values()):
            if every or parked.req.rid == rid:
                with self._rank.guarded():
                    self._unpark(parked, stay=False)

    def propose(self) -> Sequence[int]:
        """For each stopped request without a reply so far, whether DRAM has copies of its blocks here."""
        now = self._clock()
        self._copying = [parked for parked in self._parked.values() if not parked.answered]
        return [int(self._copied(parked, now)) for parked in self._copying]

    def act(self, agreed: Sequence[int]) -> None:
        """Once per pass: export the requests whose blocks are copied on all ranks."""
        for parked, copied in zip(self._copying, agreed, strict=False):
            if copied:
                self._export(parked)
        self._remind_of_parked()

    def _problem(self, req: Any, rid: str) -> str:
        """Why a request cannot be stopped now; empty if it can. Takes in the result of the last batch."""
        scheduler = self._rank.cache.scheduler
        if self._rank.cache.ranks.pipelined:
            return "its server is a pipeline of several stages"
        if req is None:
            return AGAIN if _is_known(scheduler, rid) else "no such request runs here"
        if _has_ended(req):
            return JUST_ENDED
        if self._rank.manager is not None and not self._rank.cache.of_weights_in_use(req):
            return "its KV is of several weights: they were updated while it ran"
        if why := obstacle(req, not scheduler.spec_algorithm.is_none()):
            return why
        if not self._settled():
            return AGAIN
        # The batch whose result has been taken in may have ended it.
        return JUST_ENDED if _has_ended(req) else ""

    def _settled(self) -> bool:
        """Take in the result of the batch that was launched last. False when that is a prefill: its requests
        are not in the running batch yet."""
        scheduler = self._rank.cache.scheduler
        if not scheduler.enable_overlap or scheduler.last_batch is None or not scheduler.result_queue:
            return True
        if not scheduler.last_batch.forward_mode.is_decode():
            return False
        # As pause_generation does it.
        batch, result = scheduler.result_queue.popleft()
        scheduler.process_batch_result(batch, result)
        scheduler.last_batch = None
        return True

    def _offer(self, parked: _Parked, manager: Transfers) -> None:
        """Offer all pages of a request in a hand-over, as prefill does when it has computed a prompt, and the
        rows of its window or state."""
        scheduler, req = self._rank.cache.scheduler, parked.req
        number = 1 + int.from_bytes(hashlib.blake2b(parked.id.encode(), digest_size=8).digest()) % (
            BOOTSTRAP_ROOMS - 1
        )
        sender = manager.agent.sender
        try:
            parked.handover = sender.open(number, read=True)
        except RefusedError as error:
            self._unpark(parked, stay=True)
            self._rank.reply(Parked(self._rank.epoch, parked.id, str(error)))
            return
        row = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : req.kv.kv_committed_len]
        page = self._rank.cache.page_size
        pages = row[::page].cpu().numpy().astype(np.int64) // page
        beside = manager.beside_running(req)
        sender.complete(parked.handover, pages, self._row(number, req), beside=beside)
        self._reply(parked, received=True, meeting=manager.meeting, bootstrap_room=number)

    def _row(self, number: int, req: Any) -> bytes:
        """SGLang's metadata row: the last token stands for the first that prefill sends."""
        # Not one of the scheduler's own rows: the transfer thread may be filling any of them.
        row = ScratchRow(self._rank.cache.scheduler.disagg_metadata_buffers)
        row.buffers.output_ids[0][0] = req.output_ids[-1]
        row.buffers.bootstrap_room[0, 0] = number
        return row.read()

    def _remind_of_parked(self) -> None:
        oldest = self._clock() - PARKED_SECONDS
        for parked in list(self._parked.values()):
            if not parked.reminded and parked.since < oldest:
                parked.reminded = True
                if self._rank.enqueue(Unpark(parked.id, stay=True)):
                    logger.warning("a stopped request continues here: its router has sent no Unpark")

    def _copied(self, parked: _Parked, now: float) -> bool:
        """Whether DRAM has copies of a request's blocks, as far as they are waited for."""
        return self._rank.cache.copied(parked.req, parked.tokens) or now - parked.since > COPY_SECONDS

    def _export(self, parked: _Parked) -> None:
        """Export the blocks of a request, if peers can fetch them, and send its state."""
        cache, req = self._rank.cache, parked.req
        export, (extra_key, cache_salt) = "", cache.tenant_of(req)
        if cache.peers is not None:
            export = parked.id
            cache.peers.export(Export(export, parked.tokens, extra_key, cache_salt, EXPORT_SECONDS))
        self._reply(
            parked,
            received=False,
            tokens=parked.tokens,
            extra_key=extra_key,
            cache_salt=cache_salt,
            export=export,
        )

    def _reply(self, parked: _Parked, *, received: bool, **where: Any) -> None:
        """Send the state of a stopped request, and where its KV is. received: see `state_of`."""
        state = state_of(parked.req, received=received, stages=request_stages(parked.req))
        self._rank.reply(Parked(self._rank.epoch, parked.id, resume=state, **where))
        parked.answered = True

    def _unpark(self, parked: _Parked, *, stay: bool) -> None:
        scheduler, req, manager = self._rank.cache.scheduler, parked.req, self._rank.manager
        del self._parked[parked.id]
        if parked.handover is not None and manager is not None:
            # Its pages are open from here on, whatever becomes of the request.
            manager.agent.sender.forget(parked.handover)
        self._rank.counts["stayed" if stay else "left"] += 1
        if stay and manager is None:
            scheduler._add_request_to_queue(req)
        elif stay:
            # It has its slots still, as one whose KV has just come.
            scheduler.waiting_queue.append(req)
        else:
            self._end(req)

    def _end(self, req: Any) -> None:
        from sglang.srt.disaggregation.utils import prepare_abort

        from sglang_ext.patches.seams import current

        scheduler = self._rank.cache.scheduler
        prepare_abort(req, GOES_ON)
        if req.kv.holds_kv:
            current.release(req, self._rank.cache, keep=True)
        scheduler.output_streamer.stream_output([req], req.return_logprob)


def _has_ended(req: Any) -> bool:
    """Whether a request has ended, or ends with the result of the batch under way."""
    return bool(req.finished() or req.to_finish is not None)


def _is_known(scheduler: Any, rid: str) -> bool:
    """Whether a request of this name waits somewhere before the running batch."""
    waiting = [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]
    if scheduler.last_batch is not None:
        waiting += scheduler.last_batch.reqs
    if scheduler.chunked_req is not None:
        waiting.append(scheduler.chunked_req)
    for name in ("disagg_decode_prealloc_queue", "disagg_decode_transfer_queue"):
        queue = getattr(scheduler, name, None)
        if queue is not None:
            waiting += [entry.req for entry in queue.queue]
            waiting += getattr(queue, "retracted_queue", [])
    return any(req.rid == rid and not req.finished() for req in waiting)

"""A running request goes on at another instance, with its KV (MemServe, table 3).

    router                        source                          target
    Park     ------------------>  stops it between two tokens
             <------------------  Parked: its state, and where its KV can be had
    Watch, with the state  ------------------------------------->  keeps it under a ticket
             <---------------------------------------------------  Expecting
    the request, with the ticket in its body ------------------->  takes the KV, goes on
             <---------------------------------------------------  Running
    Unpark   ------------------>  ends it, its blocks stay in the tree

Until `Unpark` the source keeps all it has: if the target dies, or takes nothing, the request goes on where it
was (``stay``), and its client has seen a pause. The target sends the answer from its beginning; the
router leaves out the part that the client has.

The KV moves by the means that each kind of instance has anyway:

    decode       the source gives it as a prefill server does (`engine/pd/prefill_sender.py`): all pages of
                 prompt and answer in a hand-over, which the target joins as if they were a prompt. It reads
                 the pages that it lacks, also where prefill pushes; nothing is computed again.
    colocated    the source puts the whole blocks into its tree, waits for their copies in DRAM, and exports
                 them (`peers/export.py`). The target fetches them (`peers/fetches.py`), and computes the
                 rest: the end of the last block, or all, if nothing was to be had.

Before, while the request runs, the router has its prompt fetched where there is DRAM
(``sglang_ext.router.dispatch.move_calls``).

All methods run in the scheduler's thread, on every rank between the same two passes. No method
that SGLang's loop calls raises: the request is aborted instead, and counted.
"""

from __future__ import annotations

import hashlib
import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from sglang_ext.disagg.errors import RefusedError
from sglang_ext.engine.events.router_commands import RouterCommands
from sglang_ext.engine.pd.agent import Agent
from sglang_ext.engine.pd.sending_handover import SendingHandover
from sglang_ext.engine.peers.peer_kv import PeerKv
from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.resume import (
    AGAIN,
    FIELD,
    Ticket,
    Tickets,
    misfit,
    obstacle,
    output_of,
    put_back,
    replay,
    state_of,
)
from sglang_ext.engine.tiers.write_down import WriteDown
from sglang_ext.keys import TOKEN_BYTES, encode_tokens
from sglang_ext.patches.adapter.pd_setup import ScratchRow
from sglang_ext.patches.adapter.request_stages import request_stages, set_former
from sglang_ext.protocol.agent import (
    Export,
    Park,
    Parked,
    Running,
    Unpark,
    Watch,
)
from sglang_ext.radix_global import RadixTree
from sglang_ext.wire import Message

logger = logging.getLogger(__name__)

PARKED_SECONDS: Final = 30.0
"""After that a parked request goes on: the router that stopped it is gone."""
COPY_SECONDS: Final = 1.0
"""Timeout for DRAM copies of the newest blocks; blocks without a copy by then are computed again."""
EXPORT_SECONDS: Final = 20.0
MOST_COMING: Final = 1000
BOOTSTRAP_ROOMS: Final = 1 << 47
_PROMPT: Final = "sglang_ext_prompt"
"""Attribute of a request: its prompt, until its KV has come."""
GOES_ON: Final = "the request goes on at another instance"


class MovesFrom(Protocol):
    """The part of the rank's cache that migration uses."""

    scheduler: Any
    page_size: int
    tree: RadixTree
    ranks: Ranks
    write_down: WriteDown | None
    peers: PeerKv | None

    def namespace_of(self, req: Any) -> Hashable | None: ...


class Transfers(Protocol):
    """The part of the rank's transfer backend that migration uses."""

    agent: Agent
    meeting: str


@dataclass(eq=False)
class _Parked:
    """A request that was stopped. handover: offers its KV, on decode. tokens: those with KV."""

    id: str
    req: Any
    since: float
    tokens: bytes
    handover: SendingHandover | None = None
    told: bool = False
    reminded: bool = False


@dataclass(eq=False)
class _Coming:
    """A request that came with a ticket. rid: the string object that SGLang passes on, compared by identity,
    since another request may have an equal name. ticket: None when it had no known one."""

    rid: str
    ticket: Ticket | None


@dataclass(eq=False)
class _Arriving:
    """A request that resumes, until it runs."""

    req: Any
    ticket: Ticket


class Migration:
    """See the module's docstring. Both ends, of one rank.

    Args:
        cache: the rank's, which knows the scheduler.
        commands: replies to the routers; in rank 0, where there are routers.
    """

    def __init__(
        self,
        cache: MovesFrom,
        commands: RouterCommands | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._commands = commands
        self._clock = clock
        self._parked: dict[str, _Parked] = {}
        self.tickets = Tickets()
        self._coming: OrderedDict[str, _Coming] = OrderedDict()
        self._arriving: dict[str, _Arriving] = {}
        self.manager: Transfers | None = None
        """The transfer backend's of this rank, on a decode instance: see `transfer_by`."""
        self.epoch = b"" if commands is None else commands.epoch
        self.counts: dict[str, int] = {}
        """Requests that were to be moved, by outcome here."""
        self._copying: list[_Parked] = []
        """Those of which the ranks agree on in this pass."""
        cache.ranks.add(self)

    def __repr__(self) -> str:
        return f"Migration(parked={len(self._parked)}, arriving={len(self._arriving)}, {self.counts})"

    def transfer_by(self, manager: Transfers | None) -> None:
        """The server decodes from now on, with this transfer backend; or it does not any more."""
        self.manager = manager

    @property
    def busy(self) -> bool:
        """Whether memory is held that the scheduler knows nothing of, so that it must not take itself for
        idle."""
        return bool(self._parked)

    def takes_command(self, message: Message, at: float) -> bool:
        """Carry out a command about a moved request; returns whether it was one. at: rank 0's time."""
        match message:
            case Park():
                self._park(message)
            case Unpark():
                if (parked := self._parked.get(message.id)) is not None:
                    self._unpark(parked, stay=message.stay)
            case Watch():
                if not self.tickets.put(message, at):
                    logger.warning("a request that is to be moved here cannot be: too many are on their way")
                    self._count("refused")
            case _:
                return False
        return True

    def propose(self) -> Sequence[int]:
        """For each parked request without a reply so far, whether DRAM has copies of its blocks here."""
        now = self._clock()
        self._copying = [parked for parked in self._parked.values() if not parked.told]
        return [int(self._copied(parked, now)) for parked in self._copying]

    def act(self, agreed: Sequence[int]) -> None:
        """Once per pass."""
        if not (self._parked or self._arriving):
            return
        with self._guarded():
            for parked, copied in zip(self._copying, agreed, strict=False):
                if copied:
                    self._lend(parked)
            self._remind_of_parked()
        with self._guarded():
            if self._arriving:
                self._look_at_arriving()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Let no exception into SGLang's loop."""
        try:
            yield
        except Exception:
            logger.exception("moving requests failed here")
            self._count("error")

    # -- the source -----------------------------------------------------------------------------------------

    def _park(self, message: Park) -> None:
        if message.id in self._parked:
            return
        scheduler = self._cache.scheduler
        req = next((req for req in scheduler.running_batch.reqs if req.rid == message.rid), None)
        why = self._problem(req, message.rid)
        if not why and not self._settled():
            why = AGAIN
        if not why and req is not None and (req.finished() or req.to_finish is not None):
            why = "it has just ended"
        if why or req is None:
            self._count("again" if why == AGAIN else "refused")
            self._reply(Parked(self.epoch, message.id, why))
            return
        batch = scheduler.running_batch
        batch.filter_batch(keep_indices=[at for at, other in enumerate(batch.reqs) if other is not req])
        batch.batch_is_full = False
        tokens = encode_tokens((req.origin_input_ids + req.output_ids)[:-1])
        parked = self._parked[message.id] = _Parked(message.id, req, self._clock(), tokens)
        self._count("parked")
        manager = self.manager
        if manager is not None:
            self._give(parked, manager)
            return
        from sglang_ext.patches.seams import current

        # The tree takes the whole blocks; the rest is computed again wherever it goes on.
        current.release(req, self._cache, keep=True)
        req.reset_for_retract()

    def _problem(self, req: Any, rid: str) -> str:
        scheduler = self._cache.scheduler
        if req is None:
            return AGAIN if _is_known(scheduler, rid) else "no such request runs here"
        if req.finished() or req.to_finish is not None:
            return "it has just ended"
        if self.manager is not None and self._cache.namespace_of(req) is None:
            return "its KV is of several weights: they were updated while it ran"
        return obstacle(req, not scheduler.spec_algorithm.is_none())

    def _settled(self) -> bool:
        """Take in the result of the batch that was launched last. False when that is a prefill: its requests
        are not in the running batch yet."""
        scheduler = self._cache.scheduler
        if not scheduler.enable_overlap or scheduler.last_batch is None or not scheduler.result_queue:
            return True
        if not scheduler.last_batch.forward_mode.is_decode():
            return False
        # As pause_generation does it.
        batch, result = scheduler.result_queue.popleft()
        scheduler.process_batch_result(batch, result)
        scheduler.last_batch = None
        return True

    def _give(self, parked: _Parked, manager: Transfers) -> None:
        """Offer all pages of a request in a hand-over, as prefill does when it has computed a prompt."""
        scheduler, req = self._cache.scheduler, parked.req
        number = 1 + int.from_bytes(hashlib.blake2b(parked.id.encode(), digest_size=8).digest()) % (
            BOOTSTRAP_ROOMS - 1
        )
        sender = manager.agent.sender
        try:
            parked.handover = sender.open(number, read=True)
        except RefusedError as error:
            self._unpark(parked, stay=True)
            self._reply(Parked(self.epoch, parked.id, str(error)))
            return
        row = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : req.kv.kv_committed_len]
        page = self._cache.page_size
        pages = row[::page].cpu().numpy().astype(np.int64) // page
        sender.complete(parked.handover, pages, self._row(number, req))
        self._reply(
            Parked(
                self.epoch,
                parked.id,
                resume=state_of(req, received=True, stages=request_stages(req)),
                meeting=manager.meeting,
                bootstrap_room=number,
            )
        )
        parked.told = True

    def _row(self, number: int, req: Any) -> bytes:
        """SGLang's metadata row: the last token stands for the first that prefill sends."""
        # Not one of the scheduler's own rows: the transfer thread may be filling any of them.
        row = ScratchRow(self._cache.scheduler.disagg_metadata_buffers)
        row.buffers.output_ids[0][0] = req.output_ids[-1]
        row.buffers.bootstrap_room[0, 0] = number
        return row.read()

    def _remind_of_parked(self) -> None:
        now = self._clock()
        for parked in list(self._parked.values()):
            if self._commands is not None and not parked.reminded and now - parked.since > PARKED_SECONDS:
                parked.reminded = True
                logger.warning("a stopped request continues here: its router has sent no Unpark")
                self._commands.enqueue(Unpark(parked.id, stay=True))

    def _copied(self, parked: _Parked, now: float) -> bool:
        """Whether DRAM has copies of a request's blocks, as far as they are waited for."""
        cache = self._cache
        if cache.write_down is None or cache.peers is None:
            return True
        path = cache.tree.match(cache.namespace_of(parked.req), parked.tokens).path
        return cache.write_down.incomplete().isdisjoint(path) or now - parked.since > COPY_SECONDS

    def _lend(self, parked: _Parked) -> None:
        cache, req = self._cache, parked.req
        export = ""
        if cache.peers is not None:
            export = parked.id
            cache.peers.export(Export(export, parked.tokens, req.extra_key, req.cache_salt, EXPORT_SECONDS))
        parked.told = True
        self._reply(
            Parked(
                self.epoch,
                parked.id,
                resume=state_of(req, received=False, stages=request_stages(req)),
                tokens=parked.tokens,
                extra_key=req.extra_key,
                cache_salt=req.cache_salt,
                export=export,
            )
        )

    def _unpark(self, parked: _Parked, *, stay: bool) -> None:
        scheduler, req, manager = self._cache.scheduler, parked.req, self.manager
        del self._parked[parked.id]
        if parked.handover is not None and manager is not None:
            # Its pages are open from here on, whatever becomes of the request.
            manager.agent.sender.forget(parked.handover)
        self._count("stayed" if stay else "left")
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

        scheduler = self._cache.scheduler
        prepare_abort(req, GOES_ON)
        if req.kv.holds_kv:
            current.release(req, self._cache, keep=True)
        scheduler.output_streamer.stream_output([req], req.return_logprob)

    def aborted(self, rid: str, *, every: bool) -> None:
        """A client aborts the request of this name, or all."""
        for parked in list(self._parked.values()):
            if every or parked.req.rid == rid:
                with self._guarded():
                    self._unpark(parked, stay=False)
        for name, arriving in list(self._arriving.items()):
            # SGLang drops a waiting request silently; on decode, its end is reported.
            if (every or name == rid) and not _is_receiving(arriving.req):
                del self._arriving[name]

    # -- the target -----------------------------------------------------------------------------------------

    def received(self, message: Any) -> None:
        """A request has come: take out the ticket of its state."""
        with self._guarded():
            params = message.sampling_params.custom_params
            if not isinstance(params, dict) or FIELD not in params:
                return
            rest = {name: value for name, value in params.items() if name != FIELD}
            message.sampling_params.custom_params = rest or None
            self._coming[message.rid] = _Coming(message.rid, self.tickets.take(params[FIELD], message.rid))
            while len(self._coming) > MOST_COMING:
                self._coming.popitem(last=False)

    def queued(self, req: Any) -> None:
        """A request is about to wait: with a ticket, it begins where it was stopped; with an unknown or
        unfitting ticket, it is aborted."""
        if not self._coming or (coming := self._coming.get(req.rid)) is None or coming.rid is not req.rid:
            return
        del self._coming[req.rid]
        if req.finished() or req.to_finish is not None:
            return
        try:
            why = self._resumed(req, coming.ticket)
        except Exception:
            logger.exception("request %s cannot be gone on with", req.rid)
            self._count("error")
            why = "an error of this server"
        if why:
            self._count("misfit")
            # In its first state, so that SGLang treats it as a new request.
            setattr(req, _PROMPT, None)
            req.output_ids, req.is_retracted = array("q"), False
            req.set_finish_with_abort(f"the request cannot be gone on with: {why}")

    def _resumed(self, req: Any, ticket: Ticket | None) -> str:
        """Restore a request's state, or return why that is impossible."""
        if ticket is None:
            return "nothing of it is known here"
        resume, scheduler, manager = ticket.resume, self._cache.scheduler, self.manager
        vocabulary = scheduler.model_config.vocab_size
        if why := misfit(resume, req, vocabulary=vocabulary, receives=manager is not None):
            return why
        if not self._has_room() or req.rid in self._arriving:
            return "too many are on their way here"
        set_former(req, resume.stages)
        replay(req, resume, scheduler.batch_result_processor._maybe_update_reasoning_tokens)
        if manager is None:
            put_back(req, resume)
            req.is_retracted = True
        else:
            # Up to its commit it is a request whose prompt ends before the last token, so that cached KV of
            # prompt and answer is found, and the rest read.
            setattr(req, _PROMPT, req.origin_input_ids)
            req.origin_input_ids = req.origin_input_ids + array("q", output_of(resume)[:-1])
        self._arriving[req.rid] = _Arriving(req, ticket)
        return ""

    def _has_room(self) -> bool:
        """Whether one more may arrive. A request whose state is still to be restored is never forgotten."""
        if len(self._arriving) < MOST_COMING:
            return True
        lost = next((rid for rid, each in self._arriving.items() if not _is_receiving(each.req)), None)
        if lost is not None:
            del self._arriving[lost]
        return lost is not None

    def comes_over(self, number: int) -> bool:
        """Whether the hand-over of this number is of a request that another decode instance has stopped."""
        return any(arriving.req.bootstrap_room == number for arriving in self._arriving.values())

    def committed(self, req: Any) -> None:
        """The KV of a request has come, on decode."""
        arriving = self._arriving.get(req.rid)
        if arriving is None or arriving.req is not req or not _is_receiving(req):
            return
        resume = arriving.ticket.resume
        req.origin_input_ids = getattr(req, _PROMPT)
        setattr(req, _PROMPT, None)
        if req.finished():
            return
        try:
            put_back(req, resume)
            if resume.home is not None:
                req.bootstrap_host, req.bootstrap_port = resume.home
        except Exception:
            from sglang.srt.disaggregation.utils import prepare_abort

            logger.exception("request %s cannot be gone on with", req.rid)
            self._count("error")
            prepare_abort(req, "the request cannot be gone on with: an error of this server")

    def _look_at_arriving(self) -> None:
        for rid, arriving in list(self._arriving.items()):
            req, ticket = arriving.req, arriving.ticket
            runs = len(req.output_ids) * TOKEN_BYTES > len(ticket.resume.output) or (
                self.manager is not None and req in self._cache.scheduler.running_batch.reqs
            )
            failed = req.finished() and req.finished_reason.to_json().get("type") == "abort"
            if not runs and not failed:
                continue
            del self._arriving[rid]
            self._count("failed" if failed else "arrived")
            if not failed:
                self._reply(Running(self.epoch, ticket.id))

    # -- both -----------------------------------------------------------------------------------------------

    def _reply(self, message: Parked | Running) -> None:
        if self._commands is not None:
            self._commands.reply_to_move(message)

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


def _is_receiving(req: Any) -> bool:
    """Whether a request's KV is still to come, so that its prompt is not its own."""
    return getattr(req, _PROMPT, None) is not None


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

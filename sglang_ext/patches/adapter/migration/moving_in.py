"""The target of a move: a request comes with a ticket, and goes on where it was stopped elsewhere."""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final

from sglang_ext.engine.resume import FIELD, Ticket, Tickets, misfit, output_of, put_back, replay
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.patches.adapter.migration.moving import MovingRank
from sglang_ext.patches.adapter.request_stages import set_former
from sglang_ext.protocol.agent import Running, Watch

logger = logging.getLogger(__name__)

MOST_COMING: Final = 1000
_PROMPT: Final = "sglang_ext_prompt"
"""Attribute of a request: its prompt, until its KV has come."""


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


class MovingIn:
    """The requests that come to one rank from other instances, until they run."""

    def __init__(self, rank: MovingRank) -> None:
        self._rank = rank
        self.tickets = Tickets()
        self._coming: OrderedDict[str, _Coming] = OrderedDict()
        self._arriving: dict[str, _Arriving] = {}

    def __len__(self) -> int:
        """Requests that resume, and do not run yet."""
        return len(self._arriving)

    def arrives(self, rid: str) -> bool:
        """Whether a request of this name resumes, and does not run yet."""
        return rid in self._arriving

    def watch(self, message: Watch, at: float) -> None:
        """A router announces a request with its state. at: rank 0's time."""
        if not self.tickets.put(message, at):
            logger.warning("a request that is to be moved here cannot be: too many are on their way")
            self._rank.counts["refused"] += 1

    def aborted(self, rid: str, *, every: bool) -> None:
        """A client aborts the request of this name, or all."""
        for name, arriving in list(self._arriving.items()):
            # SGLang drops a waiting request silently; on decode, its end is reported.
            if (every or name == rid) and not _is_receiving(arriving.req):
                del self._arriving[name]

    def received(self, message: Any) -> None:
        """A request has come: take out the ticket of its state."""
        with self._rank.guarded():
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
            self._rank.counts["error"] += 1
            why = "an error of this server"
        if why:
            self._rank.counts["misfit"] += 1
            # In its first state, so that SGLang treats it as a new request.
            setattr(req, _PROMPT, None)
            req.output_ids, req.is_retracted = array("q"), False
            req.set_finish_with_abort(f"the request cannot be gone on with: {why}")

    def _resumed(self, req: Any, ticket: Ticket | None) -> str:
        """Restore a request's state, or return why that is impossible."""
        if ticket is None:
            return "nothing of it is known here"
        resume, scheduler, manager = ticket.resume, self._rank.cache.scheduler, self._rank.manager
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
                req.bootstrap_host, req.bootstrap_port, req.disagg_prefill_dp_rank = resume.home
        except Exception:
            from sglang.srt.disaggregation.utils import prepare_abort

            logger.exception("request %s cannot be gone on with", req.rid)
            self._rank.counts["error"] += 1
            prepare_abort(req, "the request cannot be gone on with: an error of this server")

    def report_running(self) -> None:
        """Once per pass: report the requests that run now, or have failed."""
        for rid, arriving in list(self._arriving.items()):
            req, ticket = arriving.req, arriving.ticket
            runs = len(req.output_ids) * TOKEN_BYTES > len(ticket.resume.output) or (
                self._rank.manager is not None and req in self._rank.cache.scheduler.running_batch.reqs
            )
            failed = req.finished() and req.finished_reason.to_json().get("type") == "abort"
            if not runs and not failed:
                continue
            del self._arriving[rid]
            self._rank.counts["failed" if failed else "arrived"] += 1
            if not failed:
                self._rank.reply(Running(self._rank.epoch, ticket.id))


def _is_receiving(req: Any) -> bool:
    """Whether a request's KV is still to come, so that its prompt is not its own."""
    return getattr(req, _PROMPT, None) is not None

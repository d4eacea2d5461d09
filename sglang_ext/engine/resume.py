"""The state that a migrated request needs at its new instance, beside its KV, and the tickets that guard it.

SGLang resumes a retracted request from its prompt and its output ids, and from these the detokenizer, stop
strings, limits and counts continue as if nothing had happened. A migrated request resumes the same way. State
that its ids do not determine is carried along; `obstacle` names state that can be neither rebuilt nor
carried.

The state comes from the router over the agent's channel (`agent_messages.Watch`), never in a request's body:
there stands only a `Tickets` ticket, which works once, for one request, for half a minute. A client that
writes the field itself has no ticket, and its request is refused like any other that is wrong.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final

from sglang_ext.keys import TOKEN_BYTES, decode_tokens, encode_tokens
from sglang_ext.protocol.agent import MAX_OUTPUT_BYTES, Resume, Watch
from sglang_ext.stages import StageTimes

FIELD: Final = "sglang_ext_resume"
"""Key in ``custom_params`` of a request: the ticket of its `Resume`. Routers refuse it from clients."""

AGAIN: Final = "again"
"""A request that waits, or is in a batch whose result is not there yet, can be stopped a moment later."""

TICKET_SECONDS: Final = 30.0
"""Lifetime of a ticket: longer than a router waits for a request to resume."""
MOST_TICKETS: Final = 1000
MOST_TICKET_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Ticket:
    """The state from which the request that presents it resumes. id: of the migration, for its router."""

    id: str
    rid: str
    resume: Resume
    until: float


class Tickets:
    """States that wait for their requests. Alike on all ranks: changed by commands and requests only, with
    rank 0's time.

    Args:
        most: tickets at a time.
        most_bytes: of their output at a time.
    """

    def __init__(self, most: int = MOST_TICKETS, most_bytes: int = MOST_TICKET_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._tickets: OrderedDict[str, Ticket] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def put(self, watch: Watch, at: float) -> bool:
        """Keep a state until its request comes. False when there is no room, or the ticket is taken."""
        nbytes = self.nbytes + len(watch.resume.output)
        if watch.ticket in self._tickets or len(self) >= self._most or nbytes > self._most_bytes:
            return False
        self._tickets[watch.ticket] = Ticket(watch.id, watch.rid, watch.resume, at + TICKET_SECONDS)
        self.nbytes = nbytes
        return True

    def take(self, ticket: object, rid: str) -> Ticket | None:
        """Redeem the ticket that a request presents. None when it is no ticket of this request. A ticket
        works once."""
        found = self._tickets.pop(ticket, None) if isinstance(ticket, str) else None
        if found is None:
            return None
        self.nbytes -= len(found.resume.output)
        return found if found.rid == rid else None

    def expire(self, at: float) -> None:
        """Drop expired tickets. at: rank 0's time."""
        while self._tickets and self.next_expiry <= at:
            _, old = self._tickets.popitem(last=False)
            self.nbytes -= len(old.resume.output)

    @property
    def next_expiry(self) -> float:
        """When the next one expires, in rank 0's time. They all live equally long, so the oldest is next."""
        return next(iter(self._tickets.values())).until if self._tickets else math.inf


def prompt_digest(tokens: array[int]) -> bytes:
    """16 bytes that differ when any token of a prompt differs."""
    return hashlib.blake2b(encode_tokens(tokens), digest_size=16).digest()


def misfit(resume: Resume, req: Any, *, vocabulary: int, receives: bool) -> str:
    """Why a request cannot resume from a state; empty when it can. A token id that the model lacks, or more
    tokens than a request may have, would end the scheduler.

    req: has been checked by SGLang, which has set its ``max_new_tokens``. receives: whether KV comes by a
    hand-over here.
    """
    if resume.received is not receives:
        return "colocated and decode instances do not go on with each other's requests"
    if len(resume.output) % TOKEN_BYTES:
        return "its output is no row of tokens"
    output = decode_tokens(resume.output)
    if int(output.min()) < 0 or int(output.max()) >= vocabulary:
        return f"a token id is not below {vocabulary}"
    if prompt_digest(req.origin_input_ids) != resume.prompt:
        return "it had another prompt"
    most = req.sampling_params.max_new_tokens
    if most is not None and len(output) >= most:
        return f"it has {len(output)} tokens already, and may have {most} here"
    if max(resume.cached) > len(req.origin_input_ids) + len(output):
        return "more of it was cached than it has"
    return _kept(req)


def obstacle(req: Any, speculative: bool) -> str:
    """Why a request has to end where it is; empty when it can be moved."""
    if not req.output_ids:
        return AGAIN
    return "speculative decoding" if speculative else _kept(req)


def _kept(req: Any) -> str:
    """The first part of a request's state that cannot be rebuilt elsewhere; empty for none."""
    found = (
        (len(req.output_ids) * TOKEN_BYTES > MAX_OUTPUT_BYTES, "a long answer"),
        (req.session is not None or req.session_id is not None, "a session at the server"),
        (req.lora_id is not None, "a LoRA adapter"),
    )
    return next((why for so, why in found if so), "") or lost_by_retraction(req)


def lost_by_retraction(req: Any) -> str:
    """The first part of a request's state that its ids do not determine, so that SGLang itself would not
    resume it as it began; empty for none.
    """
    sampling = req.sampling_params
    found = (
        (req.return_logprob, "log probabilities"),
        (
            sampling.frequency_penalty != 0.0
            or sampling.presence_penalty != 0.0
            or sampling.repetition_penalty != 1.0,
            "penalties",
        ),
        (req.custom_logit_processor is not None, "a logit processor of its own"),
        (req.multimodal_inputs is not None or req.input_embeds is not None, "inputs other than tokens"),
        (req.positional_embed_overrides is not None, "overridden embeddings"),
        (req.beam_group is not None, "beam search"),
        (
            bool(req.return_hidden_states)
            or req.return_routed_experts
            or req.return_indexer_topk
            or req.return_sampling_mask
            or req.customized_info is not None,
            "internals of the model in the answer",
        ),
    )
    return next((why for so, why in found if so), "")


def state_of(req: Any, *, received: bool, stages: StageTimes) -> Resume:
    """The state of a stopped request."""
    return Resume(
        encode_tokens(req.output_ids),
        prompt_digest(req.origin_input_ids),
        (
            req.cached_tokens,
            req.cached_tokens_device,
            req.cached_tokens_host,
            req.cached_tokens_storage,
        ),
        received,
        (req.bootstrap_host, int(req.bootstrap_port), req.disagg_prefill_dp_rank or 0)
        if received and req.bootstrap_host
        else None,
        stages,
    )


def output_of(resume: Resume) -> list[int]:
    """The token ids that were generated."""
    return list(map(int, decode_tokens(resume.output)))


def put_back(req: Any, resume: Resume) -> None:
    """Restore a request to its state when it was stopped: its ids and counts."""
    req.output_ids = array("q", output_of(resume))
    req.cached_tokens, req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage = (
        resume.cached
    )
    # SGLang counts from here on how many tokens must come before the end.
    minimum = req.sampling_params.min_new_tokens
    req.sampling_params.min_new_tokens = max(0, minimum - len(req.output_ids))
    # Cached tokens are counted once: a request that is prefilled again must not count them again.
    req.retracted_stain = True
    req._cache_breakdown_computed = True


def replay(req: Any, resume: Resume, account: Any) -> None:
    """Replay the output to restore the state that depends on it: the grammar, and the count of reasoning
    tokens.

    account: SGLang's counting function, called with (request, id). SGLang itself counts a token that arrives
    with the KV.
    """
    output = output_of(resume)
    for at, token in enumerate(output, 1):
        if req.grammar is not None:
            req.grammar.accept_token(token)
        if at < len(output) or not resume.received:
            account(req, token)

"""What a request needs to go on at another instance, beside its KV: as JSON, in its body there.

SGLang resumes a request that it had to retract from its prompt and its output ids, and from these the
detokenizer, stop strings, limits and counts go on as if nothing had happened. So does a request that was
moved; what cannot be rebuilt from its ids is carried, and what can be neither, `obstacle` names.
"""

from __future__ import annotations

from array import array
from typing import Annotated, Any, Final

import msgspec

from sglang_ext.errors import UserError

FIELD: Final = "sglang_ext_resume"
"""Key in ``custom_params`` of a request: its `Resume`. Routers refuse it from clients."""

AGAIN: Final = "again"
"""A request that waits, or is in a batch whose result is not there yet, can be stopped a moment later."""

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Tokens = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class Resume(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request that was stopped.

    output_ids: generated so far; of the last one there is no KV yet. prompt_tokens: to compare. cached:
    tokens that were found cached: in all, in HBM, in DRAM and on disk. received: whether its KV comes through
    a room. home: bootstrap host and port of who prefilled it, to which its KV returns.
    """

    output_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    prompt_tokens: Tokens
    cached: tuple[Tokens, Tokens, Tokens, Tokens] = (0, 0, 0, 0)
    received: bool = False
    home: tuple[str, int] | None = None


def resume_of(value: Any, vocabulary: int) -> Resume:
    """What came in a request's ``custom_params``.

    Raises:
        UserError: it is none, or names tokens that the model does not have.
    """
    try:
        resume = msgspec.convert(value, Resume)
    except msgspec.ValidationError as error:
        raise UserError(f"not the state of a request: {error}", field=FIELD) from None
    if max(resume.output_ids) >= vocabulary:
        raise UserError(f"a token id is not below {vocabulary}", field=FIELD)
    return resume


def obstacle(req: Any, speculative: bool) -> str:
    """Why a request has to end where it is; empty when it can be moved."""
    sampling = req.sampling_params
    found = (
        (not req.output_ids, AGAIN),
        (speculative, "speculative decoding"),
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
        (req.session is not None or req.session_id is not None, "a session at the server"),
        (req.lora_id is not None, "a LoRA adapter"),
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


def state_of(req: Any, *, received: bool) -> bytes:
    """`Resume` of a stopped request, as JSON."""
    home = (req.bootstrap_host, int(req.bootstrap_port)) if received and req.bootstrap_host else None
    return msgspec.json.encode(
        Resume(
            list(req.output_ids),
            len(req.origin_input_ids),
            (
                req.cached_tokens,
                req.cached_tokens_device,
                req.cached_tokens_host,
                req.cached_tokens_storage,
            ),
            received,
            home,
        )
    )


def put_back(req: Any, resume: Resume) -> None:
    """Make a request what it was when it was stopped: its ids and counts."""
    req.output_ids = array("q", resume.output_ids)
    req.cached_tokens, req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage = (
        resume.cached
    )
    # SGLang counts from here on how many tokens must come before the end.
    minimum = req.sampling_params.min_new_tokens
    req.sampling_params.min_new_tokens = max(0, minimum - len(resume.output_ids))
    # What was cached is counted once, and a request that is prefilled again does not count again.
    req.retracted_stain = True
    req._cache_breakdown_computed = True


def replay(req: Any, resume: Resume, account: Any) -> None:
    """Bring what follows the output along, to where it was: grammar, and the count of reasoning tokens.

    account: SGLang's count, called with (request, id). Of a token that comes with the KV, SGLang counts it.
    """
    for at, token in enumerate(resume.output_ids, 1):
        if req.grammar is not None:
            req.grammar.accept_token(token)
        if at < len(resume.output_ids) or not resume.received:
            account(req, token)

"""Refuse token ids that the model does not have, and prompts without any.

Change: SGLang passes ``input_ids`` of a request to the embedding unchecked; an id outside the vocabulary
raises in the forward pass, which kills the scheduler process, on a GPU by a device-side assertion. So does a
prompt without a token. The scheduler already checks the length of every request and answers a bad one with a
400; this check joins it.

Why no extension point serves: there is none for the validation of requests.

For: any device. A server behind the router refuses such requests there first.
Can go: when SGLang validates ``input_ids`` as it does ``token_ids_logprob``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_ext.patches.plugin_hooks import Hook, hook_patch
from sglang_ext.patches.process import PROCESS

EMPTY = "The prompt is empty; it needs a token at least."


def out_of_vocabulary(input_ids: Sequence[int], vocab_size: int) -> str | None:
    """Why these ids cannot be embedded, naming the first bad one; None when they can."""
    if not input_ids or (min(input_ids) >= 0 and max(input_ids) < vocab_size):
        return None
    index = next(i for i, token in enumerate(input_ids) if not 0 <= token < vocab_size)
    return (
        f"input_ids[{index}] is {input_ids[index]}, outside the vocabulary; "
        f"valid token ids are 0 to {vocab_size - 1}."
    )


def after_length_check(error: str | None, req: Any, *_args: Any, **_kwargs: Any) -> str | None:
    """After ``validate_input_length``: the error to answer with, None for none.

    Multimodal prompts are exempt: SGLang has put hashes outside the vocabulary in place of images.
    """
    if (
        not PROCESS.checks_vocabulary
        or error is not None
        or req.vocab_size is None
        or req.multimodal_inputs is not None
    ):
        return None  # SGLang keeps the result it has
    if not req.origin_input_ids:
        return EMPTY
    return out_of_vocabulary(req.origin_input_ids, req.vocab_size)


PATCH = hook_patch(
    "vocabulary",
    "answer token ids outside the vocabulary with a 400 instead of dying",
    # The name in the module that calls it: other importers keep the plain function.
    Hook("sglang.srt.managers.scheduler.validate_input_length", "after", after_length_check),
)

"""Breakpoints of prompts: where a client says that other prompts begin alike (``Dialect.beginnings``).

An instance whose model has recurrent states keeps a state there. All others keep KV of every block anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_ext.keys import MOST_KEPT
from sglang_ext.router.api.job import Chat, Job, PromptInput
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.clients.divergence import common_tokens
from sglang_ext.router.http.types import RequestRefused
from sglang_ext.router.tenancy.budgets import Budget
from sglang_ext.router.tokens.encoded import Encoded
from sglang_ext.router.tokens.tokenizing import TokenizerService


async def places_of(
    beginnings: Sequence[Chat],
    prompt: Encoded,
    tokenizers: TokenizerService,
    limits: Limits,
    budget: Budget | None,
) -> tuple[int, ...]:
    """The places of a prompt up to which it has the tokens of its beginnings, in rising order; none where its
    tokens are not known.

    Args:
        budget: pays for tokenizing.
    """
    if prompt.tokens is None:
        return ()
    prompts = [PromptInput(chat=chat, namespace=prompt.namespace[1:]) for chat in beginnings[:MOST_KEPT]]
    job = Job(False, tuple(prompts))
    try:
        found = await tokenizers.encode(job, answer_follows=False, limits=limits, budget=budget)
    except RequestRefused:
        return ()  # the request itself can be served
    places = {common_tokens(each.key, prompt.key) for each in found if each.tokens is not None}
    return tuple(sorted(places - {0, prompt.tokens}))

"""One prompt computed by two instances at once (MemServe, table 3: sequence parallelism over transfer).

In each layer, attention of a token needs only that layer's KV of the tokens before it. So while a helper
computes the first span of a prompt, the chosen instance computes the rest a layer behind. Chunked prefill
computes a span pass by pass, and the chosen instance needs all of the first span, so only the helper's last
pass runs beside the chosen instance's first one:

    helper   [ pass ][ pass ][  last pass  ]
    chosen                    [  first pass   ][ pass ]

`best_split` finds the helper and the cut with the shortest time to first token. Later tokens attend to more
tokens, so the first span is the longer one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from sglang_ext.router.policies.base import NOTHING, Costs, Instance, Matches
from sglang_ext.router.policies.plan import Plan, Pricing, Span, Split
from sglang_ext.router.policies.spans import local_spans

CUTS: Final = 32
"""Evenly spaced cuts that are tried, in addition to the ends of the helper's chunks."""
MOST_HELPERS: Final = 4
"""Helpers that are tried, the least busy first."""
LAYER: Final = 1 / 16
"""Lag of the chosen instance behind its helper, as a share of a pass."""
LEAST_TOKENS: Final = 2048
"""Shorter prompts are not worth a split."""
GAIN: Final = 1.25
"""Least ratio of time alone to time split, because the helper's own requests wait while it helps."""


@dataclass(frozen=True, slots=True)
class SplitTerms:
    """When to split a prompt. least_tokens: uncached tokens. gain: least ratio of time alone to split."""

    least_tokens: int = LEAST_TOKENS
    gain: float = GAIN

    @classmethod
    def of(cls, text: str) -> SplitTerms | None:
        """Parse ``--sequence-parallel``: off, auto, or the number of tokens from which every prompt is split.

        Raises:
            ValueError: ``text`` is none of these.
        """
        if text == "off":
            return None
        if text == "auto":
            return cls()
        if (least := int(text)) < 1:
            raise ValueError(text)
        return cls(least, 0.0)


def best_split(
    tokens: int,
    target: Instance,
    helpers: Sequence[Instance],
    matches: Matches,
    costs: Costs,
    chunk: Callable[[str], int],
    terms: SplitTerms,
    *,
    pricing: Pricing,
    block: int,
) -> Split | None:
    """The split with the shortest time to first token; None if the terms allow no split.

    Args:
        tokens: length of the prompt.
        helpers: instances that may compute the first span.
        chunk: tokens of a prompt that an instance computes in one pass, by instance name; 0 for all.
        pricing: of the prompt at ``target``.
        block: tokens of a block; a span is whole blocks.
    """
    held = matches.get(target.name, NOTHING)
    if tokens - held.tokens < terms.least_tokens:
        return None
    alone = pricing.queue_s + pricing.alone.seconds
    best: Split | None = None
    idlest = sorted(helpers, key=lambda helper: (helper.in_flight, helper.queued_tokens, helper.name))
    for helper in idlest[:MOST_HELPERS]:
        there = min(matches.get(helper.name, NOTHING).in_memory, tokens)
        queues_s = costs.queue_s(helper), pricing.queue_s
        for cut in _cuts(tokens, max(there, held.in_memory), there, chunk(helper.name), block):
            split = _timed(tokens, cut, there, held.in_memory, helper, target, queues_s, costs, chunk, alone)
            if best is None or split.seconds < best.seconds:
                best = split
    if best is None or best.seconds == math.inf:
        return None
    return best if best.seconds * terms.gain <= alone else None


def split_plan(tokens: int, target: Instance, split: Split, matches: Matches, costs: Costs) -> Plan:
    """The plan of a split, which is required: the terms have decided."""
    held = matches.get(target.name, NOTHING)
    local = tuple(local_spans(target, held, min(held.in_memory, split.tokens), costs))
    start = local[-1].end if local else 0
    first = Span(split.source, None, start, split.tokens, split.first_s)
    rest = Span(None, None, split.tokens, tokens, split.rest_s)
    return Plan(
        target.name,
        (*local, first, rest),
        split.seconds,
        split.alone_s,
        max(0.0, split.seconds - split.rest_s),
        split.alone_s - split.seconds,
        required=True,
        split=split,
    )


def _cuts(tokens: int, least: int, known: int, chunk: int, block: int) -> Iterator[int]:
    """Possible cuts, in whole blocks behind ``least``."""
    step = max(1, (tokens - least) // CUTS)
    evenly = range(least + step, tokens, step)
    chunks = range(known + chunk, tokens, chunk) if chunk else ()
    for place in {place // block * block for place in (*evenly, *chunks)}:
        if least < place < tokens:
            yield place


def _timed(
    tokens: int,
    cut: int,
    known: int,
    here: int,
    helper: Instance,
    target: Instance,
    queues_s: tuple[float, float],
    costs: Costs,
    chunk: Callable[[str], int],
    alone: float,
) -> Split:
    """The timing of a split at ``cut``. here: tokens that the target has in memory. queues_s: of the helper
    and of the target."""
    new, most = cut - known, chunk(helper.name)
    last = new if not most or new <= most else (new - 1) % most + 1
    last_s = costs.exec_s(helper, last, cut - last)
    first_s = queues_s[0] + costs.exec_s(helper, new, known)
    begins_s = max(0.0, first_s - last_s)
    rest, most = tokens - cut, chunk(target.name)
    head = min(rest, most) if most else rest
    head_s = costs.exec_s(target, head, cut)
    rest_s = costs.exec_s(target, rest, cut)
    tail_s = max(0.0, rest_s - head_s)
    start_s = max(queues_s[1], begins_s + LAYER * last_s)
    moving_s = costs.transfer_s(helper, target, cut - here)
    ends_s = max(start_s + head_s, start_s + moving_s, first_s + LAYER * head_s)
    return Split(helper.name, cut, known, begins_s, first_s, rest_s, ends_s + tail_s, alone)

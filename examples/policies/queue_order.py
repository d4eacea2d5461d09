"""Order of the queue when every instance is full: people who watch a stream before batch jobs, short prompts
first.

sglang-ext router --queue-policy queue_order:people_first …
"""

from __future__ import annotations

from sglang_ext.router.dispatch.queueing import Waiting


def people_first(request: Waiting) -> tuple[float, ...]:
    """Larger priority, then streams, then the shorter prompt."""
    return (-request.priority, not request.streams, request.prompt_tokens)

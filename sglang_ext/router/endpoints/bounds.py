"""Limits on requests that workers answer in their event loop, without generating (``/tokenize`` and others).

A body is bounded before it is parsed. A text is bounded by the longest prompt of the model. A long text is
tokenized here first, in threads, and charged to its client's budget.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.validation import Json
from sglang_ext.router.dispatch.choosing import no_worker
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.http.types import Request, RequestRefused
from sglang_ext.router.telemetry.record import Record
from sglang_ext.router.tokens.tokenizing import INLINE_BYTES, TokenizerService

ESCAPED: Final = 6
"""Bytes of JSON that a character may take."""
MORE_BYTES: Final = 1 << 20
"""Of a body besides its text."""
MEDIA: Final = frozenset({"image_url", "video_url", "audio_url", "input_audio", "source"})
"""Fields of a message's parts that are no text."""
SECONDS_PER_BYTE: Final = 4e-6
"""Upper bound of a worker's own time for a text; the rest of a slow answer is waiting."""


class Bounds:
    """Judges requests by their length."""

    def __init__(self, fleet: Fleet, tokenizers: TokenizerService) -> None:
        self._fleet = fleet
        self._tokenizers = tokenizers

    def check_body(self, request: Request) -> None:
        """Refuse a body that has more than a prompt, before it is parsed.

        Raises:
            RequestRefused: 413; 503 without a model.
        """
        most = ESCAPED * self._tokenizers.most_characters(self._limits()) + MORE_BYTES
        if len(request.body) > most:
            raise RequestRefused(
                f"the request body has {len(request.body)} bytes; for {request.path[:80]} it may have "
                f"{most}, as the longest prompt of this model. Send less at a time",
                status=413,
                code="request_too_large",
            )

    async def check_text(self, payload: Json, field: str, record: Record) -> None:
        """Refuse a body with more text than a prompt of the model can have.

        Args:
            field: that has it, for people.

        Raises:
            RequestRefused: 400; 429 where the client's budget is used up.
        """
        if record.budget is not None:
            record.budget.check_tokenizing()
        pieces, limits = list(_texts(payload)), self._limits()
        if sum(map(len, pieces)) > min(INLINE_BYTES, self._tokenizers.most_characters(limits)):
            text, salt = "\n".join(pieces), record.caller.salt
            await self._tokenizers.check_text(text, salt, limits, record.budget, field)

    def check_ids(self, count: int, field: str) -> None:
        """Refuse more token ids than the model's context has.

        Raises:
            RequestRefused: 400.
        """
        context = self._limits().context_length
        if count > context:
            raise RequestRefused(
                f"{field} has {count} token ids, and may have as many as the model's context ({context})",
                param=field,
                code="context_length_exceeded",
            )

    @contextmanager
    def charging(self, request: Request, record: Record) -> Iterator[None]:
        """Charge the client for a worker's time while the block runs."""
        began = time.monotonic()
        try:
            yield
        finally:
            if record.budget is not None:
                took = time.monotonic() - began
                record.budget.tokenized(min(took, len(request.body) * SECONDS_PER_BYTE))

    def _limits(self) -> Limits:
        model = self._fleet.model
        if model is None:
            raise no_worker(self._fleet)
        return model.limits


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value of JSON, but media."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, list):
            waiting += each
        elif isinstance(each, dict):
            waiting += [inner for name, inner in each.items() if name not in MEDIA]

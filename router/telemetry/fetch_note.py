"""What is known of one fetch: why it was told, and what became of it. For ``/explain``, headers and logs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

UNDER_WAY = "under-way"
NOT_WORTH_IT = "not-worth-it"
"""Computing is expected to take less time; nobody was told."""
UNHEARD = "unheard"
"""One of both could not be told."""


@dataclass(eq=False, slots=True)
class FetchNote:
    """One prompt's KV that another instance holds."""

    source: str
    target: str
    tokens: int
    """Leading tokens of the prompt that the source can export."""
    lacking: int
    """How many of them the target is believed not to hold."""
    transfer_s: float
    """Expected: until they are in its HBM."""
    saved_s: float
    """Expected: what computing them would take."""
    calibrated: bool
    """Whether that comes from a profile, not from the defaults."""
    end: str = UNDER_WAY
    """``done``, or why nothing came (``engine.fetches.FetchCounters``), or a word of this module."""
    moved: int = 0
    """Tokens that came."""
    took_s: float | None = None
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the target knows of it, or nobody will say so any more."""

    def told(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "from": self.source,
            "tokens": self.tokens,
            "lacking_tokens": self.lacking,
            "expected_transfer_s": self.transfer_s,
            "expected_saving_s": self.saved_s,
            "calibrated": self.calibrated,
            "end": self.end,
            "moved_tokens": self.moved,
            "took_s": self.took_s,
        }

    def headers(self) -> dict[str, str]:
        """For an answer, as far as it is known when that begins."""
        if self.end == NOT_WORTH_IT:
            return {"x-kv-fetch": self.end}
        return {
            "x-kv-fetch": self.end,
            "x-kv-fetch-source": self.source,
            "x-kv-fetched-tokens": str(self.moved),
        }

"""What is known of one fetch: why it was told, and what became of it. For ``/explain``, headers and logs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

UNDER_WAY = "under-way"
NOT_WORTH_IT = "not-worth-it"
"""Computing is expected to take less time; nobody was told."""
UNHEARD = "unheard"
"""One of those concerned could not be told."""
COMPUTED = "compute"
"""In the place of an instance: nobody is read from."""


@dataclass(eq=False, slots=True)
class SpanNote:
    """Tokens ``start`` to ``stop`` of a prompt, and where they come from.

    source: an instance; None for what is computed. tier: of its tiers, by name; ``compute`` for what it
    computes meanwhile. expected_s: until they are in HBM; loading_s: of these, until another instance has
    them in memory, if it has not. end, moved and took_s are of what was read from another instance: why that
    ended, tokens that came, seconds.
    """

    source: str | None
    tier: str | None
    start: int
    stop: int
    expected_s: float
    loading_s: float = 0.0
    end: str | None = None
    moved: int = 0
    took_s: float | None = None

    def told(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "from": self.source or COMPUTED,
            "tier": self.tier,
            "start": self.start,
            "stop": self.stop,
            "expected_s": self.expected_s,
            "loading_s": self.loading_s,
            "end": self.end,
            "moved_tokens": self.moved,
            "took_s": self.took_s,
        }


@dataclass(eq=False, slots=True)
class FetchNote:
    """One prompt's KV that other instances hold."""

    target: str
    """Who reads."""
    spans: list[SpanNote]
    """Of the whole prompt, in order."""
    transfer_s: float
    """Expected: until what is read from others is in the target's HBM."""
    saved_s: float
    """Expected: what doing without would take longer."""
    calibrated: bool
    """Whether that comes from a profile, not from the defaults."""
    end: str = UNDER_WAY
    """``done``, or why not all came (``engine.fetches.FetchEnd``), or a word of this module."""
    spare: SpanNote | None = None
    """What is read instead of the last of the spans, where that does not come."""
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the target knows of it, or nobody will say so any more."""

    @property
    def read(self) -> list[SpanNote]:
        """The spans that are read from other instances."""
        return [span for span in self.spans if span.source not in (None, self.target)]

    @property
    def asked(self) -> list[SpanNote]:
        """The same, and the spare: what others are asked to export."""
        return [*self.read, *(() if self.spare is None else (self.spare,))]

    @property
    def tokens(self) -> int:
        """Leading tokens of the prompt that are there when all has come."""
        return max((span.stop for span in self.read), default=0)

    @property
    def moved(self) -> int:
        """Tokens that came."""
        return sum(span.moved for span in self.asked)

    def told(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "tokens": self.tokens,
            "expected_transfer_s": self.transfer_s,
            "expected_saving_s": self.saved_s,
            "calibrated": self.calibrated,
            "end": self.end,
            "moved_tokens": self.moved,
            "plan": [span.told() for span in self.spans],
            "spare": None if self.spare is None else self.spare.told(),
        }

    def headers(self) -> dict[str, str]:
        """For an answer, as far as it is known when that begins."""
        if self.end == NOT_WORTH_IT:
            return {"x-kv-fetch": self.end}
        return {
            "x-kv-fetch": self.end,
            "x-kv-fetch-source": ",".join(
                dict.fromkeys(
                    span.source or "" for span in self.asked if span is not self.spare or span.moved
                )
            ),
            "x-kv-fetched-tokens": str(self.moved),
        }

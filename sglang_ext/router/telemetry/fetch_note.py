"""Record of one fetch: its plan and its outcome. For ``/explain``, headers and logs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

UNDER_WAY, DONE, NEEDLESS = "under-way", "done", "needless"
NOT_WORTH_IT = "not-worth-it"
"""Computing is expected to take less time; no fetch was sent."""
UNSENT = "unheard"
"""The fetch could not be sent to one of its instances."""
COMPUTED = "compute"
"""Stands in place of a source: the span is computed."""


@dataclass(eq=False, slots=True)
class SpanNote:
    """Tokens ``start`` to ``stop`` of a prompt, and the source of their KV.

    source: an instance; None for a computed span. tier: name of the source's tier; ``compute`` for a span
    that the source computes meanwhile. expected_s: until the KV is in HBM; loading_s: the part of it until
    the source has loaded the KV into its memory. end, moved and took_s belong to a read from another
    instance: the reason of its end, the tokens that arrived, its seconds.
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

    def as_json(self) -> dict[str, Any]:
        """For ``/explain``."""
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
    """A fetch of one prompt's KV from other instances."""

    target: str
    """The instance that reads."""
    spans: list[SpanNote]
    """Spans of the whole prompt, in order."""
    transfer_s: float
    """Expected seconds until the KV read from other instances is in the target's HBM."""
    saved_s: float
    """Expected seconds saved, compared with no fetch."""
    calibrated: bool
    """Whether the expectations come from a profile, not from the defaults."""
    end: str = UNDER_WAY
    """``done``, or the reason of an incomplete fetch (``FetchEnd``), or a constant above."""
    spare: SpanNote | None = None
    """Replacement for the last span, read if that span fails."""
    acknowledged: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the target has acknowledged the fetch, or no acknowledgement can arrive any more."""

    @property
    def is_under_way(self) -> bool:
        """Whether the fetch was sent, and its end was not reported."""
        return self.end == UNDER_WAY

    @property
    def read(self) -> list[SpanNote]:
        """The spans that are read from other instances."""
        return [span for span in self.spans if span.source not in (None, self.target)]

    @property
    def asked(self) -> list[SpanNote]:
        """``read`` and the spare: the spans that other instances are asked to export."""
        return [*self.read, *(() if self.spare is None else (self.spare,))]

    @property
    def tokens(self) -> int:
        """Leading tokens of the prompt that the target has after a complete fetch."""
        return max((span.stop for span in self.read), default=0)

    @property
    def moved(self) -> int:
        """Tokens that arrived."""
        return sum(span.moved for span in self.asked)

    def as_json(self) -> dict[str, Any]:
        """For ``/explain``."""
        return {
            "tokens": self.tokens,
            "expected_transfer_s": self.transfer_s,
            "expected_saving_s": self.saved_s,
            "calibrated": self.calibrated,
            "end": self.end,
            "moved_tokens": self.moved,
            "plan": [span.as_json() for span in self.spans],
            "spare": None if self.spare is None else self.spare.as_json(),
        }

    def headers(self) -> dict[str, str]:
        """Headers of the answer, from the state of the fetch when the answer begins."""
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

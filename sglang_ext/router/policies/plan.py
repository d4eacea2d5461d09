"""The price of a request at one instance, term by term, and the plan for its KV. Plain data."""

from __future__ import annotations

import msgspec

from sglang_ext.tiers import Tier


class Span(msgspec.Struct, frozen=True):
    """Tokens ``start`` to ``end`` of a prompt.

    source: the instance that holds their KV, tier: the farthest of its tiers with KV of the span. Both are
    None for a span that the target computes; only ``tier`` is None if ``source`` computes the span for it.
    seconds: until the KV is in HBM. loading_s: the part of it until another instance has loaded the KV into
    its memory.
    """

    source: str | None
    tier: Tier | None
    start: int
    end: int
    seconds: float
    loading_s: float = 0.0


class Way(msgspec.Struct, frozen=True):
    """Loading a part of the instance's own KV and computing the rest. Unweighted seconds."""

    load_s: float
    exec_s: float

    @property
    def seconds(self) -> float:
        """The sum of both."""
        return self.load_s + self.exec_s


class Split(msgspec.Struct, frozen=True):
    """``source`` computes the leading ``tokens`` tokens. known: leading tokens already in its cache.

    begins_s: until its last pass begins; first_s: until that pass has ended; rest_s: computing the other
    tokens at the target; seconds: until the first token of the answer; alone_s: the same without a helper.
    """

    source: str
    tokens: int
    known: int
    begins_s: float
    first_s: float
    rest_s: float
    seconds: float
    alone_s: float


class Plan(msgspec.Struct, frozen=True):
    """All spans of a prompt at an instance, in order, with at least one from another instance.

    seconds: the sum of the spans, with computing weighted by ``exec_weight``. alone_s: the same without other
    instances. transfer_s: until all KV from other instances has arrived; saved_s: the time to compute the
    tokens that other instances send; both unweighted. spare: a replacement for the last span read from
    another instance, used if that read fails; None if no other instance has any of the span in memory.
    required: the plan is carried out even if computing is faster. split: another instance computes the first
    span meanwhile. busy_s: the longest queue at an instance that is asked to export.
    """

    instance: str
    spans: tuple[Span, ...]
    seconds: float
    alone_s: float
    transfer_s: float
    saved_s: float
    spare: Span | None = None
    required: bool = False
    split: Split | None = None
    busy_s: float = 0.0

    @property
    def worth_it(self) -> bool:
        """Whether to carry it out: it is required, or takes no longer than without other instances."""
        return self.required or self.seconds <= self.alone_s

    @property
    def read(self) -> tuple[Span, ...]:
        """The spans that are read from other instances."""
        return tuple(span for span in self.spans if span.source not in (None, self.instance))

    @property
    def asked(self) -> tuple[Span, ...]:
        """``read`` and the spare: the spans that other instances are asked to export."""
        return self.read if self.spare is None else (*self.read, self.spare)


class Pricing(msgspec.Struct, frozen=True):
    """The time of a request at ``instance``.

    queue_s: until it begins with the request. ways: without reads from other instances. plan: the fastest
    plan with such reads; None if no other instance has KV that this one lacks.
    """

    instance: str
    queue_s: float
    ways: tuple[Way, ...]
    plan: Plan | None = None

    @property
    def alone(self) -> Way:
        """The fastest of ``ways``, which the instance takes by its own load policy."""
        return min(self.ways, key=_seconds) if len(self.ways) > 1 else self.ways[0]

    def alone_s(self, exec_weight: float) -> float:
        """The least sum over ``ways``, with computing weighted."""
        first = self.ways[0]
        if len(self.ways) == 1:
            return first.load_s + exec_weight * first.exec_s
        return min([way.load_s + exec_weight * way.exec_s for way in self.ways])


def _seconds(way: Way) -> float:
    return way.seconds

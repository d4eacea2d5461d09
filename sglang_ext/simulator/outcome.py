"""The outcome of a simulation: one row for each request, sums over the instances, and figures of both."""

from __future__ import annotations

import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_ext.simulator.settings import BLOCK_TOKENS
from sglang_ext.tiers import Tier

PERCENTS = (50, 90, 99)


def percentile(values: Iterable[float], percent: float) -> float:
    """The value that ``percent`` of the values do not exceed; 0 of none."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, round(len(ordered) * percent / 100 + 0.5) - 1))]


@dataclass(frozen=True, slots=True)
class Decided:
    """The instance of a request, the tokens of its prompt that were found there, by tier, and its times.

    hits: by the tier's name. stages: seconds by the names of ``STAGES``; empty where they are not known.
    """

    instance: str
    hits: Mapping[str, int]
    stages: Mapping[str, float] = field(default_factory=dict)


STAGES = ("way", "queue", "prefill", "transfer", "decode")
"""Of a request: HTTP, tokenizer and routing; waiting in the router and for the first pass with its prompt;
its passes, with the loads that they wait for; from the last of them until the instance that decodes begins;
and from the first token to the last. The sum is the time to the last token."""


@dataclass(frozen=True, slots=True)
class Served:
    """One turn of a session. Times are seconds from the start.

    session: its name. known: tokens of the turns before. hbm, below: tokens of its prompt that were found in
    HBM, and below. begins: it is the first of its session. queued_s: for which it waited in the router.
    """

    session: str
    sent_s: float
    first_s: float
    last_s: float
    prompt: int
    answer: int
    known: int
    hbm: int
    below: int
    begins: bool
    queued_s: float

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def in_hbm(self) -> bool:
        """The blocks of the turns before it, but for the last one, were in HBM."""
        return self.hbm >= self.known - self.known % BLOCK_TOKENS - BLOCK_TOKENS


@dataclass
class Tenant:
    """The requests of one tenant."""

    ttft: array.array[float] = field(default_factory=lambda: array.array("d"))
    tokens: int = 0
    """Of prompts and answers."""
    failed: Counter[str] = field(default_factory=Counter)
    """Requests without an answer, by the reason."""

    def as_json(self) -> dict[str, Any]:
        """Its figures."""
        refused = {code: count for code, count in sorted(self.failed.items()) if code in REFUSALS}
        return {
            "requests": len(self.ttft),
            "failed": dict(sorted(self.failed.items())),
            "refused": sum(refused.values()),
            "tokens": self.tokens,
            "ttft_s": _spread(self.ttft),
        }


REFUSALS = frozenset(
    {
        "requests_limit_exceeded", "concurrency_limit_exceeded", "tokens_limit_exceeded",
        "bytes_limit_exceeded", "too_many_requests", "queue_full", "queue_timeout",
    }
)  # fmt: skip
"""Codes of the router's answers to requests beyond a limit."""


@dataclass
class Outcome:
    """Times are seconds, sizes are tokens."""

    ttft: array.array[float] = field(default_factory=lambda: array.array("d"))
    jct: array.array[float] = field(default_factory=lambda: array.array("d"))
    tpot: array.array[float] = field(default_factory=lambda: array.array("d"))
    """Between two tokens of an answer, of each request with two at least."""
    arrivals: array.array[float] = field(default_factory=lambda: array.array("d"))
    prompt_tokens: int = 0
    output_tokens: int = 0
    hits: Counter[Tier] = field(default_factory=Counter)
    by_instance: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    served: list[Served] = field(default_factory=list)
    """Of a closed loop, in the order of their ends."""
    failed: Counter[str] = field(default_factory=Counter)
    """Requests without an answer, by the reason."""
    tenants: dict[str, Tenant] = field(default_factory=dict)
    """By their names, where clients have keys."""
    retried: int = 0
    role_changes: list[tuple[float, str, str]] = field(default_factory=list)
    """When, which instance, and its new role."""
    counts: dict[str, int] = field(default_factory=dict)
    """Calls of the router's and the engine's objects."""
    link_bytes: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    """Of virtual time."""
    busy: float = 0.0
    """Share of the time in which instances computed or generated."""
    capacity_used: float = 0.0
    """The largest of three shares of the time until the last arrival: in which instances computed prompts, in
    which requests waited that none could begin with, and of HBM that requests held."""
    computed_s: float = 0.0
    """Device time of passes with prompts."""
    saved_s: float = 0.0
    """Device time that computing the reused tokens would have taken, by the cost model."""
    regret: Mapping[str, float] = field(default_factory=dict)
    decided: dict[str, Decided] = field(default_factory=dict)
    """Of recorded requests, by their ids."""
    agreement: Mapping[str, float] = field(default_factory=dict)
    """With a recording; see `trace.agreement`."""

    def answered(
        self,
        arrived: float,
        first: float,
        last: float,
        prompt_tokens: int,
        output_tokens: int,
        hits: Mapping[Tier, int],
        instance: str,
        reason: str,
    ) -> None:
        """Add a request."""
        self.arrivals.append(arrived)
        self.ttft.append(first - arrived)
        self.jct.append(last - arrived)
        if output_tokens > 1:
            self.tpot.append((last - first) / (output_tokens - 1))
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens
        self.hits.update(hits)
        self.by_instance[instance] += 1
        self.reasons[reason] += 1

    def tenant(self, name: str) -> Tenant:
        """Its figures so far."""
        found = self.tenants.get(name)
        if found is None:
            found = self.tenants[name] = Tenant()
        return found

    def fail(self, reason: str, tenant: str | None) -> None:
        """A request has no answer."""
        self.failed[reason] += 1
        if tenant is not None:
            self.tenant(tenant).failed[reason] += 1

    @property
    def requests(self) -> int:
        """Answered ones."""
        return len(self.ttft)

    def as_json(self) -> dict[str, Any]:
        """All figures, in an order of their own: the same outcome gives the same bytes."""
        prompt = max(1, self.prompt_tokens)
        shares = {tier.name: self.hits[tier] / prompt for tier in sorted(self.hits)}
        mean = self.requests / max(1, len(self.by_instance))
        return {
            "requests": self.requests,
            "failed": dict(sorted(self.failed.items())),
            "tenants": {name: found.as_json() for name, found in sorted(self.tenants.items())},
            "retried": self.retried,
            "role_changes": [list(each) for each in self.role_changes],
            "virtual_seconds": self.seconds,
            "busy": self.busy,
            "capacity_used": self.capacity_used,
            "mean_prompt_tokens": self.prompt_tokens / max(1, self.requests),
            "mean_output_tokens": self.output_tokens / max(1, self.requests),
            "ttft_s": _spread(self.ttft),
            "jct_s": _spread(self.jct),
            "tpot_s": _spread(self.tpot),
            "reused": sum(shares.values()),
            "reused_by_tier": shares,
            "regret": dict(self.regret),
            "busiest_over_mean": max(self.by_instance.values(), default=0) / mean if mean else 0.0,
            "computed_device_s": self.computed_s,
            "saved_device_s": self.saved_s,
            "link_bytes": dict(sorted(self.link_bytes.items())),
            "agreement": dict(self.agreement),
            "reasons": dict(sorted(self.reasons.items())),
            "counts": dict(sorted(self.counts.items())),
        }


def _spread(values: Iterable[float]) -> dict[str, float]:
    kept = list(values)
    found = {f"p{percent}": percentile(kept, percent) for percent in PERCENTS}
    return {"mean": sum(kept) / len(kept) if kept else 0.0, **found}

"""Reports on decisions to load a request's KV from a tier, with their numbers, for answers and metrics."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_ext.tiers import Tier

_ATTRIBUTE = "sglang_ext_loads"
"""Attribute of a request: its reports by tier."""
STORAGE_BACKEND = "global"
"""Value of ``storage_backend`` for our disk: the name in ``--radix-cache-backend``. SGLang looks for HiCache
only, and would report ``none``."""
_NAMES = {Tier.DRAM: "host", Tier.DISK: "storage"}
"""SGLang's names of the tiers in ``cached_tokens_details``."""


class Reason(enum.Enum):
    """Why this part of the KV was read and no more."""

    FASTER = "faster"
    """Reading is expected to take less time than computing."""
    SLOWER = "slower"
    OVERLAP = "overlap"
    """Both take equally long: the head is read while the tail is computed."""
    UNMEASURED = "unmeasured"
    """No time was measured yet, so reading is tried."""
    ALWAYS = "always"
    """``--kv-load-policy always``."""
    SHORT = "short"
    """Less than ``--kv-load-policy min-tokens``."""
    NO_ROOM = "no_room"
    """The target tier is full of blocks in use."""
    LATE = "late"
    """Given up: reading took longer than computing was expected to."""
    FAILED = "failed"
    """Damaged, unreadable or gone."""


@dataclass(frozen=True)
class Decision:
    """A decision, with its numbers. Seconds are None where none were measured yet."""

    blocks: int
    read_seconds: float | None
    recompute_seconds: float | None
    reason: Reason = Reason.UNMEASURED


@dataclass(eq=False)
class LoadReport:
    """One request and tier. found, read: tokens of its prompt that the tier has, and that were read from it.

    Filled in during the load; ``found`` is 0 until ``decided``.
    """

    tier: Tier
    found: int = 0
    read: int = 0
    read_bytes: int = 0
    load_seconds: float | None = None
    compute_seconds: float | None = None
    reason: Reason = Reason.UNMEASURED
    sources: tuple[tuple[Tier, int], ...] = ()
    """Below DRAM: the tiers of the found tokens, in order, each with its number of tokens."""
    layers_in_hbm: float = 0.0
    """Average number of layers of the loaded blocks that were in HBM already."""
    _token_bytes: float = 0.0

    def decided(
        self,
        found: int,
        decision: Decision,
        block_tokens: int,
        block_bytes: int,
        sources: Sequence[tuple[Tier, int]] = (),
    ) -> None:
        """Record the decision on ``found`` blocks."""
        self.found = found * block_tokens
        self.sources = tuple((tier, blocks * block_tokens) for tier, blocks in sources)
        self._token_bytes = block_bytes / block_tokens
        self.load_seconds, self.compute_seconds = decision.read_seconds, decision.recompute_seconds
        self.came(decision.blocks * block_tokens, decision.reason)

    def came(self, tokens: int, reason: Reason) -> None:
        """Record the tokens that are read in the end, and why no more."""
        self.read, self.reason = tokens, reason
        self.read_bytes = round(tokens * self._token_bytes)

    def shares(self, other: LoadReport) -> None:
        """Copy the numbers of another request, for which the blocks are being read already."""
        self.found, self.read, self.read_bytes = other.found, other.read, other.read_bytes
        self.load_seconds, self.compute_seconds = other.load_seconds, other.compute_seconds
        self.reason, self._token_bytes, self.sources = other.reason, other._token_bytes, other.sources

    @property
    def decision(self) -> str:
        """``load``, ``compute``, or ``both``: the head is loaded and the tail computed."""
        if not self.read:
            return "compute"
        return "load" if self.read >= self.found else "both"

    def details(self) -> dict[str, int | str]:
        """As entries of ``cached_tokens_details``, which may have whole numbers and texts. Times are in
        microseconds, left out where none were measured.
        """
        if not self.found:
            return {}
        name = _NAMES[self.tier]
        details: dict[str, int | str] = {
            f"{name}_decision": self.decision,
            f"{name}_reason": self.reason.value,
            f"{name}_found_tokens": self.found,
            f"{name}_read_tokens": self.read,
            f"{name}_read_bytes": self.read_bytes,
        }
        for what, seconds in (("load", self.load_seconds), ("compute", self.compute_seconds)):
            if seconds is not None:
                details[f"{name}_{what}_us"] = round(seconds * 1e6)
        if self.layers_in_hbm:
            details[f"{name}_layers_in_hbm"] = round(self.layers_in_hbm)
        left = self.read
        for tier, tokens in self.sources:
            if read := min(left, tokens):
                details[tier.usage_key] = int(details.get(tier.usage_key, 0)) + read
                left -= read
        return details


class LoadDecisions:
    """Counts of decisions by (decision, reason), and the newest with its numbers, of one tier."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.last: LoadReport | None = None

    def note(self, report: LoadReport) -> None:
        """Count a decision."""
        self.counts[report.decision, report.reason.value] += 1
        self.last = report


def begin_report(req: Any, tier: Tier) -> LoadReport:
    """A new report on a request, in the place of an older one of the same tier."""
    report = LoadReport(tier)
    if req is None:
        return report
    reports = getattr(req, _ATTRIBUTE, None)
    if reports is None:
        reports = {}
        setattr(req, _ATTRIBUTE, reports)
    reports[tier] = report
    return report


def details_of(req: Any) -> dict[str, int | str]:
    """The entries that a request's reports add to ``cached_tokens_details``."""
    reports: Mapping[Tier, LoadReport] = getattr(req, _ATTRIBUTE, None) or {}
    details: dict[str, int | str] = {}
    for tier in sorted(reports):
        details |= reports[tier].details()
    return details


def answer_details(details: Mapping[str, int | str] | None, req: Any) -> dict[str, int | str] | None:
    """An answer's ``cached_tokens_details``: SGLang's ``details`` and the entries of a request's reports.
    None to leave SGLang's as they are.
    """
    more = details_of(req)
    answer: dict[str, int | str] = {**(details or {"device": 0, "host": 0, "storage": 0}), **more}
    disk = answer.get("storage") or "storage_decision" in answer or "storage_backend" in answer
    if disk:
        answer["storage_backend"] = STORAGE_BACKEND
    return answer if more or disk else None

"""What happened to one request, as it is counted, logged, traced and explained."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_ext.router.telemetry.estimate import Estimate
from sglang_ext.router.telemetry.fetch_note import FetchNote
from sglang_ext.router.tenancy.budgets import Budget
from sglang_ext.router.tenancy.tenants import ANYBODY, Caller
from sglang_ext.stages import StageTimes

SHOWN_STEP_S = 0.01
"""Steps in which tenants are told how long the router took for parts of their requests. Finer ones would show
what of a prompt the router had in its caches."""
CLIENT_GONE = 499
"""Status under which a request is counted whose client went away (nginx's number)."""


@dataclass(slots=True)
class DocumentNote:
    """The documents that a request names."""

    ids: tuple[str, ...]
    tokens: int = 0
    """Leading tokens of its prompt for which the KV of the first is held back."""
    composed_bytes: int = 0
    """Memory held for the request with their contents, until it has ended."""


class Record:
    """One request. Times are seconds of the clock."""

    status: int = 0
    priority: int = 0
    stream: bool = False
    instance: str | None = None
    """Who answers; with prefill and decode apart, who decodes."""
    prefill_instance: str | None = None
    """Who prefilled, where that is another one."""
    reason: str | None = None
    prompt_tokens: int | None = None
    matched_tokens: int | None = None
    """Tokens that the router believed the chosen instance to hold."""
    fetch: FetchNote | None = None
    """What another instance holds of its prompt, and what became of fetching that."""
    estimate: Estimate | None = None
    """What it was expected to take where it was sent last."""
    documents: DocumentNote | None = None
    budget: Budget | None = None
    """The budget charged for its bytes and its tokenizing."""
    cached_tokens: int | None = None
    """Tokens that the instance says it found."""
    completion_tokens: int | None = None
    answer_id: str | None = None
    """What stands as ``id`` in the answer; of a batch, the first."""
    attempts: int = 0
    instance_stages: StageTimes | None = None
    """Seconds at the instances, by stage, where they tell."""
    durability: str | None = None
    """With what its end was told, where that waited for the instance's disk."""
    queued_s: float = 0.0
    first_byte: float | None = None
    error: str | None = None
    trace_id: str | None = None

    def __init__(
        self, request_id: str, method: str, path: str, started: float, caller: Caller = ANYBODY
    ) -> None:
        self.request_id, self.method, self.path, self.started = request_id, method, path, started
        self.caller = caller
        self.tiers: dict[str, int] = {}
        """Tier -> tokens that were found there."""
        self.stages: dict[str, float] = {}
        """Seconds the router itself spent, by stage; waiting for a place is not one of them."""

    def shown(self, seconds: float) -> float:
        """A time of the router's own as its caller is told it: to a tenant, in steps of ``SHOWN_STEP_S``."""
        return seconds if self.caller.admin else round(seconds / SHOWN_STEP_S) * SHOWN_STEP_S

    def timings(self) -> list[tuple[str, float]]:
        """(stage, seconds) as far as they are known, in the order in which a request passes them."""
        found = self._own_timings()
        return found if self.instance_stages is None else [*found, *self.instance_stages.items()]

    def shown_timings(self) -> list[tuple[str, float]]:
        """``timings`` as the caller is told them."""
        own = [(stage, self.shown(seconds)) for stage, seconds in self._own_timings()]
        return own if self.instance_stages is None else [*own, *self.instance_stages.items()]

    def _own_timings(self) -> list[tuple[str, float]]:
        own = dict(self.stages)
        route = own.pop("route", None)
        found = [*own.items(), ("router_queue", self.queued_s)]
        if route is not None:
            found.append(("route", route))
        return found

"""Record of one request, the source of its metrics, log line, trace and explanation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sglang_ext.router.clients.divergence import Divergence
from sglang_ext.router.clients.pauses import Forecast
from sglang_ext.router.clients.repairs import Repair
from sglang_ext.router.telemetry.estimate import Estimate
from sglang_ext.router.telemetry.fetch_note import DONE, UNDER_WAY, FetchNote
from sglang_ext.router.tenancy.budgets import Budget
from sglang_ext.router.tenancy.tenants import ANYBODY, Caller
from sglang_ext.stages import StageTimes

SHOWN_STEP_S = 0.01
"""Resolution of the router's stage times in answers to tenants. A finer one would reveal which parts of a
prompt the router had in its caches."""
BY_FETCH = "by-fetch"
"""In ``Record.hints``: the answer to a hint is the outcome of the fetch for the request."""
CLIENT_GONE = 499
"""Status of a request whose client disconnected (nginx's number)."""


@dataclass(slots=True)
class DocumentNote:
    """The documents that a request names."""

    ids: tuple[str, ...]
    tokens: int = 0
    """Leading tokens of its prompt with KV of the first document that is held for it."""
    composed_bytes: int = 0
    """Memory held for the request with their contents, until it has ended."""


@dataclass(frozen=True, slots=True)
class Pause:
    """The pause that a turn ends in.

    after: the tools called; empty for a user who thinks. hint: the id of the hint made for the next turn.
    """

    after: str
    forecast: Forecast | None
    earliest_s: float | None = None
    """Before which the hint expects no request; 0: its KV stays in HBM."""
    hint: str | None = None
    verdict: str | None = None
    retired: bool = False
    """The session has made room for others, and its next turn waits (``dispatch.programs``)."""

    def as_json(self) -> dict[str, object]:
        """For ``/explain``."""
        found = self.forecast
        return {
            "after": self.after or None,
            "forecast": None if found is None else dataclasses.asdict(found),
            "kept_out_s": self.earliest_s,
            "hint": self.hint,
            "verdict": self.verdict,
            "made_room": self.retired,
        }


class Record:
    """One request. Times are seconds of the clock."""

    status: int = 0
    priority: int = 0
    stream: bool = False
    instance: str | None = None
    """The instance that answers; with PD disaggregation, the decode instance."""
    prefill_instance: str | None = None
    """The prefill instance, if it differs from ``instance``."""
    reason: str | None = None
    prompt_tokens: int | None = None
    matched_tokens: int | None = None
    """Tokens that the chosen instance held according to the index."""
    fetch: FetchNote | None = None
    """The fetch of its prompt's KV from other instances."""
    estimate: Estimate | None = None
    """The time estimate at the instance of the last attempt."""
    documents: DocumentNote | None = None
    budget: Budget | None = None
    """The budget charged for its bytes and its tokenizing."""
    cached_tokens: int | None = None
    """Cached tokens that the instance reports."""
    completion_tokens: int | None = None
    answer_id: str | None = None
    """The ``id`` in the answer; of a batch, the first."""
    attempts: int = 0
    instance_stages: StageTimes | None = None
    """Seconds at the instances, by stage, if they report them."""
    repairs: tuple[Repair, ...] = ()
    """The effects of rules on its prompt (``--client-rules``)."""
    divergence: Divergence | None = None
    """The place at which it left the last turn of its session, where KV was lost by that."""
    splice: str | None = None
    """Of a session's turn: whether the server's own tokens of the last answer are in its prompt, and if not,
    why (``tokens.answers.Outcome``)."""
    spliced_tokens: int = 0
    """Tokens of the last turn that the prompt begins with only by that."""
    tools: tuple[str, ...] = ()
    """Names of the tools that the answer calls."""
    pause: Pause | None = None
    """The pause after the answer, of a session's turn."""
    durability: str | None = None
    """The durability reported with the end of the answer, if the end waited for the instance's disk."""
    queued_s: float = 0.0
    decided: float | None = None
    """When the instance of the last attempt was chosen."""
    sent: float | None = None
    """When the request was sent to it."""
    first_byte: float | None = None
    error: str | None = None
    trace_id: str | None = None

    def __init__(
        self, request_id: str, method: str, path: str, started: float, caller: Caller = ANYBODY
    ) -> None:
        self.request_id, self.method, self.path, self.started = request_id, method, path, started
        self.caller = caller
        self.tiers: dict[str, int] = {}
        """Tier -> cached tokens found in it."""
        self.hints: dict[str, str] = {}
        """The answers to hints that it carries beside itself, by action."""
        self.stages: dict[str, float] = {}
        """Seconds that the router itself spent, by stage, without ``queued_s``."""

    def shown(self, seconds: float) -> float:
        """A stage time of the router for the caller: rounded to ``SHOWN_STEP_S`` unless it is an admin."""
        return seconds if self.caller.admin else round(seconds / SHOWN_STEP_S) * SHOWN_STEP_S

    def hint_answers(self) -> str:
        """The answers to its hints, as far as they are known, for a header."""
        return ", ".join(
            [f"{id}={self._of_fetch() if said == BY_FETCH else said}" for id, said in self.hints.items()]
        )

    def _of_fetch(self) -> str:
        """The answer to a hint that names a source of the prompt's KV: the router has chosen one itself."""
        if self.fetch is None:
            said = "completed" if self.matched_tokens else "rejected"
        else:
            said = {DONE: "completed", UNDER_WAY: "accepted"}.get(self.fetch.end, "rejected")
        return f"{said};source=router"

    def timings(self) -> list[tuple[str, float]]:
        """The known (stage, seconds), in the order in which a request passes the stages."""
        found = self._own_timings()
        return found if self.instance_stages is None else [*found, *self.instance_stages.items()]

    def shown_timings(self) -> list[tuple[str, float]]:
        """``timings`` for the caller, with the router's own times rounded by ``shown``."""
        own = [(stage, self.shown(seconds)) for stage, seconds in self._own_timings()]
        return own if self.instance_stages is None else [*own, *self.instance_stages.items()]

    def _own_timings(self) -> list[tuple[str, float]]:
        own = dict(self.stages)
        route = own.pop("route", None)
        found = [*own.items(), ("router_queue", self.queued_s)]
        if route is not None:
            found.append(("route", route))
        return found

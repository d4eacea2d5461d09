"""Hints that no client sends: a session's turn ends in a pause, and earlier pauses say how long it is.

When a turn has ended, the router offers a hint for the session's conversation. Its request does not come
before the shortest pauses of the kind: until then the instance gives the conversation's HBM up first, and
brings the KV back just before (Symphony, section 3.3). Where bringing it back takes as long as the shortest
pauses do, by the cost model, or where pauses are too different to know when, the KV stays. After the longest
pauses, it is like any other.

These hints yield to those of clients: their priority is lower, and the lower the longer the pause is. KV that
is held for a minute takes the place of KV that is used many times meanwhile. They may use a share of the
tenant's limits only (``--tenant-limits learnt-hints``).
"""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass

from sglang_ext.clock import Clock
from sglang_ext.router.clients.pauses import USER, Forecast, Pauses, Turned
from sglang_ext.router.dispatch.flight import Flight
from sglang_ext.router.dispatch.program_gate import ProgramGate
from sglang_ext.router.hints.advising import Advisor
from sglang_ext.router.hints.hint import Hint
from sglang_ext.router.hints.session_memory import SessionMemory
from sglang_ext.router.placing.costs import RouterCosts
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.telemetry.record import Pause
from sglang_ext.router.tenancy.bounded import Bounded, size_of
from sglang_ext.tiers import Tier

logger = logging.getLogger("router.pausing")

LEAST_TOKENS = 64
"""Of a conversation for which a hint is worth its message."""
LEAST_LEAD_S = 0.1
"""Time that bringing KV back takes, whatever its length."""
_SESSION_BYTES = 8 << 20


def rank_of(forecast: Forecast) -> int:
    """The priority of a learnt hint, below a client's own: the longer the pause, the lower."""
    return -1 - int(2 * math.log2(1 + 10 * forecast.typical_s))


@dataclass(eq=False, slots=True)
class _Session:
    """running: requests on their way. ended: when the last one did, in seconds of the clock."""

    running: int = 0
    ended: float | None = None
    turned: Turned | None = None


class Pausing:
    """Learns the pauses of sessions, and offers hints for the turns after them.

    Args:
        advisor: takes the hints.
        sessions: their conversations.
        costs: the time to bring KV back.
        gate: decides which sessions keep their places over their pauses.
        share: of a tenant's limits for hints that these may use; 0: pauses are learnt, and no hint is made.
        longest_s: how long KV is held for a turn from its earliest time on.
    """

    def __init__(
        self,
        advisor: Advisor,
        sessions: SessionMemory,
        costs: RouterCosts,
        gate: ProgramGate,
        metrics: RouterMetrics,
        clock: Clock,
        *,
        share: float,
        longest_s: float,
    ) -> None:
        self.pauses = Pauses()
        self._advisor = advisor
        self._memory = sessions
        self._costs = costs
        self._gate = gate
        self._clock = clock
        self._share = share
        self._longest_s = longest_s
        self._outcomes = metrics.counter("learnt_hints")
        self._sessions: Bounded[str, _Session] = Bounded(_SESSION_BYTES, lambda name, _: size_of(name))
        metrics.show_table("pauses", self.pauses)
        metrics.show_table("paused-sessions", self._sessions)

    def begins(self, flight: Flight) -> None:
        """A request has come."""
        name = flight.admitted.session
        if name is None:
            return
        session = self._sessions.use(name)
        if session is None:
            session = _Session()
            self._sessions.put(name, session)
        if session.running == 0 and session.ended is not None and session.turned is not None:
            self.pauses.learn(session.turned, self._clock.monotonic() - session.ended)
        session.running += 1

    def ends(self, flight: Flight) -> None:
        """It has been answered, or has failed."""
        turned = self._turned(flight)
        forecast = None if turned is None else self.pauses.forecast(turned)
        retired = self._gate.ends(flight, None if forecast is None else forecast.typical_s)
        if turned is None:
            return
        try:
            self._announce(flight, turned, forecast, retired)
        except Exception:  # the answer is the client's already
            logger.exception("cannot make a hint for the turn after a pause")

    def _turned(self, flight: Flight) -> Turned | None:
        """The end of a session's turn; None where no pause follows."""
        name, record = flight.admitted.session, flight.record
        session = None if name is None else self._sessions.get(name)
        if name is None or session is None:
            return None
        session.running -= 1
        if session.running > 0 or record.status != 200 or record.error is not None or flight.aborted:
            session.ended = None
            return None
        session.ended = self._clock.monotonic()
        agent = flight.request.headers.get("user-agent", "").partition("/")[0]
        session.turned = Turned(record.caller.scope, agent, name, "+".join(record.tools) or USER)
        return session.turned

    def _announce(self, flight: Flight, turned: Turned, forecast: Forecast | None, retired: bool) -> None:
        flight.record.pause = Pause(turned.tool, forecast, retired=retired)
        if forecast is None:
            self._outcomes.labels("unknown").inc()
            return
        # The KV of a session that has made room for others is not held for its next turn.
        hint = None if self._share <= 0.0 or retired else self._hint(flight, turned, forecast)
        if hint is None:
            self._outcomes.labels("none").inc()
            return
        _, told = self._advisor.offer(hint)
        self._outcomes.labels(told["verdict"]).inc()
        flight.record.pause = dataclasses.replace(
            flight.record.pause, earliest_s=hint.earliest_s, hint=told["id"], verdict=told["verdict"]
        )

    def _hint(self, flight: Flight, turned: Turned, forecast: Forecast) -> Hint | None:
        known = self._memory.main(turned.session)
        if known is None:
            return None
        namespace, key = known
        hint = Hint(turned.tenant, namespace, key, turned.session, learnt=True)
        if hint.tokens < LEAST_TOKENS or not hint.is_sendable:
            return None
        bring_s = LEAST_LEAD_S + 2 * self._costs.model.load_tokens_s(Tier.DRAM, hint.tokens)
        earliest_s = forecast.away_s(bring_s)
        return dataclasses.replace(
            hint,
            priority=min(flight.record.priority, 0) + rank_of(forecast),
            earliest_s=earliest_s,
            ttl_s=min(forecast.latest_s - earliest_s + LEAST_LEAD_S, self._longest_s),
        )

    def __repr__(self) -> str:
        return f"Pausing({self.pauses})"

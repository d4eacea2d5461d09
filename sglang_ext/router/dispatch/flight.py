"""Requests that are on their way, and where the answers are that instances keep."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Sequence

from sglang_ext.ids import random_id
from sglang_ext.router.api.dialect import AnswerEdit
from sglang_ext.router.api.job import session_of_key
from sglang_ext.router.api.sse import EventFilter
from sglang_ext.router.dispatch.diagnosing import Diagnosed
from sglang_ext.router.dispatch.suspects import digest_of_request
from sglang_ext.router.hints.session_answers import SessionTurn
from sglang_ext.router.http.types import Request, RequestRefused, Responder
from sglang_ext.router.telemetry.record import CLIENT_GONE, Record
from sglang_ext.router.tenancy.admit import through
from sglang_ext.router.tenancy.admitted import Admitted, Sent
from sglang_ext.router.tenancy.bounded import Bounded, size_of
from sglang_ext.router.tokens.encoded import Encoded
from sglang_ext.signals import Signal

MAX_HOMES = 50_000
MAX_HOME_BYTES = 32 << 20


class Flight:
    """One generation request on its way.

    Args:
        sent: the request to workers; as admitted, unless its instances need another dialect.
        units: length of all prompts, in the unit of matches.
        turn: learns the ids of the answer, and takes them out of it.
    """

    __slots__ = (
        "aborted", "admitted", "began", "breakpoints", "diagnosed", "failed", "filter", "goes_on", "prompts",
        "record", "request", "responder", "sent", "task", "turn", "units", "works",
    )  # fmt: skip

    def __init__(
        self,
        admitted: Admitted,
        prompts: Sequence[Encoded],
        request: Request,
        responder: Responder,
        record: Record,
        sent: Sent,
        units: int,
        turn: SessionTurn | None = None,
    ) -> None:
        self.admitted = admitted
        self.prompts = prompts
        self.request = request
        self.responder = responder
        self.record = record
        self.sent = sent
        self.units = units
        self.filter: EventFilter | None = None
        """Takes out of a stream what only the router has asked for."""
        self.breakpoints: tuple[int, ...] = ()
        """Places of its prompt, in tokens, for instances that keep states there."""
        self.turn = turn
        self.diagnosed: Diagnosed | None = None
        """Compares it with an earlier request."""
        self.failed: str | None = None
        """The instance at which the last attempt failed, where it is not the chosen one."""
        self.aborted = False
        self.works = False
        """Its session has a place for it (``program_gate``)."""
        self.began = 0.0
        """When it came to the gate."""
        self.goes_on: int | None = None
        """Tokens of its session's last turn, if the session had a place then."""
        self.task: asyncio.Task[object] | None = None
        if admitted.hides_usage and admitted.job.stream:
            self.filter = EventFilter(*sent.dialect.tells_tiers)

    def digest(self) -> str:
        """By which the request is recognised when a client sends it again."""
        return digest_of_request(self.record.caller.scope, self.request.target, self.request.body)

    @property
    def salt_by_header(self) -> str | None:
        """The tenant's salt, where the body has no field for it; None otherwise."""
        return None if self.sent.dialect.takes_salt else self.record.caller.salt

    @property
    def edit(self) -> AnswerEdit | None:
        """Puts the difference from an earlier request into the answer, where the client asks for that."""
        return None if self.diagnosed is None else self.diagnosed.edit

    def take_fields(self) -> None:
        """Have it sent in a dialect in which servers take the router's fields; see ``admit.through``."""
        if self.sent.dialect.via is not None:
            self.sent = through(self.sent.dialect, self.admitted.job, {}, self.admitted.in_place)


class Flights:
    """All requests on their way, by the names under which they can be aborted."""

    def __init__(self) -> None:
        self._all: set[Flight] = set()

    def __len__(self) -> int:
        return len(self._all)

    def carrying(self, flight: Flight) -> Carrying:
        """Keep a flight while the block runs, and end the block when it is aborted.

        Raises:
            RequestRefused: it was aborted.
        """
        return Carrying(self._all, flight)

    def named(self, name: str, scope: str) -> list[Flight]:
        """Flights with this request id or ``rid``, of the callers with this scope."""
        return [
            flight
            for flight in self.of(scope)
            if name in (flight.record.request_id, flight.admitted.called) or name in flight.admitted.rids
        ]

    def of(self, scope: str) -> list[Flight]:
        """All flights of the callers with this scope."""
        return [flight for flight in self._all if flight.record.caller.scope == scope]

    def __repr__(self) -> str:
        return f"Flights({len(self._all)})"


class Carrying:
    """See ``Flights.carrying``. A class, because a generator costs every request more."""

    __slots__ = ("_before", "_flight", "_flights")

    def __init__(self, flights: set[Flight], flight: Flight) -> None:
        self._flights = flights
        self._flight = flight
        self._before = 0

    def __enter__(self) -> None:
        flight = self._flight
        flight.task = asyncio.current_task()
        self._before = flight.task.cancelling() if flight.task is not None else 0
        self._flights.add(flight)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        flight, task = self._flight, self._flight.task
        flight.task = None
        self._flights.discard(flight)
        if not isinstance(error, asyncio.CancelledError) or not flight.aborted or task is None:
            return
        if task.uncancel() <= self._before:
            raise RequestRefused(
                "the request was aborted", status=CLIENT_GONE, code="aborted", kind="aborted"
            ) from None


def abort(flight: Flight) -> None:
    """End a flight from outside: its connection to the worker closes, on which the worker aborts."""
    if flight.task is not None and not flight.aborted:
        flight.aborted = True
        flight.task.cancel()


class Homes:
    """Response, or ``session_key``, -> the instance that keeps it; the oldest are forgotten.

    Args:
        instances: names of the fleet's; sessions that a router has named tell which of them keeps them.
        size: most responses that are known.
    """

    def __init__(self, instances: Callable[[], Iterable[str]] = lambda: (), size: int = MAX_HOMES) -> None:
        self._instances = instances
        self._homes: Bounded[tuple[str, str], str] = Bounded(
            MAX_HOME_BYTES, lambda key, _instance: size_of(*key), max_entries=size
        )
        self.kept: Signal[[str, str]] = Signal()
        """An instance has answered with a response here: (name, instance), for other routers' ``learn``."""

    def keep(self, scope: str, response_id: str, instance: str) -> None:
        """An instance has answered with this response."""
        self._keep(scope, response_id, instance)
        self.kept(f"{response_id}\n{scope}", instance)

    def learn(self, session: str, name: str) -> None:
        """Another router was answered with this response, by an instance."""
        response_id, _, scope = session.partition("\n")
        self._keep(scope, response_id, name)

    def found(self, scope: str, response_id: str, instance: str) -> None:
        """Another router was asked, and keeps this response."""
        self._keep(scope, response_id, instance)

    def _keep(self, scope: str, response_id: str, instance: str) -> None:
        self._homes.put((scope, response_id), instance)

    def forget(self, scope: str, response_id: str) -> None:
        """It is kept no more. Other routers learn that from the instance, when they ask for it."""
        self._homes.pop((scope, response_id))

    def get(self, scope: str, response_id: str) -> str | None:
        """The instance that keeps a response; None if the response is unknown or belongs to another
        tenant."""
        if (found := self._homes.get((scope, response_id))) is not None:
            return found
        session = session_of_key(response_id)
        return None if session is None else opened_at(session, self._instances())

    @property
    def size_bytes(self) -> int:
        """Memory of all that are known."""
        return self._homes.size_bytes

    def __len__(self) -> int:
        return len(self._homes)


def session_named_after(instance: str) -> str:
    """A new name for a session that an instance keeps, from which every router finds that instance."""
    return f"{random_id()}-{_digest(instance)}"


def opened_at(session: str, instances: Iterable[str]) -> str | None:
    """The instance after which a session is named; None of names that clients chose."""
    digest = session.rpartition("-")[2]
    return next((instance for instance in instances if _digest(instance) == digest), None)


def _digest(instance: str) -> str:
    return hashlib.blake2b(instance.encode(), digest_size=6).hexdigest()


def no_home(key: str) -> RequestRefused:
    """The refusal of a response or a session that is not known.

    Args:
        key: the response's id, or a ``session_key``.
    """
    session = session_of_key(key)
    kind, name = ("response", key) if session is None else ("session", session)
    return RequestRefused(
        f"there is no {kind} {name[:80]!r} here",
        status=404,
        param="response_id" if session is None else "session_params.id",
        code=f"{kind}_not_found",
    )


def home_lost(key: str, instance: str, why: str) -> RequestRefused:
    """The refusal of a request that continues a response or session whose instance cannot serve it.

    Args:
        key: the response's id, or a ``session_key``.
        why: the instance's state.
    """
    session = session_of_key(key)
    if session is None:
        text, way_out = f"response {key[:80]!r}", "Send the whole conversation"
    else:
        text = f"session {session[:80]!r}"
        way_out = "A session ends with its server: open a new one, and send the conversation so far"
    return RequestRefused(
        f"{instance}, which keeps {text}, cannot take the request: {why}. {way_out}",
        status=410,
        code="response_lost" if session is None else "session_lost",
    )

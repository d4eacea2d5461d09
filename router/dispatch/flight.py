"""Requests that are on their way, and where the answers are that instances keep."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec
import orjson

from sglang_ext.errors import InternalError
from sglang_ext.router.api.anthropic_answers import AnthropicAnswer
from sglang_ext.router.api.sse import EventFilter
from sglang_ext.router.api.usage import Form
from sglang_ext.router.api.validation import Endpoint, Job, Json
from sglang_ext.router.http.types import Request, RequestRefused, Responder
from sglang_ext.router.telemetry.record import CLIENT_GONE, Record
from sglang_ext.router.tokens.tokenizing import Encoded

MAX_HOMES = 50_000


class Flight(msgspec.Struct, eq=False):
    """One generation request on its way."""

    job: Job
    prompts: Sequence[Encoded]
    request: Request
    responder: Responder
    record: Record
    body: bytes
    """What is sent to a worker: as it came, unless the tenant's salt had to be put in."""
    target: str
    """Path and query at the worker."""
    form: Form
    """Of the worker's answer."""
    session: str | None = None
    filter: EventFilter | None = None
    """Takes out of a stream what only the router has asked for."""
    tells_cached: bool = False
    """The worker was asked what it found cached; an answer that says nothing of it found nothing."""
    translation: AnthropicAnswer | None = None
    """Turns the worker's answer into the form that the client expects."""
    rids: tuple[str, ...] = ()
    """What the worker calls the request, where the client chose it."""
    failed: str | None = None
    """The instance at which the last attempt failed, where it is not the chosen one."""
    rid: str = ""
    """What a worker is to call the request, so that it can be spoken of; empty for a batch."""
    units: int = 0
    """Length of all prompts, in the unit of matches."""
    aborted: bool = False
    task: asyncio.Task[object] | None = None


def through_chat(flight: Flight, fields: Json) -> None:
    """Send a message of ``/v1/messages`` as the chat request that SGLang would make of it, and turn the
    answer back: for what chat's body can say and SGLang's ``/v1/messages`` cannot.

    Args:
        fields: put into the body.
    """
    chat = flight.job.prompts[0].chat
    if chat is None:
        raise InternalError(f"{flight.job.endpoint} without a conversation")
    body = {**chat.payload, **fields}
    if flight.job.stream:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    flight.body = orjson.dumps(body)
    flight.target = Endpoint.CHAT.value
    flight.form = Form.OPENAI
    flight.translation = AnthropicAnswer(chat.payload["model"])


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
            flight for flight in self.of(scope) if name == flight.record.request_id or name in flight.rids
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
    """Response -> the instance that keeps it; the oldest are forgotten.

    Args:
        size: most responses that are known.
    """

    def __init__(self, size: int = MAX_HOMES) -> None:
        self._size = size
        self._homes: OrderedDict[tuple[str, str], str] = OrderedDict()
        self.share: Callable[[str, str], None] = lambda name, instance: None
        """Told of every response that an instance answered with here, for other routers' ``learn``."""

    def keep(self, scope: str, response_id: str, instance: str) -> None:
        """An instance has answered with this response."""
        self._keep(scope, response_id, instance)
        self.share(f"{response_id}\n{scope}", instance)

    def learn(self, name: str, instance: str) -> None:
        """Another router was answered with this response."""
        response_id, _, scope = name.partition("\n")
        self._keep(scope, response_id, instance)

    def _keep(self, scope: str, response_id: str, instance: str) -> None:
        self._homes[scope, response_id] = instance
        self._homes.move_to_end((scope, response_id))
        while len(self._homes) > self._size:
            self._homes.popitem(last=False)

    def find(self, scope: str, response_id: str) -> str:
        """Where a response is.

        Raises:
            RequestRefused: 404, for one that is not known, or is another tenant's.
        """
        instance = self._homes.get((scope, response_id))
        if instance is None:
            raise RequestRefused(
                f"there is no response {response_id[:80]!r} here",
                status=404,
                param="response_id",
                code="response_not_found",
            )
        return instance

    def __len__(self) -> int:
        return len(self._homes)

"""Migrates running requests, with their KV, off an instance that is draining (MemServe, table 3).

The instance stops each request between two tokens (`Park`). Another instance of its kind gets the request
with the generated tokens, fetches the KV, and continues (`patches.adapter.migration`). Once it reports that
it does (`Running`), the router reads the answer from there and leaves out the part that the client has
(`stream_splice`). Until then nothing is lost: if the other instance fails, the first one continues. Requests
that cannot be migrated finish in place.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from typing import Final

import orjson

from sglang_ext.clock import Clock
from sglang_ext.ids import NewId, random_id
from sglang_ext.protocol.agent import Expecting, Park, Parked, Running, Unpark, Watch
from sglang_ext.protocol.cluster import server_of
from sglang_ext.router.api.usage import StreamReader
from sglang_ext.router.dispatch.flight import Flight
from sglang_ext.router.dispatch.forwarding import Forwarding
from sglang_ext.router.dispatch.move_calls import MoveCalls
from sglang_ext.router.fleet.channels import AgentChannels
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.fleet.instance_record import Load
from sglang_ext.router.fleet.lifecycle import USABLE, State
from sglang_ext.router.http.types import ConnectionLost, UpstreamResponse
from sglang_ext.router.policies.base import Role
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.tenancy.admit import RESUME
from sglang_ext.tasks import Rounds, Tasks

logger = logging.getLogger("router.moving")

AGAIN: Final = "again"
AT_ONCE: Final = 8
"""Requests that are on their way at a time, so that each one's pause is short."""
ANSWER_S: Final = 5.0
"""For an instance to stop a request: it has to come to the end of a step."""
WATCH_S: Final = 2.0
"""Timeout for the other instance's agent to acknowledge the state of a request; involves no computation."""
GO_ON_S: Final = 20.0
LOOK_S: Final = 0.1
PAUSE_S: Final = 1.0
"""After a try that failed: each one stops the request for a while."""
WHOLE_EVENT_S: Final = 1.0


class AnswerMoved(ConnectionLost):
    """Another instance has taken over the answer that was being read."""


class OpenAnswer:
    """An answer that an instance gives, while the block runs.

    Args:
        rid: the instance's name of the request.
        mover: may have another instance continue the request; None if the request cannot be moved.
    """

    __slots__ = (
        "began_at", "blocked_reason", "copied_to", "flight", "instance", "last_outcome", "load", "mover",
        "moving", "over", "reader", "response", "rid", "taken_over", "target",
    )  # fmt: skip

    def __init__(self, flight: Flight, instance: str, rid: str, load: Load, mover: Mover | None) -> None:
        self.flight = flight
        self.instance = self.began_at = instance
        self.rid = rid
        self.load = load
        self.mover = mover
        self.response: UpstreamResponse | None = None
        """The stream that is being read; None before it begins."""
        self.reader: StreamReader | None = None
        self.taken_over: asyncio.Task[UpstreamResponse] | None = None
        """The other instance's answer, once that goes on with the request."""
        self.target = ""
        self.moving = self.over = False
        self.blocked_reason = ""
        """Why it finishes at its instance; empty while it can be moved."""
        self.copied_to = ""
        """Instance to which its prompt's KV was copied ahead."""
        self.last_outcome = ""
        """Outcome of the last attempt to move it."""

    def __enter__(self) -> OpenAnswer:
        if self.mover is not None:
            self.mover.begin(self)
        return self

    def __exit__(self, *error: object) -> None:
        if self.mover is not None:
            self.mover.end(self)

    async def take_over(self, fleet: Fleet) -> UpstreamResponse:
        """The answer of the instance that goes on with the request, from its beginning.

        Raises:
            ConnectFailed, ConnectionLost: it went away.
        """
        opening, self.taken_over = self.taken_over, None
        assert opening is not None
        fleet.move(self.load, self.target)
        self.instance = self.flight.record.instance = self.target
        self.moving, self.response = False, None
        self.last_outcome = ""
        try:
            with self.load.until_lost():
                return await asyncio.shield(opening)
        except BaseException:
            _discard(opening)
            raise


class Mover:
    """See the module's docstring.

    Args:
        clock: seconds.
        new_id: names moves and exports, and makes the tickets of moved requests.
    """

    def __init__(
        self,
        fleet: Fleet,
        channels: AgentChannels,
        forwarding: Forwarding,
        clock: Clock,
        metrics: RouterMetrics,
        rounds: Rounds,
        new_id: NewId = random_id,
    ) -> None:
        self._fleet = fleet
        self._rounds = rounds
        self.calls = MoveCalls(channels, new_id)
        """To the agents."""
        self._clock = clock
        self._moves = metrics.counter("moves")
        self._forwarding = forwarding
        self._answers: dict[str, set[OpenAnswer]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._heading: Counter[str] = Counter()
        """Requests on their way to each instance."""

    # -- what runs where ------------------------------------------------------------------------------------

    def names(self, flight: Flight, instance: str) -> str:
        """The name under which an instance can move a request; empty if the request cannot be moved."""
        movable = flight.sent.dialect.splice is not None and self.calls.known(instance)
        return flight.admitted.rid if movable else ""

    def carrying(self, flight: Flight, at: str, load: Load, *, named: bool) -> OpenAnswer:
        """An instance answers a request while the block runs. named: the instance has its name, so that the
        request can be moved."""
        return OpenAnswer(flight, at, flight.admitted.rid, load, self if named else None)

    def begin(self, answer: OpenAnswer) -> None:
        """It can be moved from now on."""
        self._answers.setdefault(answer.began_at, set()).add(answer)

    def end(self, answer: OpenAnswer) -> None:
        """It cannot be any more."""
        answer.over = True
        for name in (answer.began_at, answer.instance, answer.target):
            self._drop(name, answer)
        if answer.taken_over is not None:
            _discard(answer.taken_over)

    def _drop(self, name: str, answer: OpenAnswer) -> None:
        answers = self._answers.get(name)
        if answers is not None:
            answers.discard(answer)
            if not answers:
                del self._answers[name]

    # -- moving ---------------------------------------------------------------------------------------------

    def empty(self, instance: str) -> None:
        """An instance shall go: move what runs there, until it is not to go any more or has nothing left."""
        if instance not in self._tasks:
            task = self._tasks[instance] = self._rounds.start(
                "drains", functools.partial(self._emptying, instance), of_one_peer=True
            )
            task.add_done_callback(lambda _: self._tasks.pop(instance, None))

    async def stop(self) -> None:
        """End."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _emptying(self, instance: str) -> None:
        moves = Tasks()
        try:
            while True:
                row = self._fleet.rows.get(instance)
                if row is None or row.state is not State.DRAINING:
                    return
                for answer in list(self._answers.get(instance, ())):
                    if not answer.moving and not answer.blocked_reason:
                        answer.moving = True
                        moves.start(self._moving(answer), name=f"move {answer.rid}")
                await self._clock.sleep(LOOK_S)
        finally:
            await moves.cancel()

    async def _moving(self, answer: OpenAnswer) -> None:
        async with self._at_once:
            try:
                what = await self._move(answer)
            except Exception:
                logger.exception("request %s is not moved", answer.flight.record.request_id)
                what = "failed"
        if what not in ("moved", AGAIN, "failed", "no_target"):
            answer.blocked_reason = what
            logger.info("request %s ends at %s: %s", answer.flight.record.request_id, answer.instance, what)
            what = "stuck"
        if what != answer.last_outcome:
            logger.info("request %s at %s: %s", answer.flight.record.request_id, answer.instance, what)
            # Repeated attempts with the same outcome count once.
            self._moves.labels(what).inc()
        answer.last_outcome = what
        if what == "failed":
            await self._clock.sleep(PAUSE_S)
        if what != "moved":
            answer.moving = False

    async def _move(self, answer: OpenAnswer) -> str:
        """Returns what became of it: ``moved``, ``failed``, ``again``, ``no_target``, or why it cannot be."""
        source, id = answer.instance, self.calls.new_id()
        target = self._target(source)
        if why := _obstacle(answer):
            return why
        if target is None:
            return "no_target"
        if answer.copied_to != target:
            answer.copied_to = target
            await self.calls.copy_ahead(answer.flight, source, target)
            if not self.calls.known(target):
                answer.copied_to = ""
                return AGAIN
            if answer.over:
                return AGAIN
        parked = await self.calls.ask(source, id, Park(id, answer.rid), ANSWER_S)
        if not isinstance(parked, Parked):
            logger.info("%s does not say that it has stopped a request", source)
            self.calls.send(source, Unpark(id, stay=True))
            return "failed"
        if parked.why:
            return parked.why
        began = self._clock.monotonic()
        handed_over = False
        self._heading[target] += 1
        try:
            handed_over = await self._hand_over(answer, target, id, parked)
        finally:
            self._heading[target] -= 1
            # A client that is gone has taken the request with it.
            self.calls.send(source, Unpark(id, stay=not handed_over and not answer.over))
        if handed_over:
            logger.info(
                "request %s goes on at %s instead of %s after %.0f ms",
                answer.flight.record.request_id,
                target,
                source,
                (self._clock.monotonic() - began) * 1000,
            )
        return "moved" if handed_over else "failed"

    async def _hand_over(self, answer: OpenAnswer, target: str, id: str, parked: Parked) -> bool:
        """Have the target go on; whether it does, and its answer is read."""
        if parked.export:
            await self.calls.have_it_fetched(answer.instance, target, parked)
        if parked.resume is None:
            return False
        ticket = self.calls.new_id()
        body = _body(answer, parked, ticket)
        with self.calls.expecting(target, id) as running:
            # The state goes where only members of the cluster speak; the body has the ticket alone.
            watch = Watch(id, answer.rid, ticket, parked.resume)
            if not isinstance(await self.calls.ask(target, ticket, watch, WATCH_S), Expecting):
                logger.info("%s does not say that it expects a request", target)
                return False
            opening = asyncio.ensure_future(self._opened(answer.flight, target, body))
            try:
                async with asyncio.timeout(GO_ON_S):
                    await self._until_it_runs(answer, target, opening, running)
            except (TimeoutError, ConnectionLost) as error:
                logger.info("%s does not go on with a request: %s", target, error or "no word of it")
                _discard(opening)
                return False
            except BaseException:
                _discard(opening)
                raise
        if not await self._at_an_end_of_event(answer) or answer.over:
            _discard(opening)
            return False
        answer.taken_over, answer.target = opening, target
        self._drop(answer.instance, answer)
        self._answers.setdefault(target, set()).add(answer)
        if answer.response is not None:
            answer.response.interrupt(AnswerMoved(f"the request goes on at {target}"))
        else:
            answer.load.give_up(AnswerMoved(f"the request goes on at {target}"))
        return True

    async def _opened(self, flight: Flight, target: str, body: bytes) -> UpstreamResponse:
        response = await self._forwarding.open(flight, target, body)
        if response.status == 200:
            return response
        try:
            text = (await response.read())[:500].decode("utf-8", "replace")
        finally:
            response.close()
        raise ConnectionLost(f"{target} answers {text or 'with an error'}")

    async def _until_it_runs(
        self,
        answer: OpenAnswer,
        target: str,
        opening: asyncio.Future[UpstreamResponse],
        running: asyncio.Future[Running],
    ) -> None:
        while not running.done():
            if answer.over:
                raise ConnectionLost("the client is gone")
            if (row := self._fleet.rows.get(target)) is None or row.state not in USABLE:
                raise ConnectionLost("it is down")
            if opening.done():
                opening.result()
            await asyncio.wait(
                {running} | ({opening} if not opening.done() else set()),
                timeout=LOOK_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
        if opening.done():
            opening.result()

    async def _at_an_end_of_event(self, answer: OpenAnswer) -> bool:
        """Wait for the rest of an event that the client has a part of. It is on its way."""
        end = self._clock.monotonic() + WHOLE_EVENT_S
        while answer.reader is not None and answer.reader.in_event:
            if self._clock.monotonic() > end:
                return False
            await self._clock.sleep(0.005)
        return True

    def _target(self, source: str) -> str | None:
        """Where requests of an instance go: to the one of its kind that has least to do."""
        row = self._fleet.rows.get(source)
        role = Role.COLOCATED if row is None else row.role
        there = [
            known
            for known in self._fleet.usable()
            if server_of(known.name) != server_of(source)  # where the request's name is taken
            and known.role is role
            and self.calls.known(known.name)
        ]
        best = min(
            there,
            key=lambda known: (known.in_flight + self._heading[known.name], known.name),
            default=None,
        )
        return None if best is None else best.name

    def __repr__(self) -> str:
        return f"Mover({sum(map(len, self._answers.values()))} answers, emptying {sorted(self._tasks)})"


def _obstacle(answer: OpenAnswer) -> str:
    """Why a stream cannot be gone on with in the middle; empty where it can."""
    splice, sent = answer.flight.sent.dialect.splice, answer.flight.sent
    if splice is not None and answer.reader is not None and (why := splice.obstacle(answer.reader)):
        return why
    return "tool calls in a stream" if answer.flight.admitted.job.stream and b'"tools"' in sent.body else ""


def _body(answer: OpenAnswer, parked: Parked, ticket: str) -> bytes:
    """The request as the other instance gets it: with its name, the ticket of its state, and where its KV
    is."""
    flight = answer.flight
    payload = orjson.loads(flight.sent.body)
    payload["rid"] = answer.rid
    holder = payload
    if name := flight.sent.dialect.custom_params_in:
        holder = payload[name] = dict(payload.get(name) or {})
    custom = dict(holder.get("custom_params") or {})
    custom[RESUME] = ticket
    holder["custom_params"] = custom
    if parked.meeting:
        host, _, port = parked.meeting.rpartition(":")
        payload |= {
            "bootstrap_host": host,
            "bootstrap_port": int(port),
            "bootstrap_room": parked.bootstrap_room,
        }
    return orjson.dumps(payload)


def _discard(opening: asyncio.Future[UpstreamResponse]) -> None:
    """Close an answer that is no longer needed, whenever it opens; the instance then aborts the request."""

    def close(done: asyncio.Future[UpstreamResponse]) -> None:
        if not done.cancelled() and done.exception() is None:
            done.result().close()

    opening.add_done_callback(close)
    opening.cancel()

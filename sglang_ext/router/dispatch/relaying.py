"""One attempt at one instance: sending a request on, passing its answer back, learning from both."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from sglang_ext.clock import Clock
from sglang_ext.errors import SglangExtError
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.router.api.dialect import Dialect
from sglang_ext.router.api.stream_splice import NoContinuation
from sglang_ext.router.api.usage import StreamReader, Usage, answer_id, read_answer
from sglang_ext.router.dispatch.flight import Flight, Homes
from sglang_ext.router.dispatch.forwarding import Forwarding
from sglang_ext.router.dispatch.moving import AnswerMoved, Mover, OpenAnswer
from sglang_ext.router.dispatch.pairs import MAX_ERROR_BYTES, HalfFailed, meeting_point, run_beside
from sglang_ext.router.dispatch.suspects import Suspects
from sglang_ext.router.fleet.fleet import Fleet, Load
from sglang_ext.router.fleet.lifecycle import State
from sglang_ext.router.http.types import (
    EVENT_STREAM_TYPE,
    HOP_BY_HOP,
    ConnectFailed,
    ConnectionLost,
    RequestRefused,
    RequestTimeout,
    UpstreamResponse,
)
from sglang_ext.router.index.prompt_trees import PromptTrees
from sglang_ext.router.placing.costs import RouterCosts
from sglang_ext.router.placing.placing import Placement
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.telemetry.record import Record
from sglang_ext.router.tenancy.admit import splice
from sglang_ext.router.tenancy.tenants import Meter
from sglang_ext.router.tokens.encoded import Encoded
from sglang_ext.router.tokens.tokenizing import TokenizerService
from sglang_ext.tasks import Tasks

logger = logging.getLogger("router.relaying")

MAX_READ_BYTES = 4 << 20
"""Longer answers are passed on unread."""
_NOT_RETURNED = HOP_BY_HOP | {"content-length", "date", "server"}


class Relay:
    """Sends requests to instances.

    Args:
        trees: records which instance has computed which prompt.
        costs: corrected by observed times.
        tokenizers: for the tokens of answers.
        homes: records which instance keeps which response.
        clock: seconds.
        suspects: records requests that an instance's death interrupted.
        on_background: called for each response that its instance continues to generate in the background,
            while the request still counts.
        on_learnt: each is called with a prompt and its generated tokens, if they are known.
        explains: whether answers have headers with the reason of the choice.
    """

    def __init__(
        self,
        forwarding: Forwarding,
        fleet: Fleet,
        trees: PromptTrees,
        costs: RouterCosts,
        tokenizers: TokenizerService,
        homes: Homes,
        metrics: RouterMetrics,
        clock: Clock,
        mover: Mover,
        suspects: Suspects,
        *,
        on_background: Callable[[Dialect, str, Load, Meter | None], None],
        on_learnt: Sequence[Callable[[Flight, tuple[str | None, ...], bytes], None]],
        explains: bool,
    ) -> None:
        self._forwarding = forwarding
        self._fleet = fleet
        self._trees = trees
        self._costs = costs
        self._tokenizers = tokenizers
        self._homes = homes
        self._broken_streams = metrics.counter("broken_streams")
        self._transfers = metrics.transfers
        self._clock = clock
        self._mover = mover
        self._suspects = suspects
        self._learning = Tasks(lambda error: logger.error("cannot learn generated tokens", exc_info=error))
        self._on_background = on_background
        self._on_learnt = on_learnt
        self._explains = explains

    def attempt(self, flight: Flight, placement: Placement) -> Coroutine[Any, Any, None]:
        """Send a request to the chosen instance, and its answer to the client.

        Raises:
            ConnectFailed, ConnectionLost: the instance went away. If the responder has not started, another
                one can be tried.
        """
        record = flight.record
        record.instance = placement.decode or placement.instance
        record.prefill_instance = None if placement.decode is None else placement.instance
        if placement.decode is None:
            return self._answer(flight, placement, placement.instance, flight.sent.body)
        return self._pair(flight, placement, placement.decode)

    async def _pair(self, flight: Flight, placement: Placement, decode: str) -> None:
        """Like ``attempt``, with a prefill instance and a decode instance."""
        facts = self._fleet.rows[placement.instance].facts
        meeting = meeting_point(placement.instance, facts)
        flight.take_fields()
        body = splice(flight.sent.body, meeting)
        await run_beside(
            lambda: self._prefill(flight, placement, body),
            lambda: self._decode(flight, placement, decode, body),
            lambda: not flight.responder.started,
        )

    async def _decode(self, flight: Flight, placement: Placement, decode: str, body: bytes) -> None:
        """The half of a request that answers the client."""
        try:
            await self._answer(flight, placement, decode, body)
        except (ConnectFailed, ConnectionLost):
            flight.failed = decode
            raise

    async def _prefill(self, flight: Flight, placement: Placement, body: bytes) -> None:
        """The prefill half of a request; its answer is discarded."""
        queued = max(0, flight.units - placement.matched)
        try:
            with self._fleet.carrying(placement.instance, queued) as load, load.until_lost():
                response = await self._forwarding.open(flight, placement.instance, body)
                status = response.status
                try:
                    answer = await response.read()
                finally:
                    response.close()
            if status >= 500:
                raise HalfFailed(placement.instance, "prefills", status, answer)
        except (ConnectFailed, ConnectionLost) as error:
            flight.failed = placement.instance
            self._lost(flight, placement.instance, error)
            raise
        if status != 200:
            text = answer[:MAX_ERROR_BYTES].decode("utf-8", "replace")
            raise RequestRefused(
                f"{placement.instance}, which prefills, refused the request: {text}", status=status
            )

    async def _answer(self, flight: Flight, placement: Placement, instance: str, body: bytes) -> None:
        """Have ``instance`` answer the client."""
        queued = max(0, flight.units - placement.matched)
        sending = self._costs.sending(
            placement.instance,
            queued,
            placement.matched,
            streams=flight.admitted.job.stream,
            estimate=flight.record.estimate,
        )
        here = queued if placement.decode is None else 0
        name = self._mover.names(flight, instance)
        if name:
            body = splice(body, {"rid": name})
        with (
            self._fleet.carrying(instance, here) as load,
            sending as first_byte,
            self._mover.carrying(flight, instance, load, named=bool(name)) as answer,
        ):
            flight.record.sent = self._costs.now()
            goes_on = False
            while True:
                try:
                    if goes_on:
                        # Nothing was sent to the client: the other answer is as good from its beginning.
                        response = await answer.take_over(self._fleet)
                    else:
                        with load.until_lost():
                            response = await self._forwarding.open(flight, instance, body)
                    try:
                        is_stream = response.headers.get("content-type", "").startswith(EVENT_STREAM_TYPE)
                        if response.status == 200 and is_stream:
                            await self._stream(flight, placement, response, answer, first_byte)
                        else:
                            await self._whole(flight, placement, response, load)
                        return
                    finally:
                        response.close()
                except AnswerMoved:
                    goes_on = True
                except ConnectionLost as error:
                    self._lost(flight, flight.record.instance or instance, error)
                    raise

    def _lost(self, flight: Flight, instance: str, error: Exception) -> None:
        """An attempt has failed; an instance that went away may have ended because of the request."""
        if not isinstance(error, ConnectionLost) or isinstance(error, HalfFailed | AnswerMoved):
            return
        row = self._fleet.rows.get(instance)
        if row is None or row.state is not State.DRAINING:  # its operator may end a draining instance
            self._suspects.lost(flight.digest(), instance)

    async def _whole(
        self, flight: Flight, placement: Placement, response: UpstreamResponse, load: Load
    ) -> None:
        """Pass on an answer in one piece; until it is complete, another instance can be tried."""
        body = response.arrived()
        if body is None:
            with load.until_lost():
                body = await response.read()
        if response.status >= 500 and placement.decode is not None:
            raise HalfFailed(placement.decode, "decodes", response.status, body)
        load.answered()
        record = flight.record
        record.first_byte = self._clock.monotonic()
        record.status = response.status
        usage = Usage()
        if response.status == 200:
            if len(body) <= MAX_READ_BYTES:
                usage = read_answer(body, flight.sent.dialect, flight.admitted.job.choices)
                _infer_cached(flight, usage)
            self._learn(flight, placement, usage)
            if flight.admitted.job.background and usage.response_id is not None:
                self._on_background(flight.admitted.dialect, usage.response_id, load, record.caller.meter)
        _note(record, usage)
        record.tools = usage.tools
        headers = self._response_headers(response, record, usage)
        size = len(body)
        if flight.turn is not None and response.status == 200:
            flight.turn.answered(usage)
            body = flight.turn.whole(body)
        if flight.sent.translation is not None:
            body = flight.sent.translation.whole(response.status, body)
        _name_answer(flight, body)
        if flight.edit is not None:
            body = flight.edit.whole(response.status, body)
        await flight.responder.send(response.status, headers, body)
        if response.status == 200 and not usage.output_keys:
            self._learn_texts(flight, record.instance or "", lambda: usage.output_texts, size)

    async def _stream(
        self,
        flight: Flight,
        placement: Placement,
        response: UpstreamResponse,
        answer: OpenAnswer,
        first_byte: Callable[[], None],
    ) -> None:
        """Pass on an answer as it comes; until its first byte, another instance can be tried."""
        record, responder = flight.record, flight.responder
        load = answer.load
        reader = StreamReader(flight.sent.dialect, flight.admitted.job.choices)
        with load.until_lost():
            first = await response.piece()
        load.answered()
        load.prefilled()
        first_byte()
        record.first_byte = self._clock.monotonic()
        record.status = response.status
        self._learn(flight, placement, Usage())
        head = self._response_headers(response, record, reader.first(first))
        if flight.admitted.dialect.stream_type != EVENT_STREAM_TYPE:
            head["content-type"] = flight.admitted.dialect.stream_type
        await responder.start(response.status, head, _for_client(flight, first))
        answer.response, answer.reader = response, reader
        reader.feed(first)
        broken: SglangExtError | None = None
        try:
            goes_on = False
            try:
                while chunk := await response.piece():
                    load.answered()
                    if data := _for_client(flight, chunk):
                        await responder.write(data)
                    reader.feed(chunk)
            except AnswerMoved:
                goes_on = True
            if goes_on:
                await self._go_on(flight, answer, reader)
        except (ConnectionLost, RequestTimeout, NoContinuation) as error:
            broken = error.with_traceback(None)  # the traceback would keep this frame, and so the request
        if broken is not None:
            self._lost(flight, record.instance or placement.instance, broken)
            record.error = str(broken)
            self._broken_streams.inc()
            message = f"the worker went away in mid-answer: {broken}"
            # A translated or edited piece is made of whole events.
            whole = flight.sent.translation is not None or flight.edit is not None
            end = b"\n\n" if reader.in_event and not whole else b""
            rest = flight.admitted.dialect.broken_off(message)
            await responder.write(_held_back(flight) + end + rest)
        elif held := _held_back(flight):
            await responder.write(held)
        if reader.done:
            _infer_cached(flight, reader.usage)
            if flight.turn is not None:
                flight.turn.answered(reader.usage)
        if reader.usage.output_keys or reader.usage.response_id is not None:
            self._learn(flight, placement, reader.usage)
        _note(record, reader.usage)
        if flight.admitted.session is not None:
            record.tools = reader.tools_called()
        await responder.finish()
        if not reader.usage.output_keys:
            self._learn_texts(flight, record.instance or "", reader.output_texts, reader.kept_bytes)

    async def _go_on(self, flight: Flight, answer: OpenAnswer, reader: StreamReader) -> None:
        """Pass on the rest of a stream from the instances that continue it.

        Raises:
            ConnectionLost, NoContinuation: an instance went away, or its answer differs.
        """
        splice = flight.sent.dialect.splice
        assert splice is not None  # else it is not moved
        while True:
            seam = splice(reader)
            response = await answer.take_over(self._fleet)
            answer.response = response
            try:
                while chunk := await response.piece():
                    answer.load.answered()
                    if rest := seam.feed(chunk):
                        if data := _for_client(flight, rest):
                            await flight.responder.write(data)
                        reader.feed(rest)
                seam.check_end()
                return
            except AnswerMoved:
                pass  # and so does the loop
            finally:
                response.close()

    # -- learning ---------------------------------------------------------------------------------

    def _learn(self, flight: Flight, placement: Placement, usage: Usage) -> None:
        """The instances have computed these prompts and their generated tokens."""
        answering = flight.record.instance or placement.instance
        for index, prompt in enumerate(flight.prompts):
            generated = usage.output_keys.get(index, b"") if prompt.tokens is not None else b""
            key = prompt.key + generated
            self._trees.confirm(prompt.namespace, key, answering)
            if placement.decode is not None:
                self._trees.confirm(prompt.namespace, prompt.key, placement.instance)
                moved = self._transfers.labels(placement.instance, answering, "hand-over")
                moved.inc(len(prompt.key) // TOKEN_BYTES if prompt.tokens is not None else 0)
            known = prompt.known
            for learn in self._on_learnt:
                learn(flight, known.namespace, key if known is prompt else known.key)
        if usage.response_id is not None:
            self._homes.keep(flight.record.caller.scope, usage.response_id, answering)

    def _learn_texts(
        self, flight: Flight, instance: str, texts: Callable[[], Mapping[int, str]], size: int
    ) -> None:
        """As ``_learn``, for answers that tell the text only; the client does not wait for it.

        Args:
            size: bytes of the answer.
        """
        prompts: Sequence[Encoded] = flight.prompts
        tells_ids = flight.sent.dialect.whole_events
        if tells_ids or flight.admitted.job.echoes or all(prompt.tokens is None for prompt in prompts):
            return
        if flight.admitted.session is None and not any(
            self._trees.learns_of(prompt.namespace, instance) for prompt in prompts
        ):
            return  # its agent reports the KV, and no session continues from the answer

        salts = [prompt.salt for prompt in prompts]

        def learn(generated: Mapping[int, bytes]) -> None:
            for index, key in generated.items():
                if prompts[index].tokens is not None:
                    whole = prompts[index].key + key
                    self._trees.confirm(prompts[index].namespace, whole, instance)
                    for learnt in self._on_learnt:
                        learnt(flight, prompts[index].namespace, whole)

        async def learn_later() -> None:
            learn(await self._tokenizers.continuations(texts, salts, flight.record.budget))

        try:
            at_once = self._tokenizers.short_continuations(texts, salts, size)
            if at_once is not None:
                learn(at_once)
                return
        except Exception:
            logger.exception("cannot learn generated tokens")
            return
        self._learning.start(learn_later(), name="learn generated tokens")

    async def stop(self) -> None:
        """Cancel the tasks that outlive their answers."""
        await self._learning.cancel()

    # -- headers ----------------------------------------------------------------------------------

    def _response_headers(self, response: UpstreamResponse, record: Record, usage: Usage) -> dict[str, str]:
        headers = {name: value for name, value in response.headers.items() if name not in _NOT_RETURNED}
        headers["x-request-id"] = record.request_id
        headers["x-kv-instance"] = record.instance or ""
        if record.prefill_instance is not None:
            headers["x-kv-prefill-instance"] = record.prefill_instance
        if record.hints:
            headers["x-kv-hints"] = record.hint_answers()
        if record.repairs:
            headers["x-kv-repaired"] = ",".join([repair.rule for repair in record.repairs])
        if self._explains and record.reason is not None:
            headers["x-kv-route-reason"] = record.reason
            if record.matched_tokens is not None:
                headers["x-kv-matched-tokens"] = str(record.matched_tokens)
            if record.fetch is not None:
                headers |= record.fetch.headers()
        if usage.cached_tokens is not None:
            headers["x-kv-cached-tokens"] = str(usage.cached_tokens)
        if record.instance_stages is not None:
            # As web clients know it (W3C Server Timing), in milliseconds. A stream's end comes too late.
            headers["server-timing"] = ", ".join(
                f"{stage};dur={seconds * 1e3:.3f}" for stage, seconds in record.shown_timings()
            )
        return headers


def _for_client(flight: Flight, chunk: bytes) -> bytes:
    """The part of a stream's next piece that the client gets."""
    if flight.turn is not None:
        chunk = flight.turn.feed(chunk)
    if flight.sent.translation is not None:
        chunk = flight.sent.translation.feed(chunk)
    elif flight.filter is not None:
        chunk = flight.filter.feed(chunk)
    if chunk and flight.record.answer_id is None:
        _name_answer(flight, chunk)
    if flight.edit is not None:
        chunk = flight.edit.feed(chunk)
    return chunk


def _name_answer(flight: Flight, data: bytes) -> None:
    """Note the id of an answer, or of a stream by its beginning."""
    name = answer_id(data)
    flight.record.answer_id = name
    if name is not None and flight.diagnosed is not None:
        flight.diagnosed.remember(name)


def _held_back(flight: Flight) -> bytes:
    if flight.edit is not None or flight.sent.translation is not None:
        return b""
    held = b"" if flight.turn is None else flight.turn.end()
    return held if flight.filter is None else flight.filter.feed(held) + flight.filter.end()


def _infer_cached(flight: Flight, usage: Usage) -> None:
    """SGLang leaves out the requested details when nothing was cached."""
    if flight.admitted.tells_cached and usage.cached_tokens is None:
        usage.cached_tokens = 0


def _note(record: Record, usage: Usage) -> None:
    if usage.prompt_tokens is not None and (record.prompt_tokens is None or not usage.partial):
        record.prompt_tokens = usage.prompt_tokens
    record.cached_tokens = usage.cached_tokens
    record.tiers = usage.tiers
    record.instance_stages = usage.stages
    record.durability = usage.durability
    record.completion_tokens = usage.completion_tokens

"""The description of an HTTP API for the router: all differences between APIs, in one place.

A module of this folder describes one API by a `Dialect`, and ``__init__`` lists them. Nothing else knows any
of them: routes, admission, relaying, hints and ``/openapi.json`` ask the dialect of a request's path.
"""

from __future__ import annotations

import enum
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import msgspec
import orjson

from sglang_ext.router.api.job import Chat, Job
from sglang_ext.router.api.limits import Limits, ModelKind
from sglang_ext.router.api.sse import event, parsed
from sglang_ext.router.api.stream_splice import StreamSplice
from sglang_ext.router.api.usage import Usage
from sglang_ext.router.api.validation import Json
from sglang_ext.router.http.types import EVENT_STREAM_TYPE, RequestRefused

SAYS_USAGE = re.compile(rb'"(usage|sglext)"\s*:\s*\{')


_DATA = b"data: "


class Translation(Protocol):
    """Turns one answer of a worker into the dialect of the client."""

    def whole(self, status: int, body: bytes) -> bytes:
        """An answer in one piece."""

    def feed(self, chunk: bytes) -> bytes:
        """The whole events of a piece of a stream."""


class AnswerEdit(ABC):
    """Edits answers: the object of one in one piece, or that in an event of a stream. A ``Translation``.

    Args:
        mark: in all events with such an object; events without it are not parsed.
    """

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._held = b""
        """The beginning of an event whose end has not arrived."""

    @abstractmethod
    def edit(self, answer: Json) -> bool:
        """Change an object; whether it was changed. It may be of another kind than an answer."""

    def whole(self, status: int, body: bytes) -> bytes:
        """An answer in one piece."""
        return self._edited(body) if status == 200 else body

    def feed(self, chunk: bytes) -> bytes:
        """The next piece of a stream, by whole events."""
        events, end, self._held = (self._held + chunk).rpartition(b"\n\n")
        if self._mark not in events:
            return events + end
        return b"\n\n".join([self._event(event) for event in events.split(b"\n\n")]) + end

    def _event(self, event: bytes) -> bytes:
        if self._mark not in event:
            return event
        lines = event.split(b"\n")
        return b"\n".join(
            [_DATA + self._edited(line[len(_DATA) :]) if line.startswith(_DATA) else line for line in lines]
        )

    def _edited(self, data: bytes) -> bytes:
        value: Any = parsed(data)
        if not isinstance(value, dict):
            return data
        holders = (value, value.get("response"), value.get("message"))
        changed = [self.edit(holder) for holder in holders if isinstance(holder, dict)]
        return orjson.dumps(value) if any(changed) else data


class ModelName(AnswerEdit):
    """Renames the model of answers.

    Args:
        sent: the name that the worker was sent.
        given: the name that the client sent.
    """

    def __init__(self, sent: str, given: str) -> None:
        super().__init__(b'"model"')
        self._sent = sent
        self._given = given

    def edit(self, answer: Json) -> bool:
        """Rename the model, if it has the name that was sent."""
        if answer.get("model") != self._sent:
            return False
        answer["model"] = self._given
        return True


class Part(enum.Enum):
    """Parts of a request that are compared with those of another one, in this order."""

    MODEL = enum.auto()
    SYSTEM = enum.auto()
    TOOLS = enum.auto()
    MESSAGES = enum.auto()
    EFFORT = enum.auto()
    """How hard the model is asked to think."""
    UNKNOWN = enum.auto()
    """No part that could be named."""


class DiagnosisAsked(msgspec.Struct, frozen=True):
    """A request that is compared with an earlier one, or that a later one may be compared with."""

    answer_id: str | None = None
    """The answer to the earlier one."""
    answered: bool = True
    """The answer states the difference."""
    by_message: bool = True
    """Messages are compared one by one."""


class Diagnosis(msgspec.Struct, frozen=True):
    """The difference of a request from an earlier one, as far as it cost KV that was cached for that one."""

    known: bool = True
    """The earlier request is known here."""
    part: Part | None = None
    """The first part that differs; None without a difference."""
    missed: int = 0
    """Tokens of the earlier prompt after the difference."""
    reusable: int = 0
    """Tokens of the earlier prompt."""


@dataclass(frozen=True, slots=True)
class Question:
    """An endpoint beside an API's own, which any worker answers. check: of its body."""

    path: str
    summary: str
    check: Callable[[Json], None]
    schema: Json


class Dialect(ABC):
    """An HTTP API. One object serves all requests, so it keeps nothing of any."""

    path: ClassVar[str]
    methods: ClassVar[frozenset[str]] = frozenset({"POST"})
    summary: ClassVar[str]
    """For ``/openapi.json``."""

    answered_by: ClassVar[tuple[ModelKind, ...]] = (ModelKind.GENERATES,)
    """Kinds of models whose servers answer it."""

    def check_model(self, kind: ModelKind) -> None:
        """Check that the servers of a model answer such requests.

        Raises:
            RequestRefused: they would refuse it, or end.
        """
        if kind not in self.answered_by:
            paths = ", ".join(path for path, dialect in DIALECTS.items() if kind in dialect.answered_by)
            raise RequestRefused(
                f"the model of this fleet {kind.value}, and cannot answer {self.path}; it answers {paths}",
                code="model_cannot",
            )

    # -- requests -----------------------------------------------------------------------------------

    takes_salt: ClassVar[bool] = True
    """Servers take ``cache_salt``, which keeps tenants' KV apart, and ``extra_key`` in the body. Otherwise
    servers that register take the salt in a header (``keys.SALT_HEADER``)."""
    prompt_field: ClassVar[str]
    """Where prompts stand, for the texts of errors; ``ids_field`` where they are token ids."""
    ids_field: ClassVar[str] = ""
    own_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields of a body that clients may set, beside those of ``request_fields.FIELDS``. Other fields
    are dropped before the body reaches a server."""
    media_in: ClassVar[tuple[str, ...]] = ()
    """Fields that hold images, videos and sounds."""
    parts_in: ClassVar[tuple[str, ...]] = ()
    """Fields that hold messages, whose parts may hold such."""
    instructions_in: ClassVar[tuple[str, ...]] = ()
    """Fields that hold instructions to the model: a text, or parts."""
    messages_in: ClassVar[tuple[str, ...]] = ()
    """Fields that hold messages with roles."""
    known_by: ClassVar[tuple[frozenset[str], ...]] = ()
    """Fields by which a body is known where its path is not, as in logs: any of these sets. Of several APIs,
    that with the largest set counts."""
    takes_default_model: ClassVar[bool] = True
    """The server takes ``default`` for the model's name."""
    custom_params_in: ClassVar[str] = ""
    """The object in which ``custom_params`` stand; empty for the body itself."""
    asks_tiers: ClassVar[str] = ""
    """The field that makes the server tell in which tiers it found KV, where it does not by itself."""
    tells_tiers: ClassVar[tuple[bytes, ...]] = ()
    """In all of the events, and in no other, with which a stream tells them then."""
    asks_ids: ClassVar[str] = ""
    """The field that makes the server tell the ids that it generated; with ``takes_ids`` or not at all."""
    takes_ids: ClassVar[str] = ""
    """The field with token ids that go before a conversation's text, which the rest of the body stays for."""
    via: ClassVar[Dialect | None] = None
    """The dialect in which requests go to servers that do not take the router's own fields in this one."""
    admitted_as: ClassVar[Dialect | None] = None
    """The dialect in which requests of this one are admitted and sent (``rewritten``). Workers get no request
    in this one."""

    @abstractmethod
    def parse(self, payload: Json, limits: Limits) -> Job:
        """Check a body.

        Raises:
            RequestRefused: it must not reach a worker, or the worker would refuse it.
        """

    def translate(self, job: Job, fields: Json, in_place: bool) -> tuple[bytes, Translation]:
        """(the body in the dialect ``via``, what turns the answer back). Only asked where there is one.

        Args:
            fields: put into the body.
            in_place: see ``Chat.seen``.
        """
        raise NotImplementedError

    def rewritten(self, payload: Json, limits: Limits) -> Json:
        """The body in the dialect ``admitted_as``. Only asked where there is one.

        Raises:
            RequestRefused: the body is wrong; the error names the field as the client sent it.
        """
        raise NotImplementedError

    def answers(self, payload: Json, limits: Limits) -> Translation:
        """Translates the answer to a ``rewritten`` request. Only asked where there is such a dialect."""
        raise NotImplementedError

    def answer_at_once(self, payload: Json, limits: Limits) -> tuple[str, bytes] | None:
        """(content type, body) of the answer to a request that needs no worker; None for all others."""
        return None

    def field_of(self, job: Job, index: int) -> str:
        """The field in which a prompt came."""
        has_ids = self.ids_field and job.prompts[index].ids is not None
        name = self.ids_field if has_ids else self.prompt_field
        return f"{name}[{index}]" if len(job.prompts) > 1 else name

    document_fields: ClassVar[Mapping[str, str]] = {}
    """Kind of document -> the field with the prompt that such documents go before. None are taken without."""

    # -- requests that only warm the cache ------------------------------------------------------------

    hint_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of ``/v1/advisory`` that hold a prompt as this API takes it."""

    def only_warms(self, payload: Json) -> bool:
        """Whether a request asks for nothing but the cache to be warmed."""
        options = payload.get("prompt_cache_options")
        return isinstance(options, dict) and options.get("prewarm") is True

    def expected(self, payload: Json, limits: Limits) -> Job:
        """The request of one prompt that a hint announces.

        Raises:
            RequestRefused: names the field.
        """
        job = self.parse(payload, limits)
        if len(job.prompts) != 1:
            name = self.field_of(job, 0).partition("[")[0]
            raise RequestRefused(f"{name} must be one prompt", param=name, code="invalid_prompt")
        return job

    @abstractmethod
    def empty_answer(self, name: str, model: Any, prompt: int, cached: int) -> Json:
        """An answer without text, as clients expect it.

        Args:
            name: its id is made of this.
            prompt, cached: tokens of the prompt, and how many of them were cached.
        """

    def empty_events(self, answer: Json) -> Iterator[bytes]:
        """The same as a stream."""
        yield event(answer)
        yield event(None)

    # -- answers --------------------------------------------------------------------------------------

    stream_type: ClassVar[str] = EVENT_STREAM_TYPE
    """Content type of streams; empty where no answer is one."""
    whole_events: ClassVar[bool] = False
    """Each event of a stream has the whole answer so far, with the generated ids."""
    says_usage: ClassVar[re.Pattern[bytes]] = SAYS_USAGE
    """In every event of a stream that ``read`` has to see."""
    splice: ClassVar[type[StreamSplice] | None] = None
    """How a stream goes on at another instance; without it, requests end where they began."""
    keeps_answers: ClassVar[bool] = False
    """Instances keep answers, at ``path/ID``."""

    @abstractmethod
    def read(self, usage: Usage, answer: Any, choices: int) -> None:
        """Take in the token counts of an answer, or of an event of a stream. It may be any JSON.

        Args:
            choices: answers per prompt.
        """

    def texts(self, answers: Sequence[Any]) -> Mapping[int, str]:
        """The generated texts of answers, by prompt; of a stream, all its events together. Answers with parts
        that are no text are left out. They may be any JSON."""
        return {}

    def streamed_texts(self, events: Sequence[bytes]) -> Mapping[int, str]:
        """As ``texts``, of the events of a stream as they came."""
        answers = [parsed(data) for data in events]
        return {} if None in answers else self.texts(answers)

    def still_runs(self, answer: Any) -> bool:
        """Whether an answer that is kept is not complete yet."""
        return False

    # -- where other prompts begin alike --------------------------------------------------------------

    marks_beginnings: ClassVar[bytes] = b""
    """In every body with such a mark; empty where there are none."""

    def beginnings(self, payload: Json) -> list[Chat]:
        """The conversations that end where the client has marked a breakpoint: others may begin alike.
        Without the end of the conversation itself.

        Args:
            payload: has been checked.
        """
        return []

    # -- why a cache missed -----------------------------------------------------------------------------

    def asks_diagnosis(self, payload: Json) -> DiagnosisAsked | None:
        """Whether a request is to be compared with an earlier one, or may be with a later one."""
        return None

    def diagnosis(self, found: Diagnosis | None) -> Json:
        """The fields that state a difference in an answer.

        Args:
            found: None where the request names no earlier one.
        """
        return {}

    # -- errors -----------------------------------------------------------------------------------------

    def error(self, refused: RequestRefused) -> Json:
        """The body of an error of ours."""
        return refused.payload()

    def broken_off(self, message: str) -> bytes:
        """The event that ends a stream whose worker went away; an end mark is left out on purpose."""
        return event(self.error(worker_lost(message)))

    # -- its description ----------------------------------------------------------------------------------

    @property
    def questions(self) -> tuple[Question, ...]:
        """Endpoints beside it."""
        return ()

    @property
    @abstractmethod
    def schema(self) -> Json:
        """The JSON schema of a body."""

    def __repr__(self) -> str:
        return f"<{self.path}>"


def fields(names: str) -> frozenset[str]:
    """Names of fields, parted by blanks."""
    return frozenset(names.split())


def worker_lost(message: str) -> RequestRefused:
    """The error of a worker that went away while it worked on a request."""
    return RequestRefused(message, status=502, kind="server_error", code="worker_lost")


DIALECTS: dict[str, Dialect] = {}
"""By path. Each is served, checked, described and fuzzed."""


def register(*dialects: Dialect) -> None:
    """Have HTTP APIs served by routers that start from now on."""
    for dialect in dialects:
        if dialect.path in DIALECTS:
            raise ValueError(f"there is already an HTTP API at {dialect.path}")
        DIALECTS[dialect.path] = dialect


def error_body(path: str, refused: RequestRefused) -> Json:
    """An error of ours, in the form of the API to which a path belongs."""
    for dialect in DIALECTS.values():
        if path == dialect.path or path.startswith(dialect.path + "/"):
            return dialect.error(refused)
    return refused.payload()

"""Documents in the bodies of clients: registrations, and requests that name documents. Pure functions.

A request that names documents is the request with their contents in front of its prompt, in the order named:
texts joined as they are, token ids and messages one after the other. That composed request is matched,
limited, charged and sent to a worker, so its answer is the answer to the whole prompt, cached or not.

Content is kept as JSON bytes, without the fields that SGLang does not read, both in memory and between
routers. Composing joins these bytes; the result is parsed like a request that a client sent whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
import orjson

from sglang_ext.errors import PeerError
from sglang_ext.router.api import json_schema as schemas
from sglang_ext.router.api.dialect import DIALECTS, Dialect
from sglang_ext.router.api.hints import take_seconds
from sglang_ext.router.api.validation import Json, take_int, take_name, wrong
from sglang_ext.router.http.types import RequestRefused

DOCUMENT_IDS: Final = "document_ids"
KINDS: Final = ("text", "input_ids", "messages")
"""In which field a document's content is given, and so before which prompts it can go."""
MOST_NAMED = 16
MOST_INSTANCES = 1024
MAX_TTL_S = 30 * 86_400.0
MAX_DOCUMENT_BYTES: Final = 8 << 20
"""Of a registration, and of the content as JSON: a million tokens, and a small part of what routers tell each
other at a time (``membership_local.MAX_FRAME``)."""
MAX_COMPOSED_BYTES: Final = 2 * MAX_DOCUMENT_BYTES
"""Of a request with the contents of the documents that it names."""
TOMBSTONE_S = 300.0
"""How long a deletion is remembered. Other routers receive it within seconds."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FIELDS = frozenset({*KINDS, "ttl_s", "instances", "priority", "extra_key"})

SCHEMA: Final[Json] = schemas.record(
    {
        "text": schemas.MAYBE_TEXT,
        "input_ids": schemas.several(schemas.TOKEN, null=True),
        "messages": schemas.several(schemas.OBJECT, null=True),
        "ttl_s": schemas.NUMBER,
        "instances": schemas.whole(1, MOST_INSTANCES),
        "priority": schemas.whole(),
        "extra_key": schemas.NAME,
    }
)


MESSAGE_FIELDS: Final = frozenset(
    ["role", "content", "name", "tool_call_id", "tool_calls", "tools", "reasoning_content", "phase", "prefix"]
)
PART_FIELDS: Final = frozenset(
    ["type", "text", "thinking", "image_url", "video_url", "audio_url", "input_audio", "modalities", "name"]
)
"""Fields that SGLang reads of a message, and of a part of its content;
``tests/engine/cache/test_request_fields.py`` holds both to its classes."""
_GONE = msgspec.Raw(b"null")


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A document as a client has registered it. Also how routers share it."""

    scope: Annotated[str, msgspec.Meta(max_length=128)]
    """Of the tenant (``Caller.scope``)."""
    id: Annotated[str, msgspec.Meta(max_length=128)]
    kind: Annotated[str, msgspec.Meta(max_length=16)]
    """One of ``KINDS``."""
    content: msgspec.Raw
    """A text, token ids, or messages, as JSON; ``null`` of a deleted document."""
    expires: float
    """Seconds by the monotonic clock of the router that has it; on the way between two, from now."""
    salt: str | None = None
    """The tenant's."""
    extra_key: str | None = None
    priority: int = 0
    instances: Annotated[int, msgspec.Meta(ge=1, le=MOST_INSTANCES)] = 1
    """At how many its KV is held back."""
    stamp: int = 0
    """Time of registration or deletion, in milliseconds since the epoch, later than its predecessor's: the
    newest of an id counts, however the routers' clocks differ."""

    @property
    def ids(self) -> tuple[str, str]:
        """(Scope, id), unique among documents."""
        return self.scope, self.id

    def __hash__(self) -> int:
        return hash((self.scope, self.id, self.stamp))

    @property
    def size_bytes(self) -> int:
        """Of its content."""
        return len(self.content_json)

    @property
    def content_json(self) -> memoryview:
        """Its content."""
        return memoryview(self.content)

    @property
    def is_deleted(self) -> bool:
        """Whether it says only that there is none of this id any more."""
        return self.content == _GONE

    def deleted(self, now: float, wall: float) -> Document:
        """The record of its deletion, which is kept for a while.

        Args:
            now, wall: seconds, of the monotonic clock and since the epoch.
        """
        stamp = max(int(wall * 1e3), self.stamp + 1)
        expires = min(self.expires, now + TOMBSTONE_S)
        return msgspec.structs.replace(
            self, content=_GONE, stamp=stamp, expires=expires, salt=None, extra_key=None
        )

    def after(self, former: Document | None) -> Document:
        """The same document, registered later than its predecessor."""
        if former is None or former.stamp < self.stamp:
            return self
        return msgspec.structs.replace(self, stamp=former.stamp + 1)

    def shifted(self, seconds: float) -> Document:
        """The same by a clock that is ahead by so much: clocks of two machines share no zero."""
        return msgspec.structs.replace(self, expires=self.expires + seconds)

    def announced(self) -> Json:
        """The body of the advisory request for it."""
        content = orjson.loads(self.content_json)
        return {self.kind: content, "extra_key": self.extra_key, "priority": self.priority}


def take_document(
    payload: Json, id: str, scope: str, salt: str | None, priority: int, now: float, wall: float, ttl_s: float
) -> Document:
    """Check the form of a registration; the content is checked as the prompt that it is.

    Args:
        scope, salt: of the tenant.
        priority: the request's, checked.
        now, wall: seconds, of the monotonic clock and since the epoch.
        ttl_s: how long it lives unless it says.

    Raises:
        RequestRefused: 400, naming the field; 413: it is too long.
    """
    if _ID.fullmatch(id) is None:
        raise RequestRefused(
            "a document's id has 1 to 128 letters, digits, '.', '_' and '-', a letter or digit first",
            param="id",
            code="invalid_value",
        )
    unknown = sorted(payload.keys() - _FIELDS)
    if unknown:
        raise RequestRefused(
            f"a document has no field {unknown[0][:80]!r}; its fields are {', '.join(sorted(_FIELDS))}",
            param=unknown[0][:80],
            code="unknown_field",
        )
    given = [kind for kind in KINDS if payload.get(kind) is not None]
    if len(given) != 1:
        raise RequestRefused(
            f"give the document's content in one of {', '.join(KINDS)}",
            param=given[1] if given else KINDS[0],
            code="invalid_prompt",
        )
    lives = take_seconds(payload, "ttl_s")
    content = orjson.dumps(_judged(given[0], payload[given[0]]))
    check_document_size(len(content), given[0])
    return Document(
        scope,
        id,
        given[0],
        msgspec.Raw(content),
        expires=now + min(ttl_s if lives is None else lives, MAX_TTL_S),
        salt=salt,
        extra_key=take_name(payload, "extra_key") or None,
        priority=priority,
        instances=take_int(payload, "instances", least=1, most=MOST_INSTANCES) or 1,
        stamp=int(wall * 1e3),
    )


def check_document_size(size: int, field: str | None = None) -> None:
    """Refuse a registration or a content that is too long.

    Args:
        size: in bytes, of a registration or of a content as JSON.
        field: the field that has the content, if it is known.

    Raises:
        RequestRefused: 413.
    """
    if size > MAX_DOCUMENT_BYTES:
        raise RequestRefused(
            f"{'the document' if field is None else field} has {size} bytes as JSON, and may have "
            f"{MAX_DOCUMENT_BYTES}; register its parts, and name several in document_ids",
            status=413,
            param=field,
            code="document_too_large",
        )


def _judged(kind: str, content: Any) -> Any:
    """A content without the fields of messages and their parts that no server reads."""
    if kind != "messages" or type(content) is not list:
        return content
    return [_message(each) if type(each) is dict else each for each in content]


def _message(message: Json) -> Json:
    kept = {name: value for name, value in message.items() if name in MESSAGE_FIELDS}
    if type(parts := kept.get("content")) is list:
        kept["content"] = [
            {name: value for name, value in part.items() if name in PART_FIELDS}
            if type(part) is dict
            else part
            for part in parts
        ]
    return kept


def decode_document(body: bytes) -> Document:
    """A document as another router has written it down.

    Raises:
        PeerError: it is none.
    """
    try:
        str(body, "utf-8")  # of the content msgspec looks at the structure only
        document = msgspec.json.decode(body, type=Document)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"no document: {str(error)[:200]}") from None
    content = document.content.copy()  # of the body it is a view
    form = b'"' if document.kind == "text" else b"["
    if document.kind not in KINDS or not (document.is_deleted or bytes(memoryview(content)[:1]) == form):
        raise PeerError(f"document {document.id} has no content of a kind that is known")
    if len(memoryview(content)) > MAX_DOCUMENT_BYTES:
        raise PeerError(f"document {document.id} has more than {MAX_DOCUMENT_BYTES} bytes")
    return msgspec.structs.replace(document, content=content)


def take_names(payload: Json) -> tuple[str, ...]:
    """The documents that a request names, in their order.

    Raises:
        RequestRefused: 400: it is no array of ids.
    """
    value = payload.get(DOCUMENT_IDS)
    if value is None:
        return ()
    if type(value) is not list:
        raise wrong(DOCUMENT_IDS, "an array of ids", value)
    for index, name in enumerate(value):
        if type(name) is not str:
            raise wrong(f"{DOCUMENT_IDS}[{index}]", "a string", name)
    if len(value) > MOST_NAMED:
        raise RequestRefused(
            f"a request names at most {MOST_NAMED} documents, not {len(value)}",
            param=DOCUMENT_IDS,
            code="out_of_range",
        )
    return tuple(value)


def hinting_dialect(payload: Json) -> Dialect | None:
    """In whose form the body of an advisory request gives its prompt."""
    return next(
        (
            dialect
            for dialect in DIALECTS.values()
            if any(payload.get(name) is not None for name in dialect.hint_fields)
        ),
        None,
    )


def with_documents(dialect: Dialect | None, payload: Json, documents: Sequence[Document]) -> bytes:
    """The body of the request that is meant: without the names, and with the contents in front of its prompt.

    Args:
        dialect: of the request; None for one without a prompt.

    Raises:
        RequestRefused: 400: the documents do not fit the request or each other.
    """
    body = {name: value for name, value in payload.items() if name != DOCUMENT_IDS}
    if not documents:
        return orjson.dumps(body)
    takes = {} if dialect is None else dialect.document_fields
    if not takes:
        raise _unfit("this API takes no documents: send their contents with the prompt")
    kind = documents[0].kind
    for index, document in enumerate(documents):
        where = f"{DOCUMENT_IDS}[{index}]"
        if document.kind not in takes:
            raise _unfit(
                f"{where} was registered with {document.kind}, and this API takes documents with "
                f"{' or '.join(takes)}",
                where,
            )
        if document.kind != kind:
            raise _unfit(
                f"{where} has {document.kind}, and {DOCUMENT_IDS}[0] has {kind}: they must agree", where
            )
    field = takes[kind]
    other = next((name for name in takes.values() if name != field and body.get(name) is not None), None)
    value: Any = body.pop(field, None)
    if other is not None or not _is_one(kind, value):
        raise _unfit(
            f"a request that names documents with {kind} gives one prompt as {_FORMS[kind]} in {field}"
        )
    return _joined(body, field, documents, orjson.dumps(value))


def too_long_together(size: int) -> RequestRefused:
    """Documents that one request names have more bytes than ``MAX_COMPOSED_BYTES``."""
    return RequestRefused(
        f"the documents that {DOCUMENT_IDS} names have {size} bytes together, each counted as often as it is "
        f"named, and may have {MAX_COMPOSED_BYTES}; name fewer",
        status=413,
        param=DOCUMENT_IDS,
        code="documents_too_large",
    )


def _joined(body: Json, field: str, documents: Sequence[Document], own: bytes) -> bytes:
    """A body with the contents of documents in front of its own prompt, which is JSON like them.

    Copying is all that is done with the contents: they may be long, and nothing else runs meanwhile.
    """
    pieces: list[bytes | memoryview] = [orjson.dumps(body)[:-1], b"," if body else b""]
    first = own[:1]
    between = b"" if first == b'"' else b","
    pieces += [orjson.dumps(field), b":", first]
    inner = [each.content_json[1:-1] for each in documents]
    inner.append(memoryview(own)[1:-1])
    filled = [each for each in inner if each.nbytes]
    for number, each in enumerate(filled):
        pieces += [between, each] if number else [each]
    pieces += [memoryview(own)[-1:], b"}"]
    return b"".join(pieces)


_FORMS: Final = {"text": "a string", "input_ids": "an array of token ids", "messages": "an array of messages"}


def _is_one(kind: str, value: Any) -> bool:
    """Whether a prompt is one, and in the form of a kind of documents."""
    if kind == "text":
        return type(value) is str
    return type(value) is list and not (kind == "input_ids" and value and type(value[0]) is not int)


def _unfit(why: str, param: str = DOCUMENT_IDS) -> RequestRefused:
    return RequestRefused(why, param=param, code="invalid_document")

"""The channel between routers, and its messages: hints, limits, used signatures, pins, queries.

Messages are sent at once and not stored; records of members and documents, which outlive their router, go
through ``membership``. A later message of the same hint or limit makes up for a lost one, and a router that
starts gets the snapshot of every other router.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated, Any, Protocol, TypeAlias

import msgspec

from sglang_ext.errors import InternalError, PeerError
from sglang_ext.signals import Signal

Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=2048)]
"""As long as a client may call something, with its tenant's prefix."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Namespace: TypeAlias = tuple[str | None, ...]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    router: Name
    """The sender; of a hint, the router that accepted it."""


class HintStatus(_Message, frozen=True, tag="hint"):
    """How a hint is that this router has taken, whenever that changes."""

    id: Name
    stamp: Count
    """Larger in later messages of the same router."""
    tenant: Name
    namespace: Namespace
    tokens: Count
    digest: Name
    """Of the key that these tokens are: see ``digest_of``."""
    state: Name
    age_s: Seconds
    lives_s: Seconds
    """From now on."""
    view: dict[str, Any] = msgspec.field(name="told")
    """The hint as clients receive it in JSON."""
    session: Name | None = None
    priority: int = 0
    instance: Name | None = None
    decode: Name | None = None
    """Where its request is expected: URLs, as in ``hints.hint.Place``."""


class HintTaken(_Message, frozen=True, tag="hint-taken"):
    """A hint of another router has ended at this one: its request has come here, or a client withdrew it."""

    id: Name
    used: bool
    why: Name = ""


class HintRepeated(_Message, frozen=True, tag="hint-repeated"):
    """A hint of another router was given to this one again."""

    id: Name
    earliest_s: Seconds
    lives_s: Seconds


class Query(_Message, frozen=True):
    """A question to all other routers, each of which sends a ``Reply`` with the same id."""

    id: Name


class Reply(_Message, frozen=True):
    """The answer of one router."""

    id: Name

    @property
    def found(self) -> bool:
        """Whether this router found the object of the query."""
        return False


class SessionAsked(Query, frozen=True, tag="session-asked"):
    """Ask for the last prompt of a session."""

    session: Name


class SessionKnown(Reply, frozen=True, tag="session-known"):
    """Namespace and key of the session's last prompt; ``key`` is None from a router without that session."""

    namespace: Namespace
    key: bytes | None

    @property
    def found(self) -> bool:
        return self.key is not None


class AbortAsked(Query, frozen=True, tag="abort-asked"):
    """Abort the requests of one scope that have this name; all of them without a name."""

    scope: Name
    name: Name | None


class Aborted(Reply, frozen=True, tag="aborted"):
    """So many requests were aborted."""

    requests: Count


class ExplainAsked(Query, frozen=True, tag="explain-asked"):
    """Explain the request of this id to a caller."""

    request_id: Name
    tenant: Name | None
    admin: bool


class Explained(Reply, frozen=True, tag="explained"):
    """The explanation as JSON, compressed with zlib; None from a router that did not serve the request."""

    body: bytes | None

    @property
    def found(self) -> bool:
        return self.body is not None


class ResponseAsked(Query, frozen=True, tag="response-asked"):
    """Which instance keeps a response of this scope?"""

    scope: Name
    response_id: Name


class ResponseKept(Reply, frozen=True, tag="response-kept"):
    """The instance's URL; None from a router that has no such response."""

    instance: str | None

    @property
    def found(self) -> bool:
        return self.instance is not None


class SyncAsked(Query, frozen=True, tag="sync-asked"):
    """Reply when everything sent before has been sent."""


class Synced(Reply, frozen=True, tag="synced"):
    """Everything that this router sent before has arrived, because messages keep their order."""


class LimitUsed(_Message, frozen=True, tag="limit"):
    """This router's use of the limits of an API key."""

    limit: Name
    """A name of the key that does not reveal it."""
    running: Count
    taken: Count
    """Requests since this router's start."""
    charged: Count
    """Tokens since then."""
    requests_left: float | None = None
    tokens_left: float | None = None
    """The fill of the buckets as this router has it; None without such a limit."""


class RequestLost(_Message, frozen=True, tag="request-lost"):
    """An instance went away while it worked on a request: see ``dispatch.suspects``."""

    digest: Name
    instance: Name
    age_s: Seconds


class SignatureUsed(_Message, frozen=True, tag="signature-used"):
    """A request that a member signed was taken: its signature is good for no second one, at no router."""

    signed: Annotated[str, msgspec.Meta(max_length=256)]
    """Moment, nonce and signature."""
    age_s: Seconds


class TextPinned(_Message, frozen=True, tag="pinned"):
    """The text that a session had first at a place of its prompts: see ``hints.shared_pins``."""

    session: Name
    rule: Name
    at: Count
    text: Annotated[str, msgspec.Meta(max_length=256)]


class Begun(_Message, frozen=True, tag="begun"):
    """This router begins, or was cut off for a while, and requests the messages of all others."""


RouterMessage: TypeAlias = (
    HintStatus
    | HintTaken
    | HintRepeated
    | SessionAsked
    | SessionKnown
    | AbortAsked
    | Aborted
    | ExplainAsked
    | Explained
    | ResponseAsked
    | ResponseKept
    | SyncAsked
    | Synced
    | LimitUsed
    | RequestLost
    | SignatureUsed
    | TextPinned
    | Begun
)


class Topic(Protocol):
    """One kind of state that routers share by messages: hints, limits, used signatures. It subscribes to a
    ``RouterChannel``. ``tests/router/topic_contract.py`` checks every topic that has state."""

    def on_message(self, message: Any) -> None:
        """A message of another router, of a kind to which the topic has subscribed. It may arrive twice."""

    def snapshot(self) -> Iterable[RouterMessage]:
        """The messages that bring a router that has just started up to date."""

    def on_routers(self, names: Collection[str]) -> None:
        """The names of the other routers, whenever they change."""


class RouterChannel:
    """Messages between this router and the others. Topics publish theirs and subscribe to those of others.

    Args:
        router: this router's name.
    """

    def __init__(self, router: str) -> None:
        self.router = router
        self._topics: list[Topic] = []
        self._by_kind: dict[type[Any], Topic] = {}
        self.outgoing: Signal[[RouterMessage]] = Signal()
        """A message for all other routers. Without a subscriber there are no other routers."""

    @property
    def is_open(self) -> bool:
        """Whether there can be other routers; a message published otherwise reaches none."""
        return bool(self.outgoing)

    def publish(self, message: RouterMessage) -> None:
        """Send a message to all other routers."""
        self.outgoing(message)

    def subscribe(self, topic: Topic, *kinds: type[Any]) -> None:
        """Deliver the messages of these classes, and of classes derived from them, to a topic.

        Raises:
            InternalError: another topic has subscribed to one of them.
        """
        for kind in kinds:
            if kind in self._by_kind:
                raise InternalError(f"{kind.__name__} has two topics")
            self._by_kind[kind] = topic
        self._topics.append(topic)

    def receive(self, message: RouterMessage) -> None:
        """Deliver a message of another router. This router's own messages are dropped."""
        if message.router == self.router:
            return
        for kind in type(message).__mro__:
            if (topic := self._by_kind.get(kind)) is not None:
                topic.on_message(message)
                return

    def snapshot(self) -> list[RouterMessage]:
        """The messages of all topics for a router that has just started."""
        return [message for topic in self._topics for message in topic.snapshot()]

    def on_routers(self, names: Collection[str]) -> None:
        """Pass the names of the other routers to every topic."""
        for topic in self._topics:
            topic.on_routers(names)

    def __repr__(self) -> str:
        return f"RouterChannel({self.router}, {', '.join(map(repr, self._topics))})"


def encode_message(message: RouterMessage) -> bytes:
    """A message as JSON."""
    return msgspec.json.encode(message)


def decode_message(data: bytes) -> RouterMessage:
    """The message that ``data`` holds.

    Raises:
        PeerError: it holds none.
    """
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"not a message of a router: {str(error)[:200]}") from None


_DECODER: msgspec.json.Decoder[RouterMessage] = msgspec.json.Decoder(RouterMessage)

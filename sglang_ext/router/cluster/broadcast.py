"""Messages that routers exchange at once and do not store: hints, the use of limits, queries.

Records of members and documents have to outlive the routers that wrote them; these have not. A word that is
lost is made good by a later one of the same hint or limit, and by ``Speaker.words`` for a router that begins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated, Any, Protocol, TypeAlias

import msgspec

from sglang_ext.errors import PeerError
from sglang_ext.signals import Signal

Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=2048)]
"""As long as a client may call something, with its tenant's prefix."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Namespace: TypeAlias = tuple[str | None, ...]


class _Word(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    router: Name
    """The sender; of a hint, the router that accepted it."""


class HintSaid(_Word, frozen=True, tag="hint"):
    """How a hint is that this router has taken, whenever that changes."""

    id: Name
    stamp: Count
    """Larger in later words of the same router."""
    tenant: Name
    namespace: Namespace
    tokens: Count
    digest: Name
    """Of the key that these tokens are: see ``digest_of``."""
    state: Name
    age_s: Seconds
    lives_s: Seconds
    """From now on."""
    told: dict[str, Any]
    """The hint as clients receive it in JSON."""
    session: Name | None = None
    priority: int = 0
    instance: Name | None = None
    decode: Name | None = None
    """Where its request is expected: URLs, as in ``hints.hint.Place``."""


class HintTaken(_Word, frozen=True, tag="hint-taken"):
    """A hint of another router has ended at this one: its request has come here, or a client withdrew it."""

    id: Name
    used: bool
    why: Name = ""


class HintRepeated(_Word, frozen=True, tag="hint-repeated"):
    """A hint of another router was given to this one again."""

    id: Name
    earliest_s: Seconds
    lives_s: Seconds


class Query(_Word, frozen=True):
    """A question to all other routers, each of which sends a ``Reply`` with the same id."""

    id: Name


class Reply(_Word, frozen=True):
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


class LimitUsed(_Word, frozen=True, tag="limit"):
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


class RequestLost(_Word, frozen=True, tag="request-lost"):
    """An instance went away while it worked on a request: see ``dispatch.suspects``."""

    digest: Name
    instance: Name
    age_s: Seconds


class SignatureUsed(_Word, frozen=True, tag="signature-used"):
    """A request that a member signed was taken: its signature is good for no second one, at no router."""

    signed: Annotated[str, msgspec.Meta(max_length=256)]
    """Moment, nonce and signature."""
    age_s: Seconds


class Begun(_Word, frozen=True, tag="begun"):
    """This router begins, or was cut off for a while, and requests the words of all others."""


Word: TypeAlias = (
    HintSaid
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
    | Begun
)


class Speaker(Protocol):
    """A part that exchanges words with the same part of other routers."""

    said: Signal[[Word]]
    """A word to send to the other routers now."""

    def hear(self, word: Word) -> None:
        """A word of another router; it may be for another part, and may come twice."""

    def words(self) -> Iterable[Word]:
        """The words to send to a router that begins."""

    def on_routers(self, names: Collection[str]) -> None:
        """The names of the other routers, whenever they change."""


def encode_word(word: Word) -> bytes:
    """A word as JSON."""
    return msgspec.json.encode(word)


def decode_word(data: bytes) -> Word:
    """The word that ``data`` holds.

    Raises:
        PeerError: it holds none.
    """
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"not a word of a router: {str(error)[:200]}") from None


_DECODER: msgspec.json.Decoder[Word] = msgspec.json.Decoder(Word)

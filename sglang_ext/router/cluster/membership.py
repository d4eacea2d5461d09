"""Where membership is kept: by one router for itself, or shared by several.

The contract. ``tests/router/membership_contract.py`` checks it for every implementation.

The caller (``members.Members``)
- calls ``start`` once, with a listener, and ``stop`` once; everything in one event loop;
- keeps a roster of its own and merges the listener's records into it; a record may come more than once,
  late, and out of order, and may be the router's own;
- calls ``publish`` for each record that it has made or changed, and ``share_status`` about once per second.

The implementation
- never blocks and never fails in ``publish``, ``share_status``, ``remember``, ``share`` and ``broadcast``:
  when a lost store is back, it is brought up to date from the ``Listener``'s ``records``, ``documents``,
  ``snapshot`` and ``is_alive``;
- delivers to the listener every record that any router has published, within seconds; the newest of each
  instance at least, those of before the start too; and every document that has not expired;
- delivers the messages of another router once both are connected, and the result of its ``Listener.snapshot``
  soon after the start;
- forgets an instance that no router has found alive for ``MEMBER_TTL_S``, and a router that has sent no
  status for ``ROUTER_TTL_S``;
- leaves out malformed or too large records, counts them, and goes on with the next; small records do not
  wait for large ones;
- reports whether it is connected. While it is not, ``others`` is empty: no other router is seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Protocol

import msgspec

from sglang_ext.clock import Clock
from sglang_ext.protocol.cluster import StoreView
from sglang_ext.router.api.documents import Document
from sglang_ext.router.cluster.broadcast import RouterMessage
from sglang_ext.router.cluster.roster import Member
from sglang_ext.router.tenancy.bounded import Bounded

MEMBER_TTL_S = 60.0
ROUTER_TTL_S = 5.0
MAX_SESSION_CHARACTERS = 512


class Seen(msgspec.Struct, frozen=True, array_like=True):
    """How one router sees one instance."""

    state: Annotated[str, msgspec.Meta(max_length=32)]
    in_flight: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 0


class RouterStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The status that a router shares every second."""

    router: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    instances: Annotated[dict[str, Seen], msgspec.Meta(max_length=100_000)] = {}
    """By instance id."""


class Listener(Protocol):
    """Callbacks of a membership. Nothing of it blocks."""

    def on_member(self, member: Member) -> None:
        """A record, perhaps an old one."""

    def on_routers(self, others: Mapping[str, RouterStatus]) -> None:
        """The last status of each other router; those that are gone are left out."""

    def on_session(self, session: str, instance: str) -> None:
        """Another router has sent a session to an instance (by id)."""

    def on_document(self, document: Document) -> None:
        """A document, perhaps an old one."""

    def on_message(self, message: RouterMessage) -> None:
        """A message of another router; it may come twice."""

    def records(self) -> Iterable[Member]:
        """Every record that this router has."""

    def snapshot(self) -> Iterable[RouterMessage]:
        """The messages to send to a router that begins."""

    def documents(self) -> Iterable[Document]:
        """Every document that this router has."""

    def is_alive(self, instance: str) -> bool:
        """Whether this router finds the instance alive."""


class Membership(Protocol):
    """Where membership is kept. See the module for the contract."""

    shares: bool
    """Whether there can be other routers."""
    refused: int
    """Records and frames of others that were malformed or too large: each was left out, and is not requested
    again while it stays the same.
    """
    unsent: int
    """Things that this router had to share and that are too large."""

    async def start(self, listener: Listener) -> None:
        """Begin. Returns when the records of other routers have been delivered, or cannot be had now."""

    async def stop(self) -> None:
        """End; other routers see at once that this one has gone."""

    def publish(self, member: Member) -> None:
        """Share a record."""

    def share_status(self, status: RouterStatus) -> None:
        """Share the status of this router."""

    def remember(self, session: str, instance: str) -> None:
        """Share that a session is at an instance (by id)."""

    def share(self, document: Document) -> None:
        """Share a document."""

    def broadcast(self, message: RouterMessage) -> None:
        """Send a message to the other routers."""

    @property
    def others(self) -> Mapping[str, RouterStatus]:
        """The last status of each other router."""

    @property
    def tables(self) -> Mapping[str, Bounded[Any, Any]]:
        """Tables of what clients send and of refused records, by their names in `/metrics`."""

    def view(self) -> StoreView:
        """How it is."""


class Sightings:
    """When this router first saw each member's record as it is."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[int, float]] = {}

    def seen(self, member: Member) -> float:
        """When a record was first seen; ``monotonic``. It is from now on, if it is new."""
        stamp, since = self._seen.get(member.instance, (-1, 0.0))
        if stamp != member.stamp:
            since = self._clock.monotonic()
            self._seen[member.instance] = (member.stamp, since)
        return since

    def alive(self, member: Member, listener: Listener) -> bool:
        """Whether this router finds the instance alive, or saw its record first within ``MEMBER_TTL_S``."""
        return self._clock.monotonic() - self.seen(member) < MEMBER_TTL_S or listener.is_alive(
            member.instance
        )


class EmbeddedMembership:
    """Membership of one router, in its own memory: nothing to share, nothing to lose."""

    shares = False
    refused = unsent = 0
    others: Mapping[str, RouterStatus] = {}
    tables: Mapping[str, Bounded[Any, Any]] = {}

    async def start(self, listener: Listener) -> None:
        """Nothing to load: there are no other routers."""

    async def stop(self) -> None:
        """Nothing to do."""

    def publish(self, member: Member) -> None:
        """Nothing to do: there are no other routers."""

    def share_status(self, status: RouterStatus) -> None:
        """Nothing to do: there are no other routers."""

    def remember(self, session: str, instance: str) -> None:
        """Nothing to do: there are no other routers."""

    def share(self, document: Document) -> None:
        """Nothing to do: there are no other routers."""

    def broadcast(self, message: RouterMessage) -> None:
        """Nothing to do: there are no other routers."""

    def view(self) -> StoreView:
        """Always there."""
        return StoreView(kind="embedded")

    def __repr__(self) -> str:
        return "EmbeddedMembership()"

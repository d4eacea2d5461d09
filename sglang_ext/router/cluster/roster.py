"""The members of the cluster, as a table of records that routers can exchange in any order.

Each record carries a stamp; of two records of one instance the one with the larger stamp counts, and among
equals the one whose text is larger. So any two routers that have seen the same records agree, whatever the
order, however often each came. Pure: the time comes in as an argument.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from sglang_ext.errors import InternalError, PeerError
from sglang_ext.protocol.cluster import Registration, RoleName, dp_rank_of, server_of, url_problem

MAX_RECORD_BYTES = 64 << 10
LEFT_KEPT_S = 86_400.0
"""How long it is remembered that an instance has left: as long, a record of it that some router still had
cannot bring it back."""


class Intent(enum.StrEnum):
    """The wish about an instance's future."""

    STAY = "stay"
    GO = "go"
    """The instance shall finish and leave. The wish holds until it is taken back, or the instance is started
    anew: a drained instance does not come back by registering again.
    """
    GONE = "gone"
    """It has left; it may come back by registering."""


class Changing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why an instance is drained that is to come back: it changes its role."""

    role: RoleName
    router: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    """The router that carries out the change; when it is gone, another one takes the drain back."""


class Member(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The record of one instance."""

    instance: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    url: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    registration: Registration | None = None
    """``None`` for an instance that was listed by its URL."""
    intent: Intent = Intent.STAY
    deadline_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """With GO: how long the instance may finish its requests. Each router counts from when it learns of it:
    their clocks may differ.
    """
    changing: Changing | None = None
    """With GO: it comes back in another role."""
    stamp: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = 0
    """Milliseconds since the epoch when it changed, or one more than before if the clock went back."""

    def __post_init__(self) -> None:
        if (problem := url_problem(self.url)) is not None:
            raise ValueError(f"url: {self.url!r} {problem}")
        if self.registration is not None and (
            (self.registration.instance, self.registration.url) != (self.instance, self.url)
        ):
            raise ValueError("registration: it is another instance's")

    @property
    def epoch(self) -> str:
        """Of its agent; empty for an instance that was listed."""
        return self.registration.epoch if self.registration else ""


def encode_member(member: Member) -> bytes:
    """A record as text that sorts the same everywhere."""
    return msgspec.json.encode(member)


def decode_member(data: bytes) -> Member:
    """The record that ``data`` holds.

    Raises:
        PeerError: it holds none.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise PeerError(f"a record of {len(data)} bytes")
    try:
        return msgspec.json.decode(data, type=Member)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"not a record of a member: {str(error)[:200]}") from None


@dataclass(frozen=True, slots=True)
class Change:
    """The change that a record made to the table."""

    before: Member | None
    after: Member


class Taken(PeerError):
    """The name or the URL belongs to another process that lives."""


class Roster:
    """The records of all members, by instance.

    Args:
        shared: the same registration, with less memory.
    """

    def __init__(
        self, shared: Callable[[Registration], Registration] = lambda registration: registration
    ) -> None:
        self._members: dict[str, Member] = {}
        self._shared = shared

    def __repr__(self) -> str:
        counts = {intent: sum(m.intent is intent for m in self) for intent in Intent}
        return f"Roster({', '.join(f'{name}: {count}' for name, count in counts.items())})"

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def get(self, instance: str) -> Member | None:
        """The record of an instance."""
        return self._members.get(instance)

    def at(self, url: str) -> Member | None:
        """The newest member at a URL that is not gone."""
        there = [member for member in self if member.url == url and member.intent is not Intent.GONE]
        return max(there, key=_rank, default=None)

    def together(self, member: Member) -> list[Member]:
        """A member, and all other replicas of its server that are not gone: they come and go with it."""
        if dp_rank_of(member.url) is None:
            return [member]
        server, gone = server_of(member.url), Intent.GONE
        return [
            other
            for other in self
            if other is member or (server_of(other.url) == server and other.intent is not gone)
        ]

    def merge(self, member: Member) -> Change | None:
        """Take in a record, of whatever age. ``None`` when it changes nothing."""
        before = self._members.get(member.instance)
        if before is not None and _rank(before) >= _rank(member):
            return None
        if member.registration is not None:
            member = msgspec.structs.replace(member, registration=self._shared(member.registration))
        self._members[member.instance] = member
        return Change(before, member)

    def forget(self, instance: str) -> None:
        """Drop the record of an instance that has been silent for long."""
        self._members.pop(instance, None)

    def expired(self, now: float) -> list[str]:
        """Instances that left so long ago that no router can still have an older record. A drain of a listed
        instance holds as long as the list.
        """
        return [
            member.instance
            for member in self
            if member.stamp / 1e3 + LEFT_KEPT_S < now
            and (member.intent is Intent.GONE or (member.intent is Intent.GO and member.registration))
        ]

    # -- what happens, as records; the caller merges them ------------------------------------------------

    def listed(self, url: str, now: float) -> Member | None:
        """An instance named by its URL; ``None`` when it is listed already."""
        if self.at(url) is not None:
            return None
        name = name_of(url)
        return Member(instance=name, url=url, stamp=self._stamp(name, now))

    def registered(
        self, registration: Registration, now: float, *, alive: bool, living: Collection[str] = ()
    ) -> list[Member]:
        """An instance registers: the records that change, its own last; none when nothing does.

        Args:
            alive: whether the recorded process of this name has given a sign of life lately.
            living: instances at this URL whose agents were alive a moment ago, in the recorded epoch.

        Raises:
            Taken: another process has the name or the URL, and lives.
        """
        before = self._members.get(registration.instance)
        for other in self:
            at_home = other.url == registration.url and other.intent is not Intent.GONE
            if at_home and other.epoch not in ("", registration.epoch) and other.instance in living:
                raise Taken(
                    f"{registration.url} is instance {other.instance} of another start, which lives",
                    field="url",
                    hint="Two servers announce one address: give each its own (--kv-announce-host, --port)",
                )
        changed: list[Member] = []
        intent, deadline_s, changing = Intent.STAY, 0.0, None
        if before is not None and before.registration is None:
            if (before.url, before.intent) == (registration.url, Intent.GO):
                intent, deadline_s = before.intent, before.deadline_s  # it was listed, and wished to go
        elif before is not None:
            if before.epoch == registration.epoch:
                if before.intent is Intent.GO:
                    intent, deadline_s, changing = Intent.GO, before.deadline_s, before.changing
            elif before.url != registration.url and before.intent is Intent.STAY and alive:
                raise Taken(
                    f"instance {registration.instance} is at {before.url}, and lives", field="instance"
                )
        for other in self:
            if _same_place(other.url, registration.url) and other.instance != registration.instance:
                if other.registration is None and other.intent is Intent.GO:
                    intent, deadline_s = other.intent, other.deadline_s  # the wish was about this URL
                if other.intent is not Intent.GONE:
                    changed.append(self._with(other, now, intent=Intent.GONE))
        if (
            before is not None
            and not changed
            and (before.registration, before.intent) == (registration, intent)
        ):
            return []
        changed.append(
            Member(
                instance=registration.instance,
                url=registration.url,
                registration=registration,
                intent=intent,
                deadline_s=deadline_s,
                changing=changing,
                stamp=self._stamp(registration.instance, now),
            )
        )
        return changed

    def wished(
        self,
        instance: str,
        intent: Intent,
        now: float,
        deadline_s: float = 0.0,
        changing: Changing | None = None,
    ) -> Member:
        """The record of a member with another intent."""
        return self._with(
            self._members[instance], now, intent=intent, deadline_s=deadline_s, changing=changing
        )

    def _with(
        self,
        member: Member,
        now: float,
        *,
        intent: Intent,
        deadline_s: float = 0.0,
        changing: Changing | None = None,
    ) -> Member:
        return msgspec.structs.replace(
            member,
            intent=intent,
            deadline_s=deadline_s,
            changing=changing,
            stamp=self._stamp(member.instance, now),
        )

    def _stamp(self, instance: str, now: float) -> int:
        before = self._members.get(instance)
        return max(int(now * 1e3), before.stamp + 1 if before else 0)

    def check(self) -> None:
        """Verify the table.

        Raises:
            InternalError: a record is under another name.
        """
        for name, member in self._members.items():
            if member.instance != name:
                raise InternalError(f"the record of {member.instance} is kept under {name}")
            if member.registration is not None and (
                member.registration.instance != name or member.registration.url != member.url
            ):
                raise InternalError(f"the record of {name} holds the registration of another")


def _rank(member: Member) -> tuple[int, bytes]:
    return member.stamp, encode_member(member)


def _same_place(one: str, other: str) -> bool:
    """Whether two instances cannot both be: at one URL, or a server as a whole and one of its replicas."""
    whole = dp_rank_of(one) is None or dp_rank_of(other) is None
    return one == other or (whole and server_of(one) == server_of(other))


def name_of(url: str) -> str:
    """The id of an instance that has not registered: the URL without ``http://``."""
    parts = urlsplit(url)
    return f"{parts.netloc}{parts.path.rstrip('/')}"

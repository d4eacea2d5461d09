"""The conformance suite of memberships: the promises of ``cluster/membership.py``, for every implementation.

A subclass makes memberships (``make``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from sglang_ext.clock import SystemClock
from sglang_ext.protocol.cluster import Registration
from sglang_ext.router.api.documents import Document
from sglang_ext.router.cluster.broadcast import RouterMessage, SessionAsked
from sglang_ext.router.cluster.membership import Membership, RouterStatus, Seen
from sglang_ext.router.cluster.roster import Intent, Member, Roster, encode_member
from sglang_ext.testing.waiting import until

Make = Callable[[str], Membership]
URL = "http://127.0.0.1:1001"


def member(name: str = "a", stamp: int | None = None, **more: object) -> Member:
    """A record of now."""
    registration = Registration(url=URL, instance=name, epoch="0" * 32)
    now = int(SystemClock().wall() * 1e3) if stamp is None else stamp
    values = {"instance": name, "url": URL, "registration": registration, "stamp": now, **more}
    return msgspec.convert(values, Member)


class OwnClock(SystemClock):
    """The time of one router's machine: no two agree on the wall clock, or began at the same time.

    Args:
        router: its name.
    """

    def __init__(self, router: str) -> None:
        self._ahead_s = {"one": -90.0, "two": 90.0}.get(router, 0.0)

    def monotonic(self) -> float:
        return super().monotonic() + 100.0 * self._ahead_s

    def wall(self) -> float:
        return super().wall() + self._ahead_s


LIVES_S = 60.0


def document(
    id: str = "d", stamp: int = 1, router: str = "", content: str = "The manual.", **more: Any
) -> Document:
    """A document of a router that lives for another minute."""
    expires, written = OwnClock(router).monotonic() + LIVES_S, msgspec.Raw(msgspec.json.encode(content))
    return Document("one-", id, "text", written, expires, stamp=stamp, **more)


@dataclass
class Ear:
    """A router as far as a membership sees it."""

    roster: Roster = field(default_factory=Roster)
    others: Mapping[str, RouterStatus] = field(default_factory=dict)
    sessions: dict[str, str] = field(default_factory=dict)
    alive: set[str] = field(default_factory=set)
    told: int = 0
    known: dict[tuple[str, str], Document] = field(default_factory=dict)
    received: list[RouterMessage] = field(default_factory=list)
    own_messages: list[RouterMessage] = field(default_factory=list)

    def on_member(self, member: Member) -> None:
        self.told += 1
        self.roster.merge(member)

    def on_routers(self, others: Mapping[str, RouterStatus]) -> None:
        self.others = others

    def on_session(self, session: str, instance: str) -> None:
        self.sessions[session] = instance

    def on_document(self, document: Document) -> None:
        if (had := self.known.get(document.ids)) is None or had.stamp < document.stamp:
            self.known[document.ids] = document

    def on_message(self, message: RouterMessage) -> None:
        self.received.append(message)

    def snapshot(self) -> Iterable[RouterMessage]:
        return self.own_messages

    def documents(self) -> Iterable[Document]:
        return self.known.values()

    def knows(self, router: str, *documents: Document) -> bool:
        """Whether it knows these and no others, each for the rest of its minute by the router's clock."""
        now = OwnClock(router).monotonic()
        assert all(0 < known.expires - now <= LIVES_S + 0.1 for known in self.known.values())
        found, wanted = (
            {each.shifted(-each.expires) for each in some} for some in (self.known.values(), documents)
        )
        return found == wanted

    def records(self) -> Iterable[Member]:
        return self.roster

    def is_alive(self, instance: str) -> bool:
        return instance in self.alive

    def texts(self) -> set[bytes]:
        return {encode_member(m) for m in self.roster}


@dataclass
class Router:
    """A membership and its listener."""

    store: Membership
    ear: Ear

    def publish(self, record: Member) -> None:
        """As ``Members`` does it: into the own roster first."""
        self.ear.roster.merge(record)
        self.store.publish(record)


class MembershipContract:
    """The behaviour of every implementation. Subclasses give a fixture ``make``."""

    @pytest.fixture
    async def begin(self, make: Make) -> Callable[..., Awaitable[Router]]:
        async with AsyncExitStack() as stack:

            async def start(name: str, ear: Ear | None = None) -> Router:
                router = Router(make(name), ear or Ear())
                await router.store.start(router.ear)
                stack.push_async_callback(router.store.stop)
                return router

            yield start  # type: ignore[misc]

    async def test_nothing_fails_before_the_start_and_after_the_end(self, make: Make) -> None:
        store = make("one")
        for _ in range(2):
            store.publish(member())
            store.share_status(RouterStatus("one", {"a": Seen("ready", 1)}))
            store.remember("session", "a")
            store.share(document())
            store.broadcast(SessionAsked("one", "1", "s"))
            assert store.others == {}
            assert store.view().kind
            await store.start(Ear())
            await store.stop()
        await store.stop()

    async def test_it_says_how_it_is(self, begin) -> None:
        view = (await begin("one")).store.view()
        assert view.connected
        assert view.error == ""
        assert view.since_s >= 0

    async def test_a_router_alone_sees_no_other(self, begin) -> None:
        one = await begin("one")
        one.store.share_status(RouterStatus("one", {}))
        one.publish(member())
        assert one.store.others == {}
        assert one.ear.others == {}


class SharedMembershipContract(MembershipContract):
    """The additional behaviour of memberships that several routers share: memberships that ``make`` makes see
    each other."""

    async def test_a_record_reaches_the_others(self, begin) -> None:
        one, two = await begin("one"), await begin("two")
        one.publish(member())
        await until(lambda: two.ear.roster.get("a") is not None)
        two.publish(member(intent=Intent.GO, deadline_s=5.0, stamp=one.ear.roster.get("a").stamp + 1))
        await until(lambda: one.ear.roster.get("a").intent is Intent.GO)
        assert one.ear.texts() == two.ear.texts()

    async def test_who_begins_later_learns_everything(self, begin) -> None:
        one = await begin("one")
        for number in range(50):
            one.publish(member(f"i{number}"))
        one.publish(member("i7", intent=Intent.GONE, stamp=one.ear.roster.get("i7").stamp + 1))
        one.store.remember("s", "i3")
        watcher = await begin("watcher")
        await until(lambda: watcher.ear.texts() == one.ear.texts() and "s" in watcher.ear.sessions)
        two = await begin("two")
        assert two.ear.texts() == one.ear.texts()
        assert two.ear.sessions == {"s": "i3"}

    async def test_the_newest_record_counts_even_if_an_older_one_is_written_last(self, begin) -> None:
        one, two = await begin("one"), await begin("two")
        new, old = member(stamp=member().stamp + 1000, intent=Intent.GO), member()
        one.publish(new)
        await until(lambda: two.ear.roster.get("a") == new)
        two.store.publish(old)
        two.store.publish(member("last"))
        await until(lambda: one.ear.roster.get("last") is not None)
        three = await begin("three")
        assert three.ear.roster.get("a") == new

    async def test_among_equal_stamps_all_agree(self, begin) -> None:
        one, two = await begin("one"), await begin("two")
        stamp = member().stamp
        one.publish(member(stamp=stamp, deadline_s=1.0))
        two.publish(member(stamp=stamp, deadline_s=2.0))
        await until(lambda: one.ear.told > 0 and two.ear.told > 0)
        await until(lambda: one.ear.texts() == two.ear.texts())
        three = await begin("three")
        assert three.ear.texts() == one.ear.texts()

    async def test_routers_see_each_other_until_one_goes(self, begin, make: Make) -> None:
        one = await begin("one")
        two = make("two")
        await two.start(Ear())
        two.share_status(RouterStatus("two", {"a": Seen("draining", 4)}))

        def seen() -> bool:
            one.store.share_status(RouterStatus("one", {}))
            return one.ear.others.get("two") == RouterStatus("two", {"a": Seen("draining", 4)})

        await until(seen)
        await two.stop()

        def gone() -> bool:
            one.store.share_status(RouterStatus("one", {}))
            return one.ear.others == {} and one.store.others == {}

        await until(gone)

    async def test_a_document_reaches_the_others_and_who_begins_later(self, begin) -> None:
        one, two = await begin("one"), await begin("two")
        first, newer = document(router="one"), document(stamp=2, router="one", content="Another one.")
        theirs = document("theirs", router="two", content="Theirs.")
        for router, shared in ((one, first), (one, newer), (one, first), (two, theirs)):
            router.ear.on_document(shared)
            router.store.share(shared)
        await until(lambda: one.ear.knows("one", newer, theirs) and two.ear.knows("two", newer, theirs))
        deleted = two.ear.known[newer.ids].deleted(OwnClock("two").monotonic(), OwnClock("two").wall())
        two.ear.on_document(deleted)
        two.store.share(deleted)
        await until(lambda: one.ear.knows("one", deleted, theirs))
        again = document(router="one", content="A third one.").after(one.ear.known[newer.ids])
        one.ear.on_document(again)
        one.store.share(again)
        await until(lambda: two.ear.knows("two", again, theirs))
        assert (await begin("three")).ear.knows("three", again, theirs)

    async def test_a_session_reaches_the_others_and_not_its_own(self, begin) -> None:
        one, two = await begin("one"), await begin("two")
        one.store.remember("conversation-1", "a")
        one.store.remember("x" * 100_000, "a")
        two.store.remember("conversation-2", "b")
        await until(lambda: two.ear.sessions == {"conversation-1": "a"})
        await until(lambda: one.ear.sessions == {"conversation-2": "b"})

    async def test_messages_reach_the_others_and_a_snapshot_a_router_that_starts(self, begin) -> None:
        asked = [SessionAsked("one", str(number), "s" * number) for number in range(600)]
        one, two = await begin("one"), await begin("two")
        for message in asked:
            one.store.broadcast(message)
        await until(lambda: two.ear.received == asked)
        one.ear.own_messages = asked[:5]
        three = await begin("three")
        await until(lambda: three.ear.received == asked[:5])
        assert one.ear.received == []

"""Membership of the routers of one machine: the contract, and routers that die, hang or send rubbish."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from sglang_ext.clock import SystemClock
from sglang_ext.errors import ConfigError
from sglang_ext.router.cluster import membership_local
from sglang_ext.router.cluster.membership import MEMBER_TTL_S, ROUTER_TTL_S, RouterStatus
from sglang_ext.router.cluster.membership_local import LocalMembership
from sglang_ext.router.cluster.roster import Intent
from sglang_ext.tasks import Rounds
from sglang_ext.testing.fakes import FakeClock
from sglang_ext.testing.waiting import until

sys.path.insert(0, str(Path(__file__).parents[1]))

from membership_contract import Ear, Make, OwnClock, Router, SharedMembershipContract, member

uvloop.new_event_loop().close()  # opens pipes that last as long as the process; not in a test, as a leak


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Deeper than the path of a socket may be long."""
    found = tmp_path / ("deep" * 30)
    found.mkdir(mode=0o700)
    return found


class TestLocal(SharedMembershipContract):
    @pytest.fixture
    def make(self, folder: Path) -> Make:
        return lambda name: LocalMembership(folder, name, OwnClock(name))


@asynccontextmanager
async def router(folder: Path, name: str, ear: Ear | None = None) -> AsyncIterator[Router]:
    """A router that has begun."""
    found = Router(LocalMembership(folder, name, SystemClock()), ear or Ear())
    await found.store.start(found.ear)
    try:
        yield found
    finally:
        await found.store.stop()


def left_behind(folder: Path, name: str) -> Path:
    """The socket of a router that was killed."""
    path = folder / f"{name}.sock"
    there = os.open(folder, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(f"/proc/self/fd/{there}/{name}.sock")
    os.close(there)
    return path


async def test_routers_do_not_wait_for_a_killed_one(folder: Path) -> None:
    path = left_behind(folder, "dead")
    async with router(folder, "one") as one:
        await until(lambda: not path.exists())
        one.store.share_status(RouterStatus("one"))
        async with router(folder, "two") as two:
            two.publish(member())
            await until(lambda: one.ear.roster.get("a") is not None)
    assert not os.listdir(folder)


def test_a_router_that_hangs_up_at_once_fails_no_work(folder: Path) -> None:
    """With uvloop, as routers run: it raises where asyncio drops bytes for a closed connection."""

    async def connections() -> Counter[str]:
        rounds = Rounds()
        store = LocalMembership(folder, "one", SystemClock(), rounds=rounds)
        await store.start(Ear())
        store.remember("session", "a")  # the write of this finds the connection closed, and closes it here
        try:
            directory = os.open(folder, os.O_RDONLY)
            for _ in range(20):
                with socket.socket(socket.AF_UNIX) as other:
                    other.connect(f"/proc/self/fd/{directory}/one.sock")
                await asyncio.sleep(0.005)
            os.close(directory)
        finally:
            await store.stop()
        return rounds.failures

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(connections()) == Counter()


async def test_only_their_user_can_reach_them(folder: Path) -> None:
    async with router(folder, "one"):
        assert {os.stat(folder / name).st_mode & 0o777 for name in os.listdir(folder)} == {0o600}
    os.chmod(folder, 0o710)
    with pytest.raises(ConfigError, match="others can enter") as caught:
        await LocalMembership(folder, "two", SystemClock()).start(Ear())
    assert caught.value.field == "--cluster"
    with pytest.raises(ConfigError, match="cannot open"):
        await LocalMembership(folder / "none", "two", SystemClock()).start(Ear())


async def test_what_one_router_knew_outlives_it(folder: Path) -> None:
    """After a router has gone, another sends its members, documents and sessions to a third."""
    async with router(folder, "two", Ear(alive={"a"})) as two:
        async with router(folder, "one") as one:
            one.publish(member(intent=Intent.GO, deadline_s=5.0))
            one.store.remember("session", "a")
            await until(lambda: two.ear.sessions == {"session": "a"} and two.ear.roster.get("a") is not None)
        async with router(folder, "three") as three:
            assert three.ear.texts() == two.ear.texts()
            assert three.ear.sessions == {"session": "a"}


async def test_a_router_that_starts_receives_no_dead_members(folder: Path) -> None:
    clock = FakeClock()
    one = Router(LocalMembership(folder, "one", clock), Ear(alive={"heard"}))
    await one.store.start(one.ear)
    try:
        for name, more in (("silent", {}), ("heard", {}), ("left", {"intent": Intent.GONE})):
            one.publish(member(name, **more))
        clock.advance(MEMBER_TTL_S + 1)
        one.publish(member("new"))
        async with router(folder, "two") as two:
            assert {record.instance for record in two.ear.roster} == {"heard", "left", "new"}
    finally:
        await one.store.stop()


async def test_a_router_that_says_nothing_any_more_is_left_out(folder: Path) -> None:
    clock = FakeClock()
    one, two = LocalMembership(folder, "one", clock), LocalMembership(folder, "two", clock)
    ear = Ear()
    await one.start(ear)
    await two.start(Ear())
    try:
        two.share_status(RouterStatus("two"))
        await until(lambda: "two" in ear.others)
        one.share_status(RouterStatus("one"))
        assert "two" in one.others
        clock.advance(ROUTER_TTL_S + 1)
        one.share_status(RouterStatus("one"))
        assert one.others == {} == ear.others
        two.share_status(RouterStatus("two"))
        await until(lambda: "two" in ear.others)
    finally:
        await one.stop()
        await two.stop()


@pytest.mark.parametrize("rubbish", [b"\0\0\0\2x{", b"\0\0\0\2m{", b"\0\0\0\3s[]", b"\0\0\0\0", b"\xff" * 9])
async def test_rubbish_does_no_harm(folder: Path, rubbish: bytes) -> None:
    def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(rubbish)
        told.append(writer)

    told: list[asyncio.StreamWriter] = []
    there = os.open(folder, os.O_RDONLY)
    server = await asyncio.start_unix_server(talk, f"/proc/self/fd/{there}/liar.sock")
    try:
        async with router(folder, "one") as one, router(folder, "two") as two:
            await until(lambda: isinstance(one.store, LocalMembership) and one.store.refused > 0)
            two.publish(member())
            await until(lambda: one.ear.roster.get("a") is not None)
            one.store.share_status(RouterStatus("one"))
            await until(lambda: one.store.refused + two.store.refused >= 2)
            one.store.share_status(RouterStatus("one"))
            assert len(told) == 2, "it does not ask again for refused records"
    finally:
        server.close()
        for writer in told:
            writer.close()
        os.close(there)


async def test_a_router_that_does_not_keep_up_receives_everything_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with router(folder, "one") as one:
        there = os.open(folder, os.O_RDONLY)
        reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{there}/one.sock", limit=1)
        os.close(there)
        monkeypatch.setattr(membership_local, "MAX_BEHIND", 1 << 16)
        for number in range(3000):
            one.publish(member(f"i{number}"))
            await asyncio.sleep(0)
        with pytest.raises(asyncio.IncompleteReadError):
            await reader.readexactly(1 << 30)  # it was cut off
        writer.close()
        async with router(folder, "two") as two:
            # It starts after `HEARING_S`, whether it has received everything or not.
            await until(lambda: two.ear.texts() == one.ear.texts())


async def test_what_was_kept_of_a_session_does_not_take_back_what_is_new(folder: Path) -> None:
    """A router that was away for a moment may receive old records from another that was away, too."""
    async with router(folder, "one") as one:
        one.store.remember("session", "old")
        two = LocalMembership(folder, "two", SystemClock())
        two.remember("session", "ignored before the start")
        ear = Ear()
        two._sessions.put("session", "new")
        await two.start(ear)
        try:
            assert ear.sessions == {}
            one.store.remember("session", "newest")
            await until(lambda: ear.sessions == {"session": "newest"})
        finally:
            await two.stop()

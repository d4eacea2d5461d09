"""Records that clients make routers share stay behind the routers' own, and are read once."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from membership_contract import Ear, OwnClock, document, member

from sglang_ext.clock import SystemClock
from sglang_ext.cluster_key import ClusterKey
from sglang_ext.router.api.documents import MAX_DOCUMENT_BYTES, decode_document
from sglang_ext.router.cluster import membership_local, membership_redis
from sglang_ext.router.cluster.broadcast import SessionKnown
from sglang_ext.router.cluster.membership import RouterStatus
from sglang_ext.router.cluster.membership_local import MAX_FRAME, LocalMembership
from sglang_ext.router.cluster.membership_redis import MAX_MESSAGE_BYTES, SYNC_S, RedisMembership
from sglang_ext.router.cluster.redis_records import SESSIONS_AT_ONCE
from sglang_ext.router.cluster.roster import encode_member
from sglang_ext.testing.fakes import FakeClock
from sglang_ext.testing.waiting import until
from tests.support.servers.redis_server import HOW_TO_GET_IT, RedisServer, redis_is_installed

KEY = ClusterKey(b"the-key-of-a-test-0123456789-abcdefghijklmnop")
needs_redis = pytest.mark.skipif(not redis_is_installed(), reason=HOW_TO_GET_IT)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "routers"
    found.mkdir(mode=0o700)
    return found


async def test_a_frame_that_is_too_large_is_skipped(folder: Path) -> None:
    """The frame was requested again for ever, and later frames were never received."""

    def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        told.append(writer)
        writer.write((MAX_FRAME + 1).to_bytes(4, "big") + bytes(MAX_FRAME + 1))
        good = encode_member(member("behind"))
        writer.write((1 + len(good)).to_bytes(4, "big") + b"m" + good)

    told: list[asyncio.StreamWriter] = []
    server = await asyncio.start_unix_server(talk, folder / "old.sock")
    one, ear = LocalMembership(folder, "one", SystemClock()), Ear()
    await one.start(ear)
    try:
        await until(lambda: ear.roster.get("behind") is not None)
        one.share_status(RouterStatus("one"))
        assert (one.refused, len(told)) == (1, 1)
    finally:
        await one.stop()
        server.close()
        for writer in told:
            writer.close()


async def test_a_document_fits_into_a_frame() -> None:
    largest = document(content="x" * (MAX_DOCUMENT_BYTES - 2))
    assert decode_document(msgspec.json.encode(largest)) == largest
    assert 2 * len(msgspec.json.encode(largest)) < MAX_FRAME


async def test_more_documents_than_may_wait_reach_who_begins(folder: Path, monkeypatch) -> None:
    """The peer was cut off for not keeping up, at each attempt, and later records were never received."""
    monkeypatch.setattr(membership_local, "MAX_BEHIND", 1 << 20)
    one, first = LocalMembership(folder, "one", SystemClock()), Ear()
    documents = [document(f"d{number}", content="x" * (256 << 10)) for number in range(16)]
    for each in documents:
        first.on_document(each)
    await one.start(first)
    two, second = LocalMembership(folder, "two", SystemClock()), Ear()
    heard: list[str] = []
    monkeypatch.setattr(second, "on_document", lambda each: heard.append(each.id))
    try:
        one.share_status(RouterStatus("one"))
        await two.start(second)
        while len(heard) < len(documents):
            one.share_status(RouterStatus("one"))  # it is looked at how much waits
            await asyncio.sleep(0)
        assert "one" in two.others
        assert heard == [each.id for each in documents], "each was sent once"
    finally:
        await one.stop()
        await two.stop()


async def test_small_records_go_before_documents(folder: Path) -> None:
    one, ear = LocalMembership(folder, "one", SystemClock()), Ear()
    ear.roster.merge(member("a"))
    ear.on_document(document(content="x" * (4 << 20)))
    ear.own_messages = [SessionKnown("one", "q", (), None)]
    await one.start(ear)
    there = os.open(folder, os.O_RDONLY)
    try:
        one.share_status(RouterStatus("one"))
        one.remember("s", "a")
        assert len(one.tables["local-sessions"]) == 1
        reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{there}/one.sock")
        kinds = b""
        while not kinds.endswith(b"c"):
            size = int.from_bytes(await reader.readexactly(4), "big")
            kinds += (await reader.readexactly(size))[:1]
        assert kinds == b"mswrdc"
        writer.close()
    finally:
        os.close(there)
        await one.stop()


@needs_redis
async def test_of_documents_in_redis_only_what_changed_is_read() -> None:
    """All were read, verified and decoded every ten seconds: 100 large ones took 4.4 s of the event loop."""
    import redis.asyncio as library

    with RedisServer() as server:
        clock = FakeClock(wall=SystemClock().wall())
        writer, teller = RedisMembership(server.url, "two", OwnClock("two"), key=KEY), Ear()
        reader, ear = RedisMembership(server.url, "one", clock, key=KEY), Ear()
        await writer.start(teller)
        await reader.start(ear)
        try:
            async with library.from_url(server.url) as client:

                async def told() -> int:
                    return int((await client.info("stats"))["total_net_output_bytes"])

                size, count = 256 << 10, 20
                for number in range(count):
                    each = document(f"d{number}", router="two", content=f"{number}" + "x" * size)
                    teller.on_document(each)
                    writer.share(each)
                await until(lambda: len(ear.known) == count)
                before = await told()
                for number in range(5):
                    clock.advance(SYNC_S)
                    newer = document("d0", number + 2, "two", content="small")
                    teller.on_document(newer)
                    writer.share(newer)
                    await until(lambda: ear.known["one-", "d0"].stamp == newer.stamp)  # noqa: B023
                assert await told() - before < size
        finally:
            await reader.stop()
            await writer.stop()


@needs_redis
async def test_what_is_refused_in_redis_is_not_read_again() -> None:
    import redis.asyncio as library

    with RedisServer() as server:
        clock = FakeClock(wall=SystemClock().wall())
        reader, ear = RedisMembership(server.url, "one", clock, key=KEY), Ear()
        async with library.from_url(server.url) as client:
            base = "sglang_ext:{default}:"
            await client.sadd(f"{base}documents", "one-/large", "one-/forged", "one-/gone")
            await client.set(f"{base}document:one-/large", b"9 - " + bytes(MAX_DOCUMENT_BYTES + (1 << 20)))
            forged = msgspec.json.encode(document("forged"))
            await client.set(f"{base}document:one-/forged", b"9 - " + forged)
            await reader.start(ear)
            try:
                assert (reader.refused, ear.known) == (2, {})
                reads = (await client.info("commandstats"))["cmdstat_getrange"]["calls"]
                clock.advance(SYNC_S)
                while (await client.info("commandstats"))["cmdstat_getrange"]["calls"] < reads + 2:
                    pass
                own = document("own", router="")
                ear.on_document(own)
                reader.share(own)
                while not await client.exists(f"{base}document:one-/own"):
                    pass
                assert reader.refused == 2
                assert await client.smembers(f"{base}documents") >= {b"one-/own", b"one-/large"}
            finally:
                await reader.stop()


@needs_redis
async def test_sessions_in_redis_are_read_in_pages(monkeypatch) -> None:
    """All 5,000 came in one answer. A busy machine took longer to parse it than an answer may take: the
    router lost Redis, connected again, and asked for the same for ever."""
    import redis.asyncio as library

    first = 4 * SESSIONS_AT_ONCE + 50
    monkeypatch.setattr(membership_redis, "FIRST_SESSIONS", first)
    with RedisServer() as server:
        writer, reader = (
            RedisMembership(server.url, name, SystemClock(), key=KEY) for name in ("two", "one")
        )
        ear = Ear()
        await writer.start(Ear())
        try:
            async with library.from_url(server.url) as client:
                for number in range(first + 100):
                    writer.remember(f"s{number}", "a")
                writer.remember(f"s{first}", "b")
                await until(lambda: not writer.tables["pending-words"] and not writer._sessions)
                while await client.xlen("sglang_ext:{default}:sessions") < first + 101:
                    pass
                before = (await client.info("commandstats"))["cmdstat_xrevrange"]["calls"]
                await reader.start(ear)
                after = (await client.info("commandstats"))["cmdstat_xrevrange"]["calls"]
                assert after - before == 3 + 5, "the ends of three streams, and five pages"
                assert len(ear.sessions) == first - 1
                assert (ear.sessions[f"s{first}"], ear.sessions["s101"]) == ("b", "a")
                assert "s100" not in ear.sessions
        finally:
            await reader.stop()
            await writer.stop()


@needs_redis
async def test_messages_that_are_too_long_for_redis_are_counted(caplog: Any) -> None:
    with RedisServer() as server:
        store = RedisMembership(server.url, "one", SystemClock())
        await store.start(Ear())
        try:
            store.broadcast(SessionKnown("one", "q", (), bytes(MAX_MESSAGE_BYTES)))
            assert store.unsent == 1
            assert "SessionKnown" in caplog.text
        finally:
            await store.stop()

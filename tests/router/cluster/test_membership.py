"""Memberships: all kinds keep the contract, and the shared ones outlive routers, and Redis."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sglang_ext.clock import SystemClock
from sglang_ext.cluster_key import ClusterKey
from sglang_ext.errors import ConfigError
from sglang_ext.router.cluster.membership import EmbeddedMembership, RouterStatus
from sglang_ext.router.cluster.membership_redis import SYNC_S, RedisMembership, address_of
from sglang_ext.router.cluster.redis_records import MAX_EVENTS
from sglang_ext.router.cluster.roster import Intent
from sglang_ext.testing.fakes import FakeClock
from tests.support.servers.redis_server import HOW_TO_GET_IT, RedisServer, redis_is_installed

sys.path.insert(0, str(Path(__file__).parents[1]))

from membership_contract import (
    Ear,
    Make,
    MembershipContract,
    OwnClock,
    SharedMembershipContract,
    document,
    member,
)

from sglang_ext.testing.waiting import until

pytestmark = pytest.mark.slow

needs_redis = pytest.mark.skipif(not redis_is_installed(), reason=HOW_TO_GET_IT)


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def make_shared(redis: RedisServer) -> Make:
    return lambda name: RedisMembership(redis.url, name, OwnClock(name), key=ClusterKey(SECRET))


class TestEmbedded(MembershipContract):
    @pytest.fixture
    def make(self) -> Make:
        return lambda name: EmbeddedMembership()


@needs_redis
class TestRedis(SharedMembershipContract):
    @pytest.fixture
    def make(self, make_shared: Make) -> Make:
        return make_shared


SECRET = b"a key of at least thirty-two characters"


@needs_redis
async def test_what_no_member_has_signed_is_not_believed(redis: RedisServer) -> None:
    """An intruder who can write to Redis names an instance, a router and a session of his own."""
    key = ClusterKey(SECRET)
    good, false = member("good"), member("false")
    ear = Ear()
    shared = RedisMembership(redis.url, "one", SystemClock(), key=key)
    other = RedisMembership(redis.url, "two", SystemClock(), key=ClusterKey(SECRET))
    strangers = [
        RedisMembership(redis.url, "stranger", SystemClock()),
        RedisMembership(redis.url, "guesser", SystemClock(), key=ClusterKey(b"x" + SECRET)),
    ]
    for store in (shared, *strangers, other):
        await store.start(ear if store is shared else Ear())
    try:
        for stranger in strangers:
            stranger.publish(false)
            stranger.share_status(RouterStatus("false"))
            stranger.remember("session", "false")
            stranger.share(document("false"))
        await until(lambda: shared.refused >= 2)
        other.publish(good)
        other.share_status(RouterStatus("two"))
        other.remember("session", "good")
        other.share(document("good"))

        def told() -> bool:
            shared.share_status(RouterStatus("one"))
            return (
                bool(ear.others) and ear.roster.get("good") is not None and bool(ear.sessions and ear.known)
            )

        await until(told)
        assert ear.roster.get("false") is None
        assert {*ear.others} == {"two"}
        assert ear.sessions == {"session": "good"}
        assert {id for _, id in ear.known} == {"good"}
        late = Ear()
        third = RedisMembership(redis.url, "three", SystemClock(), key=key)
        await third.start(late)
        try:
            await until(lambda: late.roster.get("good") is not None)
            assert late.roster.get("false") is None
            assert {id for _, id in late.known} == {"good"}
        finally:
            await third.stop()
    finally:
        for store in (shared, *strangers, other):
            await store.stop()


@needs_redis
async def test_redis_dies_and_comes_back_empty(redis: RedisServer, make_shared: Make) -> None:
    one, two = Ear(alive={"a", "b"}), Ear(alive={"b"})
    first, second = make_shared("one"), make_shared("two")
    await first.start(one)
    await second.start(two)
    try:
        one.roster.merge(member("a"))
        first.publish(member("a"))
        second.share_status(RouterStatus("two"))

        def all_seen() -> bool:
            first.share_status(RouterStatus("one"))
            return two.roster.get("a") is not None and "two" in one.others

        await until(all_seen)
        redis.kill()
        await until(lambda: not first.view().connected and not second.view().connected)
        assert "redis" in first.view().address
        assert first.view().error
        assert one.others == {}, "nothing is known of other routers"
        assert one.roster.get("a") is not None, "known records stay"
        # Meanwhile each goes on by itself.
        record = member("b")
        two.roster.merge(record)
        second.publish(record)
        redis.start()
        await until(lambda: first.view().connected and second.view().connected)
        await until(lambda: one.roster.get("b") == record)
        third, ear = make_shared("three"), Ear()
        await third.start(ear)
        try:
            await until(lambda: ear.texts() == one.texts() == two.texts())
        finally:
            await third.stop()
    finally:
        await first.stop()
        await second.stop()


@needs_redis
async def test_redis_that_hangs_is_lost_and_found(redis: RedisServer, make_shared: Make) -> None:
    store = make_shared("one")
    await store.start(Ear())
    try:
        redis.pause()
        store.publish(member("a"))
        await until(lambda: not store.view().connected)
        redis.go_on()
        await until(lambda: store.view().connected)
    finally:
        redis.go_on()
        await store.stop()


@needs_redis
async def test_a_router_without_redis_begins_alone_and_joins_later() -> None:
    with RedisServer() as redis:
        redis.kill()
        ear = Ear(alive={"a"})
        ear.roster.merge(member("a"))
        store = RedisMembership(redis.url, "one", SystemClock())
        await store.start(ear)
        try:
            assert not store.view().connected
            redis.start()
            await until(lambda: store.view().connected)
            late = Ear()
            other = RedisMembership(redis.url, "two", SystemClock())
            await other.start(late)
            try:
                await until(lambda: late.texts() == ear.texts())
            finally:
                await other.stop()
        finally:
            await store.stop()


@needs_redis
async def test_a_wrong_password_is_said_at_the_start() -> None:
    with RedisServer(password="right") as redis:
        wrong = RedisMembership(redis.url.replace("right", "wrong"), "one", SystemClock())
        with pytest.raises(ConfigError, match="Redis refuses us") as caught:
            await wrong.start(Ear())
        assert caught.value.field == "--cluster"
        assert "wrong" not in str(wrong)
        await wrong.stop()
        right = RedisMembership(redis.url, "one", SystemClock())
        await right.start(Ear())
        assert right.view().connected
        assert "right" not in right.view().address
        await right.stop()


@needs_redis
async def test_silent_members_expire_and_live_ones_stay(redis: RedisServer) -> None:
    import redis.asyncio as library

    clock = FakeClock(wall=SystemClock().wall())
    ear = Ear(alive={"heard"})
    store = RedisMembership(redis.url, "one", clock)
    await store.start(ear)
    try:
        async with library.from_url(redis.url) as client:
            keys = {name: f"sglang_ext:{{default}}:member:{name}" for name in ("heard", "silent", "gone")}
            for name in keys:
                intent = Intent.GONE if name == "gone" else Intent.STAY
                record = member(name, intent=intent)
                ear.roster.merge(record)
                store.publish(record)

            async def all_there() -> int:
                return int(await client.exists(*keys.values()))

            while await all_there() < 3:
                pass
            for key in keys.values():
                assert await client.pttl(key) > 0
            assert await client.pttl(keys["gone"]) > 10 * await client.pttl(keys["silent"])
            for name in ("heard", "silent"):
                await client.pexpire(keys[name], 5_000)
            clock.advance(SYNC_S)
            while await client.pttl(keys["heard"]) <= 5_000:
                pass
            assert await client.pttl(keys["silent"]) <= 5_000
            # The record has expired, its instance sends no heartbeats, and no router has just announced it:
            # it is not written again.
            await client.delete(keys["silent"], keys["heard"])
            clock.advance(1000.0)
            while not await client.exists(keys["heard"]):
                clock.advance(SYNC_S)
            assert not await client.exists(keys["silent"])
            assert "silent" in {m.instance for m in ear.roster}
    finally:
        await store.stop()


@needs_redis
async def test_rubbish_in_redis_does_no_harm(redis: RedisServer, make_shared: Make) -> None:
    import redis.asyncio as library

    async with library.from_url(redis.url) as client:
        base = "sglang_ext:{default}:"
        await client.sadd(f"{base}members", "a", "b", b"\xff\xfe")
        await client.set(f"{base}member:a", b"no record")
        await client.set(f"{base}member:b", b'99 {"instance": 5}')
        await client.sadd(f"{base}routers", "ghost", "liar")
        await client.set(f"{base}router:liar", b"[[[")
        await client.xadd(f"{base}events", {"x": "y"})
        await client.xadd(f"{base}sessions", {"s": b"\xff", "i": b"\xfe"})
        ear = Ear()
        store = make_shared("one")
        await store.start(ear)
        try:
            await client.xadd(f"{base}events", {"m": b"1 {}"})
            store.share_status(RouterStatus("one"))
            store.publish(member("a"))
            good = make_shared("two")
            other = Ear()
            await good.start(other)
            await until(lambda: other.roster.get("a") is not None)
            assert store.view().connected
            assert isinstance(store, RedisMembership)
            assert store.refused >= 2
            await good.stop()
        finally:
            await store.stop()


@needs_redis
async def test_streams_are_bounded(redis: RedisServer, make_shared: Make) -> None:
    import redis.asyncio as library

    store, ear = make_shared("one"), Ear()
    await store.start(ear)
    try:
        record = member("a")
        count = MAX_EVENTS // 8
        for round_ in range(16):
            for number in range(count):
                name = f"i{number}"
                store.publish(
                    msgspec.structs.replace(
                        record, instance=name, registration=None, stamp=record.stamp + round_ * count + number
                    )
                )
            last = record.stamp + round_ * count + count - 1
            async with library.from_url(redis.url) as client:
                while not (await client.get(f"sglang_ext:{{default}}:member:i{count - 1}") or b"").startswith(
                    str(last).encode()
                ):
                    pass
        async with library.from_url(redis.url) as client:
            assert await client.xlen("sglang_ext:{default}:events") < MAX_EVENTS + 200
    finally:
        await store.stop()


def test_an_address_shows_no_secret() -> None:
    assert address_of("redis://user:secret@host:6379/2?x=secret") == "redis://host:6379/2"
    assert address_of("unix://:secret@/run/redis.sock?db=1") == "unix:///run/redis.sock"

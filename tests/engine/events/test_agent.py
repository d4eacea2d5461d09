"""Agent and router over real sockets: the router's index follows a tree's changes at once, and messages that
are lost, late or of another epoch never make it wrong."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
import zmq
import zmq.asyncio
from agent_rig import BLOCK, KEY, NAME, PLAIN, Disk, Instance, until

from sglang_ext.clock import Clock, SystemClock
from sglang_ext.cluster_key import ClusterKey
from sglang_ext.engine.events import agent
from sglang_ext.engine.events.agent_socket import AgentSocket
from sglang_ext.errors import ConfigError
from sglang_ext.keys import Namespace, block_keys, encode_tokens, tenant_salt
from sglang_ext.protocol.agent import FROM_AGENT, TO_AGENT, Hello, Park, PeerDead, ToAgent, Welcome
from sglang_ext.protocol.cluster import HEARTBEAT_S, VERDICT_S
from sglang_ext.router.cluster.agent_link import Link
from sglang_ext.router.cluster.agents import Agents
from sglang_ext.router.index.index import Index
from sglang_ext.router.policies import Match
from sglang_ext.testing.fakes import FakeClock, Stopwatch
from sglang_ext.tiers import Tier


class Listener:
    def __init__(self) -> None:
        self.beats = 0
        self.silent = 0

    def on_heartbeat(self, name: str, epoch: str) -> None:
        self.beats += 1

    def on_silent(self, name: str) -> None:
        self.silent += 1


class Side:
    """The router's side."""

    def __init__(self, key: ClusterKey | None = None, clock: Clock | None = None) -> None:
        clock = clock or SystemClock()
        self.index = Index(clock, block_size=BLOCK)
        self.listener = Listener()
        self.agents = Agents(self.index, clock, router="r", key=key, listener=self.listener)

    def match(self, tokens: list[int], namespace: tuple[str | None, ...] = PLAIN) -> Match | None:
        return self.index.match(namespace, encode_tokens(tokens)).get(NAME)


@contextlib.asynccontextmanager
async def connected(
    instance: Instance, key: ClusterKey | None = None, clock: Clock | None = None
) -> AsyncIterator[Side]:
    side = Side(key, clock)
    try:
        side.agents.connect(NAME, instance.registration)
        yield side
    finally:
        await side.agents.close()
        instance.close()


@pytest.mark.parametrize("key", [None, KEY], ids=["loopback", "curve"])
async def test_a_router_knows_what_an_instance_holds(key: ClusterKey | None) -> None:
    instance = Instance(key=key)
    instance.insert([1] * 8)
    async with connected(instance, key) as side:
        await until(lambda: side.index.trusted(NAME), instance)
        assert side.match([1] * 12) == Match(8, own=True)
        instance.insert([1] * 8 + [2] * 4)
        instance.insert([1] * 8, instance.dram)
        await until(lambda: side.match([1] * 8 + [2] * 4 + [3]) == Match(12, own=True), instance)
        assert side.match([1] * 12) == Match(8, own=False)
        instance.tree.evict(instance.hbm, 2)
        await until(lambda: side.match([1] * 12) == Match(8, own=True, below={Tier.DRAM: 4}), instance)
        instance.feed.before_clear()
        instance.tree.drop_holder(instance.hbm)
        instance.tree.drop_holder(instance.dram)
        await until(lambda: side.match([1] * 12) is None, instance)
        assert side.index.trusted(NAME)
        side.index.check()
        await until(lambda: side.listener.beats > 1, instance)


OLD, NEW = b"the old key of the cluster, 0123456789", b"the new key of the cluster, 0123456789"


@pytest.mark.parametrize(
    ("instances", "routers"),
    [((OLD, NEW), (NEW, OLD)), ((NEW, OLD), (OLD, NEW)), ((OLD, NEW), (NEW,))],
    ids=["the router first", "the instance first", "the router has done"],
)
async def test_a_channel_outlives_a_change_of_keys(
    instances: tuple[bytes, ...], routers: tuple[bytes, ...]
) -> None:
    instance = Instance(key=ClusterKey(*instances))
    instance.insert([1] * 8)
    async with connected(instance, ClusterKey(*routers)) as side:
        await until(lambda: side.index.trusted(NAME), instance)
        assert side.match([1] * 12) == Match(8, own=True)


@pytest.mark.parametrize("cap", [3, 4, 5])
async def test_a_disk_with_more_names_than_a_snapshot_has_is_sent_in_part(
    cap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the router's index is marked incomplete, so that a missing block does not count as absent."""
    monkeypatch.setattr(agent, "SNAPSHOT_NAMES", cap * agent.NAMES_CHUNK)
    there = 4 * agent.NAMES_CHUNK
    instance = Instance(disk=Disk([number.to_bytes(16, "big") for number in range(there)]))
    async with connected(instance) as side:
        await until(lambda: side.index.trusted(NAME), instance)
        replica = side.index.replica(NAME)
        assert replica is not None
        assert replica.names == min(cap * agent.NAMES_CHUNK, there)
        assert replica.partial is (cap < 4)


async def test_tenants_do_not_match_each_other() -> None:
    instance = Instance()
    instance.insert([1] * 8, salt="one")
    async with connected(instance) as side:
        await until(lambda: side.index.trusted(NAME), instance)
        assert side.match([1] * 8, ("tokens", None, None, "one")) == Match(8, own=True)
        for other in (
            PLAIN,
            ("tokens", None, "one", None),
            ("tokens", "one", None, None),
            ("text", None, None),
        ):
            assert side.match([1] * 8, other) is None


async def test_a_disk_is_sent_by_name_and_found_after_memory() -> None:
    tokens = [5] * 16
    space = Namespace("m", "w0", "f32", "layout", "tp0of1", tenant_salt(None, "s"))
    names = block_keys(space.digest(), encode_tokens(tokens), BLOCK)
    instance = Instance(disk=Disk(names[:3] + [bytes([i]) * 16 for i in range(200)]))
    instance.insert(tokens[:4], salt="s")
    async with connected(instance) as side:
        await until(lambda: side.index.trusted(NAME), instance)
        mine = ("tokens", None, None, "s")
        assert side.match(tokens, mine) == Match(12, own=False, below={Tier.DISK: 8})
        assert side.match(tokens) is None
        instance.feed.queue.names_changed(Tier.DISK, [], names[2:3])
        await until(lambda: side.match(tokens, mine) == Match(8, own=False, below={Tier.DISK: 4}), instance)
        (gone,) = side.index.history(mine, encode_tokens(tokens))
        assert (gone.instance, gone.tier, gone.tokens) == (NAME, "disk", 12)
        instance.feed.weights_changed(1)
        await until(lambda: side.match(tokens, mine) is None, instance)


class GatedDisk(Disk):
    """Lists its names in the order given, one at a time, and the second and later ones when it may."""

    def __init__(self, names: list[bytes]) -> None:
        super().__init__([])
        self.names = names
        self.gate = threading.Event()

    def names_after(self, place: bytes, limit: int) -> tuple[list[bytes], bytes | None]:
        at = int(place or b"0")
        if at:
            assert self.gate.wait(10)
        return self.names[at : at + 1], b"%d" % (at + 1) if at + 1 < len(self.names) else None


async def test_a_partial_snapshot_is_used_while_the_rest_is_awaited() -> None:
    tokens = [5] * 16
    space = Namespace("m", "w0", "f32", "layout", "tp0of1", tenant_salt(None, None))
    disk = GatedDisk(block_keys(space.digest(), encode_tokens(tokens), BLOCK))
    instance = Instance(disk=disk)
    async with connected(instance) as side:
        assert side.index.awaited(NAME), "from the registration on"
        await until(lambda: side.match(tokens) == Match(4, own=False, below={Tier.DISK: 4}), instance)
        assert side.index.awaited(NAME)
        assert not side.index.trusted(NAME)
        disk.gate.set()
        await until(lambda: side.index.trusted(NAME), instance)
        assert not side.index.awaited(NAME)
        assert side.match(tokens) == Match(16, own=True, below={Tier.DISK: 16})


async def test_a_router_with_another_key_receives_nothing() -> None:
    instance = Instance(key=KEY)
    instance.insert([1] * 8)
    async with connected(instance, ClusterKey(b"another" * 8)) as side:
        await until(lambda: instance.agent.socket.port, instance)
        with pytest.raises(TimeoutError):
            await until(lambda: side.listener.beats, instance, seconds=1.5)
        assert not side.index.trusted(NAME)
        assert not instance.agent.stream.readers


async def test_a_silent_instance_is_not_trusted_and_a_restarted_one_known_anew() -> None:
    instance = Instance()
    instance.insert([1] * 8)
    async with connected(instance) as side:
        await until(lambda: side.index.trusted(NAME), instance)
        port = instance.agent.socket.port
        instance.close()
        with Stopwatch() as verdict:
            await until(lambda: side.listener.silent)
        assert verdict.seconds < VERDICT_S + 1
        assert not side.index.trusted(NAME)
        assert side.match([1] * 8) is None
        again = Instance(port=port)
        try:
            again.insert([2] * 8)
            side.agents.connect(NAME, again.registration)
            await until(lambda: side.index.trusted(NAME), again)
            assert side.match([1] * 8) is None
            assert side.match([2] * 8) == Match(8, own=True)
        finally:
            again.close()


async def test_a_channel_that_ends_late_says_nothing_of_the_one_that_replaced_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receive, may_end = Link._receive, asyncio.Event()

    async def ends_late(self: Link) -> None:
        try:
            await receive(self)
        finally:
            await may_end.wait()

    monkeypatch.setattr(Link, "_receive", ends_late)
    instance = Instance()
    async with connected(instance) as side:
        await until(lambda: side.index.trusted(NAME), instance)
        former = side.agents._links[NAME].task
        instance.close()
        again = Instance(port=instance.agent.socket.port)
        try:
            side.agents.connect(NAME, again.registration)
            assert not side.index.trusted(NAME)
            await until(lambda: side.index.trusted(NAME), again)
            may_end.set()
            await until(former.done, again)
            assert side.index.trusted(NAME)
        finally:
            may_end.set()
            again.close()


@pytest.mark.parametrize("router", ["the same", "another"])
async def test_what_comes_late_on_a_channel_that_was_made_anew_is_not_heard(
    router: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `Park` that the router has forgotten stops no request. The twin is another router's."""
    instance, came = Instance(), []
    receive = instance.agent.socket.receive

    def received() -> Iterator[tuple[bytes, ToAgent]]:
        for reader, message in receive():
            came.append(message)
            yield reader, message

    monkeypatch.setattr(instance.agent.socket, "receive", received)
    context = zmq.asyncio.Context()
    former, newer = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    try:
        for each, name in ((former, "the same"), (newer, router)):
            each.connect(instance.registration.agent)
            await each.send(TO_AGENT.encode(Hello(name)))
            assert isinstance(FROM_AGENT.decode(await each.recv()), Welcome)
        late, new = Park("late", "rid"), Park("new", "rid")
        await former.send(TO_AGENT.encode(Hello("the same")))
        await former.send(TO_AGENT.encode(late))
        await until(lambda: late in came)
        await newer.send(TO_AGENT.encode(new))
        await until(lambda: new in instance.said)
        two = router == "another"
        assert (late in instance.said) is two
        assert len(instance.agent.stream.readers) == 1 + two
    finally:
        former.close(linger=0)
        newer.close(linger=0)
        context.term()
        instance.close()


async def test_time_in_which_the_router_stands_still_is_no_silence() -> None:
    instance, clock = Instance(), FakeClock()
    instance.insert([1] * 8)
    async with connected(instance, clock=clock) as side:

        async def heard() -> bool:
            await clock.pass_time(0.01)
            return side.index.trusted(NAME)

        async with asyncio.timeout(10):
            while not await heard():
                instance.feed.publish()
                await asyncio.sleep(0.01)
        clock.advance(VERDICT_S + 1)
        await clock.pass_time(HEARTBEAT_S)
        assert not side.listener.silent
        assert side.index.trusted(NAME)
        instance.close()
        # Messages sent before may arrive in the middle of a silence, which then begins again, once.
        for _ in range(round(2 * (VERDICT_S + HEARTBEAT_S) / 0.5)):
            await clock.pass_time(0.5)
        assert side.listener.silent == 1


async def test_dropped_events_are_noticed_by_the_next_beat() -> None:
    instance = Instance()
    instance.insert([1] * 8)
    async with connected(instance) as side:
        await until(lambda: side.index.trusted(NAME), instance)
        instance.feed.queue._limit = 0
        instance.insert([2] * 8)
        instance.feed.publish()
        instance.feed.queue._limit = 100
        await until(lambda: side.match([2] * 8) == Match(8, own=True), instance)
        await until(lambda: side.index.trusted(NAME), instance)  # usable before the snapshot is complete
        assert side.agents.counters()[NAME].gaps == 1
        assert side.agents.counters()[NAME].snapshots == 2


async def test_a_reader_that_receives_nothing_delays_no_other() -> None:
    instance = Instance()
    context = zmq.asyncio.Context()
    deaf = context.socket(zmq.DEALER)
    deaf.setsockopt(zmq.RCVHWM, 1)
    deaf.setsockopt(zmq.RCVBUF, 4096)
    deaf.connect(instance.registration.agent)
    try:
        async with connected(instance) as side:
            await until(lambda: side.index.trusted(NAME), instance)
            await deaf.send(TO_AGENT.encode(Hello("deaf")))
            assert isinstance(FROM_AGENT.decode(await deaf.recv()), Welcome)
            prompts = 400
            for start in range(prompts):
                instance.insert([start, *range(40_000)])
                instance.feed.publish()
                if start % 50 == 49:
                    tokens = [start, *range(40_000)]
                    await until(lambda tokens=tokens: side.match(tokens) is not None, instance)
            await until(lambda: len(instance.agent.stream.readers) == 1, instance, seconds=20)
            assert side.agents.counters()[NAME].gaps == 0
            side.index.check()
    finally:
        deaf.close(linger=0)
        context.term()


async def test_routers_pass_on_that_an_instance_died() -> None:
    instance = Instance()
    async with connected(instance) as side:
        await until(lambda: side.index.trusted(NAME), instance)
        side.agents.peer_dead("a", "00" * 16)  # that is itself
        side.agents.peer_dead("b", "01" * 16)
        await until(lambda: instance.said, instance)
        assert instance.said == [PeerDead("b", b"\1" * 16)]


async def test_what_is_no_message_is_counted() -> None:
    instance = Instance()
    context = zmq.asyncio.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(instance.registration.agent)
    try:
        for frames in ([b"x"], [b"", b""], [b"\xff" * 1000]):
            await stranger.send_multipart(frames)
        await until(lambda: instance.agent.socket.refused == 3)
    finally:
        stranger.close(linger=0)
        context.term()
        instance.close()


def test_nothing_listens_beyond_loopback_without_a_key() -> None:
    with pytest.raises(ConfigError, match="--kv-cluster-key-file"):
        AgentSocket("0.0.0.0", (0,), None)

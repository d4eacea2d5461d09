"""KV events as SGLang itself writes and publishes them, followed by the router."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq
import zmq.asyncio
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from sglang_ext.keys import encode_tokens
from sglang_ext.radix_global import RadixTree
from sglang_ext.radix_global.sync.replica import Outcome
from sglang_ext.router.cluster.stock_links import StockLink
from sglang_ext.router.fleet.facts import EventSource
from sglang_ext.router.index import stock_replica as ours
from sglang_ext.router.index.index import Index
from sglang_ext.router.policies.base import Role
from sglang_ext.testing.fakes import FakeClock
from sglang_ext.testing.waiting import until
from tests.support.servers.ports import free_port

ENCODE = msgspec.msgpack.Encoder().encode
BLOCK = 4


def test_every_field_is_read_as_it_was_written() -> None:
    theirs = [
        BlockStored([-5, 2**63 - 1], None, [1, 2, 3, 4], 2, None, "GPU", "salt", "session"),
        BlockStored([7], 9, [5, 6], 2, 3, None),
        BlockRemoved([-5], "CPU_PINNED"),
        BlockRemoved([7]),
        AllBlocksCleared(),
    ]
    batch = ours.DECODER.decode(ENCODE(KVEventBatch(ts=1.5, events=theirs, attn_dp_rank=0)))
    assert (batch.ts, batch.attn_dp_rank) == (1.5, 0)
    assert batch.events == [
        ours.BlockStored([-5, 2**63 - 1], None, [1, 2, 3, 4], 2, None, "GPU", "salt"),
        ours.BlockStored([7], 9, [5, 6], 2, 3, None, None),
        ours.BlockRemoved([-5], "CPU_PINNED"),
        ours.BlockRemoved([7], None),
        ours.AllBlocksCleared(),
    ]
    known = {field.name for field in msgspec.structs.fields(ours.BlockStored)} | {"session_id"}
    written = {field.name for field in msgspec.structs.fields(BlockStored)}
    assert written | {"lora_name"} == known, "a version of SGLang may lack the name of adapters"


def node(parent: TreeNode | None, tokens: list[int], salt: str | None = None) -> TreeNode:
    """A node of SGLang's tree with pages of 2 tokens, whose names are made up: SGLang compiles its hash."""
    made = TreeNode()
    made.parent, made.key = parent, RadixKey(tokens, None, cache_salt=salt)
    names = [f"{made.id:08x}{at:08x}" + 48 * "0" for at in range(0, len(tokens), 2)]
    made.hash_value = made.event_hash_value = names
    return made


def test_what_sglang_records_of_its_own_nodes_is_what_is_known() -> None:
    recorder = KVCacheEventRecorder(enabled=True, page_size=2)
    root = node(None, [])
    trunk, other = node(root, list(range(10))), node(root, list(range(10)), "salt")
    branch = node(trunk, list(range(20, 26)))
    for new in (trunk, branch, other):
        recorder.record_store(new)
    tree = RadixTree(BLOCK)
    replica = ours.StockReplica(tree, "s")
    replica.began()

    def known(salt: str | None = None) -> int:
        found = tree.holders((None, salt), encode_tokens([*range(10), *range(20, 26)]))
        return found.get(replica.holder, 0)

    def tell() -> None:
        events = recorder.take()
        assert replica.take(replica.next, ENCODE(KVEventBatch(ts=0.0, events=events))) is Outcome.APPLIED
        assert replica.bad == 0
        replica.check()

    tell()
    assert (known(), known("salt")) == (16, 8)
    recorder.record_remove(branch)
    tell()
    assert (known(), known("salt")) == (8, 8)
    recorder.record_all_cleared()
    tell()
    assert (known(), known("salt"), replica.pages) == (0, 0, 0)


# -- followed over ZeroMQ ---------------------------------------------------------------------------------


class Publisher:
    """SGLang's own publisher, and the events published through it."""

    def __init__(self, ports: tuple[int, int], *, buffer_steps: int = 1000) -> None:
        self._ends = [f"tcp://*:{port}" for port in ports]
        self._steps = buffer_steps
        self._names = iter(range(1, 100_000))
        self._open = self._start()

    def _start(self) -> ZmqEventPublisher:
        self._context = zmq.Context()
        with pytest.MonkeyPatch.context() as patch:
            # Else it is the process's, in which others may have sockets.
            patch.setattr(zmq.Context, "instance", classmethod(lambda _: self._context))
            made = ZmqEventPublisher(0, self._ends[0], self._ends[1], self._steps, topic="kv")
        atexit.unregister(made.shutdown)
        return made

    def _end(self) -> None:
        """Its own `shutdown` closes the sockets after a second, whether its thread uses them or not."""
        self._open._running = False
        self._open._event_queue.put(None)
        self._open._thread.join()
        for socket in (self._open._pub, self._open._replay):
            assert socket is not None
            socket.close(linger=0)
        self._context.term()  # only then are its ports free

    def store(self, first: int) -> list[int]:
        """A prompt of one block of its own."""
        tokens = list(range(first, first + BLOCK))
        names = [next(self._names) for _ in tokens]
        self._open.publish(KVEventBatch(ts=0.0, events=[BlockStored(names, None, tokens, 1, None, "GPU")]))
        return tokens

    def publish_all(self) -> None:
        """Wait until its thread has sent all events: earlier subscribers receive them live."""
        self._open._event_queue.join()

    def restart(self) -> None:
        """Another process, with an empty cache, at the same address."""
        self._end()
        self._open = self._start()

    def close(self) -> None:
        self._end()


class Following:
    """A publisher and a link to it."""

    def __init__(self, *, replay: bool = True, buffer_steps: int = 1000) -> None:
        self.ports = free_port(), free_port()
        self.publisher = Publisher(self.ports, buffer_steps=buffer_steps)
        self.index = Index(FakeClock(), block_size=BLOCK)
        self._context = zmq.asyncio.Context()
        here = [f"tcp://127.0.0.1:{port}" for port in self.ports]
        self._source = EventSource(here[0], here[1] if replay else None, "kv")
        self.link: StockLink | None = None

    def follow(self) -> ours.StockReplica:
        """Begin to listen."""
        replica = self.index.attach_stock("s", Role.COLOCATED)
        self.link = StockLink(self._context, self.index, "s", self._source, "process", replica, keep_up_s=0.1)
        return replica

    def known(self, tokens: list[int]) -> int:
        match = self.index.match(("tokens", None, None, None), encode_tokens(tokens)).get("s")
        return 0 if match is None else match.tokens

    async def knows(self, *prompts: list[int]) -> None:
        """Wait until the index has every prompt, of an instance that is trusted."""
        await until(
            lambda: self.index.trusted("s") and all(self.known(tokens) for tokens in prompts), 20, "events"
        )

    async def close(self) -> None:
        if self.link is not None:
            self.link.task.cancel()
            await asyncio.gather(self.link.task, return_exceptions=True)
        self._context.term()
        await asyncio.to_thread(self.publisher.close)
        self.index.check()


@pytest.fixture
async def following() -> AsyncIterator[Following]:
    made = Following()
    yield made
    await made.close()


async def test_what_was_published_before_is_asked_for_and_what_comes_is_taken(following: Following) -> None:
    before = following.publisher.store(0)
    replica = following.follow()
    assert following.index.awaited("s")
    await following.knows(before)
    assert not following.index.awaited("s")
    await following.knows(before, following.publisher.store(100))
    assert (replica.partial, replica.lost_count) == (False, 0)


async def test_what_is_lost_on_the_way_is_asked_for_again(following: Following) -> None:
    replica = following.follow()
    await following.knows(following.publisher.store(0))
    assert following.link is not None
    take, lost = following.link._published, []

    def loses(number: int, payload: bytes) -> None:
        if len(lost) < 2:
            lost.append(number)
        else:
            take(number, payload)

    following.link._published = loses  # type: ignore[method-assign]
    await following.knows(*(following.publisher.store(first) for first in (100, 200, 300)))
    assert len(lost) == 2
    assert (replica.partial, replica.lost_count) == (False, 0)


async def test_a_server_that_was_started_anew_has_nothing_of_what_it_had(following: Following) -> None:
    replica = following.follow()
    old = [following.publisher.store(first) for first in (0, 100, 200)]
    await following.knows(*old)
    await asyncio.to_thread(following.publisher.restart)
    # It sends nothing by itself: the follower requests the last batch, which the new process does not have.
    await until(lambda: not any(map(following.known, old)) and following.index.trusted("s"), 20, "a restart")
    await following.knows(following.publisher.store(300))
    assert not any(map(following.known, old))
    assert not replica.partial


async def test_forgotten_events_are_dropped_and_the_rest_is_partial() -> None:
    following = Following(buffer_steps=2)
    try:
        old = [following.publisher.store(first) for first in (0, 100, 200, 300)]
        await asyncio.to_thread(following.publisher.publish_all)
        replica = following.follow()
        await following.knows(*old[2:])
        assert not any(map(following.known, old[:2]))
        assert replica.partial
        assert following.index.learns_of(("tokens", None, None, None), "s")
    finally:
        await following.close()


async def test_without_a_replay_socket_what_is_heard_is_taken_and_the_rest_believed() -> None:
    following = Following(replay=False)
    try:
        replica = following.follow()
        told: list[list[int]] = []

        def heard() -> bool:
            told.append(following.publisher.store(100 * len(told)))
            return bool(replica.batches)

        await until(heard, 20, "a subscription")
        await following.knows(told[-1])
        if replica.next != len(told):
            pytest.fail(f"{replica!r} after {len(told)} batches")
        assert replica.partial == (replica.batches < len(told))
    finally:
        await following.close()


async def test_garbage_on_the_line_changes_nothing_but_trust(following: Following) -> None:
    replica = following.follow()
    known = following.publisher.store(0)
    await following.knows(known)
    assert following.link is not None
    following.link._published(replica.next, b"\xc1 garbage")
    assert (replica.bad, replica.partial, following.known(known)) == (1, True, 0)
    await until(lambda: following.index.trusted("s"), 20, "to go on")
    await following.knows(following.publisher.store(100), following.publisher.store(200))

"""Commands reach the scheduler's thread in order and wake it; hints become prefetches, bad ones nothing."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import select
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from engine_simulation import SCENARIOS, Rank
from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput, PauseGenerationReqInput
from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
from sglang.utils import TypeBasedDispatcher

from sglang_ext.engine.commands import MOST_WAITING, Command, RankCommandQueue
from sglang_ext.engine.events.router_commands import RouterCommands
from sglang_ext.engine.pd.messages import RANK_COMMANDS
from sglang_ext.engine.prefetch.advice import Advice
from sglang_ext.engine.prefetch.hbm_prefetch import PrefetchEnd, PrefetchResult
from sglang_ext.keys import encode_tokens
from sglang_ext.patches.adapter.command import KvCommand
from sglang_ext.patches.hooks import messages as commands
from sglang_ext.patches.process import PROCESS
from sglang_ext.protocol.agent import TO_AGENT, Advise, Advised, Ping, Withdraw


@pytest.fixture
def command_queue() -> Iterator[RankCommandQueue]:
    made = RankCommandQueue(clock=lambda: 7.0)
    yield made
    with contextlib.suppress(OSError):
        made.close()


def readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def test_commands_come_in_their_order(command_queue: RankCommandQueue) -> None:
    for number in range(5):
        assert command_queue.put(b"%d" % number)
    assert [command.payload for command in command_queue.take()] == [b"0", b"1", b"2", b"3", b"4"]
    assert command_queue.take() == []


def test_nothing_is_lost_between_threads(command_queue: RankCommandQueue) -> None:
    def put(first: int) -> None:
        for number in range(first, first + 500):
            command_queue.put(b"%d" % number)

    threads = [threading.Thread(target=put, args=(1000 * each,)) for each in range(4)]
    for thread in threads:
        thread.start()
    taken: list[bytes] = []
    while any(thread.is_alive() for thread in threads):
        taken += [command.payload for command in command_queue.take()]
    for thread in threads:
        thread.join()
    taken += [command.payload for command in command_queue.take()]
    numbers = [int(payload) for payload in taken]
    assert sorted(numbers) == [1000 * each + i for each in range(4) for i in range(500)]
    for each in range(4):
        own = [number for number in numbers if number // 1000 == each]
        assert own == sorted(own)


def test_a_command_wakes_until_it_was_seen(command_queue: RankCommandQueue) -> None:
    assert not readable(command_queue.fd)
    command_queue.put(b"x")
    assert readable(command_queue.fd)
    command_queue.slept()
    assert not readable(command_queue.fd)
    command_queue.slept()


def test_a_loop_that_stands_still_does_not_fill_the_memory(command_queue: RankCommandQueue) -> None:
    assert all(command_queue.put(b"") for _ in range(MOST_WAITING))
    assert not command_queue.put(b"")
    command_queue.take()
    assert command_queue.put(b"")


def test_the_time_comes_once_when_something_expires(command_queue: RankCommandQueue) -> None:
    assert command_queue.take() == []
    command_queue.broadcast_time_at(7.5)
    assert command_queue.take() == []
    command_queue.broadcast_time_at(7.0)
    assert command_queue.take() == [Command(b"", 7.0)]
    assert command_queue.take() == []
    command_queue.broadcast_time_at(6.0)
    command_queue.put(b"x")
    assert command_queue.take() == [Command(b"x", 7.0), Command(b"", 7.0)]
    assert command_queue.take() == []


def test_a_command_survives_the_way_over_the_ranks() -> None:
    """SGLang broadcasts with pickle: the received command must equal the sent one."""
    command = KvCommand(payload=bytes(range(256)))
    assert pickle.loads(pickle.dumps([command])) == [command]


# -- hooks ------------------------------------------------------------------------------------------


@dataclass
class Cache:
    obeyed: list[bytes] = field(default_factory=list)

    @property
    def commands(self) -> Cache:
        return self

    def handle(self, payload: bytes, at: float) -> None:
        if payload == b"bad":
            raise RuntimeError("a fault of ours")
        self.obeyed.append(payload)


@pytest.fixture
def hooked(command_queue: RankCommandQueue, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Cache]:
    cache = Cache()
    scheduler = SimpleNamespace(tree_cache=cache, _request_dispatcher=TypeBasedDispatcher([]))
    monkeypatch.setattr(PROCESS, "commands", command_queue)
    monkeypatch.setattr(PROCESS, "cache", cache)
    commands.after_dispatcher(None, scheduler)
    return scheduler, cache


def test_commands_precede_what_sglang_received(
    command_queue: RankCommandQueue, hooked: tuple[Any, Cache]
) -> None:
    command_queue.put(b"one")
    requests: list[Any] = ["a request"]
    commands.after_pull(requests, None)
    assert requests == [KvCommand(payload=b"one", at=7.0), "a request"]
    commands.after_pull(None, None)  # a rank that gets its requests from other ranks


def test_with_dp_attention_a_command_goes_to_the_ranks_of_its_replica() -> None:
    """SGLang sends ``control`` of the first replica to all, and drops that of the others."""
    receiver: Any = object.__new__(SchedulerRequestReceiver)
    pause, command = PauseGenerationReqInput(), KvCommand(payload=b"one", at=7.0)
    request = BatchTokenizedGenerateReqInput(batch=[])
    received: list[Any] = [command, request, pause]
    work, control = commands.after_split(receiver._split_work_and_control_reqs(received), receiver, received)
    assert (work, control) == ([command, request], [pause])


def test_a_command_goes_to_the_cache_and_has_no_reply(hooked: tuple[Any, Cache]) -> None:
    scheduler, cache = hooked
    assert scheduler._request_dispatcher(KvCommand(payload=b"one")) is None
    assert cache.obeyed == [b"one"]


def test_a_fault_of_a_command_does_not_end_the_scheduler(
    hooked: tuple[Any, Cache], caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, cache = hooked
    assert scheduler._request_dispatcher(KvCommand(payload=b"bad")) is None
    assert "a fault of ours" in caplog.text
    assert cache.obeyed == []


def test_another_cache_than_ours_receives_no_command(hooked: tuple[Any, Cache]) -> None:
    scheduler, cache = hooked
    scheduler.tree_cache = object()
    assert scheduler._request_dispatcher(KvCommand(payload=b"one")) is None
    assert cache.obeyed == []


def test_a_command_wakes_an_idle_scheduler(
    command_queue: RankCommandQueue, hooked: tuple[Any, Cache]
) -> None:
    import zmq

    scheduler, _ = hooked
    scheduler.idle_sleeper = SimpleNamespace(poller=zmq.Poller())
    commands.before_sleep(scheduler)
    assert scheduler.idle_sleeper.poller.poll(0) == []
    command_queue.put(b"x")
    assert scheduler.idle_sleeper.poller.poll(0) != []
    commands.before_sleep(scheduler)
    assert scheduler.idle_sleeper.poller.poll(0) == []
    del scheduler.idle_sleeper
    commands.before_sleep(scheduler)  # a scheduler that does not sleep


# -- hints ------------------------------------------------------------------------------------------


@dataclass
class Bringer:
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    ended: list[PrefetchResult] = field(default_factory=list)

    def expect(self, id: str, tokens: bytes, **terms: Any) -> None:
        self.asked.append(("expect", id, tokens, *terms.values()))

    def prefetch(self, id: str, tokens: bytes, **terms: Any) -> None:
        self.asked.append(("prefetch", id, tokens, *terms.values()))

    def cancel(self, id: str) -> bool:
        self.asked.append(("cancel", id))
        return True

    def take_ended(self) -> list[PrefetchResult]:
        ended, self.ended = self.ended, []
        return ended


def test_a_hint_becomes_a_prefetch_in_the_tenants_namespace() -> None:
    brings = Bringer()
    tokens = encode_tokens([1, 2, 3])
    advice = Advice(brings)
    hint = Advise("h1", tokens, extra_key="lora", cache_salt="tenant", priority=3, ttl_s=7.0, earliest_s=2.5)
    advice.handle_command(hint, 100.0)
    advice.handle_command(Withdraw("h1"), 101.0)
    assert brings.asked == [("prefetch", "h1", tokens, "lora", "tenant", 3, 107.0, 102.5), ("cancel", "h1")]
    advice.priority_sign = -1
    advice.handle_command(hint, 102.0)
    assert brings.asked[-1] == ("prefetch", "h1", tokens, "lora", "tenant", -3, 109.0, 104.5)


@pytest.mark.parametrize("payload", [b"", b"\xc1", os.urandom(64), TO_AGENT.encode(Ping("router"))])
def test_bytes_that_are_no_command_change_nothing_but_the_time(payload: bytes) -> None:
    """Rank 0's time comes with every command, and alone, as no bytes."""
    with closing(Rank(SCENARIOS[0], routed=True, takes_hints=True)) as rank:
        advice = rank.cache.find(Advice)
        assert advice is not None
        rank.cache.commands.handle(RANK_COMMANDS.encode(Advise("h", encode_tokens([1] * 64), ttl_s=7.0)), 5.0)
        assert advice._brings.retention.next_expiry == 12.0
        rank.cache.commands.handle(payload, 13.0)
        assert advice._brings.retention.next_expiry == math.inf


def test_an_ended_hint_is_reported_once_and_by_rank_0_only() -> None:
    result = PrefetchResult("h1", PrefetchEnd.DONE, 64, 32)
    brings = Bringer(ended=[result])
    results: list[PrefetchResult] = []
    advice = Advice(brings, results.append)
    advice.each_pass()
    advice.each_pass()
    assert results == [result]
    silent = Bringer(ended=[result])
    Advice(silent).each_pass()
    assert silent.ended == []


def test_what_came_of_a_hint_goes_to_the_router_that_gave_it(command_queue: RankCommandQueue) -> None:
    posted: list[tuple[bytes, Any]] = []
    routers = RouterCommands(
        command_queue, bytes(16), lambda reader, message: posted.append((reader, message))
    )
    routers.receive(b"one", Advise("h1", b"", ttl_s=1.0))
    routers.receive(b"two", Advise("h2", b""))
    routers.receive(b"two", Ping("two"))
    assert [TO_AGENT.decode(command.payload).id for command in command_queue.take()] == ["h1", "h2"]  # type: ignore[union-attr]
    routers.reply_to_hint(PrefetchResult("h2", PrefetchEnd.NO_ROOM, 64, 32))
    routers.reply_to_hint(PrefetchResult("h2", PrefetchEnd.DONE, 64, 32))
    routers.reply_to_hint(PrefetchResult("unknown", PrefetchEnd.DONE, 64, 32))
    assert posted == [(b"two", Advised(bytes(16), "h2", "no_room", 64, 32))]


def test_a_hint_that_is_being_computed_is_reported_again_at_its_end(command_queue: RankCommandQueue) -> None:
    posted: list[Any] = []
    routers = RouterCommands(command_queue, bytes(16), lambda reader, message: posted.append(message))
    routers.receive(b"one", Advise("h1", b"", ttl_s=1.0))
    routers.reply_to_hint(PrefetchResult("h1", PrefetchEnd.COMPUTING, 32, 32))
    routers.reply_to_hint(PrefetchResult("h1", PrefetchEnd.COMPUTED, 64, 32, computed=32))
    assert posted == [
        Advised(bytes(16), "h1", "computing", 32, 32),
        Advised(bytes(16), "h1", "computed", 64, 32, 32),
    ]


@dataclass
class Computer:
    takes_all: bool = True
    taken: list[tuple[Any, ...]] = field(default_factory=list)

    def takes(self, *what: Any) -> bool:
        self.taken.append(what)
        return self.takes_all

    def cancel(self, id: str) -> None:
        self.taken.append(("cancel", id))


def test_what_was_brought_goes_on_with_what_is_to_be_computed() -> None:
    brings, computer = Bringer(), Computer()
    results: list[PrefetchResult] = []
    advice = Advice(brings, results.append, rest=[computer])
    tokens = encode_tokens([1, 2, 3])
    advice.handle_command(Advise("h1", tokens, cache_salt="tenant", priority=2), 0.0)
    brings.ended = [
        PrefetchResult("h1", PrefetchEnd.DONE, 0, 0),
        PrefetchResult("h2", PrefetchEnd.DONE, 0, 0),
    ]
    advice.each_pass()
    assert [(result.id, result.end.value) for result in results] == [("h1", "computing"), ("h2", "done")]
    assert computer.taken == [(PrefetchResult("h1", PrefetchEnd.DONE, 0, 0), tokens, None, "tenant", 2)]
    advice.handle_command(Withdraw("h1"), 0.0)
    assert computer.taken[-1] == ("cancel", "h1")


def test_a_hint_that_the_queue_cannot_take_is_answered(command_queue: RankCommandQueue) -> None:
    posted: list[Any] = []
    routers = RouterCommands(command_queue, bytes(16), lambda reader, message: posted.append(message))
    for _ in range(MOST_WAITING):
        command_queue.put(b"")
    routers.receive(b"one", Advise("h1", b""))
    assert posted == [Advised(bytes(16), "h1", "dropped", 0, 0)]

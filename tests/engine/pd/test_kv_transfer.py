"""SGLang's sender and receiver over agents: the order of its queues' calls, and the states that they see."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pd_rig import METADATA, Rig, rig
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError

from sglang_ext.disagg.handover import ReceiverState, SenderState
from sglang_ext.engine.forward_fence import nothing_runs
from sglang_ext.mempool.ledger import Call
from sglang_ext.mempool.store import Store
from sglang_ext.patches.adapter.pd import kv_requests
from sglang_ext.patches.adapter.pd.kv_hooks import match_on_decode
from sglang_ext.patches.adapter.pd.kv_requests import GlobalKVReceiver, GlobalKVSender
from sglang_ext.radix_global import RadixTree

NUMBERS = itertools.count(1)
ROW = bytes(range(METADATA))


@dataclass
class Manager:
    """The members of a manager that senders and receivers use."""

    agent: Any
    pushes: bool = False
    migration: Any = None
    store: Store = field(default_factory=lambda: Store(RadixTree(16)))
    page_bytes: int = 10
    fence: Any = lambda: nothing_runs
    kv_args: Any = field(default_factory=lambda: SimpleNamespace(page_size=4))
    buffers: Any = field(default_factory=lambda: SimpleNamespace(read=lambda row: ROW))
    beside: Any = field(default=lambda indices: ())


@pytest.fixture(params=["pull", "push"])
def servers(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with rig(mode=request.param) as found:
        yield found


def managers(servers: Rig) -> tuple[Manager, Manager]:
    prefill, decode = servers.prefill[0].agent, servers.decode[0].agent
    pushes = prefill.config.local.mode == "push"
    return Manager(prefill, pushes), Manager(decode, pushes)


def both(servers: Rig) -> tuple[GlobalKVSender, GlobalKVReceiver]:
    """A request at both servers, as their queues begin it."""
    prefill, decode = managers(servers)
    number = next(NUMBERS)
    sender = GlobalKVSender(prefill, "unused", number, [0], 0)
    receiver = GlobalKVReceiver(decode, servers.address, number)
    assert receiver.poll() == KVPoll.Bootstrapping
    receiver.init(0)
    return sender, receiver


def until(servers: Rig, poller: GlobalKVSender | GlobalKVReceiver, state: int) -> None:
    servers.wait(lambda: poller.poll() == state, f"{state}, not {poller.poll()}")


def compute(sender: GlobalKVSender, pages: list[int], chunks: int = 2) -> None:
    """SGLang's calls for a request that is computed in chunks."""
    skip = sender.pop_decode_prefix_len() // 4
    pages = pages[skip:]
    sender.init(len(pages), 3)
    parts = np.array_split(np.array(pages, np.int32), chunks)
    for at, part in enumerate(parts):
        if sender.should_send_kv_chunk(len(part), at == chunks - 1):
            sender.send(part)


@pytest.mark.parametrize("prefix", [0, 4])
def test_a_request_goes_through_the_states_that_sglangs_queues_wait_for(servers: Rig, prefix: int) -> None:
    sender, receiver = both(servers)
    here, there = [5, 3, 9], [40, 2, 7]
    lacking = np.array(there[prefix // 4 :], np.int32)
    if sender.kv_mgr.pushes:
        assert sender.poll() == KVPoll.Bootstrapping, "prefill waits for decode's slots"
        until(servers, receiver, KVPoll.WaitingForInput)
        receiver.send_metadata(lacking, 1, decode_prefix_len=prefix)
        assert receiver.poll() == KVPoll.Transferring
        until(servers, sender, KVPoll.WaitingForInput)
        assert sender.pop_decode_prefix_len() == prefix
        compute(sender, here)
    else:
        assert sender.poll() == KVPoll.WaitingForInput, "prefill computes at once"
        assert sender.pop_decode_prefix_len() == 0
        compute(sender, here)
        assert sender.poll() == KVPoll.Transferring
        until(servers, receiver, KVPoll.WaitingForInput)
        receiver.send_metadata(lacking, 1, decode_prefix_len=prefix)
    until(servers, receiver, KVPoll.Success)
    assert receiver.kv_mgr.store.calls == dict.fromkeys(Call, 0) | {Call.TRANSFER: 1}
    until(servers, sender, KVPoll.Success)
    taken, given = servers.decode[0], servers.prefill[0]
    assert np.array_equal(given.kv(here[prefix // 4 :], 4), taken.kv(lacking.tolist(), 4))
    assert taken.rows.written == {1: ROW}
    for end in (sender, receiver):
        end.clear()
    # SGLang may have the result before the task is over.
    servers.wait(lambda: given.agent.sender.live == taken.agent.receiver.live == 0, "the tasks' ends")


def test_a_request_that_leaves_another_decode_server_is_read_whatever_the_mode(servers: Rig) -> None:
    _, decode = managers(servers)
    number = next(NUMBERS)
    decode.migration = SimpleNamespace(target=SimpleNamespace(comes_over=lambda asked: asked == number))
    source, here = servers.prefill[0], servers.decode[0]
    handover = source.agent.sender.open(number, read=True)
    source.agent.sender.complete(handover, np.array([5, 3, 9]), ROW)
    receiver = GlobalKVReceiver(decode, servers.address, number)
    receiver.init(0)
    until(servers, receiver, KVPoll.WaitingForInput)
    assert handover.state is SenderState.OFFERED
    receiver.send_metadata(np.array([2, 7], np.int32), 1, decode_prefix_len=4)
    until(servers, receiver, KVPoll.Success)
    servers.wait(lambda: handover.state is SenderState.RELEASED, "the release")
    assert np.array_equal(source.kv([3, 9], 4), here.kv([2, 7], 4))
    assert here.rows.written == {1: ROW}


def test_a_failure_has_freed_everything_when_sglang_learns_of_it(servers: Rig) -> None:
    sender, receiver = both(servers)
    sender.abort()
    assert sender.poll() == KVPoll.Failed
    with pytest.raises(KVTransferError, match="aborted on prefill"):
        sender.failure_exception()
    if sender.kv_mgr.pushes:
        receiver.abort()  # it has not asked for the hand-over yet
    until(servers, receiver, KVPoll.Failed)
    with pytest.raises(KVTransferError):
        receiver.failure_exception()
    assert receiver.handover is not None
    assert receiver.handover.stopped.wait(30)


def test_an_abort_ends_a_request_whose_kv_has_come_and_whom_sglang_has_not_asked_since(servers: Rig) -> None:
    sender, receiver = both(servers)
    here, there = [5, 3, 9], np.array([40, 2, 7], np.int32)
    if sender.kv_mgr.pushes:
        until(servers, receiver, KVPoll.WaitingForInput)
        receiver.send_metadata(there, 1)
        until(servers, sender, KVPoll.WaitingForInput)
    compute(sender, here)
    if not sender.kv_mgr.pushes:
        until(servers, receiver, KVPoll.WaitingForInput)
        receiver.send_metadata(there, 1)
    assert receiver.handover is not None
    servers.wait(lambda: receiver.handover.state is ReceiverState.HELD, "the KV")
    receiver.abort()
    assert receiver.poll() == KVPoll.Failed
    with pytest.raises(KVTransferError, match="aborted on decode"):
        receiver.failure_exception()
    until(servers, sender, KVPoll.Success)


def test_a_receiver_that_is_aborted_before_it_began(servers: Rig) -> None:
    _, decode = managers(servers)
    receiver = GlobalKVReceiver(decode, servers.address, next(NUMBERS))
    receiver.abort()
    assert receiver.poll() == KVPoll.Failed
    with pytest.raises(KVTransferError, match="aborted"):
        receiver.failure_exception()


def test_a_handover_that_is_in_use_fails_its_second_request_only(servers: Rig) -> None:
    prefill, _ = managers(servers)
    number = next(NUMBERS)
    first = GlobalKVSender(prefill, "unused", number, [0], 0)
    second = GlobalKVSender(prefill, "unused", number, [0], 0)
    assert second.poll() == KVPoll.Failed
    with pytest.raises(KVTransferError, match="in use"):
        second.failure_exception()
    assert first.poll() != KVPoll.Failed
    first.abort()


def test_every_state_has_a_poll() -> None:
    assert set(kv_requests._SENDER_POLL) == set(SenderState)
    assert set(kv_requests._RECEIVER_POLL) == set(ReceiverState)
    # Slots that a transport may use are never given back.
    assert kv_requests._RECEIVER_POLL[ReceiverState.STOPPING] == KVPoll.Transferring


def test_another_cache_is_matched_as_sglang_does() -> None:
    queue = SimpleNamespace(tree_cache=object())
    assert match_on_decode(lambda queue, req: (queue, req), queue, "req") == (queue, "req")

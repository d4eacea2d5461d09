"""Slots to which a forward pass under way still stores: no other writer may use them before it ends."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pd_rig import METADATA, Rig, Side, rig

from sglang_ext.disagg.handover import ReceiverState
from sglang_ext.engine.forward_fence import ForwardFence, nothing_runs
from sglang_ext.engine.pd.landing import Wanted
from sglang_ext.engine.pd.receiving_handover import ReceivingHandover
from sglang_ext.engine.pd.sending_handover import SendingHandover
from sglang_ext.patches.adapter.pd.kv_requests import GlobalKVReceiver

ROWS = bytes(range(METADATA))
NUMBERS = itertools.count(1)
OLD = -7.0
HERE, THERE = [5, 3, 9], [40, 2, 7]


class GatedPass:
    """Forward pass k-1 over a request that has ended: it stores that one's KV when the test lets it."""

    def __init__(self, side: Side, pages: list[int], page: int) -> None:
        self._planes = side.planes
        self._slots = (np.asarray(pages)[:, None] * page + np.arange(page)).ravel()
        self._ended = False
        self.looks = 0

    def go(self) -> None:
        for (layer, _), plane in self._planes.items():
            if layer:  # the first layer was through when the slots were freed
                plane[self._slots] = OLD
        self._ended = True

    def passed(self) -> bool:
        self.looks += 1
        return self._ended


def open_both(servers: Rig) -> tuple[SendingHandover, ReceivingHandover]:
    """A request has come to both servers."""
    number = next(NUMBERS)
    given = servers.prefill[0].agent.sender.open(number)
    return given, servers.decode[0].agent.receiver.open(servers.address, number)


def compute(servers: Rig, given: SendingHandover, taken: ReceivingHandover) -> None:
    """Prefill's scheduler computes; when pushing, as soon as it has decode's slots."""
    sender = servers.prefill[0].agent.sender
    if not taken.read:
        servers.wait(lambda: given.granted() is not None, "decode's slots")
    sender.complete(given, np.array(HERE), ROWS)
    if taken.read:
        servers.wait(lambda: taken.state is ReceiverState.READY, "an offer")


@pytest.mark.parametrize("fenced", [True, False], ids=["fenced", "twin"])
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_pass_under_way_does_not_damage_what_arrives(mode: str, fenced: bool) -> None:
    """The twin has no fence: the KV arrives first, and the pass stores over it."""
    with rig(mode=mode) as servers:
        decode = servers.decode[0]
        receiving, before = decode.agent.receiver, decode.kv(THERE, servers.page)
        gate = GatedPass(decode, THERE, servers.page)
        given, handover = open_both(servers)
        wanted = Wanted(np.array(THERE), 0, 0, gate.passed if fenced else nothing_runs)
        if mode == "push":
            servers.wait(lambda: handover.state is ReceiverState.WAITING, "a connection")
        else:
            compute(servers, given, handover)
        receiving.read(handover, wanted)
        if fenced:
            # Decode has everything that it needs to begin, and looks at nothing but the pass.
            servers.wait(lambda: gate.looks > 3, "decode to wait")
            assert handover.state in (ReceiverState.READING, ReceiverState.GRANTED)
            assert np.array_equal(decode.kv(THERE, servers.page), before)
            gate.go()
        if mode == "push":
            compute(servers, given, handover)
        servers.wait(lambda: handover.state is ReceiverState.HELD, f"the KV ({handover.reason})")
        if not fenced:
            gate.go()
        whole = np.array_equal(servers.prefill[0].kv(HERE, servers.page), decode.kv(THERE, servers.page))
        assert whole is fenced
        servers.check()


def test_a_request_that_ends_while_it_waits_for_a_pass_frees_its_slots() -> None:
    with rig() as servers:
        decode = servers.decode[0]
        gate = GatedPass(decode, THERE, servers.page)
        given, handover = open_both(servers)
        compute(servers, given, handover)
        before = decode.kv(THERE, servers.page)
        decode.agent.receiver.read(handover, Wanted(np.array(THERE), 0, 0, gate.passed))
        servers.wait(lambda: gate.looks > 3, "decode to wait")
        decode.agent.receiver.abort(handover, "the client is gone")
        servers.wait(lambda: handover.state is ReceiverState.FAILED, "the end")
        assert np.array_equal(decode.kv(THERE, servers.page), before)
        servers.check()


class Stream:
    """A device's stream: work that has been launched, and how much of it has run."""

    def __init__(self) -> None:
        self.launched = self.ran = 0


class Module:
    """The module that `torch.get_device_module` returns, for a device that the test drives."""

    def __init__(self) -> None:
        self.current = Stream()

    def current_stream(self) -> Stream:
        return self.current

    class Event:
        def record(self, stream: Stream) -> None:
            self.stream, self.at = stream, stream.launched

        def query(self) -> bool:
            return self.stream.ran >= self.at


def scheduler_of(device: str, stream: Any) -> Any:
    """A scheduler as it is when it makes its transfer backend."""
    pool = SimpleNamespace(device=device)
    return SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        forward_stream=stream,
    )


def test_a_fence_is_passed_when_all_that_was_launched_before_it_has_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, forward = Module(), Stream()
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    fence = ForwardFence.of(scheduler_of("cuda", forward))
    forward.launched, module.current.launched = 3, 2
    passed = fence()
    forward.launched += 5  # later passes are not waited for
    assert not passed()
    forward.ran = 3
    assert not passed(), "without overlap, passes run on the scheduler's own stream"
    module.current.ran = 2
    assert passed()
    assert passed()


def test_a_pool_in_host_memory_needs_no_fence() -> None:
    assert ForwardFence.of(scheduler_of("cpu", None))() is nothing_runs


def test_sglangs_slots_come_with_a_fence_that_is_set_when_they_come() -> None:
    with rig() as servers:
        number = next(NUMBERS)
        gate = GatedPass(servers.decode[0], [1], servers.page)
        manager = SimpleNamespace(
            agent=servers.decode[0].agent,
            migration=None,
            kv_args=SimpleNamespace(page_size=servers.page),
            fence=lambda: gate.passed,
            store=None,
            beside=lambda indices: (),
        )
        receiver = GlobalKVReceiver(manager, servers.address, number)
        receiver.init(0)
        handover = receiver.handover
        assert handover is not None
        compute(servers, servers.prefill[0].agent.sender.open(number), handover)
        receiver.send_metadata(np.array(THERE, np.int32), 0)
        servers.wait(lambda: gate.looks > 3, "the read to wait")
        assert handover.state is ReceiverState.READING
        gate.go()
        servers.wait(lambda: handover.state is ReceiverState.HELD, "the KV")

"""Push by layer from a device: each layer leaves behind the event of its launch.

The device is the test's: launched work runs there when the test says so. Twins set no fence, and send the
former content of the slots.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pd_rig import LAYERS, METADATA, Rig, Side, rig

from sglang_ext.disagg.handover import ReceiverState, SenderState
from sglang_ext.engine.forward_fence import Passed, nothing_runs, on_host
from sglang_ext.engine.pd.landing import Wanted
from sglang_ext.engine.pd.pushing import Computing, Writing
from sglang_ext.engine.pd.receiving_handover import ReceivingHandover
from sglang_ext.engine.pd.sending_handover import SendingHandover
from sglang_ext.patches.adapter.pd import kv_hooks
from sglang_ext.patches.adapter.pd.kv_requests import GlobalKVSender
from sglang_ext.patches.adapter.pd.pd_setup import around_layers

pytestmark = pytest.mark.slow

ROWS = bytes(range(METADATA))
NUMBERS = itertools.count(1)
HERE, THERE = [5, 3, 9, 12], [40, 2, 7, 8]
"""Prefill's pages of a prompt, and decode's."""


class Device:
    """Runs launched work in its order, as far as the test lets it."""

    def __init__(self, side: Side, page: int) -> None:
        self._side, self._page = side, page
        self._work: list[Callable[[], None]] = []
        self._ran = 0
        self.looks = 0
        self.error: RuntimeError | None = None

    def launch(self, pages: list[int], layer: int) -> None:
        """A pass stores one layer's KV."""
        slots = (np.asarray(pages)[:, None] * self._page + np.arange(self._page)).ravel()

        def store() -> None:
            for (of, _), plane in self._side.planes.items():
                if of == layer:
                    plane[slots] += 100.0

        self._work.append(store)

    def fence(self) -> Passed:
        launched = len(self._work)

        def passed() -> bool:
            self.looks += 1
            if self.error is not None:
                raise self.error
            return self._ran >= launched

        return passed

    def run(self, until: int | None = None) -> None:
        """So much of the launched work, all by default."""
        until = len(self._work) if until is None else until
        for work in self._work[self._ran : until]:
            work()
        self._ran = max(self._ran, until)


class Scene:
    """A request that both servers have, whose pages at decode are granted."""

    def __init__(self, servers: Rig, *, fenced: bool = True) -> None:
        self.servers = servers
        self.prefill, self.decode = servers.prefill[0], servers.decode[0]
        self.device = Device(self.prefill, servers.page)
        fence = self.device.fence if fenced else lambda: nothing_runs
        self.feed = self.prefill.agent.layer_feed(0, LAYERS, fence)
        self.given, self.taken = self.open()
        (self.writing,) = self.given.writings()

    def open(self, there: list[int] = THERE) -> tuple[SendingHandover, ReceivingHandover]:
        number, receiver = next(NUMBERS), self.decode.agent.receiver
        given = self.prefill.agent.sender.open(number)
        taken = receiver.open(self.servers.address, number)
        self.servers.wait(lambda: taken.state is ReceiverState.WAITING, "a connection")
        receiver.read(taken, Wanted(np.array(there), 0, row=0))
        self.servers.wait(lambda: given.granted() is not None, "decode's pages")
        return given, taken

    def launch(self, first: int, last: int, *, python: bool = True) -> None:
        """A pass that completes some of the pages. python: whether its layers call Python."""
        pages = HERE[first:last]
        about = Computing(np.arange(first, last), lambda: np.array(pages), self.given.writings)
        self.feed.forward_begins([about])
        for layer in range(LAYERS):
            if python:
                self.feed.layer_begins(layer)
            self.device.launch(pages, layer)
        self.feed.forward_ended()

    def ahead(self, pages: int) -> None:
        """So many pages times layers are sent ahead, and no more."""
        self.servers.wait(lambda: self.writing.layers_ahead == pages, f"{pages} ahead")
        looks = self.device.looks
        self.servers.wait(lambda: self.device.looks > looks + 3, "further looks")
        assert self.writing.layers_ahead == pages

    def complete(self) -> None:
        self.prefill.agent.sender.complete(self.given, np.array(HERE), ROWS)

    def held(self) -> None:
        reasons = f"the KV ({self.taken.reason}, {self.given.reason})"
        self.servers.wait(lambda: self.taken.state is ReceiverState.HELD, reasons)

    def same(self, layers: int = LAYERS) -> bool:
        """Whether decode has prefill's KV of the first layers."""
        page, planes = self.servers.page, 2 * layers
        return np.array_equal(
            self.prefill.kv(HERE[1:3], page)[:planes], self.decode.kv(THERE[1:3], page)[:planes]
        )


def test_each_layer_leaves_behind_its_event() -> None:
    """The first page is a prefix that was a hit, the last one is not full: both go at the end."""
    with rig(mode="push-by-layer") as servers:
        scene = Scene(servers)
        scene.launch(1, 3)
        scene.ahead(0)
        for layer in range(LAYERS - 1):
            scene.device.run(layer + 1)
            scene.ahead(2 * (layer + 1))
        scene.device.run()
        servers.wait(lambda: (scene.writing.sent == [-1, *HERE[1:3], -1]).all(), "the last layer")
        scene.complete()
        scene.held()
        assert scene.same()
        assert scene.prefill.agent.state().pushed == {"ahead": 2 * LAYERS, "after": 2 * LAYERS}
        servers.check()


@pytest.mark.parametrize("fenced", [True, False], ids=["fenced", "twin"])
@pytest.mark.parametrize("how", ["layers", "graph", "chunks"])
def test_what_leaves_is_computed(how: str, fenced: bool) -> None:
    """The twin's layers leave as soon as they are launched. A captured graph calls no Python for its layers,
    so that all of them leave behind the pass; the next chunk is launched before the first has run."""
    with rig(mode="push-by-layer") as servers:
        scene = Scene(servers, fenced=fenced)
        if how == "chunks":
            scene.launch(0, 2)
            scene.launch(2, 4)
        else:
            scene.launch(0, 4, python=how == "layers")
        if fenced:
            scene.ahead(0)
            scene.device.run(LAYERS - 1)
            if how == "graph":
                scene.ahead(0)
        else:
            servers.wait(lambda: (scene.writing.sent == HERE).all(), "all of it")
            servers.wait(scene.same, "the writes of what was there before")
        scene.device.run()
        scene.complete()
        scene.held()
        assert scene.same() is fenced
        assert scene.prefill.agent.state().pushed == {"ahead": 4 * LAYERS, "after": 0}
        servers.check()


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "twin"])
def test_the_rest_leaves_behind_what_waits_for_the_device(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler may have the result of a pass before the event loop has seen its event. The twin writes
    the pages at once, and once more when the loop sees it."""
    if not waits:
        monkeypatch.setattr(
            Writing, "ahead", property(lambda self: None, lambda self, event: None), raising=False
        )
    with rig(mode="push-by-layer") as servers:
        scene = Scene(servers)
        scene.launch(1, 3)
        scene.ahead(0)
        scene.complete()
        if waits:
            scene.ahead(0)
            assert scene.given.state is SenderState.WRITING
            assert scene.taken.state is ReceiverState.GRANTED
            scene.device.run()
        scene.held()
        after = 2 if waits else 4
        assert scene.prefill.agent.state().pushed == {"ahead": 2 * LAYERS * waits, "after": after * LAYERS}
        scene.device.run()
        servers.check()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_nothing_leaves_for_a_request_that_ended_meanwhile(side: str) -> None:
    """Both use its slots for others before the pass has ended. The next request gets its KV."""
    with rig(mode="push-by-layer") as servers:
        scene = Scene(servers)
        scene.launch(1, 3)
        scene.device.run(1)
        scene.ahead(2)
        if side == "prefill":
            scene.given.give_up("aborted on prefill")
        else:
            scene.decode.agent.receiver.abort(scene.taken, "aborted on decode")
        servers.wait(lambda: scene.taken.state is ReceiverState.FAILED, "the end on decode")
        servers.wait(lambda: scene.given.state is SenderState.LOST, "the end on prefill")
        before = scene.decode.kv(range(64), servers.page)
        scene.device.run()
        servers.wait(lambda: not scene.feed._waiting, "the last look")
        assert np.array_equal(scene.decode.kv(range(64), servers.page), before)
        assert scene.writing.layers_ahead == 2
        scene.given, scene.taken = scene.open()
        (scene.writing,) = scene.given.writings()
        scene.launch(0, 4)
        scene.device.run()
        scene.complete()
        scene.held()
        assert scene.same()
        servers.check()


def test_a_device_that_fails_ends_the_request_on_both_sides() -> None:
    with rig(mode="push-by-layer") as servers:
        scene = Scene(servers)
        scene.device.error = RuntimeError("an illegal memory access was encountered")
        scene.launch(1, 3)
        scene.complete()
        servers.wait(lambda: scene.taken.state is ReceiverState.FAILED, "the end on decode")
        servers.wait(lambda: scene.given.state is SenderState.LOST, "the end on prefill")
        assert "illegal memory access" in scene.given.reason
        assert "illegal memory access" in scene.taken.reason
        servers.check()


def test_a_write_that_is_refused_ends_the_request_alone() -> None:
    """A request beside it in the batch gets its layers."""
    with rig(mode="push-by-layer") as servers:
        scene = Scene(servers)
        other, theirs = scene.open([50, 51, 52, 53])
        (writing,) = other.writings()
        writing.target = writing.target + (1 << 20)
        batch = [
            Computing(np.array([0, 1]), lambda: np.array(HERE[:2]), given.writings)
            for given in (other, scene.given)
        ]
        scene.feed.forward_begins(batch)
        scene.feed.forward_ended()
        servers.wait(lambda: scene.writing.layers_ahead == 2 * LAYERS, "the other request's layers")
        assert writing.refused is not None
        assert writing.layers_ahead == 0
        for given in (other, scene.given):
            scene.prefill.agent.sender.complete(given, np.array(HERE), ROWS)
        scene.held()
        servers.wait(lambda: theirs.state is ReceiverState.FAILED, "the end of the one")
        servers.check()


class Kv:
    """SGLang's pool on a device."""

    device = "cuda"

    def set_kv_buffer(self, layer: Any) -> None:
        pass


def test_the_scheduler_records_one_fence_a_layer_and_looks_at_none() -> None:
    """As SGLang calls it: the pool's method for each layer of a batch; nothing outside of a prefill batch."""
    with rig(mode="push-by-layer") as servers:
        agent = servers.prefill[0].agent
        fences: list[int] = []
        lookers: set[int] = set()

        def fence() -> Passed:
            fences.append(len(fences))

            def passed() -> bool:
                lookers.add(threading.get_ident())
                return True

            return passed

        feed, pool = agent.layer_feed(0, LAYERS, fence), Kv()
        around_layers(pool, before=feed.layer_begins)

        def layers() -> None:
            for layer in range(LAYERS):
                pool.set_kv_buffer(SimpleNamespace(layer_id=layer))

        layers()
        feed.forward_begins([])
        layers()
        feed.forward_ended()
        assert not fences, "nothing is to be sent"
        feed.forward_begins([Computing(np.array([0]), lambda: np.array([0]), list)])
        layers()
        feed.forward_ended()
        assert len(fences) == LAYERS
        servers.wait(lambda: lookers and not feed._waiting, "the layers")
        assert threading.get_ident() not in lookers


@pytest.mark.parametrize(
    ("cached", "computed", "skip", "places", "pages"),
    [
        (0, 16, 0, [0, 1, 2, 3], [7, 3, 9, 1]),
        (8, 18, 0, [2, 3], [9, 1]),  # a hit, and a page that is not full
        (6, 16, 0, [2, 3], [9, 1]),  # the rest of a page that the hit has begun leaves at the end
        (0, 16, 3, [0], [1]),  # decode has three pages
        (0, 3, 0, [], []),
    ],
)
def test_the_pages_of_a_chunk(
    cached: int,
    computed: int,
    skip: int,
    places: list[int],
    pages: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page, sender = 4, GlobalKVSender.__new__(GlobalKVSender)
    sender.handover = SimpleNamespace(granted=lambda: skip, writings=list)  # type: ignore[assignment]
    current = SimpleNamespace(prefix_tokens=lambda req: cached, computed_end=lambda req: computed)
    monkeypatch.setattr(kv_hooks, "current", current)
    table = torch.zeros(2, 64, dtype=torch.int32)
    for place, where in enumerate([7, 3, 9, 1, 5]):
        table[1, place * page : (place + 1) * page] = torch.arange(where * page, (where + 1) * page)
    req = SimpleNamespace(disagg_kv_sender=sender, kv=SimpleNamespace(req_pool_idx=1))
    found = kv_hooks.computing(
        SimpleNamespace(kv_args=SimpleNamespace(page_size=page)),  # type: ignore[arg-type]
        SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table)),
        SimpleNamespace(reqs=[req]),
    )
    table.zero_()
    assert [each.places.tolist() for each in found] == ([places] if places else [])
    assert [each.pages().tolist() for each in found] == ([pages] if pages else [])
    assert all(each.pages().dtype == np.int64 for each in found)
    assert on_host(torch.tensor([3], dtype=torch.int32))().tolist() == [3]

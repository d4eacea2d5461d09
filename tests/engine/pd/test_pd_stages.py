"""Prefill whose ranks are stages of a pipeline: decode reads from each the layers that it has."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from pd_rig import LAYERS, METADATA, Rig, rig

from sglang_ext.disagg.handover import ReceiverState, SenderState
from sglang_ext.disagg.messages import Offer
from sglang_ext.disagg.transfer.instance import RENEWALS, Instance
from sglang_ext.engine.pd import offering, peers
from sglang_ext.engine.pd.landing import Wanted
from sglang_ext.patches.adapter.pd import pd_setup
from sglang_ext.testing.waiting import wait_until

STAGES = (range(1), range(1, LAYERS))
FROM, TO = [3, 9, 4], [20, 7, 31]


def move(servers: Rig, *, late: int = 0) -> None:
    """Hand one request over; the stage ``late`` has computed it last."""
    taken = [side.agent.receiver.open(servers.address, 5) for side in servers.decode]
    given = [side.agent.sender.open(5) for side in servers.prefill]
    stages = list(zip(servers.prefill, given, strict=True))
    for side, handover in sorted(stages, key=lambda each: each[0] is servers.prefill[late]):
        assert all(each.state is not ReceiverState.READY for each in taken)
        side.agent.sender.complete(handover, np.array(FROM), bytes(METADATA))
    for side, each in zip(servers.decode, taken, strict=True):
        servers.wait(lambda each=each: each.state is ReceiverState.READY, "an offer")
        side.agent.receiver.read(each, Wanted(np.array(TO), 0, 1))
    servers.wait(lambda: all(each.over for each in taken), "the KV", seconds=60)
    assert {each.state for each in taken} == {ReceiverState.HELD}, [each.reason for each in taken]
    servers.wait(lambda: all(each.state is SenderState.RELEASED for each in given), "the release")


def rows(pages: list[int], page: int) -> npt.NDArray[np.int64]:
    return (np.asarray(pages)[:, None] * page + np.arange(page)).ravel()


@pytest.mark.parametrize("late", range(len(STAGES)))
@pytest.mark.parametrize("decode", [1, 2])
def test_every_layer_comes_from_its_stage(decode: int, late: int) -> None:
    with rig(prefill=len(STAGES), decode=decode, stages=STAGES) as servers:
        move(servers, late=late)
        for side in servers.decode:
            assert len(side.planes) == 2 * LAYERS
            for (layer, kind), plane in side.planes.items():
                stage = next(at for at, layers in enumerate(STAGES) if layer in layers)
                heads = slice(side.first_head, side.first_head + plane.shape[1])
                expected = servers.prefill[stage].planes[layer, kind][rows(FROM, servers.page), heads]
                assert np.array_equal(plane[rows(TO, servers.page)], expected), (layer, kind)
        servers.check()


SHORT_LEASE = 2.0


@pytest.fixture
def renewals(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each rank's lease was renewed. Leases end soon."""
    for module in (offering, peers):
        monkeypatch.setattr(module, "LEASE_SECONDS", SHORT_LEASE)
    found: Counter[int] = Counter()
    renew = Instance.renew

    async def counted(self: Instance, offer: Offer, seconds: float) -> bool:
        kept = await renew(self, offer, seconds)
        found[offer.rank] += kept
        return kept

    monkeypatch.setattr(Instance, "renew", counted)
    return found


def test_the_first_stage_waits_for_the_last_one_longer_than_a_lease_lives(renewals: Counter[int]) -> None:
    with rig(prefill=len(STAGES), stages=STAGES) as servers:
        taken = servers.decode[0].agent.receiver.open(servers.address, 5)
        given = [side.agent.sender.open(5) for side in servers.prefill]
        servers.prefill[0].agent.sender.complete(given[0], np.array(FROM), bytes(METADATA))
        servers.wait(lambda: renewals[0] > 1.5 * RENEWALS, "renewals for longer than a lease", seconds=60)
        servers.prefill[1].agent.sender.complete(given[1], np.array(FROM), bytes(METADATA))
        servers.wait(lambda: taken.state is ReceiverState.READY, "an offer")
        servers.decode[0].agent.receiver.read(taken, Wanted(np.array(TO), 0, 1))
        servers.wait(lambda: taken.over, "the KV")
        assert taken.state is ReceiverState.HELD, taken.reason


def test_without_renewals_the_first_stage_gives_up(
    renewals: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin."""
    monkeypatch.setattr(Instance, "keeping", lambda *_: nullcontext())
    with rig(prefill=len(STAGES), stages=STAGES) as servers:
        taken = servers.decode[0].agent.receiver.open(servers.address, 5)
        given = [side.agent.sender.open(5) for side in servers.prefill]
        servers.prefill[0].agent.sender.complete(given[0], np.array(FROM), bytes(METADATA))
        servers.wait(lambda: given[0].state is SenderState.LOST, "the end of the lease")
        servers.prefill[1].agent.sender.complete(given[1], np.array(FROM), bytes(METADATA))
        servers.wait(lambda: taken.state is ReceiverState.READY, "an offer")
        servers.decode[0].agent.receiver.read(taken, Wanted(np.array(TO), 0, 1))
        servers.wait(lambda: taken.over, "the end")
        assert (taken.state, not renewals) == (ReceiverState.FAILED, True)
        assert "3 of 3 blocks have another generation now" in taken.reason


class Stages:
    """Stages that load new weights one after the other. in_use: the digest by which each goes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.in_use = ["old", "old"]
        self.compared = 0
        self._parts: dict[int, bytes] = {}
        self._meet = threading.Barrier(len(STAGES))
        monkeypatch.setattr(pd_setup, "part_of_weights", lambda part: part)
        monkeypatch.setattr(pd_setup, "on_all_ranks", self._on_all_ranks)
        monkeypatch.setattr(pd_setup, "digest_of", lambda parts: "+".join(each.decode() for each in parts))

    def stage(self, at: int, part: bytes) -> pd_setup.InUse:
        def use(digest: str) -> None:
            self.in_use[at] = digest

        return pd_setup.InUse(part, at, use)

    def _on_all_ranks(self, part: bytes, at: Any) -> list[bytes]:
        self._parts[at] = part
        self._meet.wait(20)
        found = [self._parts[each] for each in sorted(self._parts)]
        self.compared += self._meet.wait(20) == 0
        return found


def test_stages_go_by_new_weights_once_all_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch)
    first, second = stages.stage(0, b"one"), stages.stage(1, b"two")
    first.changing()
    first.changed()
    assert stages.in_use == ["", "old"]
    second.changing()
    assert stages.in_use == ["", ""]
    second.changed()
    wait_until(lambda: stages.in_use == ["one+two"] * 2, seconds=20, what="one digest")


def test_stages_do_not_go_by_weights_that_change_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage changes again before the second has changed once."""
    stages = Stages(monkeypatch)
    first, second = stages.stage(0, b"one"), stages.stage(1, b"two")
    first.changing()
    first.changed()
    first.changing()
    second.changing()
    second.changed()
    wait_until(lambda: stages.in_use[1] and stages.compared == 1, seconds=20, what="a comparison")
    assert stages.in_use[0] == ""
    second.changing()
    first.changed()
    second.changed()
    wait_until(lambda: stages.in_use == ["one+two"] * 2, seconds=20, what="one digest")

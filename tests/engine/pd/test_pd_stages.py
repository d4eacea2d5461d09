"""Prefill whose ranks are stages of a pipeline: decode reads from each the layers that it has."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from pd_rig import LAYERS, METADATA, Rig, rig

from sglang_ext.disagg.handover import ReceiverState, SenderState
from sglang_ext.engine.pd.landing import Wanted

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

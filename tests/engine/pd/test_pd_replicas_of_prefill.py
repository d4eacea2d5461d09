"""Prefill servers with replicas: decode finds each behind the one bootstrap port, and reads its KV."""

from __future__ import annotations

import numpy as np
import pytest
from pd_rig import METADATA, Rig, Side, rig

from sglang_ext.disagg.handover import ReceiverState, SenderState
from sglang_ext.engine.pd.landing import Wanted
from sglang_ext.protocol.cluster import bootstrap_of_replica

FROM, TO = [3, 9, 4], [20, 7, 31]
REPLICAS = 2


def move(servers: Rig, replica: int, number: int) -> None:
    """Hand one request over from a replica."""
    taken = [
        side.agent.receiver.open(bootstrap_of_replica(servers.address, replica), number)
        for side in servers.decode
    ]
    sender = servers.prefill[replica].agent.sender
    given = sender.open(number)
    sender.complete(given, np.array(FROM), bytes(METADATA))
    for side, each in zip(servers.decode, taken, strict=True):
        servers.wait(lambda each=each: each.state is ReceiverState.READY, "an offer")
        side.agent.receiver.read(each, Wanted(np.array(TO), 0, 1))
    servers.wait(lambda: all(each.over for each in taken), "the KV", seconds=60)
    assert {each.state for each in taken} == {ReceiverState.HELD}, [each.reason for each in taken]
    servers.wait(lambda: given.state is SenderState.RELEASED, "the release")


def is_kv_of(side: Side, source: Side, page: int) -> bool:
    """Whether the pages that decode's rank has read are a replica's."""
    to, of = ((np.asarray(pages)[:, None] * page + np.arange(page)).ravel() for pages in (TO, FROM))
    return all(
        np.array_equal(plane[to], source.planes[key][of, side.first_head : side.first_head + plane.shape[1]])
        for key, plane in side.planes.items()
    )


@pytest.mark.parametrize("decode", [1, 2])
def test_kv_comes_from_the_replica_that_is_named(decode: int) -> None:
    with rig(prefill=REPLICAS, decode=decode, replicas=True) as servers:
        for number, replica in enumerate((0, 1, 0), 5):
            move(servers, replica, number)
            for side in servers.decode:
                found = [is_kv_of(side, each, servers.page) for each in servers.prefill]
                assert found == [at == replica for at in range(REPLICAS)]
        assert len(servers.decode[0].agent.state().connects) == 1
        assert servers.decode[0].agent.state().prefill_servers["connected"] == REPLICAS
        servers.check()

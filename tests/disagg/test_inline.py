"""Small reads made on the event loop's own thread, and events between `transfer` and `landed`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from sglang_ext.disagg.errors import PeerGoneError, StaleReadError
from sglang_ext.disagg.generations import HEADER_BYTES, changed
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.instance import Instance
from sglang_ext.disagg.transports import TransportName
from sglang_ext.testing.transfer.rig import NAMESPACE, Rank, Shape, start_instance

LOCAL = [TransportName.SHM, TransportName.CMA]
EVERY = np.arange(24)
SECONDS = 10.0


@asynccontextmanager
async def pair(transport: TransportName) -> AsyncIterator[tuple[Rank, Rank, Instance]]:
    """An owner of 24 sealed random blocks, and a reader connected to it."""
    config = EndpointConfig("x", NAMESPACE, transports=(transport,))
    shared = transport is TransportName.SHM
    (owner,) = await start_instance(config, Shape(), shared=shared)
    (reader,) = await start_instance(config, Shape(), shared=shared)
    try:
        owner.pool.fill(1)
        owner.owned.seal(EVERY)
        instance = await reader.endpoint.connect([owner.endpoint.address])
        yield owner, reader, instance
        reader.endpoint.check()
    finally:
        await reader.close()
        await owner.close()


@pytest.mark.parametrize("transport", LOCAL)
async def test_a_small_read_is_over_without_a_turn_of_the_loop(transport: TransportName) -> None:
    async with pair(transport) as (owner, reader, instance):
        offer = owner.endpoint.publish("hbm", "r", EVERY)
        instance.transfer("r", [offer], "hbm", EVERY)
        with pytest.raises(StopIteration):
            instance.landed("r", SECONDS).send(None)
        assert np.array_equal(owner.pool.bytes, reader.pool.bytes)
        stats = instance.links[0].peer.stats
        assert (stats.bytes, stats.transactions, stats.completed) == (owner.pool.bytes.size, 1, 1)


@pytest.mark.parametrize("transport", LOCAL)
async def test_a_small_read_of_a_rewritten_block_is_discarded(transport: TransportName) -> None:
    async with pair(transport) as (owner, _, instance):
        offer = owner.endpoint.publish("hbm", "r", EVERY)
        owner.endpoint.withdraw("hbm", offer.lease)
        owner.owned.open(np.array([7, 9]))
        owner.owned.seal(np.array([7]))
        instance.transfer("r", [offer], "hbm", EVERY)
        with pytest.raises(StaleReadError, match="2 of 24"):
            await instance.landed("r", SECONDS)
        assert instance.links[0].peer.stats.stale == 1


@pytest.mark.parametrize("transport", LOCAL)
async def test_requests_that_meet_are_coalesced_all_the_same(transport: TransportName) -> None:
    async with pair(transport) as (owner, reader, instance):
        for name, blocks in (("a", EVERY[12:]), ("b", EVERY[:12])):
            offer = owner.endpoint.publish("hbm", name, blocks)
            instance.transfer(name, [offer], "hbm", blocks)
        await instance.landed("b", SECONDS)
        await instance.landed("a", SECONDS)
        assert np.array_equal(owner.pool.bytes, reader.pool.bytes)
        assert instance.links[0].peer.stats.transactions == 1


@pytest.mark.parametrize("transport", LOCAL)
async def test_nothing_is_written_after_a_request_was_dropped_or_its_peer_lost(
    transport: TransportName,
) -> None:
    async with pair(transport) as (owner, reader, instance):
        offer = owner.endpoint.publish("hbm", "r", EVERY)
        instance.transfer("r", [offer], "hbm", EVERY)
        await instance.drop("r")
        reader.pool.bytes[:] = 0
        instance.transfer("s", [offer], "hbm", EVERY)
        instance.links[0].peer.fail(PeerGoneError("gone meanwhile"))
        with pytest.raises(PeerGoneError, match="gone meanwhile"):
            await instance.landed("s", SECONDS)
        assert not reader.pool.bytes.any()


@pytest.mark.parametrize("transport", LOCAL)
async def test_layers_read_by_themselves_are_verified_at_the_end(transport: TransportName) -> None:
    async with pair(transport) as (owner, reader, instance):
        offer = owner.endpoint.publish("hbm", "r", EVERY)
        for layer in range(2):
            instance.transfer("r", [offer], "hbm", EVERY, layers=[layer])
        await instance.complete("r", SECONDS)
        assert np.array_equal(owner.pool.bytes, reader.pool.bytes)


def test_counters_that_are_mapped_are_compared_inside_their_table_only() -> None:
    table = np.arange(32, dtype=np.int64)
    blocks, at = np.array([3, 0, 5]), HEADER_BYTES + 64
    right = table[at // 8 + blocks]
    assert changed(table, at, blocks, right) == 0
    assert changed(table, at, blocks, right + np.array([0, 2, 1])) == 2
    for place, ids in ((at, [16]), (at, [-1]), (at + 4, [0]), (0, [0]), (1 << 40, [0]), (at, [0, 1])):
        assert changed(table, place, np.array(ids), right[:1]) == -1

"""Pools whose blocks an engine's allocator reuses without a word to us."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from sglang_ext.disagg.errors import RangeError, RefusedError, StaleReadError
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.engine import Endpoint
from sglang_ext.disagg.transfer.instance import Instance
from sglang_ext.disagg.transfer.leases import LeaseEnd
from sglang_ext.disagg.transfer.pools import OwnedPool
from sglang_ext.disagg.transports import TransportName
from sglang_ext.testing.transfer.rig import NAMESPACE, Pool, Shape
from sglang_ext.testing.waiting import until

SLOTS = np.array([3, 1, 2])
SECONDS = 10.0


class Engine:
    """Reuses slots as soon as they are unlocked, and overwrites them. It does not track generations."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.locked: set[int] = set()
        self.ends: list[LeaseEnd] = []

    def reuse(self, slots: np.ndarray) -> None:
        assert not self.locked & set(slots.tolist())
        self.pool.view(0, "k")[slots] = 0xEE


@asynccontextmanager
async def served(borrowed: bool, **changes: float) -> AsyncIterator[tuple[Engine, Endpoint, Instance, Pool]]:
    """An owner of an engine's slots, and a reader connected to it."""
    config = EndpointConfig("x", NAMESPACE, transports=(TransportName.SHM,), **changes)  # type: ignore[arg-type]
    theirs, mine = (Pool("hbm", Shape(), shared=True) for _ in range(2))
    engine = Engine(theirs)

    def ended(pool: str, end) -> None:  # type: ignore[no-untyped-def]
        engine.ends.append(end.how)
        engine.locked -= set(end.freed.tolist())

    owner = await Endpoint.start(
        config, [dataclasses.replace(theirs.spec, borrowed=borrowed)], on_ended=ended
    )
    reader = await Endpoint.start(config, [mine.spec])
    try:
        theirs.fill(1)
        yield engine, owner, await reader.connect([owner.address]), mine
        owner.check()
    finally:
        await reader.close()
        await owner.close()
        theirs.close()
        mine.close()


async def late_read(borrowed: bool) -> np.ndarray:
    """A reader that comes after its lease expired and the engine reused a slot; the bytes that it accepts."""
    async with served(borrowed, lease_ttl=0.01) as (engine, owner, instance, mine):
        if not borrowed:
            owner.pools["hbm"].seal(SLOTS)
        engine.locked |= set(SLOTS.tolist())
        offer = owner.publish("hbm", "r", SLOTS)
        await until(lambda: not engine.locked)
        engine.reuse(SLOTS[:1])
        instance.transfer("r", [offer], "hbm", np.arange(3))
        await instance.complete("r", SECONDS)
        return mine.view(0, "k")[0].copy()


async def test_a_slot_that_the_engine_has_reused_is_never_served() -> None:
    with pytest.raises(StaleReadError, match="3 of 3"):
        await late_read(borrowed=True)


async def test_without_borrowing_another_prompts_bytes_would_have_been_accepted() -> None:
    assert (await late_read(borrowed=False) == 0xEE).all()


async def test_slots_are_sealed_just_as_long_as_a_lease_lives() -> None:
    async with served(borrowed=True) as (engine, owner, instance, mine):
        owned: OwnedPool = owner.pools["hbm"]
        for turn in range(3):
            offers = [owner.publish("hbm", f"{turn}/{i}", SLOTS) for i in range(2)]
            assert offers[0].generations == offers[1].generations
            assert owned.is_sealed(SLOTS).all()
            for i, offer in enumerate(offers):
                instance.transfer(offer.request, [offer], "hbm", np.arange(3))
                await instance.complete(offer.request, SECONDS)
                assert owned.is_sealed(SLOTS).all() == (i == 0)
            assert np.array_equal(mine.view(1, "v")[:3], engine.pool.view(1, "v")[SLOTS])
        assert engine.ends == [LeaseEnd.COMPLETED] * 6
        lease = owner.publish("hbm", "w", SLOTS).lease
        assert owner.withdraw("hbm", lease)
        assert not owned.is_sealed(SLOTS).any()


async def test_what_cannot_be_leased_stays_open() -> None:
    async with served(borrowed=True) as (_, owner, _, _):
        owned = owner.pools["hbm"]
        owned.hold(SLOTS[:1])
        with pytest.raises(RangeError, match="granted to a writer"):
            owner.publish("hbm", "r", SLOTS)
        owned.release(SLOTS[:1])
        owned._leases._budget = 2
        with pytest.raises(RefusedError):
            owner.publish("hbm", "r", SLOTS)
        assert not owned.is_sealed(SLOTS).any()

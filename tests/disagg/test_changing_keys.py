"""The cluster's key changes while ranks are connected: they go on; a peer with a removed key is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.cluster_key import ClusterKey, read_cluster_key
from sglang_ext.disagg.errors import PeerGoneError, TransferDeadlineError
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.link import Outcome
from sglang_ext.disagg.transports import TransportName
from sglang_ext.testing.transfer.rig import Rank, Shape, planes_of, start_instance
from sglang_ext.testing.waiting import until

OLD, NEW = ("one-that-was-there-before-0123456789", "another-that-comes-after-9876543210")
SHAPE = Shape()
BLOCKS = np.arange(8)


@asynccontextmanager
async def member(key: ClusterKey, **times: float) -> AsyncIterator[Rank]:
    config = EndpointConfig("member", "one model", transports=(TransportName.CMA,), keys=key, **times)
    (rank,) = await start_instance(config, SHAPE)
    try:
        yield rank
        rank.endpoint.check()
    finally:
        await rank.close()


class KeyFile:
    """The key file of one host."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.write(OLD)
        self.key: ClusterKey = read_cluster_key(path)

    def write(self, *keys: str) -> None:
        # Replace the key file atomically, as an administrator would, so that a reader never sees half of it.
        new = self._path.with_suffix(".new")
        new.touch(0o600)
        new.write_text("\n".join(keys))
        new.replace(self._path)

    def holds(self, *keys: str) -> bool:
        """Whether a member has read these."""
        return self.key.curve_pairs() == tuple(ClusterKey(key.encode()).curve_pair() for key in keys)


@pytest.fixture
def files(tmp_path: Path) -> tuple[KeyFile, KeyFile]:
    """The key files of the owner's host and of the reader's."""
    return KeyFile(tmp_path / "owner.key"), KeyFile(tmp_path / "reader.key")


async def reads(me: Rank, owner: Rank, number: int) -> bool:
    """Whether a transfer over the connection that is there arrives, byte for byte."""
    me.pool.bytes[:] = 0
    offer = owner.endpoint.publish("hbm", f"r{number}", BLOCKS)
    (instance,) = me.endpoint.instances
    instance.transfer(f"r{number}", [offer], "hbm", BLOCKS)
    # A COMPLETE whose answer was lost with the connection is asked again, and finds the lease over.
    assert await instance.complete(f"r{number}", 10) in (Outcome.RELEASED, Outcome.LEASE_OVER)
    here, there = (planes_of([rank], SHAPE) for rank in (me, owner))
    return all(np.array_equal(here[name][BLOCKS], plane[BLOCKS]) for name, plane in there.items())


def listens_by(owner: Rank, key: str) -> bool:
    server = owner.endpoint._server
    assert server is not None
    return server.public_key == ClusterKey(key.encode()).curve_pair()[0]


@pytest.mark.parametrize("owner_first", [True, False], ids=["owner's host first", "reader's host first"])
async def test_a_connection_outlives_a_change_of_the_key(
    files: tuple[KeyFile, KeyFile], owner_first: bool
) -> None:
    """No verdict, no lost request: each step reaches one host before the other."""
    at_owner, at_reader = files
    order = files if owner_first else files[::-1]
    async with (
        member(at_owner.key, heartbeat=0.5, dead_after=2.5) as owner,
        member(at_reader.key, heartbeat=0.5, dead_after=2.5) as me,
    ):
        owner.owned.seal(np.arange(SHAPE.blocks))
        instance = await me.endpoint.connect([owner.endpoint.address])
        assert await reads(me, owner, 0)
        for step, keys in enumerate([(OLD, NEW), (NEW, OLD), (NEW,)], 1):
            for host, file in enumerate(order):
                file.write(*keys)
                await until(lambda file=file, keys=keys: file.holds(*keys), 60)
                if file is at_owner:
                    await until(lambda keys=keys: listens_by(owner, keys[0]), 8)
                assert await reads(me, owner, 2 * step + host)
                assert not instance.gone


async def test_who_has_a_key_that_was_removed_is_out(files: tuple[KeyFile, KeyFile]) -> None:
    """Its connection ends within seconds, and there is no other."""
    at_owner, thief = files
    async with (
        member(at_owner.key, heartbeat=0.2, dead_after=1.0) as owner,
        member(thief.key, heartbeat=0.2, dead_after=1.0, connect_timeout=1.0) as me,
    ):
        owner.owned.seal(np.arange(SHAPE.blocks))
        instance = await me.endpoint.connect([owner.endpoint.address])
        at_owner.write(NEW, OLD)
        await until(lambda: listens_by(owner, NEW), 8)
        at_owner.write(NEW)
        await until(lambda: instance.gone, 8)
        with pytest.raises(PeerGoneError):
            instance.transfer("r", [owner.endpoint.publish("hbm", "r", BLOCKS)], "hbm", BLOCKS)
        with pytest.raises(TransferDeadlineError):
            await me.endpoint.connect([owner.endpoint.address])

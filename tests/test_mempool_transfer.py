"""transfer and transfer_with_insert between pools, over real endpoints."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from sglang_ext.disagg.errors import RefusedError, TransferError
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.engine import Endpoint
from sglang_ext.disagg.transfer.instance import Instance
from sglang_ext.disagg.transfer.pool_transfer import TransferFlag
from sglang_ext.disagg.transfer.pool_transfer import transfer as transfer_blocks
from sglang_ext.errors import ConfigError, UserError
from sglang_ext.geometry import mha_geometry
from sglang_ext.keys import Namespace
from sglang_ext.mempool import AddressError, ArenaRegion, MemPool, MemType, Received, serve
from sglang_ext.mempool.envelope import Envelope, seal, unseal
from sglang_ext.mempool.regions import Rows
from sglang_ext.testing.transfer.rig import Gate
from sglang_ext.tiers import Tier

GEOMETRY = mha_geometry(
    k_addresses=(0, 0), v_addresses=(0, 0), slots=4, heads=2, head_dim=8, dtype="float16", block_tokens=4
)
LAYOUT = GEOMETRY.layout
SPACE = Namespace("m", "w", "float16", LAYOUT.facts())
NO_TENANT = msgspec.msgpack.encode(Envelope(b"p"))
LEASE = 0.6
FLAGS = [TransferFlag.PULL, TransferFlag.PUSH]


def kv(seed: int, blocks: int) -> Rows:
    return np.random.default_rng(seed).integers(0, 256, (blocks, LAYOUT.block_bytes), dtype=np.uint8)


@dataclass
class Pair:
    one: MemPool
    two: MemPool
    peer: Instance
    endpoints: list[Endpoint]
    received: list[Received] = field(default_factory=list)

    def cached(self, tokens: list[int], rows: Rows, namespace: Namespace = SPACE) -> None:
        blocks = self.one.alloc_mem(len(rows), id="r")
        self.one.write(blocks, rows)
        self.one.insert(tokens, blocks, namespace=namespace)

    def found(self, tokens: list[int], namespace: Namespace = SPACE) -> Rows:
        """What the receiver's index has of a prompt."""
        with self.two.match(tokens, id="look", namespace=namespace) as hold:
            return self.two.read(hold.addresses)[0]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pools = [MemPool.create(name, LAYOUT, 8, 6, namespace=SPACE) for name in ("one", "two")]
    received: list[Received] = []
    endpoints = [
        await serve(
            pool, EndpointConfig(pool.instance, "m/w", lease_ttl=LEASE), GEOMETRY, on_received=received.append
        )
        for pool in pools
    ]
    peer = await endpoints[0].connect([endpoints[1].address])
    pair = Pair(*pools, peer, endpoints, received)
    del peer
    yield pair
    while endpoints:
        await endpoints.pop().close()
    del pair.peer
    for pool in pools:
        pool.detach()
        assert not pool.ledger.busy
        pool.reset()
        pool.check()
        for region in pool.tiers.regions.values():
            assert isinstance(region, ArenaRegion)
            region.arena.close()


@pytest.mark.parametrize("flag", FLAGS)
async def test_blocks_arrive_at_their_owner(pair: Pair, flag: TransferFlag) -> None:
    mine = pair.one.alloc_mem(3, id="session")
    pair.one.write(mine, kv(1, 3))
    sent = await pair.one.transfer(
        pair.peer, mine, id="session", flags=flag | TransferFlag.USER, private=b"sampling"
    )
    assert (sent.instance, sent.inserted, len(sent.blocks)) == ("two", False, 3)
    (received,) = pair.received
    assert (received.owner, received.private) == ("session", b"sampling")
    assert received.flags & TransferFlag.USER
    assert [(a.tier, a.place[0]) for a in received.addresses] == list(sent.blocks)
    assert np.array_equal(pair.two.read(received.addresses)[0], kv(1, 3))
    assert pair.two.free_mem(id="session") == 3
    assert pair.one.free_mem(mine) == 3


@pytest.mark.parametrize("renewed", [True, False], ids=["renewed", "twin"])
async def test_reading_may_take_longer_than_a_lease(
    pair: Pair, renewed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not renewed:
        monkeypatch.setattr(Instance, "keeping", lambda *_: nullcontext())
    sender, receiver = pair.endpoints
    (link,) = (await receiver.reach(sender.address)).links
    gate = Gate(link.peer, "read")
    mine = pair.one.alloc_mem(3, id="r")
    pair.one.write(mine, kv(1, 3))
    leases = sender.pools["hbm"]._leases._leases
    sending = asyncio.create_task(pair.one.transfer(pair.peer, mine, id="r", seconds=30.0))
    try:
        await until(gate.reached.is_set)
        (number,) = leases
        granted = leases[number].deadline
        # Longer than a lease lives: it still does, or is over.
        await until(lambda: leases[number].deadline > granted + LEASE if renewed else not leases)
        if not renewed:
            pair.one.write(mine, kv(2, 3))  # nothing keeps its owner from that
    finally:
        gate.go.set()
    if renewed:
        await sending
        (received,) = pair.received
        assert np.array_equal(pair.two.read(received.addresses)[0], kv(1, 3))
        assert pair.two.free_mem(id="r") == 3
    else:
        with pytest.raises(RefusedError):
            await sending
    assert pair.one.free_mem(mine) == 3


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - it is true in a thread of its own
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("flag", FLAGS)
async def test_cached_blocks_enter_the_other_index(pair: Pair, flag: TransferFlag) -> None:
    """Both tiers are sent, the second continuing the first; a later turn sends its new blocks only."""
    tokens = list(range(6 * 4))
    pair.cached(tokens[:16], kv(1, 4))
    pair.one.swap_out(2)
    with pair.one.match(tokens, id="r") as hold:
        assert hold.tiers == [Tier.HBM] * 2 + [Tier.DRAM] * 2
        sent = await pair.one.transfer_with_insert(pair.peer, tokens[:16], hold.addresses, id="r", flags=flag)
        assert sent.inserted
        pair.one.swap_in(hold.addresses)
    assert np.array_equal(pair.found(tokens), kv(1, 4))
    new = pair.one.alloc_mem(2, id="r")
    pair.one.write(new, kv(2, 2))
    sent = await pair.one.transfer_with_insert(pair.peer, tokens, new, id="r", flags=flag)
    assert sent.inserted
    assert np.array_equal(pair.found(tokens), np.concatenate([kv(1, 4), kv(2, 2)]))
    assert pair.one.insert(tokens, new).new == 2
    assert not pair.two.ledger.owners


async def test_a_flipped_byte_would_be_noticed(pair: Pair) -> None:
    tokens = list(range(8))
    pair.cached(tokens, kv(1, 2))
    with pair.one.match(tokens, id="r") as hold:
        region = pair.one.tiers.regions[Tier.HBM]
        assert isinstance(region, ArenaRegion)
        region.arena.blocks[hold.addresses[1].place[0], 5] ^= 1
        await pair.one.transfer_with_insert(pair.peer, tokens, hold.addresses, id="r")
    assert [np.array_equal(a, b) for a, b in zip(pair.found(tokens), kv(1, 2), strict=True)] == [True, False]


async def test_what_continues_nothing_is_not_inserted_and_not_kept(pair: Pair) -> None:
    tokens = list(range(8))
    pair.cached(tokens, kv(1, 2))
    with pair.one.match(tokens, id="r") as hold:
        sent = await pair.one.transfer_with_insert(pair.peer, tokens, hold.addresses[1:], id="r")
    assert not sent.inserted
    assert pair.two.store.tiers[Tier.HBM].free_blocks == 8


async def test_the_type_decides_where_and_mixed_falls_back(pair: Pair) -> None:
    mine = pair.one.alloc_mem(2, id="r")
    pair.one.write(mine, kv(1, 2))
    sent = await pair.one.transfer(pair.peer, mine, id="r", type=MemType.DRAM)
    assert [tier for tier, _ in sent.blocks] == [Tier.DRAM] * 2
    pair.two.alloc_mem(8, id="full")
    with pytest.raises(RefusedError, match="no_room"):
        await pair.one.transfer(pair.peer, mine, id="r")
    sent = await pair.one.transfer(pair.peer, mine, id="r", type=MemType.MIXED)
    assert [tier for tier, _ in sent.blocks] == [Tier.DRAM] * 2
    assert pair.two.owned_blocks(Tier.HBM) == 8
    with pytest.raises(ConfigError, match="end in HBM or DRAM"):
        await pair.one.transfer(pair.peer, mine, id="r", type=MemType.DISK)


async def test_destinations_are_blocks_of_the_receiver(pair: Pair) -> None:
    """As for hand-over layer by layer: the receiver has set its blocks aside beforehand."""
    mine, theirs = pair.one.alloc_mem(2, id="r"), pair.two.alloc_mem(2, id="request")
    pair.one.write(mine, kv(1, 2))
    sent = await pair.one.transfer(pair.peer, mine, theirs, id="r")
    assert [block for _, block in sent.blocks] == [address.place[0] for address in theirs]
    assert pair.received[0].addresses == tuple(theirs)
    assert np.array_equal(pair.two.read(theirs)[0], kv(1, 2))
    pair.two.free_mem(theirs)
    cached = list(range(50, 58))
    pair.two.insert(cached, pair.two.alloc_mem(2, id="other"))
    for flags in (TransferFlag.PULL, TransferFlag.PUSH):  # the blocks are another's by now
        with pytest.raises(RefusedError, match="not allocated here"):
            await pair.one.transfer(pair.peer, mine, theirs, id="r", flags=flags)
    pair.two.check()
    with pytest.raises(AddressError, match="no memory of 'two'"):
        await pair.one.transfer(pair.peer, mine, mine, id="r")
    with pytest.raises(UserError, match="as many destinations"):
        await pair.one.transfer(pair.peer, mine, theirs[:1], id="r")
    with pytest.raises(UserError, match="more addresses"):
        await pair.one.transfer_with_insert(pair.peer, [1], mine, id="r")


@pytest.mark.parametrize("flag", FLAGS)
async def test_memory_of_another_instance_is_allocated_filled_and_freed(
    pair: Pair, flag: TransferFlag
) -> None:
    """It belongs to the same `id` there, until it is freed from either side."""
    mine = pair.one.alloc_mem(3, id="session")
    pair.one.write(mine, kv(1, 3))
    theirs = await pair.one.alloc_mem(3, id="session", instance=pair.peer)
    assert {address.instance for address in theirs} == {"two"}
    assert pair.two.owned_blocks(Tier.HBM) == 3
    assert not pair.received, "nothing has been sent yet"
    for seed in (1, 2):
        pair.one.write(mine, kv(seed, 3))
        await pair.one.transfer(pair.peer, mine, theirs, id="session", flags=flag)
        assert np.array_equal(pair.two.read(pair.received[-1].addresses)[0], kv(seed, 3))
    with pytest.raises(RefusedError, match="not 'other'"):
        await pair.one.free_mem(theirs, id="other", instance=pair.peer)
    assert pair.two.owned_blocks(Tier.HBM) == 3
    assert await pair.one.free_mem(theirs[:1], id="session", instance=pair.peer) == 1
    assert pair.two.owned_blocks(Tier.HBM) == 2
    with pytest.raises(RefusedError, match="not allocated here"):
        await pair.one.free_mem(theirs[:1], id="session", instance=pair.peer)
    tokens = list(range(8))
    sent = await pair.one.transfer_with_insert(pair.peer, tokens, mine[:2], theirs[1:], id="session")
    assert sent.inserted
    assert np.array_equal(pair.found(tokens), kv(2, 2))
    assert not pair.two.ledger.owners


async def test_memory_of_another_instance_has_an_end(pair: Pair) -> None:
    await pair.one.alloc_mem(7, id="r", instance=pair.peer)
    with pytest.raises(RefusedError, match="2 blocks of HBM asked for, 1 of 8 are free"):
        await pair.one.alloc_mem(2, id="r", instance=pair.peer)
    found = await pair.one.alloc_mem(5, MemType.DRAM, id="r", instance=pair.peer)
    assert {address.tier for address in found} == {Tier.DRAM}
    for tier in (Tier.HBM, Tier.DRAM):
        mixed = await pair.one.alloc_mem(1, MemType.MIXED, id="r", instance=pair.peer)
        assert [address.tier for address in mixed] == [tier]
    assert pair.two.free_mem(id="r") == 7 + 5 + 2
    with pytest.raises(ConfigError, match="end in HBM or DRAM"):
        await pair.one.alloc_mem(1, MemType.DISK, id="r", instance=pair.peer)
    with pytest.raises(AddressError, match="no memory of 'two'"):
        await pair.one.free_mem(pair.one.alloc_mem(1, id="r"), id="r", instance=pair.peer)


async def test_what_is_freed_during_a_transfer_is_freed_when_it_ends(pair: Pair) -> None:
    mine = pair.one.alloc_mem(2, id="r")
    pair.one.write(mine, kv(1, 2))
    tokens = list(range(8))
    pair.cached(tokens, kv(2, 2))
    hold = pair.one.match(tokens, id="r")
    used = [*mine, *hold.addresses]
    pair.one.begin_use(used)
    assert pair.one.free_mem(id="r") == 2
    with pytest.raises(AddressError, match="being transferred"):
        pair.one.insert(list(range(100, 108)), mine)
    assert pair.one.owned_blocks(Tier.HBM) == 2
    assert pair.one.swap_out(2) == 0
    pair.one.check()
    pair.one.end_use(used)
    assert not pair.one.ledger.owners
    assert pair.one.swap_out(2) == 2


async def test_a_receiver_that_is_gone_costs_nothing(pair: Pair) -> None:
    mine = pair.one.alloc_mem(2, id="r")
    pair.one.write(mine, kv(1, 2))
    await pair.endpoints.pop().close()
    with pytest.raises(TransferError):
        await pair.one.transfer(pair.peer, mine, id="r", seconds=0.5)
    assert pair.one.free_mem(mine) == 2
    pair.one.check()


async def test_blocks_that_were_sent_can_be_used_again(pair: Pair) -> None:
    """They were sealed for the reader, and are opened again when they are given out or written."""
    for seed in range(3):
        mine = pair.one.alloc_mem(8, id="r")
        pair.one.write(mine, kv(seed, 8))
        pair.one.write(mine, kv(seed + 10, 8))
        await pair.one.transfer(pair.peer, mine, id="r")
        pair.one.write(mine[:1], kv(seed + 20, 1))
        await pair.one.transfer(pair.peer, mine[:1], id="r", type=MemType.DRAM)
        assert np.array_equal(pair.two.read(pair.received[-2].addresses)[0], kv(seed + 10, 8))
        assert np.array_equal(pair.two.read(pair.received[-1].addresses)[0], kv(seed + 20, 1))
        pair.one.free_mem(mine)
        assert pair.two.free_mem(id="r") == 9


async def test_a_tenants_blocks_stay_the_tenants(pair: Pair) -> None:
    tenant = dataclasses.replace(SPACE, salt="tenant")
    tokens = list(range(8))
    pair.cached(tokens, kv(1, 2), tenant)
    with pair.one.match(tokens, id="r", namespace=tenant) as hold:
        assert (await pair.one.transfer_with_insert(pair.peer, tokens, hold.addresses, id="r")).inserted
        with pytest.raises(UserError, match="another namespace"):
            await pair.one.transfer_with_insert(pair.peer, tokens, hold.addresses, id="r", namespace=SPACE)
    assert len(pair.found(tokens)) == 0
    assert np.array_equal(pair.found(tokens, tenant), kv(1, 2))
    mine = pair.one.alloc_mem(2, id="r")
    pair.one.write(mine, kv(2, 2))
    other = dataclasses.replace(SPACE, salt="other")
    await pair.one.transfer_with_insert(pair.peer, tokens, mine, id="r", namespace=other)
    assert np.array_equal(pair.found(tokens, other), kv(2, 2))
    with pytest.raises(UserError, match="one model, weights and layout"):
        await pair.one.transfer_with_insert(
            pair.peer, tokens, mine, id="r", namespace=dataclasses.replace(SPACE, weights_version="x")
        )


@pytest.mark.parametrize("private", [b"", b"\xff", b"\x91\xa1x", NO_TENANT])
async def test_a_transfer_that_no_pool_sent_is_refused(pair: Pair, private: bytes) -> None:
    mine = pair.one.alloc_mem(1, id="r")
    pair.one.write(mine, kv(1, 1))
    endpoint = pair.endpoints[0]
    endpoint.pools["hbm"].seal(np.array([mine[0].place[0]]))
    with pytest.raises(RefusedError, match=r"private|namespace"):
        await transfer_blocks(
            endpoint, pair.peer, "r", "hbm", np.array([mine[0].place[0]]), "hbm", seconds=5, private=private
        )
    assert not pair.two.ledger.owners


def test_namespaces_that_are_tuples_are_named_as_they_are() -> None:
    pool = MemPool.create("one", LAYOUT, 1, namespace=SPACE)
    pool.namespace = (0, None, "salt")
    assert unseal(pool, seal(pool, (1, "key", None), b"p")) == ((1, "key", None), b"p")
    with pytest.raises(UserError, match="cannot be named"):
        seal(pool, object(), b"")

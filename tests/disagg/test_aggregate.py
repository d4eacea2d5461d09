"""Two pools of one rank: packing into an arena, and transfers between memory types and block sizes."""

import dataclasses

import numpy as np
import pytest

from sglang_ext.disagg.errors import RangeError
from sglang_ext.disagg.transfer.aggregate import Packer
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.engine import Endpoint
from sglang_ext.disagg.transfer.link import Outcome
from sglang_ext.disagg.transports import TransportName
from sglang_ext.testing.transfer.rig import NAMESPACE, Pool, Shape

PAGES = Shape(layers=3, heads=2, width=16, blocks=64, block_tokens=1)
"""HBM in pages of one token."""
BLOCKS = Shape(layers=3, heads=2, width=16, blocks=6, block_tokens=16)
"""DRAM in blocks of sixteen."""


async def start(name: str) -> tuple[Endpoint, Pool, Pool]:
    hbm, dram = Pool("hbm", PAGES, shared=True), Pool("dram", BLOCKS, shared=True, arena=True)
    config = EndpointConfig(name, NAMESPACE, transports=(TransportName.SHM,))
    # One block of tokens may be four pages of four or sixteen pages of one: the unit is found at CONNECT.
    return await Endpoint.start(config, [hbm.spec, dram.spec]), hbm, dram


def tokens(pool: Pool, layer: int, kind: str) -> np.ndarray:
    """Rows of a plane by token slot: (slots, heads, bytes)."""
    view = pool.view(layer, kind)
    return view.reshape(-1, *view.shape[2:])


async def test_packing_and_unpacking_move_every_plane() -> None:
    endpoint, hbm, dram = await start("a")
    try:
        hbm.fill(1)
        packer = Packer(endpoint.pools["hbm"].meta, endpoint.pools["dram"].meta, endpoint.regions)
        pages = np.random.default_rng(2).permutation(64)[:32]
        packer.pack(pages, np.array([4, 1]))
        slots = np.concatenate([np.arange(64, 80), np.arange(16, 32)])
        for layer in range(3):
            for kind in "kv":
                assert np.array_equal(tokens(dram, layer, kind)[slots], tokens(hbm, layer, kind)[pages])
                assert not tokens(dram, layer, kind)[:16].any()
        before = hbm.bytes.copy()
        hbm.bytes[:] = 0
        packer.unpack(np.array([4, 1]), pages)
        kept = np.isin(np.arange(64), pages)
        for layer in range(3):
            plane = tokens(hbm, layer, "v")
            assert not plane[~kept].any()
        hbm.bytes[:] = np.where(hbm.bytes, hbm.bytes, before)
        assert np.array_equal(hbm.bytes, before)
        with pytest.raises(RangeError, match="cannot fill"):
            packer.pack(pages[:15], np.array([0]))
    finally:
        await endpoint.close()
        hbm.close()
        dram.close()


async def test_any_memory_type_and_block_size_into_any_other() -> None:
    a, a_hbm, a_dram = await start("a")
    b, b_hbm, b_dram = await start("b")
    pages = np.random.default_rng(3).permutation(64)
    ids = {"hbm": pages[:32], "dram": np.array([5, 2])}
    slots = {"hbm": pages[:32], "dram": np.concatenate([np.arange(80, 96), np.arange(32, 48)])}
    source, target = {"hbm": a_hbm, "dram": a_dram}, {"hbm": b_hbm, "dram": b_dram}
    try:
        a_hbm.fill(4)
        a_dram.fill(5)
        instance = await b.connect([a.address])
        for there in ("hbm", "dram"):
            a.pools[there].seal(ids[there])
            for here in ("hbm", "dram"):
                offer = a.publish(there, f"{there}-{here}", ids[there])
                instance.transfer(offer.request, [offer], here, ids[here])
                assert await instance.complete(offer.request, 10) is Outcome.RELEASED
                for layer in range(3):
                    for kind in "kv":
                        got = tokens(target[here], layer, kind)[slots[here]]
                        assert np.array_equal(got, tokens(source[there], layer, kind)[slots[there]])
        # Between two arenas a block is one run; two neighbours are one altogether.
        before = dataclasses.replace(instance.links[0].peer.stats)
        a.pools["dram"].seal(np.array([3, 4]))
        offer = a.publish("dram", "run", np.array([3, 4]))
        instance.transfer("run", [offer], "dram", np.array([0, 1]))
        assert await instance.complete("run", 10) is Outcome.RELEASED
        assert instance.links[0].peer.stats.transactions - before.transactions == 1
    finally:
        await b.close()
        await a.close()
        for pool in (a_hbm, a_dram, b_hbm, b_dram):
            pool.close()

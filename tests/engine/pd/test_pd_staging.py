"""By-request aggregation: packed KV arrives unchanged, KV without room in staging travels in blocks, and
staging is free again however a request ends.
"""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from engine_pools import PoolKind, Pools
from pd_rig import LAYERS, PAGES, Rig, pool_and_geometry, rig
from test_pd_handovers import ROWS, hand_over, push

from sglang_ext.config import KvConfig
from sglang_ext.disagg.handover import ReceiverState, SenderState
from sglang_ext.disagg.memory import MemoryKind
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.staging import STAGING, Staging
from sglang_ext.disagg.transports import TransportName
from sglang_ext.disagg.transports.verbs import VerbsTransport
from sglang_ext.engine.pd.landing import Wanted
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.errors import ConfigError
from sglang_ext.patches.adapter.build_transfers import staging_of, start_fetching
from sglang_ext.patches.adapter.hbm import EnginePool, pool_geometry

pytestmark = pytest.mark.slow

NUMBERS = itertools.count(1 << 40)
MOVES = {"pull": hand_over, "push": push}


def same(servers: Rig, here: list[int], there: list[int]) -> bool:
    given = np.concatenate([side.kv(here, servers.page) for side in servers.prefill], axis=2)
    taken = np.concatenate([side.kv(there, servers.page) for side in servers.decode], axis=2)
    return np.array_equal(given, taken)


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize(
    ("page", "staging"),
    [(1, (8, 8)), (16, (8, 8)), (1, (8, 2)), (4, (2, 8))],
    ids=["page-1", "page-16", "no-room-on-decode", "no-room-on-prefill"],
)
def test_what_is_packed_arrives_as_it_was(page: int, staging: tuple[int, int], mode: str) -> None:
    here, there = [5, 3, 9, 10, 31], [40, 2, 7, 21, 6]
    with rig(page=page, mode=mode, staging=staging) as servers:
        # Twice: staging that was read has to be writable again.
        for _ in range(2):
            MOVES[mode](servers, here, there)
            assert same(servers, here, there)
            servers.check()
            here, there = [side[::-1] for side in (there, here)]


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_may_cut_the_heads_differently(prefill: int, decode: int, mode: str) -> None:
    with rig(prefill, decode, mode=mode, staging=(8, 8)) as servers:
        MOVES[mode](servers, [5, 3, 9], [40, 2, 7])
        assert same(servers, [5, 3, 9], [40, 2, 7])
        servers.check()


def test_one_rank_may_offer_packed_pages_and_another_its_own() -> None:
    with rig(2, 1, staging=(4, 8)) as servers:
        first = servers.prefill[0].agent.transfers.staging
        assert first is not None
        taken = first.take(3)
        assert taken is not None
        hand_over(servers, [5, 3, 9], [40, 2, 7])
        assert same(servers, [5, 3, 9], [40, 2, 7])
        first.give(taken)
        servers.check()


@pytest.mark.usefixtures("sglang_config")
@pytest.mark.parametrize(("pages", "blocks"), [(3.5, 3), (8, 8), (0.5, 1), (1000, 41)])
def test_the_flag_says_how_much_is_packed_at_once(pages: float, blocks: int) -> None:
    """``--kv-transfer-layout aggregated,staging=SIZE``: at least one page, at most the pool."""
    pools = Pools(PoolKind(), 40, block=4, rows=2, context=64)
    page_bytes = pools.geometry().block_bytes // 4
    geometry = pool_geometry(
        pools.tensors,
        block_tokens=1,
        page_tokens=1,
        first_layer=0,
        model_layers=2,
        tp_rank=0,
        tp_size=1,
        model_kv_heads=2,
    )
    config = KvConfig(transfer_layout="aggregated", transfer_staging_size=int(pages * page_bytes))
    staging = staging_of(config, geometry, MemoryKind.HOST)
    assert staging is not None
    try:
        assert staging.spec.blocks == staging.blocks == blocks
        assert staging.take(blocks + 1) is None
        assert staging.take(blocks) is not None
    finally:
        staging.close()
    assert staging_of(KvConfig(transfer_staging_size=1), geometry, MemoryKind.HOST) is None
    with pytest.raises(ConfigError, match="--kv-transfer-layout"):
        staging_of(config, geometry, MemoryKind.CUDA)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_packed_request_is_one_range(mode: str) -> None:
    here, there = [5, 30, 9, 1, 12, 50], [40, 2, 7, 33, 60, 21]
    ranges = {}
    for staging in (None, (8, 8)):
        with rig(page=1, mode=mode, staging=staging) as servers:
            MOVES[mode](servers, here, there)
            assert same(servers, here, there)
            (side,) = servers.decode if mode == "pull" else servers.prefill
            (stats,) = side.agent.endpoint.totals().values()
            ranges[staging] = stats.runs
    assert ranges == {None: len(here) * 2 * LAYERS, (8, 8): 1}


def test_a_cached_prefix_is_neither_sent_nor_unpacked() -> None:
    with rig(staging=(8, 8)) as servers:
        others = [page for page in range(PAGES) if page not in (50, 51)]
        before = servers.decode[0].kv(others, servers.page)
        hand_over(servers, [1, 2, 3, 4], [50, 51], skip=2)
        assert same(servers, [3, 4], [50, 51])
        assert np.array_equal(servers.decode[0].kv(others, servers.page), before)
        servers.check()


def test_the_engines_pages_are_not_leased_while_packed_ones_are_read() -> None:
    with rig(staging=(8, 8)) as servers:
        agent, number = servers.prefill[0].agent, next(NUMBERS)
        handover = agent.sender.open(number)
        receiving = servers.decode[0].agent.receiver.open(servers.address, number)
        agent.sender.complete(handover, np.array([1, 2, 3]), ROWS)
        servers.wait(lambda: receiving.state is ReceiverState.READY, "an offer")
        pools = agent.endpoint.pools
        assert (pools[HBM_POOL].pinned, pools[STAGING].pinned) == (0, 3)
        servers.decode[0].agent.receiver.abort(receiving, "the client is gone")
        servers.wait(lambda: handover.state is SenderState.LOST, "the end on prefill")
        assert pools[STAGING].pinned == 0
        servers.check()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_staging_is_kept_until_a_copy_has_ended(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that ends while it is packed or unpacked: its blocks are not reused before the copy ends."""
    with rig(staging=(8, 8)) as servers:
        agents = servers.prefill[0].agent, servers.decode[0].agent
        agent = agents[0] if side == "prefill" else agents[1]
        begun, go_on = threading.Event(), threading.Event()
        staging = agent.transfers.staging
        assert staging is not None
        packer = staging._packer
        copy = packer.pack if side == "prefill" else packer.unpack

        def held(*args: object) -> None:
            begun.set()
            assert go_on.wait(20)
            copy(*args)

        monkeypatch.setattr(packer, "pack" if side == "prefill" else "unpack", held)
        number = next(NUMBERS)
        handover, receiving = agents[0].sender.open(number), agents[1].receiver.open(servers.address, number)
        agents[0].sender.complete(handover, np.array([1, 2, 3]), ROWS)
        if side == "decode":
            servers.wait(lambda: receiving.state is ReceiverState.READY, "an offer")
            agents[1].receiver.read(receiving, Wanted(np.array([4, 5, 6]), 0, 0))
        servers.wait(begun.is_set, "a copy")
        if side == "prefill":
            handover.give_up("gone")
        else:
            agents[1].receiver.abort(receiving, "gone")
            assert receiving.state is ReceiverState.STOPPING, "its pages are still written to"
        assert staging.used == 3
        go_on.set()
        servers.wait(lambda: staging.used == 0, "the end of the copy")
        servers.wait(lambda: receiving.state is ReceiverState.FAILED, "the end on decode")
        servers.wait(lambda: handover.state in (SenderState.LOST, SenderState.RELEASED), "the end on prefill")
        servers.check()


def test_blocks_are_given_side_by_side_and_again() -> None:
    _, _, geometry = pool_and_geometry(0, 1, 1, seed=0)
    staging = Staging(geometry, 10 * geometry.layout.block_bytes)
    try:
        first, second, third = (staging.take(count) for count in (4, 3, 3))
        assert [list(each) for each in (first, second, third)] == [  # type: ignore[arg-type]
            [0, 1, 2, 3],
            [4, 5, 6],
            [7, 8, 9],
        ]
        assert staging.take(1) is None
        assert staging.take(0) is None
        assert second is not None
        staging.give(second)
        assert staging.take(4) is None
        again = staging.take(2)
        assert again is not None
        assert list(again) == [4, 5]
        assert staging.used == 9
    finally:
        staging.close()


def test_layouts_that_differ_are_refused() -> None:
    with rig() as servers, rig(staging=(4, 4)) as others:
        receiving = others.decode[0].agent.receiver.open(servers.address, next(NUMBERS))
        servers.wait(lambda: receiving.state is ReceiverState.FAILED, "the refusal")
        assert "--kv-transfer-layout" in receiving.reason


def test_by_layer_and_aggregated_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="--kv-transfer-layout"):
        KvConfig(transfer_mode="push-by-layer", transfer_layout="aggregated")


def test_fetching_is_off_with_the_reason_where_no_transport_is_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(VerbsTransport, "unavailable", lambda self: "no RDMA device")
    pools = Pools(PoolKind(), 40, block=4, rows=2, context=64)
    config = EndpointConfig("x", "a model", transports=(TransportName.VERBS,))
    spec = EnginePool(pools.tensors, pools.geometry()).spec("dram")
    with caplog.at_level("WARNING"):
        assert start_fetching(config, [spec]) is None
    assert "neither fetched" in caplog.text
    assert "verbs: no RDMA device" in caplog.text

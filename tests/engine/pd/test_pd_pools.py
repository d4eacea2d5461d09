"""Hand-overs between SGLang's own pools on the CPU: every row that a model reads at decode is prefill's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_pools import PoolKind, Pools, WrongKvError, chain_of
from pd_rig import hand_over, pair

from sglang_ext.disagg.transfer.pools import PoolSpec
from sglang_ext.engine.pd.landing import Wanted
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.patches.adapter.hbm import EnginePool

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

TOKENS = 300
CHAIN = np.array(chain_of("prompt", range(TOKENS)), np.uint64)


def plain(kind: PoolKind) -> tuple[Pools, PoolSpec]:
    """SGLang's pool for some pages, as an endpoint has it."""
    pools = Pools(kind, 12 * kind.page, block=kind.page, rows=1, context=1)
    return pools, EnginePool(pools.tensors, pools.geometry()).spec(HBM_POOL)


def slots_of(pages: list[int], page: int, tokens: int) -> np.ndarray:
    return (np.array(pages)[:, None] * page + np.arange(page)).ravel()[:tokens]


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("kind", [PoolKind("dsa", 64, layers=3), PoolKind("mla", 64)], ids=str)
def test_every_plane_of_a_page_is_handed_over(kind: PoolKind, mode: str) -> None:
    """Latents, and the index keys of layers that have them; the last page is not full, and decode has the
    first. The twin: a byte of any plane that is another one is seen."""
    here, there = [5, 3, 9, 10, 2], [7, 1, 12, 4]
    (prefill, sends), (decode, receives) = plain(kind), plain(kind)
    computed = slots_of(here, kind.page, TOKENS)
    received = slots_of(there, kind.page, TOKENS - kind.page)
    for layer in range(kind.layers):
        prefill.oracle.write(computed, CHAIN, layer)
    with pair([sends], [receives], kind.page, mode) as (sender, receiver, address):
        hand_over(sender, receiver, address, here, Wanted(np.array(there), 1, 0))
    for layer in range(kind.layers):
        decode.oracle.compare(received, CHAIN[kind.page :], layer, "received")
    for layer, planes in enumerate(decode.tensors):
        for plane in planes:
            row = plane.view(torch.uint8).view(len(plane), -1)[int(received[70])]
            row[0] ^= 1
            with pytest.raises(WrongKvError):
                decode.oracle.compare(received, CHAIN[kind.page :], layer, "damaged")
            row[0] ^= 1

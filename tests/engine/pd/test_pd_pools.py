"""Hand-overs between SGLang's own pools on the CPU: every row that a model reads at decode is prefill's."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from engine_hybrid_pools import FULL, MAMBA, SWA, HybridKind, HybridPools
from engine_pools import PoolKind, Pools, WrongKvError, chain_of
from pd_rig import hand_over, pair
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_ext.disagg.handover import ReceiverState
from sglang_ext.disagg.transfer.pools import PoolSpec
from sglang_ext.engine.hybrid.components import FULL as FULL_KV
from sglang_ext.engine.pd.landing import PoolRows, Wanted
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.patches.adapter.hbm import EnginePool
from sglang_ext.patches.adapter.hybrid.pools import STATE, WINDOW, ComponentPool, component_pools
from sglang_ext.testing.waiting import wait_until

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


KINDS = [
    HybridKind(window=100, page=16),
    HybridKind(window=100, page=16, latents=True),
    HybridKind(states=9, page=1),
    HybridKind(window=100, states=9, page=16),
]
PARTS: dict[ComponentType, str] = {FULL: HBM_POOL, SWA: WINDOW, MAMBA: STATE.name}


def hybrid(kind: HybridKind) -> tuple[HybridPools, dict[str, ComponentPool]]:
    """SGLang's pools of a model with windows or states, and as endpoints have them."""
    pools = HybridPools(kind, tokens=400, window_tokens=208 if kind.window else 0)
    found = component_pools(pools.params(), kind.window or None)
    return pools, {HBM_POOL if each.component == FULL_KV else each.component.name: each for each in found}


@dataclass
class Place:
    """The blocks of one request in each pool of a side. Pages are numbered from 1, as SGLang has it."""

    pages: list[int]
    window: list[int]
    state: int

    @staticmethod
    def of(kind: HybridKind, seed: int) -> Place:
        rng = np.random.default_rng(seed)
        whole = -(-TOKENS // kind.page)
        last = whole - (TOKENS - kind.window) // kind.page
        window = rng.permutation(np.arange(1, 208 // kind.page + 1))[:last] if kind.window else []
        return Place(list(rng.permutation(np.arange(1, 400 // kind.page + 1))[:whole]), list(window), seed)

    def beside(self, kind: HybridKind) -> tuple[PoolRows, ...]:
        found = [PoolRows(WINDOW, np.array(self.window))] if kind.window else []
        return (*found, PoolRows(STATE.name, np.array([self.state]))) if kind.states else tuple(found)

    def rows(self, part: ComponentType, kind: HybridKind) -> tuple[np.ndarray, np.ndarray]:
        """The slots of a component, and the tokens whose rows they are."""
        if part == MAMBA:
            return np.array([self.state]), CHAIN[-1:]
        if part == FULL:
            return slots_of(self.pages, kind.page, TOKENS), CHAIN
        first = (TOKENS - kind.window) // kind.page * kind.page
        return slots_of(self.window, kind.page, TOKENS - first), CHAIN[first:]


def compare(pools: HybridPools, place: Place, what: str) -> None:
    for part, oracle in pools.oracles.items():
        for layer in range(oracle.layers):
            oracle.compare(*place.rows(part, pools.kind), layer, what)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_windows_and_states_are_handed_over(kind: HybridKind) -> None:
    """The rows of the window lie in other slots than those of all tokens, at decode too. The twin: a byte of
    any pool that is another one is seen."""
    (prefill, sends), (decode, receives) = hybrid(kind), hybrid(kind)
    here, there = Place.of(kind, 3), Place.of(kind, 5)
    for part, oracle in prefill.oracles.items():
        for layer in range(oracle.layers):
            oracle.write(*here.rows(part, kind), layer)
    described = {name: pool.described(1) for name, pool in sends.items()}
    specs = [[pool.spec(name, 0, 1) for name, pool in side.items()] for side in (sends, receives)]
    with pair(*specs, kind.page, components=(described, described)) as (sender, receiver, address):
        wanted = Wanted(np.array(there.pages), 0, 0, beside=there.beside(kind))
        hand_over(sender, receiver, address, here.pages, wanted, here.beside(kind))
        assert [pool.pinned for pool in sender.endpoint.pools.values()] == [0] * len(sends)
    compare(decode, there, "received")
    for part, planes in decode.planes.items():
        slot = int(there.rows(part, kind)[0][-1])
        row = planes[-1][-1][slot].view(torch.uint8).view(-1)
        row[0] ^= 1
        with pytest.raises(WrongKvError):
            compare(decode, there, "damaged")
        row[0] ^= 1
    compare(decode, there, "mended")


def test_a_window_for_which_decode_has_other_room_fails_by_name() -> None:
    kind = KINDS[0]
    (_, sends), (_, receives) = hybrid(kind), hybrid(kind)
    here = Place.of(kind, 3)
    described = {name: pool.described(1) for name, pool in sends.items()}
    specs = [[pool.spec(name, 0, 1) for name, pool in side.items()] for side in (sends, receives)]
    short = (PoolRows(WINDOW, np.array(here.window[1:])),)
    with pair(*specs, kind.page, components=(described, described)) as (sender, receiver, address):
        for number, (beside, why) in enumerate((((), "other room"), (short, "pages in window")), 1):
            wanted = Wanted(np.array(here.pages), 0, 0, beside=beside)
            with pytest.raises(AssertionError, match=why):
                hand_over(sender, receiver, address, here.pages, wanted, here.beside(kind), number)


OTHERS = [
    (HybridKind(window=100, page=16), HybridKind(window=80, page=16), r"window \("),
    (HybridKind(window=100, page=16), HybridKind(window=100, page=16, latents=True), r"hbm \("),
    (HybridKind(states=9, page=1), HybridKind(window=100, page=1), r"state \(.* there, none here"),
    (KINDS[0], KINDS[0], "2048 bytes, of all ranks .* there, .* 4096 bytes, of all ranks"),
]


@pytest.mark.parametrize(("ours", "theirs", "word"), OTHERS, ids=["window", "latents", "state", "heads"])
def test_unequal_windows_or_states_are_refused_at_the_join(
    ours: HybridKind, theirs: HybridKind, word: str
) -> None:
    """The last: with two ranks that have as many heads each, a model has twice as many."""
    sides = [hybrid(kind)[1] for kind in (ours, theirs)]
    ranks = (1, 2) if ours is theirs else (1, 1)
    specs = [[pool.spec(name, 0, 1) for name, pool in side.items()] for side in sides]
    described = [
        {name: pool.described(n) for name, pool in side.items()} for n, side in zip(ranks, sides, strict=True)
    ]
    with pair(*specs, 16, components=(described[0], described[1])) as (_, receiver, address):
        taken = receiver.receiver.open(address, 1)
        wait_until(lambda: taken.over, seconds=20, what="the refusal")
        assert taken.state is ReceiverState.FAILED
        assert re.search(f"memory of windows or states differs: .*{word}", taken.reason), taken.reason

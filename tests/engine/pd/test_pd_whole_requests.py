"""Hand-overs of all that SGLang keeps for a request, between its own pools on the CPU: pages, windows and
states, those of draft models, and the rows that it keeps by request.

SGLang lists for its own transfer backends the buffers that it hands over, and their units: nothing
is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_drafts import DRAFTED, GRID, PAGED_WINDOW, STATES, with_draft
from engine_hybrid_pools import FULL, MAMBA, SWA, HybridPools, Ids, process_settings
from engine_hybrids import HybridScenario
from engine_page_pools import COMPRESSED, GROUPED, LOW_RATIO, QSA, whole
from engine_pools import WrongKvError, chain_of
from pd_rig import hand_over, pair
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.utils import (
    get_dsa_tail_state_indices,
    get_qsa_pending_state_indices,
    setup_state_kv_args,
)
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_ext.engine.pd.landing import PoolRows, Wanted
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.errors import ConfigError
from sglang_ext.patches.adapter.hybrid.handed_over import REQUEST, handed_over_pools
from sglang_ext.patches.adapter.hybrid.pools import STATE, WINDOW, ComponentPool
from sglang_ext.patches.adapter.pd.kv_manager import _POOLS, require_pools, rows_beside

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

PAGES, WINDOW_PAGES = 10, 8
"""Pages of the pools of a side."""
BEHIND = 71
"""Tokens behind the last whole page: no whole group of 2, 4 or 128 tokens."""
PLACES = {FULL: HBM_POOL, SWA: WINDOW, MAMBA: STATE.name}
SCENARIOS = {
    "window-draft": PAGED_WINDOW,
    "window-plain-draft": next(each for each in DRAFTED if "draft without one" in each.name),
    "state-draft": STATES,
    "grid-draft": GRID,
    "compressed": COMPRESSED,
    "compressed-draft": with_draft(COMPRESSED),
    "low-ratio": LOW_RATIO,
    "low-ratio-draft": with_draft(LOW_RATIO),
    "grouped": GROUPED,
    "grouped-draft": with_draft(GROUPED),
    "qsa": QSA,
    "qsa-draft": with_draft(QSA),
}


@dataclass
class Side:
    """SGLang's pools of a server, as its endpoint has them and as SGLang lists them for hand-overs."""

    scenario: HybridScenario
    pools: HybridPools
    found: dict[str, ComponentPool]
    args: Any

    @property
    def kinds(self) -> list[str]:
        return [kind.value for kind in self.args.state_types]

    @property
    def tokens(self) -> int:
        page = self.pools.kind.page
        return 4 * page + BEHIND % page if page > 1 else 3 * 64 + BEHIND

    def planes(self, pool: str) -> list[torch.Tensor]:
        return [plane for layer in self.found[pool].planes_by_layer for plane in layer]


@contextmanager
def side(scenario: HybridScenario) -> Iterator[Side]:
    kind = scenario.kind
    tokens = PAGES * kind.page if kind.page > 1 else 400
    with process_settings(kind):
        window_tokens = WINDOW_PAGES * max(kind.page, 16) if kind.window else 0
        pools = scenario.make_pools(kind, tokens=tokens, window_tokens=window_tokens)
        found = handed_over_pools(pools.params(), kind.window or None, pools.drafts)
        yield Side(scenario, pools, found, listed(pools))


def listed(pools: HybridPools) -> Any:
    """As SGLang's queues list a server's memory."""
    args, draft = KVArgs(), next(iter(pools.drafts.pools), None)
    infos = [pool.get_contiguous_buf_infos() for pool in (pools.kvcache, draft) if pool is not None]
    joined = [list(chain.from_iterable(each)) for each in zip(*infos, strict=True)]
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = joined
    setup_state_kv_args(args, pools.kvcache, draft, len(infos[0][0]), pools.requests)
    return args


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_a_pool_has_all_that_sglang_hands_over_in_its_units(scenario: HybridScenario) -> None:
    with side(scenario) as here:
        require_pools(here.kinds, here.found)
        args = here.args
        listed = [(HBM_POOL, *each) for each in zip(args.kv_data_ptrs, args.kv_item_lens, strict=True)]
        for kind, *entries in zip(here.kinds, args.state_data_ptrs, args.state_item_lens, strict=True):
            listed += [(_POOLS[kind] or HBM_POOL, *each) for each in zip(*entries, strict=True)]
        blocks = {
            (name, plane.data_ptr(), plane.stride(0) * pool.block_rows)
            for name, pool in here.found.items()
            for plane in here.planes(name)
        }
        missing = [each for each in listed if each[2] and each not in blocks]
        assert not missing


def test_a_state_without_a_pool_is_refused_by_name() -> None:
    with (
        side(COMPRESSED) as here,
        pytest.raises(ConfigError, match="this state of a model: c128_state, swa_ring"),
    ):
        require_pools([*here.kinds, "swa_ring"], here.found.keys() - {REQUEST})


@dataclass(frozen=True)
class Place:
    """The rows of one request at a side. Pages are numbered from 1, as SGLang has it."""

    at: Side
    pages: Ids
    window: Ids
    request: int

    @staticmethod
    def of(at: Side, seed: int) -> Place:
        page, rng = at.pools.kind.page, np.random.default_rng(seed)
        count = -(-at.tokens // page)
        pages = rng.permutation(np.arange(1, at.pools.tokens // page + 1))[:count]
        window = rng.permutation(np.arange(1, at.pools.window_tokens // page + 1))[: count - at_page(at)]
        return Place(at, pages, window, seed)

    def beside(self) -> tuple[PoolRows, ...]:
        """The rows that SGLang names, by its own functions."""
        pools = self.at.pools
        named = {
            "swa": lambda: self.window,
            "mamba": lambda: [np.array([self.request])],
            "dsa": lambda: self.pages,
            "qsa_compressed": lambda: self.pages,
            "qsa_pending": lambda: get_qsa_pending_state_indices(self.running),
            "dsa_tail": lambda: get_dsa_tail_state_indices(pools.kvcache, self.request, self.at.tokens),
            "c128_state": lambda: pools.kvcache.request_state_transfer_indices(self.request, self.at.tokens),
        }
        return rows_beside(self.at.kinds, [named[kind]() for kind in self.at.kinds])

    @property
    def running(self) -> Any:
        """The request, as SGLang's functions ask for its row."""
        return SimpleNamespace(kv=SimpleNamespace(req_pool_idx=self.request))

    def slots(self, part: ComponentType) -> tuple[Ids, int]:
        """The slots of a component, and the first token whose rows are there."""
        page, tokens = self.at.pools.kind.page, self.at.tokens
        if part == MAMBA:
            return np.array([self.request]), tokens - 1
        first = at_page(self.at) * page if part == SWA else 0
        pages = self.window if part == SWA else self.pages
        return (pages[:, None] * page + np.arange(page)).ravel()[: tokens - first], first


def at_page(at: Side) -> int:
    """The first page of the last window."""
    return max(0, at.tokens - at.pools.kind.window) // at.pools.kind.page


def each_layer(place: Place, call: str, *more: str) -> None:
    """Write or compare the rows of the model and of the draft model."""
    pools, text = place.at.pools, [at % 7 for at in range(place.at.tokens)]
    hashes = np.array(chain_of("prompt", text), np.uint64)
    drafts = pools.kind.draft_chain(hashes, [5])
    for oracles, rows in ((pools.oracles, hashes), (pools.draft_oracles, drafts)):
        for part, oracle in oracles.items():
            slots, first = place.slots(part)
            for layer in range(oracle.layers):
                getattr(oracle, call)(slots, rows[first:], layer, *more)


def filled(at: Side, seed: int) -> None:
    """Random bytes in all memory of requests."""
    torch.manual_seed(seed)
    for name in at.found.keys() & {REQUEST, WINDOW}:
        for plane in at.planes(name):
            plane.random_(0, 256)


def rows_of(place: Place) -> dict[str, Sequence[int]]:
    return {HBM_POOL: place.pages, **{each.pool: each.rows for each in place.beside()}}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_all_of_a_request_is_handed_over(scenario: HybridScenario) -> None:
    """Prompts end within a page and within groups. Decode has other rows. The twin: a byte of any pool that
    is another one is seen."""
    with side(whole(scenario)) as prefill, side(whole(scenario)) as decode:
        here, there = Place.of(prefill, 3), Place.of(decode, 5)
        filled(prefill, 7)
        each_layer(here, "write")
        described = [{name: pool.described(1) for name, pool in at.found.items()} for at in (prefill, decode)]
        specs = [[pool.spec(name, 0, 1) for name, pool in at.found.items()] for at in (prefill, decode)]
        page = scenario.kind.page
        with pair(*specs, page, components=(described[0], described[1])) as (sender, receiver, address):
            wanted = Wanted(there.pages, 0, 0, beside=there.beside())
            hand_over(sender, receiver, address, list(here.pages), wanted, here.beside())
            assert [pool.pinned for pool in sender.endpoint.pools.values()] == [0] * len(prefill.found)
        each_layer(there, "compare", "received")
        assert_equal_bytes(here, there)
        assert {REQUEST} & {*decode.found} == {REQUEST} & {each.pool for each in there.beside()}
        for name in rows_of(there):
            row = decode.planes(name)[-1][int(rows_of(there)[name][-1]) * decode.found[name].block_rows]
            row[0] ^= 1
            with pytest.raises(AssertionError):
                assert_equal_bytes(here, there)
            row[0] ^= 1
        assert_equal_bytes(here, there)


def assert_equal_bytes(here: Place, there: Place) -> None:
    """The blocks of a request are the same at both sides, in each pool."""
    assert [*here.at.found] == [*there.at.found]
    theirs = rows_of(there)
    for name, rows in rows_of(here).items():
        count = here.at.found[name].block_rows
        for sent, received in zip(here.at.planes(name), there.at.planes(name), strict=True):
            for one, other in zip(rows, theirs[name], strict=True):
                mine, got = (
                    plane[int(row) * count : (int(row) + 1) * count]
                    for plane, row in ((sent, one), (received, other))
                )
                assert torch.equal(mine, got), f"{name}: block {other} is not block {one}"


@pytest.mark.parametrize("scenario", [PAGED_WINDOW, STATES, COMPRESSED, GROUPED, QSA], ids=str)
def test_a_missing_draft_is_refused_at_the_join(scenario: HybridScenario) -> None:
    """A decode server without the draft, or a prefill server without it."""
    without = replace(scenario, kind=replace(scenario.kind, draft=(), verified=0))
    with side(with_draft(scenario)) as drafted, side(without) as plain:
        ours, theirs = (
            {name: pool.described(1) for name, pool in at.found.items()} for at in (drafted, plain)
        )
        assert ours != theirs


def test_one_wrong_row_of_a_draft_is_seen() -> None:
    """The twin of the comparison with what each layer has."""
    with side(PAGED_WINDOW) as here:
        place = Place.of(here, 3)
        each_layer(place, "write")
        each_layer(place, "compare", "written")
        for part, oracle in here.pools.draft_oracles.items():
            slots, _ = place.slots(part)
            oracle.spoil(slots[-1:])
            with pytest.raises(WrongKvError):
                each_layer(place, "compare", "spoilt")
            each_layer(place, "write")

"""Behaviour of a chain of tiers beyond the contract: one part fails, and the others go on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from sglang_ext.geometry import BlockLayout
from sglang_ext.testing.blocks import LAYOUT, NAMESPACE, get_all, memory_of, prefix_keys, put_all
from sglang_ext.testing.tiers import MemoryTier
from sglang_ext.tiered_store.chain import TierChain
from sglang_ext.tiered_store.tier import BlockMemory, Get, Ids, LayerRead, Outcome, Put
from sglang_ext.tiers import Tier


class Failing(MemoryTier):
    """A tier of which one thing fails."""

    def __init__(self, what: str) -> None:
        super().__init__(LAYOUT, 50)
        self.what = what

    def prepare_put(self, namespace: bytes, keys: Sequence[bytes]) -> Put | Outcome:  # type: ignore[override]
        return Outcome.READ_ONLY if self.what == "prepare_put" else super().prepare_put(namespace, keys)

    def put_layer(self, put: Put, layer: int, memory: BlockMemory, ids: Ids) -> Outcome:
        if self.what == "put_layer" and layer == 1:
            return Outcome.IO_ERROR
        return super().put_layer(put, layer, memory, ids)

    def complete_puts(self, puts: Sequence[Put]) -> list[Outcome]:
        if self.what != "complete_puts":
            return super().complete_puts(puts)
        for put in puts:
            self.abort_put(put)
        return [Outcome.IO_ERROR] * len(puts)

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        if self.what == "get_layer" and layer == 1:
            self.drop(get.namespace, get.keys[2:])
            get.blocks = min(get.blocks, 2)
            return LayerRead(super().get_layer(get, layer, memory, ids[:2]).blocks, Outcome.DAMAGED)
        return super().get_layer(get, layer, memory, ids)


@pytest.mark.parametrize("what", ["prepare_put", "put_layer", "complete_puts"])
@pytest.mark.parametrize("first", [False, True])
def test_what_one_part_does_not_take_another_does(what: str, first: bool) -> None:
    failing, sound = Failing(what), MemoryTier(LAYOUT, 50)
    tier = TierChain([failing, sound] if first else [sound, failing])
    keys = prefix_keys(1, 5)
    assert put_all(tier, NAMESPACE, keys) is Outcome.DONE
    assert (failing.match(NAMESPACE, keys), sound.match(NAMESPACE, keys)) == (0, 5)
    assert get_all(tier, NAMESPACE, keys) == 5
    tier.check()


@pytest.mark.parametrize("what", ["put_layer", "complete_puts"])
def test_a_put_is_not_done_where_only_a_tier_that_forgets_has_it(what: str) -> None:
    """The chain is durable, so a put that its durable part has not stored must not count as done."""
    durable, forgetful = Failing(what), MemoryTier(LAYOUT, 50)
    durable.durable = True
    tier = TierChain([forgetful, durable])
    assert tier.durable
    keys = prefix_keys(1, 5)
    memory, _ = memory_of(LAYOUT, NAMESPACE, keys)
    put = tier.prepare_put(NAMESPACE, keys)
    assert isinstance(put, Put)
    outcomes = [tier.put_layer(put, layer, memory, np.arange(5)) for layer in range(LAYOUT.n_layers)]
    if what == "put_layer":
        assert outcomes[1] is Outcome.IO_ERROR
        tier.abort_put(put)
    else:
        assert tier.complete_puts([put]) == [Outcome.IO_ERROR]
    tier.check()


def test_what_one_part_has_damaged_is_found_in_another_the_next_time() -> None:
    near, far = Failing("get_layer"), MemoryTier(LAYOUT, 50)
    tier = TierChain([near, far])
    keys = prefix_keys(1, 5)
    put_all(tier, NAMESPACE, keys)
    assert get_all(tier, NAMESPACE, keys) == 2
    near.what = ""
    get = tier.prepare_get(NAMESPACE, keys)
    assert [blocks for _, blocks in tier.sources(get)] == [2, 3]
    tier.complete_get(get)
    assert get_all(tier, NAMESPACE, keys) == 5


def test_a_block_that_any_part_lacks_is_written_to_that_part() -> None:
    near, far = MemoryTier(LAYOUT, 50), MemoryTier(LAYOUT, 50)
    keys = prefix_keys(1, 5)
    put_all(far, NAMESPACE, keys)
    put_all(near, NAMESPACE, keys[:3])
    tier = TierChain([near, far])
    assert (tier.match(NAMESPACE, keys), put_all(tier, NAMESPACE, keys)) == (5, Outcome.DONE)
    assert near.match(NAMESPACE, keys) == 5


def test_parts_of_other_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="one layout"):
        TierChain([MemoryTier(LAYOUT, 4), MemoryTier(BlockLayout(1, ((8,),)), 4, Tier.DISK)])

"""Holders: one object per place."""

from __future__ import annotations

import copy
import gc

import pytest

from sglang_ext.radix_global import Holder
from sglang_ext.tiers import Tier


def test_the_same_facts_are_the_same_object() -> None:
    holder = Holder.of("a", 0x2A, Tier.DRAM)
    assert Holder.of("a", 0x2A, Tier.DRAM) is holder
    assert copy.deepcopy(holder) is holder
    others = [Holder.of("b", 0x2A, Tier.DRAM), Holder.of("a", 1, Tier.DRAM), Holder.of("a", 0x2A, Tier.HBM)]
    assert holder not in others
    assert repr(holder) == "a/2a/DRAM"


def test_a_tier_is_itself_however_it_is_copied() -> None:
    assert copy.deepcopy(Tier.DISK) is Tier.DISK
    assert sorted([Tier.DISK, Tier.HBM, Tier.DRAM]) == [Tier.HBM, Tier.DRAM, Tier.DISK]


def test_a_holder_without_references_is_forgotten() -> None:
    gc.collect()  # of other tests
    before = len(Holder._interned)
    holder = Holder.of("short-lived", 1, Tier.HBM)
    assert len(Holder._interned) == before + 1
    del holder
    gc.collect()
    assert len(Holder._interned) == before


def test_holders_are_not_made_by_hand() -> None:
    with pytest.raises(TypeError, match=r"Holder\.of"):
        Holder()

"""The disk's events for added and removed blocks: a listing plus all later events gives its content."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from sglang_ext.testing.blocks import LAYOUT, NAMESPACE, OTHER, prefix_keys, put_all
from sglang_ext.tiered_store.disk.state import DiskConfig
from sglang_ext.tiered_store.disk.tier import DiskTier


def listed(tier: DiskTier, limit: int) -> set[bytes]:
    names: set[bytes] = set()
    place: bytes | None = b""
    while place is not None:
        some, place = tier.names_after(place, limit)
        assert len(some) <= limit
        names.update(some)
    return names


class Watcher:
    def __init__(self, tier: DiskTier) -> None:
        self.names = listed(tier, 3)
        self.stored = self.removed = 0
        tier.watch(self.changed)

    def changed(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self.names.update(stored)
        self.names.difference_update(removed)
        self.stored += len(stored)
        self.removed += len(removed)


def traffic(tier: DiskTier, watcher: Watcher, seed: int) -> None:
    rnd = random.Random(seed)
    prefixes = [prefix_keys(i, 6) for i in range(12)]
    for _ in range(60):
        keys = rnd.choice(prefixes)
        draw = rnd.random()
        if draw < 0.8:
            put_all(tier, NAMESPACE, keys[: rnd.randrange(1, 7)])
        elif draw < 0.97:
            tier.drop(NAMESPACE, keys[rnd.randrange(6) :])
        else:
            tier.clear(rnd.choice([None, OTHER]))
        assert watcher.names == listed(tier, 5)


@pytest.mark.parametrize("seed", range(3))
def test_a_watcher_has_what_is_there(tmp_path: Path, seed: int) -> None:
    tier = DiskTier(DiskConfig(tmp_path, 24 * (16 << 10)), LAYOUT)
    watcher = Watcher(tier)
    traffic(tier, watcher, seed)
    assert watcher.stored > 20
    assert watcher.removed > 5
    tier.close()
    again = DiskTier(DiskConfig(tmp_path, 24 * (16 << 10)), LAYOUT)
    assert Watcher(again).names == watcher.names
    again.close()


@pytest.mark.parametrize("limit", [1, 3, 50])
def test_a_listing_of_a_namespace_has_its_names_alone(tmp_path: Path, limit: int) -> None:
    tier = DiskTier(DiskConfig(tmp_path, 64 * (16 << 10)), LAYOUT)
    mine, others = prefix_keys(1, 6), prefix_keys(2, 5)
    put_all(tier, NAMESPACE, mine)
    put_all(tier, OTHER, others)
    for namespace, right in ((NAMESPACE, mine), (OTHER, others), (bytes(16), []), (b"\xff" * 16, [])):
        found: list[bytes] = []
        place: bytes | None = b""
        while place is not None:
            some, place = tier.names_in(namespace, place, limit)
            assert len(some) <= limit
            found += some
        assert found == sorted(right)
    tier.close()
    assert tier.names_in(NAMESPACE, b"", limit) == ([], None)


def test_a_watcher_that_misses_removals_is_found(tmp_path: Path) -> None:
    class BlindWatcher(Watcher):
        def changed(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
            super().changed(stored, [])

    tier = DiskTier(DiskConfig(tmp_path, 24 * (16 << 10)), LAYOUT)
    watcher = BlindWatcher(tier)
    with pytest.raises(AssertionError):
        traffic(tier, watcher, 0)
    tier.close()

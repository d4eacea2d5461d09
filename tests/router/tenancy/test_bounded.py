"""Tables bounded in bytes and entries, against a list."""

from __future__ import annotations

import random

import pytest

from sglang_ext.router.tenancy.bounded import ENTRY_BYTES, Bounded, size_of


def table(**limits: int) -> Bounded[tuple[str, int], bytes]:
    return Bounded(
        limits.pop("max_bytes", 1 << 30), lambda key, value: len(value), owner=lambda key: key[0], **limits
    )


def test_the_oldest_make_room() -> None:
    kept = table(max_bytes=2 * ENTRY_BYTES + 10)
    kept.put(("a", 1), b"12345")
    kept.put(("a", 2), b"12345")
    assert kept.use(("a", 1)) == b"12345", "now it is the newest"
    kept.put(("a", 3), b"")
    assert list(kept) == [("a", 1), ("a", 3)]
    assert (kept.dropped, kept.get(("a", 2)), ("a", 2) in kept) == (1, None, False)
    kept.put(("a", 4), bytes(1000))
    assert len(kept) == 0, "a value larger than the table is not kept"
    kept.check()


def test_an_owner_makes_room_for_its_own() -> None:
    kept = table(owner_entries=2)
    for number in range(3):
        kept.put(("a", number), b"")
        kept.put(("b", 0), b"")
    assert list(kept) == [("a", 1), ("a", 2), ("b", 0)]
    kept.check()


@pytest.mark.parametrize(
    "limits", [{"max_bytes": 9000}, {"max_entries": 9}, {"owner_bytes": 4000}, {"owner_entries": 3}]
)
def test_whatever_comes_the_counts_hold(limits: dict[str, int]) -> None:
    kept, rng, newest = table(**limits), random.Random(7), {}
    for _ in range(2000):
        key = rng.choice("abc"), rng.randrange(20)
        action = rng.random()
        if action < 0.7:
            newest[key] = value = bytes(rng.randrange(600))
            kept.put(key, value)
        elif action < 0.8:
            kept.pop(key)
        else:
            kept.use(key)
        kept.check()
        assert all(newest[key] == value for key, value in kept.items())
    assert kept.dropped > 100
    kept.clear()
    kept.check()
    assert (len(kept), kept.size_bytes) == (0, 0)


def test_strings_are_charged_as_they_are_stored() -> None:
    assert size_of("a" * 1000) < size_of("a" * 999 + "\N{GRINNING FACE}") > 4000

"""Sets of names in parts: the same as a set, and no part of it large."""

from __future__ import annotations

import random

from sglang_ext.radix_global.sync.names import PARTS, Names


def test_they_are_a_set() -> None:
    rng = random.Random(3)
    some = [rng.randbytes(16) for _ in range(300)]
    names, truth = Names(), set[bytes]()
    for _ in range(400):
        few = rng.sample(some, 7)
        if rng.random() < 0.5:
            names.add(few)
            truth.update(few)
        elif rng.random() < 0.9:
            names.discard(few)
            truth.difference_update(few)
        else:
            before = len(names)
            assert names.take(5) == min(5, before)
            truth = set(names)
            assert len(truth) == max(0, before - 5)
        assert (len(names), names) == (len(truth), truth)
        assert all((name in names) == (name in truth) for name in few)


def test_all_of_it_can_be_taken_some_at_a_time() -> None:
    rng = random.Random(4)
    names = Names()
    names.add([rng.randbytes(16) for _ in range(PARTS * 100)])
    assert [names.take(3000) for _ in range(4)] == [3000, 3000, 400, 0]
    assert not names

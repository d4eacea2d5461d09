"""Coalescing and cutting, against an oracle that counts bytes."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.disagg import runs as r
from sglang_ext.disagg.runs import Runs


def byte_map(runs: Runs) -> Counter[tuple[int, int, int, int]]:
    """Every byte that a batch moves, as (remote region, offset, local region, offset)."""
    return Counter(
        (int(rr), int(ro) + i, int(lr), int(lo) + i) for rr, ro, lr, lo, n in runs for i in range(int(n))
    )


rows = st.lists(
    st.tuples(
        st.integers(0, 1), st.integers(0, 12), st.integers(0, 1), st.integers(0, 12), st.integers(1, 4)
    ),
    max_size=24,
)


def batch(rows: list[tuple[int, ...]]) -> Runs:
    return np.array(rows, np.int64).reshape(len(rows), 5)


@settings(deadline=None)
@given(rows)
def test_coalescing_keeps_every_byte_and_misses_no_merge(rows: list[tuple[int, ...]]) -> None:
    before = batch(rows)
    after, group = r.coalesce(before)
    assert byte_map(after) == byte_map(before)
    assert after.shape[0] <= before.shape[0]
    # Every input row lies inside the merged row that `group` names.
    for row, g in zip(before, group, strict=True):
        m = after[g]
        assert (m[0], m[2], m[1] - m[3]) == (row[0], row[2], row[1] - row[3])
        assert m[1] <= row[1]
        assert row[1] + row[4] <= m[1] + m[4]
    # No two merged rows continue each other, unless both continue from a duplicated start.
    starts = Counter((int(a), int(b), int(c), int(d)) for a, b, c, d, _ in before)
    if all(n == 1 for n in starts.values()):
        begin = {(int(a), int(b), int(c), int(d)) for a, b, c, d, _ in after}
        end = {(int(a), int(b + n), int(c), int(d + n)) for a, b, c, d, n in after}
        assert not begin & end


def test_coalescing_merges_across_any_order() -> None:
    shuffled = np.random.default_rng(3).permutation(1000)
    runs = np.stack([np.zeros(1000), shuffled * 64, np.ones(1000), shuffled * 64 + 8, np.full(1000, 64)], 1)
    after, _ = r.coalesce(np.ascontiguousarray(runs.astype(np.int64)))
    assert after.tolist() == [[0, 0, 1, 8, 64000]]


@settings(deadline=None)
@given(rows, st.integers(1, 9))
def test_cutting_keeps_every_byte_within_the_limit(rows: list[tuple[int, ...]], limit: int) -> None:
    before = batch(rows)
    after, piece = r.cut(before, limit)
    assert byte_map(after) == byte_map(before)
    for number in np.unique(piece[:, 0]):
        assert after[piece[:, 0] == number, 4].sum() <= limit
    assert (np.diff(piece[:, 0]) >= 0).all()
    assert after.shape[0] <= before.shape[0] + before[:, 4].sum() // limit


@pytest.mark.parametrize(
    ("row", "bad"),
    [
        ((0, 0, 0, 0, 10), -1),
        ((0, 1, 0, 0, 10), 0),
        ((1, 0, 0, 0, 1), 0),
        ((2, 0, 0, 0, 1), 0),
        ((-1, 0, 0, 0, 1), 0),
        ((0, -1, 0, 0, 1), 0),
        ((0, 0, 0, 0, 0), 0),
        ((0, 2**62, 0, 0, 2**62), 0),
        ((0, 0, 0, 0, 2**63 - 1), 0),
    ],
)
def test_rows_outside_of_a_region_are_found(row: tuple[int, ...], bad: int) -> None:
    assert r.outside(batch([row]), r.REMOTE, np.array([10, 0], np.int64)) == bad

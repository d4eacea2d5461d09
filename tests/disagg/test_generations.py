"""Generations: parity, order, and where their counters are read."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.disagg.errors import RangeError
from sglang_ext.disagg.generations import GenerationTable, counter_runs, counters_at_a_time, header


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_blocks_open_and_seal_in_turn() -> None:
    table = GenerationTable(np.empty(4, np.int64))
    assert repr(table) == "<GenerationTable sealed=0 open=4>"
    assert table.seal(ids(1, 3)).tolist() == [2, 2]
    with pytest.raises(RangeError, match="block 3 is already sealed"):
        table.seal(ids(0, 3))
    assert table.current(ids(0)).tolist() == [1]  # all or nothing
    table.open(ids(3))
    with pytest.raises(RangeError, match="already open"):
        table.open(ids(0))
    assert table.seal(ids(3)).tolist() == [4]
    assert table.is_sealed(ids(0, 1, 2, 3)).tolist() == [False, True, False, True]
    for bad in (ids(4), ids(-1), ids(1, 1)):
        with pytest.raises(RangeError):
            table.open(bad)
    table.check()


@settings(deadline=None)
@given(st.lists(st.integers(0, 20000), unique=True, max_size=60), st.sampled_from([0, 64, 1024]))
def test_counters_are_read_from_where_they_lie(blocks: list[int], gap: int) -> None:
    at = 4096
    region = np.arange(at // 8 + 20001, dtype=np.int64).view(np.uint8)
    size = 64 + max(1, len(blocks)) * (gap + 8)
    assert counters_at_a_time(size, gap) == max(1, len(blocks))
    scratch = np.zeros(size + 128, np.uint8)
    wanted = np.array(blocks, np.int64)
    runs, where = counter_runs(wanted, at, 7, 128, size, gap)
    for remote, offset, local, to, n in runs.tolist():
        assert (remote, local) == (0, 7)
        scratch[to : to + n] = region[offset : offset + n]
    assert runs[0].tolist() == [0, 0, 7, 128, 64]
    assert scratch.view(np.int64)[where // 8].tolist() == (wanted + at // 8).tolist()


def test_too_little_scratch_is_refused() -> None:
    with pytest.raises(RangeError, match="need"):
        counter_runs(np.arange(0, 100000, 1000), 0, 0, 0, 256, 8)


def test_header_names_the_epoch() -> None:
    assert header(b"e" * 16).startswith(b"KVXGEN01" + b"e" * 16)
    with pytest.raises(ValueError, match="16 bytes"):
        header(b"short")

"""Writing behind: bounded, in groups with one sync, with an outcome for every key."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.errors import DeadlineError
from sglang_ext.testing.blocks import (
    LAYOUT,
    NAMESPACE,
    get_all,
    memory_of,
    prefix_keys,
    put_all,
)
from sglang_ext.testing.tiers import FaultyTier, GatedTier, MemoryTier, WrappedTier
from sglang_ext.tiered_store.disk.state import DiskConfig
from sglang_ext.tiered_store.disk.tier import DiskTier
from sglang_ext.tiered_store.loading.write_behind import LagPolicy, WriteBehind, Written
from sglang_ext.tiered_store.tier import Outcome


def submit(writer: WriteBehind, prefix: int, blocks: int, results: list[Written], **options: Any) -> Outcome:
    keys = prefix_keys(prefix, blocks)
    memory, _ = memory_of(LAYOUT, NAMESPACE, keys)
    return writer.submit(NAMESPACE, keys, memory, range(blocks), on_written=results.append, **options)


def test_a_lagging_writer_skips_and_counts() -> None:
    disk = GatedTier(MemoryTier(LAYOUT, 50))
    writer = WriteBehind(disk, backlog_bytes=5 * LAYOUT.block_bytes, lag=LagPolicy.SKIP)
    results: list[Written] = []
    disk.close_gate("put_layer")
    assert submit(writer, 1, 3, results) is Outcome.DONE
    disk.wait_until_stopped("put_layer")
    assert submit(writer, 2, 2, results) is Outcome.DONE
    assert submit(writer, 3, 1, results) is Outcome.BEHIND
    assert writer.pending_bytes == 5 * LAYOUT.block_bytes
    writer.check()
    disk.open_gate("put_layer")
    writer.flush(30)
    assert submit(writer, 4, 9, results) is Outcome.DONE  # larger than the backlog, alone
    writer.close()
    writer.close()
    assert submit(writer, 5, 1, results) is Outcome.CLOSED
    assert writer.counters == {Outcome.DONE: 14, Outcome.BEHIND: 1, Outcome.CLOSED: 1}
    assert [len(result.keys) for result in results] == [3, 2, 9]
    assert all(result.done for result in results)
    assert get_all(disk, NAMESPACE, prefix_keys(4, 9)) == 9


def test_a_lagging_writer_makes_submissions_wait() -> None:
    disk = GatedTier(MemoryTier(LAYOUT, 50))
    writer = WriteBehind(disk, backlog_bytes=3 * LAYOUT.block_bytes, lag=LagPolicy.WAIT)
    results: list[Written] = []
    disk.close_gate("put_layer")
    submit(writer, 1, 3, results)
    disk.wait_until_stopped("put_layer")
    with pytest.raises(DeadlineError, match="--kv-disk-io lag"):
        submit(writer, 2, 2, results, timeout=0.0)
    accepted: list[Outcome] = []
    thread = threading.Thread(target=lambda: accepted.append(submit(writer, 2, 2, results, timeout=30)))
    thread.start()
    disk.open_gate("put_layer")
    thread.join(timeout=30)
    assert accepted == [Outcome.DONE]
    writer.close()
    assert [len(result.keys) for result in results] == [3, 2]


def test_tenants_take_turns() -> None:
    writer = WriteBehind(
        MemoryTier(LAYOUT, 50), backlog_bytes=1 << 30, group_bytes=LAYOUT.block_bytes, threaded=False
    )
    results: list[Written] = []
    for prefix in range(5):
        submit(writer, prefix, 2, results, owner="a")
    assert writer.step() == 1
    for prefix in (10, 11):
        submit(writer, prefix, 1, results, owner="b")
    while writer.step():
        writer.check()
    order = [int.from_bytes(result.keys[0][:8], "little") for result in results]
    assert order == [0, 10, 11, 1, 2, 3, 4]
    writer.close()


@pytest.mark.parametrize("lag", LagPolicy)
def test_what_would_be_written_last_gives_way_to_another_tenant(lag: LagPolicy) -> None:
    disk = GatedTier(MemoryTier(LAYOUT, 50))
    writer = WriteBehind(disk, backlog_bytes=6 * LAYOUT.block_bytes, lag=lag)
    results: dict[int, list[Written]] = {prefix: [] for prefix in range(7)}
    disk.close_gate("put_layer")
    assert submit(writer, 0, 1, results[0], owner="a") is Outcome.DONE
    disk.wait_until_stopped("put_layer")
    for prefix in range(1, 6):
        assert submit(writer, prefix, 1, results[prefix], owner="a") is Outcome.DONE
    assert submit(writer, 6, 2, results[6], owner="b", timeout=0.0) is Outcome.DONE
    skipped = [prefix for prefix, result in results.items() if result]
    assert skipped == [4, 5]
    assert {outcome for prefix in skipped for outcome in results[prefix][0].outcomes} == {Outcome.BEHIND}
    more: list[Written] = []
    if lag is LagPolicy.SKIP:
        assert submit(writer, 7, 1, more, owner="a") is Outcome.BEHIND
    else:
        with pytest.raises(DeadlineError, match="--kv-disk-io lag"):
            submit(writer, 7, 1, more, owner="a", timeout=0.0)
    writer.check()
    disk.open_gate("put_layer")
    writer.close()
    assert all(results[prefix][0].done for prefix in (0, 1, 2, 3, 6))
    assert [len(result) for result in results.values()] == [1] * 7
    assert more == []


def test_groups_share_a_sync(tmp_path: Path) -> None:
    disk = DiskTier(DiskConfig(tmp_path, 64 << 20), LAYOUT)
    writer = WriteBehind(disk, backlog_bytes=1 << 30, group_bytes=8 * LAYOUT.block_bytes, threaded=False)
    results: list[Written] = []
    for prefix in range(6):
        submit(writer, prefix, 3, results)
    assert [writer.step() for _ in range(4)] == [2, 2, 2, 0]
    assert disk.stats().extra["syncs"] == 3
    assert disk.stats().extra["commits"] == 3
    writer.close()
    disk.close()


def test_each_key_gets_its_outcome() -> None:
    inner = MemoryTier(LAYOUT, 4)
    disk = FaultyTier(inner, seed=1, rate=0.0)
    writer = WriteBehind(disk, backlog_bytes=1 << 30, threaded=False)
    put_all(inner, NAMESPACE, prefix_keys(1, 2))
    results: list[Written] = []
    submit(writer, 1, 7, results)
    writer.step()
    assert results[-1].outcomes == (Outcome.DONE,) * 4 + (Outcome.FULL,) * 3  # it holds four
    disk.rate = 1.0
    submit(writer, 1, 2, results)
    submit(writer, 2, 2, results)
    writer.step()
    assert all(outcome is not Outcome.DONE for outcome in results[-1].outcomes)
    writer.close()


class Broken(WrappedTier):
    def put_layer(self, *_: object) -> Outcome:  # type: ignore[override]
        raise ZeroDivisionError


def test_a_writer_that_breaks_gives_the_memory_back_and_takes_nothing_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = WriteBehind(Broken(MemoryTier(LAYOUT, 50)), backlog_bytes=1 << 30)
    results: list[Written] = []
    submit(writer, 1, 3, results)
    submit(writer, 2, 2, results)
    writer.flush(30)
    writer.close()
    assert [result.outcomes for result in results if not result.done] == [
        (Outcome.IO_ERROR,) * len(result.keys) for result in results
    ]
    assert sum(len(result.keys) for result in results) in (3, 5)
    assert "nothing more is written" in caplog.text
    assert submit(writer, 3, 1, results) is Outcome.CLOSED
    assert "failed" in repr(writer)


def test_wrong_numbers_of_ids_are_refused() -> None:
    writer = WriteBehind(MemoryTier(LAYOUT, 4), backlog_bytes=1, threaded=False)
    memory, _ = memory_of(LAYOUT, NAMESPACE, prefix_keys(1, 2))
    with pytest.raises(ValueError, match="ids for 2 keys"):
        writer.submit(NAMESPACE, prefix_keys(1, 2), memory, [0])

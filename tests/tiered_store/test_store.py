"""DRAM over disk: write-behind, durable before free, and a model test against a dict with a failing disk."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sglang_ext.errors import DeadlineError
from sglang_ext.geometry import BlockLayout
from sglang_ext.testing.blocks import (
    LAYOUT,
    NAMESPACE,
    OTHER,
    contents,
    get_all,
    memory_of,
    prefix_keys,
    put_all,
)
from sglang_ext.testing.tiers import FaultyTier, GatedTier, MemoryTier, WrappedTier
from sglang_ext.tiered_store.disk import DiskTier
from sglang_ext.tiered_store.disk_state import DiskConfig
from sglang_ext.tiered_store.dram import DramArena
from sglang_ext.tiered_store.store import Durability, Found, StoreConfig, TieredStore
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier, Outcome, Put
from sglang_ext.tiered_store.write_behind import LagPolicy, WriteBehind, Written


def arena(blocks: int) -> DramArena:
    return DramArena(LAYOUT, blocks * (LAYOUT.block_bytes + 8) + 8, pin=False, touch=False)


def store_of(
    disk: BlockTier | None, blocks: int = 12, *, threaded: bool = True, **options: object
) -> TieredStore:
    return TieredStore(arena(blocks), disk, StoreConfig(**options), threaded=threaded)  # type: ignore[arg-type]


def put(store: TieredStore, keys: list[bytes], namespace: bytes = NAMESPACE) -> list[Outcome]:
    memory, _ = memory_of(LAYOUT, namespace, keys)
    return store.put(namespace, keys, memory, range(len(keys)), timeout=30)


def load(store: TieredStore, keys: list[bytes], namespace: bytes = NAMESPACE) -> int:
    """Load the longest prefix, verify every byte, and return its length."""
    blocks = np.zeros((len(keys), LAYOUT.block_bytes), dtype=np.uint8)
    memory = BlockMemory.of_blocks(LAYOUT, blocks)
    loading = store.load(namespace, keys, memory, range(len(keys)))
    count = loading.result(30)
    for row, key in zip(blocks[:count], keys, strict=False):
        assert np.array_equal(row, contents(LAYOUT, namespace, key))
    return count


@pytest.fixture
def stores() -> Iterator[list[TieredStore]]:
    """Stores put in here are checked and closed at the end."""
    made: list[TieredStore] = []
    yield made
    for store in made:
        store.flush(30)
        store.check()
        assert all(stats.pins == 0 for stats in store.stats().values())
        store.close()
        store.close()


def test_write_through_and_back_from_both_tiers(stores: list[TieredStore], tmp_path: Path) -> None:
    store = store_of(DiskTier(DiskConfig(tmp_path, 64 << 20), LAYOUT), blocks=6)
    stores.append(store)
    keys = prefix_keys(1, 6)
    assert put(store, keys) == [Outcome.DONE] * 6
    assert store.find(NAMESPACE, keys) == Found(6, 0)
    store.flush(30)
    assert store.durable(NAMESPACE, keys) == 6
    assert put(store, prefix_keys(2, 4)) == [Outcome.DONE] * 4
    # Four durable blocks have gone from DRAM, from the end of the prefix; together the tiers have all.
    assert store.find(NAMESPACE, keys) == Found(2, 4)
    assert store.find(NAMESPACE, prefix_keys(1, 9)).blocks == 6
    assert load(store, keys) == 6
    assert store.counters["written"] >= 6
    assert store.stats()["dram"].extra["lost_blocks"] == 0


def test_layers_of_both_parts_are_passed_on(stores: list[TieredStore], tmp_path: Path) -> None:
    store = store_of(DiskTier(DiskConfig(tmp_path, 64 << 20), LAYOUT), blocks=6)
    stores.append(store)
    put(store, prefix_keys(1, 6))
    store.flush(30)
    put(store, prefix_keys(2, 4))
    seen: list[tuple[str, int, int]] = []
    memory = BlockMemory.of_blocks(LAYOUT, np.zeros((6, LAYOUT.block_bytes), dtype=np.uint8))
    loading = store.load(
        NAMESPACE,
        prefix_keys(1, 6),
        memory,
        range(6),
        on_layer=lambda layer, _, blocks: seen.append(("dram", layer, blocks)),
        on_disk_layer=lambda layer, _, blocks: seen.append(("disk", layer, blocks)),
    )
    assert [loading.wait(layer, 30) for layer in range(LAYOUT.n_layers)] == [6] * LAYOUT.n_layers
    assert loading.result(30) == 6
    assert sorted(seen) == [("disk", i, 4) for i in range(3)] + [("dram", i, 2) for i in range(3)]


def test_nothing_found_is_nothing_loaded(stores: list[TieredStore]) -> None:
    store = store_of(MemoryTier(LAYOUT, 50))
    stores.append(store)
    assert load(store, prefix_keys(1, 3)) == 0
    assert store.find(NAMESPACE, []) == Found(0, 0)


def test_a_restart_finds_what_was_flushed(stores: list[TieredStore], tmp_path: Path) -> None:
    store = store_of(DiskTier(DiskConfig(tmp_path, 64 << 20), LAYOUT))
    put(store, prefix_keys(1, 6))
    store.close()  # writes what has been accepted
    again = store_of(DiskTier(DiskConfig(tmp_path, 64 << 20), LAYOUT))
    stores.append(again)
    assert again.find(NAMESPACE, prefix_keys(1, 6)) == Found(0, 6)
    assert load(again, prefix_keys(1, 6)) == 6


# --- durability ---


def test_what_is_not_on_disk_yet_stays_in_dram(stores: list[TieredStore]) -> None:
    disk = GatedTier(MemoryTier(LAYOUT, 50))
    store = store_of(disk, blocks=6)
    stores.append(store)
    disk.close_gate("put_layer")
    assert put(store, prefix_keys(1, 4)) == [Outcome.DONE] * 4
    disk.wait_until_stopped("put_layer")
    # Two more fit; the third would need a block whose only other copy is still being made.
    assert put(store, prefix_keys(2, 3)) == [Outcome.DONE, Outcome.DONE, Outcome.FULL]
    assert put(store, prefix_keys(3, 1)) == [Outcome.FULL]
    assert load(store, prefix_keys(1, 4)) == 4
    assert store.stats()["dram"].put[Outcome.FULL] == 2
    disk.open_gate("put_layer")
    store.flush(30)
    assert put(store, prefix_keys(3, 3)) == [Outcome.DONE] * 3
    assert load(store, prefix_keys(1, 4)) == 4
    assert load(store, prefix_keys(2, 2)) == 2


def test_without_disk_durability_nothing_is_written_there(stores: list[TieredStore]) -> None:
    disk = MemoryTier(LAYOUT, 50)
    put_all(disk, NAMESPACE, prefix_keys(9, 3))
    store = store_of(disk, blocks=6, durability=Durability.DRAM)
    stores.append(store)
    for prefix in range(4):
        assert put(store, prefix_keys(prefix, 3)) == [Outcome.DONE] * 3
    assert disk.stats().blocks == 3
    assert load(store, prefix_keys(3, 3)) == 3
    assert load(store, prefix_keys(9, 3)) == 3  # what is there is found


def test_a_store_that_is_off_takes_nothing(stores: list[TieredStore]) -> None:
    store = store_of(MemoryTier(LAYOUT, 50), durability=Durability.OFF)
    stores.append(store)
    assert put(store, prefix_keys(1, 2)) == [Outcome.ABSENT] * 2
    assert load(store, prefix_keys(1, 2)) == 0


def test_blocks_that_the_disk_has_dropped_do_not_fill_dram_for_good(stores: list[TieredStore]) -> None:
    disk = MemoryTier(LAYOUT, 4)
    store = store_of(disk, blocks=8)
    stores.append(store)
    for prefix in range(6):
        assert put(store, prefix_keys(prefix, 4)) == [Outcome.DONE] * 4
        store.flush(30)
    assert disk.stats().evicted == 20
    assert load(store, prefix_keys(5, 4)) == 4
    assert store.stats()["dram"].extra["lost_blocks"] > 0  # counted


def test_a_dead_disk_leaves_a_dram_cache(stores: list[TieredStore]) -> None:
    class Dead(WrappedTier):
        def prepare_put(self, namespace: bytes, keys: object) -> Put | Outcome:
            return Outcome.READ_ONLY

    store = store_of(Dead(MemoryTier(LAYOUT, 50)), blocks=6)
    stores.append(store)
    for prefix in range(5):
        assert put(store, prefix_keys(prefix, 4)) == [Outcome.DONE] * 4
        store.flush(30)
        assert load(store, prefix_keys(prefix, 4)) == 4
    assert store.counters["not_written_read_only"] == 20


def test_blocks_that_the_disk_refused_are_offered_again(stores: list[TieredStore]) -> None:
    disk = FaultyTier(MemoryTier(LAYOUT, 50), seed=0, rate=1.0)
    store = store_of(disk)
    stores.append(store)
    put(store, prefix_keys(1, 4))
    store.flush(30)
    assert disk.inner.stats().blocks == 0
    disk.rate = 0.0
    put(store, prefix_keys(1, 4))
    store.flush(30)
    assert disk.inner.stats().blocks == 4
    assert (store.counters["written"], store.stats()["disk"].blocks) == (4, 4)


def test_dram_alone(stores: list[TieredStore]) -> None:
    store = store_of(None, blocks=6)
    stores.append(store)
    for prefix in range(4):
        assert put(store, prefix_keys(prefix, 4)) == [Outcome.DONE] * 4
    assert load(store, prefix_keys(3, 4)) == 4
    assert store.durable(NAMESPACE, prefix_keys(3, 4)) == 0
    assert store.drop(NAMESPACE, prefix_keys(3, 9)) == 4
    assert load(store, prefix_keys(3, 4)) == 0


def test_tiers_of_different_layouts_are_refused() -> None:
    other = BlockLayout(4, ((8,),))
    held = arena(4)
    with pytest.raises(ValueError, match="layout"):
        TieredStore(held, MemoryTier(other, 4), StoreConfig())
    held.close()


# --- the writer and its lag ---


def submit(
    writer: WriteBehind, prefix: int, blocks: int, results: list[Written], **options: float
) -> Outcome:
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
    with pytest.raises(DeadlineError, match="--kv-lag"):
        submit(writer, 2, 2, results, timeout=0.0)
    accepted: list[Outcome] = []
    thread = threading.Thread(target=lambda: accepted.append(submit(writer, 2, 2, results, timeout=30)))
    thread.start()
    disk.open_gate("put_layer")
    thread.join(timeout=30)
    assert accepted == [Outcome.DONE]
    writer.close()
    assert [len(result.keys) for result in results] == [3, 2]


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


def test_each_key_is_told_its_outcome() -> None:
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


# --- the model ---


class NotingStore(TieredStore):
    """Remembers every block that was not written, at any time."""

    def __init__(self, *args: object, **options: object) -> None:
        self.not_written: set[tuple[bytes, bytes]] = set()
        super().__init__(*args, **options)  # type: ignore[arg-type]

    def _note(self, result: Written) -> None:
        super()._note(result)
        self.not_written |= {
            (result.namespace, key)
            for key, outcome in zip(result.keys, result.outcomes, strict=True)
            if outcome is not Outcome.DONE
        }


class StoreModel(RuleBasedStateMachine):
    """The store against a dict of what was put, over a disk that fails at random.

    A block for which put said DONE is in DRAM or on disk until it is dropped, or until the disk has refused
    it or lost it (which the model is told by the disk itself). What is loaded is right, always.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = MemoryTier(LAYOUT, 10_000)
        self.disk: FaultyTier
        self.store: NotingStore | None = None
        self.kept: set[tuple[bytes, bytes]] = set()

    @initialize(seed=st.integers(0, 2**16), rate=st.sampled_from([0.0, 0.1, 0.3]), blocks=st.integers(3, 14))
    def begin(self, seed: int, rate: float, blocks: int) -> None:
        self.disk = FaultyTier(self.inner, seed=seed, rate=rate)
        config = StoreConfig(backlog_bytes=20 * LAYOUT.block_bytes, load_threads=1)
        self.store = NotingStore(arena(blocks), self.disk, config, threaded=False)

    @rule(prefix=st.integers(0, 4), blocks=st.integers(1, 6), namespace=st.sampled_from([NAMESPACE, OTHER]))
    def put(self, prefix: int, blocks: int, namespace: bytes) -> None:
        assert self.store is not None
        keys = prefix_keys(prefix, blocks)
        memory, _ = memory_of(LAYOUT, namespace, keys)
        outcomes = self.store.put(namespace, keys, memory, range(blocks))
        for key, outcome in zip(keys, outcomes, strict=True):
            if outcome is Outcome.DONE:
                self.kept.add((namespace, key))
                self.disk.lost.discard((namespace, key))
            else:
                assert outcome is Outcome.FULL

    @rule(prefix=st.integers(0, 4), blocks=st.integers(1, 7), namespace=st.sampled_from([NAMESPACE, OTHER]))
    def load(self, prefix: int, blocks: int, namespace: bytes) -> None:
        assert self.store is not None
        keys = prefix_keys(prefix, blocks)
        count = load(self.store, keys, namespace)
        assert count <= sum(1 for _ in itertools.takewhile(lambda key: (namespace, key) in self.kept, keys))

    @rule(groups=st.integers(1, 3))
    def write(self, groups: int) -> None:
        assert self.store is not None
        assert self.store.writer is not None
        for _ in range(groups):
            self.store.writer.step()

    @rule(prefix=st.integers(0, 4), blocks=st.integers(1, 6), namespace=st.sampled_from([NAMESPACE, OTHER]))
    def drop(self, prefix: int, blocks: int, namespace: bytes) -> None:
        assert self.store is not None
        assert self.store.writer is not None
        while self.store.writer.step():  # what is being written is written all the same
            pass
        keys = prefix_keys(prefix, blocks)
        self.store.drop(namespace, keys)
        self.kept -= {(namespace, key) for key in keys}
        assert self.store.find(namespace, keys).blocks == 0

    @invariant()
    def never_nowhere(self) -> None:
        if self.store is None:
            return
        self.store.check()
        for namespace, key in self.kept:
            here = self.store.dram.match(namespace, [key]) or self.inner.match(namespace, [key])
            if not here and (namespace, key) not in self.disk.lost:
                assert (namespace, key) in self.may_be_lost(), f"{key.hex()} is nowhere"

    def may_be_lost(self) -> set[tuple[bytes, bytes]]:
        """Blocks that the disk has refused at some time, which is counted."""
        assert self.store is not None
        return self.store.not_written

    def teardown(self) -> None:
        if self.store is not None:
            self.store.close()
            assert self.inner.stats().pins == 0


class HealthyStoreModel(StoreModel):
    """The same over a disk without a fault: then nothing may be lost at all."""

    @initialize(blocks=st.integers(3, 14))
    def begin(self, blocks: int) -> None:
        super().begin(0, 0.0, blocks)

    def may_be_lost(self) -> set[tuple[bytes, bytes]]:
        return set()


def run_store_model(examples: int, steps: int, model: type[StoreModel]) -> type:
    case = model.TestCase
    case.settings = settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    return case


TestStoreModel = run_store_model(40, 30, StoreModel)
TestHealthyStoreModel = run_store_model(40, 30, HealthyStoreModel)


@pytest.mark.long
class TestStoreModelLong(StoreModel.TestCase):
    settings = settings(max_examples=600, stateful_step_count=60, deadline=None)

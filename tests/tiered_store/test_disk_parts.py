"""The parts of the disk tier on their own: format, vectored I/O, index, choice of victims."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.geometry import BlockLayout
from sglang_ext.testing.blocks import NAMESPACE, OTHER, prefix_keys
from sglang_ext.tiered_store.disk import index as index_module
from sglang_ext.tiered_store.disk.files import IOV_MAX, Files, can_be_direct, read_fully, write_fully
from sglang_ext.tiered_store.disk.index import Change, Index, IndexDamagedError, IndexFailedError
from sglang_ext.tiered_store.disk.index_rows import RunRow, RunUse, decode_run, encode_run
from sglang_ext.tiered_store.disk.owner import mounted_kind
from sglang_ext.tiered_store.disk.reclaim import RunFacts, SegmentFacts, choose_victims
from sglang_ext.tiered_store.disk.segment_format import (
    PAGE,
    FormatError,
    RunHeader,
    RunShape,
    decode_run_header,
    decode_segment_header,
    encode_run_header,
    encode_segment_header,
    largest_run,
    layer_sizes,
    run_offsets,
)
from tests.support.files import FaultyFiles

# --- format ---


def header_of(layers: tuple[int, ...], blocks: int) -> RunHeader:
    shape = RunShape.of(layers, blocks)
    sums = np.arange(len(layers) * blocks, dtype=np.uint64).reshape(len(layers), blocks) << np.uint64(40)
    keys = tuple(prefix_keys(7, blocks))
    return RunHeader(b"s" * 16, 3, 8 * PAGE, 12345, 1.5e9, NAMESPACE, keys, sums, shape)


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=5), st.integers(1, 700))
def test_a_run_header_is_read_back(layers: list[int], blocks: int) -> None:
    header = header_of(tuple(layers), blocks)
    data = encode_run_header(header)
    assert len(data) == header.shape.header_bytes
    assert len(data) % PAGE == 0
    again = decode_run_header(data + b"what follows")
    for field in ("store", "segment", "offset", "run", "created", "namespace", "keys", "shape"):
        assert getattr(again, field) == getattr(header, field)
    assert np.array_equal(again.sums, header.sums)


@given(st.integers(0, PAGE - 1), st.integers(0, 7))
def test_no_flipped_bit_passes_in_a_header(at: int, bit: int) -> None:
    data = bytearray(encode_run_header(header_of((100, 50), 20)))
    data[at] ^= 1 << bit
    with pytest.raises(FormatError):
        decode_run_header(bytes(data))
    page = bytearray(encode_segment_header(b"x" * 16, 9))
    assert decode_segment_header(bytes(page)) == (b"x" * 16, 9)
    page[at] ^= 1 << bit
    with pytest.raises(FormatError):
        decode_segment_header(bytes(page))


def test_a_header_that_is_cut_short_is_refused() -> None:
    data = encode_run_header(header_of((100, 50), 500))
    assert len(data) > PAGE
    for length in (0, 8, 16, 100, PAGE, len(data) - 1):
        with pytest.raises(FormatError):
            decode_run_header(data[:length])


@given(st.integers(1, 5), st.integers(1, 3000), st.integers(1, 64), st.integers(0, 4 << 20))
def test_the_largest_run_fits_and_a_larger_one_does_not(
    layers: int, row: int, tokens: int, limit: int
) -> None:
    layout = BlockLayout.uniform(n_layers=layers, planes_per_layer=1, row_bytes=row, block_tokens=tokens)
    blocks = largest_run(layout, limit)
    assert blocks == 0 or RunShape.of(layer_sizes(layout), blocks).length <= limit
    assert RunShape.of(layer_sizes(layout), blocks + 1).length > limit


def test_layers_of_a_run_do_not_overlap() -> None:
    shape = RunShape.of((5000, 100, 4096), 7)
    ends = [shape.offset(layer, 6) + size for layer, size in enumerate(shape.layer_bytes)]
    starts = [shape.offset(layer, 0) for layer in range(3)]
    assert starts[0] == shape.header_bytes
    assert all(end <= start for end, start in zip(ends, [*starts[1:], shape.length], strict=True))
    assert all(start % PAGE == 0 for start in starts)


def test_run_offsets_are_found_at_page_borders_only() -> None:
    data = np.zeros(6 * PAGE + 10, dtype=np.uint8)
    magic = np.frombuffer(encode_run_header(header_of((8,), 1))[:8], dtype=np.uint8)
    for at in (0, 2 * PAGE, 3 * PAGE + 8, 6 * PAGE):
        data[at : at + 8] = magic
    assert list(run_offsets(data)) == [0, 2 * PAGE]


# --- vectored I/O ---


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(0, 97))
def test_scattered_bytes_go_to_the_file_and_back_whatever_the_kernel_moves_at_once(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], short: int
) -> None:
    files = FaultyFiles()
    files.short = short
    path = tmp_path_factory.mktemp("vectors") / "file"
    source = np.random.default_rng(len(sizes)).integers(0, 256, 40_000, dtype=np.uint8)
    starts = np.random.default_rng(1).permutation(100)[: len(sizes)] * 400
    vectors = np.array(
        [(source.ctypes.data + s, n) for s, n in zip(starts, sizes, strict=True)], dtype=np.uint64
    )
    fd = files.open(path, write=True, create=True)
    try:
        write_fully(files, fd, vectors, 11)
        wanted = b"".join(source[s : s + n].tobytes() for s, n in zip(starts, sizes, strict=True))
        assert path.read_bytes()[11:] == wanted
        target = np.zeros_like(source)
        back = vectors.copy()
        back[:, 0] = [target.ctypes.data + start for start in starts]
        assert read_fully(files, fd, back, 11) == sum(sizes)
        assert all(
            np.array_equal(target[s : s + n], source[s : s + n]) for s, n in zip(starts, sizes, strict=True)
        )
        assert int((target != 0).sum()) <= sum(sizes)
        os.ftruncate(fd, 11 + sum(sizes) // 2)
        assert read_fully(files, fd, back, 11) == sum(sizes) // 2
    finally:
        files.close(fd)


def test_more_vectors_than_the_kernel_takes(tmp_path: Path) -> None:
    files = Files()
    count = 2 * IOV_MAX + 7
    source = np.arange(count * 3, dtype=np.uint32).view(np.uint8)
    vectors = np.array([(source.ctypes.data + 12 * i, 12) for i in range(count)], dtype=np.uint64)
    fd = files.open(tmp_path / "file", write=True, create=True)
    write_fully(files, fd, vectors, 0)
    assert (tmp_path / "file").read_bytes() == source.tobytes()
    source[:] = 0
    assert read_fully(files, fd, vectors, 0) == source.nbytes
    assert (tmp_path / "file").read_bytes() == source.tobytes()
    files.close(fd)


def test_a_write_that_stops_short_is_no_room(tmp_path: Path) -> None:
    files = FaultyFiles()
    fd = files.open(tmp_path / "file", write=True, create=True)
    files.pwritev = lambda fd, vectors, offset: 0  # type: ignore[method-assign]
    data = np.ones(8, dtype=np.uint8)
    with pytest.raises(OSError, match="No space") as raised:
        write_fully(files, fd, np.array([(data.ctypes.data, 8)], dtype=np.uint64), 0)
    assert raised.value.errno == errno.ENOSPC
    files.close(fd)


def test_what_may_go_past_the_page_cache() -> None:
    aligned = np.array([(4096, 512), (8192, 4096)], dtype=np.uint64)
    assert can_be_direct(aligned, 1024)
    assert not can_be_direct(aligned, 100)
    assert not can_be_direct(aligned + np.array([[8, 0]], dtype=np.uint64), 0)
    assert not can_be_direct(aligned + np.array([[0, 8]], dtype=np.uint64), 0)


# --- index ---


def row(run: int, blocks: int = 3, segment: int = 1, namespace: bytes = NAMESPACE) -> RunRow:
    return RunRow(run, segment, blocks, run * PAGE, PAGE, PAGE, run, float(run), namespace)


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path / "index")


def test_a_row_proves_itself() -> None:
    value = encode_run(row(5), prefix_keys(1, 3))
    key = (5).to_bytes(8, "big")
    assert decode_run(key, value) == row(5)
    for at in range(len(value)):
        broken = bytearray(value)
        broken[at] ^= 4
        assert decode_run(key, bytes(broken)) is None
    assert decode_run(key, b"") is None


def test_keys_lead_to_runs(index: Index) -> None:
    index.load()
    assert index.commit(Change(add=[(row(1), prefix_keys(1, 3))])) == {1: 3}
    assert index.find(NAMESPACE, prefix_keys(1, 5)) == [(1, 0), (1, 1), (1, 2), None, None]
    assert index.find(OTHER, prefix_keys(1, 1)) == [None]
    assert index.find_prefix(NAMESPACE, prefix_keys(1, 5)) == [(1, 0), (1, 1), (1, 2)]
    # Another run with the same keys serves only the new keys.
    assert index.commit(Change(add=[(row(2, 5), prefix_keys(1, 5))])) == {2: 2}
    assert index.commit(Change(add=[(row(3, 5), prefix_keys(1, 5))])) == {3: 0}
    assert index.blocks == 5
    assert index.keys_of(2) == tuple(prefix_keys(1, 5))
    assert index.keys_of(3) == ()
    assert index.commit(Change(drop_blocks=[(NAMESPACE, key) for key in prefix_keys(1, 4)])) == {1: 0, 2: 1}
    assert [entry[2:] for entry in index.entries()] == [(2, 4)]
    assert [loaded for loaded, _ in index.load().runs] == [row(2, 5)]
    index.close()
    assert index.closed
    assert index.find_prefix(NAMESPACE, prefix_keys(1, 5)) == []


def test_a_run_that_cannot_be_read_loses_its_keys_to_one_that_can(index: Index) -> None:
    index.load()
    index.commit(Change(add=[(row(1), prefix_keys(1, 3))]))
    alive = index.commit(Change(add=[(row(2, 2), prefix_keys(1, 2))], serves=lambda run: run != 1))
    assert alive == {1: 1, 2: 2}
    assert index.find(NAMESPACE, prefix_keys(1, 3)) == [(2, 0), (2, 1), (1, 2)]
    index.close()


def test_a_moved_run_takes_over_in_one_step(index: Index) -> None:
    index.load()
    index.commit(Change(add=[(row(1), prefix_keys(1, 3)), (row(2), prefix_keys(2, 3))]))
    alive = index.commit(Change(add=[(row(3, segment=2), prefix_keys(1, 3))], replace={1, 2}))
    assert alive == {1: 0, 2: 0, 3: 3}
    assert index.find_prefix(NAMESPACE, prefix_keys(1, 3)) == [(3, 0), (3, 1), (3, 2)]
    assert index.find_prefix(NAMESPACE, prefix_keys(2, 3)) == []
    index.close()


def test_uses_and_numbers_are_kept(index: Index, tmp_path: Path) -> None:
    store = index.load().stores
    index.commit(Change(add=[(row(1), prefix_keys(1, 3))], next_run=7, next_segment=4))
    index.commit(Change(uses={1: RunUse(99.0, 5, 3)}))
    index.close()
    again = Index(tmp_path / "index").load()
    assert (again.stores, again.next_run, again.next_segment) == (store, 7, 4)
    assert again.runs == ((row(1), RunUse(99.0, 5, 3)),)


def test_a_change_that_fails_changes_nothing(tmp_path: Path) -> None:
    import lmdb

    fail = False

    def step(name: str) -> None:
        if fail:
            raise lmdb.Error("mdb_txn_commit: Input/output error")

    index = Index(tmp_path / "index", step=step)
    index.load()
    index.commit(Change(add=[(row(1), prefix_keys(1, 3))]))
    fail = True
    with pytest.raises(IndexFailedError, match="Input/output") as raised:
        index.commit(Change(add=[(row(2), prefix_keys(2, 3))], replace={1}))
    assert not raised.value.full
    fail = False
    assert index.find_prefix(NAMESPACE, prefix_keys(1, 3)) == [(1, 0), (1, 1), (1, 2)]
    assert index.commit(Change(add=[(row(2), prefix_keys(2, 3))])) == {2: 3}
    index.close()


def test_an_index_that_is_full_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_MAP_SIZES", (128 << 10,))
    index = Index(tmp_path / "index")
    index.load()
    failures: list[IndexFailedError] = []
    for number in range(1, 200):
        try:
            index.commit(Change(add=[(row(number, 30), prefix_keys(number, 30))]))
        except IndexFailedError as error:
            failures.append(error)
    assert failures
    assert all(failure.full for failure in failures)
    assert len(index.find_prefix(NAMESPACE, prefix_keys(1, 30))) == 30
    index.close()


def test_a_read_only_index_that_is_missing_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(IndexDamagedError, match="missing"):
        Index(tmp_path / "index", readonly=True)


def test_a_namespace_can_be_listed(index: Index) -> None:
    index.load()
    index.commit(Change(add=[(row(1), prefix_keys(1, 3)), (row(2, namespace=OTHER), prefix_keys(2, 3))]))
    assert index.keys_in_namespace(OTHER) == [(OTHER, key) for key in prefix_keys(2, 3)]
    assert len(index.keys_in_namespace(None)) == 6
    assert index.keys_in_namespace(b"?" * 16) == []
    index.close()


# --- victims ---

MIB = 1 << 20


def segment(number: int, *runs: RunFacts, nbytes: int = 8 * MIB, busy: bool = False) -> SegmentFacts:
    return SegmentFacts(number, nbytes, busy, runs)


def run(number: int, *, age: float, hits: int = 0, nbytes: int = MIB, alive: float = 1.0) -> RunFacts:
    return RunFacts(number, nbytes, alive, 10_000.0 - age, hits)


def choose(segments: list[SegmentFacts], need: int = 1, room: int = 0) -> list[tuple[int, tuple[int, ...]]]:
    victims = choose_victims(segments, need, 10_000.0, room_for_moves=room)
    return [(victim.segment, victim.move) for victim in victims]


def test_the_oldest_goes_first() -> None:
    segments = [segment(n, run(n, age=age)) for n, age in ((1, 50), (2, 5000), (3, 500))]
    assert choose(segments) == [(2, ())]
    assert choose(segments, need=20 * MIB) == [(2, ()), (3, ()), (1, ())]
    assert choose(segments, need=0) == []


def test_use_and_living_blocks_count() -> None:
    assert choose([segment(1, run(1, age=900, hits=8)), segment(2, run(2, age=500))]) == [(2, ())]
    assert choose([segment(1, run(1, age=500)), segment(2, run(2, age=400, alive=0.2))]) == [(2, ())]
    assert choose([segment(1, run(1, age=500)), segment(2)]) == [(2, ())]
    # A run that was used often goes first all the same when its last use is long ago.
    assert choose([segment(1, run(1, age=9000, hits=10**6)), segment(2, run(2, age=100))]) == [(1, ())]


def test_what_is_being_read_stays() -> None:
    assert choose([segment(1, run(1, age=9000), busy=True), segment(2, run(2, age=10))]) == [(2, ())]
    assert choose([segment(1, run(1, age=9000), busy=True)]) == []
    assert choose([]) == []


def test_a_hot_run_among_cold_ones_is_moved_if_there_is_room() -> None:
    mixed = segment(1, run(1, age=1, hits=15), *(run(n, age=9000) for n in range(2, 8)))
    others = [segment(n, *(run(10 * n + i, age=1000) for i in range(8))) for n in (2, 3, 4)]
    assert choose([mixed, *others], room=2 * MIB) == [(1, (1,))]
    assert choose([mixed, *others], room=MIB - 1) == [(2, ())]
    # Two hot runs of which only one fits: the hotter.
    two = segment(1, run(1, age=1, hits=3), run(2, age=1, hits=15), *(run(n, age=9000) for n in range(3, 9)))
    assert dict(choose([two, *others], need=40 * MIB, room=MIB))[1] == (2,)


def test_gains_are_counted_after_moves() -> None:
    hot = [segment(n, run(n, age=1, hits=15, nbytes=2 * MIB), run(10 + n, age=9999)) for n in (1, 2)]
    cold = [segment(n, *(run(10 * n + i, age=800) for i in range(8))) for n in range(3, 8)]
    victims = choose([*hot, *cold], need=9 * MIB, room=2 * MIB)
    assert victims[0] == (1, (1,))
    assert len(victims) == 2  # 6 MiB from the first are not enough


@given(
    st.lists(
        st.tuples(st.integers(0, 5000), st.integers(0, 20), st.booleans(), st.integers(1, 4)),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 60 * MIB),
    st.integers(0, 8 * MIB),
)
def test_enough_goes_if_there_is_enough(
    given_segments: list[tuple[int, int, bool, int]], need: int, room: int
) -> None:
    segments = [
        segment(n, *(run(100 * n + i, age=age + i, hits=hits) for i in range(count)), busy=busy)
        for n, (age, hits, busy, count) in enumerate(given_segments)
    ]
    by_number = {s.segment: s for s in segments}
    sizes = {r.run: r.nbytes for s in segments for r in s.runs}
    victims = choose_victims(segments, need, 10_000.0, room_for_moves=room)
    chosen = [v.segment for v in victims]
    assert len(set(chosen)) == len(chosen)
    assert not any(by_number[number].busy for number in chosen)
    moved = sum(sizes[number] for v in victims for number in v.move)
    assert moved <= room
    gained = sum(by_number[number].nbytes for number in chosen) - moved
    assert gained >= need or len(chosen) == sum(not s.busy for s in segments)
    assert all(set(v.move) <= {r.run for r in by_number[v.segment].runs} for v in victims)


MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /mnt rw - nfs4 filer:/export rw,vers=4.2
31 30 8:2 / /mnt/local\\040disk rw - xfs /dev/sdb1 rw
32 22 0:41 / /home rw - ext4 /dev/sdc1 rw
33 22 0:42 / /home rw - fuse.sshfs other: rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/kv", "ext4"),
        ("/mnt/kv", "nfs4"),
        ("/mnt", "nfs4"),
        ("/mntother", "ext4"),
        ("/mnt/local disk/kv", "xfs"),
        ("/home/kv", "fuse.sshfs"),
    ],
)
def test_the_file_system_of_a_path_is_known(path: str, kind: str) -> None:
    assert mounted_kind(Path(path), MOUNTS) == kind

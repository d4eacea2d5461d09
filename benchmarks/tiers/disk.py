"""Loads from disk and writes to it, against fio on the same file system and against other ways to keep
blocks.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from benchmarks.lib.common import SEED, Options, Report, Samples, paired
from benchmarks.tiers.copy import BLOCK_TOKENS, Pool
from benchmarks.tiers.lmcache import CHUNK_TOKENS, LmCache, missing
from sglang_ext.tiered_store.disk.speed import choose_io
from sglang_ext.tiered_store.disk.state import DiskConfig, IoMode
from sglang_ext.tiered_store.disk.tier import DiskTier
from sglang_ext.tiered_store.loading.loader import Loader
from sglang_ext.tiered_store.loading.write_behind import WriteBehind
from sglang_ext.tiered_store.tier import BlockMemory, Outcome

PLANE_BYTES = 32 << 10
RUN_BLOCKS = 64
"""Blocks of a prefix, and so of a run: one layer of it is one read of 4 MiB."""
READ_BYTES = 2 * PLANE_BYTES * RUN_BLOCKS
THREADS = 4
NAMESPACE = b"benchmark-tiers."


class Bench:
    """A pool full of KV, and the keys of the prefixes that it holds."""

    def __init__(self, total: int, folder: Path) -> None:
        self.folder = folder
        self.pool = Pool(PLANE_BYTES, total)
        self.layout = self.pool.geometry.layout
        self.nbytes = (
            self.pool.nbytes // (RUN_BLOCKS * self.layout.block_bytes) * RUN_BLOCKS * self.layout.block_bytes
        )
        self.prefixes = self.nbytes // (RUN_BLOCKS * self.layout.block_bytes)
        random = np.random.default_rng(SEED)
        for plane in self.pool.planes:
            plane[:] = random.integers(0, 256, plane.size, dtype=np.uint8)
        self.pool.copier.gather(self.pool.plan, 0, self.pool.layers)
        self.memory = BlockMemory.of_arena(self.pool.arena)

    def keys(self, prefix: int) -> list[bytes]:
        return [prefix.to_bytes(8, "little") + i.to_bytes(8, "little") for i in range(RUN_BLOCKS)]

    def ids(self, prefix: int) -> np.ndarray:
        return np.arange(prefix * RUN_BLOCKS, (prefix + 1) * RUN_BLOCKS)

    def close(self) -> None:
        self.pool.close()


def open_tier(bench: Bench, name: str, io: IoMode = IoMode.BUFFERED) -> DiskTier:
    return DiskTier(DiskConfig(bench.folder / name, 3 * bench.nbytes + (64 << 20), io=io), bench.layout)


def write_all(bench: Bench, tier: DiskTier) -> None:
    """Write every prefix behind, durably."""
    writer = WriteBehind(tier, backlog_bytes=bench.nbytes)
    for prefix in range(bench.prefixes):
        accepted = writer.submit(NAMESPACE, bench.keys(prefix), bench.memory, bench.ids(prefix))
        assert accepted is Outcome.DONE
    writer.close()
    assert writer.counters == {Outcome.DONE: bench.prefixes * RUN_BLOCKS}


def load_all(bench: Bench, tier: DiskTier, loader: Loader) -> None:
    """Load every prefix layer by layer into the pool, past DRAM, with a bounded number of bytes in flight."""
    copier = bench.pool.copier
    loads = []
    for prefix in range(bench.prefixes):
        slots = (bench.ids(prefix)[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).ravel()
        plan = copier.plan_staging(slots)

        def on_layer(layer: int, memory: BlockMemory, blocks: int, plan: Any = plan) -> None:
            copier.scatter_staging(plan, layer, memory.layers[layer])

        get = tier.prepare_get(NAMESPACE, bench.keys(prefix))
        loads.append(loader.load(tier, get, None, range(RUN_BLOCKS), on_layer=on_layer))
    for load in loads:
        read = load.result()
        assert (read.blocks, read.outcome) == (RUN_BLOCKS, Outcome.DONE)


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache, so that reads go to the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


# --- fio ---


class Fio:
    """fio on a file of our own, with as many threads and bytes in flight as our loader has."""

    def __init__(self, bench: Bench) -> None:
        self.file = bench.folder / "fio" / "data"
        self.nbytes = bench.nbytes
        self.file.parent.mkdir()
        chunk = np.random.default_rng(SEED).integers(0, 256, 16 << 20, dtype=np.uint8)
        with self.file.open("wb") as file:
            for _ in range(0, self.nbytes, chunk.size):
                file.write(chunk.data)

    def run(self, *, write: bool, direct: bool) -> float:
        """Seconds that fio needed for all bytes."""
        share = self.nbytes // THREADS
        jobs, size = (1, self.nbytes) if write else (THREADS, share)
        command = [
            "fio", "--name=fio", f"--filename={self.file}", "--thread", "--ioengine=psync",
            f"--rw={'write' if write else 'read'}", f"--bs={READ_BYTES}", f"--numjobs={jobs}",
            f"--size={size}", f"--offset_increment={share}", f"--direct={int(direct)}",
            "--invalidate=1", "--group_reporting", "--output-format=json",
            *(["--end_fsync=1", "--overwrite=1"] if write else []),
        ]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=300, encoding="utf-8"
        )
        job = json.loads(done.stdout)["jobs"][0]["write" if write else "read"]
        return self.nbytes / float(job["bw_bytes"])

    def note(self, took: list[float], *, write: bool, direct: bool) -> None:
        """Run, and add the seconds that fio reports: its process takes half a second to start."""
        took.append(self.run(write=write, direct=direct))


# --- other ways to keep blocks ---


class LmdbValues:
    """Every layer of every block as a value in LMDB."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.folder = bench.folder / "lmdb"

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self) -> None:
        """One writer: LMDB has room for no second one."""
        with lmdb.open(str(self.folder), map_size=4 * self.bench.nbytes) as env:
            for prefix in range(self.bench.prefixes):
                with env.begin(write=True) as txn:
                    for key, block in zip(self.bench.keys(prefix), self.bench.ids(prefix), strict=True):
                        for layer, rows in enumerate(self.bench.memory.layers):
                            txn.put(key + bytes([layer]), rows[block].data)

    def read(self) -> None:
        with lmdb.open(
            str(self.folder), map_size=4 * self.bench.nbytes, readonly=True, readahead=True
        ) as env:
            _in_threads(lambda prefix: self._read(env, prefix), self.bench.prefixes)

    def _read(self, env: lmdb.Environment, prefix: int) -> None:
        with env.begin(buffers=True) as txn:
            for layer, rows in enumerate(self.bench.memory.layers):
                for key, block in zip(self.bench.keys(prefix), self.bench.ids(prefix), strict=True):
                    value = txn.get(key + bytes([layer]))
                    assert value is not None
                    rows[block] = np.frombuffer(value, dtype=np.uint8)


class FilePerPage:
    """Every block as a file of its own in one flat folder, as HiCache's file backend keeps pages."""

    def __init__(self, bench: Bench, *, synced: bool) -> None:
        self.bench = bench
        self.synced = synced
        self.folder = bench.folder / f"pages-{'synced' if synced else 'unsynced'}"

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self) -> None:
        self.folder.mkdir()
        _in_threads(self._write, self.bench.prefixes)

    def _write(self, prefix: int) -> None:
        for key, block in zip(self.bench.keys(prefix), self.bench.ids(prefix), strict=True):
            with (self.folder / key.hex()).open("wb", buffering=0) as file:
                file.write(self.bench.pool.arena.blocks[block].data)
                if self.synced:
                    os.fdatasync(file.fileno())

    def read(self) -> None:
        _in_threads(self._read, self.bench.prefixes)

    def _read(self, prefix: int) -> None:
        for key, block in zip(self.bench.keys(prefix), self.bench.ids(prefix), strict=True):
            with (self.folder / key.hex()).open("rb", buffering=0) as file:
                file.readinto(self.bench.pool.arena.blocks[block].data)


def _in_threads(work: Callable[[int], None], prefixes: int) -> None:
    """For every prefix, with as many threads as our loader has."""
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(prefixes)))


# --- measuring ---


def measure_disk(
    options: Options, report: Report, folder: Path | None, lmcache_python: Path | None = None
) -> None:
    """Rows for loading and writing, and `disk_to_hbm_vs_fio`: 1 is as fast as fio."""
    with temporary(folder) as path, contextlib.ExitStack() as ends:
        bench = Bench(options.pick(1024, quick=192, tiny=96) << 20, path)
        ends.callback(bench.close)
        why = missing(lmcache_python)
        if why:
            report.note(f"LMCache left out: {why}")
        peers = {} if why else _lmcache(bench, lmcache_python, ends)
        _measure(options, report, bench, peers)


def _lmcache(bench: Bench, python: Path | None, ends: contextlib.ExitStack) -> dict[str, LmCache]:
    """LMCache's backend with as many bytes and threads as ours has, in its own chunks."""
    chunk_bytes = CHUNK_TOKENS // BLOCK_TOKENS * bench.layout.block_bytes
    return {
        name: ends.enter_context(
            LmCache(
                python,
                bench.folder / f"lmcache-{name}",
                chunk_bytes=chunk_bytes,
                chunks=bench.nbytes // chunk_bytes,
                threads=THREADS,
                direct=name == "direct",
            )
        )
        for name in ("buffered", "direct")
    }


@contextlib.contextmanager
def temporary(folder: Path | None) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="benchmark-tiers-", dir=folder))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _measure(options: Options, report: Report, bench: Bench, peers: dict[str, LmCache]) -> None:
    fio = Fio(bench) if shutil.which("fio") else None
    pages = [FilePerPage(bench, synced=synced) for synced in (False, True)]
    values = LmdbValues(bench)
    tiers = {}
    for name, io in (("buffered", IoMode.BUFFERED), ("direct", IoMode.DIRECT)):
        tiers[name] = open_tier(bench, name, io)
        write_all(bench, tiers[name])
    values.write()
    for page in pages:
        page.write()
    chosen = choose_io(bench.folder, bench.layout, IoMode.AUTO).value
    report.note(
        f"disk: --kv-disk-io auto reads {chosen} here, and the summary is of that, beside the faster way of "
        f"fio's two and of LMCache's. Readers, and the writers of a file per page, have {THREADS} threads"
    )
    loader = Loader(THREADS * READ_BYTES, threads=THREADS)
    took: dict[str, list[float]] = {}
    legs: dict[str, Callable[[], Any]] = {}
    before: dict[str, Callable[[], Any]] = {}
    for name, tier in tiers.items():
        legs[name] = partial(load_all, bench, tier, loader)
        before[name] = partial(forget, bench.folder / name)
        if fio is not None:
            leg = f"fio {name}"
            took[leg] = []
            legs[leg] = partial(fio.note, took[leg], write=False, direct=name == "direct")
            before[leg] = partial(forget, bench.folder / "fio")
    for name, peer in peers.items():
        peer.run("write")
        leg = f"lmcache {name}"
        took[leg] = []
        legs[leg] = partial(peer.note, took[leg], "read")
        before[leg] = partial(forget, peer.folder)
    legs |= {"lmdb": values.read, "pages": pages[0].read}
    before |= {
        "lmdb": lambda: forget(values.folder),
        "pages": lambda: forget(pages[0].folder),
    }
    rounds = options.rounds(9, quick=3)
    deadline = options.pick(240, quick=20, tiny=2)
    times = _as_reported(paired(legs, rounds=rounds, before=before, deadline=deadline), took)
    for name in tiers:
        against = times.ratio(f"fio {name}", name) if fio is not None else None
        _row(report, f"disk to HBM, cold, {name}", bench, times, name, against)
    for leg, label in (
        ("fio buffered", "fio, cold, buffered"),
        ("fio direct", "fio, direct"),
        ("lmcache buffered", "LMCache to DRAM, cold, buffered"),
        ("lmcache direct", "LMCache to DRAM, direct"),
        ("lmdb", "LMDB values to DRAM, cold"),
        ("pages", "a file per page to DRAM, cold"),
    ):
        if leg in times.seconds:
            _row(report, label, bench, times, leg, None)
    labels = {
        "buffered": "disk to HBM, warm",
        "lmdb": "LMDB, warm",
        "pages": "a file per page, warm",
        "lmcache buffered": "LMCache, warm",
    }
    deadline = options.pick(60, quick=8, tiny=1)
    warm = _as_reported(
        paired({leg: legs[leg] for leg in labels if leg in legs}, rounds=rounds, deadline=deadline), took
    )
    for leg, label in labels.items():
        if leg in warm.seconds:
            _row(report, label, bench, warm, leg, None)
    loader.close()
    if fio is None:
        report.note("fio is not installed: `apt-get install fio` for disk_to_hbm_vs_fio")
        report.summary["disk_to_hbm_vs_fio"] = None
    else:
        limit = min(("fio buffered", "fio direct"), key=times.median)
        report.summary["disk_to_hbm_vs_fio"] = times.ratio(limit, chosen)
    report.summary["disk_read_vs_lmdb_cold"] = times.ratio("lmdb", chosen)
    report.summary["disk_read_vs_file_per_page_cold"] = times.ratio("pages", chosen)
    if peers:
        report.summary["disk_read_vs_lmcache"] = times.ratio(
            min((f"lmcache {name}" for name in peers), key=times.median), chosen
        )
    _measure_writes(options, report, bench, tiers["buffered"], fio, values, pages, peers.get("buffered"))
    for tier in tiers.values():
        tier.close()


def _measure_writes(
    options: Options,
    report: Report,
    bench: Bench,
    tier: DiskTier,
    fio: Fio | None,
    values: LmdbValues,
    pages: list[FilePerPage],
    peer: LmCache | None,
) -> None:
    took: dict[str, list[float]] = {"fio": []}
    legs: dict[str, Callable[[], Any]] = {
        "ours": lambda: write_all(bench, tier),
        "lmdb": values.write,
        "pages": pages[0].write,
        "pages synced": pages[1].write,
    }
    if fio is not None:
        legs["fio"] = partial(fio.note, took["fio"], write=True, direct=False)
    if peer is not None:
        took["lmcache"] = []
        legs["lmcache"] = partial(peer.note, took["lmcache"], "write")
    before: dict[str, Callable[[], Any]] = {
        "ours": lambda: tier.clear(),
        "lmdb": values.clear,
        "pages": pages[0].clear,
        "pages synced": pages[1].clear,
    }
    if peer is not None:
        before["lmcache"] = lambda: peer.run("clear")
    times = _as_reported(
        paired(
            legs,
            rounds=options.rounds(7, quick=3),
            before=before,
            deadline=options.pick(240, quick=15, tiny=2),
        ),
        took,
    )
    for leg, label in (
        ("ours", "DRAM to disk, durable"),
        ("fio", "fio write and fsync"),
        ("lmdb", "LMDB values, durable"),
        ("pages synced", "a file per page, synced"),
        ("pages", "a file per page, not synced"),
        ("lmcache", "LMCache, not synced"),
    ):
        if times.seconds.get(leg):
            against = times.ratio("fio", leg) if leg == "ours" and fio is not None else None
            _row(report, label, bench, times, leg, against)
    if fio is not None:
        report.summary["dram_to_disk_vs_fio"] = times.ratio("fio", "ours")
    report.summary["disk_write_vs_lmdb"] = times.ratio("lmdb", "ours")
    report.summary["disk_write_vs_file_per_page_synced"] = times.ratio("pages synced", "ours")


def _as_reported(times: Samples, took: dict[str, list[float]]) -> Samples:
    """Replace the seconds of a peer's process by those that it reports; its first were warmup."""
    seconds = {leg: list(found) for leg, found in times.seconds.items()}
    for leg, reported in took.items():
        if leg in seconds:
            seconds[leg] = reported[-len(seconds[leg]) :]
    return Samples(seconds)


def _row(
    report: Report, label: str, bench: Bench, times: Samples, leg: str, against_fio: float | None
) -> None:
    report.add(
        label,
        gb_s=bench.nbytes / times.median(leg) / 1e9,
        median_ms=1000 * times.median(leg),
        p99_ms=1000 * times.p(leg, 99),
        vs_fio=against_fio,
    )

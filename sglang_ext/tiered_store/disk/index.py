"""The index of a disk tier: the run that holds each block, in LMDB.

Tables:

    meta     b"stores" -> id of this store (16 bytes), then ids of stores whose segments it took over
             b"next" -> next run, next segment
    runs     run -> where the run lies, its namespace, its keys, and a checksum over all of that
    use      run -> last use, times used, blocks alive
    blocks   namespace + block key -> run, position in the run

Each change is one LMDB transaction, synced: after a crash the index has all of it or nothing. The data that a
transaction refers to has been synced before; see `disk.py`.

LMDB trusts its file: damage could crash the process. So the file is verified first (`lmdb.verify`, which
walks it without LMDB, a tenth of a second per 100,000 blocks), and rows carry their own proof: a run row its
checksum, a block entry the run's header, which names the block's key.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import lmdb
import lmdb.verify

from sglang_ext.tiered_store.disk.index_rows import (
    ENTRY,
    NEXT,
    RUN_KEY,
    RUN_ROW,
    USE_ROW,
    RunRow,
    RunUse,
    decode_entry,
    decode_run,
    decode_use,
    encode_run,
    keys_in,
    verified,
)
from sglang_ext.tiered_store.disk.segment_format import NAMESPACE_BYTES, STORE_ID_BYTES

logger = logging.getLogger(__name__)

DATA_FILE = "data.mdb"
_MAP_SIZES = (64 << 30, 4 << 30, 256 << 20)
"""Address space for the file, which grows only as it is filled; the first that the host grants."""


class IndexDamagedError(Exception):
    """The index cannot be used as it is; the text says why. An operator must repair the medium, or undo a
    change made to the file.
    """


class IndexFailedError(Exception):
    """A transaction did not happen. `full`: for lack of room."""

    def __init__(self, error: lmdb.Error) -> None:
        super().__init__(str(error))
        self.full = isinstance(error, lmdb.MapFullError) or getattr(error, "code", 0) == errno.ENOSPC


Watch = Callable[[Sequence[bytes], Sequence[bytes]], None]
"""Takes the keys of blocks that can be found now, and of such that cannot be found any more. The first may
name some that could be found before. Must not block."""


@dataclasses.dataclass(slots=True)
class Change:
    """One transaction.

    add: runs with their keys. A key that another run already serves stays with it, unless `replace` holds
        that run.
    replace: runs whose keys may pass to added ones, and which are dropped.
    serves: whether a run that the index leads to can be read now. If not, its keys may pass to added ones.
    skip: positions in added runs that are damaged, and that no key shall lead to.
    drop_blocks: (namespace, key), wherever they lie.
    uses: new values of runs that were only used.
    """

    add: Sequence[tuple[RunRow, Sequence[bytes]]] = ()
    replace: set[int] = dataclasses.field(default_factory=set)
    serves: Callable[[int], bool] = lambda run: True
    skip: Mapping[int, Set[int]] = dataclasses.field(default_factory=dict)
    drop_blocks: Sequence[tuple[bytes, bytes]] = ()
    uses: Mapping[int, RunUse] = dataclasses.field(default_factory=dict)
    next_run: int = 0
    next_segment: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """The contents of the index at start: all runs, without their keys. bad_rows: rows that did not
    verify."""

    stores: tuple[bytes, ...]
    next_run: int
    next_segment: int
    runs: tuple[tuple[RunRow, RunUse], ...]
    bad_rows: int


class Index:
    """The LMDB environment of one disk tier.

    step: called with `index_prepared` inside each change, before it is committed; for crash tests.

    Lookups may be made from any thread at any time. Changes are serialised by the caller.

    shared: read the file beside the process that writes it, which has verified it.

    Raises:
        IndexDamagedError: the file is not sound.
        OSError: it cannot be opened or created.
    """

    def __init__(
        self,
        path: Path,
        *,
        readonly: bool = False,
        shared: bool = False,
        step: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.path = path
        self.readonly = readonly = readonly or shared
        # LMDB reuses pages that no reader has registered for; a directory without writing has no writer.
        self._locks = os.access(path, os.W_OK) if shared else not readonly
        self._step = step
        self.watch: Watch | None = None
        """Called after every committed change, in the thread that made it."""
        self._changed: tuple[list[bytes], list[bytes]] = ([], [])
        if not readonly:
            path.mkdir(mode=0o700, exist_ok=True)
        if (path / DATA_FILE).exists():
            problems = [] if shared else verify_file(path)
            if problems:
                raise IndexDamagedError("; ".join(problems[:3]))
        elif readonly:
            raise IndexDamagedError(f"{path / DATA_FILE} is missing")
        self._env: Any = None
        self._open()

    @classmethod
    def missing(cls, path: Path) -> Index:
        """An index that finds nothing, for where none can be opened."""
        index = cls.__new__(cls)
        index.path = path
        index.readonly = True
        index.watch = None
        index._env = None
        return index

    def _open(self) -> None:
        for size in _MAP_SIZES:
            try:
                self._env = lmdb.open(
                    str(self.path),
                    map_size=size,
                    mode=0o600,
                    max_dbs=4,
                    max_readers=512,
                    readonly=self.readonly,
                    lock=self._locks,
                    create=not self.readonly,
                    readahead=False,
                )
                break
            except lmdb.MemoryError:
                if size == _MAP_SIZES[-1]:
                    raise OSError(errno.ENOMEM, "no address space for the index") from None
            except lmdb.DiskError as error:
                raise OSError(errno.EIO, str(error)) from error
            except lmdb.Error as error:
                code = getattr(error, "code", 0)
                if code in (errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EIO):
                    raise OSError(code, str(error)) from error
                raise IndexDamagedError(str(error)) from error
        try:
            options = {"create": not self.readonly}
            self._meta = self._env.open_db(b"meta", **options)
            self._runs = self._env.open_db(b"runs", **options)
            self._use = self._env.open_db(b"use", **options)
            self._blocks = self._env.open_db(b"blocks", **options)
        except lmdb.Error as error:
            self._env.close()
            if IndexFailedError(error).full:
                raise OSError(errno.ENOSPC, str(error)) from error
            raise IndexDamagedError(str(error)) from error
        self._identity = _identity(self.path / DATA_FILE)

    # --- reading ---

    def load(self) -> Snapshot:
        """Read all runs; creates the store's id when the index is new."""
        try:
            with self._env.begin() as txn:
                stores = txn.get(b"stores", db=self._meta)
                following = txn.get(b"next", db=self._meta)
                rows, bad = self._load_runs(txn)
            if stores is None and not self.readonly:
                stores = os.urandom(STORE_ID_BYTES)
                with self._env.begin(write=True) as txn:
                    txn.put(b"stores", stores, db=self._meta)
        except lmdb.Error as error:
            raise IndexDamagedError(str(error)) from error
        if not stores or len(stores) % STORE_ID_BYTES:
            raise IndexDamagedError("the index has no store id")
        ids = tuple(stores[i : i + STORE_ID_BYTES] for i in range(0, len(stores), STORE_ID_BYTES))
        known = following is not None and len(following) == NEXT.size
        next_run, next_segment = NEXT.unpack(following) if known else (1, 1)
        return Snapshot(ids, next_run, next_segment, tuple(rows), bad)

    def take_over(self, stores: Iterable[bytes]) -> None:
        """Accept the segments of other stores as this one's: after an index was lost and rebuilt."""
        known = self.load().stores
        ids = dict.fromkeys([*known, *stores])
        with self._env.begin(write=True) as txn:
            txn.put(b"stores", b"".join(ids), db=self._meta)

    def _load_runs(self, txn: Any) -> tuple[list[tuple[RunRow, RunUse]], int]:
        uses = dict(txn.cursor(db=self._use))
        rows: list[tuple[RunRow, RunUse]] = []
        bad = 0
        for key, value in txn.cursor(db=self._runs):
            row = decode_run(key, value)
            if row is None:
                bad += 1
                continue
            rows.append((row, decode_use(uses.get(key)) or RunUse(row.created, 0, row.blocks)))
        return rows, bad

    def find(self, namespace: bytes, keys: Sequence[bytes]) -> list[tuple[int, int] | None]:
        """(run, position) for each key, None for those that are not here.

        Raises:
            IndexFailedError: LMDB failed.
        """
        if self._env is None:
            return [None] * len(keys)
        try:
            with self._env.begin() as txn:
                values = [txn.get(namespace + key, db=self._blocks) for key in keys]
        except lmdb.Error as error:
            raise IndexFailedError(error) from error
        return [decode_entry(value) if value is not None else None for value in values]

    def find_prefix(self, namespace: bytes, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """(run, position) for the leading keys that are here. Raises IndexFailedError."""
        found: list[tuple[int, int]] = []
        if self._env is None:
            return found
        try:
            with self._env.begin() as txn:
                for key in keys:
                    value = txn.get(namespace + key, db=self._blocks)
                    if value is None:
                        break
                    found.append(decode_entry(value))
        except lmdb.Error as error:
            raise IndexFailedError(error) from error
        return found

    def row_of(self, run: int) -> RunRow | None:
        """The row of a run; None when the run is not here or its row is bad. Raises IndexFailedError."""
        name = RUN_KEY.pack(run)
        if self._env is None:
            return None
        try:
            with self._env.begin() as txn:
                value = txn.get(name, db=self._runs)
        except lmdb.Error as error:
            raise IndexFailedError(error) from error
        return None if value is None else decode_run(name, value)

    def keys_of(self, run: int) -> tuple[bytes, ...]:
        """Keys of a run in the order of its blocks; empty when the run is not here or its row is bad."""
        try:
            with self._env.begin() as txn:
                value = txn.get(RUN_KEY.pack(run), db=self._runs)
        except lmdb.Error as error:
            raise IndexFailedError(error) from error
        return keys_in(value) if value is not None and verified(value) else ()

    def entries(self) -> Iterator[tuple[bytes, bytes, int, int]]:
        """(namespace, key, run, position) of every block, for checks."""
        with self._env.begin() as txn:
            for key, value in txn.cursor(db=self._blocks):
                yield key[:NAMESPACE_BYTES], key[NAMESPACE_BYTES:], *decode_entry(value)

    def keys_in_namespace(self, namespace: bytes | None) -> list[tuple[bytes, bytes]]:
        """(namespace, key) of every block of one namespace, or of all."""
        found: list[tuple[bytes, bytes]] = []
        if self._env is None:
            return found
        try:
            with self._env.begin() as txn:
                cursor = txn.cursor(db=self._blocks)
                more = cursor.set_range(namespace) if namespace else cursor.first()
                while more:
                    key = cursor.key()
                    if namespace and not key.startswith(namespace):
                        break
                    found.append((key[:NAMESPACE_BYTES], key[NAMESPACE_BYTES:]))
                    more = cursor.next()
        except lmdb.Error as error:
            raise IndexFailedError(error) from error
        return found

    def names_after(
        self, place: bytes, limit: int, namespace: bytes = b""
    ) -> tuple[list[bytes], bytes | None]:
        """Up to ``limit`` keys, and the place to go on from; ``b""`` to begin with, ``None`` at the end.

        Args:
            namespace: only its keys; the place lies in it.
        """
        found: list[bytes] = []
        if self._env is None:
            return found, None
        try:
            with self._env.begin() as txn:
                cursor = txn.cursor(db=self._blocks)
                more = cursor.set_range(place) if place else cursor.first()
                while (more := more and cursor.key().startswith(namespace)) and len(found) < limit:
                    found.append(cursor.key()[NAMESPACE_BYTES:])
                    more = cursor.next()
                return found, cursor.key() if more else None
        except lmdb.Error as error:
            raise IndexFailedError(error) from error

    def names_in(self, namespace: bytes, first: bytes, limit: int) -> tuple[list[bytes], bytes | None]:
        """Like `names_after`, of one namespace: keys from ``first`` on, and the key to go on from."""
        names, place = self.names_after(namespace + first, limit, namespace)
        return names, None if place is None else place[NAMESPACE_BYTES:]

    @property
    def closed(self) -> bool:
        return self._env is None

    @property
    def blocks(self) -> int:
        """Blocks in the index."""
        if self._env is None:
            return 0
        with self._env.begin() as txn:
            return int(txn.stat(self._blocks)["entries"])

    @property
    def file_bytes(self) -> int:
        """Bytes of the index's file."""
        try:
            return (self.path / DATA_FILE).stat().st_size
        except OSError:
            return 0

    # --- changing ---

    def commit(self, change: Change) -> dict[int, int]:
        """Make a change durable, all of it or nothing.

        Returns, for every run whose count of alive blocks the change set or lowered, that count.

        Raises:
            IndexFailedError: nothing has changed.
        """
        self._changed = ([], [])
        try:
            with self._env.begin(write=True) as txn:
                alive = self._apply(txn, change)
                self._step("index_prepared")
        except lmdb.Error as error:
            self._recover(error)
            raise IndexFailedError(error) from error
        if self.watch is not None:
            self.watch(*self._changed)
        return alive

    def _apply(self, txn: Any, change: Change) -> dict[int, int]:
        alive: dict[int, int] = {}
        touched = dict(change.uses)
        lowered: Counter[int] = Counter()
        for row, keys in change.add:
            skip = change.skip.get(row.run, ())
            serving = sum(
                self._point(txn, row, key, i, change, lowered) for i, key in enumerate(keys) if i not in skip
            )
            alive[row.run] = serving
            if not serving:
                continue  # other runs serve all of its blocks already
            txn.put(RUN_KEY.pack(row.run), encode_run(row, keys), db=self._runs)
            use = touched.pop(row.run, None) or RunUse(row.created, 0, serving)
            touched[row.run] = dataclasses.replace(use, alive=serving)
        for run in change.replace:
            self._drop_run(txn, run)
            touched.pop(run, None)
            alive[run] = 0
        for namespace, key in change.drop_blocks:
            value = txn.pop(namespace + key, db=self._blocks)
            if value is not None:
                self._changed[1].append(key)
                lowered[decode_entry(value)[0]] += 1
        for run, count in lowered.items():
            left = self._lower(txn, run, count, touched)
            if left is not None:
                alive[run] = left
        for run, use in touched.items():
            txn.put(RUN_KEY.pack(run), USE_ROW.pack(use.last, use.hits, use.alive), db=self._use)
        if change.next_run:
            txn.put(b"next", NEXT.pack(change.next_run, change.next_segment), db=self._meta)
        return alive

    def _point(
        self, txn: Any, row: RunRow, key: bytes, position: int, change: Change, lowered: Counter[int]
    ) -> bool:
        """Lead `key` to a position of `row`, unless another run serves it. Whether `row` serves it now."""
        name = row.namespace + key
        value = txn.get(name, db=self._blocks)
        if value is not None:
            run = decode_entry(value)[0]
            if run not in change.replace:
                row_there = txn.get(RUN_KEY.pack(run), db=self._runs)
                if row_there is not None and change.serves(run):
                    return False
                lowered[run] += 1
        txn.put(name, ENTRY.pack(row.run, position), db=self._blocks)
        self._changed[0].append(key)
        return True

    def _lower(self, txn: Any, run: int, count: int, touched: dict[int, RunUse]) -> int | None:
        """Lower a run's count of alive blocks; drops the run at 0. None when it is not here."""
        name = RUN_KEY.pack(run)
        if txn.get(name, db=self._runs) is None:
            return None
        use = touched.pop(run, None) or decode_use(txn.get(name, db=self._use))
        left = max(0, use.alive - count) if use else 0
        if left:
            assert use is not None
            touched[run] = dataclasses.replace(use, alive=left)
        else:
            self._drop_run(txn, run)
        return left

    def _drop_run(self, txn: Any, run: int) -> None:
        name = RUN_KEY.pack(run)
        value = txn.pop(name, db=self._runs)
        txn.delete(name, db=self._use)
        if value is None or not verified(value):
            return  # its entries lead nowhere now, which is a miss
        namespace = RUN_ROW.unpack_from(value)[7]
        for key in keys_in(value):
            entry = txn.get(namespace + key, db=self._blocks)
            if entry is not None and decode_entry(entry)[0] == run:
                txn.delete(namespace + key, db=self._blocks)
                self._changed[1].append(key)

    def _recover(self, error: lmdb.Error) -> None:
        """After a failed write LMDB may refuse everything; opening it again brings back the last good
        state.
        """
        if isinstance(error, lmdb.MapFullError):
            return
        try:
            self._env.close()
            self._open()
        except (lmdb.Error, OSError, IndexDamagedError) as again:
            logger.error("index %s cannot be opened again after an error: %s", self.path, again)

    def in_place(self) -> bool:
        """Whether the file that is open is still the one in the directory."""
        return self._env is None or self._identity == _identity(self.path / DATA_FILE)

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._env is not None:
            env, self._env = self._env, None
            env.close()


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def verify_file(path: Path) -> list[str]:
    """Structural faults of an index's file; empty when there are none."""
    try:
        return [str(problem) for problem in lmdb.verify.verify(str(path))]
    except lmdb.verify.VerifyError as error:
        return [str(error)]
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - a verifier that trips over the file has found it damaged
        return [f"{type(error).__name__}: {error}"]

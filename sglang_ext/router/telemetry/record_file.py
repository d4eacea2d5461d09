"""The file of ``--record``: a thread that writes it, rotated and bounded."""

from __future__ import annotations

import fcntl
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Final

from sglang_ext.cluster_key import ClusterKey, read_secret
from sglang_ext.errors import ConfigError
from sglang_ext.folders import open_own
from sglang_ext.protocol.recording import AnyLine, Namer, Writer

logger = logging.getLogger("router.record")

PENDING_BYTES: Final = 64 << 20
"""Prompts that wait to be written. Lines beyond are dropped and counted."""
PENDING: Final = 1 << 16
OTHERS: Final = 64
"""Processes that may record to one name on a machine: each has a file of its own."""
_PURPOSE: Final = "recording"
_KEY_FIELD: Final = "--record"

Lines = Callable[[Namer, Writer], Iterable[AnyLine]]
"""Makes lines, in the thread that writes them."""


def yield_to_others() -> None:
    """Release the interpreter lock: the event loop would else wait up to 5 ms while a prompt is hashed."""
    time.sleep(0)


def recording_key(cluster: ClusterKey | None) -> bytes:
    """The secret that names in recordings are keyed with: made of the cluster's key, so that all routers and
    instances of a fleet have the same; without one, of a file of this user that is made once.

    Raises:
        ConfigError: that file cannot be used.
    """
    if cluster is not None:
        return bytes.fromhex(cluster.seal(_PURPOSE, b""))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "sglang_ext"
    path = folder / "recording.key"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / f"recording.key.{os.getpid()}"
        if not path.exists():
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(32))
            try:
                os.link(fresh, path)  # of several routers that start at once, the first one's stays
            except FileExistsError:
                pass
            finally:
                fresh.unlink()
    except OSError as error:
        raise ConfigError(f"cannot make {path}: {error.strerror or error}", field=_KEY_FIELD) from error
    return bytes.fromhex(read_secret(path, field=_KEY_FIELD).decode())


class RecordFile:
    """Writes lines to a file in a thread of its own. No call waits for the disk, and none raises.

    Args:
        path: where the lines go. When it is full, it becomes ``path.1``, and so on; files of a former run are
            moved likewise. If another process records there, ``-2`` and so on is put to its name.
        size: bytes of one file, about.
        files: most files that are kept, the newest included.
        namer: names the blocks.
    """

    def __init__(self, path: Path, size: int, files: int, namer: Namer) -> None:
        self._wanted, self._size, self._files = path, size, files
        self._namer = namer
        self._beginning: Callable[[], Iterable[AnyLine]] = tuple
        self._queue: queue.SimpleQueue[tuple[Lines, int] | None] = queue.SimpleQueue()
        self._pending = threading.Lock()
        self._pending_bytes = 0
        self._writer, self._written = Writer(), 0
        self._file: IO[bytes] | None = None
        self.path = path
        """Where it writes."""
        self.lines = 0
        self.dropped = 0
        """Lines that were not written: too many waited, or the disk failed."""
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)

    @property
    def key_id(self) -> str:
        """See ``Namer``."""
        return self._namer.key_id

    def word(self, text: str) -> str:
        """See ``Namer``."""
        return self._namer.word(text)

    def start(self, beginning: Callable[[], Iterable[AnyLine]]) -> None:
        """Open the file, and write from now on.

        Args:
            beginning: makes the first lines of each file.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._beginning = beginning
        self._open()
        self._thread.start()

    def put(self, lines: Lines, size: int = 0) -> None:
        """Write lines soon.

        Args:
            size: bytes that ``lines`` holds until then.
        """
        with self._pending:
            full = self._pending_bytes + size > PENDING_BYTES or self._queue.qsize() >= PENDING
            if full:
                self.dropped += 1
                return
            self._pending_bytes += size
        self._queue.put((lines, size))

    def begin_again(self) -> None:
        """Write the first lines of a file once more, soon: one of them has changed. Names before them count
        as not written."""

        def lines(_namer: Namer, _writer: Writer) -> Iterable[AnyLine]:
            self._writer = Writer()
            return self._beginning()

        self.put(lines)

    def close(self) -> None:
        """Write the lines that wait, and end the thread."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            lines, size = item
            try:
                self._write(lines)
                self._failing = False
            except Exception:
                self.dropped += 1
                if not self._failing:
                    logger.exception("cannot record to %s", self.path)
                self._failing = True
            del lines, item
            with self._pending:
                self._pending_bytes -= size
            if self._file is not None and self._queue.empty():
                self._flush()
        if self._file is not None:
            self._flush()
            self._file.close()

    def _flush(self) -> None:
        try:
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            logger.error("cannot record to %s: %r", self.path, error)
            self._failing, self._file = True, None

    def _write(self, lines: Lines) -> None:
        if self._file is None:
            self._open()
        elif self._written >= self._size:
            self._file.close()
            self._file = None
            self._open()
        assert self._file is not None
        for line in lines(self._namer, self._writer):
            data = self._writer.line(line)
            self._written += self._file.write(data)
            self.lines += 1

    def _open(self) -> None:
        """Begin a new file.

        Raises:
            ConfigError: it cannot be made.
        """
        try:
            self._file = self._locked()
        except OSError as error:
            raise ConfigError(
                f"cannot write {self._wanted}: {error.strerror or error}", field=_KEY_FIELD
            ) from error
        self._writer, self._written = Writer(), 0
        for line in self._beginning():
            self._written += self._file.write(self._writer.line(line))
        self._file.flush()

    def _locked(self) -> IO[bytes]:
        """A new file of a name that no other process records to; a former one is moved away."""
        for number in range(1, OTHERS + 1):
            name = self._wanted
            if number > 1:
                name = name.with_name(f"{name.stem}-{number}{name.suffix}")
            if (file := _lock(name, os.O_CREAT)) is None:
                continue
            if os.fstat(file.fileno()).st_size:
                with file:
                    self._shift(name)
                    new = _lock(name, os.O_CREAT | os.O_EXCL)
                if new is None:
                    continue
                file = new
            self.path = name
            return file
        raise OSError(f"{OTHERS} processes record there")

    def _shift(self, path: Path) -> None:
        """Make room for a new file, and forget the oldest."""
        if self._files == 1:
            path.unlink()
        for number in range(self._files - 1, 0, -1):
            newer = path if number == 1 else path.with_name(f"{path.name}.{number - 1}")
            if newer.exists():
                newer.replace(path.with_name(f"{path.name}.{number}"))

    def __repr__(self) -> str:
        return f"RecordFile({self.path}, lines={self.lines}, dropped={self.dropped})"


def _lock(path: Path, flags: int) -> IO[bytes] | None:
    """A file for writing, locked; None where another process has it."""
    try:
        file = os.fdopen(open_own(path, os.O_WRONLY | flags), "wb")
    except FileExistsError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file

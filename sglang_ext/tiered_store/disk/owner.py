"""One owner per directory: a lock that goes with its process, and a note that says who holds it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from pathlib import Path

import msgspec

from sglang_ext.errors import ConfigError

LOCK_FILE = "owner.lock"


class OwnerNote(msgspec.Struct, frozen=True):
    """Who holds a directory. since: wall-clock seconds."""

    pid: int
    instance: str
    host: str
    since: float


class DirectoryOwner:
    """Holds `path` for this process until `release`, or until the process ends, however it ends.

    Raises:
        ConfigError: another process holds it; the text names that process.
        OSError: the lock file cannot be made (a read-only disk among other reasons).
    """

    def __init__(self, path: Path, instance: str) -> None:
        self.path = path
        # Not through a link that somebody else has put there: what it points to would be emptied.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path / LOCK_FILE, flags, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            note = read_owner(path)
            os.close(self._fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise ConfigError(
                f"{path} is in use by {_describe(note)}",
                field="--kv-disk-path",
                hint="Give each server a directory of its own, or stop that one first",
            ) from None
        note = OwnerNote(os.getpid(), instance, socket.gethostname(), time.time())
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, msgspec.json.encode(note), 0)

    def release(self) -> None:
        """Let go; may be called twice."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1


def read_owner(path: Path) -> OwnerNote | None:
    """The note of whoever holds, or last held, a directory."""
    try:
        return msgspec.json.decode((path / LOCK_FILE).read_bytes(), type=OwnerNote)
    except (OSError, msgspec.DecodeError):
        return None


def _describe(note: OwnerNote | None) -> str:
    if note is None:
        return "another process"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(note.since))
    return f"instance {note.instance!r} (process {note.pid} on {note.host}, since {since})"

"""One owner per directory: a lock that goes with its process, and a note that says who holds it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import time
from pathlib import Path

import msgspec

from sglang_ext.errors import ConfigError

LOCK_FILE = "owner.lock"
NETWORK = frozenset(
    {"afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"}
    | {"fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs"}
)
"""File systems that other machines may have mounted too. There a lock may hold on one machine alone, and
LMDB, a mapping that processes share, is damaged by the second machine that writes."""


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

    def in_place(self) -> bool:
        """Whether the directory still has the lock that this process holds."""
        try:
            there, ours = os.stat(self.path / LOCK_FILE, follow_symlinks=False), os.fstat(self._fd)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def release(self) -> None:
        """Let go; may be called twice."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1


def refuse_network(path: Path, kind: str) -> None:
    """Refuse a directory that is on a file system of this kind, if that is one that machines share.

    Raises:
        ConfigError: it is.
    """
    if kind in NETWORK:
        raise ConfigError(
            f"{path} is on a network file system ({kind}), which a server of another machine could use too",
            field="--kv-disk-path",
            hint="Give a directory on a disk of this machine",
        )


def mounted_kind(path: Path, mountinfo: str) -> str:
    """The kind of file system that a path is on; "" if none is found.

    Args:
        path: absolute, without links.
        mountinfo: the text of /proc/self/mountinfo.
    """
    found, longest = "", -1
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        # Blanks and the like are written as octal numbers.
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), before.split()[4])
        # Of two at one place, the later covers the earlier.
        if path.is_relative_to(point) and len(point) >= longest:
            found, longest = after.split()[0], len(point)
    return found


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

"""One owner per directory: a lock that goes with its process, and a note that names its holder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sglang_ext.errors import ConfigError
from sglang_ext.folders import open_own, own_folder

LOCK_FILE = "owner.lock"
NETWORK = frozenset(
    {"afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"}
    | {"fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs"}
)
"""File systems that other machines may have mounted too. There a lock may hold on one machine alone, and
LMDB, a mapping that processes share, is damaged by the second machine that writes."""


class OwnerNote(msgspec.Struct, frozen=True):
    """The instance that holds a directory. since: wall-clock seconds. path: the directory, as given on its
    server's command line."""

    pid: int
    instance: str
    host: str
    since: float
    path: str = ""

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"instance {self.instance!r} (process {self.pid} on {self.host}, since {since})"


class DirectoryOwner:
    """Holds `path` for this process until `release`, or until the process ends, however it ends.

    Raises:
        ConfigError: another process holds it; the text names that process.
        OSError: the lock file cannot be made (a read-only disk among other reasons).
    """

    def __init__(self, path: Path, instance: str) -> None:
        self.path = path
        # Not through a link: the file that it leads to would be emptied.
        self._fd = open_own(path / LOCK_FILE, os.O_RDWR | os.O_CREAT)
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
        note = OwnerNote(os.getpid(), instance, socket.gethostname(), time.time(), str(path))
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


@dataclass(frozen=True)
class Place:
    """Where a directory was when it was opened. device: of its file system. resolved: without links."""

    device: int
    resolved: Path

    @classmethod
    def of(cls, path: Path) -> Place:
        return cls(path.stat().st_dev, path.resolve())


def take_anew(lost: DirectoryOwner, place: Place, instance: str) -> DirectoryOwner:
    """Replace a directory that was removed, emptied or swapped, and hold the new one; creates it if it is
    missing. Files of others are never touched: it has to be empty, this user's, and on the same disk.

    Returns `lost` where only its lock was left there.

    Raises:
        ConfigError: it is not safe to use, or another process uses it.
        OSError: it cannot be made, or read.
    """
    path = lost.path
    above = next(each for each in (path, *path.absolute().parents) if each.exists())
    if above.stat().st_dev != place.device:
        raise _unsafe(f"{path} would be on another file system than before; is its disk still mounted?")
    own_folder(path, "--kv-disk-path", make=True)
    _require_empty(path, place)
    if lost.in_place():
        return lost
    owner = DirectoryOwner(path, instance)
    try:
        _require_empty(path, place)  # another server may have come and gone
    except BaseException:
        owner.release()
        raise
    return owner


def _require_empty(path: Path, place: Place) -> None:
    if Place.of(path) != place:
        raise _unsafe(f"{path} leads to another place than before")
    there = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK_FILE)
    if there:
        raise _unsafe(f"{path} holds {there[0]!r}, which this server has not written there")


def _unsafe(text: str) -> ConfigError:
    return ConfigError(text, field="--kv-disk-path", hint="Empty that directory, or restart the server")


def lost_owners(path: Path) -> Iterator[OwnerNote]:
    """Processes of this machine whose directory, at or below `path`, is not there any more: it was removed,
    emptied or replaced while they used it. Finds those that this user may look at.
    """
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            if not Path(os.readlink(link)).name.startswith(LOCK_FILE):
                continue
            note = msgspec.json.decode(link.read_bytes(), type=OwnerNote)
            mine = str(note.pid) == link.parts[2] and note.path
            if mine and Path(note.path).absolute().is_relative_to(path.absolute()) and not _same(link, note):
                yield note


def _same(link: Path, note: OwnerNote) -> bool:
    try:
        there = os.stat(Path(note.path) / LOCK_FILE, follow_symlinks=False)
    except OSError:
        return False
    ours = link.stat()
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def refuse_network(path: Path, kind: str) -> None:
    """Refuse a directory on a file system of this kind if machines share that kind.

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
    """The note of the instance that holds, or last held, a directory."""
    try:
        return msgspec.json.decode((path / LOCK_FILE).read_bytes(), type=OwnerNote)
    except (OSError, msgspec.DecodeError):
        return None


def _describe(note: OwnerNote | None) -> str:
    return "another process" if note is None else str(note)

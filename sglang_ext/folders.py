"""Folders and files that this package reads from and writes to are this user's: others cannot exchange them.

A path is walked from the root, link by link. Every folder on the way belongs to this user or to root, and no
other user may write to it, apart from folders with the sticky bit, as ``/tmp``: there, each entry belongs to
its owner. A process's own group counts as the user, since Kubernetes gives a pod its volumes by their group
(``fsGroup``: root's, mode 2775). Once that holds, no other user can change where the path leads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sglang_ext.errors import ConfigError

MAX_LINKS: Final = 40
"""On one path, as in the kernel."""
UNMAPPED_FILE: Final = Path("/proc/sys/fs/overflowuid")
WHOLE_MAP: Final = ["0", "0", "4294967295"]


@dataclass(frozen=True)
class Identity:
    """A process, as the kernel judges it.

    Args:
        user: effective user id.
        groups: effective and further group ids.
        unmapped: in a user namespace that lacks users of the machine, the id that all of these have, root
            perhaps among them; None outside.
    """

    user: int
    groups: frozenset[int]
    unmapped: int | None = None

    @classmethod
    def ours(cls) -> Identity:
        """That of this process."""
        return cls(os.geteuid(), frozenset({os.getegid(), *os.getgroups()}), _unmapped())


def _unmapped() -> int | None:
    try:
        maps = Path("/proc/self/uid_map").read_text(encoding="ascii").split()
        return None if maps == WHOLE_MAP else int(UNMAPPED_FILE.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def problem_of(status: os.stat_result, identity: Identity, *, is_parent: bool, in_sticky: bool) -> str | None:
    """Why another user could change a file or folder, as the rest of a sentence; None when none could.

    Args:
        status: of the entry itself, not of a link's target.
        identity: the user and groups of the process that is going to use it.
        is_parent: the entry is a folder on the way. Then the sticky bit is enough, and in a user namespace an
            owner that it does not know: those above a container's root are root's as a rule.
        in_sticky: it is in a folder where every user can make entries.
    """
    mode, owners = stat.S_IMODE(status.st_mode), {identity.user, 0}
    if is_parent and not in_sticky and identity.unmapped is not None:
        owners.add(identity.unmapped)
    if status.st_uid not in owners:
        return f"belongs to another user ({status.st_uid}, mode {mode:04o})"
    if stat.S_ISLNK(status.st_mode) or (is_parent and mode & stat.S_ISVTX):
        return None
    if mode & stat.S_IWOTH or (mode & stat.S_IWGRP and status.st_gid not in identity.groups):
        return f"can be written by others (owner {status.st_uid}, group {status.st_gid}, mode {mode:04o})"
    return None


def own_folder(path: Path, field: str, *, make: bool = False, shared: bool = False) -> Path:
    """A folder that no other user can change or exchange; returned without the links on its way.

    Args:
        path: of the folder.
        field: the flag or variable that named it, for errors.
        make: make it where there is none, with mode 0700; folders above it get 0755.
        shared: others may make entries of their own in it, as in ``/tmp``.

    Raises:
        ConfigError: another user could; names the folder on the path, its owner and its mode.
        OSError: the path cannot be walked, or a folder cannot be made.
    """
    identity, last, status = Identity.ours(), path, None
    for last, status, in_sticky in _walk(path, make=make):
        if problem := problem_of(status, identity, is_parent=True, in_sticky=in_sticky):
            raise _refusal(path, last, problem, field)
    if not shared and status is not None:
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        if problem := problem_of(status, identity, is_parent=False, in_sticky=False):
            raise _refusal(path, last, problem, field)
    return last


def require_own(folder: Path, entries: Iterable[Path], field: str) -> None:
    """Refuse files and folders that another user has made or could change, and links.

    Args:
        folder: one of our own, in which they are.
        entries: those that exist are looked at.
        field: the flag that named the folder, for errors.

    Raises:
        ConfigError: names the entry, its owner and its mode.
        OSError: one cannot be looked at.
    """
    identity = Identity.ours()
    for entry in entries:
        try:
            status = os.lstat(entry)
        except FileNotFoundError:
            continue
        link = "is a symbolic link" if stat.S_ISLNK(status.st_mode) else None
        if problem := link or problem_of(status, identity, is_parent=False, in_sticky=False):
            hint = f"Empty {folder}, or give another folder: what others put there would be used as ours"
            raise ConfigError(f"{entry} {problem}", field=field, hint=hint)


def open_own(path: Path, flags: int) -> int:
    """A descriptor of a file that no other user can change, with mode 0600 where it is made.

    Args:
        path: in a folder of our own.
        flags: as those of ``os.open``.

    Raises:
        OSError: as from ``os.open``; ELOOP where there is a link, EPERM where another user could change it.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        problem = problem_of(os.fstat(descriptor), Identity.ours(), is_parent=False, in_sticky=False)
        if problem:
            raise PermissionError(errno.EPERM, f"it {problem}", str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _walk(path: Path, *, make: bool) -> Iterator[tuple[Path, os.stat_result, bool]]:
    """Every folder and link on a path from the root on: where it is, its status, and whether it is in a
    folder where every user can make entries. Goes on when the caller has judged it.
    """
    left = list(reversed(path.absolute().parts[1:]))
    here, links = Path("/"), 0
    yield here, os.lstat(here), False
    while left:
        name = left.pop()
        if name == "..":
            here = here.parent
            yield here, os.lstat(here), False
            continue
        entry = here / name
        above = stat.S_IMODE(os.lstat(here).st_mode)
        status = _made(entry, 0o755 if left else 0o700) if make else os.lstat(entry)
        yield entry, status, bool(above & stat.S_ISVTX and above & (stat.S_IWOTH | stat.S_IWGRP))
        if not stat.S_ISLNK(status.st_mode):
            here = entry
            continue
        links += 1
        if links > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = Path(os.readlink(entry))
        here = Path("/") if target.is_absolute() else here
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def _made(folder: Path, mode: int) -> os.stat_result:
    """The status of a path, at which a folder is made if nothing is there."""
    try:
        return os.lstat(folder)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):  # made meanwhile; the caller judges whose it is
            os.mkdir(folder, mode)
        return os.lstat(folder)


def _refusal(path: Path, component: Path, problem: str, field: str) -> ConfigError:
    where = f"{component}" if component == path else f"{component}, on the way to {path},"
    hint = (
        f"Give a folder that only this user can change; or chown {component} to this user and "
        f"chmod go-w it, once it holds nothing that others put there"
    )
    return ConfigError(f"{where} {problem}", field=field, hint=hint)

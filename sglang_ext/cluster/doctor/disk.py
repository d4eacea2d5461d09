"""``sglang-ext doctor --kv-disk-path``: the disk tier's directory, its room, its speed, its index.

``gather`` inspects and, if requested, repairs; ``findings`` judges the facts, and is a pure function.

A server keeps one directory per rank below ``--kv-disk-path``; each such directory is inspected.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_ext.cluster.doctor.findings import MIB, Finding, Level, size
from sglang_ext.errors import ConfigError, SglangExtError
from sglang_ext.tiered_store.disk.check import (
    CheckReport,
    NotOwnError,
    RepairReport,
    check_directory,
    repair_directory,
)
from sglang_ext.tiered_store.disk.files import Files
from sglang_ext.tiered_store.disk.owner import (
    LOCK_FILE,
    NETWORK,
    OwnerNote,
    lost_owners,
    mounted_kind,
)
from sglang_ext.tiered_store.disk.segments import SUFFIX
from sglang_ext.tiered_store.disk.speed import DiskSpeed, measure_disk
from sglang_ext.tiered_store.disk.tier import INDEX_DIRECTORY

MEASURED = 256 * MIB
LEAST_MEASURED = 16 * MIB
"""A smaller file gives no meaningful speed."""
RUN_AS_ITS_USER = "If a server of another user has it, run this command as that user."
_SHOWN = 8
"""Problems that are listed one by one."""

Doing = Callable[[str], AbstractContextManager[object]]
"""Shows the name of a slow step while it runs."""


@dataclass(frozen=True)
class StoreFacts:
    """One rank's directory.

    in_use: the server that uses it now, as a sentence; empty for none.
    report, repaired, after: results of the check, of the repair, and of the check after it.
    error: why it could not be inspected or repaired. advice: the next step then.
    """

    path: Path
    in_use: str = ""
    report: CheckReport | None = None
    repaired: RepairReport | None = None
    after: CheckReport | None = None
    error: str = ""
    advice: str = "Look at the health of that disk."


LOCAL = Files()
"""This machine's."""


@dataclass(frozen=True)
class DiskFacts:
    """Facts about a --kv-disk-path. Sizes in bytes.

    total, free: of the file system. ours: bytes of it in disk tiers below the path. beside: other files in
    their directories, and old ones of theirs. network: the kind of file system, if other machines may have
    it, too.
    """

    path: Path
    repair: bool
    exists: bool = False
    total: int = 0
    free: int = 0
    ours: int = 0
    beside: tuple[tuple[Path, int], ...] = ()
    speed: DiskSpeed | None = None
    speed_error: str = ""
    stores: tuple[StoreFacts, ...] = ()
    network: str = ""
    lost: tuple[OwnerNote, ...] = ()
    """Servers whose directory was here, and is not any more."""


def gather(path: Path, *, repair: bool, deep: bool, doing: Doing, files: Files = LOCAL) -> DiskFacts:
    """Look at everything. Writes a file of up to 256 MiB to measure, and removes it; with ``deep`` or
    ``repair`` it reads everything there is.
    """
    lost = tuple(lost_owners(path))
    if not path.is_dir():
        return DiskFacts(path, repair, lost=lost)
    stores = list(_stores(path))
    usage = shutil.disk_usage(path)
    kind = mounted_kind(path.resolve(), files.mountinfo())
    speed, error = _speed(path, usage.free, doing)
    return DiskFacts(
        path,
        repair,
        exists=True,
        total=usage.total,
        free=usage.free,
        ours=sum(_bytes_below(entry) for store in stores for entry in store.iterdir() if _is_ours(entry)),
        beside=tuple(
            (entry, _bytes_below(entry))
            for store in stores
            for entry in sorted(store.iterdir())
            if not _is_ours(entry) and entry not in stores
        ),
        speed=speed,
        speed_error=error,
        network=kind if kind in NETWORK else "",
        lost=lost,
        stores=tuple(_look(store, repair=repair, deep=deep or repair, doing=doing) for store in stores),
    )


def _stores(path: Path) -> Iterator[Path]:
    for folder in (path, *sorted(entry for entry in path.iterdir() if entry.is_dir())):
        with contextlib.suppress(OSError):
            if (folder / INDEX_DIRECTORY).is_dir() or any(folder.glob(f"*{SUFFIX}")):
                yield folder


def _is_ours(entry: Path) -> bool:
    return entry.name in (INDEX_DIRECTORY, LOCK_FILE) or entry.suffix == SUFFIX


def _bytes_below(path: Path) -> int:
    """Bytes that a file, or all files of a folder, take on the disk."""
    total = 0
    for file in [path, *path.rglob("*")] if path.is_dir() else [path]:
        with contextlib.suppress(OSError):
            total += file.stat(follow_symlinks=False).st_blocks * 512
    return total


def _speed(path: Path, free: int, doing: Doing) -> tuple[DiskSpeed | None, str]:
    nbytes = min(MEASURED, free // 4)
    if nbytes < LEAST_MEASURED:
        return None, "there is too little room to measure in"
    try:
        with doing(f"measuring the disk of {path}"):
            return measure_disk(path, nbytes), ""
    except OSError as error:
        return None, error.strerror or str(error)


def _look(path: Path, *, repair: bool, deep: bool, doing: Doing) -> StoreFacts:
    report: CheckReport | None = None
    repaired: RepairReport | None = None
    try:
        with doing(f"{'reading' if deep else 'checking'} {path}"):
            report = check_directory(path, deep=deep)
        if not repair or report.sound:
            return StoreFacts(path, report=report)
        with doing(f"repairing {path}"):
            repaired = repair_directory(path)
        with doing(f"checking {path}"):
            return StoreFacts(path, report=report, repaired=repaired, after=check_directory(path))
    except ConfigError as error:
        return StoreFacts(path, in_use=error.message, report=report, repaired=repaired)
    except NotOwnError as error:
        return StoreFacts(path, error=error.message, advice=f"{error.hint or ''}. {RUN_AS_ITS_USER}")
    except SglangExtError as error:
        return StoreFacts(path, report=report, repaired=repaired, error=str(error))
    except OSError as error:
        return StoreFacts(path, report=report, repaired=repaired, error=f"{path}: {error.strerror}")


def findings(facts: DiskFacts) -> list[Finding]:
    """Findings that follow from the facts."""
    if not facts.exists:
        advice = "Make it, on a local disk, and writable for the server's user; or name another."
        found = [Finding(Level.PROBLEM, "directory", f"there is none at {facts.path}", advice)]
        return [*found, *_lost(facts)]
    found = [*_network(facts), *_lost(facts), _room(facts), *_beside(facts), _speed_finding(facts)]
    if not facts.stores:
        found.append(Finding(Level.OK, "disk tier", f"nothing is kept at {facts.path} yet"))
    for store in facts.stores:
        found += _store(store, repair=facts.repair)
    return found


def _network(facts: DiskFacts) -> Iterator[Finding]:
    if facts.network:
        text = f"{facts.path} is on a network file system ({facts.network}); a server refuses that"
        yield Finding(Level.PROBLEM, "directory", text, "Give a directory on a disk of this machine.")


def _lost(facts: DiskFacts) -> Iterator[Finding]:
    for owner in facts.lost:
        text = f"{owner.path} was removed, emptied or replaced under {owner}: its blocks there are lost"
        advice = (
            "The server goes on in a new directory when it writes next, if there is none or an empty one, on "
            "the same disk. Otherwise empty the directory, or restart the server."
        )
        yield Finding(Level.PROBLEM, "disk tier", text, advice)


def _room(facts: DiskFacts) -> Finding:
    others = facts.total - facts.free - facts.ours
    text = (
        f"{size(facts.free)} of {size(facts.total)} are free; the disk tier takes {size(facts.ours)}, "
        f"everything else {size(max(0, others))}"
    )
    if facts.free >= LEAST_MEASURED:
        return Finding(Level.OK, "room", text)
    advice = "Free space on that disk, or make --kv-disk-size smaller."
    return Finding(Level.WARNING, "room", text, advice)


def _beside(facts: DiskFacts) -> Iterator[Finding]:
    if facts.beside:
        names = ", ".join(f"{entry} ({size(nbytes)})" for entry, nbytes in facts.beside)
        advice = "Delete what you do not need; an index that was set aside is of no use once it was rebuilt."
        yield Finding(Level.WARNING, "other files", names, advice)


def _speed_finding(facts: DiskFacts) -> Finding:
    if facts.speed is None:
        advice = "Make the directory writable, or free some space."
        return Finding(Level.WARNING, "speed", f"not measured: {facts.speed_error}", advice)
    speed = facts.speed
    direct = "no O_DIRECT here" if speed.direct is None else f"{speed.direct / 1e9:.2f} GB/s with O_DIRECT"
    text = (
        f"writes {speed.write / 1e9:.2f} GB/s, synced; reads {speed.buffered / 1e9:.2f} GB/s through the "
        f"page cache, cold, {direct}: --kv-disk-io auto would choose {speed.io.value}"
    )
    return Finding(Level.OK, "speed", text)


def _store(store: StoreFacts, *, repair: bool) -> Iterator[Finding]:
    subject = "disk tier"
    if store.in_use:
        level = Level.PROBLEM if repair else Level.WARNING
        advice = "Its files are left alone. Stop that server first, and ask again."
        yield Finding(level, subject, f"not checked: {store.in_use}", advice)
        return
    if store.error:
        yield Finding(Level.PROBLEM, subject, store.error, store.advice)
    report = store.report
    if report is None:
        return
    lost = sum(problem.blocks for problem in report.problems)
    if report.sound:
        yield Finding(Level.OK, subject, f"{store.path}: {_contents(report)}")
        return
    level = Level.WARNING if store.repaired is not None else Level.PROBLEM
    for problem in report.problems[:_SHOWN]:
        blocks = f" ({problem.blocks} blocks)" if problem.blocks else ""
        yield Finding(level, subject, f"{problem.where}: {problem.text}{blocks}")
    if len(report.problems) > _SHOWN:
        yield Finding(level, subject, f"{len(report.problems) - _SHOWN} more of that kind")
    if store.repaired is None:
        text = f"{store.path}: {report.recoverable} blocks can be brought back, {lost} are lost"
        advice = (
            f"Run `sglang-ext doctor --kv-disk-path {store.path} --verify repair`; lost blocks are computed "
            "again."
        )
        yield Finding(level, subject, text, advice)
    else:
        yield _repaired(store, store.repaired)


def _repaired(store: StoreFacts, repaired: RepairReport) -> Finding:
    gone = ", ".join(f"{count} {reason}" for reason, count in repaired.lost.items() if count)
    aside = f"; the old index is at {repaired.set_aside}" if repaired.set_aside else ""
    text = (
        f"{store.path}: repaired. {repaired.blocks} blocks in {repaired.runs} runs are found again"
        f"{f'; lost, to be computed again: {gone}' if gone else ''}{aside}"
    )
    if store.after is None or not store.after.sound:
        return Finding(Level.PROBLEM, "disk tier", f"{text}; not all is well yet", "Run it once more.")
    return Finding(Level.OK, "disk tier", text)


def _contents(report: CheckReport) -> str:
    verified = f", {size(report.verified_bytes)} read and verified" if report.verified_bytes else ""
    return (
        f"{report.blocks} blocks in {report.runs} runs and {report.segments} segments, "
        f"{size(report.data_bytes)} and {size(report.index_bytes)} of index fit together{verified}"
    )


def as_json(facts: DiskFacts) -> dict[str, Any]:
    """The figures as plain data; errors are in the findings."""
    return {
        "path": str(facts.path),
        "total_bytes": facts.total,
        "free_bytes": facts.free,
        "tier_bytes": facts.ours,
        "lost": [{"path": each.path, "pid": each.pid, "instance": each.instance} for each in facts.lost],
        "speed": None if facts.speed is None else {**asdict(facts.speed), "io": facts.speed.io.value},
        "stores": [
            {
                "path": str(store.path),
                "in_use": store.in_use,
                "report": None if store.report is None else asdict(store.report),
                "repaired": None
                if store.repaired is None
                else {
                    "runs": store.repaired.runs,
                    "blocks": store.repaired.blocks,
                    "lost": dict(store.repaired.lost),
                    "set_aside": str(store.repaired.set_aside) if store.repaired.set_aside else None,
                },
            }
            for store in facts.stores
        ],
    }

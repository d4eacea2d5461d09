"""The parts that all benchmarks share: the command line, paired measuring, the environment, the report.

A benchmark is a module with `main()`, run as `python -m benchmarks.NAME [--quick] [--json FILE]`:

    def main(argv: Sequence[str] | None = None) -> int:
        options = Options.of(argv, NAME, __doc__)
        report = Report(NAME)
        legs = {"ours": lambda: ..., "plain copy": lambda: ...}
        times = paired(legs, rounds=options.rounds(9, quick=5))
        report.add("copy", ours_s=times.median("ours"), ratio=times.ratio("plain copy", "ours"))
        report.summary["copy_vs_plain"] = times.ratio("plain copy", "ours")
        return report.finish(options)

Every comparison is a ratio of two things measured in the same run: the legs take turns, in an order that
changes each round, and the ratio is the median of the rounds' ratios, so that a neighbour that slows the
machine slows both sides.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from sglang_ext.flags import Flagged, flag

SEED = 20240625
"""Seed of every random choice in a benchmark, so that two runs do the same work."""

T = TypeVar("T")
Value = float | int | str | bool | None
Row = dict[str, Value]

_PACKAGES = ("sglang", "torch", "numpy", "numba", "lmdb", "pyzmq", "aiohttp", "uvloop", "xxhash")


@dataclass(frozen=True, kw_only=True)
class Options(Flagged):
    """The command line of a benchmark; one with flags of its own has a subclass."""

    quick: bool = flag(False, "Fewer and smaller measurements; ends within a minute.")
    tiny: bool = flag(False, "A pass over everything to see that it runs; figures mean nothing.")
    json: Path | None = flag(None, "Also write the report to FILE as one JSON object.", metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "quick", self.quick or self.tiny)

    def rounds(self, full: int, *, quick: int) -> int:
        """Rounds to run: `full`, `quick` with --quick, or two at most with --tiny."""
        return self.pick(full, quick=quick, tiny=min(quick, 2))

    def pick(self, full: T, *, quick: T, tiny: T) -> T:
        """The value for the chosen form."""
        return tiny if self.tiny else quick if self.quick else full

    @classmethod
    def of(cls, argv: Sequence[str] | None, name: str, description: str | None) -> Self:
        """Read the command line of the benchmark `name`, whose docstring is `description`."""
        summary = (description or "").strip().split("\n\n")[0]
        return cls.parse(argv, prog=f"python -m benchmarks.{name}", description=summary)


# --- measuring ---


@dataclass(frozen=True)
class Samples:
    """Seconds per leg, one sample per round, in the order of the rounds."""

    seconds: Mapping[str, Sequence[float]]

    def median(self, leg: str) -> float:
        """Median seconds of a leg."""
        return statistics.median(self.seconds[leg])

    def p(self, leg: str, percent: float) -> float:
        """Seconds that `percent` of a leg's rounds did not exceed."""
        return percentile(self.seconds[leg], percent)

    def ratio(self, over: str, under: str) -> float:
        """Median over the rounds of seconds(over) / seconds(under): how many times faster `under` is."""
        pairs = zip(self.seconds[over], self.seconds[under], strict=True)
        return statistics.median(a / b for a, b in pairs)


def paired(
    legs: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    warmup: int = 1,
    before: Mapping[str, Callable[[], Any]] | None = None,
    deadline: float | None = None,
) -> Samples:
    """Run every leg once per round, in an order shuffled anew each round, and time each.

    Args:
        warmup: rounds at the start that are run and not counted.
        before: per leg, a function that runs untimed before each of its runs (drop a cache, touch a buffer).
        deadline: stop after this many seconds, with at least three rounds.
    """
    seconds: dict[str, list[float]] = {leg: [] for leg in legs}
    order = list(legs)
    shuffle = random.Random(SEED)
    start = time.perf_counter()
    for number in range(rounds + warmup):
        shuffle.shuffle(order)
        for leg in order:
            if before and leg in before:
                before[leg]()
            begin = time.perf_counter()
            legs[leg]()
            elapsed = time.perf_counter() - begin
            if number >= warmup:
                seconds[leg].append(elapsed)
        if deadline and number - warmup >= 2 and time.perf_counter() - start > deadline:
            break
    return Samples(seconds)


def percentile(values: Iterable[float], percent: float) -> float:
    """The smallest of `values` that `percent` of them do not exceed."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("percentile of no values")
    rank = -(-len(ordered) * percent // 100)
    return ordered[min(len(ordered), max(1, int(rank))) - 1]


# --- reporting ---


@dataclass(frozen=True)
class Aim:
    """The aim of a figure of a summary."""

    bound: float
    at_most: bool = False

    def met(self, value: float) -> bool:
        """Whether a figure reaches it."""
        return value <= self.bound if self.at_most else value >= self.bound

    def __str__(self) -> str:
        return f"{'at most' if self.at_most else 'at least'} {self.bound:g}"


def at_least(bound: float) -> Aim:
    return Aim(bound)


def at_most(bound: float) -> Aim:
    return Aim(bound, at_most=True)


@dataclass
class Report:
    """Rows in named groups, and a summary of ratios; printed as tables and written as one JSON object.

    aims: aims of the summary's figures, by their names; each is reported as met or missed.
    """

    name: str
    aims: Mapping[str, Aim] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    summary: dict[str, Value] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, case: str, **values: Value) -> None:
        """Add a row. Rows with the same columns are printed as one table."""
        self.rows.append({"case": case, **values})

    def note(self, text: str) -> None:
        """Add a remark for the reader, such as a peer that is not installed and was left out."""
        self.notes.append(text)

    def verdicts(self) -> dict[str, dict[str, Value]]:
        """The aim of each figure that has one, and whether it was met; None where it was not measured."""
        found: dict[str, dict[str, Value]] = {}
        for key, aim in self.aims.items():
            value = self.summary.get(key)
            met = aim.met(value) if isinstance(value, int | float) else None
            found[key] = {"aim": str(aim), "met": met}
        return found

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "environment": environment(),
            "rows": self.rows,
            "summary": self.summary,
            "aims": self.verdicts(),
            **({"notes": self.notes} if self.notes else {}),
        }

    def print(self) -> None:
        """Print tables of all rows, then the summary."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        # A file or a pipe has no width of its own; a narrow guess would cut numbers.
        console = Console(width=None if sys.stdout.isatty() else 160)
        for columns, rows in _same_columns(self.rows):
            table = Table(title=self.name, title_justify="left")
            for column in columns:
                left = any(isinstance(row[column], str) for row in rows)
                table.add_column(column, justify="left" if left else "right", overflow="fold")
            for row in rows:
                table.add_row(*(Text(_text(row[column])) for column in columns))
            console.print(table)
        for text in self.notes:
            console.print(f"note: {text}", markup=False)
        if self.summary:
            table = Table(title="summary", title_justify="left")
            for column in ("figure", "measured", "aim", ""):
                table.add_column(column, justify="right" if column == "measured" else "left", overflow="fold")
            verdicts = self.verdicts()
            for key, value in self.summary.items():
                verdict = verdicts.get(key, {"aim": "", "met": None})
                said = {True: "met", False: "missed", None: ""}[verdict["met"]]  # type: ignore[index]
                table.add_row(key, Text(_text(value)), str(verdict["aim"]), said)
            console.print(table)

    def finish(self, options: Options) -> int:
        """Print, write the JSON file if asked for, and return the exit status of the benchmark (0)."""
        if options.tiny:
            self.note("--tiny: too little was measured for any figure to mean something")
        self.print()
        if options.json:
            options.json.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")
        return 0


def environment() -> dict[str, Any]:
    """The machine and the versions that the numbers belong to."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seed": SEED,
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": _gpu_name(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "shared_huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES", ""),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def _same_columns(rows: Iterable[Row]) -> list[tuple[tuple[str, ...], list[Row]]]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row), []).append(row)
    return list(groups.items())


def _text(value: Value) -> str:
    if isinstance(value, bool) or not isinstance(value, float):
        return "-" if value is None else str(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def _gpu_name() -> str | None:
    torch = sys.modules.get("torch")  # a benchmark that does not use torch should not pay for its import
    if torch is None or not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_name(0))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _chosen(path: str) -> str | None:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError:
        return None
    return text[text.find("[") + 1 : text.find("]")]

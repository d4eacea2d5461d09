"""A pytest plugin that reports CPU seconds per file, per fixture and per test.

Wall-clock durations depend on the load of the machine. CPU seconds include every process below the test run:
the servers that a test or fixture started, and their descendants, for as long as they live. The background
work of a shared server counts for the test that runs meanwhile.

`--cpu-seconds` prints the report at the end of the run: files, fixtures (without the fixtures that they
request), and single tests above `TEST_SECONDS`.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROWS = 400
"""Rows of each table."""
TEST_SECONDS = 5.0
"""A test that takes more CPU time than this has a row of its own."""
TICK = 1 / os.sysconf("SC_CLK_TCK")
"""Seconds per unit of /proc/PID/stat."""


def tree_seconds(pid: int | str = "self") -> float:
    """CPU seconds of a process and its living descendants, each with its children that have ended."""
    total, waiting = 0.0, [str(pid)]
    while waiting:
        process = Path("/proc") / waiting.pop()
        with suppress(OSError):
            fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
            total += sum(map(int, fields[11:15])) * TICK
            for task in (process / "task").iterdir():
                waiting += (task / "children").read_text(encoding="utf-8").split()
    return total


class CpuSeconds:
    """Sums of CPU seconds, by file, fixture and test."""

    def __init__(self) -> None:
        self.files: defaultdict[str, float] = defaultdict(float)
        self.fixtures: defaultdict[str, float] = defaultdict(float)
        self.tests: defaultdict[str, float] = defaultdict(float)
        self._nested: list[float] = []

    @contextmanager
    def _measured(self) -> Iterator[list[float]]:
        """Yields a list that holds the seconds of the block, without nested blocks, and with them."""
        before = tree_seconds()
        self._nested.append(0.0)
        seconds: list[float] = []
        try:
            yield seconds
        finally:
            whole = max(0.0, tree_seconds() - before)
            seconds += [max(0.0, whole - self._nested.pop()), whole]
            if self._nested:
                self._nested[-1] += whole

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        with self._measured() as seconds:
            result = yield
        self.fixtures[f"{fixturedef.argname} ({fixturedef.scope}, {fixturedef.baseid})"] += seconds[0]
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        with self._measured() as seconds:
            result = yield
        self.files[item.nodeid.partition("::")[0]] += seconds[1]
        self.tests[item.nodeid] += seconds[0]
        return result

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total = sum(self.files.values())
        terminalreporter.section(f"{total:.0f} CPU seconds")
        for title, sums, least in (
            ("file, with the fixtures that it set up", self.files, 0.0),
            ("fixture, without the fixtures that it requested", self.fixtures, 0.0),
            (f"test above {TEST_SECONDS:.0f} s, without fixtures", self.tests, TEST_SECONDS),
        ):
            terminalreporter.write_line(f"seconds  {title}")
            rows = sorted(sums.items(), key=lambda row: -row[1])
            for name, seconds in rows[:ROWS]:
                if seconds > max(least, 0.5):
                    terminalreporter.write_line(f"{seconds:7.1f}  {name}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-seconds", action="store_true", help="report CPU seconds per file, fixture and test"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--cpu-seconds"):
        config.pluginmanager.register(CpuSeconds(), "sglang_ext-cpu-seconds")

"""A pytest plugin for strict runs: leftovers of a test fail it, a hang ends with every stack shown.

`pytest_plugins = ["tests.support.strict"]` in the top conftest.py. Needs pytest-timeout for the limits.

- A test that passes and leaves threads, processes (orphans too), open files, shared memory or temporary files
  behind is an error. Fixtures of a wider scope may keep their resources until the end of the run; for
  resources that they set up later, inside a test, they use the `leak_guard` fixture's `adopting()`.
- Resources that exist at the run's end and did not when the tests began fail the run: those that fixtures of
  a wider scope set up and did not take down, those left by the fixtures' own tear-down, and those left by
  skipped tests. Where a test has failed, only resources that fixtures set up and did not take down are looked
  for: its traceback keeps its objects alive.
- Temporary files of the run go to a folder of its own, which is removed.
- pytest-timeout fails a test that runs too long and shows every stack. Where it cannot, because a C call does
  not return to the interpreter, the run ends `HANG_GRACE_SECONDS` later, with every stack on stderr.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import tempfile
from collections.abc import Generator
from typing import Any

import pytest

from tests.support.leaks import LeakError, LeakGuard, Resources, mark_processes

HANG_GRACE_SECONDS = 30.0

_GUARD = pytest.StashKey[LeakGuard]()
_FOLDER = pytest.StashKey[str]()
_STDERR = pytest.StashKey[int]()
_IMPORTED = pytest.StashKey[Resources]()
_BEFORE = pytest.StashKey[Resources]()
_FAILED = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    # tmp_path keeps the folders of failed runs where the user looks for them.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    # Short: paths of Unix sockets below it have to fit in 107 bytes.
    folder = tempfile.mkdtemp(prefix="strict-")
    config.stash[_FOLDER] = tempfile.tempdir = os.environ["TMPDIR"] = folder
    mark_processes()
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        config.stash[_STDERR] = os.dup(2)


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()
    if _FOLDER in config.stash:
        shutil.rmtree(config.stash[_FOLDER], ignore_errors=True)
        os.close(config.stash[_STDERR])


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_GUARD] = LeakGuard()


def pytest_collection_finish(session: pytest.Session) -> None:
    # Imported modules stay. Looking through them for garbage after a test takes half a second with SGLang.
    gc.collect()
    gc.freeze()
    session.config.stash[_IMPORTED] = Resources.take()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    guard = session.config.stash.get(_GUARD, None)
    if guard is None or session.exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR):
        return
    try:
        guard.check_end(None if session.testsfailed else session.config.stash.get(_IMPORTED, None))
    except LeakError as error:
        reporter: Any = session.config.pluginmanager.getplugin("terminalreporter")
        reporter.write_line(f"\nThe run {error}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def leak_guard(request: pytest.FixtureRequest) -> LeakGuard:
    """For owners that outlive a test and take on more during one: `with leak_guard.adopting(): ...`."""
    return request.config.stash[_GUARD]


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    if fixturedef.scope == "function":
        return (yield)
    with request.config.stash[_GUARD].adopting():
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    limit = _limit(item)
    if limit:
        faulthandler.dump_traceback_later(
            limit + HANG_GRACE_SECONDS, exit=True, file=item.config.stash[_STDERR]
        )
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _limit(item: pytest.Item) -> float:
    """The seconds that pytest-timeout gives this test; 0 for no limit."""
    marker = item.get_closest_marker("timeout")
    if marker is not None and (marker.args or "timeout" in marker.kwargs):
        value = marker.args[0] if marker.args else marker.kwargs["timeout"]
    else:
        value = item.config.getoption("timeout", None) or item.config.getini("timeout")
    return float(value or 0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_BEFORE] = Resources.take()
    item.stash[_FAILED] = False
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.outcome != "passed":
        item.stash[_FAILED] = True
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    before = item.stash[_BEFORE]
    del item.stash[_BEFORE]
    # The traceback of a failed test keeps its objects alive.
    if not item.stash[_FAILED]:
        item.config.stash[_GUARD].check(before)
    return result

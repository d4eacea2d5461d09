"""Processes of a CPU server start by fork where that is safe, and by spawn where it is not."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_ext.patches.cpu import fork as fork_children

pytestmark = pytest.mark.slow

NO_METRICS = SimpleNamespace(enable_metrics=False, dp_size=1)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A stand-in for SGLang's module: it sets the same values."""

    def set_envs_and_config(server_args: object) -> None:
        multiprocessing.set_start_method("spawn", force=True)
        signal.signal(signal.SIGQUIT, lambda number, frame: None)

    module: Any = ModuleType("engine")
    module._set_envs_and_config = set_envs_and_config

    def resolve(path: str) -> Any:
        return module if path.endswith(".engine") else module._set_envs_and_config

    monkeypatch.setattr(fork_children, "resolve", resolve)
    monkeypatch.setattr("gc.freeze", lambda: None)
    method = multiprocessing.get_start_method(allow_none=True)
    handler = signal.getsignal(signal.SIGQUIT)
    yield module
    multiprocessing.set_start_method(method, force=True)
    signal.signal(signal.SIGQUIT, handler)


def test_forks(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    fork_children.apply()
    assert fork_children.applied()
    engine._set_envs_and_config(NO_METRICS)
    assert multiprocessing.get_start_method() == "fork"


@pytest.mark.parametrize(
    ("sizes", "method"),
    [
        ({"dp_size": 1}, "fork"),
        ({"dp_size": 2}, "spawn"),
        ({"dp_size": 1, "attn_dp_size": 2}, "spawn"),
    ],
)
def test_a_child_that_starts_replicas_spawns_them(
    engine: Any, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], method: str
) -> None:
    """The data parallel controller has threads by the time it starts the schedulers."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    fork_children.apply()
    engine._set_envs_and_config(SimpleNamespace(enable_metrics=False, **sizes))
    assert multiprocessing.get_start_method() == "fork"
    fork = multiprocessing.get_context("fork")
    methods = fork.Queue()
    child = fork.Process(target=lambda: methods.put(multiprocessing.get_start_method()))
    child.start()
    assert methods.get(timeout=30) == method
    child.join(30)


@pytest.mark.parametrize(("imported", "method"), [(False, "fork"), (True, "spawn")])
def test_metrics_need_to_know_how_to_be_kept(
    engine: Any, monkeypatch: pytest.MonkeyPatch, imported: bool, method: str
) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.delitem(sys.modules, "prometheus_client", raising=False)
    if imported:
        monkeypatch.setitem(sys.modules, "prometheus_client", ModuleType("prometheus_client"))
    fork_children.apply()
    engine._set_envs_and_config(SimpleNamespace(enable_metrics=True, dp_size=1))
    assert multiprocessing.get_start_method() == method


def test_applies_once(engine: Any) -> None:
    fork_children.apply()
    once = engine._set_envs_and_config
    fork_children.apply()
    assert engine._set_envs_and_config is once


def test_spawns_beside_another_thread(engine: Any) -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        fork_children.apply()
        engine._set_envs_and_config(NO_METRICS)
        assert multiprocessing.get_start_method() == "spawn"
    finally:
        ended.set()
        thread.join()


def test_spawns_when_asked(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setenv(fork_children.START_METHOD, "spawn")
    fork_children.apply()
    engine._set_envs_and_config(NO_METRICS)
    assert multiprocessing.get_start_method() == "spawn"


def test_a_child_dies_of_what_only_the_server_handles(engine: Any) -> None:
    fork_children.apply()
    engine._set_envs_and_config(NO_METRICS)

    def quit_now() -> None:
        os.kill(os.getpid(), signal.SIGQUIT)

    child = multiprocessing.get_context("fork").Process(target=quit_now)
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGQUIT


FORK_AND_COPY = Path(__file__).parent / "fork_and_copy.py"


def test_threads_of_a_child_find_torchs_pool() -> None:
    ended = subprocess.run([sys.executable, FORK_AND_COPY, "renew", "60"], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr


def test_without_a_new_pool_they_do_not() -> None:
    """The defect that `renew_thread_pool` works around still exists; otherwise the workaround can go."""
    ended = subprocess.run([sys.executable, FORK_AND_COPY, "keep", "1000"], capture_output=True, text=True)
    assert "Invalid thread pool" in ended.stdout, ended.stderr

"""Fixtures of all tests of the engine: SGLang importable on a CPU, and no thread left behind.

`oracle/` has the engine of the tests: SGLang's scheduler and pools in small, on which every row is checked.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_ext.patches.cpu import allocator as paged_allocator
from sglang_ext.patches.cpu import runtime

HERE = Path(__file__).parent
# Helpers in this folder and in `oracle`, and what tests of a folder take from each other, are imported by
# their own names.
sys.path[:0] = map(str, (HERE, *sorted(HERE.glob("[a-z]*/"))))

runtime.prepare_process(os.environ)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang and its imports warn about kernels that a CPU has not
    paged_allocator.apply()
    import sglang.srt.managers.scheduler  # noqa: F401


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Every thread that a test starts has ended when the test has."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(timeout=5)
    names = [thread.name for thread in left if thread.is_alive()]
    assert not names, f"threads left behind: {names}"


@pytest.fixture(scope="session")
def sglang_config() -> None:
    """The process's configuration for SGLang's functions: the defaults of a CPU server."""
    from engine_pools import publish_server_args

    publish_server_args()

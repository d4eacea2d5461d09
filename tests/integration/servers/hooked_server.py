"""SGLang's server as ``sglang_ext.launch_server`` starts it, whose schedulers are other than they should be.

A script beside this module names the change and serves. Tests and schedulers exchange the state of that
change through files in the folder ``FOLDER``.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sglang_ext import launch_server

FOLDER = "SGLANG_EXT_TEST_FOLDER"
"""Nothing reads it while modules are imported, so that servers which have it can be forked (`preloaded`)."""


@contextmanager
def holding(folder: Path, step: str) -> Iterator[Path]:
    """Hold a scheduler at a step; yields the file that appears when the scheduler has arrived there.

    Each use has a file of its own: a scheduler that is stopped between looking for the hold and reporting
    may report after this block has ended, which must not count as an arrival of the next block.
    """
    hold, use = folder / f"hold-{step}", secrets.token_hex(4)
    unfinished = folder / f"{use}.part"
    unfinished.write_text(use)
    unfinished.rename(hold)
    try:
        yield folder / f"at-{step}-{use}"
    finally:
        hold.unlink()


def is_held(folder: Path, step: str) -> bool:
    """Whether a test holds this scheduler at a step; if so, reports the arrival."""
    try:
        use = (folder / f"hold-{step}").read_text()
    except FileNotFoundError:
        return False
    (folder / f"at-{step}-{use}").touch()
    return True


def serve(change: Callable[[Path], None]) -> None:
    """Serve until a signal ends it; in each scheduler's process, ``change`` is called with the folder first.

    Without a folder, nothing is changed.
    """
    if FOLDER in os.environ:
        multiprocessing.util.register_after_fork(change, _in_child)
    launch_server.main(sys.argv[1:])


def change_spawned(change: Callable[[Path], None]) -> None:
    """For a script that a spawned process imports: the scheduler of a replica, which is not forked. Its
    server must not be forked from a preloaded process, whose script is another one."""
    if FOLDER in os.environ:
        change(Path(os.environ[FOLDER]))


def _in_child(change: Callable[[Path], None]) -> None:
    """A process of the server has been forked: a scheduler, or the detokenizer."""
    target = getattr(multiprocessing.current_process(), "_target", None)
    if "scheduler" in getattr(target, "__name__", ""):
        change(Path(os.environ[FOLDER]))

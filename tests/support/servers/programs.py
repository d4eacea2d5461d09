"""Programs that import SGLang and end by themselves, forked from the preloaded process as servers are."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.servers import preloaded


def run_program(words: Sequence[str], folder: Path, seconds: float = 240.0) -> tuple[int, str]:
    """Run ``python WORDS...`` in a folder.

    Args:
        words: ``-m MODULE`` or a script, then its arguments.

    Returns:
        Its exit code, and all that it printed.

    Raises:
        subprocess.TimeoutExpired: it runs on.
    """
    parent = preloaded.current({})
    assert parent is not None, "programs of SGLang are forked: SGLANG_EXT_TESTS_PRELOAD is 0"
    watch, end = os.pipe()
    log = folder / "printed"
    try:
        with log.open("wb") as file:
            process = parent.launch(
                [sys.executable, *words],
                environment={**os.environ, "HF_HUB_OFFLINE": "1"},
                folder=folder,
                log=file.fileno(),
                watch=watch,
                grace_s=1.0,
            )
    finally:
        os.close(watch)
    try:
        code = process.wait(seconds)
    finally:
        os.close(end)
        process.wait()
    return code, log.read_text()

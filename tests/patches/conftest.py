"""SGLang importable on a CPU, as the launcher makes it."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from sglang_ext.patches.cpu import runtime

# Modules beside the tests are imported by their own names.
sys.path.insert(0, str(Path(__file__).parent))

runtime.prepare_process(os.environ)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang and its dependencies warn about kernels that a CPU lacks
    import sglang.srt.managers.scheduler  # noqa: F401


@pytest.fixture
def agree_with_triton(tmp_path: Path) -> Callable[[ModuleType, int], None]:
    """Compare our kernels with SGLang's, run by Triton's interpreter, which has to be chosen before they are
    defined: by an oracle, run as a program, in so many random batches."""

    def compare(oracle: ModuleType, batches: int) -> None:
        assert oracle.__file__ is not None
        run = subprocess.run(
            [sys.executable, "-W", "ignore", oracle.__file__, "7", str(batches)],
            env={**os.environ, "TRITON_INTERPRET": "1", "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout.strip().endswith(f"{batches} batches agree")

    return compare

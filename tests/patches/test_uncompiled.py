"""On a CPU nothing is compiled, so that no compiler is needed and no request waits for one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sglang_ext.patches.cpu import runtime
from sglang_ext.patches.hooks.uncompiled import around_compiled

pytestmark = pytest.mark.slow

PROGRAM = """
import os
from sglang_ext.patches.cpu import runtime
runtime.prepare_process(os.environ)
import torch
print(torch.compile(lambda x: x * 2 + 1, dynamic=True)(torch.ones(3)).sum().item())
"""


@pytest.mark.parametrize("compiles", [False, True], ids=["as it is", "the twin that compiles"])
def test_a_cpu_server_needs_no_compiler(compiles: bool, tmp_path: os.PathLike[str]) -> None:
    nowhere = {"CXX": "/nowhere/c++", "CC": "/nowhere/cc", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environment = {**os.environ, **nowhere}
    environment.pop(runtime.COMPILING, None)
    if compiles:
        environment[runtime.COMPILING] = "0"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (run.returncode != 0) == compiles, run.stderr
    if not compiles:
        assert run.stdout.split() == ["9.0"]
        assert not list(os.scandir(tmp_path))


def test_what_is_compiled_is_called_uncompiled() -> None:
    def compiled(x: int) -> int:
        pytest.fail("it was compiled")

    compiled._torchdynamo_orig_callable = lambda x: x + 1  # type: ignore[attr-defined]
    assert around_compiled(compiled, 1) == 2
    assert around_compiled(lambda x: x + 2, 1) == 3

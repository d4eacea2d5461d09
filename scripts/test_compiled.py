"""Run the tests of the hot modules compiled to machine code, beside the checkout (`native.py`).

    python scripts/test_compiled.py [PYTEST ARGUMENTS...]

As Python, the same tests run in ``make test``. The fuzz corpus is among them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from compile_router import MODULES, ROOT, compile_into, obstacle

ROUTER = (
    "http", "index", "policies", "dispatch", "fleet", "telemetry", "tenancy", "api", "tokens", "app",
    "endpoints",
)  # fmt: skip
"""Folders of the router's tests."""
TESTS = (
    "tests/fuzz", "tests/cost_model", "tests/radix_global", "tests/engine/cache", "tests/engine/events",
    *(f"tests/router/{folder}" for folder in ROUTER),
)  # fmt: skip


def main() -> int:
    """Compile, and run them."""
    if why := obstacle():
        print(f"Nothing can be compiled: {why}.")
        return 1
    with tempfile.TemporaryDirectory(prefix="compiled-") as name:
        built = Path(name) / "native"
        compile_into(built)
        environment = {**os.environ, "SGLANG_EXT_NATIVE": str(built)}
        # Without it nothing would fail if what was compiled were not used.
        used = "from sglang_ext.native import is_compiled; import sglang_ext.router.http.reader as reader"
        subprocess.run(
            [sys.executable, "-c", f"{used}; assert is_compiled(reader)"], env=environment, check=True
        )
        print(f"{len(MODULES)} modules compiled.", flush=True)
        command = [sys.executable, "-m", "pytest", *TESTS, *sys.argv[1:]]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

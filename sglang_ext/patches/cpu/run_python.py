"""``sglang-ext python``: run a program that imports SGLang, on a machine without a GPU too.

SGLang's own client code (``sglang.lang``) imports CUDA packages. On a CPU the stand-ins have to be there
before the program's first import.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_ext.patches.cpu import runtime

USAGE = "usage: sglang-ext python SCRIPT [ARGUMENTS]\n       sglang-ext python -m MODULE [ARGUMENTS]\n"
USAGE_STATUS = 2


def main(arguments: Sequence[str]) -> int:
    """Run a script or a module as Python would; returns the exit status for a wrong command line.

    Exceptions of the program, ``SystemExit`` included, pass through.
    """
    words = list(arguments)
    if words[:1] in (["-h"], ["--help"]):
        sys.stdout.write(USAGE)
        return 0
    is_module = words[:1] == ["-m"]
    if is_module:
        del words[0]
    if not words or words[0].startswith("-"):
        sys.stderr.write(USAGE)
        return USAGE_STATUS
    if not is_module and not Path(words[0]).is_file():
        sys.stderr.write(f"sglang-ext python: there is no file {words[0]}\n")
        return USAGE_STATUS
    if runtime.wanted((), os.environ):
        runtime.prepare_process(os.environ)
    sys.argv = words
    sys.path.insert(0, str(Path.cwd() if is_module else Path(words[0]).resolve().parent))
    if is_module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

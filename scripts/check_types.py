"""Types of the whole project, with mypy.

mypy knows no mapping of packages to folders, so it is shown one tree in which `router/` and `patches/` stand
where they are installed: `sglang_ext.router`, `sglang_ext.patches`. Messages name the files where they are.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = Path(sys.prefix) / ".setup" / "types"


def main() -> int:
    """mypy's exit status; further arguments are mypy's."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]
    elsewhere = dict(settings["setuptools"]["package-dir"])
    shutil.rmtree(TREE, ignore_errors=True)
    package = TREE / "sglang_ext"
    package.mkdir(parents=True)
    for entry in (ROOT / "sglang_ext").iterdir():
        (package / entry.name).symlink_to(entry)
    for name, folder in elsewhere.items():
        (TREE / name.replace(".", "/")).symlink_to(ROOT / folder)
    (TREE / "benchmarks").symlink_to(ROOT / "benchmarks")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"),
         "--cache-dir", str(ROOT / ".mypy_cache"), *sys.argv[1:]],
        cwd=TREE, stdout=subprocess.PIPE, text=True, check=False, encoding="utf-8",
    )  # fmt: skip
    for line in done.stdout.splitlines():
        for name, folder in elsewhere.items():
            line = line.replace(name.replace(".", "/") + "/", folder + "/", 1) if "/" in line else line
        print(line)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())

"""Print the purpose of each folder and module: the first line of its docstring, where the truth stands.

python scripts/module_map.py [FOLDER ...]
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("sglang_ext", "benchmarks", "examples/demo", "scripts/following", "tests/support")


def first_line(path: Path) -> str:
    """The first line of a module's docstring; empty where it has none."""
    return (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n")[0]


def folders() -> Iterator[Path]:
    """Every folder with modules, relative to the repository."""
    for package in PACKAGES:
        for init in sorted((ROOT / package).rglob("__init__.py")):
            yield init.parent.relative_to(ROOT)


def modules(folder: Path) -> Iterator[Path]:
    """The modules of a folder, without its ``__init__``."""
    return (path for path in sorted((ROOT / folder).glob("*.py")) if path.name != "__init__.py")


def main() -> int:
    """Print the folders that are named with those below, or all."""
    wanted = sys.argv[1:] or list(PACKAGES)
    for folder in folders():
        if any(str(folder) == name or str(folder).startswith(f"{name}/") for name in wanted):
            print(f"{folder}/  {first_line(ROOT / folder / '__init__.py')}")
            for path in modules(folder):
                print(f"    {path.name:24} {first_line(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

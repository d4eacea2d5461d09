"""Smoke test of an installed package: run ``python -P smoke.py PREFIX VERSION compiled|python`` inside its
environment.

Nothing is downloaded and no server is started. Ends with an error that names the failed check.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from types import ModuleType

NEEDED = frozenset({"python", "sglang-ext", "sglang", "plugin", "patches"})
"""The checks that the doctor must pass. Memory, compilers and the like are the machine's."""
WITH_SGLANG_ONLY = ("sglang_ext.patches", "sglang_ext.launch_server")
PROGRAMS = ("sglang_ext.testing.", "__main__")
"""Modules that are run, not imported."""


def command(*words: str, statuses: tuple[int, ...] = (0,)) -> str:
    """Run ``sglang-ext`` as it is installed; its output."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / "sglang-ext"), *words],
        capture_output=True, text=True, check=False, timeout=300, encoding="utf-8",
    )  # fmt: skip
    if done.returncode not in statuses:
        raise SystemExit(f"sglang-ext {' '.join(words)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def import_all(package: ModuleType) -> None:
    """Import every module below a package. `walk_packages` would import the modules left out here."""
    left_out = (*WITH_SGLANG_ONLY, *PROGRAMS)
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if not found.name.startswith(left_out) and not found.name.endswith(left_out):
            module = importlib.import_module(found.name)
            if found.ispkg:
                import_all(module)


def main(prefix: str, wanted: str, how: str) -> None:
    import sglang_ext
    from sglang_ext.native import is_compiled

    assert sglang_ext.__file__ is not None
    here = Path(sglang_ext.__file__).resolve()
    assert here.is_relative_to(Path(prefix).resolve()), f"{here} is not the package installed into {prefix}"
    assert version("sglang-ext") == wanted, f"{version('sglang-ext')} is installed, {wanted} was built"

    import_all(sglang_ext)
    runs = "compiled" if is_compiled(sys.modules["sglang_ext.router.http.reader"]) else "python"
    assert runs == how, f"the router's hot modules run {runs}, not {how}"

    for name in ("router/static/ui/index.html", "testing/static/vocabulary.txt.xz", "py.typed"):
        assert files("sglang_ext").joinpath(name).is_file(), f"{name} is missing"

    help_text = command("--help")
    for name in ("serve", "router", "cluster", "doctor"):
        assert f"  {name} " in help_text, f"--help does not name {name}"
        command(name, "--help")
    assert command("--version").splitlines()[0] == f"sglang-ext {wanted}"

    # The hooks: SGLang's loader must see the plugin, and every patch must fit the SGLang beside it.
    found = json.loads(command("doctor", "--json", statuses=(0, 1)))["findings"]
    levels = {finding["subject"]: finding["level"] for finding in found}
    assert levels.keys() >= NEEDED, f"the doctor says nothing of {NEEDED - levels.keys()}"
    wrong = [finding for finding in found if finding["subject"] in NEEDED and finding["level"] != "ok"]
    assert not wrong, f"the doctor finds {wrong}"


if __name__ == "__main__":
    main(*sys.argv[1:])

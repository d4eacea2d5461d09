"""Modules that were compiled to machine code (mypyc): found, and used only while they are of their sources.

The Python sources are the program, and run without any of this. ``make compile`` compiles some modules of
this package into its folder `_native`, beside the digests of their sources and of the modules that these
import, whose constants mypyc inlines. The compiled modules are used all together or, when one of the digests
differs, not at all: an edited source is never hidden by its former version.
``SGLANG_EXT_NATIVE=0`` runs the sources in any case, ``=1`` refuses to; a folder there is taken in place of
`_native`.

Loops over bytes and addresses that must not hold the GIL are numba's (`compiled`); these modules are the
other hot code: objects, dictionaries, strings.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

FOLDER = "_native"
LIST = "modules.json"
SWITCH = "SGLANG_EXT_NATIVE"
REQUIRED = "1"
"""Of `SWITCH`: sources alone are an error. Tests of whole servers run what users run."""
SUFFIX: str = sysconfig.get_config_var("EXT_SUFFIX")


def digest(source: Path) -> str:
    """SHA-256 of a source file, as hexadecimal digits."""
    return hashlib.sha256(source.read_bytes()).hexdigest()


class Native:
    """The compiled modules of one package, found by the import system.

    Args:
        files: by the names under which they are imported.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = files

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``."""
        file = self.files.get(name)
        return None if file is None else importlib.util.spec_from_file_location(name, file)

    def __repr__(self) -> str:
        return f"Native({len(self.files)} modules)"


def found(package: str, folder: Path, built: Path | None = None) -> Native | None:
    """The compiled modules of a package, None where there are none that may be used.

    Args:
        folder: of the package.
        built: where they are, if elsewhere.
    """
    built = built or folder / FOLDER
    try:
        listed = json.loads((built / LIST).read_text(encoding="utf-8"))
        group, modules, sources = listed["group"], list(listed["modules"]), dict(listed["sources"])
        if listed["suffix"] != SUFFIX:
            return None
        if any(digest(folder / f"{name}.py") != known for name, known in sources.items()):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    files = {f"{package}.{name.replace('/', '.')}": built / f"{name}{SUFFIX}" for name in modules}
    files[group] = built / f"{group}{SUFFIX}"
    return Native(files) if all(file.exists() for file in files.values()) else None


def use(package: str, folder: Path) -> bool:
    """Have the compiled modules of a package imported in place of their sources; before any is imported.
    Returns whether there are any.

    Raises:
        ImportError: they are required, and are missing or were compiled of other sources.
    """
    setting = os.environ.get(SWITCH, "")
    built = None if setting in ("", "0", REQUIRED) else Path(setting)
    native = None if setting == "0" else found(package, folder, built)
    if native is not None:
        sys.meta_path.insert(0, native)
    elif setting == REQUIRED:
        raise ImportError(
            f"{SWITCH}={REQUIRED}, and the compiled modules are missing or of other sources: run "
            f"`make compile`, or set {SWITCH}=0 to run the sources"
        )
    return native is not None


def is_compiled(module: ModuleType) -> bool:
    """Whether a module is machine code."""
    return (module.__file__ or "").endswith(SUFFIX)

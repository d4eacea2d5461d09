"""Where source is: our own, the installed SGLang's, that of another version or in a folder."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from sglang_ext.patches.contract.check import check, modules_in
from sglang_ext.patches.contract.needs import Report
from sglang_ext.patches.contract.source import Module, Source
from sglang_ext.patches.versions import follows_hybrids, installed_sglang_version, seam_of

_OURS = "sglang_ext"
_PATCHES = "sglang_ext.patches"
_SEAMS = "sglang_ext.patches.seams"
_NEWEST = ("sglang_ext.patches.adapter.hybrid", "sglang_ext.patches.adapter.hicache_unified")
"""Modules for classes of SGLang that came with its support of windows and states."""


class NoSourceError(RuntimeError):
    """There is no SGLang of this version or in this folder; the message says where it was looked for."""


def folder_of(package: str) -> Path:
    """The folder of an importable package, without importing its modules.

    Raises:
        NoSourceError: when there is none.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise NoSourceError(f"{package} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def sglang_folder(where: str) -> Path:
    """The folder `sglang` of a version, or in a folder; a version that is not installed is fetched by pip.

    Raises:
        NoSourceError: when there is none.
    """
    if where == installed_sglang_version():
        return folder_of("sglang")
    for folder in (Path(where), Path(where) / "sglang"):
        if (folder / "srt").is_dir():
            return folder
    if not where[:1].isdigit():
        raise NoSourceError(f"{where} is neither a version nor a folder with SGLang's source")
    return _fetched(where)


def _fetched(version: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang_ext"
    kept = cache / f"sglang-{version}"
    if not kept.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
            done = subprocess.run(
                [*command, f"sglang=={version}"],
                capture_output=True,
                text=True,
                check=False,
                encoding="utf-8",
            )
            wheel = next(Path(scratch).glob("*.whl"), None)
            if wheel is None:
                last = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
                raise NoSourceError(f"sglang {version} is not installed, and pip cannot fetch it: {last}")
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(
                    Path(scratch) / "unpacked", [name for name in packed.namelist() if _read(name)]
                )
            (Path(scratch) / "unpacked").rename(kept)
    return kept / "sglang"


def _read(name: str) -> bool:
    return name.startswith("sglang/") and name.endswith(".py") and "/multimodal_gen/" not in name


def version_of(sglang: Path) -> str:
    """The version that a folder with SGLang's source says it is; empty where it says none."""
    text = (sglang / "_version.py").read_text(encoding="utf-8") if (sglang / "_version.py").exists() else ""
    found = re.search(r"""^(?:__version__ = )?(?:version = )['"]([^'"]+)""", text, re.MULTILINE)
    return found[1] if found else ""


def source_with(sglang: Path) -> Source:
    """Our source, with the seam that it would have beside an SGLang, and that SGLang's."""
    seam = f"{_SEAMS}.{seam_of(version_of(sglang))}"
    packages = {"sglang": sglang, _OURS: folder_of(_OURS), _PATCHES: folder_of(_PATCHES)}
    return Source(packages, {f"{_SEAMS}.current": seam})


def our_modules(source: Source, *, hybrids: bool) -> Iterator[Module]:
    """Our modules that touch SGLang: the patches with one seam, the engine that they hand requests to.

    hybrids: with those for models with windows or states, and those that came with them.
    """
    seam = source.find(f"{_SEAMS}.current")
    for each in modules_in(source, _PATCHES, folder_of(_PATCHES)):
        if not hybrids and each.name.startswith(_NEWEST):
            continue
        if each.name.rpartition(".")[0] != _SEAMS or each is seam:
            yield each
    yield from modules_in(source, f"{_OURS}.engine", folder_of(_OURS) / "engine")
    launcher = source.module(f"{_OURS}.launch_server")
    if launcher is not None:
        yield launcher


def check_contract(sglang: Path, source: Source | None = None) -> Report:
    """Hold our patches to an SGLang: see `contract.check`.

    Args:
        source: of `source_with`, where more is read of it; by default it is read for this alone.
    """
    source = source or source_with(sglang)
    collects = gc.isenabled()
    gc.disable()  # trees of source are very many small objects that all stay
    try:
        return check(source, our_modules(source, hybrids=follows_hybrids(version_of(sglang))))
    finally:
        if collects:
            gc.enable()

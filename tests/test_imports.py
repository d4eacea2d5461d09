"""The allowed imports between parts. The architecture's import direction, kept by reading every module's
source.

Imports inside functions and behind TYPE_CHECKING count too: they couple parts all the same.
"""

from __future__ import annotations

import ast
import graphlib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SHARED = {
    "addresses",
    "advise",
    "client",
    "clock",
    "cluster_key",
    "compiled",
    "config",
    "errors",
    "flags",
    "folders",
    "geometry",
    "ids",
    "keys",
    "native",
    "own_functions",
    "tiers",
    "signals",
    "stages",
    "tasks",
    "wire",
}
"""Modules of sglang_ext that every part may import."""


def folders(package: str, *names: str, below: Iterable[str]) -> dict[str, set[str]]:
    """A package's folders in the order in which the right may import the left, and the modules that all may
    import."""
    table: dict[str, set[str]] = {}
    for name in names:
        table[f"{package}.{name}" if name else package] = {*below, *table}
    return table


PARTS = {"radix_global", "radix_global.sync", "disagg", "disagg.transports", "disagg.transfer"} | {
    "tiered_store",
    "tiered_store.dram",
    "tiered_store.disk",
    "tiered_store.loading",
}
ENGINE = folders(
    "engine",
    *("", "movers", "tiers", "peers", "hybrid", "prefetch", "events", "cache", "pd"),
    below=PARTS | {"protocol", "mempool", "cost_model"},
)
PATCHES = folders(
    "patches",
    *(
        "environment",
        "versions",
        "contract",
        "base",
        "process",
        "plugin_hooks",
        "readiness",
        "seams",
        "cpu",
        "adapter",
        "hooks",
        "",
    ),
    below=set(ENGINE).union(*ENGINE.values()),
)
ROUTER = folders(
    "router",
    *("http", "api", "clients", "tenancy", "telemetry", "policies", "index", "fleet", "tokens", "cluster"),
    *("placing", "hints", "dispatch", "endpoints", "app", "estimate", ""),
    below=("protocol", "radix_global", "radix_global.sync", "cost_model"),
)
MAY_IMPORT: dict[str, set[str]] = {
    "shared": set(),
    "protocol": set(),
    "radix_global": set(),
    "radix_global.sync": {"radix_global", "protocol"},
    "tiered_store": {"tiered_store.dram"},
    "tiered_store.dram": set(),
    "tiered_store.loading": {"tiered_store", "tiered_store.dram"},
    "tiered_store.disk": {"tiered_store", "tiered_store.dram", "tiered_store.loading"},
    "disagg": set(),
    "disagg.transports": {"disagg"},
    "disagg.transfer": {"disagg", "disagg.transports"},
    "cost_model": set(),
    "calibration": {"cluster", "cost_model"},
    "migrate": set(),
    "mempool": PARTS,
    **ENGINE,
    **PATCHES,
    "launch_server": set(PATCHES),
    **ROUTER,
    "cluster": {*PATCHES, *PARTS, "protocol"},
    "simulator": {*ENGINE, *PARTS, "cost_model", "mempool", "protocol", *ROUTER} - {"router.app"},
    "gpu_check": {*ENGINE, *PARTS, *PATCHES, "cluster", "testing"},
    "cli": {"calibration", "cluster", "patches.environment", *ROUTER},
    "testing.transfer": {*PARTS, "mempool", "testing"},
    "testing": {*PARTS, "mempool"},
    "tests": {*PARTS, "protocol", "cluster", "engine", "engine.events", "testing", *PATCHES, "gpu_check"},
    "scripts": {"patches.contract", "patches.versions"},
    "examples": {"cluster", "patches.environment", "testing"},
    "benchmarks": {"*"},
}
"""The modules of this project that each part may import, beside itself and the shared modules. A package's
own modules and its folders are parts of their own."""

SGLANG_PARTS = {*PATCHES, "launch_server", "benchmarks"}
"""Parts that may import sglang."""

TORCH_PARTS = {*SGLANG_PARTS, *ENGINE, "gpu_check"}
LAZY_TORCH_PARTS = {"calibration", "tiered_store.dram", "cluster", "testing", "tests"}
"""Parts that may import torch, and those that may do so inside a function only."""

STILL_TO_CUT = {
    ("router.app", "router"),
}
"""Breaches from before this test. Nothing is added here."""

MOST_MODULES = 20
"""A folder with more wants folders."""

PROJECT = ("sglang_ext", "benchmarks", "examples", "scripts", "tests")
FOLDERS = ("sglang_ext", "benchmarks", "examples/demo", "scripts/following", "tests/support")
"""The packages of the project, and the folders that are read here. `router` and `patches` at the top are
links into `sglang_ext`."""
TORCH = ("torch", "torchvision", "triton")
SGLANG = ("sglang", "sgl_kernel")


def part_of(module: str) -> str | None:
    """The part a dotted module belongs to; None for a module that is not of this project."""
    top, _, rest = module.partition(".")
    if top != "sglang_ext":
        return top if top in PROJECT else None
    name, _, inner = rest.partition(".")
    folder = f"{name}.{inner.partition('.')[0]}"
    return folder if folder in MAY_IMPORT else "shared" if name in SHARED or not name else name


@cache
def imports(source: str, module: str, *, is_package: bool) -> tuple[tuple[int, str, bool], ...]:
    """(line, imported module, at the top level) for every import in a module's source."""
    return tuple(_imports(source, module, is_package=is_package))


def _imports(source: str, module: str, *, is_package: bool) -> Iterator[tuple[int, str, bool]]:
    tree = ast.parse(source)
    lazy = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(outer)
    }
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            # "from sglang_ext import engine" imports the module sglang_ext.engine.
            found = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and _imports_by_name(node.func):
            found = [
                a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)
            ]
        for name in found:
            yield node.lineno, name, id(node) not in lazy


def _imports_by_name(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in {"import_module", "__import__"}


def complaint(part: str, imported: str, top_level: bool) -> str | None:
    """Why `part` may not import `imported`; None when it may."""
    library = imported.partition(".")[0]
    if {(part, library), (part, part_of(imported))} & STILL_TO_CUT:
        return None
    if library in SGLANG and part not in SGLANG_PARTS:
        return f"{part} must not import sglang"
    if library in TORCH and part not in TORCH_PARTS:
        if part not in LAZY_TORCH_PARTS:
            return f"{part} must not import torch"
        if top_level:
            return f"{part} may import torch inside a function only"
    target = part_of(imported)
    allowed = MAY_IMPORT[part]
    if target in {None, "shared", part} or "*" in allowed or target in allowed:
        return None
    return f"{part} must not import {target}"


def modules(root: Path) -> Iterator[tuple[Path, str, tuple[tuple[int, str, bool], ...]]]:
    """(file, dotted name, `imports`) of every module below `root`."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            is_package = path.name == "__init__.py"
            inner = path.relative_to(root)
            module = ".".join((inner.parent if is_package else inner.with_suffix("")).parts)
            yield path, module, imports(path.read_text("utf-8"), module, is_package=is_package)


def complaints(root: Path) -> list[str]:
    """Every breach below `root`, as 'file:line: part must not import module'."""
    found: list[str] = []
    for path, module, imported_there in modules(root):
        relative = path.relative_to(root)
        part = part_of(module)
        if part not in MAY_IMPORT:
            found.append(
                f"{relative}: the part {part!r} is not in MAY_IMPORT; add it, with its allowed imports"
            )
            continue
        for line, imported, top_level in imported_there:
            why = complaint(part, imported, top_level)
            if why:
                found.append(f"{relative}:{line}: {why} ({imported})")
    return found


def circle(root: Path) -> list[str]:
    """Modules below `root` that import each other, each the one after it; empty when none do."""
    graph = {module: imported for _, module, imported in modules(root)}
    # A name in `from package import name` is a module, or stands in the package's own.
    edges = {
        module: {name if name in graph else name.rpartition(".")[0] for _, name, _ in imported} - {module}
        for module, imported in graph.items()
    }
    try:
        graphlib.TopologicalSorter({module: edges[module] & set(graph) for module in edges}).prepare()
    except graphlib.CycleError as error:
        found: list[str] = error.args[1]
        return found[::-1]
    return []


def test_imports_follow_the_architecture() -> None:
    assert complaints(ROOT) == []


def test_no_modules_import_each_other() -> None:
    assert circle(ROOT) == []


@pytest.mark.parametrize(
    "sources",
    [
        {"a": "from sglang_ext.mempool.b import B", "b": "import sglang_ext.mempool.a"},
        {"a": "def f():\n    from . import b", "b": "from .c import C", "c": "from . import a"},
        {"a": "if TYPE_CHECKING:\n    from sglang_ext.mempool import b", "b": "from .a import A"},
        {"a": "from sglang_ext.mempool import B", "__init__": "from .b import B", "b": "from .a import A"},
    ],
    ids=["two", "three, one inside a function", "for types only", "through a package"],
)
def test_a_circle_is_found(tmp_path: Path, sources: dict[str, str]) -> None:
    """The twin."""
    room = tmp_path / "sglang_ext" / "mempool"
    room.mkdir(parents=True)
    for name, source in sources.items():
        (room / f"{name}.py").write_text(source, "utf-8")
    found = circle(tmp_path)
    assert len(found) == len(sources) + 1
    assert found[0] == found[-1]
    # Without one of its imports it is none.
    (room / "a.py").write_text("", "utf-8")
    assert circle(tmp_path) == []


def test_what_tests_take_from_each_other_is_found_when_all_are_run() -> None:
    """By its own name, which no other folder has: otherwise the first folder on the path decides."""
    known = Counter(path.stem for path in (ROOT / "tests").rglob("*.py"))
    taken = {
        node.module
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module in known
    }
    assert taken, "they are imported in another way, which this does not see"
    assert not {name for name in taken if known[name] > 1}


def test_no_folder_is_crowded() -> None:
    crowded = {}
    for folder in FOLDERS:
        for path in [ROOT / folder, *(ROOT / folder).rglob("*/")]:
            modules = [file.name for file in path.glob("*.py") if file.name != "__init__.py"]
            if len(modules) > MOST_MODULES:
                crowded[path.relative_to(ROOT).as_posix()] = len(modules)
    assert not crowded, "split these folders"


def test_the_table_has_no_cycle() -> None:
    seen: list[str] = []

    def visit(part: str, path: tuple[str, ...]) -> None:
        assert part not in path, f"cycle: {' -> '.join((*path, part))}"
        if part not in seen:
            for below in MAY_IMPORT[part] - {"*"}:
                visit(below, (*path, part))
            seen.append(part)

    for part in MAY_IMPORT:
        visit(part, ())
    assert set(seen) == set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("sglang_ext/keys.py", "import sglang_ext.disagg", "shared must not import disagg"),
        ("sglang_ext/keys.py", "import torch", "shared must not import torch"),
        (
            "sglang_ext/disagg/x.py",
            "from sglang_ext import tiered_store",
            "disagg must not import tiered_store",
        ),
        (
            "sglang_ext/disagg/x.py",
            "from ..radix_global.tree import T",
            "disagg must not import radix_global",
        ),
        ("sglang_ext/disagg/__init__.py", "from .. import engine", "disagg must not import engine"),
        ("sglang_ext/engine/x.py", "import sglang_ext.router.app.run", "engine must not import router.app"),
        (
            "sglang_ext/tiered_store/dram/x.py",
            "import torch",
            "tiered_store.dram may import torch inside a function only",
        ),
        ("sglang_ext/router/x.py", "def f():\n    from sglang import srt", "router must not import sglang"),
        ("sglang_ext/engine/tiers/x.py", "import sglang.srt", "engine.tiers must not import sglang"),
        (
            "sglang_ext/router/http/x.py",
            "from sglang_ext.router.dispatch import relaying",
            "router.http must not import router.dispatch",
        ),
        (
            "sglang_ext/patches/cpu/x.py",
            "from sglang_ext.patches import adapter",
            "patches.cpu must not import patches.adapter",
        ),
        (
            "sglang_ext/router/x.py",
            "import importlib\nimportlib.import_module('sglang')",
            "router must not import sglang",
        ),
        ("sglang_ext/engine/x.py", "import benchmarks.index", "engine must not import benchmarks"),
        ("sglang_ext/testing/x.py", "from tests.support import leaks", "testing must not import tests"),
        ("sglang_ext/cluster/x.py", "import examples.demo.report", "cluster must not import examples"),
        ("tests/support/x.py", "from sglang_ext.router import Router", "tests must not import router"),
        ("sglang_ext/new_part/x.py", "", "the part 'new_part' is not in MAY_IMPORT"),
    ],
)
def test_a_breach_is_found(tmp_path: Path, path: str, source: str, expected: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source, "utf-8")
    (found,) = complaints(tmp_path)
    assert found.startswith(path)
    assert expected in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("sglang_ext/tiered_store/dram/x.py", "def f():\n    import torch"),
        (
            "sglang_ext/patches/adapter/x.py",
            "import sglang.srt\nimport torch\nfrom sglang_ext import keys, radix_global",
        ),
        (
            "sglang_ext/radix_global/x.py",
            "from . import tree\nfrom .tree import y\nfrom sglang_ext.keys import z",
        ),
        (
            "sglang_ext/router/dispatch/x.py",
            "from sglang_ext.router.policies import base\nfrom sglang_ext.radix_global import tree",
        ),
    ],
)
def test_what_is_allowed_is_not_found(tmp_path: Path, path: str, source: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source, "utf-8")
    assert complaints(tmp_path) == []

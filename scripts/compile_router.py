"""Compile hot modules to machine code, where mypyc and a C compiler are there (`native.py`).

    python scripts/compile_router.py

Does nothing when the compiled modules match these sources. Exits with 1, and prints the reason, where
compiling is not possible.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path

from sglang_ext.native import LIST, SUFFIX, digest, found

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "sglang_ext"
NATIVE = PACKAGE / "_native"
ROUTER = (
    "http/body", "http/connection", "http/messages", "http/reader", "http/responder", "http/state",
    "http/upstream", "http/web_sites", "http/worker_connection", "index/index", "index/memory",
    "index/prompt_trees", "policies/assembly", "policies/cost", "policies/fleet_queries",
    "policies/holdings", "policies/options", "policies/prompt_tree", "policies/search", "policies/spans",
    "dispatch/choosing", "dispatch/flight", "dispatch/forwarding", "dispatch/queueing", "dispatch/relaying",
    "dispatch/suspects", "placing/costs", "placing/fetching", "placing/outlook", "placing/placing",
    "placing/queue_estimate", "placing/rows", "placing/transfer_times", "fleet/fleet",
    "fleet/instance_record", "fleet/standing", "telemetry/local_metrics", "telemetry/observability",
    "telemetry/record", "tenancy/admit", "tenancy/bounded", "tenancy/budgets", "tenancy/rate",
    "tenancy/request_fields", "api/generate", "api/prompts", "api/sse", "api/usage", "api/validation",
    "tokens/prompt_tokenizer", "tokens/segments", "tokens/tokenizing", "endpoints/charges",
    "endpoints/generation", "endpoints/retry_budget", "endpoints/routes", "app/service",
)  # fmt: skip
MODULES = (
    "cost_model/model", "cost_model/passes", "cost_model/sums", "radix_global/edges", "radix_global/eviction",
    "radix_global/locks", "radix_global/node", "radix_global/tree", "radix_global/sync/replica",
    "radix_global/sync/runs", *(f"router/{name}" for name in ROUTER),
)  # fmt: skip
"""The modules in which a request spends its time. mypyc ignores msgspec's options for a class (``frozen``,
``eq``), so such classes live in modules of their own, which are not compiled."""
BUILD = """
import os, sys
from mypyc.build import mypycify
from setuptools import setup
config, *files = sys.argv[1:]
sys.argv = ["setup.py", "-q", "build_ext", "-i", "-j", str(len(os.sched_getaffinity(0)))]
setup(name="native", packages=[], ext_modules=mypycify(
    ["--config-file", config, *files], opt_level="1", debug_level="0", target_dir="c", multi_file=True))
"""
"""A file of C for each module takes compilers half the time, for the same speed; so does level 1 beside 2."""


def obstacle() -> str:
    """Why nothing can be compiled; empty when it can."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"there is no C compiler ({compiler})"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python's C headers are not installed"
    done = subprocess.run([sys.executable, "-c", "import mypyc.build"], capture_output=True, check=False)
    return "" if done.returncode == 0 else "mypyc is not installed (pip install mypy)"


def is_done() -> bool:
    """Whether these sources are compiled already."""
    native = found("sglang_ext", PACKAGE, NATIVE)
    return native is not None and native.files.keys() >= {
        f"sglang_ext.{name.replace('/', '.')}" for name in MODULES
    }


def imported(package: Path, modules: Iterable[str]) -> set[str]:
    """The modules that some modules of a package import, directly or not, and these themselves.

    Args:
        package: its folder, named as the package is.
        modules: names relative to the package, as in `MODULES`; so are those returned.
    """
    found: set[str] = set()
    waiting = [f"{package.name}/{name}" for name in modules]
    while waiting:
        path = package.parent / waiting.pop()
        path = path / "__init__" if path.is_dir() else path
        name = str(path.relative_to(package.parent))
        if name in found or not path.with_suffix(".py").exists():
            continue
        found.add(name)
        for node in ast.walk(ast.parse(path.with_suffix(".py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            waiting += [each.replace(".", "/") for each in names if each.split(".")[0] == package.name]
    return {name.removeprefix(f"{package.name}/") for name in found}


def compile_into(target: Path, modules: tuple[str, ...] = MODULES) -> None:
    """Compile modules of the package.

    Raises:
        subprocess.CalledProcessError: they cannot be.
    """
    with tempfile.TemporaryDirectory(prefix="compile-") as name:
        folder = Path(name)
        ignore = shutil.ignore_patterns("__pycache__", "_native", "*.so")
        shutil.copytree(PACKAGE, folder / "sglang_ext", ignore=ignore)
        package = folder / "sglang_ext"
        sources = {name: digest(package / f"{name}.py") for name in sorted(imported(package, modules))}
        config = folder / "mypy.ini"
        config.write_text(
            "[mypy]\nfollow_imports = silent\nignore_missing_imports = True\n"
            "[mypy-opentelemetry.*,sglang.*,numba.*,lmdb.*,transformers.*,tokenizers.*,torch.*,zmq.*,numpy.*]\n"
            "follow_imports = skip\n",
            encoding="utf-8",
        )
        files = [f"sglang_ext/{module}.py" for module in modules]
        subprocess.run(
            [sys.executable, "-c", BUILD, str(config), *files],
            cwd=folder, check=True, capture_output=True, text=True, encoding="utf-8",
        )  # fmt: skip
        built = folder / "native"
        built.mkdir()
        (group,) = (file.name.removesuffix(SUFFIX) for file in folder.glob(f"*{SUFFIX}"))
        shutil.move(folder / f"{group}{SUFFIX}", built)
        for module in modules:
            (built / module).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(folder / "sglang_ext" / f"{module}{SUFFIX}", (built / module).parent)
        listed = {"suffix": SUFFIX, "group": group, "modules": modules, "sources": sources}
        (built / LIST).write_text(json.dumps(listed), encoding="utf-8")
        beside = target.with_name(f"{target.name}.{os.getpid()}")
        shutil.move(built, beside)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(beside, target)


def main() -> int:
    """Compile."""
    if is_done():
        print(f"{len(MODULES)} modules are compiled.")
        return 0
    why = obstacle()
    if why:
        print(f"Nothing is compiled, everything runs as Python: {why}.")
        return 1
    try:
        compile_into(NATIVE)
    except subprocess.CalledProcessError as error:
        print(f"Nothing is compiled, everything runs as Python:\n{error.stdout}{error.stderr}")
        return 1
    print(f"{len(MODULES)} modules are compiled.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Every flag that a message, a docstring or a page of the documentation names is a flag that exists."""

from __future__ import annotations

import argparse
import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang.srt.server_args import ServerArgs

from examples.demo.__main__ import Arguments as DemoArguments
from sglang_ext import launch_server
from sglang_ext.cli import COMMANDS, flags_of
from sglang_ext.flags import removed
from sglang_ext.flags.help import Removed
from sglang_ext.migrate.gateway import GATEWAY

ROOT = Path(__file__).parents[2]
PACKAGES = ("sglang_ext", "benchmarks", "scripts", "examples")
PAGES = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")

FLAG = re.compile(r"(?<![\w/-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*(?![\w-])")
"""A whole flag: a name that ends in a dash or a star stands for several."""

OTHERS = {
    "argparse, sglang-ext": {"--version"},
    "abbreviations of SGLang's": {"--tp", "--pp", "--dp"},
    "newer SGLang": {"--attn-dp-size", "--disaggregation-decode-allocation-policy"},
    "pip": {
        "--no-deps",
        "--target",
        "--no-build-isolation",
        "--disable-pip-version-check",
        "--exclude",
        "--all",
        "--dest",
        "--force-reinstall",
        "--quiet",
        "--ignore-installed",
        "--no-index",
        "--python",
        *("--implementation", "--no-cache-dir", "--only-binary", "--platform", "--python-version"),
    },
    "git": {"--cached", "--exclude-standard", "--others"},
    "helm, systemctl": {"--set", "--now"},
    "Ray": {
        *("--address", "--block", "--disable-usage-stats", "--head", "--include-dashboard"),
        *("--node-ip-address", "--num-cpus", "--num-gpus", "--object-store-memory", "--temp-dir"),
    },
    "SLURM": {"--gpus-per-node", "--jobid", "--nodes", "--overlap"},
    "mount": {"--bind", "--rbind", "--lazy"},
    "unshare": {"--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"},
    "mypy": {"--cache-dir", "--config-file"},
    "venv": {"--system-site-packages", "--clear", "--without-pip"},
    "pytest": {"--confcutdir", "--durations", "--import-mode", "--rootdir"},
    "docker": {"--shm-size", "--ulimit"},
    "nvidia-smi": {"--query-gpu", "--format", "--id"},
    "redis-server": {"--appendonly", "--requirepass", "--save", "--unixsocket"},
    "fio": {
        *("--bs", "--direct", "--filename", "--invalidate", "--ioengine", "--name", "--numjobs"),
        *("--output-format", "--overwrite", "--rw", "--size", "--thread"),
    },
    "npm, tsc": {
        *("--ignore-scripts", "--module", "--offline", "--pack-destination", "--silent", "--strict"),
    },
    "SGLang's own router": {f"--{name}" for name in GATEWAY},
}
"""Flags that none of the parsers has, by whose they are."""


def of_parsers() -> set[str]:
    """SGLang's flags, and those of our commands."""
    sglang, ours = argparse.ArgumentParser(), [DemoArguments.parser()]
    ServerArgs.add_cli_args(sglang)
    ours += [flags.parser() for flags in map(flags_of, COMMANDS.values()) if flags is not None]
    return {
        name
        for parser in (sglang, *ours)
        for action in parser._actions
        if not isinstance(action, Removed)
        for name in action.option_strings
    }


def of_calls(root: Path) -> set[str]:
    """The flags that programs below ``root``, and the options of pytest, add by name."""
    found: set[str] = set()
    for path in root.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not any(word in text for word in ("add_argument", "addoption", "= flag(")):
            continue  # parsing takes most of the time
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("add_argument", "addoption"):
                found |= {
                    word.value
                    for word in node.args
                    if isinstance(word, ast.Constant) and str(word.value).startswith("--")
                }
            elif isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
                if {"within", "variable_only"} & {word.arg for word in node.value.keywords}:
                    continue  # no flag of its own
                found.add("--" + ast.unparse(node.target).replace("_", "-"))  # a field made by `flag`
    return found


def named_in_code(text: str) -> Iterator[str]:
    """The flags that strings of a module name, docstrings among them."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from FLAG.findall(node.value)


REMOVED_FLAGS = [table for name, table in vars(removed).items() if name.isupper()]


def known() -> set[str]:
    own = set().union(*(of_calls(ROOT / package) for package in (*PACKAGES, "tests")))
    launcher = {launch_server.KEY_FILE_FLAG, launch_server.NO_REPORT_FLAG}  # taken before SGLang's parser
    return of_parsers() | own | launcher | set().union(*OTHERS.values())


def test_every_flag_that_is_named_exists() -> None:
    there = known()
    assert {"--kv-dram-size", "--tp-size", "--colocated", "--hide-routing", "--long"} <= there
    assert "--kv-dram-pin" not in there
    wrong: dict[str, set[str]] = defaultdict(set)
    pages = [ROOT / name for name in PAGES] + sorted((ROOT / "docs").rglob("*.md"))
    pages += sorted((ROOT / "scripts").rglob("*.sh"))
    replaced = {name for table in REMOVED_FLAGS for name in table}
    for path in pages:
        # The changelog names flags that are gone.
        expected = there | replaced if path.name == "CHANGELOG.md" else there
        for flag in set(FLAG.findall(path.read_text(encoding="utf-8"))) - expected:
            wrong[flag].add(path.relative_to(ROOT).as_posix())
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if path.name == "removed.py":
                continue
            for flag in set(named_in_code(path.read_text(encoding="utf-8"))) - there:
                wrong[flag].add(path.relative_to(ROOT).as_posix())
    assert not wrong, dict(sorted(wrong.items()))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('"""Use --kv-dram-pin off."""', ["--kv-dram-pin"]),
        (
            'raise E(f"set --kv-block-tokens to {n}; not --kv-{n}, --kv-x-*")',
            ["--kv-block-tokens"],
        ),
        ("# --a-comment", []),
        ('x = "a--b", "docs/--x", "---"', []),
    ],
)
def test_a_flag_is_found_where_users_read_it(text: str, found: list[str]) -> None:
    assert list(named_in_code(text)) == found

"""The patches' requirements are found in our source, and those that SGLang lacks are named."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from scripts.following.differences import differences
from sglang_ext.patches.contract.calls import Shape, refused
from sglang_ext.patches.contract.needs import Report
from sglang_ext.patches.contract.places import (
    NoSourceError,
    check_contract,
    folder_of,
    sglang_folder,
    source_with,
)
from sglang_ext.patches.contract.source import Found, Source
from sglang_ext.patches.versions import SUPPORTED, Supported, installed_sglang_version
from tests.support import ROOT

pytestmark = pytest.mark.slow


def folder_or_skip(version: str) -> Path:
    try:
        return sglang_folder(version)
    except NoSourceError as error:
        pytest.skip(str(error))


def checked(folder: Path) -> tuple[Source, Report]:
    """An SGLang, read once, and how our patches fit it."""
    source = source_with(folder)
    return source, check_contract(folder, source)


@pytest.fixture(scope="module")
def read() -> tuple[Source, Report]:
    """Of the installed SGLang."""
    return checked(folder_of("sglang"))


@pytest.fixture(scope="module")
def installed(read: tuple[Source, Report]) -> Report:
    return read[1]


@pytest.mark.parametrize("version", SUPPORTED, ids=lambda each: each.version)
def test_contract_and_hashes_hold(version: Supported, read: tuple[Source, Report]) -> None:
    folder = folder_or_skip(version.version)
    source, report = read if version.version == installed_sglang_version() else checked(folder)
    assert [str(each) for each in report.broken] == []
    found = {path: source.find(path) for path in report.targets}
    now = {path: (each.signature, each.source) for path, each in found.items() if isinstance(each, Found)}
    assert now == {path: (each.signature, each.source) for path, each in version.hashes().items()}


def test_what_we_read_of_sglang_is_found_in_our_source(installed: Report) -> None:
    """A few of each kind, annotated and not, so that a reader that no longer sees them is noticed."""
    batch = "sglang.srt.managers.schedule_batch"
    for kind, paths in {
        "names": {"sglang.srt.disaggregation.utils.FAKE_BOOTSTRAP_HOST"},
        "members": {
            f"{batch}.Req.origin_input_ids",
            f"{batch}.ReqKvInfo.cache_protected_len",
            "sglang.srt.managers.scheduler.Scheduler.waiting_queue",
            "sglang.srt.server_args.ServerArgs.disaggregation_transfer_backend",
        },
        "calls": {
            "sglang.srt.mem_cache.common.release_kv_cache",
            "sglang.srt.mem_cache.base_prefix_cache.MatchResult",
        },
        "overrides": {"sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache.match_prefix"},
        "hooks": {"sglang.srt.managers.scheduler.Scheduler.ingest_requests (after)"},
    }.items():
        assert paths <= installed.needs[kind], kind


BREAKS = {
    "an abstract method more": (
        "srt/mem_cache/base_prefix_cache.py",
        "    @abstractmethod\n    def reset(",
        "    @abstractmethod\n    def keep_all(self): ...\n\n    @abstractmethod\n    def reset(",
        "BasePrefixCache.keep_all: GlobalRadixCache lacks it",
    ),
    "an override is called with more": (
        "srt/mem_cache/base_prefix_cache.py",
        "def evict(self, params: EvictParams)",
        "def evict(self, params: EvictParams, urgent: bool)",
        "BasePrefixCache.evict: GlobalRadixCache's takes 1 arguments by position, 2 are given",
    ),
    "a field is gone": (
        "srt/mem_cache/base_prefix_cache.py",
        "host_hit_length",
        "host_prefix_len",
        "MatchResult: has no parameter 'host_hit_length'",
    ),
    "an attribute of a request is gone": (
        "srt/managers/schedule_batch.py",
        "cache_protected_len",
        "cache_own_len",
        "ReqKvInfo.cache_protected_len: is gone",
    ),
    "a flag is gone": (
        "srt/arg_groups/fields/disagg.py",
        "disaggregation_bootstrap_port",
        "disaggregation_port",
        "ServerArgs.disaggregation_bootstrap_port: is gone",
    ),
    "a function takes another argument": (
        "srt/mem_cache/common.py",
        "def release_kv_cache(req",
        "def release_kv_cache(keep, req",
        "release_kv_cache: needs",
    ),
    "a name is gone": (
        "srt/disaggregation/utils.py",
        "FAKE_BOOTSTRAP_HOST",
        "NO_BOOTSTRAP_HOST",
        "sglang.srt.disaggregation.utils.FAKE_BOOTSTRAP_HOST: is gone",
    ),
    "a hooked function is gone": (
        "srt/managers/scheduler.py",
        "def is_fully_idle(",
        "def is_fully_asleep(",
        "Scheduler.is_fully_idle: is gone",
    ),
    "a replaced function names its argument otherwise": (
        "srt/disaggregation/prefill.py",
        "self: Scheduler, req: Req",
        "self: Scheduler, request: Req",
        "maybe_send_cached_prefix_chunk: its replacement",
    ),
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The errors for a copy of the installed SGLang that lacks all of these at once."""
    there = tmp_path_factory.mktemp("broken") / "sglang"
    others = shutil.ignore_patterns("*.json", "*.so", "test", "multimodal_gen", "__pycache__")
    shutil.copytree(folder_of("sglang"), there, copy_function=os.symlink, ignore=others)
    for file, before, after, _ in BREAKS.values():
        text = (there / file).read_text()
        assert before in text, f"{file} has no {before!r} any more"
        (there / file).unlink()
        (there / file).write_text(text.replace(before, after))
    yield [str(each) for each in check_contract(there).broken]
    shutil.rmtree(there)


@pytest.mark.parametrize("name", BREAKS)
def test_a_contract_broken_on_purpose_is_named(broken: list[str], name: str) -> None:
    told = BREAKS[name][-1]
    assert any(told in each for each in broken), broken


def shape(parameters: str, *, bound: bool = False) -> Shape:
    function = ast.parse(f"def f({parameters}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return Shape.of(function, bound=bound)


@pytest.mark.parametrize(
    ("parameters", "call", "problem"),
    [
        ("a, b=1", "f(1)", ""),
        ("a, b=1", "f(1, 2, 3)", "takes 2 arguments by position, 3 are given"),
        ("a, b=1", "f(b=2)", "needs a"),
        ("a, *, b", "f(1, b=2)", ""),
        ("a, *, b", "f(1)", "needs b"),
        ("a", "f(1, c=2)", "has no parameter 'c'"),
        ("a", "f(1, a=2)", "has no parameter 'a'"),
        ("a, **more", "f(1, c=2)", ""),
        ("a, b", "f(*args)", ""),
        ("a, b", "f(1, **more)", ""),
    ],
)
def test_a_call_is_held_to_parameters(parameters: str, call: str, problem: str) -> None:
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call)
    assert refused(node, shape(parameters)) == problem


@pytest.mark.parametrize(
    ("ours", "theirs", "stands"),
    [
        ("self, n", "self, n", True),
        ("self, n, *args, **kwargs", "self, n, more=1", True),
        ("self, n", "self, n, more=1", False),
        ("self, n, more", "self, n", False),
        ("self, m", "self, n", False),
        ("self, *args, **kwargs", "self, n, *, named", True),
        ("self, n, extra=1", "self, n", True),
    ],
)
def test_one_function_stands_for_another_in_every_call(ours: str, theirs: str, stands: bool) -> None:
    assert (shape(ours, bound=True).cannot_stand_for(shape(theirs, bound=True)) == "") is stands


def package(folder: Path, **modules: str) -> Source:
    folder.mkdir()
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    return Source({"p": folder})


def test_only_what_runs_is_a_difference(tmp_path: Path) -> None:
    old = package(
        tmp_path / "old", m="def same(a):\n    return a\n\n\ndef other(a):\n    return a\n\n\nx = 1\n"
    )
    new = package(
        tmp_path / "new",
        m='def same(a: int) -> int:\n    """New words."""\n    # And a comment.\n    return a\n\n\n'
        "def other(a):\n    return a + 1\n",
    )
    (found,) = differences(old, new, ["p.m.same", "p.m.other"])
    assert "p.m.other" in found
    assert "+    return a + 1" in found
    assert list(differences(old, new, ["p.m.x"])) == ["- p.m.x\n"]


def test_names_are_found_through_re_exports_bases_and_stars(tmp_path: Path) -> None:
    source = package(
        tmp_path / "p",
        __init__="from .a import *\nfrom .b import Child as Kid\n",
        a="def starred(): ...\n",
        b="from p.c import Base\n\n\nclass Child(Base):\n    def __init__(self, n):\n        self.n = n\n",
        c="if True:\n\n    class Base:\n        def method(self): ...\n",
    )
    found = source.find("p.Kid.method")
    assert isinstance(found, Found)
    assert found.path == "p.c.Base.method"
    assert source.find("p.starred") is not None
    assert source.find("p.Kid.gone") is None
    kid = source.find("p.Kid")
    assert isinstance(kid, Found)
    assert {"n", "method"} <= set(source.members(kid).found)


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)


def test_the_command_prints_hashes_and_refuses_what_is_no_sglang(tmp_path: Path) -> None:
    version = installed_sglang_version()
    printed = run("scripts.following", "--hashes", version)
    known = next(each for each in SUPPORTED if each.version == version)
    assert json.loads(printed.stdout) == {path: asdict(each) for path, each in known.hashes().items()}
    refusal = run("sglang_ext.patches", "--check", str(tmp_path))
    assert refusal.returncode == 2
    assert "neither a version nor a folder" in refusal.stderr

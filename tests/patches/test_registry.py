"""Patches fit the installed SGLang, and one that does not is refused with everything a user needs."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_ext.patches import __main__ as command
from sglang_ext.patches.base import (
    Patch,
    PatchMismatchError,
    Scope,
    Target,
    TargetState,
    check_target,
    describe,
    plain_function,
    signature_of,
)
from sglang_ext.patches.registry import PATCHES, check_all, require_applied, select
from sglang_ext.patches.version import SGLANG_VERSION, installed_sglang_version


def test_every_patch_fits_the_installed_sglang() -> None:
    assert installed_sglang_version() == SGLANG_VERSION
    check_all(PATCHES)


def test_every_patch_says_what_why_and_when_it_can_go() -> None:
    for patch in PATCHES:
        (module,) = (
            module
            for name, module in sys.modules.items()
            if name.startswith("sglang_ext.patches.") and getattr(module, "PATCH", None) is patch
        )
        doc = module.__doc__ or ""
        for part in ("What:", "Why no extension point serves:", f"SGLang {SGLANG_VERSION}", "Can go:"):
            assert part in doc, f"{patch.name} does not say {part!r}"


def test_names_are_unique_and_targets_are_hashed() -> None:
    assert len({patch.name for patch in PATCHES}) == len(PATCHES)
    for patch in PATCHES:
        for target in patch.targets:
            assert len(target.source) == 12, target


def a_patch() -> Patch:
    return next(patch for patch in PATCHES if patch.name == "paged_allocator")


def with_target(patch: Patch, **changes: str) -> Patch:
    return dataclasses.replace(
        patch, targets=(dataclasses.replace(patch.targets[0], **changes), *patch.targets[1:])
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source": "0" * 12}, "source differs"),
        ({"signature": "(everything)"}, "signature differs"),
        ({"path": "sglang.srt.mem_cache.allocator.paged.alloc_extend_kernel_v2"}, "missing"),
        ({"path": "sglang.no_such_module.function"}, "missing"),
    ],
)
def test_a_target_that_differs_is_named_with_the_patch_the_version_and_the_way_out(
    changes: dict[str, str], words: str
) -> None:
    patch = with_target(a_patch(), **changes)
    with pytest.raises(PatchMismatchError) as caught:
        check_all([patch])
    message = str(caught.value)
    for part in (
        "'paged_allocator'",
        patch.targets[0].path,
        words,
        f"sglang {SGLANG_VERSION}",
        f"pip install sglang=={SGLANG_VERSION}",
        "python -m sglang_ext.patches --hashes paged_allocator",
    ):
        assert part in message
    assert len(message.splitlines()) == 1, "the targets that fit are not complained about"


def test_every_mismatch_is_reported_at_once() -> None:
    wrong = [dataclasses.replace(with_target(a_patch(), source="0" * 12), name=f"p{i}") for i in range(2)]
    with pytest.raises(PatchMismatchError, match=r"(?s)'p0'.*'p1'"):
        check_all(wrong)


def test_a_patch_that_is_not_in_place_is_refused() -> None:
    patch = Patch("nothing", "does nothing", Scope.CPU, (), apply=lambda: None, applied=lambda: False)
    with pytest.raises(PatchMismatchError, match="'nothing' was applied and is not in place"):
        require_applied([patch])


def test_scopes_partition_the_patches() -> None:
    assert sum((select(scope) for scope in Scope), ()) == PATCHES
    assert [patch.name for patch in select(Scope.PROCESS)] == ["torchvision_operators", "sgl_kernel_stand_in"]


class Example:
    @classmethod
    def made(cls, n: int, *, fast: bool = False) -> None:
        """A method to describe."""


def test_a_signature_has_defaults_and_no_annotations() -> None:
    assert signature_of(plain_function(Example.made)) == "(cls, n, *, fast=False)"


def test_a_description_sees_through_decorators() -> None:
    """Ours or another plugin's wrapper around a target must not look like an upgrade."""
    path = "sglang.srt.managers.utils.validate_input_length"
    before = describe(path)
    import functools

    import sglang.srt.managers.utils as utils

    stock = utils.validate_input_length
    utils.validate_input_length = functools.wraps(stock)(lambda *args: stock(*args))
    try:
        assert describe(path) == before
    finally:
        utils.validate_input_length = stock


def test_a_target_without_source_is_missing() -> None:
    assert check_target(Target("math.sqrt", "(x, /)", "0" * 12)).state is TargetState.MISSING


def test_the_command_lists_every_patch_with_its_state(tmp_path: Path) -> None:
    """In a process of its own, which has to import SGLang without an accelerator by itself."""
    listing = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "sglang_ext.patches"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert listing.returncode == 0, listing.stderr
    lines = listing.stdout.splitlines()
    assert lines[0] == f"sglang {SGLANG_VERSION}; patches written for {SGLANG_VERSION}"
    assert [line.split()[0] for line in lines[1:]] == ["ok"] * len(PATCHES)


@pytest.fixture
def main_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[str]], int]]:
    """The command in this process, which has imported SGLang already."""
    monkeypatch.setattr(command.runtime, "prepare_process", lambda environment: None)
    before = logging.root.manager.disable
    yield command.main
    logging.disable(before)


def test_the_command_prints_hashes_to_copy(
    main_here: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_here(["--hashes", "vocabulary"]) == 0
    target = next(patch for patch in PATCHES if patch.name == "vocabulary").targets[0]
    printed = capsys.readouterr().out
    assert target.path in printed
    assert target.source in printed
    with pytest.raises(SystemExit) as refused:
        main_here(["--hashes", "nonsense"])
    assert refused.value.code == 2
    assert "no patch 'nonsense'" in capsys.readouterr().err

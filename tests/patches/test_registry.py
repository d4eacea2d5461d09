"""Patches fit the installed SGLang; a patch that does not fit is refused with its reason and a way out."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_ext.patches import versions
from sglang_ext.patches.base import Patch, PatchMismatchError, Scope
from sglang_ext.patches.registry import PATCHES, check_all, require_applied, select
from sglang_ext.patches.versions import SUPPORTED, Supported, installed_sglang_version

INSTALLED = next(each for each in SUPPORTED if each.version == installed_sglang_version())


def test_every_patch_fits_the_installed_sglang() -> None:
    check_all(PATCHES)


def test_every_patch_states_its_change_its_reason_and_its_end() -> None:
    for patch in PATCHES:
        (module,) = (
            module
            for name, module in sys.modules.items()
            if name.startswith("sglang_ext.patches.") and getattr(module, "PATCH", None) is patch
        )
        doc = module.__doc__ or ""
        for part in ("Change:", "Why no extension point serves:", "Can go:"):
            assert part in doc, f"{patch.name} does not say {part!r}"


def test_names_are_unique_and_every_target_is_hashed_in_every_version() -> None:
    assert len({patch.name for patch in PATCHES}) == len(PATCHES)
    targets = {path for patch in PATCHES for path in patch.targets}
    for each in SUPPORTED:
        assert targets == set(each.hashes()), each.version


def a_patch() -> Patch:
    return next(patch for patch in PATCHES if patch.name == "paged_allocator")


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have something else declared for the installed version."""

    def change(path: str, **changes: str) -> None:
        hashes = dict(INSTALLED.hashes())
        hashes[path] = dataclasses.replace(hashes[path], **changes)
        monkeypatch.setattr(Supported, "hashes", lambda _self: hashes)

    return change


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"source": "0" * 12}, "source differs"), ({"signature": "(everything)"}, "signature differs")],
)
def test_a_target_that_differs_is_named_with_the_patch_the_version_and_the_way_out(
    declare: Callable[..., None], changes: dict[str, str], words: str
) -> None:
    patch = a_patch()
    declare(patch.targets[0], **changes)
    with pytest.raises(PatchMismatchError) as caught:
        check_all([patch])
    message = str(caught.value)
    for part in (
        "'paged_allocator'",
        patch.targets[0],
        words,
        f"sglang {INSTALLED.version}",
        f"sglang=={INSTALLED.version}",
        "python -m sglang_ext.patches --check",
    ):
        assert part in message
    assert len(message.splitlines()) == 1, "the targets that fit are not complained about"


@pytest.mark.parametrize("path", ["sglang.srt.mem_cache.allocator.paged.v2", "sglang.no_module.f"])
def test_a_target_that_is_gone_is_named(path: str) -> None:
    with pytest.raises(PatchMismatchError, match=f"{path}: missing"):
        check_all([dataclasses.replace(a_patch(), targets=(path,))])


def test_a_target_without_a_known_hash_is_named() -> None:
    with pytest.raises(PatchMismatchError, match="not declared"):
        check_all([dataclasses.replace(a_patch(), targets=("sglang.srt.utils.common.is_hip",))])


def test_every_mismatch_is_reported_at_once() -> None:
    wrong = [dataclasses.replace(a_patch(), name=f"p{i}", targets=("sglang.no.such",)) for i in range(2)]
    with pytest.raises(PatchMismatchError, match=r"(?s)'p0'.*'p1'"):
        check_all(wrong)


def test_a_patch_that_is_not_in_place_is_refused() -> None:
    patch = Patch("nothing", "does nothing", Scope.CPU, (), apply=lambda: None, applied=lambda: False)
    with pytest.raises(PatchMismatchError, match="'nothing' was applied and is not in place"):
        require_applied([patch])


def test_scopes_partition_the_patches() -> None:
    assert sum((select(scope) for scope in Scope), ()) == PATCHES
    assert [patch.name for patch in select(Scope.PROCESS)] == ["torchvision_operators", "sgl_kernel_stand_in"]


def test_the_command_lists_every_patch_with_its_state(tmp_path: Path) -> None:
    """In a process of its own."""
    listing = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "sglang_ext.patches"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert listing.returncode == 0, listing.stderr
    lines = listing.stdout.splitlines()
    assert lines[0] == f"sglang {INSTALLED.version}; tested with {versions.tested_versions()}"
    assert [line.split()[0] for line in lines[1:]] == ["ok"] * len(PATCHES)

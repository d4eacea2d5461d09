"""All patches, in the order of application; checking and applying them together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

from sglang_ext.patches import grammars, rendezvous
from sglang_ext.patches.base import (
    Patch,
    PatchMismatchError,
    Scope,
    TargetReport,
    TargetState,
    check_target,
    mismatch_message,
)
from sglang_ext.patches.contract.places import check_contract, folder_of
from sglang_ext.patches.contract.source import Source
from sglang_ext.patches.cpu import (
    allocator as paged_allocator,
)
from sglang_ext.patches.cpu import (
    attention as native_attention,
)
from sglang_ext.patches.cpu import (
    draft_attention,
    early_send,
    gated_norms,
    kda,
    mamba2,
    mla_attention,
    mla_rope,
    qwen_operators,
    short_conv,
)
from sglang_ext.patches.cpu import (
    fork as fork_children,
)
from sglang_ext.patches.cpu import (
    kernels as sgl_kernel_stand_in,
)
from sglang_ext.patches.cpu import (
    torchvision as torchvision_operators,
)
from sglang_ext.patches.hooks import (
    durability,
    exact_abort,
    flags,
    headers,
    load_details,
    migration,
    request_values,
    restarts,
    retraction,
    samples,
    stages,
    template_errors,
    uncompiled,
    vocabulary,
    wide_pads,
)
from sglang_ext.patches.hooks import (
    messages as commands,
)
from sglang_ext.patches.hooks import (
    role as role_switch,
)
from sglang_ext.patches.hooks import (
    scheduler as scheduler_calls,
)
from sglang_ext.patches.hooks import (
    transfer as transfer_backend,
)
from sglang_ext.patches.hooks import (
    weights as weight_updates,
)
from sglang_ext.patches.versions import (
    ALLOW_UNTESTED,
    SGLANG_VERSION,
    Declared,
    Status,
    installed_sglang_version,
    supported,
    tested_versions,
)

PATCHES: tuple[Patch, ...] = (
    torchvision_operators.PATCH,
    sgl_kernel_stand_in.PATCH,
    paged_allocator.PATCH,
    mla_attention.PATCH,
    mla_rope.PATCH,
    native_attention.PATCH,
    draft_attention.PATCH,
    short_conv.PATCH,
    gated_norms.PATCH,
    mamba2.PATCH,
    kda.PATCH,
    qwen_operators.PATCH,
    early_send.PATCH,
    fork_children.PATCH,
    flags.PATCH,
    transfer_backend.PATCH,
    scheduler_calls.PATCH,
    restarts.PATCH,
    retraction.PATCH,
    load_details.PATCH,
    stages.PATCH,
    durability.PATCH,
    commands.PATCH,
    migration.PATCH,
    exact_abort.PATCH,
    samples.PATCH,
    role_switch.PATCH,
    weight_updates.PATCH,
    vocabulary.PATCH,
    wide_pads.PATCH,
    request_values.PATCH,
    grammars.PATCH,
    template_errors.PATCH,
    headers.PATCH,
    uncompiled.PATCH,
    rendezvous.PATCH,
)


def select(*scopes: Scope) -> tuple[Patch, ...]:
    """The patches of these scopes, in order."""
    return tuple(patch for patch in PATCHES if patch.scope in scopes)


def reports(
    patches: Iterable[Patch], declared: Mapping[str, Declared], source: Source
) -> list[tuple[Patch, TargetReport]]:
    """Every target of every patch, compared with SGLang's source."""
    return [(patch, check_target(path, declared, source)) for patch in patches for path in patch.targets]


@cache
def installed_source() -> Source:
    """The installed SGLang's."""
    return Source({"sglang": folder_of("sglang")})


@cache
def version_problem(installed: str, allowed: bool) -> str:
    """Why nothing of ours may start with this version of SGLang; empty when it may.

    Args:
        allowed: whether the user accepts an untested version.
    """
    known = supported(installed)
    if known is not None and known.status is Status.TESTED:
        return ""
    refused = f"sglang {installed} is not tested with this package. Tested: {tested_versions()}"
    if not allowed:
        return (
            f"{refused}; install one of them (pip install sglang=={SGLANG_VERSION}). To start anyway where "
            f"all that is needed of SGLang is there, set {ALLOW_UNTESTED}=1."
        )
    broken = check_contract(folder_of("sglang")).broken
    if not broken:
        return ""
    named = "".join(f"\n  {each}" for each in broken)
    return f"{refused}. {ALLOW_UNTESTED}=1 does not help, because it lacks what is needed:{named}"


def untested_allowed(environment: Mapping[str, str]) -> bool:
    """Whether the user accepts an untested version."""
    return environment.get(ALLOW_UNTESTED) == "1"


def require_version(environment: Mapping[str, str]) -> None:
    """Refuse an untested version of SGLang, unless the user allows it and the contract holds.

    Raises:
        PatchMismatchError: naming the versions tested, or all that does not hold.
    """
    problem = version_problem(installed_sglang_version(), untested_allowed(environment))
    if problem:
        raise PatchMismatchError(problem)


def check_all(patches: Iterable[Patch]) -> None:
    """Check that the installed SGLang looks as the patches expect. Of an untested version nothing is known.

    Raises:
        PatchMismatchError: naming every patch and target that differs, and the way out.
    """
    known = supported(installed_sglang_version())
    if known is None:
        return
    wrong = [
        mismatch_message(patch, report)
        for patch, report in reports(patches, known.hashes(), installed_source())
        if report.state is not TargetState.OK
    ]
    if wrong:
        raise PatchMismatchError("\n".join(wrong))


def apply_all(patches: Iterable[Patch]) -> None:
    """Apply patches in this process. Hooks take effect when SGLang applies them."""
    for patch in patches:
        patch.apply()


def require_applied(patches: Iterable[Patch]) -> None:
    """Verify that patches are in place in this process.

    Raises:
        PatchMismatchError: naming a patch that is not.
    """
    for patch in patches:
        if not patch.applied():
            raise PatchMismatchError(
                f"patch {patch.name!r} was applied and is not in place; another plugin may have undone it. "
                f"Set SGLANG_PLUGINS=sglang_ext to start without other plugins."
            )

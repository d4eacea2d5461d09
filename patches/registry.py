"""All patches, in the order of application, and what is done with them together."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_ext.patches.base import (
    Patch,
    PatchMismatchError,
    Scope,
    TargetReport,
    TargetState,
    check_patch,
    mismatch_message,
)
from sglang_ext.patches.cpu import (
    allocator as paged_allocator,
)
from sglang_ext.patches.cpu import (
    attention as native_attention,
)
from sglang_ext.patches.cpu import (
    fork as fork_children,
)
from sglang_ext.patches.cpu import (
    kernels as sgl_kernel_stand_in,
)
from sglang_ext.patches.cpu import (
    mla_attention,
    mla_rope,
)
from sglang_ext.patches.cpu import (
    torchvision as torchvision_operators,
)
from sglang_ext.patches.hooks import (
    durability,
    early_send,
    flags,
    load_details,
    migration,
    restarts,
    retraction,
    stages,
    vocabulary,
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

PATCHES: tuple[Patch, ...] = (
    torchvision_operators.PATCH,
    sgl_kernel_stand_in.PATCH,
    paged_allocator.PATCH,
    mla_attention.PATCH,
    mla_rope.PATCH,
    native_attention.PATCH,
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
    role_switch.PATCH,
    weight_updates.PATCH,
    vocabulary.PATCH,
)


def select(*scopes: Scope) -> tuple[Patch, ...]:
    """The patches of these scopes, in order."""
    return tuple(patch for patch in PATCHES if patch.scope in scopes)


def reports(patches: Iterable[Patch]) -> list[tuple[Patch, TargetReport]]:
    """Every target of every patch, compared with the installed SGLang."""
    return [(patch, report) for patch in patches for report in check_patch(patch)]


def check_all(patches: Iterable[Patch]) -> None:
    """Check that the installed SGLang looks as the patches expect.

    Raises:
        PatchMismatchError: naming every patch and target that differs, and the way out.
    """
    wrong = [
        mismatch_message(patch, report)
        for patch, report in reports(patches)
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

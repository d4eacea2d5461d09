"""Norms with a gate, as linear-attention layers have them, without Triton.

Change: on a CPU without AMX, ``RMSNorm`` and ``FusedRMSNormGated`` of SGLang's flash-linear-attention launch
a Triton kernel, which has no driver there. The same is computed here in plain torch.

Why no extension point serves: the classes ask for AMX when they are imported, and know nothing else.

Can go: when SGLang has a torch form for CPUs without AMX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import silu

from sglang_ext.patches.base import Patch, Scope, is_in_place, put_in_place, resolve

_NAME = "gated_norms"
_NORM = "sglang.kernels.ops.attention.fla.layernorm_gated.RMSNorm"
_FUSED = "sglang.kernels.ops.attention.fla.fused_norm_gate.FusedRMSNormGated"

Method = Callable[..., Any]


def gated_norm(norm: Any, rows: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """The norm of rows (rows, size) in groups of the norm's size, times the activated gate of that shape.

    `norm` is SGLang's module: ``weight``, ``eps``, ``activation``, and where the gate and groups are its
    choice ``norm_before_gate`` and ``group_size``.
    """
    activate = torch.sigmoid if norm.activation == "sigmoid" else silu
    found, first = rows.float(), getattr(norm, "norm_before_gate", True)
    factor = None if gate is None else activate(gate.float())
    if factor is not None and not first:
        found = found * factor
    size = getattr(norm, "group_size", None) or rows.shape[-1]
    found = torch.rms_norm(found.unflatten(-1, (-1, size)), (size,), eps=norm.eps).flatten(-2)
    if norm.weight is not None:
        found = found * norm.weight.float()
    if factor is not None and first:
        found = found * factor
    return found.to(rows.dtype)


def _ours(stock: Method) -> Method:
    @functools.wraps(stock)
    def forward(self: Any, x: torch.Tensor, *gate: Any, **options: Any) -> Any:
        if x.device.type != "cpu" or len(gate) > 1 or options.keys() - {"z", "g"}:
            return stock(self, x, *gate, **options)
        return gated_norm(self, x, next(iter((*gate, *options.values())), None))

    return forward


def apply() -> None:
    """Put ours in the place of both classes' ``forward``."""
    if applied():
        return
    for path in (_NORM, _FUSED):
        norm = resolve(path)
        put_in_place(norm, "forward", _ours(norm.forward), _NAME)


def applied() -> bool:
    """Whether both classes call ours."""
    return all(is_in_place(resolve(path), "forward", _NAME) for path in (_NORM, _FUSED))


PATCH = Patch(
    name=_NAME,
    summary="norms with a gate of linear-attention layers run without Triton",
    scope=Scope.CPU,
    targets=(f"{_NORM}.forward", f"{_FUSED}.forward"),
    apply=apply,
    applied=applied,
)

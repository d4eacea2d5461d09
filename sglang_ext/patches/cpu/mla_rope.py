"""Rotary embedding of MLA models without YaRN on a CPU.

Change: MLA models take their rotary embedding from ``get_rope_wrapper``, which on a CPU calls
``get_rope_cpu``, which knows ``deepseek_yarn`` alone and asserts otherwise; a model with plain or other
scaling (``rope_scaling`` null, as in GLM-4.7-Flash and in small test models) does not start.
Every other model takes the same embeddings from ``get_rope``, which runs on a CPU; this calls it.

Why no extension point serves: a plugin hook would, but SGLang applies hooks later than the CPU runtime is
verified, and swallows their failure.

Can go: when ``get_rope_cpu`` falls back to ``get_rope``.
"""

from __future__ import annotations

import functools
from typing import Any

from sglang_ext.patches.base import Patch, Scope, is_in_place, put_in_place, resolve

_NAME = "mla_rope"
_MODULE = "sglang.srt.layers.rotary_embedding.factory"
_YARN = "deepseek_yarn"


def apply() -> None:
    """Wrap ``get_rope_cpu`` in the one module that calls it."""
    if applied():
        return
    module = resolve(_MODULE)
    stock, plain = module.get_rope_cpu, module.get_rope

    @functools.wraps(stock)
    def get_rope_cpu(
        head_size: int,
        rotary_dim: int,
        max_position: int,
        base: int,
        is_neox_style: bool = True,
        rope_scaling: dict[str, Any] | None = None,
        dtype: Any = None,
        partial_rotary_factor: float = 1.0,
        device: str | None = None,
    ) -> Any:
        arguments = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype)
        if rope_scaling is not None and rope_scaling.get("rope_type") == _YARN:
            return stock(*arguments, partial_rotary_factor, device)
        return plain(*arguments, partial_rotary_factor)

    put_in_place(module, "get_rope_cpu", get_rope_cpu, _NAME)


def applied() -> bool:
    """Whether SGLang calls our wrapper."""
    return is_in_place(resolve(_MODULE), "get_rope_cpu", _NAME)


PATCH = Patch(
    name=_NAME,
    summary="MLA models without YaRN take the rotary embedding that all other models take",
    scope=Scope.CPU,
    targets=(
        f"{_MODULE}.get_rope_cpu",
        f"{_MODULE}.get_rope_wrapper",
    ),
    apply=apply,
    applied=applied,
)

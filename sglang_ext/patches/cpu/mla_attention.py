"""Prefill of MLA models with the plain-torch attention backend.

Change: ``--attention-backend torch_native`` reads keys and values from the KV pool alone. SGLang has no
entry for it in the table that chooses how an MLA layer attends, and falls back to Triton's, which computes
the first prefill of a prompt with full keys and values that it passes as arguments and keeps out of the pool:
the model dies in the first forward pass. The entry made here chooses the absorbed form always, in which the
pool's latent is key and value.

Why no extension point serves: the table is one (``AttentionBackendRegistry.register``), and this uses it; but
nothing in SGLang calls for the entry.

Can go: when SGLang registers a handler for ``torch_native``.
"""

from __future__ import annotations

from typing import Any

from sglang_ext.patches.base import Patch, Scope, resolve

_MODULE = "sglang.srt.models.deepseek_common.attention_backend_handler"
_BACKEND = "torch_native"


class Absorbed:
    """The way in which an MLA layer attends: absorbed, whatever the batch."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def __call__(self, attn: Any, forward_batch: Any) -> Any:
        return self._method


def apply() -> None:
    """Register the entry."""
    method = resolve(f"{_MODULE}.AttnForwardMethod").MLA
    resolve(f"{_MODULE}.AttentionBackendRegistry").register(_BACKEND, Absorbed(method))


def applied() -> bool:
    """Whether SGLang finds our entry."""
    handler = resolve(f"{_MODULE}.AttentionBackendRegistry").get_handler(_BACKEND)
    return isinstance(handler, Absorbed)


PATCH = Patch(
    name="mla_attention",
    summary="MLA layers attend in absorbed form with the torch_native attention backend",
    scope=Scope.CPU,
    targets=(
        f"{_MODULE}.AttentionBackendRegistry.get_handler",
        f"{_MODULE}.handle_attention_triton",
    ),
    apply=apply,
    applied=applied,
)

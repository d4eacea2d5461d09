"""Attention of speculative decoding with the attention backend ``torch_native``, for chains of drafts.

Change: SGLang's tables of backends for drafts lack ``torch_native``, so that no server with a draft model
starts on a CPU without AMX, and the backend does not know batches that verify drafts.

- ``DraftBackendFactory._create_backend`` finds ``torch_native`` in its table. Each drafting step has a
  backend of its own, in which a request is longer by the drafts of the steps before. The draft model's pass
  over the verified tokens has the plain backend;
- ``TorchNativeAttnBackend.forward_extend`` gets the lengths of a batch that verifies: SGLang leaves them
  out, and they follow from the number of drafts. A chain of drafts is attended to like any other text.

Trees of drafts (``--speculative-eagle-topk`` above 1) need a mask of their own; they are refused.

Why no extension point serves: the tables are local to two methods; a backend of a name of our own is in
neither.

Can go: when SGLang drafts and verifies with ``torch_native``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from sglang_ext.errors import ConfigError
from sglang_ext.patches.base import Patch, Scope, is_in_place, put_in_place, resolve

_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_CREATE = "_create_backend"
_EXTEND = "forward_extend"
_DECODE = "_run_sdpa_forward_decode"
_NAME = "draft_attention"
_TORCH_NATIVE = "torch_native"
_LIKE = "intel_amx"
"""The CPU backend that both tables have."""


class DraftSteps:
    """The backends of the steps that draft, under the names that SGLang gives such a container.

    The last draft needs no step: it is not fed to the draft model again.
    """

    def __init__(self, runner: Any, steps: int) -> None:
        self.attn_backends = [_step(resolve(_BACKEND)(runner), ahead) for ahead in range(1, steps)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Before the first step of a batch. Each step has slots of its own."""


def _step(backend: Any, ahead: int) -> Any:
    """A backend whose requests are ``ahead`` tokens longer than SGLang says."""
    decode, forward = getattr(backend, _DECODE), backend.forward_decode

    def forward_decode(
        q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *more: Any, **options: Any
    ) -> torch.Tensor:
        backend.init_forward_metadata(forward_batch)  # translates the step's slots to those of windows
        found: torch.Tensor = forward(q, k, v, layer, forward_batch, *more, **options)
        return found

    def run(
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        *more: Any,
        **options: Any,
    ) -> torch.Tensor:
        before = (query, output, k_cache, v_cache, req_to_token, req_pool_indices)
        attended: torch.Tensor = decode(*before, seq_lens + ahead, *more, **options)
        return attended

    setattr(backend, _DECODE, run)
    backend.forward_decode = forward_decode
    return backend


def _create(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def create_backend(
        factory: Any, backend_name: str, backend_map: dict[str, Any], *more: Any, **options: Any
    ) -> Any:
        def torch_native() -> tuple[str, Any]:
            _require_chain(factory.topk)
            runner = factory.draft_model_runner
            if backend_map[_LIKE] == factory._create_intel_amx_decode_backend:
                return _TORCH_NATIVE, DraftSteps(runner, factory.speculative_num_steps)
            return _TORCH_NATIVE, resolve(_BACKEND)(runner)

        return stock(factory, backend_name, {**backend_map, _TORCH_NATIVE: torch_native}, *more, **options)

    return create_backend


def _require_chain(topk: int) -> None:
    if topk != 1:
        raise ConfigError(
            f"{topk} makes trees of drafts; --attention-backend {_TORCH_NATIVE} verifies chains only",
            field="--speculative-eagle-topk",
            hint="Set it to 1, and --speculative-num-draft-tokens to one more than --speculative-num-steps",
        )


def require_chains(server_args: Any) -> None:
    """Refuse trees of drafts before the model is loaded. SGLang names no top-k where nothing is drafted.

    Raises:
        ConfigError: naming ``--speculative-eagle-topk``.
    """
    drafts = getattr(server_args, "speculative_draft_model_path", None) is not None
    if drafts and getattr(server_args, "attention_backend", None) == _TORCH_NATIVE:
        _require_chain(server_args.speculative_eagle_topk or 1)


def _extend(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(stock)
    def forward_extend(
        backend: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *more: Any, **options: Any
    ) -> torch.Tensor:
        if forward_batch.forward_mode.is_target_verify():
            forward_batch = _with_lengths(forward_batch)
        return stock(backend, q, k, v, layer, forward_batch, *more, **options)

    return forward_extend


def _with_lengths(forward_batch: Any) -> Any:
    """A copy of a verifying batch that extends each request by the token to verify and its drafts."""
    _require_chain(forward_batch.spec_info.tree_topk)
    prefixes, new = forward_batch.seq_lens, forward_batch.spec_info.draft_token_num
    extends = copy.copy(forward_batch)
    extends.extend_prefix_lens = prefixes
    extends.extend_seq_lens = torch.full_like(prefixes, new)
    extends.seq_lens = prefixes + new
    return extends


def apply() -> None:
    """Put both in the place of SGLang's."""
    if applied():
        return
    for path, name, ours in ((_FACTORY, _CREATE, _create), (_BACKEND, _EXTEND, _extend)):
        owner = resolve(path)
        put_in_place(owner, name, ours(getattr(owner, name)), _NAME)


def applied() -> bool:
    """Whether SGLang calls ours."""
    return is_in_place(resolve(_FACTORY), _CREATE, _NAME) and is_in_place(resolve(_BACKEND), _EXTEND, _NAME)


PATCH = Patch(
    name=_NAME,
    summary="torch_native drafts and verifies chains of drafts, for speculative decoding on a CPU",
    scope=Scope.CPU,
    targets=(
        f"{_FACTORY}.{_CREATE}",
        f"{_BACKEND}.{_EXTEND}",
        f"{_BACKEND}.{_DECODE}",
    ),
    apply=apply,
    applied=applied,
)

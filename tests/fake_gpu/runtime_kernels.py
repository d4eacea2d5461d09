"""The kernels that SGLang compiles at run time (``load_jit``), in torch, by the names of their modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _halves_of(cache: Any, positions: Any) -> tuple[Any, Any, int]:
    rows = cache[positions.view(-1).long()].float()
    cos, sin = rows.chunk(2, -1)
    return cos[:, None], sin[:, None], int(rows.shape[-1])


def _rotated(halves: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    a, b = halves
    return a * cos - b * sin, b * cos + a * sin


def store_cache(k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any, *_rest: Any) -> None:
    """Rows of K and V to their slots."""
    for rows, pool in ((k, k_cache), (v, v_cache)):
        pool.view(pool.shape[0], -1)[slots] = rows.reshape(rows.shape[0], -1).to(pool.dtype)


def rotary_embedding(
    positions: Any, query: Any, key: Any, head_size: int, cache: Any, is_neox: bool, *_rest: Any
) -> None:
    """Rotate query and key in place; either form."""
    cos, sin, size = _halves_of(cache, positions)
    for tensor in (query, key):
        if tensor is None:
            continue
        heads = tensor.view(positions.numel(), -1, head_size)
        part = heads[..., :size].float()
        if is_neox:
            turned = torch.cat(_rotated(part.chunk(2, -1), cos, sin), -1)
        else:
            turned = torch.stack(_rotated((part[..., ::2], part[..., 1::2]), cos, sin), -1).flatten(-2)
        heads[..., :size] = turned.to(heads.dtype)


def run_rope(query: Any, key: Any, cache: Any, positions: Any, *_rest: Any) -> None:
    """Rotate query and key in place, as NeoX does."""
    cos, sin, size = _halves_of(cache, positions)
    for tensor in (query, key):
        heads = tensor if tensor.dim() == 3 else tensor.view(positions.numel(), -1, size)
        part = heads[..., :size].float()
        heads[..., :size] = torch.cat(_rotated(part.chunk(2, -1), cos, sin), -1).to(heads.dtype)


def run_activation(x: Any, out: Any, name: Any, *_rest: Any) -> None:
    """A gated activation by its name."""
    half = x.shape[-1] // 2
    function = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}[str(name)]
    out.copy_((function(x[..., :half].float()) * x[..., half:].float()).to(out.dtype))


def clamp_position(target: Any, lengths: Any, *_rest: Any) -> None:
    """The position of the newest token of each request."""
    target.copy_(torch.clamp(lengths - 1, min=0))


_KERNELS: dict[str, Callable[..., Any]] = {
    kernel.__name__: kernel
    for kernel in (store_cache, rotary_embedding, run_rope, run_activation, clamp_position)
}


class _Module:
    """A compiled module, as ``load_jit`` returns it."""

    def __init__(self, words: tuple[Any, ...]) -> None:
        self._words = words

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        kernel = _KERNELS.get(name)
        if kernel is not None:
            return kernel

        def missing(*_args: Any, **_kwargs: Any) -> Any:
            raise NotImplementedError(f"the run-time kernel {name} of {self._words} has no form here")

        return missing


def load_jit(*words: Any, **_sources: Any) -> _Module:
    """In place of SGLang's: compiles nothing."""
    return _Module(words)

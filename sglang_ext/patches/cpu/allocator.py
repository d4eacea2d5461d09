"""The paged KV allocator on a CPU: two Triton kernels in plain torch.

Change: with ``--page-size`` above 1, ``PagedTokenToKVPoolAllocator`` launches ``alloc_extend_kernel`` and
``alloc_decode_kernel``; without a GPU driver Triton refuses ("0 active drivers"). The stand-ins here take
the same arguments and write the same slots; SGLang's own methods around them stay.

Why no extension point serves: the allocator's class is chosen inside SGLang by device and model, and a
plugin hook on a Triton kernel would wrap it in a function, which cannot be launched as ``kernel[grid](...)``.

SGLang's ``alloc_extend_naive`` computes the same in torch but asserts when the free list
is empty, where the kernel's caller expects to return None.
Can go: when SGLang allocates pages on a CPU without Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_ext.patches.base import Patch, Scope

if TYPE_CHECKING:
    import torch

_MODULE = "sglang.srt.mem_cache.allocator.paged"


class PlainKernel:
    """A function with a Triton kernel's way of being called: ``kernel[grid](*args)``."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._function

    def __repr__(self) -> str:
        return f"PlainKernel({self._function.__name__})"


def alloc_extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    bs_upper: int,
    page_size: int,
) -> None:
    """Write the slots of a batch of extends into ``out_indices``, requests one after the other.

    A request grows from ``prefix_lens[i]`` to ``seq_lens[i]`` tokens: first the rest of the page that holds
    ``last_loc[i]``, the slot of its last token, then new pages from the front of ``free_pages`` in order of
    requests. All tensors are int64 of shape (batch,), but ``free_pages`` (pages,) and ``out_indices``
    (sum of growths,). Where ``free_pages`` is too short the slots that lack a page are -1; the caller
    sees the shortage by its own count and discards the result.
    """
    import torch

    growth = seq_lens - prefix_lens
    ends = torch.cumsum(growth, 0)
    owner = torch.repeat_interleave(torch.arange(len(growth)), growth)
    position = torch.arange(out_indices.numel()) - (ends - growth)[owner] + prefix_lens[owner]

    first_new_page = (prefix_lens + page_size - 1) // page_size
    pages_after = (seq_lens + page_size - 1) // page_size
    new_pages = pages_after - first_new_page
    pages_before = torch.cumsum(new_pages, 0) - new_pages

    page = position // page_size
    in_old_page = page < first_new_page[owner]
    rank = pages_before[owner] + page - first_new_page[owner]
    have = (rank >= 0) & (rank < free_pages.numel())
    padded = torch.cat((free_pages, free_pages.new_zeros(1)))  # so that an empty list can be indexed
    fresh = padded[torch.where(have, rank, free_pages.numel())] * page_size + position % page_size
    old = last_loc[owner] + 1 + position - prefix_lens[owner]
    out_indices.copy_(torch.where(in_old_page, old, torch.where(have, fresh, -1)))


def alloc_decode(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    bs_upper: int,
    page_size: int,
) -> None:
    """Write one slot per request into ``out_indices``: the next of its page, or the first of a new page.

    ``seq_lens`` counts the new token. Shapes as in :func:`alloc_extend`.
    """
    alloc_extend(seq_lens - 1, seq_lens, last_loc, free_pages, out_indices, bs_upper, page_size)


def apply() -> None:
    """Put the plain kernels in place of Triton's, in the one module that launches them."""
    if applied():
        return
    module: Any = __import__(_MODULE, fromlist=["alloc_extend_kernel"])
    module.alloc_extend_kernel = PlainKernel(alloc_extend)
    module.alloc_decode_kernel = PlainKernel(alloc_decode)


def applied() -> bool:
    """Whether the allocator launches our kernels."""
    module: Any = __import__(_MODULE, fromlist=["alloc_extend_kernel"])
    return isinstance(module.alloc_extend_kernel, PlainKernel) and isinstance(
        module.alloc_decode_kernel, PlainKernel
    )


PATCH = Patch(
    name="paged_allocator",
    summary="the paged KV allocator's two Triton kernels in plain torch, for --page-size above 1",
    scope=Scope.CPU,
    targets=(
        "sglang.kernels.ops.memory.allocator.alloc_extend_kernel",
        "sglang.kernels.ops.memory.allocator.alloc_decode_kernel",
        f"{_MODULE}.PagedTokenToKVPoolAllocator.alloc_extend",
        f"{_MODULE}.PagedTokenToKVPoolAllocator.alloc_decode",
    ),
    apply=apply,
    applied=applied,
)

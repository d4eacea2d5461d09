"""Ends chunks of a prefill where a state is worth keeping (`engine/hybrid/forks.py`), by SGLang's own chunks.

SGLang keeps the state after each chunk, and continues at most one prompt in chunks. Other prompts of the pass
share its budget of tokens; the memory that the rest of the cut prompt needs is set aside from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sglang_ext.engine.hybrid.forks import Forks

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

_SHARED = "_sglang_ext_shared_tokens"
"""Attribute of a request: up to where the KV of its prompt was known when it was last matched."""
_FORKS = "_sglang_ext_forks"
"""Attribute of a request: another one is likely to fork near its prompt's end."""
KEPT_PLACES = "_sglang_ext_kept_places"
"""Attribute of a request: places where others are said to begin like it, in tokens (``hooks.headers``)."""


class Chunks:
    """See the module's docstring. In the scheduler's thread, on all ranks alike."""

    def __init__(self, forks: Forks) -> None:
        self.forks = forks
        self._grid = 1
        """All chunks but a prompt's last have a multiple of so many tokens (``truncation_align_size``)."""
        self.cuts = 0
        """Chunks that ended for a state, each of which cost a forward pass."""

    def __repr__(self) -> str:
        return f"Chunks({self.forks}, cuts={self.cuts})"

    @classmethod
    def of(cls, params: CacheInitParams) -> Chunks | None:
        """For a model; None where it keeps no states, or keeps them on a grid and where prompts fork
        (``extra_buffer``)."""
        pool: Any = getattr(params.req_to_token_pool, "mamba_pool", None)
        if pool is None or params.enable_mamba_extra_buffer or params.disable:
            return None
        allocator: Any = params.token_to_kv_pool_allocator  # of one pool or two
        kvcache = allocator.get_kvcache()
        sizes = getattr(kvcache, "full_kv_pool", kvcache).get_kv_size_bytes()
        kv_bytes = sum(sizes) if isinstance(sizes, tuple) else sizes
        tokens = getattr(allocator, "size_full", allocator.size)
        return cls(Forks.of(pool.get_kv_size_bytes() // pool.size, kv_bytes // tokens))

    def matched(self, req: Req, shared: int) -> None:
        """A request's prompt was looked up.

        Args:
            shared: up to where its KV is there, with or without a state.
        """
        setattr(req, _SHARED, shared)

    @staticmethod
    def shared(req: Req) -> int:
        """As `matched` had it."""
        return int(getattr(req, _SHARED, 0))

    def admit(self, stock: Callable[..., Any], adder: PrefillAdder, req: Req, **about: Any) -> Any:
        """Choose the first chunk of a request: `stock` is SGLang's ``_select_prefill_admission``."""
        from sglang.srt.managers.schedule_policy import AddReqResult

        admission = stock(adder, req, **about)
        if isinstance(admission, AddReqResult):
            return admission
        if about.get("has_chunked_req") or adder.new_chunked_req is not None:
            return AddReqResult.OTHER if admission.is_chunked else admission
        if adder.rem_chunk_tokens is None:
            return admission
        self._grid = about["truncation_align_size"] or 1
        # A prompt that forked from another, or repeats it, is likely to have a successor that does so. And
        # SGLang computes a prompt once before it computes several answers.
        again = self.shared(req) > admission.prefix_len or req.sampling_params.max_new_tokens == 0
        setattr(req, _FORKS, again)
        cut = self._cut(req, admission.prefix_len)
        if cut is None or cut >= admission.prefix_len + admission.extend_len:
            return admission
        self.cuts += 1
        return replace(
            admission,
            extend_len=cut - admission.prefix_len,
            max_new_tokens=_rest(req, cut),
            is_chunked=True,
        )

    def go_on(self, stock: Callable[..., Req | None], adder: PrefillAdder, req: Req) -> Req | None:
        """Choose the next chunk of a request: `stock` is SGLang's ``add_chunked_req``."""
        start = req.prefix_len
        cut = self._cut(req, start)
        if cut is not None:
            limits = [cut - start, adder.chunked_req_limit]
            adder.chunked_req_limit = min(limit for limit in limits if limit is not None)
        left = stock(adder, req)
        if left is not None and cut is not None and cut == req.extend_end:
            self.cuts += 1
            adder.memory_budget.total_offset += _rest(req, cut)
        return left

    def _cut(self, req: Req, start: int) -> int | None:
        if req.skip_radix_cache_insert or req.positional_embed_overrides is not None:
            return None  # its KV enters no tree, or is its own
        prompt = len(req.full_untruncated_fill_ids)
        cut = self.forks.cut(
            start,
            prompt,
            self.shared(req),
            forks=getattr(req, _FORKS, False),
            breakpoints=getattr(req, KEPT_PLACES, ()),
        )
        tokens = 0 if cut is None else (cut - start) // self._grid * self._grid
        return start + tokens if tokens else None

    @staticmethod
    def ends_behind_state(req: Req, up_to: int) -> bool:
        """Whether a prompt that is computed up to its end has a state close enough before it."""
        at_end = up_to == len(req.full_untruncated_fill_ids) and not req.finished() and req.session is None
        return at_end and Forks.replaces_end(req.kv.cache_protected_len, up_to)


def _rest(req: Req, cut: int) -> int:
    """Tokens for which a request needs memory after a cut."""
    from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

    new_tokens: int = min(req.sampling_params.max_new_tokens, CLIP_MAX_NEW_TOKENS)
    return len(req.full_untruncated_fill_ids) - cut + new_tokens

"""SGLang's protocol for storage below the host, which the scheduler follows for each waiting request.

A request waits for KV from a peer (``peer_kv``) first; then the disk is queried for the missing blocks.

enters the queue     prefetch_from_storage       look on the disk, start to bring blocks to DRAM
each pass            check_prefetch_progress     false: others go first
                     pop_prefetch_loaded_span    the span that came, for the request's token counts
admitted             finish_storage_prefetch_admission, or discard_storage_prefetch_accounting
gone                 release_aborted_request
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from sglang_ext.engine.cache.faults import CacheFaults
from sglang_ext.engine.peers.peer_kv import PeerKv
from sglang_ext.engine.tiers.load_report import begin_report
from sglang_ext.engine.tiers.promotion import Wanted
from sglang_ext.engine.tiers.promotions import Promotions
from sglang_ext.keys import encode_tokens
from sglang_ext.patches.adapter.request_rows import is_private
from sglang_ext.tiers import Tier

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle


class StoragePrefetch:
    """The part of the cache that speaks that protocol. Without promotions and peers there is nothing to wait
    for.

    Args:
        promotions: bring blocks from disk; None without a disk.
        peers: fetch; None where that is not possible.
        namespace: where the KV of a tenant's prompts belongs now, from its ``extra_key`` and ``cache_salt``.
        faults: takes note of what fails here.
        priority_sign: -1 where smaller priorities go first (``--schedule-low-priority-values-first``).
    """

    hicache_storage_pass_prefix_keys = False

    def __init__(
        self,
        promotions: Promotions | None,
        peers: PeerKv | None,
        namespace: Callable[[str | None, str | None], Hashable],
        faults: CacheFaults,
        *,
        priority_sign: int = 1,
    ) -> None:
        self.faults = faults
        self._promoting = promotions
        self._fetching = peers
        self._namespace_now = namespace
        self._priority_sign = priority_sign
        self._behind_peers: dict[CacheRequestHandle, Wanted] = {}
        """Requests that wait for KV from a peer, before the disk is queried for them."""
        self._last_matched: Req | None = None

    @property
    def uses_storage(self) -> bool:
        """Whether the scheduler has to follow the protocol at all."""
        return self._promoting is not None or self._fetching is not None

    def matched(self, req: Req) -> None:
        """This request is being matched; SGLang looks for the rest of it next."""
        self._last_matched = req

    def forget_waiting(self) -> None:
        """Forget who waits for a peer: the disk would be looked at in the namespace they were queued in."""
        self._behind_peers.clear()

    def is_backuped(self, node: Any) -> bool:
        """Whether storage may continue ``node``: that is found out when it is looked at."""
        return True

    def get_last_hash_value(self, node: Any) -> None:
        """Names of blocks are ours to make."""

    def prefetch_from_storage(
        self,
        handle: CacheRequestHandle,
        last_host_node: Any,
        new_input_tokens: Any,
        last_hash: str | None = None,
        prefix_keys: list[str] | None = None,
        *,
        matched_prefix_tokens: Any,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        **_: Any,
    ) -> None:
        """Look for what of a prompt is not in memory."""
        if not self.uses_storage or not len(new_input_tokens):
            return
        with self.faults.guard("prefetch_from_storage"):
            self._look_for(handle, matched_prefix_tokens, new_input_tokens, extra_key, cache_salt)

    def _look_for(
        self,
        handle: CacheRequestHandle,
        matched: Any,
        new: Any,
        extra_key: str | None,
        cache_salt: str | None,
    ) -> None:
        # The matched tokens are whole blocks, at whose ends an encoding may be cut.
        key = encode_tokens(matched) + encode_tokens(new)
        wanted = Wanted(self._namespace_now(extra_key, cache_salt), key, request=handle.rid)
        req = self._last_matched  # SGLang has just matched it
        if req is not None and req.cache_request_handle == handle:
            if is_private(req):
                return  # no other request's KV is of its embeddings, and streams are not matched again
            priority = (req.priority or 0) * self._priority_sign
            wanted = dataclasses.replace(wanted, priority=priority, report=begin_report(req, Tier.DISK))
        if self._fetching is not None and self._fetching.waits(wanted.namespace, wanted.key):
            self._behind_peers[handle] = wanted
        elif self._promoting is not None:
            self._promoting.begin(handle, wanted)

    def check_prefetch_progress(self, handle: CacheRequestHandle) -> bool:
        with self.faults.guard("check_prefetch_progress"):
            return self._is_ready(handle)
        return True

    def _is_ready(self, handle: CacheRequestHandle) -> bool:
        wanted = self._behind_peers.get(handle)
        if wanted is not None:
            if self._fetching is not None and self._fetching.waits(wanted.namespace, wanted.key):
                # A span that a peer computes now comes in front of the forward pass.
                return self._fetching.fetches.starts(handle, wanted.namespace, wanted.key)
            del self._behind_peers[handle]
            if self._promoting is not None:
                self._promoting.begin(handle, wanted)
        return self._promoting is None or self._promoting.ready(handle)

    def pop_prefetch_loaded_span(self, handle: CacheRequestHandle) -> tuple[int, int | None]:
        """Tokens that came from disk, and the position of the first. They stay locked until admission."""
        brought = self._promoting.brought(handle) if self._promoting is not None else None
        return (0, None) if brought is None else (brought.tokens, brought.start)

    def finish_storage_prefetch_admission(
        self, handle: CacheRequestHandle, fulfilled_tokens: int, reason: str | None
    ) -> None:
        self._release(handle)

    def discard_storage_prefetch_accounting(self, handle: CacheRequestHandle) -> None:
        self._release(handle)

    def release_aborted_request(self, handle: CacheRequestHandle) -> None:
        self._release(handle)

    def _release(self, handle: CacheRequestHandle) -> None:
        self._behind_peers.pop(handle, None)
        if self._fetching is not None:
            self._fetching.fetches.release(handle)
        if self._promoting is not None:
            self._promoting.release(handle)

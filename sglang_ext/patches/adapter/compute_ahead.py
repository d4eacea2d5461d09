"""Computes the uncached rest of announced prompts while the instance is idle.

With ``--kv-advisory-compute``. After a prefetch has brought up what there is, the rest is computed as
requests of our own that ask for one token: a piece of the prompt each, never more than a prefill chunk, and
the next one only when the instance is idle again. So a request that comes meanwhile waits for one piece at
most, nothing needs to be aborted, and the KV computed until then is cached like other KV, for that request
too. Computed KV displaces only KV that is not announced, or is announced with a lower priority.

Tenants share it: of equal priorities, the next piece is computed for the tenant with the fewest tokens
computed since it began to wait, and when all places are taken, the tenant with the most loses its last one.

Decided alike on all ranks: from the scheduler's queues, which they have alike, and their equal trees. The
scheduler's thread only.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Protocol

from sglang_ext.engine.planners import Planner
from sglang_ext.engine.prefetch.advice import OnResult
from sglang_ext.engine.prefetch.hbm_prefetch import PrefetchEnd, Prefetcher, PrefetchResult
from sglang_ext.engine.rank_metrics import RankMetrics
from sglang_ext.engine.tiers.hbm_tier import HbmTier
from sglang_ext.engine.tiers.retention import most_of, owner_of, path_of
from sglang_ext.keys import TOKEN_BYTES, decode_tokens
from sglang_ext.patches.adapter.own_requests import Running
from sglang_ext.radix_global import Holder, RadixTree

logger = logging.getLogger(__name__)

MOST_WAITING: Final = 64


class Host(Protocol):
    """The scheduler, as it is used here."""

    def idle(self) -> bool:
        """Whether nothing runs and nothing waits. The same on all ranks in the same pass."""

    def start(
        self, name: str, tokens: list[int], extra_key: str | None, cache_salt: str | None
    ) -> Running | None:
        """Put a request for one token into the queue; None when the scheduler does not take it."""

    @property
    def piece_tokens(self) -> int:
        """Most tokens of a request of ours."""


@dataclass(eq=False)
class _Job:
    """The rest of a hint's prompt, still to be computed. brought: tokens, by the prefetch before it."""

    id: str
    key: bytes
    extra_key: str | None
    cache_salt: str | None
    namespace: Hashable
    priority: int
    brought: int
    computed: int = 0
    """Tokens, by requests of ours."""

    @property
    def owner(self) -> Hashable:
        """Its tenant."""
        return owner_of(self.namespace)


class ComputeAhead(Planner):
    """See the module's docstring.

    Args:
        prefetcher: knows which hints live.
        namespace: where the KV of a tenant's prompts belongs now, from its ``extra_key`` and ``cache_salt``.
        on_result: replies to routers, in rank 0.
    """

    def __init__(
        self,
        tree: RadixTree,
        hbm: Holder,
        hbm_tier: HbmTier,
        prefetcher: Prefetcher,
        namespace: Callable[[str | None, str | None], Hashable],
        host: Host,
        on_result: OnResult = lambda result: None,
    ) -> None:
        self._tree = tree
        self._hbm = hbm
        self._hbm_tier = hbm_tier
        self._prefetcher = prefetcher
        self._namespace = namespace
        self._host = host
        self._on_result = on_result
        self._jobs: list[_Job] = []
        """The highest priority first, then the oldest."""
        self._served: dict[Hashable, int] = {}
        """Tokens computed for each tenant that waits. A tenant that begins to wait starts from the least."""
        self._running: tuple[_Job, int, Running] | None = None
        """The job with a piece under way, and how many blocks HBM had of it before."""
        self._ended: deque[PrefetchResult] = deque()
        self._names = 0
        self.computed_blocks = 0
        """Computed ahead, since the start."""

    # -- asking ---------------------------------------------------------------------------------

    def takes(
        self,
        result: PrefetchResult,
        tokens: bytes,
        extra_key: str | None,
        cache_salt: str | None,
        priority: int,
    ) -> bool:
        """A prefetch has ended: whether there is something left to compute, which is then done here."""
        step = self._tree.block_size * TOKEN_BYTES
        key = tokens[: len(tokens) // step * step]
        missing = len(key) // TOKEN_BYTES - result.tokens
        if result.end is not PrefetchEnd.DONE or missing <= 0 or not self._prefetcher.expects(result.id):
            return False
        self.cancel(result.id)
        job = _Job(
            result.id,
            key,
            extra_key,
            cache_salt,
            self._namespace(extra_key, cache_salt),
            priority,
            result.brought,
        )
        place = next((at for at, each in enumerate(self._jobs) if each.priority < priority), len(self._jobs))
        self._jobs.insert(place, job)
        self._served.setdefault(job.owner, min(self._served.values(), default=0))
        if len(self._jobs) <= MOST_WAITING:
            return True
        most = most_of(each.namespace for each in self._jobs)
        weakest = [each for each in self._jobs if each.owner == most][-1]
        if weakest is not job:
            self._end(weakest, PrefetchEnd.DROPPED)
            return True
        self._forget(job)
        return False

    def cancel(self, id: str) -> None:
        """Compute no more for ``id``. A piece under way ends by itself."""
        for job in self._jobs:
            if job.id == id:
                self._end(job, PrefetchEnd.CANCELLED)
                return

    def take_ended(self) -> list[PrefetchResult]:
        """Those that have ended since this was asked last."""
        ended = list(self._ended)
        self._ended.clear()
        return ended

    # -- going on -------------------------------------------------------------------------------

    def each_pass(self) -> None:
        """Take the next step, and report the prompts that have ended. Once per pass."""
        self.drain()
        for result in self.take_ended():
            self._on_result(result)

    def drain(self) -> None:
        """Begin the next piece, if the last one has ended and the instance is idle."""
        if self._running is not None:
            job, before, running = self._running
            if not (running.finished() or self._host.idle()):  # an aborted one is gone without a trace
                return
            self._running = None
            gained = max(0, self._reached(job) - before)
            job.computed += gained * self._tree.block_size
            self.computed_blocks += gained
            self._prefetcher.retention.look(job.id)
            if not gained and job in self._jobs:
                self._end(job, PrefetchEnd.GIVEN_UP)  # refused, aborted, or already evicted
        while (first := self._turn()) is not None and not self._prefetcher.expects(first.id):
            self._end(first, PrefetchEnd.CANCELLED)
        if first is not None and self._host.idle():
            self._next(first)

    def _turn(self) -> _Job | None:
        """The job whose next piece is computed next."""
        return min(self._jobs, key=lambda job: (-job.priority, self._served[job.owner]), default=None)

    def _next(self, job: _Job) -> None:
        block = self._tree.block_size
        reached = self._reached(job) * block
        whole = len(job.key) // TOKEN_BYTES
        if reached >= whole:
            self._end(job, PrefetchEnd.COMPUTED)
            return
        piece = min(whole - reached, max(block, self._host.piece_tokens // block * block))
        # One block for the token that is asked for.
        needed = piece // block + 1
        self._hbm_tier.make_room(needed, priority=job.priority)
        if self._hbm_tier.free_blocks < needed:
            self._end(job, PrefetchEnd.NO_ROOM)
            return
        self._names += 1
        tokens = decode_tokens(job.key[: (reached + piece) * TOKEN_BYTES]).tolist()
        running = self._host.start(f"hint_{job.id}_{self._names}", tokens, job.extra_key, job.cache_salt)
        if running is None:
            self._end(job, PrefetchEnd.GIVEN_UP)
        else:
            self._running = (job, reached // block, running)
            self._served[job.owner] += piece

    def _reached(self, job: _Job) -> int:
        """Blocks of the prompt's beginning that HBM has."""
        reached = 0
        for end, node in path_of(self._tree, job.namespace, job.key):
            if self._hbm not in node.placements:
                break
            reached = end
        return reached

    def _end(self, job: _Job, end: PrefetchEnd) -> None:
        self._forget(job)
        block = self._tree.block_size
        self._ended.append(
            PrefetchResult(job.id, end, self._reached(job) * block, job.brought, computed=job.computed)
        )

    def _forget(self, job: _Job) -> None:
        self._jobs.remove(job)
        if all(each.owner != job.owner for each in self._jobs):
            del self._served[job.owner]

    @property
    def busy(self) -> bool:
        """Whether the next passes of an idle scheduler have something to do."""
        return bool(self._jobs) or self._running is not None

    def show(self, metrics: RankMetrics) -> None:
        metrics.count_events("announced_blocks", {"computed": self.computed_blocks})

    def drop_in_flight(self) -> None:
        """Compute nothing more: the cache is about to be emptied."""
        while self._jobs:
            self._end(self._jobs[0], PrefetchEnd.DROPPED)

    def __repr__(self) -> str:
        return f"ComputeAhead({len(self._jobs)} prompts, {self.computed_blocks} blocks so far)"

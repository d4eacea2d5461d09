"""Reads the blocks of a prompt that this rank lacks from a peer's DRAM, by name in each component.

Both sides compute the names of a prompt's pages from its tokens and tenant. The peer answers which names it
has (`exports`). This rank chooses the longest resume point that its own blocks and those of the peer allow
together, and reserves memory for all blocks that it needs, in every component or in none. They are entered
once all have verified. Until the request is admitted, or for `KEPT_SECONDS`, none of them is given up.

All methods run in the scheduler's thread. Every rank reads its part from the peer's same rank, and takes each
step once all can. Ranks may have different blocks, so that a resume point of one is none of another's. They
compare the least and the greatest of their choices; while these differ, each chooses again, not beyond the
least. It is read if any rank gains by it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Final, Protocol

import numpy as np

from sglang_ext.engine.hybrid.components import Component, Flags, resume_points
from sglang_ext.engine.hybrid.exports import NamesOf, pool_name
from sglang_ext.engine.hybrid.paths import Name
from sglang_ext.engine.hybrid.store import HybridStore, StoredComponent
from sglang_ext.engine.movers.mover import BlockIds
from sglang_ext.engine.moves.move import State
from sglang_ext.engine.moves.moves import Moves
from sglang_ext.engine.moves.sources import FromPeer
from sglang_ext.engine.peers.fetch_link import Job
from sglang_ext.engine.peers.fetch_results import FetchEnd
from sglang_ext.engine.peers.fetches import (
    MOST_FETCHES,
    FetchedSpan,
    Fetching,
    FetchPlanner,
    Reads,
    Wish,
)
from sglang_ext.engine.ranks import NOT_YET, Ranks
from sglang_ext.keys import BLOCK_KEY_BYTES
from sglang_ext.mempool.ledger import Committed
from sglang_ext.wire import unpack_ids

SHARE: Final = 4
"""At most ``1 / SHARE`` of DRAM is reserved for fetches at a time: for each component as many bytes, and one
block in any case."""
KEPT_SECONDS: Final = 10.0
"""How long blocks that came stay locked for a request that is not admitted."""


class NamedReads(Reads, Protocol):
    """The methods of ``fetch_link.FetchLink`` that fetching uses."""

    def read_parts(self, job: Job, parts: Mapping[str, tuple[BlockIds, BlockIds]], blocks: int) -> None: ...


@dataclass(eq=False)
class _Part:
    """One component's blocks that a resume point needs. held: in DRAM. ids: for those on their way. All are
    locked. path: the names of all, in order."""

    part: StoredComponent
    held: BlockIds
    names: Sequence[Name]
    ids: BlockIds
    path: Sequence[Name]

    def unlock(self) -> None:
        self.part.memory.unlock(self.held)
        self.part.memory.unlock(self.ids)


@dataclass(eq=False, kw_only=True)
class _NamedSpan(FetchedSpan):
    """A span on its way. most: some rank has no resume point beyond so many blocks."""

    most: int
    parts: list[_Part] = field(default_factory=list)


@dataclass(eq=False)
class _Kept:
    """Blocks that a request waits for, until a time on this rank's clock."""

    namespace: Hashable
    key: bytes
    parts: list[_Part]
    until: float


class NamedFetches(FetchPlanner):
    """See the module's docstring.

    Args:
        ranks: agree on when blocks are kept no longer.
        least_blocks: a fetch must lengthen a prompt that can be resumed by as many.
        kept_seconds: how long blocks that came stay locked for a request that is not admitted.
    """

    _link: NamedReads

    def __init__(
        self,
        store: HybridStore,
        link: NamedReads,
        moves: Moves,
        ranks: Ranks,
        names: NamesOf,
        *,
        least_blocks: int,
        kept_seconds: float = KEPT_SECONDS,
    ) -> None:
        super().__init__(link, moves, store.block_tokens)
        self._store = store
        self._least_blocks = least_blocks
        self._kept_seconds = kept_seconds
        self._names = lru_cache(maxsize=MOST_FETCHES)(names)
        self._kept: list[_Kept] = []
        ranks.add(self)

    def begin(self, wish: Wish) -> None:
        if wish.for_others or any(span.layered for span in wish.spans):
            self._decline(wish, FetchEnd.REFUSED)
        else:
            super().begin(wish)

    def _held(self, wish: Wish) -> int:
        return 0  # ranks may have different blocks, and go on alike: `offer` finds out

    def _new_span(self, fetch: Fetching) -> _NamedSpan:
        return _NamedSpan(planner=self, fetch=fetch, whole=True, most=len(fetch.wish.key) // self._step)

    # -- choosing -----------------------------------------------------------------------------------

    def _longest(self, names: Sequence[Name], offered: Mapping[Component, Flags], most: int) -> int:
        """The longest resume point that is not beyond `most` blocks."""
        held = {component: part.memory.held(names) for component, part in self._store.parts.items()}
        held = {component: flags | offered.get(component, False) for component, flags in held.items()}
        points = np.flatnonzero(resume_points(held, self._block_tokens))
        return int(points[points <= most][-1])

    def offer(self, move: _NamedSpan) -> Sequence[int]:
        """The longest resume point with the peer's blocks; the same with the other sign, so that the least
        number of all ranks shows the greatest; and so the blocks by which it is longer than without them."""
        job = move.fetch.job
        if job.offered is None:
            return (NOT_YET, -NOT_YET, 0)
        names = self._names(move.fetch.wish.namespace, move.fetch.wish.key)
        offered = {
            component: np.fromiter((name in places for name in names), np.bool_, len(names))
            for component, places in self._places(job).items()
        }
        end = self._longest(names, offered, move.most)
        return (end, -end, self._longest(names, {}, move.most) - end)

    def _places(self, job: Job) -> dict[Component, dict[Name, int]]:
        """The place of each name in the peer's offer of each component; empty where it offers none."""
        size, found = BLOCK_KEY_BYTES, {}
        for component in () if job.why else self._store.parts:
            offer = job.offers[pool_name(component)]
            names = [offer.names[at : at + size] for at in range(0, len(offer.names), size)]
            if len(names) != len(unpack_ids(offer.blocks)):
                return {}
            found[component] = {name: place for place, name in enumerate(names)}
        return found

    def offered(self, move: _NamedSpan, agreed: Sequence[int]) -> None:
        least, greatest, gain = agreed[0], -agreed[1], -agreed[2]
        if least == NOT_YET:
            return
        if least != greatest:
            move.most = least
        elif gain < self._least_blocks:
            self._refused(move, FetchEnd.of(move.fetch.job.why or "needless"), go_on=True)
        else:
            self._read(move, least)

    # -- reading ------------------------------------------------------------------------------------

    def _read(self, move: _NamedSpan, end: int) -> None:
        """Reserve memory for all that a resume after so many blocks needs, and read the missing blocks."""
        job, move.blocks = move.fetch.job, end
        wanted = self._reserve(move, self._names(move.fetch.wish.namespace, move.fetch.wish.key)[:end])
        if wanted is None:
            # The other ranks learn it as the end of a read of which nothing came.
            self._unlock(move)
            self._link.drop(job)
            job.why, job.read = FetchEnd.NO_ROOM.value, 0
        else:
            self._link.read_parts(job, wanted, end)
        wait, cancel = partial(self._link.wait, job), partial(self._link.cancel, job)
        self._moves.fill(move, None, FromPeer(job, end, wait, cancel))

    def _reserve(
        self, move: _NamedSpan, names: Sequence[Name]
    ) -> dict[str, tuple[BlockIds, BlockIds]] | None:
        """Lock or reserve the blocks for a resume after these.

        Returns:
            for each pool that lacks some, places in the peer's offer, and the blocks to fill from there. None
            where memory is too little.
        """
        places, wanted = self._places(move.fetch.job), {}
        for part in self._store.parts.values():
            found = self._reserve_part(part, self._store.needed(part.component, names))
            if found is None:
                return None
            move.parts.append(found)
            known = places.get(part.component, {})  # of a peer that refuses, none are needed
            if any(name not in known for name in found.names):
                return None  # given up here since it was found
            if len(found.ids):
                where = np.array([known[name] for name in found.names], np.int64)
                wanted[pool_name(part.component)] = where, found.ids
        return wanted

    def _reserve_part(self, part: StoredComponent, names: Sequence[Name]) -> _Part | None:
        memory = part.memory
        lacking = [name for name in names if name not in memory]
        most = max(1, memory.arena.n_blocks // (SHARE * len(self._store.parts)))
        taken = sum(len(each.ids) for each in self._under_way() if each.part is part)
        if lacking and taken + len(lacking) > most:
            return None
        held = memory.take([name for name in names if name in memory])
        assert held is not None
        ids = memory.reserve(len(lacking))
        if ids is None:
            memory.unlock(held)
            return None
        return _Part(part, held, lacking, ids, names)

    def _under_way(self) -> list[_Part]:
        parts = [part for kept in self._kept for part in kept.parts]
        for span in self._active.values():
            if isinstance(span, _NamedSpan):
                parts += span.parts
        return parts

    @staticmethod
    def _unlock(of: _NamedSpan | _Kept) -> None:
        """Nothing writes to the blocks: release those that have no name, and the locks on the others."""
        for part in of.parts:
            part.unlock()
        of.parts = []

    def ended(self, move: _NamedSpan, blocks: int, done: Committed | None) -> None:
        """Enter the blocks, if all of them have verified on every rank, and end the span."""
        fetch = move.fetch
        if move.state is not State.LANDED:
            self._unlock(move)
            if move.state is not State.CANCELLED:
                self._span_over(fetch, FetchEnd.of(fetch.job.why), go_on=True)
            return
        before = self._longest(self._names(fetch.wish.namespace, fetch.wish.key)[:blocks], {}, blocks)
        for each in move.parts:
            each.part.memory.enter(each.names, each.ids, each.path)
            if each.part.disk is not None:
                each.part.disk.write(each.names, each.ids)
            self.counters.fetched_blocks += len(each.ids)
        until = self._clock.monotonic() + self._kept_seconds
        self._kept.append(_Kept(fetch.wish.namespace, fetch.wish.key, move.parts, until))
        self._span_over(fetch, FetchEnd.DONE, blocks - before, go_on=True)

    # -- blocks that came ---------------------------------------------------------------------------

    def admitted(self, namespace: Hashable, key: bytes) -> None:
        """A request with this prompt is admitted or is gone: unlock the blocks that came for it."""
        for kept in list(self._kept):
            # A request is not matched up to its last token.
            fits = key.startswith(kept.key) or (key and kept.key.startswith(key))
            if kept.namespace == namespace and fits:
                self._drop(kept)

    def _drop(self, kept: _Kept) -> None:
        self._kept.remove(kept)
        self._unlock(kept)

    def propose(self) -> Sequence[int]:
        """For each prompt whose blocks are kept, whether that has lasted too long."""
        now = self._clock.monotonic()
        return [int(now > kept.until) for kept in self._kept]

    def act(self, agreed: Sequence[int]) -> None:
        """Unlock blocks whose time is over on every rank."""
        for kept, over in zip(list(self._kept), agreed, strict=False):
            if over:
                self._drop(kept)

    def settle(self) -> None:
        super().settle()
        for kept in list(self._kept):
            self._drop(kept)

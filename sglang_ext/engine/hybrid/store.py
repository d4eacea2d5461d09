"""The memory below HBM of one rank, for a model whose cached state has several components.

SGLang's own tree (`UnifiedRadixCache`) keeps the rules of HBM for such models. Here are the tiers below it:
for each component, blocks of a page by name, in DRAM and on disk. A prefix can be resumed after a page where
every component has what `components.resume_points` asks for, each in DRAM.

save      when the tree takes new nodes: from HBM to DRAM, and on to disk
promote   when a request enters the queue: from disk to DRAM, the blocks that a longer resume needs
lookup    in each match: the lengths after which a prefix can be resumed
load      when the request is admitted: from DRAM to HBM; the forward pass waits for it

KV that is in DRAM has been verified, and stays there while it is loaded: a load cannot fail.

Each rank has DRAM and disks of its own, whose blocks may differ: a disk fails, DRAM is full. The ranks
agree on what changes SGLang's trees: the saves that have ended, and the promotions that have arrived; and
SGLang intersects the lengths that they look up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from sglang_ext.engine.hybrid.components import FULL, Component, Flags, resume_points
from sglang_ext.engine.hybrid.disk import ComponentDisk, Read
from sglang_ext.engine.hybrid.memory import ComponentMemory, Dram
from sglang_ext.engine.hybrid.paths import Name
from sglang_ext.engine.movers.copies import Copies
from sglang_ext.engine.movers.mover import NOTHING_TO_WAIT_FOR, BlockIds, of_blocks
from sglang_ext.engine.ranks import Ranks


@dataclass(frozen=True, eq=False)
class Rows:
    """Blocks of a component and their places in HBM.

    names: of each block, in the order of the prefix. slots: rows of the component's pool, those of each block
    side by side, as its mover takes them.
    """

    names: Sequence[Name]
    slots: Any


@dataclass(eq=False)
class StoredComponent:
    """One component: its memory, the copies between that and HBM, and its disk.

    copies: of this rank alone; each rank copies the blocks that its own memory lacks.
    """

    component: Component
    memory: ComponentMemory
    copies: Copies
    disk: ComponentDisk | None = None


@dataclass(frozen=True, eq=False)
class _Queued:
    """A load that waits for its batch. ids: locked."""

    part: StoredComponent
    slots: Any
    ids: BlockIds


@dataclass(eq=False)
class _Save:
    """Copies of one node to DRAM. All blocks are locked until the last copy has ended: a state is worth
    nothing before its KV has come."""

    copying: int = 0
    locked: list[tuple[StoredComponent, BlockIds]] = field(default_factory=list)

    def ended(self) -> None:
        """One copy less is under way."""
        self.copying -= 1
        if not self.copying:
            for part, ids in self.locked:
                part.memory.unlock(ids)


@dataclass(eq=False)
class Promotion:
    """Blocks that a waiting request needs from disk. Those that it needs and DRAM has are locked meanwhile.

    blocks: by so many the prefix gets longer that can be resumed from DRAM.
    """

    blocks: int = 0
    reads: list[tuple[StoredComponent, Read]] = field(default_factory=list)
    locked: list[tuple[StoredComponent, BlockIds]] = field(default_factory=list)
    over: bool = False

    @property
    def arrived(self) -> bool:
        return all(read.load.over for _, read in self.reads)


@dataclass
class HybridCounters:
    """Blocks of all components, since the start."""

    saved: int = 0
    skipped: int = 0
    """Not saved, because too much of DRAM was locked."""
    loaded: int = 0
    promoted: int = 0
    unreadable: int = 0
    """Found on disk, and not read."""


class HybridStore:
    """See the module's docstring. In the scheduler's thread.

    Args:
        dram: of all components.
        parts: the components, `FULL` first.
        block_tokens: tokens of a block.
        ranks: agree on the saves and promotions that have ended.
        least_tokens: a promotion must lengthen a prefix by as many.
    """

    def __init__(
        self,
        dram: Dram,
        parts: Sequence[StoredComponent],
        block_tokens: int,
        ranks: Ranks,
        *,
        least_tokens: int = 0,
    ) -> None:
        if parts[0].component != FULL:
            raise ValueError("the first component must be `FULL`")
        self.dram = dram
        self.parts = {part.component: part for part in parts}
        self.block_tokens = block_tokens
        self.ranks = ranks
        self.counters = HybridCounters()
        self.least_blocks = -(-max(1, least_tokens) // block_tokens)
        self._saves: deque[_Save] = deque()
        self._saves_ended = 0
        """How many of the oldest have ended on every rank."""
        self._forgotten = 0
        """Saves whose end the caller has taken note of."""
        self._queued: dict[Hashable, list[_Queued]] = {}
        self._loads: dict[int, list[tuple[StoredComponent, int]]] = {}
        """For each batch that loads something, the tickets that its forward pass waits for."""
        self._batches = 0
        self._promotions: dict[Hashable, Promotion] = {}
        ranks.add(self)

    def __repr__(self) -> str:
        return f"HybridStore({self.dram}, saving={len(self._saves)}, {self.counters})"

    @property
    def has_disk(self) -> bool:
        return any(part.disk is not None for part in self.parts.values())

    # -- from HBM to DRAM -----------------------------------------------------------------------------

    def save(self, rows: Mapping[Component, Rows]) -> None:
        """Copy the blocks that DRAM lacks. Their rows must not change until `ended_saves` counts this."""
        save = _Save(1)  # the last copy may end before this has
        self._saves.append(save)
        for component, each in rows.items():
            self._save(save, self.parts[component], each)
        save.ended()

    def _save(self, save: _Save, part: StoredComponent, rows: Rows) -> None:
        lacking = np.flatnonzero(~part.memory.held(rows.names))
        if not len(lacking):
            return
        ids = part.memory.reserve(len(lacking))
        if ids is None:
            self.counters.skipped += len(lacking)
            return
        names = [rows.names[position] for position in lacking.tolist()]
        save.copying += 1

        def copied() -> None:
            self.counters.saved += len(names)
            part.memory.enter(names, ids, rows.names)
            if part.disk is not None:
                part.disk.write(names, ids)
            save.locked.append((part, ids))
            save.ended()

        part.copies.write(of_blocks(rows.slots, lacking, len(rows.names)), ids, copied)

    @property
    def ended_saves(self) -> int:
        """How many of the oldest saves have ended, on every rank."""
        return self._saves_ended

    def _saves_ended_here(self) -> int:
        return next((count for count, save in enumerate(self._saves) if save.copying), len(self._saves))

    def forget_save(self) -> None:
        """The caller has taken note of the end of the oldest save."""
        self._saves.popleft()
        self._saves_ended -= 1
        self._forgotten += 1

    @property
    def saves(self) -> int:
        """How many saves have begun, since the start."""
        return self._forgotten + len(self._saves)

    def saved(self, count: int) -> bool:
        """Whether the first so many saves have ended, on every rank."""
        return self._forgotten + self.ended_saves >= count

    @property
    def saving(self) -> bool:
        """Whether copies to DRAM are under way, or their end was not taken note of."""
        return bool(self._saves)

    def end_copies(self) -> None:
        """Wait for every copy under way. On all ranks in the same pass."""
        for part in self.parts.values():
            part.copies.settle()
        self._saves_ended = len(self._saves)

    # -- lookup ---------------------------------------------------------------------------------------

    def lookup(self, names: Sequence[Name], user: Hashable = None) -> list[int]:
        """After how many blocks a prefix can be resumed from DRAM.

        Args:
            names: of the blocks that follow the prefix in HBM, which has all that a resume there needs.
            user: the request; None for another one at each call.

        Returns:
            The numbers of blocks, ascending, without 0.
        """
        points = self._points(names, on_disk=False)
        if points:
            self.dram.paths.used(names[points[-1] - 1], user)
        return points

    def used_in_hbm(self, end: Name, user: Hashable) -> None:
        """A request resumes from HBM after this block, which DRAM may have as well."""
        self.dram.paths.used(end, user)

    def follows(self, before: Name, first: Name) -> None:
        """The first block of a save, made or to come, follows this block."""
        self.dram.paths.expect(before, first)

    def leading(self, names: Sequence[Name]) -> int:
        """How many of the first of these blocks have their KV in DRAM, with or without a state."""
        return self._leading(self.parts[FULL], names, on_disk=False)

    def _points(self, names: Sequence[Name], *, on_disk: bool) -> list[int]:
        names = names[: self._leading(self.parts[FULL], names, on_disk=on_disk)]
        held = {
            component: np.ones(len(names), np.bool_)
            if component == FULL
            else self._held(part, names, on_disk=on_disk)
            for component, part in self.parts.items()
        }
        points: list[int] = np.flatnonzero(resume_points(held, self.block_tokens))[1:].tolist()
        return points

    @staticmethod
    def _leading(part: StoredComponent, names: Sequence[Name], *, on_disk: bool) -> int:
        """How many of the first blocks a component has."""
        lacking = np.flatnonzero(~part.memory.held(names))
        if on_disk and part.disk is not None and len(lacking):
            lacking = lacking[part.disk.leading([names[position] for position in lacking.tolist()]) :]
        return int(lacking[0]) if len(lacking) else len(names)

    @staticmethod
    def _held(part: StoredComponent, names: Sequence[Name], *, on_disk: bool) -> Flags:
        held = part.memory.held(names)
        if on_disk and part.disk is not None:
            lacking = np.flatnonzero(~held)
            held[lacking] = part.disk.held([names[position] for position in lacking.tolist()])
        return held

    # -- from disk to DRAM ----------------------------------------------------------------------------

    def promote(self, handle: Hashable, names: Sequence[Name], priority: int = 0) -> None:
        """Begin to read what lets a prefix be resumed later than DRAM does. On all ranks in the same pass.

        Args:
            handle: the request's.
            names: as for `lookup`.
        """
        self.release(handle)
        self._promotions[handle] = self._promotion(names, priority)

    def _promotion(self, names: Sequence[Name], priority: int) -> Promotion:
        now, later = self._points(names, on_disk=False), self._points(names, on_disk=True)
        start, end = (now or [0])[-1], (later or [0])[-1]
        promotion = Promotion(end - start)
        if promotion.blocks < self.least_blocks or not self._read(promotion, names[:end], priority):
            self._unlock(promotion)
            return Promotion()
        return promotion

    def _read(self, promotion: Promotion, names: Sequence[Name], priority: int) -> bool:
        """Lock or begin to read all that a resume after these blocks needs; False where DRAM has no room."""
        wanted = [(part, self.needed(part.component, names)) for part in self.parts.values()]
        for part, needed in wanted:
            ids = part.memory.take([name for name in needed if name in part.memory])
            assert ids is not None
            promotion.locked.append((part, ids))
        for part, needed in wanted:
            lacking = [name for name in needed if name not in part.memory]
            if lacking:
                read = None if part.disk is None else part.disk.read(lacking, priority, needed)
                if read is None:
                    return False
                promotion.reads.append((part, read))
        return True

    def needed(self, component: Component, names: Sequence[Name]) -> Sequence[Name]:
        """The blocks of a component that a resume at the end of these needs."""
        needed = component.coverage.blocks(self.block_tokens)
        return names if needed is None else names[-needed:]

    def ready(self, handle: Hashable) -> bool:
        """Whether nothing is read for a request any more, on every rank."""
        promotion = self._promotions.get(handle)
        return promotion is None or promotion.over

    def promoted(self, handle: Hashable) -> Promotion | None:
        """The promotion of a request, also when it is over."""
        return self._promotions.get(handle)

    def release(self, handle: Hashable) -> None:
        """A request needs its promotion no more."""
        promotion = self._promotions.pop(handle, None)
        if promotion is not None:
            self._unlock(promotion)

    @staticmethod
    def _unlock(promotion: Promotion) -> None:
        for part, read in promotion.reads:
            assert part.disk is not None
            part.disk.release(read)
        for part, ids in promotion.locked:
            part.memory.unlock(ids)

    def propose(self) -> Sequence[int]:
        """How many of the oldest saves have ended here; and for each promotion under way, in the order of the
        requests, whether it has arrived here."""
        for part in self.parts.values():
            part.copies.look()
        waiting = [int(promotion.arrived) for promotion in self._promotions.values() if not promotion.over]
        return [self._saves_ended_here(), *waiting] if self._saves or waiting else ()

    def act(self, agreed: Sequence[int]) -> None:
        """Take over the saves and promotions that have ended on every rank."""
        waiting = [promotion for promotion in self._promotions.values() if not promotion.over]
        self._saves_ended = agreed[0] if agreed else 0
        for promotion, arrived in zip(waiting, agreed[1:], strict=False):
            if arrived:
                promotion.over = True
                for part, read in promotion.reads:
                    assert part.disk is not None
                    count = part.disk.finish(read)
                    self.counters.promoted += count
                    self.counters.unreadable += len(read.names) - count
                    if count < len(read.names):
                        promotion.blocks = 0  # one block less, and the resume point is another
        for part in self.parts.values():
            if part.disk is not None:
                part.disk.look()

    # -- from DRAM to HBM -----------------------------------------------------------------------------

    def load(self, handle: Hashable, rows: Mapping[Component, Rows]) -> bool:
        """Queue the load of a request into slots that are its own. False where a block is gone."""
        queued: list[_Queued] = []
        for component, each in rows.items():
            part = self.parts[component]
            ids = part.memory.take(each.names)
            if ids is None:
                _unlock(queued)
                return False
            queued.append(_Queued(part, each.slots, ids))
        self._queued[handle] = queued
        return True

    def cancel_load(self, handle: Hashable) -> bool:
        """Give up a load; False where it was started."""
        queued = self._queued.pop(handle, None)
        _unlock(queued or ())
        return queued is not None

    def start_loads(self) -> int:
        """Start the queued loads. Returns a number for `wait`, or -1 where there are none."""
        if not self._queued:
            return NOTHING_TO_WAIT_FOR
        if not any(part.copies.loading for part in self.parts.values()):
            self._loads.clear()  # all over: there is nothing to wait for
        queued, self._queued = self._queued, {}
        for load in (each for loads in queued.values() for each in loads):
            self.counters.loaded += len(load.ids)
            load.part.copies.load(load.slots, load.ids, done=partial(load.part.memory.unlock, load.ids))
        self._loads[self._batches] = [
            (part, part.copies.loads_submitted - 1) for part in self.parts.values() if part.copies.loading
        ]
        self._batches += 1
        return self._batches - 1

    def wait(self, batch: int) -> None:
        """Return when the loads of a batch are in HBM; on a GPU, let its current stream wait for it."""
        for part, ticket in self._loads.get(batch, ()):
            part.copies.mover.wait_layer(ticket, part.memory.arena.layout.n_layers - 1)

    # -- whole ----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for every copy under way, and for the disk."""
        self.end_copies()
        for part in self.parts.values():
            if part.disk is not None:
                part.disk.settle()

    def drop_in_flight(self) -> None:
        """Give up loads that have not begun and all reads, and wait for copies under way."""
        for handle in list(self._queued):
            self.cancel_load(handle)
        for handle in list(self._promotions):
            self.release(handle)
        self.settle()
        self._forgotten += len(self._saves)
        self._saves.clear()
        self._saves_ended = 0

    def forget(self) -> None:
        """Forget all blocks in DRAM: their names are those of former weights."""
        self.drop_in_flight()
        for part in self.parts.values():
            part.memory.clear()
            if part.disk is not None:
                part.disk.forget()

    def clear(self) -> None:
        """Forget everything in DRAM and on disk."""
        self.forget()
        for part in self.parts.values():
            if part.disk is not None:
                part.disk.clear()

    def check(self) -> None:
        """Verify the bookkeeping. Raises AssertionError naming the violated invariant."""
        self.dram.check()

    def close(self) -> None:
        """Complete all copies and writes under way, and end."""
        self.drop_in_flight()
        for part in self.parts.values():
            part.copies.close()
            if part.disk is not None:
                part.disk.close()
        self.dram.close()


def _unlock(queued: Iterable[_Queued]) -> None:
    for each in queued:
        each.part.memory.unlock(each.ids)

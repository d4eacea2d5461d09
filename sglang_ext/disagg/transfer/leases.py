"""Leases on published blocks, and grants on blocks that a peer may write. Pure: time comes in as an argument.

A lease lets one reader take blocks of ours; while it lives the blocks are pinned and the pool does not reuse
them. It ends exactly once:

    state    event                                next
    LIVE     complete(lease) by its reader        COMPLETED
    LIVE     its deadline passes                  EXPIRED
    LIVE     its reader's epoch is dead           READER_DEAD
    LIVE     the owner withdraws it               WITHDRAWN

After any of these the blocks are free once no other lease holds them. A late reader of an expired lease does
no harm: reusing a block opens its generation first, and the reader discards the bytes that it read.

A grant lets one peer write into blocks of ours (push mode). A late writer would do harm, and nothing that a
reader checks afterwards could undo it. So an expired grant frees nothing until the writer is known to be
fenced:

    state        event                                  next          blocks
    GRANTED      written(grant) by its writer           WRITTEN       to the inserting caller
    GRANTED      deadline passes, it is revoked, or      QUARANTINED   held: ask the writer to stop
                 the writer's epoch dies
    QUARANTINED  fenced(grant): writer acknowledged,    FREED         free
                 died, or its connection was cut

Rules: a block is pinned exactly while a live lease holds it; the pins of all leases never exceed the
budget; a block is granted for one request at a time, and to several writers only where each fills a part of
all of that request's blocks; it is free only after WRITTEN or FREED of every one of its grants.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_ext.disagg.errors import RangeError, RefusedError
from sglang_ext.disagg.runs import Ids


class LeaseEnd(enum.Enum):
    """How a lease ended."""

    COMPLETED = "completed"
    EXPIRED = "expired"
    READER_DEAD = "reader_dead"
    WITHDRAWN = "withdrawn"


@dataclass(frozen=True)
class Lease:
    """One reader's claim. deadline: seconds on the owner's monotonic clock."""

    number: int
    request: str
    blocks: Ids
    deadline: float
    reader: bytes | None
    """Epoch of the only reader that may complete it; None while any peer may (bound at its first use)."""
    names: bytes = b""
    """See `Offer`."""


@dataclass(frozen=True)
class Ended:
    """A lease that is over, and the blocks that are free by it (no other lease holds them)."""

    lease: Lease
    how: LeaseEnd
    freed: Ids


class LeaseTable:
    """All leases on one pool.

    blocks: ids run over [0, blocks). budget: most blocks that may be pinned at a time, by all leases
        together.
    numbers: where lease numbers come from; shared by the tables of one owner, so that a number names one
        lease.
    """

    def __init__(self, blocks: int, budget: int, numbers: Iterator[int] | None = None) -> None:
        if budget < 1 or blocks < 1:
            raise ValueError("a lease table needs blocks, and a budget of at least one block")
        self._pins: npt.NDArray[np.int32] = np.zeros(blocks, np.int32)
        self._budget = budget
        self._leases: dict[int, Lease] = {}
        self._numbers = itertools.count(1) if numbers is None else numbers
        self._pinned = 0

    def __repr__(self) -> str:
        return f"<LeaseTable live={len(self._leases)} pinned={self._pinned}/{self._budget}>"

    @property
    def live(self) -> int:
        """Leases that have not ended."""
        return len(self._leases)

    @property
    def pinned(self) -> int:
        """Blocks that at least one lease holds."""
        return self._pinned

    def is_pinned(self, blocks: Ids) -> npt.NDArray[np.bool_]:
        """A mask of the `blocks` that a live lease holds."""
        held: npt.NDArray[np.bool_] = self._pins[blocks] > 0
        return held

    def grant(
        self, request: str, blocks: Ids, deadline: float, reader: bytes | None = None, names: bytes = b""
    ) -> Lease:
        """Pin `blocks` for a reader until `deadline`. names: see `Offer`.

        Raises:
            RefusedError: the budget is spent; publish again when leases have ended.
            RangeError: an id is out of range or named twice.
        """
        blocks = _distinct(blocks, self._pins.shape[0])
        fresh = int((self._pins[blocks] == 0).sum())
        if self._pinned + fresh > self._budget:
            raise RefusedError(
                "budget", f"{self._pinned} blocks are pinned by leases, {fresh} more exceed {self._budget}"
            )
        self._pins[blocks] += 1
        self._pinned += fresh
        lease = Lease(next(self._numbers), request, blocks, deadline, reader, names)
        self._leases[lease.number] = lease
        return lease

    def get(self, number: int) -> Lease | None:
        """A live lease."""
        return self._leases.get(number)

    def find(self, request: str) -> Lease | None:
        """The newest live lease of a request."""
        return next((x for x in reversed(self._leases.values()) if x.request == request), None)

    def bind(self, number: int, reader: bytes) -> bool:
        """Tie a lease to the reader that asked for it; False when it is over or another reader's."""
        lease = self._leases.get(number)
        if lease is None or lease.reader not in (None, reader):
            return False
        if lease.reader is None:
            self._leases[number] = dataclasses.replace(lease, reader=reader)
        return True

    def renew(self, number: int, deadline: float) -> bool:
        """Move a live lease's deadline; False when it is over."""
        lease = self._leases.get(number)
        if lease is None:
            return False
        self._leases[number] = dataclasses.replace(lease, deadline=deadline)
        return True

    def complete(self, number: int, reader: bytes) -> Ended | None:
        """The reader is done. None when the lease is over, or is another reader's."""
        lease = self._leases.get(number)
        if lease is None or lease.reader not in (None, reader):
            return None
        return self._end(lease, LeaseEnd.COMPLETED)

    def withdraw(self, number: int) -> Ended | None:
        """The owner needs the blocks back. None when the lease is over."""
        lease = self._leases.get(number)
        return self._end(lease, LeaseEnd.WITHDRAWN) if lease else None

    def expire(self, now: float) -> tuple[Ended, ...]:
        """End every lease whose deadline is not after `now`."""
        over = [x for x in self._leases.values() if x.deadline <= now]
        return tuple(self._end(x, LeaseEnd.EXPIRED) for x in over)

    def reader_dead(self, reader: bytes) -> tuple[Ended, ...]:
        """End every lease of a reader's epoch."""
        over = [x for x in self._leases.values() if x.reader == reader]
        return tuple(self._end(x, LeaseEnd.READER_DEAD) for x in over)

    def next_deadline(self) -> float | None:
        """The earliest deadline, None without leases."""
        return min((x.deadline for x in self._leases.values()), default=None)

    def check(self) -> None:
        """Verify that pins are exactly those of the live leases, and within the budget."""
        pins = np.zeros_like(self._pins)
        for lease in self._leases.values():
            pins[lease.blocks] += 1
        assert (pins == self._pins).all(), "pins differ from the leases"
        assert self._pinned == int((pins > 0).sum()), "count of pinned blocks is wrong"
        assert self._pinned <= self._budget, "more blocks pinned than the budget allows"

    def _end(self, lease: Lease, how: LeaseEnd) -> Ended:
        del self._leases[lease.number]
        self._pins[lease.blocks] -= 1
        freed = lease.blocks[self._pins[lease.blocks] == 0]
        self._pinned -= int(freed.size)
        return Ended(lease, how, freed)


class GrantState(enum.Enum):
    """See the table at the top of this file."""

    GRANTED = "granted"
    QUARANTINED = "quarantined"


@dataclass(frozen=True)
class Grant:
    """One peer's leave to write blocks. deadline: seconds on the owner's monotonic clock."""

    number: int
    request: str
    pool: str
    blocks: Ids
    deadline: float
    writer: bytes
    """Epoch of the writer."""
    state: GrantState = GrantState.GRANTED


class GrantTable:
    """All grants of one owner, over all its pools."""

    def __init__(self) -> None:
        self._grants: dict[int, Grant] = {}
        self._next = 1

    def __repr__(self) -> str:
        held = sum(g.state is GrantState.QUARANTINED for g in self._grants.values())
        return f"<GrantTable granted={len(self._grants) - held} quarantined={held}>"

    def __len__(self) -> int:
        return len(self._grants)

    def grant(self, request: str, pool: str, blocks: Ids, deadline: float, writer: bytes) -> Grant:
        """Let `writer` fill `blocks`, or its part of each, until `deadline`.

        Raises:
            RangeError: a block is granted for another request, or for this one and not as these blocks to
                another writer; or a grant for this one is over: the next reader of the blocks would read a
                part.
        """
        shared = {g.number for g in self.sharing(request, pool, blocks) if g.state is GrantState.GRANTED}
        for g in self._grants.values():
            if g.pool != pool or not np.isin(blocks, g.blocks).any():
                continue
            if g.number not in shared or g.writer == writer:
                raise RangeError(f"blocks of {request!r} are already granted to {g.request!r}")
        grant = Grant(self._next, request, pool, blocks, deadline, writer)
        self._next += 1
        self._grants[grant.number] = grant
        return grant

    def get(self, number: int) -> Grant | None:
        """A grant that is granted or quarantined."""
        return self._grants.get(number)

    def all(self) -> tuple[Grant, ...]:
        """All that are granted or quarantined."""
        return tuple(self._grants.values())

    def sharing(self, request: str, pool: str, blocks: Ids) -> tuple[Grant, ...]:
        """All grants of a request on exactly these blocks, each of another writer's."""
        return tuple(
            g
            for g in self._grants.values()
            if (g.request, g.pool) == (request, pool) and np.array_equal(g.blocks, blocks)
        )

    def of(self, writer: bytes) -> tuple[Grant, ...]:
        """All grants of a writer's epoch."""
        return tuple(g for g in self._grants.values() if g.writer == writer)

    def written(self, number: int, writer: bytes) -> Grant | None:
        """The writer has written everything. None when the grant is over, quarantined, or not the
        writer's.
        """
        grant = self._grants.get(number)
        if grant is None or grant.state is not GrantState.GRANTED or grant.writer != writer:
            return None
        return self._grants.pop(number)

    def overdue(self, now: float, dead: Iterable[bytes] = ()) -> tuple[Grant, ...]:
        """Quarantine every grant whose deadline passed or whose writer died; returns those newly so."""
        gone = set(dead)
        late = [
            g
            for g in self._grants.values()
            if g.state is GrantState.GRANTED and (g.deadline <= now or g.writer in gone)
        ]
        for g in late:
            self.quarantine(g.number)
        return tuple(self._grants[g.number] for g in late)

    def quarantine(self, number: int) -> None:
        """End a grant before its time: its writer gives up, or its owner wants it to."""
        g = self._grants.get(number)
        if g is not None:
            self._grants[number] = Grant(
                g.number, g.request, g.pool, g.blocks, g.deadline, g.writer, GrantState.QUARANTINED
            )

    def quarantined(self) -> tuple[Grant, ...]:
        """Grants whose writers have yet to be fenced."""
        return tuple(g for g in self._grants.values() if g.state is GrantState.QUARANTINED)

    def fenced(self, number: int) -> Grant | None:
        """The writer cannot write any more. Returns the grant, whose blocks are free now."""
        grant = self._grants.get(number)
        if grant is None or grant.state is not GrantState.QUARANTINED:
            return None
        return self._grants.pop(number)

    def check(self) -> None:
        """Verify that no block of a pool is granted for two requests, or twice to one writer."""
        holders: dict[tuple[str, int], Grant] = {}
        for g in self._grants.values():
            writers = [other.writer for other in self.sharing(g.request, g.pool, g.blocks)]
            assert len(set(writers)) == len(writers), f"grant {g.number} is granted twice to one writer"
            for b in g.blocks:
                other = holders.setdefault((g.pool, int(b)), g)
                alike = other.request == g.request and np.array_equal(other.blocks, g.blocks)
                assert alike, f"grant {g.number} shares blocks with another request's"


def _distinct(blocks: Ids, limit: int) -> Ids:
    blocks = np.ascontiguousarray(np.asarray(blocks, np.int64))
    if blocks.size and (int(blocks.min()) < 0 or int(blocks.max()) >= limit):
        raise RangeError(f"block ids must lie in [0, {limit})")
    if np.unique(blocks).size != blocks.size:
        raise RangeError("a block is named twice")
    return blocks

"""The transaction queue (KVDirect, section 4.2). Pure: no I/O, no clock, no threads.

TRANSFER and COMPLETE of all requests to one peer stand in one queue. `take` pops every transfer up to the
next COMPLETE and merges those that are contiguous on both sides, across requests. The returned pieces are
posted without waiting; a COMPLETE goes out once the transfers of its own request have landed, whatever others
are doing.

A request, from its first transfer to its end:

    state      event                          next       action of the caller
    OPEN       transfer(request, runs)        OPEN
    OPEN       complete(request)              CLOSING
    OPEN       its last piece lands           OPEN
    CLOSING    its last piece lands           LANDED     verify generations, send COMPLETE
    LANDED     acknowledged(request)          gone
    any        a piece of it fails            FAILED     report; the rest of its pieces still have to end
    any        cancel(request)                FAILED     stop pieces that are its alone
    FAILED     its last piece ends            gone       local ranges may be freed

Rules: every requested byte is in exactly one piece; a batch never has more runs than the transfers it came
from; a request is LANDED only when every piece with a byte of it has landed; a request leaves the table
only when no piece with a byte of it is under way.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from sglang_ext.disagg.errors import RangeError
from sglang_ext.disagg.runs import Runs, coalesce, cut, total_bytes


class Direction(enum.Enum):
    """The direction of the bytes."""

    READ = "read"
    WRITE = "write"


class RequestState(enum.Enum):
    """See the table at the top of this file."""

    OPEN = "open"
    CLOSING = "closing"
    LANDED = "landed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Piece:
    """The unit of work of a transport's lane. Every piece must be answered by `landed` or
    `failed`.
    """

    number: int
    direction: Direction
    grant: tuple[int, int]
    """Of a write: slot and number of the grant it is made under."""
    runs: Runs
    nbytes: int
    requests: frozenset[str]
    """Requests with bytes in this piece."""


@dataclass(frozen=True)
class Batch:
    """All that was popped at once. `uncoalesced` and `coalesced` count runs before and after merging."""

    pieces: tuple[Piece, ...]
    uncoalesced: int
    coalesced: int


@dataclass(slots=True)
class _Request:
    state: RequestState = RequestState.OPEN
    queued: int = 0
    """Transfers still in the queue."""
    pieces: set[int] = field(default_factory=set)
    """Pieces under way."""
    closing: bool = False
    """Its COMPLETE is queued."""


@dataclass(frozen=True, slots=True)
class _Transfer:
    request: str
    direction: Direction
    grant: tuple[int, int]
    runs: Runs


@dataclass(frozen=True, slots=True)
class _Complete:
    request: str


class TransactionQueue:
    """Transactions to one peer.

    piece_bytes: how much one lane moves at a time. Smaller pieces let a request complete sooner and cancel
        faster, larger ones cost fewer hand-overs between threads.
    coalescing: off only to measure its benefit.
    """

    def __init__(self, piece_bytes: int = 16 << 20, *, coalescing: bool = True) -> None:
        if piece_bytes < 1:
            raise ValueError("piece_bytes must be at least 1")
        self._piece_bytes = piece_bytes
        self.coalescing = coalescing
        self._queue: deque[_Transfer | _Complete] = deque()
        self._requests: dict[str, _Request] = {}
        self._pieces: dict[int, Piece] = {}
        self._next_piece = 0

    def __repr__(self) -> str:
        return (
            f"<TransactionQueue queued={len(self._queue)} requests={len(self._requests)} "
            f"pieces={len(self._pieces)}>"
        )

    @property
    def idle(self) -> bool:
        """Whether nothing is queued and nothing is under way."""
        return not self._queue and not self._requests

    def state(self, request: str) -> RequestState | None:
        """The request's state, None when it is not in the table."""
        known = self._requests.get(request)
        return known.state if known else None

    def transfer(
        self,
        request: str,
        runs: Runs,
        direction: Direction = Direction.READ,
        grant: tuple[int, int] = (0, 0),
    ) -> None:
        """Queue the runs of a request; it may have many transfers before its COMPLETE.

        Raises:
            RangeError: after the request's COMPLETE, or when a run is empty.
        """
        if runs.shape[0] and int(runs[:, 4].min()) <= 0:
            raise RangeError("a run moves no bytes")
        known = self._requests.get(request)
        if known is None:
            known = self._requests[request] = _Request()
        if known.state is not RequestState.OPEN:
            raise RangeError(f"request {request!r} is {known.state.value}: no more transfers")
        if runs.shape[0]:
            known.queued += 1
            self._queue.append(_Transfer(request, direction, grant, runs))

    def complete(self, request: str) -> bool:
        """Queue the request's COMPLETE. True when it is LANDED at once, because nothing is left to move."""
        known = self._requests.setdefault(request, _Request())
        if known.state is not RequestState.OPEN:
            raise RangeError(f"request {request!r} is {known.state.value}: it has had its COMPLETE")
        known.state = RequestState.CLOSING
        self._queue.append(_Complete(request))
        return self._settle(request)

    def take(self) -> Batch | None:
        """Pop all transfers up to the next COMPLETE (or change of direction or grant), coalesced and cut
        into pieces.

        None when no transfer is queued.
        """
        while self._queue and isinstance(self._queue[0], _Complete):
            self._queue.popleft()
        if not self._queue:
            return None
        taken: list[_Transfer] = []
        while self._queue:
            head = self._queue[0]
            if isinstance(head, _Complete) or (
                taken and (head.direction, head.grant) != (taken[0].direction, taken[0].grant)
            ):
                break
            taken.append(head)
            self._queue.popleft()
        return self._batch(taken)

    def ends(self, piece: Piece) -> str | None:
        """The request that is LANDED once this piece is, when the piece is its alone."""
        if len(piece.requests) > 1:
            return None
        (request,) = piece.requests
        known = self._requests[request]
        last = known.state is RequestState.CLOSING and not known.queued and len(known.pieces) == 1
        return request if last else None

    def landed(self, piece: Piece) -> tuple[str, ...]:
        """A piece's bytes are all in place. Returns the requests that are LANDED by it."""
        self._end(piece)
        return tuple(r for r in sorted(piece.requests) if self._settle(r))

    def failed(self, piece: Piece) -> tuple[str, ...]:
        """A piece ended otherwise. Returns the requests that fail by it and were not failed before."""
        self._end(piece)
        fresh: list[str] = []
        for request in sorted(piece.requests):
            known = self._requests.get(request)
            if known is not None and known.state is not RequestState.FAILED:
                self._fail(request, known)
                fresh.append(request)
            self._settle(request)
        return tuple(fresh)

    def acknowledged(self, request: str) -> None:
        """The peer has answered the request's COMPLETE, or never will: the request is over."""
        known = self._requests.get(request)
        if known is None or known.state is not RequestState.LANDED:
            raise RangeError(f"request {request!r} is not waiting for an acknowledgement")
        del self._requests[request]

    def cancel(self, request: str) -> tuple[Piece, ...]:
        """Drop the request's queued transfers. Returns the pieces under way that hold bytes of it alone.

        Those may be stopped; pieces that it shares with others run on. The request is over, and its local
        ranges free, once `state` says None.
        """
        known = self._requests.get(request)
        if known is None:
            return ()
        if known.state is RequestState.LANDED:
            del self._requests[request]
            return ()
        self._fail(request, known)
        self._settle(request)
        return tuple(
            p for n in sorted(known.pieces) if (p := self._pieces[n]).requests == frozenset((request,))
        )

    def check(self) -> None:
        """Verify every rule between queue, pieces and requests."""
        for name, known in self._requests.items():
            queued = sum(1 for t in self._queue if isinstance(t, _Transfer) and t.request == name)
            under_way = {n for n, p in self._pieces.items() if name in p.requests}
            assert known.queued == queued, f"{name}: {known.queued} queued, found {queued}"
            assert known.pieces == under_way, f"{name}: pieces {known.pieces}, found {under_way}"
            if known.state is RequestState.LANDED:
                assert not queued, f"{name} is landed with transfers queued"
                assert not under_way, f"{name} is landed with pieces under way"
            if known.state is RequestState.CLOSING:
                assert queued or under_way, f"{name} is closing with nothing left to move"
            if known.state is RequestState.FAILED:
                assert under_way, f"{name} failed and should be gone"
                assert not queued, f"{name} failed with transfers queued"
        for piece in self._pieces.values():
            assert piece.requests <= self._requests.keys(), f"piece {piece.number} outlives a request"

    def _batch(self, taken: list[_Transfer]) -> Batch:
        names = [t.request for t in taken]
        runs = taken[0].runs if len(taken) == 1 else np.concatenate([t.runs for t in taken])
        merged, group = coalesce(runs) if self.coalescing else (runs, np.arange(runs.shape[0]))
        single = len(set(names)) == 1
        owner = None if single else np.repeat(np.arange(len(taken)), [t.runs.shape[0] for t in taken])
        total = total_bytes(merged)
        if total <= self._piece_bytes:
            pieces = [self._piece(taken[0], merged, total, frozenset(names))]
        else:
            rows, of = cut(merged, self._piece_bytes)
            bounds = np.flatnonzero(np.diff(of[:, 0], prepend=-1))
            pieces = []
            for start, stop in zip(bounds, np.append(bounds[1:], rows.shape[0]), strict=True):
                inside = frozenset(names)
                if owner is not None:
                    # Merged rows of a piece are consecutive, and so say which transfers are in it.
                    low, high = of[start, 1], of[stop - 1, 1]
                    inside = frozenset(names[i] for i in np.unique(owner[(group >= low) & (group <= high)]))
                part = rows[start:stop]
                pieces.append(self._piece(taken[0], part, total_bytes(part), inside))
        for t in taken:
            self._requests[t.request].queued -= 1
        return Batch(tuple(pieces), runs.shape[0], merged.shape[0])

    def _piece(self, like: _Transfer, runs: Runs, nbytes: int, requests: frozenset[str]) -> Piece:
        piece = Piece(self._next_piece, like.direction, like.grant, runs, nbytes, requests)
        self._next_piece += 1
        self._pieces[piece.number] = piece
        for request in requests:
            self._requests[request].pieces.add(piece.number)
        return piece

    def _end(self, piece: Piece) -> None:
        if self._pieces.pop(piece.number, None) is None:
            raise RangeError(f"piece {piece.number} has already ended")
        for request in piece.requests:
            self._requests[request].pieces.discard(piece.number)

    def _fail(self, request: str, known: _Request) -> None:
        known.state = RequestState.FAILED
        if known.queued:
            self._queue = deque(
                t for t in self._queue if not (isinstance(t, _Transfer) and t.request == request)
            )
            known.queued = 0

    def _settle(self, request: str) -> bool:
        """Move a request on when nothing of it is left to move. True when that makes it LANDED."""
        known = self._requests.get(request)
        if known is None or known.queued or known.pieces:
            return False
        if known.state is RequestState.FAILED:
            del self._requests[request]
        elif known.state is RequestState.CLOSING:
            known.state = RequestState.LANDED
            return True
        return False

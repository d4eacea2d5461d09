"""Model test of the transaction queue: any interleaving, against sets of bytes."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_ext.disagg.errors import RangeError
from sglang_ext.disagg.runs import Runs
from sglang_ext.disagg.transfer.transactions import Batch, Direction, Piece, RequestState, TransactionQueue

REQUESTS = [f"r{i}" for i in range(4)]


def byte_map(runs: Runs) -> Counter[tuple[int, int, int, int]]:
    return Counter(
        (int(rr), int(ro) + i, int(lr), int(lo) + i) for rr, ro, lr, lo, n in runs for i in range(int(n))
    )


class QueueMachine(RuleBasedStateMachine):
    """Drives the queue; the model keeps, per request, the bytes asked for, posted and landed."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = TransactionQueue(piece_bytes=24)
        self.asked: dict[str, Counter] = {}
        self.waiting: list[tuple[str, Counter, Direction]] = []  # queued transfers, in order
        self.completes: list[str] = []
        self.order: list[tuple[str, str]] = []  # ("transfer"|"complete", request) as queued
        self.flying: dict[int, Piece] = {}
        self.bytes_of: dict[int, Counter] = {}
        self.landed_bytes: dict[str, Counter] = {}
        self.dead: set[str] = set()
        self.landed: set[str] = set()

    def model(self, request: str) -> RequestState | None:
        return self.queue.state(request)

    @rule(
        request=st.sampled_from(REQUESTS),
        blocks=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6),
        direction=st.sampled_from([Direction.READ, Direction.READ, Direction.WRITE]),
    )
    def transfer(self, request: str, blocks: list[tuple[int, int]], direction: Direction) -> None:
        runs = np.array([(0, a * 8, 0, b * 8, 8) for a, b in blocks], np.int64)
        if self.model(request) not in (None, RequestState.OPEN):
            with pytest.raises(RangeError):
                self.queue.transfer(request, runs, direction)
            return
        self.queue.transfer(request, runs, direction)
        self.asked.setdefault(request, Counter()).update(byte_map(runs))
        self.waiting.append((request, byte_map(runs), direction))
        self.order.append(("transfer", request))

    @rule(request=st.sampled_from(REQUESTS))
    def complete(self, request: str) -> None:
        if self.model(request) not in (None, RequestState.OPEN):
            with pytest.raises(RangeError):
                self.queue.complete(request)
            return
        at_once = self.queue.complete(request)
        self.order.append(("complete", request))
        assert at_once == (self.asked.get(request, Counter()) == self.landed_bytes.get(request, Counter()))
        if at_once:
            self.landed.add(request)

    @rule()
    def take(self) -> None:
        batch: Batch | None = self.queue.take()
        # The model pops transfers up to the next COMPLETE or change of direction.
        while self.order and self.order[0][0] == "complete":
            self.order.pop(0)
        popped: list[tuple[str, Counter, Direction]] = []
        while self.order and self.order[0][0] == "transfer":
            if popped and self.waiting[0][2] is not popped[0][2]:
                break
            self.order.pop(0)
            popped.append(self.waiting.pop(0))
        if not popped:
            assert batch is None
            return
        assert batch is not None
        assert batch.coalesced <= batch.uncoalesced == sum(sum(b.values()) // 8 for _, b, _ in popped)
        posted: Counter = Counter()
        for piece in batch.pieces:
            assert piece.direction is popped[0][2]
            posted.update(byte_map(piece.runs))
            self.flying[piece.number] = piece
            for request in piece.requests:
                assert any(request == r for r, _, _ in popped)
        wanted: Counter = Counter()
        for _, b, _ in popped:
            wanted.update(b)
        assert posted == wanted  # every byte exactly once
        for request, b, _ in popped:
            covered: Counter = Counter()
            for piece in batch.pieces:
                if request in piece.requests:
                    covered.update(byte_map(piece.runs))
            assert b <= covered  # and in a piece that knows the request
            # Which piece lands which of its bytes: taken from the pieces, in order.
            rest = Counter(b)
            for piece in batch.pieces:
                if request in piece.requests:
                    part = rest & byte_map(piece.runs)
                    rest -= part
                    self.bytes_of.setdefault(piece.number, Counter())
                    self.landed_share.setdefault((piece.number, request), Counter()).update(part)

    @property
    def landed_share(self) -> dict[tuple[int, str], Counter]:
        return self.__dict__.setdefault("_share", {})

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        piece = self.flying.pop(data.draw(st.sampled_from(sorted(self.flying)), label="piece"))
        last = self.queue.ends(piece)
        ready = self.queue.landed(piece)
        assert (last,) == ready if last is not None else len(ready) != 1 or len(piece.requests) > 1
        for request in piece.requests - self.dead:
            self.landed_bytes.setdefault(request, Counter()).update(
                self.landed_share.pop((piece.number, request), Counter())
            )
        for request in ready:
            assert request not in self.dead
            assert self.landed_bytes.get(request, Counter()) == self.asked.get(request, Counter())
            self.landed.add(request)
        self.bury()
        with pytest.raises(RangeError):
            self.queue.landed(piece)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        piece = self.flying.pop(data.draw(st.sampled_from(sorted(self.flying)), label="piece"))
        fresh = self.queue.failed(piece)
        assert set(fresh) == piece.requests - self.dead
        for request in fresh:
            self.kill(request)
        self.bury()

    @rule(request=st.sampled_from(REQUESTS))
    def cancel(self, request: str) -> None:
        before = self.model(request)
        stoppable = self.queue.cancel(request)
        assert all(p.requests == {request} and p.number in self.flying for p in stoppable)
        if before is not None:
            self.kill(request)
        self.bury()

    @precondition(lambda self: self.landed)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.landed)), label="request")
        self.queue.acknowledged(request)
        self.forget(request)

    def kill(self, request: str) -> None:
        self.dead.add(request)
        self.landed.discard(request)
        keep = [(r, b, d) for r, b, d in self.waiting if r != request]
        self.waiting = keep
        self.order = [(kind, r) for kind, r in self.order if not (r == request and kind == "transfer")]

    def bury(self) -> None:
        """A dead request is gone exactly when none of its pieces is under way."""
        for request in sorted(self.dead):
            under_way = any(request in p.requests for p in self.flying.values())
            assert (self.model(request) is None) == (not under_way)
            if not under_way:
                self.forget(request)

    def forget(self, request: str) -> None:
        self.asked.pop(request, None)
        self.landed_bytes.pop(request, None)
        self.dead.discard(request)
        self.landed.discard(request)

    @invariant()
    def consistent(self) -> None:
        self.queue.check()
        for request in self.landed:
            assert self.model(request) is RequestState.LANDED


TestQueueShort = QueueMachine.TestCase
TestQueueShort.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.long
class TestQueueLong(QueueMachine.TestCase):
    settings = settings(max_examples=2000, stateful_step_count=60, deadline=None)


def test_the_papers_example_merges_across_requests() -> None:
    """KVDirect, figure 8: read 0 -> 5 of R1 and read 1 -> 6 of R2 become one transaction."""
    queue = TransactionQueue()
    queue.transfer("R1", np.array([(0, 0, 0, 5 * 8192, 8192)], np.int64))
    queue.transfer("R2", np.array([(0, 8192, 0, 6 * 8192, 8192), (0, 9 * 8192, 0, 0, 8192)], np.int64))
    queue.complete("R1")
    queue.complete("R2")
    batch = queue.take()
    assert batch is not None
    assert (batch.uncoalesced, batch.coalesced) == (3, 2)
    assert batch.pieces[0].runs[0].tolist() == [0, 0, 0, 5 * 8192, 2 * 8192]
    assert queue.landed(batch.pieces[0]) == ("R1", "R2")
    assert queue.take() is None
    queue.acknowledged("R1")
    queue.acknowledged("R2")
    assert queue.idle


def test_a_complete_does_not_hold_up_other_requests() -> None:
    queue = TransactionQueue()
    queue.transfer("R1", np.array([(0, 0, 0, 0, 8)], np.int64))
    queue.complete("R1")
    queue.transfer("R2", np.array([(0, 8, 0, 8, 8)], np.int64))
    queue.complete("R2")
    first, second = queue.take(), queue.take()
    assert first is not None
    assert second is not None
    assert queue.landed(second.pieces[0]) == ("R2",)
    assert queue.state("R1") is RequestState.CLOSING
    assert queue.landed(first.pieces[0]) == ("R1",)

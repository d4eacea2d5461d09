"""Model test of leases, and the table of grants."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_ext.disagg.errors import RangeError, RefusedError
from sglang_ext.disagg.transfer.leases import Ended, GrantTable, LeaseEnd, LeaseTable

BLOCKS, BUDGET = 12, 8
READERS = [b"a", b"b"]


class LeaseMachine(RuleBasedStateMachine):
    """The model is a dict of lease -> (blocks, deadline, reader)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(BLOCKS, BUDGET)
        self.model: dict[int, tuple[set[int], float, bytes | None]] = {}
        self.now = 0.0

    def pinned(self) -> set[int]:
        return {b for blocks, _, _ in self.model.values() for b in blocks}

    def over(self, ended: Ended, how: LeaseEnd) -> None:
        blocks, _, _ = self.model.pop(ended.lease.number)
        assert ended.how is how
        assert set(ended.freed.tolist()) == blocks - self.pinned()

    @rule(
        blocks=st.sets(st.integers(0, BLOCKS - 1), min_size=1, max_size=5),
        ttl=st.floats(0.1, 5),
        reader=st.sampled_from([*READERS, None]),
    )
    def grant(self, blocks: set[int], ttl: float, reader: bytes | None) -> None:
        ids = np.array(sorted(blocks))
        if len(self.pinned() | blocks) > BUDGET:
            with pytest.raises(RefusedError, match="budget"):
                self.table.grant("r", ids, self.now + ttl, reader)
            return
        lease = self.table.grant("r", ids, self.now + ttl, reader)
        self.model[lease.number] = (blocks, self.now + ttl, reader)

    @rule(number=st.integers(1, 30), reader=st.sampled_from(READERS))
    def complete(self, number: int, reader: bytes) -> None:
        known = self.model.get(number)
        ended = self.table.complete(number, reader)
        if known is None or known[2] not in (None, reader):
            assert ended is None
        else:
            assert ended is not None
            self.over(ended, LeaseEnd.COMPLETED)

    @rule(number=st.integers(1, 30), reader=st.sampled_from(READERS))
    def bind(self, number: int, reader: bytes) -> None:
        known = self.model.get(number)
        assert self.table.bind(number, reader) == (known is not None and known[2] in (None, reader))
        if known is not None and known[2] is None:
            self.model[number] = (known[0], known[1], reader)

    @rule(seconds=st.floats(0, 3))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        ended = self.table.expire(self.now)
        assert {e.lease.number for e in ended} == {n for n, x in self.model.items() if x[1] <= self.now}
        freed = [b for e in ended for b in e.freed.tolist()]
        assert len(set(freed)) == len(freed)
        for e in ended:
            del self.model[e.lease.number]
        assert not set(freed) & self.pinned()

    @rule(reader=st.sampled_from(READERS))
    def reader_dies(self, reader: bytes) -> None:
        for ended in self.table.reader_dead(reader):
            self.over(ended, LeaseEnd.READER_DEAD)
        assert all(r != reader for _, _, r in self.model.values())

    @invariant()
    def consistent(self) -> None:
        self.table.check()
        assert set(np.flatnonzero(self.table.is_pinned(np.arange(BLOCKS))).tolist()) == self.pinned()
        assert self.table.next_deadline() == min((d for _, d, _ in self.model.values()), default=None)


TestLeasesShort = LeaseMachine.TestCase
TestLeasesShort.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.long
class TestLeasesLong(LeaseMachine.TestCase):
    settings = settings(max_examples=1500, stateful_step_count=60, deadline=None)


def test_an_expired_grant_frees_nothing_until_the_writer_is_fenced() -> None:
    table = GrantTable()
    grant = table.grant("r", "dram", np.array([3, 4]), deadline=10.0, writer=b"w")
    with pytest.raises(RangeError, match="already granted"):
        table.grant("s", "dram", np.array([4, 5]), deadline=10.0, writer=b"x")
    assert table.fenced(grant.number) is None  # still live
    assert [g.number for g in table.overdue(10.0)] == [grant.number]
    assert table.overdue(11.0) == ()
    assert table.written(grant.number, b"w") is None  # too late: the bytes may be another's by now
    assert repr(table) == "<GrantTable granted=0 quarantined=1>"
    with pytest.raises(RangeError, match="already granted"):
        table.grant("s", "dram", np.array([4]), deadline=20.0, writer=b"x")
    freed = table.fenced(grant.number)
    assert freed is not None
    assert freed.blocks.tolist() == [3, 4]
    table.check()
    assert len(table) == 0


def test_several_writers_may_fill_the_blocks_of_one_request() -> None:
    table, blocks = GrantTable(), np.array([3, 4])
    first = table.grant("r", "hbm", blocks, deadline=10.0, writer=b"w")
    second = table.grant("r", "hbm", blocks, deadline=10.0, writer=b"x")
    table.check()
    for request, pool_blocks, writer in (
        ("r", [3, 4], b"w"),  # it has them
        ("r", [3], b"y"),  # others than those
        ("r", [4, 3], b"y"),
        ("s", [3, 4], b"y"),
    ):
        with pytest.raises(RangeError, match="already granted"):
            table.grant(request, "hbm", np.array(pool_blocks), deadline=10.0, writer=writer)
    assert table.written(first.number, b"w") == first
    assert table.sharing("r", "hbm", blocks) == (second,)
    # Once a writer was stopped, the blocks that it left out will not arrive: no writer may join the others.
    table.quarantine(second.number)
    with pytest.raises(RangeError, match="already granted"):
        table.grant("r", "hbm", blocks, deadline=10.0, writer=b"y")
    assert table.fenced(second.number) is not None
    assert table.sharing("r", "hbm", blocks) == ()


def test_a_grant_is_its_writers_alone() -> None:
    table = GrantTable()
    grant = table.grant("r", "hbm", np.array([0]), deadline=10.0, writer=b"w")
    assert table.written(grant.number, b"other") is None
    assert table.written(grant.number, b"w") == grant
    assert table.written(grant.number, b"w") is None

"""The plain-torch page allocator against a slow oracle, against Triton, and inside SGLang's allocator."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import paged_oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from paged_oracle import Batch, slots_of
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from sglang_ext.patches.cpu import allocator as paged_allocator
from sglang_ext.patches.cpu.allocator import alloc_decode, alloc_extend

pytestmark = pytest.mark.slow

PAGE_SIZES = (1, 2, 4, 16)


@pytest.fixture(scope="module", autouse=True)
def patched() -> None:
    paged_allocator.apply()


def ours(batch: Batch) -> list[int]:
    out = torch.empty(sum(batch.length) - sum(batch.prefix), dtype=torch.int64)
    size = len(batch.prefix)
    arguments = [
        torch.tensor(x, dtype=torch.int64) for x in (batch.prefix, batch.length, batch.last, batch.free)
    ]
    alloc_extend(*arguments, out, size, batch.page_size)
    return out.tolist()


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    page_size = draw(st.sampled_from(PAGE_SIZES))
    size = draw(st.integers(1, 6))
    prefix = [draw(st.integers(0, 3 * page_size)) for _ in range(size)]
    length = [old + draw(st.integers(0, 3 * page_size)) for old in prefix]
    last = [
        -1 if old == 0 else (1000 + i) * page_size + (old - 1) % page_size for i, old in enumerate(prefix)
    ]
    # Sometimes too few pages.
    free = draw(st.lists(st.integers(1, 900), unique=True, max_size=24))
    return Batch(page_size, prefix, length, last, free)


@given(batches())
@settings(max_examples=400, deadline=None)
def test_extend_gives_what_one_token_at_a_time_gives(batch: Batch) -> None:
    assert ours(batch) == slots_of(batch)


@given(batches())
@settings(max_examples=200, deadline=None)
def test_decode_is_an_extend_by_one(batch: Batch) -> None:
    length = [old + 1 for old in batch.prefix]
    out = torch.empty(len(length), dtype=torch.int64)
    alloc_decode(
        *(torch.tensor(x, dtype=torch.int64) for x in (length, batch.last, batch.free)),
        out,
        len(length),
        batch.page_size,
    )
    assert out.tolist() == slots_of(Batch(batch.page_size, batch.prefix, length, batch.last, batch.free))


def test_our_kernels_agree_with_tritons(agree_with_triton: Callable[[ModuleType, int], None]) -> None:
    agree_with_triton(paged_oracle, 60)


def allocator_of(pages: int, page_size: int) -> PagedTokenToKVPoolAllocator:
    return PagedTokenToKVPoolAllocator(
        size=pages * page_size,
        page_size=page_size,
        dtype=torch.float32,
        device="cpu",
        kvcache=None,
        need_sort=False,
    )


@pytest.mark.parametrize("page_size", [4, 16])
def test_a_pool_that_is_too_small_answers_none_and_keeps_its_pages(page_size: int) -> None:
    allocator = allocator_of(2, page_size)
    zero, length = torch.tensor([0]), torch.tensor([3 * page_size])
    assert allocator.alloc_extend(zero, zero, length, length, torch.tensor([-1]), 3 * page_size) is None
    assert allocator.available_size() == 2 * page_size


def test_an_empty_pool_answers_none() -> None:
    """SGLang's own plain-torch form (``alloc_extend_naive``) asserts here."""
    allocator = allocator_of(1, 4)
    assert allocator.alloc(4) is not None
    zero, one = torch.tensor([0]), torch.tensor([1])
    assert allocator.alloc_extend(zero, zero, one, one, torch.tensor([-1]), 1) is None
    assert allocator.alloc_decode(one, one, torch.tensor([-1])) is None


class PagedAllocation(RuleBasedStateMachine):
    """Requests come, grow by prefill and decode, and go; pool and rows are checked at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.page_size = 4
        self.pages = 12
        self.allocator = allocator_of(self.pages, self.page_size)
        self.rows: list[list[int]] = []

    def grow(self, grown: list[tuple[int, int]]) -> None:
        rows = [self.rows[i] for i, _ in grown]
        prefix = torch.tensor([len(row) for row in rows])
        length = torch.tensor([len(row) + n for row, (_, n) in zip(rows, grown, strict=True)])
        last = torch.tensor([row[-1] if row else -1 for row in rows])
        total = sum(n for _, n in grown)
        before = self.allocator.available_size()
        slots = self.allocator.alloc_extend(prefix, prefix, length, length, last, total)
        if slots is None:
            assert self.allocator.available_size() == before
            return
        start = 0
        for row, (_, n) in zip(rows, grown, strict=True):
            row.extend(slots[start : start + n].tolist())
            start += n

    @rule(lengths=st.lists(st.integers(1, 11), min_size=1, max_size=3))
    def come(self, lengths: list[int]) -> None:
        first = len(self.rows)
        self.rows += [[] for _ in lengths]
        self.grow([(first + i, n) for i, n in enumerate(lengths)])
        self.rows = [row for row in self.rows if row]

    @precondition(lambda self: self.rows)
    @rule(n=st.integers(1, 9), data=st.data())
    def extend_one(self, n: int, data: st.DataObject) -> None:
        self.grow([(data.draw(st.integers(0, len(self.rows) - 1)), n)])

    @precondition(lambda self: self.rows)
    @rule()
    def decode_all(self) -> None:
        length = torch.tensor([len(row) + 1 for row in self.rows])
        slots = self.allocator.alloc_decode(length, length, torch.tensor([row[-1] for row in self.rows]))
        if slots is not None:
            for row, slot in zip(self.rows, slots.tolist(), strict=True):
                row.append(slot)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        row = self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1)))
        self.allocator.free(torch.tensor(row))

    @invariant()
    def every_page_has_one_owner(self) -> None:
        owned = [slot // self.page_size for row in self.rows for slot in row[:: self.page_size]]
        free = self.allocator.get_all_free_pages().tolist()
        assert sorted(owned + free) == list(range(1, self.pages + 1))

    @invariant()
    def rows_fill_their_pages_in_order(self) -> None:
        for row in self.rows:
            assert [slot % self.page_size for slot in row] == [i % self.page_size for i in range(len(row))]
            pages = [slot // self.page_size for slot in row]
            assert all(pages[i] == pages[i - i % self.page_size] for i in range(len(row)))


TestPagedAllocation = PagedAllocation.TestCase
TestPagedAllocation.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

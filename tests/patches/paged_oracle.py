"""The correct answers of the paged allocator, one token at a time; and, run as a script, Triton's answers.

As a script it compares our kernels with SGLang's own, in Triton's interpreter, on random batches:
``TRITON_INTERPRET=1 python paged_oracle.py SEED COUNT``.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass

NO_PAGE = -1


@dataclass(frozen=True)
class Batch:
    """Requests that grow from ``prefix`` to ``length`` tokens; ``last`` is the slot of the last old token."""

    page_size: int
    prefix: list[int]
    length: list[int]
    last: list[int]
    free: list[int]


def slots_of(batch: Batch) -> list[int]:
    """The slots of the new tokens, requests one after the other; -1 where there is no page."""
    slots: list[int] = []
    free = iter(batch.free)
    for prefix, length, last in zip(batch.prefix, batch.length, batch.last, strict=True):
        slot = last
        for position in range(prefix, length):
            if position % batch.page_size == 0:
                page = next(free, None)
                slot = NO_PAGE if page is None else page * batch.page_size
            elif slot != NO_PAGE or position == prefix:
                slot += 1
            slots.append(slot)
    return slots


def random_batch(rng: random.Random) -> Batch:
    """A batch with pages enough for it."""
    page_size = rng.choice([1, 2, 4, 16, 64])
    prefix, length, last = [], [], []
    for i in range(rng.randrange(1, 9)):
        old = rng.randrange(0, 3 * page_size + 1)
        prefix.append(old)
        length.append(old + rng.randrange(0, 4 * page_size))
        last.append(-1 if old == 0 else (1000 + i) * page_size + (old - 1) % page_size)
    return Batch(page_size, prefix, length, last, rng.sample(range(1, 900), 64))


def main(seed: int, count: int) -> None:
    """Compare ``count`` random batches; raises AssertionError at the first that differs."""
    import os

    from sglang_ext.patches.cpu import runtime

    runtime.prepare_process(os.environ)
    import torch
    from sglang.kernels.ops.memory.allocator import alloc_decode_kernel, alloc_extend_kernel

    from sglang_ext.patches.cpu.allocator import alloc_decode, alloc_extend

    rng = random.Random(seed)
    tensor = torch.tensor
    for number in range(count):
        batch = random_batch(rng)
        size = len(batch.prefix)
        upper = 1 << (size - 1).bit_length()
        lengths, last, free = tensor(batch.length), tensor(batch.last), tensor(batch.free)
        arguments = (tensor(batch.prefix), lengths, last, free)
        theirs = torch.empty(sum(batch.length) - sum(batch.prefix), dtype=torch.int64)
        ours = torch.empty_like(theirs)
        alloc_extend_kernel[(size,)](*arguments, theirs, upper, batch.page_size)
        alloc_extend(*arguments, ours, upper, batch.page_size)
        assert theirs.tolist() == ours.tolist(), f"batch {number}: {batch}"

        grown = torch.clamp(lengths, min=1)
        before = tensor([1000 + i for i in range(size)]) * batch.page_size + (grown - 2) % batch.page_size
        theirs, ours = torch.empty(size, dtype=torch.int64), torch.empty(size, dtype=torch.int64)
        alloc_decode_kernel[(size,)](grown, before, free, theirs, upper, batch.page_size)
        alloc_decode(grown, before, free, ours, upper, batch.page_size)
        assert theirs.tolist() == ours.tolist(), f"decode of batch {number}: {batch}"
    print(f"{count} batches agree")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

"""How long the runs of neighbouring blocks are that a conversation has in DRAM after a day of use.

Neighbours are copied to a GPU, read over RDMA and read from disk in one call. Conversations of random lengths
take turns; each turn takes the blocks that it lacks, and gives up ends of the least recently used
conversations where none are free. The arena is a server's; no byte is copied. Counted in the second half: the
blocks that a turn finds in DRAM, and how many runs they are; for RDMA, runs that are neighbours here as well
as at another instance, which reads them into an arena in the same state.
"""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from statistics import median

from benchmarks.lib.common import SEED, Options, Report
from sglang_ext.geometry import BlockLayout
from sglang_ext.tiered_store.dram.arena import DramArena, bytes_for

BLOCKS = 20_000
TURNS = 24 * 3600
"""One each second of a day; a tenth with ``--quick``."""
CONVERSATIONS = 600
"""At a time: their KV is about four times as large as the arena."""
ENDS = 0.1
"""The part of turns that are a conversation's last."""
GIVEN_UP = 32
"""Blocks that go at once, at least, from the end of a conversation."""


class Churn:
    """The arena of an instance, and the conversations of which it has a beginning."""

    def __init__(self) -> None:
        layout = BlockLayout(layers=((1,),), block_tokens=1)
        self._arena = DramArena(layout, bytes_for(layout, BLOCKS), shared=False, pin=False, touch=False)
        self._kept: OrderedDict[int, list[int]] = OrderedDict()

    def turn(self, conversation: int, blocks: int) -> tuple[list[int], list[int]]:
        """A turn of a conversation, with its blocks at the end. Returns those that were there, and all."""
        kept = self._kept.pop(conversation, [])
        found, lacking = list(kept), blocks - len(kept)
        while (taken := self._arena.alloc(lacking)) is None:
            oldest, its = next(iter(self._kept.items()))
            going = max(GIVEN_UP, lacking - self._arena.free_blocks)
            self._arena.free(its[-going:])
            del its[-going:]
            if not its:
                del self._kept[oldest]
        self._kept[conversation] = [*kept, *taken.tolist()]
        return found, self._kept[conversation]


def turns(count: int, source: random.Random) -> Iterator[tuple[int, int]]:
    """Conversations, each with the blocks that it has at this turn."""
    live: list[int] = []
    lengths: dict[int, int] = {}
    for _ in range(count):
        if len(live) < CONVERSATIONS:
            live.append(len(lengths))
            lengths[live[-1]] = 0
        conversation = source.choice(live)
        lengths[conversation] += max(1, int(source.lognormvariate(3.3, 1.0)))
        yield conversation, lengths[conversation]
        if source.random() < ENDS:
            live.remove(conversation)


def runs(*places: Sequence[int]) -> int:
    """Pieces in which blocks are copied: each has neighbours in all arenas."""
    following = zip(*map(itertools.pairwise, places), strict=True)
    return 1 + sum(any(there != here + 1 for here, there in pairs) for pairs in following)


def measure_churn(options: Options, report: Report) -> None:
    """Add the lengths of runs to a report."""
    count = TURNS // 10 if options.quick else TURNS
    source = random.Random(SEED)
    holder, reader = Churn(), Churn()
    loads: list[tuple[int, int]] = []
    fetches: list[tuple[int, int]] = []
    # The reader serves conversations of its own, and then some that the holder has, whose blocks it lacks.
    here, there = turns(count, source), turns(count, random.Random(SEED + 1))
    for number, ((mine, blocks), (other, length)) in enumerate(zip(here, there, strict=True)):
        found, kept = holder.turn(mine, blocks)
        reader.turn(other, length)
        if number < count // 2 or not found:
            continue
        loads.append((len(found), runs(found)))
        if number % 10 == 0:
            _, read = reader.turn(-number, len(kept))
            fetches.append((len(kept), runs(kept, read)))
    for case, pieces in (("copies to a GPU, reads from disk", loads), ("reads over RDMA", fetches)):
        report.add(
            case,
            turns=len(pieces),
            blocks=sum(size for size, _ in pieces),
            blocks_per_run=round(sum(size for size, _ in pieces) / sum(number for _, number in pieces), 1),
            median_of_turns=round(median(size / number for size, number in pieces), 1),
        )

"""A fleet's caches over a log: one pass gives the found blocks of every size, for two ways of routing."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from sglang_ext.router.estimate.arrivals import Arrival
from sglang_ext.router.estimate.reuse import Curve, Run, Stack, found_within

MATCH_SHARE: Final = 0.3
"""The share of a prompt that must be cached to decide, as ``--cache-threshold`` has it by default."""


@dataclass(frozen=True)
class Tiers:
    """Blocks that each tier of an instance holds. A lower tier has the blocks of those above: its size
    counts, not the sum. 0 for none."""

    hbm: int
    dram: int = 0
    disk: int = 0

    @property
    def most(self) -> int:
        """Blocks that are found in some tier."""
        return max(self.hbm, self.dram, self.disk)

    def found(self, runs: Sequence[Run], most: int) -> tuple[int, int, int]:
        """Blocks of a prompt that are found in each tier. most: blocks that may be reused at all."""
        hbm = min(found_within(runs, self.hbm), most)
        dram = min(found_within(runs, max(self.hbm, self.dram)), most)
        every = min(found_within(runs, self.most), most)
        return hbm, dram - hbm, every - dram


class Instances:
    """Instances with an LRU cache each, of every size at once.

    Args:
        by_prefix: a prompt goes to the instance that has most of it, as a router with an index sends it;
            otherwise to one after the other, as a load balancer does.
    """

    def __init__(self, count: int, *, by_prefix: bool) -> None:
        self._stacks = [Stack() for _ in range(count)]
        self._by_prefix = by_prefix
        self._tokens = [0] * count
        """Tokens that each instance had to compute, with a cache without a limit."""
        self._next = 0
        self.curve = Curve()

    def use(self, arrival: Arrival, block_tokens: int) -> tuple[int, list[Run]]:
        """Send a prompt to an instance. Returns its number, and the runs that were used there before."""
        names: Sequence[Hashable] = arrival.names
        at = self._choose(names) if self._by_prefix and len(self._stacks) > 1 else self._in_turn()
        unknown = 0
        if arrival.answer:
            names = [*names, *arrival.answer]
        else:
            whole = (arrival.tokens + max(0, arrival.answer_tokens - 1)) // block_tokens
            unknown = max(0, whole - len(names))
        runs = _clipped(self._stacks[at].use(names, unknown), reusable(arrival, block_tokens))
        self._tokens[at] += arrival.tokens - block_tokens * sum(run.blocks for run in runs)
        self.curve.add(runs)
        return at, runs

    def _in_turn(self) -> int:
        self._next = (self._next + 1) % len(self._stacks)
        return self._next

    def _choose(self, names: Sequence[Hashable]) -> int:
        depths = [stack.depth(names) for stack in self._stacks]
        best = max(depths)
        if best < MATCH_SHARE * len(names) or not best:
            return min(range(len(depths)), key=lambda at: (self._tokens[at], at))
        return min(
            (at for at, depth in enumerate(depths) if depth == best), key=lambda at: (self._tokens[at], at)
        )


def reusable(arrival: Arrival, block_tokens: int) -> int:
    """Whole blocks of a prompt that may come from a cache: its last token is always computed."""
    return min(len(arrival.names), max(0, arrival.tokens - 1) // block_tokens)


def _clipped(runs: Sequence[Run], most: int) -> list[Run]:
    found = []
    for run in runs:
        if most <= 0:
            break
        found.append(Run(run.before, min(run.blocks, most)))
        most -= run.blocks
    return found

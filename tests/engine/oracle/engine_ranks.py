"""Ranks of one instance, each its own scheduler thread, pools and mover, that meet where real ones have a
collective. Ranks with the same KV share a directory on disk."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine_movers import DEADLINE_S
from engine_simulation import Rank, Scenario, Traffic, finish

from sglang_ext.engine.ranks import Least, Part, Ranks
from sglang_ext.geometry import BlockLayout
from sglang_ext.patches.adapter.building import open_in_turn
from sglang_ext.tiered_store.disk.followed import FollowedDisk
from sglang_ext.tiered_store.disk.index import Index
from sglang_ext.tiered_store.disk.state import DiskConfig
from sglang_ext.tiered_store.disk.tier import DiskTier
from sglang_ext.tiered_store.tier import BlockTier

RANKS = 2


class DriftedApart(AssertionError):
    """The ranks no longer have the same tree, or no longer make the same calls."""


class Together:
    """The ranks' common operations: agree on the smallest number, and compare their views."""

    def __init__(self, count: int = RANKS) -> None:
        self._barrier = threading.Barrier(count, timeout=DEADLINE_S)
        self._said: list[Any] = [None] * count

    def least_of(self, rank: int) -> Least:
        """How a rank compares its numbers."""

        def least(numbers: Sequence[int]) -> Sequence[int]:
            said = self.everyone(rank, list(numbers))
            return [min(each) for each in zip(*said, strict=True)]

        return least

    def everyone(self, rank: int, what: Any) -> list[Any]:
        """Each rank's value at the same point of its program."""
        self._said[rank] = what
        try:
            self._barrier.wait()
            said = list(self._said)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise DriftedApart("the ranks do not make the same calls") from None
        return said

    def give_up(self) -> None:
        self._barrier.abort()


class _SameProcessIndex(Index):
    """The owner's index, read by another rank in its process, where LMDB allows one environment."""

    def __init__(self, owner: Index) -> None:
        self._owner = owner
        super().__init__(owner.path, shared=True)

    def _open(self) -> None:
        owner = self._owner
        self._env, self._identity = owner._env, owner._identity
        self._meta, self._runs, self._use, self._blocks = owner._meta, owner._runs, owner._use, owner._blocks

    def close(self) -> None:
        self._env = None


class SharedDisk:
    """A directory of ranks with the same KV: rank 0 writes it, and the others read it.

    Args:
        around: wraps a rank's tier, by its number.
    """

    def __init__(
        self,
        path: Path,
        together: Together,
        *,
        limit: int = 64 << 20,
        around: Callable[[BlockTier, int], BlockTier] = lambda tier, number: tier,
    ) -> None:
        self._config = DiskConfig(path, limit)
        self._together = together
        self._around = around
        self.owner: DiskTier | None = None
        self.followers: dict[int, FollowedDisk] = {}

    def open(self, number: int, layout: BlockLayout, *, place: int | None = None) -> BlockTier:
        """The tier of a rank. On all ranks at once. place: among those with the same KV."""

        def opened(*, follows: bool) -> BlockTier:
            if not follows:
                self.owner = DiskTier(self._config, layout)
                return self.owner
            owner = self.owner
            assert owner is not None
            index = owner._state.index
            self.followers[number] = tier = FollowedDisk(
                self._config, layout, open_index=lambda path: _SameProcessIndex(index)
            )
            return tier

        ranks = Ranks(self._together.least_of(number))
        tier = open_in_turn(ranks, opened, follows=(number if place is None else place) > 0)
        assert tier is not None
        return self._around(tier, number)


class TooManyComparisons(AssertionError):
    """The ranks compared numbers more often in a pass than once."""


class RankThread(threading.Thread):
    """One rank's scheduler process."""

    def __init__(
        self,
        number: int,
        together: Together,
        make: Callable[[int], Rank],
        program: Callable[[RankThread, Rank], None],
    ) -> None:
        super().__init__(name=f"rank {number}")
        self.number = number
        self._together = together
        self._make = make
        self._program = program
        self.error: BaseException | None = None
        self.failed_at = 0.0
        self.compared = 0
        """Passes in which the ranks compared numbers."""
        self.streamed = 0
        self.loaded = 0
        self.evicted = 0
        self.retracted = 0
        self.start()

    def run(self) -> None:
        rank = self._make(self.number)
        try:
            self._program(self, rank)
        except BaseException as error:  # noqa: BLE001 - raised again by the test
            self.error, self.failed_at = error, time.monotonic()
            self._together.give_up()
        finally:
            rank.close()

    def serve_traffic(self, rank: Rank, seed: int, steps: int) -> None:
        """Serve random requests, all ranks the same, and compare the trees after each pass."""
        traffic = Traffic(rank.scenario, seed, rank.scenario.stretch)
        for step in range(steps):
            traffic.act(rank.scheduler)
            self._step(rank)
            rank.check()
            seen = (rank.picture(), rank.pools.free_slots().tolist())
            pictures = self._together.everyone(self.number, seen)
            if any(picture != pictures[0] for picture in pictures):
                raise DriftedApart(f"the ranks have different trees after step {step}")
        self.loaded = rank.scheduler.loaded_tokens
        self.evicted = rank.tier.evicted if rank.tier is not None else 0
        if rank.cache.retracting is not None:
            self.retracted = rank.cache.retracting.retraction.counters.retracted
        finish(rank)

    def _step(self, rank: Rank) -> None:
        streams = 0

        def noted() -> bool:
            nonlocal streams
            before = rank.ranks.vectors
            held = streams_hold()
            streams = rank.ranks.vectors - before
            return held

        streams_hold, before = rank.cache.streams_hold, rank.ranks.vectors
        rank.cache.streams_hold = noted  # type: ignore[method-assign]
        rank.scheduler.step()
        del rank.cache.streams_hold
        compared = rank.ranks.vectors - before
        if streams > 1 or compared - streams > 1:
            raise TooManyComparisons(f"{compared} times, {streams} of them for what streamed")
        self.compared += compared
        self.streamed += streams


def serve(
    scenario: Scenario,
    seed: int,
    steps: int,
    *,
    agree: bool = True,
    threaded: bool = False,
    also: Callable[[Rank, int], Part] | None = None,
    check: bool = False,
    disk: Callable[[BlockTier], BlockTier] = lambda disk: disk,
    count: int = RANKS,
) -> list[RankThread]:
    """Serve the same traffic on all ranks; rank 0 copies when it has to, others at random or in a thread."""

    def program(thread: RankThread, rank: Rank) -> None:
        thread.serve_traffic(rank, seed, steps)

    together = Together(count)

    def make(number: int) -> Rank:
        own = scenario
        if threaded and number > 0:
            own = Scenario(**{**scenario.__dict__, "threaded": True})
        pace = random.Random(1000 + number) if number > 0 else None
        least = together.least_of(number) if agree else None
        rank = Rank(own, pace=pace, least=least, check=check, disk_class=disk)
        if also is not None:
            rank.ranks.add(also(rank, number))
        return rank

    return play(together, make, program, count)


def play(
    together: Together,
    make: Callable[[int], Rank],
    program: Callable[[RankThread, Rank], None],
    count: int = RANKS,
) -> list[RankThread]:
    """Have all ranks do the same at once. Raises the error of the rank in which it arose."""
    ranks = [RankThread(number, together, make, program) for number in range(count)]
    for rank in ranks:
        rank.join(timeout=300)
        assert not rank.is_alive()
    failed = sorted((rank for rank in ranks if rank.error is not None), key=lambda rank: rank.failed_at)
    errors = [rank.error for rank in failed if rank.error is not None]
    for error in errors:
        if not isinstance(error, DriftedApart):  # the other ranks raise it when one gives up
            raise error
    if errors:
        raise errors[0]
    return ranks

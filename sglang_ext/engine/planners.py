"""The mechanisms of a cache as one list: the cache calls each planner in order, and a mechanism that is off
is absent from the list.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from sglang_ext.engine.rank_metrics import RankMetrics
from sglang_ext.tiers import Tier
from sglang_ext.wire import Message


class ReadsBatch(Protocol):
    """How planners read the requests of a batch, which are SGLang's."""

    def computed_end(self, request: Any) -> int:
        """The token up to which the batch computes a request."""

    def slots_of(self, request: Any, start: int, end: int) -> Any:
        """Where tokens ``start`` to ``end`` of a request are."""


class Planner:
    """One mechanism of a rank's cache; it overrides the methods that concern it.

    All calls come in the scheduler's thread, at one place of the same pass on every rank.
    """

    def each_pass(self) -> None:
        """Take the next step. Once per pass of the scheduler's loop, after the ranks have agreed."""

    def idle_pass(self) -> None:
        """Use a pass in which the scheduler has no request."""

    @property
    def busy(self) -> bool:
        """Whether an idle scheduler must not sleep, because the next passes have something to do."""
        return False

    @property
    def alarm(self) -> float:
        """The time, by rank 0's clock, at which `expire` must be called; infinite for none."""
        return math.inf

    @property
    def moves_alarm(self) -> bool:
        """Whether a pass may have changed `alarm`. Commands always may."""
        return False

    def expire(self, now: float) -> None:
        """Drop expired entries, and begin those that are due. now: rank 0's time."""

    def takes_command(self, message: Message, at: float) -> bool:
        """Carry out a command if it is for this planner, and return whether it is. at: rank 0's time."""
        return False

    def prefill_begins(self, lengths: Sequence[tuple[int, int]], *, loads: bool) -> None:
        """A prefill batch is about to run; see `PrefillClock`."""

    def prefill_ended(self) -> None:
        """The result of the oldest such batch was processed."""

    def pass_begins(self, requests: Sequence[Any], reads: ReadsBatch) -> None:
        """A prefill batch of these requests is about to run; their slots are in the request table."""

    def pass_ended(self, *, held: bool) -> None:
        """A prefill batch has run. held: whether all KV that streamed into it has verified."""

    def drop_in_flight(self) -> None:
        """Give up all transfers under way. When this returns, none of their KV arrives."""

    def before_clear(self) -> None:
        """Prepare for all tiers being emptied. Transfers under way have been given up."""

    def clear(self) -> None:
        """Empty the tiers below memory; those in memory are empty."""

    def weights_changed(self, generation: int) -> None:
        """Switch to a generation of weights: from now on, KV of other generations does not match."""

    def quiesce(self) -> None:
        """Wait until no copy reads or writes the pool."""

    def check(self) -> None:
        """Verify the bookkeeping. Raises AssertionError that names the inconsistency."""

    def close(self) -> None:
        """Complete the work in flight, and end."""

    def blocks(self) -> Mapping[Tier, tuple[int, int]]:
        """Blocks held and blocks that fit, of each tier that this planner fills."""
        return {}

    def show(self, metrics: RankMetrics) -> None:
        """Publish its metrics (`engine.metric_table`)."""


P = TypeVar("P", bound=Planner)


def find(planners: Iterable[Planner], kind: type[P]) -> P | None:
    """The planner of a kind; None where its mechanism is off."""
    return next((each for each in planners if isinstance(each, kind)), None)

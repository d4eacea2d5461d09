"""The order in which announced prompts are brought, and the time from which each may use HBM.

Prompts of high priority come first, then prompts whose requests may come first. Until shortly before a
request may come (``due_times``), its prompt goes from disk to DRAM only, and *rests* there. Pure decisions;
times are rank 0's.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from sglang_ext.engine.prefetch.due_times import MoveRate, latest_starts
from sglang_ext.engine.tiers.retention import Retention, most_of, owner_of

READ_AHEAD = 4
"""Prompts that are read from disk at the same time."""
AWAKE_S = 1.5
"""An idle scheduler, which sleeps for a second at a time, stays awake so long before a prompt is due."""


@dataclass(eq=False)
class Prompt:
    """A prompt to bring; also the handle of its promotions."""

    id: str
    namespace: Hashable
    key: bytes
    priority: int = 0
    earliest: float = -math.inf
    """The time before which its request does not come."""
    due: bool = False
    """Whether it may use HBM."""
    starts: float = -math.inf
    """When it becomes due."""
    rests: bool = False
    """The blocks that DRAM lacked were read from disk, and the copy to HBM waits until it is due."""
    begun: bool = False
    since: float = 0.0
    """When it began, in the tree's time."""
    reached: int = 0
    """Blocks of the prompt that HBM had when it was last looked at."""
    brought: int = 0
    moving_since: float | None = None
    """When its first piece began, by this rank's clock."""


class PromptQueue:
    """See the module's docstring.

    Args:
        rate: how fast KV moves to HBM.
        kv_per_byte: bytes of KV for each byte of a prompt's key.
        retention: defers the blocks of prompts that are not due.
    """

    def __init__(self, rate: MoveRate, kv_per_byte: int, retention: Retention) -> None:
        self._rate = rate
        self._kv_per_byte = kv_per_byte
        self._retention = retention
        self._now = -math.inf
        self._prompts: list[Prompt] = []
        """In the order in which they are brought."""
        self.next_due = math.inf
        """When the next prompt becomes due; the caller calls ``expire`` then."""

    def __len__(self) -> int:
        return len(self._prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)

    def find(self, id: str) -> Prompt | None:
        return next((each for each in self._prompts if each.id == id), None)

    def put(self, prompt: Prompt) -> None:
        self._prompts.append(prompt)
        self.plan()

    def remove(self, prompt: Prompt) -> None:
        self._prompts.remove(prompt)
        if not prompt.due:
            self._retention.defer(prompt.id, -math.inf)
            self.plan()

    def plan(self) -> None:
        """Sort the prompts, and decide which may use HBM from now on, and when the next one may."""
        self._prompts.sort(key=lambda each: (-each.priority, each.earliest))
        resting = [each for each in self._prompts if not each.due]
        jobs = [(each.earliest, self._rate.seconds(len(each.key) * self._kv_per_byte)) for each in resting]
        for each, starts in zip(resting, latest_starts(jobs), strict=True):
            each.starts = starts
            each.due = each.starts <= self._now or each.earliest == -math.inf
            self._retention.defer(each.id, -math.inf if each.due else each.earliest)
        self.next_due = min((each.starts for each in resting if not each.due), default=math.inf)

    def expire(self, now: float) -> None:
        """Set the time to ``now``, and let prompts that are due use HBM."""
        self._now = now
        if self.next_due < math.inf:
            self.plan()

    def first(self) -> list[Prompt]:
        """Up to `READ_AHEAD` prompts to bring now: those that are due before those to read from disk."""
        first = [each for each in self._prompts if each.due][:READ_AHEAD]
        reading = [each for each in self._prompts if not (each.due or each.rests)]
        return first + reading[: READ_AHEAD - len(first)]

    def weakest(self) -> Prompt:
        """The prompt to drop for another: of the tenant that has the most, one of the lowest priority."""
        most = most_of(each.namespace for each in self._prompts)
        theirs = [each for each in self._prompts if owner_of(each.namespace) == most]
        weakest = [each for each in theirs if each.priority == theirs[-1].priority]
        return weakest[0] if weakest[-1].due else weakest[-1]

    def busy(self, now: float) -> bool:
        """Whether the next passes of an idle scheduler have something to bring."""
        return any(each.due or not each.rests for each in self._prompts) or now >= self.next_due - AWAKE_S

    @property
    def resting(self) -> int:
        """Prompts that wait until they are due."""
        return sum(not each.due for each in self._prompts)

    def __repr__(self) -> str:
        return f"waiting={len(self)}, resting={self.resting}"

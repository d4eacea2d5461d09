"""``RouterCosts`` at a whole fleet: see ``policies.outlook``."""

from __future__ import annotations

import numpy as np

from sglang_ext.cost_model import CostModel
from sglang_ext.router.placing.rows import (
    BEGAN,
    COUNT,
    DISK,
    FETCH,
    GROUP,
    KIND,
    LINE,
    LINED,
    MORE,
    OTHERS,
    REPORTED,
    RUNNING,
    Rows,
)
from sglang_ext.router.placing.transfer_times import factors
from sglang_ext.router.policies.outlook import Numbers, Outlook
from sglang_ext.tiers import Tier

# A Python number beside an array would be converted anew for each operation.
_NONE: Numbers = np.zeros((), np.int64)
_NO_S: Numbers = np.zeros(())


class Steps:
    """Times of decode steps by the number of running requests, kept for one model.

    Args:
        most: largest number of requests.
    """

    def __init__(self, model: CostModel, most: int) -> None:
        self.model, self.most = model, most
        self.beside_s = model.beside_s
        self.all_s: Numbers = np.array([0.0, *(model.decode_s(count) for count in range(1, most + 1))])


class RouterOutlook(Outlook):
    """The terms at the instances of a fleet, at one moment.

    Args:
        table: the columns of the fleet's instances.
        counts: the same of ``Rows.counts``.
        steps: of the model, up to any number of requests that was seen before.
        factor: correction of each one's computing times.
        even: see ``Outlook``.
        in_flight: requests in flight at each.
        now: seconds.
        observed: whether loads from any disk, and fetches from any instance, were observed.
    """

    def __init__(
        self,
        steps: Steps,
        rows: Rows,
        table: Numbers,
        counts: Numbers,
        factor: Numbers,
        even: float | None,
        in_flight: Numbers,
        now: float,
        observed: tuple[bool, bool],
    ) -> None:
        self._model, self._rows, self._table, self._now = steps.model, rows, table, now
        self.factor, self.even = factor, even
        self.kinds = rows.kinds
        self.kind = table[KIND]
        # Much of the time of a decision goes here: so few arrays are made, and terms of zero are left out.
        self.waiting = table[LINED] > _NO_S if rows.lined else None
        mixed = any([rows.batchings[kind].mixed for kind in self.kinds])
        running = np.subtract(in_flight, counts[COUNT])
        np.maximum(running, _NONE, out=running)
        if rows.more:
            running += counts[MORE]
            np.maximum(running, _NONE, out=running)
        most = int(running[running.argmax()])
        self.steps = steps = steps if most <= steps.most else Steps(steps.model, 2 * most)
        self.queue_s = self._queue_s(running if most else None)
        self.steps_s = steps.beside_s * table[RUNNING] if mixed else None
        disks_observed, fetches_observed = observed
        self.even_disks, self.even_fetches = not disks_observed, not fetches_observed
        self._disk_factor: Numbers | None = None
        self._fetch_factor: Numbers | None = None

    def _queue_s(self, running: Numbers | None) -> Numbers:
        """``queue_s``. running: requests that each instance generates for; None if there are none."""
        table, rows, steps = self._table, self._rows, self.steps
        seconds: Numbers
        if not (rows.grouped or rows.lined or rows.others):
            seconds = np.zeros(table.shape[1]) if running is None else steps.all_s.take(running)
            return seconds
        factor = self.factor if self.even is None else self.even
        seconds = table[GROUP] * factor
        seconds += table[BEGAN]
        seconds -= self._now
        np.maximum(seconds, _NO_S, out=seconds)
        if rows.lined:
            seconds += table[LINE] * factor
        if rows.others:
            left_s = table[OTHERS] * factor
            left_s -= self._now - table[REPORTED]
            seconds += np.maximum(left_s, _NO_S, out=left_s)
        if running is not None:
            seconds += steps.all_s.take(running)
        return seconds

    @property
    def disk_factor(self) -> Numbers:
        found = self._disk_factor
        if found is None:
            found = self._disk_factor = factors(self._table[DISK : DISK + 3], self._now)
        return found

    @property
    def fetch_factor(self) -> Numbers:
        found = self._fetch_factor
        if found is None:
            found = self._fetch_factor = factors(self._table[FETCH : FETCH + 3], self._now)
        return found

    def computing(self, kind: int, new: int, context: int) -> tuple[float, int]:
        batching = self._rows.batchings[kind]
        most = batching.chunk
        passes = -(-new // most) if most else 1
        return self._model.exec_s(new, context, batching), passes

    def adding_s(self, new: int, context: int) -> float:
        return self._model.adding_s(new, context)

    def loading_s(self, tier: Tier, tokens: int) -> float:
        return self._model.load_tokens_s(tier, tokens)

    def moving_s(self, tokens: int) -> float:
        return self._model.transfer_s(tokens)

    def can_fetch(self, kind: int, sources: Numbers) -> Numbers:
        sharing = self._rows.sharing
        number = sharing[kind]
        if number < 0:
            return np.zeros(len(sources), bool)
        if len(self.kinds) == 1:
            return np.ones(len(sources), bool)
        alike: Numbers = np.array(sharing)[self.kind[sources].astype(np.int64)] == number
        return alike

    def reachable(self, kind: int, sources: Numbers) -> Numbers:
        if len(self.kinds) == 1 and self._rows.sharing[kind] >= 0:
            return sources
        found: Numbers = sources[self.can_fetch(kind, sources)]
        return found

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


class RouterOutlook(Outlook):
    """The terms at the instances of a fleet, at one moment.

    Args:
        table: the columns of the fleet's instances.
        factor: correction of each one's computing times.
        in_flight: requests in flight at each.
        now: seconds.
        report_s: lifetime of a load report.
    """

    def __init__(
        self,
        model: CostModel,
        rows: Rows,
        table: Numbers,
        factor: Numbers,
        in_flight: Numbers,
        now: float,
        report_s: float,
    ) -> None:
        self._model, self._rows, self._table, self._now = model, rows, table, now
        self.factor = factor
        self.kinds = rows.kinds
        self.kind = table[KIND]
        # Most of the time of a decision goes here: so few arrays are made, and terms of zero are left out.
        self.waiting = table[LINED] > 0 if np.count_nonzero(table[LINED]) else None
        step_s = model.decode_s(0)
        per_request_s = model.decode_s(1) - step_s
        more, others = np.count_nonzero(table[MORE]), np.count_nonzero(table[OTHERS])
        mixed = any([rows.batchings[kind].mixed for kind in self.kinds])
        if more or others or mixed:
            age = now - table[REPORTED]
            fresh = age < report_s
        running = in_flight - table[COUNT]
        np.maximum(running, 0, out=running)
        if more:
            running += table[MORE] * fresh
            np.maximum(running, 0, out=running)
        seconds = factor * table[GROUP]
        seconds += table[BEGAN]
        seconds -= now
        np.maximum(seconds, 0, out=seconds)
        if self.waiting is not None:
            seconds += factor * table[LINE]
        if others:
            seconds += np.where(fresh, np.maximum(factor * table[OTHERS] - age, 0), 0)
        seconds += (running > 0) * step_s
        running *= per_request_s
        seconds += running
        self.queue_s = seconds
        self.steps_s = per_request_s * np.where(fresh, table[RUNNING], 0) if mixed else None
        self._disk_factor: Numbers | None = None
        self._fetch_factor: Numbers | None = None

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

"""An ``Outlook`` over costs that answer for one instance at a time, for tests with costs of their own.

It knows each queue, and nothing of computing: so prompts wait at every instance, and a policy has to
price one by one.
"""

from __future__ import annotations

import numpy as np

from sglang_ext.router.policies.base import Costs, Fleet, Instance
from sglang_ext.router.policies.outlook import Numbers, Outlook
from sglang_ext.tiers import Tier

MANY = 1000
"""Tokens by which sources are compared."""


class AskedOutlook(Outlook):
    def __init__(self, costs: Costs, fleet: Fleet) -> None:
        self._costs, self._fleet = costs, fleet
        self.queue_s = np.array([costs.queue_s(instance) for instance in fleet], float)
        self.factor = np.ones(len(fleet))
        self.steps_s = None
        self.waiting = np.ones(len(fleet), bool)
        self.kind, self.kinds = np.zeros(len(fleet), int), [0]

    @property
    def disk_factor(self) -> Numbers:
        return np.ones(len(self._fleet))

    @property
    def fetch_factor(self) -> Numbers:
        reader = Instance("a reader", 0, 0, 0, 0)
        return np.array([self._costs.transfer_s(each, reader, MANY) / MANY for each in self._fleet])

    def computing(self, kind: int, new: int, context: int) -> tuple[float, int]:
        return 0.0, 0

    def adding_s(self, new: int, context: int) -> float:
        return 0.0

    def loading_s(self, tier: Tier, tokens: int) -> float:
        return self._costs.load_s(self._fleet[0], tier, tokens)

    def moving_s(self, tokens: int) -> float:
        return float(tokens)

    def can_fetch(self, kind: int, sources: Numbers) -> Numbers:
        return np.isfinite(self.fetch_factor[sources])

"""The last hour of a router, for the cluster page: samples of its counters, and its regret."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from sglang_ext.clock import Clock
from sglang_ext.router.dispatch.regret import Regret
from sglang_ext.router.telemetry.observability import RouterMetrics

EVERY_S: Final = 30.0
SAMPLES: Final = 121


class History:
    """A sample every `EVERY_S`, for an hour.

    Args:
        regret: computed with each sample.
        now: the values of a sample, by name; counters as sums since the router's start.
    """

    def __init__(
        self, regret: Regret, clock: Clock, metrics: RouterMetrics, now: Callable[[], Mapping[str, float]]
    ) -> None:
        self.regret = regret
        self._clock = clock
        self._now = now
        self._samples: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=SAMPLES)
        gauge = metrics.gauge("last_hour_cached_ratio")

        def refresh() -> None:
            gauge.clear()
            found = self.regret.last_hour
            if found is not None:
                gauge.labels("hit").set(found.hit)
                gauge.labels("unlimited").set(found.unlimited)
                if found.oracle is not None:
                    gauge.labels("oracle").set(found.oracle)

        metrics.refreshing.subscribe(refresh)
        metrics.show_table("regret", regret)

    async def round(self) -> float:
        """Take a sample; returns the pause until the next."""
        self._samples.append((self._clock.monotonic(), self._now()))
        self.regret.forget_old()
        self.regret.show(await asyncio.to_thread(self.regret.comparison()))
        return EVERY_S

    def as_json(self) -> dict[str, Any]:
        """The answer of ``GET /metrics/last_hour``."""
        now, found = self._clock.monotonic(), self.regret.last_hour
        return {
            "every_s": EVERY_S,
            "samples": [{"ago_s": round(now - at, 3), **values} for at, values in self._samples],
            "cached": None if found is None else msgspec.structs.asdict(found),
        }

    def __repr__(self) -> str:
        return f"History({len(self._samples)} samples)"

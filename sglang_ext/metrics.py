"""Prometheus metrics: names and buckets, the same for every part.

A part makes its metrics in a registry that it is given, never in the process-wide one, so that two
parts of a kind can live in one process (and two tests in one run).
"""

from __future__ import annotations

from typing import Final

PREFIX: Final = "sglang_ext"

STAGE_BUCKETS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
"""Seconds. For our own steps, where 100 microseconds matter."""

REQUEST_BUCKETS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
"""Seconds. For whole requests, time to first token included."""

RATIO_BUCKETS: Final = (0.125, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.4, 2.0, 4.0, 8.0)
"""Observed over expected."""


def metric_name(part: str, name: str) -> str:
    """``sglang_ext_router_requests`` for part ``router`` and name ``requests``; counters gain ``_total``."""
    return f"{PREFIX}_{part}_{name}"

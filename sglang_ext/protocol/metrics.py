"""Prometheus metrics as rows of tables: the names and kinds that a part of the project publishes.

A part makes its metrics in a registry of its own, never in the process-wide one, so that two parts of a kind
can live in one process. The page of all metrics in the documentation is written from these tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
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


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of a table.

    name: without the prefix of its part, and without the ``_total`` that Prometheus appends to a counter's.
    unit: of its value: the counted things, or `s`, `bytes`, `ratio`, `0 or 1`.
    buckets: of a histogram, ascending.
    """

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True)
class MetricTable:
    """All metrics that a part of the project publishes.

    part: its prefix. also: labels that every metric has after its own.
    """

    part: str
    rows: tuple[Metric, ...]
    also: tuple[str, ...] = ()

    @cached_property
    def _by_name(self) -> dict[str, Metric]:
        found = {row.name: row for row in self.rows}
        assert len(found) == len(self.rows), f"two metrics of {self.part} have one name"
        return found

    def row(self, name: str, *kinds: Kind) -> Metric:
        """The row of a name, which is of one of these kinds.

        Raises:
            KeyError: the table has no such row.
        """
        row = self._by_name[name]
        if row.kind not in kinds:
            raise KeyError(f"{name} is a {row.kind}")
        return row

    def labels(self, row: Metric) -> tuple[str, ...]:
        """The names of the labels of a row."""
        return (*row.labels, *self.also)

    def exported(self) -> Iterator[tuple[str, Metric]]:
        """Each row with the name that ``/metrics`` shows."""
        for row in self.rows:
            suffix = "_total" if row.kind is Kind.COUNTER else ""
            yield metric_name(self.part, row.name) + suffix, row

"""The benchmark of placement events measures the named quantities, of an index that is right."""

from __future__ import annotations

import pytest

from benchmarks.index_events import __main__ as index_events
from benchmarks.lib.common import Report


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_events, "HELD_BLOCKS", 1500)


@pytest.mark.usefixtures("small")
def test_an_index_that_took_in_everything_has_what_the_instances_have() -> None:
    sources = [index_events.reported(f"i{number}", number, 150) for number in range(3)]
    index, spent = index_events.taken_in(sources)
    assert spent > 0
    assert all(index.trusted(sent.name) for sent in sources)
    assert [index.tokens_of(sent.name) for sent in sources] == [1500 * index_events.BLOCK] * 3
    index.check()


@pytest.mark.usefixtures("small")
def test_the_summary_has_what_telling_costs() -> None:
    report = Report("index_events")
    sent = index_events.scheduler_rows(report, passes=60, warm=60)
    index_events.router_rows(report, [sent], calls=20)
    assert sent.events > 120
    assert report.summary.keys() == {"added_us_per_pass", "pass_vs_silent", "events_per_second_1"}
    assert all(float(str(value)) > 0 for value in report.summary.values())

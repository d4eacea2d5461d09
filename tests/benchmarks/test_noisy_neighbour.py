"""The benchmark of noisy neighbours runs, reports its measurements, and marks those that mean nothing."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import cast

import pytest

from benchmarks.noisy_neighbour.__main__ import RATIO, Seen, main, why_void
from benchmarks.noisy_neighbour.compute import compute, cpu_seconds
from benchmarks.noisy_neighbour.mechanisms import MECHANISMS
from benchmarks.noisy_neighbour.sides import IN_A_ROW, NotSettledError, Paced, Side, settle

NO_SIDE = cast(Side, None)


async def test_b_has_settled_when_its_requests_are_as_fast_as_before() -> None:
    times = [0.1] * 5 + [0.9] + [0.2] * IN_A_ROW + [9.0]

    async def ask(b: Side) -> float:
        return times.pop(0)

    await settle(NO_SIDE, ask, 0.1)
    assert times == [9.0]


async def test_a_row_whose_b_does_not_settle_is_void() -> None:
    async def slow(b: Side) -> float:
        return 0.21

    with pytest.raises(NotSettledError, match="alone took 210 ms, and before A's 100 ms"):
        await settle(NO_SIDE, slow, 0.1, timeout_s=0.02)
    assert Seen([0.1], [0.1], void="it did not settle").ratio() is None
    assert Seen([0.1], [0.2]).ratio() == 2.0
    assert Seen([0.1], [0.2]).control_ratio() is None
    assert Seen([0.1], [0.2], [0.4]).control_ratio() == 0.5


async def test_plain_requests_come_at_their_pace_and_take_their_compute() -> None:
    taken: list[float] = []

    async def take(seconds: float) -> None:
        taken.append(seconds)

    class Plain:
        async def generate(self, prompt: object) -> float:
            return 0.0

    paced, began = Paced(take, per_s=50.0, cpu_s=0.25), time.perf_counter()
    for _ in range(6):
        await paced(cast(Side, Plain()))
    assert taken == [0.25] * 6
    assert time.perf_counter() - began > 0.08, "the first at once, and five 20 ms apart"


async def test_compute_takes_the_cpu_seconds_that_it_is_asked_for() -> None:
    with compute() as processes:
        before = cpu_seconds()
        await processes.take(0.2)
        assert cpu_seconds() - before >= 0.15


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        ({200: 5, 429: 9}, {200: 5}, ""),
        ({200: 5, 500: 1}, {200: 5}, "1 of A's"),
        ({200: 5, 0: 2}, {200: 5}, "2 of A's"),
        ({429: 9}, {200: 5}, "A got nothing done"),
        ({200: 5}, {200: 5, 429: 1}, "1 of B's"),
    ],
)
def test_a_row_with_failed_requests_is_void(a: dict[int, int], b: dict[int, int], why: str) -> None:
    found = why_void(Counter(a), Counter(b))
    assert found.startswith(why)
    assert bool(found) == bool(why)


@pytest.mark.slow
def test_it_measures_what_it_was_asked_for(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    assert main(["--tiny", "--mechanisms", "documents", "priorities", "--json", str(found)]) == 0
    report = json.loads(found.read_text())
    assert [row["case"] for row in report["rows"]] == ["documents", "priorities"]
    for row in report["rows"]:
        assert row["void"] is None
        assert row["ratio"] > 0
        assert row["a_failed"] == 0
        assert row["a_done"] > 0
        assert row["control_ratio"] > 0
        assert row["a_cpu_ms"] is None or row["a_cpu_ms"] > 0
    aims = {f"p99_{name}_vs_{to}" for name in MECHANISMS for to in ("alone", "control")}
    assert aims == report["aims"].keys()
    assert report["aims"]["p99_documents_vs_alone"]["aim"] == f"at most {RATIO}"

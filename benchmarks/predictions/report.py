"""The tables of the benchmark, from the cells that have run."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.lib.common import Report, at_most
from benchmarks.predictions.cells import ORDER, Cell, Ran
from benchmarks.predictions.figures import Errors, Spread, Times, components, error, inside, order
from benchmarks.predictions.fleet import REFERENCE_ANSWER, REFERENCE_TOKENS
from benchmarks.predictions.predict import MARGIN, Replayed, of_links, of_memory, pace, slower
from sglang_ext.cost_model import CostModel, Profile

AIMS: Final = {
    "ttft_mean_error": at_most(0.15),
    "jct_mean_error": at_most(0.15),
    "ttft_p90_error": at_most(0.25),
    "jct_p90_error": at_most(0.25),
    "outside_of_interval": at_most(0),
    "pairs_in_another_order": at_most(0),
}
"""Errors: the largest of all cells but those at `NEAR`."""
LINKS: Final = ("network", "disk_read", "disk_write")
"""Settings that are bandwidths."""
LEAST: Final = "0.3"
NEAR: Final = "0.85"
"""The load at which an interval is predicted."""


class Tables:
    """Adds the cells' rows to a report.

    Args:
        profile: of another run.
    """

    def __init__(self, report: Report, profile: Profile) -> None:
        self._report, self._profile, self._model = report, profile, CostModel(profile)
        self._links, self._memory = of_links(profile), of_memory(profile)
        self._worst: dict[str, float] = {}
        self._outside = self._near = 0
        self._means: dict[Cell, tuple[float, float]] = {}
        """Of the truth: TTFT and JCT of each cell."""
        self._paces: dict[Cell, tuple[float, float]] = {}
        """Of passes and steps, of the cells at `LEAST`."""

    def add(self, cells: Sequence[Ran]) -> None:
        """Add all measured cells, and the figures of all together."""
        replayed = {ran.cell: Replayed.of(ran) for ran in cells}
        for cell, each in replayed.items():
            real = list(each.truth.values())
            self._means[cell] = (
                statistics.fmean(one.ttft for one in real), statistics.fmean(one.jct for one in real)
            )  # fmt: skip
            if cell.load == LEAST:
                self._paces[cell] = pace(each.predicted(self._model), each.truth)
        for ran in cells:
            self._add(ran, replayed[ran.cell])
        for figure, value in self._worst.items():
            self._report.summary[figure] = value
        if self._near:
            self._report.summary["outside_of_interval"] = self._outside
        self._orders({cell: each for cell, each in replayed.items() if cell.setup == ORDER})

    def _add(self, ran: Ran, replayed: Replayed) -> None:
        cell, truth = ran.cell, replayed.truth
        predicted = replayed.predicted(self._model)
        both = [id for id in truth if id in predicted]
        real, ours = [truth[id] for id in both], [predicted[id] for id in both]
        drift = self._drift(ran)
        self._report.add(
            cell.name, counted=len(both), rate=ran.facts["rate"], users=ran.facts["users"],
            load_1m=ran.facts["load_1m"], **drift,
        )  # fmt: skip
        ttft, jct = self._errors(cell.name, "simulator", ours, real)
        self._components(cell.name, ours, real)
        if cell.setup != ORDER and cell.load != NEAR:
            for name, value in (
                ("ttft_mean_error", ttft.mean), ("jct_mean_error", jct.mean),
                ("ttft_p90_error", ttft.p90), ("jct_p90_error", jct.p90),
            ):  # fmt: skip
                self._worst[name] = max(self._worst.get(name, 0.0), abs(value))
        if cell.load == NEAR:
            self._interval(replayed, ours, real)
        if cell.setup != ORDER:
            self._others(cell, replayed, both, real, drift)

    def _drift(self, ran: Ran) -> dict[str, float]:
        """Prefills and steps of the reference requests over the profile's; and the slowest part's prefills
        over the fastest part's."""
        parts = ran.facts["reference_s"]
        prefill_s, generation_s = (
            statistics.fmean(statistics.median(each[place] for each in part) for part in parts)
            for place in (0, 1)
        )
        prefills = [statistics.median(each[0] for each in part) for part in parts]
        step_s = self._model.decode_s(1, REFERENCE_TOKENS + REFERENCE_ANSWER / 2)
        late = self._model.late
        first_s = self._model.exec_s(REFERENCE_TOKENS, 0) + late * step_s
        return {
            "prefill_over_profile": prefill_s / first_s,
            "step_over_profile": generation_s / (REFERENCE_ANSWER - 1 - late) / step_s,
            "slowest_over_fastest": max(prefills) / min(prefills),
        }

    def _errors(
        self, case: str, by: str, ours: Sequence[Times], real: Sequence[Times]
    ) -> tuple[Errors, Errors]:
        """Add a row with the errors of TTFT and JCT."""
        first = Errors.of([one.ttft for one in ours], [one.ttft for one in real])
        last = Errors.of([one.jct for one in ours], [one.jct for one in real])
        truth = Spread.of([one.ttft for one in real]), Spread.of([one.jct for one in real])
        self._report.add(
            case, by=by,
            ttft_ms=truth[0].mean * 1e3, error=first.mean, p90_ms=truth[0].p90 * 1e3, p90_error=first.p90,
            each=first.each, middle=first.middle, jct_ms=truth[1].mean * 1e3, jct_error=last.mean,
            jct_p90_error=last.p90, jct_each=last.each, jct_middle=last.middle,
        )  # fmt: skip
        return first, last

    def _components(self, case: str, ours: Sequence[Times], real: Sequence[Times]) -> None:
        found = components(ours, real)
        self._report.add(case, **{f"{stage}_ms_too_long": 1e3 * found[stage] for stage in found})

    def _interval(self, replayed: Replayed, ours: Sequence[Times], real: Sequence[Times]) -> None:
        """Add predictions for a little less and a little more load: is the measured time between them?"""
        means = {"at_rate": statistics.fmean(one.ttft for one in ours)}
        for name, rate in (("at_less", 1 - MARGIN), ("at_more", 1 + MARGIN)):
            means[name] = statistics.fmean(one.ttft for one in replayed.predicted(self._model, rate).values())
        truth = statistics.fmean(one.ttft for one in real)
        found = inside(truth, list(means.values()))
        self._near += 1
        self._outside += not found
        self._report.add(
            replayed.cell.name, mean_ttft_ms=truth * 1e3, inside=found,
            **{f"predicted_ms_{name}": seconds * 1e3 for name, seconds in means.items()},
        )  # fmt: skip

    def _others(
        self,
        cell: Cell,
        replayed: Replayed,
        both: Sequence[str],
        real: Sequence[Times],
        drift: Mapping[str, float],
    ) -> None:
        """Rows of baselines and of changed constants."""
        name = cell.name
        drifted = slower(self._profile, drift["prefill_over_profile"], drift["step_over_profile"])
        for by, model, changes in (
            ("twice the links' bandwidth", self._links, dict.fromkeys(LINKS, 2.0)),
            ("twice the bandwidth of passes", self._memory, {}),
            ("simulator, times scaled by the reference", drifted, {}),
            (f"simulator, times scaled by the cells at {LEAST}", self._paced(cell), {}),
        ):
            if model is not None:
                found = replayed.predicted(model, **changes)
                if all(id in found for id in both):
                    self._errors(name, by, [found[id] for id in both], real)
        others = [
            means for other, means in self._means.items() if other.setup == cell.setup and other != cell
        ]
        if others:
            ttft, jct = (statistics.fmean(each[place] for each in others) for place in (0, 1))
            same = {"way": 0.0, "queue": 0.0, "prefill": ttft, "transfer": 0.0, "decode": jct - ttft}
            null = [Times(one.session, same) for one in real]
            self._errors(name, "null: the mean of the set-up's other cells", null, real)

    def _paced(self, cell: Cell) -> CostModel | None:
        """With passes and steps as long as they were at the set-up's least load; None for that itself."""
        found = [pace for other, pace in self._paces.items() if other.setup == cell.setup]
        if not found or cell.load == LEAST:
            return None
        passes, steps = (statistics.fmean(each[place] for each in found) for place in (0, 1))
        return slower(self._profile, passes, steps)

    def _orders(self, cells: Mapping[Cell, Replayed]) -> None:
        """Compare the order of policies, seed by seed."""
        wrong, compared = 0, 0
        for seed in sorted({cell.seed for cell in cells}):
            of_seed = {cell.policy: each for cell, each in cells.items() if cell.seed == seed}
            truth = order({policy: by_turn(each.truth) for policy, each in of_seed.items()})
            ours = order({policy: by_turn(each.predicted(self._model)) for policy, each in of_seed.items()})
            for pair, said in truth.items():
                compared += 1
                wrong += ours[pair] != said
                self._report.add(
                    f"order, seed {seed}", first=pair[0], second=pair[1], measured=_SAID[said],
                    predicted=_SAID[ours[pair]],
                )  # fmt: skip
            for policy, each in of_seed.items():
                real = statistics.fmean(one.ttft for one in each.truth.values())
                found = statistics.fmean(one.ttft for one in each.predicted(self._model).values())
                self._report.add(
                    f"order, seed {seed}", policy=policy, ttft_ms=real * 1e3, predicted_ms=found * 1e3,
                    error=error(found, real),
                )  # fmt: skip
        if compared:
            self._report.summary["pairs_in_another_order"] = wrong
            self._report.summary["pairs_compared"] = compared


_SAID: Final = {-1: "first is faster", 0: "tie", 1: "second is faster"}


def by_turn(times: Mapping[str, Times]) -> dict[str, Times]:
    """By session and number in it, which are of the same request with every policy."""
    counts: Counter[str] = Counter()
    found = {}
    for each in times.values():
        counts[each.session] += 1
        found[f"{each.session} {counts[each.session]}"] = each
    return found

"""A recorded cell by the simulator: its arrivals and lengths, and the times of a profile of another run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from benchmarks.predictions.cells import ESTIMATED, PAIR, Cell, Ran, estimate
from benchmarks.predictions.figures import Times
from sglang_ext.cost_model import Batch, CostModel, Link, OperatorLevel, Profile
from sglang_ext.cost_model.model import Execution
from sglang_ext.router.placing.profiles import load_named
from sglang_ext.simulator.command import Arguments, settings_of
from sglang_ext.simulator.outcome import Decided
from sglang_ext.simulator.run import simulate
from sglang_ext.simulator.settings import Settings
from sglang_ext.simulator.trace import Trace, read_trace
from sglang_ext.tiers import Tier

MARGIN: Final = 0.1
"""By which the load is changed for the interval."""
HINTED: Final = "disk-hints"


@dataclass(frozen=True)
class Replayed:
    """A recorded cell. counted: the requests that count, in the order of their arrivals."""

    cell: Cell
    trace: Trace
    settings: Settings
    counted: list[str]

    @classmethod
    def of(cls, ran: Ran) -> Replayed:
        """Reference requests are simulated, and do not count."""
        trace = read_trace(ran.lines)
        references = set(ran.facts["reference_places"])
        ids = [each.turn.id for place, each in enumerate(trace.sessions) if place not in references]
        ids = ids[ran.facts["warm"] :]
        settings = replace(settings_of(Arguments(), trace), observed=False, closed=ran.cell.closed)
        settings = replace(settings, requests=len(trace.sessions))
        if ran.cell.setup == PAIR:
            settings = replace(settings, pd_caching=2)
        if ran.cell.setup == HINTED and ran.cell.closed:
            # Each turn is announced when it has ended, which is another moment in the simulation.
            settings, trace.announcements = replace(settings, hints=1.0), []
        return cls(ran.cell, trace, settings, ids)

    @functools.cached_property
    def truth(self) -> dict[str, Times]:
        """By request, where its stages were recorded."""
        return self._times(self.trace.decided)

    def predicted(self, model: CostModel, rate: float = 1.0, **changes: float) -> dict[str, Times]:
        """By request.

        Args:
            rate: arrivals in a time, in times of the recorded ones.
            changes: of settings, as factors.
        """
        factors = {name: getattr(self.settings, name) * factor for name, factor in changes.items()}
        settings = replace(self.settings, **factors, layers=layers_of(model) or self.settings.layers)
        trace = self.trace if rate == 1.0 else self.trace.at_rate(rate)
        expected = load_named(estimate()) if self.cell.policy == ESTIMATED else None
        outcome = simulate(settings, model, trace, expected=expected)
        return self._times(outcome.decided)

    def _times(self, decided: dict[str, Decided]) -> dict[str, Times]:
        sessions = {each.turn.id: each.name for each in self.trace.sessions}
        return {
            id: Times(sessions[id], found.stages, sum(found.hits.values()) - found.hits.get("hbm", 0))
            for id in self.counted
            if (found := decided.get(id)) is not None and found.stages
        }


def layers_of(model: CostModel) -> int:
    """Of the profile's model; 0 where it does not know them."""
    profile = model.profile
    return 0 if profile is None or profile.operators is None else profile.operators.layers


class Slower:
    """An execution whose passes take ``factor`` times as long."""

    def __init__(self, execution: Execution, factor: float) -> None:
        self._execution, self._factor = execution, factor

    @property
    def around_s(self) -> float:
        return self._factor * self._execution.around_s

    def batch_s(self, batch: Batch) -> float:
        return self._factor * self._execution.batch_s(batch)

    def adding_s(self, batch: Batch) -> float:
        return self._factor * self._execution.adding_s(batch)


def slower(profile: Profile, passes: float, steps: float) -> CostModel:
    """The costs of a machine whose passes with prompts and whose steps take so many times as long."""
    model = CostModel(_decoding(profile, steps))
    model.execution = Slower(model.execution, passes)
    return model


def pace(predicted: Mapping[str, Times], truth: Mapping[str, Times]) -> tuple[float, float]:
    """How many times as long passes and steps took as was predicted."""

    def ratio(stage: str) -> float:
        both = [id for id in truth if id in predicted]
        return sum(truth[id].stages[stage] for id in both) / sum(predicted[id].stages[stage] for id in both)

    return ratio("prefill"), ratio("decode")


def _decoding(profile: Profile, factor: float) -> Profile:
    if profile.decode is None:
        return profile
    return msgspec.structs.replace(profile, decode=profile.decode.times(factor))


def of_links(profile: Profile) -> CostModel:
    """With twice the bandwidth of each tier and between instances."""
    defaults = CostModel(profile)

    def halved(seconds: Callable[[float], float]) -> Link:
        fixed_s = seconds(0.0)
        return Link(fixed_s, (seconds(1e9) - fixed_s) / 2e9)

    tiers = {tier.name: halved(functools.partial(defaults.load_s, tier)) for tier in (Tier.DRAM, Tier.DISK)}
    per_token = profile.kv_bytes_per_token
    transfer = halved(lambda nbytes: defaults.transfer_s(round(nbytes / per_token)))
    return CostModel(msgspec.structs.replace(profile, tiers=tiers, transfer=transfer))


def of_memory(profile: Profile) -> CostModel | None:
    """With twice the bandwidth of memory in a pass, and of matrix products; None without operators."""
    level = profile.operators
    if level is None:
        return None
    waves = msgspec.structs.replace(level.waves, flops_per_s=2 * level.waves.flops_per_s)
    changed: OperatorLevel = msgspec.structs.replace(level, waves=waves)
    return CostModel(msgspec.structs.replace(_decoding(profile, 0.5), operators=changed))

"""How much the advisory benchmark measures, in its quick and in its full form, and its flags."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.advisory.fleet import (
    BY_LAYER,
    HINTED,
    MODEL,
    MODELS,
    RECOMPUTE,
    STOCK,
    SYSTEMS,
    UNHINTED,
    WHOLE,
    Tiers,
)
from benchmarks.advisory.talks import Shape
from benchmarks.lib.common import Options
from benchmarks.lib.data import data_flag
from sglang_ext.flags import flag, one_of

PARTS = ("systems", "hits", "missing", "priority", "prefill", "balance", "agents", "graph", "layers")
QUICK_PARTS = ("systems", "hits", "missing")
SERVERS = "each server: model "
"""Beginning of the note that describes a report's servers."""
WORDS = {system.word: system for system in (*SYSTEMS, WHOLE, BY_LAYER)}


@dataclass(frozen=True)
class Crowd:
    """The part ``balance``: so many users of so many instances, for so long. Requests sent in the first
    ``settling_s`` are not counted: all users begin at once."""

    instances: int = 4
    users: int = 48
    seconds: float = 75.0
    settling_s: float = 15.0
    window_s: float = 10.0
    tiers: Tiers = field(default_factory=lambda: Tiers(hbm=12_288, dram=65_536))
    shape: Shape = field(default_factory=lambda: Shape(under_way=False, least_turns=4, least_past=0))


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    counts: users by system; the count that all systems share is ``main``. varied_s, slice_s: of the parts
    that vary something, and of its turns. runs, calls: of agents. fan_out_rounds: of each run that fans out.
    sessions, rounds: of the part ``layers``.
    """

    main: int
    counts: dict[str, tuple[int, ...]]
    seconds: float
    varied_s: float
    slice_s: float
    missing: tuple[float, ...]
    urgent: tuple[float, ...]
    hits: int
    runs: int
    calls: int
    fan_out_rounds: int
    tiers: Tiers = field(default_factory=Tiers)
    crowd: Crowd = field(default_factory=Crowd)
    sessions: tuple[int, ...] = (6, 8, 10, 12)
    rounds: int = 3
    layers_tiers: Tiers = field(default_factory=lambda: Tiers(hbm=12_288, dram=65_536))


QUICK = Plan(
    main=16,
    counts={RECOMPUTE.name: (2, 4), STOCK.name: (8, 16), UNHINTED.name: (), HINTED.name: (16, 24)},
    seconds=8.0,
    varied_s=24.0,
    slice_s=4.0,
    # The ends of a line determine it better than points between them.
    missing=(0.0, 0.5),
    urgent=(0.1, 0.3, 0.5),
    hits=32,
    runs=3,
    calls=8,
    fan_out_rounds=3,
    tiers=Tiers(hbm=12_288),
    crowd=Crowd(seconds=30.0, settling_s=6.0),
    sessions=(8,),
)
TINY = Plan(
    main=2,
    counts={RECOMPUTE.name: (2,), STOCK.name: (2,), UNHINTED.name: (), HINTED.name: (2,)},
    seconds=1.0,
    varied_s=2.0,
    slice_s=1.0,
    missing=(0.0, 0.5),
    urgent=(0.5,),
    hits=2,
    runs=1,
    calls=2,
    fan_out_rounds=1,
    tiers=Tiers(hbm=12_288),
    crowd=Crowd(users=2, seconds=1.0, settling_s=0.1),
    sessions=(8,),
    rounds=1,
)
FULL = Plan(
    main=24,
    counts={RECOMPUTE.name: (2, 4, 8), STOCK.name: (4, 12, 24), HINTED.name: (12, 24, 40)},
    seconds=50.0,
    varied_s=280.0,
    slice_s=7.0,
    missing=(0.0, 0.1, 0.3, 0.5),
    urgent=(0.1, 0.3, 0.5),
    hits=140,
    runs=5,
    calls=10,
    fan_out_rounds=4,
)


@dataclass(frozen=True, kw_only=True)
class AdvisoryOptions(Options):
    """The flags of the advisory benchmark."""

    data: str | None = data_flag()
    parts: tuple[str, ...] = flag(
        (), "The parts to measure; all of these without --quick.", one_of(*PARTS), several="+"
    )
    systems: tuple[str, ...] = flag(
        tuple(WORDS), "The systems to measure; all of these.", one_of(*WORDS), several="+"
    )
    instances: int = flag(2, "Servers of each system.")
    model: str = flag(MODEL, "The tiny model, in float32.", one_of(*MODELS))
    dram_tokens: int | None = flag(
        None, "DRAM of each server that has any, in tokens. Not given: more than all sessions need."
    )
    disk_tokens: int = flag(0, "A disk tier below DRAM, in tokens for each server. 0: none.")
    pace: float = flag(Shape().pace, "How much shorter pauses are.")
    sglang_router_python: Path | None = flag(None, "Interpreter of an environment with sglang-router.")
    add_to: Path | None = flag(
        None,
        "The JSON report of an earlier run: new rows take the place of the same rows, and the "
        "summary is that of all.",
        metavar="FILE",
    )
    plots: Path | None = flag(None, "Also write the figures there, as SVG.", metavar="DIR")

    def tiers(self, planned: Tiers) -> Tiers:
        """Those of each server, where the plan has these."""
        dram = planned.dram if self.dram_tokens is None else self.dram_tokens
        return replace(planned, dram=dram, disk=self.disk_tokens)

    @property
    def servers(self) -> str:
        """The conditions that two runs must share to be one report."""
        dram = "DRAM as planned" if self.dram_tokens is None else f"DRAM of {self.dram_tokens} tokens"
        disk = f"a disk of {self.disk_tokens} tokens" if self.disk_tokens else "no disk"
        return f"{SERVERS}{self.model}, {dram}, {disk}"

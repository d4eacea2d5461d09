"""How far the simulator's predicted times are from those of real servers.

Tiny servers behind a router that records: two colocated, one for prefill and one for decode, one with a disk
and hints; at 0.3, 0.6 and 0.85 of the measured capacity with Poisson arrivals, and with users who think, as
many as give 0.6. The simulator gets the arrivals, prompts and lengths of the recording, and the times of a
profile that another run has calibrated (--calibrate). At three colocated servers and a load of 0.6, the order
of policies is compared.

Each cell is a file in --folder, and is not run again. --minutes says for how long new cells are begun; 0 only
reports.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.common import Options, Report
from benchmarks.predictions.cells import CLOSED, SETUPS, Cell, Folder, cells
from benchmarks.predictions.fleet import Fleet, expected_s, make_profile
from benchmarks.predictions.predict import Replayed
from benchmarks.predictions.report import AIMS, Tables
from sglang_ext.cost_model import CostModel, load
from sglang_ext.errors import ConfigError
from sglang_ext.flags import COUNT, NUMBER, flag, one_of

NAME = "predictions"


@dataclass(frozen=True, kw_only=True)
class PredictionOptions(Options):
    """The flags of this benchmark."""

    folder: Path = flag(Path("predictions"), "Where cells are kept.", metavar="FOLDER")
    calibrate: bool = flag(False, "Only calibrate a server, and keep its profile in the folder.")
    setups: tuple[str, ...] = flag(SETUPS, "Set-ups to run.", one_of(*SETUPS), several="+")
    loads: tuple[str, ...] = flag((), "Only these loads.", one_of("0.3", "0.6", "0.85", CLOSED), several="+")
    seeds: int = flag(3, "Seeds to run, from 1.", COUNT.positive())
    minutes: float = flag(60.0, "For how long new cells are begun; 0: only report.", NUMBER)


def main(argv: Sequence[str] | None = None) -> int:
    options = PredictionOptions.of(argv, NAME, __doc__)
    folder, report = Folder(options.folder), Report(NAME, AIMS)
    if options.calibrate:
        make_profile(folder, *options.pick((7, 9), quick=(5, 5), tiny=(5, 1)))
        return 0
    if not folder.profile.exists():
        raise ConfigError(f"there is no {folder.profile}", field="--folder", hint="Run it with --calibrate")
    until = time.monotonic() + 60 * options.minutes
    seeds = range(1, options.seeds + 1)
    wanted = [
        cell for cell in cells(options.setups, seeds) if not options.loads or cell.load in options.loads
    ]
    try:
        for setup in options.setups:
            run(options, folder, setup, [cell for cell in wanted if cell.setup == setup], until)
    except KeyboardInterrupt:
        report.note("interrupted")
    found = [ran for cell in wanted if (ran := folder.ran(cell)) is not None]
    missing = [cell.name for cell in wanted if folder.read(cell.name) is None]
    if missing:
        report.note(f"{len(missing)} cells were not run: {', '.join(missing)}")
    Tables(report, load(folder.profile)).add(found)
    return report.finish(options)


def run(options: PredictionOptions, folder: Folder, setup: str, wanted: Sequence[Cell], until: float) -> None:
    """Play the cells of a set-up that have not run."""
    missing = [cell for cell in wanted if folder.read(cell.name) is None]
    if not missing or time.monotonic() >= until:
        return
    warm, count = options.pick((40, 220), quick=(30, 200), tiny=(4, 12))
    model = CostModel(load(folder.profile))
    jct_s = expected_s(model.exec_s, model.decode_s(2))
    with Fleet(setup, folder) as fleet:
        known = folder.read(f"capacity-{setup}")
        if known is None:
            known = {"per_s": fleet.capacity(*((6.0,) if options.tiny else ()))}
            folder.write(f"capacity-{setup}", known)
        for cell in missing:
            if time.monotonic() >= until:
                return
            sys.stderr.write(f"{cell.name}\n")
            folder.add(cell, fleet.play(cell, known["per_s"], warm, count, _jct(folder, cell, jct_s)))


def _jct(folder: Folder, cell: Cell, alone_s: float) -> float:
    """The mean time to the last token at 0.6 of the capacity, of the cell that has it; else twice that of a
    request by itself."""
    ran = folder.ran(Cell(cell.setup, "0.6", cell.seed)) if cell.closed else None
    if ran is None:
        return 2 * alone_s
    times = [each.jct for each in Replayed.of(ran).truth.values()]
    return sum(times) / len(times)


if __name__ == "__main__":
    sys.exit(main())

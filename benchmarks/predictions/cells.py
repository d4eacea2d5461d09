"""The cells of the benchmark, and the folder that keeps those that have run.

A cell is one load on one set-up, with one seed and one policy. Its file has the measurements around the run;
the router's recording lies beside it. The file is written last, so a cell without one has not run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from sglang_ext.testing.models import model_path

CLOSED: Final = "closed"
LOADS: Final = {"0.3": 0.3, "0.6": 0.6, "0.85": 0.85, CLOSED: 0.6}
"""Shares of the measured capacity. ``closed``: users in a closed loop, as many as give that share."""
PAIR: Final = "1P1D"
ORDER: Final = "3-colocated"
"""The set-up at which policies are compared."""
SETUPS: Final = ("2-colocated", PAIR, "disk-hints", ORDER)
ESTIMATED: Final = "cost-estimated"
"""The policy ``cost`` with the estimate for a CPU in place of the calibration."""
MODEL: Final = "small"
POLICIES: Final = ("cost", ESTIMATED, "prompt-tree", "session", "least-load", "round-robin")


@dataclass(frozen=True, slots=True)
class Cell:
    """One run."""

    setup: str
    load: str
    seed: int
    policy: str = "cost"

    @property
    def name(self) -> str:
        return f"{self.setup}_{self.load}_{self.policy}_{self.seed}"

    @property
    def closed(self) -> bool:
        """Users wait for their answers."""
        return self.load == CLOSED


def cells(setups: Sequence[str], seeds: Sequence[int]) -> Iterator[Cell]:
    """All cells, seed by seed: those that were chosen first give a whole table."""
    for seed in seeds:
        for setup in setups:
            if setup == ORDER:
                yield from (Cell(setup, "0.6", seed, policy) for policy in POLICIES)
            else:
                yield from (Cell(setup, load, seed) for load in LOADS)


def estimate() -> str:
    """``--cost-profile`` of the router with the policy `ESTIMATED`."""
    return f"estimated=cpu:{model_path(MODEL) / 'config.json'}"


@dataclass(frozen=True, slots=True)
class Ran:
    """A cell that has run. lines: of its recording."""

    cell: Cell
    facts: dict[str, Any]
    lines: list[bytes]


class Folder:
    """The measured cells, a file each.

    Args:
        path: made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path

    @property
    def profile(self) -> Path:
        """The costs of the servers, calibrated by another run."""
        return self.path / "profile.json"

    def recording(self, cell: Cell) -> Path:
        """Where the router records a cell; an old one of a run that was interrupted is gone."""
        path = self.path / f"{cell.name}.jsonl"
        path.unlink(missing_ok=True)
        return path

    def ran(self, cell: Cell) -> Ran | None:
        """A cell that has run; None if it has not."""
        facts = self.read(cell.name)
        if facts is None:
            return None
        recording = (self.path / f"{cell.name}.jsonl").read_bytes()
        return Ran(cell, facts, recording.splitlines(keepends=True))

    def add(self, cell: Cell, facts: dict[str, Any]) -> None:
        """A cell has run."""
        self.write(cell.name, {"cell": asdict(cell), **facts})

    def read(self, name: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads((self.path / f"{name}.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return found

    def write(self, name: str, facts: dict[str, Any]) -> None:
        """A reader never sees half of it."""
        part = self.path / f"{name}.part"
        part.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self.path / f"{name}.json")

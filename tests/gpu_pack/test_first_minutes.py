"""``first_minutes.sh`` on a machine without a GPU: its parts run as they are, with a stand-in for servers
(stand_in.py), and ``verdicts.py`` judges their files. The figures mean nothing.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.addresses import Ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
TRAVELS = runpy.run_path(str(ROOT / "scripts" / "gpu_pack.py"))["TRAVELS"]
COMMAND = f"""#!/bin/bash
if [[ "$1 $2" == "-m "*.launch_server ]]; then
  exec {sys.executable} {Path(__file__).with_name("stand_in.py")} "$@"
fi
exec {sys.executable} "$@"
"""


class Machine:
    """A checkout with ``.dev``, unpacked, and a ``python3`` whose servers are stand-ins."""

    def __init__(self, folder: Path, ports: int) -> None:
        self.out = folder / "out"
        self._folder = folder
        self._log = folder / "starts"
        dev, commands = folder / ".dev", folder / "commands"
        (dev / "site").mkdir(parents=True)
        (dev / "site" / ".ready").touch()
        for name in TRAVELS:
            shutil.copy(ROOT / "scripts" / "gpu" / name, dev)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").touch()
        commands.mkdir()
        (commands / "python3").write_text(COMMAND, encoding="utf-8")
        (commands / "python3").chmod(0o755)
        self._environment = {
            **os.environ,
            "SMALL": "1",
            "MODEL": str(folder / "model"),
            "OUT": str(self.out),
            "PORTS": str(ports),
            "FLAGS": "--more 1",
            "STAND_IN_LOG": str(self._log),
            "PATH": f"{commands}:{os.environ['PATH']}",
        }

    def part(self, name: str, status: int = 0) -> str:
        """Run a part; returns its output."""
        done = subprocess.run(
            [str(self._folder / ".dev" / "first_minutes.sh")],
            cwd=self._folder,
            env={**self._environment, "PART": name},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def starts(self) -> list[tuple[str | None, str, set[str]]]:
        """Of each server: the plugins that it may load, its module, and the names of its flags."""
        found = []
        for line in self._log.read_text(encoding="utf-8").splitlines():
            plugins, _, module, *words = json.loads(line)
            found.append((plugins, module, {word for word in words if word.startswith("--")}))
        return found

    def read(self, name: str) -> Any:
        return json.loads((self.out / f"{name}.json").read_text(encoding="utf-8"))

    def verdicts(self, measurement: str) -> list[str]:
        return [row["verdict"] for row in self.read("verdicts") if row["measurement"] == measurement]


STOCK = ("none", "sglang.launch_server")
OURS = (None, "sglang_ext.launch_server")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with Ports() as ports:
        (first,) = ports.free_after(33_000, 1, run=9)
        yield Machine(tmp_path, first)


def test_ttft_of_stock_ours_and_hicache(machine: Machine) -> None:
    machine.part("ttft")
    starts = machine.starts()
    assert [start[:2] for start in starts] == [STOCK, OURS, STOCK]
    assert ["--radix-cache-backend" in start[2] for start in starts] == [False, True, False]
    assert ["--enable-hierarchical-cache" in start[2] for start in starts] == [False, False, True]
    assert all("--more" in start[2] for start in starts)
    rows = {name: machine.read(f"ttft-{name}")["rows"][0]["counted"] for name in ("stock", "ours", "hicache")}
    assert rows["stock"] == {"computed": 1, "HBM": 1, "below": 0}
    assert rows["ours"] == rows["hicache"] == {"computed": 1, "HBM": 1, "below": 1}
    assert {path.name for path in machine.out.glob("*.log")} == {"stock.log", "ours.log", "hicache.log"}


def test_tpot_without_dram_with_it_and_of_hicache(machine: Machine) -> None:
    machine.part("tpot")
    assert [start[:2] for start in machine.starts()] == [OURS, OURS, STOCK]
    assert "beside_loads" not in machine.read("tpot-off")
    for name in ("ours", "hicache"):
        found = machine.read(f"tpot-{name}")["beside_loads"]
        assert found["asked"] == found["loaded"] > 0


def test_answers_are_judged_and_a_damaged_byte_is_seen(machine: Machine) -> None:
    machine.part("answers")
    starts = machine.starts()
    assert [start[:2] for start in starts] == [STOCK, STOCK, OURS]
    assert all("--enable-deterministic-inference" in start[2] for start in starts)
    assert "verdicts" not in {path.stem for path in machine.out.iterdir()}
    machine.part("verdicts")
    assert machine.verdicts("13") == ["met"] * 4
    assert set(machine.verdicts("2") + machine.verdicts("6")) == {"not run"}
    # Where the damage changes nothing, the comparison shows nothing.
    ours = machine.read("answers-ours")
    ours["damaged"] = {number: ours["below"][number] for number in ours["damaged"]}
    (machine.out / "answers-ours.json").write_text(json.dumps(ours), encoding="utf-8")
    assert "missed   twin" in machine.part("verdicts", status=1)


def test_a_measurement_that_fails_is_told_and_the_others_are_made(machine: Machine) -> None:
    (machine.out / "ttft-ours.json").mkdir(parents=True)
    machine.part("ttft", status=1)
    assert machine.read("ttft-stock")["rows"]
    assert machine.read("ttft-hicache")["rows"]


def test_a_part_that_is_not_there_is_refused(machine: Machine) -> None:
    assert machine.part("nonsense", status=2) == "there is no part nonsense\n"

"""The start lines of scripts/gpu on an emulated GPU (``tests.fake_gpu``): ``first_minutes.sh`` in its small
form starts servers of ours, of stock SGLang and of HiCache, and its files are judged.

A ``sitecustomize`` in the folder of the packages installs the emulator, so that each line is that of a GPU
machine. The emulator says nothing of speed: of the verdicts, those on answers count here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.testing.models import model_path
from tests import fake_gpu

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[3]
EMULATOR = f"""\
import sys

if any(w.endswith(".launch_server") or w == "--multiprocessing-fork" for w in sys.orig_argv):
    sys.path.append({str(ROOT)!r})
    from tests import fake_gpu

    fake_gpu.install()
"""
# HiCache's default copies are compiled when it runs, for a GPU.
HICACHE = "--page-size 16 --hicache-io-backend direct --hicache-mem-layout layer_first"


class Machine:
    """A checkout with ``.dev`` as on a GPU machine, but for the packages, which are this environment's."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self._folder = folder
        self._temporary = folder / "t"
        """SGLang leaves files of its sockets in the folder for temporary files."""
        self._temporary.mkdir()
        dev = folder / ".dev"
        shutil.copytree(ROOT / "scripts" / "gpu", dev)
        site = dev / "site"
        (site / ".ready").touch()
        (site / "sitecustomize.py").write_text(EMULATOR, encoding="utf-8")

    def first_minutes(self, part: str, status: int = 0) -> str:
        """Run a part; returns its output."""
        done = subprocess.run(
            [str(self._folder / ".dev" / "first_minutes.sh")],
            cwd=self._folder,
            env={
                **os.environ,
                **fake_gpu.ENVIRONMENT,
                # The kernels of deterministic inference ask each tensor whether it is CUDA's.
                "EXACT": "",
                "TMPDIR": str(self._temporary),
                "PART": part,
                "OUT": str(self.out),
                "SMALL": "1",
                "WAIT": "900",
                "HICACHE": HICACHE,
                "MODEL": str(model_path("tiny", "float32")),
                "FLAGS": " ".join((*fake_gpu.FLAGS, "--dtype float32 --skip-server-warmup")),
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def read(self, name: str) -> Any:
        return json.loads((self.out / f"{name}.json").read_text(encoding="utf-8"))


def test_ttft_of_stock_ours_and_hicache(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.first_minutes("ttft")
    counted = {
        name: machine.read(f"ttft-{name}")["rows"][0]["counted"] for name in ("stock", "ours", "hicache")
    }
    assert counted["stock"] == {"computed": 1, "HBM": 1, "below": 0}
    assert counted["ours"] == counted["hicache"] == {"computed": 1, "HBM": 1, "below": 1}
    logs = {name: (machine.out / f"{name}.log").read_text(encoding="utf-8") for name in ("stock", "ours")}
    assert [name for name, log in logs.items() if "Global KV cache of instance" in log] == ["ours"]


def test_tpot_beside_writes_and_loads(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.first_minutes("tpot")
    assert machine.read("tpot-off")["tpot_ms"] > 0
    for name in ("tpot-ours", "tpot-hicache"):
        found = machine.read(name)["beside_loads"]
        assert found["asked"] == found["loaded"] > 0, name


def test_answers_are_those_of_stock_and_a_damaged_byte_is_seen(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.first_minutes("answers")
    machine.first_minutes("verdicts")
    rows = [row for row in machine.read("verdicts") if row["measurement"] == "13"]
    assert [row["verdict"] for row in rows] == ["met"] * 4, rows
    # Without the damage, the twin is no other answer, and this is a miss.
    ours = machine.read("answers-ours")
    ours["damaged"] = {number: ours["below"][number] for number in ours["damaged"]}
    (machine.out / "answers-ours.json").write_text(json.dumps(ours), encoding="utf-8")
    assert "missed   twin" in machine.first_minutes("verdicts", status=1)

"""The doctor's findings about a machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.cluster.doctor.command import main
from sglang_ext.cluster.doctor.findings import GIB, Level
from sglang_ext.cluster.doctor.machine import PACKAGES, Facts, _transports, findings
from sglang_ext.cluster.plan import HostFacts
from sglang_ext.patches.versions import SGLANG_VERSION

VERSIONS: dict[str, str | None] = dict.fromkeys(PACKAGES, "1.0") | {"sglang": SGLANG_VERSION}

HEALTHY = Facts(
    python="3.11.7",
    packages=VERSIONS,
    host=HostFacts(cores=2, accelerators=0),
    torch_error="",
    plugin_visible=True,
    allowed_plugins="",
    patches_fit=True,
    patches_report="sglang 0.5.21\nok        cpu      one: a\nok        server   two: b",
    memory_available=16 * GIB,
    shared_memory_free=4 * GIB,
    temporary_folder=Path("/somewhere"),
    temporary_free=100 * GIB,
    has_lscpu=True,
    has_compiler=False,
    rdma_devices=(),
    rails=(),
    has_pyverbs=False,
    transports={"shm": None, "cma": None, "verbs": "no RDMA device", "tcp": None},
)


def test_a_healthy_machine() -> None:
    found = findings(HEALTHY)
    assert {finding.level for finding in found} == {Level.OK}
    assert any(finding.subject == "patches" and "all 2 fit" in finding.text for finding in found)


@pytest.mark.parametrize(
    ("change", "subject", "level", "says"),
    [
        ({"packages": VERSIONS | {"torch": None}}, "torch", Level.PROBLEM, "make setup"),
        (
            {"packages": VERSIONS | {"sglang": "9.9.9"}, "patches_fit": False},
            "sglang",
            Level.PROBLEM,
            f"sglang=={SGLANG_VERSION}",
        ),
        ({"packages": VERSIONS | {"sglang": "9.9.9"}}, "sglang", Level.WARNING, f"sglang=={SGLANG_VERSION}"),
        ({"plugin_visible": False}, "plugin", Level.PROBLEM, "pip install -e"),
        ({"allowed_plugins": "other"}, "plugin", Level.PROBLEM, "SGLANG_PLUGINS"),
        (
            {"patches_fit": False, "patches_report": "mismatch  cpu  one: a"},
            "patches",
            Level.PROBLEM,
            "mismatch",
        ),
        ({"host": None, "torch_error": "no libgomp"}, "devices", Level.PROBLEM, "no libgomp"),
        ({"has_lscpu": False}, "lscpu", Level.PROBLEM, "util-linux"),
        ({"host": HostFacts(2, 1)}, "compiler", Level.PROBLEM, "gcc"),
        ({"memory_available": GIB}, "memory", Level.WARNING, "1.0 GiB"),
        ({"shared_memory_free": 0}, "shared memory", Level.WARNING, "--shm-size"),
        ({"temporary_free": 0}, "temporary files", Level.WARNING, "TMPDIR"),
        ({"rdma_devices": ("mlx5_0",)}, "RDMA", Level.WARNING, "python3-pyverbs"),
        (
            {"transports": {"cma": "ptrace_scope is 2", "tcp": None}},
            "transports",
            Level.WARNING,
            "ptrace_scope is 2",
        ),
        ({"transports": {}}, "transports", Level.WARNING, "each serves for itself"),
    ],
)
def test_each_trouble_is_named_with_what_to_do(
    change: dict[str, Any], subject: str, level: Level, says: str
) -> None:
    troubles = [f for f in findings(dataclasses.replace(HEALTHY, **change)) if f.level is not Level.OK]
    assert [(f.subject, f.level) for f in troubles] == [(subject, level)]
    assert says in f"{troubles[0].text} {troubles[0].advice}"
    assert troubles[0].advice


def test_the_plugin_may_be_one_of_several() -> None:
    allowed = dataclasses.replace(HEALTHY, allowed_plugins="other, sglang_ext")
    assert {finding.level for finding in findings(allowed)} == {Level.OK}


def test_transports_are_named_best_first_with_what_stands_against_the_others() -> None:
    found = [f for f in findings(HEALTHY) if f.subject == "transports"]
    assert [f.text for f in found] == ["shm, cma, tcp can be used", "not verbs: no RDMA device"]


def test_this_machine_has_a_transport() -> None:
    """`tcp` works everywhere."""
    assert _transports()["tcp"] is None


@pytest.mark.parametrize("flags", [["--verify", "repair"], ["--verify", "deep"], ["--kv-disk", "x"]])
def test_a_command_line_that_makes_no_sense(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    assert "usage: sglang-ext doctor" in capsys.readouterr().err

"""No module that the simulator loads reads a clock or draws a number by itself: two runs are the same."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.simulator.small_fleet import AS_RECORDED, PAIRS, check_parts, write_recording

ROOT = Path(__file__).parents[2]
ENTRY_POINTS = {
    "sglang_ext.clock": "the machine's time, given as a `Clock`; the simulation gives its own",
    "sglang_ext.ids": "random names, given as a `NewId`; the simulation gives its own",
}
"""Modules from which all others get time and names."""
UNUSED = {
    "sglang_ext.cluster_key": "signatures and the age of a file: there is one router, and no HTTP",
    "sglang_ext.tiered_store.dram.memory": "progress of mapping the arena: there is none",
    "sglang_ext.tiered_store.loading.loader": "the time of a read from a real disk",
    "sglang_ext.router.api.messages_as_chat": "ids in translated answers: no answer is translated",
    "sglang_ext.router.api.openai": "the time in answers: no instance answers in JSON",
    "sglang_ext.router.api.responses": "the time in answers",
    "sglang_ext.router.api.rewritten.ollama": "the times in answers",
    "sglang_ext.router.tenancy.tenants": "the secret by which keys are compared: no request has a key",
}
"""Modules that come with the ones in use, and what of them a simulation never calls."""
REFUSED = ("time", "uuid", "secrets")
SEEDED = {"Random"}
"""Of `random`: a generator with a seed."""


def loaded() -> dict[str, Path]:
    """The project's modules that the command loads, with their files."""
    script = (
        "import sys, sglang_ext.simulator.command\n"
        "for name, module in sorted(sys.modules.items()):\n"
        "    if name.split('.')[0] == 'sglang_ext': print(name, module.__file__)\n"
        "print('torch' in sys.modules or 'sglang' in sys.modules, '-')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT,
        env={"SGLANG_EXT_NATIVE": "0"},
    )  # fmt: skip
    rows = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert rows.pop()[0] == "False", "neither torch nor SGLang is loaded"
    return {name: Path(file) for name, file in rows}


def breaches(source: str) -> list[str]:
    """The places at which a module reads a clock or draws a number by itself."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [f"{node.lineno}: import {a.name}" for a in node.names if a.name in REFUSED]
        elif isinstance(node, ast.ImportFrom):
            if node.module in REFUSED:
                found.append(f"{node.lineno}: from {node.module}")
            elif node.module in ("random", "os"):
                names = [a.name for a in node.names]
                wrong = set(names) - SEEDED if node.module == "random" else set(names) & {"urandom"}
                found += [f"{node.lineno}: from {node.module} import {name}" for name in sorted(wrong)]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "random" and node.attr not in SEEDED:
                found.append(f"{node.lineno}: random.{node.attr}")
            elif (node.value.id, node.attr) == ("os", "urandom"):
                found.append(f"{node.lineno}: os.urandom")
        if isinstance(node, ast.Call) and not (node.args or node.keywords):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name == "Random":
                found.append(f"{node.lineno}: a generator without a seed")
    return found


def test_no_module_reads_a_clock_or_draws_a_number_by_itself() -> None:
    modules = loaded()
    assert len(modules) > 100
    known = ENTRY_POINTS | UNUSED
    found = {name: where for name, path in modules.items() if (where := breaches(path.read_text("utf-8")))}
    assert {name: where for name, where in found.items() if name not in known} == {}
    assert set(known) <= set(found), "these need no exception any more"


SECRETS = {
    "estimate/arrivals.py": "the key of one estimate's hashes",
    "telemetry/record_file.py": "the key of recordings",
    "tenancy/tenants.py": "the secret by which keys are compared",
    "api/messages_as_chat.py": "ids in translated answers",
}
"""Files of the router that draw random numbers by themselves, and for what."""


def test_the_router_takes_all_other_names_from_one_source() -> None:
    """Those too that no simulation loads."""
    folder = ROOT / "sglang_ext" / "router"
    drawn = {
        str(path.relative_to(folder))
        for path in sorted(folder.rglob("*.py"))
        if any(not where.endswith(" time") for where in breaches(path.read_text("utf-8")))
    }
    assert drawn == set(SECRETS)


def test_each_way_to_read_a_clock_or_to_draw_is_found() -> None:
    """The twin."""
    for source in (
        "import time", "from time import monotonic", "import uuid", "from secrets import token_hex",
        "import random\nrandom.random()", "from random import choice", "import os\nos.urandom(4)",
        "from os import urandom", "import random\nx = random.Random()",
    ):  # fmt: skip
        assert breaches(source), source
    assert not breaches("import random\nimport os\nx = random.Random(3)\nos.getpid()")


PROBE = """
import sys, time, uuid, secrets, random, os

def refuse(module, name):
    real = getattr(module, name)
    def called(*args, **kwargs):
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("sglang_ext"):
            raise AssertionError(f"{caller} calls {module.__name__}.{name}")
        return real(*args, **kwargs)
    setattr(module, name, called)

for module, names in (
    (time, ["time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "sleep"]),
    (uuid, ["uuid4", "uuid1"]), (secrets, ["token_hex", "token_bytes", "randbelow", "randbits"]),
    (random, ["random", "choice", "randrange", "shuffle"]), (os, ["urandom"]),
):
    for name in names:
        refuse(module, name)
import json
from sglang_ext.simulator.command import Arguments, settings_of
from sglang_ext.simulator.run import simulate
from sglang_ext.simulator.settings import Settings, changed
from sglang_ext.simulator.trace import read_trace

what, *traces = sys.argv[1:]
trace, settings = None, Settings()
if traces:
    with open(traces[0], "rb") as file:
        trace = read_trace(file)
    settings = settings_of(Arguments(), trace)
print(json.dumps(simulate(changed(settings, what), None, trace).as_json()))
"""


def probed(*arguments: str) -> Any:
    """The figures of a simulation in which such a call of ours raises."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, check=False, cwd=ROOT,
        env={"SGLANG_EXT_NATIVE": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_a_run_calls_neither_clocks_nor_generators_of_the_machine() -> None:
    """With hints, fetches, deaths and limits of tenants: the reasons of the exceptions above are true."""
    what = "instances=3,requests=60,policy=cost,hbm=400,dram=800,hints=0.5,failures=100,tenants=2"
    what += ",requests_per_second=2,concurrent=9,tokens_per_minute=1000000,priority=0/1,most_running=3"
    what += ",max_concurrent_requests=50,bytes_per_minute=9000000,queue_size=9"
    assert probed(what)["requests"] > 0
    roles = (
        "prefill=2,decode=2,pd_caching=3,rate=20,role_controller=on,role_dwell_secs=3,requests=120,hbm=700"
    )
    assert probed(roles)["role_changes"]


def test_a_replay_calls_neither(tmp_path: Path) -> None:
    """With disks; and with pairs and returns beside them."""
    path = tmp_path / "day.jsonl"
    write_recording(path)
    as_recorded = probed(AS_RECORDED, str(path))
    check_parts(as_recorded, probed(f"{AS_RECORDED},{PAIRS}", str(path)))

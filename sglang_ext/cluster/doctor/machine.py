"""``sglang-ext doctor``: whether servers can start here, with problems and advice.

``gather`` inspects the machine, ``findings`` judges the facts, and is a pure function.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from sglang_ext.cluster.doctor.findings import GIB, Finding, Level
from sglang_ext.cluster.plan import HostFacts
from sglang_ext.disagg.transports.rails import Topology, choose, topology
from sglang_ext.patches.versions import ALLOW_UNTESTED, SGLANG_VERSION, Status, supported, tested_versions

PLUGIN = "sglang_ext"
PLUGIN_GROUP = "sglang.srt.plugins"
PACKAGES = ("sglang-ext", "sglang", "torch", "transformers", "numba")
SERVER_MEMORY = 2 * GIB
"""Memory of the three processes of a CPU server with a tiny model: 1.6 GB, and a reserve."""
SHARED_MEMORY = 64 << 20
DISK = 1 * GIB
PATCH_CHECK_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Facts:
    """Facts about this machine and installation. Sizes in bytes."""

    python: str
    packages: dict[str, str | None]
    """Version by distribution name; None for a distribution that is not installed."""
    host: HostFacts | None
    """None when torch cannot be imported."""
    torch_error: str
    """Why not."""
    plugin_visible: bool
    allowed_plugins: str
    """SGLANG_PLUGINS, which limits the plugins that SGLang loads; empty for all."""
    patches_fit: bool
    patches_report: str
    memory_available: int
    shared_memory_free: int
    temporary_folder: Path
    temporary_free: int
    has_lscpu: bool
    has_compiler: bool
    rdma_devices: tuple[str, ...]
    rails: tuple[str, ...]
    """The RDMA device that each GPU's rank would use, with the reason."""
    has_pyverbs: bool
    transports: dict[str, str | None]
    """Why this host cannot use each transport between instances; None where it can."""


def gather() -> Facts:
    """Look at everything; takes some seconds, because SGLang is imported (in a process of its own)."""
    host, torch_error = _host()
    patches = _patches()
    temporary = Path(tempfile.gettempdir())
    found = topology()
    return Facts(
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        host=host,
        torch_error=torch_error,
        plugin_visible=any(entry.name == PLUGIN for entry in entry_points(group=PLUGIN_GROUP)),
        allowed_plugins=os.environ.get("SGLANG_PLUGINS", ""),
        patches_fit=patches[0],
        patches_report=patches[1],
        memory_available=_memory_available(),
        shared_memory_free=_free(Path("/dev/shm")),
        temporary_folder=temporary,
        temporary_free=_free(temporary),
        has_lscpu=shutil.which("lscpu") is not None,
        has_compiler=any(shutil.which(name) for name in ("cc", "gcc", "clang")),
        rdma_devices=tuple(str(nic) for nic in found.nics),
        rails=_rails(found),
        has_pyverbs=importlib.util.find_spec("pyverbs") is not None,
        transports=_transports(),
    )


def _rails(found: Topology) -> tuple[str, ...]:
    if not found.nics:
        return ()
    return tuple(f"GPU {at}: {choose(found, gpu, at)}" for at, gpu in enumerate(found.gpus))


def _transports() -> dict[str, str | None]:
    try:
        from sglang_ext.disagg.transports.select import reasons

        return {str(name): reason for name, reason in reasons().items()}
    except ImportError as error:
        return {"all": str(error)}


def _host() -> tuple[HostFacts | None, str]:
    try:
        from sglang_ext.cluster.host import host_facts

        return host_facts(), ""
    except (ImportError, OSError, RuntimeError) as error:
        return None, f"{type(error).__name__}: {error}"


def _patches() -> tuple[bool, str]:
    command = [sys.executable, "-P", "-m", "sglang_ext.patches"]
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PATCH_CHECK_TIMEOUT_S,
            check=False,
            encoding="utf-8",
        )
    except subprocess.TimeoutExpired:
        return False, f"`{' '.join(command[2:])}` did not end within {PATCH_CHECK_TIMEOUT_S:.0f} s"
    text = result.stdout if result.returncode == 0 else result.stdout + result.stderr
    return result.returncode == 0, text.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _memory_available() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def findings(facts: Facts) -> list[Finding]:
    """Findings that follow from the facts, in the order in which a start would meet them."""
    return [
        *_installation(facts),
        *_plugin(facts),
        *_devices(facts),
        *_room(facts),
        _rdma(facts),
        *_transport_findings(facts),
    ]


def _installation(facts: Facts) -> list[Finding]:
    found = [Finding(Level.OK, "python", facts.python)]
    for name, installed in facts.packages.items():
        if installed is None:
            advice = (
                "Run `make setup`, or install the package with the extra cpu or gpu (docs/quickstart.md)."
            )
            found.append(Finding(Level.PROBLEM, name, "is not installed", advice))
        elif name == "sglang":
            found.append(_sglang(installed, facts))
        else:
            found.append(Finding(Level.OK, name, installed))
    return found


def _sglang(installed: str, facts: Facts) -> Finding:
    known = supported(installed)
    if known is not None and known.status is Status.TESTED:
        return Finding(Level.OK, "sglang", f"{installed}; tested: {tested_versions()}")
    state = "not tested" if known is None else known.status.value
    untested = f"{installed}: {state}; tested: {tested_versions()}"
    advice = f"Install sglang=={SGLANG_VERSION}."
    if facts.patches_fit:  # the contract holds, which is asked where the user allows it
        return Finding(Level.WARNING, "sglang", f"{untested}; allowed by {ALLOW_UNTESTED}=1", advice)
    return Finding(Level.PROBLEM, "sglang", facts.patches_report or untested, advice)


def _plugin(facts: Facts) -> list[Finding]:
    if not facts.plugin_visible:
        plugin = Finding(
            Level.PROBLEM,
            "plugin",
            f"SGLang cannot see it: there is no entry point {PLUGIN} in {PLUGIN_GROUP}",
            "Install the package (`pip install -e .` in its folder); a folder on PYTHONPATH is not enough.",
        )
    elif facts.allowed_plugins and PLUGIN not in [n.strip() for n in facts.allowed_plugins.split(",")]:
        plugin = Finding(
            Level.PROBLEM,
            "plugin",
            f"SGLANG_PLUGINS={facts.allowed_plugins} keeps SGLang from loading it",
            f"Add {PLUGIN} to SGLANG_PLUGINS, or unset it.",
        )
    else:
        plugin = Finding(Level.OK, "plugin", "SGLang sees it")
    if facts.patches_fit:
        count = sum(line.startswith("ok ") for line in facts.patches_report.splitlines())
        fits = f"all {count} fit the installed SGLang" if count else "SGLang has everything they need"
        return [plugin, Finding(Level.OK, "patches", fits)]
    if supported(facts.packages.get("sglang") or "") is None:
        return [plugin]  # reported as a fault of the version
    advice = f"Install sglang=={SGLANG_VERSION}; `python -m sglang_ext.patches` shows the details."
    lines = [line for line in facts.patches_report.splitlines() if not line.startswith("ok ")]
    return [plugin, Finding(Level.PROBLEM, "patches", "\n".join(lines[-10:]) or "no answer", advice)]


def _devices(facts: Facts) -> list[Finding]:
    if facts.host is None:
        advice = "Reinstall torch: `make setup`, or the extra gpu."
        return [Finding(Level.PROBLEM, "devices", f"torch cannot be used: {facts.torch_error}", advice)]
    cores = f"{facts.host.cores} CPU cores"
    if facts.host.accelerators:
        found = [Finding(Level.OK, "devices", f"{facts.host.accelerators} accelerators, {cores}")]
        if not facts.has_compiler:
            advice = "Install gcc; Triton compiles a part of each kernel with it."
            found.append(Finding(Level.PROBLEM, "compiler", "there is none", advice))
        return found
    found = [Finding(Level.OK, "devices", f"no accelerator, {cores}: servers run on the CPU")]
    if not facts.has_lscpu:
        advice = "Install util-linux; SGLang reads the layout of the cores from lscpu."
        found.append(Finding(Level.PROBLEM, "lscpu", "there is none", advice))
    return found


def _room(facts: Facts) -> list[Finding]:
    return [
        _at_least(
            "memory",
            facts.memory_available,
            SERVER_MEMORY,
            "available",
            "Free some memory: a server of even a tiny model takes that much.",
        ),
        _at_least(
            "shared memory",
            facts.shared_memory_free,
            SHARED_MEMORY,
            "free in /dev/shm",
            "Give the container more (docker: --shm-size).",
        ),
        _at_least(
            "temporary files",
            facts.temporary_free,
            DISK,
            f"free in {facts.temporary_folder}",
            "Free some space, or set TMPDIR.",
        ),
    ]


def _at_least(subject: str, have: int, need: int, where: str, advice: str) -> Finding:
    text = f"{have / GIB:.1f} GiB {where}"
    if have >= need:
        return Finding(Level.OK, subject, text)
    return Finding(Level.WARNING, subject, f"{text}, less than {need / GIB:.2g}", advice)


def _rdma(facts: Facts) -> Finding:
    if not facts.rdma_devices:
        return Finding(Level.OK, "RDMA", "no device")
    devices = ", ".join(facts.rdma_devices)
    if facts.has_pyverbs:
        text = "; ".join((f"{devices}, pyverbs is there", *facts.rails))
        return Finding(Level.OK, "RDMA", text)
    return Finding(
        Level.WARNING,
        "RDMA",
        f"{devices}, and no pyverbs: the verbs transport cannot be used",
        "Make the distribution's python3-pyverbs visible to this environment (docs/quickstart.md).",
    )


def _transport_findings(facts: Facts) -> Iterator[Finding]:
    """Usable transports between instances, best first, and reasons against the others."""
    works = [name for name, reason in facts.transports.items() if reason is None]
    if works:
        yield Finding(Level.OK, "transports", f"{', '.join(works)} can be used")
    else:
        advice = "Without one, KV does not move between instances; each serves for itself."
        yield Finding(Level.WARNING, "transports", "none can be used", advice)
    for name, reason in facts.transports.items():
        # Most machines have no RDMA device, and faults of one are reported above.
        expected = name in ("verbs", "cuda_ipc") and works
        if reason is not None:
            level = Level.OK if expected else Level.WARNING
            advice = "" if expected else "Others are used instead, as far as they can be."
            yield Finding(level, "transports", f"not {name}: {reason}", advice)

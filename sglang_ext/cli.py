"""``sglang-ext``: the commands of this package under one name.

Only the chosen command's module is imported, so that ``--help`` and ``--version`` answer at once.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from sglang_ext.cluster import guard
from sglang_ext.errors import UserError
from sglang_ext.patches import environment

if TYPE_CHECKING:
    from sglang_ext.flags import Flagged

PROG = "sglang-ext"
PACKAGE = "sglang-ext"
USAGE_STATUS = 2
"""Exit status for a command line that cannot be understood, as argparse gives it."""


@dataclass(frozen=True)
class Command:
    """A subcommand: a module with ``main(arguments)``, which returns the exit status."""

    module: str
    help: str
    flags: str = ":Arguments"
    """The class of its flags, as ``module:class``, by default in its own module; empty for none."""
    replaces_process: bool = False
    """Run as ``python -m module``. SGLang's child processes import the main module of their parent first, and
    have to find the launcher there."""
    guarded: bool = False
    """Run so below ``cluster/guard.py``, which removes what SGLang leaves behind and reaps orphans."""


COMMANDS: Mapping[str, Command] = {
    "serve": Command(
        "sglang_ext.launch_server",
        "start one SGLang server with the shared cache; takes every flag of SGLang's launch_server",
        "sglang_ext.config:KvConfig",
        replaces_process=True,
        guarded=True,
    ),
    "router": Command(
        "sglang_ext.router.__main__", "start the router in front of running servers", ":RouterConfig"
    ),
    "cluster": Command(
        "sglang_ext.cluster.command",
        "start servers and router on this machine, in one command",
        ":ClusterConfig",
    ),
    "calibrate": Command(
        "sglang_ext.calibration.command", "measure a running server for the router's cost model"
    ),
    "cluster-status": Command("sglang_ext.cluster.status", "show who is in a cluster, as its router sees it"),
    "top": Command("sglang_ext.cluster.top", "watch a cluster in the terminal, as its router sees it"),
    "drain": Command("sglang_ext.cluster.drain", "let an instance of a cluster finish what it has, and go"),
    "role": Command(
        "sglang_ext.cluster.role", "have an instance prefill instead of decode, or the other way round"
    ),
    "python": Command(
        "sglang_ext.patches.cpu.run_python",
        "run a program that imports SGLang, such as a frontend program, on a machine without a GPU too",
        "",
        replaces_process=True,
    ),
    "doctor": Command(
        "sglang_ext.cluster.doctor.command",
        "check this machine, or the way to another one, and say what to do",
    ),
    "gpu-check": Command(
        "sglang_ext.gpu_check.command",
        "check this machine's GPU in five minutes: link, copies, a server's answers from each tier",
    ),
    "diverge": Command(
        "sglang_ext.router.diverge", "say which turns in a log of requests defeat prefix caches, and why"
    ),
    "estimate": Command(
        "sglang_ext.router.estimate.command", "say what a shared cache would save, from a log of requests"
    ),
    "simulate": Command(
        "sglang_ext.simulator.command",
        "say what a fleet would do under a load, in virtual time, without a GPU or a model",
    ),
    "migrate": Command(
        "sglang_ext.migrate.command", "print the command line for one of HiCache, LMCache or SGLang's router"
    ),
}


def flags_of(command: Command) -> type[Flagged] | None:
    """The flags of a command; None where it takes none of ours."""
    module, _, name = command.flags.partition(":")
    return getattr(importlib.import_module(module or command.module), name) if name else None


def _help() -> str:
    width = max(len(name) for name in COMMANDS)
    commands = "\n".join(f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items())
    return (
        f"usage: {PROG} [-h] [--version] COMMAND ...\n\n"
        "A cluster of SGLang instances that shares one KV cache.\n\n"
        f"commands:\n{commands}\n\n"
        f"options:\n  -h, --help  show this help message and exit\n"
        "  --version   show the versions of this package and of SGLang and exit\n\n"
        f"`{PROG} COMMAND --help` shows the flags of a command.\n"
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        sys.stderr.write(_help())
        return USAGE_STATUS
    name, rest = given[0], given[1:]
    if name in ("-h", "--help"):
        sys.stdout.write(_help())
        return 0
    if name == "--version":
        sys.stdout.write(f"{PROG} {_version(PACKAGE)}\nsglang {_version('sglang')}\n")
        return 0
    command = COMMANDS.get(name)
    if command is None:
        sys.stderr.write(f"{PROG}: unknown command {name!r}; there are {', '.join(COMMANDS)}\n")
        return USAGE_STATUS
    environment.printable()
    try:
        environment.prepare(os.environ)
    except UserError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return USAGE_STATUS
    if command.replaces_process:
        sys.stdout.flush()
        # -P: a folder of our name in the current folder is not this package.
        words = [sys.executable, "-P", "-m", command.module, *rest]
        if command.guarded:
            words = [sys.executable, "-I", "-S", guard.__file__, "-1", "inf", "--", *words]
        os.execv(sys.executable, words)
    if os.getpid() == 1:
        guard.step_aside()
    status: int = importlib.import_module(command.module).main(rest)
    return status


if __name__ == "__main__":
    raise SystemExit(main())

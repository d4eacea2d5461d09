"""Prepare the environment: ``python3 scripts/setup.py [--venv DIR] [--sglang VERSION]``, or ``make setup``.

Runs on a bare Python with nothing but the standard library. Every step leaves a mark, so that a run that
was interrupted goes on where it stopped and a second run does nothing. Nothing here needs a C compiler: all
packages come as wheels, and numba brings its own LLVM. Where there is one, the router's hot modules are
compiled.
"""

from __future__ import annotations

import argparse
import email
import fcntl
import hashlib
import re
import runpy
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU = ROOT / "requirements" / "cpu.txt"
TEST = ROOT / "requirements" / "test.txt"
COMPILER = ROOT / "scripts" / "compile_router.py"
_VERSIONS = runpy.run_path(str(ROOT / "sglang_ext" / "patches" / "versions.py"))
SGLANG: str = _VERSIONS["SGLANG_VERSION"]
SUPPORTED: list[str] = [each.version for each in _VERSIONS["SUPPORTED"]]
PYTHON = (3, 11)
DISK_NEEDED_GB = 5
"""A finished environment is about 3 GB (torch and triton are half of it), plus the wheels while unpacking."""

FIRST = ("torch",)
"""Installed with their dependencies, which differ with the build of torch that pip finds."""

WITHOUT_DEPENDENCIES = ("torchvision==0.28.0",)
"""Installed beside SGLang without dependencies: their metadata asks for CUDA builds; the extra `cpu` lists
the dependencies they need on a CPU.
"""

FOR_SOME_PYTHONS = ("async-timeout==5.0.1; python_full_version < '3.11.3'",)
"""Packages needed on a Python version other than the lock's, such as Debian 12's."""

HELD_BACK = ("pymdown-extensions<13",)
"""Newer versions need a later Python 3.11 than Debian 12's 3.11.2."""

BROUGHT_BY_TORCH = ("triton",)
"""Left as torch's build brought it; the pin counts only where torch brings none (a CPU build)."""


class SetupError(Exception):
    """A sentence for the user: the missing requirement and how to meet it."""


def beside(version: str) -> Path:
    """The pins that differ between versions of SGLang, and SGLang itself."""
    return ROOT / "requirements" / f"sglang-{version}.txt"


def read_pins(path: Path) -> dict[str, str]:
    """The lines of a requirements file by lower-case package name."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    pins = [line for line in lines if line and not line.startswith("#")]
    return {pin.split("==")[0].lower(): pin for pin in pins}


def digest(*parts: str) -> str:
    """A digest that changes when an input of the step changes."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


class Progress:
    """One line per step; on a terminal the line counts along while pip works."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._step = 0
        self._started = time.monotonic()
        self._title = ""
        self._tty = sys.stdout.isatty()
        self._last = 0.0

    def start(self, title: str) -> None:
        self._step += 1
        self._title = title
        self._started = time.monotonic()
        self._last = self._started
        if not self._tty:
            print(f"[{self._step}/{self._steps}] {title}", flush=True)
        self.update("")

    def update(self, detail: str) -> None:
        now = time.monotonic()
        if self._tty:
            text = f"[{self._step}/{self._steps}] {self._title} {detail}"
            text = text[: shutil.get_terminal_size().columns - 8]
            print(f"\r\x1b[K{text} {now - self._started:.0f} s", end="", flush=True)
        elif detail and now - self._last >= 10:
            self._last = now
            print(f"      {detail} ({now - self._started:.0f} s)", flush=True)

    def done(self, outcome: str) -> None:
        took = f"{outcome} ({time.monotonic() - self._started:.0f} s)"
        print(f"\r\x1b[K[{self._step}/{self._steps}] {self._title}: {took}" if self._tty else f"      {took}")


@dataclass(frozen=True)
class Step:
    """One part of the set-up. ``run`` is called when the mark of the last run differs from ``mark``."""

    name: str
    title: str
    mark: str
    run: Callable[[], str | None]
    """The outcome of the step, unless it is simply done."""


class Environment:
    """The virtual environment that is being prepared."""

    def __init__(self, path: Path, progress: Progress, sglang: str = SGLANG) -> None:
        self.path = path
        self.sglang = sglang
        self.python = path / "bin" / "python"
        self.marks = path / ".setup"
        self.log = path / "setup.log"
        self.progress = progress

    def steps(self, *, compiling: bool = True) -> list[Step]:
        """The steps in order; a step whose mark changed makes those after it run again.

        Args:
            compiling: include the step that compiles the hot modules.
        """
        pins = read_pins(CPU) | read_pins(TEST) | read_pins(beside(self.sglang))
        first = [pins[name] for name in FIRST]
        rest = [pin for name, pin in pins.items() if name not in FIRST]
        version = ".".join(str(part) for part in sys.version_info[:3])
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        steps = [
            Step("venv", f"virtual environment {self.path.name}", digest(version), self.make_venv),
            Step("torch", ", ".join(first), digest(*first), lambda: self.pip("torch", *first)),
            Step("packages", f"{len(rest)} pinned packages", digest(*rest), lambda: self.install_rest(pins)),
            Step("project", "this project, editable", digest(project, str(ROOT)), self.install_project),
        ]
        if compiling:
            modules = sorted((ROOT / "sglang_ext").rglob("*.py"))
            sources = [path.read_text(encoding="utf-8") for path in modules]
            title = "the router's hot modules, compiled (a minute or two; COMPILE=no leaves them as Python)"
            steps.append(Step("compile", title, digest(version, *sources), self.compile))
        return steps

    def make_venv(self) -> None:
        """Create the environment, or keep a working one."""
        if self.python.exists():
            code = f"import sys, pip; sys.exit(sys.version_info[:2] != {PYTHON})"
            if subprocess.run([self.python, "-c", code], capture_output=True, check=False).returncode == 0:
                return
        result = subprocess.run(
            [sys.executable, "-m", "venv", "--clear", self.path],
            capture_output=True,
            text=True,
            check=False,
            encoding="utf-8",
        )
        if result.returncode != 0:
            raise SetupError(
                f"`{sys.executable} -m venv {self.path}` failed: {(result.stderr or result.stdout).strip()}"
            )

    def install_rest(self, pins: dict[str, str]) -> None:
        """Install every other pin as it stands, without resolving the packages' own requirements."""
        skip = set(FIRST)
        skip |= {name for name in BROUGHT_BY_TORCH if name in pins and self.has(name)}
        wanted = self.path / "wanted.txt"
        wanted.write_text(
            "".join(f"{pin}\n" for name, pin in pins.items() if name not in skip), encoding="utf-8"
        )
        self.pip("the pinned packages", "--no-deps", "-r", str(wanted), total=len(pins) - len(skip))

    def install_project(self) -> None:
        """Install the project so that SGLang finds its plugin."""
        self.pip("this project", "--no-deps", "--no-build-isolation", "-e", str(ROOT))

    def compile(self) -> str:
        """Compile the router's hot modules; or say why they run as Python, which serves as well, slower."""
        with self.log.open("a+", encoding="utf-8") as log:
            before = log.tell()
            process = subprocess.Popen([self.python, COMPILER], stdout=log, stderr=subprocess.STDOUT)
            while process.poll() is None:
                time.sleep(0.2)
                self.progress.update("compiling")
            log.seek(before)
            said = log.readline().strip()
        return said if said.endswith(".") else f"{said} {self.log} says why."

    def has(self, module: str) -> bool:
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        return subprocess.run([self.python, "-c", code], check=False).returncode == 0

    def forget_halves(self) -> None:
        """Let pip install again the packages that it was installing when it was killed.

        pip takes a package for installed once its metadata is there, and writes the list of its files
        (RECORD) last: metadata without RECORD is a package that may lack files.
        """
        for info in self.path.glob("lib/python*/site-packages/*.dist-info"):
            if not (info / "RECORD").exists():
                shutil.rmtree(info)

    def pip(self, what: str, *arguments: str, total: int = 0) -> None:
        """``pip install`` with its output in the log and its progress on the line."""
        self.forget_halves()
        command = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
        seen = 0
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"\n$ {' '.join(command)}\n")
            log.flush()
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                encoding="utf-8",
            )
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                if line.startswith(("Collecting ", "Requirement already satisfied: ")):
                    seen += 1
                    self.progress.update(f"fetching {seen}/{total}" if total else f"fetching {seen}")
                elif line.startswith("Installing collected"):
                    self.progress.update("unpacking")
            status = process.wait()
        if status != 0:
            tail = [
                line for line in self.log.read_text(encoding="utf-8").splitlines() if "WARNING" not in line
            ][-12:]
            raise SetupError(
                "\n".join(tail)
                + f"\n\npip could not install {what} (exit status {status}). The whole output is in "
                f"{self.log}. If it says that no version was found or that a connection failed, pip cannot "
                "reach its package index: see `pip config list`. Then run `make setup` again; what is "
                "installed stays."
            )


def check_host(venv: Path) -> None:
    """Check the requirements of the first step."""
    if sys.version_info[:2] != PYTHON:
        raise SetupError(
            f"Python {PYTHON[0]}.{PYTHON[1]} is needed and this is {sys.version.split()[0]} "
            f"({sys.executable}). Install it, or name it: make setup PYTHON=/path/to/python3.11"
        )
    for module, package in (("venv", "python3.11-venv"), ("ensurepip", "python3.11-venv")):
        try:
            __import__(module)
        except ImportError as exc:
            raise SetupError(
                f"{sys.executable} has no module {module!r}, which makes the virtual environment and its "
                f"pip. On Debian and Ubuntu it is in the package {package}."
            ) from exc
    if not venv.exists():
        free = shutil.disk_usage(ROOT).free / 1e9
        if free < DISK_NEEDED_GB:
            raise SetupError(f"{ROOT} has {free:.1f} GB free; the set-up needs {DISK_NEEDED_GB} GB.")


def prepare(venv: Path, sglang: str, *, compiling: bool) -> None:
    """Run the steps that are not done yet."""
    check_host(venv)
    environment = Environment(venv, Progress(4 + compiling), sglang)
    steps = environment.steps(compiling=compiling)
    redo = False
    for step in steps:
        mark = environment.marks / step.name
        environment.progress.start(step.title)
        if not redo and mark.exists() and mark.read_text(encoding="utf-8") == step.mark:
            environment.progress.done("is there")
            continue
        redo = True
        outcome = step.run()
        environment.marks.mkdir(exist_ok=True)
        mark.write_text(step.mark, encoding="utf-8")
        environment.progress.done(outcome or "done")
    (environment.marks / "done").write_text("", encoding="utf-8")


def asked_by_sglang(wheel: Path) -> list[str]:
    """The requirements of a version of SGLang, as constraints; torch is pinned to our version."""
    with zipfile.ZipFile(wheel) as packed:
        name = next(name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(packed.read(name))
    asked = []
    for line in metadata.get_all("Requires-Dist", []):
        found = re.fullmatch(r"([\w.-]+)(?:\[[^]]*\])? *([=<>!~][^;]*)", line)
        if found and found[1] not in FIRST:
            asked.append(f"{found[1]}{found[2].strip()}")
    return asked


def resolve(scratch: Path, version: str, progress: Progress) -> tuple[set[str], set[str]]:
    """The pins of the extras `cpu` and `test` beside a version of SGLang, found in a fresh environment."""
    environment = Environment(scratch, progress)
    progress.start(f"sglang {version}: throw-away environment")
    environment.make_venv()
    progress.done("done")

    def freeze() -> set[str]:
        command = [str(environment.python), "-m", "pip", "freeze", "--all", "--exclude", "pip"]
        command += ["--exclude", "sglang-ext"]
        output = subprocess.run(command, capture_output=True, text=True, check=True, encoding="utf-8")
        return {line.split("+")[0] for line in output.stdout.splitlines() if "==" in line}

    progress.start(f"sglang {version}: what it asks of packages")
    fetch = [str(environment.python), "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch)]
    subprocess.run([*fetch, f"sglang=={version}"], check=True, stderr=subprocess.DEVNULL)
    asked = scratch / "asked.txt"
    constraints = [*asked_by_sglang(next(scratch.glob("sglang-*.whl"))), *HELD_BACK]
    asked.write_text("".join(f"{each}\n" for each in constraints), encoding="utf-8")
    progress.done("read")
    progress.start(f"sglang {version}: extra cpu")
    environment.pip("the extra cpu", "-c", str(asked), f"{ROOT}[cpu]", "setuptools>=77")
    progress.done("done")
    cpu = freeze() | {*WITHOUT_DEPENDENCIES, f"sglang=={version}"}
    progress.start(f"sglang {version}: extra test")
    environment.pip("the extra test", "-c", str(asked), f"{ROOT}[cpu,test]")
    test = (freeze() - cpu) | set(FOR_SOME_PYTHONS)
    progress.done("done")
    shutil.rmtree(scratch)
    return cpu, test


def lock(scratch: Path) -> None:
    """Resolve pyproject's extras anew beside each version of SGLang, and write the pins."""
    tail = "Written by `make lock`.\n"
    base = (
        f"# What a server on a CPU host needs, exact, with everything it brings in. {tail}"
        "# scripts/setup.py installs torch first (its build decides what it brings in), then the rest\n"
        "# without resolving: SGLang's metadata asks for CUDA packages that a CPU host has no use for.\n"
    )
    check_host(scratch)
    progress = Progress(4 * len(SUPPORTED) + 1)
    found = {version: resolve(scratch, version, progress) for version in SUPPORTED}
    progress.start("requirements/")
    cpu = set.intersection(*(each for each, _ in found.values()))
    test = set.intersection(*(each for _, each in found.values()))

    def write(path: Path, comment: str, pins: set[str]) -> None:
        path.write_text(
            comment + "".join(f"{pin}\n" for pin in sorted(pins, key=str.lower)), encoding="utf-8"
        )

    write(CPU, base, cpu)
    write(TEST, f"# What the checks and the tests need beside cpu.txt, exact. {tail}", test)
    for version, (needed, tools) in found.items():
        comment = f"# SGLang {version}, and what differs beside it from other versions. {tail}"
        write(beside(version), comment, (needed | tools) - cpu - test)
    progress.done("written")


def main() -> int:
    parser = argparse.ArgumentParser(description="Prepare the virtual environment of this project.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", metavar="DIR")
    parser.add_argument("--sglang", default=SGLANG, choices=SUPPORTED, help="its version (%(default)s)")
    parser.add_argument("--no-compile", action="store_true", help="leave the router's hot modules as Python")
    parser.add_argument("--lock", action="store_true", help="write requirements/*.txt anew instead")
    options = parser.parse_args()
    # Two makes at once must not install into one environment at once; the lock ends with the process.
    with (ROOT / "pyproject.toml").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            if options.lock:
                lock(ROOT / "build" / "lock-venv")
            else:
                prepare(options.venv.resolve(), options.sglang, compiling=not options.no_compile)
        except SetupError as error:
            print(f"\n{error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("\nInterrupted. Run `make setup` again: it goes on with the step that was running.")
            return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

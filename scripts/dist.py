"""``make dist``: build wheels and source distribution, and try each in a fresh environment beside SGLang.

One wheel is for any platform; where there is a C compiler, another has the router's hot modules compiled
(`scripts/compile_router.py`), which pip prefers on the platform and the Python that it is of. Beside them the
packages in ``clients/`` are built, and their tests run: that for Python on every Python here that it takes,
that for TypeScript where there is Node.

Built from the files that git knows, in a folder of their own, so that nothing which lies about is shipped.
Each is installed into an environment that has nothing of its own but sees the packages of the present one
(SGLang among them), and smoke-tested there by `scripts/smoke.py`. Only packages that pass are put into
``dist/``.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import typescript_client
from compile_router import compile_into, obstacle

ROOT = Path(__file__).resolve().parent.parent
NATIVE = "sglang_ext/_native"
BUILD = (
    "import sys; from setuptools import build_meta; to, *what = sys.argv[1:]; "
    "[getattr(build_meta, f'build_{each}')(to) for each in what]"
)
"""The backend takes ``sys.argv`` for itself, so it is read first."""


class DistError(Exception):
    """A built distribution is incomplete or contains unexpected files."""


def shipped(tracked: Iterable[str]) -> set[str]:
    """The tracked files that a wheel contains."""
    return {path for path in tracked if path.startswith("sglang_ext/")}


def lacking(wanted: Iterable[str], wheel: Iterable[str]) -> tuple[list[str], list[str]]:
    """Tracked files that a wheel lacks, and files in it that are not tracked."""
    there = {name for name in wheel if ".dist-info/" not in name and not name.endswith("/")}
    return sorted(set(wanted) - there), sorted(there - set(wanted))


def run(*command: str | Path, cwd: Path | None = None) -> None:
    """Run a command quietly.

    Raises:
        DistError: it fails; carries the end of its output.
    """
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        encoding="utf-8",
    )
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()[-20:]
        raise DistError("\n".join([f"{' '.join(map(str, command))[:200]} failed:", *said]))


def tracked_files() -> list[str]:
    """The files of the checkout: those that git knows, and new ones that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True, encoding="utf-8",
    )  # fmt: skip
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


CLIENT = "clients/python"
PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14")
"""Minor versions on which the client is tried, where they are on the path."""
CLIENT_TRY = (
    "import sys, sglang_ext_client as client; "
    "assert client.__file__.startswith(sys.prefix), client.__file__; "
    "client.Hints('http://127.0.0.1:1').close(); "
    "assert client.Client('http://127.0.0.1:1').session('s').headers == {'x-session-id': 's'}"
)


def build_client(source: Path, out: Path) -> list[Path]:
    """Wheel and source distribution of the client for Python programs.

    Args:
        source: a copy of the checkout's files.

    Raises:
        DistError: a file of the package is missing, or one is there that should not be.
    """
    shutil.copytree(source / "sglang_ext" / "client", source / CLIENT / "sglang_ext_client")
    out.mkdir()
    run(sys.executable, "-c", BUILD, out, "sdist", "wheel", cwd=source / CLIENT)
    wanted = {
        f"sglang_ext_client/{path.name}"
        for path in (source / "sglang_ext" / "client").iterdir()
        if path.is_file()
    }
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        missing, strange = lacking(wanted, archive.namelist())
    if missing or strange:
        raise DistError(f"{wheel.name} lacks {missing}, and has the untracked {strange}")
    return [wheel, sdist]


def try_client(package: Path, scratch: Path) -> list[str]:
    """Install the client alone, on every Python here that it takes; their versions.

    Raises:
        DistError: it cannot be installed, or does not work without other packages.
    """
    tried = []
    for version in PYTHONS:
        python = shutil.which(f"python{version}")
        if python is None or subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode:
            continue
        venv = scratch / f"venv-{version}-{package.name}"
        run(python, "-m", "venv", "--without-pip", venv)
        # The source distribution is built by the setuptools of this environment, which its own lacks.
        (site,) = venv.glob("lib/python*/site-packages")
        pip = ["--disable-pip-version-check", "--no-index", "--no-deps", "--no-build-isolation"]
        run(sys.executable, "-m", "pip", "install", "--target", site, *pip, package)
        run(venv / "bin" / "python", "-I", "-c", CLIENT_TRY, cwd=scratch)
        tried.append(version)
    return tried


def copy_to(source: Path) -> list[str]:
    """Copy the checkout's files, and nothing else that lies there; their names."""
    tracked = tracked_files()
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    return tracked


def build(scratch: Path, source: Path, tracked: Sequence[str]) -> list[Path]:
    """Wheels and source distribution.

    Args:
        source: a copy of the checkout's files. tracked: their names.

    Raises:
        DistError: something is missing from one, or is in it that should not be.
    """
    out = scratch / "out"
    out.mkdir()
    wanted = shipped(tracked)
    run(sys.executable, "-c", BUILD, out, "sdist", "wheel", cwd=source)
    compiled: set[str] = set()
    if why := obstacle():
        print(f"no wheel with compiled modules: {why}")
    else:
        compile_into(source / NATIVE)
        compiled = {str(path.relative_to(source)) for path in (source / NATIVE).rglob("*") if path.is_file()}
        run(sys.executable, "-c", BUILD, out, "wheel", cwd=source)
    wheels, (sdist,) = sorted(out.glob("*.whl")), out.glob("*.tar.gz")
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            missing, strange = lacking(wanted | (set() if is_pure(wheel) else compiled), archive.namelist())
        if missing or strange:
            raise DistError(f"{wheel.name} lacks {missing}, and has the untracked {strange}")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    if missing := {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md"} - names:
        raise DistError(f"the source distribution lacks {missing}")
    return [*wheels, sdist]


def is_pure(package: Path) -> bool:
    """Whether nothing in a package is compiled."""
    return package.name.endswith(("-none-any.whl", ".tar.gz"))


def install(package: Path, scratch: Path) -> Path:
    """Install a package into a fresh environment beside SGLang; the environment.

    Raises:
        DistError: it cannot be installed.
    """
    venv = scratch / f"venv-{package.name}"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    (site,) = venv.glob("lib/python*/site-packages")
    # A path in a .pth file adds packages, but Python ignores the .pth files in it: packages installed here in
    # editable form stay out of sight.
    (site / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    pip = ["--disable-pip-version-check", "--no-index", "--no-deps", "--no-build-isolation"]
    run(sys.executable, "-m", "pip", "--python", python, "install", "--ignore-installed", *pip, package)
    return venv


def try_out(package: Path, scratch: Path) -> None:
    """Install a package into a fresh environment, and smoke-test it there.

    Raises:
        DistError: it cannot be installed, or does not work.
    """
    venv = install(package, scratch)
    version = package.name.removesuffix(".tar.gz").split("-")[1]
    how = "python" if is_pure(package) else "compiled"
    run(venv / "bin" / "python", "-P", ROOT / "scripts" / "smoke.py", venv, version, how, cwd=scratch)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build and try out wheels and source distribution.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="DIR")
    out: Path = parser.parse_args(arguments).out
    try:
        with tempfile.TemporaryDirectory(prefix="sglang-ext-dist-") as folder:
            scratch = Path(folder)
            source = scratch / "source"
            tracked = copy_to(source)
            packages = build(scratch, source, tracked)
            for package in packages:
                try_out(package, scratch)
                print(f"{package.name}: installs beside SGLang, and works")
            clients = build_client(source, scratch / "client")
            for package in clients:
                print(f"{package.name}: works alone on Python {', '.join(try_client(package, scratch))}")
            run(sys.executable, "-m", "pytest", "-q", "tests/router/client_packages", cwd=ROOT)
            if why := typescript_client.obstacle():
                print(f"no package for TypeScript: {why}")
            else:
                copied = typescript_client.copy_to(scratch / "typescript")
                clients.append(typescript_client.pack(copied, scratch))
                print(f"{clients[-1].name}: works alone")
            packages += clients
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir(parents=True)
            for package in packages:
                shutil.copy2(package, out)
    except (DistError, typescript_client.NodeError) as error:
        print(f"make dist: {error}", file=sys.stderr)
        return 1
    print(f"in {out}: {', '.join(package.name for package in packages)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The TypeScript client in ``clients/typescript``: built where there are Node and npm.

TypeScript itself is installed with npm into ``build/typescript``, once; the client has no other dependency.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "clients" / "typescript"
LEAST_NODE = 18
TOOLS = ROOT / "build" / "typescript"
FILES = ("package.json", "package-lock.json", ".npmrc")


class NodeError(Exception):
    """A command of Node's failed; carries the end of its output."""


def run(*command: str | Path, cwd: Path, environment: Mapping[str, str] | None = None) -> str:
    """Run a command; its output.

    Raises:
        NodeError: it fails.
    """
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd, env={**os.environ, **(environment or {})}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, timeout=600, encoding="utf-8",
    )  # fmt: skip
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()[-60:]
        raise NodeError("\n".join([f"{' '.join(map(str, command))[:200]} failed:", *said]))
    return done.stdout


def obstacle() -> str | None:
    """Why nothing can be built here; None where it can."""
    for name in ("node", "npm"):
        if shutil.which(name) is None:
            return f"there is no {name}"
    version = subprocess.run(
        ["node", "--version"], capture_output=True, text=True, check=False, encoding="utf-8"
    ).stdout.strip()
    if not version.startswith("v") or int(version[1:].partition(".")[0]) < LEAST_NODE:
        return f"node is {version or 'broken'}, and the client needs {LEAST_NODE} or later"
    return _tools_missing()


def _tools_missing() -> str | None:
    """Install TypeScript unless it is there in the version of the lock; why it cannot be."""
    TOOLS.mkdir(parents=True, exist_ok=True)
    with (TOOLS / ".lock").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        lock = (SOURCES / "package-lock.json").read_bytes()
        mark = TOOLS / ".installed"
        if mark.is_file() and mark.read_bytes() == lock:
            return None
        for name in FILES:
            shutil.copy2(SOURCES / name, TOOLS / name)
        try:
            run("npm", "ci", "--ignore-scripts", cwd=TOOLS)
        except (NodeError, subprocess.TimeoutExpired) as error:
            return f"TypeScript cannot be installed: {str(error).splitlines()[-1]}"
        mark.write_bytes(lock)
    return None


def copy_to(folder: Path) -> Path:
    """A copy of the client's sources with TypeScript beside them; ``obstacle`` was None.

    Raises:
        NodeError: the sources do not fit each other.
    """
    left_out = shutil.ignore_patterns("node_modules", "dist", "build")
    shutil.copytree(SOURCES, folder, ignore=left_out)
    (folder / "node_modules").symlink_to(TOOLS / "node_modules")
    return folder


def pack(folder: Path, out: Path) -> Path:
    """Build the package of a copy's sources, and try it alone in a folder of its own; the file in ``out``.

    Raises:
        NodeError: it cannot be built, or does not work.
    """
    run("npm", "run", "build", cwd=folder)
    name = run("npm", "pack", "--silent", "--pack-destination", out, cwd=folder).strip()
    alone = folder / "alone"
    alone.mkdir()
    (alone / "package.json").write_text('{"type": "module"}\n', encoding="utf-8")
    run("npm", "install", "--offline", "--silent", out / name, cwd=alone)
    (alone / "try.ts").write_text(
        'import { Client, Hints } from "sglang-ext-client";\n'
        'const { headers } = new Client("http://127.0.0.1:1").session("s");\n'
        'if (headers["x-session-id"] !== "s") throw new Error("no session");\n'
        'await new Hints("http://127.0.0.1:1").close();\n',
        encoding="utf-8",
    )
    compiler = TOOLS / "node_modules" / ".bin" / "tsc"
    run(compiler, "--module", "nodenext", "--target", "es2022", "--strict", "try.ts", cwd=alone)
    run("node", "try.js", cwd=alone)
    return out / name

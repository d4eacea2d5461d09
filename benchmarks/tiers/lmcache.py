"""LMCache's local disk backend, to measure the disk tier beside it, in an environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

CHILD = Path(__file__).with_name("lmcache_child.py")
IMPORTED = "import lmcache.v1.storage_backend.local_disk_backend"
CHUNK_TOKENS = 256
"""LMCache's default."""


def missing(python: Path | None) -> str | None:
    """Why LMCache cannot be measured with this interpreter, None when it can."""
    command = [str(python or sys.executable), "-c", IMPORTED]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=120, encoding="utf-8"
        )
    except OSError as error:
        return f"--lmcache-python: {error}"
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or [""])[-1]
    if python is None:
        return "not installed; --lmcache-python names the interpreter of an environment that has it"
    return f"not installed there: {last}"


class LmCache:
    """The backend over a folder of its own, in a process of its own.

    Args:
        python: interpreter that has LMCache.
        folder: made by the backend, and removed when it ends.
        chunk_bytes, chunks: how much is kept.
        threads: of the backend, for reading.
        direct: with O_DIRECT.
    """

    def __init__(
        self, python: Path | None, folder: Path, *, chunk_bytes: int, chunks: int, threads: int, direct: bool
    ) -> None:
        self.folder = folder
        arguments = {
            "folder": str(folder),
            "chunk_bytes": chunk_bytes,
            "chunks": chunks,
            "threads": threads,
            "direct": direct,
        }
        self._log = folder.with_suffix(".log")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(python or sys.executable), str(CHILD), json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
            )
        try:
            self._answer()
        except BaseException:
            self._process.kill()
            self.close()
            raise

    def run(self, what: str) -> float:
        """Seconds that the backend needed to `write` or `read` everything."""
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def note(self, took: list[float], what: str) -> None:
        """Run, and add the seconds that the backend's process measured."""
        took.append(self.run(what))

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"LMCache ended: {self._log.read_text(encoding='utf-8')[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End its process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> LmCache:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

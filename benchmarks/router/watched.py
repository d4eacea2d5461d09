"""The router under observation, `python -m benchmarks.router.watched FOLDER FLAGS...`, for `profile`.

SIGUSR1 begins an observation or ends it, in turns: bytecodes are counted while requests come, then for as
long without any, for the router's idle work; then a clock samples the function that the event loop is in.
Each turn is answered by a file in FOLDER (two signals at once are one): `begun-N`, or the observation as
JSON.

Bytecodes are exact, and the same on every machine. Time is sampled (CPU seconds of the process, by the
system's tick), so that looking costs next to nothing and favours no function.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from sglang_ext.router.__main__ import main

TICK_S = 0.001
"""Asked for; the system's own tick may be longer."""
ENTRY = 8
"""Bytes of code at whose execution a function has only begun: a tick there belongs to the C code that ran
before, since a signal waits until Python code runs."""


class Watch:
    """Counts by function."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._codes: Counter[CodeType] = Counter()
        self._calls: Counter[CodeType] = Counter()
        self._ticks: Counter[CodeType | None] = Counter()
        self._turn = 0

    def switch(self, *_: object) -> None:
        """To the next observation, or to none."""
        self._turn += 1
        if self._turn % 2:
            (self._folder / f"begun-{self._turn}").touch()
        if self._turn in (1, 3):
            self._codes.clear()
            self._calls.clear()
            sys.settrace(self._called)
        elif self._turn in (2, 4):
            sys.settrace(None)
            name = "bytecodes" if self._turn == 2 else "idle"
            self._write(name, {code: (self._codes[code], calls) for code, calls in self._calls.items()})
        elif self._turn == 5:
            signal.signal(signal.SIGPROF, self._tick)
            signal.setitimer(signal.ITIMER_PROF, TICK_S, TICK_S)
        else:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self._write("ticks", {c: (n, 0) for c, n in self._ticks.items()})

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._calls[frame.f_code] += 1
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return self._stepped

    def _stepped(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self._codes[frame.f_code] += 1
        return self._stepped

    def _tick(self, number: int, frame: FrameType | None) -> None:
        is_between = frame is None or frame.f_lasti <= ENTRY
        self._ticks[None if is_between or frame is None else frame.f_code] += 1

    def _write(self, name: str, seen: dict[CodeType | None, tuple[int, int]] | Any) -> None:
        rows = [
            ["" if code is None else code.co_filename, "" if code is None else code.co_qualname, *counts]
            for code, counts in seen.items()
        ]
        part = self._folder / f"{name}.part"
        part.write_text(json.dumps(rows), encoding="utf-8")
        os.replace(part, self._folder / f"{name}.json")


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, Watch(Path(sys.argv[1])).switch)
    sys.exit(main(sys.argv[2:]))

"""A writer that is killed, and the checks of the directory that it leaves.

`python -m tests.support.crash DIRECTORY ...` puts blocks into a disk tier as fast as it can, and prints
a line after each put that the tier has reported durable. `CrashTest` runs it, kills it with SIGKILL at a
random moment or at a named step of the tier, and then verifies the content of the directory.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sglang_ext.testing.blocks import LAYOUT, NAMESPACE, get_all, prefix_keys, put_all
from sglang_ext.tiered_store.disk.state import DiskConfig
from sglang_ext.tiered_store.disk.tier import DiskTier
from sglang_ext.tiered_store.tier import Outcome
from tests.support import ROOT

STEPS = (
    "reserved",
    "layer_written",
    "header_written",
    "data_synced",
    "index_prepared",
    "index_committed",
    "published",
)
"""Steps of every put, in order."""
RECLAIM_STEPS = ("moved", "index_dropped", "unlinked")
"""Steps of reclaiming, which happen when the limit is reached."""

HOT = 0
"""The prefix that the writer puts first and uses after every put."""
_DEADLINE = 60.0


def config(path: Path, *, small: bool) -> DiskConfig:
    """Small: a limit that is reached again and again."""
    run = 16 << 10
    if small:
        return DiskConfig(path, 48 * run, segment_bytes=8 * run, instance="writer")
    return DiskConfig(path, 64 << 20, segment_bytes=64 * run, instance="writer")


def main(argv: Sequence[str] | None = None) -> int:
    """The writer. Ends by being killed, or after `--puts` puts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--first", type=int, required=True, help="number of the first prefix to put")
    parser.add_argument("--puts", type=int, default=1000)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--step", default="", help="kill this process at that step")
    parser.add_argument("--after", default="", help="count occurrences only once this step has been seen")
    parser.add_argument("--occurrence", type=int, default=1, help="... the so manieth time")
    options = parser.parse_args(argv)
    seen: Counter[str] = Counter()

    def step(name: str) -> None:
        if options.after and name != options.after and not seen[options.after]:
            return
        seen[name] += 1
        if name == options.step and seen[name] == options.occurrence:
            os.kill(os.getpid(), signal.SIGKILL)

    tier = DiskTier(config(options.directory, small=options.small), LAYOUT, step=step)
    for number in range(options.first, options.first + options.puts):
        keys = prefix_keys(number, 1 + number % 6)
        if put_all(tier, NAMESPACE, keys) is Outcome.DONE:
            report(f"{number} {len(keys)}")
        if tier.match(NAMESPACE, prefix_keys(HOT, 3)) < 3:
            put_all(tier, NAMESPACE, prefix_keys(HOT, 3))
        get_all(tier, NAMESPACE, prefix_keys(HOT, 3))
    tier.close()
    report("end 0")
    return 0


def report(line: str) -> None:
    os.write(1, line.encode() + b"\n")  # no buffer: each line reaches the pipe before the kill


@dataclass
class CrashTest:
    """A directory whose writers are killed, one after the other.

    durable: prefix -> blocks that a writer has reported as durable.
    """

    path: Path
    small: bool = False
    durable: dict[int, int] = field(default_factory=dict)
    kills: int = 0
    found: int = 0
    _next: int = 1

    def kill_at_step(self, step: str, occurrence: int, after: str = "") -> None:
        """Run a writer that kills itself at a step; with `after`, counted from the first time of that step
        on.
        """
        options = ("--step", step, "--occurrence", str(occurrence), "--after", after)
        with self._writer(*options) as child:
            self._listen(child, None)
            code = child.wait(timeout=_DEADLINE)
        if code != -signal.SIGKILL:
            raise AssertionError(f"the writer ended with {code} before step {step} came {occurrence} times")
        self.kills += 1

    def kill_at_random(self, choose: random.Random) -> None:
        """Run a writer and kill it after a random number of its reports, wherever it is by then."""
        with self._writer() as child:
            self._listen(child, choose.randrange(25))
            child.kill()
            self._listen(child, None)
            child.wait(timeout=_DEADLINE)
        self.kills += 1

    def _writer(self, *options: str) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "tests.support.crash",
            str(self.path),
            "--first",
            str(self._next),
        ]
        command += [*options, *(["--small"] if self.small else [])]
        self._next += 1000
        return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)

    def _listen(self, child: subprocess.Popen[bytes], lines: int | None) -> None:
        """Record the writer's reports: that many lines, or all until it ends."""
        assert child.stdout is not None
        while lines is None or lines > 0:
            line = child.stdout.readline()
            if not line.endswith(b"\n"):
                return
            number, blocks = line.split()
            if number == b"end":
                raise AssertionError("the writer has come to its end without being killed")
            self.durable[int(number)] = int(blocks)
            lines = None if lines is None else lines - 1

    def verify(self) -> None:
        """Open the directory: all durable blocks are there, every byte of them is right, and the tier can be
        used.

        With a small limit, older prefixes may have been evicted, each as a whole, but never the one in use.
        """
        tier = DiskTier(config(self.path, small=self.small), LAYOUT)
        try:
            tier.check()
            if tier.stats().extra["lost_at_start_blocks"]:
                raise AssertionError("blocks were lost")
            for number, blocks in list(self.durable.items()):
                found = get_all(tier, NAMESPACE, prefix_keys(number, blocks))
                self.found += found
                if found == blocks:
                    continue
                if not self.small or found:
                    raise AssertionError(f"prefix {number} had {blocks} durable blocks, {found} are left")
                del self.durable[number]
            if self.small and self.kills and get_all(tier, NAMESPACE, prefix_keys(HOT, 3)) not in (0, 3):
                raise AssertionError("the prefix in use is there in part")
            if tier.stats().used_bytes > tier.stats().limit_bytes:
                raise AssertionError("the limit is exceeded")
        finally:
            tier.close()


if __name__ == "__main__":
    sys.exit(main())

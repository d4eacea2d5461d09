"""Verbs between two kernels that share nothing: guests with Soft-RoCE, both started from one snapshot.

So their boot ids are one, their processes have the same ids, and nothing but memory itself says that they are
two machines. ``guest/two_kernels.py`` runs in both; cables are cut and machines killed here.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.testing.waiting import wait_until

HERE = Path(__file__).parent
PACKAGES = ("numba", "llvmlite", "xxhash")
"""The local transports need them, so that only the two kernels keep these from being chosen."""
APPEND = "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off no_timer_check rdinit=/init two"
STEP_S = 900.0
END_S = 30.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


class Guest:
    """One virtual machine.

    Args:
        qemu: the command.
        folder: for its sockets and its console's log.
        ports: UDP on loopback: its own end of the cable, and the other one's.
        more: flags.
    """

    def __init__(self, qemu: Sequence[str], folder: Path, ports: tuple[int, int], *more: str) -> None:
        folder.mkdir()
        self._serial, self._monitor = folder / "serial", folder / "monitor"
        self._log = folder / "console"
        own, other = ports
        self.process = subprocess.Popen(
            [
                *qemu, "-append", APPEND, "-serial", "stdio",
                "-serial", f"unix:{self._serial},server=on,wait=off",
                "-qmp", f"unix:{self._monitor},server=on,wait=off",
                "-netdev", f"socket,id=cable,udp=127.0.0.1:{other},localaddr=127.0.0.1:{own}",
                "-device", "virtio-net-pci,netdev=cable,mac=52:54:00:00:00:09", *more,
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace",
        )  # fmt: skip
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name=f"console of {folder.name}")
        self._reader.start()
        self._test: socket.socket | None = None

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self._log.open("w") as log:
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The next line that says so."""
        deadline = time.monotonic() + STEP_S
        while True:
            line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            assert line is not None, f"the guest ended without {pattern!r}:\n{self._log.read_text()[-4000:]}"
            if match := re.search(pattern, line):
                return match
            assert "Traceback" not in line, f"{pattern!r} is waited for:\n{self._log.read_text()[-4000:]}"

    def monitor(self, command: str, **arguments: Any) -> Any:
        """Send a command of QMP, and return its answer."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(END_S)
            wait_until(lambda: self._monitor.exists(), seconds=END_S, what="the monitor")
            sock.connect(str(self._monitor))
            stream = sock.makefile("rw")
            stream.readline()
            for name, given in (("qmp_capabilities", {}), (command, arguments)):
                stream.write(json.dumps({"execute": name, "arguments": given}) + "\n")
                stream.flush()
                while "return" not in (answer := json.loads(stream.readline())):
                    assert "error" not in answer, answer
            return answer["return"]

    def send(self, line: str) -> None:
        """A line on the second serial port."""
        if self._test is None:
            self._test = socket.socket(socket.AF_UNIX)
            self._test.connect(str(self._serial))
        self._test.sendall(f"{line}\n".encode())

    def run(self, line: str) -> None:
        """Send a line until it is taken: a serial port may lose bytes while its machine begins."""
        for _ in range(int(STEP_S)):
            self.send(line)
            with contextlib.suppress(queue.Empty):
                while (said := self._lines.get(timeout=1.0)) is not None:
                    if "@@RUNS" in said:
                        return
        raise TimeoutError(f"{line!r} is not taken:\n{self._log.read_text()[-4000:]}")

    def cable(self, *, up: bool) -> None:
        self.monitor("set_link", name="cable", up=up)

    def save(self, to: Path) -> None:
        """Its whole state, where it stands, into a file."""
        self.monitor("stop")
        self.monitor("migrate", uri=f"exec:cat > {to}")
        wait_until(
            lambda: self.monitor("query-migrate").get("status") == "completed",
            seconds=STEP_S,
            what="the snapshot",
        )

    def go_on(self) -> None:
        """Begin where the snapshot was taken."""
        wait_until(
            lambda: self.monitor("query-status")["status"] in ("paused", "postmigrate"),
            seconds=STEP_S,
            what="the snapshot is read",
        )
        self.monitor("cont")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(END_S)
        self._reader.join(END_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        if self._test is not None:
            self._test.close()


def free_udp_ports() -> tuple[int, int]:
    with socket.socket(type=socket.SOCK_DGRAM) as one, socket.socket(type=socket.SOCK_DGRAM) as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]


def prepared(site: Path) -> list[str]:
    """qemu's command for a guest that imports from a folder, which is made."""
    command = ["bash", str(HERE / "prepare.sh"), sys.executable, str(site), *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def two() -> Iterator[tuple[Guest, Guest]]:
    """The owner's and the reader's guest, from one snapshot."""
    with contextlib.ExitStack() as stack:
        # Not below pytest's folder, whose path is too long for a socket, and which keeps large files.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="two-guests-", dir="/tmp")))
        qemu = prepared(folder / "site")
        first = Guest(qemu, folder / "first", free_udp_ports())
        with contextlib.closing(first):
            first.wait_for("@@WAITING")
            first.save(folder / "snapshot")
        ports = free_udp_ports()
        restored = ("-incoming", f"exec:cat {folder / 'snapshot'}")
        guests = []
        for number, (name, ends) in enumerate((("owner", ports), ("reader", ports[::-1])), 1):
            guest = Guest(qemu, folder / name, ends, *restored)
            stack.callback(guest.close)
            guest.go_on()
            guest.run(f"go {number} python3 two_kernels.py {name}")
            guests.append(guest)
        yield guests[0], guests[1]


def test_two_machines_of_one_snapshot_read_and_write_each_others_memory(two: tuple[Guest, Guest]) -> None:
    owner, reader = two
    for guest in two:
        assert guest.wait_for(r"@@SAYS identity (\w+) pid (\w+)").groups() == ("True", "True"), (
            "all that a kernel says of itself is the same"
        )
        name, reasons = guest.wait_for(r"@@SAYS chosen (\w*) (.*)").groups()
        print(f"{guest._log.parent.name} reads by {name}: {reasons}")
        assert name == "verbs"
        assert "shm" in reasons
        assert "cma" in reasons
        assert "numba" not in reasons, "they are passed over for what they read, not for want of a compiler"

    # A partition in the middle of a READ: it ends, by name, and nothing of it lands later.
    reader.wait_for("@@SAYS reading")
    owner.cable(up=False)
    kind, took, broken = reader.wait_for(r"@@SAYS gone (\w+) (\S+ s) (\w+)").groups()
    print(f"a cut cable ended a READ after {took}")
    assert (kind, broken) == ("PeerGoneError", "True")
    reader.wait_for("@@SAYS heal")
    owner.cable(up=True)
    reader.send("healed")
    assert reader.wait_for(r"@@SAYS again (\w+) untouched (\w+)").groups() == ("True", "True")

    # A writer is fenced; then a second, whose cable is cut.
    assert reader.wait_for(r"@@SAYS fenced (\w+)")[1] == "PeerGoneError"
    assert owner.wait_for(r"@@SAYS barred (\w+) unchanged (\w+)").groups() == ("True", "True")
    owner.wait_for("@@SAYS cut")
    owner.cable(up=False)
    owner.send("cut")
    owner.wait_for("@@SAYS heal")
    owner.cable(up=True)
    owner.send("healed")
    assert reader.wait_for(r"@@SAYS fenced (\w+)")[1] == "PeerGoneError"
    assert owner.wait_for(r"@@SAYS barred (\w+) unchanged (\w+)").groups() == ("True", "True")

    # A whole machine goes in the middle of a READ.
    reader.wait_for("@@SAYS reading")
    owner.close()
    kind, took, _ = reader.wait_for(r"@@SAYS gone (\w+) (\S+ s) (\w+)").groups()
    print(f"a dead machine ended a READ after {took}")
    assert kind == "PeerGoneError"
    assert reader.wait_for(r"@@EXIT (\d+)")[1] == "0"

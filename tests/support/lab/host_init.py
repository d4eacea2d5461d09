"""The first process of a lab's host: sets it up inside its new namespaces, and waits until it shall end.

Run as a script, without the package, by ``unshare``; its one argument is JSON. When its standard input ends,
so does it, and the kernel ends every other process of the host with it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

BOOT_ID = "/proc/sys/kernel/random/boot_id"
OWN_FILES = {"hosts": "/etc/hosts", "resolv.conf": "/etc/resolv.conf", "boot_id": BOOT_ID}
"""Files of which the host has its own copy, by name among the facts."""
OWN_FOLDERS = ("/tmp", "/dev/shm")
OLD = "/mnt"
"""Where a folder of the machine stays visible until its shared parts have been bound."""


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def hide(folder: str, shared: list[str]) -> None:
    """Put an empty file system over a folder, with its shared parts in their places."""
    mount("--rbind", folder, OLD)
    mount("-t", "tmpfs", "-o", "mode=1777", "lab", folder)
    for path in shared:
        if path.startswith(folder + "/"):
            target, source = Path(path), OLD + path.removeprefix(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            if os.path.isdir(source):
                target.mkdir(exist_ok=True)
            else:
                target.touch()
            mount("--rbind", source, path)
    subprocess.run(["umount", "--lazy", OLD], check=True)


def set_up(facts: dict[str, object], shared: list[str]) -> None:
    """Make these namespaces a host."""
    socket.sethostname(str(facts["hostname"]))
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for folder in OWN_FOLDERS:
        hide(folder, shared)
    own = Path("/tmp/.lab")
    own.mkdir()
    for name, target in OWN_FILES.items():
        (own / name).write_text(str(facts[name]), encoding="utf-8")
        mount("--bind", str(own / name), target)


def reap(*_: object) -> None:
    """Reap ended processes: processes whose parent has gone are this one's children."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


if __name__ == "__main__":
    facts = json.loads(sys.argv[1])
    set_up(facts, facts.pop("shared"))
    signal.signal(signal.SIGCHLD, reap)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()

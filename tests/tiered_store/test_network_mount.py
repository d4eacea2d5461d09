"""A disk tier's directory on a mounted network file system: sshfs, from one host of a lab on another."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.lab.hosts import Host, Lab, stop, why_not

pytestmark = pytest.mark.long

SFTP = Path("/usr/lib/openssh/sftp-server")
PORT = 2222
SERVE = """
import socket, subprocess, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
while True:
    at, _ = server.accept()
    subprocess.Popen(sys.argv[3:], stdin=at, stdout=at)
    at.close()
"""
OPEN = """
import sys
from pathlib import Path
from sglang_ext.errors import ConfigError
from sglang_ext.testing.blocks import LAYOUT
from sglang_ext.tiered_store.disk.state import DiskConfig
from sglang_ext.tiered_store.disk.tier import DiskTier
try:
    DiskTier(DiskConfig(Path(sys.argv[1]), 256 << 20), LAYOUT).close()
    print("taken")
except ConfigError as error:
    print(error)
"""
DOCTOR = "import sys; from sglang_ext.cli import main; print('status', main(sys.argv[1:]))"


@dataclass
class Mounted:
    """A host, and two folders on it: a mount from another host, and a local one."""

    host: Host
    there: str
    here: str


@pytest.fixture
def mounted() -> Iterator[Mounted]:
    if reason := why_not():
        pytest.skip(reason)
    if not (SFTP.exists() and shutil.which("sshfs")):
        pytest.skip("sshfs and sftp-server are not installed")
    with Lab("filer", "server", families=(4,)) as lab:
        filer, host = lab["filer"], lab["server"]
        command = [sys.executable, "-c", SERVE, filer.address(), str(PORT), str(SFTP)]
        serving = filer.popen(command, stdout=subprocess.PIPE)
        mount = None
        try:
            assert serving.stdout is not None
            assert serving.stdout.readline() == b"ready\n"
            filer.run("mkdir", "/tmp/export")
            host.run("mkdir", "/tmp/there", "/tmp/here")
            options = ["-f", "-o", f"directport={PORT}", f"{filer.address()}:/tmp/export", "/tmp/there"]
            mount = host.popen(["sshfs", *options])
            host.run("sh", "-c", "until mountpoint -q /tmp/there; do sleep 0.1; done")
            yield Mounted(host, "/tmp/there", "/tmp/here")
        finally:
            for process in filter(None, (mount, serving)):
                stop(process)


def test_a_directory_of_another_machine_is_refused_and_named(mounted: Mounted) -> None:
    """By the server and by the doctor, also below the mount; the twin is a directory of this machine's."""
    host = mounted.host
    host.run("touch", f"{mounted.there}/file")  # it is served
    for path, refused in ((mounted.there, True), (f"{mounted.there}/below", True), (mounted.here, False)):
        said = host.run(sys.executable, "-c", OPEN, path)
        assert ("is on a network file system (fuse.sshfs)" in said) is refused, said
        assert (said == "taken\n") is not refused
        told = host.run(sys.executable, "-c", DOCTOR, "doctor", "--kv-disk-path", path)
        assert ("network file system (fuse.sshfs)" in " ".join(told.split())) is refused, told
        assert f"status {int(refused)}" in told, told

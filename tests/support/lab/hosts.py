"""A lab: hosts with addresses, names, memory and processes of their own, and wires that can be cut.

    with Lab("a", "b") as lab:
        server = lab["b"].popen([...], log=folder / "b.log")
        with lab["a"].network():
            ...                      # this thread connects from host a now
        lab.cut("a", "b")

Needs root, or its rights on namespaces; ``why_not`` names the missing one. Nothing is left of a lab when it
ends, nor when the process that made it ends: its hosts are namespaces without names.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

from tests.support import ROOT
from tests.support.lab import clock
from tests.support.lab.switch import enter_network

HERE: Final = Path(__file__).parent
NEEDED = (*(Path(each) for each in (sys.base_prefix, sys.prefix)), ROOT)
"""Folders of Python and of this code, which may lie below a folder that the host replaces by its own."""
NAMESPACES: Final = ("--net", "--uts", "--ipc", "--mount", "--pid")
STOP_SECONDS: Final = 10.0


def why_not() -> str | None:
    """Why no lab can be made on this machine; None where one can."""
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
        words = ["unshare", *NAMESPACES, "--fork", "--mount-proc", "ip", "link", "set", "lo", "up"]
        subprocess.run(words, check=True, capture_output=True, text=True, encoding="utf-8")
    except subprocess.CalledProcessError as error:
        return f"no hosts can be made of namespaces: {error.stderr.strip()}"
    except OSError as error:
        return f"no hosts can be made of namespaces: {error}"
    return None


class Host:
    """One host of a lab.

    Args:
        name: the lab's name for it.
        number: its place among the hosts, from 1: the last part of its addresses.
        hostname: its own host name.
        shared: files and folders of /tmp and /dev/shm that it sees too.
        families: 4, 6 or both: IP versions of its addresses.
        networks: their names.
        environment: of its processes, on top of what each is given.
    """

    def __init__(
        self,
        name: str,
        number: int,
        hostname: str,
        shared: Sequence[Path],
        families: Sequence[int],
        networks: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        self.name = name
        self._environment = environment
        self.hostname = hostname
        self._interfaces = {
            network: [f"10.77.{index}.{number}/24" if family == 4 else f"fd77:{index + 1}::{number}/64"
                      for family in families]
            for index, network in enumerate(networks)
        }  # fmt: skip
        facts = {
            "hostname": hostname,
            # Its own name is all that it can look up.
            "hosts": f"127.0.0.1 localhost\n127.0.1.1 {hostname}\n::1 localhost\n",
            "resolv.conf": "",
            "boot_id": f"{uuid.uuid4()}\n",
            "shared": [str(path) for path in (*NEEDED, *shared)],
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        self._init = _start(
            "unshare", *NAMESPACES, "--fork", "--kill-child=SIGKILL", "--mount-proc",
            sys.executable, "-I", "-S", str(HERE / "host_init.py"), json.dumps(facts),
        )  # fmt: skip
        self.pid = _child_of(self._init.pid)
        """PID of its first process, in this machine's numbering."""

    def __repr__(self) -> str:
        return f"<Host {self.name} {self.address()}>"

    def address(self, network: str = "", family: int | None = None) -> str:
        """On a network (its first), of a family (the first that it has)."""
        found = self._interfaces[network] if network else next(iter(self._interfaces.values()))
        hosts = [each.partition("/")[0] for each in found]
        return hosts[0] if family is None else next(each for each in hosts if (":" in each) == (family == 6))

    def ports(self) -> list[dict[str, object]]:
        """The devices that the switch plugs in: one per network, named as the network."""
        return [
            {
                "host": self.name,
                "network": network,
                "pid": self.pid,
                "device": network,
                "addresses": addresses,
            }
            for network, addresses in self._interfaces.items()
        ]

    @contextmanager
    def network(self) -> Iterator[None]:
        """Sockets that this thread opens inside the block are on this host's network."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            enter_network(f"/proc/{self.pid}/ns/net")
            try:
                yield
            finally:
                enter_network(f"/proc/self/fd/{before}")
        finally:
            os.close(before)

    def popen(
        self,
        command: Sequence[str],
        *,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        stdout: int | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        """Start a process on this host. It leads a process group, by which it is signalled (``stop``)."""
        words = ["nsenter", "--target", str(self.pid), *NAMESPACES, "--", *command]
        output: IO[bytes] | int | None = log.open("wb") if log is not None else stdout
        try:
            process = subprocess.Popen(
                words,
                env={**(os.environ if environment is None else environment), **self._environment},
                stdin=stdin,
                stdout=output,
                stderr=None if log is None else subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            if log is not None:
                output.close()  # type: ignore[union-attr]
        self._processes.append(process)
        return process

    def run(self, *command: str, seconds: float = 30.0) -> str:
        """Run a program on this host to its end. Returns its standard output.

        Raises:
            CalledProcessError: it failed. TimeoutExpired: it did not end.
        """
        process = self.popen(command, stdout=subprocess.PIPE)
        try:
            out, _ = process.communicate(timeout=seconds)
        except BaseException:
            stop(process, signal.SIGKILL)
            raise
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, out)
        return out.decode()

    def close(self) -> None:
        """End every process of the host, and with them the host."""
        _end(self._init)
        for process in self._processes:
            stop(process, signal.SIGKILL)


class Lab:
    """See the module's docstring.

    Args:
        names: of its hosts.
        hostnames: their own host names, if they differ from `names`; several may have the same.
        shared: see ``Host``; the same for all.
        families: IP versions of their addresses: 4, 6.
        networks: each host has a device of that name on each; the first is the default.
        seed: of the packets that get lost.
        clocks: by how many seconds the clocks of hosts are off (`clock`); those of others are right.
    """

    def __init__(
        self,
        *names: str,
        hostnames: Mapping[str, str] | None = None,
        shared: Sequence[Path] = (),
        families: Sequence[int] = (4, 6),
        networks: Sequence[str] = ("lan",),
        seed: int = 1,
        clocks: Mapping[str, float] | None = None,
    ) -> None:
        self.networks = tuple(networks)
        self.hosts: dict[str, Host] = {}
        self._names, self._hostnames = names, hostnames or {}
        self._shared, self._families, self._seed = shared, families, seed
        self._clocks = clocks or {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._switch: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Lab:
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="lab-")
            library = clock.built(Path(self._folder.name)) if self._clocks else None
            for number, name in enumerate(self._names, 1):
                hostname = self._hostnames.get(name, name)
                off = clock.environment(library, self._clocks.get(name, 0.0)) if library else {}
                shared = (*self._shared, Path(self._folder.name))
                self.hosts[name] = Host(name, number, hostname, shared, self._families, self.networks, off)
            plan = {
                "seed": self._seed,
                "ports": [port for host in self.hosts.values() for port in host.ports()],
            }
            script = str(HERE / "switch.py")
            self._switch = _start(sys.executable, "-I", "-S", script, json.dumps(plan))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts.values():
            host.close()
        self.hosts.clear()
        if self._switch is not None:
            _end(self._switch)
            self._switch = None
        if self._folder is not None:
            self._folder.cleanup()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def wire(
        self,
        source: str,
        target: str,
        *,
        both: bool = True,
        network: str = "",
        delay_s: float = 0.0,
        loss: float = 0.0,
        bytes_per_s: float = 0.0,
        cut: bool = False,
    ) -> None:
        """Set how packets go from one host to another from now on; and back, with ``both``.

        Args:
            network: all networks by default.
            delay_s, loss, bytes_per_s, cut: see ``switch.Wire``.
        """
        settings = {"delay_s": delay_s, "loss": loss, "bytes_per_s": bytes_per_s, "cut": cut}
        for each in (network,) if network else self.networks:
            self._order("wire", network=each, source=source, target=target, **settings)
            if both:
                self._order("wire", network=each, source=target, target=source, **settings)

    def cut(self, source: str, target: str, *, both: bool = True, network: str = "") -> None:
        """Let nothing pass; ``wire`` heals it."""
        self.wire(source, target, both=both, network=network, cut=True)

    def mask(self, host: str, address: str, *, network: str = "") -> None:
        """Put a host behind an IPv4 address of that network, as routers that masquerade do: other hosts reach
        it at this address, whose ports lead to its own, one to one."""
        self._order("mask", network=network or self.networks[0], host=host, address=address)

    def close_ports(self, host: str, *, but: Iterable[int]) -> None:
        """Let others reach no port of a host but these, as a firewall does: silently."""
        self._order("close_ports", host=host, but=list(but))

    def _order(self, do: str, **order: object) -> None:
        assert self._switch is not None
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        self._switch.stdin.write(json.dumps({"do": do, **order}).encode() + b"\n")
        self._switch.stdin.flush()
        if self._switch.stdout.readline() != b"done\n":
            raise RuntimeError(f"the switch did not take {do} {order}")


def stop(process: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> None:
    """Signal a process of a host and its process group; kill them after `STOP_SECONDS`."""
    for each in (number, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, each)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
            break
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def _start(*command: str) -> subprocess.Popen[bytes]:
    """Start one of the lab's own processes, which prints ``ready`` when it is."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        _end(process)
        raise RuntimeError(f"{command[0]} ended with {process.returncode}; see its output above")
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """End one of the lab's own processes: its input is over."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def _child_of(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    return int(child)

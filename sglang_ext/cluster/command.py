"""``sglang-ext cluster``: a cluster of SGLang servers with its router on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console

from sglang_ext.addresses import Ports
from sglang_ext.cluster.config import ClusterConfig
from sglang_ext.cluster.host import host_facts
from sglang_ext.cluster.plan import Door, HostFacts, Keys, Part, make_plan, speaks_tls, with_environment
from sglang_ext.cluster.process import environment_of
from sglang_ext.cluster.ranks import meeting_ports
from sglang_ext.cluster.supervisor import Cluster, Observer
from sglang_ext.cluster.terminal import Display
from sglang_ext.errors import ConfigError, UserError
from sglang_ext.folders import own_folder
from sglang_ext.patches.environment import require_temporary

PROG = ClusterConfig.prog
CHECK_FLAG = "--check"
"""Of the router: check the flags, and end."""
LOG_FOLDER_PREFIX = "sglang-ext-cluster-"
RUNTIME_FOLDER_PREFIX = "sglang-ext-run-"


class LogFolder:
    """The folder for the logs: the user's, or a temporary one. That goes when it is empty, or when the block
    did not raise and ``keep`` was not set.

    Raises:
        ConfigError: on entering, when the folder cannot be made.
    """

    def __init__(self, chosen: Path | None) -> None:
        self._chosen = chosen
        self.path = Path()
        self.keep = False

    def __enter__(self) -> LogFolder:
        try:
            if self._chosen is None:
                self.path = Path(tempfile.mkdtemp(prefix=LOG_FOLDER_PREFIX))
            else:
                self.path = own_folder(self._chosen, "--log-dir", make=True)
        except OSError as error:
            raise ConfigError(
                f"cannot make a folder for the logs: {error}", field="--log-dir", hint="Give another one"
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._chosen is None and ((kind is None and not self.keep) or not any(self.path.iterdir())):
            shutil.rmtree(self.path, ignore_errors=True)


@contextlib.contextmanager
def made_keys() -> Iterator[Keys]:
    """Keys for one cluster, in files readable by this user alone, until the block ends."""
    _remove_left_folders(Path(tempfile.gettempdir()))
    prefix = f"{RUNTIME_FOLDER_PREFIX}{os.getpid()}-"
    # tempfile makes a folder of mode 0700, whatever the umask.
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        keys = Keys(Path(folder) / "cluster.key", Path(folder) / "servers.key")
        for path in (keys.cluster, keys.servers):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_urlsafe(48))
        yield keys


def _remove_left_folders(where: Path) -> None:
    """Remove the keys of clusters whose supervisor was killed."""
    for folder in where.glob(f"{RUNTIME_FOLDER_PREFIX}*-*"):
        pid = folder.name.removeprefix(RUNTIME_FOLDER_PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.geteuid() and pid.isdigit() and not Path("/proc", pid).exists():
                shutil.rmtree(folder, ignore_errors=True)


def open_door(config: ClusterConfig, ports: Ports, private: Path) -> tuple[int, Door]:
    """The routers' port, and the sockets and ports that their processes inherit; all held by ``ports``.

    Args:
        ports: holds the opened sockets and reserved ports.
        private: a folder closed to other users, in which several routers get their shared one.

    Raises:
        ConfigError: the port cannot be had.
    """
    sockets = ports.open(config.host, config.port, "--port")
    port = int(sockets[0].getsockname()[1])
    descriptors = tuple(each.fileno() for each in sockets)
    if config.routers > 1:
        shared = private / "routers"
        shared.mkdir(mode=0o700)
        return port, Door(descriptors, tuple(ports.free_after(port, config.routers)), shared)
    stands_by = config.restart and not speaks_tls(config)
    return port, Door(descriptors, tuple(ports.free_after(port, 2)) if stands_by else ())


@contextlib.asynccontextmanager
async def running_cluster(
    config: ClusterConfig, log_dir: Path, observer: Observer | None = None, host: HostFacts | None = None
) -> AsyncIterator[Cluster]:
    """The cluster that ``config`` describes, starting; it has ended when the block has.

    Args:
        log_dir: existing folder for the logs.
        observer: notified of every change.
        host: this machine; determined here when it is None.

    Raises:
        ConfigError: it cannot run here; names the flag.
    """
    require_temporary(os.environ)
    config = with_environment(config, os.environ)
    if config.ray is not None:
        from sglang_ext.cluster.ray_cluster import running_on_ray

        with made_keys() as keys:
            async with running_on_ray(config, log_dir, keys, observer) as cluster:
                yield cluster
        return
    with Ports() as ports, made_keys() as keys:
        router_port, door = open_door(config, ports, keys.servers.parent)
        server_ports = ports.free_after(router_port, config.ports - config.servers)
        for index in range(config.servers):
            server_ports += ports.free_after(router_port, 1, run=meeting_ports(config, index))
        parts = make_plan(config, host or host_facts(), router_port, server_ports, keys, door)
        if config.router_args:
            await check_router(parts[-1])
        cluster = Cluster(
            parts,
            log_dir,
            restarts=config.restart,
            start_timeout_s=config.start_timeout_secs,
            stop_timeout_s=config.stop_timeout_secs,
            observer=observer,
        )
        async with cluster:
            yield cluster


async def check_router(part: Part) -> None:
    """Have a router check its flags, before servers take minutes to start.

    Raises:
        ConfigError: it refuses one of ``--router-args``.
    """
    checking = await asyncio.create_subprocess_exec(
        *part.command,
        CHECK_FLAG,
        env=environment_of(part, os.environ),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, said = await checking.communicate()
    finally:
        if checking.returncode is None:
            checking.kill()
            await checking.wait()
    if checking.returncode:
        words = said.decode(errors="replace").strip().splitlines() or [f"status {checking.returncode}"]
        raise ConfigError(f"the router refuses its flags: {words[-1]}", field="--router-args")


class _Stopper:
    """Turns the user's signals into the end of a cluster, from before it starts."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._cluster: Cluster | None = None
        self._times = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._stop)

    def watch(self, cluster: Cluster) -> None:
        """Stop this cluster on a signal, or at once if the signal came before."""
        self._cluster = cluster
        if self._times:
            cluster.stop()

    def _stop(self) -> None:
        self._times += 1
        if self._times == 1:
            self._console.print("Ending the cluster; again to end it at once.")
        if self._cluster is not None and self._times == 1:
            self._cluster.stop()
        elif self._cluster is not None:
            self._cluster.hurry()


async def run(config: ClusterConfig, console: Console) -> int:
    """Run a cluster until a signal stops it or a part dies for good; returns the exit status."""
    stopper = _Stopper(console)
    with LogFolder(config.log_dir) as logs, Display(console, logs.path) as display:
        async with running_cluster(config, logs.path, display) as cluster:
            stopper.watch(cluster)
            await cluster.ended()
        if cluster.failure is None:
            return 0
        logs.keep = True
        sys.stderr.write(f"{PROG}: {cluster.failure}\n")
        return 1


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 0 ended by a signal, 1 a part failed, 2 a wrong flag."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    known = ClusterConfig.parser(
        allow_abbrev=False,
        usage="%(prog)s --model-path MODEL [--colocated N] [--prefill N --decode M] [--port PORT] [options] "
        "[-- SGLANG-FLAGS]",
        epilog="example: sglang-ext cluster --model-path my/model --colocated 2 -- --kv-dram-size 4GiB",
    )
    try:
        args, unknown = known.parse_known_args(arguments[:cut])
        if unknown:
            known.error(f"unrecognized arguments: {' '.join(unknown)}. The flags of SGLang go after --")
        config = dataclasses.replace(
            ClusterConfig.from_cli_args(args), server_args=tuple(arguments[cut + 1 :])
        )
        return asyncio.run(run(config, Console()))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except UserError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 2

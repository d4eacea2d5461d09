"""Several processes of one router at one port: ``--workers N``.

The first process binds the port and forks the workers. Each is a whole router; they share members, sessions,
hints, documents and the use of limits through sockets in a folder of their own (``membership_local``), and
the kernel gives a connection to a free one. A worker that dies, or ends by an error, is forked again;
connections that it had not accepted go to another one. An error of a flag at the first start of a worker ends
them all. Each has its own ``/metrics``, at its own port on loopback, which the log names.

The first process does nothing else, has no threads and no event loop, so that it can fork at any time.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, NoReturn

from sglang_ext.addresses import Ports
from sglang_ext.errors import ConfigError, InternalError, SglangExtError, UserError
from sglang_ext.router.app.run import run
from sglang_ext.router.cluster.setup import EMBEDDED
from sglang_ext.router.config import RouterConfig
from sglang_ext.router.telemetry.logs import configure_logging

logger = logging.getLogger("router.workers")

ENDS: Final = (signal.SIGINT, signal.SIGTERM)
WATCHED: Final = {signal.SIGCHLD, signal.SIGHUP, *ENDS}
FAILED, WRONG_FLAG = 1, 2
PR_SET_PDEATHSIG: Final = 1
Mask = set[int | signal.Signals]
DEATHS, WITHIN_S = 5, 60.0
"""More deaths than this within this time are no accident, and end the router."""


def run_workers(config: RouterConfig) -> None:
    """Run the workers until SIGINT or SIGTERM; a second one cuts what still runs.

    Raises:
        ConfigError: the port cannot be had.
        InternalError: workers died again and again.
    """
    configure_logging(config.log_level, config.log_format)
    with Ports() as ports, tempfile.TemporaryDirectory(prefix="sglang-ext-router-") as folder:
        doors = ports.open(config.host, config.port, "--port")
        port = int(doors[0].getsockname()[1])
        shared = f"local://{folder}" if config.cluster == EMBEDDED else config.cluster
        _Workers(
            [
                dataclasses.replace(
                    config,
                    workers=1,
                    port=port,
                    listen_fds=tuple(each.fileno() for each in doors),
                    member_port=own,
                    cluster=shared,
                )
                for own in ports.free_after(port, config.workers)
            ],
            doors,
        ).run()


class _Workers:
    """The processes, each with its configuration.

    Args:
        configs: of each worker.
        doors: where clients come in, bound.
    """

    def __init__(self, configs: Sequence[RouterConfig], doors: Sequence[socket.socket]) -> None:
        self._configs = configs
        self._doors = doors
        self._running: dict[int, int] = {}
        """Process id -> number of the worker."""
        self._deaths: deque[float] = deque(maxlen=DEATHS)
        self._restarted: set[int] = set()
        """Workers that were started again."""
        self._ending = False
        self._failure: SglangExtError | None = None

    def run(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
        try:
            for number in range(len(self._configs)):
                self._fork(number, before)
            while self._running:
                number = signal.sigwait(WATCHED)
                if number == signal.SIGCHLD:
                    self._reap(before)
                elif number in ENDS:
                    self._end()
                else:
                    self._signal(signal.SIGHUP)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if self._failure is not None:
            raise self._failure

    def _fork(self, number: int, mask: Mask) -> None:
        config, parent = self._configs[number], os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _be_worker(config, parent, mask)
        self._running[pid] = number
        logger.info("worker %d is process %d, alone at http://127.0.0.1:%s", number, pid, config.member_port)

    def _reap(self, mask: Mask) -> None:
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            number = self._running.pop(pid, None)
            code = os.waitstatus_to_exitcode(status)
            if number is None or self._ending:
                continue
            now = time.monotonic()
            if code == WRONG_FLAG and number not in self._restarted:
                self._fail(ConfigError(f"worker {number} could not start, as it has said"))
            elif len(self._deaths) == DEATHS and now - self._deaths[0] < WITHIN_S:
                died = f"{DEATHS + 1} workers died within {WITHIN_S:g} s"
                self._fail(InternalError(f"{died}, the last with status {code}"))
            else:
                self._deaths.append(now)
                self._restarted.add(number)
                logger.error("worker %d (process %d) died with status %d; it starts again", number, pid, code)
                self._fork(number, mask)

    def _fail(self, why: SglangExtError) -> None:
        self._failure = why
        self._end()

    def _end(self) -> None:
        self._ending = True
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._running:
            os.kill(pid, number)


def _be_worker(config: RouterConfig, parent: int, mask: Mask) -> NoReturn:
    """Run in a forked process. A terminal's Ctrl-C reaches the first process only, which passes it on."""
    status = FAILED
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it died before that
            os._exit(FAILED)
        # Until it listens, there are no keys to read again.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        run(config)
        status = 0
    except UserError as error:
        sys.stderr.write(f"router: {error}\n")
        status = WRONG_FLAG
    except BaseException:
        logger.exception("a worker ends")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

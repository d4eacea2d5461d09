"""Running a router: start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import uvloop

from sglang_ext.clock import Clock, SystemClock
from sglang_ext.cluster_key import LOOK_S
from sglang_ext.errors import ConfigError, InternalError, PeerError
from sglang_ext.router.app.wiring import Parts
from sglang_ext.router.config import RouterConfig
from sglang_ext.router.fleet.fleet import USABLE
from sglang_ext.router.telemetry.logs import configure_logging
from sglang_ext.router.tenancy.key_file import read_key_file
from sglang_ext.tasks import Tasks

logger = logging.getLogger("router.run")

TOKENIZER_WAIT_S = 30.0
"""How long the start waits for the tokenizer; later, prompts are matched by text until it is there."""
KEYS_WAIT_S = 1.0
"""How long the end waits for keys that are being read again."""
TIDY_INTERVAL_S = 0.25
"""Pause between looking for expired entries of the prompt tree, when there are none to take out."""
GC_THRESHOLDS = (20_000, 20, 50)
"""Objects until the youngest are looked at, and passes until the older and the oldest are. Requests leave
hardly any cycles behind."""


class Router(Parts):
    """Its parts, running: ``async with Router(config) as router`` serves at ``router.url`` until the block
    ends.

    Args:
        config: see ``RouterConfig``.
        clock: seconds.
        on_loaded: called when a tokenizer has been loaded.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        clock: Clock | None = None,
        on_loaded: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.clock = clock or SystemClock()
        self._tasks: list[asyncio.Task[None]] = []
        self._reading_keys = asyncio.Lock()
        self._ended: asyncio.Future[None] | None = None
        super().__init__(config, self.clock, on_loaded=on_loaded, on_crash=self._crash)

    @property
    def url(self) -> str:
        """Where it listens, once started."""
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        port = self.config.port or self.server.port
        return f"{'https' if self.config.tls_cert_file else 'http'}://{host}:{port}"

    async def start(self) -> None:
        """Ask the workers who they are, load their tokenizer, and listen; with ``standby_fd`` all but the
        last, which is left to ``take_over``.

        Workers that do not answer yet are waited for while serving: requests get a 503 until one does.

        Raises:
            ConfigError: the workers serve different models, or the address cannot be bound.
        """
        config = self.config
        self._ended = asyncio.get_running_loop().create_future()
        await self.read_keys()
        try:
            await self.members.start(config.worker_urls)
            if config.member_port is not None:
                await self._listen("127.0.0.1", config.member_port, "--member-port")
            await self.watch.first_round()
            await self.adoption.loaded(TOKENIZER_WAIT_S)
            if config.standby_fd is None:
                await self.take_over()
        except BaseException:
            await self.stop()
            raise
        self.watch.start()
        for name, each in (
            ("prompt_tree", self._tidy),
            ("members", self.members.round),
            ("hints", self.advisor.round),
            ("documents", self.documents.round),
            ("spilling", self.spilling.next_round),
            ("cluster_key", self._watch_cluster_key),
            ("last_hour", self.history.round),
            *((("roles", self.roles.round),) if self.roles.is_on else ()),
        ):
            self._tasks.append(self.rounds.start(name, each))
        usable = sum(row.state in USABLE for row in self.fleet.rows.values())
        logger.info(
            "%s %s: policy %s, %d of %d workers usable, %s",
            "listening at" if config.standby_fd is None else "standing by for",
            self.url, config.policy, usable, len(self.fleet.rows), self.tokenizers.status,
        )  # fmt: skip

    async def take_over(self) -> None:
        """Listen where clients connect.

        Raises:
            ConfigError: the address cannot be bound.
        """
        await self._listen(self.config.host, self.config.port, "--port", self.config.listen_fds)
        self.roles.serve()
        self.information.serve()

    async def _listen(self, host: str, port: int, flag: str, descriptors: Sequence[int] = ()) -> None:
        try:
            sockets = [socket.socket(fileno=each) for each in descriptors]
            await self.server.start(host, port, sockets)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror or error}",
                field="--listen-fds" if descriptors else flag,
            ) from error

    async def read_keys(self) -> None:
        """Read the file of API keys, at the start and whenever it has changed.

        Raises:
            ConfigError: it cannot be used; the keys stay as they were.
        """
        if self.config.api_keys_file is not None:
            async with self._reading_keys:
                self.keys.replace(await read_key_file(self.config.api_keys_file))
            logger.info("%r from %s", self.keys, self.config.api_keys_file)

    async def stop(self) -> None:
        """Stop listening, let running requests end within the grace period, and end every task and thread."""
        # First, because what still runs needs all the rest.
        await self.server.stop()
        await self.watch.stop()
        for task in self._tasks:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self.adoption.stop()
        await self.mover.stop()
        await self.members.stop()
        await self.agents.close()
        await self.stock.close()
        await self.information.stop()
        await self.advisory.stop()
        await self.queries.stop()
        await self.fleet_api.stop()
        await self.background.stop()
        await self.relay.stop()
        await self.upstream.close()
        self.tokenizers.close()
        self.tracing.close()
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.file.close)
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def hurry(self) -> None:
        """Have ``stop`` wait for no request any more."""
        self.server.hurry()

    async def ended(self) -> None:
        """Wait until it was stopped.

        Raises:
            InternalError: a task of the router died, and with it the router must.
        """
        if self._ended is None:
            raise InternalError("the router was not started")
        await asyncio.shield(self._ended)

    async def __aenter__(self) -> Router:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def __repr__(self) -> str:
        return f"Router({self.fleet!r}, {self.trees!r}, {self.tokenizers!r})"

    # -- tasks ------------------------------------------------------------------------------------

    def _crash(self, error: BaseException) -> None:
        logger.critical("a task of the router died", exc_info=error)
        if self._ended is not None and not self._ended.done():
            failure = InternalError(f"a task of the router died: {error!r}")
            failure.__cause__ = error
            self._ended.set_exception(failure)

    async def _watch_cluster_key(self) -> float | None:
        """Have the key of the cluster read again when its file has changed. In a thread: no disk holds up the
        requests that it is used for."""
        if (key := self.cluster_key) is None:
            return None
        await asyncio.to_thread(key.look)
        return LOOK_S

    async def _tidy(self) -> float:
        self.information.look_ready()
        return 0.0 if self.trees.tidy() else TIDY_INTERVAL_S


def settle_garbage() -> None:
    """Exempt the objects of this moment from garbage collection. For a process that is a router and nothing
    else, once all is loaded.

    Python looks at every object that there is, now and then, for cycles. A tokenizer's libraries leave half a
    million objects behind that never become garbage; looking at them takes 100 ms and more, in which no
    request goes on.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


async def serve(config: RouterConfig) -> None:
    """Run a router until SIGINT or SIGTERM; a second one cuts what still runs.

    Raises:
        ConfigError: it cannot start as configured.
        InternalError: a part of it died.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with Router(config, on_loaded=settle_garbage) as router:
        reading = Tasks()

        def read_keys_again() -> None:
            reading.start(_read_keys_again(router), name="read the API keys again")

        loop.add_signal_handler(signal.SIGHUP, read_keys_again)
        stopping = asyncio.create_task(stop.wait())
        ending = asyncio.create_task(router.ended())
        try:
            if config.standby_fd is not None:
                await _stand_by(router, config.standby_fd, (stopping, ending))
            await asyncio.wait({stopping, ending}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                ending.result()
            logger.info("stopping: %d requests are being answered", len(router.flights))
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, router.hurry)
            if reading:  # a pending reading of the keys is finished, if the disk answers
                await asyncio.wait(reading, timeout=KEYS_WAIT_S)
            tasks = (stopping, ending, *reading)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _stand_by(router: Router, descriptor: int, ends: Iterable[asyncio.Future[Any]]) -> None:
    """Until a byte comes through the pipe, which makes the router take over, or one of ``ends`` is done.

    Raises:
        PeerError: the process that held the pipe's other end is gone.
    """
    loop = asyncio.get_running_loop()
    received: asyncio.Future[bytes] = loop.create_future()

    def read() -> None:
        loop.remove_reader(descriptor)
        received.set_result(os.read(descriptor, 1))

    loop.add_reader(descriptor, read)
    try:
        await asyncio.wait({received, *ends}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        loop.remove_reader(descriptor)
    if received.done():
        if not received.result():
            raise PeerError("the process that had this router stand by is gone")
        await router.take_over()
        logger.info("took over at %s", router.url)
    received.cancel()


async def _read_keys_again(router: Router) -> None:
    try:
        await router.read_keys()
    except ConfigError as error:
        logger.error("the API keys stay as they were: %s", error)


def run(config: RouterConfig) -> None:
    """Run one router in this process until SIGINT or SIGTERM, on an event loop of its own (uvloop).

    Raises:
        ConfigError, InternalError: as ``serve``.
    """
    configure_logging(config.log_level, config.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config))

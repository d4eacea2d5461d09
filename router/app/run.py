"""Putting the parts together, and running them."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import uvloop

from sglang_ext.clock import Clock, SystemClock
from sglang_ext.cluster_key import read_cluster_key
from sglang_ext.cost_model import CostModel
from sglang_ext.errors import ConfigError, DeadlineError, InternalError, PeerError
from sglang_ext.hosts import is_loopback
from sglang_ext.protocol.agent import FromAgent
from sglang_ext.router.app import garbage
from sglang_ext.router.app.service import Service
from sglang_ext.router.app.serving import Serving
from sglang_ext.router.cluster.agents import Agents
from sglang_ext.router.cluster.agents_metrics import show_agents
from sglang_ext.router.cluster.members import Members, new_router_name
from sglang_ext.router.cluster.role_change import RoleChanges
from sglang_ext.router.cluster.setup import open_membership, show_membership
from sglang_ext.router.config import RouterConfig
from sglang_ext.router.dispatch.advisory_book import HintBook
from sglang_ext.router.dispatch.costs import RouterCosts
from sglang_ext.router.dispatch.fetching import Fetching
from sglang_ext.router.dispatch.moving import Mover
from sglang_ext.router.dispatch.profiles import AUTO, cost_model_for, load_named
from sglang_ext.router.endpoints.advisory_api import AdvisoryApi
from sglang_ext.router.endpoints.cluster_api import ClusterApi
from sglang_ext.router.endpoints.pages import page_routes
from sglang_ext.router.endpoints.routes import RouteTable
from sglang_ext.router.fleet.facts import InstanceFacts
from sglang_ext.router.fleet.fleet import USABLE, Fleet
from sglang_ext.router.fleet.health import HealthWatch
from sglang_ext.router.fleet.worker import LEARN_TIMEOUT_S, WorkerApi
from sglang_ext.router.hints.advising import Advisor
from sglang_ext.router.hints.session_memory import SessionMemory
from sglang_ext.router.http.server import HttpServer, raise_file_limit
from sglang_ext.router.http.tls import server_context, worker_context
from sglang_ext.router.http.upstream import HttpUpstream
from sglang_ext.router.http.web_sites import sites_of
from sglang_ext.router.index.index import Index
from sglang_ext.router.telemetry.logs import configure_logging
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.telemetry.tracing import open_tracing
from sglang_ext.router.tenancy.key_file import read_key_file
from sglang_ext.router.tenancy.tenants import KeyRing
from sglang_ext.router.tokens.tokenizing import TokenizerService

logger = logging.getLogger("router.run")

TOKENIZER_WAIT_S = 30.0
"""How long the start waits for the tokenizer; later, prompts are matched by text until it is there."""
TIDY_INTERVAL_S = 0.25
"""Pause between looking for expired entries of the prompt tree, when there are none to take out."""


class Router:
    """A router: ``async with Router(config) as router`` serves at ``router.url`` until the block ends.

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
        self._on_loaded = on_loaded
        self.config = config
        self.clock = clock or SystemClock()
        self.metrics = RouterMetrics()
        self.trees = Index(
            self.clock,
            block_size=config.block_size,
            ttl_s=config.tree_ttl_secs,
            max_bytes=config.tree_max_bytes,
            mode=config.index,
            wait_s=config.index_wait_secs,
        )
        self.costs = RouterCosts(load_named(config.cost_profile) or CostModel(), self.clock.monotonic)
        self.fleet = Fleet(
            failure_threshold=config.health_failure_threshold,
            on_restart=self._forget,
            on_model=self._adopt,
            cached_tokens=self.trees.tokens_of,
            trusted=self.trees.trusted,
            awaited=self.trees.awaited,
            pairs=True,
            now=self.clock.monotonic,
        )
        self.tokenizers = TokenizerService(
            threads=config.tokenizer_threads,
            cache_bytes=config.tokenizer_cache_bytes,
            path=config.tokenizer_path,
            trust_remote_code=config.trust_remote_code,
            on_fallback=lambda why: self.metrics.untokenized.labels(why).inc(),
        )
        self._upstream = HttpUpstream(
            config.connect_timeout_secs, tls=lambda: worker_context(config.tls_worker_ca_file)
        )
        self._api = WorkerApi(self._upstream, config.worker_api_key)
        self.keys = KeyRing(self.clock, api_key=config.api_key, trusted=config.trusted())
        self.tracing = open_tracing(config.otel_endpoint)
        key = read_cluster_key(config.cluster_key_file) if config.cluster_key_file else None
        name = new_router_name()
        self.agents = Agents(self.trees, self.clock, router=name, key=key)
        self.mover = Mover(
            self.fleet, self.agents, self.clock, lambda how: self.metrics.moves.labels(how).inc()
        )
        self.serving = Serving(
            config,
            self.fleet,
            self.trees,
            self.costs,
            self.tokenizers,
            self._upstream,
            self._api,
            self.metrics,
            self.clock,
            self.mover,
            self.tracing,
        )
        homes = self.serving.homes
        self.watch = HealthWatch(
            self.fleet,
            self._api,
            self.clock,
            interval_s=config.health_check_interval_secs,
            timeout_s=config.health_check_timeout_secs,
            on_crash=self._crash,
        )
        store = open_membership(
            config.cluster,
            config.cluster_name,
            config.cluster_password_file,
            name,
            self.clock,
            key,
            self._crash,
        )
        show_membership(store, self.metrics)
        self.members = Members(
            self.fleet,
            self.watch,
            store,
            self.clock,
            router=name,
            links=self.agents,
            on_session=homes.learn,
        )
        self.members.on_drain = self.mover.empty
        self.agents.listener = self.members
        show_agents(self.agents, self.fleet, self.metrics)
        homes.share = self.members.remember_session
        self.advisor = Advisor(
            self.fleet,
            self.trees,
            self.tokenizers,
            self.costs,
            self.serving.chooser,
            self.agents,
            SessionMemory(config.session_memory_bytes),
            self.metrics,
            self.clock,
            HintBook(config.hint_limits()),
        )
        self._advisory = AdvisoryApi(self.advisor, self.fleet, self.clock)
        self.serving.chooser.expectations = self.advisor
        self.serving.relay.on_learnt = self.advisor.learn
        self.serving.generation.hinting = self._advisory
        self.agents.others = self._on_message
        self.fetching = Fetching(
            self.agents,
            self.costs,
            lambda why: self.metrics.fetches.labels(why).inc(),
            self._fetch_ended,
        )
        self.costs.can_fetch = self.fetching.possible
        self.serving.chooser.fetching = self.advisor.fetching = self.fetching
        cluster = ClusterApi(
            self.members,
            RoleChanges(self.members, self._api),
            key,
            self.keys,
            self.clock,
            sites_of(config.allowed_hosts, config.allowed_origins, config.host, keyed=False),
            local=is_loopback(config.host),
        )
        self.routes = RouteTable(
            [
                *self.serving.routes(),
                *cluster.routes(),
                *self._advisory.routes(),
                *page_routes(),
            ]
        )
        keyed = config.api_key is not None or config.api_keys_file is not None
        sites = sites_of(config.allowed_hosts, config.allowed_origins, config.host, keyed=keyed)
        self._service = Service(self.routes, self.keys, sites, self.metrics, self.clock, self.tracing)
        self._server = HttpServer(
            self._service,
            config.http_limits(),
            tls=server_context(config.tls_cert_file, config.tls_key_file) if config.tls_cert_file else None,
            clock=self.clock,
            on_crash=self._crash,
            grace_s=config.shutdown_grace_period_secs,
        )
        self._adopting: asyncio.Task[None] | None = None
        self._background: list[asyncio.Task[None]] = []
        self._ended: asyncio.Future[None] | None = None

    @property
    def url(self) -> str:
        """Where it listens, once started."""
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        port = self.config.port or self._server.port
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
        self.read_keys()
        try:
            await self.members.start(config.worker_urls)
            if config.member_port is not None:
                await self._listen("127.0.0.1", config.member_port, "--member-port")
            await self.watch.first_round()
            if self._adopting is not None:
                await asyncio.wait({self._adopting}, timeout=TOKENIZER_WAIT_S)
            if config.standby_fd is None:
                await self.take_over()
        except BaseException:
            await self.stop()
            raise
        self.watch.start()
        for name, work in (
            ("tidy the prompt tree", self._tidy()),
            ("manage the cluster", self.members.run()),
            ("watch the hints", self.advisor.run()),
        ):
            task = asyncio.create_task(work, name=name)
            task.add_done_callback(self._task_ended)
            self._background.append(task)
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

    async def _listen(self, host: str, port: int, flag: str, descriptors: Sequence[int] = ()) -> None:
        try:
            sockets = [socket.socket(fileno=each) for each in descriptors]
            await self._server.start(host, port, sockets)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror or error}",
                field="--listen-fds" if descriptors else flag,
            ) from error

    def read_keys(self) -> None:
        """Read the file of API keys, at the start and whenever it has changed.

        Raises:
            ConfigError: it cannot be used; the keys stay as they were.
        """
        if self.config.api_keys_file is not None:
            self.keys.replace(read_key_file(self.config.api_keys_file))
            logger.info("%r from %s", self.keys, self.config.api_keys_file)

    async def stop(self) -> None:
        """Stop listening, let what is running end for the grace period, and end every task and thread."""
        # First, because what still runs needs all the rest.
        await self._server.stop()
        await self.watch.stop()
        for task in (*self._background, self._adopting):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self.mover.stop()
        await self.members.stop()
        await self.agents.close()
        await self._advisory.stop()
        await self.serving.stop()
        await self._upstream.close()
        self.tokenizers.close()
        self.tracing.close()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def hurry(self) -> None:
        """Have ``stop`` wait for no request any more."""
        self._server.hurry()

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

    def check(self) -> None:
        """Verify every invariant of every part."""
        self.fleet.check()
        self.members.roster.check()
        self.trees.check()
        self.serving.check()
        self.advisor.check()
        self._server.check()

    # -- tasks ------------------------------------------------------------------------------------

    def _crash(self, error: BaseException) -> None:
        logger.critical("a task of the router died", exc_info=error)
        if self._ended is not None and not self._ended.done():
            failure = InternalError(f"a task of the router died: {error!r}")
            failure.__cause__ = error
            self._ended.set_exception(failure)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crash(error)

    async def _tidy(self) -> None:
        while True:
            self.serving.look_ready()
            await self.clock.sleep(0 if self.trees.tidy() else TIDY_INTERVAL_S)

    def _on_message(self, name: str, message: FromAgent) -> None:
        """What an agent says that concerns neither the index nor its life."""
        for listener in (self.fetching, self.mover.calls, self.advisor):
            listener.on_message(name, message)

    def _fetch_ended(self, how: str, tokens: int) -> None:
        self.metrics.fetches_ended.labels(how).inc()
        self.metrics.fetched_tokens.inc(tokens)

    def _forget(self, name: str) -> None:
        """An instance was started anew or is gone: neither its cache nor its speed is what it was."""
        self.trees.forget(name)
        self.costs.forget(name)
        self.fetching.forget(name)

    def _adopt(self, facts: InstanceFacts) -> None:
        """The fleet takes on a model: nothing known of the former one holds."""
        self.trees.clear()
        if self.config.cost_profile == AUTO:
            self.costs.use(cost_model_for(facts.model.name))
        if self._adopting is not None:
            self._adopting.cancel()
        self._adopting = asyncio.create_task(self._load_tokenizer(facts), name="load the tokenizer")
        self._adopting.add_done_callback(self._task_ended)

    async def _load_tokenizer(self, facts: InstanceFacts) -> None:
        await self.tokenizers.load(facts)
        self._on_loaded()
        if self.tokenizers.tokenizer is None:
            return
        while True:
            for instance in [row for row in self.fleet.rows.values() if row.state in USABLE]:
                theirs = functools.partial(self._api.tokenize, instance.name, timeout_s=LEARN_TIMEOUT_S)
                try:
                    await self.tokenizers.verify(theirs)
                except (PeerError, DeadlineError) as error:
                    logger.warning("cannot compare tokens: %s", error)
                else:
                    return
            await self.clock.sleep(1.0)


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
    async with Router(config, on_loaded=garbage.settle) as router:
        loop.add_signal_handler(signal.SIGHUP, _read_keys_again, router)
        stopping = asyncio.create_task(stop.wait())
        ending = asyncio.create_task(router.ended())
        try:
            if config.standby_fd is not None:
                await _stand_by(router, config.standby_fd, (stopping, ending))
            await asyncio.wait({stopping, ending}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                ending.result()
            logger.info("stopping: %d requests are being answered", len(router.serving.flights))
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, router.hurry)
            for task in (stopping, ending):
                task.cancel()
            await asyncio.gather(stopping, ending, return_exceptions=True)


async def _stand_by(router: Router, descriptor: int, ends: Iterable[asyncio.Future[Any]]) -> None:
    """Until a byte comes through the pipe, which makes the router take over, or one of ``ends`` is done.

    Raises:
        PeerError: nobody is left who could write to the pipe.
    """
    loop = asyncio.get_running_loop()
    told: asyncio.Future[bytes] = loop.create_future()

    def read() -> None:
        loop.remove_reader(descriptor)
        told.set_result(os.read(descriptor, 1))

    loop.add_reader(descriptor, read)
    try:
        await asyncio.wait({told, *ends}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        loop.remove_reader(descriptor)
    if told.done():
        if not told.result():
            raise PeerError("whoever had this router stand by is gone")
        await router.take_over()
        logger.info("took over at %s", router.url)
    told.cancel()


def _read_keys_again(router: Router) -> None:
    try:
        router.read_keys()
    except ConfigError as error:
        logger.error("the API keys stay as they were: %s", error)


def run(config: RouterConfig) -> None:
    """Run a router in this process until SIGINT or SIGTERM, on an event loop of its own (uvloop).

    Raises:
        ConfigError, InternalError: as ``serve``.
    """
    configure_logging(config.log_level, config.log_format)
    raise_file_limit(config.max_connections)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config))

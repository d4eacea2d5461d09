"""What serves requests to the model, put together: choosing, waiting, sending, telling, controlling."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_ext.clock import Clock
from sglang_ext.router.config import RouterConfig
from sglang_ext.router.dispatch.choosing import Chooser
from sglang_ext.router.dispatch.costs import RouterCosts
from sglang_ext.router.dispatch.explain import Stories
from sglang_ext.router.dispatch.flight import Flights, Homes
from sglang_ext.router.dispatch.moving import Mover
from sglang_ext.router.dispatch.queueing import Admission
from sglang_ext.router.dispatch.relaying import Relay
from sglang_ext.router.endpoints.background import Background
from sglang_ext.router.endpoints.control import Control
from sglang_ext.router.endpoints.generation import Generation, generation_routes
from sglang_ext.router.endpoints.information import Information
from sglang_ext.router.endpoints.routes import Route
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.fleet.worker import WorkerApi
from sglang_ext.router.http.types import Upstream
from sglang_ext.router.index.index import Index
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.telemetry.tracing import Tracing
from sglang_ext.router.tenancy.admit import Rules
from sglang_ext.router.tokens.tokenizing import TokenizerService


class Serving:
    """The parts that requests pass through, and their endpoints.

    Args:
        config: everything that can be told.
        fleet: the instances.
        trees: who holds which prefix.
        costs: what computing takes where.
        tokenizers: from prompts to keys.
        upstream: connections to workers.
        api: calls to workers beside generation.
        metrics: counts.
        clock: seconds.
        mover: moves running requests.
        tracing: spans.
    """

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        trees: Index,
        costs: RouterCosts,
        tokenizers: TokenizerService,
        upstream: Upstream,
        api: WorkerApi,
        metrics: RouterMetrics,
        clock: Clock,
        mover: Mover,
        tracing: Tracing,
    ) -> None:
        self.stories = Stories(config.explain_max_bytes)
        self.flights = Flights()
        self.homes = Homes()
        self.chooser = Chooser(config, fleet, trees, costs, metrics)
        self.admission = Admission(
            self.chooser.capacity, clock, size=config.queue_size, patience_s=config.queue_timeout_secs
        )
        self.admission.measure(metrics)
        self.relay = Relay(
            config, fleet, trees, costs, tokenizers, upstream, self.homes, metrics, clock, mover, tracing
        )
        background = Background(api, fleet, self.admission, clock, config.request_timeout_secs)
        self.generation = Generation(
            config,
            Rules(
                cache_details=config.cache_details,
                session_header=config.session_header,
                session_field=config.session_field,
                session_cookie=config.session_cookie,
            ),
            fleet,
            self.chooser,
            self.relay,
            tokenizers,
            self.admission,
            self.flights,
            self.homes,
            self.stories,
            background,
            metrics,
            clock,
        )
        self._information = Information(
            config, fleet, trees, tokenizers, self.admission, api, metrics, self.stories, clock
        )
        self._control = Control(fleet, trees, api, self.flights, self.homes)

    def routes(self) -> Iterator[Route]:
        """Their endpoints."""
        yield from generation_routes(self.generation)
        yield from self._information.routes()
        yield from self._control.routes()

    def look_ready(self) -> None:
        """Find out whether the router is ready; also while nobody asks."""
        self._information.look_ready()

    def check(self) -> None:
        """Verify the counters."""
        self.admission.check()

    async def stop(self) -> None:
        """End what goes on after the answers."""
        await self.generation.stop()

    def __repr__(self) -> str:
        return f"Serving({self.flights!r}, {self.admission!r}, {self.stories!r})"

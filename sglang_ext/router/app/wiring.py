"""The parts of a router, put together: each is made complete, of parts that were made before it."""

from __future__ import annotations

from collections.abc import Callable

from sglang_ext.clock import Clock
from sglang_ext.router.app.cluster_parts import ClusterParts
from sglang_ext.router.app.endpoint_parts import EndpointParts, ServerParts
from sglang_ext.router.app.foundation import Foundation
from sglang_ext.router.app.instance_parts import InstanceParts
from sglang_ext.router.app.request_parts import RequestParts
from sglang_ext.router.app.routing_parts import RoutingParts
from sglang_ext.router.config import RouterConfig


class Parts:
    """All parts of a router. Nothing runs yet.

    Args:
        config: the router's whole configuration; each part gets the fields that concern it.
        clock: seconds.
        on_loaded: called when a tokenizer has been loaded.
        on_crash: called when background work has failed for good: without it the router must not go on.

    Raises:
        ConfigError: a file that a flag names cannot be used.
    """

    def __init__(
        self,
        config: RouterConfig,
        clock: Clock,
        *,
        on_loaded: Callable[[], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        base = Foundation(config, clock, on_crash)
        self.cluster_key, self.metrics, self.rounds = base.cluster_key, base.metrics, base.rounds
        self.tracing, self.keys, self.budgets = base.tracing, base.keys, base.budgets

        of = InstanceParts(base, on_loaded)
        self.upstream, self.api = of.upstream, of.api
        self.trees, self.fleet, self.watch = of.trees, of.fleet, of.watch
        self.agents, self.stock, self.tokenizers = of.agents, of.stock, of.tokenizers
        self.costs, self.adoption = of.costs, of.adoption

        routing = RoutingParts(base, of)
        self.fetching, self.queries, self.sessions = routing.fetching, routing.queries, routing.sessions
        self.pausing, self.programs = routing.pausing, routing.programs
        self.advisor, self.documents, self.spilling = routing.advisor, routing.documents, routing.spilling
        self.chooser, self.admission = routing.chooser, routing.admission

        requests = RequestParts(base, of, routing)
        self.request_log, self.flights, self.replays = (
            requests.request_log,
            requests.flights,
            requests.replays,
        )
        self.homes, self.background = requests.homes, requests.background
        self.mover, self.relay = requests.mover, requests.relay
        self.recorder, self.history = requests.recorder, requests.history

        cluster = ClusterParts(base, of, routing, requests)
        self.members, self.role_changes, self.roles = cluster.members, cluster.role_changes, cluster.roles
        self._measure()

        endpoints = EndpointParts(base, of, routing, requests, cluster)
        self.advisory, self.generation = endpoints.advisory, endpoints.generation
        self.information, self.fleet_api = endpoints.information, endpoints.fleet_api
        self.routes = endpoints.routes
        served = ServerParts(base, self.routes, requests, cluster)
        self.service, self.server = served.service, served.server

    def _measure(self) -> None:
        """Have the parts show their state in `/metrics`."""
        self.metrics.show_table("sessions", self.sessions)
        self.metrics.show_table("request-log", self.request_log)
        self.metrics.show_table("homes", self.homes)
        self.metrics.show_table("hints", self.advisor.book)
        for part in (
            self.fleet, self.trees, self.tokenizers, self.agents, self.admission, self.members, self.costs,
            self.role_changes, self.roles, self.stock,
        ):  # fmt: skip
            part.measure(self.metrics)

    def check(self) -> None:
        """Verify every invariant of every part.

        Raises:
            InternalError: names the first that does not hold.
        """
        self.fleet.check()
        self.members.roster.check()
        self.trees.check()
        self.admission.check()
        self.programs.check()
        self.advisor.check()
        self.documents.book.check()
        self.spilling.conversations.check()
        self.server.check()

"""The parts that carry requests to instances and their answers back."""

from __future__ import annotations

from sglang_ext.router.app.foundation import Foundation
from sglang_ext.router.app.instance_parts import InstanceParts
from sglang_ext.router.app.routing_parts import RoutingParts
from sglang_ext.router.clients.rules import rules_of
from sglang_ext.router.cluster.shared_limits import SharedLimits
from sglang_ext.router.cluster.shared_replays import SharedReplays
from sglang_ext.router.dispatch.aborting import Aborting
from sglang_ext.router.dispatch.explain import Explainer, RequestLog
from sglang_ext.router.dispatch.flight import Flights, Homes
from sglang_ext.router.dispatch.forwarding import Forwarding
from sglang_ext.router.dispatch.moving import Mover
from sglang_ext.router.dispatch.relaying import Relay
from sglang_ext.router.dispatch.suspects import Suspects
from sglang_ext.router.dispatch.turns import Turns
from sglang_ext.router.endpoints.background import Background
from sglang_ext.router.endpoints.shared_requests import SharedRequests


class RequestParts:
    """Requests on their way, the log of recent ones, and what routers share about them.

    Args:
        routing: the choice of an instance, and the queue.
    """

    def __init__(self, base: Foundation, of: InstanceParts, routing: RoutingParts) -> None:
        config, clock, metrics = base.config, base.clock, base.metrics
        self.request_log = RequestLog(config.explain_max_bytes)
        self.flights = Flights()
        self.suspects = Suspects(base.channel, clock)
        self.replays = SharedReplays(base.channel, clock)
        SharedLimits(base.channel, base.keys, clock, base.cluster_key)
        self.homes = Homes(of.fleet.rows.keys)
        self.aborting = Aborting(self.flights, of.api)
        explainer = Explainer(self.request_log, of.trees, of.fleet.rows.keys, routing.spilling.copies_of)
        self.shared = SharedRequests(routing.queries, self.aborting, explainer, self.homes)
        self.background = Background(of.api, of.fleet, routing.admission, clock, config.request_timeout_secs)
        forwarding = Forwarding(
            of.upstream,
            timeout_s=config.request_timeout_secs,
            asks_for_key=base.asks_for_key,
            worker_api_key=config.worker_api_key,
            tracing=base.tracing,
        )
        turns = Turns(
            routing.sessions, rules_of(config.client_rules).rules, of.tokenizers, metrics, config.block_size
        )
        self.mover = Mover(of.fleet, of.agents, forwarding, clock, metrics, base.rounds)
        self.relay = Relay(
            forwarding, of.fleet, of.trees, of.costs, of.tokenizers, self.homes, metrics, clock, self.mover,
            self.suspects,
            on_background=self.background.keep,
            on_learnt=(turns.learn, routing.spilling.learn),
            explains=config.explain_routing,
        )  # fmt: skip

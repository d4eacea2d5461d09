"""The endpoints of a router, and the HTTP server that serves them."""

from __future__ import annotations

from sglang_ext.addresses import is_loopback
from sglang_ext.router.app.cluster_parts import ClusterParts
from sglang_ext.router.app.foundation import Foundation
from sglang_ext.router.app.instance_parts import InstanceParts
from sglang_ext.router.app.request_parts import RequestParts
from sglang_ext.router.app.routing_parts import RoutingParts
from sglang_ext.router.app.service import Service
from sglang_ext.router.clients.rules import rules_of
from sglang_ext.router.dispatch.diagnosing import Diagnoses
from sglang_ext.router.endpoints.advisory_api import AdvisoryApi
from sglang_ext.router.endpoints.bounds import Bounds
from sglang_ext.router.endpoints.cluster_api import ClusterApi
from sglang_ext.router.endpoints.control import Control
from sglang_ext.router.endpoints.documents_api import DocumentsApi
from sglang_ext.router.endpoints.fleet_api import FleetApi
from sglang_ext.router.endpoints.generation import Generation, generation_routes
from sglang_ext.router.endpoints.indexer_api import IndexerApi
from sglang_ext.router.endpoints.information import Information
from sglang_ext.router.endpoints.pages import page_routes
from sglang_ext.router.endpoints.repairing import Repairs
from sglang_ext.router.endpoints.routes import RouteTable
from sglang_ext.router.endpoints.sessions import Sessions
from sglang_ext.router.hints.session_answers import SessionAnswers
from sglang_ext.router.hints.shared_pins import SharedPins
from sglang_ext.router.http.server import HttpServer, limits_within, raise_file_limit
from sglang_ext.router.http.tls import server_context
from sglang_ext.router.http.web_sites import sites_of
from sglang_ext.router.tenancy.admitted import Rules
from sglang_ext.router.tenancy.open_sessions import OpenSessions


class EndpointParts:
    """The endpoints that have state of their own, and the table of all routes.

    Args:
        routing: the choice of an instance, and the queue.
        cluster: members and roles.
    """

    def __init__(
        self,
        base: Foundation,
        of: InstanceParts,
        routing: RoutingParts,
        requests: RequestParts,
        cluster: ClusterParts,
    ) -> None:
        config, clock = base.config, base.clock
        table = rules_of(config.client_rules)
        pins = SharedPins(base.channel)
        base.metrics.show_table("pins", pins)
        repairs = Repairs(table, pins, base.metrics)
        self.advisory = AdvisoryApi(
            routing.advisor, routing.encoder, of.fleet, routing.documents, repairs, clock, routing.queries
        )
        diagnoses = Diagnoses(config.session_memory_bytes // 4, config.block_size)
        base.metrics.show_table("diagnoses", diagnoses)
        answers = SessionAnswers(config.session_answer_bytes, of.tokenizers, base.metrics)
        base.metrics.show_table("session-answers", answers)
        self.generation = Generation(
            Rules(config.cache_details, table.sessions), repairs, of.fleet, routing.chooser,
            requests.relay, of.tokenizers, routing.admission, routing.programs, requests.flights,
            requests.suspects, requests.shared, routing.queries, requests.request_log,
            self.advisory, routing.pausing, routing.documents, diagnoses, answers, base.metrics, clock,
            max_retries=config.max_retries, retry_budget=config.retry_budget,
        )  # fmt: skip
        self.information = Information(
            of.fleet, of.trees, of.tokenizers, routing.admission, of.api, base.metrics, requests.shared,
            requests.history, clock,
            policy=config.policy, asks_for_key=base.asks_for_key, metrics_open=config.metrics_open,
            wait_s=config.index_wait_secs,
        )  # fmt: skip
        bounds = Bounds(of.fleet, of.tokenizers)
        control = Control(of.fleet, of.api, requests.aborting, requests.shared, bounds, repairs)
        self.fleet_api = FleetApi(of.fleet, of.trees, of.api, bounds, timeout_s=config.request_timeout_secs)
        documents = DocumentsApi(
            routing.documents, of.fleet, clock, config.document_ttl_secs, routing.queries
        )
        self.routes = RouteTable(
            [
                *generation_routes(self.generation),
                *self.information.routes(),
                *control.routes(),
                *_sessions(base, of, requests).routes(),
                *_cluster_api(base, routing, requests, cluster).routes(),
                *self.advisory.routes(),
                *documents.routes(),
                *IndexerApi(of.fleet, of.trees).routes(),
                *page_routes(),
            ]
        )
        for route in list(self.fleet_api.routes(frozenset(route.path for route in self.routes))):
            self.routes.add(route)


class ServerParts:
    """The service behind the HTTP server, and the server.

    Args:
        routes: every endpoint.
        requests: their log notes the end of each.
        cluster: the role controller counts ended requests.
    """

    def __init__(
        self, base: Foundation, routes: RouteTable, requests: RequestParts, cluster: ClusterParts
    ) -> None:
        config = base.config
        sites = sites_of(config.allowed_hosts, config.allowed_origins, config.host, keyed=base.asks_for_key)
        self.service = Service(routes, base.keys, base.budgets, sites, base.metrics, base.clock, base.tracing)
        self.service.ended.subscribe(requests.request_log.end)
        if cluster.roles.is_on:
            self.service.ended.subscribe(cluster.roles.ended)
        limits = config.http_limits()
        self.server = HttpServer(
            self.service,
            limits_within(limits, raise_file_limit(limits)),
            tls=server_context(config.tls_cert_file, config.tls_key_file) if config.tls_cert_file else None,
            clock=base.clock,
            rounds=base.rounds,
            grace_s=config.shutdown_grace_period_secs,
        )


def _sessions(base: Foundation, of: InstanceParts, requests: RequestParts) -> Sessions:
    config = base.config
    opened = OpenSessions(base.clock, most=config.client_sessions, idle_s=config.session_timeout_secs)
    base.metrics.show_table("open-sessions", opened)
    return Sessions(of.fleet, of.api, requests.shared, requests.homes, opened)


def _cluster_api(
    base: Foundation, routing: RoutingParts, requests: RequestParts, cluster: ClusterParts
) -> ClusterApi:
    config = base.config
    return ClusterApi(
        cluster.members,
        cluster.role_changes,
        cluster.roles,
        routing.queries,
        base.cluster_key,
        base.keys,
        base.clock,
        sites_of(config.allowed_hosts, config.allowed_origins, config.host, keyed=False),
        requests.replays,
        local=is_loopback(config.host),
    )

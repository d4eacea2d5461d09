"""The parts of a router, put together: each is made complete, of parts that were made before it."""

from __future__ import annotations

from collections.abc import Callable

from sglang_ext.addresses import is_loopback
from sglang_ext.clock import Clock
from sglang_ext.cluster_key import read_cluster_key
from sglang_ext.cost_model import CostModel
from sglang_ext.router.app.adoption import Adoption
from sglang_ext.router.app.service import Service
from sglang_ext.router.cluster.agents import Agents
from sglang_ext.router.cluster.joins import Joins
from sglang_ext.router.cluster.members import Members, new_router_name
from sglang_ext.router.cluster.queries import Queries
from sglang_ext.router.cluster.role_change import RoleChanges
from sglang_ext.router.cluster.role_controller import RoleController
from sglang_ext.router.cluster.setup import open_membership
from sglang_ext.router.cluster.shared_limits import SharedLimits
from sglang_ext.router.cluster.shared_replays import SharedReplays
from sglang_ext.router.cluster.stock_links import StockLinks
from sglang_ext.router.config import RouterConfig
from sglang_ext.router.dispatch.aborting import Aborting
from sglang_ext.router.dispatch.choosing import Chooser, Routing
from sglang_ext.router.dispatch.explain import Explainer, RequestLog
from sglang_ext.router.dispatch.flight import Flights, Homes, learning_sessions
from sglang_ext.router.dispatch.forwarding import Forwarding
from sglang_ext.router.dispatch.moving import Mover
from sglang_ext.router.dispatch.queueing import Admission, queue_policy_named
from sglang_ext.router.dispatch.relaying import Relay
from sglang_ext.router.dispatch.spilling import Spilling
from sglang_ext.router.dispatch.suspects import Suspects
from sglang_ext.router.endpoints.advisory_api import AdvisoryApi
from sglang_ext.router.endpoints.background import Background
from sglang_ext.router.endpoints.bounds import Bounds
from sglang_ext.router.endpoints.cluster_api import ClusterApi
from sglang_ext.router.endpoints.control import Control
from sglang_ext.router.endpoints.documents_api import DocumentsApi
from sglang_ext.router.endpoints.fleet_api import FleetApi
from sglang_ext.router.endpoints.generation import Generation, generation_routes
from sglang_ext.router.endpoints.indexer_api import IndexerApi
from sglang_ext.router.endpoints.information import Information
from sglang_ext.router.endpoints.pages import page_routes
from sglang_ext.router.endpoints.routes import RouteTable
from sglang_ext.router.endpoints.sessions import Sessions
from sglang_ext.router.endpoints.shared_requests import SharedRequests
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.fleet.health import HealthWatch
from sglang_ext.router.fleet.worker import WorkerApi
from sglang_ext.router.hints.advising import Advisor
from sglang_ext.router.hints.advisory_book import HintBook
from sglang_ext.router.hints.document_book import DocumentBook
from sglang_ext.router.hints.documents import Documents
from sglang_ext.router.hints.remote_hints import HintsElsewhere
from sglang_ext.router.hints.session_memory import SessionMemory
from sglang_ext.router.hints.shared_hints import SharedHints, SharedSessions
from sglang_ext.router.http.server import HttpServer, limits_within, raise_file_limit
from sglang_ext.router.http.tls import server_context, worker_context
from sglang_ext.router.http.upstream import HttpUpstream
from sglang_ext.router.http.web_sites import sites_of
from sglang_ext.router.index.index import Index
from sglang_ext.router.placing.costs import RouterCosts
from sglang_ext.router.placing.fetching import Fetching
from sglang_ext.router.placing.placing import PlacingOptions
from sglang_ext.router.placing.profiles import load_named
from sglang_ext.router.policies import PolicyOptions, policy_named
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.telemetry.tracing import open_tracing
from sglang_ext.router.tenancy.admitted import Rules
from sglang_ext.router.tenancy.budgets import MINUTE_S, Budgets
from sglang_ext.router.tenancy.open_sessions import OpenSessions
from sglang_ext.router.tenancy.tenants import KeyRing
from sglang_ext.router.tokens.tokenizing import TokenizerService, default_threads
from sglang_ext.tasks import Rounds


class Parts:
    """Everything that a router is made of. Nothing runs yet.

    Args:
        config: the router's whole configuration; each part gets what concerns it.
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
        name = new_router_name()
        asks_for_key = config.api_key is not None or config.api_keys_file is not None
        path = config.cluster_key_file
        self.cluster_key = read_cluster_key(path, looks=False) if path else None

        # Observability, and access.
        self.metrics = RouterMetrics()
        failures = self.metrics.counter("task_failures")
        self.rounds = Rounds(clock, on_crash, failures.labels)
        self.tracing = open_tracing(config.otel_endpoint)
        self.keys = KeyRing(clock, api_key=config.api_key, trusted=config.trusted())
        threads = config.tokenizer_threads or default_threads()
        share = config.client_tokenizing_share
        self.budgets = Budgets(
            clock,
            bytes_per_minute=config.client_bytes_per_minute,
            tokenizing_s=share * threads * MINUTE_S if share < 1.0 else 0.0,
        )

        # The instances: their caches, states and agents.
        self.upstream = HttpUpstream(
            config.connect_timeout_secs, tls=lambda: worker_context(config.tls_worker_ca_file)
        )
        self.api = WorkerApi(self.upstream, config.worker_api_key)
        self.trees = Index(
            clock,
            block_size=config.block_size,
            ttl_s=config.tree_ttl_secs,
            max_bytes=config.tree_max_bytes,
            mode=config.index,
            wait_s=config.index_wait_secs,
        )
        self.fleet = Fleet(
            failure_threshold=config.health_failure_threshold,
            view=self.trees.holdings_of,
            changed=self.trees.take_changed,
            pairs=True,
            silence_s=config.silence_secs,
            now=clock.monotonic,
        )
        self.watch = HealthWatch(
            self.fleet,
            self.api,
            clock,
            interval_s=config.health_check_interval_secs,
            timeout_s=config.health_check_timeout_secs,
            rounds=self.rounds,
        )
        self.agents = Agents(
            self.trees,
            clock,
            router=name,
            key=self.cluster_key,
            listener=self.watch,
            far_verdict_s=config.silence_secs,
            rounds=self.rounds,
        )
        self.stock = StockLinks(self.trees, self.fleet)

        # The model: its tokens, and what computing takes.
        self.tokenizers = TokenizerService(
            threads=threads,
            cache_bytes=config.tokenizer_cache_bytes,
            path=config.tokenizer_path,
            trust_remote_code=config.trust_remote_code,
        )
        self.costs = RouterCosts(
            load_named(config.cost_profile) or CostModel(),
            clock.monotonic,
            can_fetch=self.agents.can_fetch,
            can_split=self.agents.can_split,
            batching=self.fleet.batching,
        )
        self.agents.loads.subscribe(
            lambda name, load: self.costs.on_load(name, load, self.fleet.in_flight(name))
        )
        self.adoption = Adoption(
            self.fleet,
            self.trees,
            self.costs,
            self.tokenizers,
            self.api,
            clock,
            cost_profile=config.cost_profile,
            on_loaded=on_loaded,
            rounds=self.rounds,
        )

        # From a request to an instance.
        routing = Routing(
            name=config.policy,
            placing=PlacingOptions(
                policy=policy_named(config.policy),
                thresholds=PolicyOptions(
                    cache_threshold=config.cache_threshold,
                    balance_abs_threshold=config.balance_abs_threshold,
                    balance_rel_threshold=config.balance_rel_threshold,
                    balance_cache_factor=config.balance_cache_factor,
                    tie_tokens=config.block_size,
                    queue_weight=config.queue_weight,
                    exec_weight=config.exec_weight,
                ),
                split=config.split_terms(),
                block_size=config.block_size,
            ),
            most_running=config.max_running_per_instance,
        )
        self.fetching = Fetching(self.agents, self.costs, self.metrics)
        self.queries = Queries(name)
        sessions = SessionMemory(config.session_memory_bytes)
        shared_sessions = SharedSessions(sessions, self.queries)
        elsewhere = HintsElsewhere()
        self.advisor = Advisor(
            self.fleet,
            self.trees,
            self.tokenizers,
            self.costs,
            routing.placing,
            self.agents,
            sessions,
            self.metrics,
            clock,
            self.fetching,
            HintBook(config.hint_limits(), elsewhere),
            elsewhere,
            shared_sessions.ask,
        )
        self.spilling = Spilling(
            config.spill_terms(), self.fleet, self.trees, self.agents, self.metrics, clock
        )
        self.documents = Documents(
            DocumentBook(config.document_limits()),
            self.fleet,
            self.trees,
            self.tokenizers,
            self.costs,
            self.advisor,
            self.agents,
            self.fetching,
            self.metrics,
            clock,
        )
        self.chooser = Chooser(
            routing, self.fleet, self.trees, self.costs, self.metrics, self.fetching, self.advisor
        )
        self.admission = Admission(
            self.chooser.capacity,
            clock,
            size=config.queue_size,
            patience_s=config.queue_timeout_secs,
            order=queue_policy_named(config.queue_policy),
        )

        # Requests on their way.
        self.request_log = RequestLog(config.explain_max_bytes)
        self.flights = Flights()
        suspects = Suspects(name, clock)
        self.replays = replays = SharedReplays(name, clock)
        self.homes = Homes(self.fleet.rows.keys)
        aborting = Aborting(self.flights, self.api)
        shared = SharedRequests(
            self.queries,
            aborting,
            Explainer(self.request_log, self.trees, self.fleet.rows.keys, self.spilling.copies_of),
            self.homes,
        )
        self.background = Background(self.api, self.fleet, self.admission, clock, config.request_timeout_secs)
        forwarding = Forwarding(
            self.upstream,
            timeout_s=config.request_timeout_secs,
            asks_for_key=asks_for_key,
            worker_api_key=config.worker_api_key,
            tracing=self.tracing,
        )
        self.mover = Mover(self.fleet, self.agents, forwarding, clock, self.metrics, self.rounds)
        self.relay = Relay(
            forwarding,
            self.fleet,
            self.trees,
            self.costs,
            self.tokenizers,
            self.homes,
            self.metrics,
            clock,
            self.mover,
            suspects,
            on_background=self.background.keep,
            on_learnt=(learning_sessions(sessions), self.spilling.learn),
            explains=config.explain_routing,
        )

        # The cluster: its members, and the state that several routers share.
        store = open_membership(
            config.cluster,
            config.cluster_name,
            config.cluster_password_file,
            name,
            clock,
            self.cluster_key,
            self.rounds,
        )
        self.members = Members(
            self.fleet,
            self.watch,
            store,
            clock,
            router=name,
            links=self.agents,
            homes=self.homes,
            documents=self.documents,
            speakers=(
                SharedHints(self.advisor, name, clock),
                self.queries,
                SharedLimits(self.keys, name, clock, self.cluster_key),
                suspects,
                replays,
            ),
            on_drain=self.mover.empty,
        )

        joins = Joins(self.fleet.rows, self.agents, clock, router=name)
        self.fleet.happened.subscribe(lambda *_: joins.announce())
        self.agents.reached.subscribe(lambda _: joins.announce())
        self.members.ticked.subscribe(joins.announce)
        self.agents.reached.subscribe(self.documents.again)
        self.agents.reached.subscribe(self.advisor.tell_unanswered)
        self.agents.reached.subscribe(self.fetching.forget)  # its messages on a former channel may be lost

        self.role_changes = RoleChanges(self.members, self.api)
        self.roles = RoleController(
            config.role_controller,
            config.role_dwell_secs,
            self.members,
            self.role_changes,
            self.costs,
            self.trees.tokens_of,
        )

        # A restarted or departed instance has lost its cache and its measured speed.
        for forget in (
            self.trees.forget, self.costs.forget, self.fetching.forget, self.spilling.forget,
            self.documents.again,
        ):  # fmt: skip
            self.fleet.restarted.subscribe(forget)
        self.metrics.show_table("sessions", sessions)
        self.metrics.show_table("stories", self.request_log)
        self.metrics.show_table("homes", self.homes)
        self.metrics.show_table("hints", self.advisor.book)
        for part in (
            self.fleet, self.trees, self.tokenizers, self.agents, self.admission, self.members, self.costs,
            self.role_changes, self.roles, self.stock,
        ):  # fmt: skip
            part.measure(self.metrics)

        # The endpoints.
        self.advisory = AdvisoryApi(self.advisor, self.fleet, self.documents, clock, self.queries)
        self.generation = Generation(
            Rules(
                cache_details=config.cache_details,
                session_header=config.session_header,
                session_field=config.session_field,
                session_cookie=config.session_cookie,
            ),
            self.fleet,
            self.chooser,
            self.relay,
            self.tokenizers,
            self.admission,
            self.flights,
            suspects,
            shared,
            self.queries,
            self.request_log,
            self.advisory,
            self.documents,
            self.metrics,
            clock,
            max_retries=config.max_retries,
            retry_budget=config.retry_budget,
        )
        self.information = Information(
            self.fleet,
            self.trees,
            self.tokenizers,
            self.admission,
            self.api,
            self.metrics,
            shared,
            clock,
            policy=config.policy,
            asks_for_key=asks_for_key,
            metrics_open=config.metrics_open,
            wait_s=config.index_wait_secs,
        )
        bounds = Bounds(self.fleet, self.tokenizers)
        control = Control(self.fleet, self.api, aborting, shared, bounds)
        self.fleet_api = FleetApi(
            self.fleet, self.trees, self.api, bounds, timeout_s=config.request_timeout_secs
        )
        cluster = ClusterApi(
            self.members,
            self.role_changes,
            self.roles,
            self.queries,
            self.cluster_key,
            self.keys,
            clock,
            sites_of(config.allowed_hosts, config.allowed_origins, config.host, keyed=False),
            self.replays,
            local=is_loopback(config.host),
        )
        open_sessions = OpenSessions(clock, most=config.client_sessions, idle_s=config.session_timeout_secs)
        self.metrics.show_table("open-sessions", open_sessions)
        documents = DocumentsApi(self.documents, self.fleet, clock, config.document_ttl_secs, self.queries)
        self.routes = RouteTable(
            [
                *generation_routes(self.generation),
                *self.information.routes(),
                *control.routes(),
                *Sessions(self.fleet, self.api, shared, self.homes, open_sessions).routes(),
                *cluster.routes(),
                *self.advisory.routes(),
                *documents.routes(),
                *IndexerApi(self.fleet, self.trees).routes(),
                *page_routes(),
            ]
        )
        for route in list(self.fleet_api.routes(frozenset(route.path for route in self.routes))):
            self.routes.add(route)
        sites = sites_of(config.allowed_hosts, config.allowed_origins, config.host, keyed=asks_for_key)
        self.service = Service(self.routes, self.keys, self.budgets, sites, self.metrics, clock, self.tracing)
        if self.roles.is_on:
            self.service.ended.subscribe(self.roles.ended)
        limits = config.http_limits()
        self.server = HttpServer(
            self.service,
            limits_within(limits, raise_file_limit(limits)),
            tls=server_context(config.tls_cert_file, config.tls_key_file) if config.tls_cert_file else None,
            clock=clock,
            rounds=self.rounds,
            grace_s=config.shutdown_grace_period_secs,
        )

    def check(self) -> None:
        """Verify every invariant of every part.

        Raises:
            InternalError: names the first that does not hold.
        """
        self.fleet.check()
        self.members.roster.check()
        self.trees.check()
        self.admission.check()
        self.advisor.check()
        self.documents.book.check()
        self.spilling.conversations.check()
        self.server.check()

"""The base of every part of a router: its name, metrics, tasks, keys, and the channel to other routers."""

from __future__ import annotations

from collections.abc import Callable

from sglang_ext.clock import Clock
from sglang_ext.cluster_key import read_cluster_key
from sglang_ext.router.cluster.broadcast import RouterChannel
from sglang_ext.router.cluster.members import new_router_name
from sglang_ext.router.config import RouterConfig
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.telemetry.tracing import open_tracing
from sglang_ext.router.tenancy.budgets import MINUTE_S, Budgets
from sglang_ext.router.tenancy.tenants import KeyRing
from sglang_ext.router.tokens.tokenizing import default_threads
from sglang_ext.tasks import Rounds


class Foundation:
    """Observability, access, and the channel to the other routers.

    Args:
        config: the router's whole configuration.
        clock: seconds.
        on_crash: called when background work has failed for good.

    Raises:
        ConfigError: a file that a flag names cannot be used.
    """

    def __init__(self, config: RouterConfig, clock: Clock, on_crash: Callable[[BaseException], None]) -> None:
        self.config = config
        self.clock = clock
        self.asks_for_key = config.api_key is not None or config.api_keys_file is not None
        path = config.cluster_key_file
        self.cluster_key = read_cluster_key(path, looks=False) if path else None
        self.channel = RouterChannel(new_router_name())
        self.metrics = RouterMetrics()
        failures = self.metrics.counter("task_failures")
        self.rounds = Rounds(clock, on_crash, failures.labels)
        self.tracing = open_tracing(config.otel_endpoint)
        self.keys = KeyRing(clock, api_key=config.api_key, trusted=config.trusted())
        self.tokenizer_threads = config.tokenizer_threads or default_threads()
        share = config.client_tokenizing_share
        self.budgets = Budgets(
            clock,
            bytes_per_minute=config.client_bytes_per_minute,
            tokenizing_s=share * self.tokenizer_threads * MINUTE_S if share < 1.0 else 0.0,
        )

    @property
    def name(self) -> str:
        """This router's name among the routers of its cluster."""
        return self.channel.router

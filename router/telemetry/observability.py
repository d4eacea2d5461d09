"""What can be measured of the router: its Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from sglang_ext.metrics import REQUEST_BUCKETS, STAGE_BUCKETS, metric_name
from sglang_ext.router.fleet.fleet import USABLE, Fleet
from sglang_ext.router.index.prompt_trees import PromptTrees
from sglang_ext.router.telemetry.local_metrics import (
    LocalCounter,
    LocalCounters,
    LocalHistogram,
    LocalHistograms,
)
from sglang_ext.router.telemetry.record import CLIENT_GONE, Record
from sglang_ext.router.tokens.segments import TokenCache


class RouterMetrics:
    """Everything ``/metrics`` tells, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._local_counters("requests", "Requests answered", "endpoint", "status")
        self.decisions = self._local_counters("decisions", "Routing decisions", "policy", "reason")
        self.prompt_tokens = self._local_counters("prompt_tokens", "Prompt tokens of answered requests")
        self.matched_tokens = self._local_counters(
            "matched_tokens", "Prompt tokens the router believed to be cached"
        )
        self.cached_tokens = self._local_counters(
            "cached_tokens", "Prompt tokens that workers report as cached"
        )
        self.tier_tokens = self._local_counters(
            "tier_tokens", "Prompt tokens that workers report as cached, where they tell the tier", "tier"
        )
        self.completion_tokens = self._local_counters("completion_tokens", "Tokens generated")
        self.hints = self.counter("hints", "Hints at coming requests", "verdict")
        self.hints_used = self.counter(
            "hints_used", "Hints whose request came when all was moved, before that, or never", "when"
        )
        self.fetches = self.counter(
            "fetches",
            "Prompts whose KV an instance was told to fetch from another, for a request or a hint; unheard: "
            "one of both could not be told; not-worth-it: computing is expected to take less time",
            "why",
        )
        self.fetches_ended = self.counter("fetches_ended", "What became of them, as instances say", "how")
        self.fetched_tokens = self.counter("fetched_tokens", "Tokens whose KV came from another instance")
        self.moves = self.counter(
            "moves",
            "Running requests that were to go on at another instance; stuck: they cannot, and end where they "
            "are; failed: that one did not take them, and they go on where they were",
            "how",
        )
        self.hint_tokens = self.counter("hint_tokens", "Tokens brought to HBM ahead of their request")
        self.hint_computed_tokens = self.counter(
            "hint_computed_tokens", "Tokens computed ahead of their request"
        )
        self.retries = self.counter("retries", "Attempts on another worker", "why")
        self.retries_denied = self.counter(
            "retries_denied", "Attempts on another worker that were not made: the budget was spent"
        )
        self.refused = self.counter("refused", "Requests refused for want of room, or beyond a limit", "why")
        self.disconnects = self.counter("client_disconnects", "Clients that went away before the end")
        self.broken_streams = self.counter("broken_streams", "Streams whose worker went away in mid-answer")
        self.untokenized = self.counter("untokenized_prompts", "Prompts matched by text", "why")
        self.tenant_requests = self._local_counters(
            "tenant_requests", "Generation requests", "tenant", "status"
        )
        self.tenant_tokens = self._local_counters(
            "tenant_tokens", "Tokens of generation requests", "tenant", "kind"
        )
        self.stage = self._local_histograms(
            "stage_seconds", "Time added by the router before a request is sent on", STAGE_BUCKETS, "stage"
        )
        self.queue_wait = self._local_histograms(
            "queue_wait_seconds", "Time that requests waited for an instance with room", REQUEST_BUCKETS
        )
        self.first_byte = self._local_histograms(
            "first_byte_seconds", "Time from a request to the first byte of its answer", REQUEST_BUCKETS,
            "endpoint",
        )  # fmt: skip
        self.duration = self._local_histograms(
            "request_seconds", "Time from a request to the end of its answer", REQUEST_BUCKETS, "endpoint"
        )
        self._queue_wait = self.queue_wait.of()
        self._prompt_tokens, self._matched_tokens = self.prompt_tokens.of(), self.matched_tokens.of()
        self._cached_tokens, self._completion_tokens = self.cached_tokens.of(), self.completion_tokens.of()
        self._ends: dict[tuple[str, int], tuple[LocalCounter, LocalHistogram, LocalHistogram]] = {}
        """(endpoint, status) -> what each request that ends so is counted in."""
        self._in_flight = self.gauge("in_flight", "Requests in flight", "instance")
        self._queued = self.gauge("queued_tokens", "Prompt tokens waiting for their prefill", "instance")
        self._up = self.gauge("instance_up", "1 when the instance is given requests", "instance")
        self.event_lag = self.gauge(
            "event_lag_seconds", "Age of the last placement event when it was applied", "instance"
        )
        self.index_trusted = self.gauge("index_trusted", "1 when the index of it is believed", "instance")
        self._tree = {
            name: self.gauge(f"tree_{name}", text)
            for name, text in {
                "blocks": "Blocks in the prompt tree",
                "nodes": "Nodes of the prompt tree",
                "bytes": "Estimated memory of the prompt tree",
                "evicted_blocks": "Blocks forgotten for want of memory, since the start",
            }.items()
        }
        self._token_cache = {
            name: self.gauge(f"token_cache_{name}", text)
            for name, text in {
                "bytes": "Memory of tokens kept for prompts seen before",
                "hits": "Segments found tokenized, since the model was loaded",
                "misses": "Segments tokenized, since the model was loaded",
            }.items()
        }
        self.on_refresh: list[Callable[[], None]] = []
        """Called before the metrics are shown, to bring gauges up to date."""

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """A new counter in this registry."""
        return Counter(metric_name("router", name), text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """A new gauge in this registry."""
        return Gauge(metric_name("router", name), text, labels, registry=self.registry)

    def _local_counters(self, name: str, text: str, *labels: str) -> LocalCounters:
        """A new counter that every request writes."""
        return LocalCounters(metric_name("router", name), text, labels, self.registry)

    def _local_histograms(
        self, name: str, text: str, bounds: Sequence[float], *labels: str
    ) -> LocalHistograms:
        """A new histogram that every request writes."""
        return LocalHistograms(metric_name("router", name), text, labels, bounds, self.registry)

    def decided(self, policy: str, reason: str) -> None:
        """Count a routing decision."""
        self.decisions.of(policy, reason).add()

    def refresh(self, fleet: Fleet, trees: PromptTrees, cache: TokenCache) -> None:
        """Bring the gauges up to date; called when somebody looks."""
        for gauge in (self._in_flight, self._queued, self._up):
            gauge.clear()
        for row in fleet.rows.values():
            self._in_flight.labels(row.name).set(row.in_flight)
            self._queued.labels(row.name).set(row.queued_tokens)
            self._up.labels(row.name).set(row.state in USABLE)
        for name, value in (
            ("blocks", trees.blocks),
            ("nodes", trees.nodes),
            ("bytes", trees.size_bytes),
            ("evicted_blocks", trees.evicted_blocks),
        ):
            self._tree[name].set(value)
        self._token_cache["bytes"].set(cache.size_bytes)
        self._token_cache["hits"].set(cache.hits)
        self._token_cache["misses"].set(cache.misses)
        for refresh in self.on_refresh:
            refresh()

    def count(self, record: Record, endpoint: str, now: float) -> None:
        """Take in a request that has ended."""
        ends = self._ends.get((endpoint, record.status))
        if ends is None:
            ends = self._ends[endpoint, record.status] = (
                self.requests.of(endpoint, str(record.status)),
                self.duration.of(endpoint),
                self.first_byte.of(endpoint),
            )
        requests, duration, first_byte = ends
        requests.value += 1.0
        duration.add(now - record.started)
        if record.first_byte is not None:
            first_byte.add(record.first_byte - record.started)
        for stage, seconds in record.stages.items():
            self.stage.of(stage).add(seconds)
        if record.status == CLIENT_GONE:
            self.disconnects.inc()
        if record.caller.tenant is not None and record.stages:
            self.tenant_requests.of(record.caller.tenant, str(record.status)).add()
        if record.status == 200 and record.stages:
            self._count_tokens(record)

    def _count_tokens(self, record: Record) -> None:
        prompt, cached = record.prompt_tokens or 0, record.cached_tokens or 0
        completion = record.completion_tokens or 0
        self._queue_wait.add(record.queued_s)
        self._prompt_tokens.value += prompt
        self._matched_tokens.value += record.matched_tokens or 0
        self._cached_tokens.value += cached
        self._completion_tokens.value += completion
        for tier, tokens in record.tiers.items():
            self.tier_tokens.of(tier).add(tokens)
        tenant = record.caller.tenant
        if tenant is not None:
            self.tenant_tokens.of(tenant, "prompt").add(prompt)
            self.tenant_tokens.of(tenant, "cached").add(cached)
            self.tenant_tokens.of(tenant, "completion").add(completion)

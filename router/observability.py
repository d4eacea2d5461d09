"""What can be seen of the router: metrics, and one log line per request."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from router.fleet import USABLE, Fleet
from router.prompt_trees import PromptTrees
from router.segments import TokenCache
from sglang_ext.metrics import REQUEST_BUCKETS, STAGE_BUCKETS, metric_name

access_logger = logging.getLogger("router.access")

CLIENT_GONE = 499
"""Status under which a request is counted whose client went away (nginx's number)."""


@dataclass(slots=True)
class Record:
    """What happened to one request. Times are seconds of the clock."""

    request_id: str
    method: str
    path: str
    started: float
    status: int = 0
    stream: bool = False
    instance: str | None = None
    reason: str | None = None
    prompt_tokens: int | None = None
    matched_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    attempts: int = 0
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds the router itself spent, by stage."""
    first_byte: float | None = None
    error: str | None = None


class RouterMetrics:
    """Everything ``/metrics`` tells, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(metric_name("router", name), text, labels, registry=self.registry)

        self.requests = counter("requests", "Requests answered", "endpoint", "status")
        self.decisions = counter("decisions", "Routing decisions", "policy", "reason")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of answered requests")
        self.matched_tokens = counter("matched_tokens", "Prompt tokens the router believed to be cached")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens that workers report as cached")
        self.retries = counter("retries", "Attempts on another worker", "why")
        self.disconnects = counter("client_disconnects", "Clients that went away before the end")
        self.broken_streams = counter("broken_streams", "Streams whose worker went away in mid-answer")
        self.untokenized = counter("untokenized_prompts", "Prompts matched by text", "why")
        self.stage = Histogram(
            metric_name("router", "stage_seconds"),
            "Time added by the router before a request is sent on",
            ["stage"],
            buckets=STAGE_BUCKETS,
            registry=self.registry,
        )
        self.first_byte = Histogram(
            metric_name("router", "first_byte_seconds"),
            "Time from a request to the first byte of its answer",
            ["endpoint"],
            buckets=REQUEST_BUCKETS,
            registry=self.registry,
        )
        self.duration = Histogram(
            metric_name("router", "request_seconds"),
            "Time from a request to the end of its answer",
            ["endpoint"],
            buckets=REQUEST_BUCKETS,
            registry=self.registry,
        )
        self._in_flight = self._gauge("in_flight", "Requests in flight", "instance")
        self._queued = self._gauge("queued_tokens", "Prompt tokens waiting for their prefill", "instance")
        self._up = self._gauge("instance_up", "1 when the instance is given requests", "instance")
        self._tree = {
            name: self._gauge(f"tree_{name}", text)
            for name, text in {
                "blocks": "Blocks in the prompt tree",
                "nodes": "Nodes of the prompt tree",
                "bytes": "Estimated memory of the prompt tree",
                "evicted_blocks": "Blocks forgotten for want of memory, since the start",
            }.items()
        }
        self._token_cache = {
            name: self._gauge(f"token_cache_{name}", text)
            for name, text in {
                "bytes": "Memory of tokens kept for prompts seen before",
                "hits": "Segments found tokenized, since the model was loaded",
                "misses": "Segments tokenized, since the model was loaded",
            }.items()
        }

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(metric_name("router", name), text, labels, registry=self.registry)

    def refresh(self, fleet: Fleet, trees: PromptTrees, cache: TokenCache) -> None:
        """Bring the gauges up to date; called when somebody looks."""
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

    def count(self, record: Record, endpoint: str, now: float) -> None:
        """Take in a request that has ended."""
        self.requests.labels(endpoint, str(record.status)).inc()
        self.duration.labels(endpoint).observe(now - record.started)
        if record.first_byte is not None:
            self.first_byte.labels(endpoint).observe(record.first_byte - record.started)
        for stage, seconds in record.stages.items():
            self.stage.labels(stage).observe(seconds)
        if record.status == CLIENT_GONE:
            self.disconnects.inc()
        if record.status == 200:
            self.prompt_tokens.inc(record.prompt_tokens or 0)
            self.matched_tokens.inc(record.matched_tokens or 0)
            self.cached_tokens.inc(record.cached_tokens or 0)


def log_access(record: Record, now: float) -> None:
    """Write the one line of a request."""
    fields: dict[str, Any] = {
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "ms": round((now - record.started) * 1e3, 1),
        "first_byte_ms": _ms(record.first_byte, record.started),
        "added_ms": round(sum(record.stages.values()) * 1e3, 2) if record.stages else None,
        "stream": record.stream or None,
        "instance": record.instance,
        "reason": record.reason,
        "prompt": record.prompt_tokens,
        "matched": record.matched_tokens,
        "cached": record.cached_tokens,
        "generated": record.completion_tokens,
        "attempts": record.attempts if record.attempts > 1 else None,
        "error": record.error,
        "id": record.request_id,
    }
    present = {name: value for name, value in fields.items() if value is not None}
    access_logger.info("request", extra={"fields": present})


def _ms(moment: float | None, since: float) -> float | None:
    return None if moment is None else round((moment - since) * 1e3, 1)


class TextFormatter(logging.Formatter):
    """``time level logger message name=value ...``, always one line."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        parts = [
            self.formatTime(record, "%Y-%m-%d %H:%M:%S"),
            record.levelname.lower(),
            record.name,
            record.getMessage().replace("\n", "\\n"),
            *(f"{name}={_value(value)}" for name, value in fields.items()),
        ]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _value(value: Any) -> str:
    text = str(value)
    return json.dumps(text) if not text or any(c in text for c in ' "=\n\r\t') else text


def configure_logging(level: str, log_format: str) -> None:
    """Send what the router logs to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger("router")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(level.upper())

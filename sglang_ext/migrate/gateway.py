"""Flags of SGLang's router (sglang-router, SGLang Model Gateway)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sglang_ext.migrate.rules import MANY, NoEqualError, Rule, Words, choice, each, no_equal, nothing, to

WORKERS: Final = "--worker-urls"
_ROLES = "workers say themselves whether they prefill or decode"
_POLICY = "--policy serves both: prefill is chosen by prefix, decode by load"
_DISCOVERY = (
    "servers find the router: start them with --kv-router http://ROUTER:PORT, or dns+http://SERVICE:PORT "
    "for all routers of a headless Service (docs/deploy.md)"
)
_HISTORY = "responses are kept by the workers that gave them, not in a database"
_KEYS = "give tenants and administrators their keys in a file: --api-keys-file FILE (docs/keys.md)"
_SERVERS = "give this to the servers, which apply it"
_BREAKER = (
    "a worker that fails is left out until it answers again; --max-retries budget bounds what is tried anew"
)
_MANUAL = "the manual policy does not exist; --policy session keeps a session at one worker"
POLICIES: Final = {
    "cache_aware": "prompt-tree",
    "round_robin": "round-robin",
    "random": "random",
    "power_of_two": "least-load",
}


def _first(given: Words) -> Words:
    return [WORKERS, *given[:1]]


def _most(given: Words) -> Words:
    return [] if given == ["-1"] else ["--max-concurrent-requests", *given]


def _collector(given: Words) -> Words:
    host, _, port = given[0].rpartition(":")
    return ["--otel-endpoint", f"http://{host}:{'4318' if port == '4317' else port}"]


def _one_file(given: Words) -> Words:
    if len(given) > 1:
        raise NoEqualError(
            "--tls-worker-ca-file is one file: put the certificates into it one after the other"
        )
    return ["--tls-worker-ca-file", *given]


GATEWAY: Final[Mapping[str, Rule]] = {
    "host": to("--host", "loopback by default; beyond it the router asks for keys (docs/keys.md)"),
    "port": to("--port"),
    "worker-urls": to(WORKERS, values=MANY),
    "policy": choice("--policy", POLICIES, _MANUAL),
    **each(("prefill-policy", "decode-policy"), no_equal(_POLICY)),
    "cache-threshold": to("--cache-threshold"),
    "balance-abs-threshold": to("--balance-abs-threshold"),
    "balance-rel-threshold": to("--balance-rel-threshold"),
    "max-payload-size": to("--max-payload-bytes"),
    "max-tree-size": nothing("the tree is bounded in bytes: `--memory-limits tree`"),
    "eviction-interval-secs": nothing("`--time-limits prefix-ttl` ends what is old"),
    **each(("bucket-adjust-interval-secs", "max-idle-secs", "assignment-mode"), nothing(_MANUAL)),
    **each(("redis-url", "redis-key-prefix"), no_equal(
        _HISTORY + "; routers share a cluster with --cluster redis://HOST and --cluster-name")),
    "dp-aware": no_equal("start one server per replica", values=0),
    "enable-igw": no_equal("a router serves one model: start one router per model", values=0),
    "mini-lb": nothing("there is one router", values=0),
    "pd-disaggregation": nothing(_ROLES, values=0),
    "prefill": Rule(_first, f"`{WORKERS}`", _ROLES + ", and their bootstrap ports", MANY),
    "decode": Rule(_first, f"`{WORKERS}`", _ROLES, MANY),
    **each(
        ("worker-startup-timeout-secs", "worker-startup-check-interval"),
        nothing("the router serves at once, and workers when they are ready"),
    ),
    "log-dir": no_equal("the log goes to stderr: redirect it"),
    "log-level": choice(
        "--log-level",
        {"debug": "debug", "info": "info", "warn": "warning", "error": "error"},
        "there are debug, info, warning and error",
    ),
    "service-discovery": no_equal(_DISCOVERY, values=0),
    **each(("selector", "prefill-selector", "decode-selector"), no_equal(_DISCOVERY, values=MANY)),
    **each(("service-discovery-port", "service-discovery-namespace"), no_equal(_DISCOVERY)),
    **each(("prometheus-port", "prometheus-host"), no_equal("metrics are at /metrics of the router's port")),
    "prometheus-duration-buckets": no_equal("histograms have fixed buckets", values=MANY),
    "request-id-headers": no_equal("x-request-id is read, and answered", values=MANY),
    "request-timeout-secs": to("--request-timeout-secs"),
    "shutdown-grace-period-secs": to("--shutdown-grace-period-secs"),
    "cors-allowed-origins": to("--allowed-origins", values=MANY),
    "max-concurrent-requests": Rule(_most, "`--max-concurrent-requests`", "-1, their default, needs no flag"),
    "queue-size": to("--queue-size"),
    "queue-timeout-secs": to("--queue-timeout-secs"),
    "rate-limit-tokens-per-second": no_equal("limits belong to keys. " + _KEYS),
    "retry-max-retries": to("--max-retries"),
    **each(
        (
            *("retry-initial-backoff-ms", "retry-max-backoff-ms", "retry-backoff-multiplier"),
            "retry-jitter-factor",
        ),
        nothing("another worker is tried at once, within `--max-retries budget`"),
    ),
    "disable-retries": Rule(lambda _: ["--max-retries", "0"], "`--max-retries 0`", values=0),
    "health-failure-threshold": to("--health-failure-threshold"),
    "health-success-threshold": nothing("one answer is enough"),
    "health-check-timeout-secs": to("--health-check-timeout-secs"),
    "health-check-interval-secs": to("--health-check-interval-secs"),
    "health-check-endpoint": no_equal("workers are asked at /health"),
    "disable-health-check": no_equal("a worker that stops must be noticed", values=0),
    **each(
        (
            *("cb-failure-threshold", "cb-success-threshold", "cb-timeout-duration-secs"),
            "cb-window-duration-secs",
        ),
        nothing(_BREAKER),
    ),
    "disable-circuit-breaker": nothing(_BREAKER, values=0),
    "model-path": nothing("the router takes the tokenizer that its workers name"),
    "tokenizer-path": to("--tokenizer-path"),
    "chat-template": no_equal(_SERVERS + ": --chat-template"),
    "tokenizer-cache-enable-l0": nothing("`--memory-limits tokenizer-cache`", values=0),
    "tokenizer-cache-enable-l1": nothing("`--memory-limits tokenizer-cache`", values=0),
    "tokenizer-cache-l0-max-entries": nothing("`--memory-limits tokenizer-cache`"),
    "tokenizer-cache-l1-max-memory": to(
        "--memory-limits", "its setting tokenizer-cache", convert=lambda size: f"tokenizer-cache={size}"
    ),
    "reasoning-parser": no_equal(_SERVERS + ": --reasoning-parser"),
    "tool-call-parser": no_equal(_SERVERS + ": --tool-call-parser"),
    "mcp-config-path": no_equal("the router runs no tools"),
    "backend": choice("", {"sglang": ""}, "workers are SGLang servers"),
    "history-backend": choice("", {"memory": "", "none": ""}, _HISTORY),
    **each(
        (
            *("oracle-wallet-path", "oracle-tns-alias", "oracle-connect-descriptor", "oracle-username"),
            *("oracle-password", "oracle-pool-min", "oracle-pool-max", "oracle-pool-timeout-secs"),
            *("postgres-db-url", "postgres-pool-max", "redis-pool-max", "redis-retention-days"),
        ),
        no_equal(_HISTORY),
    ),
    **each(("client-cert-path", "client-key-path"), no_equal(
        "the router shows workers no certificate: let them ask for a key (--worker-api-key-file)")),
    "ca-cert-paths": Rule(_one_file, "`--tls-worker-ca-file`", "one file", MANY),
    "tls-cert-path": to("--tls-cert-file"),
    "tls-key-path": to("--tls-key-file"),
    "enable-trace": nothing("`--otel-endpoint` starts it", values=0),
    "otlp-traces-endpoint": Rule(_collector, "`--otel-endpoint`", "by HTTP: port 4318 instead of 4317"),
    "api-key": to("--worker-api-key", "the key that workers ask for"),
    "control-plane-api-keys": no_equal(_KEYS, values=MANY),
    "control-plane-audit-enabled": no_equal("the router logs what administrators do", values=0),
    **each(("jwt-issuer", "jwt-audience", "jwt-jwks-uri"), no_equal(_KEYS)),
    "jwt-role-mapping": no_equal(_KEYS, values=MANY),
}  # fmt: skip
"""By flags without their dashes; `sglang_router.launch_server` puts `router-` before them."""

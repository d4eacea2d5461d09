"""The router's configuration: one frozen dataclass, and the flags that fill it."""

from __future__ import annotations

import argparse
import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from sglang_ext.cluster_key import read_secret
from sglang_ext.errors import ConfigError
from sglang_ext.hosts import is_loopback
from sglang_ext.router.cluster.setup import EMBEDDED, add_cluster_args, check_cluster
from sglang_ext.router.dispatch.advisory_book import HintLimits
from sglang_ext.router.http.state import HttpLimits
from sglang_ext.router.index.index import MODES as INDEX_MODES
from sglang_ext.router.policies import POLICIES, policy_named
from sglang_ext.router.tenancy.request_fields import may_be_trusted

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Everything the router can be told. Field names are the flags' names with underscores."""

    worker_urls: tuple[str, ...] = ()
    """Instances that are there from the start; others register themselves."""
    host: str = "127.0.0.1"
    port: int = 30000
    """0 lets the system choose; ``RunningRouter.url`` tells."""
    listen_fds: tuple[int, ...] = ()
    """Sockets that were inherited, bound to ``host`` and ``port``: connections wait there while no router
    accepts them, when one is replaced by another."""
    member_port: int | None = None
    """A further port, on loopback: instances register there although ``port`` is another router's."""
    standby_fd: int | None = None
    """Get ready, and accept nothing on ``port`` until a byte can be read from this descriptor."""
    policy: str = "auto"
    """A name in ``policies.POLICIES``, or ``package.module:function``."""
    cost_profile: str = "auto"
    """What computing takes: a file of ``sglang-ext calibrate``; ``auto`` for the one that is kept for the
    model, if there is exactly one; ``none`` for defaults."""
    session_header: str = "x-session-id"
    session_field: str = "session_id"
    session_cookie: str = ""
    """Where a request names its session: the first of these that does. An empty name is not looked for."""
    api_key: str | None = field(default=None, repr=False)
    api_keys_file: str | None = None
    """Keys of tenants, with their limits; see ``tenants``. Read again on SIGHUP."""
    trusted_fields: str = ""
    """Comma-separated fields of requests that clients without a tenant may set although they can harm other
    clients, or are newer than this router; see ``request_fields``."""
    worker_api_key: str | None = field(default=None, repr=False)
    allowed_hosts: tuple[str, ...] = ()
    """Names under which a router without a key may be addressed, besides this machine's own and IP addresses;
    see ``web_sites``. ``*`` for any. With a key, any will do unless some are named."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may send requests and read the answers, besides the router's own."""
    cluster: str = field(default=EMBEDDED, repr=False)
    """Where membership is kept; may hold a password."""
    cluster_name: str = "default"
    cluster_password_file: str | None = None
    cluster_key_file: str | None = None

    cache_threshold: float = 0.3
    """A common beginning of prompts counts when it is at least this share of the prompt; see
    ``policies.prompt_tree``."""
    balance_abs_threshold: int = 8
    """Requests in flight that an instance may have beyond the least loaded one before its cached
    prefixes stop attracting more; both this and ``balance_rel_threshold`` must be exceeded."""
    balance_rel_threshold: float = 1.5
    balance_cache_factor: float = 4.0
    """A common beginning of prompts stops attracting new ones to an instance that caches more than the
    emptiest one by more than this factor times that beginning."""

    index: str = "auto"
    """What is known of instances' caches: see ``index``."""
    block_size: int = 16
    """Tokens per block of the prompt tree; shorter common prefixes are not seen."""
    tree_ttl_secs: float = 600.0
    """Seconds after which an instance is no longer believed to have a prefix it was not asked for."""
    tree_max_bytes: int = 256 * MIB
    index_wait_secs: float = 15.0
    """How long a starting router is not ready, at most, for want of what instances hold; and how long an
    instance that is to tell is expected to."""

    health_check_interval_secs: float = 0.5
    health_check_timeout_secs: float = 0.75
    health_failure_threshold: int = 3
    """Probes missed in a row that make the verdict; a refused connection is a verdict at once. The
    verdict falls within max(interval, timeout) + threshold * timeout: 3 s by default."""
    connect_timeout_secs: float = 2.0
    request_timeout_secs: float = 1800.0
    max_retries: int = 3
    """Other instances tried for one request when a connection fails before the client was sent anything."""
    retry_budget: float = 0.8
    """Retries that are allowed per request, on average over 10 s. 0.8 lets the requests of one of two
    instances go on elsewhere when it dies, and asks a fleet in which everything fails less than twice."""
    max_running_per_instance: int = 0
    """Requests that an instance is given at a time; further ones wait here. 0 for no limit."""
    queue_size: int = 1024
    """Requests that may wait; beyond, the least important is refused with a 503."""
    queue_timeout_secs: float = 30.0
    max_payload_bytes: int = 512 * MIB
    max_total_payload_bytes: int = 2048 * MIB
    """Bodies of all requests that are being read, wait or are being answered; one more gets a 503."""
    max_header_bytes: int = 64 << 10
    max_connections: int = 16_384
    max_concurrent_requests: int = 4096
    """Further requests get a 429 at once."""
    header_timeout_secs: float = 10.0
    """For the head of a request to arrive; its body has 30 s, and more for each byte that has come."""
    keep_alive_secs: float = 75.0
    """Idle connections of clients are closed after this time."""
    shutdown_grace_period_secs: float = 1.0
    """What is being answered when the router is told to stop may go on for this time; then it is cut."""
    tls_cert_file: str | None = None
    """With ``tls_key_file``: clients are answered over TLS only."""
    tls_key_file: str | None = field(default=None, repr=False)
    tls_worker_ca_file: str | None = None
    """Who vouches for workers with https URLs; without it, whom the system trusts."""

    tokenizer_path: str | None = None
    """Read the tokenizer from here instead of the path that the workers report."""
    tokenizer_threads: int = 2
    tokenizer_cache_bytes: int = 64 * MIB
    trust_remote_code: bool = False

    log_level: str = "info"
    log_format: str = "text"
    explain_routing: bool = True
    """Send ``x-kv-route-reason`` with every answer."""
    metrics_open: bool = False
    """``/metrics`` needs no key, though it names tenants and instances."""
    cache_details: bool = True
    """Ask workers which tier cached tokens came from (``return_cached_tokens_details``), where the answer is
    in one piece: what they found is then known even without their ``--enable-cache-report``."""
    explain_max_bytes: int = 32 * MIB
    """Memory for recent requests that ``/explain`` can tell of."""
    hint_ttl_secs: float = 120.0
    """How long a request is expected that a hint announces, unless the hint says."""
    hints_per_second: float = 50.0
    hints_live: int = 1000
    hint_tokens: int = 1 << 20
    """Of each tenant: hints a second, hints at once, and tokens being moved for them at once."""
    session_memory_bytes: int = 64 * MIB
    """Memory for what each session sent last, so that a hint need only name the session."""
    otel_endpoint: str | None = None
    """OTLP/HTTP address for traces; nothing is traced without it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "worker_urls", tuple(normalize_url(url) for url in self.worker_urls))
        if len(set(self.worker_urls)) != len(self.worker_urls):
            raise ConfigError(f"a worker is named twice: {' '.join(self.worker_urls)}", field="--worker-urls")
        object.__setattr__(self, "allowed_origins", tuple(normalize_origin(o) for o in self.allowed_origins))
        for name in self.allowed_hosts:
            self._check_host_name(name)
        policy_named(self.policy)
        check_cluster(self.cluster, self.cluster_name, self.cluster_password_file, is_loopback)
        if not is_loopback(self.host) and not self.api_key and not self.api_keys_file:
            raise ConfigError(
                f"{self.host} can be reached from other machines, and no key is set",
                field="--api-key",
                hint="Give --api-key-file or --api-keys-file, or bind with --host 127.0.0.1",
            )
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"{self.port} is not a port", field="--port")
        if self.member_port is not None and not 0 <= self.member_port <= 65535:
            raise ConfigError(f"{self.member_port} is not a port", field="--member-port")
        if not 0.0 <= self.cache_threshold <= 1.0:
            raise ConfigError(
                f"{self.cache_threshold} is not a share between 0 and 1", field="--cache-threshold"
            )
        for name in (
            "block_size", "tree_ttl_secs", "tree_max_bytes", "health_check_interval_secs",
            "health_check_timeout_secs", "health_failure_threshold", "connect_timeout_secs",
            "request_timeout_secs", "max_payload_bytes", "max_header_bytes", "max_connections",
            "max_concurrent_requests", "header_timeout_secs", "keep_alive_secs",
            "tokenizer_threads", "tokenizer_cache_bytes", "queue_timeout_secs", "hint_ttl_secs",
            "hints_per_second", "hints_live", "hint_tokens",
        ):  # fmt: skip
            self._require(name, getattr(self, name) > 0, "must be greater than 0")
        for name in (
            "balance_abs_threshold", "balance_cache_factor", "max_retries", "retry_budget",
            "max_running_per_instance", "queue_size", "explain_max_bytes", "session_memory_bytes",
            "shutdown_grace_period_secs", "index_wait_secs",
        ):  # fmt: skip
            self._require(name, getattr(self, name) >= 0, "must not be negative")
        self._require(
            "max_total_payload_bytes",
            self.max_total_payload_bytes >= self.max_payload_bytes,
            f"is less than one body may have (--max-payload-bytes {self.max_payload_bytes})",
        )
        self._require("balance_rel_threshold", self.balance_rel_threshold >= 1.0, "must be at least 1")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ConfigError(
                "a certificate and its key are given together",
                field="--tls-cert-file" if self.tls_cert_file is None else "--tls-key-file",
            )
        self._require("index", self.index in INDEX_MODES, f"is not one of {', '.join(INDEX_MODES)}")
        self._require("log_level", self.log_level in LOG_LEVELS, f"is not one of {', '.join(LOG_LEVELS)}")
        for name in self.trusted():
            if not may_be_trusted(name):
                raise ConfigError(
                    f"{name} needs no trust, or is no client's to set",
                    field="--trusted-fields",
                    hint="Leave it out",
                )
        self._require("log_format", self.log_format in LOG_FORMATS, f"is not one of {', '.join(LOG_FORMATS)}")

    def _check_host_name(self, name: str) -> None:
        if not name or any(character in name for character in "/:@ "):
            raise ConfigError(
                f"{name!r} is not the name of a host",
                field="--allowed-hosts",
                hint="Give names without scheme and port, such as llm.example.com, or * for any",
            )

    def _require(self, name: str, condition: bool, why: str) -> None:
        if not condition:
            raise ConfigError(f"{getattr(self, name)} {why}", field="--" + name.replace("_", "-"))

    def trusted(self) -> frozenset[str]:
        """The names in ``trusted_fields``."""
        return frozenset(name.strip() for name in self.trusted_fields.split(",") if name.strip())

    def http_limits(self) -> HttpLimits:
        """What clients may ask of the HTTP server."""
        return HttpLimits(
            max_body_bytes=self.max_payload_bytes,
            max_total_body_bytes=self.max_total_payload_bytes,
            max_head_bytes=self.max_header_bytes,
            max_connections=self.max_connections,
            max_concurrent_requests=self.max_concurrent_requests,
            head_timeout_s=self.header_timeout_secs,
            idle_timeout_s=self.keep_alive_secs,
        )

    def hint_limits(self) -> HintLimits:
        """What a tenant may cause with hints."""
        return HintLimits(
            per_second=self.hints_per_second,
            burst=max(1, round(4 * self.hints_per_second)),
            live=self.hints_live,
            moving_tokens=self.hint_tokens,
            ttl_s=self.hint_ttl_secs,
        )

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add one flag per field to ``parser``."""
        defaults = {f.name: f.default for f in dataclasses.fields(cls)}

        def flag(name: str, kind: type, text: str, **more: Any) -> None:
            default = defaults[name]
            shown = f" (default: {default})" if default is not None else ""
            parser.add_argument(
                "--" + name.replace("_", "-"), type=kind, default=default, help=text + shown, **more
            )

        parser.add_argument(
            "--worker-urls",
            nargs="*",
            default=(),
            metavar="URL",
            help="SGLang servers to route to; those with --kv-router register themselves",
        )
        add_cluster_args(parser)
        flag("host", str, "address to listen on; beyond loopback only with --api-key")
        flag("port", int, "port to listen on; 0 lets the system choose")
        parser.add_argument(
            "--listen-fds",
            type=parse_descriptors,
            default=(),
            metavar="FD,...",
            help="inherited sockets to accept connections from, bound to --host and --port by whoever starts "
            "the router and keeps them open when it dies",
        )
        flag("member_port", int, "another port, on loopback, for instances to register at", metavar="PORT")
        flag(
            "standby_fd",
            int,
            "stand by: accept nothing at --port until a byte can be read from this inherited pipe",
            metavar="FD",
        )
        flag(
            "policy",
            str,
            f"how an instance is chosen: {', '.join(POLICIES)}, or one's own as package.module:function",
            metavar="NAME",
        )
        flag(
            "cost_profile",
            str,
            "what computing takes: a file written by sglang-ext calibrate, auto, or none",
            metavar="FILE",
        )
        flag("session_header", str, "header in which a client names its session", metavar="NAME")
        flag("session_field", str, "field of the body that names the session", metavar="NAME")
        flag("session_cookie", str, "cookie that names the session", metavar="NAME")
        flag(
            "api_key",
            str,
            "key that clients must send as 'Authorization: Bearer KEY'; others on this machine see it: "
            f"better --api-key-file, or the variable {KEY_VARIABLES['api_key']}",
            metavar="KEY",
        )
        parser.add_argument("--api-key-file", metavar="FILE", help="file (mode 0600) with that key")
        flag(
            "api_keys_file",
            str,
            "JSON or TOML file with the keys of tenants and their limits (mode 0600)",
            metavar="FILE",
        )
        for name, metavar, text in (
            (
                "--allowed-hosts",
                "NAME",
                "names, besides this machine's own, that the Host header may have where no key is asked for, "
                "for example behind a proxy that passes it on; * for any",
            ),
            (
                "--allowed-origins",
                "ORIGIN",
                "origins of web pages, such as https://chat.example.com, that may use this router and read "
                "its answers (CORS); * for any",
            ),
        ):
            parser.add_argument(name, nargs="*", default=(), metavar=metavar, help=text)
        flag(
            "trusted_fields",
            str,
            "fields of requests, comma-separated, that clients without a tenant may set although a server "
            "takes them on trust (mm_hashes, mm_content_hashes, content_hash, kv_hints), or that are newer "
            "than this router",
            metavar="NAMES",
        )
        flag(
            "worker_api_key",
            str,
            "key that the workers ask for (their --api-key); better --worker-api-key-file, or the variable "
            + KEY_VARIABLES["worker_api_key"],
            metavar="KEY",
        )
        parser.add_argument("--worker-api-key-file", metavar="FILE", help="file (mode 0600) with that key")
        flag("cache_threshold", float, "share of a prompt that a common beginning must be to decide")
        flag("balance_abs_threshold", int, "requests an instance may be ahead of the least loaded one")
        flag("balance_rel_threshold", float, "factor an instance may be ahead of the least loaded one")
        flag(
            "balance_cache_factor",
            float,
            "factor of a common beginning its holder may cache more than others",
        )
        flag(
            "index",
            str,
            "who holds what: exact (what agents tell), approximate (what passes by), or auto (exact for "
            "instances that register, approximate for others)",
            choices=list(INDEX_MODES),
        )
        flag("block_size", int, "tokens per block of the prompt tree")
        flag("tree_ttl_secs", float, "seconds an unused prefix is believed to stay cached")
        flag("tree_max_bytes", int, "memory for the prompt tree")
        flag(
            "index_wait_secs",
            float,
            "seconds that /ready waits at most for instances to tell what they hold; 0 for none",
        )
        flag("health_check_interval_secs", float, "seconds between two probes of a worker")
        flag("health_check_timeout_secs", float, "seconds a worker has to answer a probe")
        flag("health_failure_threshold", int, "probes missed in a row after which a worker is down")
        flag("connect_timeout_secs", float, "seconds to connect to a worker")
        flag("request_timeout_secs", float, "seconds a request may take in all")
        flag("max_retries", int, "other workers tried when a connection fails before anything was sent")
        flag("retry_budget", float, "retries allowed per request, on average over 10 s")
        flag("max_running_per_instance", int, "requests given to a worker at a time; 0 for no limit")
        flag("queue_size", int, "requests that may wait for a worker with room")
        flag("queue_timeout_secs", float, "seconds that a request may wait for a worker with room")
        flag("max_payload_bytes", int, "largest request body")
        flag("max_total_payload_bytes", int, "memory for the bodies of all requests at a time; beyond, a 503")
        flag("max_header_bytes", int, "largest head of a request")
        flag("max_connections", int, "most connections of clients; one more gets a 503")
        flag("max_concurrent_requests", int, "most requests at a time; one more gets a 429")
        flag("header_timeout_secs", float, "seconds for the head of a request to arrive")
        flag("keep_alive_secs", float, "seconds after which a client's idle connection is closed")
        flag(
            "shutdown_grace_period_secs",
            float,
            "seconds for which running answers may go on when the router is told to stop",
        )
        flag("tls_cert_file", str, "certificate (PEM) for answering clients over TLS", metavar="FILE")
        flag("tls_key_file", str, "private key (PEM) of the certificate", metavar="FILE")
        flag("tls_worker_ca_file", str, "certificates (PEM) that vouch for https workers", metavar="FILE")
        flag(
            "tokenizer_path",
            str,
            "tokenizer to use instead of the one that the workers report",
            metavar="DIR",
        )
        flag("tokenizer_threads", int, "threads that render and tokenize prompts")
        flag("tokenizer_cache_bytes", int, "memory for tokens of prompt parts seen before")
        parser.add_argument(
            "--trust-remote-code", action="store_true", help="let the tokenizer run code of its own"
        )
        flag("log_level", str, "what to log", choices=list(LOG_LEVELS))
        flag("log_format", str, "how to log", choices=list(LOG_FORMATS))
        flag("hint_ttl_secs", float, "seconds a request is expected that a hint announces")
        flag("hints_per_second", float, "hints (/v1/advisory) that a tenant may send per second")
        flag("hints_live", int, "hints of a tenant that may wait for their request at a time")
        flag("hint_tokens", int, "tokens that may be moved at a time for the hints of a tenant")
        flag("session_memory_bytes", int, "memory for what each session sent last, for hints that name it")
        flag("explain_max_bytes", int, "memory for recent requests that /explain can tell of")
        flag("otel_endpoint", str, "OTLP/HTTP address to send traces to (extra 'otel')", metavar="URL")
        parser.add_argument(
            "--metrics-open",
            action="store_true",
            help="answer /metrics without an administrator's key, though it names tenants and instances",
        )
        parser.add_argument(
            "--no-cache-details",
            dest="cache_details",
            action="store_false",
            help="do not ask workers which tier cached tokens came from",
        )
        parser.add_argument(
            "--hide-routing",
            dest="explain_routing",
            action="store_false",
            help="do not send x-kv-route-reason to clients",
        )

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> RouterConfig:
        """The configuration that parsed flags stand for; other attributes of ``args`` are ignored.

        Raises:
            ConfigError: a value cannot work; the message names the flag.
        """
        values = {f.name: getattr(args, f.name) for f in dataclasses.fields(cls) if hasattr(args, f.name)}
        for name in ("worker_urls", "allowed_hosts", "allowed_origins"):
            if name in values:
                values[name] = tuple(values[name])
        for name, variable in KEY_VARIABLES.items():
            values[name] = _key(values.get(name), getattr(args, f"{name}_file", None), name, variable)
        return cls(**values)


KEY_VARIABLES = {"api_key": "SGLANG_EXT_ROUTER_API_KEY", "worker_api_key": "SGLANG_EXT_WORKER_API_KEY"}
"""The variables of the keys, which unlike flags are not in a list of processes."""


def _key(given: str | None, path: str | None, name: str, variable: str) -> str | None:
    """A key by its flag, its file, or its variable.

    Raises:
        ConfigError: it is given twice, or the file cannot be used.
    """
    flag = "--" + name.replace("_", "-")
    if path is None:
        return given or os.environ.get(variable) or None
    if given:
        raise ConfigError("is given twice", field=flag, hint=f"Give {flag}-file alone")
    return read_secret(path, field=f"{flag}-file").decode("utf-8", "replace")


LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


def parse_descriptors(text: str) -> tuple[int, ...]:
    """File descriptors with commas between them.

    Raises:
        ValueError: one of them is no number.
    """
    return tuple(int(word) for word in text.split(","))


def normalize_url(url: str) -> str:
    """``http://host:port`` without a trailing slash.

    Raises:
        ConfigError: it is not an http URL of a server.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        valid = bool(parts.hostname) and parts.scheme in ("http", "https")
        _ = parts.port
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment or parts.username:
        raise ConfigError(f"{url!r} is not of the form http://host:port", field="--worker-urls")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def normalize_origin(origin: str) -> str:
    """``scheme://host[:port]`` as browsers send it; ``*`` and ``null`` stay.

    Raises:
        ConfigError: it is not an origin.
    """
    if origin in ("*", "null"):
        return origin
    parts = urlsplit(origin)
    if not parts.scheme or not parts.netloc or parts.path not in ("", "/") or parts.query or parts.username:
        raise ConfigError(
            f"{origin!r} is not the origin of a web page",
            field="--allowed-origins",
            hint="Give scheme, host and port as in https://chat.example.com, or * for any",
        )
    return f"{parts.scheme}://{parts.netloc}".lower()

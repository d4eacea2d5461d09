"""The router's configuration: one frozen dataclass, whose fields are its flags."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from sglang_ext.addresses import is_loopback
from sglang_ext.errors import ConfigError
from sglang_ext.flags import COUNT, NUMBER, PORT, SECONDS, SIZE, Flagged, Parser, flag, list_flag, one_of
from sglang_ext.flags.removed import ROUTER
from sglang_ext.router.clients.rules import AUTO, rules_of
from sglang_ext.router.cluster.role_controller import MODES
from sglang_ext.router.cluster.setup import EMBEDDED, check_cluster
from sglang_ext.router.dispatch.queueing import QUEUE_POLICIES, queue_policy_named
from sglang_ext.router.hints.advisory_book import HintLimits
from sglang_ext.router.hints.document_book import DocumentLimits
from sglang_ext.router.http.state import HttpLimits
from sglang_ext.router.index.index import MODES as INDEX_MODES
from sglang_ext.router.policies import POLICIES, policy_named
from sglang_ext.router.policies.spilling import SpillTerms
from sglang_ext.router.policies.splitting import SplitTerms
from sglang_ext.router.tenancy.request_fields import may_be_trusted

MIB = 1 << 20


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


def host_name(name: str) -> str:
    """The name of a host as the ``Host`` header has it, without scheme and port; ``*`` for any.

    Raises:
        ConfigError: it is not one.
    """
    if not name or any(character in name for character in "/:@ "):
        raise ConfigError(
            f"{name!r} is not the name of a host",
            field="--allowed-hosts",
            hint="Give names without scheme and port, such as llm.example.com, or * for any",
        )
    return name


def _descriptors(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not file descriptors with commas between them") from None


@dataclass(frozen=True, kw_only=True)
class RouterConfig(Flagged):
    """All settings of the router.

    Raises:
        ConfigError: from the constructor, when a value cannot work; names the flag.
    """

    prog = "sglang-ext router"
    description = "One address in front of several SGLang servers."

    lists = (
        list_flag(
            "--tenant-limits",
            "Limits of each tenant. Clients without a tenant share one set of limits, but bytes-per-minute "
            "and tokenizing-share then hold for each address.",
            common=True,
        ),
        list_flag(
            "--memory-limits", "Memory that the router and its documents may use, by purpose.", common=True
        ),
        list_flag("--time-limits", "How long the router waits, and how long it keeps state, by purpose."),
    )
    removed = ROUTER

    worker_urls: tuple[str, ...] = flag(
        (),
        "The SGLang servers to route to. Those with --kv-router register themselves.",
        Parser(normalize_url, "URL"),
        several="*",
        group="Instances and cluster",
        common=True,
    )
    cluster: str = flag(
        EMBEDDED,
        "Where membership is kept: embedded (in this router); local:///FOLDER, which routers of this machine "
        "share (mode 0700); or redis://[:PASSWORD@]HOST:PORT[/DB], rediss:// (TLS) or unix:///SOCKET for a "
        "Redis 7 that several routers share.",
        metavar="URL",
        secret=True,
        common=True,
    )
    cluster_name: str = flag("default", "Routers of one name in one Redis are one cluster.", metavar="NAME")
    cluster_password_file: str | None = flag(
        None,
        "The password of that Redis, mode 0600. In a URL, others on this machine can see it.",
        metavar="FILE",
    )
    cluster_key_file: str | None = flag(
        None,
        "The key of the cluster, mode 0600, the same at every instance (--kv-cluster-key-file). Without it, "
        "instances can register on this machine only.",
        metavar="FILE",
        common=True,
    )

    host: str = flag(
        "127.0.0.1",
        "The address to listen on; beyond loopback only with --api-key.",
        metavar="HOST",
        group="Listening",
        common=True,
    )
    port: int = flag(30000, "The port to listen on. 0 lets the system choose.", PORT, common=True)
    workers: int = flag(
        1,
        "Processes that answer at --port, a core each. They share members, sessions, hints and limits; "
        "/metrics and /explain of each are at a port of its own, which the log names.",
        COUNT.where(lambda workers: 1 <= workers <= 64, "is not 1 to 64"),
        common=True,
    )
    check: bool = flag(False, "Check the flags, and end: with status 2 where one is wrong.")
    listen_fds: tuple[int, ...] = flag(
        (),
        "Inherited sockets to accept connections from, bound to --host and --port by the process that starts "
        "the router and keeps them open when it dies: connections wait there while one router is replaced by "
        "another.",
        Parser(_descriptors, "FD,..."),
        internal=True,
    )
    member_port: int | None = flag(
        None,
        "Another port, on loopback, for instances to register at although --port is another router's.",
        PORT,
        internal=True,
    )
    standby_fd: int | None = flag(
        None,
        "Stand by: accept nothing at --port until a byte can be read from this inherited pipe.",
        metavar="FD",
        internal=True,
    )
    tls_cert_file: str | None = flag(
        None, "The certificate (PEM) for answering clients, over TLS only.", metavar="FILE", common=True
    )
    tls_key_file: str | None = flag(
        None, "The private key (PEM) of the certificate.", metavar="FILE", secret=True, common=True
    )
    tls_worker_ca_file: str | None = flag(
        None,
        "Certificates (PEM) that vouch for https workers. Not given: those that the system trusts.",
        metavar="FILE",
    )

    api_key: str | None = flag(
        None,
        "The key that clients must send as 'Authorization: Bearer KEY'. Others on this machine see it: "
        "better --api-key-file, or the variable SGLANG_EXT_ROUTER_API_KEY.",
        metavar="KEY",
        variable="SGLANG_EXT_ROUTER_API_KEY",
        secret=True,
        file=True,
        group="Keys and trust",
        common=True,
    )
    api_keys_file: str | None = flag(
        None,
        "A JSON or TOML file with the keys of tenants and their limits (mode 0600). Read again on SIGHUP.",
        metavar="FILE",
        common=True,
    )
    worker_api_key: str | None = flag(
        None,
        "The key that the workers ask for (their --api-key). Better --worker-api-key-file, or the variable "
        "SGLANG_EXT_WORKER_API_KEY.",
        metavar="KEY",
        variable="SGLANG_EXT_WORKER_API_KEY",
        secret=True,
        file=True,
        common=True,
    )
    allowed_hosts: tuple[str, ...] = flag(
        (),
        "Names, besides this machine's own and IP addresses, that the Host header may have where no key is "
        "asked for, for example behind a proxy that passes it on. * for any. With a key, any will do unless "
        "some are named.",
        Parser(host_name, "NAME"),
        several="*",
    )
    allowed_origins: tuple[str, ...] = flag(
        (),
        "Origins of web pages, such as https://chat.example.com, that may use this router and read its "
        "answers (CORS). * for any.",
        Parser(normalize_origin, "ORIGIN"),
        several="*",
    )
    trusted_fields: str = flag(
        "",
        "Fields of requests, comma-separated, that clients without a tenant may set although a server takes "
        "them on trust (mm_hashes, mm_content_hashes, content_hash, kv_hints), or that are newer than this "
        "router.",
        metavar="NAMES",
    )

    policy: str = flag(
        "auto",
        f"How an instance is chosen: {', '.join(POLICIES)}, or one's own as package.module:function.",
        metavar="NAME",
        group="Choosing an instance",
        common=True,
    )
    cost_profile: str = flag(
        "auto",
        "Times of computing: a file written by sglang-ext calibrate, auto (the profile that is kept for "
        "the model; without one, an estimate for the device that instances report), "
        "estimated=DEVICE:FILE (cpu, h100 or h200, and the model's config.json), or none (defaults).",
        metavar="FILE",
        common=True,
    )
    queue_weight: float = flag(
        1.0,
        "With --policy cost: the weight of a second of waiting for an instance's other prompts (MemServe, "
        "equation 1, has 1).",
        NUMBER.not_negative(),
        variable_only=True,
        variable="SGLANG_EXT_ROUTER_QUEUE_WEIGHT",
    )
    exec_weight: float = flag(
        1.5,
        "With --policy cost: the weight of a second of computing the prompt. The paper's equation has 1, the "
        "request's own time; more than 1 also counts the wait of the next requests.",
        NUMBER.positive(),
        variable_only=True,
        variable="SGLANG_EXT_ROUTER_EXEC_WEIGHT",
    )
    sequence_parallel: str = flag(
        "off",
        "Have two colocated instances compute one long prompt at the same time: off, auto (where that is "
        "expected to be faster by far), or the number of tokens to compute from which every prompt is split.",
        metavar="off|auto|TOKENS",
    )
    client_rules: str = flag(
        AUTO,
        "Where clients name their sessions, and repairs of parts of prompts that defeat caches: auto (the "
        "table that ships), off (its sessions alone), or a TOML file that is put before the table.",
        metavar="auto|off|FILE",
        common=True,
    )
    cache_threshold: float = flag(
        0.3,
        "The share of a prompt that a common beginning must be to decide.",
        NUMBER.where(lambda share: 0.0 <= share <= 1.0, "is not a share between 0 and 1"),
        common=True,
    )
    balance_abs_threshold: int = flag(
        8,
        "Requests in flight that an instance may have beyond the least loaded one before its cached prefixes "
        "stop attracting more. Both this and --balance-rel-threshold must be exceeded.",
        common=True,
    )
    balance_rel_threshold: float = flag(
        1.5,
        "The factor that an instance may be ahead of the least loaded one.",
        NUMBER.where(lambda factor: factor >= 1.0, "must be at least 1"),
    )
    balance_cache_factor: float = flag(
        4.0,
        "A common beginning stops attracting new prompts to an instance that caches more than the emptiest "
        "one by more than this factor times that beginning.",
        NUMBER.not_negative(),
        variable_only=True,
        variable="SGLANG_EXT_ROUTER_BALANCE_CACHE_FACTOR",
    )

    index: str = flag(
        "auto",
        "The index: exact (reports of agents), approximate (inferred from requests), or auto (exact for "
        "instances that register, approximate for others).",
        one_of(*INDEX_MODES),
        group="Index",
        common=True,
    )
    block_size: int = flag(
        16,
        "Tokens per block of the prompt tree. Shorter common prefixes are not seen.",
        COUNT.positive(),
        "TOKENS",
        common=True,
    )

    role_controller: str = flag(
        "off",
        "Whether instances are moved between prefill and decode as the load changes: off, dry-run (only say "
        "what would be done: sglang-ext cluster-status, /metrics, the log), or on. Of several routers, one "
        "does it.",
        one_of(*MODES),
        group="Roles",
        common=True,
    )
    role_dwell_secs: float = flag(
        60.0,
        "The least time between two such changes, and how far ahead is looked: loads are means over half of "
        "it, and a change must be due for a sixth of it.",
        SECONDS.positive(),
        within="--role-controller",
        key="dwell",
    )

    spill_above: float = flag(
        0.9,
        "The share of its DRAM from which an instance is full: it is about to evict, and the coldest of its "
        "prefixes that may be asked for again are kept by others, which take them up to five sixths of this.",
        NUMBER.where(lambda share: 0.0 < share <= 1.0, "is not a share between 0 and 1"),
        group="Idle memory",
    )

    health_check_interval_secs: float = flag(
        0.5, "The time between two probes of a worker.", SECONDS.positive(), group="Health and retries"
    )
    health_check_timeout_secs: float = flag(
        0.75, "The time that a worker has to answer a probe.", SECONDS.positive()
    )
    health_failure_threshold: int = flag(
        3,
        "Probes missed in a row after which a worker is down; a refused connection is a verdict at once.",
        COUNT.positive(),
    )
    request_timeout_secs: float = flag(
        1800.0, "The time a request may take in all.", SECONDS.positive(), common=True
    )
    max_retries: int = flag(
        3, "Other workers tried for a request when a connection fails before the client was sent anything."
    )
    # 0.8 lets the requests of one of two instances go on elsewhere when it dies, and asks a fleet in which
    # everything fails less than twice.
    retry_budget: float = flag(
        0.8,
        "Retries allowed per request, on average over 10 s.",
        NUMBER.not_negative(),
        within="--max-retries",
        key="budget",
    )

    max_running_per_instance: int = flag(
        0,
        "Requests given to a worker at a time; further ones wait here. 0 for no limit.",
        group="Limits",
        common=True,
    )
    queue_size: int = flag(
        1024,
        "Requests that may wait for a worker with room. Beyond, the least important is refused with a 503.",
        common=True,
    )
    queue_policy: str = flag(
        "priority",
        f"Order of waiting requests: {', '.join(QUEUE_POLICIES)}, or one's own as "
        "package.module:function. A full line refuses its last.",
        metavar="NAME",
    )
    queue_timeout_secs: float = flag(
        30.0, "How long a request may wait for a worker with room.", SECONDS.positive(), common=True
    )
    max_payload_bytes: int = flag(
        128 * MIB,
        "The largest request body. While the router parses one, it does nothing else.",
        SIZE.positive(),
        common=True,
    )
    max_concurrent_requests: int = flag(
        4096, "The most requests at a time. One more gets a 429.", COUNT.positive(), common=True
    )
    max_connections: int = flag(
        16_384,
        "The most connections of clients; fewer where ulimit -n allows fewer. One more gets a 503.",
        COUNT.positive(),
        within="--max-concurrent-requests",
        key="connections",
    )
    program_share: float = flag(
        0.0,
        "The KV of sessions that are admitted at first, in times what HBM holds; then as many are as are "
        "served in time. Turns of others wait. 0: sessions are not admitted as a whole.",
        NUMBER.where(lambda share: 0.0 <= share <= 4.0, "is not between 0 and 4"),
        within="--max-concurrent-requests",
        key="program-share",
    )
    shutdown_grace_period_secs: float = flag(
        1.0,
        "How long running answers may go on when the router stops; then they are cut.",
        SECONDS.not_negative(),
    )

    hints_per_second: float = flag(
        50.0,
        "Hints (/v1/advisory) that a tenant may send per second.",
        NUMBER.positive(),
        within="--tenant-limits",
    )
    hints_live: int = flag(
        1000,
        "Hints of a tenant that may wait for their request at a time.",
        COUNT.positive(),
        within="--tenant-limits",
    )
    hint_tokens: int = flag(
        1 << 20,
        "Tokens that may be moved at a time for the hints of a tenant.",
        COUNT.positive(),
        "TOKENS",
        within="--tenant-limits",
    )
    learnt_hints: float = flag(
        0.0,
        "The share of a tenant's limits for hints that the router's own hints may use, which it makes from "
        "the pauses of sessions; 0: it makes none.",
        NUMBER.where(lambda share: 0.0 <= share <= 1.0, "is not a share between 0 and 1"),
        within="--tenant-limits",
        key="learnt-hints",
    )
    hint_bytes: int = flag(
        64 * MIB,
        "Memory for the prompts that the hints of a tenant announce, 4 bytes for each token.",
        SIZE,
        within="--tenant-limits",
    )
    document_blocks_per_tenant: int = flag(
        4096,
        "Blocks of KV that documents of a tenant may have held back.",
        COUNT,
        "BLOCKS",
        within="--tenant-limits",
        key="document-blocks",
    )
    document_bytes_per_tenant: int = flag(
        64 * MIB,
        "Memory for the documents of a tenant: their contents and tokens.",
        SIZE,
        within="--tenant-limits",
        key="document-bytes",
    )
    spill_blocks_per_tenant: int = flag(
        4096,
        "Blocks of KV of one tenant that instances that lend DRAM (--kv-dram-size SIZE,for-others=SIZE) may "
        "keep for instances whose own DRAM is full. 0 for no spilling.",
        COUNT,
        "BLOCKS",
        within="--tenant-limits",
        key="spill-blocks",
    )
    client_bytes_per_minute: int = flag(
        4096 * MIB,
        "The bodies that one tenant, or without tenants one address, may send in a minute, as many at once "
        "after a pause. More get a 429. 0 for no limit.",
        SIZE,
        within="--tenant-limits",
        key="bytes-per-minute",
    )
    client_tokenizing_share: float = flag(
        0.75,
        "The share of the tokenizer threads' time that texts of one tenant, or without tenants of one "
        "address, may take, on average over a minute. More get a 429. 1 for no limit.",
        NUMBER.where(lambda share: 0.0 < share <= 1.0, "is not a share above 0, up to 1"),
        within="--tenant-limits",
        key="tokenizing-share",
    )
    client_sessions: int = flag(
        256,
        "Sessions (/open_session) that one tenant, or without tenants one address, may have open. One more "
        "gets a 429.",
        COUNT,
        within="--tenant-limits",
        key="sessions",
    )

    tree_max_bytes: int = flag(
        256 * MIB, "Memory for the prompt tree.", SIZE.positive(), within="--memory-limits", key="tree"
    )
    tokenizer_cache_bytes: int = flag(
        64 * MIB,
        "Memory for tokens of prompt parts seen before.",
        SIZE.positive(),
        within="--memory-limits",
        key="tokenizer-cache",
    )
    session_memory_bytes: int = flag(
        64 * MIB,
        "Memory for what each session sent last, so that a hint need only name the session; and a quarter of "
        "it for requests that later ones are compared with.",
        SIZE,
        within="--memory-limits",
        key="sessions",
    )
    session_answer_bytes: int = flag(
        0,
        "Memory for the tokens of each session's last answers, which servers are asked for. They go into the "
        "next turn's prompt in the place of the same text tokenized again. 0: servers are not asked.",
        SIZE,
        within="--memory-limits",
        key="session-answers",
    )
    document_bytes: int = flag(
        256 * MIB,
        "Memory for documents: their contents and tokens, over all tenants.",
        SIZE,
        within="--memory-limits",
        key="documents",
    )
    document_blocks: int = flag(
        8192,
        "Blocks of KV that documents (/v1/documents) may have held back, over all tenants and instances.",
        COUNT,
        "BLOCKS",
        within="--memory-limits",
        key="document-blocks",
    )
    explain_max_bytes: int = flag(
        32 * MIB,
        "Memory for recent requests, for /explain.",
        SIZE,
        within="--memory-limits",
        key="explain",
    )
    max_total_payload_bytes: int = flag(
        2048 * MIB,
        "Memory for the bodies of all requests that are read, wait or are answered. One more gets a 503.",
        SIZE,
        within="--memory-limits",
        key="bodies",
    )
    max_header_bytes: int = flag(
        64 << 10,
        "The largest head of a request.",
        SIZE.positive(),
        within="--memory-limits",
        key="request-head",
    )
    connect_timeout_secs: float = flag(
        2.0, "The time to connect to a worker.", SECONDS.positive(), within="--time-limits", key="connect"
    )
    silence_secs: float = flag(
        8.0,
        "How long a worker on another machine may answer no probe, and its agent be silent, before it is "
        "down, unless it refuses a connection. 8 outlasts a network that fails over in 3 s. On this machine, "
        "3 s of the agent and the probes missed are enough.",
        SECONDS.positive(),
        within="--time-limits",
        key="silence",
    )
    index_wait_secs: float = flag(
        15.0,
        "Longest wait of /ready for the snapshots of instances. 0 for none.",
        SECONDS.not_negative(),
        within="--time-limits",
        key="index-wait",
    )
    header_timeout_secs: float = flag(
        10.0,
        "The time for the head of a request to arrive. Its body has 30 s, and more for each byte that came.",
        SECONDS.positive(),
        within="--time-limits",
        key="request-head",
    )
    keep_alive_secs: float = flag(
        75.0,
        "The time after which a client's idle connection is closed.",
        SECONDS.positive(),
        within="--time-limits",
        key="keep-alive",
    )
    session_timeout_secs: float = flag(
        86_400.0,
        "The longest time-out of a session, and that of one opened without: a server closes a session in "
        "which nothing was sent for so long.",
        SECONDS.positive(),
        within="--time-limits",
        key="session",
    )
    tree_ttl_secs: float = flag(
        600.0,
        "How long an unused prefix is believed to stay cached.",
        SECONDS.positive(),
        within="--time-limits",
        key="prefix-ttl",
    )
    hint_ttl_secs: float = flag(
        120.0,
        "How long an announced request is expected, unless its hint says.",
        SECONDS.positive(),
        within="--time-limits",
        key="hint-ttl",
    )
    document_ttl_secs: float = flag(
        3600.0,
        "How long a document is kept, unless its registration has a time.",
        SECONDS.positive(),
        within="--time-limits",
        key="document-ttl",
    )

    tokenizer_path: str | None = flag(
        None,
        "The tokenizer to use instead of the one that the workers report.",
        metavar="DIR",
        group="Tokenizer",
        common=True,
    )
    tokenizer_threads: int = flag(
        0, "Threads that render and tokenize prompts. 0: one per core, from 2 to 8.", COUNT
    )
    trust_remote_code: bool = flag(False, "Let the tokenizer run code of its own.")

    log_level: str = flag(
        "info", "What to log.", one_of("debug", "info", "warning", "error"), group="Telemetry", common=True
    )
    log_format: str = flag("text", "How to log.", one_of("text", "json"), within="--log-level", key="format")
    record: str | None = flag(
        None,
        "Record requests to this file, for sglang-ext simulate and estimate: times, lengths, choices and "
        "hashes of blocks, no text.",
        metavar="FILE",
    )
    shadow: bool = flag(
        False,
        "Stand in front of a fleet of any servers, pass everything on as it is, and record it (--record).",
    )
    record_size: int = flag(
        256 * MIB,
        "The size at which the file becomes FILE.1 and a new one begins.",
        SIZE.positive(),
        within="--record",
        key="size",
    )
    record_files: int = flag(
        4, "The files that are kept, the newest included.", COUNT.positive(), within="--record", key="files"
    )
    otel_endpoint: str | None = flag(
        None,
        "The OTLP/HTTP address to send traces to (extra 'otel'). Nothing is traced without it.",
        metavar="URL",
        common=True,
    )
    metrics_open: bool = flag(
        False, "Answer /metrics without an administrator's key, though it names tenants and instances."
    )
    # Cached tokens are then known even for workers without --enable-cache-report.
    cache_details: bool = flag(
        True,
        "Whether workers are asked which tier cached tokens came from.",
        variable_only=True,
        variable="SGLANG_EXT_ROUTER_CACHE_DETAILS",
    )
    explain_routing: bool = flag(True, "Do not send x-kv-route-reason to clients.", name="--hide-routing")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.worker_urls)) != len(self.worker_urls):
            raise ConfigError(f"a worker is named twice: {' '.join(self.worker_urls)}", field="--worker-urls")
        policy_named(self.policy)
        self.split_terms()
        queue_policy_named(self.queue_policy)
        if self.workers > 1:
            for field, given in (
                ("--listen-fds", self.listen_fds),
                ("--member-port", self.member_port is not None),
                ("--standby-fd", self.standby_fd is not None),
            ):
                if given:
                    raise ConfigError(
                        f"{self.workers} workers listen at sockets of their own",
                        field=field,
                        hint="Leave it out, or give --workers 1; `sglang-ext cluster` has --routers",
                    )
        check_cluster(self.cluster, self.cluster_name, self.cluster_password_file, is_loopback)
        self._check_shadow()
        if not is_loopback(self.host) and not self.api_key and not self.api_keys_file and not self.shadow:
            raise ConfigError(
                f"{self.host} can be reached from other machines, and no key is set",
                field="--api-key",
                hint="Give --api-key-file or --api-keys-file, or bind with --host 127.0.0.1",
            )
        if self.max_total_payload_bytes < self.max_payload_bytes:
            raise ConfigError(
                f"{self.max_total_payload_bytes} is less than one body may have "
                f"(--max-payload-bytes {self.max_payload_bytes})",
                field="--memory-limits bodies",
            )
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ConfigError(
                "a certificate and its key are given together",
                field="--tls-cert-file" if self.tls_cert_file is None else "--tls-key-file",
            )
        rules_of(self.client_rules)
        for name in self.trusted():
            if not may_be_trusted(name):
                raise ConfigError(
                    f"{name} needs no trust, or is no client's to set",
                    field="--trusted-fields",
                    hint="Leave it out",
                )

    def _check_shadow(self) -> None:
        if not self.shadow:
            return
        if self.record is None or not self.worker_urls:
            raise ConfigError(
                "nothing is recorded, or nothing is there to pass requests on to",
                field="--shadow",
                hint="Give --record FILE and --worker-urls",
            )
        if self.workers > 1:
            raise ConfigError("it is one process", field="--shadow", hint="Leave --workers out")

    def trusted(self) -> frozenset[str]:
        """The names in ``trusted_fields``."""
        return frozenset(name.strip() for name in self.trusted_fields.split(",") if name.strip())

    def split_terms(self) -> SplitTerms | None:
        """When two instances compute one prompt; None for never.

        Raises:
            ConfigError: the flag says something else.
        """
        try:
            return SplitTerms.of(self.sequence_parallel)
        except ValueError:
            raise ConfigError(
                f"{self.sequence_parallel!r} is not off, auto, or a number of tokens above 0",
                field="--sequence-parallel",
            ) from None

    def http_limits(self) -> HttpLimits:
        """The HTTP server's limits for clients."""
        return HttpLimits(
            max_body_bytes=self.max_payload_bytes,
            max_total_body_bytes=self.max_total_payload_bytes,
            max_head_bytes=self.max_header_bytes,
            max_connections=self.max_connections,
            max_concurrent_requests=self.max_concurrent_requests,
            head_timeout_s=self.header_timeout_secs,
            idle_timeout_s=self.keep_alive_secs,
        )

    def document_limits(self) -> DocumentLimits:
        """The budgets of documents."""
        return DocumentLimits(
            self.document_blocks,
            self.document_blocks_per_tenant,
            self.block_size,
            self.document_bytes,
            self.document_bytes_per_tenant,
        )

    def spill_terms(self) -> SpillTerms:
        """Thresholds of spilling; see ``policies.spilling``."""
        return SpillTerms(
            full=self.spill_above,
            idle=self.spill_above * SpillTerms.IDLE,
            tenant_blocks=self.spill_blocks_per_tenant,
        )

    def hint_limits(self) -> HintLimits:
        """Each tenant's limits for hints."""
        return HintLimits(
            per_second=self.hints_per_second,
            burst=max(1, round(4 * self.hints_per_second)),
            live=self.hints_live,
            moving_tokens=self.hint_tokens,
            ttl_s=self.hint_ttl_secs,
            bytes=self.hint_bytes,
            learnt=self.learnt_hints,
        )

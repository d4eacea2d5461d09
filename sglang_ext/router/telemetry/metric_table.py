"""All metrics of the router, by name: kind, unit, labels and help."""

from __future__ import annotations

from typing import Final

from sglang_ext.protocol.metrics import (
    RATIO_BUCKETS,
    REQUEST_BUCKETS,
    STAGE_BUCKETS,
    Kind,
    Metric,
    MetricTable,
)

COUNTER, GAUGE, HISTOGRAM = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

ROUTER: Final = MetricTable("router", (
    # Requests, and tables that clients fill
    Metric("requests", COUNTER, "requests", ("endpoint", "status"), "Requests answered"),
    Metric("decisions", COUNTER, "decisions", ("policy", "reason"), "Routing decisions"),
    Metric("prompt_tokens", COUNTER, "tokens", (), "Prompt tokens of answered requests"),
    Metric("matched_tokens", COUNTER, "tokens", (), "Prompt tokens the router believed to be cached"),
    Metric("cached_tokens", COUNTER, "tokens", (), "Prompt tokens that workers report as cached"),
    Metric(
        "tier_tokens", COUNTER, "tokens", ("tier",),
        "Prompt tokens that workers report as cached, where they tell the tier",
    ),
    Metric("completion_tokens", COUNTER, "tokens", (), "Tokens generated"),
    Metric(
        "transferred_tokens", COUNTER, "tokens", ("source", "target", "how"),
        "Tokens whose KV went from one instance to another: fetched, or of prompts that were handed over",
    ),
    Metric("repaired", COUNTER, "requests", ("rule",), "Requests whose prompt a rule has repaired"),
    Metric(
        "diverged_tokens", COUNTER, "tokens", ("cause",),
        "Tokens of their session's last turn that turns could not reuse, because they differed before them",
    ),
    Metric(
        "answer_splices", COUNTER, "turns", ("outcome",),
        "Turns of sessions, by whether the server's own tokens of the last answer went into their prompt",
    ),
    Metric("client_disconnects", COUNTER, "clients", (), "Clients that went away before the end"),
    Metric("tenant_requests", COUNTER, "requests", ("tenant", "status"), "Generation requests"),
    Metric("tenant_tokens", COUNTER, "tokens", ("tenant", "kind"), "Tokens of generation requests"),
    Metric(
        "stage_seconds", HISTOGRAM, "s", ("stage",),
        "Time added by the router before a request is sent on",
        STAGE_BUCKETS,
    ),
    Metric(
        "instance_stage_seconds", HISTOGRAM, "s", ("stage",),
        "Time that answered requests spent at their instances, by stage, where these tell",
        REQUEST_BUCKETS,
    ),
    Metric(
        "queue_wait_seconds", HISTOGRAM, "s", (),
        "Time that requests waited for an instance with room",
        REQUEST_BUCKETS,
    ),
    Metric(
        "first_byte_seconds", HISTOGRAM, "s", ("endpoint",),
        "Time from a request to the first byte of its answer",
        REQUEST_BUCKETS,
    ),
    Metric(
        "request_seconds", HISTOGRAM, "s", ("endpoint",),
        "Time from a request to the end of its answer",
        REQUEST_BUCKETS,
    ),
    Metric(
        "estimate_ratio", HISTOGRAM, "ratio", ("instance", "term"),
        "Observed over expected seconds until the first token, and of terms of that",
        RATIO_BUCKETS,
    ),
    Metric("table_bytes", GAUGE, "bytes", ("table",), "Memory of a table that clients fill"),
    Metric("table_entries", GAUGE, "entries", ("table",), "Entries of a table that clients fill"),
    Metric(
        "last_hour_cached_ratio", GAUGE, "ratio", ("what",),
        "Share of prompt tokens of the last hour that was cached: hit, as workers report; oracle, with the "
        "same capacity and Belady's evictions; unlimited, with a cache without a limit",
    ),
    Metric("recorded_lines", GAUGE, "lines", ("what",), "Lines of --record: written, and dropped"),
    # The service
    Metric("refused", COUNTER, "requests", ("why",), "Requests refused for want of room, or beyond a limit"),
    Metric("task_failures", COUNTER, "rounds", ("task",), "Rounds of background work that failed"),
    # Tokens
    Metric("untokenized_prompts", COUNTER, "prompts", ("why",), "Prompts matched by text"),
    Metric("token_cache_bytes", GAUGE, "bytes", (), "Memory of tokens kept for prompts seen before"),
    Metric("token_cache_hits", GAUGE, "segments", (), "Segments found tokenized, since the model was loaded"),
    Metric("token_cache_misses", GAUGE, "segments", (), "Segments tokenized, since the model was loaded"),
    # The index
    Metric("index_blocks", GAUGE, "blocks", ("instance", "where"), "Blocks that an instance tells to hold"),
    Metric(
        "index_partial", GAUGE, "0 or 1", ("instance",),
        "1 when the instance holds more than the index could keep",
    ),
    Metric("tree_blocks", GAUGE, "blocks", (), "Blocks in the prompt tree"),
    Metric("tree_nodes", GAUGE, "nodes", (), "Nodes of the prompt tree"),
    Metric("tree_bytes", GAUGE, "bytes", (), "Estimated memory of the prompt tree"),
    Metric(
        "tree_evicted_blocks", GAUGE, "blocks", (),
        "Blocks forgotten for want of memory, since the start",
    ),
    # Instances
    Metric("in_flight", GAUGE, "requests", ("instance",), "Requests in flight"),
    Metric("queued_tokens", GAUGE, "tokens", ("instance",), "Prompt tokens waiting for their prefill"),
    Metric("instance_up", GAUGE, "0 or 1", ("instance",), "1 when the instance is given requests"),
    Metric("index_trusted", GAUGE, "0 or 1", ("instance",), "1 when the index of it is believed"),
    # The cluster
    Metric(
        "instance_requests", GAUGE, "requests", ("instance", "state"),
        "Requests that an instance reports",
    ),
    Metric(
        "tier_blocks", GAUGE, "blocks", ("instance", "tier", "what"),
        "Blocks that a tier holds (spilled: of them, which it keeps for other instances) or can hold",
    ),
    Metric("index_events", GAUGE, "events", ("instance",), "Placement events applied, since the start"),
    Metric("index_gaps", GAUGE, "gaps", ("instance",), "How often events were missing, since the start"),
    Metric("index_snapshots", GAUGE, "snapshots", ("instance",), "Snapshots taken in, since the start"),
    Metric(
        "event_lag_seconds", GAUGE, "s", ("instance",),
        "Age of the last placement event when it was applied",
    ),
    Metric("membership_connected", GAUGE, "0 or 1", (), "1 when membership can be shared, or need not be"),
    Metric(
        "membership_routers", GAUGE, "routers", (),
        "Routers that share the membership, this one included",
    ),
    Metric("membership_refused", GAUGE, "records", (), "Records of other routers that were left out"),
    Metric("membership_unsent", GAUGE, "records", (), "Records that were too large for other routers"),
    Metric(
        "role_changes", COUNTER, "changes", ("role", "why", "outcome"),
        "Changes between prefill and decode",
    ),
    Metric(
        "role_controller_wish", GAUGE, "0 or 1", ("role",),
        "1 for the role that should have one instance more",
    ),
    Metric(
        "role_controller_expected_seconds", GAUGE, "s", ("split",),
        "Expected seconds of a request besides its own prefill and transfer, by split of the instances",
    ),
    Metric("kv_event_batches", GAUGE, "batches", ("instance",), "Batches of KV events taken in"),
    Metric(
        "kv_event_losses", GAUGE, "losses", ("instance",),
        "How often KV events were lost, and the index of their instance was dropped",
    ),
    # Choosing, fetching, moving and spilling
    Metric(
        "cost_correction", GAUGE, "ratio", ("instance",),
        "Observed over calculated computing time of the last answers",
    ),
    Metric(
        "queue_estimate_seconds", GAUGE, "s", ("instance",),
        "Expected time until all prompts sent there are computed",
    ),
    Metric(
        "fetches", COUNTER, "prompts", ("why",),
        "Prompts whose KV an instance was to fetch from another, for a request or a hint; unheard: "
        "one of the messages could not be sent; not-worth-it: computing is expected to take less time; "
        "split: the other one computes the beginning meanwhile",
    ),
    Metric("fetches_ended", COUNTER, "prompts", ("how",), "Fetches that have ended, as instances report"),
    Metric(
        "fetched_spans", COUNTER, "spans", ("how",),
        "Spans of prompts that were read from another instance, by how that ended",
    ),
    Metric("fetched_tokens", COUNTER, "tokens", (), "Tokens whose KV came from another instance"),
    Metric(
        "moves", COUNTER, "requests", ("how",),
        "Running requests that were to go on at another instance; stuck: they cannot, and end where they "
        "are; failed: that one did not take them, and they go on where they were",
    ),
    Metric("queue_waiting", GAUGE, "requests", (), "Requests that wait for an instance with room"),
    Metric("programs", GAUGE, "sessions", ("state",), "Sessions at work, and those whose turns wait"),
    Metric("programs_retired", COUNTER, "sessions", (), "Sessions that made room for others at a turn's end"),
    Metric("admitted", GAUGE, "requests", (), "Generation requests that have a place"),
    Metric("broken_streams", COUNTER, "streams", (), "Streams whose worker went away in mid-answer"),
    Metric(
        "spills", COUNTER, "prefixes", ("how",),
        "Prefixes that a full instance was about to evict and another was asked to keep, by how that "
        "ended; no-room, tenant-budget: how often one was left where it was",
    ),
    Metric("spilled_tokens", COUNTER, "tokens", (), "Tokens whose KV another instance keeps since then"),
    Metric(
        "spilled_blocks", GAUGE, "blocks", ("tenant",),
        "Blocks that instances keep of a tenant for others",
    ),
    # Attempts
    Metric("retries", COUNTER, "attempts", ("why",), "Attempts on another worker"),
    Metric(
        "retries_denied", COUNTER, "attempts", (),
        "Attempts on another worker that were not made: the budget was spent",
    ),
    # Hints and documents
    Metric("hints", COUNTER, "hints", ("verdict",), "Hints at coming requests"),
    Metric(
        "hints_used", COUNTER, "hints", ("when",),
        "Hints whose request came when all was moved, before that, or never",
    ),
    Metric(
        "learnt_hints", COUNTER, "hints", ("verdict",),
        "Hints from learnt pauses, at ends of turns; unknown: too few pauses were seen; none: not made",
    ),
    Metric("hint_tokens", COUNTER, "tokens", (), "Tokens brought to HBM ahead of their request"),
    Metric("hint_computed_tokens", COUNTER, "tokens", (), "Tokens computed ahead of their request"),
    Metric(
        "document_requests", COUNTER, "requests", ("cached",),
        "Requests that name documents, by what of the first was cached",
    ),
    Metric(
        "document_cached_tokens", COUNTER, "tokens", (),
        "Tokens of documents that were cached when a request named them",
    ),
    Metric("documents", GAUGE, "documents", (), "Documents that are registered"),
    Metric("document_pinned_blocks", GAUGE, "blocks", (), "Blocks that instances hold back for documents"),
))  # fmt: skip

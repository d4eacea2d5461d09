"""The metrics of a server: of the cache, of hand-overs, and of requests by stage."""

from __future__ import annotations

from typing import Final

from sglang_ext.protocol.metrics import REQUEST_BUCKETS, Kind, Metric, MetricTable
from sglang_ext.tiers import Tier, tiers_below

COUNTER, GAUGE, HISTOGRAM = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
RANK: Final = ("tp_rank",)

_CACHE: Final = (
    Metric("blocks", GAUGE, "blocks", ("tier",), "Blocks that a tier holds."),
    Metric("capacity_blocks", GAUGE, "blocks", ("tier",), "Blocks that a tier can hold."),
    Metric("announced_prompts", GAUGE, "prompts", (), "Prompts whose requests are expected (hints)."),
    Metric(
        "deferred_prompts", GAUGE, "prompts", (),
        "Of them, those that get no HBM yet because their requests come later (earliest_s).",
    ),
    Metric(
        "layer_region_blocks", GAUGE, "blocks", (),
        "Blocks of HBM that hold the lowest layers of announced sessions instead of whole blocks.",
    ),
    Metric("spilled_blocks", GAUGE, "blocks", (), "Blocks of DRAM that are kept for other instances."),
    Metric("spilled_bytes", GAUGE, "bytes", (), "Bytes of DRAM that are kept for other instances."),
    Metric("disk_backlog_bytes", GAUGE, "bytes", (), "Bytes in DRAM that wait to be written to disk."),
    Metric(
        "load_decisions", COUNTER, "requests", ("tier", "decision", "reason"),
        "Requests whose KV was found in a tier below HBM, by what was decided: load, compute, or both "
        "(the head is loaded while the tail is computed), and why.",
    ),
    Metric(
        "tier_blocks", COUNTER, "blocks", ("tier", "event"),
        "Blocks that a tier below DRAM was to take (put) or to give (got), by how that ended, and those "
        "that it evicted.",
    ),
    Metric(
        "acked_answers", COUNTER, "answers", ("end",),
        "Answers whose end waited for the disk (--kv-durability acked), by what was reported with it: "
        "durable, behind (as the flag allows), late, refused (by the disk), lost, or uncached.",
    ),
    Metric(
        "durability_wait_seconds", HISTOGRAM, "s", (),
        "How long ends of answers were held back until they were durable.",
        REQUEST_BUCKETS,
    ),
    Metric(
        "fetched_bytes", COUNTER, "bytes", ("transport",),
        "Bytes of KV read from other instances, by the transport that brought them.",
    ),
    Metric("mempool_calls", COUNTER, "calls", ("call",), "Calls of the memory pool (MemServe, table 1)."),
    Metric(
        "faults", COUNTER, "calls", ("call",),
        "Calls of SGLang's scheduler that failed in the cache, and were treated as a miss.",
    ),
    Metric(
        "prefetches", COUNTER, "prompts", ("event",),
        "Prompts that were to be brought to HBM ahead of their request, by how that ended.",
    ),
    Metric(
        "announced_blocks", COUNTER, "blocks", ("event",),
        "Blocks of announced prompts: given up although they were held back (given_up), in any tier, "
        "and computed ahead of their request (computed).",
    ),
    Metric(
        "layer_region_block_layers", COUNTER, "layers of blocks", ("event",),
        "Single layers of blocks in HBM: brought ahead of a request (filled), copied to its slots "
        "when it was admitted (used), or given up for something else (given_up).",
    ),
    Metric(
        "retractions", COUNTER, "requests", ("event",),
        "Running requests that gave way to one of a higher priority (retracted) and run again "
        "(resumed); requests of a higher priority that waited instead, because that was expected to "
        "be short (avoided); decisions that failed (error).",
    ),
    Metric(
        "retracted_tokens", COUNTER, "tokens", ("event",),
        "Tokens of retracted requests that run again: their KV was found, or recomputed.",
    ),
    Metric(
        "dram_blocks", COUNTER, "blocks", ("event",),
        "Blocks written to DRAM, loaded from it, brought to HBM ahead of a request (prefetched), "
        "evicted from it, or skipped because it was full of locked blocks; those that went between it "
        "and a GPU more slowly, because our kernel could not be compiled or launched (without_kernel).",
    ),
    Metric(
        "spilled_blocks_events", COUNTER, "blocks", ("event",),
        "Blocks of other instances: kept for them in idle DRAM, used by requests here, exported to "
        "peers again, or given up because the DRAM was needed.",
    ),
    Metric(
        "peers", COUNTER, "blocks, fetches", ("event",),
        "KV from other instances: blocks fetched from them (fetch_streamed: those of them that the "
        "other one computed meanwhile) and exported to them (exported, not_exported, given_back; "
        "from_disk: read for that), "
        "or computed for them (span_computed, span_failed), and fetches by how they ended.",
    ),
    Metric(
        "disk_blocks", COUNTER, "blocks", ("event",),
        "Blocks written below DRAM, not written because that was behind (write_skipped) or refused "
        "them (write_failed); found there and promoted to DRAM (streamed: those of them that a "
        "forward pass did not wait for) or brought straight to HBM, left for computing (recomputed, "
        "no_room), not readable (read_failed) or given up (late).",
    ),
)  # fmt: skip


def weighed(tier: Tier) -> str:
    """The name of the metric of the newest decision to load from a tier."""
    return f"{tier.name}_weighed_seconds"


def cache_table() -> MetricTable:
    """Of the cache of a rank. Each tier that is registered below HBM adds a row."""
    by_tier = (
        Metric(
            weighed(tier), GAUGE, "s", ("way",),
            f"The newest decision to load from {tier.title} or to compute: how long each was expected to "
            "take.",
        )
        for tier in tiers_below(Tier.HBM)
    )  # fmt: skip
    return MetricTable("cache", (*_CACHE, *by_tier), RANK)


PD: Final = MetricTable("pd", (
    Metric("live_handovers", GAUGE, "requests", ("side",), "Requests whose hand-over has not ended."),
    Metric("leased_pages", GAUGE, "pages", (), "Pages that peers may be reading."),
    Metric(
        "unfenced_pages", GAUGE, "pages", (),
        "Pages of pushes that are over, kept until their writer is known to have stopped.",
    ),
    Metric("metadata_rows", GAUGE, "rows", (), "Rows of SGLang's metadata buffers that requests have."),
    Metric(
        "set_aside_tokens", GAUGE, "tokens", ("tier",),
        "Memory that KV on its way back is to fill, in tokens.",
    ),
    Metric(
        "prefill_servers", GAUGE, "servers", ("state",),
        "Prefill servers that this decode rank is connected to, and such that it tries to reach.",
    ),
    Metric(
        "rdma_device", GAUGE, "0 or 1", ("device", "why"),
        "1 for the RDMA device and port that this rank uses, and why.",
    ),
    Metric(
        "connects", COUNTER, "connections", ("why",),
        "Connections made to prefill servers: ahead of requests, or while a request waited.",
    ),
    Metric(
        "handovers", COUNTER, "requests", ("side", "end"),
        "Hand-overs that have ended: released (prefill) and held (decode) are good, fault, abort, "
        "peer_abort and peer_dead are not.",
    ),
    Metric("read_bytes", COUNTER, "bytes", ("transport",), "Bytes of KV read from other servers."),
    Metric(
        "transactions", COUNTER, "ranges", ("transport",),
        "Ranges of KV read from other servers, after coalescing.",
    ),
    Metric(
        "mempool_calls", COUNTER, "calls", ("call",),
        "Calls of the memory pool that named another instance (MemServe, table 1).",
    ),
    Metric(
        "pushed_layers", COUNTER, "layers of pages", ("when",),
        "Pages times layers written to decode, of hand-overs that ended well: ahead of the end of their "
        "request's computation (push by layer), or after it.",
    ),
    Metric(
        "returns", COUNTER, "requests", ("side", "outcome"),
        "Requests whose KV went back to prefill (returned), or why not.",
    ),
    Metric(
        "returned_tokens", COUNTER, "tokens", (),
        "Tokens of KV that went back from decode to prefill.",
    ),
), RANK)  # fmt: skip
"""Of hand-overs and returns of a rank."""

REQUESTS: Final = MetricTable("request", (
    Metric(
        "stage_seconds", HISTOGRAM, "s", ("stage", "role"),
        "Time that requests spent at this server, by stage.",
        REQUEST_BUCKETS,
    ),
))  # fmt: skip
"""Of the requests of a server, with any cache."""

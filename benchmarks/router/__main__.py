"""The router's cost per request, and the share of the caches that it puts to use, beside sglang-router.

With fast stand-in workers: requests per second and added latency, one core for the router; the same beside
thousands of idle streams and clients that read slowly, and over new connections; bytecodes per request, by
stage; CPU time with the rules for agents' prompts and without. Memory, events and decisions with a thousand
instances, and while a snapshot comes in. With real servers: tokens reused and time to first token by policy,
in ordinary operation, with pools too small for the load, and right after an instance has restarted; and the
tail of the time to first token when some sessions share their beginning (MemServe, figure 15).

Two things are compared with sglang-router: the routing alone, in front of the very same servers, without
tiers (ordinary, scarce pools); and the whole, our router in front of servers with DRAM and disk tiers, beside
sglang-router in front of servers that have none, as stock SGLang's (scarce, restart).
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.common import Options, Report, at_least, at_most
from benchmarks.router.connections import measure_connections
from benchmarks.router.processes import SGLANG_ROUTER, VLLM_ROUTER
from benchmarks.router.profile import measure_profile
from benchmarks.router.rules import measure_rules
from benchmarks.router.scale import measure_scale
from benchmarks.router.serving import SERVING_CASES, measure_serving
from benchmarks.router.speed import measure_speed
from sglang_ext.flags import flag, one_of

PARTS = ("speed", "connections", "profile", "rules", "scale", "serving")
AIMS = {
    "added_p50_vs_sglang_router": at_most(1.0),
    "added_p99_vs_sglang_router": at_most(1.0),
    "rps_vs_sglang_router": at_least(1.0),
    "rps_fresh_vs_sglang_router": at_least(1.0),
    "idle_streams_p50_ratio": at_most(1.2),
    "idle_streams_kib_vs_sglang_router": at_most(1.0),
    "slow_readers_p50_ratio": at_most(1.2),
    "slow_readers_kib_vs_sglang_router": at_most(1.0),
    "reconnecting_rps_vs_sglang_router": at_least(1.0),
    "storm_vs_quiet_p99": at_most(2.0),
    "rules_cpu_ratio": at_most(1.03),
    "prompt-tree_decision_many_vs_few_1_holders": at_most(10.0),
    "cost_1_holders_idle_p50_us": at_most(100.0),
    "cost_1_holders_busy_p50_us": at_most(100.0),
    "cost_100_holders_idle_p50_us": at_most(200.0),
    "cost_100_holders_busy_p50_us": at_most(200.0),
    "cost_1000_holders_idle_p50_us": at_most(500.0),
    "cost_1000_holders_busy_p50_us": at_most(500.0),
    "events_many_vs_few": at_least(0.8),
    "reuse_vs_cache_aware": at_least(1.2),
    "reuse_vs_cache_aware_scarce": at_least(1.2),
    "reuse_vs_cache_aware_restart": at_least(1.2),
    "p99_ttft_vs_session_share2": at_most(0.41),
}


@dataclass(frozen=True, kw_only=True)
class RouterOptions(Options):
    """The flags of this benchmark."""

    sglang_router_python: Path | None = flag(
        None,
        "Interpreter of an environment of its own with sglang-router==0.3.2, to measure it too.",
        metavar="PYTHON",
    )
    vllm_router_python: Path | None = flag(
        None,
        "The same with vllm-router==0.1.17, for speed.",
        metavar="PYTHON",
    )
    cases: tuple[str, ...] = flag(
        tuple(SERVING_CASES), "Of the part with real servers.", one_of(*SERVING_CASES), several="+"
    )
    parts: tuple[str, ...] = flag(tuple(PARTS), "What to measure.", one_of(*PARTS), several="+")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    # End every process that was started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = RouterOptions.of(argv, "router", __doc__)
    report = Report("router", AIMS)
    try:
        if "speed" in options.parts:
            peers = {SGLANG_ROUTER: options.sglang_router_python, VLLM_ROUTER: options.vllm_router_python}
            measure_speed(options, report, peers)
        if "connections" in options.parts:
            measure_connections(options, report, options.sglang_router_python)
        if "profile" in options.parts:
            measure_profile(options, report)
        if "rules" in options.parts:
            measure_rules(options, report)
        if "scale" in options.parts:
            measure_scale(options, report)
        if "serving" in options.parts:
            measure_serving(options, report, options.cases, options.sglang_router_python)
    finally:
        # The measurements made before the end are reported, too.
        report.finish(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())

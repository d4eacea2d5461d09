"""The parts that carry requests to instances and their answers back."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sglang_ext.protocol.recording import VERSION, Head, Namer
from sglang_ext.router.app.foundation import Foundation
from sglang_ext.router.app.instance_parts import InstanceParts
from sglang_ext.router.app.routing_parts import RoutingParts
from sglang_ext.router.clients.rules import rules_of
from sglang_ext.router.cluster.shared_limits import SharedLimits
from sglang_ext.router.cluster.shared_replays import SharedReplays
from sglang_ext.router.dispatch.aborting import Aborting
from sglang_ext.router.dispatch.explain import Explainer, RequestLog
from sglang_ext.router.dispatch.flight import Flights, Homes
from sglang_ext.router.dispatch.forwarding import Forwarding
from sglang_ext.router.dispatch.moving import Mover
from sglang_ext.router.dispatch.recording import Recorder, recorded_limits
from sglang_ext.router.dispatch.regret import History, Regret
from sglang_ext.router.dispatch.relaying import Relay
from sglang_ext.router.dispatch.suspects import Suspects
from sglang_ext.router.dispatch.turns import Turns
from sglang_ext.router.endpoints.background import Background
from sglang_ext.router.endpoints.shared_requests import SharedRequests
from sglang_ext.router.policies import Role
from sglang_ext.router.telemetry.record_file import RecordFile, recording_key, yield_to_others


class RequestParts:
    """Requests on their way, the log of recent ones, and what routers share about them.

    Args:
        routing: the choice of an instance, and the queue.
    """

    def __init__(self, base: Foundation, of: InstanceParts, routing: RoutingParts) -> None:
        config, clock, metrics = base.config, base.clock, base.metrics
        self.request_log = RequestLog(config.explain_max_bytes)
        self.flights = Flights()
        self.suspects = Suspects(base.channel, clock)
        self.replays = SharedReplays(base.channel, clock)
        SharedLimits(base.channel, base.keys, clock, base.cluster_key)
        self.homes = Homes(of.fleet.rows.keys)
        self.aborting = Aborting(self.flights, of.api)
        self.history = _history(base, of, routing, self.request_log)
        explainer = Explainer(
            self.request_log, of.trees, of.fleet.rows.keys, routing.spilling.copies_of, self.history.regret
        )
        self.shared = SharedRequests(routing.queries, self.aborting, explainer, self.homes)
        self.background = Background(of.api, of.fleet, routing.admission, clock, config.request_timeout_secs)
        forwarding = Forwarding(
            of.upstream,
            timeout_s=config.request_timeout_secs,
            asks_for_key=base.asks_for_key,
            worker_api_key=config.worker_api_key,
            tracing=base.tracing,
            keeps_states=of.fleet.keeps_states,
        )
        turns = Turns(
            routing.sessions, rules_of(config.client_rules).rules, of.tokenizers, metrics, config.block_size
        )
        self.mover = Mover(of.fleet, of.agents, forwarding, clock, metrics, base.rounds)
        self.relay = Relay(
            forwarding, of.fleet, of.trees, of.costs, of.tokenizers, self.homes, metrics, clock, self.mover,
            self.suspects,
            on_background=self.background.keep,
            on_learnt=(turns.learn, routing.spilling.learn, self.request_log.learn),
            explains=config.explain_routing,
        )  # fmt: skip
        self.recorder = None if config.record is None else _recorder(base, of, routing, self.request_log)


def _history(base: Foundation, of: InstanceParts, routing: RoutingParts, log: RequestLog) -> History:
    """The last hour of this router."""

    def capacity() -> int | None:
        beats = [beat for name in of.fleet.rows if (beat := of.agents.beat(name)) is not None]
        # A lower tier has the blocks of those above it.
        sizes = [max((fill.size for fill in beat.fills), default=0) for beat in beats]
        return sum(sizes) or None

    def now() -> dict[str, float]:
        metrics = base.metrics
        return {
            "running": sum(row.in_flight for row in of.fleet.rows.values()),
            "waiting": len(routing.admission.line),
            "requests": metrics.answered,
            "generated": metrics.completion_tokens.of().value,
            "prompt": metrics.prompt_tokens.of().value,
            "cached": metrics.cached_tokens.of().value,
        }

    regret = Regret(base.clock, base.config.block_size, capacity)
    log.ended.subscribe(regret.on_ended)
    return History(regret, base.clock, base.metrics, now)


def _recorder(base: Foundation, of: InstanceParts, routing: RoutingParts, log: RequestLog) -> Recorder:
    """The recorder of ``--record``, subscribed to its sources."""
    config = base.config
    file = RecordFile(
        Path(config.record or ""),
        config.record_size,
        config.record_files,
        Namer(recording_key(base.cluster_key), config.block_size, yield_to_others),
    )
    settings: dict[str, str | float] = {
        "--cache-threshold": config.cache_threshold,
        "--balance-abs-threshold": config.balance_abs_threshold,
        "--balance-rel-threshold": config.balance_rel_threshold,
        "queue-weight": config.queue_weight,
        "exec-weight": config.exec_weight,
        "SGLANG_EXT_ROUTER_BALANCE_CACHE_FACTOR": config.balance_cache_factor,
        "--max-running-per-instance": config.max_running_per_instance,
        "--max-concurrent-requests": config.max_concurrent_requests,
        "--queue-size": config.queue_size,
        "--queue-timeout-secs": config.queue_timeout_secs,
        "--queue-policy": config.queue_policy,
        "bytes-per-minute": config.client_bytes_per_minute,
        "--spill-above": config.spill_above,
        "--index": config.index,
    }

    def head(at: float, key_id: str) -> Head:
        profile = of.costs.model.profile
        costs = {} if profile is None else msgspec.to_builtins(profile)
        limits = recorded_limits((meter.entry for meter in base.keys.meters), file.word)
        return Head(at, VERSION, base.name, key_id, config.block_size, config.policy, settings, costs, limits)

    def role_of(name: str) -> str:
        row = of.fleet.rows.get(name)
        return Role.COLOCATED.value if row is None else row.role.value

    recorder = Recorder(
        file,
        head,
        base.clock,
        base.metrics,
        role_of=role_of,
        kind_of=of.agents.shares_kv,
        chunk_of=lambda name: of.fleet.batching(name).chunk,
        beat_of=of.agents.beat,
        changing=lambda: (of.costs.model.profile, base.keys.meters),
    )
    log.ended.subscribe(recorder.on_ended)
    routing.advisor.offered.subscribe(recorder.on_hint)
    of.agents.loads.subscribe(recorder.on_load)
    of.agents.applied.subscribe(recorder.on_applied)
    of.fleet.restarted.subscribe(recorder.on_gone)
    return recorder

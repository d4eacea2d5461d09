"""The parts that lead from a request, a hint or a document to an instance."""

from __future__ import annotations

import math

from sglang_ext.router.app.foundation import Foundation
from sglang_ext.router.app.instance_parts import InstanceParts
from sglang_ext.router.cluster.members_view import fills_of
from sglang_ext.router.cluster.queries import Queries
from sglang_ext.router.config import RouterConfig
from sglang_ext.router.dispatch.choosing import Chooser, Routing
from sglang_ext.router.dispatch.pausing import Pausing
from sglang_ext.router.dispatch.program_gate import ProgramGate
from sglang_ext.router.dispatch.queueing import Admission, queue_policy_named
from sglang_ext.router.dispatch.spilling import Spilling
from sglang_ext.router.hints.advising import Advisor
from sglang_ext.router.hints.advisory_book import HintBook
from sglang_ext.router.hints.document_book import DocumentBook
from sglang_ext.router.hints.documents import Documents
from sglang_ext.router.hints.encoding import HintEncoder
from sglang_ext.router.hints.preparing import Preparer
from sglang_ext.router.hints.remote_hints import RemoteHints
from sglang_ext.router.hints.session_memory import SessionMemory
from sglang_ext.router.hints.shared_hints import SharedHints, SharedSessions
from sglang_ext.router.placing.fetching import Fetching
from sglang_ext.router.placing.placing import PlacingOptions
from sglang_ext.router.policies import PolicyOptions, policy_named
from sglang_ext.tiers import Tier


class RoutingParts:
    """Hints, documents and spilling, the choice of an instance, and the queue before it."""

    def __init__(self, base: Foundation, of: InstanceParts) -> None:
        config, clock, metrics = base.config, base.clock, base.metrics
        routing = _routing(config)
        self.fetching = Fetching(of.agents, of.costs, metrics)
        self.queries = Queries(base.channel)
        self.sessions = SessionMemory(config.session_memory_bytes)
        self.encoder = HintEncoder(
            of.fleet, of.tokenizers, self.sessions, SharedSessions(self.sessions, self.queries).ask
        )
        remote = RemoteHints()
        book = HintBook(config.hint_limits(), remote)
        preparer = Preparer(
            of.fleet, of.trees, of.costs, routing.placing, of.agents, metrics, clock, self.fetching, book
        )
        self.advisor = Advisor(of.fleet, routing.placing.thresholds, metrics, clock, book, remote, preparer)
        SharedHints(base.channel, self.advisor, clock)
        self.programs = ProgramGate(
            lambda: _program_tokens(of, config), of.costs.alone_s, metrics, clock,
            size=config.queue_size, patience_s=config.queue_timeout_secs,
        )  # fmt: skip
        self.pausing = Pausing(
            self.advisor, self.sessions, of.costs, self.programs, metrics, clock,
            share=config.learnt_hints, longest_s=config.hint_ttl_secs,
        )  # fmt: skip
        self.spilling = Spilling(config.spill_terms(), of.fleet, of.trees, of.agents, metrics, clock)
        self.documents = Documents(
            DocumentBook(config.document_limits()), of.fleet, of.trees, of.tokenizers, of.costs,
            self.encoder, of.agents, self.fetching, metrics, clock,
        )  # fmt: skip
        self.chooser = Chooser(routing, of.fleet, of.trees, of.costs, metrics, self.fetching, self.advisor)
        self.admission = Admission(
            self.chooser.capacity,
            clock,
            size=config.queue_size,
            patience_s=config.queue_timeout_secs,
            order=queue_policy_named(config.queue_policy),
        )


def _program_tokens(of: InstanceParts, config: RouterConfig) -> float:
    """Tokens of KV that sessions at work may have; infinite without a limit, or while no HBM is reported."""
    if not config.program_share:
        return math.inf
    beats = [of.agents.beat(known.name) for known in of.fleet.usable()]
    fills = [fills_of(beat).get(Tier.HBM) for beat in beats if beat is not None]
    blocks = sum(fill.size for fill in fills if fill is not None)
    return config.program_share * blocks * config.block_size if blocks else math.inf


def _routing(config: RouterConfig) -> Routing:
    """The policy and its thresholds, by the flags."""
    thresholds = PolicyOptions(
        cache_threshold=config.cache_threshold,
        balance_abs_threshold=config.balance_abs_threshold,
        balance_rel_threshold=config.balance_rel_threshold,
        balance_cache_factor=config.balance_cache_factor,
        tie_tokens=config.block_size,
        queue_weight=config.queue_weight,
        exec_weight=config.exec_weight,
    )
    placing = PlacingOptions(
        policy=policy_named(config.policy),
        thresholds=thresholds,
        split=config.split_terms(),
        block_size=config.block_size,
    )
    return Routing(name=config.policy, placing=placing, most_running=config.max_running_per_instance)

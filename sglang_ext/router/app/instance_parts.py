"""The parts that follow the instances: their caches, states, agents, model and costs."""

from __future__ import annotations

from collections.abc import Callable

from sglang_ext.cost_model import CostModel
from sglang_ext.router.app.adoption import Adoption
from sglang_ext.router.app.foundation import Foundation
from sglang_ext.router.cluster.agents import Agents
from sglang_ext.router.cluster.stock_links import StockLinks
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.fleet.health import HealthWatch
from sglang_ext.router.fleet.worker import WorkerApi
from sglang_ext.router.http.tls import worker_context
from sglang_ext.router.http.upstream import HttpUpstream
from sglang_ext.router.index.index import Index
from sglang_ext.router.placing.costs import RouterCosts
from sglang_ext.router.placing.profiles import load_named
from sglang_ext.router.tokens.tokenizing import TokenizerService


class InstanceParts:
    """The instances, what their agents report, and what computing takes there.

    Args:
        on_loaded: called when a tokenizer has been loaded.
    """

    def __init__(self, base: Foundation, on_loaded: Callable[[], None]) -> None:
        config, clock = base.config, base.clock
        self.upstream = HttpUpstream(
            config.connect_timeout_secs, tls=lambda: worker_context(config.tls_worker_ca_file)
        )
        self.api = WorkerApi(self.upstream, config.worker_api_key)
        self.trees = Index(
            clock,
            block_size=config.block_size,
            ttl_s=config.tree_ttl_secs,
            max_bytes=config.tree_max_bytes,
            mode=config.index,
            wait_s=config.index_wait_secs,
        )
        self.fleet = Fleet(
            failure_threshold=config.health_failure_threshold,
            view=self.trees.holdings_of,
            changed=self.trees.take_changed,
            pairs=True,
            silence_s=config.silence_secs,
            now=clock.monotonic,
        )
        self.watch = HealthWatch(
            self.fleet,
            self.api,
            clock,
            interval_s=config.health_check_interval_secs,
            timeout_s=config.health_check_timeout_secs,
            rounds=base.rounds,
        )
        self.agents = Agents(
            self.trees,
            clock,
            router=base.name,
            key=base.cluster_key,
            listener=self.watch,
            far_verdict_s=config.silence_secs,
            rounds=base.rounds,
        )
        self.stock = StockLinks(self.trees, self.fleet)
        self.tokenizers = TokenizerService(
            threads=base.tokenizer_threads,
            cache_bytes=config.tokenizer_cache_bytes,
            path=config.tokenizer_path,
            trust_remote_code=config.trust_remote_code,
        )
        self.costs = _costs(base, self.fleet, self.agents)
        self.adoption = Adoption(
            self.fleet, self.trees, self.costs, self.tokenizers, self.api, clock,
            cost_profile=config.cost_profile, on_loaded=on_loaded, rounds=base.rounds,
        )  # fmt: skip


def _costs(base: Foundation, fleet: Fleet, agents: Agents) -> RouterCosts:
    """The costs of computing and moving, corrected by the heartbeats of agents."""
    costs = RouterCosts(
        load_named(base.config.cost_profile) or CostModel(),
        base.clock.monotonic,
        can_fetch=agents.can_fetch,
        shares_kv=agents.shares_kv,
        can_split=agents.can_split,
        batching=fleet.batching,
    )
    agents.loads.subscribe(lambda name, load: costs.on_load(name, load, fleet.in_flight(name)))
    return costs

"""Gives an instance its agent: feed, socket, thread, and registration with the routers."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from sglang_ext.addresses import bracketed, listen_host
from sglang_ext.cluster_key import ClusterKey, read_cluster_key
from sglang_ext.config import KvConfig
from sglang_ext.engine.cache.listeners import Listener
from sglang_ext.engine.events.agent import Agent, AgentFacts, ListsNames
from sglang_ext.engine.events.agent_socket import AgentSocket
from sglang_ext.engine.events.events import PlacementFeed
from sglang_ext.engine.events.registration import Registrar
from sglang_ext.engine.events.router_commands import RouterCommands
from sglang_ext.engine.tiers.block_names import BlockNames
from sglang_ext.keys import Namespace
from sglang_ext.patches.adapter.build_transfers import context_ranks, dp_rank, engine_ranks
from sglang_ext.protocol.agent import Fill, Load, Naming
from sglang_ext.protocol.cluster import Registration, RoleName, url_of_replica
from sglang_ext.protocol.compatibility import bounded
from sglang_ext.tiers import Tier

if TYPE_CHECKING:
    from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache

logger = logging.getLogger(__name__)

ROLES: Final[Mapping[str, RoleName]] = {"null": "colocated", "prefill": "prefill", "decode": "decode"}


MOST_OF_A_NAME: Final = 200
"""Characters of a device's name that routers get."""


class SchedulerGauges:
    """The server's load, which the agent sends with every heartbeat.

    Reads the scheduler's lists from another thread: their lengths are whatever they are at that moment.
    """

    def __init__(self, cache: GlobalRadixCache) -> None:
        self._cache = cache

    def load(self) -> Load:
        scheduler = self._cache.scheduler
        if scheduler is None:
            return Load()
        waiting = [*scheduler.waiting_queue, *_pd_queues(scheduler)]
        tokens = sum(len(getattr(each, "req", each).origin_input_ids) for each in waiting)
        cut = scheduler.chunked_req
        return Load(
            running=len(scheduler.running_batch.reqs),
            queued=len(waiting) + (cut is not None),
            queued_tokens=tokens + (0 if cut is None else _left_of(cut)),
        )

    def fills(self) -> tuple[Fill, ...]:
        dram = self._cache.dram
        kept = {} if dram is None else {Tier.DRAM: sum(guests.shown for guests in dram.guests)}
        held = self._cache.blocks_by_tier()
        return tuple(Fill(tier.level, *used, kept.get(tier, 0)) for tier, used in held.items())


def _left_of(req: Any) -> int:
    """Tokens that are still to be computed of a prompt that is computed in chunks."""
    from sglang_ext.patches.seams import current

    return max(0, len(req.origin_input_ids) - current.prefix_tokens(req))


def _pd_queues(scheduler: Any) -> list[Any]:
    """Requests that wait in the queues of a PD server."""
    found: list[Any] = []
    for name in ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue"):
        queue = getattr(scheduler, name, None)
        if queue is not None:
            found += list(queue.queue)
    return found


def attach_agent(
    cache: GlobalRadixCache,
    server_args: Any,
    config: KvConfig,
    facts: AgentFacts,
    *,
    router_commands: RouterCommands,
    named: Mapping[Tier, ListsNames],
    namespace: Namespace,
    settings: Mapping[str, str],
    handover: Mapping[str, str],
    endpoints: tuple[str, ...] = (),
    splits: bool = False,
    keeps_states: bool = False,
) -> Agent:
    """Start the agent of ``cache``'s instance, and register it with every router of ``config``.

    Called in rank 0, while the cache, which has a feed, is empty. settings: of the model. handover: of
    hand-overs, where it takes part in them. router_commands: receives the routers' commands to the
    schedulers. endpoints: where peers read ranks' DRAM. splits: whether it computes spans of prompts with
    others. keeps_states: whether it keeps states where routers say so.

    Raises:
        ConfigError: the key cannot be read, or the agent cannot listen.
    """
    feed = cache.find(PlacementFeed)
    assert config.router is not None
    assert feed is not None
    key = _key_of(config)
    host = bracketed(config.announce_host or server_args.host)
    bind = listen_host(server_args.host, keyed=key is not None)
    channel = AgentSocket(bind, (config.agent_port,) if config.agent_port else config.port_range, key)
    for tier, index in named.items():
        index.watch(functools.partial(feed.queue.names_changed, tier))
    agent = Agent(facts, feed, SchedulerGauges(cache), channel, named=named, others=router_commands.receive)
    address = bracketed(bind) if key is None else host
    scheme = "https" if getattr(server_args, "ssl_certfile", None) else "http"
    url, rank = f"{scheme}://{host}:{server_args.port}", dp_rank()
    device, device_bytes = device_of(str(server_args.device))
    registration = Registration(
        url=url if rank is None else url_of_replica(url, rank),
        instance=facts.instance,
        epoch=facts.epoch.hex(),
        role=ROLES.get(server_args.disaggregation_mode, "colocated"),
        agent=f"tcp://{address}:{agent.socket.port}",
        agent_key=agent.socket.public_key,
        block_size=facts.block_size,
        model=str(server_args.served_model_name or server_args.model_path),
        tp_size=engine_ranks() * context_ranks(),
        pp_size=server_args.pp_size,
        namespace=namespace.digest().hex(),
        endpoints=endpoints,
        computes=config.advisory_compute,
        splits=splits,
        keeps_states=keeps_states,
        settings=bounded(settings),
        handover=dict(handover),
        weights=namespace.weights_version,
        device=device,
        device_bytes=device_bytes,
        for_others=0 if cache.dram is None else sum(guests.limit for guests in cache.dram.guests),
    )
    registrar = Registrar(config.router.split(","), registration, key, agent.silent_s)
    agent.rekeyed.subscribe(registrar.rekey)
    agent.start()
    registrar.start()
    cache.listeners.add(_Registered(cache, agent, registrar, feed, tuple(named.values())))
    logger.info(
        "Agent of instance %s at %s, for routers %s", facts.instance, registration.agent, config.router
    )
    return agent


class _Registered(Listener):
    """The instance is known to routers for as long as its cache is there."""

    def __init__(
        self,
        cache: GlobalRadixCache,
        agent: Agent,
        registrar: Registrar,
        feed: PlacementFeed,
        named: Iterable[ListsNames],
    ) -> None:
        self._cache = cache
        self._agent = agent
        self._registrar = registrar
        self._feed = feed
        self._named = named

    def role_changed(self, role: str) -> None:
        before = self._registrar.registration
        splits = before.splits and ROLES[role] == before.role
        self._registrar.update(msgspec.structs.replace(before, role=ROLES[role], splits=splits))

    def before_end(self) -> None:
        for index in self._named:
            index.watch(lambda stored, removed: None)
        self._registrar.close()
        self._agent.close()
        self._cache.listeners.remove(self)
        self._feed.close()


def device_of(kind: str) -> tuple[str, int]:
    """The name of this rank's device and the bytes of its memory; empty and 0 for a kind that neither PyTorch
    for CUDA nor this machine can name.

    Args:
        kind: ``--device`` of the server.
    """
    if kind == "cpu":
        cores = len(os.sched_getaffinity(0))
        return f"cpu, {cores} cores", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if kind != "cuda":
        return "", 0
    import torch

    try:
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
    except (RuntimeError, AssertionError) as error:  # the latter without CUDA
        logger.warning("the device is not named to routers: %s", error)
        return "", 0
    return str(device.name)[:MOST_OF_A_NAME], int(device.total_memory)


def naming_of(names: BlockNames) -> Naming:
    """The parts of the names of blocks on disk, as routers receive them."""
    identity = names.identity
    return Naming(
        identity.model,
        names.weights(0),
        identity.dtype,
        identity.geometry,
        identity.shard,
        names.adapters,
    )


def _key_of(config: KvConfig) -> ClusterKey | None:
    if config.cluster_key_file is None:
        return None
    return read_cluster_key(config.cluster_key_file, field="--kv-cluster-key-file")

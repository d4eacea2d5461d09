"""The channels to the instances' agents: opened and ended as the cluster manager wants it."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

from zmq import constants as zmq
from zmq.asyncio import Context

from sglang_ext.addresses import host_of, is_loopback
from sglang_ext.clock import Clock
from sglang_ext.cluster_key import ClusterKey
from sglang_ext.protocol.agent import (
    FROM_AGENT,
    Beat,
    Events,
    Load,
    PeerDead,
    SnapshotEnd,
    ToAgent,
)
from sglang_ext.protocol.cluster import VERDICT_S, Registration
from sglang_ext.router.cluster.agent_link import AgentCounters, AgentListener, Link
from sglang_ext.router.cluster.members_view import fills_of
from sglang_ext.router.fleet.channels import AgentChannels
from sglang_ext.router.index.index import Index
from sglang_ext.router.policies.base import Role
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.signals import Signal
from sglang_ext.tasks import Rounds, Tasks

logger = logging.getLogger("router.agents")


class Agents(AgentChannels):
    """See the module's docstring.

    Args:
        index: receives the placement events.
        clock: seconds.
        router: this router's name.
        key: of the cluster.
        listener: receives heartbeats and silence.
        far_verdict_s: how long an agent on another machine may be silent.
    """

    def __init__(
        self,
        index: Index,
        clock: Clock,
        *,
        router: str,
        key: ClusterKey | None = None,
        listener: AgentListener | None = None,
        far_verdict_s: float = VERDICT_S,
        rounds: Rounds | None = None,
    ) -> None:
        self.index = index
        self.rounds = rounds or Rounds(clock)
        self.listener = listener
        self.router = router
        self.clock = clock
        self.messages = Signal()
        self.loads: Signal[[str, Load]] = Signal()
        """The load of an instance, from each heartbeat: (name, load)."""
        self.applied: Signal[[str, Events | SnapshotEnd]] = Signal()
        """Placement events of an instance are in the index, or the whole of a snapshot is."""
        self.reached: Signal[[str]] = Signal()
        """An agent became reachable, for the first time or again: (name)."""
        self.verdict_s = VERDICT_S
        """How long an agent may be silent: on this machine until it is lost, on another one until its channel
        is opened anew. Tests on a busy machine give it longer.
        """
        self._far_verdict_s = far_verdict_s
        self._key = key
        self._context: Any = None
        self._links: dict[str, Link] = {}
        self._ending = Tasks()

    def verdict_of(self, registration: Registration) -> float:
        """How long the agent of an instance may be silent, in seconds."""
        near = is_loopback(host_of(registration.agent.removeprefix("tcp://")))
        return self.verdict_s if near else max(self.verdict_s, self._far_verdict_s)

    # -- as the cluster manager wants it ------------------------------------------------------------

    def connect(self, name: str, registration: Registration) -> None:
        """Reach an instance's agent from now on; another address or epoch replaces the former."""
        link = self._links.get(name)
        if link is not None and link.goes_to(registration):
            return
        if self._key is not None and not registration.agent_key:
            logger.warning("%s is not reached: its agent asks for no key, and this cluster has one", name)
            return
        if link is not None:
            self._end(link)
            if link.registration.epoch != registration.epoch:
                self.index.began(name, bytes.fromhex(registration.epoch), None)
        if registration.block_size != self.index.block_size:
            logger.warning(
                "%s has blocks of %d tokens, the index of %d: reports of %s are not used. Start the router "
                "with --block-size %d",
                name, registration.block_size, self.index.block_size, name, registration.block_size,
            )  # fmt: skip
        else:
            self.index.attach(name, Role(registration.role))
            self.index.expect(name)
        if self._context is None:
            self._context = Context()
        self._links[name] = Link(self, name, registration, link.counters if link else AgentCounters())

    def expect(self, name: str) -> None:
        """An instance serves and will register: it is awaited until its first snapshot is in."""
        self.index.expect(name)

    def disconnect(self, name: str) -> None:
        """Close the channel and drop the instance's index entries."""
        link = self._links.pop(name, None)
        if link is not None:
            self._end(link)
        self.index.detach(name)

    def peer_dead(self, instance: str, epoch: str) -> None:
        """Report the death of an instance (by id) to every other agent."""
        dead = PeerDead(instance, bytes.fromhex(epoch))
        for link in self._links.values():
            if link.registration.instance != instance:
                link.send(dead)

    def registration(self, name: str) -> Registration | None:
        """The registration of an instance, while its agent is alive."""
        link = self._links.get(name)
        return link.registration if link is not None and link.alive else None

    def send(self, name: str, message: ToAgent) -> bool:
        """Send a message to an instance's agent. False when it has no agent, or the agent is silent."""
        link = self._links.get(name)
        return link is not None and link.send(message)

    def beat(self, name: str) -> Beat | None:
        """The last heartbeat of an instance, while its agent is alive."""
        link = self._links.get(name)
        return link.beat if link is not None and link.alive else None

    def silent_s(self, name: str) -> float:
        """Seconds since the last message of its agent; infinite for a silent agent."""
        link = self._links.get(name)
        return self.clock.monotonic() - link.last_seen_at if link is not None and link.alive else math.inf

    def counters(self) -> dict[str, AgentCounters]:
        """The counters of each agent's channel, by instance."""
        return {name: link.counters for name, link in self._links.items()}

    def measure(self, metrics: RouterMetrics) -> None:
        """Export each instance's load and tier fills, and the counters of its channel."""
        gauges = {
            "events": metrics.gauge("index_events"),
            "gaps": metrics.gauge("index_gaps"),
            "snapshots": metrics.gauge("index_snapshots"),
            "lag_s": metrics.gauge("event_lag_seconds"),
        }
        requests = metrics.gauge("instance_requests")
        tiers = metrics.gauge("tier_blocks")

        def refresh() -> None:
            for gauge in (*gauges.values(), requests, tiers):
                gauge.clear()
            for name, link in self._links.items():
                for what, gauge in gauges.items():
                    gauge.labels(name).set(getattr(link.counters, what))
                if (beat := self.beat(name)) is None:
                    continue
                requests.labels(name, "running").set(beat.load.running)
                requests.labels(name, "queued").set(beat.load.queued)
                for tier, fill in fills_of(beat).items():
                    tiers.labels(name, tier.name, "used").set(fill.used)
                    tiers.labels(name, tier.name, "size").set(fill.size)
                    tiers.labels(name, tier.name, "spilled").set(fill.spilled)

        metrics.refreshing.subscribe(refresh)

    def _end(self, link: Link) -> None:
        # At once: when the task has ended, another channel to the same instance may have marked it alive
        # already.
        self.index.on_heartbeat(link.name, alive=False)
        link.task.cancel()
        self._ending.keep(link.task)

    async def close(self) -> None:
        """End every channel."""
        for name in list(self._links):
            self._end(self._links.pop(name))
        await asyncio.gather(*self._ending, return_exceptions=True)
        if self._context is not None:
            self._context.term()
            self._context = None

    def socket(self, registration: Registration) -> Any:
        """A connected socket to an agent."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, FROM_AGENT.limit)
        socket.setsockopt(zmq.SNDHWM, 100)
        socket.setsockopt(zmq.RCVHWM, 100)
        socket.setsockopt(
            zmq.CONNECT_TIMEOUT, 500
        )  # a host that is cut off is tried again sooner than by TCP
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.IPV6, 1)
        if registration.agent_key:
            if self._key is None:
                logger.warning(
                    "%s asks for the key of a cluster; give --cluster-key-file", registration.agent
                )
            else:
                socket.curve_publickey, socket.curve_secretkey = self._key.curve_pair()
                socket.curve_serverkey = registration.agent_key.encode()
        socket.connect(registration.agent)
        return socket

    def __repr__(self) -> str:
        return f"Agents({', '.join(map(repr, self._links.values()))})"

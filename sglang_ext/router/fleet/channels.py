"""The channels to the instances' agents, as the parts that send instances messages use them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from sglang_ext.protocol.agent import FromAgent, ToAgent
from sglang_ext.protocol.cluster import Registration
from sglang_ext.signals import Signal


class AgentChannels(Protocol):
    """See the module's docstring. Names are URLs."""

    messages: Signal[[str, FromAgent]]
    """Messages of agents other than placements and heartbeats: (name, message)."""

    def registration(self, name: str) -> Registration | None:
        """The registration of an instance, while its agent is alive."""

    def send(self, name: str, message: ToAgent) -> bool:
        """Send a message to an instance's agent. False when it has no agent, or the agent is silent."""

    def computes(self, name: str) -> bool:
        """Whether an instance computes the uncached tokens of an announced prompt."""
        registration = self.registration(name)
        return registration is not None and registration.computes

    def shares_kv(self, name: str) -> Hashable:
        """The kind of an instance's KV: those of one kind can fetch from each other. None without a live
        agent, and for an instance that exports nothing."""
        known = self.registration(name)
        if known is None or not known.endpoints:
            return None
        return known.namespace, known.block_size, len(known.endpoints)

    def can_fetch(self, source: str, target: str) -> bool:
        """Whether ``target`` can fetch from ``source``: both have KV of the same kind, and live agents."""
        if source == target:
            return False
        kind = self.shares_kv(source)
        return kind is not None and kind == self.shares_kv(target)

    def can_split(self, source: str, target: str) -> bool:
        """Whether ``target`` can compute a prompt behind what ``source`` computes of it."""
        there, here = self.registration(source), self.registration(target)
        if there is None or here is None or not self.can_fetch(source, target):
            return False
        return there.splits and here.splits and there.role == here.role == "colocated"

"""The channels to the instances' agents, as the parts that send instances messages use them."""

from __future__ import annotations

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

    def can_fetch(self, source: str, target: str) -> bool:
        """Whether ``target`` can fetch from ``source``: both have KV of the same kind, and live agents."""
        there, here = self.registration(source), self.registration(target)
        if there is None or here is None or source == target:
            return False
        return bool(there.endpoints) and (
            (there.namespace, there.block_size, len(there.endpoints))
            == (here.namespace, here.block_size, len(here.endpoints))
        )

    def can_split(self, source: str, target: str) -> bool:
        """Whether ``target`` can compute a prompt behind what ``source`` computes of it."""
        there, here = self.registration(source), self.registration(target)
        if there is None or here is None or not self.can_fetch(source, target):
            return False
        return there.splits and here.splits and there.role == here.role == "colocated"

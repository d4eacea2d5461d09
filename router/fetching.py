"""Having an instance fetch KV that another one holds (MemServe, section 5.3, equation 2).

The holder's agent is told to lend what DRAM has of the prompt, the other's to fetch it; both at once, just
before the request or with the hint. What comes of it is between the two: a fetch that fails is computed.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Final, Protocol

from router.flight import Flight
from router.policies import Decision, Instance, Match, beginners
from router.policies import Fleet as Instances
from router.policies.base import Costs, Fetch, Matches, load_of
from router.policies.prompt_tree import NOTHING
from sglang_ext import agent_messages
from sglang_ext.agent_messages import Lend, Source, ToAgent
from sglang_ext.cluster_messages import Registration

LEAST_WAIT_S: Final = 0.25
"""A busy scheduler takes its time until it lends."""
MOST_WAIT_S: Final = 10.0
LEND_S: Final = 30.0
MOST_KEY_BYTES: Final = 1 << 19
"""Longer prompts do not fit into a message to an agent."""


class FetchChannels(Protocol):
    """What of ``router.agents.Agents`` is used here. Names are URLs."""

    def registration(self, name: str) -> Registration | None: ...

    def send(self, name: str, message: ToAgent) -> bool: ...


class Fetching:
    """See the module's docstring.

    Args:
        channels: to the agents.
        costs: what computing and moving take.
        told: called with a word for what was asked for.
    """

    def __init__(
        self, channels: FetchChannels, costs: Costs, told: Callable[[str], None] = lambda what: None
    ) -> None:
        self._channels = channels
        self._costs = costs
        self._told = told

    def possible(self, source: str, target: str) -> bool:
        """Whether ``target`` can fetch from ``source``: their KV is of one kind, and both can be told."""
        there, here = self._channels.registration(source), self._channels.registration(target)
        if there is None or here is None or source == target:
            return False
        return bool(there.endpoints) and (
            (there.namespace, there.block_size, len(there.endpoints))
            == (here.namespace, here.block_size, len(here.endpoints))
        )

    def everywhere(self, fleet: Instances) -> bool:
        """Whether any instance of a fleet can fetch from any other."""
        return len(fleet) > 1 and all(
            self.possible(fleet[0].name, other.name) for other in fleet if other is not fleet[0]
        )

    # -- for a request ------------------------------------------------------------------------------

    def wanted(self, decision: Decision, fleet: Instances, matches: Matches, tokens: int) -> Fetch | None:
        """What the chosen instance should fetch for a prompt of so many tokens: what the policy says, or, as
        most say nothing of it, what is sooner there than computed."""
        if decision.fetch is not None or decision.decode is not None:
            return decision.fetch
        chosen = next((known for known in fleet if known.name == decision.instance), None)
        source = None if chosen is None else self._best(chosen, fleet, matches)
        if chosen is None or source is None:
            return None
        held = matches.get(chosen.name, NOTHING).tokens
        there = min(in_memory(matches[source.name]), tokens)
        if there <= held:
            return None
        moving = self._costs.transfer_s(source, chosen, there - held)
        return Fetch(source.name, there) if moving <= self._saved_s(chosen, tokens, held, there) else None

    def begin(
        self, flight: Flight, fetch: Fetch, decision: Decision, fleet: Instances, matches: Matches
    ) -> bool:
        """Tell both. Whether they could be told."""
        if len(flight.prompts) != 1:
            return False
        (prompt,) = flight.prompts
        chosen = next((known for known in fleet if known.name == decision.instance), None)
        key = prompt.key[: fetch.tokens * 4]
        if chosen is None or not self._movable(prompt.namespace, key):
            return False
        _, _, extra_key, salt = prompt.namespace
        source = self._lend(fetch.source, chosen.name, key, extra_key, salt)
        if source is None:
            return False
        held = matches.get(chosen.name, NOTHING).tokens
        saved = self._saved_s(chosen, flight.units, held, fetch.tokens)
        wait_s = min(MOST_WAIT_S, LEAST_WAIT_S + saved)
        message = agent_messages.Fetch(flight.record.request_id, key, source, extra_key, salt, wait_s)
        sent = self._channels.send(chosen.name, message)
        self._told("fetch" if sent else "unheard")
        return sent

    def _saved_s(self, instance: Instance, tokens: int, held: int, there: int) -> float:
        """What need not be computed when ``there`` tokens are known instead of ``held``."""

        def exec_s(known: int) -> float:
            new = max(1, tokens - known)
            return self._costs.exec_s(instance, new, max(0, tokens - new))

        return max(0.0, exec_s(held) - exec_s(there))

    # -- for a hint ---------------------------------------------------------------------------------

    def balanced(self, fleet: Instances, matches: Matches) -> str:
        """Where a request that is expected runs best when its KV can be anywhere by then: where least is
        going on, and among equals where most of it is."""

        def rank(known: Instance) -> tuple[object, ...]:
            return (known.in_flight, -matches.get(known.name, NOTHING).tokens, load_of(known))

        return min(beginners(fleet), key=rank).name

    def source_for(
        self,
        namespace: tuple[str | None, ...],
        key: bytes,
        instance: str,
        fleet: Instances,
        matches: Matches,
    ) -> Source | None:
        """Have whoever holds most of a prompt lend it to an instance that holds less."""
        chosen = next((known for known in fleet if known.name == instance), None)
        source = None if chosen is None else self._best(chosen, fleet, matches)
        if source is None or not self._movable(namespace, key):
            return None
        if in_memory(matches[source.name]) <= matches.get(instance, NOTHING).tokens:
            return None
        _, _, extra_key, salt = namespace
        found = self._lend(source.name, instance, key, extra_key, salt)
        self._told("hint" if found is not None else "unheard")
        return found

    # -- both ---------------------------------------------------------------------------------------

    def _best(self, chosen: Instance, fleet: Instances, matches: Matches) -> Instance | None:
        """Whoever holds most of the prompt in memory, of those that the chosen instance can fetch from."""
        holders = [
            known
            for known in fleet
            if known.trusted and known.name in matches and self.possible(known.name, chosen.name)
        ]
        return max(holders, key=lambda known: in_memory(matches[known.name]), default=None)

    def _movable(self, namespace: tuple[str | None, ...], key: bytes) -> bool:
        """Whether a prompt's tokens are known, and its KV means the same everywhere."""
        return namespace[0] == "tokens" and namespace[1] is None and 0 < len(key) <= MOST_KEY_BYTES

    def _lend(
        self, source: str, target: str, key: bytes, extra_key: str | None, salt: str | None
    ) -> Source | None:
        there = self._channels.registration(source)
        if there is None or not self.possible(source, target):
            return None
        loan = uuid.uuid4().hex
        if not self._channels.send(source, Lend(loan, key, extra_key, salt, LEND_S)):
            return None
        return Source(there.endpoints, loan)


def in_memory(match: Match) -> int:
    """Leading tokens that can be lent: those on disk cannot."""
    return match.tokens - match.disk

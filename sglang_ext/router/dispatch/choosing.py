"""From a request to an instance: who holds its prompt, who has room, what the policy says."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from sglang_ext.router.dispatch.costs import RouterCosts
from sglang_ext.router.dispatch.explain import Choice
from sglang_ext.router.dispatch.fetching import Fetching
from sglang_ext.router.dispatch.flight import Flight
from sglang_ext.router.dispatch.hint import Place
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.http.types import RequestRefused
from sglang_ext.router.index.prompt_trees import PromptTrees
from sglang_ext.router.policies import (
    Decision,
    Instance,
    Match,
    Policy,
    PolicyOptions,
    Prompt,
    Reason,
    Role,
    beginners,
)
from sglang_ext.router.policies import Fleet as Instances
from sglang_ext.router.policies.assembly import trusted_matches, with_decode
from sglang_ext.router.policies.base import NOTHING
from sglang_ext.router.policies.questions import matched_tokens, named
from sglang_ext.router.telemetry.estimate import Estimate
from sglang_ext.router.telemetry.fetch_note import NOT_WORTH_IT, UNDER_WAY, FetchNote
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.telemetry.record import Record

RETRY_AFTER_S = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How an instance is chosen, as the router was told."""

    name: str
    """Of the policy."""
    policy: Policy
    options: PolicyOptions
    most_running: int = 0
    """Requests that an instance is given at a time; 0 for no limit."""


class Expectations(Protocol):
    """Where requests are expected (``advising``)."""

    def expected_at(self, flight: Flight, fleet: Instances) -> Place | None:
        """Where a request was announced, if it was, and can still go there; without the instance that
        decodes, if another one has to be chosen."""


class Chooser:
    """Decides, and tells the index the guess that the chosen instance will hold the prompt.

    Args:
        routing: the policy and its thresholds.
        fleet: who can take requests.
        trees: who holds which prefix.
        costs: what computing takes where, and what is on its way.
        metrics: counts decisions.
        fetching: has the chosen instance fetch what another one holds.
        expectations: told of each request before it is decided on; None where no hints are taken.
    """

    def __init__(
        self,
        routing: Routing,
        fleet: Fleet,
        trees: PromptTrees,
        costs: RouterCosts,
        metrics: RouterMetrics,
        fetching: Fetching | None = None,
        expectations: Expectations | None = None,
    ) -> None:
        self._name = routing.name
        self._most_running = routing.most_running
        self._fleet = fleet
        self._trees = trees
        self._costs = costs
        self._metrics = metrics
        self._policy = routing.policy
        self._options = routing.options
        self._expectations = expectations
        self._fetching = fetching

    def capacity(self) -> float:
        """Requests that the fleet may have now; infinite without ``--max-running-per-instance``."""
        if not self._most_running:
            return math.inf
        return self._most_running * len(beginners(self._fleet.usable()))

    def choose(self, flight: Flight, excluded: frozenset[str]) -> tuple[Decision, Choice] | None:
        """An instance for a request, and what was seen; ``None`` when there is none."""
        record = flight.record
        fleet = self._with_room(self._fleet.usable(excluded))
        if not fleet:  # if there are any, a request can begin at one of them: see ``Fleet.usable``
            return None
        matches = self._matches(flight)
        prompt = Prompt(flight.units, flight.admitted.session, record.priority, request_id=record.request_id)
        decision = self._as_expected(flight, prompt, fleet, matches) if not excluded else None
        fetch = self._fetch(flight, decision, fleet, matches)
        if decision is None or (fetch is not None and fetch.end == NOT_WORTH_IT):
            # Not announced, or too late: its KV is elsewhere still, and the announced place would compute it.
            decision = self._policy(prompt, fleet, matches, self._costs, self._options)
            fetch = self._fetch(flight, decision, fleet, matches)
        record.fetch = fetch
        if not self._has_all(flight, decision.instance, matches):
            self._guess(flight, decision.instance)
        record.instance, record.reason = decision.instance, decision.reason.value
        record.matched_tokens = None if record.prompt_tokens is None else decision.matched
        self._metrics.decided(self._name, record.reason)
        record.estimate = self._estimate(flight, decision, matches, fleet)
        return decision, _choice(decision, record, matches, fleet)

    def _as_expected(
        self, flight: Flight, prompt: Prompt, fleet: tuple[Instance, ...], matches: dict[str, Match]
    ) -> Decision | None:
        """Where the request was announced to run, with an instance that decodes where it needs one."""
        place = None if self._expectations is None else self._expectations.expected_at(flight, fleet)
        if place is None:
            return None
        held = matched_tokens(matches, place.instance)
        decision = Decision(place.instance, Reason.ADVISED, held, decode=place.decode)
        return with_decode(
            decision, prompt, fleet, trusted_matches(fleet, matches), self._costs, self._options
        )

    def _fetch(
        self,
        flight: Flight,
        decision: Decision | None,
        fleet: tuple[Instance, ...],
        matches: dict[str, Match],
    ) -> FetchNote | None:
        """What of the prompt the chosen instance has another one send, if anything."""
        if decision is None or self._fetching is None:
            return None
        return self._fetching.consider(flight, decision, fleet, matches)

    async def prepared(self, flight: Flight) -> None:
        """Return when the chosen instance is ready for a request that was chosen for it."""
        if self._fetching is not None and flight.record.fetch is not None:
            await self._fetching.heard(flight.record.fetch)

    def _matches(self, flight: Flight) -> dict[str, Match]:
        """What each instance holds of all prompts together."""
        first, *others = flight.prompts
        matches = self._trees.match(first.namespace, first.key)
        for encoded in others:
            for name, match in self._trees.match(encoded.namespace, encoded.key).items():
                before = matches.get(name, NOTHING)
                below = Counter(before.below)
                below.update(match.below)
                matches[name] = Match(
                    before.tokens + match.tokens, before.own or match.own, dict(sorted(below.items()))
                )
        return matches

    def pinned(
        self, flight: Flight, instance: str, excluded: frozenset[str]
    ) -> tuple[Decision, Choice] | None:
        """The instance that keeps what a request goes on from, if it can take requests.

        Raises:
            RequestRefused: it does half of a request only, and the other half does not know the conversation.
        """
        home = named(self._fleet.usable(excluded), instance)
        if home is None:
            return None
        if home.role is not Role.COLOCATED:
            raise RequestRefused(
                f"{instance} keeps that response or session and is a {home.role.value} server; prefill and "
                "decode servers do not know each other's conversations. Send the whole conversation",
                param="previous_response_id",
                code="previous_response_of_a_pair",
            )
        decision = Decision(instance, Reason.SESSION)
        self._guess(flight, instance)
        record = flight.record
        record.instance, record.reason = instance, decision.reason.value
        self._metrics.decided(self._name, record.reason)
        record.estimate = self._estimate(flight, decision, {}, (home,))
        return decision, _choice(decision, record, {}, (home,))

    def _estimate(
        self, flight: Flight, decision: Decision, matches: dict[str, Match], fleet: tuple[Instance, ...]
    ) -> Estimate:
        """What the request is expected to take where it goes."""
        there, fetch = _there(fleet, decision.instance), flight.record.fetch
        held = matches.get(there.name, NOTHING)
        found = self._costs.estimate(there, flight.units, held)
        if fetch is not None and fetch.end == UNDER_WAY:
            fetched = Match(max(fetch.tokens, held.tokens), below=held.below)
            found = self._costs.estimate(there, flight.units, fetched)
            found.transfer_s += fetch.transfer_s
        if decision.decode is not None:
            lacking = max(0, flight.units - matched_tokens(matches, decision.decode))
            found.transfer_s += self._costs.transfer_s(there, _there(fleet, decision.decode), lacking)
        return found

    def _has_all(self, flight: Flight, instance: str, matches: dict[str, Match]) -> bool:
        """Whether an instance is known to hold every whole block of a single prompt: a guess adds nothing."""
        if len(flight.prompts) != 1:
            return False
        block = self._trees.block_size
        return matched_tokens(matches, instance) >= flight.units // block * block

    def _guess(self, flight: Flight, instance: str) -> None:
        for encoded in flight.prompts:
            self._trees.guess(encoded.namespace, encoded.key, instance)

    def _with_room(self, fleet: tuple[Instance, ...]) -> tuple[Instance, ...]:
        """Leave out who has as many requests as it may, unless that is everybody: having waited for its
        place, a request is not turned away because an instance has gone meanwhile."""
        if not self._most_running:
            return fleet
        roomy = tuple(known for known in fleet if known.in_flight < self._most_running)
        return roomy if beginners(roomy) else fleet


def _there(fleet: tuple[Instance, ...], name: str) -> Instance:
    """An instance that was chosen of the fleet."""
    found = named(fleet, name)
    assert found is not None
    return found


def _choice(
    decision: Decision, record: Record, matches: dict[str, Match], fleet: tuple[Instance, ...]
) -> Choice:
    return Choice(
        decision.instance,
        record.reason or "",
        decision.matched,
        matches,
        decision.scores,
        fleet,
        decision.decode,
        record.fetch,
        record.estimate,
    )


def no_worker(fleet: Fleet) -> RequestRefused:
    """The error when no instance can take a request."""
    return RequestRefused(
        f"no worker can take the request now: {fleet.obstacle() or 'all that could were tried'}",
        status=503,
        kind="server_error",
        code="no_worker",
        headers={"retry-after": str(RETRY_AFTER_S)},
    )

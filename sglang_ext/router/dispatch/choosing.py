"""From a request to an instance: the facts about the fleet and the prompt, a decision, and its records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sglang_ext.router.dispatch.explain import Choice
from sglang_ext.router.dispatch.flight import Flight
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.hints.hint import Place
from sglang_ext.router.http.types import RequestRefused
from sglang_ext.router.index.prompt_trees import PromptTrees
from sglang_ext.router.placing.costs import RouterCosts
from sglang_ext.router.placing.fetching import Fetching, is_movable
from sglang_ext.router.placing.placing import Placement, PlacingOptions, place
from sglang_ext.router.policies import Decision, Match, Prompt, Reason, Role, first_targets
from sglang_ext.router.policies import Fleet as Instances
from sglang_ext.router.policies.base import NOTHING
from sglang_ext.router.policies.fleet_queries import matched_tokens, named
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.tokens.encoded import Encoded

RETRY_AFTER_S = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How requests are routed, from the router's configuration."""

    name: str
    """Of the policy, for metrics."""
    placing: PlacingOptions
    most_running: int = 0
    """Requests that an instance may have at a time; 0 for no limit."""


class Expectations(Protocol):
    """Hints for requests that have not come yet (``advising``)."""

    def expected_at(
        self, scope: str, session: str | None, prompts: Sequence[Encoded], fleet: Instances
    ) -> Place | None:
        """End the hint that announced a request. Returns its place if the instances still can take the
        request, without the decode instance if only that one cannot."""


class Chooser:
    """Chooses an instance for each request, and has the index guess that it will hold the prompt.

    Args:
        routing: the policy and its thresholds.
        costs: of computing and moving, and the queues.
        expectations: the hints.
    """

    def __init__(
        self,
        routing: Routing,
        fleet: Fleet,
        trees: PromptTrees,
        costs: RouterCosts,
        metrics: RouterMetrics,
        fetching: Fetching,
        expectations: Expectations,
    ) -> None:
        self._routing = routing
        self._fleet = fleet
        self._trees = trees
        self._costs = costs
        self._metrics = metrics
        self._fetching = fetching
        self._expectations = expectations

    def capacity(self) -> float:
        """Requests that the fleet may have now; infinite without ``--max-running-per-instance``."""
        if not self._routing.most_running:
            return math.inf
        return self._routing.most_running * len(first_targets(self._fleet.usable()))

    def choose(self, flight: Flight, excluded: frozenset[str]) -> tuple[Placement, Choice] | None:
        """Place a request and start the transfers of its plan; None if no instance can take it."""
        fleet = self._with_room(self._fleet.usable(excluded))
        if not fleet:  # a fleet that is not empty has an instance that can begin: see ``Fleet.usable``
            return None
        matches = self._matches(flight)
        expected = announced = None
        if not excluded:
            scope, session = flight.record.caller.scope, flight.admitted.session
            expected = self._expectations.expected_at(scope, session, flight.prompts, fleet)
        if expected is not None:
            held = matched_tokens(matches, expected.instance)
            announced = Decision(expected.instance, Reason.ADVISED, held, decode=expected.decode)
        placed, choice = self._take(flight, fleet, matches, announced)
        record = flight.record
        record.matched_tokens = None if record.prompt_tokens is None else placed.matched
        return placed, choice

    def pinned(
        self, flight: Flight, instance: str, excluded: frozenset[str]
    ) -> tuple[Placement, Choice] | None:
        """Place a request at the instance that keeps its conversation; None if that cannot take requests.

        Raises:
            RequestRefused: the instance is one of a pair, and the other one does not have the conversation.
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
        return self._take(flight, (home,), {}, Decision(instance, Reason.SESSION))

    def _take(
        self,
        flight: Flight,
        fleet: Instances,
        matches: dict[str, Match],
        announced: Decision | None,
    ) -> tuple[Placement, Choice]:
        """Place a request, carry out its plan, and note the decision in the index, metrics and records."""
        record = flight.record
        first, *others = flight.prompts
        known = first.known
        # Of a prompt with pictures, instances send each other the tokens before the first one.
        beyond = known is not first and any(m.tokens > known.units for m in matches.values())
        prompt = Prompt(
            flight.units,
            flight.admitted.session,
            record.priority,
            request_id=record.request_id,
            movable=not others and not beyond and is_movable(known.namespace),
        )
        placed = place(prompt, fleet, matches, self._costs, self._routing.placing, announced)
        record.fetch = fetch = self._fetching.carry_out(placed.plan, flight.prompts)
        record.estimate = placed.estimate if fetch is not None and fetch.is_under_way else placed.alone
        record.instance, record.reason, record.decided = placed.instance, placed.reason, self._costs.now()
        self._guess(flight, placed.instance, matches)
        self._metrics.decided(self._routing.name, record.reason)
        choice = Choice(
            placed.instance,
            record.reason,
            placed.matched,
            matches,
            placed.scores,
            fleet,
            placed.decode,
            fetch,
            record.estimate,
        )
        return placed, choice

    async def prepared(self, flight: Flight) -> None:
        """Return when the chosen instance is ready for its request."""
        if flight.record.fetch is not None:
            await self._fetching.acknowledged(flight.record.fetch)

    def _matches(self, flight: Flight) -> dict[str, Match]:
        """Each instance's match with all prompts together."""
        first, *others = flight.prompts
        matches = matches_of(self._trees, first)
        for encoded in others:
            for name, match in matches_of(self._trees, encoded).items():
                before = matches.get(name, NOTHING)
                below = Counter(before.below)
                below.update(match.below)
                matches[name] = Match(
                    before.tokens + match.tokens, before.own or match.own, dict(sorted(below.items()))
                )
        return matches

    def _guess(self, flight: Flight, instance: str, matches: dict[str, Match]) -> None:
        """Add the prompts to the index. If the instance holds all whole blocks of a single prompt, there is
        nothing to add."""
        block = self._trees.block_size
        if len(flight.prompts) == 1 and matched_tokens(matches, instance) >= flight.units // block * block:
            return
        for encoded in flight.prompts:
            self._trees.guess(encoded.namespace, encoded.key, instance)
            if encoded.known is not encoded:
                self._trees.guess(encoded.known.namespace, encoded.known.key, instance)

    def _with_room(self, fleet: Instances) -> Instances:
        """The instances with fewer requests than they may have; all, if none of them can begin with a
        request: a request that has waited for its turn is not refused because an instance has left."""
        most = self._routing.most_running
        if not most:
            return fleet
        roomy = tuple(known for known in fleet if known.in_flight < most)
        return roomy if first_targets(roomy) else fleet


def matches_of(trees: PromptTrees, prompt: Encoded) -> dict[str, Match]:
    """Each instance's match with a prompt. Of an instance that reports its cache, text behind the first
    picture counts only where the tokens before it are reported: it may have evicted them."""
    known, found = prompt.known, trees.match(prompt.namespace, prompt.key)
    if known is prompt:
        return found
    before, whole = trees.match(known.namespace, known.key), known.units // trees.block_size
    for name in [name for name in found if not trees.learns_of(known.namespace, name)]:
        reported = before.get(name, NOTHING)
        if reported.tokens < whole * trees.block_size:
            found[name] = reported
    return found


def no_worker(fleet: Fleet) -> RequestRefused:
    """The error when no instance can take a request."""
    return RequestRefused(
        f"no worker can take the request now: {fleet.obstacle() or 'all that could were tried'}",
        status=503,
        kind="server_error",
        code="no_worker",
        headers={"retry-after": str(RETRY_AFTER_S)},
    )

"""A simulated fleet under real policies: the router's own code decides, instances are models of instances.

Real are ``sglang_ext.router.policies`` and ``sglang_ext.router.placing.costs`` with its queues and
corrections, called as the router calls them. Simulated are the instances: an instance computes its waiting
prompts in passes, as SGLang fills them, each as long as its cost model says for the real contents of its
cache, and generates for the others meanwhile; its cache keeps the blocks used last, up to its size. The
router learns of a cache's contents at once (an exact index) or believes whatever it sent there (an
approximate one).
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from benchmarks.policies.workloads import BLOCK_TOKENS, Blocks, SimSession
from sglang_ext.cost_model import Batching, CostModel
from sglang_ext.router.placing.costs import RouterCosts
from sglang_ext.router.policies import Instance, Match, Policy, PolicyOptions, Prompt


class BlockCache:
    """The blocks that were used last, in whole prefixes.

    Args:
        blocks: how many it holds; None for any number.
    """

    def __init__(self, blocks: int | None) -> None:
        self._limit = blocks
        self._held: OrderedDict[int, bool] = OrderedDict()
        """Chain name of a block -> whether something ended with it; used last at the end."""

    def match(self, chain: Blocks) -> tuple[int, bool]:
        """How many leading blocks are held, and whether they end where something that was inserted ended."""
        count = 0
        for name in chain:
            if name not in self._held:
                break
            count += 1
        return count, bool(count) and self._held[chain[count - 1]]

    def insert(self, chain: Blocks) -> None:
        """Hold a prefix, and drop the least recently used blocks, ends of prefixes first."""
        for place in range(len(chain) - 1, -1, -1):
            name = chain[place]
            ended = self._held.get(name, False) or place == len(chain) - 1
            self._held[name] = ended
            self._held.move_to_end(name)
        while self._limit is not None and len(self._held) > self._limit:
            self._held.popitem(last=False)

    def __len__(self) -> int:
        return len(self._held)


class Chains:
    """Chain names: a block with all before it, as one number, so that equal names are equal prefixes."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], int] = {}

    def of(self, blocks: Blocks) -> Blocks:
        """The chain names of a prompt's prefixes, shortest first."""
        found, before = [], -1
        for block in blocks:
            before = self._known.setdefault((before, block), len(self._known))
            found.append(before)
        return tuple(found)


@dataclass
class SimInstance:
    """One simulated instance."""

    name: str
    cache: BlockCache
    believed: BlockCache
    """The router's belief about the contents of its cache."""
    in_flight: int = 0
    queued_tokens: int = 0
    last_picked: int = 0
    generating: int = 0
    line: list[_Flight] = field(default_factory=list)
    """Prompts that wait."""
    computing: bool = False


@dataclass(frozen=True)
class _Flight:
    """One request on its way."""

    session: SimSession
    turn: int
    chain: Blocks
    sent: float
    new_tokens: int
    counted: ExitStack
    first_byte: Callable[[], None]


@dataclass(frozen=True)
class Served:
    """The outcome of one request."""

    session: str
    instance: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


@dataclass
class Outcome:
    """The outcomes of all requests."""

    served: list[Served] = field(default_factory=list)

    def ttft(self, percent: float) -> float:
        """Seconds to the first token that ``percent`` of the requests did not exceed."""
        ordered = sorted(one.ttft_s for one in self.served)
        return ordered[min(len(ordered) - 1, max(0, round(len(ordered) * percent / 100 + 0.5) - 1))]

    @property
    def reused(self) -> float:
        """Share of all prompt tokens that were cached."""
        return sum(o.cached_tokens for o in self.served) / sum(o.prompt_tokens for o in self.served)

    @property
    def spread(self) -> dict[str, int]:
        """Requests by instance."""
        counts: dict[str, int] = {}
        for one in self.served:
            counts[one.instance] = counts.get(one.instance, 0) + 1
        return counts


@dataclass(frozen=True)
class FleetPlan:
    """The fleet to simulate.

    instances: how many. cache_blocks: of each; None for any number. exact: whether the router's index has the
    true contents of the caches. model: the true costs of the instances. believed: the costs that the router
    assumes. batching: how instances fill their passes. told: the batching that they report to the router.
    """

    instances: int = 4
    cache_blocks: int | None = None
    exact: bool = True
    model: CostModel = field(default_factory=CostModel)
    believed: CostModel | None = None
    batching: Batching = field(default_factory=lambda: Batching(chunk=2048))
    told: Batching | None = None


def simulate(
    sessions: Sequence[SimSession],
    policy: Policy,
    plan: FleetPlan,
    options: PolicyOptions | None = None,
) -> Outcome:
    """Run sessions through a policy; the same arguments give the same outcome."""
    return _Run(sessions, policy, plan, options or PolicyOptions(tie_tokens=BLOCK_TOKENS)).outcome()


class _Run:
    def __init__(
        self, sessions: Sequence[SimSession], policy: Policy, plan: FleetPlan, options: PolicyOptions
    ) -> None:
        self._policy = policy
        self._options = options
        self._model = plan.model
        self._exact = plan.exact
        self._batching = plan.batching
        self._now = 0.0
        self._costs = RouterCosts(
            plan.believed or plan.model,
            lambda: self._now,
            can_fetch=lambda source, target: False,
            shares_kv=lambda name: None,
            can_split=lambda source, target: False,
            batching=lambda name: plan.told or plan.batching,
        )
        self._instances: dict[str, SimInstance] = {}
        for number in range(plan.instances):
            cache = BlockCache(plan.cache_blocks)
            believed = cache if plan.exact else BlockCache(None)
            self._instances[f"i{number}"] = SimInstance(f"i{number}", cache, believed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._picks = itertools.count(1)
        self._requests = itertools.count()
        self._chains = Chains()
        self._outcome = Outcome()
        for session in sessions:
            self._at(session.start_s, lambda s=session: self._send(s, 0))  # type: ignore[misc]

    def _at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def outcome(self) -> Outcome:
        while self._events:
            self._now, _, what = heapq.heappop(self._events)
            what()
        return self._outcome

    def _send(self, session: SimSession, turn: int) -> None:
        """A request arrives: the policy chooses, and it joins the line of the chosen instance."""
        request = session.requests[turn]
        chain = self._chains.of(request.blocks)
        tokens = len(chain) * BLOCK_TOKENS
        fleet, matches = self._seen(chain)
        prompt = Prompt(tokens, session.name, request_id=f"r{next(self._requests)}")
        decision = self._policy(prompt, fleet, matches, self._costs, self._options)
        chosen = self._instances[decision.instance]
        chosen.last_picked = next(self._picks)
        chosen.in_flight += 1
        new = max(1, tokens - decision.matched)
        chosen.queued_tokens += new
        if not self._exact:
            chosen.believed.insert(chain)
        counted = ExitStack()
        first_byte = counted.enter_context(self._costs.sending(chosen.name, new, tokens - new, streams=True))
        chosen.line.append(_Flight(session, turn, chain, self._now, new, counted, first_byte))
        if not chosen.computing:
            self._compute(chosen)

    def _compute(self, chosen: SimInstance) -> None:
        """Compute the waiting prompts, as far as one pass takes them: the cache's present contents count, and
        the pass waits for a step of generation that is under way."""
        passes = self._model.passes(self._batching, chosen.generating)
        batch: list[tuple[_Flight, int]] = []
        for flight in chosen.line:
            tokens = len(flight.chain) * BLOCK_TOKENS
            cached = min(chosen.cache.match(flight.chain)[0] * BLOCK_TOKENS, tokens - 1)
            more = passes.adding(tokens - cached, cached)
            if batch and more.closed:
                break
            batch.append((flight, cached))
            passes = more
        del chosen.line[: len(batch)]
        chosen.computing = True
        step = self._model.decode_s(chosen.generating) if chosen.generating else 0.0
        self._at(self._now + step + passes.seconds, lambda: self._computed(chosen, batch))

    def _computed(self, chosen: SimInstance, batch: list[tuple[_Flight, int]]) -> None:
        """A pass is over."""
        for flight, cached in batch:
            self._answer(chosen, flight, cached)
        chosen.computing = False
        if chosen.line:
            self._compute(chosen)

    def _answer(self, chosen: SimInstance, flight: _Flight, cached: int) -> None:
        """Its first token is there."""
        flight.first_byte()
        chosen.queued_tokens -= flight.new_tokens
        chosen.cache.insert(flight.chain)
        chosen.generating += 1
        self._outcome.served.append(
            Served(
                flight.session.name,
                chosen.name,
                self._now - flight.sent,
                len(flight.chain) * BLOCK_TOKENS,
                cached,
            )
        )
        request = flight.session.requests[flight.turn]
        seconds = request.output_tokens * self._model.decode_s(chosen.generating)
        self._at(self._now + seconds, lambda: self._end(chosen, flight))

    def _end(self, chosen: SimInstance, flight: _Flight) -> None:
        """Its answer is complete; the session's next request comes after a while."""
        flight.counted.close()
        chosen.generating -= 1
        chosen.in_flight -= 1
        turn = flight.turn + 1
        if turn < len(flight.session.requests):
            wait = flight.session.requests[turn].think_s
            self._at(self._now + wait, lambda: self._send(flight.session, turn))

    def _seen(self, chain: Blocks) -> tuple[tuple[Instance, ...], dict[str, Match]]:
        """The router's view: the fleet, and the blocks that it assumes each instance holds."""
        fleet, matches = [], {}
        for one in self._instances.values():
            fleet.append(
                Instance(
                    one.name,
                    one.in_flight,
                    one.queued_tokens,
                    len(one.believed) * BLOCK_TOKENS,
                    one.last_picked,
                )
            )
            count, own = one.believed.match(chain)
            if count:
                matches[one.name] = Match(count * BLOCK_TOKENS, own)
        return tuple(fleet), matches

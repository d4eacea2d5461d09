"""Brings the KV of announced requests to the instances where they are expected (Symphony, section 3.2).

``placing`` decides as for requests, over a fleet in which expected requests count as load. The instance's
agent then gets the hint, brings the KV up, and reports its progress.

With prefill-decode disaggregation the place is a pair, and each of the two brings up its own KV. If the
decode instance goes away, another one is chosen and the hint lives on: its KV is at the prefill instance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from sglang_ext.clock import Clock
from sglang_ext.protocol.agent import Advised, FetchSpan, FromAgent, Withdraw
from sglang_ext.router.fleet.channels import AgentChannels
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.hints.advisory_book import HintBook
from sglang_ext.router.hints.hint import BUSY, ENDED, Entry, Place, State
from sglang_ext.router.hints.whereabouts import Whereabouts, whereabouts
from sglang_ext.router.index.prompt_trees import PromptTrees
from sglang_ext.router.placing.costs import RouterCosts
from sglang_ext.router.placing.fetching import Fetching
from sglang_ext.router.placing.placing import Placement, PlacingOptions, fetches_everywhere, place
from sglang_ext.router.policies import Decision, Match, Prompt, Reason, Role, first_targets
from sglang_ext.router.policies import Fleet as Instances
from sglang_ext.router.policies.assembly import assembled, without
from sglang_ext.router.policies.simple import balanced
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.signals import Signal
from sglang_ext.tiers import Tier

AGAIN_S = 5.0
"""A repeated hint is sent again if it expires this much later,"""
SOONER_S = 0.1
"""or if its request comes this much sooner."""
COMPUTING = "computing"
"""A value of ``engine.prefetch.PrefetchEnd``."""


@dataclass(eq=False, slots=True)
class Part:
    """The part of one instance in a hint."""

    where: Whereabouts
    moved: int = 0
    """Tokens that it has brought to HBM."""
    computed: int = 0
    """Tokens that it has computed."""
    sent_earliest: float = 0.0
    """Earliest time of the request in the last message to it."""
    sent_until: float | None = None
    """End of the protection from eviction in the last message to it; None if none was sent."""
    busy: bool = False
    """It was asked to bring KV, and has not reported that it has."""
    spans: tuple[FetchSpan, ...] = ()
    """Spans that it was asked to fetch."""


@dataclass(eq=False, slots=True)
class Preparation:
    """The parts of all instances in a hint."""

    tokens: int
    parts: dict[str, Part] = field(default_factory=dict)
    """Instance -> its part, in the order of ``Place.names``."""

    def part_of(self, name: str | None) -> Part:
        """The part of an instance; of none, a part with all KV nowhere."""
        return self.parts.get(name or "") or Part(Whereabouts(nowhere=self.tokens))


class Preparer:
    """Starts, follows and ends the work of instances for hints.

    Args:
        costs: of computing and moving, and the queues.
        options: how requests are placed.
        metrics: counts tokens that were moved and computed.
        clock: seconds.
        fetching: has instances export KV to each other.
    """

    def __init__(
        self,
        fleet: Fleet,
        trees: PromptTrees,
        costs: RouterCosts,
        options: PlacingOptions,
        links: AgentChannels,
        metrics: RouterMetrics,
        clock: Clock,
        fetching: Fetching,
        book: HintBook,
    ) -> None:
        self._fleet = fleet
        self._trees = trees
        self._costs = costs
        self._options = options
        self._links = links
        self._hint_tokens = metrics.counter("hint_tokens")
        self._hint_computed_tokens = metrics.counter("hint_computed_tokens")
        self._clock = clock
        self._fetching = fetching
        self._book = book
        self._preparations: dict[str, Preparation] = {}
        """Hint id -> the parts of its instances, also for a while after the hint has ended."""
        self.changed: Signal[[Entry]] = Signal()
        """A hint has changed its state, its place, or the progress of an instance."""
        links.messages.subscribe(self.on_message)

    # -- hints --------------------------------------------------------------------------------------

    def add(self, entry: Entry, tokens: int) -> None:
        """Follow a hint of so many tokens from now on."""
        if entry.id not in self._preparations:
            self._preparations[entry.id] = Preparation(tokens)

    def get(self, id: str) -> Preparation | None:
        """The parts of a hint's instances; None for a hint that is not followed."""
        return self._preparations.get(id)

    def forget_dropped(self) -> None:
        """Drop the state of hints that are no longer in the book."""
        for id in [id for id in self._preparations if self._book.find(id) is None]:
            del self._preparations[id]

    def start_all(self, entries: list[Entry]) -> None:
        """Start the hints for which the budget has room."""
        for entry in entries:
            self.start(entry)

    def start(self, entry: Entry) -> None:
        """Place the announced request, and have its KV brought there."""
        hint = entry.hint
        fleet = self._expecting(self._fleet.usable())
        if not first_targets(fleet):
            why = self._fleet.obstacle() or "no instance"
            started = self._book.failed(entry, self._clock.monotonic(), why)
            self.end(entry)
            self.start_all(started)
            return
        matches = self._trees.match(hint.namespace, hint.key)
        # If KV can be moved to any instance before the request comes, load decides (Symphony, section 3.2).
        everywhere = fetches_everywhere(fleet, self._costs)
        crowded = self._crowded(fleet, hint.priority, slack=0 if everywhere else 1)
        policy = without(assembled(balanced) if everywhere else self._options.policy, crowded)
        options = dataclasses.replace(self._options, policy=policy, ahead=True)
        placed = place(_prompt(entry), fleet, matches, self._costs, options)
        self._book.placed(entry, Place(placed.instance, placed.decode))
        self._bring(entry, placed.instance, matches, placed)
        if placed.decode is not None:
            self._bring(entry, placed.decode, matches)
        # If no KV is to be moved, the hint is ready at once.
        self._look(entry)

    def end(self, entry: Entry) -> None:
        """A hint has ended: its instances stop working for it and protecting its KV."""
        preparation = self._preparations.get(entry.id)
        # Protection ends by itself at that time; only work under way has to be stopped.
        over = entry.state is State.EXPIRED and entry.ended_from not in BUSY
        for name, part in {} if preparation is None or over else preparation.parts.items():
            if part.sent_until is not None:
                self._links.send(name, Withdraw(entry.id))
        self._notify(entry)

    def repeat(self, entry: Entry) -> None:
        """Send a repeated hint again if it expires later or its request comes sooner. Its instances protect
        the KV longer, begin sooner, and bring evicted KV up again.
        """
        for name, part in self._preparations[entry.id].parts.items():
            if part.sent_until is None:
                continue
            if entry.expires - part.sent_until >= AGAIN_S or part.sent_earliest - entry.earliest >= SOONER_S:
                self._send(entry, name)

    # -- placing ------------------------------------------------------------------------------------

    def _expecting(self, fleet: Instances) -> Instances:
        """The fleet with expected requests counted as load."""
        return tuple(
            msgspec.structs.replace(known, in_flight=known.in_flight + self._book.promised(known.name))
            for known in fleet
        )

    def _crowded(self, fleet: Instances, priority: int, slack: int) -> frozenset[str]:
        """The instances that expect more requests of at least this priority than others do.

        So sessions of paying users are spread over instances (Symphony, section 3.5), by any policy. slack:
        how many more an instance may expect, where a session's KV cannot follow it.
        """
        if priority <= 0:
            return frozenset()
        decoders = tuple(known for known in fleet if known.role is Role.DECODE)
        crowded: set[str] = set()
        for kind in (first_targets(fleet), decoders):
            expected = {known.name: self._book.promised(known.name, priority) for known in kind}
            most = min(expected.values(), default=0) + slack
            crowded |= {name for name, count in expected.items() if count > most}
        return frozenset(crowded)

    def _decode_elsewhere(self, entry: Entry) -> None:
        """Choose another decode instance, which brings up its own KV."""
        assert entry.instance is not None
        fleet = self._expecting(self._fleet.usable())
        if all(known.name != entry.instance for known in first_targets(fleet)):
            self._book.failed(entry, self._clock.monotonic(), "no instance is left that decodes")
            self.end(entry)
            return
        matches = self._trees.match(entry.hint.namespace, entry.hint.key)
        options = dataclasses.replace(self._options, ahead=True)
        kept = Decision(entry.instance, Reason.ADVISED)
        placed = place(_prompt(entry), fleet, matches, self._costs, options, kept)
        self._book.placed(entry, Place(placed.instance, placed.decode))
        if placed.decode is not None:
            self._bring(entry, placed.decode, matches)
        self._look(entry)

    # -- messages to agents -------------------------------------------------------------------------

    def _bring(
        self, entry: Entry, name: str, matches: Mapping[str, Match], placed: Placement | None = None
    ) -> None:
        """Send a hint to one of its instances, if the instance holds any of the KV or can get it.

        placed: for the instance that the request goes to first. A decode instance gets the rest of the KV
        from the prefill instance, so it only brings up its own.
        """
        preparation = self._preparations[entry.id]
        where = whereabouts(matches, name, preparation.tokens)
        part = preparation.parts[name] = Part(where)
        hint = entry.hint
        names = hint.namespace
        assert isinstance(names, tuple)
        if not hint.is_sendable:
            return
        spans: tuple[FetchSpan, ...] = ()
        if placed is not None and where.elsewhere:
            spans = self._fetching.export(placed.plan, names, hint.key, entry.id)
        missing = where.nowhere + where.elsewhere >= self._trees.block_size
        computes = placed is not None and missing and self._links.computes(name)
        below = any(count for tier, count in where.here.items() if tier is not Tier.HBM)
        to_do = bool(spans) or computes or below
        if to_do or where.here.get(Tier.HBM):
            # KV that is in HBM already is protected from eviction.
            part.busy, part.spans = self._send(entry, name, spans) and to_do, spans

    def _send(self, entry: Entry, name: str, spans: tuple[FetchSpan, ...] = ()) -> bool:
        now = self._clock.monotonic()
        message = entry.hint.as_advise(entry.id, entry.expires - now, spans, entry.earliest - now)
        sent = self._links.send(name, message)
        if sent:
            part = self._preparations[entry.id].parts[name]
            part.sent_until, part.sent_earliest = entry.expires, entry.earliest
        return sent

    def resend_unanswered(self, name: str) -> None:
        """Repeat the unanswered messages to an instance that has a new channel: messages on the former one
        may be lost. An instance answers at once for work that it has done already."""
        now = self._clock.monotonic()
        for id, preparation in self._preparations.items():
            entry, part = self._book.find(id), preparation.parts.get(name)
            if entry is None or part is None:
                continue
            if entry.state not in ENDED:
                if part.busy:
                    self._send(entry, name, part.spans)
            elif part.sent_until is not None and part.sent_until > now:
                self._links.send(name, Withdraw(id))  # else it would protect the KV until then

    # -- messages of agents -------------------------------------------------------------------------

    def on_message(self, name: str, message: FromAgent) -> None:
        """An agent has sent a message."""
        if isinstance(message, Advised):
            self.on_advised(name, message)

    def on_advised(self, name: str, advised: Advised) -> None:
        """An instance reports its part in a hint."""
        entry = self._book.find(advised.id)
        if entry is None or entry.state in ENDED:
            return
        part = self._preparations[entry.id].parts.get(name)
        if part is None:
            return
        if not part.busy:
            # The KV was in HBM when the hint was given, and had to be brought back since.
            self._hint_tokens.inc(max(0, advised.brought - part.moved))
            part.moved = max(part.moved, advised.brought)
            return
        brought, computed = advised.brought - part.moved, advised.computed - part.computed
        part.where = part.where.brought_up(max(0, brought)).computed(max(0, computed))
        part.moved, part.computed = advised.brought, advised.computed
        self._hint_tokens.inc(max(0, brought))
        self._hint_computed_tokens.inc(max(0, computed))
        part.busy = advised.end == COMPUTING
        if part.busy:
            self._book.computing(entry)
        self._look(entry)

    def _look(self, entry: Entry) -> None:
        """After a change: a hint is ready when none of its instances is busy with it."""
        parts = self._preparations[entry.id].parts.values()
        if entry.state in BUSY and not any(part.busy for part in parts):
            self.start_all(self._book.arrived(entry, self._clock.monotonic()))
        self._notify(entry)

    def _notify(self, entry: Entry) -> None:
        if entry.id in self._preparations:
            self.changed(entry)

    # -- instances that go --------------------------------------------------------------------------

    def check_places(self) -> None:
        """End hints, or choose another decode instance for them, whose instance cannot be used any more."""
        usable = {known.name for known in self._fleet.usable()}
        places = [entry.place for entry in self._book.live() if entry.place is not None]
        for name in {name for expected in places for name in expected.names} - usable:
            self.on_lost(name)

    def on_lost(self, name: str) -> None:
        """An instance is gone. Hints for requests that begin there end; hints that only decode there get
        another decode instance, if there is one."""
        for entry in self._book.lost(name, self._clock.monotonic()):
            self.end(entry)
        for entry in self._book.decoding_at(name):
            self._preparations[entry.id].parts.pop(name, None)
            self._decode_elsewhere(entry)
        self.start_all(self._book.startable())

    def __repr__(self) -> str:
        return f"Preparer({len(self._preparations)} hints)"


def _prompt(entry: Entry) -> Prompt:
    """The announced request for policies."""
    hint = entry.hint
    return Prompt(hint.tokens, hint.session, hint.priority, request_id=entry.id)

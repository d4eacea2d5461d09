"""Advisory requests: prefetching KV before a request arrives (Symphony, section 3.2).

A hint names a session, or carries the conversation so far. The router decides at once where the announced
request will run, sends the hint to that instance's agent, which brings the KV up, and remembers the place.
When the request arrives, it goes there, unless the instance has died or filled up; then it is routed like any
other. So no session sticks to an instance, and a wrong, late or repeated hint costs no more than the book
(``advisory_book``) allows.

With prefill-decode disaggregation the place is a pair, and each of the two brings up its own KV. If the
decode instance goes away, another one is chosen and the hint lives on: its KV is at the prefill instance.

``placing.placing`` decides as for requests, over a fleet in which expected requests count as load.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sglang_ext.clock import Clock
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.protocol.agent import Advised, FetchSpan, FromAgent, Withdraw
from sglang_ext.router.api.hints import Advisory
from sglang_ext.router.cluster.agents import AgentChannels
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.hints.advisory_book import REPEATED, Answer, HintBook, Verdict
from sglang_ext.router.hints.hint import BUSY, ENDED, Entry, Hint, Place, State
from sglang_ext.router.hints.remote_hints import Copy, HintsElsewhere
from sglang_ext.router.hints.session_memory import Known, SessionMemory
from sglang_ext.router.hints.whereabouts import Whereabouts, whereabouts
from sglang_ext.router.index.prompt_trees import PromptTrees
from sglang_ext.router.placing.costs import RouterCosts
from sglang_ext.router.placing.fetching import Fetching
from sglang_ext.router.placing.placing import Placement, PlacingOptions, fetches_everywhere, place
from sglang_ext.router.policies import Decision, Match, Prompt, Reason, Role, first_targets
from sglang_ext.router.policies import Fleet as Instances
from sglang_ext.router.policies.assembly import assembled, without
from sglang_ext.router.policies.fleet_queries import decoders_for, named
from sglang_ext.router.policies.prompt_tree import is_ahead
from sglang_ext.router.policies.simple import balanced
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.tenancy.budgets import Budget
from sglang_ext.router.tenancy.tenants import Caller
from sglang_ext.router.tokens.encoded import Encoded
from sglang_ext.router.tokens.tokenizing import TokenizerService
from sglang_ext.signals import Signal
from sglang_ext.tiers import Tier

logger = logging.getLogger("router.advising")

OPEN_END = 4
"""Tokens at the end of an open text that its continuation may change."""
TICK_S = 0.5
"""Interval of checks for expired hints."""
AGAIN_S = 5.0
"""A repeated hint is sent again if it expires this much later,"""
SOONER_S = 0.1
"""or if its request comes this much sooner."""
COMPUTING = "computing"
"""A value of ``engine.prefetch.PrefetchEnd``."""


@dataclass(eq=False, slots=True)
class _End:
    """The part of one instance in a hint."""

    where: Whereabouts
    moved: int = 0
    """Tokens that it has brought to HBM."""
    computed: int = 0
    """Tokens that it has computed."""
    told_earliest: float = 0.0
    """Earliest time of the request in the last message to it."""
    told_until: float | None = None
    """End of the protection from eviction in the last message to it; None if none was sent."""
    busy: bool = False
    """It was asked to bring KV, and has not reported that it has."""
    spans: tuple[FetchSpan, ...] = ()
    """Spans that it was asked to fetch."""


@dataclass(eq=False, slots=True)
class _Kept:
    """The advisor's own state of a hint."""

    tokens: int
    changed: asyncio.Event
    ends: dict[str, _End] = field(default_factory=dict)
    """The parts of its instances, in the order of ``Place.names``."""


class Advisor:
    """Takes hints, and gives requests the places that were prepared for them.

    Args:
        fleet: the instances.
        trees: the index of their prefixes.
        tokenizers: from conversations to keys.
        costs: of computing and moving, and the queues.
        options: how requests are placed.
        links: to the agents.
        sessions: the last prompt of each session.
        metrics: counts hints.
        clock: seconds.
        fetching: has instances export KV to each other.
        book: the live hints of this router.
        elsewhere: the hints of other routers.
        ask: asks other routers for the last prompt of a session.
    """

    def __init__(
        self,
        fleet: Fleet,
        trees: PromptTrees,
        tokenizers: TokenizerService,
        costs: RouterCosts,
        options: PlacingOptions,
        links: AgentChannels,
        sessions: SessionMemory,
        metrics: RouterMetrics,
        clock: Clock,
        fetching: Fetching,
        book: HintBook,
        elsewhere: HintsElsewhere,
        ask: Callable[[str], Awaitable[Known | None]],
    ) -> None:
        self._fleet = fleet
        self._trees = trees
        self._tokenizers = tokenizers
        self._costs = costs
        self._options = options
        self._links = links
        self.sessions = sessions
        self._hints = metrics.counter("hints")
        self._hints_used = metrics.counter("hints_used")
        self._hint_tokens = metrics.counter("hint_tokens")
        self._hint_computed_tokens = metrics.counter("hint_computed_tokens")
        self._clock = clock
        self.elsewhere = elsewhere
        self.book = book
        self._ask = ask
        self.happened: Signal[[Entry]] = Signal()
        """A hint of this router has changed."""
        self.taken: Signal[[Copy]] = Signal()
        """A hint of another router has ended here."""
        self.repeated: Signal[[Copy, float]] = Signal()
        """A hint of another router was given here again; its request comes after so many seconds."""
        self._kept: dict[str, _Kept] = {}
        self._fetching = fetching
        links.messages.subscribe(self.on_message)

    # -- hints ------------------------------------------------------------------------------------

    async def hint(
        self, advisory: Advisory, caller: Caller, priority: int, budget: Budget | None = None
    ) -> Hint | None:
        """The hint of an advisory request; None if it names only a session, and the session is unknown.

        Args:
            budget: pays for tokenizing it.

        Raises:
            RequestRefused: 400: the prompt is too long; 429: the budget is used up.
        """
        session = None if advisory.session is None else caller.scope + advisory.session
        known = None
        if advisory.job is not None:
            model = self._fleet.model
            template = model is not None and model.chat.completion_template is not None
            (encoded,) = await self._tokenizers.encode(
                advisory.job,
                completion_template=template,
                answer_follows=False,
                limits=None if model is None else model.limits,
                budget=budget,
            )
            key = encoded.key
            if advisory.job.prompts[0].text is not None:
                # The last tokens may merge with the text that follows.
                key = key[: -OPEN_END * TOKEN_BYTES]
            known = (encoded.namespace, key)
        elif session is not None:
            known = self.sessions.find(session)
            if known is None:
                known = await self._ask(session)
        if known is None:
            return None
        namespace, key = known
        return Hint(caller.scope, namespace, key, session, priority, advisory.earliest_s, advisory.ttl_s)

    def too_fast(self, caller: Caller) -> Answer | None:
        """The refusal of a hint beyond the caller's rate, before it is encoded; None within the rate."""
        answer = self.book.refused(caller.scope, self._clock.monotonic())
        if answer is not None:
            self._hints.labels(answer.verdict.value).inc()
        return answer

    def offer(self, hint: Hint) -> tuple[Answer, dict[str, Any]]:
        """Take a hint. Returns the book's answer, and the client's as JSON."""
        now = self._clock.monotonic()
        self._expire(now)
        if (copy := self.elsewhere.same(hint)) is not None:
            if copy.is_for(hint):
                return self._repeat(copy, hint, now)
            self._end_elsewhere(copy, State.CANCELLED, "followed by a longer one of the same session")
        answer = self.book.offer(uuid.uuid4().hex, hint, now)
        self._hints.labels(answer.verdict.value).inc()
        if answer.replaced is not None:
            self._ended(answer.replaced)
        entry = answer.entry
        if entry is None:
            return answer, {"verdict": answer.verdict.value, "reason": answer.reason, "id": None}
        if entry.id not in self._kept:
            self._kept[entry.id] = _Kept(hint.tokens, asyncio.Event())
        if answer.start:
            try:
                self._start(entry)
            except BaseException:
                # Its share of the tenant's budget is free for other hints again.
                if entry.state not in ENDED:
                    self.book.cancel(entry, now)
                raise
        elif answer.reason == REPEATED:
            self._tell_again(entry)
        self.happened(entry)
        return answer, {"verdict": answer.verdict.value, "reason": answer.reason, **self.as_json(entry)}

    def _repeat(self, copy: Copy, hint: Hint, now: float) -> tuple[Answer, dict[str, Any]]:
        """A client repeats here a hint that another router has taken."""
        refusal = self.book.too_fast(hint.tenant, now)
        answer = refusal or Answer(Verdict.ACCEPTED, REPEATED)
        self._hints.labels(answer.verdict.value).inc()
        state: dict[str, Any] = {"id": None}
        if refusal is None:
            _, expires = self.book.times(hint, now)
            self.elsewhere.prolong(copy, expires)
            self.repeated(copy, hint.earliest_s)
            state = copy.told(now)
        return answer, {"verdict": answer.verdict.value, "reason": answer.reason, **state}

    def _end_elsewhere(self, copy: Copy, state: State, why: str) -> None:
        self.elsewhere.end(copy, state, why, self._clock.monotonic())
        self.taken(copy)

    def as_json(self, entry: Entry | Copy) -> dict[str, Any]:
        """The state of a hint for its client."""
        if isinstance(entry, Copy):
            return entry.told(self._clock.monotonic())
        kept, place = self._kept[entry.id], entry.place
        now = self._clock.monotonic()
        end = kept.ends.get(entry.instance or "") or _End(Whereabouts(nowhere=kept.tokens))
        decode = None if place is None or place.decode is None else kept.ends.get(place.decode)
        return {
            "id": entry.id,
            "object": "advisory",
            "state": entry.state.value,
            "why": entry.why or None,
            "instance": entry.instance,
            "decode": None if place is None else place.decode,
            "session": entry.hint.session is not None,
            "tokens": end.where.as_json(),
            "moved_tokens": end.moved,
            "decode_moved_tokens": None if decode is None else decode.moved,
            "computed_tokens": end.computed,
            "earliest_in_s": round(max(0.0, entry.earliest - now), 3),
            "expires_in_s": round(max(0.0, entry.expires - now), 3),
            "ready_after_s": None if entry.ready_at is None else round(entry.ready_at - entry.born, 6),
        }

    def find(self, id: str, caller: Caller) -> Entry | Copy | None:
        """A caller's hint by its id, of this router or of another."""
        entry = self.book.get(id, caller.scope)
        if entry is not None and entry.id in self._kept:
            return entry
        return self.elsewhere.get(id, caller.scope)

    def withdraw(self, entry: Entry | Copy, why: str = "taken back") -> None:
        """Cancel a hint for its client."""
        if isinstance(entry, Copy):
            self._end_elsewhere(entry, State.CANCELLED, why)
        elif entry.state not in ENDED:
            started = self.book.cancel(entry, self._clock.monotonic(), why)
            self._ended(entry)
            self._start_all(started)

    def use(self, entry: Entry) -> None:
        """End a hint whose request has arrived, here or at another router."""
        if entry.state not in ENDED:
            self.book.used(entry, self._clock.monotonic())
            self._hints_used.labels("early" if entry.ready_at is None else "ready").inc()
            self._ended(entry)
            self._start_all(self.book.startable())

    def repeat(self, entry: Entry, earliest_s: float, lives_s: float) -> None:
        """Prolong a hint that its client has repeated at another router."""
        if entry.state not in ENDED:
            now = self._clock.monotonic()
            self.book.repeated(entry, now + earliest_s, now + lives_s)
            self._tell_again(entry)
            self.happened(entry)

    async def changed(self, entry: Entry | Copy) -> None:
        """Wait until the hint has changed. Returns at once if it has ended."""
        if isinstance(entry, Copy):
            if entry.ended_at is None:
                await entry.changed.wait()
            return
        kept = self._kept.get(entry.id)
        if kept is not None and entry.state not in ENDED:
            await kept.changed.wait()

    # -- where --------------------------------------------------------------------------------------

    def _start(self, entry: Entry) -> None:
        """Decide where the request will run, and have its KV brought there."""
        hint = entry.hint
        fleet = self._expecting(self._fleet.usable())
        if not first_targets(fleet):
            why = self._fleet.obstacle() or "no instance"
            started = self.book.failed(entry, self._clock.monotonic(), why)
            self._ended(entry)
            self._start_all(started)
            return
        matches = self._trees.match(hint.namespace, hint.key)
        # If KV can be moved to any instance before the request comes, load decides (Symphony, section 3.2).
        everywhere = fetches_everywhere(fleet, self._costs)
        crowded = self._crowded(fleet, hint.priority, slack=0 if everywhere else 1)
        policy = without(assembled(balanced) if everywhere else self._options.policy, crowded)
        options = dataclasses.replace(self._options, policy=policy, ahead=True)
        placed = place(self._prompt(entry), fleet, matches, self._costs, options)
        self.book.placed(entry, Place(placed.instance, placed.decode))
        self._bring(entry, placed.instance, matches, placed)
        if placed.decode is not None:
            self._bring(entry, placed.decode, matches)
        # If no KV is to be moved, the hint is ready at once.
        self._look(entry)

    def _prompt(self, entry: Entry) -> Prompt:
        """The announced request for policies."""
        hint = entry.hint
        return Prompt(hint.tokens, hint.session, hint.priority, request_id=entry.id)

    def _expecting(self, fleet: Instances) -> Instances:
        """The fleet with expected requests counted as load."""
        return tuple(
            msgspec.structs.replace(known, in_flight=known.in_flight + self.book.promised(known.name))
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
            expected = {known.name: self.book.promised(known.name, priority) for known in kind}
            most = min(expected.values(), default=0) + slack
            crowded |= {name for name, count in expected.items() if count > most}
        return frozenset(crowded)

    def _bring(
        self, entry: Entry, name: str, matches: Mapping[str, Match], placed: Placement | None = None
    ) -> None:
        """Send a hint to one of its instances, if the instance holds any of the KV or can get it.

        placed: for the instance that the request goes to first. A decode instance gets the rest of the KV
        from the prefill instance, so it only brings up its own.
        """
        kept = self._kept[entry.id]
        where = whereabouts(matches, name, kept.tokens)
        end = kept.ends[name] = _End(where)
        hint = entry.hint
        names = hint.namespace
        assert isinstance(names, tuple)
        if not hint.can_be_told:
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
            end.busy, end.spans = self._tell(entry, name, spans) and to_do, spans

    def _tell(self, entry: Entry, name: str, spans: tuple[FetchSpan, ...] = ()) -> bool:
        now = self._clock.monotonic()
        told = entry.hint.told(entry.id, entry.expires - now, spans, entry.earliest - now)
        sent = self._links.send(name, told)
        if sent:
            end = self._kept[entry.id].ends[name]
            end.told_until, end.told_earliest = entry.expires, entry.earliest
        return sent

    def _tell_again(self, entry: Entry) -> None:
        """Send a repeated hint again if it expires later or its request comes sooner. Its instances protect
        the KV longer, begin sooner, and bring evicted KV up again.
        """
        for name, end in self._kept[entry.id].ends.items():
            if end.told_until is None:
                continue
            if entry.expires - end.told_until >= AGAIN_S or end.told_earliest - entry.earliest >= SOONER_S:
                self._tell(entry, name)

    def tell_unanswered(self, name: str) -> None:
        """Repeat the unanswered messages to an instance that has a new channel: messages on the former one
        may be lost. An instance answers at once for work that it has done already."""
        now = self._clock.monotonic()
        for id, kept in self._kept.items():
            entry, end = self.book.find(id), kept.ends.get(name)
            if entry is None or end is None:
                continue
            if entry.state not in ENDED:
                if end.busy:
                    self._tell(entry, name, end.spans)
            elif end.told_until is not None and end.told_until > now:
                self._links.send(name, Withdraw(id))  # else it would protect the KV until then

    # -- their end ----------------------------------------------------------------------------------

    def on_message(self, name: str, message: FromAgent) -> None:
        """An agent has sent a message."""
        if isinstance(message, Advised):
            self.on_advised(name, message)

    def on_advised(self, name: str, advised: Advised) -> None:
        """An instance reports its part in a hint."""
        entry = self.book.find(advised.id)
        if entry is None or entry.state in ENDED:
            return
        kept = self._kept[entry.id]
        end = kept.ends.get(name)
        if end is None or not end.busy:
            return
        brought, computed = advised.brought - end.moved, advised.computed - end.computed
        end.where = end.where.brought_up(max(0, brought)).computed(max(0, computed))
        end.moved, end.computed = advised.brought, advised.computed
        self._hint_tokens.inc(max(0, brought))
        self._hint_computed_tokens.inc(max(0, computed))
        end.busy = advised.end == COMPUTING
        if end.busy:
            self.book.computing(entry)
        self._look(entry)

    def _look(self, entry: Entry) -> None:
        """After a change: a hint is ready when none of its instances is busy with it."""
        if entry.state in BUSY and not any(end.busy for end in self._kept[entry.id].ends.values()):
            self._arrived(entry)
        else:
            self._changed(entry)

    def on_lost(self, name: str) -> None:
        """An instance is gone. Hints for requests that begin there end; hints that only decode there get
        another decode instance, if there is one."""
        for entry in self.book.lost(name, self._clock.monotonic()):
            self._ended(entry)
        for entry in self.book.decoding_at(name):
            self._kept[entry.id].ends.pop(name, None)
            self._decode_elsewhere(entry)
        self._start_all(self.book.startable())

    def _decode_elsewhere(self, entry: Entry) -> None:
        """Choose another decode instance, which brings up its own KV."""
        assert entry.instance is not None
        fleet = self._expecting(self._fleet.usable())
        if all(known.name != entry.instance for known in first_targets(fleet)):
            self.book.failed(entry, self._clock.monotonic(), "no instance is left that decodes")
            self._ended(entry)
            return
        matches = self._trees.match(entry.hint.namespace, entry.hint.key)
        options = dataclasses.replace(self._options, ahead=True)
        kept = Decision(entry.instance, Reason.ADVISED)
        placed = place(self._prompt(entry), fleet, matches, self._costs, options, kept)
        self.book.placed(entry, Place(placed.instance, placed.decode))
        if placed.decode is not None:
            self._bring(entry, placed.decode, matches)
        self._look(entry)

    def _arrived(self, entry: Entry) -> None:
        self._start_all(self.book.arrived(entry, self._clock.monotonic()))
        self._changed(entry)

    def _start_all(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._start(entry)

    def _ended(self, entry: Entry) -> None:
        """A hint has ended: its instances stop working for it and protecting its KV."""
        kept = self._kept.get(entry.id)
        # Protection ends by itself at that time; only work under way has to be stopped.
        over = entry.state is State.EXPIRED and entry.ended_from not in BUSY
        for name, end in {} if kept is None or over else kept.ends.items():
            if end.told_until is not None:
                self._links.send(name, Withdraw(entry.id))
        self._changed(entry)

    def _changed(self, entry: Entry) -> None:
        kept = self._kept.get(entry.id)
        if kept is not None:
            kept.changed.set()
            kept.changed = asyncio.Event()
            self.happened(entry)

    # -- requests -----------------------------------------------------------------------------------

    def expected_at(
        self, scope: str, session: str | None, prompts: Sequence[Encoded], fleet: Instances
    ) -> Place | None:
        """End the hint that announced a request. Returns its place if the instances still can take the
        request, without the decode instance if only that one cannot."""
        if not (len(self.book) or len(self.elsewhere)) or len(prompts) != 1:
            return None
        (prompt,) = prompts
        self._expire(self._clock.monotonic())
        place = self._claimed(scope, prompt.namespace, prompt.key, session)
        if place is None or not self._can_take(place.instance, first_targets(fleet)):
            return None
        prefill = named(fleet, place.instance)
        decoders = () if prefill is None else tuple(decoders_for(fleet, prefill))
        decode = place.decode if place.decode and self._can_take(place.decode, decoders) else None
        return Place(place.instance, decode)

    def _claimed(
        self, scope: str, namespace: tuple[str | None, ...], key: bytes, session: str | None
    ) -> Place | None:
        """End the hint for a request, of this router or of another, and return its place."""
        entry = self.book.expected(scope, namespace, key, session)
        copy = self.elsewhere.expected(scope, namespace, key, session)
        if copy is not None:
            theirs = (session is not None and copy.said.session == session, copy.said.tokens)
            hint = None if entry is None else entry.hint
            if hint is None or theirs > (session is not None and hint.session == session, hint.tokens):
                self._end_elsewhere(copy, State.USED, "its request has come")
                return copy.place
        if entry is None:
            return None
        self.use(entry)
        return entry.place

    def _can_take(self, name: str, fleet: Instances) -> bool:
        """Whether an instance is in a fleet of its kind, and not too far ahead of it in load."""
        least = min((known.in_flight for known in fleet), default=0)
        return any(
            known.name == name and not is_ahead(known, least, self._options.thresholds) for known in fleet
        )

    # -- time ---------------------------------------------------------------------------------------

    def tick(self) -> None:
        """End hints that have expired or lost their instance, and drop the state of hints no longer in the
        book."""
        usable = {known.name for known in self._fleet.usable()}
        places = [entry.place for entry in self.book.live() if entry.place is not None]
        for name in {name for expected in places for name in expected.names} - usable:
            self.on_lost(name)
        self._expire(self._clock.monotonic())
        self._start_all(self.book.startable())
        for id in [id for id in self._kept if self.book.find(id) is None]:
            del self._kept[id]

    def _expire(self, now: float) -> None:
        self.elsewhere.expire(now)
        for entry in self.book.expire(now):
            self._hints_used.labels("never").inc()
            self._ended(entry)

    async def round(self) -> float:
        """Tick; returns the pause until the next."""
        self.tick()
        return TICK_S

    def check(self) -> None:
        """Verify every invariant.

        Raises:
            InternalError: names the first that does not hold.
        """
        self.book.check()
        self.elsewhere.check()

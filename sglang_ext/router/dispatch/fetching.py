"""Having an instance fetch KV that others hold (MemServe, section 5.3, equation 2), or compute for it.

``policies.spans`` says which span of the prompt comes from whom. Each holder's agent is told to export what
it has of it, in DRAM or on disk, the other's to fetch all spans; all at once, just before the request or with
the hint. Somebody else who has most of the last span is told as well, and read from where that does not come.
What comes of it is between them: a fetch that fails is computed.

With ``--sequence-parallel``, where nothing is to be fetched, another instance may be told to compute the
beginning of a long prompt meanwhile (``policies.splitting``), and the chosen one to fetch that layer by
layer.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.protocol import agent as agent_messages
from sglang_ext.protocol.agent import Expecting, Export, Fetched, FetchSpan, FromAgent, Source
from sglang_ext.router.cluster.agents import AgentChannels
from sglang_ext.router.dispatch.costs import RouterCosts, Sending
from sglang_ext.router.dispatch.flight import Flight
from sglang_ext.router.policies import Decision, Instance, beginners
from sglang_ext.router.policies import Fleet as Instances
from sglang_ext.router.policies.base import NOTHING, Fetch, Matches
from sglang_ext.router.policies.questions import load_of, named
from sglang_ext.router.policies.spans import Plan, Span, best_plan, given_plan
from sglang_ext.router.policies.splitting import SplitTerms, best_split
from sglang_ext.router.telemetry.fetch_note import (
    COMPUTED,
    NOT_WORTH_IT,
    UNDER_WAY,
    UNHEARD,
    FetchNote,
    SpanNote,
)
from sglang_ext.router.telemetry.observability import RouterMetrics

LEAST_WAIT_S: Final = 0.25
"""A scheduler takes its time until it exports: it does between two passes. So a request may wait so much
longer than computing would take,"""
MOST_BUSY_S: Final = 1.0
"""and for what the holder has to compute first, as a pass may be as long as that, up to this,"""
MOST_WAIT_S: Final = 10.0
"""and never longer than this."""
EXPORT_S: Final = 30.0
MOST_SPLIT_S: Final = 60.0
"""A request waits at most so long for an instance that computes its beginning,"""
PATIENCE: Final = 2.0
"""and so many times as long as that is expected to take, where the instance's costs were measured."""
MOST_KEY_BYTES: Final = 1 << 19
"""Longer prompts do not fit into a message to an agent."""
MOST_NOTES: Final = 10_000
"""Fetches of which nothing was heard yet."""
AS_BUSY: Final = 1
"""Requests in flight by which instances that have any may differ and yet be as busy as each other."""
IN_VAIN: Final = frozenset({"late", "gone", "stale"})
"""Ends of fetches that took time and brought nothing."""


class Fetching:
    """See the module's docstring.

    Args:
        channels: to the agents.
        costs: what computing and moving take.
        metrics: counts what was asked for, and what became of that.
        split: when two instances compute one prompt; None for never.
        block_size: tokens of a block.
        new_id: draws the name of a fetch. That of its request is its client's choice, and may come twice.
    """

    def __init__(
        self,
        channels: AgentChannels,
        costs: RouterCosts,
        metrics: RouterMetrics,
        *,
        split: SplitTerms | None = None,
        block_size: int = 16,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self._channels = channels
        self._costs = costs
        self._terms = split
        self._block_size = block_size
        self._new_id = new_id
        self._fetches = metrics.counter(
            "fetches",
            "Prompts whose KV an instance was told to fetch from another, for a request or a hint; unheard: "
            "one of them could not be told; not-worth-it: computing is expected to take less time; split: "
            "the other one computes the beginning meanwhile",
            "why",
        )
        self._ends = metrics.counter("fetches_ended", "What became of them, as instances say", "how")
        self._spans = metrics.counter(
            "fetched_spans", "Spans of prompts that were read from another instance, by how that ended", "how"
        )
        self._transfers = metrics.transfers
        self._fetched_tokens = metrics.counter("fetched_tokens", "Tokens whose KV came from another instance")
        self._notes: OrderedDict[tuple[bool, str], FetchNote] = OrderedDict()
        """(Of a hint, id) -> a fetch that has not ended, as far as is known; the oldest are forgotten."""
        self._helping: dict[FetchNote, Sending] = {}
        """Notes by which another instance computes: it is busy until they end."""
        self.least_wait_s = LEAST_WAIT_S
        channels.messages.subscribe(self.on_message)

    def everywhere(self, fleet: Instances) -> bool:
        """Whether any instance of a fleet can fetch from any other."""
        return len(fleet) > 1 and all(
            self._channels.can_fetch(fleet[0].name, other.name) for other in fleet if other is not fleet[0]
        )

    # -- for a request ------------------------------------------------------------------------------

    def consider(
        self, flight: Flight, decision: Decision, fleet: Instances, matches: Matches
    ) -> FetchNote | None:
        """Have the chosen instance, which may decode elsewhere, fetch what is sooner fetched than computed;
        ``None`` when nobody else holds more of the prompt than it does."""
        if decision.fetch:
            return self.begin(flight, decision.fetch, decision, fleet, matches)
        chosen = named(fleet, decision.instance)
        if chosen is None:
            return None
        holders = self._holders(chosen, fleet, matches)
        plan = best_plan(flight.units, chosen, holders, matches, self._costs) if holders else None
        if plan is not None and plan.worth_it:
            return self._tell(flight, self._note(plan), fleet)
        if (split := self._split(flight, decision, chosen, fleet, matches)) is not None:
            return split
        if plan is None:
            return None
        note = self._note(plan)
        note.end = NOT_WORTH_IT
        self._fetches.labels(NOT_WORTH_IT).inc()
        return note

    def begin(
        self, flight: Flight, fetches: Sequence[Fetch], decision: Decision, fleet: Instances, matches: Matches
    ) -> FetchNote | None:
        """Tell all. ``None`` where the prompt's KV cannot be moved, or the instance holds it."""
        chosen = named(fleet, decision.instance)
        if chosen is None:
            return None
        plan = given_plan(flight.units, chosen, fleet, fetches, matches, self._costs)
        return None if plan is None else self._tell(flight, self._note(plan), fleet)

    def _split(
        self, flight: Flight, decision: Decision, chosen: Instance, fleet: Instances, matches: Matches
    ) -> FetchNote | None:
        """Have another instance compute the prompt's beginning, where that is worth it."""
        if self._terms is None or decision.decode is not None:
            return None
        helpers = [known for known in fleet if self._channels.can_split(known.name, chosen.name)]
        split = best_split(
            flight.units,
            chosen,
            helpers,
            matches,
            self._costs,
            self._costs.chunk,
            self._terms,
            block=self._block_size,
        )
        if split is None:
            return None
        held = min(matches.get(chosen.name, NOTHING).in_memory, split.tokens)
        rest_s = self._costs.exec_s(chosen, flight.units - split.tokens, split.tokens)
        spans = [
            SpanNote(split.source, COMPUTED, held, split.tokens, split.first_s),
            SpanNote(None, None, split.tokens, flight.units, rest_s),
        ]
        if held:
            spans.insert(0, SpanNote(chosen.name, None, 0, held, 0.0))
        ahead_s = max(0.0, split.seconds - rest_s)
        saved_s = split.alone_s - split.seconds
        calibrated = self._costs.of(chosen.name).calibrated
        note = FetchNote(chosen.name, spans, ahead_s, saved_s, calibrated)
        # Costs that nobody measured are a guess, and giving up too soon wastes what the helper has computed.
        patience_s = PATIENCE * split.first_s if calibrated else MOST_SPLIT_S
        wait_s = min(MOST_SPLIT_S, self.least_wait_s + patience_s)
        told = self._tell(flight, note, fleet, wait_s)
        if told is not None and told.end == UNDER_WAY:
            new = split.tokens - split.known
            sending = self._costs.sending(split.source, new, split.known, streams=False)
            sending.__enter__()
            self._helping[told] = sending
        return told

    def _tell(
        self, flight: Flight, note: FetchNote, fleet: Instances, split_s: float | None = None
    ) -> FetchNote | None:
        """split_s: how long the request waits for another instance to compute."""
        if len(flight.prompts) != 1:
            return None
        (prompt,) = flight.prompts
        if not movable(prompt.namespace, prompt.key[: note.tokens * TOKEN_BYTES]):
            return None
        _, _, extra_key, salt = prompt.namespace
        if spans := self._lend_all(note, prompt.key, extra_key, salt, split_s):
            holders = (named(fleet, span.source or "") for span in note.asked)
            busy_s = max(
                (self._costs.queue_s(holder) for holder in holders if holder is not None), default=0.0
            )
            wait_s = min(MOST_WAIT_S, self.least_wait_s + note.saved_s + min(MOST_BUSY_S, busy_s))
            if split_s is not None:
                wait_s = split_s
            id = self._new_id()
            key = prompt.key[: max(span.tokens for span in spans) * TOKEN_BYTES]
            message = agent_messages.Fetch(id, key, spans, extra_key, salt, wait_s)
            if self._channels.send(note.target, message):
                self._fetches.labels("fetch" if split_s is None else "split").inc()
                self._keep(ahead=False, id=id, note=note)
                return note
        note.end = UNHEARD
        self._fetches.labels(UNHEARD).inc()
        return note

    def _note(self, plan: Plan) -> FetchNote:
        """What is expected of a plan."""
        transfer_s = sum(span.seconds for span in plan.read)
        saved_s = max(0.0, plan.alone_s - (plan.seconds - transfer_s))
        return FetchNote(
            plan.instance,
            [_span_note(each) for each in plan.spans],
            transfer_s,
            saved_s,
            self._costs.of(plan.instance).calibrated,
            spare=None if plan.spare is None else _span_note(plan.spare),
        )

    async def heard(self, note: FetchNote) -> None:
        """Return when the instance that fetches knows of it. A request that came there before that would not
        wait for its KV; so it waits here, for a round trip, and not long where the agent does not answer."""
        if note.end == UNDER_WAY and not note.heard.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(note.heard.wait(), self.least_wait_s)

    # -- for a hint ---------------------------------------------------------------------------------

    def balanced(self, fleet: Instances, matches: Matches) -> str:
        """Where a request that is expected runs best when its KV can be anywhere by then: where nothing is
        going on, else where least is. Among busy ones, one request more is nothing that lasts until it comes:
        of these it is where most of its KV is, as every move costs both ends time."""
        beginning = beginners(fleet)
        least = min(known.in_flight for known in beginning)
        as_busy = least + AS_BUSY if least else 0

        def rank(known: Instance) -> tuple[object, ...]:
            held = matches.get(known.name, NOTHING).tokens
            return (max(as_busy, known.in_flight), -held, load_of(known))

        return min(beginning, key=rank).name

    def spans_for(
        self,
        namespace: tuple[str | None, ...],
        key: bytes,
        instance: str,
        fleet: Instances,
        matches: Matches,
        id: str = "",
    ) -> tuple[FetchSpan, ...]:
        """Have others export to an instance what they hold of a prompt and it does not. id: of the hint."""
        chosen = named(fleet, instance)
        if chosen is None or not movable(namespace, key):
            return ()
        holders, tokens = self._holders(chosen, fleet, matches), len(key) // TOKEN_BYTES
        plan = best_plan(tokens, chosen, holders, matches, self._costs, whole=True)
        if plan is None:
            return ()
        note = self._note(plan)
        _, _, extra_key, salt = namespace
        spans = self._lend_all(note, key, extra_key, salt)
        self._fetches.labels("hint" if spans else UNHEARD).inc()
        if spans:
            self._keep(ahead=True, id=id, note=note)
        return spans

    # -- what becomes of it -------------------------------------------------------------------------

    def on_message(self, name: str, message: FromAgent) -> None:
        """What an agent says."""
        match message:
            case Expecting():
                self._on_expecting(name, message)
            case Fetched():
                self._on_fetched(name, message)

    def _on_expecting(self, name: str, message: Expecting) -> None:
        """The request of a fetch may come."""
        note = self._notes.get((False, message.id))
        if note is not None and note.target == name:
            note.heard.set()

    def _on_fetched(self, name: str, message: Fetched) -> None:
        """A fetch has ended."""
        note = self._notes.get((message.ahead, message.id))
        if note is None or note.target != name:
            return
        note.heard.set()
        del self._notes[message.ahead, message.id]
        self._helped(note)
        note.end = message.end
        self._ends.labels(message.end).inc()
        for span, ended in zip(note.asked, message.spans, strict=False):
            span.end, span.moved, span.took_s = ended.end, ended.tokens, ended.seconds
            self._spans.labels(ended.end).inc()
            self._fetched_tokens.inc(ended.tokens)
            if ended.tokens and span.source is not None:
                self._transfers.labels(span.source, name, "fetch").inc(ended.tokens)
            lost = span.stop - span.start if ended.end in IN_VAIN else 0
            moved = ended.tokens if ended.end == "done" else lost
            if moved and span.source is not None and span.tier != COMPUTED:
                # What took longer than expected did so in both parts alike, as far as can be told.
                loading = span.loading_s / span.expected_s if span.expected_s else 0.0
                self._costs.observe_transfer(span.source, name, moved, ended.seconds * (1 - loading))
                if loading:
                    share = moved / (span.stop - span.start)
                    self._costs.observe_load(span.source, span.loading_s * share, ended.seconds * loading)

    def forget(self, name: str) -> None:
        """An instance was started anew, or is gone: nothing more is heard of what it was told."""
        for key, note in list(self._notes.items()):
            if note.target == name:
                note.end = "gone"
                note.heard.set()
                self._helped(note)
                del self._notes[key]

    @property
    def under_way(self) -> int:
        """Fetches that were told and of whose end nothing was heard."""
        return len(self._notes)

    def _keep(self, *, ahead: bool, id: str, note: FetchNote) -> None:
        if (former := self._notes.pop((ahead, id), None)) is not None:
            self._helped(former)
        self._notes[ahead, id] = note
        while len(self._notes) > MOST_NOTES:
            self._helped(self._notes.popitem(last=False)[1])

    def _helped(self, note: FetchNote) -> None:
        """An instance computes for it no more."""
        if (sending := self._helping.pop(note, None)) is not None:
            sending.__exit__()

    # -- both ---------------------------------------------------------------------------------------

    def _holders(self, chosen: Instance, fleet: Instances, matches: Matches) -> list[Instance]:
        """Who has more of the prompt than the chosen instance has in memory, and can export it to that."""
        held = matches.get(chosen.name, NOTHING).in_memory
        more = {name for name, match in matches.items() if match.tokens > held}
        if not more:
            return []
        return [
            known
            for known in fleet
            if known.name in more and known.trusted and self._channels.can_fetch(known.name, chosen.name)
        ]

    def _lend_all(
        self,
        note: FetchNote,
        key: bytes,
        extra_key: str | None,
        salt: str | None,
        split_s: float | None = None,
    ) -> tuple[FetchSpan, ...]:
        """Tell the holders of the spans that are to be read, up to the first that cannot be told. split_s:
        how long they have to compute them."""
        lent: list[FetchSpan] = []
        for span in note.asked:
            source = self._lend(
                span.source or "", note.target, key[: span.stop * TOKEN_BYTES], extra_key, salt, split_s
            )
            if source is None:
                span.end = UNHEARD
                break
            lent.append(FetchSpan(source, span.stop, split_s is not None))
        return tuple(lent)

    def _lend(
        self,
        source: str,
        target: str,
        key: bytes,
        extra_key: str | None,
        salt: str | None,
        split_s: float | None = None,
    ) -> Source | None:
        there = self._channels.registration(source)
        if there is None or not self._channels.can_fetch(source, target):
            return None
        export = uuid.uuid4().hex
        seconds = EXPORT_S if split_s is None else split_s
        message = Export(export, key, extra_key, salt, seconds, compute=split_s is not None)
        if not self._channels.send(source, message):
            return None
        return Source(there.endpoints, export)


def movable(namespace: tuple[str | None, ...], key: bytes) -> bool:
    """Whether a prompt's tokens are known, and its KV means the same everywhere."""
    return namespace[0] == "tokens" and namespace[1] is None and 0 < len(key) <= MOST_KEY_BYTES


def _span_note(span: Span) -> SpanNote:
    tier = None if span.tier is None else span.tier.name
    return SpanNote(span.source, tier, span.start, span.end, span.seconds, span.loading_s)

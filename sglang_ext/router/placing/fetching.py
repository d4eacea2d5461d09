"""Carries out plans: instances read each other's KV, or compute for each other (MemServe, section 5.3).

``placing`` decides which span of a prompt an instance reads from which other one. Here each source's agent is
sent an `Export` for its spans, and the target's agent a `Fetch` of all spans, both just before the request or
with its hint. The holder of a spare exports as well; the target reads from it if the last span fails. The
agents do the rest by themselves, and the target computes every span whose fetch fails.

In the plan of a split (``policies.splitting``), the source computes its span meanwhile, and the target
fetches it layer by layer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from sglang_ext.ids import NewId, random_id
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.protocol import agent as agent_messages
from sglang_ext.protocol.agent import Expecting, Export, Fetched, FetchSpan, FromAgent, Source
from sglang_ext.router.fleet.channels import AgentChannels
from sglang_ext.router.placing.costs import RouterCosts, Sending
from sglang_ext.router.policies.plan import Plan, Span
from sglang_ext.router.telemetry.fetch_note import (
    COMPUTED,
    NOT_WORTH_IT,
    UNSENT,
    FetchNote,
    SpanNote,
)
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.tokens.encoded import Encoded

LEAST_WAIT_S: Final = 0.25
"""A holder's scheduler exports between two passes. So a request waits this much longer than computing would
take,"""
MOST_BUSY_S: Final = 1.0
"""plus the holder's queue, up to this (a pass may take as long),"""
MOST_WAIT_S: Final = 10.0
"""and never longer than this."""
EXPORT_S: Final = 30.0
"""Lifetime of an export."""
MOST_SPLIT_S: Final = 60.0
"""A request waits at most this long for an instance that computes its beginning,"""
PATIENCE: Final = 2.0
"""and at most this many times the expected time, if the instance's costs were measured."""
MOST_KEY_BYTES: Final = 1 << 19
"""Longer prompts do not fit into a message to an agent."""
MOST_NOTES: Final = 10_000
"""Fetches under way that are remembered."""
FAILED_ENDS: Final = frozenset({"late", "gone", "stale"})
"""Ends of fetches that took time and brought no KV."""


class Fetching:
    """See the module's docstring.

    Args:
        costs: learns from the fetches that have ended.
        metrics: counts fetches by reason and by end.
        new_id: names fetches and exports. A request's own id is its client's choice and may come twice.
    """

    def __init__(
        self,
        channels: AgentChannels,
        costs: RouterCosts,
        metrics: RouterMetrics,
        *,
        new_id: NewId = random_id,
    ) -> None:
        self._channels = channels
        self._costs = costs
        self._new_id = new_id
        self._fetches = metrics.counter("fetches")
        self._ends = metrics.counter("fetches_ended")
        self._spans = metrics.counter("fetched_spans")
        self._transfers = metrics.transfers
        self._fetched_tokens = metrics.counter("fetched_tokens")
        self._notes: OrderedDict[tuple[bool, str], FetchNote] = OrderedDict()
        """(Whether it is for a hint, id) -> a fetch whose end was not reported; the oldest are dropped."""
        self._helping: dict[FetchNote, Sending] = {}
        """Fetches of splits. Their sources count as busy until they end."""
        self.least_wait_s = LEAST_WAIT_S
        channels.messages.subscribe(self.on_message)

    # -- for a request ------------------------------------------------------------------------------

    def carry_out(self, plan: Plan | None, prompts: Sequence[Encoded]) -> FetchNote | None:
        """Send the messages of a request's plan, if it is worth it. Returns a record of it; None if there is
        no plan, or the prompt's KV cannot be moved."""
        if plan is None:
            return None
        note = self._note(plan)
        if not plan.worth_it:
            note.end = NOT_WORTH_IT
            self._fetches.labels(NOT_WORTH_IT).inc()
            return note
        if len(prompts) != 1:
            return None
        prompt = prompts[0].known
        if note.tokens > prompt.units or not movable(
            prompt.namespace, prompt.key[: note.tokens * TOKEN_BYTES]
        ):
            return None
        if self._send(plan, note, prompt):
            self._fetches.labels("fetch" if plan.split is None else "split").inc()
        else:
            note.end = UNSENT
            self._fetches.labels(UNSENT).inc()
        return note

    def _send(self, plan: Plan, note: FetchNote, prompt: Encoded) -> bool:
        """Send a plan to the agents of its sources and of its target; whether the target's got it."""
        _, _, extra_key, salt = prompt.namespace
        split, split_s = plan.split, None
        if split is None:
            wait_s = min(MOST_WAIT_S, self.least_wait_s + plan.saved_s + min(MOST_BUSY_S, plan.busy_s))
        else:
            # Default costs are a guess, and giving up too soon wastes the helper's work.
            patience_s = PATIENCE * split.first_s if note.calibrated else MOST_SPLIT_S
            wait_s = split_s = min(MOST_SPLIT_S, self.least_wait_s + patience_s)
        spans = self._export_all(note, prompt.key, extra_key, salt, split_s)
        if not spans:
            return False
        id = self._new_id()
        key = self._beginning(note.target, prompt.key, max(span.tokens for span in spans), split_s)
        message = agent_messages.Fetch(id, key, spans, extra_key, salt, wait_s)
        if not self._channels.send(note.target, message):
            return False
        self._keep(ahead=False, id=id, note=note)
        if split is not None:
            computed = split.tokens - split.known
            sending = self._costs.sending(split.source, computed, split.known, streams=False)
            sending.__enter__()
            self._helping[note] = sending
        return True

    def _note(self, plan: Plan) -> FetchNote:
        return FetchNote(
            plan.instance,
            [_span_note(each) for each in plan.spans],
            plan.transfer_s,
            plan.saved_s,
            self._costs.model.calibrated,
            spare=None if plan.spare is None else _span_note(plan.spare),
        )

    async def acknowledged(self, note: FetchNote) -> None:
        """Return when the target has acknowledged a fetch. A request that arrived there earlier would not
        wait for its KV, so it waits here: for a round trip, at most ``least_wait_s``."""
        if note.is_under_way and not note.acknowledged.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(note.acknowledged.wait(), self.least_wait_s)

    # -- for a hint ---------------------------------------------------------------------------------

    def export(
        self, plan: Plan | None, namespace: tuple[str | None, ...], key: bytes, id: str
    ) -> tuple[FetchSpan, ...]:
        """Have the sources of a plan export their spans. Returns the spans for the target's hint; empty if
        there are none, or the prompt's KV cannot be moved.

        Args:
            id: of the hint.
        """
        if plan is None or not movable(namespace, key):
            return ()
        note = self._note(plan)
        _, _, extra_key, salt = namespace
        spans = self._export_all(note, key, extra_key, salt, None)
        self._fetches.labels("hint" if spans else UNSENT).inc()
        if spans:
            self._keep(ahead=True, id=id, note=note)
        return spans

    # -- when it ends -------------------------------------------------------------------------------

    def on_message(self, name: str, message: FromAgent) -> None:
        """An agent has sent a message."""
        match message:
            case Expecting():
                self._on_expecting(name, message)
            case Fetched():
                self._on_fetched(name, message)

    def _on_expecting(self, name: str, message: Expecting) -> None:
        """The target has acknowledged a fetch: its request may be sent."""
        note = self._notes.get((False, message.id))
        if note is not None and note.target == name:
            note.acknowledged.set()

    def _on_fetched(self, name: str, message: Fetched) -> None:
        """A fetch has ended."""
        note = self._notes.get((message.ahead, message.id))
        if note is None or note.target != name:
            return
        note.acknowledged.set()
        del self._notes[message.ahead, message.id]
        self._release_helper(note)
        note.end = message.end
        self._ends.labels(message.end).inc()
        for span, ended in zip(note.asked, message.spans, strict=False):
            span.end, span.moved, span.took_s = ended.end, ended.tokens, ended.seconds
            self._spans.labels(ended.end).inc()
            self._fetched_tokens.inc(ended.tokens)
            if ended.tokens and span.source is not None:
                self._transfers.labels(span.source, name, "fetch").inc(ended.tokens)
            lost = span.stop - span.start if ended.end in FAILED_ENDS else 0
            moved = ended.tokens if ended.end == "done" else lost
            if moved and span.source is not None and span.tier != COMPUTED:
                # Loading and moving are not timed apart: both get the same share of the difference.
                loading = span.loading_s / span.expected_s if span.expected_s else 0.0
                self._costs.observe_transfer(span.source, name, moved, ended.seconds * (1 - loading))
                if loading:
                    share = moved / (span.stop - span.start)
                    self._costs.observe_load(span.source, span.loading_s * share, ended.seconds * loading)

    def forget(self, name: str) -> None:
        """An instance was started anew, or is gone: it will report no fetch's end any more."""
        for key, note in list(self._notes.items()):
            if note.target == name:
                note.end = "gone"
                note.acknowledged.set()
                self._release_helper(note)
                del self._notes[key]

    @property
    def under_way(self) -> int:
        """Fetches that were sent and whose end was not reported."""
        return len(self._notes)

    def _keep(self, *, ahead: bool, id: str, note: FetchNote) -> None:
        if (former := self._notes.pop((ahead, id), None)) is not None:
            self._release_helper(former)
        self._notes[ahead, id] = note
        while len(self._notes) > MOST_NOTES:
            self._release_helper(self._notes.popitem(last=False)[1])

    def _release_helper(self, note: FetchNote) -> None:
        """The source of a split has ended its part."""
        if (sending := self._helping.pop(note, None)) is not None:
            sending.__exit__()

    # -- both ---------------------------------------------------------------------------------------

    def _export_all(
        self,
        note: FetchNote,
        key: bytes,
        extra_key: str | None,
        salt: str | None,
        split_s: float | None,
    ) -> tuple[FetchSpan, ...]:
        """Have the sources export their spans, up to the first whose agent cannot be reached.

        Args:
            split_s: time in which the source has to compute its span; None if it holds it already.
        """
        exported: list[FetchSpan] = []
        for span in note.asked:
            beginning = self._beginning(span.source or "", key, span.stop, split_s)
            source = self._export(span.source or "", note.target, beginning, extra_key, salt, split_s)
            if source is None:
                span.end = UNSENT
                break
            exported.append(FetchSpan(source, span.stop, split_s is not None))
        return tuple(exported)

    def _beginning(self, name: str, key: bytes, tokens: int, split_s: float | None) -> bytes:
        """The first tokens of a prompt, for an instance, and up to a block less one token more. The index has
        whole blocks; a model with states may have one behind them, other models ignore part of a block."""
        there = self._channels.registration(name)
        more = 0 if there is None or split_s is not None else there.block_size - 1
        return key[: (tokens + more) * TOKEN_BYTES]

    def _export(
        self,
        source: str,
        target: str,
        key: bytes,
        extra_key: str | None,
        salt: str | None,
        split_s: float | None,
    ) -> Source | None:
        there = self._channels.registration(source)
        if there is None or not self._channels.can_fetch(source, target):
            return None
        export = self._new_id()
        seconds = EXPORT_S if split_s is None else split_s
        message = Export(export, key, extra_key, salt, seconds, compute=split_s is not None)
        if not self._channels.send(source, message):
            return None
        return Source(there.endpoints, export)


def is_movable(namespace: tuple[str | None, ...]) -> bool:
    """Whether instances can send each other a prompt's KV: its tokens are known, and it uses no adapter."""
    return namespace[0] == "tokens" and namespace[1] is None


def movable(namespace: tuple[str | None, ...], key: bytes) -> bool:
    """The same for a prompt whose key is sent to an agent: the key fits into a message, too."""
    return is_movable(namespace) and 0 < len(key) <= MOST_KEY_BYTES


def _span_note(span: Span) -> SpanNote:
    tier = None
    if span.tier is not None:
        tier = span.tier.name
    elif span.source is not None:
        tier = COMPUTED
    return SpanNote(span.source, tier, span.start, span.end, span.seconds, span.loading_s)

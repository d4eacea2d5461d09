"""Recording the facts for a replay (``--record``): the request log and the reports of instances, as lines.

The request log ends a request here; all that its record and its choices say is copied, and the thread of
``RecordFile`` hashes its prompt. See ``protocol.recording`` for the lines.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

from sglang_ext.clock import Clock
from sglang_ext.protocol.agent import Beat, Events, Load, SnapshotEnd
from sglang_ext.protocol.recording import (
    AnyLine,
    Applied,
    Blocks,
    Choice,
    Fill,
    Gone,
    Head,
    HintLine,
    Limits,
    Loaded,
    Member,
    Namer,
    Request,
    Writer,
)
from sglang_ext.router.dispatch import explain
from sglang_ext.router.dispatch.explain import LoggedRequest
from sglang_ext.router.hints.advisory_book import Answer
from sglang_ext.router.hints.hint import Hint
from sglang_ext.router.placing.fetching import FAILED_ENDS
from sglang_ext.router.telemetry.fetch_note import DONE, NEEDLESS, FetchNote
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.telemetry.record import Record
from sglang_ext.router.telemetry.record_file import RecordFile
from sglang_ext.router.tenancy.tenants import KeyEntry
from sglang_ext.tiers import all_tiers

TOKENS = "tokens"


class Recorder:
    """Makes lines of what happens; nothing that it does can fail a request.

    Args:
        file: not started yet.
        head: makes the first line of a file, from the time and the id of the key.
        role_of: the role of an instance, by name.
        kind_of: the kind of its KV, by name; None where it cannot be fetched.
        chunk_of: tokens of a prompt that it computes in one pass, by name.
        beat_of: the last heartbeat of an instance, by name.
        changing: the parts of the head that can change, as they are now.
    """

    def __init__(
        self,
        file: RecordFile,
        head: Callable[[float, str], Head],
        clock: Clock,
        metrics: RouterMetrics,
        *,
        role_of: Callable[[str], str],
        kind_of: Callable[[str], Hashable],
        chunk_of: Callable[[str], int],
        beat_of: Callable[[str], Beat | None],
        changing: Callable[[], tuple[object, ...]],
    ) -> None:
        self.file = file
        self._changing, self._head = changing, changing()
        self._clock = clock
        self._role_of, self._kind_of, self._chunk_of = role_of, kind_of, chunk_of
        self._beat_of = beat_of
        self._zero = clock.wall() - clock.monotonic()
        self._members: dict[str, tuple[Hashable, ...]] = {}
        """Instance -> the facts of its last line that can change."""
        self._lines: dict[str, Member] = {}
        self._loads: dict[str, Load] = {}
        file.start(lambda: (head(self.at(clock.monotonic()), file.key_id), *tuple(self._lines.values())))
        recorded = metrics.gauge("recorded_lines")

        def refresh() -> None:
            recorded.labels("written").set(file.lines)
            recorded.labels("dropped").set(file.dropped)

        metrics.refreshing.subscribe(refresh)

    def at(self, moment: float) -> float:
        """Seconds since the epoch of a moment by the monotonic clock."""
        return round(self._zero + moment, 6)

    def on_ended(self, logged: LoggedRequest, now: float) -> None:
        """A request has ended."""
        for choice in logged.choices:
            self._see(choice.instance)
            if choice.decode:
                self._see(choice.decode)
        record, whole = logged.record, logged.whole
        arrived, choices = self.at(record.started), [_choice(each) for each in logged.choices]
        size = len(whole) + sum(len(prompt.key) for prompt in logged.prompts)
        tiers, stages = dict(record.tiers), dict(record.timings())
        ended_s, fetch_s = now - record.started, _fetch_s(record.fetch)

        def lines(namer: Namer, writer: Writer) -> Iterator[AnyLine]:
            yield Request(
                arrived,
                id=namer.word(record.request_id),
                path=record.path,
                status=record.status,
                prompts=tuple(_prompts(logged, whole, namer, writer)),
                tenant=namer.word(record.caller.tenant or ""),
                session=namer.word(logged.session or ""),
                priority=record.priority,
                stream=record.stream,
                max_new_tokens=logged.max_new_tokens,
                completion_tokens=record.completion_tokens,
                prompt_tokens=record.prompt_tokens,
                choices=tuple(choices),
                instance=record.instance or "",
                prefill_instance=record.prefill_instance or "",
                cached=record.cached_tokens,
                tiers=tiers,
                queued_s=record.queued_s,
                routed_s=_until_routed(record),
                decided_s=None if record.decided is None else record.decided - record.started,
                sent_s=None if record.sent is None else record.sent - record.started,
                first_byte_s=None if record.first_byte is None else record.first_byte - record.started,
                ended_s=ended_s,
                stages=stages,
                fetch_s=fetch_s,
            )

        self.file.put(lines, size)

    def on_hint(self, hint: Hint, answer: Answer) -> None:
        """A hint was offered."""
        at = self.at(self._clock.monotonic())
        instance = "" if answer.entry is None else answer.entry.instance or ""

        def lines(namer: Namer, writer: Writer) -> Iterator[AnyLine]:
            space = namer.word(repr(hint.namespace))
            yield HintLine(
                at,
                tenant=namer.word(hint.tenant),
                session=namer.word(hint.session or ""),
                prompt=writer.blocks(space, hint.tokens, namer.names(space, hint.key)),
                lead_s=hint.earliest_s,
                ttl_s=hint.ttl_s,
                verdict=answer.verdict.value,
                instance=instance,
            )

        self.file.put(lines, len(hint.key))

    def on_load(self, name: str, load: Load) -> None:
        """A load report was applied. Repeated values are left out."""
        self._see(name)
        if self._loads.get(name) != load:
            self._loads[name] = load
            moment = self.at(self._clock.monotonic())
            self._put(Loaded(moment, name, load.running, load.queued, load.queued_tokens))

    def on_applied(self, name: str, message: Events | SnapshotEnd) -> None:
        """Placement events were applied."""
        at = self.at(self._clock.monotonic())
        if isinstance(message, Events):
            age_s = message.age_ms / 1000
            self._put(Applied(at, name, len(message.events), message.first, age_s=age_s))
        else:
            self._put(Applied(at, name, 0, message.seq, snapshot=True))

    def on_gone(self, name: str) -> None:
        """An instance restarted, or has left."""
        self._loads.pop(name, None)
        self._lines.pop(name, None)
        if self._members.pop(name, None) is not None:
            self._put(Gone(self.at(self._clock.monotonic()), name))

    def _see(self, name: str) -> None:
        """Write the line of an instance if it has changed, and the head if it has: costs may be those of the
        first instance that comes, and a key file may be read again."""
        if (head := self._changing()) != self._head:
            self._head = head
            self.file.begin_again()
        role, beat = self._role_of(name), self._beat_of(name)
        fills = () if beat is None else tuple((fill.level, fill.size) for fill in beat.fills)
        kind, chunk = self._kind_of(name), self._chunk_of(name)
        if self._members.get(name) == (role, fills, kind, chunk):
            return
        self._members[name] = (role, fills, kind, chunk)
        tiers: Mapping[str, Fill] = {}
        if beat is not None:
            by_level = {fill.level: fill for fill in beat.fills}
            tiers = {
                tier.name: Fill(by_level[tier.level].used, by_level[tier.level].size)
                for tier in all_tiers()
                if tier.level in by_level
            }
        kv = "" if kind is None else self.file.word(repr(kind))
        at = self.at(self._clock.monotonic())
        self._lines[name] = line = Member(at, name, role, tiers, kv, chunk)
        self._put(line)

    def _put(self, line: AnyLine) -> None:
        self.file.put(lambda _namer, _writer: (line,))

    def __repr__(self) -> str:
        return f"Recorder({self.file})"


def recorded_limits(entries: Iterable[KeyEntry], word: Callable[[str], str]) -> dict[str, Limits]:
    """The limits of tenants that have any.

    Args:
        entries: the keys; of those of one tenant, the limits are added, and a key without one has no end.
        word: hashes a tenant's name.
    """
    keys: dict[str, list[KeyEntry]] = {}
    for entry in entries:
        keys.setdefault(entry.tenant, []).append(entry)
    found = {}
    for tenant, own in keys.items():
        limits = Limits(
            max(entry.priority for entry in own),
            _sum([entry.requests_per_second for entry in own]),
            int(_sum([entry.burst for entry in own])),
            int(_sum([entry.concurrent for entry in own])),
            int(_sum([entry.tokens_per_minute for entry in own])),
        )
        if limits != Limits():
            found[word(tenant)] = limits
    return found


def _sum(limits: Sequence[float | None]) -> float:
    known = [limit for limit in limits if limit is not None]
    return sum(known) if len(known) == len(limits) else 0


def _prompts(logged: LoggedRequest, whole: bytes, namer: Namer, writer: Writer) -> Iterator[Blocks]:
    for prompt in logged.prompts:
        space = namer.word(repr(prompt.namespace))
        key, before = prompt.key, 0
        if len(logged.prompts) == 1 and len(whole) > len(key) and whole.startswith(key):
            before, key = len(key) // 4 // namer.block_size, whole
        names = namer.names(space, key)
        answer = len(names) - before if key is whole else 0
        yield writer.blocks(space, prompt.units, names, answer, exact=prompt.namespace[0] == TOKENS)


def _fetch_s(note: FetchNote | None) -> float | None:
    """See ``Request.fetch_s``. None where nothing was read for another reason than its time."""
    spans = [] if note is None else [span for span in note.asked if span.took_s is not None]
    if not spans:
        return None
    # One after the other. A spare is read only if the span before it fails.
    seconds = sum(span.took_s or 0.0 for span in spans)
    ends = [span.end for span in spans if span.end != NEEDLESS]
    if ends and ends[-1] == DONE:
        return seconds
    return -seconds if any(end in FAILED_ENDS for end in ends) else None


def _until_routed(record: Record) -> float:
    return sum(record.stages.values()) + record.queued_s


def _choice(choice: explain.Choice) -> Choice:
    fetched: dict[str, int] = {}
    if choice.fetch is not None:
        for span in choice.fetch.read:
            fetched[span.source or ""] = fetched.get(span.source or "", 0) + span.stop - span.start
    return Choice(
        choice.instance,
        choice.reason,
        choice.matched,
        choice.decode or "",
        {name: match.tokens for name, match in choice.holders.items()},
        fetched,
        None if choice.estimate is None else choice.estimate.ttft_s,
    )

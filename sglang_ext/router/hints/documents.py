"""Documents: named prefixes whose KV is retained at instances (MemServe, table 2).

A client registers a document; requests of the same tenant name it, and the router puts its content in front
of their prompts (``api/documents``). From there on such a request is any other: it goes where the index finds
its tokens. To retain the KV, the router sends the document to each chosen instance like an announced session
(``advising``), and repeats the message while the document lives. So the KV is brought up again after
pressure or after a restart (from disk), and instances that compute ahead compute it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from sglang_ext.clock import Clock
from sglang_ext.ids import NewId, random_id
from sglang_ext.protocol.agent import FetchSpan, Withdraw
from sglang_ext.router.api.dialect import Dialect
from sglang_ext.router.api.documents import (
    DOCUMENT_IDS,
    MAX_COMPOSED_BYTES,
    Document,
    take_names,
    too_long_together,
    with_documents,
)
from sglang_ext.router.api.hints import parse_advisory
from sglang_ext.router.api.validation import Json
from sglang_ext.router.fleet.channels import AgentChannels
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.hints.document_book import (
    LEASE_S,
    RENEW_S,
    RETRY_S,
    DocumentBook,
    DocumentEntry,
    Lease,
    places,
)
from sglang_ext.router.hints.encoding import HintEncoder
from sglang_ext.router.hints.whereabouts import whereabouts
from sglang_ext.router.http.body import BodyBudget
from sglang_ext.router.http.types import RequestRefused
from sglang_ext.router.index.prompt_trees import PromptTrees
from sglang_ext.router.placing.costs import RouterCosts
from sglang_ext.router.placing.fetching import Fetching
from sglang_ext.router.placing.placing import gathering_plan
from sglang_ext.router.policies import first_targets
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.telemetry.record import DocumentNote, Record
from sglang_ext.router.tenancy.admit import with_salt
from sglang_ext.router.tenancy.budgets import Budget
from sglang_ext.router.tenancy.tenants import Caller
from sglang_ext.router.tokens.encoded import Encoded
from sglang_ext.router.tokens.tokenizing import TokenizerService
from sglang_ext.signals import Signal

logger = logging.getLogger("router.documents")

TICK_S = 0.5
MAX_COMPOSING_BYTES = 512 << 20
"""Of all requests that name documents and are being answered, with the contents of these."""
NOT_TOKENS = "its tokens are not known here, so it cannot be sent to instances"


class Documents:
    """Takes documents, puts them into requests, and has their KV held back.

    Args:
        book: all documents and their budgets.
        tokenizers: show whether tokens are still the model's.
        encoder: makes the hint of a document's content.
        fetching: has instances fetch from each other.
        clock: seconds.
        new_id: names the pins of documents.
    """

    def __init__(
        self,
        book: DocumentBook,
        fleet: Fleet,
        trees: PromptTrees,
        tokenizers: TokenizerService,
        costs: RouterCosts,
        encoder: HintEncoder,
        links: AgentChannels,
        fetching: Fetching,
        metrics: RouterMetrics,
        clock: Clock,
        new_id: NewId = random_id,
    ) -> None:
        self.book = book
        self._new_id = new_id
        self.changed: Signal[[Document]] = Signal()
        """A client has registered or deleted a document here; for the other routers."""
        self._fleet = fleet
        self._trees = trees
        self._tokenizers = tokenizers
        self._costs = costs
        self._hint_encoder = encoder
        self._links = links
        self._fetching = fetching
        self._clock = clock
        self._requests = metrics.counter("document_requests")
        self._cached_tokens = metrics.counter("document_cached_tokens")
        self._composing = BodyBudget(MAX_COMPOSING_BYTES)
        metrics.show_table("documents", book)
        metrics.show_table("deleted-documents", book.deleted)
        size = metrics.gauge("documents")
        pinned = metrics.gauge("document_pinned_blocks")

        def refresh() -> None:
            size.set(len(book))
            pinned.set(book.pinned())

        metrics.refreshing.subscribe(refresh)

    # -- documents --------------------------------------------------------------------------------

    async def encoded(self, document: Document, budget: Budget | None = None) -> DocumentEntry:
        """A document with its tokens, ready for ``take``.

        Args:
            budget: pays for tokenizing it.

        Raises:
            RequestRefused: 400: its content is no prompt of the model; 429: the budget is used up.
        """
        entry = DocumentEntry(document, self._new_pin())
        await self._encode(entry, budget)
        return entry

    def take(self, entry: DocumentEntry) -> None:
        """Take a document, in place of one of the same id.

        Raises:
            RequestRefused: 429: it is beyond a budget.
        """
        why = self.book.obstacle(entry)
        if why is not None:
            raise RequestRefused(
                f"the document is refused: {why}; delete others, or ask for fewer instances",
                status=429,
                kind="rate_limit_error",
                code="document_budget_exceeded",
            )
        entry.document = entry.document.after(self.book.newest(entry.ids))
        self._put(entry)
        self._hold(entry)
        self.changed(entry.document)

    def learn(self, document: Document) -> None:
        """Another router has taken or deleted a document, perhaps long ago. Its tokens are found out soon."""
        known = self.book.newest(document.ids)
        if document.expires <= self._clock.monotonic() or (
            known is not None and known.stamp >= document.stamp
        ):
            return
        if document.is_deleted:
            self._bury(document)
        else:
            entry, former = DocumentEntry(document, self._new_pin()), self.book.find(*document.ids)
            if former is not None and former.document.announced() == document.announced():
                entry.hint, entry.encoded_by = former.hint, former.encoded_by
            self._put(entry)

    def all(self) -> list[Document]:
        """All records of documents that routers share, deletions included."""
        return self.book.documents()

    def _put(self, entry: DocumentEntry) -> None:
        former = self.book.put(entry)
        if former is not None:
            entry.requests = former.requests
            if former.hint is not None and former.hint == entry.hint:
                entry.pin, entry.leases = former.pin, former.leases
                self._withdraw(entry, list(entry.leases)[entry.document.instances :])
                self.book.again_for(entry)
            else:
                self._withdraw(former, list(former.leases))

    def _bury(self, deleted: Document) -> None:
        entry = self.book.bury(deleted)
        if entry is not None:
            self._withdraw(entry, list(entry.leases))

    def find(self, id: str, caller: Caller) -> DocumentEntry:
        """A caller's document.

        Raises:
            RequestRefused: 404: the document is unknown, or another tenant's.
        """
        entry = self.book.find(caller.scope, id)
        if entry is None or entry.document.expires <= self._clock.monotonic():
            raise _unknown(id, "id")
        return entry

    def of(self, caller: Caller) -> list[DocumentEntry]:
        """A caller's documents."""
        self._expire()
        return self.book.of(caller.scope)

    def remove(self, entry: DocumentEntry) -> None:
        """Forget a document, and hold nothing back for it."""
        deleted = entry.document.deleted(self._clock.monotonic(), self._clock.wall())
        self._bury(deleted)
        self.changed(deleted)

    def as_json(self, entry: DocumentEntry) -> Json:
        """A document for its client."""
        document, hint = entry.document, entry.hint
        view: dict[str, Any] = {
            "id": document.id,
            "object": "document",
            "kind": document.kind,
            "tokens": hint.tokens if hint is not None and hint.is_sendable else None,
            "blocks": self.book.cost(entry),
            "expires_in_s": round(max(0.0, document.expires - self._clock.monotonic()), 3),
            "requests": entry.requests,
            "why_not_held_back": entry.why or None,
            "instances": {},
        }
        if hint is not None and entry.leases:
            matches = self._trees.match(hint.namespace, hint.key)
            view["instances"] = {
                name: {"held_back": lease.sent, "tokens": whereabouts(matches, name, hint.tokens).as_json()}
                for name, lease in entry.leases.items()
            }
        return view

    # -- requests -----------------------------------------------------------------------------------

    def compose(self, dialect: Dialect | None, payload: Json, record: Record) -> bytes:
        """The body of the request that one with names of documents means. Its memory is held until ``ended``.

        Args:
            dialect: of the request; None for one without a prompt.

        Raises:
            RequestRefused: 404: there is no such document of the caller's; 400: it does not fit; 413: it is
                too long; 503: there is no memory for it now.
        """
        names, caller, now = take_names(payload), record.caller, self._clock.monotonic()
        found: list[Document] = []
        for index, name in enumerate(names):
            entry = self.book.find(caller.scope, name)
            if entry is None or entry.document.expires <= now:
                raise _unknown(name, f"{DOCUMENT_IDS}[{index}]")
            found.append(entry.document)
        size = sum(document.size_bytes for document in found)
        if size > MAX_COMPOSED_BYTES:
            raise too_long_together(size)
        if names:
            if not self._composing.take(size):
                raise _no_memory()
            record.documents = DocumentNote(names, composed_bytes=size)
        return with_documents(dialect, payload, found)

    def ended(self, record: Record) -> None:
        """A request has ended: release the memory of the documents that it names."""
        if (note := record.documents) is not None:
            self._composing.give(note.composed_bytes)
            note.composed_bytes = 0

    def note(self, record: Record, prompts: Sequence[Encoded]) -> None:
        """The prompt of a request that names documents is known: say where its first document ends in it."""
        note = record.documents
        entry = None if note is None else self.book.find(record.caller.scope, note.ids[0])
        if note is None or entry is None or entry.hint is None or len(prompts) != 1:
            return
        prompt, hint = prompts[0].known, entry.hint
        if (
            prompt.tokens is not None
            and prompt.namespace == hint.namespace
            and prompt.key.startswith(hint.key)
        ):
            note.tokens = hint.tokens

    def used(self, record: Record) -> None:
        """A request that names documents has ended."""
        note = record.documents
        if note is None:
            return
        for name in dict.fromkeys(note.ids):
            entry = self.book.find(record.caller.scope, name)
            if entry is not None:
                entry.requests += 1
        block, cached = self.book.limits.block_size, record.cached_tokens
        whole = note.tokens // block * block
        if cached is None or not whole:
            verdict = "unknown"
        else:
            verdict = "all" if cached >= whole else "some" if cached >= block else "none"
            self._cached_tokens.inc(min(cached, whole))
        self._requests.labels(verdict).inc()
        first = self.book.find(record.caller.scope, note.ids[0])
        if first is not None and verdict in ("some", "none"):
            self.book.again_for(first)  # now there is more to be held back

    # -- holding back -------------------------------------------------------------------------------

    def again(self, instance: str) -> None:
        """An instance was started anew, or is reached again."""
        self.book.again(instance)

    async def _encode(self, entry: DocumentEntry, budget: Budget | None = None) -> None:
        """Find out its tokens, if the model is known.

        Raises:
            RequestRefused: as ``encoded``.
        """
        model = self._fleet.model
        if model is None:
            return
        entry.encoded_by = self._encoder
        document = entry.document
        advisory = parse_advisory(document.announced(), model.limits)
        assert advisory.job is not None
        owner = Caller(salt=document.salt)
        advisory = dataclasses.replace(advisory, job=with_salt(advisory.job, owner))
        entry.hint = await self._hint_encoder.hint(advisory, owner, document.priority, budget)

    @property
    def _encoder(self) -> object:
        return self._tokenizers.tokenizer, self._tokenizers.trust

    def _hold(self, entry: DocumentEntry) -> None:
        """Tell the instances that are to hold a document back, where it is time to."""
        hint, now = entry.hint, self._clock.monotonic()
        if hint is None or not hint.is_sendable or not hint.tokens:
            entry.why = NOT_TOKENS
            self._withdraw(entry, list(entry.leases))
            return
        entry.why = ""
        fleet = self._fleet.usable()
        usable = [known.name for known in first_targets(fleet)]
        stay = [name for name in entry.leases if name in usable]
        if len(stay) == min(entry.document.instances, len(usable)) and all(
            entry.leases[name].due > now for name in stay
        ):
            self._withdraw(entry, [name for name in entry.leases if name not in stay])
            return
        matches = self._trees.match(hint.namespace, hint.key)
        held = {name: match.tokens for name, match in matches.items()}
        pinned = {name: self.book.pinned(name) for name in usable}
        chosen = places(entry.document.instances, tuple(entry.leases), usable, held, pinned)
        self._withdraw(entry, [name for name in entry.leases if name not in chosen])
        ttl_s = min(LEASE_S, entry.document.expires - now)
        for name in chosen:
            lease = entry.leases.setdefault(name, Lease())
            if lease.due > now:
                continue
            spans: tuple[FetchSpan, ...] = ()
            if whereabouts(matches, name, hint.tokens).elsewhere:
                assert isinstance(hint.namespace, tuple)
                plan = gathering_plan(hint.tokens, name, fleet, matches, self._costs)
                spans = self._fetching.export(plan, hint.namespace, hint.key, entry.pin)
            # KV that the index does not have is named, too: the instance may have it on disk, or compute it.
            lease.sent = self._links.send(name, hint.as_advise(entry.pin, ttl_s, spans))
            lease.due = now + (RENEW_S if lease.sent else RETRY_S)

    def _withdraw(self, entry: DocumentEntry, names: Sequence[str]) -> None:
        for name in names:
            if entry.leases.pop(name).sent:
                self._links.send(name, Withdraw(entry.pin))

    # -- time ---------------------------------------------------------------------------------------

    def _expire(self) -> None:
        for entry in self.book.expire(self._clock.monotonic()):
            self._withdraw(entry, list(entry.leases))

    async def tick(self) -> None:
        """Drop expired documents, and renew the leases of the others."""
        self._expire()
        for entry in self.book:
            hint = entry.hint
            if entry.encoded_by != self._encoder:
                try:
                    await self._encode(entry)
                except RequestRefused as refused:
                    entry.hint, entry.why = None, refused.message
                    logger.info("document %s does not fit the model: %s", entry.document.id, refused.message)
                if entry.hint != hint:
                    self._withdraw(entry, list(entry.leases))
            if self.book.find(*entry.ids) is entry:  # it was not deleted meanwhile
                self._hold(entry)

    async def round(self) -> float:
        """Tick; returns the pause until the next."""
        await self.tick()
        return TICK_S

    def _new_pin(self) -> str:
        return f"document-{self._new_id()}"


def _no_memory() -> RequestRefused:
    return RequestRefused(
        f"requests that name documents may take {MAX_COMPOSING_BYTES} bytes together; try again when others "
        "are answered",
        status=503,
        kind="server_error",
        code="bodies_full",
        headers={"retry-after": "1"},
    )


def _unknown(id: str, param: str) -> RequestRefused:
    return RequestRefused(
        f"there is no document {id[:128]!r} here, or it has expired; register it with PUT /v1/documents/ID",
        status=404,
        param=param,
        code="no_such_document",
    )

"""All documents of one router: their owners, budgets, and the instances that retain their KV.

A document (MemServe, table 2: an index by document beside tokens and sessions) counts against two budgets of
blocks, its tenant's and the one of all tenants: its blocks times the instances that retain them. A short one
counts as ``LEAST_BLOCKS``, so that the budgets bound the number of documents. Two more budgets bound the
memory of documents in each router. A document beyond a budget is refused; an accepted one is retained until
it expires. Deleted documents are remembered for minutes, in a table of their own.

At each instance the KV is retained like an announced session's (``engine/tiers/retention.py``), under a lease
that the router renews: the leases of a router that dies run out.

Pure: no I/O and no clock. ``now`` is seconds of a clock that does not go back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sglang_ext.errors import InternalError
from sglang_ext.router.api.documents import Document
from sglang_ext.router.hints.hint import Hint
from sglang_ext.router.tenancy.bounded import ENTRY_BYTES, Bounded, size_of

LEASE_S = 60.0
"""Time for which an instance retains a document after a message."""
RENEW_S = 20.0
"""After which the message is repeated, and the instance brings evicted KV up again."""
RETRY_S = 1.0
"""After which the message to an instance that could not be reached is repeated."""
LEAST_BLOCKS = 32
MOST_DELETED = 1024
MOST_DELETED_IN_ALL = 8192
MAX_DELETED_BYTES = 16 << 20
"""Deleted documents of one tenant, and of all, that are remembered; the oldest are forgotten."""


@dataclass(frozen=True, slots=True)
class DocumentLimits:
    """Limits of documents: blocks and bytes of all tenants, and of one. block_size: tokens per block."""

    blocks: int = 8192
    tenant_blocks: int = 4096
    block_size: int = 16
    bytes: int = 256 << 20
    tenant_bytes: int = 64 << 20


@dataclass(eq=False, slots=True)
class Lease:
    """One instance's lease of a document."""

    due: float = 0.0
    """Time of the next message to the instance."""
    sent: bool = False


@dataclass(eq=False, slots=True)
class DocumentEntry:
    """A document in the book."""

    document: Document
    pin: str
    """Its name at instances."""
    hint: Hint | None = None
    """Its content as a hint; None while its tokens are not known."""
    encoded_by: object = None
    """The tokenizer of the hint, and its trusted parts."""
    why: str = ""
    """Why its KV is not retained, for people."""
    leases: dict[str, Lease] = field(default_factory=dict)
    """By instance."""
    requests: int = 0

    @property
    def ids(self) -> tuple[str, str]:
        """(Scope, id), unique among documents."""
        return self.document.ids


class DocumentBook:
    """See the module's docstring.

    Args:
        limits: in blocks.
    """

    def __init__(self, limits: DocumentLimits) -> None:
        self.limits = limits
        self._entries: dict[tuple[str, str], DocumentEntry] = {}
        self.deleted: Bounded[tuple[str, str], Document] = Bounded(
            MAX_DELETED_BYTES,
            lambda ids, deleted: size_of(*ids),
            max_entries=MOST_DELETED_IN_ALL,
            owner=lambda ids: ids[0],
            owner_entries=MOST_DELETED,
        )
        """Deleted documents: another router may still announce one of them."""

    def cost(self, entry: DocumentEntry) -> int:
        """Blocks that it counts for."""
        return self._blocks(entry) * entry.document.instances

    def _blocks(self, entry: DocumentEntry) -> int:
        tokens = 0 if entry.hint is None else entry.hint.tokens
        return max(LEAST_BLOCKS, -(-tokens // self.limits.block_size))

    @staticmethod
    def memory(entry: DocumentEntry) -> int:
        """Bytes that it counts for: its content, and its tokens."""
        document = entry.document
        tokens = 0 if entry.hint is None else len(entry.hint.key)
        return ENTRY_BYTES + document.size_bytes + size_of(*document.ids, document.extra_key) + tokens

    @property
    def size_bytes(self) -> int:
        """Of all documents."""
        return sum(map(self.memory, self._entries.values()))

    def obstacle(self, entry: DocumentEntry) -> str | None:
        """Why a document cannot be taken; one of the same id goes for it."""
        others = [each for each in self._entries.values() if each.ids != entry.ids]
        own = [each for each in others if each.document.scope == entry.document.scope]
        limits = self.limits
        for what, count, mine, all_ in (
            ("blocks", self.cost, limits.tenant_blocks, limits.blocks),
            ("bytes", self.memory, limits.tenant_bytes, limits.bytes),
        ):
            wanted = count(entry)
            for left, whose in (
                (mine - sum(map(count, own)), "your documents"),
                (all_ - sum(map(count, others)), "documents"),
            ):
                if wanted > left:
                    return f"it takes {wanted} {what}, and the budget of {whose} has {max(0, left)} left"
        return None

    def put(self, entry: DocumentEntry) -> DocumentEntry | None:
        """Take a document in. Returns the one of the same id that it replaces."""
        former = self._entries.pop(entry.ids, None)
        self.deleted.pop(entry.ids)
        self._entries[entry.ids] = entry
        return former

    def bury(self, deleted: Document) -> DocumentEntry | None:
        """A document was deleted. Returns it, if it was here."""
        self.deleted.put(deleted.ids, deleted)
        return self._entries.pop(deleted.ids, None)

    def newest(self, ids: tuple[str, str]) -> Document | None:
        """The newest record of a document, a deletion included."""
        entry = self._entries.get(ids)
        return self.deleted.get(ids) if entry is None else entry.document

    def documents(self) -> list[Document]:
        """All records that routers share, deletions included."""
        return [*(entry.document for entry in self), *self.deleted.values()]

    def find(self, scope: str, id: str) -> DocumentEntry | None:
        """A tenant's document by its id."""
        return self._entries.get((scope, id))

    def of(self, scope: str) -> list[DocumentEntry]:
        """A tenant's documents, in the order of their ids."""
        own = [entry for entry in self._entries.values() if entry.document.scope == scope]
        return sorted(own, key=lambda entry: entry.document.id)

    def remove(self, entry: DocumentEntry) -> None:
        """Forget a document."""
        if self._entries.get(entry.ids) is entry:
            del self._entries[entry.ids]

    def expire(self, now: float) -> list[DocumentEntry]:
        """Drop expired documents, and return them."""
        late = [entry for entry in self if entry.document.expires <= now]
        for entry in late:
            self.remove(entry)
        for ids in [ids for ids, deleted in self.deleted.items() if deleted.expires <= now]:
            self.deleted.pop(ids)
        return late

    def again(self, instance: str) -> None:
        """An instance has restarted, or is reached again: repeat the messages for all its leases."""
        for entry in self:
            if instance in entry.leases:
                entry.leases[instance] = Lease()

    def again_for(self, entry: DocumentEntry) -> None:
        """More of a document's KV may exist now: repeat the messages to its instances."""
        for lease in entry.leases.values():
            lease.due = 0.0

    def pinned(self, instance: str | None = None) -> int:
        """Blocks retained at all instances, or at one of them."""
        return sum(
            self._blocks(entry)
            for entry in self
            for name, lease in entry.leases.items()
            if lease.sent and instance in (None, name)
        )

    def __iter__(self) -> Iterator[DocumentEntry]:
        return iter(list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"DocumentBook({len(self)} documents, {self.pinned()} blocks held back)"

    def check(self) -> None:
        """Verify that everything is where it is looked for.

        Raises:
            InternalError: names the first that is not.
        """
        self.deleted.check()
        pins: set[str] = set()
        for ids, entry in self._entries.items():
            if entry.ids != ids:
                raise InternalError(f"document {entry.ids} stands under {ids}")
            if len(entry.leases) > entry.document.instances:
                raise InternalError(f"document {ids} is held back at {len(entry.leases)} instances")
            if entry.leases and (entry.hint is None or not entry.hint.is_sendable):
                raise InternalError(f"document {ids} is held back, and its tokens are not known")
            if ids in self.deleted:
                raise InternalError(f"document {ids} is there, and deleted")
            if entry.pin in pins:
                raise InternalError(f"two documents are called {entry.pin}")
            pins.add(entry.pin)


def places(
    wanted: int, now: Sequence[str], usable: Sequence[str], held: Mapping[str, int], pinned: Mapping[str, int]
) -> tuple[str, ...]:
    """The instances that are to hold a document back: those that do and can, then those that hold most of it,
    then those that hold back least.

    Args:
        wanted: how many.
        now: those that do.
        usable: those that can.
        held: tokens of the document, by instance.
        pinned: blocks of other documents, by instance.
    """
    stay = [name for name in now if name in usable][:wanted]
    others = [name for name in usable if name not in stay]
    others.sort(key=lambda name: (-held.get(name, 0), pinned.get(name, 0), name))
    return (*stay, *others[: wanted - len(stay)])

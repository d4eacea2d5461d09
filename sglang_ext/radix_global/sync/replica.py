"""A reader's copy of an instance's tree, built from its placement events.

    state    on                                                     goes to
    -------  -----------------------------------------------------  --------------------------------------
    BLANK    SnapshotBegin                                          FILLING
    FILLING  SnapshotEnd, nothing missing                           LIVE
    LIVE     anything that does not follow: a number left out, an   STALE (the index stays but is not
    FILLING  unknown run, a part missing                            trusted); the caller asks for a snapshot
    STALE    SnapshotBegin                                          FILLING
    any      another epoch                                          BLANK, and everything is forgotten

Repeated messages change nothing. A message that comes too early leaves a number out: the copy becomes STALE,
and the next snapshot corrects it.

A copy may evict cold blocks to keep within its memory: it then has less than the instance, never more.
`partial` reports this, and events about evicted blocks are ignored.

The tree is shared by many copies: each has one holder in it, whose address of a node names the run of which
the node is a piece. Pure: one thread, no clock.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Final

from sglang_ext.protocol.agent import (
    Cleared,
    Events,
    Moved,
    NamesRemoved,
    NamesStored,
    Naming,
    PlacementEvent,
    Removed,
    SnapshotBegin,
    SnapshotEnd,
    SnapshotPart,
    Split,
    Stored,
)
from sglang_ext.radix_global.node import Evicted, Node
from sglang_ext.radix_global.placement import Holder
from sglang_ext.radix_global.sync.names import Names
from sglang_ext.radix_global.sync.runs import (
    NAME_BYTES,
    RUN_BYTES,
    Piece,
    Run,
    names_in,
    path_key,
    with_weights,
)
from sglang_ext.radix_global.tree import RadixTree
from sglang_ext.tiers import Tier, tier_at

PAST_EPOCHS: Final = 8
FREED_NAMES: Final = 512
"""Freed with each message: more than one brings, so that they are gone before as many have come."""


class State(enum.StrEnum):
    """How far a copy can be trusted."""

    BLANK = "blank"
    FILLING = "filling"
    LIVE = "live"
    STALE = "stale"


class Outcome(enum.Enum):
    """Result of applying a message."""

    APPLIED = "applied"
    IGNORED = "ignored"
    """It was applied before, or belongs to an epoch or a snapshot that is over."""
    BROKEN = "broken"
    """It does not follow the last one. Ask for a snapshot."""


class _Unknown(Exception):
    """An event refers to a run that is not in this copy."""


class Replica:
    """See the module's docstring.

    Args:
        tree: shared by the copies of all instances of a role.
        instance: its name here.
        serial: numbers for holders.
        abandon: takes over a holder whose placements are obsolete. Without it, they are removed from the tree
            at once, which takes a while for many.
        left: called when a run leaves a tier: its last node, its blocks, the tiers it left, and those it is
            still in.
    """

    def __init__(
        self,
        tree: RadixTree,
        instance: str,
        *,
        serial: Iterator[int] | None = None,
        abandon: Callable[[Holder], None] | None = None,
        left: Callable[[Node, int, int, int], None] | None = None,
    ) -> None:
        self.instance = instance
        self.state = State.BLANK
        self.epoch = b""
        self.next = 0
        """Number of the next event."""
        self.partial = False
        """There is more than this copy has."""
        self.naming: Naming | None = None
        self.named: dict[Tier, Names] = {}
        """Names of the blocks in each tier below memory, of those that have any."""
        self.events = 0
        """Events applied since the start."""
        self._tree = tree
        self._serial = serial or itertools.count()
        self._abandon = abandon
        self._left = left
        self._holder = Holder.of(instance, next(self._serial), Tier.HBM)
        self._runs: dict[int, Run] = {}
        self._past: list[bytes] = []
        self._number = -1
        self._parts = 0
        self._gone: list[Names] = []
        """Obsolete names: each message frees some."""

    @property
    def holder(self) -> Holder:
        """Stands for this copy in the tree."""
        return self._holder

    @property
    def trusted(self) -> bool:
        return self.state is State.LIVE

    @property
    def blocks(self) -> int:
        """Blocks in memory that are known here."""
        return self._tree.blocks_of(self._holder)

    @property
    def names(self) -> int:
        """Blocks below memory that are known here."""
        return sum(map(len, self.named.values()))

    @property
    def size_bytes(self) -> int:
        """Estimated memory beside the tree's."""
        return RUN_BYTES * len(self._runs) + NAME_BYTES * self.names

    # -- messages -------------------------------------------------------------------------------

    def began(self, epoch: bytes, naming: Naming | None) -> None:
        """Record the instance's epoch, from `Welcome`."""
        if epoch != self.epoch:
            self._new_epoch(epoch)
        self.naming = naming

    def apply(self, message: Events | SnapshotBegin | SnapshotPart | SnapshotEnd) -> Outcome:
        """Take one message in."""
        if self._gone and self._gone[-1].take(FREED_NAMES) < FREED_NAMES:
            self._gone.pop()
        if message.epoch != self.epoch:
            if message.epoch in self._past:
                return Outcome.IGNORED
            self._new_epoch(message.epoch)
        if isinstance(message, SnapshotBegin):
            return self._begin(message)
        if self.state not in (State.FILLING, State.LIVE):
            return Outcome.BROKEN
        if isinstance(message, Events):
            return self._events(message)
        if self.state is State.LIVE or message.number != self._number:
            return Outcome.IGNORED
        if isinstance(message, SnapshotPart):
            return self._part(message)
        if message.parts != self._parts or message.seq != self.next:
            return self._broken()
        self.partial = self.partial or message.partial
        self.state = State.LIVE
        return Outcome.APPLIED

    def forget(self) -> None:
        """Forget the index: the instance is gone, or its index is not needed any more."""
        self._new_epoch(b"")

    def lost_touch(self) -> None:
        """The channel to the instance is lost: the index stays but is no longer trusted."""
        if self.state is not State.BLANK:
            self.state = State.STALE

    def _begin(self, message: SnapshotBegin) -> Outcome:
        if message.number <= self._number:
            return Outcome.IGNORED
        self._empty()
        self._number = message.number
        self._parts = 0
        self.next = message.seq
        self.state = State.FILLING
        return Outcome.APPLIED

    def _part(self, message: SnapshotPart) -> Outcome:
        if message.index < self._parts:
            return Outcome.IGNORED
        if message.index > self._parts or message.seq != self.next:
            return self._broken()
        self._parts += 1
        return self._all(message.events)

    def _events(self, message: Events) -> Outcome:
        known = self.next - message.first
        if known < 0:
            return self._broken()
        new = message.events[known:] if known else message.events
        if not new:
            return Outcome.IGNORED
        self.next += len(new)
        return self._all(new)

    def _all(self, events: Sequence[PlacementEvent]) -> Outcome:
        lenient = self.partial or self.state is State.FILLING
        for event in events:
            try:
                self._one(event)
            except _Unknown:
                if not lenient:
                    return self._broken()
        self.events += len(events)
        return Outcome.APPLIED

    def _broken(self) -> Outcome:
        self.state = State.STALE
        return Outcome.BROKEN

    def _new_epoch(self, epoch: bytes) -> None:
        if self.epoch:
            self._past = [*self._past, self.epoch][-PAST_EPOCHS:]
        if epoch in self._past:
            self._past.remove(epoch)
        self.epoch = epoch
        self.state = State.BLANK
        self.next = 0
        self.naming = None
        self._number = -1
        self._empty()

    def _empty(self) -> None:
        self._empty_memory()
        self._forget_names()
        self.partial = False

    def _forget_names(self) -> None:
        self._gone += self.named.values()
        self.named = {}

    def _empty_memory(self) -> None:
        if not self._runs:
            return
        if self._abandon is None:
            self._tree.drop_holder(self._holder)
        else:
            self._abandon(self._holder)
        self._holder = Holder.of(self.instance, next(self._serial), Tier.HBM)
        self._runs = {}

    # -- events ---------------------------------------------------------------------------------

    def _one(self, event: PlacementEvent) -> None:
        if isinstance(event, Moved):  # the most frequent
            run = self._run(event.run)
            gone = run.tiers & ~_at_least_one(event.tiers)
            run.tiers = event.tiers
            if gone and self._left is not None:
                self._left(run.node, run.blocks, gone, run.tiers)
        elif isinstance(event, Stored):
            self._stored(event)
        elif isinstance(event, Removed):
            self._removed(self._run(event.run))
        elif isinstance(event, Split):
            self._split(self._run(event.run), event.upper, event.blocks)
        elif isinstance(event, NamesStored | NamesRemoved):
            self._named(event)
        else:
            self._cleared(event)

    def _run(self, number: int) -> Run:
        run = self._runs.get(number)
        if run is None:
            raise _Unknown
        return run

    def _stored(self, event: Stored) -> None:
        known = self._runs.get(event.run)
        if known is not None:
            known.tiers = _at_least_one(event.tiers)
            return
        blocks, rest = divmod(len(event.tokens), self._tree.block_bytes)
        if rest or not blocks:
            raise _Unknown
        run = Run(event.run, _at_least_one(event.tiers), blocks, self._tree.root)
        piece = Piece(run, blocks)
        if event.parent:
            before = self._run(event.parent)
            if before.cut:
                raise _Unknown
            result = self._tree.extend(before.node, event.tokens, self._holder, piece)
        else:
            tenant = (event.extra_key, event.cache_salt)
            result = self._tree.insert(tenant, event.tokens, self._holder, piece)
        if result.held_blocks:
            # Two runs for the same blocks: the new placements belong to a run that is about to be removed.
            for node in result.added[:1]:
                self._tree.remove(node, self._holder)
            raise _Unknown
        run.node = result.node
        self._runs[event.run] = run

    def _split(self, run: Run, number: int, blocks: int) -> None:
        if number in self._runs:
            return
        if blocks >= run.blocks:
            if not run.cut:
                raise _Unknown
            # Its end was given up here: all that is left is in the first part.
            del self._runs[run.number]
            run.number = number
            run.cut = blocks > run.blocks
            self._runs[number] = run
            return
        rest = run.blocks - blocks
        node = run.node
        while node.blocks <= rest:
            rest -= node.blocks
            assert node.parent is not None
            node = node.parent
            if not rest:
                break
        if rest:
            node = self._tree.split(node, node.blocks - rest)
        upper = Run(number, run.tiers, blocks, node)
        run.blocks -= blocks
        self._runs[number] = upper
        left = blocks
        while left:
            node.placements[self._holder].run = upper
            left -= node.blocks
            assert node.parent is not None
            node = node.parent

    def _removed(self, run: Run) -> None:
        node, left = run.node, run.blocks
        if self._left is not None:
            self._left(node, left, run.tiers, 0)
        while left > node.blocks:
            left -= node.blocks
            assert node.parent is not None
            node = node.parent
        for evicted in self._tree.remove(node, self._holder):
            self._runs.pop(evicted.address.run.number, None)

    def _named(self, event: NamesStored | NamesRemoved) -> None:
        tier = tier_at(event.level)
        if tier is None:
            return
        names = self.named.get(tier)
        if names is None:
            names = self.named[tier] = Names()
        if isinstance(event, NamesStored):
            names.add(names_in(event.names))
        else:
            names.discard(names_in(event.names))
        if not names:
            del self.named[tier]

    def _cleared(self, event: Cleared) -> None:
        self._empty_memory()
        if self.naming is not None:
            self.naming = with_weights(self.naming, event.weights)
            if self.naming is None:
                self._forget_names()

    # -- memory ---------------------------------------------------------------------------------

    def give_up(self, blocks: int) -> list[Evicted]:
        """Evict the least recently matched blocks, ends of prefixes first. Returns the evicted placements."""
        gone = self._tree.evict(self._holder, blocks)
        for evicted in gone:
            run: Run = evicted.address.run
            run.blocks -= evicted.blocks
            if run.blocks:
                assert evicted.node.parent is not None
                run.node = evicted.node.parent
                run.cut = True
            else:
                self._runs.pop(run.number, None)
        self.partial = self.partial or bool(gone)
        return gone

    def give_up_names(self, blocks: int) -> int:
        """Forget names of blocks, any of those of the farthest tier. Returns how many."""
        if not self.named:
            return 0
        tier = max(self.named)
        names = self.named[tier]
        count = names.take(blocks)
        if not names:
            del self.named[tier]
        self.partial = True
        return count

    # -- seeing ---------------------------------------------------------------------------------

    def tiers_of(self, node: Node) -> int:
        """In which tiers the instance has ``node``; 0 when it has it nowhere."""
        piece = node.placements.get(self._holder)
        return 0 if piece is None else int(piece.run.tiers)

    def contents(self) -> dict[tuple[Hashable, bytes], int]:
        """Tiers of every block in memory, by tenant and by all tokens up to its end. For tests; slow."""
        found: dict[tuple[Hashable, bytes], int] = {}
        step = self._tree.block_bytes
        for node in self._tree.nodes():
            if self._holder not in node.placements:
                continue
            prefix = path_key(node)
            before = len(prefix) - len(node.key)
            for end in range(before + step, len(prefix) + step, step):
                found[node.namespace, prefix[:end]] = self.tiers_of(node)
        return found

    def __repr__(self) -> str:
        return (
            f"Replica({self.instance}, {self.state}, next={self.next}, blocks={self.blocks}, "
            f"names={self.names}{', partial' if self.partial else ''})"
        )

    def check(self) -> None:
        """Verify that runs and tree agree.

        Raises:
            AssertionError: names the first run or node that does not.
        """
        blocks: dict[int, int] = {}
        for node in self._tree.nodes():
            piece: Piece | None = node.placements.get(self._holder)
            if piece is None:
                continue
            number = piece.run.number
            if self._runs.get(number) is not piece.run:
                raise AssertionError(f"{node!r} is a piece of run {number}, which is not known")
            if len(piece) != node.blocks:
                raise AssertionError(f"{node!r} has a piece of {len(piece)} blocks")
            blocks[number] = blocks.get(number, 0) + node.blocks
        for number, known in self._runs.items():
            if blocks.get(number) != known.blocks:
                raise AssertionError(f"run {number} has {blocks.get(number)} blocks, not {known.blocks}")
            end: Piece | None = known.node.placements.get(self._holder)
            if end is None or end.run is not known:
                raise AssertionError(f"run {number} does not end where it says")


def _at_least_one(tiers: int) -> int:
    if not tiers:
        raise _Unknown
    return tiers

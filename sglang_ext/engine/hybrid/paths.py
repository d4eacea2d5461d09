"""The blocks in DRAM that need each other: runs of KV as a tree, each with the states and windows of its end.

A *run* is the KV of consecutive blocks of a prefix, and ends where prefixes fork or have a state. It follows
its parent run. The states and windows of its blocks are its *extras*, one piece for each component.

Eviction keeps the blocks that a resume needs:

    a run's KV goes after the runs that follow it, from its end, and after its extras
    a run that no resume can use, because it ends with neither extras nor another run, goes first
    a use of a run is a use of all runs before it

The extras of a run at the end of a path are worth the tokens since the last resume point for their bytes and
the run's, all of which go with them. Those in its middle are worth the same tokens for their own bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from sglang_ext.engine.hybrid.components import FULL, AtSnapshot, Component
from sglang_ext.engine.hybrid.worth import FRESH, WORTHLESS, ByWorth, Level, level_of

Name = bytes
"""Of a prefix that ends where the block ends (`names.page_names`)."""

FORK: Final = 8
"""A prefix is so many times less likely to fork in its middle, where it has not yet, than to go on."""
MOST_EXPECTED: Final = 100_000
"""Blocks whose place is known before they have come."""


@dataclass(eq=False, slots=True)
class Piece:
    """Blocks of one component in a run. names: the last is given up first. run: None while the KV is not
    here."""

    component: Component
    names: list[Name]
    run: Run | None
    used: float = 0.0
    uses: int = 0


@dataclass(eq=False, slots=True)
class Run:
    """See the module's docstring. user: the request that used it last."""

    kv: Piece
    parent: Run | None = None
    children: set[Run] = field(default_factory=set)
    extras: dict[Component, Piece] = field(default_factory=dict)
    user: Hashable = None


class Paths:
    """See the module's docstring.

    Args:
        block_bytes: of one block of each component.
        block_tokens: tokens of a block.
        nbytes: of DRAM.
    """

    def __init__(self, block_bytes: Mapping[Component, int], block_tokens: int, nbytes: int) -> None:
        self._bytes = block_bytes
        self._tokens = block_tokens
        self._others = tuple(component for component in block_bytes if component != FULL)
        self._runs: dict[Name, Run] = {}
        self._extras: dict[Component, dict[Name, Piece]] = {each: {} for each in self._others}
        self._expected: dict[Name, Name] = {}
        """For the first blocks of runs that may come, the block before."""
        self._order: ByWorth[Piece] = ByWorth(nbytes / FRESH)
        self._now = 0.0
        """Bytes that have come in."""

    def __repr__(self) -> str:
        return f"Paths({len(self._runs)} blocks of KV, {len(self._order)} pieces that may go)"

    # -- new blocks -----------------------------------------------------------------------------------

    def entered(self, component: Component, names: Sequence[Name], new: Collection[Name]) -> None:
        """Blocks of a prefix are here. names: in its order, and for `FULL` one after the other."""
        self._now += len(new) * self._bytes[component]
        if component == FULL:
            self._enter_kv(names, new)
        elif new:
            self._enter_extras(component, [name for name in names if name in new])

    def _enter_kv(self, names: Sequence[Name], new: Collection[Name]) -> None:
        before: Name | None = None
        run: Run | None = None
        for name in names:
            if name not in new:
                if run is not None:
                    self._complete(run)
                    if name in self._runs:
                        self._link(self._runs[name], name, run.kv.names[-1])
                run = None
            elif run is None:
                parent = None if before is None else self._ending_at(before)
                run = self._runs[name] = Run(Piece(FULL, [name], None, self._now), parent)
                run.kv.run = run
            else:
                run.kv.names.append(name)
                self._runs[name] = run
            before = name
        if run is not None:
            self._complete(run)

    def _complete(self, run: Run) -> None:
        """A new run is here as a whole: take up its extras, and find the run that it follows."""
        names = run.kv.names
        before = self._expected.pop(names[0], None)
        if run.parent is None and before is not None:
            run.parent = self._ending_at(before)
        if run.parent is not None:
            run.parent.children.add(run)
            self._weigh(run.parent)
        for component in self._others:
            known = self._extras[component]
            here = [name for name in names if name in known]
            if here:
                self._enter_extras(component, here)
        self._weigh(run)

    def _enter_extras(self, component: Component, names: Sequence[Name]) -> None:
        """Extras that are new, or whose KV has come."""
        known = self._extras[component]
        for name in names:
            old = known.pop(name, None)
            if old is not None:
                self._take_out(old, {name})
        at = 0
        while at < len(names):
            run = self._runs.get(names[at])
            if run is not None and isinstance(component.coverage, AtSnapshot):
                run = self._ending_at(names[at])
            end = at + 1
            while end < len(names) and self._runs.get(names[end]) is run is not None:
                end += 1
            self._attach(component, run, names[at:end])
            at = end

    def _attach(self, component: Component, run: Run | None, names: Sequence[Name]) -> None:
        piece = None if run is None else run.extras.get(component)
        if piece is None:
            piece = Piece(component, [], run)
        piece.used = self._now
        if run is None:
            piece.names += names
            self._order.put(piece, WORTHLESS, piece.used)
        else:
            members = {*piece.names, *names}
            piece.names[:] = [name for name in reversed(run.kv.names) if name in members]
            run.extras[component] = piece
            self._weigh(run)
        self._extras[component].update(dict.fromkeys(names, piece))

    def expect(self, before: Name, first: Name) -> None:
        """A block follows another, whether or not they are here yet."""
        run = self._runs.get(first)
        if run is not None:
            self._link(run, first, before)
            return
        self._expected[first] = before
        if len(self._expected) > MOST_EXPECTED:
            del self._expected[next(iter(self._expected))]

    def _link(self, run: Run, first: Name, before: Name) -> None:
        """Have a run follow the block before it, if it begins with a block and follows none."""
        if run.parent is not None or run.kv.names[0] != first:
            return
        parent = self._ending_at(before)
        if parent is not None:
            run.parent = parent
            parent.children.add(run)
            self._weigh(parent)
            self._weigh(run)

    def _ending_at(self, name: Name) -> Run | None:
        """The run that ends with a block, split off from a longer one; None where it is not here."""
        run = self._runs.get(name)
        if run is None or run.kv.names[-1] == name:
            return run
        cut = run.kv.names.index(name) + 1
        head = Run(Piece(FULL, run.kv.names[:cut], None, run.kv.used, run.kv.uses), run.parent, {run})
        head.kv.run, head.user = head, run.user
        if run.parent is not None:
            run.parent.children.remove(run)
            run.parent.children.add(head)
        run.parent = head
        del run.kv.names[:cut]
        self._runs.update(dict.fromkeys(head.kv.names, head))
        own = set(head.kv.names)
        for component, piece in list(run.extras.items()):
            going = [each for each in piece.names if each in own]
            if going:
                self._take_out(piece, own)
                half = Piece(component, going, head, piece.used, piece.uses)
                head.extras[component] = half
                self._extras[component].update(dict.fromkeys(going, half))
        self._weigh(head)
        self._weigh(run)
        return head

    # -- uses of blocks ---------------------------------------------------------------------------------

    def used(self, end: Name, user: Hashable) -> None:
        """A request has found the prefix that ends with a block. Its later calls are the same use."""
        run, behind = self._runs.get(end), 0
        while run is not None:
            self._use(run.kv, run, user)
            for component, piece in run.extras.items():
                needed = component.coverage.blocks(self._tokens)
                if needed is None or behind < needed:
                    self._use(piece, run, user)
            behind += len(run.kv.names)
            run.user = user
            self._weigh(run)
            run = run.parent

    def _use(self, piece: Piece, run: Run, user: Hashable) -> None:
        piece.used = self._now
        piece.uses += user != run.user or user is None

    # -- eviction ------------------------------------------------------------------------------------

    def least(self, may_go: Callable[[Piece], bool]) -> Piece | None:
        """The piece that is worth least among those that may go."""
        return self._order.least(self._now, may_go)

    def left(self, component: Component, names: Sequence[Name]) -> None:
        """Blocks are gone; of KV, the last of their runs."""
        pieces: dict[Piece, set[Name]] = {}
        for name in names:
            piece = self._runs[name].kv if component == FULL else self._extras[component][name]
            pieces.setdefault(piece, set()).add(name)
        for piece, gone in pieces.items():
            run = piece.run
            if component != FULL:
                for name in gone:
                    del self._extras[component][name]
                self._take_out(piece, gone)
                continue
            assert run is not None
            for name in gone:
                del self._runs[name]
            del piece.names[len(piece.names) - len(gone) :]
            for other, extra in list(run.extras.items()):
                without = [name for name in extra.names if name in gone]
                if without:
                    self._take_out(extra, gone)
                    self._attach(other, None, without)
            if piece.names:
                self._weigh(run)
            else:
                self._order.remove(piece)
                self._end(run)

    def _end(self, run: Run) -> None:
        """A run has no KV any more."""
        for child in run.children:
            child.parent = None
        if run.parent is not None:
            run.parent.children.remove(run)
            self._weigh(run.parent)

    def _take_out(self, piece: Piece, gone: Collection[Name]) -> None:
        """Take blocks out of a piece of extras."""
        piece.names[:] = [name for name in piece.names if name not in gone]
        run = piece.run
        if not piece.names:
            self._order.remove(piece)
            if run is not None:
                del run.extras[piece.component]
                if len(run.children) == 1:  # others are weighed when they are used
                    self._weigh(next(iter(run.children)))
        if run is not None:
            self._weigh(run)

    # -- worth ----------------------------------------------------------------------------------------

    def _weigh(self, run: Run) -> None:
        """Enter a run's pieces with their present worth."""
        kv, nbytes = run.kv, 0.0
        last = not run.children
        for piece in run.extras.values():
            nbytes += self._needed(piece, run) * self._bytes[piece.component]
        if last:
            nbytes += len(kv.names) * self._bytes[FULL]
        resumable = self._resumable(run)
        tokens = self._saved_tokens(run) if resumable else 0.0
        if len(run.children) == 1:
            tokens /= FORK  # it goes on, and has not forked
        for piece in run.extras.values():
            level = level_of(tokens, nbytes, piece.uses)
            if len(piece.names) > self._needed(piece, run):
                # The first to go are those before the end, which only a fork would use.
                level = level_of(self._tokens / FORK, self._bytes[piece.component], piece.uses)
            self._order.put(piece, level, piece.used)
        if last and not run.extras:
            self._order.put(kv, level_of(tokens, nbytes, kv.uses), kv.used)
        else:
            self._order.remove(kv)

    def _needed(self, piece: Piece, run: Run) -> int:
        """How many of the run's own blocks of a component a resume at its end needs."""
        needed = piece.component.coverage.blocks(self._tokens)
        return len(run.kv.names) if needed is None else min(needed, len(run.kv.names))

    def _resumable(self, run: Run) -> bool:
        """Whether the run has all of its own blocks that a resume at its end needs."""
        return len(run.extras) == len(self._others) and all(
            len(piece.names) >= self._needed(piece, run) for piece in run.extras.values()
        )

    def _saved_tokens(self, run: Run) -> int:
        """Tokens since the last resume point before the run's end."""
        blocks, at = len(run.kv.names), run.parent
        while at is not None and not self._resumable(at):
            blocks, at = blocks + len(at.kv.names), at.parent
        return blocks * self._tokens

    def level(self, piece: Piece) -> Level | None:
        """The level of a piece; None where it may not go."""
        return self._order.level(piece)

    def check(self, held: Mapping[Component, Collection[Name]]) -> None:
        """Verify the bookkeeping against the blocks that are here. Raises AssertionError naming the violated
        invariant."""
        if self._runs.keys() != set(held[FULL]):
            raise AssertionError("the runs are not those of the KV that is here")
        for run in set(self._runs.values()):
            if any(self._runs[name] is not run for name in run.kv.names):
                raise AssertionError("a block belongs to another run")
            if run.parent is not None and run not in run.parent.children:
                raise AssertionError("a run follows a run that does not know it")
            if run.kv in self._order and (run.children or run.extras):
                raise AssertionError("KV may go before what needs it")
        for component in self._others:
            known = self._extras[component]
            if known.keys() != set(held[component]):
                raise AssertionError(f"the pieces of {component} are not those of the blocks that are here")
            for name, piece in known.items():
                if name not in piece.names or piece not in self._order:
                    raise AssertionError(f"a block of {component} cannot go")
                if piece.run is not None and self._runs.get(name) is not piece.run:
                    raise AssertionError(f"a block of {component} is an extra of another run")

"""Placement events: changes in an instance's tree, encoded in few bytes for readers that keep a copy of it.

`PlacementLog` observes the tree of one instance and publishes its changes as events (``protocol/agent.py``),
each after the tier's action is complete: a copy between tiers is published when it has arrived. These events
cover tiers in memory only; blocks on disk are published by name.

A *run* is a node of the tree as readers see it: a number, its blocks, and its tiers. The tree splits and
drops nodes as it likes; the log keeps a one-to-one mapping between runs and nodes, and publishes its changes.

`Walk` publishes the whole tree in small parts while it goes on changing: see `protocol/agent.py` on how
readers must handle that.

Pure: called by the tree's owner, in its thread.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping

from sglang_ext.protocol.agent import Cleared, Moved, PlacementEvent, Removed, Split, Stored
from sglang_ext.radix_global.node import Node
from sglang_ext.radix_global.placement import Holder
from sglang_ext.radix_global.tree import RadixTree

Tenant = tuple[str | None, str | None]
"""(extra_key, cache_salt) of prompts; prompts of different tenants never match."""

LONGEST_TAG = 4096
LONGEST_RUN_BYTES = 8 << 20
"""Longer runs and tags are not published, nor are their continuations."""


class _Run:
    """A node and its state as last published."""

    __slots__ = ("held", "number", "pending", "sent")

    def __init__(self, number: int) -> None:
        self.number = number
        self.sent = 0
        """Tiers that were published; 0 while all copies are still being made."""
        self.held = 0
        self.pending = 0
        """Tiers into which it is being copied."""


class PlacementLog:
    """See the module's docstring.

    Args:
        tree: empty; the log becomes its observer.
        tiers: the holders to publish, and the bit that stands for each in events.
        tenant_of: the tenant of a namespace of the tree; ``None`` for a namespace that is not published,
            because no prompt will match it any more.
    """

    def __init__(
        self,
        tree: RadixTree,
        tiers: Mapping[Holder, int],
        tenant_of: Callable[[Hashable], Tenant | None],
    ) -> None:
        self._tree = tree
        self._tiers = dict(tiers)
        self._tenant_of = tenant_of
        self._runs: dict[Node, _Run] = {}
        self._next = 1
        self._events: list[PlacementEvent] = []
        self._walks: list[Walk] = []
        tree.observer = self

    def close(self) -> None:
        """Stop observing the tree."""
        self._tree.observer = None

    def take(self) -> list[PlacementEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    # -- notifications from the tree ------------------------------------------------------------

    def placed(self, node: Node, holder: Holder) -> None:
        """See `TreeObserver`."""
        tier = self._tiers.get(holder)
        if tier is None:
            return
        run = self._runs.get(node)
        if run is None:
            if self._tenant_of(node.namespace) is None:
                return
            run = self._runs[node] = _Run(self._next)
            self._next += 1
        run.held |= tier
        if not run.pending & tier:
            self._send(node, run, tier)

    def displaced(self, node: Node, holder: Holder) -> None:
        """See `TreeObserver`."""
        tier = self._tiers.get(holder)
        run = self._runs.get(node)
        if tier is None or run is None:
            return
        run.held &= ~tier
        run.pending &= ~tier
        if run.sent & tier:
            run.sent &= ~tier
            if run.sent:
                self._events.append(Moved(run.number, run.sent))
            else:
                self._untell(node, run)
        if not run.held:
            del self._runs[node]

    def split(self, upper: Node, lower: Node) -> None:
        """See `TreeObserver`."""
        run = self._runs.get(lower)
        if run is None:
            return
        first = self._runs[upper] = _Run(self._next)
        self._next += 1
        first.sent, first.held, first.pending = run.sent, run.held, run.pending
        if run.sent:
            self._events.append(Split(run.number, first.number, upper.blocks))
            for walk in self._walks:
                walk.was_split(run.number, upper, first.number)

    # -- notifications from the tiers -----------------------------------------------------------

    def copy_begins(self, node: Node, holder: Holder) -> None:
        """``node`` is about to be placed with ``holder``, whose copy is not there yet."""
        run = self._runs.get(node)
        if run is not None:
            run.pending |= self._tiers.get(holder, 0)

    def copy_ended(self, node: Node, blocks: int, holder: Holder) -> None:
        """The last ``blocks`` blocks of the path that ends at ``node`` are with ``holder`` now."""
        tier = self._tiers.get(holder, 0)
        path: list[Node] = []
        current = node
        while blocks > 0 and current.parent is not None:
            path.append(current)
            blocks -= current.blocks
            current = current.parent
        for part in reversed(path):
            run = self._runs.get(part)
            if run is not None and run.pending & tier:
                run.pending &= ~tier
                if run.held & tier:
                    self._send(part, run, tier)

    def clear(self, weights: str) -> None:
        """Publish in one event that no block now in the tree matches any more.

        Args:
            weights: version of the weights from now on, for names of blocks.
        """
        self._runs.clear()
        for walk in self._walks:
            walk.stop()
        self._events.append(Cleared(weights))

    # -- everything -----------------------------------------------------------------------------

    def walk(self) -> Walk:
        """Publish the whole tree in parts, beginning now."""
        walk = Walk(self, self._tree)
        self._walks.append(walk)
        return walk

    def ended(self, walk: Walk) -> None:
        """Forget a walk that is complete, or whose reader has gone."""
        walk.stop()
        if walk in self._walks:
            self._walks.remove(walk)

    def stored(self, node: Node) -> Stored | None:
        """The event that publishes ``node`` in its present state; ``None`` when it is not published."""
        run = self._runs.get(node)
        if run is None or not run.sent:
            return None
        parent = node.parent
        assert parent is not None
        if parent.parent is not None:
            return Stored(run.number, self._runs[parent].number, node.key, run.sent)
        tenant = self._tenant_of(node.namespace)
        if tenant is None:
            return None
        return Stored(run.number, 0, node.key, run.sent, *tenant)

    def truth(self) -> list[Stored]:
        """All published runs as they are now, parents before children; for tests and for debugging."""
        return [event for node in self._tree.nodes() if (event := self.stored(node)) is not None]

    # -- inner workings -------------------------------------------------------------------------

    def _send(self, node: Node, run: _Run, tier: int) -> None:
        if run.sent:
            run.sent |= tier
            self._events.append(Moved(run.number, run.sent))
            return
        parent = node.parent
        assert parent is not None
        if parent.parent is None:
            tenant = self._tenant_of(node.namespace)
            if tenant is None or any(len(tag) > LONGEST_TAG for tag in tenant if tag is not None):
                return
            before, (extra_key, cache_salt) = 0, tenant
        else:
            above = self._runs.get(parent)
            if above is None or not above.sent:
                return  # its parent is not published
            before, extra_key, cache_salt = above.number, None, None
        if len(node.key) > LONGEST_RUN_BYTES:
            return
        run.sent = tier
        self._events.append(Stored(run.number, before, node.key, tier, extra_key, cache_salt))

    def _untell(self, node: Node, run: _Run) -> None:
        """Withdraw ``node``; its published continuations are withdrawn first."""
        stack = [node]
        for current in stack:
            stack.extend(child for child in current.children.values() if self._is_sent(child))
        for below in reversed(stack[1:]):
            gone = self._runs[below]
            gone.sent = 0
            self._events.append(Removed(gone.number))
            self._renumber(gone)
        self._events.append(Removed(run.number))
        self._renumber(run)

    def _is_sent(self, node: Node) -> bool:
        run = self._runs.get(node)
        return run is not None and run.sent != 0

    def _renumber(self, run: _Run) -> None:
        """A number is never used again: a node that is published again gets a new run."""
        run.number = self._next
        self._next += 1

    def number_of(self, node: Node) -> int:
        """The run of a published node; 0 for any other."""
        run = self._runs.get(node)
        return run.number if run is not None and run.sent else 0

    def __repr__(self) -> str:
        return f"PlacementLog(runs={len(self._runs)}, events={len(self._events)}, walks={len(self._walks)})"

    def check(self) -> None:
        """Verify that the published state agrees with the tree.

        Raises:
            AssertionError: names the first node for which it does not.
        """
        seen = 0
        for node in self._tree.nodes():
            run = self._runs.get(node)
            held = sum(self._tiers.get(holder, 0) for holder in node.placements)
            if run is None:
                continue
            seen += 1
            if run.held != held or run.sent & ~held or run.pending & run.sent:
                raise AssertionError(
                    f"{node!r} was sent as in {run.sent}, is in {held}, copied to {run.pending}"
                )
            if run.sent and node.parent is not None and not node.parent.is_root:
                above = self._runs.get(node.parent)
                if above is None or not above.sent:
                    raise AssertionError(f"{node!r} was sent, and what it continues is not")
        if seen != len(self._runs):
            raise AssertionError(f"{len(self._runs)} runs of {seen} nodes")


class Walk:
    """One pass over all published runs. Made by `PlacementLog.walk`."""

    def __init__(self, log: PlacementLog, tree: RadixTree) -> None:
        self._log = log
        self._stack: list[Node] = [child for root in tree.roots.values() for child in root.children.values()]
        self._visited: set[int] = set()

    @property
    def over(self) -> bool:
        return not self._stack

    def part(self, runs: int, nbytes: int) -> list[Stored]:
        """The next runs, parents before children: at most about so many, of so many bytes of tokens.

        Together with the events taken before, these give a reader the present state of all runs so far.
        """
        found: list[Stored] = []
        while self._stack and runs > len(found) and nbytes > 0:
            for event in self._visit(self._stack.pop()):
                nbytes -= len(event.tokens)
                found.append(event)
        return found

    def was_split(self, lower: int, upper: Node, number: int) -> None:
        """The first blocks of the run ``lower`` are now the new run ``number``."""
        if lower in self._visited:
            self._visited.add(number)  # readers that have ``lower`` get a Split event
        elif not self.over:
            self._stack.append(upper)  # ``lower`` may be gone before it is visited

    def stop(self) -> None:
        """Yield no more runs."""
        self._stack.clear()

    def _visit(self, node: Node) -> Iterator[Stored]:
        """Yield ``node``, preceded by nodes split off its beginning since it was pushed."""
        path: list[Node] = []
        current = node
        while current.parent is not None:
            number = self._log.number_of(current)
            if not number:
                if current is node:
                    return
                break
            if number in self._visited:
                break
            path.append(current)
            current = current.parent
        for part in reversed(path):
            event = self._log.stored(part)
            if event is None:
                return
            self._visited.add(event.run)
            yield event
            self._stack.extend(
                child for child in part.children.values() if self._log.number_of(child) not in self._visited
            )

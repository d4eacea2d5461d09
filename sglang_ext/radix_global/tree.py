"""The radix tree over prompts: maps each prefix to its holders, with their tiers.

One implementation serves the engine (one instance, addresses are pool slots and arena blocks) and the
router (many instances, addresses may be absent): MemServe section 4.2, where the tree refers to data
anywhere in the system and names the instance that has it.

Edges are encoded token ids (``keys.encode_tokens``) and split at block borders only. A whole edge is
compared by one ``memcmp``, the place where two edges part by one vectorised comparison; children are
found by the bytes of their first block.

Invariants, verified by ``check()``:

- every node below a root is held by at least one holder;
- the nodes of one holder are closed under parents: a holder of a block has the whole prefix before it. A
  prefix therefore never has a hole, and a holder's last matching node tells how much of a prompt it has;
- the counters of blocks and locked blocks per holder equal the sums over all nodes;
- every node that may be evicted is in its holder's eviction queue.

Single-threaded: the owner calls it from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator

from sglang_ext.clock import SystemClock
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.radix_global import locks
from sglang_ext.radix_global.edges import common_blocks, cut_node, walk
from sglang_ext.radix_global.eviction import EvictionPolicy, EvictionQueue, Usage, lru
from sglang_ext.radix_global.invariants import TreeInvariantError, violations
from sglang_ext.radix_global.node import (
    Address,
    Evicted,
    InsertResult,
    Match,
    Node,
    address_unit,
    cut_address,
)
from sglang_ext.radix_global.observer import TreeObserver
from sglang_ext.radix_global.placement import Holder


class RadixTree:
    """See the module's docstring.

    Args:
        block_size: tokens per block; only whole blocks are indexed.
        policy: orders the nodes for ``evict``.
        clock: seconds, monotonic; orders accesses.
    """

    def __init__(
        self,
        block_size: int = 16,
        *,
        policy: EvictionPolicy = lru,
        clock: Callable[[], float] = SystemClock.monotonic,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")
        self.block_size = block_size
        self.policy = policy
        self._step = block_size * TOKEN_BYTES
        self._clock = clock
        self.root = Node(None, b"", 0)
        """Stands for "nothing matched" in any namespace; holds nothing."""
        self._roots: dict[Hashable, Node] = {}
        self._usage: dict[Holder, Usage] = {}
        self.node_count = 0
        self.observer: TreeObserver | None = None
        """Notified of every placement and split. Set it while the tree is empty."""

    # -- looking up -----------------------------------------------------------------------------

    def match(self, namespace: Hashable, key: bytes) -> Match:
        """The longest known prefix of ``key``, with any holder.

        Splits the last node when the prompt parts from it, so that the path ends where the match does.
        Refreshes ``last_access`` on the path; ``hits`` count insertions only, because an engine matches a
        waiting request many times.
        """
        path: list[Node] = []
        node = self._roots.get(namespace)
        if node is None:
            return Match(self.root, path, 0)
        step = self._step
        position = 0
        now = self._clock()
        while True:
            child = node.only_child
            if child is None or not key.startswith(child.key, position):
                child = node.children.get(key[position : position + step])
                if child is None:
                    break
                if not key.startswith(child.key, position):
                    node = self._split(child, common_blocks(child.key, key, position, step))
                    node.last_access = now
                    path.append(node)
                    position += len(node.key)
                    break
            child.last_access = now
            path.append(child)
            position += len(child.key)
            node = child
        return Match(node, path, position // step)

    def holders(self, namespace: Hashable, key: bytes) -> dict[Holder, int]:
        """How many leading tokens of ``key`` each holder has. Changes nothing in the tree."""
        found: dict[Holder, int] = {}
        for blocks, node in walk(self._roots.get(namespace), key, self._step):
            tokens = blocks * self.block_size
            for holder in node.placements:
                found[holder] = tokens
        return found

    def touch(self, namespace: Hashable, key: bytes) -> None:
        """Refresh ``last_access`` of the known prefix of ``key`` without splitting anything."""
        now = self._clock()
        for _, node in walk(self._roots.get(namespace), key, self._step):
            node.last_access = now

    # -- changing -------------------------------------------------------------------------------

    def insert(
        self,
        namespace: Hashable,
        key: bytes,
        holder: Holder,
        address: Address = None,
        *,
        priority: int = 0,
        same_request: bool = False,
    ) -> InsertResult:
        """Record that ``holder`` has the whole blocks of ``key``.

        Args:
            namespace: prompts of different namespaces never match.
            key: the encoded prompt; a tail shorter than a block is left out.
            holder: the owner of the new placements.
            address: where, for the whole blocks of ``key``; parts that the holder has already are not
                replaced (the caller frees ``address`` up to ``held_blocks``).
            priority: raises the priority of the nodes on the path.
            same_request: the same request has inserted a shorter part before (a chunk of its prompt, or the
                prompt before the answer); nodes known before then do not count a further use.
        """
        step = self._step
        end = len(key) // step * step
        total = end // step
        if end == 0:
            return InsertResult(self.root, 0, 0, [])
        unit = 0 if address is None else address_unit(address, total)
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = Node(None, b"", 0, namespace)
        node, held, added = self._put(node, key, end, holder, address, unit, priority, int(not same_request))
        return InsertResult(node, total, held, added)

    def extend(self, node: Node, key: bytes, holder: Holder, address: Address = None) -> InsertResult:
        """Record that ``holder``, which has ``node``, has the whole blocks of ``key`` after it.

        As ``insert`` of everything up to there, which need not be known. ``InsertResult.blocks`` and
        ``held_blocks`` count from ``node`` on.

        Raises:
            ValueError: the holder does not have ``node``, or ``key`` is shorter than a block.
        """
        end = len(key) // self._step * self._step
        if holder not in node.placements or not end:
            raise ValueError(f"{holder!r} cannot go on after {node!r} by {len(key)} bytes")
        total = end // self._step
        unit = 0 if address is None else address_unit(address, total)
        node, held, added = self._put(node, key, end, holder, address, unit, 0, 1)
        return InsertResult(node, total, held, added)

    def _put(
        self,
        top: Node,
        key: bytes,
        end: int,
        holder: Holder,
        address: Address,
        unit: int,
        priority: int,
        uses: int,
    ) -> tuple[Node, int, list[Node]]:
        """Place ``key[:end]`` below ``top``. Returns the last node, blocks held before, and nodes gained."""
        node = self._descend(top, key, end, priority, uses)
        usage = self._usage_of(holder)
        added: list[Node] = []
        current = node
        held = end // self._step
        while current is not top and holder not in current.placements:
            added.append(current)
            held -= current.blocks
            assert current.parent is not None
            current = current.parent
        added.reverse()
        start = held
        for current in added:
            part = None if unit == 0 else cut_address(address, start * unit, (start + current.blocks) * unit)
            self._place(current, holder, part, usage)
            start += current.blocks
        return node, held, added

    def _descend(self, node: Node, key: bytes, end: int, priority: int, uses: int) -> Node:
        """The node at which ``key[:end]`` ends, below ``node``. Splits and creates nodes as needed."""
        step = self._step
        now = self._clock()
        position = 0
        while position < end:
            child = node.only_child
            if child is None or not key.startswith(child.key, position):
                first = key[position : position + step]
                child = node.children.get(first)
                if child is None:
                    child = Node(node, key[position:end], (end - position) // step, node.namespace)
                    child.priority = priority
                    child.hits = 1 - uses
                    node.adopt(first, child)
                    self.node_count += 1
                elif not key.startswith(child.key, position):
                    child = self._split(child, common_blocks(child.key, key, position, step))
            child.last_access = now
            child.hits += uses
            if priority > child.priority:
                child.priority = priority
            position += len(child.key)
            node = child
        return node

    def place(self, node: Node, holder: Holder, address: Address) -> None:
        """Record that ``holder`` has ``node`` too, at ``address``.

        Raises:
            ValueError: the holder already has the node or lacks the prefix before it, or the node is no
                longer in the tree.
        """
        if holder in node.placements:
            raise ValueError(f"{holder!r} already has {node!r}")
        parent = node.parent
        if parent is None or (parent.parent is not None and holder not in parent.placements):
            raise ValueError(f"{holder!r} lacks the prefix before {node!r}")
        if not node.placements:
            raise ValueError(f"{node!r} is no longer in the tree")
        if address is not None:
            address_unit(address, node.blocks)
        self._place(node, holder, address, self._usage_of(holder))

    def split(self, node: Node, blocks: int) -> Node:
        """Cut ``node`` after its first ``blocks`` blocks; returns the new node that holds those.

        ``node`` stays the tail: its holders and locks still cover the whole path.

        Raises:
            ValueError: the cut is not inside the node.
        """
        if not 0 < blocks < node.blocks:
            raise ValueError(f"cannot cut {node!r} after {blocks} blocks")
        return self._split(node, blocks)

    def remove(self, node: Node, holder: Holder) -> list[Evicted]:
        """Remove ``node`` and all its continuations from ``holder``. Locks do not prevent it.

        Returns:
            The removed placements, continuations first.
        """
        parent = node.parent
        if parent is None or holder not in node.placements:
            return []
        doomed = [node]
        for current in doomed:
            doomed.extend(child for child in current.children.values() if holder in child.placements)
        usage = self._usage[holder]
        removed = [
            Evicted(current, current.blocks, self._displace(current, holder, usage))
            for current in reversed(doomed)
        ]
        self._offer(parent, holder, usage)
        return removed

    def drop_holder(self, holder: Holder) -> int:
        """Forget everything ``holder`` has (its epoch ended, or it was flushed). Returns the blocks."""
        usage = self._usage.get(holder)
        if usage is None:
            return 0
        dropped = usage.blocks
        # A holder whose blocks were all evicted before is dropped without a walk over the tree, which may be
        # large.
        for root in list(self._roots.values()) if usage.nodes else ():
            for child in list(root.children.values()):
                self.remove(child, holder)
        usage.queue.clear()
        del self._usage[holder]
        return dropped

    def evict(
        self,
        holder: Holder,
        blocks: int,
        *,
        only: Callable[[Node], bool] | None = None,
        spare: Container[Node] = (),
        look_past: int = 64,
    ) -> list[Evicted]:
        """Take up to ``blocks`` blocks from ``holder``, by policy, ends of prefixes first, never locked ones.

        Takes exactly ``blocks`` where that many can go: the last node is split, and its tail is evicted.

        Args:
            holder: owner of the blocks.
            blocks: how many.
            only: take nodes for which it is true (those with another copy, for example) and no others.
            spare: nodes that stay. Whenever one comes up it counts as used, so that it does not come up again
                in each call.
            look_past: pass over at most so many nodes for which ``only`` is false, and give up at the
                next, which bounds the time of a call.
        """
        evicted: list[Evicted] = []
        usage = self._usage.get(holder)
        if usage is None:
            return evicted
        missing = blocks
        passed: list[Node] = []
        spared: list[Node] = []
        while missing > 0 and len(passed) <= look_past:
            node = usage.queue.take()
            if node is None:
                break
            if node in spare:
                spared.append(node)
                continue
            if only is not None and not only(node):
                passed.append(node)
                continue
            if node.blocks > missing:
                self._split(node, node.blocks - missing)
            missing -= node.blocks
            parent = node.parent
            assert parent is not None
            evicted.append(Evicted(node, node.blocks, self._displace(node, holder, usage)))
            self._offer(parent, holder, usage)
        for node in passed:
            usage.queue.offer(node, usage.nodes)
        now = self._clock() if spared else 0.0
        for node in spared:
            node.last_access = now
            usage.queue.offer(node, usage.nodes)
        return evicted

    # -- locks ----------------------------------------------------------------------------------

    def lock(self, node: Node, holder: Holder) -> int:
        """Keep ``holder``'s copies of ``node`` and of everything before it. Returns blocks newly locked.

        Raises:
            ValueError: the node is no longer in the tree.
        """
        newly = locks.take(node, holder)
        if newly:
            self._usage[holder].locked += newly
        return newly

    def unlock(self, node: Node, holder: Holder) -> int:
        """Undo one ``lock`` of the same node and holder. Returns blocks that are now free to go.

        Raises:
            ValueError: it is not locked.
        """
        freed, last = locks.release(node, holder)
        if freed:
            usage = self._usage[holder]
            usage.locked -= freed
            if last is not None:
                usage.queue.offer(last, usage.nodes)
        return freed

    def move_lock(self, node: Node, onward: Node, holder: Holder) -> None:
        """Lock ``onward`` and unlock ``node``. Where ``node`` is before it, as it mostly is, only the nodes
        between them are touched.

        Raises:
            ValueError: one of them is no longer in the tree, or ``node`` is not locked.
        """
        if not onward.placements or not node.locks.get(holder):
            newly = None
        else:
            newly = locks.move(node, onward, holder)
        if newly is None:
            self.lock(onward, holder)
            self.unlock(node, holder)
        elif newly:
            self._usage[holder].locked += newly

    # -- counters -------------------------------------------------------------------------------

    def blocks_of(self, holder: Holder) -> int:
        """Blocks that ``holder`` has."""
        usage = self._usage.get(holder)
        return 0 if usage is None else usage.blocks

    def locked_blocks_of(self, holder: Holder) -> int:
        """Blocks of ``holder`` that are locked."""
        usage = self._usage.get(holder)
        return 0 if usage is None else usage.locked

    def unlocked_blocks_of(self, holder: Holder) -> int:
        """Blocks of ``holder`` that are not locked."""
        usage = self._usage.get(holder)
        return 0 if usage is None else usage.blocks - usage.locked

    def known_holders(self) -> list[Holder]:
        """Every holder that has at least one block."""
        return [holder for holder, usage in self._usage.items() if usage.blocks]

    def now(self) -> float:
        """The tree's clock, in which ``last_access`` is kept."""
        return self._clock()

    @property
    def block_bytes(self) -> int:
        """Bytes of one encoded block."""
        return self._step

    @property
    def roots(self) -> dict[Hashable, Node]:
        """The root of each namespace that holds anything. Not to be changed."""
        return self._roots

    def nodes(self) -> Iterator[Node]:
        """Every node below the roots, parents before children."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def __repr__(self) -> str:
        held = ", ".join(f"{h!r}: {u.blocks} blocks ({u.locked} locked)" for h, u in self._usage.items())
        return f"RadixTree(block_size={self.block_size}, nodes={self.node_count}, {{{held}}})"

    def check(self) -> None:
        """Verify every invariant.

        Raises:
            TreeInvariantError: names the first violation.
        """
        for what in violations(self._step, self.root, self._roots, self._usage, self.node_count):
            raise TreeInvariantError(what)

    # -- inner workings -------------------------------------------------------------------------

    def _usage_of(self, holder: Holder) -> Usage:
        usage = self._usage.get(holder)
        if usage is None:
            usage = self._usage[holder] = Usage(EvictionQueue(holder, self.policy))
        return usage

    def _place(self, node: Node, holder: Holder, address: Address, usage: Usage) -> None:
        node.placements[holder] = address
        usage.nodes += 1
        usage.blocks += node.blocks
        if node.locks.get(holder):
            usage.locked += node.blocks
        else:
            usage.queue.offer(node, usage.nodes)
        if self.observer is not None:
            self.observer.placed(node, holder)

    def _displace(self, node: Node, holder: Holder, usage: Usage) -> Address:
        """Remove ``holder`` from a node of which it has no child; drop the node when no holder is left.

        The caller offers the parent for eviction.
        """
        address = node.placements.pop(holder)
        usage.nodes -= 1
        usage.blocks -= node.blocks
        if node.locks.get(holder):
            usage.locked -= node.blocks
        if self.observer is not None:
            self.observer.displaced(node, holder)
        if not node.placements:
            parent = node.parent
            assert parent is not None
            parent.disown(node.key[: self._step])
            self.node_count -= 1
            if parent.parent is None and not parent.children:
                del self._roots[parent.namespace]
        return address

    def _offer(self, node: Node, holder: Holder, usage: Usage) -> None:
        """Offer ``node`` for eviction after it has lost a child; the queue checks later whether it can go."""
        if holder in node.placements and not node.locks.get(holder):
            usage.queue.offer(node, usage.nodes)

    def _split(self, node: Node, blocks: int) -> Node:
        upper = cut_node(node, blocks, self._step)
        self.node_count += 1
        for holder in upper.placements:
            self._usage[holder].nodes += 1
        if self.observer is not None:
            self.observer.split(upper, node)
        return upper

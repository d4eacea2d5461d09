"""The radix tree over prompts: who holds which prefix, in which tier.

One implementation serves the engine (one instance, addresses are pool slots and arena blocks) and the
router (many instances, addresses may be absent): MemServe section 4.2, where the tree refers to data
anywhere in the system and names the instance that has it.

Edges are encoded token ids (``keys.encode_tokens``) and split at block borders only. A whole edge is
compared by one ``memcmp``, the place where two edges part by one vectorised comparison; children are
found by the bytes of their first block.

Invariants, verified by ``check()``:

- every node below a root is held by at least one holder;
- the nodes of one holder are closed under parents: whoever has a block has the whole prefix before it.
  A prefix therefore never has a hole, and a holder's last matching node tells how much of a prompt it has;
- the counters of blocks and locked blocks per holder equal what a walk finds.

Single-threaded: the owner calls it from one thread.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.radix_global.eviction import EvictionPolicy, lru
from sglang_ext.radix_global.placement import Holder

class RadixTree:
    """See the module's docstring.

    Args:
        block_size: tokens per block; only whole blocks are indexed.
        policy: what ``evict`` takes first.
        clock: seconds, monotonic; orders accesses.
    """

    def __init__(
        self,
        block_size: int = 16,
        *,
        policy: EvictionPolicy = lru,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")
        self.block_size = block_size
        self.policy = policy
        self._step = block_size * TOKEN_BYTES
        self._clock = clock
        self._sequence = itertools.count()
        self.root = Node(None, b"", 0)
        """Stands for "nothing matched" in any namespace; holds nothing."""
        self._roots: dict[Hashable, Node] = {}
        self._usage: dict[Holder, _Usage] = {}
        self.node_count = 0

    # -- looking up -----------------------------------------------------------------------------

    def match(self, namespace: Hashable, key: bytes) -> Match:
        """The longest known prefix of ``key``, whoever holds it.

        Splits the last node when the prompt parts from it, so that the path ends where the match does.
        Refreshes ``last_access`` on the path; ``hits`` count insertions and ``touch`` only, because an
        engine matches a waiting request many times.
        """
        path: list[Node] = []
        node = self._roots.get(namespace)
        if node is None:
            return Match(self.root, path, 0)
        step = self._step
        position = 0
        blocks = 0
        now = self._clock()
        while (child := node.children.get(key[position : position + step])) is not None:
            edge = child.key
            if not key.startswith(edge, position):
                child = self._split(child, self._common_blocks(edge, key, position))
            child.last_access = now
            path.append(child)
            blocks += child.blocks
            node = child
            if child.key is not edge:
                break
            position += len(edge)
        return Match(node, path, blocks)

    def holders(self, namespace: Hashable, key: bytes) -> dict[Holder, int]:
        """How many leading tokens of ``key`` each holder has. Changes nothing in the tree."""
        found: dict[Holder, int] = {}
        for blocks, node in self._walk(namespace, key):
            tokens = blocks * self.block_size
            for holder in node.placements:
                found[holder] = tokens
        return found

    def touch(self, namespace: Hashable, key: bytes) -> None:
        """Count a use of the known prefix of ``key`` without splitting anything."""
        now = self._clock()
        for _, node in self._walk(namespace, key):
            node.last_access = now
            node.hits += 1

    def _walk(self, namespace: Hashable, key: bytes) -> Iterator[tuple[int, Node]]:
        """Yield (blocks of ``key`` matched so far, node), the last node possibly matched in part."""
        node = self._roots.get(namespace)
        position = 0
        blocks = 0
        while node is not None:
            node = node.children.get(key[position : position + self._step])
            if node is None:
                return
            if not key.startswith(node.key, position):
                yield blocks + self._common_blocks(node.key, key, position), node
                return
            blocks += node.blocks
            position += len(node.key)
            yield blocks, node

    def _common_blocks(self, edge: bytes, key: bytes, position: int) -> int:
        """Whole blocks that ``edge`` shares with ``key`` from ``position`` on; less than all of ``edge``."""
        count = min(len(edge), (len(key) - position) // self._step * self._step) // TOKEN_BYTES
        differs = np.frombuffer(edge, "<i4", count) != np.frombuffer(key, "<i4", count, position)
        first = int(differs.argmax())
        if not differs[first]:
            first = count
        return first // self.block_size

    # -- changing -------------------------------------------------------------------------------

    def insert(
        self, namespace: Hashable, key: bytes, holder: Holder, address: Address = None, *, priority: int = 0
    ) -> InsertResult:
        """Record that ``holder`` has the whole blocks of ``key``.

        Args:
            namespace: prompts of different namespaces never match.
            key: the encoded prompt; a tail shorter than a block is left out.
            holder: who has it.
            address: where, for the whole blocks of ``key``; parts that the holder has already are not
                replaced (the caller frees ``address`` up to ``held_blocks``).
            priority: raises the priority of the nodes on the path.
        """
        step = self._step
        end = len(key) // step * step
        total = end // step
        if end == 0:
            return InsertResult(self.root, 0, 0, [])
        unit = 0 if address is None else self._unit(address, total)
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = Node(None, b"", 0, namespace)
        now = self._clock()
        position = 0
        done = 0
        held = 0
        added: list[Node] = []
        while position < end:
            first = key[position : position + step]
            child = node.children.get(first)
            if child is None:
                child = Node(node, key[position:end], total - done, namespace)
                node.children[first] = child
                self.node_count += 1
            elif not key.startswith(child.key, position):
                child = self._split(child, self._common_blocks(child.key, key, position))
            child.last_access = now
            child.hits += 1
            if priority > child.priority:
                child.priority = priority
            if holder in child.placements:
                held = done + child.blocks
            else:
                part = None if unit == 0 else address[done * unit : (done + child.blocks) * unit]
                self._place(child, holder, part)
                added.append(child)
            done += child.blocks
            position += len(child.key)
            node = child
        return InsertResult(node, total, held, added)

    def place(self, node: Node, holder: Holder, address: Address) -> None:
        """Record that ``holder`` has ``node`` too, at ``address``.

        Raises:
            ValueError: the holder has it already, or lacks the prefix before it.
        """
        if holder in node.placements:
            raise ValueError(f"{holder!r} already has {node!r}")
        parent = node.parent
        if parent is None or (parent.parent is not None and holder not in parent.placements):
            raise ValueError(f"{holder!r} lacks the prefix before {node!r}")
        if address is not None:
            self._unit(address, node.blocks)
        self._place(node, holder, address)

    def split(self, node: Node, blocks: int) -> Node:
        """Cut ``node`` after its first ``blocks`` blocks; returns the new node that holds those.

        ``node`` stays the tail, so that who holds or has locked it still stands for the whole path.

        Raises:
            ValueError: the cut is not inside the node.
        """
        if not 0 < blocks < node.blocks:
            raise ValueError(f"cannot cut {node!r} after {blocks} blocks")
        return self._split(node, blocks)

    def remove(self, node: Node, holder: Holder) -> list[Evicted]:
        """``holder`` no longer has ``node``, nor anything that continues it. Locks do not prevent it."""
        removed: list[Evicted] = []
        stack = [node]
        doomed: list[Node] = []
        while stack:
            current = stack.pop()
            if holder in current.placements:
                doomed.append(current)
                stack.extend(current.children.values())
        for current in reversed(doomed):
            removed.append(Evicted(current, current.blocks, self._displace(current, holder)))
        return removed

    def drop_holder(self, holder: Holder) -> int:
        """Forget everything ``holder`` has (its epoch ended, or it was flushed). Returns the blocks."""
        usage = self._usage.get(holder)
        if usage is None:
            return 0
        dropped = usage.blocks
        for root in list(self._roots.values()):
            for child in list(root.children.values()):
                self.remove(child, holder)
        del self._usage[holder]
        return dropped

    def evict(
        self,
        holder: Holder,
        blocks: int,
        *,
        only: Callable[[Node], bool] | None = None,
        look_past: int = 64,
    ) -> list[Evicted]:
        """Take up to ``blocks`` blocks from ``holder``, by policy, ends of prefixes first, never locked ones.

        Takes exactly ``blocks`` where that many can go: the last node is split, and its tail goes.

        Args:
            holder: whose blocks.
            blocks: how many.
            only: take nodes for which it is true (those with another copy, for example) and no others.
            look_past: give up after passing over so many nodes for which ``only`` is false, which bounds
                the time of a call.
        """
        evicted: list[Evicted] = []
        usage = self._usage.get(holder)
        if usage is None:
            return evicted
        missing = blocks
        passed: list[Node] = []
        while missing > 0 and len(passed) <= look_past:
            node = self._pop_candidate(usage, holder)
            if node is None:
                break
            if only is not None and not only(node):
                passed.append(node)
                continue
            if node.blocks > missing:
                self._enqueue(self._split(node, node.blocks - missing), holder)
            missing -= node.blocks
            evicted.append(Evicted(node, node.blocks, self._displace(node, holder)))
        for node in passed:
            self._enqueue(node, holder)
        return evicted

    # -- locks ----------------------------------------------------------------------------------

    def lock(self, node: Node, holder: Holder) -> int:
        """Keep ``holder``'s copies of ``node`` and of everything before it. Returns blocks newly locked."""
        newly = 0
        current = node
        while (parent := current.parent) is not None:
            count = current.locks.get(holder, 0)
            current.locks[holder] = count + 1
            if count == 0 and holder in current.placements:
                newly += current.blocks
            current = parent
        if newly:
            self._usage[holder].locked += newly
        return newly

    def unlock(self, node: Node, holder: Holder) -> int:
        """Undo one ``lock`` of the same node and holder. Returns blocks that are now free to go.

        Raises:
            ValueError: it is not locked.
        """
        freed = 0
        current = node
        while (parent := current.parent) is not None:
            count = current.locks.get(holder, 0)
            if count < 1:
                raise ValueError(f"{current!r} is not locked for {holder!r}")
            if count == 1:
                del current.locks[holder]
                if holder in current.placements:
                    freed += current.blocks
                    self._enqueue(current, holder)
            else:
                current.locks[holder] = count - 1
            current = parent
        if freed:
            self._usage[holder].locked -= freed
        return freed

    # -- counters -------------------------------------------------------------------------------

    def blocks_of(self, holder: Holder) -> int:
        """Blocks that ``holder`` has."""
        usage = self._usage.get(holder)
        return 0 if usage is None else usage.blocks

    def locked_blocks_of(self, holder: Holder) -> int:
        """Blocks of ``holder`` that are locked."""
        usage = self._usage.get(holder)
        return 0 if usage is None else usage.locked

    def known_holders(self) -> list[Holder]:
        """Every holder that has at least one block."""
        return [holder for holder, usage in self._usage.items() if usage.blocks]

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
            TreeInvariantError: names the first that does not hold.
        """
        blocks: dict[Holder, int] = {}
        locked: dict[Holder, int] = {}
        nodes: dict[Holder, int] = {}
        count = 0
        for root in self._roots.values():
            _require(bool(root.children), "an empty root was kept")
        for root in (self.root, *self._roots.values()):
            _require(root.parent is None and not root.placements and not root.locks, "a root holds something")
        for node in self.nodes():
            count += 1
            self._check_node(node)
            for holder in node.placements:
                nodes[holder] = nodes.get(holder, 0) + 1
                blocks[holder] = blocks.get(holder, 0) + node.blocks
                if node.locks.get(holder):
                    locked[holder] = locked.get(holder, 0) + node.blocks
        _require(count == self.node_count, f"counted {count} nodes, node_count is {self.node_count}")
        for holder, usage in self._usage.items():
            _require(usage.nodes == nodes.get(holder, 0), f"node count of {holder!r} is off")
            _require(usage.blocks == blocks.pop(holder, 0), f"block count of {holder!r} is off")
            _require(usage.locked == locked.pop(holder, 0), f"locked count of {holder!r} is off")
            queued = [entry[2] for entry in usage.heap]
            _require(len(set(map(id, queued))) == len(queued), f"a node is queued twice for {holder!r}")
        _require(not blocks, f"holders without counters: {list(blocks)}")

    def _check_node(self, node: Node) -> None:
        parent = node.parent
        _require(parent is not None, f"{node!r} has no parent")
        assert parent is not None
        _require(node.blocks > 0 and len(node.key) == node.blocks * self._step, f"{node!r}: edge length")
        _require(parent.children.get(node.key[: self._step]) is node, f"{node!r} is not its parent's child")
        _require(bool(node.placements), f"{node!r} is held by nobody")
        for holder, address in node.placements.items():
            _require(parent.is_root or holder in parent.placements, f"{holder!r} has a hole above {node!r}")
            _require(address is None or len(address) % node.blocks == 0, f"{node!r}: address length")
            free = not node.locks.get(holder) and self._is_candidate(node, holder)
            _require(not free or holder in node.queued, f"{node!r} is not queued for eviction")
        for holder, count in node.locks.items():
            _require(count > 0, f"{node!r} has a lock count of {count}")
            below = sum(child.locks.get(holder, 0) for child in node.children.values())
            _require(count >= below, f"{node!r} is locked less than its children")

    # -- inner workings -------------------------------------------------------------------------

    def _unit(self, address: Address, blocks: int) -> int:
        unit, rest = divmod(len(address), blocks)
        if rest or unit == 0:
            raise ValueError(f"an address of {len(address)} entries does not divide into {blocks} blocks")
        return unit

    def _place(self, node: Node, holder: Holder, address: Address) -> None:
        usage = self._usage.get(holder)
        if usage is None:
            usage = self._usage[holder] = _Usage()
        node.placements[holder] = address
        usage.nodes += 1
        usage.blocks += node.blocks
        if node.locks.get(holder):
            usage.locked += node.blocks
        else:
            self._enqueue(node, holder)

    def _displace(self, node: Node, holder: Holder) -> Address:
        """Take ``holder`` off a node none of whose children it has; drop the node when nobody is left."""
        address = node.placements.pop(holder)
        usage = self._usage[holder]
        usage.nodes -= 1
        usage.blocks -= node.blocks
        if node.locks.get(holder):
            usage.locked -= node.blocks
        parent = node.parent
        assert parent is not None
        if not node.placements:
            del parent.children[node.key[: self._step]]
            self.node_count -= 1
            if parent.is_root and not parent.children:
                del self._roots[parent.namespace]
        if holder in parent.placements and not parent.locks.get(holder):
            self._enqueue(parent, holder)
        return address

    def _split(self, node: Node, blocks: int) -> Node:
        """Put the first ``blocks`` blocks of ``node`` into a new parent, and return that.

        ``node`` itself stays the tail: whoever holds or has locked it still stands for the whole path.
        """
        parent = node.parent
        assert parent is not None
        assert 0 < blocks < node.blocks
        cut = blocks * self._step
        upper = Node(parent, node.key[:cut], blocks, node.namespace)
        upper.last_access, upper.hits, upper.priority = node.last_access, node.hits, node.priority
        upper.locks = dict(node.locks)
        for holder, address in node.placements.items():
            self._usage[holder].nodes += 1
            if address is None:
                upper.placements[holder] = None
            else:
                border = len(address) // node.blocks * blocks
                upper.placements[holder] = address[:border]
                node.placements[holder] = address[border:]
        parent.children[upper.key[: self._step]] = upper
        node.key = node.key[cut:]
        node.blocks -= blocks
        node.parent = upper
        upper.children[node.key[: self._step]] = node
        self.node_count += 1
        return upper

    def _enqueue(self, node: Node, holder: Holder) -> None:
        """Offer ``node`` for eviction. Whether it can go is decided when it comes up."""
        if holder in node.queued:
            return
        node.queued.add(holder)
        usage = self._usage[holder]
        heapq.heappush(usage.heap, (self.policy(node), next(self._sequence), node))
        if len(usage.heap) > 2 * usage.nodes + 64:
            # Entries of nodes that were removed rather than evicted; keep the queue in proportion.
            kept = []
            for entry in usage.heap:
                if holder in entry[2].placements:
                    kept.append(entry)
                else:
                    entry[2].queued.discard(holder)
            heapq.heapify(kept)
            usage.heap = kept

    def _is_candidate(self, node: Node, holder: Holder) -> bool:
        if holder not in node.placements or node.locks.get(holder):
            return False
        return not any(holder in child.placements for child in node.children.values())

    def _pop_candidate(self, usage: _Usage, holder: Holder) -> Node | None:
        """The next node that may go, taken off the queue; ``None`` when there is none.

        A node that cannot go is dropped from the queue: unlocking it, or losing its last child of this
        holder, puts it back.
        """
        heap = usage.heap
        while heap:
            key, _, node = heapq.heappop(heap)
            if not self._is_candidate(node, holder):
                node.queued.discard(holder)
                continue
            now = self.policy(node)
            if now != key:
                heapq.heappush(heap, (now, next(self._sequence), node))
                continue
            node.queued.discard(holder)
            return node
        return None


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise TreeInvariantError(message)

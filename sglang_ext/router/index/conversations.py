"""Conversations that may continue: the last prompt and answer of each, the coldest first.

The end of a conversation is the end of its longest known prompt; each turn replaces the one before. A
conversation was *used again* when a later request continued or repeated all of an earlier one. A beginning
that conversations share, such as a system prompt, is not a conversation.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sglang_ext.clock import Clock
from sglang_ext.radix_global import Holder, Node, RadixTree
from sglang_ext.router.index.memory import TreeSize
from sglang_ext.tiers import Tier

FORGET_BLOCKS = 256


@dataclass(eq=False, slots=True)
class Conversation:
    """namespace, key, request: of the last turn. uses: number of requests that were turns of it."""

    id: int
    node: Node
    namespace: tuple[str | None, ...]
    key: bytes
    tenant: str
    request: str
    session: bool
    uses: int = 1
    again: float = 0.0
    """When it may be spilled again."""
    looked: float = -1e9
    """When ``held`` and ``durable`` were looked up."""
    held: dict[str, int] = field(default_factory=dict)
    """Blocks that each instance has in memory."""
    durable: int = 0

    @property
    def goes_on(self) -> bool:
        """Whether another turn is likely."""
        return self.session or self.uses > 1


class Conversations:
    """See the module's docstring.

    Args:
        clock: seconds.
        block_size: tokens per block.
        max_bytes: estimated memory; the coldest are forgotten.
    """

    def __init__(self, clock: Clock, block_size: int, max_bytes: int) -> None:
        self._tree = RadixTree(block_size, clock=clock.monotonic)
        self._size = TreeSize(self._tree)
        self._holder = Holder.of("conversations", 0, Tier.HBM)
        self._max_bytes = max_bytes
        self._known: dict[Node, Conversation] = {}
        self._lines: dict[str, OrderedDict[int, Conversation]] = {}
        """Of each tenant that has any, the coldest first, by id."""
        self._key_bytes = 0
        self._next = 0

    def learn(
        self, namespace: tuple[str | None, ...], key: bytes, tenant: str, request: str, *, session: bool
    ) -> None:
        """Record a turn: ``key`` has the tokens of a request's prompt and answer."""
        node = self._tree.insert(namespace, key, self._holder).node
        if node.is_root or node.children:
            return  # shorter than a block, or a longer one is known
        self._next += 1
        found = Conversation(self._next, node, namespace, key, tenant, request, session)
        current: Node | None = node
        while current is not None:
            if (former := self._pop(current)) is not None:
                found.uses = max(found.uses, former.uses + (former.request != request))
                found.session = found.session or former.session
                if current is node:
                    found.again = former.again
            current = current.parent
        self._known[node] = found
        self._lines.setdefault(tenant, OrderedDict())[found.id] = found
        self._key_bytes += len(key)
        while self.size_bytes > self._max_bytes:
            gone = self._tree.evict(self._holder, FORGET_BLOCKS)
            for each in gone:
                self._pop(each.node)
            if not gone:
                break

    def forget(self, conversation: Conversation) -> None:
        """Drop a conversation of which no instance holds KV any more."""
        if self._known.get(conversation.node) is conversation:
            self._pop(conversation.node)
            self._tree.remove(conversation.node, self._holder)

    def _pop(self, node: Node) -> Conversation | None:
        known = self._known.pop(node, None)
        if known is not None:
            self._key_bytes -= len(known.key)
            line = self._lines[known.tenant]
            del line[known.id]
            if not line:
                del self._lines[known.tenant]
        return known

    def __iter__(self) -> Iterator[Conversation]:
        """The coldest first."""
        return heapq.merge(*self.of_tenants(), key=lambda each: each.id)

    def of_tenants(self) -> list[Iterable[Conversation]]:
        """The conversations of each tenant that has any, the coldest first."""
        return [line.values() for line in self._lines.values()]

    @property
    def size_bytes(self) -> int:
        """Estimated memory: of the tree, and of the whole keys beside it."""
        return self._size.size_bytes + self._key_bytes

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        return f"Conversations({len(self)}, bytes={self.size_bytes})"

    def check(self) -> None:
        """Verify every invariant. Raises AssertionError naming the first violated one."""
        self._tree.check()
        self._size.check()
        if sorted(each.id for each in self) != sorted(known.id for known in self._known.values()):
            raise AssertionError("the tenants' conversations are not those that are known")
        if self._key_bytes != sum(len(known.key) for known in self._known.values()):
            raise AssertionError(f"keys take {self._key_bytes} bytes, counted otherwise")
        inside = set(self._tree.nodes())
        if strays := [known for node, known in self._known.items() if node not in inside or node.children]:
            raise AssertionError(f"conversations that end nowhere: {strays[:3]}")

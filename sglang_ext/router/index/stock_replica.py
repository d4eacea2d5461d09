"""What a stock SGLang server holds in HBM, made from its KV events (``--kv-events-config``).

The server numbers its batches from 0 at each start and tells of pages: a name (a hash that SGLang made), the
page before it, its tokens. A page may be shorter or longer than a block of the index. The server never tells
all that it has, so a copy is right in one of two ways:

    complete   every batch from number 0 on is in, or every one since the cache was emptied: that is all
    partial    a batch was lost, or the first that was heard was not number 0: all that was known is dropped,
               and what is told from now on is right but not all

A page that continues an unknown one is left out of a partial copy. Events leave out a request's ``extra_key``
and adapter, so that pages of such prompts look like those of prompts without (``Index.guess`` sees them).
Only HBM is taken; what SGLang's hierarchical cache tells of other media is passed over.

Dialect of SGLang (``disaggregation/kv_events.py``). Pure: one thread, no clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import msgspec

from sglang_ext.keys import TOKEN_BYTES, encode_tokens
from sglang_ext.protocol.agent import Naming
from sglang_ext.radix_global import Holder, Node, RadixTree
from sglang_ext.radix_global.edges import walk
from sglang_ext.radix_global.node import Evicted
from sglang_ext.radix_global.sync.events import Tenant
from sglang_ext.radix_global.sync.replica import Outcome, State
from sglang_ext.radix_global.sync.runs import Piece, Run
from sglang_ext.tiers import Tier

PAGE_BYTES: Final = 260
"""Memory of a page's name and place, beside its tokens."""
HBM_NAMES: Final = (None, "GPU")


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Consecutive pages of ``block_size`` tokens each are in a medium."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    cache_salt: str | None = None
    lora_name: str | None = None
    """Of an adapter's KV, which earlier versions do not publish."""


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """Pages are in a medium no more."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """The cache is empty."""


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """One message."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    attn_dp_rank: int | None = None


DECODER: Final = msgspec.msgpack.Decoder(Batch)


class _Segment:
    """Pages that follow each other; others may branch off after any of them."""

    __slots__ = ("before", "branches", "names", "page", "start", "tenant", "tokens")

    def __init__(self, before: _Segment | None, start: int, tenant: Tenant, page: int) -> None:
        self.before = before
        self.start = start
        """Tokens of the prompt before it: it branches off there."""
        self.tenant = tenant
        self.page = page
        """Tokens of a page."""
        self.names: list[int] = []
        self.tokens = b""
        self.branches: list[_Segment] = []

    @property
    def end(self) -> int:
        return self.start + len(self.names) * self.page

    def prompt(self) -> bytes:
        """All tokens up to its end, encoded."""
        parts: list[bytes] = []
        segment, end = self, self.end
        while True:
            parts.append(segment.tokens[: (end - segment.start) * TOKEN_BYTES])
            if segment.before is None:
                return b"".join(reversed(parts))
            segment, end = segment.before, segment.start


_Place: TypeAlias = tuple[_Segment, int]
"""A page: its segment, and which of its pages it is."""


class StockReplica:
    """See the module's docstring.

    Args:
        tree: shared by the copies of all instances of a role.
        instance: its name here.
        serial: numbers for holders.
        abandon: takes over a holder whose placements are of no use any more.
        left: told when blocks leave HBM: their last node, how many, the tiers they left, those they are in.
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
        """LIVE: all that was sent up to now is in. STALE: something is missing that may still come."""
        self.partial = True
        self.next = 0
        """Number of the next batch."""
        self.last = b""
        """The batch before that."""
        self.page_blocks = 1
        """What the server finds again is a multiple of so many blocks."""
        self.batches = 0
        self.lost_count = 0
        """How often batches were lost for good."""
        self.bad = 0
        """Batches that could not be read."""
        self._tree = tree
        self._serial = serial or itertools.count()
        self._abandon = abandon or tree.drop_holder
        self._left = left
        self._holder = Holder.of(instance, next(self._serial), Tier.HBM)
        self._run = Run(0, Tier.HBM.bit, 0, tree.root)
        self._pages: dict[int, _Place] = {}

    @property
    def naming(self) -> Naming | None:
        """Nothing below HBM is told."""
        return None

    @property
    def named(self) -> dict[Tier, set[bytes]]:
        """Nothing below HBM is told."""
        return {}

    @property
    def names(self) -> int:
        """Nothing below HBM is told."""
        return 0

    @property
    def holder(self) -> Holder:
        """Stands for this copy in the tree."""
        return self._holder

    @property
    def trusted(self) -> bool:
        return self.state is State.LIVE

    @property
    def blocks(self) -> int:
        """Blocks that are known here."""
        return self._tree.blocks_of(self._holder)

    @property
    def pages(self) -> int:
        """Pages that are known here."""
        return len(self._pages)

    @property
    def size_bytes(self) -> int:
        """Estimated memory beside the tree's."""
        return len(self._pages) * (PAGE_BYTES + self.page_blocks * self._tree.block_bytes)

    # -- the stream -------------------------------------------------------------------------------

    def take(self, number: int, payload: bytes) -> Outcome:
        """Take one batch in. BROKEN: others are missing before it; say `lost` if they will not come."""
        if self.state is State.BLANK or number > self.next:
            if self.state is State.LIVE:
                self.state = State.STALE
            return Outcome.BROKEN
        if number < self.next:
            return Outcome.IGNORED
        try:
            batch = DECODER.decode(payload)
            for event in batch.events:
                self._one(event)
        except (msgspec.DecodeError, ValueError):
            self.bad += 1
            self.lost(number + 1)
            return Outcome.APPLIED
        self.next, self.last = number + 1, payload
        self.batches += 1
        return Outcome.APPLIED

    def began(self) -> None:
        """The server says that batch 0 is the first of all it has sent: nothing is missing so far."""
        self._empty()
        self.state, self.partial, self.next, self.last = State.STALE, False, 0, b""

    def lost(self, number: int) -> None:
        """The batches before this one do not come any more."""
        self._empty()
        self.lost_count += self.state is not State.BLANK
        self.state, self.partial, self.next, self.last = State.STALE, True, number, b""

    def caught_up(self) -> None:
        """All that was sent up to now is in."""
        self.state = State.LIVE

    def restart(self) -> None:
        """The server was started anew, or nobody knows what it does: nothing is known of it."""
        self._empty()
        self.state, self.partial, self.next, self.last = State.BLANK, True, 0, b""

    def forget(self) -> None:
        """The instance is gone, or its events are not wanted any more."""
        self.restart()

    def _empty(self) -> None:
        if not self._pages:
            return
        self._abandon(self._holder)
        self._holder = Holder.of(self.instance, next(self._serial), Tier.HBM)
        self._pages = {}

    # -- events -----------------------------------------------------------------------------------

    def _one(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        if isinstance(event, AllBlocksCleared):
            self._empty()
            self.partial = False
        elif event.medium not in HBM_NAMES:
            return
        elif isinstance(event, BlockStored):
            self._stored(event)
        else:
            self._removed(event.block_hashes)

    def _stored(self, event: BlockStored) -> None:
        names, page = event.block_hashes, event.block_size
        if page < 1 or len(names) * page != len(event.token_ids):
            raise ValueError("the tokens of an event do not fill its pages")
        if event.lora_id is not None or event.lora_name is not None:
            return
        self.page_blocks = max(1, page // self._tree.block_size)
        tokens = encode_tokens(event.token_ids)
        before, step = event.parent_block_hash, page * TOKEN_BYTES
        first = 0
        while first < len(names):
            if names[first] in self._pages:
                before, first = names[first], first + 1
                continue
            end = first
            while end < len(names) and names[end] not in self._pages:
                end += 1
            part = tokens[first * step : end * step]
            if not self._add(before, names[first:end], part, page, event.cache_salt):
                return
            before, first = names[end - 1], end

    def _add(self, before: int | None, names: list[int], tokens: bytes, page: int, salt: str | None) -> bool:
        """Note pages that are new, behind a known one. False when that is not known."""
        if before is None:
            segment = _Segment(None, 0, (None, salt), page)
        else:
            place = self._pages.get(before)
            if place is None:
                if not self.partial:
                    raise ValueError("a page continues one that was never told")
                return False
            segment, index = place
            is_end = index + 1 == len(segment.names) and not segment.branches and segment.page == page
            if not is_end:
                branch = _Segment(segment, segment.start + (index + 1) * segment.page, segment.tenant, page)
                segment.branches.append(branch)
                segment = branch
        for index, name in enumerate(names, len(segment.names)):
            self._pages[name] = (segment, index)
        segment.names += names
        segment.tokens += tokens
        key = segment.prompt()
        if blocks := len(key) // self._tree.block_bytes:
            self._tree.insert(segment.tenant, key, self._holder, Piece(self._run, blocks))
        return True

    def _removed(self, names: list[int]) -> None:
        first: dict[_Segment, int] = {}
        for name in names:
            if (place := self._pages.get(name)) is not None:
                segment, index = place
                first[segment] = min(index, first.get(segment, index))
        for segment in sorted(first, key=lambda segment: -segment.start):
            self._cut(segment, first[segment])

    def _cut(self, segment: _Segment, index: int) -> None:
        """Forget the pages of a segment from ``index`` on, and what continues them."""
        if index >= len(segment.names):
            return
        keep = segment.start + index * segment.page
        for branch in [branch for branch in segment.branches if branch.start > keep]:
            self._cut(branch, 0)
        for name in segment.names[index:]:
            self._pages.pop(name, None)
        self._trim(segment.tenant, segment.prompt(), keep // self._tree.block_size)
        del segment.names[index:]
        segment.tokens = segment.tokens[: index * segment.page * TOKEN_BYTES]
        if not segment.names and segment.before is not None:
            segment.before.branches.remove(segment)

    def _trim(self, tenant: Tenant, key: bytes, keep: int) -> None:
        """Take the end of a prompt out of the tree, down to ``keep`` blocks, or to where another one that is
        held parts from it: pages of several blocks may have the same beginning."""
        path = list(walk(self._tree.roots.get(tenant), key, self._tree.block_bytes))
        start = 0
        ends: list[tuple[int, int, Node]] = []
        for end, node in path:
            ends.append((start, end, node))
            start = end
        for start, end, node in reversed(ends):
            if end <= keep:
                return
            if self._holder not in node.placements:
                continue  # given up for lack of memory
            held_on = end - start < node.blocks
            if held_on or any(self._holder in child.placements for child in node.children.values()):
                return
            if start < keep:
                self._tree.split(node, keep - start)
            if self._left is not None:
                self._left(node, node.blocks, Tier.HBM.bit, 0)
            self._tree.remove(node, self._holder)

    # -- memory -----------------------------------------------------------------------------------

    def give_up(self, blocks: int) -> list[Evicted]:
        """Forget what was not asked for the longest, until it is told of again. Returns what it was."""
        return self._tree.evict(self._holder, blocks)

    def give_up_names(self, blocks: int) -> int:
        """There are no names of blocks here."""
        return 0

    # -- seeing -----------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return (
            f"StockReplica({self.instance}, {self.state}, next={self.next}, pages={len(self._pages)}, "
            f"blocks={self.blocks}{', partial' if self.partial else ''})"
        )

    def check(self) -> None:
        """Verify that no block is in the tree that the pages do not have.

        Raises:
            AssertionError: there is one, or a page is not where it is said to be.
        """
        for name, (segment, index) in self._pages.items():
            if segment.names[index] != name:
                raise AssertionError(f"page {name} is not at {index} of its segment")
        ends: set[tuple[Tenant, bytes]] = set()
        step = self._tree.block_bytes
        for segment in {id(segment): segment for segment, _ in self._pages.values()}.values():
            key = segment.prompt()
            ends.update((segment.tenant, key[:end]) for end in range(step, len(key) + 1, step))
        held = sum(1 for _ in ends)
        if self.blocks > held:
            raise AssertionError(f"{self.blocks} blocks are in the tree, of {held} that pages have")

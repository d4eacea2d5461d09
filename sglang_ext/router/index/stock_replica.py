"""Replica of a stock SGLang server's HBM cache, built from its KV events (``--kv-events-config``).

The server numbers its batches from 0 at each start. An event has a page's name (a hash made by SGLang), its
parent page and its tokens. A page may be shorter or longer than a block of the index. The server never sends
a snapshot, so a replica is correct in one of two ways:

    complete   all batches from number 0 on were received, or all since the cache was emptied: no page is
               missing
    partial    a batch was lost, or the first received batch was not number 0: the former pages were dropped;
               the pages since then are correct, but others may be missing

A partial replica leaves out pages whose parent is unknown. Events leave out a request's ``extra_key`` and
adapter, so that pages of such prompts look like pages of prompts without (``Index.guess`` detects them).
Only HBM is followed; events of SGLang's hierarchical cache about other media are ignored.

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
    """Consecutive pages of ``block_size`` tokens each were stored in a medium."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    cache_salt: str | None = None
    lora_name: str | None = None
    """The adapter's name; earlier versions do not publish KV of adapters."""


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """Pages were removed from a medium."""

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
    """Pages that follow each other; other segments may branch off after any of them."""

    __slots__ = ("before", "branches", "names", "page", "start", "tenant", "tokens")

    def __init__(self, before: _Segment | None, start: int, tenant: Tenant, page: int) -> None:
        self.before = before
        self.start = start
        """Tokens of the prompt before the segment, where it branches off."""
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
"""A page: its segment, and its index in the segment."""


class StockReplica:
    """See the module's docstring.

    Args:
        tree: shared by the replicas of all instances of a role.
        instance: its name in the index.
        serial: numbers for holders.
        abandon: takes over a holder whose placements are invalid.
        left: called when blocks leave HBM, with their last node, their number, the bits of the tiers that
            they left and of the tiers that still have them.
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
        """LIVE: all batches sent so far were applied. STALE: a missing batch may still arrive."""
        self.partial = True
        self.next = 0
        """Number of the next batch."""
        self.last = b""
        """Payload of the last batch."""
        self.page_blocks = 1
        """Blocks per page: the server's cache hits are multiples of it."""
        self.batches = 0
        self.lost_count = 0
        """How many times batches were lost for good."""
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
        """None: KV events cover HBM only."""
        return None

    @property
    def named(self) -> dict[Tier, set[bytes]]:
        """Empty: KV events cover HBM only."""
        return {}

    @property
    def names(self) -> int:
        """0: KV events cover HBM only."""
        return 0

    @property
    def holder(self) -> Holder:
        """The holder of this replica's placements in the tree."""
        return self._holder

    @property
    def trusted(self) -> bool:
        return self.state is State.LIVE

    @property
    def blocks(self) -> int:
        """Number of blocks in the replica."""
        return self._tree.blocks_of(self._holder)

    @property
    def pages(self) -> int:
        """Number of pages in the replica."""
        return len(self._pages)

    @property
    def size_bytes(self) -> int:
        """Estimated memory beside the tree's."""
        return len(self._pages) * (PAGE_BYTES + self.page_blocks * self._tree.block_bytes)

    # -- the stream -------------------------------------------------------------------------------

    def take(self, number: int, payload: bytes) -> Outcome:
        """Apply one batch. BROKEN: batches before it are missing; call `lost` if they will not arrive."""
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
        """Begin a complete replica: batch 0 is the server's first, so no batch is missing."""
        self._empty()
        self.state, self.partial, self.next, self.last = State.STALE, False, 0, b""

    def lost(self, number: int) -> None:
        """Begin a partial replica at batch ``number``: the missing batches before it will not arrive."""
        self._empty()
        self.lost_count += self.state is not State.BLANK
        self.state, self.partial, self.next, self.last = State.STALE, True, number, b""

    def caught_up(self) -> None:
        """Mark the replica LIVE: all batches sent so far were applied."""
        self.state = State.LIVE

    def restart(self) -> None:
        """Empty the replica: the server has restarted, or its state is unknown."""
        self._empty()
        self.state, self.partial, self.next, self.last = State.BLANK, True, 0, b""

    def forget(self) -> None:
        """Empty the replica: the instance is gone, or its events are no longer followed."""
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
        """Add new pages behind ``before``. Returns False when ``before`` is unknown."""
        if before is None:
            segment = _Segment(None, 0, (None, salt), page)
        else:
            place = self._pages.get(before)
            if place is None:
                if not self.partial:
                    raise ValueError("a page continues one that was never stored")
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
        """Drop the pages of a segment from ``index`` on, and all segments that continue them."""
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
        """Remove the end of a prompt from the tree, down to ``keep`` blocks, or to the branch of another held
        prompt, since pages of several blocks may share a beginning."""
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
        """Evict the least recently matched blocks from the replica, until they are reported again. Returns
        the evicted blocks."""
        return self._tree.evict(self._holder, blocks)

    def give_up_names(self, blocks: int) -> int:
        """Returns 0: the replica has no names of blocks."""
        return 0

    # -- seeing -----------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return (
            f"StockReplica({self.instance}, {self.state}, next={self.next}, pages={len(self._pages)}, "
            f"blocks={self.blocks}{', partial' if self.partial else ''})"
        )

    def check(self) -> None:
        """Verify that each block in the tree belongs to a page.

        Raises:
            AssertionError: a block belongs to no page, or a page is not at its recorded place.
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
